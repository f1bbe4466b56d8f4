"""Sparse MLA on a Hopper GPU: a warpgroup that gathers rows, and two that attend to them, half of the values each.

It knows tiles, stages, barriers and what wgmma wants. The meaning of the result is `reference.py`; shapes are checked,
and tunings chosen, by the caller (`dispatch`). How rows reach shared memory is in `gather.py`, how the parts of a split
list become one in `combine.py`. README.md beside this file has the sketch of the pipeline, its limit, and what was
tried.

A block attends with up to 64 heads of one query row to one part of that row's list.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels.sparse_mla import combine, gather, join
from pallas_kernels.sparse_mla.gather import LATENT, TILE, WIDTH

HEADS = 64  # of a block: the rows of a wgmma
MATH = 2  # warpgroups, with half of the 512 values each: 64 x 256 sums are 128 registers a thread
HALF = LATENT // MATH
GATHERERS = {"bf16": 1, "fp8": 2}  # warpgroups that bring rows: conversion keeps two busy
STAGES = 2  # tiles of records beside the queries in shared memory
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # one value a head, one value a record
# Registers a thread, by format and gathering warpgroups; three warpgroups of 168 are launched, or four of 128.
MATH_REGISTERS = {("bf16", 1): 216, ("fp8", 1): 208, ("bf16", 2): 200, ("fp8", 2): 200}
GATHER_REGISTERS = {("bf16", 1): 72, ("fp8", 1): 88, ("bf16", 2): 56, ("fp8", 2): 56}


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the work is cut. Bits differ between tunings, as sums are then added in another order.

    splits    parts of each list, attended to by blocks of their own
    cluster   of these, that join in shared memory: 1, 2, 4 or 8; the rest is combined by a second kernel
    gatherers   warpgroups of a block that bring rows, 1 or 2; bits do not depend on it. None: 2 for FP8 records
    apart     whether the second attending warpgroup starts after the first one's first products, and stays behind; bits
              do not depend on it. None: where a part is one tile
    """

    splits: int = 1
    cluster: int = 1
    gatherers: int | None = None
    apart: bool | None = None


@dataclasses.dataclass(frozen=True)
class Shape:
    """Everything static about one kernel."""

    rows: int  # query rows of all seats
    groups: int  # of 64 heads
    places: int  # of a list, a multiple of 64
    splits: int
    cluster: int
    scale: float
    record_format: str
    gatherers: int
    is_apart: bool
    is_interpreted: bool

    @property
    def totals(self) -> int:
        """Into how many a warpgroup divides its 64 x 256 sums: ptxas refuses wgmmas that need more than the registers
        of launch, 168 or 128."""
        return self.gatherers

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
    heads_full: Any
    tiles_full: Any
    tiles_empty: Any
    first_products_done: Any = None  # by the first attending warpgroup, where they are apart
    logarithms: Any = None  # [64] of this block's part, where blocks join
    tiles_done: Any = None


@dataclasses.dataclass(frozen=True)
class Place:
    """What this block does; i32 scalars."""

    row: Any  # query row
    part: Any  # of its list, of those that are written
    member: Any  # of the cluster
    group: Any  # of 64 heads

    def first_tile(self, shape: Shape) -> Any:
        return (self.part * shape.cluster + self.member) * shape.tiles_of_split


def attend_rows(
    query: jax.Array, records: jax.Array, slots: jax.Array, scale: float, tuning: Tuning, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """f32[R, H, 512] attended values and f32[R, H] logsumexp.

    query          bf16[R, H, 576], R query rows of all seats, H a multiple of 64
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
        heads // HEADS,
        slots.shape[1],
        splits,
        cluster,
        scale,
        record_format,
        gatherers=tuning.gatherers or GATHERERS[record_format],
        is_apart=splits == tiles if tuning.apart is None else tuning.apart,
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
            load_heads(refs, place_of_block(shape))

        def attending():
            plgpu.set_max_registers(MATH_REGISTERS[shape.record_format, shape.gatherers], action="increase")
            attend(shape, refs, place_of_block(shape), role)

        def gathering():
            plgpu.set_max_registers(GATHER_REGISTERS[shape.record_format, shape.gatherers], action="decrease")
            fill(shape, refs, place_of_block(shape), role - MATH)
            if shape.cluster > 1:
                join.wait_for_cluster()
                join.wait_for_cluster()

        # One branch and the other, not two questions: the answer to the second would be kept through all the products.
        lax.cond(role < MATH, attending, gathering)

    scratch = {}
    if shape.is_apart:
        scratch |= dict(first_products_done=plgpu.Barrier(num_arrivals=1))
    if shape.cluster > 1:
        scratch |= dict(logarithms=plgpu.SMEM((HEADS,), jnp.float32), tiles_done=plgpu.Barrier(num_arrivals=MATH))
    heads = shape.groups * HEADS
    return plgpu.kernel(
        sparse_mla,
        out_type=(
            jax.ShapeDtypeStruct((shape.rows, shape.parts, heads, LATENT), jnp.float32),
            jax.ShapeDtypeStruct((shape.rows, shape.parts, heads), jnp.float32),
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
            heads_full=plgpu.Barrier(num_arrivals=1),
            tiles_full=plgpu.Barrier(num_arrivals=shape.gatherers, num_barriers=STAGES),
            tiles_empty=plgpu.Barrier(num_arrivals=MATH, num_barriers=STAGES),
            **scratch,
        ),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,  # ex2.approx: two units in the last place
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe: no thread reads shared memory but through wgmma, and what is stored in device memory nobody reads.
            unsafe_no_auto_barriers=True,
        ),
    )


def place_of_block(shape: Shape) -> Place:
    """Blocks of the same rows are neighbours, so that the second group of heads finds them in the L2."""
    block = join.this_cluster() if shape.cluster > 1 else lax.axis_index("block")
    member = join.this_member() if shape.cluster > 1 else jnp.int32(0)
    row, inside = block // (shape.groups * shape.parts), block % (shape.groups * shape.parts)
    return Place(row, inside // shape.groups, member, inside % shape.groups)


def tiles_to_do(shape: Shape, refs: Refs, place: Place) -> Any:
    """Tiles of this part of the list that hold a record, but at least one: an empty list gives a masked tile.

    Padding is at the end, so a tile is empty where its first place is. The loads do not wait for each other.
    """
    count = jnp.int32(0)
    for index in range(1, shape.tiles_of_split):
        tile = place.first_tile(shape) + index
        slot = refs.slots[place.row, jnp.minimum(tile, shape.tiles - 1) * TILE]
        count += ((tile < shape.tiles) & (slot >= 0)).astype(jnp.int32)
    return count + 1


# The gathering role.


def load_heads(refs: Refs, place: Place) -> None:
    """The queries of this block, by TMA."""
    heads = refs.query.at[place.row, pl.ds(place.group * HEADS, HEADS)]
    plgpu.copy_gmem_to_smem(heads, refs.heads, refs.heads_full)


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
    gather.ask_for(refs.records, listed, shape.gatherers, shape.is_interpreted)
    count = tiles_to_do(shape, refs, place)

    def convert(index, carry):
        listed, following = carry
        gather.ask_for(refs.records, following, shape.gatherers, shape.is_interpreted)
        later = slots_of_tile(shape, refs, place, index + 2)

        @pl.when(index >= STAGES)
        def _():
            plgpu.barrier_wait(refs.tiles_empty.at[index % STAGES])

        start(shape, refs, index, listed, gatherer)
        gather.finish(shape.is_interpreted)
        plgpu.barrier_arrive(refs.tiles_full.at[index % STAGES])
        return following, later

    lax.fori_loop(0, count, convert, (listed, following))
    return count


def copy_tiles(shape: Shape, refs: Refs, place: Place, gatherer: Any, listed: Any, following: Any) -> Any:
    """The tiles of a bf16 pool, up to two under way at a time; how many."""
    start(shape, refs, 0, listed, gatherer)
    count = tiles_to_do(shape, refs, place)
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
        plgpu.barrier_arrive(refs.tiles_full.at[index % STAGES])

        @pl.when(index + 1 < count)
        def _():
            plgpu.barrier_wait(refs.tiles_empty.at[(index + 1) % STAGES])
            start(shape, refs, index + 1, listed, gatherer)

        return following

    lax.fori_loop(1, count, copy_next, following)
    return count


def slots_of_tile(shape: Shape, refs: Refs, place: Place, index: Any) -> Any:
    """Of this block's index-th tile; of the last one of the list where there is none."""
    first = jnp.minimum(place.first_tile(shape) + index, shape.tiles - 1) * TILE
    return gather.slots_of_tile(refs.slots, place.row, first, shape.gatherers, shape.is_interpreted)


def start(shape: Shape, refs: Refs, index: Any, listed: Any, gatherer: Any) -> None:
    stage = jnp.int32(index) % STAGES
    gather.start_tile(refs.records, refs.tiles, stage, listed, gatherer, shape.gatherers, shape.is_interpreted)


# The attending role.


def attend(shape: Shape, refs: Refs, place: Place, role: Any) -> None:
    """Attends with 64 heads to this part of the list, for values role * 256 .. role * 256 + 255.

    Both warpgroups compute all logits: 53 % more products than needed, but they then share nothing.
    """
    role, width = role & 1, HALF // shape.totals  # it is 0 or 1; where columns lie is simpler if the compiler knows
    count = tiles_to_do(shape, refs, place)
    to_exponent = jnp.float32(shape.scale * math.log2(math.e))
    plgpu.barrier_wait(refs.heads_full)

    # Apart, one's softmax runs under the other's products, but a stage is in use for as long as the second is behind,
    # and that is time that the gather does not have. In a part of one tile there is no gather left to wait for.
    if shape.is_apart:

        @pl.when(role == 1)
        def _():
            plgpu.barrier_wait(refs.first_products_done)

    def attend_tile(index, carry):
        totals, peak, mass = carry
        place = place_of_block(shape)
        stage = index % STAGES
        first = jnp.minimum(place.first_tile(shape) + index, shape.tiles - 1) * TILE
        slots = plgpu.load(refs.slots.at[place.row, pl.ds(first, TILE)], layout=COLUMNS, optimized=False)
        plgpu.barrier_wait(refs.tiles_full.at[stage])
        is_listed = lax.broadcast_in_dim(slots >= 0, (HEADS, TILE), (1,))
        products = logits_of_tile(refs, stage)

        if shape.is_apart:

            @pl.when((role == 0) & (index == 0))
            def _():
                plgpu.barrier_arrive(refs.first_products_done)

        logits = jnp.where(is_listed, products * to_exponent, -jnp.inf)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1))
        base = jnp.where(higher == -jnp.inf, 0.0, higher)  # nothing listed so far: no infinity less infinity
        weights = jnp.exp2(logits - over_columns(base, TILE))
        shrink = jnp.exp2(peak - base)
        mass = mass * shrink + jnp.sum(weights, axis=1)
        totals = tuple(total * over_columns(shrink, width) for total in totals)
        totals = add_values(shape, refs, totals, weights.astype(jnp.bfloat16), stage, role)
        plgpu.barrier_arrive(refs.tiles_empty.at[stage])
        return totals, higher, mass

    none = plgpu.layout_cast(jnp.zeros((HEADS, width), jnp.float32), plgpu.Layout.WGMMA)
    empty = (
        (none,) * shape.totals,
        plgpu.layout_cast(jnp.full((HEADS,), -jnp.inf, jnp.float32), ROWS),
        plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), ROWS),
    )
    totals, peak, mass = lax.fori_loop(0, count, attend_tile, empty)
    divisor = jnp.where(mass > 0, mass, 1.0)
    outs = [total / over_columns(divisor, width) for total in totals]
    place = place_of_block(shape)
    heads = pl.ds(place.group * HEADS, HEADS)
    lse = (peak + jnp.log2(mass)) * math.log(2.0)
    if shape.cluster > 1:
        role = join.this_warpgroup() & 1
        plgpu.barrier_arrive(refs.tiles_done)
        plgpu.barrier_wait(refs.tiles_done)  # the other half may still be reading what is written over now
        for index, out in enumerate(outs):
            join.leave_part(refs.tiles, out, role * shape.totals + index, width)

        @pl.when(role == 0)
        def _():
            refs.logarithms[...] = lse

        join.wait_for_cluster()
        out_of_part, lse_of_part = refs.out.at[place.row, place.part, heads], refs.lse.at[place.row, place.part, heads]
        join.join_parts(refs.tiles, refs.logarithms, join.this_member(), shape.cluster, out_of_part, lse_of_part)
        join.wait_for_cluster()
        return
    for columns, out in zip(columns_of_totals(shape, role), outs, strict=True):
        refs.out[place.row, place.part, heads, columns] = out

    @pl.when(role == 0)
    def _():
        refs.lse[place.row, place.part, heads] = lse


def logits_of_tile(refs: Refs, stage: Any) -> Any:
    """f32[64, TILE] products of this block's queries and the tile's rows."""

    def multiply(product):
        plgpu.wgmma(product, refs.heads, refs.tiles.at[stage].T)
        return product[...]

    return pl.run_scoped(multiply, _mosaic.accumulator((HEADS, TILE), jnp.float32))


def add_values(shape: Shape, refs: Refs, totals: Any, weights: Any, stage: Any, role: Any) -> Any:
    """Each total f32[64, n] + weights bf16[64, TILE] @ as many columns of the tile; weights stay in registers."""
    columns = [refs.tiles.at[stage, :, at] for at in columns_of_totals(shape, role)]
    if shape.is_interpreted:  # it has no wgmma with a first operand in registers
        rows = [column[...].astype(jnp.float32) for column in columns]
        return tuple(total + jnp.dot(weights.astype(jnp.float32), row) for total, row in zip(totals, rows, strict=True))

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
