"""The prefetching side of the fused kernel: verdicts that the maths leaves behind, and the role that acts on them.

It knows slots, caps, staging, the bytes of a record's journey, and PTX. It knows no query and no key.

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
from pallas_kernels.indexer_prefetch.reference import NO_ROW, NO_SLOT
from pallas_kernels.indexer_scores import mosaic_gpu as scores
from pallas_kernels.indexer_scores.mosaic_gpu import PAGE, ROWS

WARPS = 4  # of a warpgroup
THREADS = 128
CANDIDATES = 0x11111111  # the bits of h = 0
MARKED = 0x44444444
EVERY_LANE = "0xffffffff"
FIRST_LANE = "setp.eq.u32 is_first, lane, 0;"
NO_CANDIDATES = -1  # what a seat's count starts from: the padding of its list, so that one fill serves both
LOADS = 6  # that a lane has in flight


@dataclasses.dataclass(frozen=True)
class Tuning(scores.Tuning):
    """How the work is cut, and who fetches.

    fetchers    warpgroups of the prefetch role: 1, 2 or 4. Beside four that score and one that loads, two leave 72
                registers a thread
    together    records that a warp moves at once, where LOADS loads a lane do
    nap_ns      between two looks at a tile that is not scored yet
    """

    fetchers: int = 2
    together: int = 4
    nap_ns: int = 200

    @classmethod
    def of(cls, tuning: scores.Tuning) -> Tuning:
        """The same, if it says who fetches; otherwise the usual ones do."""
        return tuning if isinstance(tuning, cls) else cls(**dataclasses.asdict(tuning))


@dataclasses.dataclass(frozen=True)
class Shape(scores.Shape):
    """Everything static about the fused kernel.

    pages_per_math is 1: a warp's word holds the 16 positions that it has of one page.
    """

    tuning: Tuning
    staging: int
    host_rows: int
    record: tuple[int, ...]
    record_bytes: int
    keeps_above: bool = False  # also says which scores exceed a bound

    @property
    def fetchers(self) -> int:
        return 1 if self.is_interpreted else self.tuning.fetchers

    @property
    def words(self) -> int:
        """Verdict words of a tile."""
        return self.tuning.math * WARPS

    @property
    def most_tiles(self) -> int:
        """Of one block."""
        return -(-self.seats * self.runs // self.tuning.blocks) * self.tuning.run

    @property
    def chunk_bytes(self) -> int:
        """What one lane moves at a time. Records lie one after another from an aligned address on."""
        return next(size for size in (16, 8, 4) if self.record_bytes % size == 0)

    @property
    def chunks(self) -> int:
        """Of a record."""
        return self.record_bytes // self.chunk_bytes

    @property
    def rows_together(self) -> int:
        return max(1, min(self.tuning.together, 32 * LOADS // self.chunks))

    @property
    def stages(self) -> int:
        """As the plain kernel's, from what the verdicts leave."""
        queries = 2 * self.rows * (self.heads * scores.WIDTH * (1 if self.is_fp8 else 2) + scores.WEIGHTS * 4)
        bytes_per_stage = self.tokens * (scores.WIDTH + 4 if self.is_fp8 else 2 * scores.WIDTH)
        room = scores.SHARED_BYTES - queries - 4 * self.words * self.most_tiles
        return min(self.tuning.stages, room // bytes_per_stage)


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


def program(shape: Shape) -> str:
    """What every thread of the prefetch role runs. Operands: the references in order, the block, its tiles.

    Every branch is taken by a whole warp. The names: `part`, the math warpgroup that scored this lane's word; `offset`,
    where its half begins in its page; `left`, its candidates not yet looked at; `votes`, lanes of the warp.
    """
    every, size, warps = EVERY_LANE, shape.record_bytes, shape.fetchers * WARPS
    run, runs = shape.tuning.run, shape.runs
    return f"""{{
      .reg .pred is_done, is_word, is_there, has, wanted, more, is_first, is_next;
      .reg .b32 lane, warp, word, half, part, offset, index, linear, seat, tile, page, number, length, cap, layer, at;
      .reg .b32 left, first_position, first_row, bit, position, row, slot, votes, count, rank, place, total, from_lane;
      .reg .b32 chunk, line;  .reg .b32 one<{shape.rows_together}>;
      .reg .b64 address, of_layer, of_staging, in_line;  .reg .b32 v<{LOADS * 4}>;  .reg .pred in<{LOADS}>;
      mov.u32 lane, %laneid;  mov.u32 warp, %tid.x;  shr.u32 warp, warp, 5;  and.b32 warp, warp, {warps - 1};
      {FIRST_LANE}
      and.b32 word, lane, 15;  shr.u32 half, lane, 4;  shr.u32 part, word, 2;
      and.b32 offset, word, 3;  shl.b32 offset, offset, 4;  mad.lo.u32 offset, half, 8, offset;
      ld.global.nc.b32 layer, [$6];
      mul.wide.s32 of_layer, layer, {shape.host_rows};  mul.lo.s64 of_layer, of_layer, {size};
      add.u64 of_layer, of_layer, $5;
      mul.lo.u32 line, lane, {shape.chunk_bytes};  cvt.u64.u32 in_line, line;
      add.u64 of_layer, of_layer, in_line;  add.u64 of_staging, in_line, $9;
      mov.u32 index, warp;

    TILE:
      setp.ge.s32 is_done, index, $11;  @is_done bra.uni DONE;
      div.u32 linear, index, {run};  mul.lo.u32 tile, linear, {run};  sub.u32 tile, index, tile;
      mad.lo.u32 linear, linear, {shape.tuning.blocks}, $10;
      div.u32 seat, linear, {runs};  mul.lo.u32 at, seat, {runs};  sub.u32 at, linear, at;
      mad.lo.u32 tile, at, {run}, tile;
      mad.lo.u32 page, tile, {shape.tuning.math}, part;
      setp.lt.u32 is_word, word, {shape.words};  setp.lt.and.u32 is_word, page, {shape.page_count}, is_word;
      mad.lo.u32 at, seat, {shape.page_count}, page;  mad.wide.u32 address, at, 4, $1;
      mov.b32 number, -1;  @is_word ld.global.nc.b32 number, [address];
      mad.wide.u32 address, seat, 4, $2;  ld.global.nc.b32 length, [address];
      mad.wide.u32 address, seat, 4, $3;  ld.global.nc.b32 cap, [address];  min.s32 cap, cap, {shape.staging};
      mad.lo.u32 at, index, {shape.words}, word;  mad.lo.u32 at, at, 4, $0;
    LOOK:
      mov.b32 left, {MARKED:#x};  @is_word ld.volatile.shared.b32 left, [at];
      and.b32 bit, left, {MARKED:#x};  setp.ne.u32 is_there, bit, 0;  vote.sync.all.pred is_there, is_there, {every};
      @is_there bra.uni MARKED;
      nanosleep.u32 {shape.tuning.nap_ns};  bra.uni LOOK;
    MARKED:
      shr.b32 left, left, half;  and.b32 left, left, {CANDIDATES:#x};
      mad.lo.u32 first_position, page, {PAGE}, offset;  mad.lo.u32 first_row, number, {PAGE}, offset;

    NEXT:
      setp.ne.u32 has, left, 0;  vote.sync.any.pred more, has, {every};  @!more bra.uni ADVANCE;
      brev.b32 bit, left;  clz.b32 bit, bit;  shr.u32 bit, bit, 2;
      add.u32 position, first_position, bit;  add.u32 row, first_row, bit;
      add.u32 bit, left, -1;  and.b32 left, left, bit;
      setp.lt.and.s32 wanted, position, length, has;  setp.lt.and.u32 wanted, row, {shape.host_rows}, wanted;
      mad.wide.u32 address, row, 4, $4;  mov.b32 slot, 0;  @wanted ld.global.nc.b32 slot, [address];
      setp.eq.and.s32 wanted, slot, {NO_SLOT}, wanted;
      vote.sync.ballot.b32 votes, wanted, {every};
      setp.ne.u32 more, votes, 0;  @!more bra.uni NEXT;
      popc.b32 count, votes;  mov.u32 rank, %lanemask_lt;  and.b32 rank, rank, votes;  popc.b32 rank, rank;
      mad.wide.u32 address, seat, 4, $7;  mov.b32 place, 0;
      @is_first atom.global.add.u32 place, [address], count;
      shfl.sync.idx.b32 place, place, 0, 31, {every};
      add.u32 place, place, rank;  sub.u32 place, place, {NO_CANDIDATES};
      setp.lt.and.s32 wanted, place, cap, wanted;
      mad.lo.u32 place, seat, {shape.staging}, place;  mad.wide.u32 address, place, 4, $8;
      @wanted st.global.b32 [address], row;
      vote.sync.ballot.b32 votes, wanted, {every};

    MOVE:
      setp.ne.u32 more, votes, 0;  @!more bra.uni NEXT;
      {move_group(shape)}
      bra.uni MOVE;

    ADVANCE:
      add.u32 index, index, {warps};  bra.uni TILE;
    DONE:
    }}"""


def move_group(shape: Shape) -> str:
    """The first `rows_together` of the lanes in `votes` leave them, and their records are moved as one line of chunks:
    all loads of a lane before its first store.

    Chunk c of the line is in record c / chunks, of the lane `one<c / chunks>`. Its address there is that of the record,
    less the records that come before it in the line, plus c chunks; `of_layer` and `of_staging` are a lane's own chunk.
    """
    every, size, chunks = EVERY_LANE, shape.chunk_bytes, shape.chunks
    words = size // 4
    kind = f"v{words}.b32" if words > 1 else "b32"
    lines = [f"popc.b32 total, votes;  min.u32 total, total, {shape.rows_together};"]
    lines.append(f"mul.lo.u32 total, total, {chunks};")
    for record in range(shape.rows_together):
        lines.append(f"brev.b32 one{record}, votes;  clz.b32 one{record}, one{record};")
        lines.append("add.u32 bit, votes, -1;  and.b32 votes, votes, bit;")

    def address(first: int, numbered: str, base: str) -> str:
        """Of chunk first + lane, less `first` chunks; `numbered` is the register that has the record's number."""
        low, high = first // chunks, min(shape.rows_together - 1, (first + 31) // chunks)
        text = f"mov.b32 from_lane, one{low};  mov.b32 line, {low};  "
        for record in range(low + 1, high + 1):
            text += f"setp.ge.u32 is_next, lane, {record * chunks - first};  "
            text += f"selp.b32 from_lane, one{record}, from_lane, is_next;  selp.b32 line, {record}, line, is_next;  "
        text += f"shfl.sync.idx.b32 chunk, {numbered}, from_lane, 31, {every};  sub.u32 chunk, chunk, line;  "
        return text + f"mad.wide.s32 address, chunk, {shape.record_bytes}, {base};"

    line_chunks = shape.rows_together * chunks
    for start in range(0, line_chunks, 32 * LOADS):
        stores = []
        for load, first in enumerate(range(start, min(line_chunks, start + 32 * LOADS), 32)):
            names = [f"v{load * 4 + word}" for word in range(words)]
            values = "{" + ", ".join(names) + "}" if words > 1 else names[0]
            lines.append(f"add.u32 chunk, lane, {first};  setp.lt.u32 in{load}, chunk, total;")
            lines.append(address(first, "row", "of_layer"))
            lines.append(f"@in{load} ld.global.nc.L1::no_allocate.{kind} {values}, [address + {first * size}];")
            stores.append(address(first, "place", "of_staging"))
            stores.append(f"@in{load} st.global.{kind} [address + {first * size}], {values};")
        lines += stores
    return "\n".join(lines)


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
