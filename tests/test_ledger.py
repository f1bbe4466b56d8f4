"""Recorded rows are only ever added to, a hand edit shows, and a claim says when its sources have changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import claims, harness, ledger, sources


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository whose ledger has a marker and a file of two rows."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    results = tmp_path / "bench/results"
    results.mkdir(parents=True)
    (results / "APPEND_ONLY").write_text("from here on\n")
    (results / "cpu.jsonl").write_text('{"value": 1}\n{"value": 2}\n')
    commit(tmp_path, "start")
    return tmp_path


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", message)


# ---- this repository -------------------------------------------------------------------------------------------------


def needs_history() -> None:
    if reason := ledger.why_unknown():
        pytest.skip(reason)


def test_rows_of_this_repository_were_only_added():
    """A commit once deleted 25 rows, and another rewrote a unit by hand."""
    needs_history()
    assert ledger.changes() == []


def test_every_added_line_carries_the_digest_of_its_content():
    needs_history()
    for line, place in ledger.added_lines():
        assert line.get("digest") == ledger.digest_of(line), f"{place} was not written by the bench, or changed since"


def test_every_superseding_line_names_a_row_and_a_reason():
    known = {ledger.digest_of(line) for line, _, _ in ledger.lines_of() if not ledger.is_superseding(line)}
    for digest, reason in ledger.superseded().items():
        assert digest in known and len(reason) > 20, digest


def test_every_claim_names_sources_that_exist():
    for claim in claims.read_claims()[1]:
        globs = sources.globs_of(claim.id)
        assert globs, f"{claim.id} names no sources, nor does its part"
        empty = [glob for glob in globs if not any(path.is_file() for path in sources.ROOT.glob(glob))]
        assert not empty, f"{claim.id}: nothing is called {empty}"


# ---- only added to ---------------------------------------------------------------------------------------------------


def test_lines_added_in_commits_and_in_the_working_tree_are_fine(repository):
    path = repository / "bench/results/cpu.jsonl"
    for number in (3, 4):
        path.write_text(path.read_text() + f'{{"value": {number}}}\n')
        commit(repository, "more")
    path.write_text(path.read_text() + '{"value": 5}\n')
    (repository / "bench/results/gpu.jsonl").write_text("{}\n")
    assert ledger.changes(repository) == []
    assert [line["value"] for line, _ in ledger.added_lines(repository) if line] == [3, 4, 5]


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"value": 1}\n', "changes or drops lines of bench/results/cpu.jsonl"),
        ('{"value": 1}\n{"value": 3}\n', "changes or drops lines"),
        ('{"value": 0}\n{"value": 1}\n{"value": 2}\n', "changes or drops lines"),
        (None, "deletes bench/results/cpu.jsonl, 2 lines"),
    ],
    ids=["dropped", "changed", "put_before", "deleted"],
)
def test_anything_else_is_told(repository, text, told, is_committed):
    path = repository / "bench/results/cpu.jsonl"
    path.unlink() if text is None else path.write_text(text)
    if is_committed:
        commit(repository, "a change")
    [wrong] = ledger.changes(repository)
    assert told in wrong and ("commit " in wrong) == is_committed


def test_a_change_that_a_later_commit_takes_back_is_told_still(repository):
    path = repository / "bench/results/cpu.jsonl"
    before = path.read_text()
    path.write_text('{"value": 1}\n')
    commit(repository, "drop")
    path.write_text(before)
    commit(repository, "put back")
    assert len(ledger.changes(repository)) == 1


def test_a_renamed_file_is_followed(repository):
    results = repository / "bench/results"
    (results / "cpu.jsonl").write_text("".join(f'{{"value": {number}}}\n' for number in range(1, 3)))
    git(repository, "mv", "bench/results/cpu.jsonl", "bench/results/host.jsonl")
    commit(repository, "rename")
    assert ledger.changes(repository) == []
    (results / "host.jsonl").write_text('{"value": 2}\n')
    assert len(ledger.changes(repository)) == 1


def test_both_sides_of_a_merge_are_looked_at(repository):
    path = repository / "bench/results/cpu.jsonl"
    git(repository, "checkout", "--quiet", "-b", "side")
    path.write_text(path.read_text() + '{"value": 3}\n')
    commit(repository, "side")
    git(repository, "checkout", "--quiet", "main")
    commit(repository, "main goes on")
    git(repository, "merge", "--quiet", "--no-ff", "--no-commit", "side")
    path.write_text('{"value": 1}\n{"value": 2}\n')
    commit(repository, "a merge that drops a row")
    assert len(ledger.changes(repository)) == 1


def test_a_history_that_is_not_here_is_said(repository, tmp_path_factory):
    shallow = tmp_path_factory.mktemp("clone")
    commit(repository, "two")
    git(shallow, "clone", "--quiet", "--depth", "1", f"file://{repository}", str(shallow / "one"))
    assert "shallow" in str(ledger.why_unknown(shallow / "one"))
    assert ledger.why_unknown(repository) is None
    assert "git does not answer" in str(ledger.why_unknown(shallow / "nowhere"))


# ---- superseding -----------------------------------------------------------------------------------------------------


def recorded(folder: Path, value: float) -> str:
    harness.record("A.test_s", value=value, unit="s", results=folder)
    return ledger.digest_of(list(ledger.lines_of(folder))[-1][0])


def value_of(folder: Path) -> float | None:
    listed = [claim for claim in claims.read_claims()[1] if claim.id == "A.test_s"]
    row = claims.judge(listed, harness.read_rows(folder))[0].row
    return None if row is None else row.value


def test_a_superseded_row_no_longer_answers_its_claim(tmp_path):
    recorded(tmp_path, 400.0)
    digest = recorded(tmp_path, 100.0)
    assert value_of(tmp_path) == 100.0
    ledger.supersede(digest, "measured on a machine that did something else", tmp_path)
    assert value_of(tmp_path) == 400.0
    with pytest.raises(ValueError, match="superseded already: measured on a machine"):
        ledger.supersede(digest, "again", tmp_path)


def test_superseding_wants_a_row_and_a_reason(tmp_path):
    digest = recorded(tmp_path, 1.0)
    with pytest.raises(ValueError, match="no row has digest 0000"):
        ledger.supersede("0000", "why", tmp_path)
    with pytest.raises(ValueError, match="give one with --reason"):
        ledger.supersede(digest, " ", tmp_path)


def test_a_row_that_was_changed_by_hand_has_another_digest(tmp_path):
    recorded(tmp_path, 1.0)
    [(line, _, _)] = ledger.lines_of(tmp_path)
    assert line["digest"] == ledger.digest_of(line) and len(line["run"]) == 8
    assert ledger.digest_of(line | {"value": 2.0}) != line["digest"]


def test_rows_of_another_machine_are_collected_once_and_only_as_they_were_written(tmp_path):
    brought, results = tmp_path / "brought", tmp_path / "results"
    results.mkdir()
    recorded(brought, 1.0)
    recorded(brought, 2.0)
    assert ledger.collect(brought, results) == {"cpu.jsonl": 2}
    with pytest.raises(ValueError, match="are in the ledger already"):
        ledger.collect(brought, results)
    text = (brought / "cpu.jsonl").read_text()
    (brought / "cpu.jsonl").write_text(text.replace('"value": 2.0', '"value": 1.5'))
    with pytest.raises(ValueError, match="cpu.jsonl:2 lacks the digest of its content"):
        ledger.collect(brought, results)
    assert (results / "cpu.jsonl").read_text() == text
    with pytest.raises(ValueError, match="holds no .jsonl file"):
        ledger.collect(tmp_path / "nothing", results)


# ---- a value made of other rows --------------------------------------------------------------------------------------


def way(name: str, value: float, run: str = "a", **shapes) -> tuple[harness.Row, str]:
    date = "2026-01-02T10:00:00+00:00"
    return harness.Row(value, "us", date, "a machine", {}, name=name, run=run, shapes=shapes), f"file:{name}"


BEST = claims.Best("max", "scores, .*", ("in turn", "alone + link"), "fused")


def test_the_best_ratio_is_of_rows_measured_side_by_side():
    rows = [way("scores, 1: in turn", 30.0), way("scores, 1: fused", 20.0)]
    rows += [way("scores, 2: in turn", 40.0), way("scores, 2: fused", 20.0, run="b")]  # of two runs: not compared
    found = BEST.of(rows)
    assert found is not None and found.value == 1.5 and "file:scores, 1: fused" in found.notes


def test_of_alternatives_the_lowest_counts_and_sums_need_all_their_rows():
    rows = [way("scores, 1: in turn", 30.0), way("scores, 1: alone", 10.0), way("scores, 1: fused", 10.0)]
    assert (found := BEST.of(rows)) is not None and found.value == 3.0
    rows.append(way("scores, 1: link", 15.0))
    assert (found := BEST.of(rows)) is not None and found.value == 2.5


def test_a_worst_is_the_lowest_and_nothing_is_none():
    rows = [
        way(f"scores, {n}: {name}", n * 10.0 if name == "in turn" else 10.0)
        for n in (2, 3)
        for name in ("in turn", "fused")
    ]
    worst = claims.Best("min", "scores, .*", ("in turn",), "fused").of(rows)
    assert worst is not None and worst.value == 2.0
    assert BEST.of([way("scores, 1: in turn", 30.0)]) is None
    with pytest.raises(ValueError, match="pick must be max or min"):
        claims.Best("best", "x", (), "y")


def test_runs_are_comparable_within_five_percent_of_both_references():
    def references(run: str, empty: float, copy: float):
        return [way(harness.EMPTY_GRAPH, empty, run), way(harness.COPY_RATE, copy, run)]

    rows = references("a", 2.7, 4.3) + references("b", 2.8, 4.2) + references("c", 2.7, 4.0) + references("d", 3.0, 4.3)
    assert claims.comparable("a", "b", rows) and claims.comparable("x", "x", rows)
    assert not claims.comparable("a", "c", rows), "the copy is 7 % slower"
    assert not claims.comparable("a", "d", rows), "the empty graph is 11 % slower"
    assert not claims.comparable("a", "unknown", rows) and not claims.comparable("", "", rows)
    rows += [way("top-k", 10.0, "a", k=1), way("top-k", 12.0, "b", k=1), way("top-k", 13.0, "b", k=2)]
    assert 'top-k {"k": 1}  10  12  1.200' in claims.compare("a", "b", rows) and "13" not in claims.compare(
        "a", "b", rows
    )
    with pytest.raises(ValueError, match="runs a and c are not compared: references more than 5% apart"):
        claims.compare("a", "c", rows)


# ---- staleness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "one", "other", "is_same"),
    [
        (".py", '"""Doc."""\nx = 1  # why\n', "x = 1\n", True),
        (".py", "def f(a):\n    '''Doc.'''\n    return a\n", "def f(a): return a\n", True),
        (".py", "x = 1\n", "x = 2\n", False),
        (".py", "x = 'text'\n", "x = 'other'\n", False),
        (".cu", "int a; // why\n/* more */ int b;", "int a;\n\n  int b;", True),
        (".cu", 'auto s = "// no comment";', 'auto s = "// none";', False),
        (".cuh", "int a;", "int b;", False),
        (".toml", "a = 1", "a = 1 ", False),
    ],
)
def test_prose_and_layout_change_no_digest(suffix, one, other, is_same):
    assert (sources.meaning(suffix, one.encode()) == sources.meaning(suffix, other.encode())) == is_same


def test_a_moved_file_keeps_the_digest_and_a_changed_one_does_not(repository, monkeypatch):
    (repository / "old").mkdir()
    (repository / "old/a.py").write_text("x = 1\n")
    (repository / "old/b.cu").write_text("int b;\n")
    commit(repository, "sources")
    first = git(repository, "rev-parse", "HEAD").strip()
    (repository / "new").mkdir()
    for name in ("a.py", "b.cu"):
        (repository / "old" / name).rename(repository / "new" / name)
    monkeypatch.setattr(sources, "moved", lambda: {"old/a.py": "new/a.py", "old/b.cu": "new/b.cu"})
    now = sources._digest_now(("new/*",), repository)
    assert sources.digest_at(("new/*",), first, repository) == now
    sources._digest_now.cache_clear()
    (repository / "new/a.py").write_text("x = 2\n")
    assert sources._digest_now(("new/*",), repository) != now
    sources._digest_now.cache_clear()


@pytest.mark.parametrize(("then", "age"), [("now", "fresh"), ("0123456789abcdef", "stale")])
def test_a_claim_whose_sources_changed_is_stale(then, age):
    digest = sources.digest_now("A.test_s") if then == "now" else then
    date = "2026-01-02T10:00:00+00:00"
    row = harness.Row(100.0, "s", date, "a machine", {}, claim="A.test_s", sources=digest)
    assert claims.age_of("A.test_s", row) == age
    claim = next(claim for claim in claims.read_claims()[1] if claim.id == "A.test_s")
    assert claims.Verdict(claim, row, age).shown == ("met, stale" if age == "stale" else "met")


def test_a_machine_without_git_is_told_the_commit(repository, tmp_path_factory):
    told = repository / "bench/COMMIT"
    (repository / "echo_jax").mkdir()
    (repository / "echo_jax/a.py").write_text("x = 1\n")
    commit(repository, "a source")
    head = sources.write_commit(repository, told)
    assert head == git(repository, "rev-parse", "--short=12", "HEAD").strip()
    copied = tmp_path_factory.mktemp("elsewhere")
    (copied / "echo_jax").mkdir()
    (copied / "echo_jax/a.py").write_text("x = 1\n")
    assert sources.commit_of_tree(copied, told) == head
    (copied / "echo_jax/a.py").write_text("x = 2\n")
    assert sources.commit_of_tree(copied, told) == head + "+"
    assert sources.commit_of_tree(copied, copied / "nothing") == ""
    git(copied, "init", "--quiet")
    (copied / "echo_jax/a.py").write_text("x = 1\n")
    git(copied, "add", "--all")
    git(copied, "commit", "--quiet", "-m", "an older commit")
    assert sources.commit_of_tree(copied, told) == head, "the copy's own git folder knows another commit"
    (repository / "echo_jax/a.py").write_text("x = 3\n")
    assert sources.write_commit(repository, told) == head + "+"


def test_tables_have_a_column_for_conditions_and_for_kernels():
    row = json.loads(
        '{"value": 1.5, "unit": "ratio", "date": "2026-01-02T10:00:00+00:00", "machine": "m", "versions": {}}'
    )
    made = harness.Row(**row, claim="A.x", kernel_us=12.5)
    claim = claims.Claim("A.x", "a ratio", "ratio", ">= 1", condition="on Tuesdays")
    text = claims.as_markdown({"A": "Part"}, [claims.Verdict(claim, made, "stale")])
    assert "| A.x | a ratio | on Tuesdays | 1.5 | 12.5 us | >= 1 | met, stale | m, 2026-01-02 |" in text
