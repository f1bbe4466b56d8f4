"""Where the settings of the kernel that moves rows come from: other grids, other merging, another order, on a GPU.

    python -m bench.recall_tune             about 60 s; prints microseconds, records nothing
    python -m bench.recall_tune rounds      about 45 s, of which 32 nvcc and pools; shares beside stripes, staging

It knows the settings plain_rows.cu offers; what is measured and how stands in moving.py.
"""

from __future__ import annotations

import functools
import itertools
import sys

import jax
import jax.numpy as jnp

from bench import plain_rows
from bench.moving import (
    HOST_ROWS,
    LAYERS,
    library_recall,
    lists_of,
    made_pool,
    spread,
    time_recall,
    time_write_back,
)
from echo_jax import hostmem
from echo_jax.types import SOURCE_HOST

RECORD_BYTES = (656, 1152)
ROUNDS = (1632, 3280, 6560, 16384)  # 0.8, 1.6, 3.2 and 8 turns of 16 blocks that move four rows a warp


def staged_recall(of_staging: float, staging: int):
    """A recall whose rows lie in staging with probability `of_staging`; each launch counts `staging` records there."""

    def move(records, pool, layer, rows, slots):
        staged = jax.lax.slice_in_dim(records, 0, staging)
        there = jax.random.uniform(jax.random.key(0), rows.shape) < of_staging
        source = jnp.where(there, jnp.arange(rows.shape[0], dtype=jnp.int32) % staging, SOURCE_HOST)
        return hostmem.recall(records, pool, layer, jnp.int32(rows.shape[0]), rows, slots, source, records[:0], staged)

    return move


def nothing_missing(records, pool, layer, rows, slots):
    """A recall with a count of 0 beside a staging as long as the list."""
    staged, source = jax.lax.slice_in_dim(records, 0, rows.shape[0]), jnp.full(rows.shape, SOURCE_HOST, jnp.int32)
    return hostmem.recall(records, pool, layer, jnp.int32(0), rows, slots, source, records[:0], staged)


def rounds() -> None:
    """Prints us for contiguous shares and stripes, for lists half and wholly in staging, and for nothing to do."""
    plain_rows.build()
    print("rows bytes | shares, stripes, library; library with half and all rows staged, with none missing: us")
    for record_bytes, rows in itertools.product(RECORD_BYTES, ROUNDS):
        pool, merged = made_pool(record_bytes)[0], 4 if record_bytes <= 1024 else 2
        lists, found = lists_of(spread(rows, HOST_ROWS), rows), []
        for in_stripes in (False, True):
            move = functools.partial(plain_rows.moved_gather, blocks=16, merged=merged, in_stripes=in_stripes)
            found.append(time_recall(move, pool, lists).median)
        for move in (library_recall, staged_recall(0.5, rows), staged_recall(1.0, rows), nothing_missing):
            found.append(time_recall(move, pool, lists).median)
        print(f"{rows:6} {record_bytes:5} | " + " ".join(f"{timed:7.1f}" for timed in found), flush=True)


def main() -> None:
    """Prints us for grids, merging and orders of the library's kernel; shuffled lists show what ascending ones save."""
    plain_rows.build()
    print("tune: rows bytes | grid, rows a warp merges, s(triped) or p(arts: contiguous shares) : us")
    for record_bytes, rows in itertools.product(RECORD_BYTES, (2048, 16384)):
        pool = made_pool(record_bytes)[0]
        merges = (1, 2, 4) if record_bytes <= 1024 else (1, 2)
        settings = [(blocks, merged, False) for blocks in (4, 8, 16, 32, 64) for merged in merges]
        settings += [(16, merges[-1], True), (32, 1, True)]
        lists, found = lists_of(spread(rows, HOST_ROWS), rows), []
        for blocks, merged, in_stripes in settings:
            move = functools.partial(plain_rows.moved_gather, blocks=blocks, merged=merged, in_stripes=in_stripes)
            found.append((f"{blocks},{merged},{'s' if in_stripes else 'p'}", time_recall(move, pool, lists).median))
        shuffled = lists_of(
            lambda generator, rows=rows: generator.permutation(spread(rows, HOST_ROWS)(generator)), rows
        )
        found.append(("library shuffled", time_recall(library_recall, pool, shuffled).median))
        found.append(("library", time_recall(library_recall, pool, lists).median))
        print(f"{rows:6} {record_bytes:5} | " + "  ".join(f"{name}: {timed:.1f}" for name, timed in found), flush=True)
    for record_bytes in RECORD_BYTES:
        holder, each, found = made_pool(record_bytes), 2048 // LAYERS, []
        records, lists = (
            jnp.zeros((LAYERS, each, record_bytes // 4), jnp.uint32),
            lists_of(spread(each, HOST_ROWS), each),
        )
        for blocks, merged in itertools.product((4, 16, 32, 64), (1, 2)):
            move = functools.partial(plain_rows.moved_scatter, blocks=blocks, merged=merged, in_stripes=False)
            found.append((f"{blocks},{merged}", time_write_back(move, holder, lists, records).median))
        print(
            f"write-back 2048 x {record_bytes} | " + "  ".join(f"{name}: {timed:.1f}" for name, timed in found),
            flush=True,
        )


if __name__ == "__main__":
    rounds() if sys.argv[1:] == ["rounds"] else main()
