"""Rows of the pool into shared memory, laid out as wgmma reads them: 64 records of a list become one 64 x 576 tile.

It knows the bytes of both record formats, the tile's layout, and PTX. It knows no softmax.

TMA writes a row as one piece, and a wgmma operand keeps 128-byte pieces of a row 1,024 bytes apart, so a row would cost
nine copies of 128 bytes. Here four threads carry a row instead, and each thread two rows. bf16: 16 bytes at a time with
`cp.async`, which goes past the registers. FP8: load, scale, round to bf16, store. A slot of -1 becomes a row of
zeros, whatever the pool holds.

    column c of row r of a tile:  ((r / 8) * 9 + c / 64) * 1024 + (r % 8) * 128 + (((c % 64) / 8) ^ (r % 8)) * 16 bytes

The interpreter cannot run PTX: it has a body of its own here, which reads the same list and writes the same tile.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.sparse_mla import reference

TILE = 64  # records of a tile
LATENT, WIDTH = 512, 576
FP8_BYTES, BF16_BYTES = 656, 1152  # of a record
ROPE = 528  # where the rope values of an FP8 record begin
BLOCKS = WIDTH // 64  # columns of a tile's 8 x 64 blocks
BAND = BLOCKS * 1024  # bytes from 8 rows to the next 8
ONE_A_THREAD = plgpu.Layout.WG_STRIDED((128,), vec_size=1)

# Operands: the pool, the tiles, the stage to fill, the slots of this thread's two rows, or of its one.
# Thread 32 e + 4 q + t has rows 16 e + q and 16 e + q + 8; t: which quarter of these it carries. to: where the first of
# them begins in the tile; the second is a band on.
# half: 16 bytes of 64, the upper 64 for odd rows. Eight threads, a store's share of a cycle, thus reach all banks.
_PLACE = f"""
  .reg .b32 t, q, e, to, half;  .reg .pred listed<2>;  .reg .b32 slot<2>;  .reg .b64 pool, from<2>;
  mov.u32 t, %tid.x;  shr.u32 q, t, 2;  and.b32 q, q, 7;  shr.u32 e, t, 5;  and.b32 e, e, 3;  and.b32 t, t, 3;
  mad.lo.u32 to, e, {2 * BAND}, $1;  mad.lo.u32 to, $2, {TILE * WIDTH * 2}, to;  mad.lo.u32 to, q, 128, to;
  and.b32 half, q, 1;  shl.b32 half, half, 2;  add.u32 half, half, t;
  cvta.to.global.u64 pool, $0;
"""
# Registers of `convert_fp8`, by two warpgroups, that `load_fp8` fills.
AHEAD = (*(f"scale{index}" for index in range(4)), *(f"c{index}" for index in range(16)))
# Where two warpgroups gather, the first (threads 256 on) has the first of a thread's two rows, the other the second.
_SECOND = ".reg .b32 second;  mov.u32 second, %tid.x;  shr.u32 second, second, 7;  and.b32 second, second, 1;\n"


def _rows(bytes_per_row: int, gatherers: int) -> str:
    """Where this thread's rows begin in the pool, and in the tile where it has but one of them.

    A row that is not listed has an address of the pool all the same.
    """
    text = f"{_SECOND} mad.lo.u32 to, second, {BAND}, to;\n" if gatherers == 2 else ""
    return text + "".join(
        f"setp.ge.s32 listed{row}, ${3 + row}, 0;  max.s32 slot{row}, ${3 + row}, 0;\n"
        f"mad.wide.u32 from{row}, slot{row}, {bytes_per_row}, pool;\n"
        for row in range(2 // gatherers)
    )


def _two_pieces() -> str:
    """in0, in1: offsets in a record of the thread's two pieces of 128 bytes; at0, at1: where they go in a tile."""
    return """
      .reg .b32 at<2>, piece;  .reg .b64 in<2>;
      xor.b32 at0, half, q;  shl.b32 at0, at0, 4;  xor.b32 at1, at0, 64;  add.u32 at0, at0, to;  add.u32 at1, at1, to;
      shl.b32 piece, half, 4;  cvt.u64.u32 in0, piece;  xor.b32 piece, piece, 64;  cvt.u64.u32 in1, piece;
    """


def copy_bf16(gatherers: int = 1) -> str:
    """Starts the copies of 64 rows; `finish` waits for them."""
    text = [_PLACE, _rows(BF16_BYTES, gatherers), _two_pieces(), ".reg .b32 size;  .reg .b64 address;"]
    for row in range(2 // gatherers):
        text.append(f"selp.b32 size, 16, 0, listed{row};")  # of 0 bytes nothing is read, and zeros are written
        for piece in range(2):
            text.append(f"add.u64 address, from{row}, in{piece};")
            text += [
                f"cp.async.cg.shared.global.L2::128B [at{piece} + {BAND * row + 1024 * block}], "
                f"[address + {128 * block}], 16, size;"
                for block in range(BLOCKS)
            ]
    return "{" + "\n".join([*text, "cp.async.commit_group;"]) + "}"


def convert_fp8(gatherers: int = 1) -> str:
    """Loads 64 rows, scales and stores them as bf16.

    By one warpgroup, two half rows are in registers at a time, so that the loads of one run while the other is
    converted. By two, a thread has half the registers and half the work: 64 codes are in flight, and each block's place
    is loaded again as soon as the block is stored; the first of them are operands (`load_fp8`), behind the slot. The L2
    has been asked for the rows long before (`ask_for`).
    """
    text = [_PLACE, _rows(FP8_BYTES, gatherers)]
    codes = 32 // gatherers
    text.append(f".reg .b32 c<{codes}>, even, odd, place;  .reg .f32 scale<8>, f<4>;  .reg .b64 sixteen, address;")
    text.append(".reg .b16 lo, hi, h<4>;  .reg .b32 pair<2>, d<4>;")
    # The thread's 16 codes of a block's 64 become pieces 2 t and 2 t + 1 of its 128 bytes.
    text.append("shl.b32 place, t, 4;  cvt.u64.u32 sixteen, place;")
    text.append("shl.b32 even, t, 1;  xor.b32 even, even, q;  shl.b32 even, even, 4;")
    text.append("xor.b32 odd, even, 16;  add.u32 even, even, to;  add.u32 odd, odd, to;")
    if gatherers == 2:
        text += [f"mov.b32 {name}, ${4 + index};" for index, name in enumerate(AHEAD)]
    text += _one_row() if gatherers == 2 else _two_rows()
    return "{" + "\n".join(text) + "}"


def load_fp8() -> str:
    """What a thread that carries one row of codes loads of it before it waits for the stage: its scales, and its share
    of the first four blocks. Operands: these twenty words, the pool, the slot."""
    text = [
        ".reg .pred listed0;  .reg .b32 t, slot0;  .reg .b64 pool, from0, sixteen, address;",
        f"cvta.to.global.u64 pool, ${len(AHEAD)};  setp.ge.s32 listed0, ${len(AHEAD) + 1}, 0;",
        f"max.s32 slot0, ${len(AHEAD) + 1}, 0;  mad.wide.u32 from0, slot0, {FP8_BYTES}, pool;",
        "mov.u32 t, %tid.x;  and.b32 t, t, 3;  shl.b32 t, t, 4;  cvt.u64.u32 sixteen, t;",
        "add.u64 address, from0, sixteen;",
        *_load(0, [f"${index}" for index in range(4)], f"[from0 + {LATENT}]"),
    ]
    for block in range(4):
        text += _load(0, [f"${4 + 4 * block + i}" for i in range(4)], f"[address + {64 * block}]")
    return "{" + "\n".join(text) + "}"


def _two_rows() -> list[str]:
    text = [".reg .b32 rope<8>;"]
    text += _load_scales(0) + _load_half(0, 0, 0) + _load_half(0, 1, 1)
    text += _store_half(0, 0, 0) + _load_scales(1) + _load_half(1, 0, 0)
    text += _store_half(0, 1, 1) + _load_half(1, 1, 1)
    text += _store_half(1, 0, 0) + [_two_pieces()] + _load_rope(0)
    return text + _store_half(1, 1, 1) + _store_rope(0) + _load_rope(1) + _store_rope(1)


def _one_row() -> list[str]:
    """Four blocks of codes are in flight, the first ones since before the stage was waited for (`load_fp8`); the rope
    values follow them through the same registers."""
    text = ["add.u64 address, from0, sixteen;"]
    for block in range(BLOCKS - 1):
        text += _store_block(0, block, block % 4)
        if block < 4:
            text += _load_block(0, block + 4, block)
        elif block < 6:
            text += [_two_pieces()] if block == 4 else []
            text += _load_rope_piece(0, block - 4, [f"c{4 * (block - 4) + i}" for i in range(4)])
    for piece in range(2):
        text.append(_store_rope_piece(0, piece, [f"c{4 * piece + i}" for i in range(4)]))
    return text


def ask(bytes_per_row: int, gatherers: int = 1) -> str:
    """Asks the L2 for 64 rows, each by one of the threads that carry it. Operands: the pool, the slots.

    `prefetch.global.L2` would bring 32 bytes an instruction, a quarter of what was once asked for by lines.
    """
    text = ".reg .pred wanted, first;  .reg .b32 t, slot;  .reg .b64 pool, row;  cvta.to.global.u64 pool, $0;\n"
    text += "mov.u32 t, %tid.x;  and.b32 t, t, 3;  setp.eq.u32 first, t, 0;\n"
    for listed in ("$1", "$2")[: 2 // gatherers]:
        text += f"max.s32 slot, {listed}, 0;  mad.wide.u32 row, slot, {bytes_per_row}, pool;\n"
        text += f"setp.ge.and.s32 wanted, {listed}, 0, first;\n"
        text += f"@wanted cp.async.bulk.prefetch.L2.global [row], {bytes_per_row};\n"
    return "{" + text + "}"


def _load(row: int, names: list[str], address: str) -> list[str]:
    kind = "f32" if names[0].startswith("scale") else "b32"
    text = [f"mov.b32 {name}, 0;" if kind == "b32" else f"mov.f32 {name}, 0f00000000;" for name in names]
    return [*text, f"@listed{row} ld.global.nc.v4.{kind} {{{', '.join(names)}}}, {address};"]


def _load_scales(row: int) -> list[str]:
    return _load(row, [f"scale{4 * row + i}" for i in range(4)], f"[from{row} + {LATENT}]")


def _load_half(row: int, half: int, place: int) -> list[str]:
    """16 codes of each of four blocks, into the registers of one of two places."""
    text = [f"add.u64 address, from{row}, sixteen;"]
    for index in range(4):
        text += _load_block(row, 4 * half + index, 4 * place + index)
    return text


def _load_block(row: int, block: int, place: int) -> list[str]:
    """16 codes of a block of 64, from `address`."""
    return _load(row, [f"c{4 * place + i}" for i in range(4)], f"[address + {64 * block}]")


def _load_rope(row: int) -> list[str]:
    text = []
    for piece in range(2):
        text += _load_rope_piece(row, piece, [f"rope{4 * piece + i}" for i in range(4)])
    return text


def _load_rope_piece(row: int, piece: int, names: list[str]) -> list[str]:
    return [f"add.u64 address, from{row}, in{piece};", *_load(row, names, f"[address + {ROPE}]")]


def _store_rope(row: int) -> list[str]:
    return [_store_rope_piece(row, piece, [f"rope{4 * piece + i}" for i in range(4)]) for piece in range(2)]


def _store_rope_piece(row: int, piece: int, names: list[str]) -> str:
    return f"st.shared.v4.b32 [at{piece} + {BAND * row + 1024 * (BLOCKS - 1)}], {{{', '.join(names)}}};"


def _store_half(row: int, half: int, place: int) -> list[str]:
    text = []
    for index in range(4):
        text += _store_block(row, 4 * half + index, 4 * place + index)
    return text


def _store_block(row: int, block: int, place: int) -> list[str]:
    text = []
    for word in range(4):
        text.append(f"mov.b32 {{lo, hi}}, c{4 * place + word};")
        text.append("cvt.rn.f16x2.e4m3x2 pair0, lo;  cvt.rn.f16x2.e4m3x2 pair1, hi;")
        text.append("mov.b32 {h0, h1}, pair0;  mov.b32 {h2, h3}, pair1;")
        text += [f"cvt.f32.f16 f{i}, h{i};  mul.rn.f32 f{i}, f{i}, scale{4 * row + block // 2};" for i in range(4)]
        text += [f"cvt.rn.bf16x2.f32 d{2 * (word % 2) + i}, f{2 * i + 1}, f{2 * i};" for i in range(2)]
        if word % 2:
            to = ("even", "odd")[word // 2]
            text.append(f"st.shared.v4.b32 [{to} + {BAND * row + 1024 * block}], {{d0, d1, d2, d3}};")
    return text


def slots_of_tile(slots: Any, row: Any, first: Any, gatherers: int, is_interpreted: bool) -> tuple[Any, ...]:
    """As `start_tile` wants them: i32[128] for each row of a thread. To be read before the stage is waited for, as it
    takes a while."""
    if is_interpreted:
        return (slots[row, pl.ds(first, TILE)],)

    def emit(context, slots, first, *, index):
        del context
        i32 = ir.IntegerType.get_signless(32)
        operands = utils.memref_ptr(slots), first.registers.item()
        slot = utils.inline_ptx(own_slot(gatherers, index), *operands, result_types=i32, has_side_effects=True)
        return _of_threads(slot)

    own = plgpu.ShapeDtypeStruct((TILE * 2,), jnp.int32, layout=ONE_A_THREAD)
    read = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=own)
    return tuple(
        read(functools.partial(emit, index=index))(slots.at[row], jnp.int32(first)) for index in range(2 // gatherers)
    )


def own_slot(gatherers: int, index: int) -> str:
    """The slot of a thread's row `index`. Operands: that slot, the slots of the query row, the tile's first place.

    One load, by the thread's own address: a choice between two loaded slots is made by loading one over the other,
    which waits for the first: 27 % of these warps' time.
    """
    text = ".reg .b32 t, place, warp;  .reg .b64 base, at;  cvta.to.global.u64 base, $1;\n"
    text += "mov.u32 t, %tid.x;  shr.u32 place, t, 2;  and.b32 place, place, 7;  add.u32 place, place, $2;\n"
    text += "shr.u32 warp, t, 5;  and.b32 warp, warp, 3;  mad.lo.u32 place, warp, 16, place;\n"
    if gatherers == 2:
        text += f"{_SECOND} mad.lo.u32 place, second, 8, place;\n"
    return "{" + text + f"mad.wide.u32 at, place, 4, base;  ld.global.nc.b32 $0, [at + {32 * index}];" + "}"


def ask_for(records: Any, listed: tuple[Any, ...], gatherers: int, is_interpreted: bool) -> None:
    """Tells the L2 that the records of a tile's slots are wanted soon, while their stage is still in use."""
    if is_interpreted:
        return
    text = ask(FP8_BYTES if records.dtype == jnp.uint32 else BF16_BYTES, gatherers)

    def emit(context, records, *listed):
        del context
        utils.inline_ptx(text, utils.memref_ptr(records), *map(_word, listed), has_side_effects=True)

    types = (plgpu.RefType(), *(ONE_A_THREAD for _ in listed))
    plgpu.inline_mgpu(arg_types=types)(emit)(records, *listed)


def _word(slot: Any) -> Any:
    """The one that this thread holds."""
    return utils.bitcast(slot.registers.item(), ir.IntegerType.get_signless(32))


def load_ahead(records: Any, listed: tuple[Any, ...], gatherers: int, is_interpreted: bool) -> tuple[Any, ...]:
    """Words of the tile's records that can be on their way before there is a stage for them: `start_tile` wants them.

    The latency of the L2 would otherwise follow the wait for the stage. None where rows pass no registers, and none
    where a thread carries two rows.
    """
    if is_interpreted or gatherers == 1 or records.dtype != jnp.uint32:
        return ()
    word = plgpu.ShapeDtypeStruct((TILE * 2,), jnp.int32, layout=ONE_A_THREAD)

    def emit(context, records, listed):
        del context
        i32 = ir.IntegerType.get_signless(32)
        operands = utils.memref_ptr(records), _word(listed)
        words = utils.inline_ptx(load_fp8(), *operands, result_types=[i32] * len(AHEAD), has_side_effects=True)
        return tuple(map(_of_threads, words))

    load = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ONE_A_THREAD), return_type=(word,) * len(AHEAD))
    return load(emit)(records, *listed)


def _of_threads(word: Any) -> Any:
    """A register of each thread -> i32[128]."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.FragmentedArray(
        _registers=np.array([utils.bitcast(word, ir.VectorType.get((1,), i32))], object),
        _layout=mgpu.WGStridedFragLayout((TILE * 2,), vec_size=1),
        _is_signed=True,
    )


def start_tile(
    records: Any,
    tiles: Any,
    stage: Any,
    listed: tuple[Any, ...],
    ahead: tuple[Any, ...],
    gatherer: Any,
    gatherers: int,
    is_interpreted: bool,
) -> None:
    """Begins to fill `tiles[stage]` with the records of the slots `listed`.

    records     the pool in device memory
    tiles       bf16[stages, 64, 576] in shared memory, a `wgmma_operand`
    listed      of `slots_of_tile`
    ahead       of `load_ahead`
    gatherer    which of `gatherers` warpgroups, 1 or 2, this is: of two, each brings every second group of 8 rows
    """
    if is_interpreted:
        _interpreted_tile(records, tiles, stage, listed[0], gatherer, gatherers)
        return
    text = convert_fp8(gatherers) if records.dtype == jnp.uint32 else copy_bf16(gatherers)

    def emit(context, records, tiles, stage, *words):
        del context
        pool, tile = utils.memref_ptr(records), utils.memref_ptr(tiles)
        utils.inline_ptx(text, pool, tile, stage.registers.item(), *map(_word, words), has_side_effects=True)

    types = (plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT, *(ONE_A_THREAD for _ in (*listed, *ahead)))
    plgpu.inline_mgpu(arg_types=types)(emit)(records, tiles.ref, stage, *listed, *ahead)


def finish(is_interpreted: bool, pending: int = 0) -> None:
    """Waits for this thread's copies, except the last `pending` tiles, and lets wgmma see them after a barrier."""
    if is_interpreted:
        return

    def emit(context):
        del context
        utils.inline_ptx(f"cp.async.wait_group {pending};  fence.proxy.async.shared::cta;", has_side_effects=True)

    plgpu.inline_mgpu()(emit)()


def _interpreted_tile(records: Any, tiles: Any, stage: Any, listed: Any, gatherer: Any, gatherers: int) -> None:
    """One access reads the whole pool, small in a test, as each takes the interpreter milliseconds.

    Of two warpgroups, each brings half of the tile's rows in one piece here.
    """
    stored = records[...].at[jnp.maximum(listed, 0)].get(mode="clip")
    rows = jnp.where(listed[:, None] >= 0, reference.decode(stored, WIDTH, LATENT), 0.0).astype(jnp.bfloat16)
    share = TILE // gatherers
    first = gatherer * share
    tiles[stage, pl.ds(first, share)] = lax.dynamic_slice_in_dim(rows, first, share)
