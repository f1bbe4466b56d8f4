"""What the fused kernel keeps for whoever selects: for each query row and position, does the score exceed a bound?

It knows bits, where a warp of the maths has its scores, and PTX. It knows no slot and nothing of prefetch; the bound is
another number than the threshold, as a list must hold k positions and more, which few predictions of the k-th score
leave.

    words u32[B, T, 2 N]    bit p % 32 of word p // 32: scores[b, t, p] > bound[b]

A math warp has 16 positions of a page, which are half a word: it stores them as such, and no two warps meet in one. A
position that a row does not see scores -inf and exceeds nothing. Four instructions of a warp in which lanes wait for
each other, and a store of two bytes, beside the 64 bytes of scores that it stores.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.indexer_prefetch.reference import WORD, pack
from pallas_kernels.indexer_scores.mosaic_gpu import PAGE, ROWS

HALF = WORD // 2  # positions of a warp
EVERY_LANE = "0xffffffff"


@dataclasses.dataclass(frozen=True)
class Above:
    """The bounds, and where the bits go."""

    bound: Any  # f32[B]
    words: Any  # u32[B, T, 2 N]

    def keep(self, rows: int, page_count: int, seat: Any, row: int, start: Any, values: Any, is_interpreted: bool):
        """Keeps the bits of `values` f32[64]: one query row, a page of positions from `start` on. By a warpgroup."""
        bound = self.bound[seat]
        if is_interpreted:
            self.words[seat, row, pl.ds(start // WORD, PAGE // WORD)] = pack(values > bound)
            return

        def emit(context, words, half, bound, values):
            del context
            half, bound = half.registers.item(), bound.registers.item()
            pair = [utils.bitcast(register, half.type) for register in values.registers.flat]
            arguments = [utils.memref_ptr(words), half, utils.bitcast(bound, half.type), *pair]
            utils.inline_ptx(PROGRAM, *arguments, has_side_effects=True, convergent=True)

        splat = plgpu.Layout.WG_SPLAT
        half = (seat * rows + row) * (page_count * (PAGE // HALF)) + start // HALF
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, ROWS))(emit)(self.words, half, bound, values)


PROGRAM = f"""{{
  .reg .pred is_above, is_high, is_first;  .reg .b32 lane, low_bit, high_bit, from_lane, bits, at;  .reg .b16 half;
  .reg .f32 score, bound;  .reg .b64 address;
  mov.u32 lane, %laneid;  mov.u32 at, %tid.x;  shr.u32 at, at, 5;  and.b32 at, at, 3;  add.u32 at, at, $1;
  mad.wide.u32 address, at, 2, $0;
  mov.b32 bound, $2;
  mov.b32 score, $3;  setp.gt.f32 is_above, score, bound;  selp.b32 low_bit, 1, 0, is_above;
  mov.b32 score, $4;  setp.gt.f32 is_above, score, bound;  selp.b32 high_bit, 2, 0, is_above;
  or.b32 bits, low_bit, high_bit;
  and.b32 from_lane, lane, 7;  shl.b32 from_lane, from_lane, 2;
  shfl.sync.idx.b32 bits, bits, from_lane, 31, {EVERY_LANE};
  setp.ge.u32 is_high, lane, 8;  selp.b32 at, 2, 1, is_high;  and.b32 bits, bits, at;
  setp.ne.u32 is_above, bits, 0;  setp.lt.and.u32 is_above, lane, {HALF}, is_above;
  vote.sync.ballot.b32 bits, is_above, {EVERY_LANE};
  cvt.u16.u32 half, bits;  setp.eq.u32 is_first, lane, 0;
  @is_first st.global.b16 [address], half;
}}"""
"""Operands: the words, the first half word of the page, the bound, and this thread's two scores, as bits.

Lane 4 q + t has the scores of positions q and q + 8 of its warp; lane p of the first 16 asks for position p's.
"""
