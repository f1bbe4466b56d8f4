"""`echo-jax replay`: rows, tables, resumption, and every way in which the input can be wrong."""

import importlib
import json
import linecache
import sys
import threading
import time

import pytest

from echo_jax.cli.policies import parse_cap, parse_eviction, parse_threshold
from echo_jax.replay import job as job_lib
from tests.limits import HANG_S

TRACE = "synth:mix,layers=2,requests=2,top_k=16,steps=30,context=256"
SMALL = ("replay", TRACE, "--slots", "3k", "--json")


def counts(row):
    """The counts of a row. Sums of floats may differ in the last place when other settings share the pass."""
    return {name: value for name, value in row.items() if isinstance(value, int)}


def test_rows_say_everything_that_decides_them(echo_jax):
    done = echo_jax(*SMALL, "--policy", "never", "ema:0.25", "--sweep", "pool=shared,split", "--cost", "h200", "gh200")
    assert done.status == 0 and done.err == ""
    rows = done.rows("replay")
    assert len(rows) == 2 * 2 * 2
    keys = [row["key"] for row in rows]
    assert len({json.dumps(key) for key in keys}) == 8
    assert {key["policy"] for key in keys} == {"never", "ema:0.25"} and {key["layer"] for key in keys} == {0, 1}
    assert keys[0]["trace"] == TRACE and keys[0]["slots_per_request"] == 48 and keys[0]["record_bytes"] == 1152
    for row in rows:
        assert row["hits"] > 0 and row["recalled"] > 0 and set(row["cost"]) == {"h200", "gh200"}
        assert (row["staged"] > 0) == (row["key"]["policy"] != "never")
        exposed = row["cost"]["h200"]
        assert exposed["without_overlap_us"]["mean"] > 0 and exposed["with_overlap_us"]["p99"] > 0
    again = echo_jax(*SMALL, "--policy", "never", "ema:0.25", "--sweep", "pool=shared,split", "--cost", "h200", "gh200")
    assert again.out == done.out


def test_a_rerun_computes_only_what_is_missing(echo_jax, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    ran = []
    real = job_lib.run.run_layer
    monkeypatch.setattr(
        job_lib.run, "run_layer", lambda plan, *a, **k: ran.append(len(plan.settings)) or real(plan, *a, **k)
    )
    few = ("--policy", "ema", "--output", path, "--series")
    first = echo_jax(*SMALL, *few, "--layers", 0)
    assert ran == [1] and [row["row"] for row in first.rows("replay") + first.rows("series")] == ["replay", "series"]
    series = first.rows("series")[0]
    assert (
        len(series["kth_score"]) == len(series["predicted"]) == 30
        and sum(series["hits"]) == first.rows("replay")[0]["hits"]
    )

    both = echo_jax(*SMALL, *few)
    assert ran == [1, 1] and both.rows("replay")[0] == first.rows("replay")[0] and len(both.rows("replay")) == 2
    text = path.read_text()
    path.write_text(text[:-20])  # the last line was cut off: its layer is computed again, and nothing else
    cut = echo_jax(*SMALL, *few)
    assert ran == [1, 1, 1] and cut.out == both.out and path.read_text() == text
    other = echo_jax(*SMALL, *few, "--skip", 10)
    assert ran == [1] * 5 and other.rows("replay")[0]["counted_steps"] == 20
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_an_interrupted_replay_keeps_the_layers_that_are_done(echo_jax, tmp_path, monkeypatch):
    path, real, calls = tmp_path / "rows.jsonl", job_lib.run.run_layer, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(job_lib.run, "run_layer", interrupted)
    stopped = echo_jax(*SMALL, "--jobs", 1, "--output", path)
    assert stopped.status == 130 and stopped.out == "" and "interrupted" in stopped.err
    assert [json.loads(line)["key"]["layer"] for line in path.read_text().splitlines()] == [0]
    done = echo_jax(*SMALL, "--jobs", 1, "--output", path)
    assert done.status == 0 and len(calls) == 3 and len(done.rows("replay")) == 2


def test_an_interruption_stops_the_other_layers_at_their_next_chunk(echo_jax, monkeypatch):
    both, stopped = threading.Barrier(2), []

    def interrupted(plan, source, steps, *, progress):
        if both.wait(timeout=HANG_S) == 0:
            raise KeyboardInterrupt
        deadline = time.monotonic() + HANG_S
        try:
            while time.monotonic() < deadline:
                progress(0)
                time.sleep(0.01)
        except job_lib.Stopped:
            stopped.append(True)
            raise

    monkeypatch.setattr(job_lib.run, "run_layer", interrupted)
    assert echo_jax(*SMALL, "--jobs", 2).status == 130 and stopped == [True]


def test_a_users_class_by_name_and_a_changed_one_is_not_taken_for_the_old(echo_jax, tmp_path, monkeypatch):
    text = """
import dataclasses
from echo_jax.threshold import Last

@dataclasses.dataclass(frozen=True)
class Above(Last):
    by: float = 0.0
    def value(self, memory):
        return memory + self.by
"""
    (tmp_path / "mine_for_replay.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    mine = "mine_for_replay:Above"
    rows = echo_jax(*SMALL, "--layers", 0, "--policy", "last", mine, f"{mine}:1.0", f"margin:{mine},0").rows("replay")
    last, same, above, shifted = rows
    assert counts(shifted) == counts(last) and set(shifted["key"]["own_classes"]) == {f"margin:{mine},0"}
    assert counts(same) == counts(last) and above["staged"] < last["staged"]
    assert set(same["key"]["own_classes"]) == {mine} and last["key"]["own_classes"] == {}

    (tmp_path / "mine_for_replay.py").write_text(text.replace("+ self.by", "+ self.by + 1.0"))
    importlib.reload(sys.modules["mine_for_replay"])
    linecache.checkcache()
    changed = echo_jax(*SMALL, "--layers", 0, "--policy", mine).rows("replay")
    assert changed[0]["staged"] == above["staged"] and changed[0]["key"] != same["key"]


def test_tables_for_people(echo_jax):
    done = echo_jax(
        *SMALL[:-1], "--policy", "clairvoyant", "--eviction", "lru", "belady", "--rival", "no-offload", "ess"
    )
    assert done.status == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert sum(line[:1] == ["ema"] for line in lines) == 0  # named policies and rivals only
    hits = {tuple(line[:3]): float(line[6]) for line in lines if line and line[0] in ("clairvoyant", "never")}
    assert hits["clairvoyant", "belady", "exact"] >= hits["clairvoyant", "lru", "exact"]
    assert hits["never", "lru", "no-offload"] == 100.0
    assert "idealised, since the trace lacks what they need: ess" in done.out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--policy", "emma"), "threshold policy 'emma' is unknown; did you mean 'ema'? known: always, clairvoyant"),
        (("--policy", "ema:beta=3"), "write ema:alpha=0.5"),
        (("--policy", "margin:lost"), "threshold policy 'lost' is unknown; did you mean 'last'?"),
        (("--eviction", "belarus"), "did you mean 'belady'?"),
        (("--cap", "proportion:1"), "cap 'proportion:1' is unknown; did you mean 'proportional'?"),
        (("--cap", "fixed:-3"), "fixed rows is -3"),
        (("--sweep", "slot=1k"), "--sweep 'slot=1k' is not NAME=V,V...; did you mean 'slots'?"),
        (("--sweep", "policy=ema,last"), "give several values to --policy instead"),
        (("--sweep", "pool=sharred"), "did you mean 'shared'?"),
        (("--sweep", "slots="), "has no values"),
        (("--rival", "freakv"), "rival 'freakv' is unknown; did you mean 'freekv'?"),
        (("--slots", "many"), "slots 'many' is no number"),
        (("--slots", "1k"), "device pool holds 32 rows but B*T*(K+1) = 2*1*(16+1) needs 34"),
        (("--cost", "h1000"), "cost model 'h1000' is neither a file nor one of: gh200, h20, h200"),
        (("--layers", 7), "layer 7 is not one of the trace's, 0..1"),
        (("--steps", 31), "steps is 31 but must lie in 1..30"),
        (("--skip", 30), "skip is 30 but must lie in 0..29"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(echo_jax, arguments, says):
    assert says in echo_jax(*SMALL, *arguments).error()


def test_a_file_of_other_rows_is_left_alone(echo_jax, tmp_path):
    path = tmp_path / "rows.jsonl"
    for text, says in (
        ('{"row": "config"}\n', "rows.jsonl:1 is no row of a replay"),
        ("not json\n", "rows.jsonl:1 is no JSON row"),
        ('{"row": "replay", "key": {}, "schema": 99}\n', "has schema 99 but this version writes 1"),
    ):
        path.write_text(text)
        assert says in echo_jax(*SMALL, "--output", path).error()
        assert path.read_text() == text


def test_an_output_that_cannot_be_written_is_refused_before_the_work(echo_jax, tmp_path):
    assert "No such file" in echo_jax(*SMALL, "--output", tmp_path / "nowhere" / "rows.jsonl").error()
    assert "Is a directory" in echo_jax(*SMALL, "--output", tmp_path).error()


def test_a_sweep_too_large_for_memory_says_the_size(echo_jax):
    huge = "synth:median,requests=4096,top_k=2048,steps=10,context=1048576"
    assert "GiB" in (message := echo_jax("replay", huge).error()) and "sweep fewer values" in message


def test_the_future_is_for_replays_only(echo_jax):
    for parse, name in ((parse_threshold, "clairvoyant"), (parse_eviction, "belady")):
        assert getattr(parse(name, in_replay=True), "sees_ahead", False)
        with pytest.raises(Exception, match=f"{name}' needs to know the future, which only `echo-jax replay` does"):
            parse(name)
    assert parse_cap("7").rows == 7 and parse_cap("budgeted:100,9").rows == 9
    assert parse_threshold("margin:ema:0.25,2").policy.alpha == 0.25  # type: ignore[attr-defined]
