"""Index scores on a Hopper GPU: one persistent kernel, a loading warpgroup and several that do the maths.

It knows tiles, stages, barriers and what TMA and wgmma want. The meaning of the result is `reference.py`; shapes are
checked, and tunings chosen, by the caller (`pallas_kernels.dispatch`). README.md beside this file has the sketch of
the pipeline, its limit, and what was tried.

Work is cut into tiles: (seat, `tokens` consecutive positions), and `run` neighbouring tiles of a seat are a run. Run n
of all seats together belongs to block n mod blocks, so that one long seat and a hundred short ones both fill the chip.
A tile with a visible position is *scored*: its pages are loaded and multiplied. Any other is *hidden*: -inf is written
and nothing is read.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels.indexer_scores.once import copy_once

PAGE = 64  # keys in a page
WIDTH = 128  # values in a key
WEIGHTS = 64  # weights of a query row as shared memory holds them: TMA moves multiples of 128 bytes
SCALE_ROW = PAGE * WIDTH // (4 * PAGE)  # where a page's scales are, in rows of 64 floats
SHARED_BYTES = 232_448 - 4096  # of one block, less barriers, alignment and what Mosaic keeps for itself
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # one value a token, one value a head


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut; any valid choice gives the same bits.

    pages_per_math   pages that one math warpgroup scores of each tile
    math             math warpgroups
    stages           tiles of keys in shared memory at once; fewer are used where they do not fit
    lookahead        tiles whose page numbers are read together, while the ones before are loaded
    blocks           thread blocks; the H200 has 132 multiprocessors, and one block fills one
    run              neighbouring tiles of a seat that one block takes: its query is loaded once for them
    once             keys are the first that the L2 gives up, so that they do not drive out what others left there
    """

    pages_per_math: int = 1
    math: int = 4
    stages: int = 6
    lookahead: int = 4
    blocks: int = 132
    run: int = 1
    once: bool = False


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about one kernel."""

    seats: int
    rows: int  # query rows a seat
    heads: int
    page_count: int  # of a seat
    is_fp8: bool
    tuning: Tuning
    is_interpreted: bool

    @property
    def tile_pages(self) -> int:
        return self.tuning.pages_per_math * self.tuning.math

    @property
    def tiles(self) -> int:
        """Of a seat; the last one may be cut."""
        return -(-self.page_count // self.tile_pages)

    @property
    def runs(self) -> int:
        """Of a seat; the last one may be cut: tiles beyond the seat's last have nothing to score and no place to
        write to."""
        return -(-self.tiles // self.tuning.run)

    @property
    def tokens(self) -> int:
        return self.tile_pages * PAGE

    @property
    def tokens_per_math(self) -> int:
        return self.tuning.pages_per_math * PAGE

    @property
    def stages(self) -> int:
        """As many as are asked for and fit."""
        queries = 2 * self.rows * (self.heads * WIDTH * (1 if self.is_fp8 else 2) + WEIGHTS * 4)
        bytes_per_stage = self.tokens * (WIDTH + 4 if self.is_fp8 else 2 * WIDTH)
        return min(self.tuning.stages, (SHARED_BYTES - queries) // bytes_per_stage)

    def fitted(self) -> Shape:
        """The same with tiles small enough that loading and maths have a stage each: many query rows take much room."""
        shape = self
        while shape.stages < 2:
            if shape.tuning.math == 1:
                raise NotImplementedError(
                    f"{self.rows} query rows of {self.heads} heads leave shared memory for {shape.stages} stages of "
                    f"{shape.tuning.pages_per_math} pages, and 2 are needed; lower pages_per_math"
                )
            shape = dataclasses.replace(shape, tuning=dataclasses.replace(shape.tuning, math=shape.tuning.math // 2))
        return shape


@dataclasses.dataclass(frozen=True)
class Refs:
    """What both roles see: arrays in device memory, buffers in shared memory, and the barriers that guard these."""

    query: Any
    weights: Any
    page_numbers: Any
    visible: Any
    key_pages: Any
    scale_pages: Any  # None for bf16
    out: Any
    keys: Any  # [stages, tokens, WIDTH]
    scales: Any  # [stages, tokens], None for bf16
    queries: Any  # [2, rows, heads, WIDTH]: of this seat, and of the next one
    query_weights: Any  # [2, rows, WEIGHTS]
    keys_full: Any
    keys_empty: Any
    query_full: Any
    query_empty: Any


def score_pages(
    query: jax.Array,
    weights: jax.Array,
    pages: jax.Array,
    page_numbers: jax.Array,
    visible: jax.Array,
    tuning: Tuning,
    interpret: Any = None,
) -> jax.Array:
    """f32[B, T, 64 N] scores; -inf at positions that a row does not see.

    query          e4m3 or bf16 [B, T, G, 128], G a multiple of 8 up to 64
    weights        f32[B, T, WEIGHTS], zero beyond G
    pages          u8[M, 64 * 132] for e4m3, bf16[M, 64, 128] for bf16
    page_numbers   i32[B, N]
    visible        i32[B, T]
    interpret      parameters of the GPU interpreter, or None for the GPU
    """
    seats, rows, heads, _ = query.shape
    page_count = page_numbers.shape[1]
    if page_count % tuning.pages_per_math:  # no warpgroup's share may be cut
        tuning = dataclasses.replace(tuning, pages_per_math=1)
    is_fp8 = query.dtype == jnp.float8_e4m3fn
    shape = Shape(seats, rows, heads, page_count, is_fp8, tuning, interpret is not None)
    shape = shape.fitted()
    operands = [query, weights, page_numbers, visible, pages]
    if is_fp8:
        # Two views of the same bytes: a page is 64 keys of 128 B and then 256 B of scales, that is 66 rows of 128 B
        # or 33 of 64 floats. XLA makes bitcasts of both.
        operands[4:] = [
            lax.bitcast_convert_type(pages, jnp.float8_e4m3fn).reshape(-1, PAGE + 2, WIDTH),
            lax.bitcast_convert_type(pages.reshape(pages.shape[0], -1, 4), jnp.float32).reshape(-1, 33, PAGE),
        ]
    return _kernel(shape, interpret)(*operands)


@functools.lru_cache(maxsize=64)
def _kernel(shape: Shape, interpret: Any) -> Any:
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

    def indexer_scores(query, weights, page_numbers, visible, key_pages, *rest, **buffers):
        scale_pages, out = rest if shape.is_fp8 else (None, *rest)
        refs = Refs(query, weights, page_numbers, visible, key_pages, scale_pages, out, **{"scales": None, **buffers})
        role = lax.axis_index("role")

        @pl.when(role < tuning.math)
        def _():
            score(shape, refs, role * shape.tokens_per_math)

        @pl.when(role == tuning.math)
        def _():
            load(shape, refs)

    return plgpu.kernel(
        indexer_scores,
        out_type=jax.ShapeDtypeStruct((shape.seats, shape.rows, shape.page_count * PAGE), jnp.float32),
        grid=(tuning.blocks,),
        grid_names=("block",),
        num_threads=tuning.math + 1,
        thread_name="role",
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe: threads only read what TMA writes, and only write the scores, which nobody reads.
            unsafe_no_auto_barriers=True,
        ),
    )


# Where a block's work is. Both roles walk it in the same order and count alike, so a tile's stage needs no message.


def place(shape: Shape, index: Any) -> tuple[Any, Any]:
    """Seat and tile of this block's index-th piece of work; past the last run, a piece of the last run of all."""
    run = shape.tuning.run
    linear = lax.axis_index("block") + index // run * shape.tuning.blocks
    linear = jnp.minimum(linear, shape.seats * shape.runs - 1)
    return linear // shape.runs, linear % shape.runs * run + index % run


def work_of_block(shape: Shape) -> Any:
    blocks = shape.tuning.blocks
    return (shape.seats * shape.runs - lax.axis_index("block") + blocks - 1) // blocks * shape.tuning.run


def longest(shape: Shape, refs: Refs, seat: Any) -> Any:
    """Positions that some row of the seat sees."""
    return functools.reduce(jnp.maximum, [refs.visible[seat, row] for row in range(shape.rows)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """What a role counts on its way; i32 scalars."""

    scored: Any  # tiles so far
    stage: Any  # scored mod stages: of the next tile
    seats: Any  # seats so far; their queries alternate between two buffers
    seat: Any  # the last one

    @classmethod
    def start(cls) -> Progress:
        return cls(jnp.int32(0), jnp.int32(0), jnp.int32(0), jnp.int32(-1))

    def enter(self, seat: Any, is_new: Any) -> Progress:
        return dataclasses.replace(
            self, seats=self.seats + is_new.astype(jnp.int32), seat=jnp.where(is_new, seat, self.seat)
        )

    def advance(self, is_scored: Any, stages: int) -> Progress:
        step = is_scored.astype(jnp.int32)
        stage = jnp.where(self.stage + step == stages, 0, self.stage + step)
        return dataclasses.replace(self, scored=self.scored + step, stage=stage)


# The loading role.


def load(shape: Shape, refs: Refs) -> None:
    """Keeps the stages full. Page numbers are read a group of tiles ahead: their latency would be a tile's time."""
    group, width = shape.tuning.lookahead, 1 + shape.tile_pages
    work = work_of_block(shape)

    def load_group(number, carry):
        progress, *ahead = carry
        following = read_group(shape, refs, number + 1)
        for inside in range(group):
            index = number * group + inside
            seat, tile = place(shape, index)
            length, *numbers = ahead[inside * width : (inside + 1) * width]
            is_scored = (index < work) & (tile * shape.tokens < length)
            is_new = is_scored & (seat != progress.seat)

            @pl.when(is_new)
            def _(seat=seat, progress=progress):
                load_query(shape, refs, seat, progress)

            @pl.when(is_scored)
            def _(numbers=numbers, progress=progress):
                load_keys(shape, refs, numbers, progress)

            progress = progress.enter(seat, is_new).advance(is_scored, shape.stages)
        return progress, *following

    groups = (work + group - 1) // group
    progress, *_ = lax.fori_loop(0, groups, load_group, (Progress.start(), *read_group(shape, refs, 0)))
    # The last use of each buffer is waited for as well: no completion of a barrier may stay unobserved.
    drain(refs.keys_empty, shape.stages, progress.scored)
    drain(refs.query_empty, 2, progress.seats)


def drain(empty: Any, buffers: int, used: Any) -> None:
    for buffer in range(buffers):

        @pl.when(buffer < used)
        def _(buffer=buffer):
            plgpu.barrier_wait(empty.at[buffer])


def read_group(shape: Shape, refs: Refs, group: Any) -> tuple[Any, ...]:
    """For each tile of the group: the length of its seat, then its page numbers."""
    found: list[Any] = []
    for inside in range(shape.tuning.lookahead):
        seat, tile = place(shape, group * shape.tuning.lookahead + inside)
        found.append(longest(shape, refs, seat))
        for page in range(shape.tile_pages):
            at = jnp.minimum(tile * shape.tile_pages + page, shape.page_count - 1)
            # A page of which nothing is visible may have any number: outside the pool TMA reads zeros.
            found.append(refs.page_numbers[seat, at])
    return tuple(found)


def load_query(shape: Shape, refs: Refs, seat: Any, progress: Progress) -> None:
    buffer = progress.seats % 2

    @pl.when(progress.seats >= 2)
    def _():
        plgpu.barrier_wait(refs.query_empty.at[buffer])
        plgpu.commit_smem()  # the weights were read as plain memory, and are overwritten by TMA

    full = refs.query_full.at[buffer]
    for row in range(shape.rows):
        plgpu.copy_gmem_to_smem(refs.query.at[seat, row], refs.queries.at[buffer, row], full)
        plgpu.copy_gmem_to_smem(refs.weights.at[seat, row], refs.query_weights.at[buffer, row], full)


def load_keys(shape: Shape, refs: Refs, numbers: list[Any], progress: Progress) -> None:
    stage = progress.stage

    @pl.when(progress.scored >= shape.stages)
    def _():
        plgpu.barrier_wait(refs.keys_empty.at[stage])
        if shape.is_fp8:
            plgpu.commit_smem()  # so were the scales

    full = refs.keys_full.at[stage]
    copy = copy_once if shape.tuning.once and not shape.is_interpreted else plgpu.copy_gmem_to_smem
    for page, number in enumerate(numbers):
        first = page * PAGE
        target = refs.keys.at[stage, pl.ds(first, PAGE)]
        if shape.is_fp8 and not shape.is_interpreted:
            target = _mosaic.plain_rows(refs.keys, stage, first, PAGE, WIDTH)
        copy(refs.key_pages.at[number, pl.ds(0, PAGE)], target, full)
        if shape.is_fp8:
            scales = refs.scales.at[stage, pl.ds(first, PAGE)]
            copy(refs.scale_pages.at[number, SCALE_ROW], scales, full)


# The math role.


def score(shape: Shape, refs: Refs, first: Any) -> None:
    """Scores positions first .. first + tokens_per_math - 1 of each tile."""

    def score_next(index, progress):
        seat, tile = place(shape, index)
        start = tile * shape.tokens + first
        is_scored = tile * shape.tokens < longest(shape, refs, seat)
        is_new = is_scored & (seat != progress.seat)

        @pl.when(is_new & (progress.seats > 0))
        def _():
            plgpu.barrier_arrive(refs.query_empty.at[(progress.seats - 1) % 2])

        @pl.when(is_new)
        def _():
            plgpu.barrier_wait(refs.query_full.at[progress.seats % 2])

        progress = progress.enter(seat, is_new)

        @pl.when(is_scored)
        def _():
            score_tile(shape, refs, seat, start, first, progress)

        @pl.when(jnp.logical_not(is_scored))
        def _():
            hide_tile(shape, refs, seat, start)

        return progress.advance(is_scored, shape.stages)

    progress = lax.fori_loop(0, work_of_block(shape), score_next, Progress.start())

    @pl.when(progress.seats > 0)
    def _():
        plgpu.barrier_arrive(refs.query_empty.at[(progress.seats - 1) % 2])


def score_tile(shape: Shape, refs: Refs, seat: Any, start: Any, first: Any, progress: Progress) -> None:
    """Tokens are the rows of the product and heads its columns: the sum over heads stays in a thread and its quad."""
    stage, buffer = progress.stage, (progress.seats - 1) % 2
    mine = pl.ds(first, shape.tokens_per_math)
    plgpu.barrier_wait(refs.keys_full.at[stage])
    scale = plgpu.load(refs.scales.at[stage, mine], layout=ROWS, optimized=False) if shape.is_fp8 else None
    position = start + plgpu.broadcasted_iota(jnp.int32, (shape.tokens_per_math,), 0, layout=ROWS)
    for row in range(shape.rows):

        def multiply(product, row=row):
            plgpu.wgmma(product, refs.keys.at[stage, mine], refs.queries.at[buffer, row].T)
            return product[...]

        product = pl.run_scoped(multiply, _mosaic.accumulator((shape.tokens_per_math, shape.heads), jnp.float32))
        if row == shape.rows - 1:
            plgpu.barrier_arrive(refs.keys_empty.at[stage])
        weight = refs.query_weights.at[buffer, row, pl.ds(0, shape.heads)]
        weight = plgpu.load(weight, layout=COLUMNS, optimized=False)
        weight = lax.broadcast_in_dim(weight, product.shape, (1,))
        total = jnp.sum(jnp.maximum(product, 0.0) * weight, axis=1)
        total = total if scale is None else total * scale
        write(shape, refs, seat, row, start, jnp.where(position < refs.visible[seat, row], total, -jnp.inf))


def hide_tile(shape: Shape, refs: Refs, seat: Any, start: Any) -> None:
    nothing = plgpu.layout_cast(jnp.full((shape.tokens_per_math,), -jnp.inf, jnp.float32), ROWS)
    for row in range(shape.rows):
        write(shape, refs, seat, row, start, nothing)


def write(shape: Shape, refs: Refs, seat: Any, row: int, start: Any, values: Any) -> None:
    @pl.when(start < shape.page_count * PAGE)  # the last tile of a seat may be cut
    def _():
        refs.out[seat, row, pl.ds(start, shape.tokens_per_math)] = values
