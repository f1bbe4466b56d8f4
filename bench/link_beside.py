"""What slows rows from the host down: their order, and what the GPU does beside the gather. On an H200, 15 s.

    python -m bench.link_beside

Records of 656 bytes from a region of 1.4 GB of pinned memory that the launches before have not read, by a plain kernel
of 16 blocks; another kernel has the other multiprocessors. It knows orders and neighbours. It knows no cache: that the
prefetch role of `pallas_kernels.indexer_prefetch` is such a gather in such company is said there.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from bench import gpu_timing, harness, on_the_spot

ROWS, LAYERS, PAGE, SEATS, WINDOWS = 2**21, 3, 64, 16, 32
COUNTS = (3_277, 16_384)  # a tenth and half of 16 x 2,048
REPEATS, WARMUP = 9, 2
BESIDE = ("nothing", "arithmetic", "the L2", "device memory")
FILE = "gpu_recall.jsonl"


def orders(random: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """i32[count] distinct rows, the same ones in every order."""
    rows = random.choice(ROWS, count, replace=False).astype(np.int32)
    seat_of_page = random.permutation(ROWS // PAGE) % SEATS
    return {
        "no order": rows,
        f"{WINDOWS} windows, no order inside": rows[np.argsort(rows // (ROWS // WINDOWS), kind="stable")],
        f"ascending in each of {SEATS} seats, pages scattered": rows[np.lexsort((rows, seat_of_page[rows // PAGE]))],
        "ascending": np.sort(rows),
    }


def main() -> None:
    if gpu_timing.refuses((), sys.argv[1:]):
        sys.exit(2)
    library = on_the_spot.build("link_beside.cu", {}, "-O3")
    check(library.Prepare(LAYERS, ROWS, max(COUNTS)))
    random = np.random.default_rng(0)
    print(f"{'rows a us; beside the gather:':54}" + "".join(f"{name:>16}" for name in BESIDE))
    for count in COUNTS:
        drawn = [orders(random, count) for _ in range(WARMUP + REPEATS)]
        for order in drawn[0]:
            rates = []
            for beside, name in enumerate(BESIDE):
                times = [time(library, each[order], call % LAYERS, beside) for call, each in enumerate(drawn)]
                taken = harness.summarise(times[WARMUP:])
                rates.append(count / taken.median)
                harness.record(
                    value=taken,
                    unit="us",
                    file=FILE,
                    name=f"gather of {count} rows of 656 B, {order}, beside {name}",
                    shapes=dict(rows=count, bytes=656, order=order, beside=name),
                    method=f"CUDA events around the kernel, {REPEATS} calls, median; L2 overwritten; other rows at "
                    f"each call, {LAYERS} regions of {ROWS} rows in turn",
                    notes=f"{rates[-1]:.1f} rows a us",
                )
            print(f"{count:6} {order:47}" + "".join(f"{rate:16.1f}" for rate in rates), flush=True)


def time(library: ctypes.CDLL, rows: np.ndarray, layer: int, beside: int) -> float:
    """us"""
    held, us = np.ascontiguousarray(rows), ctypes.c_float()
    check(library.Time(held.ctypes.data_as(ctypes.c_void_p), held.size, layer, beside, ctypes.byref(us)))
    return us.value


def check(error: int) -> None:
    if error:
        sys.exit(f"CUDA refused with error {error}; `cuda.h` has its name")


if __name__ == "__main__":
    main()
