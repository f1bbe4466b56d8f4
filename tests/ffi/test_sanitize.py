"""The bench of compute-sanitizer: what it reads off a log, and that the tests it names exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import sanitize
from tests.limits import HANG_S


@pytest.mark.parametrize(
    "log, count",
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 12 hazards displayed (3 errors, 9 warnings)\n", 12),
        ("========= ERROR SUMMARY: 2 errors\n========= ERROR SUMMARY: 3 errors\n", 5),
        ("========= COMPUTE-SANITIZER\n========= Invalid __global__ write\n", None),  # stopped before its summary
        ("========= Internal Sanitizer Error: lost\n========= RACECHECK SUMMARY: 1 hazard displayed\n", None),
        ("", None),
    ],
)
def test_findings(log, count):
    assert sanitize.findings(log) == count


MARK, PREFETCH, CLEAR = (
    sanitize.lines_of(sanitize.ROOT / sanitize.VERDICTS.module, name).start + 1
    for name in ("mark", "prefetch", "clear")
)


@pytest.mark.parametrize(
    "accesses, meant",
    [
        ([("Write", "ahead.py", MARK), ("Read", "ahead.py", PREFETCH)], 1),
        ([("Read", "ahead.py", PREFETCH), ("Write", "ahead.py", MARK), ("Write", "ahead.py", MARK)], 1),
        ([("Write", "ahead.py", MARK), ("Write", "ahead.py", MARK)], 0),
        ([("Write", "ahead.py", PREFETCH), ("Read", "ahead.py", PREFETCH)], 0),
        ([("Write", "ahead.py", CLEAR), ("Read", "ahead.py", PREFETCH)], 0),
        ([("Read", "ahead.py", PREFETCH), ("Write", "ahead.py", MARK), ("Write", "above.py", MARK)], 0),
        ([("Write", "mosaic_gpu.py", MARK), ("Read", "ahead.py", PREFETCH)], 0),
        ([("Write", "ahead.py", MARK), ("Read", None, None)], 0),
        ([("Read", None, None), ("Write", None, None)], 0),
        ([("Read", "ahead.py", PREFETCH)], 0),
    ],
)
def test_a_mailboxes_own_accesses_are_no_finding(accesses, meant):
    """Only where the verdicts are stored and looked for; a log has other hazards before and behind."""
    other = "========= Error: Race reported between Write access at f+0x10 in a.py:1\n=========     and Read access at "
    other += "f+0x20 in a.py:2 [4 hazards]\n========= \n"
    lines = [
        f"{kind} access" + (f" at kernel+0x1080 in {file}:{line}" if file else "") for kind, file, line in accesses
    ]
    first, *others = lines
    hazard = f"========= Error: Race reported between {first}\n"
    hazard += "".join(f"=========     and {line} [256 hazards]\n" for line in others) + "========= \n"
    summary = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n"
    assert sanitize.in_mailbox(other + hazard + other + summary, sanitize.VERDICTS) == meant


def test_its_tests_exist():
    """A test that was renamed would leave the sanitizers with less to look at; on a GPU they would say so late."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run(
        [*command, *sanitize.TESTS], cwd=sanitize.ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(sanitize.TESTS) <= set(done.stdout.splitlines())
