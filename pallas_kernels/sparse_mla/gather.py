"""Rows of the pool into shared memory, laid out as wgmma reads them: 64 records of a list become one 64 x 576 tile.

It knows the bytes of both record formats, the tile's layout, and PTX. It knows no softmax.

TMA writes a row as one piece, and a wgmma operand keeps 128-byte pieces of a row 1,024 bytes apart, so a row would cost
nine copies of 128 bytes. Here eight threads carry a row instead. bf16: each copies 16 bytes of every 128 with
`cp.async`, which goes past the registers. FP8: each loads, scales, rounds to bf16 and stores. A slot of -1 becomes a row
of zeros, whatever the pool holds.

    column c of row r of a tile:  ((r / 8) * 9 + c / 64) * 1024 + (r % 8) * 128 + (((c % 64) / 8) ^ (r % 8)) * 16 bytes

The interpreter cannot run PTX: it has a body of its own here, which reads the same list and writes the same tile.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sparse_mla import reference

TILE = 64  # records of a tile
LATENT, WIDTH = 512, 576
FP8_BYTES, BF16_BYTES = 656, 1152  # of a record
BLOCKS = WIDTH // 64  # columns of a tile's 8 x 64 blocks
BAND = BLOCKS * 1024  # bytes from 8 rows to the next 8
PASSES = 4  # 128 threads carry 16 rows at a time

# Operands: the pool, the lists, the tiles, the stage to fill, the place of the tile's first slot among all lists.
# t: this thread's 16 bytes of 128; r: its row of 16. `to`: where they go in the first block of the first pass.
_PLACE = f"""
  .reg .b32 t, r, e, to, s<{PASSES}>;  .reg .pred listed<{PASSES}>;  .reg .b64 list, pool, from<{PASSES}>;
  mov.u32 t, %tid.x;  shr.u32 r, t, 3;  and.b32 t, t, 7;  and.b32 r, r, 15;
  and.b32 e, r, 7;  xor.b32 to, t, e;  shl.b32 to, to, 4;  mad.lo.u32 to, e, 128, to;
  shr.u32 e, r, 3;  mad.lo.u32 to, e, {BAND}, to;  mad.lo.u32 to, $3, {TILE * WIDTH * 2}, to;  add.u32 to, to, $2;
  add.u32 r, r, $4;  mad.wide.u32 list, r, 4, $1;  cvta.to.global.u64 list, list;
  cvta.to.global.u64 pool, $0;
"""


def issue_bf16() -> str:
    """Starts the copies of 64 rows; `finish` waits for them."""
    text = [_PLACE, ".reg .b32 size;  .reg .b32 lane;  shl.b32 lane, t, 4;  cvt.u64.u32 from0, lane;"]
    text.append("add.u64 pool, pool, from0;")
    text += [f"ld.global.nc.b32 s{i}, [list + {64 * i}];" for i in range(PASSES)]
    for i in range(PASSES):
        # Nothing is read where the size is 0, and zeros are written; the address must be of the pool all the same.
        text.append(f"setp.ge.s32 listed{i}, s{i}, 0;  selp.b32 size, 16, 0, listed{i};  max.s32 s{i}, s{i}, 0;")
        text.append(f"mad.wide.u32 from{i}, s{i}, {BF16_BYTES}, pool;")
        text += [
            f"cp.async.cg.shared.global.L2::128B [to + {2 * BAND * i + 1024 * block}], "
            f"[from{i} + {128 * block}], 16, size;"
            for block in range(BLOCKS)
        ]
    return "{" + "\n".join([*text, "cp.async.commit_group;"]) + "}"


def convert_fp8() -> str:
    """Loads 64 rows, two a thread at a time so that twenty loads are under way, and stores them as bf16."""
    text = [_PLACE, ".reg .b32 lane;  .reg .b64 eight, sixteen;  .reg .b16 lo, hi, h<4>;  .reg .b32 pair<2>, d<4>;"]
    text.append(".reg .f32 f<4>;  .reg .b32 c<32>, rope<8>;  .reg .f32 scale<8>;")
    text.append("shl.b32 lane, t, 3;  cvt.u64.u32 eight, lane;  shl.b32 lane, t, 4;  cvt.u64.u32 sixteen, lane;")
    text += [f"ld.global.nc.b32 s{i}, [list + {64 * i}];" for i in range(PASSES)]
    for i in range(PASSES):
        text.append(f"setp.ge.s32 listed{i}, s{i}, 0;  max.s32 s{i}, s{i}, 0;")
        text.append(f"mad.wide.u32 from{i}, s{i}, {FP8_BYTES}, pool;")
    for first in range(0, PASSES, 2):
        for row in range(2):
            text += _load_fp8(first + row, row)
        for row in range(2):
            text += _store_fp8(first + row, row)
    return "{" + "\n".join(text) + "}"


def _load_fp8(number: int, row: int) -> list[str]:
    registers = [f"c{16 * row + i}" for i in range(16)] + [f"rope{4 * row + i}" for i in range(4)]
    text = [f"mov.b32 {name}, 0;" for name in registers]
    text += [f"mov.f32 scale{4 * row + i}, 0f00000000;" for i in range(4)]
    scales = ", ".join(f"scale{4 * row + i}" for i in range(4))
    ropes = ", ".join(f"rope{4 * row + i}" for i in range(4))
    text.append(f"@listed{number} ld.global.nc.v4.f32 {{{scales}}}, [from{number} + {LATENT}];")
    text.append(f"add.u64 list, from{number}, eight;")
    text += [
        f"@listed{number} ld.global.nc.v2.b32 {{c{16 * row + 2 * block}, c{16 * row + 2 * block + 1}}}, "
        f"[list + {64 * block}];"
        for block in range(BLOCKS - 1)
    ]
    text.append(f"add.u64 list, from{number}, sixteen;")
    text.append(f"@listed{number} ld.global.nc.v4.b32 {{{ropes}}}, [list + {LATENT + 16}];")
    return text


def _store_fp8(number: int, row: int) -> list[str]:
    text = []
    at = 2 * BAND * number
    for block in range(BLOCKS - 1):
        scale = f"scale{4 * row + block // 2}"
        for word in range(2):
            text.append(f"mov.b32 {{lo, hi}}, c{16 * row + 2 * block + word};")
            text.append("cvt.rn.f16x2.e4m3x2 pair0, lo;  cvt.rn.f16x2.e4m3x2 pair1, hi;")
            text.append("mov.b32 {h0, h1}, pair0;  mov.b32 {h2, h3}, pair1;")
            text += [f"cvt.f32.f16 f{i}, h{i};  mul.rn.f32 f{i}, f{i}, {scale};" for i in range(4)]
            text += [f"cvt.rn.bf16x2.f32 d{2 * word + i}, f{2 * i + 1}, f{2 * i};" for i in range(2)]
        text.append(f"st.shared.v4.b32 [to + {at + 1024 * block}], {{d0, d1, d2, d3}};")
    ropes = ", ".join(f"rope{4 * row + i}" for i in range(4))
    text.append(f"st.shared.v4.b32 [to + {at + 1024 * (BLOCKS - 1)}], {{{ropes}}};")
    return text


def start_tile(records: Any, slots: Any, tiles: Any, stage: Any, row: Any, first: Any, is_interpreted: bool) -> None:
    """Begins to fill `tiles[stage]` with the records of slots[row, first : first + 64].

    records   the pool in device memory
    slots     i32[R, K] in device memory
    tiles     bf16[stages, 64, 576] in shared memory, a `wgmma_operand`
    """
    if is_interpreted:
        _interpreted_tile(records, slots, tiles, stage, row, first)
        return
    text = convert_fp8() if records.dtype == jnp.uint32 else issue_bf16()
    splat = plgpu.Layout.WG_SPLAT
    length = slots.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), splat, splat))
    def emit(context, records, slots, tiles, stage, at):
        del context
        pool, lists, tile = utils.memref_ptr(records), utils.memref_ptr(slots), utils.memref_ptr(tiles)
        stage, at = stage.registers.item(), at.registers.item()
        utils.inline_ptx(text, pool, lists, tile, stage, at, has_side_effects=True)

    emit(records, slots, tiles.ref, stage, row * length + first)


def finish(is_interpreted: bool, pending: int = 0) -> None:
    """Waits for this thread's copies, except the last `pending` tiles, and lets wgmma see them after a barrier."""
    if is_interpreted:
        return

    @plgpu.inline_mgpu()
    def emit(context):
        del context
        utils.inline_ptx(f"cp.async.wait_group {pending};  fence.proxy.async.shared::cta;", has_side_effects=True)

    emit()


def _interpreted_tile(records: Any, slots: Any, tiles: Any, stage: Any, row: Any, first: Any) -> None:
    """Three accesses a tile, as each takes the interpreter milliseconds: it reads the whole pool, small in a test."""
    listed = slots[row, pl.ds(first, TILE)]
    stored = records[...].at[jnp.maximum(listed, 0)].get(mode="clip")
    rows = jnp.where(listed[:, None] >= 0, reference.decode(stored, WIDTH, LATENT), 0.0)
    tiles[stage] = rows.astype(jnp.bfloat16)
