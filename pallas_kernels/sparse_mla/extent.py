"""How far a part of a list reaches: its tiles that hold a record, and the records of its last tile.

It knows that padding is at a list's end only, so that the first place of a tile tells whether it is empty, and that
whatever lies before the last tile is full. Both counts are made once, by every warp for itself: a lane looks at one
place, and the warp votes. The loop over tiles then reads no slots, and masks by a number.

The interpreter cannot run PTX: it counts in a loop here.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.sparse_mla.gather import TILE

WARP = 32


def tiles_of_part(slots: Any, row: Any, first: Any, most: int, tiles: int, is_interpreted: bool) -> Any:
    """i32: tiles with a record among `most` from tile `first` on, but at least one: an empty list has a masked tile.

    slots   i32[rows, tiles * 64] in device memory
    """
    if most == 1:
        return jnp.int32(1)
    if not is_interpreted:
        return _counted(tiles_voted(most, tiles), slots, row, first)
    count = jnp.int32(0)
    for index in range(1, most):
        tile = first + index
        count += ((tile < tiles) & (slots[row, jnp.minimum(tile, tiles - 1) * TILE] >= 0)).astype(jnp.int32)
    return count + 1


def records_of_tile(slots: Any, row: Any, tile: Any, is_interpreted: bool) -> Any:
    """i32: places of a tile that name a slot; those are its first."""
    if not is_interpreted:
        return _counted(records_voted(), slots, row, tile)
    return jnp.sum((slots[row, pl.ds(tile * TILE, TILE)] >= 0).astype(jnp.int32))


def tiles_voted(most: int, tiles: int) -> str:
    """Operands: the count, the row's slots, its first tile."""
    text = _OPERANDS
    for index in range(0, most, WARP):
        lanes = min(WARP, most - index)
        text += f"add.u32 tile, $2, {index};  add.u32 tile, tile, lane;  mad.wide.u32 at, tile, {4 * TILE}, base;\n"
        text += f"setp.lt.u32 looks, lane, {lanes};  setp.lt.and.u32 looks, tile, {tiles}, looks;\n"
        text += f"mov.b32 slot, {_NONE};  @looks ld.global.nc.b32 slot, [at];\n{_VOTE}"
    return "{" + text + "max.u32 $0, count, 1;}"


def records_voted() -> str:
    """Operands: the count, the row's slots, the tile."""
    text = _OPERANDS + f"mad.wide.u32 at, $2, {4 * TILE}, base;  mad.wide.u32 at, lane, 4, at;\n"
    for index in range(0, TILE, WARP):
        text += f"ld.global.nc.b32 slot, [at + {4 * index}];\n{_VOTE}"
    return "{" + text + "mov.u32 $0, count;}"


_NONE = 0xFFFFFFFF
_OPERANDS = """
  .reg .b32 lane, tile, slot, votes, count;  .reg .pred looks, listed;  .reg .b64 base, at;
  mov.u32 lane, %laneid;  mov.u32 count, 0;  cvta.to.global.u64 base, $1;
"""
_VOTE = """
  setp.ge.s32 listed, slot, 0;  vote.sync.ballot.b32 votes, listed, 0xffffffff;
  popc.b32 votes, votes;  add.u32 count, count, votes;
"""


def _counted(text: str, slots: Any, row: Any, tile: Any) -> Any:
    def emit(context, slots, tile):
        del context
        i32 = ir.IntegerType.get_signless(32)
        operands = utils.memref_ptr(slots), tile.registers.item()
        count = utils.inline_ptx(text, *operands, result_types=i32, has_side_effects=True, convergent=True)
        return mgpu.FragmentedArray.splat(count, (), is_signed=True)

    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    types = (plgpu.RefType(), plgpu.Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=types, return_type=number)(emit)(slots.at[row], jnp.int32(tile))
