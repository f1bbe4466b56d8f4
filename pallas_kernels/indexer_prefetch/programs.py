"""What a warp of the prefetch role runs, as PTX.

It knows verdict words, slots, caps, staging and a record's journey, as addresses. It does not know how the words come
to be (`ahead`), nor what a score is. Every branch is taken by a whole warp.

Operands: verdicts, page numbers, lengths, cap, slot_of, pool, layer, candidates, rows, records; the
block, and the number of its tiles. Some names: `part`, the math warpgroup that scored this lane's word; `offset`,
where its half begins in its page; `left`, its candidates not yet looked at; `votes`, lanes of the warp.
"""

from __future__ import annotations

from pallas_kernels.indexer_prefetch.reference import NO_SLOT
from pallas_kernels.indexer_prefetch.shape import CANDIDATES, LOADS, MARKED, NO_CANDIDATES, WARPS, Shape
from pallas_kernels.indexer_scores.mosaic_gpu import PAGE

EVERY_LANE = "0xffffffff"
FIRST_LANE = "setp.eq.u32 is_first, lane, 0;"


def program(shape: Shape) -> str:
    """What every thread of the prefetch role runs: a tile at a time, and of each lane one candidate at a time."""
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
