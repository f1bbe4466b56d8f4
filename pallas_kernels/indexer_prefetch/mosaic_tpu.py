"""Index scores with prefetch as a TPU would do it: rows leave the host by asynchronous copies, hidden by the next seat.

It knows TPU memories (SMEM, VMEM, HBM, host), copies and semaphores. It does not know who asks; arguments are checked
here because nothing dispatches to this file: it is an experiment, run under TPU interpretation on a CPU with its races
looked for. It lowers for a TPU, where it has never run. Interpreted, the host pool is handed over in device memory (jax
0.11.2 lowers no interpreter with a pinned argument); the kernel is told that it lies on the host all the same.

What it means is `reference.py`, but for the order of float sums. One core walks over (seat, page) in order:

    page n of seat b       keys and slot numbers, fetched by Pallas a page ahead
      score                a product on the matrix unit, the scores of the page to HBM
      find                 the verdicts on 64 positions, as bits of two scalars
      start                a copy host -> landing[b % 2] for each candidate under the cap; nobody waits
    last page of seat b    seat b - 1 is finished: wait for its copies, send landing[(b - 1) % 2] to HBM

The two landing buffers are what makes the overlap: copies of seat b, those of its last page too, have all of seat
b + 1's scoring to arrive. A buffer has three states, and a semaphore guards each change that another engine makes:

    free --start--> landing --`landed`, once a row--> whole --finish--> leaving --`left`, once--> free

The limit is max(scoring, link), as for the GPU kernel, plus the last seat's copies, which nothing hides. A TPU has no
fetch-add and needs none: one core counts, so the staged candidates are the lowest positions, as in the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_prefetch.reference import NO_ROW, NO_SLOT, Prefetched
from pallas_kernels.indexer_scores.reference import PAGE

WORD = 32  # verdicts in a scalar
BUFFERS = 2  # of landing rows: one seat's are filled while the other's arrive and leave


class Numbers(NamedTuple):
    """In SMEM before the kernel starts; also what the fetches of blocks are steered by."""

    page_numbers: Any  # i32[B, N]
    visible: Any  # i32[B, T]
    threshold: Any  # f32[B]
    lengths: Any  # i32[B]
    cap: Any  # i32[B]
    layer: Any  # i32[1]


class Blocks(NamedTuple):
    """In VMEM, brought by Pallas for each step; the host pool stays where it is."""

    query: Any  # [1, T * G, D]
    weights: Any  # f32[1, T, G]
    keys: Any  # [1, PAGE, D]
    slots: Any  # i32[1, 1, PAGE]
    host_pool: Any  # [L, N_H, *record], host memory


class Results(NamedTuple):
    scores: Any  # f32[1, 1, T, PAGE], VMEM: half a vector register's lanes, so pages get an axis of their own
    rows: Any  # i32[B, S], SMEM
    count: Any  # i32[B], SMEM
    refused: Any  # i32[B], SMEM
    records: Any  # [B, S, *record], HBM


class Scratch(NamedTuple):
    landing: Any  # [BUFFERS, S, *record], VMEM
    landed: Any  # a semaphore for each buffer: its rows have arrived
    left: Any  # a semaphore for each buffer: it may be filled again


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
    interpret: Any = False,
) -> Prefetched:
    """The contract of `dispatch.indexer_prefetch`; `interpret` are the parameters of the TPU interpreter, or False.

    Covers keys in bf16 or f32 and whole pages of slots; NotImplementedError says what it does not cover. Of several
    candidates the lowest positions are staged, in ascending order.
    """
    seats, rows, heads, width = query.shape
    if pages.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"keys are {pages.dtype}, and bfloat16 and float32 pages are supported on a TPU")
    if staging < 1 or slot_of.shape[0] % PAGE:
        raise NotImplementedError(
            f"staging is {staging} and there are {slot_of.shape[0]} host rows, but at least 1 place and a multiple of "
            f"{PAGE} rows are supported"
        )
    slot_pages = slot_of.reshape(-1, 1, PAGE)
    record = host_pool.shape[2:]

    def page_of(pool_pages: int):
        """Page n of seat b; a number that is no page reads some page, of which nothing counts."""
        return lambda b, n, numbers, *_: (jnp.clip(numbers[b, n], 0, pool_pages - 1), 0, 0)

    def whole(memory: Any) -> pl.BlockSpec:
        return pl.BlockSpec(memory_space=memory)

    brought = Blocks(
        query=pl.BlockSpec((1, rows * heads, width), lambda b, n, *_: (b, 0, 0)),
        weights=pl.BlockSpec((1, rows, heads), lambda b, n, *_: (b, 0, 0)),
        keys=pl.BlockSpec((1, PAGE, width), page_of(pages.shape[0])),
        slots=pl.BlockSpec((1, 1, PAGE), page_of(slot_pages.shape[0])),
        host_pool=whole(pl.HOST),
    )
    taken = Results(
        scores=pl.BlockSpec((1, 1, rows, PAGE), lambda b, n, *_: (b, n, 0, 0)),
        rows=whole(pltpu.SMEM),
        count=whole(pltpu.SMEM),
        refused=whole(pltpu.SMEM),
        records=whole(pltpu.HBM),
    )
    scratch = Scratch(
        landing=pltpu.VMEM((BUFFERS, staging, *record), host_pool.dtype),
        landed=pltpu.SemaphoreType.DMA((BUFFERS,)),
        left=pltpu.SemaphoreType.DMA((BUFFERS,)),
    )
    shapes = Results(
        scores=jax.ShapeDtypeStruct((seats, page_numbers.shape[1], rows, PAGE), jnp.float32),
        rows=jax.ShapeDtypeStruct((seats, staging), jnp.int32),
        count=jax.ShapeDtypeStruct((seats,), jnp.int32),
        refused=jax.ShapeDtypeStruct((seats,), jnp.int32),
        records=jax.ShapeDtypeStruct((seats, staging, *record), host_pool.dtype),
    )
    numbers = Numbers(page_numbers, visible, threshold, lengths, cap, jnp.asarray(layer, jnp.int32).reshape(1))
    blocks = Blocks(
        query.astype(pages.dtype).reshape(seats, rows * heads, width), weights, pages, slot_pages, host_pool
    )
    # Pallas compares containers by type and accepts tuples only.
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(numbers),
        grid=(seats, page_numbers.shape[1]),
        in_specs=tuple(brought),
        out_specs=tuple(taken),
        scratch_shapes=tuple(scratch),
    )
    call = pl.pallas_call(
        _kernel, out_shape=tuple(shapes), grid_spec=grid, interpret=interpret, name="score_and_prefetch"
    )
    made = Results(*call(*numbers, *blocks))
    scores = made.scores.swapaxes(1, 2).reshape(seats, rows, -1)
    return Prefetched(scores, made.rows, made.records, made.count, made.refused)


def _kernel(*references: Any) -> None:
    """One page of one seat; the order of a step is that of the module's sketch."""
    parts, at = [], 0
    for kind in (Numbers, Blocks, Results, Scratch):
        parts.append(kind(*references[at : at + len(kind._fields)]))
        at += len(kind._fields)
    numbers, blocks, results, scratch = parts
    seat, page = pl.program_id(0), pl.program_id(1)

    @pl.when(page == 0)
    def _():
        open_buffer(seat, results, scratch)

    scores = score(seat, page, numbers, blocks)
    results.scores[0, 0] = scores
    start(seat, page, find(seat, page, scores, numbers, blocks), numbers, blocks, results, scratch)

    @pl.when(page == pl.num_programs(1) - 1)
    def _():
        @pl.when(seat > 0)
        def _():
            finish(seat - 1, results, scratch)

        @pl.when(seat == pl.num_programs(0) - 1)
        def _():
            finish(seat, results, scratch)
            for one in range(BUFFERS):  # nothing may be under way when a kernel ends

                @pl.when(seat - one >= 0)
                def _(one=one):
                    wait_until_left(seat - one, results, scratch)


def open_buffer(seat: Any, results: Results, scratch: Scratch) -> None:
    """The seat's landing buffer is free, its list empty."""

    @pl.when(seat >= BUFFERS)
    def _():
        wait_until_left(seat - BUFFERS, results, scratch)

    results.count[seat] = 0
    results.refused[seat] = 0

    @pl.loop(0, results.rows.shape[1])
    def _(place):
        results.rows[seat, place] = NO_ROW


def score(seat: Any, page: Any, numbers: Numbers, blocks: Blocks) -> jax.Array:
    """f32[T, PAGE]: the scores of this page, -inf where a query row does not see."""
    rows, heads = blocks.weights.shape[1:]
    products = lax.dot_general(
        blocks.query[0],
        blocks.keys[0],
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if blocks.keys.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    products = jnp.maximum(products, 0.0).reshape(rows, heads, PAGE)
    scores = jnp.sum(products * blocks.weights[0][..., None], axis=1)
    position = page * PAGE + lax.broadcasted_iota(jnp.int32, (1, PAGE), 1)
    by_row = [jnp.where(position < numbers.visible[seat, row], scores[row : row + 1], -jnp.inf) for row in range(rows)]
    return jnp.concatenate(by_row, axis=0)


class Found(NamedTuple):
    """Candidates of a page. A scalar core cannot read a vector, so it is told in scalars."""

    words: tuple[jax.Array, ...]  # i32[] each: bit i of word w stands for position WORD * w + i
    total: jax.Array  # i32[]


def find(seat: Any, page: Any, scores: jax.Array, numbers: Numbers, blocks: Blocks) -> Found:
    """Who is worth copying: old, absent, and above the threshold for any query row."""
    inside = lax.broadcasted_iota(jnp.int32, (1, PAGE), 1)
    number = numbers.page_numbers[seat, page]
    is_page = (number >= 0) & (number < blocks.host_pool.shape[1] // PAGE)
    is_old = page * PAGE + inside < jnp.where(is_page, numbers.lengths[seat], 0)
    passes = jnp.max(jnp.where(scores > numbers.threshold[seat], 1, 0), axis=0, keepdims=True)
    is_candidate = (passes > 0) & is_old & (blocks.slots[0] == NO_SLOT)
    bits = jnp.where(is_candidate, 1 << inside % WORD, 0)
    words = tuple(jnp.sum(jnp.where(inside // WORD == word, bits, 0)) for word in range(PAGE // WORD))
    return Found(words, jnp.sum(is_candidate.astype(jnp.int32)))


def start(
    seat: Any, page: Any, found: Found, numbers: Numbers, blocks: Blocks, results: Results, scratch: Scratch
) -> None:
    """Sends for the candidates of this page, while there is room under the cap; the others are counted."""
    limit = jnp.clip(numbers.cap[seat], 0, results.rows.shape[1])
    first_row = numbers.page_numbers[seat, page] * PAGE
    before = place = results.count[seat]
    for word, verdicts in enumerate(found.words):

        def one(carry, word=word):
            left, place = carry
            row = first_row + WORD * word + (WORD - 1) - lax.clz(left & -left)  # of the lowest bit that is set
            results.rows[seat, place] = row
            row_copy(seat, place, row, numbers.layer[0], blocks, scratch).start()
            return left & (left - 1), place + 1

        _, place = lax.while_loop(lambda carry: (carry[0] != 0) & (carry[1] < limit), one, (verdicts, place))
    results.count[seat] = place
    results.refused[seat] = results.refused[seat] + found.total - (place - before)


def row_copy(seat: Any, place: Any, row: Any, layer: Any, blocks: Blocks, scratch: Scratch) -> Any:
    buffer = seat % BUFFERS
    return pltpu.make_async_copy(
        blocks.host_pool.at[layer, row], scratch.landing.at[buffer, place], scratch.landed.at[buffer]
    )


def finish(seat: Any, results: Results, scratch: Scratch) -> None:
    """Once all of the seat's rows have arrived they leave for HBM, together; nobody waits for that here."""
    wait_until_landed(seat, results, scratch)
    leaving(seat, results, scratch).start()


def wait_until_landed(seat: Any, results: Results, scratch: Scratch) -> None:
    buffer = seat % BUFFERS

    @pl.loop(0, results.count[seat])
    def _(place):
        row = scratch.landing.at[buffer, place]
        pltpu.make_async_copy(row, row, scratch.landed.at[buffer]).wait()  # a row's worth of bytes


def leaving(seat: Any, results: Results, scratch: Scratch) -> Any:
    buffer = seat % BUFFERS
    return pltpu.make_async_copy(scratch.landing.at[buffer], results.records.at[seat], scratch.left.at[buffer])


def wait_until_left(seat: Any, results: Results, scratch: Scratch) -> None:
    leaving(seat, results, scratch).wait()
