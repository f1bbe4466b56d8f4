"""Does compute-sanitizer find anything in the sparse MLA kernels? memcheck, racecheck and synccheck, side by side.

    python -m bench.sparse_mla_sanitize [--limit 38]      about 30 s on one GPU

Each tool runs `bench.sparse_mla once`: bf16 and FP8 records, lists of four tiles and of two, cut into four parts of
which two join in a cluster and two are combined. memcheck must also find the row behind the pool that
`bench.sparse_mla beyond` lists, by the same filter on kernels' names: where it finds nothing there, nothing found says
nothing. The other two tools have no such control here.

Nothing is recorded where a tool did not end in time or a result was wrong; the exit code says so.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bench import harness, sanitize

TOOLS = ("memcheck", "racecheck", "synccheck")


def start(sanitizer: str, tool: str, part: str, folder: Path) -> sanitize.Run:
    program = [sys.executable, "-m", "bench.sparse_mla", part]
    return sanitize.start(sanitizer, tool, f"{tool}_{part}", "kns=mosaic_gpu_kernel", program, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=float, default=38.0, help="seconds until what still runs is stopped")
    deadline = time.monotonic() + parser.parse_args().limit
    sanitizer = sanitize.tool_path("compute-sanitizer")
    folder = Path(tempfile.mkdtemp(prefix="echo_sanitize_"))
    runs = [start(sanitizer, tool, "once", folder) for tool in TOOLS]
    control = start(sanitizer, "memcheck", "beyond", folder)

    problems, said, total = [], [], 0
    for tool, run in zip(TOOLS, runs, strict=True):
        count, line, against = run.reported(tool, deadline, "ended", "a result was wrong")
        said.append(line)
        problems += against
        total += count
    seeded, _, _ = control.found(deadline)
    print(f"a row behind the pool: memcheck has {seeded} findings", flush=True)
    if not seeded:
        problems.append("memcheck does not find the row behind the pool")
    if problems:
        sys.exit("nothing is recorded: " + "; ".join(problems))

    import jax  # for the machine's name; the others have gone by now

    jax.devices()
    harness.record(
        name="compute-sanitizer findings, sparse MLA: memcheck, racecheck and synccheck",
        value=total,
        unit="",
        file="sparse_mla.jsonl",
        method="sum of the tools' findings over a small call of each record format; memcheck finds a seeded fault",
        notes="; ".join(said),
    )


if __name__ == "__main__":
    main()
