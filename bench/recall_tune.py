"""Where the settings of the kernel that moves rows come from: other grids, other merging, another order, on a GPU.

    python -m bench.recall_tune         about 60 s; prints microseconds, records nothing

It knows the settings plain_rows.cu offers; what is measured and how stands in moving.py.
"""

from __future__ import annotations

import functools
import itertools

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

RECORD_BYTES = (656, 1152)


def main() -> None:
    """Prints us for grids, merging and orders of the library's kernel; shuffled lists show what ascending ones save."""
    plain_rows.build()
    print("tune: rows bytes | grid, rows a warp merges, s(triped) or p(arts) : us")
    for record_bytes, rows in itertools.product(RECORD_BYTES, (2048, 16384)):
        pool = made_pool(record_bytes)[0]
        merges = (1, 2, 4) if record_bytes <= 1024 else (1, 2)
        settings = [(blocks, merged, False) for blocks in (4, 8, 16, 32, 64) for merged in merges]
        settings += [(16, merges[-1], True), (32, 1, True)]
        lists, found = lists_of(spread(rows, HOST_ROWS), rows), []
        for blocks, merged, in_parts in settings:
            move = functools.partial(plain_rows.moved_gather, blocks=blocks, merged=merged, in_parts=in_parts)
            found.append((f"{blocks},{merged},{'p' if in_parts else 's'}", time_recall(move, pool, lists).median))
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
            move = functools.partial(plain_rows.moved_scatter, blocks=blocks, merged=merged, in_parts=False)
            found.append((f"{blocks},{merged}", time_write_back(move, holder, lists, records).median))
        print(
            f"write-back 2048 x {record_bytes} | " + "  ".join(f"{name}: {timed:.1f}" for name, timed in found),
            flush=True,
        )


if __name__ == "__main__":
    main()
