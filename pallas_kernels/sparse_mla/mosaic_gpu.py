"""Sparse MLA on a Hopper GPU: a warpgroup that gathers rows, and two that attend to them, half of the values each.

It knows tiles, stages, barriers and what wgmma wants. The meaning of the result is `reference.py`; shapes are checked,
and tunings chosen, by the caller (`dispatch`). How rows reach shared memory is in `gather.py`, how the parts of a split
list become one in `combine.py`. README.md beside this file has the sketch of the pipeline, its limit, and what was
tried.

A block attends with up to 64 heads of one query row to one part of that row's list.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels.sparse_mla import combine, extent, gather, join, registers
from pallas_kernels.sparse_mla.gather import LATENT, TILE, WIDTH

HEADS = 64  # of a block: the rows of a wgmma
HEADS_TOGETHER = 8  # rows of a tile of queries, which TMA brings whole
MATH = 2  # warpgroups, with half of the 512 values each: 64 x 256 sums are 128 registers a thread
HALF = LATENT // MATH
GATHERERS = {"bf16": 1, "fp8": 2}  # warpgroups that bring rows: conversion keeps two busy
STAGES = 2  # tiles of records beside the queries in shared memory
APART = 8  # columns from one pair that a thread has of a row to the next
ROWS = plgpu.Layout.WGMMA.reduce(1)  # one value a head
# Registers a thread, by gathering warpgroups, of those that weigh, follow and gather: three warpgroups of 168 are
# launched, or four of 128. Both that attend have 128 of sums; logits and weights are 48 more.
REGISTERS = {1: (232, 168, 104), 2: (216, 168, 64)}


class OfHeads(enum.IntEnum):
    """What is in shared memory for each head."""

    SHRINK = 0  # sums are multiplied by it before the current tile's values are added
    MASS = 1  # of all weights
    LOGARITHM = 2  # of this block's part, where blocks join


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut. Bits differ between tunings, as sums are then added in another order.

    splits    parts of each list, attended to by blocks of their own
    cluster   of these, that join in shared memory: 1, 2, 4 or 8; the rest is combined by a second kernel
    gatherers   warpgroups of a block that bring rows, 1 or 2; bits do not depend on it. None: 2 for FP8 records
    heads     of a block, a multiple of 8; bits do not depend on it. Less than 64 leave tensor cores without work, and a
              multiprocessor with less to store
    """

    splits: int = 1
    cluster: int = 1
    gatherers: int | None = None
    heads: int = HEADS


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about one kernel."""

    rows: int  # query rows of all seats
    heads: int  # a multiple of 8
    heads_together: int  # of a block
    places: int  # of a list, a multiple of 64
    splits: int
    cluster: int
    scale: float
    record_format: str
    gatherers: int
    is_interpreted: bool

    @property
    def totals(self) -> int:
        """Into how many a warpgroup divides its 64 x 256 sums: ptxas refuses wgmmas that need more than the registers
        of launch, 168 or 128."""
        return self.gatherers

    @property
    def groups(self) -> int:
        """Of heads, each with blocks of its own."""
        return -(-self.heads // self.heads_together)

    @property
    def tiles(self) -> int:
        return self.places // TILE

    @property
    def parts(self) -> int:
        """Of each list that are written, one by each cluster."""
        return self.splits // self.cluster

    @property
    def tiles_of_split(self) -> int:
        """Of the longest one."""
        return -(-self.tiles // self.splits)


@dataclasses.dataclass(frozen=True)
class Refs:
    """What the roles see: arrays in device memory, buffers in shared memory, and the barriers that guard these."""

    query: Any
    records: Any
    slots: Any
    out: Any
    lse: Any
    heads: Any  # [64, WIDTH]: the queries of this block
    tiles: Any  # [stages, TILE, WIDTH]
    weights: Any  # [64, TILE] of one tile, from `weigh` to `follow`
    of_heads: Any  # [3, 64]: OfHeads
    heads_full: Any
    tiles_full: Any
    tiles_empty: Any
    shrink_full: Any
    weights_full: Any
    weights_empty: Any
    tiles_done: Any = None  # by both attending warpgroups, which then write over them


@dataclasses.dataclass(frozen=True)
class Place:
    """What this block does; i32 scalars."""

    row: Any  # query row
    part: Any  # of its list, of those that are written
    member: Any  # of the cluster
    group: Any  # of heads

    def first_tile(self, shape: Shape) -> Any:
        return (self.part * shape.cluster + self.member) * shape.tiles_of_split


def attend_rows(
    query: jax.Array, records: jax.Array, slots: jax.Array, scale: float, tuning: Tuning, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """f32[R, H, 512] attended values and f32[R, H] logsumexp.

    query          bf16[R, H, 576], R query rows of all seats, H a multiple of 8
    records        bf16[N, 3, 192], or u32[N, 164] for FP8
    slots          i32[R, K], K a multiple of 64; below N, and -1 from where a list ends
    interpret      parameters of the GPU interpreter, or None for the GPU
    """
    rows, heads, _ = query.shape
    record_format = "fp8" if records.dtype == jnp.uint32 else "bf16"
    tiles = slots.shape[1] // TILE
    splits = pl.cdiv(tiles, pl.cdiv(tiles, tuning.splits))  # of equal length but the last, and none without a tile
    cluster = 1 if interpret is not None else math.gcd(splits, tuning.cluster)
    shape = Shape(
        rows,
        heads,
        tuning.heads,
        slots.shape[1],
        splits,
        cluster,
        scale,
        record_format,
        gatherers=tuning.gatherers or GATHERERS[record_format],
        is_interpreted=interpret is not None,
    )
    out, lse = _kernel(shape, interpret)(query, records, slots)
    if shape.parts == 1:
        return out.reshape(rows, heads, LATENT), lse.reshape(rows, heads)
    return combine.combine(out, lse, interpret)


@functools.lru_cache(maxsize=64)
def _kernel(shape: Shape, interpret: Any) -> Any:
    def sparse_mla(query, records, slots, out, lse, **buffers):
        refs = Refs(query, records, slots, out, lse, **buffers)
        role = lax.axis_index("role")

        # Before the roles part: inside the last one, ptxas keeps a word in local memory for it.
        @pl.when(role == MATH)
        def _():
            load_heads(shape, refs, place_of_block(shape))

        def weighing():
            plgpu.set_max_registers(REGISTERS[shape.gatherers][0], action="increase")
            weigh(shape, refs, place_of_block(shape))

        def following():
            plgpu.set_max_registers(REGISTERS[shape.gatherers][1], action="increase")
            follow(shape, refs, place_of_block(shape))

        def gathering():
            plgpu.set_max_registers(REGISTERS[shape.gatherers][2], action="decrease")
            fill(shape, refs, place_of_block(shape), role - MATH)
            if shape.cluster > 1:
                join.wait_for_cluster()
                join.wait_for_cluster()

        # One branch and the other, not two questions: the answer to the second would be kept through all the products.
        lax.cond(role < MATH, lambda: lax.cond(role == 0, weighing, following), gathering)

    # Where it is not used, a barrier may not be there: the interpreter looks for completions that nobody waited for.
    scratch = {} if shape.is_interpreted else dict(tiles_done=plgpu.Barrier(num_arrivals=MATH))
    return plgpu.kernel(
        sparse_mla,
        out_type=(
            jax.ShapeDtypeStruct((shape.rows, shape.parts, shape.heads, LATENT), jnp.float32),
            jax.ShapeDtypeStruct((shape.rows, shape.parts, shape.heads), jnp.float32),
        ),
        grid=(shape.rows * shape.parts * shape.groups,),
        grid_names=("block",),
        cluster=(shape.cluster,) if shape.cluster > 1 else (),
        cluster_names=("member",) if shape.cluster > 1 else (),
        num_threads=MATH + shape.gatherers,
        thread_name="role",
        scratch_types=dict(
            heads=_mosaic.wgmma_operand((HEADS, WIDTH), jnp.bfloat16),
            tiles=_mosaic.wgmma_operand((STAGES, TILE, WIDTH), jnp.bfloat16),
            weights=_mosaic.wgmma_operand((HEADS, TILE), jnp.bfloat16),
            of_heads=plgpu.SMEM((len(OfHeads), HEADS), jnp.float32),
            heads_full=plgpu.Barrier(num_arrivals=1),
            tiles_full=plgpu.Barrier(num_arrivals=shape.gatherers, num_barriers=STAGES),
            tiles_empty=plgpu.Barrier(num_arrivals=MATH, num_barriers=STAGES),
            shrink_full=plgpu.Barrier(num_arrivals=1),
            weights_full=plgpu.Barrier(num_arrivals=1),
            weights_empty=plgpu.Barrier(num_arrivals=1),
            **scratch,
        ),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # ex2.approx: two units in the last place
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe: no thread reads shared memory but through wgmma, and what is stored in device memory nobody reads.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=4,  # none is needed: four threads of a warp have a row's logits
        ),
    )


def place_of_block(shape: Shape) -> Place:
    """Blocks of the same rows are neighbours, so that the second group of heads finds them in the L2."""
    block = lax.axis_index("block") if shape.is_interpreted else join.this_cluster(shape.cluster)
    member = join.this_member() if shape.cluster > 1 else jnp.int32(0)
    # Nothing is negative: jnp's // and % would ask, here and, as slowly as it compiles, in Mosaic.
    groups, blocks = jnp.int32(shape.groups), jnp.int32(shape.groups * shape.parts)
    row, inside = lax.div(block, blocks), lax.rem(block, blocks)
    return Place(row, lax.div(inside, groups), member, lax.rem(inside, groups))


def stage_of(index: Any) -> Any:
    return lax.rem(jnp.int32(index), jnp.int32(STAGES))


def tiles_to_do(shape: Shape, refs: Refs, place: Place) -> Any:
    """Tiles of this part of the list that hold a record, but at least one."""
    first, most = place.first_tile(shape), shape.tiles_of_split
    return extent.tiles_of_part(refs.slots, place.row, first, most, shape.tiles, shape.is_interpreted)


# The gathering role.


def load_heads(shape: Shape, refs: Refs, place: Place) -> None:
    """The queries of this block, by TMA. Where there are less than 64, what lies behind them in shared memory is taken
    for queries too: no head's result depends on another's query, and nobody reads theirs."""

    def load(count):
        heads = refs.query.at[place.row, pl.ds(place.group * shape.heads_together, count)]
        plgpu.copy_gmem_to_smem(heads, refs.heads.at[pl.ds(0, count)], refs.heads_full)

    for_heads(shape, place, load)


def for_heads(shape: Shape, place: Place, action: Callable[[int], None]) -> None:
    """Calls `action` with how many heads this block has, a number that the compiler knows."""
    rest = shape.heads % shape.heads_together
    if rest == 0 or shape.groups == 1:
        action(rest or shape.heads_together)
    else:
        lax.cond(place.group == shape.groups - 1, lambda: action(rest), lambda: action(shape.heads_together))


def fill(shape: Shape, refs: Refs, place: Place, gatherer: Any) -> None:
    """Keeps the tiles full, or this gatherer's share of them. The slots of a tile are read one tile ahead."""
    listed = slots_of_tile(shape, refs, place, 0)
    following = slots_of_tile(shape, refs, place, 1)
    if shape.record_format == "bf16":
        count = copy_tiles(shape, refs, place, gatherer, listed, following)
    else:
        count = convert_tiles(shape, refs, place, gatherer, listed, following)
    # The last use of each buffer is waited for as well: no completion of a barrier may stay unobserved.
    for left in range(STAGES):

        @pl.when(left < count)
        def _(left=left):
            plgpu.barrier_wait(refs.tiles_empty.at[left])


def convert_tiles(shape: Shape, refs: Refs, place: Place, gatherer: Any, listed: Any, following: Any) -> Any:
    """The tiles of an FP8 pool one after another, each from the L2, which is asked for the next one; how many."""
    count = tiles_to_do(shape, refs, place)  # while the first slots are on their way
    gather.ask_for(refs.records, listed, shape.gatherers, shape.is_interpreted)

    def convert(index, carry):
        listed, following = carry
        ahead = gather.load_ahead(refs.records, listed, shape.gatherers, shape.is_interpreted)
        gather.ask_for(refs.records, following, shape.gatherers, shape.is_interpreted)
        later = slots_of_tile(shape, refs, place, index + 2)

        @pl.when(index >= STAGES)
        def _():
            plgpu.barrier_wait(refs.tiles_empty.at[stage_of(index)])

        start(shape, refs, index, listed, gatherer, ahead)
        gather.finish(shape.is_interpreted)
        plgpu.barrier_arrive(refs.tiles_full.at[stage_of(index)])
        return following, later

    lax.fori_loop(0, count, convert, (listed, following))
    return count


def copy_tiles(shape: Shape, refs: Refs, place: Place, gatherer: Any, listed: Any, following: Any) -> Any:
    """The tiles of a bf16 pool, up to two under way at a time; how many."""
    count = tiles_to_do(shape, refs, place)  # while the first slots are on their way
    start(shape, refs, 0, listed, gatherer)
    listed, following = following, slots_of_tile(shape, refs, place, 2)

    # Two tiles are under way before the first is waited for; later ones start while the math is busy.
    @pl.when(count > 1)
    def _():
        start(shape, refs, 1, listed, gatherer)
        gather.finish(shape.is_interpreted, pending=1)

    @pl.when(count == 1)
    def _():
        gather.finish(shape.is_interpreted)

    plgpu.barrier_arrive(refs.tiles_full.at[0])

    def copy_next(index, carry):
        listed, following = carry, slots_of_tile(shape, refs, place, index + 2)
        gather.ask_for(refs.records, listed, shape.gatherers, shape.is_interpreted)
        gather.finish(shape.is_interpreted)
        plgpu.barrier_arrive(refs.tiles_full.at[stage_of(index)])

        @pl.when(index + 1 < count)
        def _():
            plgpu.barrier_wait(refs.tiles_empty.at[stage_of(index + 1)])
            start(shape, refs, index + 1, listed, gatherer)

        return following

    lax.fori_loop(1, count, copy_next, following)
    return count


def slots_of_tile(shape: Shape, refs: Refs, place: Place, index: Any) -> Any:
    """Of this block's index-th tile; of the last one of the list where there is none."""
    first = jnp.minimum(place.first_tile(shape) + index, shape.tiles - 1) * TILE
    return gather.slots_of_tile(refs.slots, place.row, first, shape.gatherers, shape.is_interpreted)


def start(shape: Shape, refs: Refs, index: Any, listed: Any, gatherer: Any, ahead: tuple[Any, ...] = ()) -> None:
    stage, is_interpreted = stage_of(index), shape.is_interpreted
    gather.start_tile(refs.records, refs.tiles, stage, listed, ahead, gatherer, shape.gatherers, is_interpreted)


# The attending roles.


def weigh(shape: Shape, refs: Refs, place: Place) -> None:
    """The logits of this part of the list for 64 heads, their softmax, and the first half of the values.

    Each tile's weights go to `follow` through shared memory, with what its sums shrink by, and at the end their mass.
    """
    count = tiles_to_do(shape, refs, place)
    in_last = extent.records_of_tile(refs.slots, place.row, place.first_tile(shape) + count - 1, shape.is_interpreted)
    to_exponent = shape.scale * math.log2(math.e)
    plgpu.barrier_wait(refs.heads_full)

    def hide_what_is_not_listed(products):
        is_listed = registers.numbers_of_columns(TILE, shape.is_interpreted) < in_last
        return jnp.where(lax.broadcast_in_dim(is_listed, (HEADS, TILE), (1,)), products, -jnp.inf)

    def weigh_tile(index, carry):
        totals, peak, masses = carry
        stage = stage_of(index)
        plgpu.barrier_wait(refs.tiles_full.at[stage])
        products = logits_of_tile(refs, stage)
        products = lax.cond(index == count - 1, hide_what_is_not_listed, lambda products: products, products)
        higher = jnp.maximum(peak, jnp.max(products, axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)  # nothing listed so far: no infinity less infinity
        shrink = jnp.exp2((peak - base) * to_exponent)

        @pl.when(index > 0)
        def _():
            plgpu.barrier_wait(refs.weights_empty)

        refs.of_heads[OfHeads.SHRINK] = shrink
        plgpu.barrier_arrive(refs.shrink_full)  # the other's sums shrink while the weights are made
        exponents = registers.multiply_add(
            products, to_exponent, over_columns(base * -to_exponent, TILE), shape.is_interpreted
        )
        weights = jnp.exp2(exponents)
        rounded = weights.astype(jnp.bfloat16)
        refs.weights[...] = rounded
        gather.finish(shape.is_interpreted)
        plgpu.barrier_arrive(refs.weights_full)
        # What is not on the other's way: each thread's own masses, of every eighth pair of columns.
        own = [weights[:, column : column + APART] for column in range(0, TILE, APART)]
        masses = masses * over_columns(shrink, APART) + functools.reduce(jnp.add, own)
        totals = add_values(shape, refs, shrunk(totals, shrink), rounded, stage, 0)
        plgpu.barrier_arrive(refs.tiles_empty.at[stage])
        return totals, higher, masses

    peak = plgpu.layout_cast(jnp.full((HEADS,), -jnp.inf, jnp.float32), ROWS)
    no_masses = plgpu.layout_cast(jnp.zeros((HEADS, APART), jnp.float32), plgpu.Layout.WGMMA)
    totals, peak, masses = lax.fori_loop(0, count, weigh_tile, (no_totals(shape), peak, no_masses))
    mass = jnp.sum(masses, axis=1)
    plgpu.barrier_wait(refs.weights_empty)
    refs.of_heads[OfHeads.MASS] = mass
    refs.of_heads[OfHeads.LOGARITHM] = (peak * to_exponent + jnp.log2(mass)) * math.log(2.0)
    plgpu.barrier_arrive(refs.weights_full)
    finish(shape, refs, totals, mass, 0)


def follow(shape: Shape, refs: Refs, place: Place) -> None:
    """The second half of the values, by the weights that `weigh` leaves in shared memory."""

    def follow_tile(index, totals):
        stage = stage_of(index)
        plgpu.barrier_wait(refs.tiles_full.at[stage])
        plgpu.barrier_wait(refs.shrink_full)
        totals = shrunk(totals, plgpu.load(refs.of_heads.at[OfHeads.SHRINK], layout=ROWS, optimized=False))
        plgpu.barrier_wait(refs.weights_full)
        totals = add_values(shape, refs, totals, refs.weights, stage, 1)
        plgpu.barrier_arrive(refs.tiles_empty.at[stage])
        plgpu.barrier_arrive(refs.weights_empty)
        return totals

    count = tiles_to_do(shape, refs, place)
    totals = lax.fori_loop(0, count, follow_tile, no_totals(shape))
    plgpu.barrier_wait(refs.weights_full)
    mass = plgpu.load(refs.of_heads.at[OfHeads.MASS], layout=ROWS, optimized=False)
    finish(shape, refs, totals, mass, 1)


def finish(shape: Shape, refs: Refs, totals: Any, mass: Any, role: int) -> None:
    """Writes the values of this half, or joins them with those of the cluster's other parts."""
    width = HALF // shape.totals
    divisor = jnp.where(mass > 0, mass, 1.0)
    outs = [total / over_columns(divisor, width) for total in totals]
    place = place_of_block(shape)
    if shape.is_interpreted:

        def store(count):
            heads = pl.ds(place.group * shape.heads_together, count)
            for columns, out in zip(columns_of_totals(shape, role), outs, strict=True):
                refs.out[place.row, place.part, heads, columns] = out[:count]
            if role == 0:
                refs.lse[place.row, place.part, heads] = refs.of_heads[OfHeads.LOGARITHM, pl.ds(0, count)]

        for_heads(shape, place, store)
        return
    plgpu.barrier_arrive(refs.tiles_done)
    plgpu.barrier_wait(refs.tiles_done)  # the other half may still be reading what is written over now
    for index, out in enumerate(outs):
        join.leave_part(refs.tiles, out, role * shape.totals + index, width)
    first = place.group * shape.heads_together
    results = [array.at[place.row, place.part, pl.ds(first, HEADS)] for array in (refs.out, refs.lse)]
    heads = jnp.minimum(shape.heads - first, shape.heads_together)
    logarithms = refs.of_heads.at[OfHeads.LOGARITHM]
    if shape.cluster == 1:
        plgpu.commit_smem()
        join.send_part(refs.tiles, logarithms, role, heads, *results)
    else:
        join.wait_for_cluster()
        join.join_parts(refs.tiles, logarithms, join.this_member(), shape.cluster, heads, *results)
        join.wait_for_cluster()


def no_totals(shape: Shape) -> Any:
    none = plgpu.layout_cast(jnp.zeros((HEADS, HALF // shape.totals), jnp.float32), plgpu.Layout.WGMMA)
    return (none,) * shape.totals


def shrunk(totals: Any, shrink: Any) -> Any:
    return tuple(total * over_columns(shrink, total.shape[1]) for total in totals)


def logits_of_tile(refs: Refs, stage: Any) -> Any:
    """f32[64, TILE] products of this block's queries and the tile's rows."""

    def multiply(product):
        plgpu.wgmma(product, refs.heads, refs.tiles.at[stage].T)
        return product[...]

    return pl.run_scoped(multiply, _mosaic.accumulator((HEADS, TILE), jnp.float32))


def add_values(shape: Shape, refs: Refs, totals: Any, weights: Any, stage: Any, role: Any) -> Any:
    """Each total f32[64, n] + weights bf16[64, TILE] @ as many columns of the tile; weights from either memory."""
    columns = [refs.tiles.at[stage, :, at] for at in columns_of_totals(shape, role)]
    if shape.is_interpreted:  # it has no wgmma with a first operand in registers
        weights = weights[...].astype(jnp.float32)
        rows = [column[...].astype(jnp.float32) for column in columns]
        return tuple(total + jnp.dot(weights, row) for total, row in zip(totals, rows, strict=True))

    def multiply(accumulators):
        for accumulator, column in zip(accumulators, columns, strict=True):
            plgpu.wgmma(accumulator, weights, column)

    return pl.run_state(multiply)(tuple(_mosaic.accumulator.init(total) for total in totals))


def columns_of_totals(shape: Shape, role: Any) -> list[Any]:
    """Where the columns lie that each total of a warpgroup sums."""
    width = HALF // shape.totals
    return [pl.ds(role * HALF + index * width, width) for index in range(shape.totals)]


def over_columns(values: Any, columns: int) -> Any:
    """One value a head -> the same in each of `columns` columns."""
    return lax.broadcast_in_dim(values, (HEADS, columns), (0,))
