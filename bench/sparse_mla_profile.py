"""What sparse MLA waits for, by Nsight Compute: the GPU's counters, and where in the code its warps were seen.

    python -m bench.sparse_mla_profile [--limit 60] [--keep FOLDER]       about 50 s on one GPU; prints only

It knows which counters tell tensor cores, shared memory and the L2 apart, how to ask ncu for them and for samples of
every instruction, and how to read both answers. What is profiled is the call of the bench at CALLS, as tuned.

A sample is a warp's program counter, with what the warp waited for. All warps of a block are there from its start to
its end, so that samples of one role, over its warps, are shares of the block's time. Roles are told apart by what only
they execute: wgmma, or the instructions that bring rows. `--keep` leaves ncu's report in a folder, and both of its
tables as CSV.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.sanitize import tool_path

ROOT = Path(__file__).resolve().parent.parent
CALLS = ((128, "bf16"), (128, "fp8"), (8, "bf16"), (1, "bf16"))
SHOWN = 25  # instructions of a kernel, those with most samples
SECTIONS = ("SourceCounters", "WarpStateStats", "LaunchStats", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis")
COUNTERS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "l1tex__m_xbar2l1tex_read_bytes.sum",
    "l1tex__m_xbar2l1tex_read_bytes.avg.pct_of_peak_sustained_elapsed",
    "l1tex__lsuin_requests.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "lts__t_bytes.sum",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "launch__registers_per_thread",
    "smsp__inst_executed_op_local_ld.sum",
    "smsp__inst_executed_op_local_st.sum",
)
ROLES = {"attending": ("HGMMA",), "gathering": ("LDGSTS", "CCTL", "F2FP.F16.E4M3")}
# Worth a line even where nobody was seen: they say where in a tile one is.
MARKS = (
    "SYNCS",
    "HGMMA",
    "WARPGROUP",
    "LDGSTS",
    "LDGDEPBAR",
    "DEPBAR",
    "FENCE",
    "UCGABAR",
    "USETMAXREG",
    "EXIT",
    "BRA",
)


def profiled() -> None:
    """What runs under ncu."""
    import jax

    from bench import sparse_mla_calls as calls

    shapes = [calls.Shape(seats, 128, record_format) for seats, record_format in CALLS]
    kernels = calls.compiled([(shape.record_format, shape.tuned(), shape.structs()) for shape in shapes])
    for shape, attend in zip(shapes, kernels, strict=True):
        inputs = calls.arguments(shape)
        jax.block_until_ready(attend(*inputs))
        del inputs


def labels() -> list[str]:
    return [f"B {seats} {record_format}" for seats, record_format in CALLS]


def collect(ncu: str, report: Path, limit: float) -> None:
    """Writes ncu's report of the profiled kernels; RuntimeError with its words where it fails."""
    command = [
        *(ncu, "--export", str(report), "--force-overwrite", "--kernel-name", "regex:sparse_mla"),
        *("--clock-control", "none", "--metrics", ",".join(known(ncu))),
        *(word for section in SECTIONS for word in ("--section", section)),
        *(sys.executable, "-m", "bench.sparse_mla_profile", "--profiled"),
    ]
    # ncu saves what a kernel may write before it runs it again: no more memory than is used, and no graphs.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )
    if done.returncode or not report.exists():
        raise RuntimeError(f"ncu ended with status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def known(ncu: str) -> list[str]:
    """The counters that this ncu has for a Hopper GPU; the others are named on stderr."""
    done = subprocess.run([ncu, "--query-metrics", "--chip", "gh100"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    found = [metric for metric in COUNTERS if metric.startswith("launch__") or metric.partition(".")[0] in names]
    if left := set(COUNTERS) - set(found):
        print(f"this ncu does not know {', '.join(sorted(left))}", file=sys.stderr)
    return found


def page(ncu: str, report: Path, name: str, *options: str) -> str:
    command = [ncu, "--import", str(report), "--page", name, "--csv", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def counters(said: str) -> list[dict[str, str]]:
    """Of the page "raw", a line for each kernel: metric -> value with its unit, by kernel."""
    lines = [line for line in said.splitlines() if line.startswith('"')]
    names, units, *kernels = csv.reader(io.StringIO("\n".join(lines)))
    return [
        {name: f"{value} {unit}".strip() for name, unit, value in zip(names, units, kernel, strict=True)}
        for kernel in kernels
    ]


def instructions(said: str) -> list[list[dict[str, str]]]:
    """Of the page "source", a line for each instruction behind a line of names: column -> text, by kernel."""
    kernels: list[list[dict[str, str]]] = []
    names: list[str] | None = None
    for row in csv.reader(io.StringIO(said)):
        if "Source" in row:
            names = row
            kernels.append([])
        elif names is not None and len(row) == len(names):
            kernels[-1].append(dict(zip(names, row, strict=True)))
    return kernels


def number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def samples(line: Mapping[str, str]) -> float:
    """How often a warp was seen at an instruction: ncu's name of the column differs between versions."""
    return next(
        (number(line[name]) for name in ("# Samples", "Warp Stall Sampling (All Samples)", "Sampling Data (All)")
         if name in line), 0.0,
    )  # fmt: skip


def reasons(line: Mapping[str, str]) -> Counter[str]:
    """What these warps waited for: samples by reason, those that issued nothing and the others together."""
    found: Counter[str] = Counter()
    for name, text in line.items():
        match = re.fullmatch(r"(?:smsp__pcsamp_warps_issue_stalled_|stall_)(\w+)", name)
        if match and not match[1].endswith("not_issued"):
            found[match[1]] += int(number(text))
    return +found


def opcode(line: Mapping[str, str]) -> str:
    words = line["Source"].split()
    return words[1] if words and words[0].startswith("@") and len(words) > 1 else (words or [""])[0]


def roles(lines: Sequence[Mapping[str, str]]) -> list[str]:
    """A role for each instruction: the one whose first and last mark it lies between, or else nearest to."""
    ends = {}
    for role, marks in ROLES.items():
        at = [index for index, line in enumerate(lines) if opcode(line).startswith(marks)]
        if at:
            ends[role] = at[0], at[-1]
    found = []
    for index in range(len(lines)):
        distance = {role: max(first - index, index - last, 0) for role, (first, last) in ends.items()}
        found.append(min(distance, key=distance.__getitem__) if distance else "?")
    return found


def show(label: str, lines: Sequence[Mapping[str, str]]) -> None:
    total = sum(map(samples, lines)) or 1.0
    of_role = roles(lines)
    print(f"\n{label}: {total:.0f} samples of {len(lines)} instructions")
    for role in sorted(set(of_role)):
        mine = [line for line, name in zip(lines, of_role, strict=True) if name == role]
        own = sum(map(samples, mine)) or 1.0
        why: Counter[str] = sum((reasons(line) for line in mine), Counter())
        every = sum(why.values()) or 1
        text = "  ".join(f"{name} {100 * count / every:.0f}" for name, count in why.most_common(8))
        print(f"  {role}: {100 * own / total:.1f} % of samples; of these, %: {text}")
    most = sorted(range(len(lines)), key=lambda index: -samples(lines[index]))[:SHOWN]
    print("  % of its role's samples, in order of the code; a stretch of others between two marks is one line")
    of_all = {role: sum(samples(line) for line, name in zip(lines, of_role, strict=True) if name == role) or 1.0
              for role in set(of_role)}  # fmt: skip
    stretch, count, role = 0.0, 0, None
    for index, line in enumerate(lines):
        share = 100 * samples(line) / of_all[of_role[index]]
        is_mark = opcode(line).startswith(MARKS) and share >= 0.1
        if index in most or is_mark or of_role[index] != role:
            if stretch >= 0.3:
                print(f"  {'':>5} {role:>10} {stretch:5.1f}   ... {count} others")
            stretch, count, role = 0.0, 0, of_role[index]
        if index in most or is_mark:
            waits = "  ".join(f"{name} {value}" for name, value in reasons(line).most_common(2))
            print(f"  {index:5} {role:>10} {share:5.1f}   {line['Source'].strip()[:70]:70} {waits}")
        else:
            stretch, count = stretch + share, count + 1
    if stretch >= 0.3:
        print(f"  {'':>5} {role:>10} {stretch:5.1f}   ... {count} others", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until ncu is stopped")
    parser.add_argument("--keep", type=Path, help="a folder for ncu's report and its two tables")
    parser.add_argument("--profiled", action="store_true", help="the program itself, without ncu")
    options = parser.parse_args()
    if options.profiled:
        profiled()
        return
    deadline = time.monotonic() + options.limit
    ncu = tool_path("ncu")
    with tempfile.TemporaryDirectory(prefix="echo_ncu_") as folder:
        report = Path(folder) / "sparse_mla.ncu-rep"
        collect(ncu, report, deadline - time.monotonic())
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(report, options.keep)
        raw, source = page(ncu, report, "raw"), page(ncu, report, "source", "--print-source", "sass")
    if options.keep is not None:
        (options.keep / "sparse_mla_raw.csv").write_text(raw, encoding="utf-8")
        (options.keep / "sparse_mla_source.csv").write_text(source, encoding="utf-8")
    counted = counters(raw)
    print(f"{'':72}" + "".join(f"{label:>22}" for label in labels()))
    for metric in COUNTERS:
        print(f"{metric:72}" + "".join(f"{kernel.get(metric, '-'):>22}" for kernel in counted), flush=True)
    for label, lines in zip(labels(), instructions(source), strict=True):
        show(label, lines)


if __name__ == "__main__":
    main()
