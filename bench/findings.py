"""What the replay says about thresholds and eviction: the rows behind docs/findings.md.

    python -m bench.findings traces               record the packaged traces anew, as their headers say: a new model
    python -m bench.findings run [QUESTION...]    replay what is missing of the rows in bench/results/findings/
    python -m bench.findings write                write tables and figures of docs/findings.md from those rows
    python -m bench.findings record               G.best_rule and G.policy_files as rows of bench/results/replay.jsonl

It knows which traces and settings answer which question. How answers are computed is in bench/findings_rows.py, what
they look like in bench/findings_page.py.

A rule is tuned on TUNING and judged on UNSEEN only. Rules are compared at equal wasted bytes: each is shifted up and
down by `margin` (SHIFTS times its running error), which gives a curve of exposed time over wasted bytes.
"""

import itertools
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench import harness
from echo_jax.cli.replay import named_setting
from echo_jax.replay import cost
from echo_jax.replay.job import Job
from echo_jax.replay.rows import RowFile
from echo_jax.replay.settings import SHARED, SPLIT, Setting
from echo_jax.traces import open_trace

FOLDER = harness.RESULTS / "findings"

SIZES = "requests=4,steps=192,context=32768,top_k=2048"
KINDS = ("hot", "median", "churny", "volatile")
RECORDED = ("echo-tiny-code", "echo-tiny-task", "echo-tiny-manual", "echo-tiny-recall")
TUNING = tuple(f"synth:{kind},{SIZES}" for kind in ("hot", "median", "churny"))
UNSEEN = (*(f"synth:{kind},{SIZES},seed=7" for kind in KINDS), f"synth:median,{SIZES},seed=7,jump_every=50", *RECORDED)

OWN = "examples.custom_threshold:Reverting"
RULES = ("ema:0.25", "ema", "ema:0.75", "last", "quantile", "trend", f"{OWN}:0.25", f"{OWN}:0.5", f"{OWN}:0.75")
SHIFTS = (-1.0, -0.5, 0.0, 0.5, 1.0)
FREE_CAP = "2048"
"""Out of the way: a threshold is judged, not a cap."""

EVICTIONS = ("lru", "lfu", "score", "clock", "two-queue", "belady")
MULTIPLES = (1.25, 1.5, 2, 3, 4, 6, 8, 12)

Task = tuple[str, list[Setting], bool]
"""A trace, its settings, and whether the numbers of every step are kept."""


def shifted(rule: str, shift: float) -> str:
    """The rule's name on a command line, `shift` running errors lower."""
    return f"margin:{rule},{shift:g}" if shift else rule


def setting(
    trace: str,
    policy: str = "ema",
    *,
    slots: float = 4,
    eviction: str = "lru",
    cap: str = FREE_CAP,
    pool: str = SHARED,
) -> Setting:
    """A setting by the names of the command line; slots in units of k."""
    return named_setting(int(slots * open_trace(trace).info.top_k), policy, eviction, cap, pool)


def tasks(question: str) -> Iterable[Task]:
    """What is replayed for a question."""
    everywhere = (*(f"synth:{kind},{SIZES}" for kind in KINDS), *RECORDED)
    if question == "ema":
        for trace in everywhere:
            policies = ("never", "ema", "last", "always", "clairvoyant")
            yield trace, [setting(trace, policy, slots=slots) for policy in policies for slots in (2, 4)], False
    elif question == "rules":
        for trace in TUNING:
            names = [shifted(rule, shift) for rule in RULES for shift in SHIFTS]
            yield trace, [setting(trace, name) for name in ("never", *names)], False
    elif question == "unseen":
        for trace in UNSEEN:
            rules = ("ema", "last", f"{OWN}:0.25", f"{OWN}:0.5")
            names = [shifted(rule, shift) for rule in rules for shift in SHIFTS]
            yield trace, [setting(trace, name) for name in ("never", *names)], False
    elif question == "slots":
        for trace in everywhere:
            multiples = (2, 4, 8, 16) if trace in RECORDED else MULTIPLES
            evictions = ("lru", "belady") if trace in RECORDED else EVICTIONS
            pairs = itertools.product(evictions, multiples)
            yield trace, [setting(trace, "never", slots=slots, eviction=name) for name, slots in pairs], False
    elif question == "caps":
        for kind, slots in (("median", 2), ("churny", 4)):
            trace = f"synth:{kind},{SIZES}"
            caps = ("16", "64", "256", FREE_CAP, "proportional:0.002,2048", "budgeted:256,256")
            yield trace, [setting(trace, slots=slots, cap=cap) for cap in caps], False
    elif question == "adversaries":
        for extra in ("", ",jump_every=50", ",scanners=1"):
            trace = f"synth:median,{SIZES}{extra}"
            pairs = itertools.product((2, 4), (SHARED, SPLIT))
            yield trace, [setting(trace, slots=slots, pool=pool) for slots, pool in pairs], False
    elif question == "jumps":
        trace = "synth:median,layers=4,requests=1,steps=300,context=16384,top_k=512,jump_every=50"
        yield trace, [setting(trace)], True
    else:
        raise ValueError(f"question {question!r} is unknown; known: {', '.join(QUESTIONS)}")


QUESTIONS = ("ema", "rules", "unseen", "slots", "caps", "adversaries", "jumps")


def record_traces() -> None:
    """Every packaged trace by the command in its header; `run` then finds that its rows are missing."""
    for name in RECORDED:
        words = shlex.split(open_trace(name).info.recipe["command"])
        print(" ".join(words), flush=True)
        subprocess.run([sys.executable, "-m", "echo_jax.cli.main", *words[1:]], cwd=harness.ROOT, check=True)


def skipped(trace: str) -> int:
    """The first quarter of a trace, while the pool fills, is left out of every number."""
    return open_trace(trace).info.steps // 4


def run(questions: Iterable[str]) -> None:
    """Appends the rows that are missing; interrupted, it keeps what is done."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for question in questions:
        rows = RowFile(FOLDER / f"{question}.jsonl")
        for trace, settings, series in tasks(question):
            made = {"full": settings, "shared": settings}
            job = Job(open_trace(trace), trace, made, costs=[cost.load("h200")], skip=skipped(trace), series=series)
            left = len(job.todo(rows))
            job.run(rows)
            print(f"{question}: {trace}: {left} layers, {len(settings)} settings", flush=True)


# ---- claims ----------------------------------------------------------------------------------------------


def record() -> None:
    """The two claims that this page answers."""
    from bench import findings_rows

    ratios = findings_rows.at_equal_waste(findings_rows.sections("unseen"))
    best = findings_rows.best_rule(findings_rows.sections("rules"))
    own = {trace: by_rule[best] for trace, by_rule in ratios.items()}
    harness.record(
        "G.best_rule",
        value=findings_rows.geometric_mean(own.values()),
        file="replay.jsonl",
        unit="ratio",
        shapes={"unseen": list(own), "tuned_on": list(TUNING), "rules": list(RULES), "slots": "4 k", "cap": FREE_CAP},
        method="exposed time by the h200 cost model over EMA 0.5's, both at the wasted bytes of EMA 0.5 (linear "
        "between shifts by the running error); geometric mean over traces that the rule was not chosen on, first "
        "quarter left out",
        command="python -m bench.findings run && python -m bench.findings record",
        notes=f"best on the tuning traces: {best}; "
        + "; ".join(f"{trace} {ratio:.3f}" for trace, ratio in own.items()),
    )
    files = policy_files()
    harness.record(
        "G.policy_files",
        value=files,
        file="replay.jsonl",
        unit="",
        method="files written by hand in an empty folder until `echo-jax report` showed the policy",
        command="python -m bench.findings record",
        notes="tests/cli/test_report.py holds it",
    )


POLICY = """\
import dataclasses
from echo_jax.threshold import Last

@dataclasses.dataclass(frozen=True)
class Above(Last):
    by: float = 0.5
    def value(self, memory):
        return memory + self.by
"""


def policy_files() -> int:
    """Writes a policy in an empty folder, replays and reports there, and counts the files that a person wrote.
    AssertionError where the report does not show it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mine.py").write_text(POLICY)
        by_hand = len(list(folder.iterdir()))
        program = [sys.executable, "-m", "echo_jax.cli.main"]
        trace = "synth:median,requests=2,top_k=64,steps=40,context=512"
        for words in (
            ["replay", trace, "--policy", "ema", "mine:Above", "--output", "rows.jsonl"],
            ["report", "rows.jsonl", "--output", "out"],
        ):
            subprocess.run([*program, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        assert "mine:Above" in (folder / "out" / "report.html").read_text()
        return by_hand


def main(arguments: list[str]) -> int:
    action, *questions = arguments or ["help"]
    if action == "traces":
        record_traces()
    elif action == "run":
        run(questions or QUESTIONS)
    elif action == "write":
        from bench import findings_page

        findings_page.write()
    elif action == "record":
        record()
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
