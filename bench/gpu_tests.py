"""All tests marked `gpu`, in one call of ten minutes on a machine that has one.

    JAX_PLATFORMS=cuda,cpu python -m bench.gpu_tests [--limit 560] [--workers 12]

Tests are dealt to pytest processes, as many at once as workers: compiling is most of the time and keeps one core busy.
It needs pytest and no plugin of it. It records [N.gpu_tests_failed] when every process has ended; a run that was cut at
the limit records what it has under another name, and the claim stays as it was.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench import harness

FILE = "gpu_tests.jsonl"
# Options of plugins that are not there are no errors, and pytest-benchmark turns its warnings into some.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", "-p", "no:benchmark"]
PYTEST += ["-W", "ignore::pytest.PytestConfigWarning"]
PER_PROCESS = 24


def shares() -> list[list[str]]:
    """Node ids of all GPU tests, in lists that one process each runs: tests of one file, PER_PROCESS at most."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", "tests"], cwd=harness.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"pytest cannot collect the tests: {done.stdout[-400:]} {done.stderr[-400:]}")
    by_file: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if "::" in line:
            by_file.setdefault(line.partition("::")[0], []).append(line)
    if not by_file:
        raise RuntimeError(f"pytest collected no GPU test: {done.stdout[-400:]} {done.stderr[-400:]}")
    made = []
    for ids in by_file.values():
        parts = -(-len(ids) // PER_PROCESS)
        made += [ids[part::parts] for part in range(parts)]  # dealt in turn, so that slow neighbours are spread
    return sorted(made, key=len, reverse=True)


def run(ids: list[str], report: Path, deadline: float) -> str:
    """ "" when pytest ended by itself, else what happened."""
    command = [*PYTEST, f"--junitxml={report}", *ids]
    # Two programs are equal to the bit only where XLA picks the same products for both.
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    left = deadline - time.monotonic()
    if left <= 0:
        return "not begun"
    process = subprocess.Popen(
        command,
        cwd=harness.ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "cut at the limit"
    if process.returncode not in (0, 1, 5):  # all passed, some failed, none was there
        return f"pytest ended with {process.returncode}: {' '.join(told.split())[-400:]}"
    return ""


def counts_of(report: Path) -> tuple[dict[str, int], list[str]]:
    """passed, failed and skipped tests of a report, and the names of those that failed."""
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return counts, failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_tests", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=float, default=560, metavar="SECONDS", help="of all files together")
    parser.add_argument("--workers", type=int, default=12, metavar="N", help="files at once")
    flags = parser.parse_args()
    started = time.monotonic()
    total, failed, unfinished = {"passed": 0, "failed": 0, "skipped": 0}, [], []
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(flags.workers) as pool:
        lists = shares()
        reports = [Path(folder) / f"{number}.xml" for number in range(len(lists))]
        deadline = started + flags.limit
        jobs = {pool.submit(run, lists[number], reports[number], deadline): number for number in range(len(lists))}
        for job in concurrent.futures.as_completed(jobs):
            ids, problem = lists[jobs[job]], job.result()
            path = ids[0].partition("::")[0]
            if problem:
                unfinished.append(f"{path}, {len(ids)} tests: {problem}")
                print(unfinished[-1], flush=True)
                continue
            counts, names = counts_of(reports[jobs[job]])
            total = {kind: total[kind] + counts[kind] for kind in total}
            failed += names
            seconds = time.monotonic() - started
            print(
                f"{seconds:5.0f} s  {path}: {counts}", *(f"    FAILED {name}" for name in names), sep="\n", flush=True
            )
    seconds = time.monotonic() - started
    import jax

    jax.devices()  # so that the row names the GPU
    notes = "; ".join([f"{total['passed']} passed, {total['skipped']} skipped", *failed, *unfinished])
    harness.record(
        None if unfinished else "N.gpu_tests_failed",
        name="GPU tests that failed, of a run that was cut" if unfinished else "",
        value=total["failed"],
        unit="",
        file=FILE,
        shapes=total | {"processes": len(lists), "unfinished": len(unfinished), "seconds": round(seconds)},
        method=f"pytest -m gpu, up to {PER_PROCESS} tests a process, {flags.workers} processes at once",
        notes=notes,
    )
    print(f"{notes[:2000]}\n{total}, {len(unfinished)} processes unfinished, {seconds:.0f} s")
    return 1 if failed or unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
