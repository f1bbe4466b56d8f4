"""Index scores with prefetch on a Hopper GPU: the roles of `indexer_scores`, and one that fetches while they score.

It knows which role is which warpgroup and what all of them are handed. The load and the math role are those of
`indexer_scores.mosaic_gpu`, whose code makes the bits of the scores; the prefetch role is `ahead.py`. Shapes are
checked, and tunings chosen, by the caller (`pallas_kernels.dispatch`). README.md beside this file has the sketch of the
pipeline, its limit, and what was tried.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels.indexer_prefetch import ahead
from pallas_kernels.indexer_prefetch.above import Above
from pallas_kernels.indexer_prefetch.ahead import Ahead, Watched
from pallas_kernels.indexer_prefetch.reference import WORD, Prefetched
from pallas_kernels.indexer_prefetch.shape import Shape
from pallas_kernels.indexer_prefetch.shape import Tuning as PrefetchTuning
from pallas_kernels.indexer_scores import mosaic_gpu as scores
from pallas_kernels.indexer_scores.mosaic_gpu import PAGE, WEIGHTS, WIDTH, Refs, Tuning


def score_and_prefetch(
    query: jax.Array,
    weights: jax.Array,
    pages: jax.Array,
    page_numbers: jax.Array,
    visible: jax.Array,
    threshold: jax.Array,
    lengths: jax.Array,
    cap: jax.Array,
    slot_of: jax.Array,
    host_pool: jax.Array,
    layer: jax.Array,
    staging: int,
    tuning: Tuning,
    interpret: Any = None,
    blank: tuple[jax.Array, jax.Array] | None = None,
    bound: jax.Array | None = None,
) -> Prefetched:
    """query .. visible as in `indexer_scores.mosaic_gpu.score_pages`, the others as in `dispatch.indexer_prefetch`.

    staging >= 1. Where a seat has more candidates than its cap, which of them are staged is the race's choice.
    """
    if tuning.pages_per_math != 1:
        raise ValueError(f"pages_per_math is {tuning.pages_per_math} but a verdict word holds a warp's share of 1 page")
    seats, rows, heads, _ = query.shape
    record = tuple(host_pool.shape[2:])
    shape = Shape(
        *(seats, rows, heads, page_numbers.shape[1], query.dtype == jnp.float8_e4m3fn),
        *(PrefetchTuning.of(tuning), interpret is not None),
        staging=staging,
        host_rows=host_pool.shape[1],
        record=record,
        record_bytes=math.prod(record) * host_pool.dtype.itemsize,
        keeps_above=bound is not None,
    ).fitted()
    # The same views of a page as in `score_pages`.
    keys = (pages,)
    if shape.is_fp8:
        codes = lax.bitcast_convert_type(pages, jnp.float8_e4m3fn).reshape(-1, PAGE + 2, WIDTH)
        keys = (
            codes,
            lax.bitcast_convert_type(pages.reshape(pages.shape[0], -1, 4), jnp.float32).reshape(-1, 33, PAGE),
        )
    candidates, listed = map(jax.new_ref, ahead.blank(seats, staging) if blank is None else blank)
    pool = _mosaic.host_as_device(host_pool)
    bounds = () if bound is None else (bound,)
    out, records, *above = _kernel(shape, host_pool.dtype, interpret)(
        *(query, weights, page_numbers, visible, threshold, lengths, cap, slot_of, pool, layer.reshape(1)),
        *(candidates, listed, *bounds, *keys),
    )
    total = jax.freeze(candidates) - ahead.NO_CANDIDATES
    count = jnp.minimum(total, jnp.clip(cap, 0, staging))
    return Prefetched(out, jax.freeze(listed), records, count, total - count, *above)


@functools.lru_cache(maxsize=64)
def _kernel(shape: Shape, record_type: Any, interpret: Any) -> Any:
    tuning, stages = shape.tuning, shape.stages
    key_type = jnp.float8_e4m3fn if shape.is_fp8 else jnp.bfloat16
    copies = 2 if shape.is_fp8 else 1
    scratch = dict(
        keys=_mosaic.wgmma_operand((stages, shape.tokens, WIDTH), key_type),
        queries=_mosaic.wgmma_operand((2, shape.rows, shape.heads, WIDTH), key_type),
        query_weights=plgpu.SMEM((2, shape.rows, WEIGHTS), jnp.float32),
        keys_full=plgpu.Barrier(num_arrivals=copies * shape.tile_pages, num_barriers=stages),
        keys_empty=plgpu.Barrier(num_arrivals=tuning.math, num_barriers=stages),
        query_full=plgpu.Barrier(num_arrivals=2 * shape.rows, num_barriers=2),
        query_empty=plgpu.Barrier(num_arrivals=tuning.math, num_barriers=2),
    )
    if shape.is_fp8:
        scratch["scales"] = plgpu.SMEM((stages, shape.tokens), jnp.float32)
    verdicts = ahead.scratch(shape)

    def indexer_prefetch(query, weights, page_numbers, visible, threshold, lengths, cap, slot_of, *rest, **buffers):
        pool, layer, candidates, listed, *rest = rest
        bound, key_pages, *rest = rest if shape.keeps_above else (None, *rest)
        *rest, above = rest if shape.keeps_above else (*rest, None)
        scale_pages, out, records = rest if shape.is_fp8 else (None, *rest)
        left = {"verdicts_cleared": None, "page_scored": None} | {name: buffers.pop(name) for name in verdicts}
        after = Ahead(threshold, lengths, cap, slot_of, pool, layer, candidates, listed, records, **left)
        watched = Watched(shape, out, after, Above(bound, above) if shape.keeps_above else None)
        buffers = {"scales": None, **buffers}
        refs = Refs(query, weights, page_numbers, visible, key_pages, scale_pages, watched, **buffers)
        role = lax.axis_index("role")

        @pl.when(role < tuning.math)
        def _():
            ahead.wait_for_clear(shape, after)
            scores.score(shape, refs, role * shape.tokens_per_math)

        @pl.when(role == tuning.math)
        def _():
            scores.load(shape, refs)

        @pl.when(role > tuning.math)
        def _():
            @pl.when(role == tuning.math + 1)
            def _():
                ahead.clear(shape, after)

            ahead.wait_for_clear(shape, after)
            ahead.prefetch(shape, after, page_numbers)

    above = jax.ShapeDtypeStruct((shape.seats, shape.rows, shape.page_count * PAGE // WORD), jnp.uint32)
    return plgpu.kernel(
        indexer_prefetch,
        out_type=(
            jax.ShapeDtypeStruct((shape.seats, shape.rows, shape.page_count * PAGE), jnp.float32),
            jax.ShapeDtypeStruct((shape.seats, shape.staging, *shape.record), record_type),
            *((above,) if shape.keeps_above else ()),
        ),
        grid=(tuning.blocks,),
        grid_names=("block",),
        num_threads=tuning.math + 1 + shape.fetchers,
        thread_name="role",
        scratch_types={**scratch, **verdicts},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe: threads only read what TMA writes; a verdict is one word, and what else is written nobody reads.
            unsafe_no_auto_barriers=True,
        ),
    )
