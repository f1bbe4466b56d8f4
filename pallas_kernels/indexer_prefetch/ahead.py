"""The prefetching side of the fused kernel: verdicts that the maths leaves behind, and the role that acts on them.

It knows slots, caps, staging and PTX. It knows no query and no key, and not how a warp fetches (`programs`).

A *verdict* is one bit a position: does a query row of its seat score above the seat's threshold? A math warp holds 16
positions of a tile and leaves them as one word; the words of all tiles of a block have a place each, so no buffer is
ever waited for: however slow the link, the maths goes on. A word says itself that it is there (MARKED), in the same
store as its bits, so no barrier lies between the roles either.

    word of (tile of the block, math warpgroup, warp):   bit 4 q + h   position 16 warp + 8 h + q of the page, h = 0, 1
                                                         bit 4 q + 2   the tile is scored

The prefetch role is a few warpgroups whose warps work alone, with eight of them each on every eighth tile of the block.
A lane takes half a word, one candidate at a time: 32 looks into slot_of are under way together. What is old and absent
is counted with one atomic addition for the warp, which gives each candidate a place in its seat's staging; those under
the cap are written down and copied by the whole warp, several records as one line of words, 16 bytes a lane and load.

The interpreter cannot run PTX: it has a body of its own for each of the three functions below, with the same contract,
and a barrier for each page of each tile in place of the marks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.indexer_prefetch.above import Above
from pallas_kernels.indexer_prefetch.programs import EVERY_LANE, FIRST_LANE, program
from pallas_kernels.indexer_prefetch.reference import NO_ROW, NO_SLOT
from pallas_kernels.indexer_prefetch.shape import MARKED, NO_CANDIDATES, THREADS, WARPS, Shape
from pallas_kernels.indexer_scores import mosaic_gpu as scores
from pallas_kernels.indexer_scores.mosaic_gpu import PAGE, ROWS


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What the prefetch role sees besides the page numbers, and where the maths leaves its verdicts."""

    threshold: Any
    lengths: Any
    cap: Any
    slot_of: Any
    pool: Any
    layer: Any
    candidates: Any  # i32[B]  NO_CANDIDATES + how many there are so far
    rows: Any  # i32[B, S], NO_ROW at first
    records: Any
    verdicts: Any  # i32[most_tiles * words]; interpreted, i32[most_tiles, tokens]
    verdicts_cleared: Any  # None when interpreted
    page_scored: Any  # [most_tiles * math], only when interpreted


def blank(seats: int, staging: int) -> tuple[jax.Array, jax.Array]:
    """Written before the kernel starts: what atomics count from, i32[B], and lists of nothing, i32[B, S]."""
    return jnp.full((seats,), NO_CANDIDATES, jnp.int32), jnp.full((seats, staging), NO_ROW, jnp.int32)


def scratch(shape: Shape) -> dict[str, Any]:
    if shape.is_interpreted:
        barriers = plgpu.Barrier(num_arrivals=1, num_barriers=shape.most_tiles * shape.tuning.math)
        return dict(verdicts=plgpu.SMEM((shape.most_tiles, shape.tokens), jnp.int32), page_scored=barriers)
    verdicts = plgpu.SMEM((shape.most_tiles * shape.words,), jnp.int32)
    return dict(verdicts=verdicts, verdicts_cleared=plgpu.Barrier(num_arrivals=1))


@dataclasses.dataclass(frozen=True)
class Watched:
    """Takes the place of the scores' array where the math role writes: stores them, leaves their verdict behind, and
    keeps which of them exceed the bound, where there is one.
    """

    shape: Shape
    out: Any
    ahead: Ahead
    above: Above | None = None

    def __setitem__(self, at: tuple[Any, int, Any], values: Any) -> None:
        seat, row, positions = at
        self.out[at] = values
        tuning, tile = self.shape.tuning, positions.start // self.shape.tokens
        linear = seat * self.shape.runs + tile // tuning.run
        index = linear // tuning.blocks * tuning.run + tile % tuning.run
        page = positions.start % self.shape.tokens // PAGE
        mark(self.shape, self.ahead, seat, row, index, page, values)
        if self.above is not None:
            sizes = self.shape.rows, self.shape.page_count
            self.above.keep(*sizes, seat, row, positions.start, values, self.shape.is_interpreted)


# The math role's part.


def mark(shape: Shape, ahead: Ahead, seat: Any, row: int, index: Any, page: Any, values: Any) -> None:
    """Leaves the verdict on `values` f32[64], the scores of one query row for one page of the block's index-th tile.

    Rows come in order; the last one marks the page as scored.
    """
    threshold, is_last = ahead.threshold[seat], row == shape.rows - 1
    if shape.is_interpreted:
        place = (index, pl.ds(page * PAGE, PAGE))
        passes = (values > threshold).astype(jnp.int32)
        ahead.verdicts[place] = passes if row == 0 else passes | ahead.verdicts[place]
        if is_last:
            plgpu.barrier_arrive(ahead.page_scored.at[index * shape.tuning.math + page])
        return

    text = ballot(is_first=row == 0, is_last=is_last)

    def emit(context, verdicts, word, threshold, values):
        del context
        word, threshold = word.registers.item(), threshold.registers.item()
        pair = [utils.bitcast(register, word.type) for register in values.registers.flat]
        arguments = [utils.memref_ptr(verdicts), word, utils.bitcast(threshold, word.type), *pair]
        utils.inline_ptx(text, *arguments, has_side_effects=True, convergent=True)

    splat = plgpu.Layout.WG_SPLAT
    word = index * shape.words + page * WARPS
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat, ROWS))(emit)(ahead.verdicts, word, threshold, values)


def ballot(is_first: bool, is_last: bool) -> str:
    """Operands: the verdicts, the page's first word, the threshold, and this thread's two scores, as bits.

    Every score is in the four threads of a quad; the first speaks for row q, the second for row q + 8.
    """
    add = "mov.b32 before, 0;  @is_first ld.shared.b32 before, [at];  or.b32 verdict, verdict, before;"
    return f"""{{
      .reg .pred is_high, is_above, passes, is_first;  .reg .b32 lane, quarter, verdict, at, before;
      .reg .f32 low, high, score, threshold;
      mov.u32 lane, %laneid;  and.b32 quarter, lane, 3;  {FIRST_LANE}
      mov.u32 at, %tid.x;  shr.u32 at, at, 5;  and.b32 at, at, {WARPS - 1};  add.u32 at, at, $1;
      mad.lo.u32 at, at, 4, $0;
      mov.b32 threshold, $2;  mov.b32 low, $3;  mov.b32 high, $4;
      setp.eq.u32 is_high, quarter, 1;  selp.f32 score, high, low, is_high;
      setp.gt.f32 is_above, score, threshold;  setp.lt.and.u32 passes, quarter, 2, is_above;
      vote.sync.ballot.b32 verdict, passes, {EVERY_LANE};
      {"" if is_first else add}
      {f"or.b32 verdict, verdict, {MARKED:#x};" if is_last else ""}
      @is_first st.volatile.shared.b32 [at], verdict;
    }}"""


# The prefetch role.


def clear(shape: Shape, ahead: Ahead) -> None:
    """No page is marked as scored. The maths waits for this once, while its first keys are on their way."""
    if shape.is_interpreted:
        return
    text = clearing(shape)

    def emit(context, verdicts):
        del context
        utils.inline_ptx(text, utils.memref_ptr(verdicts), has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(emit)(ahead.verdicts)
    plgpu.barrier_arrive(ahead.verdicts_cleared)


def clearing(shape: Shape) -> str:
    """Zeros in all words. Operand: the verdicts."""
    return f"""{{
      .reg .pred is_word, more;  .reg .b32 word, at, first;
      mov.u32 word, %tid.x;  and.b32 word, word, {THREADS - 1};  mad.lo.u32 at, word, 4, $0;  mov.b32 first, 0;
    AGAIN:
      setp.lt.u32 is_word, word, {shape.most_tiles * shape.words};  @is_word st.shared.b32 [at], 0;
      add.u32 word, word, {THREADS};  add.u32 at, at, {4 * THREADS};  add.u32 first, first, {THREADS};
      setp.lt.u32 more, first, {shape.most_tiles * shape.words};  @more bra.uni AGAIN;
    }}"""


def wait_for_clear(shape: Shape, ahead: Ahead) -> None:
    """Before the first verdict is left, and before the first is looked for: what lies there may look like one."""
    if not shape.is_interpreted:
        plgpu.barrier_wait(ahead.verdicts_cleared)


def prefetch(shape: Shape, ahead: Ahead, page_numbers: Any) -> None:
    """Stages the candidates of all tiles of this block, in order, as their verdicts come."""
    if shape.is_interpreted:
        _interpreted(shape, ahead, page_numbers)
        return
    text = program(shape)

    def emit(context, *operands):
        del context
        *references, block, work = operands
        pointers = [utils.memref_ptr(reference) for reference in references]
        numbers = [block.registers.item(), work.registers.item()]
        utils.inline_ptx(text, *pointers, *numbers, has_side_effects=True, convergent=True)

    references = (
        *(ahead.verdicts, page_numbers, ahead.lengths, ahead.cap, ahead.slot_of, ahead.pool, ahead.layer),
        *(ahead.candidates, ahead.rows, ahead.records),
    )
    types = (plgpu.RefType(),) * len(references) + (plgpu.Layout.WG_SPLAT,) * 2
    block = lax.axis_index("block")
    plgpu.inline_mgpu(arg_types=types)(emit)(*references, block, scores.work_of_block(shape))


def _interpreted(shape: Shape, ahead: Ahead, page_numbers: Any) -> None:
    """One access reads or writes a whole small array, as each takes the interpreter milliseconds."""
    math = shape.tuning.math

    @pl.loop(0, scores.work_of_block(shape) * math)
    def _(number):
        index, part = number // math, number % math
        seat, tile = scores.place(shape, index)
        page = tile * math + part

        @pl.when(page < shape.page_count)  # the last tile of a seat may be cut
        def _():
            plgpu.barrier_wait(ahead.page_scored.at[number])
            inside = jnp.arange(PAGE, dtype=jnp.int32)
            row = page_numbers[seat, page] * PAGE + inside
            is_row = (row >= 0) & (row < shape.host_rows) & (page * PAGE + inside < ahead.lengths[seat])
            is_absent = is_row & (ahead.slot_of[...].at[jnp.where(is_row, row, 0)].get() == NO_SLOT)
            wanted = is_absent & (ahead.verdicts[index, pl.ds(part * PAGE, PAGE)] != 0)
            before = ahead.candidates[seat]
            place = before - NO_CANDIDATES + jnp.cumsum(wanted, dtype=jnp.int32) - 1
            place = jnp.where(wanted & (place < jnp.minimum(ahead.cap[seat], shape.staging)), place, shape.staging)
            ahead.candidates[seat] = before + jnp.sum(wanted, dtype=jnp.int32)
            ahead.rows[seat] = ahead.rows[seat].at[place].set(row, mode="drop")
            found = ahead.pool[ahead.layer[0]].at[jnp.where(is_row, row, 0)].get()
            ahead.records[seat] = ahead.records[seat].at[place].set(found, mode="drop")
