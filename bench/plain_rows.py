"""Plain kernels that move rows, for the library's to be held to, and the library's own kernel in other settings.

It knows how to compile and register plain_rows.cu on the spot, and what its targets take. It does not know what is
timed. Importing it compiles nothing; the functions are called under `jax.jit` after `build()`, on a GPU or in a compile
for one.

The pool is [L, N_H, *record] in pinned host memory, records of a multiple of 16 bytes; numbers are in range and
distinct where they name a place to write: nothing is checked.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np

from bench import on_the_spot

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "bench_plain_gather": "PlainGatherCuda",
    "bench_plain_scatter": "PlainScatterCuda",
    "bench_moved_gather": "MovedGatherCuda",
    "bench_moved_scatter": "MovedScatterCuda",
}


@functools.cache
def build() -> None:
    """Compiles the kernels for sm_90a (about 15 s) and registers them; RuntimeError without nvcc."""
    folders = ("-I", str(ROOT / "ffi" / "src"), "-I", str(ROOT / "ffi" / "include"))
    on_the_spot.build("plain_rows.cu", TARGETS, "-O3", *folders)


def plain_gather(
    records: jax.Array, pool: jax.Array, layer: jax.Array, rows: jax.Array, slots: jax.Array, *, blocks: int
) -> jax.Array:
    """`records` with pool[layer, rows[m]] in slots[m]; one warp a row, `blocks` of 1024 threads."""
    return _gather("bench_plain_gather", records, pool, layer, rows, slots, blocks=np.int64(blocks))


def moved_gather(
    records: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    rows: jax.Array,
    slots: jax.Array,
    *,
    blocks: int,
    merged: int,
    in_stripes: bool,
) -> jax.Array:
    """The same by the library's kernel: a warp moves `merged` rows at once (1, 2, or 4 of at most 1024 bytes) where
    there are more rows than warps; `in_stripes` has all blocks go through the list side by side."""
    settings = dict(blocks=np.int64(blocks), merged=np.int64(merged), in_stripes=np.int64(in_stripes))
    return _gather("bench_moved_gather", records, pool, layer, rows, slots, **settings)


def plain_scatter(pool: jax.Array, records: jax.Array, rows: jax.Array, *, blocks: int) -> jax.Array:
    """`pool` with records[l, m] in row rows[m] of every layer; one warp a row, `blocks` of 1024 threads."""
    return _scatter("bench_plain_scatter", pool, records, rows, blocks=np.int64(blocks))


def moved_scatter(
    pool: jax.Array, records: jax.Array, rows: jax.Array, *, blocks: int, merged: int, in_stripes: bool
) -> jax.Array:
    """The same by the library's kernel, with the settings of `moved_gather`."""
    settings = dict(blocks=np.int64(blocks), merged=np.int64(merged), in_stripes=np.int64(in_stripes))
    return _scatter("bench_moved_scatter", pool, records, rows, **settings)


def _gather(target: str, records, pool, layer, rows, slots, **attributes) -> jax.Array:
    call = jax.ffi.ffi_call(target, jax.typeof(records), input_output_aliases={0: 0})
    return call(records, pool, layer, rows, slots, **attributes)


def _scatter(target: str, pool, records, rows, **attributes) -> jax.Array:
    return jax.ffi.ffi_call(target, jax.typeof(pool), input_output_aliases={0: 0})(pool, records, rows, **attributes)
