"""Recall and write-back on a GPU: right beyond 2^31 bytes, and how fast beside plain kernels on the same pool and rows.

    python -m bench.recall [check] [bench] [large]         (nothing given: check and bench, about 120 s)

    check   write-back, read, recall and copy against NumPy, over rows on both sides of 2^31 and 2^32 bytes
    bench   the claims B.recall_* and B.write_back_ratio on pools of 9 and 15 GiB
    large   the recall ratio again on a pool of 56 GiB; pinning it takes about half a minute

It knows shapes and claims. What is moved and how it is timed stands in moving.py, the kernels that the library is held
to in plain_rows.cu; where the kernel's settings come from shows recall_tune.py.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import threading
import time

# XLA's own pool of pinned memory ends at 64 GB unless told otherwise, before it starts.
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")

import jax
import jax.numpy as jnp
import numpy as np

from bench import harness, plain_rows
from bench.moving import (
    HOST_ROWS,
    LAYERS,
    LINK,
    best_plain,
    clustered,
    gigabytes,
    library_recall,
    lists_of,
    made_pool,
    spread,
    time_recall,
    time_write_back,
)
from echo_jax import hostmem
from echo_jax.types import SOURCE_HOST

FILE = "gpu_recall.jsonl"
LARGE_LAYERS, LARGE_HOST_ROWS = 52, 1_000_000
RECORD_BYTES = (656, 1152)
ROWS = (40, 256, 2048, 16384)


# ---- check -----------------------------------------------------------------------------------------------------------


def check() -> None:
    """Every movement against NumPy; exits with the number of differing records unless it is 0."""
    differences = 0
    for record_bytes in RECORD_BYTES:
        holder = made_pool(record_bytes)
        layers, rows, words = holder[0].shape
        generator = np.random.default_rng(record_bytes)
        at_bytes = [limit // record_bytes + step for limit in (2**31, 2**32) for step in (-1, 0, 1)]
        special = [0, rows - 1, *(row % rows for row in at_bytes)]
        written = np.unique(np.concatenate([special, generator.integers(0, rows, 3000)])).astype(np.int32)
        values = generator.integers(0, 2**32, (layers, len(written), words), np.uint32)
        pointer = holder[0].unsafe_buffer_pointer()
        holder[0] = jax.jit(hostmem.write_back, donate_argnums=0)(holder[0], values, written)
        place = {int(row): index for index, row in enumerate(written)}

        def stored(layer: int, row: int, values=values, place=place):
            return values[layer, place[row]] if row in place else np.zeros(values.shape[2], np.uint32)

        asked = np.concatenate([written[::3], [-1, rows, 2**31 - 1, -(2**31)], written[:50]]).astype(np.int32)
        read = jax.jit(hostmem.read_rows)
        for layer in (0, layers // 2, layers - 1):
            found = np.asarray(read(holder[0], layer, asked))
            for index, row in enumerate(asked):
                differences += not np.array_equal(found[index], stored(layer, int(row)))

        slots_before = generator.integers(0, 2**32, (6000, words), np.uint32)
        new, staged = (generator.integers(0, 2**32, (size, words), np.uint32) for size in (70, 90))
        entries, count, layer = 5000, 4321, layers - 1
        wanted = np.where(generator.random(entries) < 0.1, -1, generator.choice(written, entries)).astype(np.int32)
        slots = np.where(generator.random(entries) < 0.1, 6000, generator.permutation(6000)[:entries]).astype(np.int32)
        source = generator.integers(-1, 170, entries).astype(np.int32)
        source[::2] = SOURCE_HOST
        expected = slots_before.copy()
        for row, slot, origin in zip(wanted[:count], slots[:count], source[:count], strict=True):
            if row >= 0 and slot < 6000 and origin < 160:
                given = new[origin] if 0 <= origin < 70 else staged[origin - 70]
                expected[slot] = stored(layer, int(row)) if origin == SOURCE_HOST else given
        recall = jax.jit(hostmem.recall, donate_argnums=0)
        found = np.asarray(recall(jnp.array(slots_before), holder[0], layer, count, wanted, slots, source, new, staged))
        differences += int((found != expected).any(axis=1).sum())

        source_rows, target_rows = (
            written[:500],
            np.setdiff1d(np.arange(rows - 2000, rows), written)[:500].astype(np.int32),
        )
        holder[0] = jax.jit(hostmem.copy_rows, donate_argnums=0)(holder[0], source_rows, target_rows)
        for layer in (0, layers - 1):
            found = np.asarray(read(holder[0], layer, target_rows))
            for index, row in enumerate(source_rows):
                differences += not np.array_equal(found[index], stored(layer, int(row)))
        if holder[0].unsafe_buffer_pointer() != pointer:
            sys.exit("the pool moved: a donated write-back or copy made another one")
    print(f"check: {differences} records differ", flush=True)
    if differences:
        sys.exit(1)


# ---- bench -----------------------------------------------------------------------------------------------------------

METHOD = (
    "CUPTI kernel times; launches visit layer after layer of a layer-first pool, each with rows of its own, ascending "
    "and uniform; the plain kernel (one warp a row, 16-byte loads) on the same rows, the better of two grids"
)


def recall_ratios(pools: list[jax.Array]) -> tuple[float, str]:
    """Prints the table and records a row for each shape; returns the worst ratio and where it was."""
    worst = (float("inf"), "")
    print(f"{'rows':>6} {'bytes':>6} {'plain us':>9} {'recall us':>9} {'ratio':>6} {'GB/s':>6} {'of link':>7}")
    for pool in pools:
        record_bytes = pool.shape[2] * 4
        for rows in ROWS:
            lists = lists_of(spread(rows, pool.shape[1]), rows)
            plain = best_plain(
                lambda blocks, pool=pool, lists=lists: time_recall(
                    functools.partial(plain_rows.plain_gather, blocks=blocks), pool, lists
                ),
                rows,
            )
            ours = time_recall(library_recall, pool, lists)
            ratio, rate = plain.median / ours.median, gigabytes(rows, record_bytes, ours)
            print(
                f"{rows:6} {record_bytes:6} {plain.median:9.1f} {ours.median:9.1f} {ratio:6.2f} {rate:6.1f} "
                f"{rate * 1e9 / LINK:7.2f}",
                flush=True,
            )
            harness.record(
                value=ours,
                unit="us",
                file=FILE,
                name=f"recall of {rows} rows of {record_bytes} B, pool of {pool.nbytes / 2**30:.0f} GiB",
                shapes={"rows": rows, "bytes": record_bytes, "pool": list(pool.shape)},
                fraction_of_limit=rate * 1e9 / LINK,
                method=METHOD,
                notes=f"plain kernel {plain.median:.1f} us, ratio {ratio:.3f}; limit: the link at 54 GB/s",
            )
            worst = min(worst, (ratio, f"{rows} rows of {record_bytes} B, {pool.nbytes / 2**30:.0f} GiB"))
    return worst


def record_ratio(worst: tuple[float, str]) -> None:
    harness.record(
        "B.recall_ratio",
        value=worst[0],
        unit="ratio",
        file=FILE,
        method=METHOD,
        shapes={"rows": list(ROWS), "bytes": list(RECORD_BYTES)},
        notes=f"worst at {worst[1]}",
    )
    print(f"B.recall_ratio {worst[0]:.3f} ({worst[1]})", flush=True)


def bench() -> None:
    plain_rows.build()
    record_ratio(recall_ratios([made_pool(record_bytes)[0] for record_bytes in RECORD_BYTES]))
    write_back()
    recall_clustered()
    contended()


def write_back() -> None:
    """[B.write_back_ratio]: 2048 records, 128 in each of 16 layers, one launch."""
    for record_bytes in RECORD_BYTES:
        holder, each = made_pool(record_bytes), 2048 // LAYERS
        records = jnp.zeros((LAYERS, each, record_bytes // 4), jnp.uint32)
        lists = lists_of(spread(each, HOST_ROWS), each)
        plain = best_plain(
            lambda blocks, holder=holder, lists=lists, records=records: time_write_back(
                functools.partial(plain_rows.plain_scatter, blocks=blocks), holder, lists, records
            ),
            2048,
        )
        ours = time_write_back(hostmem.write_back, holder, lists, records)
        ratio, rate = plain.median / ours.median, gigabytes(2048, record_bytes, ours)
        print(
            f"write-back 2048 x {record_bytes} B: plain {plain.median:.1f} us, {ours.median:.1f} us, ratio {ratio:.2f}"
        )
        harness.record(
            "B.write_back_ratio" if record_bytes == 1152 else None,
            value=ratio,
            unit="ratio",
            file=FILE,
            name=f"write-back of 2048 records of {record_bytes} B over a plain scatter",
            method=METHOD,
            shapes={"layers": LAYERS, "rows": each, "bytes": record_bytes},
            fraction_of_limit=rate * 1e9 / LINK,
            notes=f"plain {plain.median:.1f} us, write-back {ours.median:.1f} us; fraction: of the link at 54 GB/s",
        )


def recall_clustered() -> None:
    """[B.recall_clustered_us]: ascending runs of neighbours within 128K positions, as selected sets miss them."""
    for record_bytes, mean_run in itertools.product(RECORD_BYTES, (1, 4, 16)):
        pool, rows = made_pool(record_bytes)[0], 2048
        ours = time_recall(library_recall, pool, lists_of(clustered(rows, HOST_ROWS, mean_run), rows))
        rate = gigabytes(rows, record_bytes, ours)
        print(
            f"clustered 2048 x {record_bytes} B, runs of {mean_run}: {ours.median:.1f} us, {rate:.1f} GB/s", flush=True
        )
        harness.record(
            "B.recall_clustered_us" if (record_bytes, mean_run) == (1152, 4) else None,
            value=ours,
            unit="us",
            file=FILE,
            name=f"recall of 2048 rows of {record_bytes} B in runs of {mean_run} on average",
            shapes={"rows": rows, "bytes": record_bytes, "mean run": mean_run, "positions": 131_072},
            fraction_of_limit=rate * 1e9 / LINK,
            method=METHOD.partition(";")[0] + "; rows drawn: runs of geometric length, uniform over one request's 128K "
            "positions (no recorded trace)",
        )


def contended() -> None:
    """[B.recall_contended_ratio]: recall beside copies of CPU memory on all cores, and beside copies off the GPU."""
    pool = made_pool(1152)[0]
    lists = lists_of(spread(2048, HOST_ROWS), 2048)
    alone = time_recall(library_recall, pool, lists)
    hog = "import numpy as np\na, b = np.ones(2**26), np.ones(2**26)\nwhile True: np.copyto(a, b)"
    hogs = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range(len(os.sched_getaffinity(0)) - 1)]
    try:
        time.sleep(3)  # until their memory is touched
        beside_hogs = time_recall(library_recall, pool, lists)
    finally:
        for process in hogs:
            process.kill()
            process.wait()
    bulk = jnp.zeros((2**28,), jnp.uint32)
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    stop, copied = threading.Event(), [0]

    def copy_off():
        while not stop.is_set():
            jax.block_until_ready(jax.device_put(bulk, on_host))
            copied[0] += bulk.nbytes

    thread = threading.Thread(target=copy_off)
    thread.start()
    started = time.perf_counter()
    try:
        beside_copy = time_recall(library_recall, pool, lists)
    finally:
        copy_rate = copied[0] / (time.perf_counter() - started) / 1e9
        stop.set()
        thread.join()
    ratios = [alone.median / timed.median for timed in (beside_hogs, beside_copy)]
    notes = (
        f"alone {alone.median:.1f} us; beside {len(hogs)} processes copying memory {beside_hogs.median:.1f} us "
        f"({ratios[0]:.2f}); "
        f"beside device-to-host copies at {copy_rate:.0f} GB/s {beside_copy.median:.1f} us ({ratios[1]:.2f})"
    )
    print(f"contended: {notes}", flush=True)
    harness.record(
        "B.recall_contended_ratio",
        value=min(ratios),
        unit="ratio",
        file=FILE,
        method=METHOD.partition(";")[0] + "; the worse of the two",
        shapes={"rows": 2048, "bytes": 1152},
        notes=notes,
    )


# ---- large -----------------------------------------------------------------------------------------------------------


def large() -> None:
    """The ratio on the largest pool; [B.recall_ratio] again if it is worse than what `bench` recorded before."""
    plain_rows.build()
    worst = recall_ratios([made_pool(1152, LARGE_LAYERS, LARGE_HOST_ROWS)[0]])
    results = harness.Path(os.environ.get("ECHO_RESULTS", harness.RESULTS))
    before = [row.value for row, _ in harness.read_rows(results) if row.claim == "B.recall_ratio"]
    if not before or worst[0] < before[-1]:
        record_ratio(worst)


PARTS = {"check": check, "bench": bench, "large": large}


def main() -> None:
    wanted = sys.argv[1:] or ["check", "bench"]
    if unknown := sorted(set(wanted) - set(PARTS)):
        sys.exit(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    if jax.default_backend() != "gpu":
        sys.exit(f"this needs an NVIDIA GPU; jax sees {jax.devices()[0].platform}")
    for name in wanted:
        started = time.perf_counter()
        PARTS[name]()
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
