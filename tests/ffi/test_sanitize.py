"""The bench of compute-sanitizer: what it reads off a log, and that the tests it names exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import sanitize


@pytest.mark.parametrize(
    "log, count",
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 12 hazards displayed (3 errors, 9 warnings)\n", 12),
        ("========= ERROR SUMMARY: 2 errors\n========= ERROR SUMMARY: 3 errors\n", 5),
        ("========= COMPUTE-SANITIZER\n========= Invalid __global__ write\n", None),  # stopped before its summary
        ("", None),
    ],
)
def test_findings(log, count):
    assert sanitize.findings(log) == count


def test_its_tests_exist():
    """A test that was renamed would leave the sanitizers with less to look at; on a GPU they would say so late."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    done = subprocess.run([*command, *sanitize.TESTS], cwd=sanitize.ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(sanitize.TESTS) <= set(done.stdout.splitlines())
