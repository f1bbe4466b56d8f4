"""`echo-jax report`: from a replay to pages, the commands under the figures, and wrong input."""

import json
import re
import shlex
import sys

import pytest

from echo_jax.cli import output

TRACE = "synth:mix,layers=2,requests=2,top_k=16,steps=30,context=256"

MINE = """
import dataclasses
from echo_jax.threshold import Last

@dataclasses.dataclass(frozen=True)
class Above(Last):
    by: float = 0.0
    def value(self, memory):
        return memory + self.by
"""


@pytest.fixture
def replayed(echo_jax, tmp_path, monkeypatch):
    """Rows of two policies, one a user's own, at two pool sizes, and of a rival."""
    (tmp_path / "here" / "mine_for_report.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path / "here")
    policies = ("--policy", "ema", "mine_for_report:Above:0.5", "--sweep", "slots=3k,5k", "--series")
    assert echo_jax("replay", TRACE, *policies, "--output", "rows.jsonl").status == 0
    rivals = ("--rival", "freekv", "--slots", "3k", "--series")
    assert echo_jax("replay", TRACE, *rivals, "--output", "rows.jsonl").status == 0
    return tmp_path / "here"


def keys(path):
    return sorted(json.dumps([row["row"], row["key"]]) for row in map(json.loads, path.read_text().splitlines()))


def test_a_users_policy_is_in_the_report_and_the_commands_make_the_same_rows(echo_jax, replayed):
    """The one file that was written for it is the user's own (G.policy_files)."""
    done = echo_jax("report", "rows.jsonl", "--output", "out")
    assert done.status == 0 and [line.split(":")[0] for line in done.out.splitlines()] == [
        "out/report.md",
        "out/report.html",
    ]
    page, text = (replayed / "out" / "report.html").read_text(), (replayed / "out" / "report.md").read_text()
    rows = [json.loads(line) for line in (replayed / "rows.jsonl").read_text().splitlines()]
    mine = [row for row in rows if row["key"]["policy"].startswith("mine") and row["key"]["slots_per_request"] == 48]
    wasted = sum(row["wasted"] / row["counted_steps"] for row in mine if row["row"] == "replay") / 2
    line = next(line for line in text.splitlines() if line.startswith("| mine_for_report:Above:0.5, 48 slots"))
    assert line.split(" | ")[3] == f"{wasted:.1f}" and wasted > 0
    assert re.search("<title>Above:0.5: 48, ", page) and "freekv (idealised)" in page

    blocks = [block.split("\n```")[0].splitlines() for block in text.split("```sh\n")[1:]]
    assert len(blocks) == text.count("](figures/") + 1  # every figure carries its commands, and the section its own
    *replays, report = blocks[0]
    assert report == "echo-jax report rows.jsonl --output out" and all(block[-1] == report for block in blocks)
    rows, before = keys(replayed / "rows.jsonl"), page
    (replayed / "rows.jsonl").unlink()
    for command in replays:
        assert echo_jax(*shlex.split(command)[1:]).status == 0
    assert keys(replayed / "rows.jsonl") == rows
    assert echo_jax(*shlex.split(report)[1:]).status == 0
    assert len((replayed / "out" / "report.html").read_text()) == pytest.approx(len(before), rel=0.01)


def test_a_step_of_echo_tiny_is_explained(echo_jax, tmp_path):
    done = echo_jax("report", "--explain", "echo-tiny", "--layers", 2, "--output", "out")
    assert done.status == 0 and done.out.startswith("out/explained.html: ")
    page = (tmp_path / "here" / "out" / "explained.html").read_text()
    data = json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])
    assert [one["step"] for one in data["moments"]] == [32, 33, 34, 35] and "TopologicalSorter" in data["text"]
    for one in data["moments"]:
        assert len(one["selected"]) == 256 and len(one["before"]) == 512
    assert all(any(one[what] for one in data["moments"]) for what in ("recalled", "useful"))
    assert '<pre class="command">echo-jax report --explain echo-tiny --layers 2 --output out</pre>' in page


@pytest.mark.parametrize(
    "arguments, says",
    [
        ((), "report got 0 files of rows and no trace to explain; give files of rows, or --explain TRACE"),
        (("rows.jsonl", "--explain", "echo-tiny"), "report got 1 files of rows and a trace to explain"),
        (("--explain", "echo-tinny-code"), "did you mean 'echo-tiny-code'?"),
        (("--explain", "echo-tiny", "--layers", 6), "layer 6 is none that scores"),
        (("--explain", "echo-tiny", "--step", 64), "step 64 is not one of the trace's, 0..63"),
        (("--explain", "echo-tiny", "--slots", "256"), "device pool holds 256 rows"),
        (("--explain", "echo-tiny", "--policy", "emma"), "did you mean 'ema'?"),
        (("--explain", "echo-tiny", "--policy", "clairvoyant"), "needs to know the future"),
        (("--explain", "echo-tiny", "--cap", -1), "staging -1"),
    ],
)
def test_what_cannot_be_explained_is_refused(echo_jax, tmp_path, arguments, says):
    assert says in echo_jax("report", *arguments).error()
    assert not list((tmp_path / "here").iterdir())


def test_wrong_input_is_one_line_with_the_remedy(echo_jax, tmp_path):
    here = tmp_path / "here"
    assert "'nothing.jsonl': No such file" in echo_jax("report", "nothing.jsonl").error()
    (here / "empty.jsonl").write_text("")
    assert "0 rows of replays in empty.jsonl" in echo_jax("report", "empty.jsonl").error()
    (here / "other.jsonl").write_text('{"row": "config"}\n')
    assert "other.jsonl:1 is a row 'config', not one of a replay" in echo_jax("report", "other.jsonl").error()
    assert (
        "--output 'empty.jsonl' is a file; give a folder" in echo_jax("report", "x", "--output", "empty.jsonl").error()
    )
    assert sorted(path.name for path in here.iterdir()) == ["empty.jsonl", "other.jsonl"]  # and nothing was written


def test_a_bar_counts_in_its_own_unit(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.progress("replay", 7, "layer-steps") as bar:
        bar.advance(3)
    assert "3/7 layer-steps" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
