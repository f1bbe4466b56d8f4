"""Rows are read as they were recorded, and every claim is judged by its latest row."""

import json
import re
from pathlib import Path

import pytest

from bench import claims, harness

ROW = {
    "claim": "A.test_s",
    "value": 400.0,
    "unit": "s",
    "date": "2026-01-02T10:00:00+00:00",
    "machine": "two cores",
    "versions": {"python": "3.12"},
}


def write_rows(folder: Path, *rows: dict, name: str = "cpu.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def status_of(folder: Path, claim: str = "A.test_s") -> str:
    _, listed = claims.read_claims()
    verdicts = claims.judge(listed, harness.read_rows(folder))
    return next(verdict.status for verdict in verdicts if verdict.claim.id == claim)


# ---------------------------------------------------------------------------------------------------- rows


def test_recorded_row_is_read_back_as_written(tmp_path):
    measured = harness.measure(lambda: sum(range(100)), repeats=5, warmup=1)
    fields = {"method": "a sum", "shapes": {"n": 100}}
    written = harness.record("A.test_s", value=measured, unit="s", results=tmp_path, **fields)
    [(read, place)] = harness.read_rows(tmp_path)
    assert place == "cpu.jsonl:1"
    assert read.value == written.value == measured.median
    assert list(read.spread or ()) == [measured.p10, measured.p90] and read.repeats == 5
    assert read.versions["python"] and read.versions["jax"] and "cores" in read.machine
    assert read.shapes == {"n": 100} and read.when() == written.when()


def test_rows_are_appended_and_a_malformed_one_is_not_written(tmp_path):
    harness.record(name="first", value=1, unit="", results=tmp_path)
    with pytest.raises(ValueError, match="finite"):
        harness.record(name="second", value=float("nan"), unit="", results=tmp_path)
    with pytest.raises(ValueError, match="needs the id of a claim, or a name"):
        harness.record(value=2, unit="", results=tmp_path)
    harness.record(name="third", value=3, unit="", results=tmp_path)
    assert [row.name for row, _ in harness.read_rows(tmp_path)] == ["first", "third"]


def test_results_folder_can_be_named_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHO_RESULTS", str(tmp_path / "out"))
    harness.record(name="elsewhere", value=1, unit="", file="gpu.jsonl")
    assert [place for _, place in harness.read_rows(tmp_path / "out")] == ["gpu.jsonl:1"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "a row is a JSON object, not list"),
        (json.dumps({**ROW, "valeu": 1}), "unknown field 'valeu'"),
        (json.dumps({key: ROW[key] for key in ROW if key != "machine"}), "field 'machine' is missing"),
        (json.dumps({**ROW, "machine": " "}), "machine must name the machine"),
        (json.dumps({**ROW, "value": "400"}), "value must be a finite number, not '400'"),
        (json.dumps({**ROW, "value": True}), "value must be a finite number, not True"),
        (json.dumps({**ROW, "value": float("inf")}), "value must be a finite number, not inf"),
        (json.dumps({**ROW, "date": "yesterday"}), "date must be ISO 8601"),
        (json.dumps({**ROW, "versions": "3.12"}), "versions must be a Mapping"),
    ],
)
def test_malformed_row_names_its_file_and_line(tmp_path, capsys, line, complaint):
    write_rows(tmp_path, ROW, name="a.jsonl")
    (tmp_path / "b.jsonl").write_text(json.dumps(ROW) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        harness.read_rows(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'b.jsonl'}:3: ")
    assert claims.main(["--results", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "b.jsonl:3" in captured.err and not captured.out


def test_measure_counts_calls_and_orders_its_quantiles():
    calls = []
    result = harness.measure(lambda: calls.append(None), repeats=7, warmup=2)
    assert len(calls) == 9 and result.repeats == 7
    assert result.p10 <= result.median <= result.p90
    summary = harness.summarise([float(n) for n in range(11)][::-1])
    assert (summary.p10, summary.median, summary.p90) == (1.0, 5.0, 9.0)
    assert summary.scaled(10).median == 50.0
    with pytest.raises(ValueError, match="at least 1 repeat"):
        harness.measure(lambda: None, repeats=0)


def test_measure_waits_for_the_result(monkeypatch):
    """jax returns before the work is done; a clock that does not wait would time the launch alone."""
    import jax

    events = []
    monkeypatch.setattr(harness.time, "perf_counter", lambda: events.append("clock") or float(len(events)))
    monkeypatch.setattr(jax, "block_until_ready", lambda result: events.append(f"{result} is ready"))
    harness.measure(lambda: events.append("call") or "result", repeats=2, warmup=1)
    once = ["call", "result is ready"]
    assert events == [*once, *["clock", *once, "clock"] * 2]


# -------------------------------------------------------------------------------------------------- claims


def test_every_claim_is_listed_once_with_a_bar_that_can_be_read():
    parts, listed = claims.read_claims()
    assert list(parts) == list("ABCDEFGNL")
    count = {part: sum(claim.part == part for claim in listed) for part in parts}
    assert count == {"A": 7, "B": 16, "C": 6, "D": 8, "E": 11, "F": 9, "G": 7, "N": 1, "L": 5}
    assert len({claim.id for claim in listed}) == len(listed)


@pytest.mark.parametrize(
    ("bar", "meets", "misses"),
    [
        ("<= 300", [300, 299.9, 0], [300.1]),
        (">= 0.90", [0.9, 1], [0.899]),
        ("> 1.51", [1.52], [1.51, 1.5]),
        ("< 2", [1.9], [2]),
        ("== 0", [0, 0.0], [1, -1]),
        ("recorded", [0, -5, 1e9], []),
    ],
)
def test_bars_compare_as_written(bar, meets, misses):
    claim = claims.Claim("A.x", "a thing", "s", bar)
    assert all(claim.holds(value) for value in meets)
    assert not any(claim.holds(value) for value in misses)


@pytest.mark.parametrize("bar", ["", "300", "=< 300", "<= fast", "<= 300 s", "recorded "])
def test_a_bar_that_says_nothing_is_refused(bar):
    with pytest.raises(ValueError, match="claim A.x: the bar must be"):
        claims.Claim("A.x", "a thing", "s", bar)


LINE = '"{}" = {{ what = "w", unit = "s", bar = "== 0" }}\n'


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (LINE.format("A.x") * 2, "claims.toml: "),
        (LINE.format("Z.x"), "names part 'Z'; there are A"),
        ('"A.x" = { what = "w", bar = "== 0" }\n', "must have what, unit and bar"),
    ],
)
def test_the_list_itself_is_checked(tmp_path, body, complaint):
    path = tmp_path / "claims.toml"
    path.write_text('[parts]\nA = "a"\n[claims]\n' + body)
    with pytest.raises(ValueError, match=complaint):
        claims.read_claims(path)


def test_verdicts_are_unmeasured_met_and_short(tmp_path):
    assert status_of(tmp_path / "absent") == "unmeasured"
    assert status_of(write_rows(tmp_path, ROW)) == "met"
    assert status_of(write_rows(tmp_path, {**ROW, "value": 481})) == "short"
    assert status_of(write_rows(tmp_path, {**ROW, "claim": None, "name": "other"})) == "unmeasured"


def test_the_latest_row_of_a_claim_wins(tmp_path):
    """By moment, not by text or place: 09:30 at -03:00 is later than 10:00 at +00:00."""
    late = {**ROW, "value": 500, "date": "2026-01-02T09:30:00-03:00"}
    assert status_of(write_rows(tmp_path, ROW, late)) == "short"
    assert status_of(write_rows(tmp_path, late, ROW)) == "short"
    assert status_of(write_rows(tmp_path, ROW, {**ROW, "value": 500})) == "short", "same date: the last"
    write_rows(tmp_path, {**ROW, "date": "2026-01-01"}, name="z.jsonl")
    assert status_of(tmp_path) == "short", "an old row in a later file changes nothing"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"claim": "A.tset_s"}, "no claim is called 'A.tset_s'"),
        ({"unit": "us"}, "A.test_s is in 's', but the row in 'us'"),
    ],
)
def test_a_row_must_fit_its_claim(tmp_path, change, complaint):
    write_rows(tmp_path, ROW, {**ROW, **change})
    with pytest.raises(ValueError, match=f"^cpu.jsonl:2: {re.escape(complaint)}"):
        status_of(tmp_path)


def test_one_line_per_claim_for_people(tmp_path, capsys):
    write_rows(tmp_path, {**ROW, "value": 481.25})
    _, listed = claims.read_claims()
    assert claims.main(["--results", str(tmp_path)]) == 0, "a bar that is short is no failure"
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[1 : len(listed) + 1]] == [claim.id for claim in listed]
    [line] = [line for line in table if line.startswith("A.test_s ")]
    assert re.split(r"  +", line.replace(", stale", "")) == [
        *("A.test_s", "481.2 s", "<= 480", "short", "-", "2026-01-02", "two cores")
    ]
    counts = f"{len(listed)} claims: 0 met, 1 short, {len(listed) - 1} unmeasured; "
    assert table[-1].startswith(counts) and table[-1].endswith("stale, their sources changed since")


def test_one_object_per_claim_for_programs(tmp_path, capsys):
    write_rows(tmp_path, {**ROW, "value": 481.25})
    assert claims.main(["--json", "--results", str(tmp_path)]) == 0
    objects = {item["id"]: item for item in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(objects) == [claim.id for claim in claims.read_claims()[1]]
    assert objects["A.test_s"]["status"] == "short" and objects["A.test_s"]["row"]["value"] == 481.25
    assert objects["B.recall_ratio"]["status"] == "unmeasured" and objects["B.recall_ratio"]["row"] is None


# -------------------------------------------------------------------------------------------------- README


def test_tables_are_made_from_rows_and_nothing_else_changes(tmp_path):
    readme, results = tmp_path / "README.md", write_rows(tmp_path / "rows", ROW)
    before, after = "# echo\n\ntext\n<!-- claims:begin A -->\n", "<!-- claims:end -->\nmore text\n"
    readme.write_text(f"{before}old, typed in by hand\n{after}")
    command = ["--readme", str(readme), "--results", str(results)]
    assert claims.main(command) == 0
    first = readme.read_text()
    assert first.startswith(before) and first.endswith(after) and "typed in" not in first
    shown = _without_age(first)
    assert "| A.test_s | `make test`, 2 cores |  | 400 s |  | <= 480 | met | two cores, 2026-01-02 |" in shown
    assert "| B." not in first, "the marker asked for part A only"
    assert claims.main(command) == 0 and readme.read_text() == first, "a second time changes nothing"
    write_rows(results, {**ROW, "value": 481})
    assert claims.main(command) == 0 and "| 481 s |  | <= 480 | short |" in _without_age(readme.read_text())


def test_a_marker_without_letters_asks_for_every_part(tmp_path):
    parts, listed = claims.read_claims()
    text = claims.rewrite("<!-- claims:begin -->\n<!-- claims:end -->", parts, claims.judge(listed, []))
    assert [line.split()[1] for line in text.splitlines() if re.match(r"\| [A-Z]\.", line)] == [
        claim.id for claim in listed
    ]


@pytest.mark.parametrize("text", ["no markers", "<!-- claims:begin Z -->\n<!-- claims:end -->"])
def test_a_readme_without_place_for_tables_is_left_alone(tmp_path, capsys, text):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert claims.main(["--readme", str(readme)]) == 2
    assert readme.read_text() == text and "claims: " in capsys.readouterr().err


def test_the_recorded_rows_fit_the_claims_and_the_readme_shows_them():
    parts, listed = claims.read_claims()
    verdicts = claims.judge(listed, harness.read_rows())
    text = claims.README.read_text(encoding="utf-8")
    renewed = claims.rewrite(text, parts, verdicts)
    assert _without_age(renewed) == _without_age(text), "README.md is behind the rows; python -m bench.claims --readme"


def _without_age(text: str) -> str:
    """A page without what depends on sources: every change of code would otherwise ask for the page again."""
    return text.replace(", stale |", " |")
