"""Holds the recorded rows against what was claimed: one line per claim, and the tables of the README.

    python -m bench.claims            a table on the terminal
    python -m bench.claims --json     the same, one JSON object a line
    python -m bench.claims --readme   write the tables between the markers of README.md
    python -m bench.claims --compare RUN RUN    what two runs measured, if their references say they may be compared

It knows the list of claims (claims.toml) and the form of a row (bench/harness.py), and measures nothing. The
exit status is 0 whatever the verdicts are: a bar that is short is a fact, not a failure. It is 2 when a row
or the list cannot be read.
"""

import argparse
import dataclasses
import json
import operator
import re
import sys
import tomllib
from pathlib import Path

from bench import harness, sources

CLAIMS = Path(__file__).resolve().parent / "claims.toml"
README = harness.ROOT / "README.md"

RECORDED = "recorded"
COMPARATORS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_BAR = re.compile(r"(<=|>=|==|<|>) *([0-9]+(?:\.[0-9]+)?)")

# Between these lines of a README stands a table; `<!-- claims:begin A B -->` asks for some parts only.
_BLOCK = re.compile(r"(<!-- claims:begin((?: [A-Z])*) -->\n).*?(<!-- claims:end -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Best:
    """A value that is made of other rows: the best or the worst ratio of two rows of one run, over all runs and shapes.

    pick    "max" or "min"
    rows    regular expression of the rows' names up to ": WAY"; what it matches is the shape
    over    ways, alternatives of which the lowest counts; "a + b" is the sum of two rows
    under   the way that they are divided by
    """

    pick: str
    rows: str
    over: tuple[str, ...]
    under: str

    def __post_init__(self) -> None:
        if self.pick not in ("max", "min"):
            raise ValueError(f"pick must be max or min, not {self.pick!r}")

    def of(self, rows: list[tuple[harness.Row, str]]) -> harness.Row | None:
        """A row with the value, in place of one that was recorded; None where no run has what it takes."""
        found = []
        for row, place in rows:
            ways = _ways(self.rows, rows, row)
            if ways is None or self.under not in ways or ways[self.under][0] is not row:
                continue
            sums = {way: [ways[part][0].value for part in way.split(" + ") if part in ways] for way in self.over}
            whole = [sum(values) for way, values in sums.items() if len(values) == len(way.split(" + "))]
            if whole:
                found.append((min(whole) / row.value, row, place))
        if not found:
            return None
        value, row, place = (max if self.pick == "max" else min)(found, key=lambda one: one[0])
        made_of = f"computed over {len(found)} runs and shapes; this one: {row.name}, {place}"
        return dataclasses.replace(row, value=value, unit="ratio", spread=None, notes=made_of)


def _ways(
    pattern: str, rows: list[tuple[harness.Row, str]], of: harness.Row
) -> dict[str, tuple[harness.Row, str]] | None:
    """way -> the row of that shape which was measured beside `of`: by run, or where that is not known in one second."""
    named = re.compile(f"({pattern}): (.*)")
    match = named.fullmatch(of.name)
    if match is None:
        return None
    beside = {}
    for row, place in rows:
        other = named.fullmatch(row.name)
        is_beside = row.run == of.run if row.run else row.date == of.date
        if other and other[1] == match[1] and is_beside and row.shapes.get("pages") == of.shapes.get("pages"):
            beside[other.group(other.re.groups)] = (row, place)
    return beside


@dataclasses.dataclass(frozen=True)
class Claim:
    """One number the project promises: id "A.name", what it is, unit, and the bar as written ("<= 300").

    condition: under what it holds, where that is no part of the name. best: how its value is made of other rows.
    """

    id: str
    what: str
    unit: str
    bar: str
    condition: str = ""
    best: Best | None = None

    def __post_init__(self) -> None:
        if self.bar != RECORDED and _BAR.fullmatch(self.bar) is None:
            raise ValueError(
                f'claim {self.id}: the bar must be "{RECORDED}" or a comparison as "<= 300", not {self.bar!r}'
            )

    @property
    def part(self) -> str:
        """The part of the work it belongs to: the letter before the dot."""
        return self.id.partition(".")[0]

    def holds(self, value: float) -> bool:
        """Whether a recorded value meets the bar."""
        match = _BAR.fullmatch(self.bar)
        return match is None or COMPARATORS[match[1]](value, float(match[2]))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A claim with the row that answers it, if one was recorded: met, short or unmeasured.

    age: "fresh" where the claim's sources are what they were when it was measured, "stale" where they have changed
        since, "unknown" where that cannot be said.
    """

    claim: Claim
    row: harness.Row | None
    age: str = "unknown"

    @property
    def status(self) -> str:
        if self.row is None:
            return "unmeasured"
        return "met" if self.claim.holds(self.row.value) else "short"

    @property
    def shown(self) -> str:
        """Status, with "stale" where it is: the number is of sources that have changed since."""
        return f"{self.status}, stale" if self.age == "stale" else self.status

    def cells(self) -> dict[str, str]:
        """The columns of a table, as text: id, value, bar, status, the kernels' own time, date, machine."""
        unit = f" {self.claim.unit}" if self.claim.unit not in ("", "ratio", "share") else ""
        row = self.row
        return {
            "claim": self.claim.id,
            "value": "-" if row is None else f"{_number(row.value)}{unit}",
            "bar": self.claim.bar,
            "status": self.shown,
            "kernels": "-" if row is None or row.kernel_us is None else f"{_number(row.kernel_us)} us",
            "date": "-" if row is None else row.when().date().isoformat(),
            "machine": "-" if row is None else row.machine,
        }


def read_claims(path: Path = CLAIMS) -> tuple[dict[str, str], list[Claim]]:
    """Titles of the parts by letter, and the claims in file order; ValueError names what is wrong."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:  # an id written twice ends here too
        raise ValueError(f"{path}: {error}") from None
    parts, claims = data["parts"], []
    for name, fields in data["claims"].items():
        if not {"what", "unit", "bar"} <= set(fields) <= {"what", "unit", "bar", "condition", "best", "sources"}:
            raise ValueError(
                f"{path}: claim {name} must have what, unit and bar, and may have condition, best and sources, not "
                f"{', '.join(sorted(fields))}"
            )
        fields.pop("sources", None)  # of bench/sources.py
        if made_of := fields.pop("best", None):
            fields["best"] = Best(**made_of | {"over": tuple(made_of["over"])})
        claim = Claim(id=name, **fields)
        if claim.part not in parts:
            raise ValueError(f"{path}: claim {name} names part {claim.part!r}; there are {', '.join(parts)}")
        claims.append(claim)
    return parts, claims


def judge(claims: list[Claim], rows: list[tuple[harness.Row, str]]) -> list[Verdict]:
    """One verdict per claim, in order. The latest row wins: by date, and of one date the one read last.

    ValueError names the place of a row for an unknown claim, or in another unit than the claim's.
    """
    known = {claim.id: claim for claim in claims}
    latest: dict[str, harness.Row] = {}
    for row, place in rows:
        if row.claim is None:
            continue
        if row.claim not in known:
            raise ValueError(f"{place}: no claim is called {row.claim!r}; add it to {CLAIMS.name}, or use `name`")
        if row.unit != known[row.claim].unit:
            raise ValueError(f"{place}: {row.claim} is in {known[row.claim].unit!r}, but the row in {row.unit!r}")
        if row.claim not in latest or row.when() >= latest[row.claim].when():
            latest[row.claim] = row
    latest |= {claim.id: row for claim in claims if claim.best and (row := claim.best.of(rows))}
    return [Verdict(claim, row := latest.get(claim.id), age_of(claim.id, row)) for claim in claims]


REFERENCES = (harness.EMPTY_GRAPH, harness.COPY_RATE)
COMPARABLE = 0.05


def comparable(run: str, other: str, rows: list[tuple[harness.Row, str]]) -> bool:
    """Whether two runs on a GPU may be compared: both recorded their references, and those are at most 5 % apart."""
    if run and run == other:
        return True
    of_run = {(row.run, row.name): row.value for row, _ in rows if row.name in REFERENCES}
    pairs = [(of_run.get((run, name)), of_run.get((other, name))) for name in REFERENCES]
    return all(a and b and abs(a - b) <= COMPARABLE * min(a, b) for a, b in pairs)


def compare(run: str, other: str, rows: list[tuple[harness.Row, str]]) -> str:
    """A line for each number that both runs have, with the second over the first; ValueError for runs that may not be
    compared, with their references."""
    if not comparable(run, other, rows):
        told = [f"{row.run} {row.name} {_number(row.value)} {row.unit}" for row, _ in rows if row.name in REFERENCES]
        told = [line for line in told if line.startswith((run, other))]
        raise ValueError(
            f"runs {run} and {other} are not compared: references more than {COMPARABLE:.0%} apart, or not recorded "
            f"({'; '.join(told) or 'none'}); measure both in one run"
        )
    of_run: dict[tuple[str, str], float] = {}
    for row, _ in rows:
        what = f"{row.claim or ''} {row.name} {json.dumps(row.shapes, sort_keys=True)}".strip()
        of_run[row.run, what] = row.value
    lines = []
    for (first, name), value in of_run.items():
        if first == run and (again := of_run.get((other, name))) is not None and value:
            lines.append(f"{name}  {_number(value)}  {_number(again)}  {again / value:.3f}")
    return "\n".join(lines) or f"runs {run} and {other} measured nothing in common"


def age_of(claim: str, row: harness.Row | None) -> str:
    """Whether the claim's sources are still what they were. Without their digest in the row git is asked, by the commit
    that the row names or the last one before its date."""
    globs = sources.globs_of(claim)
    if row is None or not globs:
        return "unknown"
    then = row.sources
    if not then:
        commit = row.versions.get("commit", "").rstrip("+") or sources.commit_before(row.date)
        then = sources.digest_at(globs, commit) if commit else None
    return "unknown" if not then else "fresh" if then == sources.digest_now(claim) else "stale"


def as_text(verdicts: list[Verdict]) -> str:
    """An aligned table, one line per claim, and a line that counts."""
    lines = [verdict.cells() for verdict in verdicts]
    columns = {name: max([len(name), *(len(line[name]) for line in lines)]) for name in list(lines[0])[:-1]}
    stale = sum(verdict.age == "stale" for verdict in verdicts)
    rows = [{name: name for name in lines[0]}, *lines]
    table = ["  ".join([*(row[name].ljust(width) for name, width in columns.items()), row["machine"]]) for row in rows]
    counts = [f"{sum(v.status == name for v in verdicts)} {name}" for name in ("met", "short", "unmeasured")]
    return "\n".join(
        [*table, "", f"{len(verdicts)} claims: {', '.join(counts)}; {stale} stale, their sources changed since"]
    )


def as_json(verdicts: list[Verdict]) -> str:
    """One object a line: the claim, its status, and the row as recorded (null where there is none)."""
    return "\n".join(
        json.dumps(
            {
                **dataclasses.asdict(verdict.claim),
                "status": verdict.status,
                "age": verdict.age,
                "row": None if verdict.row is None else dataclasses.asdict(verdict.row),
            },
            ensure_ascii=False,
        )
        for verdict in verdicts
    )


def as_markdown(parts: dict[str, str], verdicts: list[Verdict]) -> str:
    """A heading and a table for each part that has claims among the verdicts."""
    blocks = []
    for part, title in parts.items():
        chosen = [verdict for verdict in verdicts if verdict.claim.part == part]
        if not chosen:
            continue
        lines = [
            f"**{part}. {title}**",
            "",
            "| claim | what | condition | value | kernels | bar | | machine, date |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for verdict in chosen:
            cell = verdict.cells()
            where = "" if verdict.row is None else f"{cell['machine']}, {cell['date']}"
            what = verdict.claim.what.replace("|", "\\|")
            value = cell["value"] if verdict.row else ""
            shown = (
                what,
                verdict.claim.condition,
                value,
                cell["kernels"].strip("-"),
                cell["bar"],
                verdict.shown,
                where,
            )
            lines.append(f"| {verdict.claim.id} | {' | '.join(shown)} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def rewrite(text: str, parts: dict[str, str], verdicts: list[Verdict]) -> str:
    """The text with every table between markers made anew; all else is kept byte for byte.

    ValueError when there is no pair of markers, or one names a part that does not exist.
    """

    def table(match: re.Match[str]) -> str:
        letters = match[2].split() or list(parts)
        if unknown := [letter for letter in letters if letter not in parts]:
            raise ValueError(f"the marker {match[1].strip()} names part {unknown[0]}; there are {', '.join(parts)}")
        chosen = {letter: parts[letter] for letter in letters}
        return f"{match[1]}\n{as_markdown(chosen, verdicts)}\n\n{match[3]}"

    renewed, count = _BLOCK.subn(table, text)
    if count == 0:
        raise ValueError("no lines <!-- claims:begin --> and <!-- claims:end --> to write a table between")
    return renewed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.claims", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per claim, with the whole row")
    parser.add_argument(
        "--readme",
        nargs="?",
        type=Path,
        const=README,
        metavar="FILE",
        help="write the tables of FILE (README.md)",
    )
    parser.add_argument("--compare", nargs=2, metavar="RUN", help="the numbers of two runs side by side")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, metavar="FOLDER", help="folder of rows")
    flags = parser.parse_args(arguments)
    try:
        if flags.compare:
            run, other = flags.compare
            print(compare(run, other, harness.read_rows(flags.results)))
            return 0
        parts, claims = read_claims()
        verdicts = judge(claims, harness.read_rows(flags.results))
        if flags.readme is not None:
            text = flags.readme.read_text(encoding="utf-8")
            renewed = rewrite(text, parts, verdicts)
            flags.readme.write_text(renewed, encoding="utf-8")
            print(f"{flags.readme.name}: {'already up to date' if renewed == text else 'tables written'}")
            return 0
    except (ValueError, OSError) as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    print(as_json(verdicts) if flags.json else as_text(verdicts))
    return 0


def _number(value: float) -> str:
    """Four significant digits, without an exponent for anything people measure here."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
