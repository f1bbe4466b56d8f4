"""What the GPU's own counters say of the index scores: a few numbers of Nsight Compute for a few shapes and tunings.

    python -m bench.profile_kernel [--limit 60]        about 45 s; prints a table, writes a row for each kernel

It knows which counters tell what the kernel waits for, how to ask ncu for them and how to read its answer. What is
profiled is `bench.indexer_scores`'s arguments at SHAPES, with the tuned tiles and without their cache policy.

Two passes over the same program. In the first each kernel runs once, behind a kernel that overwrites the L2, and ncu
leaves the caches alone: what reaches device memory then includes what others left unwritten. The second asks for all
counters, for which ncu repeats each kernel with caches that it empties before.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import harness
from bench.sanitize import tool_path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((1, 98_304), (8, 98_304), (102, 32_768))
FILE = "gpu_indexer_scores_counters.jsonl"

MEMORY = {
    "time us": "gpu__time_duration.sum",
    "read MB": "dram__bytes_read.sum",
    "written MB": "dram__bytes_write.sum",
}
STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "wait", "gmma", "math_pipe_throttle", "mio_throttle")
STALLS += ("lg_throttle", "sleeping", "membar", "branch_resolving", "no_instruction", "not_selected", "selected")
COUNTERS = {
    "empty caches: time us": "gpu__time_duration.sum",
    "device memory %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor cores %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue slots %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps of 64 %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "L2 hits %": "lts__t_sector_hit_rate.pct",
    "L2 MB": "lts__t_bytes.sum",
    **{f"stall {name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS},
}
SCALE = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
SCALE |= {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}


def profiled() -> None:
    """What runs under ncu: at each shape the tuned kernel as it is and, once more, with the other cache policy."""
    import jax
    import jax.numpy as jnp

    from bench import gpu_timing, indexer_scores
    from pallas_kernels import dispatch

    for seats, length in SHAPES:
        inputs = indexer_scores.arguments("fp8", seats, length)
        tuned = dispatch.tuned(True, inputs[3].size)
        for once in (False, True):
            score = indexer_scores.kernel(dataclasses.replace(tuned, once=once))
            number = jnp.zeros((1,), jnp.uint32)
            jax.block_until_ready(gpu_timing.overwrite(number, number))
            jax.block_until_ready(score(*inputs))


def labels() -> list[str]:
    return [f"{seats} x {length}{', once' if once else ''}" for seats, length in SHAPES for once in (False, True)]


def known(ncu: str, wanted: Mapping[str, str]) -> dict[str, str]:
    """Those that this ncu has for a Hopper GPU; the others are named on stderr."""
    listed = subprocess.run(
        [ncu, "--query-metrics", "--chip", "gh100"], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[0] for line in listed.splitlines() if line.strip()}
    found = {label: metric for label, metric in wanted.items() if metric.partition(".")[0] in names}
    for label in wanted.keys() - found.keys():
        print(f"this ncu does not know {wanted[label]} ({label})", file=sys.stderr)
    return found


def collect(ncu: str, metrics: Mapping[str, str], options: Sequence[str], limit: float) -> list[dict[str, float]]:
    """label -> value for each profiled kernel, in order; RuntimeError with ncu's words where it has none."""
    with tempfile.TemporaryDirectory(prefix="echo_ncu_") as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *(ncu, "--csv", "--log-file", str(log), "--metrics", ",".join(sorted(set(metrics.values())))),
            *("--kernel-name", "regex:indexer_scores", "--clock-control", "none", "--print-units", "base", *options),
            *(sys.executable, "-m", "bench.profile_kernel", "--profiled"),
        ]
        environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        said = log.read_text(errors="replace") if log.exists() else ""
    rows = read(said, metrics)
    if done.returncode or len(rows) != len(labels()):
        words = "\n".join([line for line in said.splitlines() if line.startswith("==")][-5:])
        raise RuntimeError(
            f"ncu ended with status {done.returncode} and {len(rows)} of {len(labels())} kernels\n{words}\n"
            f"{done.stderr[-1500:]}"
        )
    return rows


def read(said: str, metrics: Mapping[str, str]) -> list[dict[str, float]]:
    """Of ncu's CSV, a line for each metric of each kernel: label -> value, times in us and bytes in MB, by kernel."""
    table = [line for line in said.splitlines() if line.startswith('"')]
    kernels: dict[str, dict[str, float]] = {}
    for line in csv.DictReader(io.StringIO("\n".join(table))):
        for label, metric in metrics.items():
            if line["Metric Name"] == metric:
                value = float(line["Metric Value"].replace(",", ""))
                kernels.setdefault(line["ID"], {})[label] = value * SCALE.get(line["Metric Unit"], 1.0)
    return [kernels[number] for number in sorted(kernels, key=int)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until ncu is stopped")
    parser.add_argument("--profiled", action="store_true", help="the program itself, without ncu")
    options = parser.parse_args()
    if options.profiled:
        profiled()
        return
    deadline = time.monotonic() + options.limit
    ncu = tool_path("ncu")
    left = ["--cache-control", "none"]
    found = collect(ncu, MEMORY, left, deadline - time.monotonic())
    show(found, MEMORY)
    counters = known(ncu, COUNTERS)
    try:
        more = collect(ncu, counters, [], deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        sys.exit(f"ncu was stopped after {options.limit:.0f} s, before the second pass was done; nothing is recorded")
    show(more, counters)

    import jax  # for the machine's name; ncu has gone by now

    jax.devices()
    for label, memory, counted in zip(labels(), found, more, strict=True):
        both = memory | counted
        harness.record(
            value=memory["time us"],
            unit="us",
            name=f"index scores, fp8, 64 heads, {label}: counters of one kernel",
            file=FILE,
            method="Nsight Compute; device memory and time behind a kernel that overwrites the L2, the rest with "
            "caches emptied before each repetition",
            notes="; ".join(f"{name} {value:.4g}" for name, value in both.items() if name != "time us"),
        )


def show(rows: Sequence[Mapping[str, float]], metrics: Mapping[str, str]) -> None:
    print(f"{'':28}" + "".join(f"{label:>20}" for label in labels()))
    for name in metrics:
        print(f"{name:28}" + "".join(f"{row.get(name, float('nan')):20.2f}" for row in rows), flush=True)


if __name__ == "__main__":
    main()
