"""Parts of a list that the blocks of one cluster attended to become one, through each other's shared memory.

It knows a cluster's barrier, where a block leaves its part, and PTX. It does not know how a part came to be; the
formula is `combine`'s, and so is the order of the sums. Nothing here runs in the interpreter, where no block sees
another's memory: there, and where a cluster is one block, parts go through device memory and `combine`.

Each block leaves 64 x 512 values, divided by their own mass, where its tiles were, and 64 logarithms beside them.
After the cluster's barrier block p joins heads p * 64 / n .. of all n parts and writes them; a second barrier keeps
every block until the others have read. Weights are divided by their sum here, and not the sum of values by it.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.sparse_mla.gather import LATENT

HEADS = 64
PITCH = LATENT + 8  # floats from one head to the next: eight heads' pieces fall in different banks
LOG2E, LN2 = math.log2(math.e), math.log(2.0)


def this_member() -> Any:
    """i32: the block's number in its cluster, read anew wherever it is asked for: kept from before the roles part, or
    through the loop over tiles, it would not fit into registers."""
    return _read("mov.u32 $0, %cluster_ctarank;")


def this_cluster(blocks: int) -> Any:
    """i32: the number in the grid of the cluster of so many blocks, read anew for the same reason."""
    return _read("mov.u32 $0, %clusterid.x;" if blocks > 1 else "mov.u32 $0, %ctaid.x;")


def _read(text: str) -> Any:
    def emit(context):
        del context
        i32 = ir.IntegerType.get_signless(32)
        number = utils.inline_ptx(text, result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    return plgpu.inline_mgpu(return_type=number)(emit)()


def leave_part(tiles: Any, values: Any, role: Any, width: int) -> None:
    """Stores f32[64, width] `values`, columns role * width .. of the part, over `tiles`."""

    def emit(context, tiles, values, column):
        del context
        f32 = ir.F32Type.get()
        start = utils.getelementptr(utils.memref_ptr(tiles), [column.registers.item()], f32)
        layout = ir.StridedLayoutAttr.get(0, [PITCH, 1])
        part = utils.ptr_as_memref(start, ir.MemRefType.get((HEADS, width), f32, layout, utils.smem()))
        values.store_untiled(part, optimized=False)

    types = (plgpu.RefType(), plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT)
    plgpu.inline_mgpu(arg_types=types)(emit)(tiles.ref, values, role * width)


def send_part(tiles: Any, logarithms: Any, role: int, heads: Any, out: Any, lse: Any) -> None:
    """Copies half `role` of the columns that `leave_part` left to out f32[heads, 512], and with half 0 lse f32[heads].

    A bulk copy for each head. Stored from the registers of wgmma's layout, 32 bytes of a row at a time, a part of 64
    heads took 30 % of the attending warps' time at B 8, most of it in a queue.

    heads   i32, how many of the block's 64 there are; a multiple of 4
    """

    def emit(context, tiles, logarithms, heads, out, lse):
        del context
        operands = [utils.memref_ptr(array) for array in (tiles, logarithms, out, lse)]
        utils.inline_ptx(sending(role), *operands, heads.registers.item(), has_side_effects=True)

    array = plgpu.RefType()
    types = (array, array, plgpu.Layout.WG_SPLAT, array, array)
    plgpu.inline_mgpu(arg_types=types)(emit)(tiles.ref, logarithms, heads, out, lse)


def sending(role: int) -> str:
    """Operands: the part and logarithms in shared memory, results in device memory, how many heads there are."""
    columns = LATENT // 2
    text = [
        ".reg .b32 head, from, size;  .reg .pred mine, first;  .reg .b64 to;",
        "mov.u32 head, %tid.x;  and.b32 head, head, 127;  setp.lt.u32 mine, head, $4;",
        f"mad.lo.u32 from, head, {4 * PITCH}, $0;  add.u32 from, from, {4 * role * columns};",
        f"cvta.to.global.u64 to, $2;  mad.wide.u32 to, head, {4 * LATENT}, to;  add.u64 to, to, {4 * role * columns};",
        f"@mine cp.async.bulk.global.shared::cta.bulk_group [to], [from], {4 * columns};",
    ]
    if role == 0:
        text += [
            "setp.eq.u32 first, head, 0;  cvta.to.global.u64 to, $3;  shl.b32 size, $4, 2;",
            "@first cp.async.bulk.global.shared::cta.bulk_group [to], [$1], size;",
        ]
    # Shared memory must stay as it is until it has been read.
    text.append("cp.async.bulk.commit_group;  cp.async.bulk.wait_group.read 0;")
    return "{" + "\n".join(text) + "}"


def wait_for_cluster() -> None:
    """Every thread of every block of the cluster comes here; what it wrote before, the others see after."""

    def emit(context):
        del context
        text = "barrier.cluster.arrive.release.aligned;  barrier.cluster.wait.acquire.aligned;"
        utils.inline_ptx(text, has_side_effects=True, convergent=True)

    plgpu.inline_mgpu()(emit)()


def join_parts(tiles: Any, logarithms: Any, part: Any, parts: int, heads: Any, out: Any, lse: Any) -> None:
    """Writes this block's share of out f32[heads, 512] and lse f32[heads], references in device memory.

    Two warpgroups come here, the first two of the block; each joins a head at a time, four values a thread.

    tiles        what `leave_part` wrote over, at the same place in every block
    logarithms   f32[64] in shared memory, at the same place too
    part         this block's number in the cluster of `parts`
    heads        i32, how many of the 64 there are
    """

    def emit(context, tiles, logarithms, part, heads, out, lse):
        del context
        operands = [utils.memref_ptr(array) for array in (tiles, logarithms, out, lse)]
        numbers = part.registers.item(), heads.registers.item()
        utils.inline_ptx(joining(parts), *operands, *numbers, has_side_effects=True)

    array = plgpu.RefType()
    types = (array, array, plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT, array, array)
    plgpu.inline_mgpu(arg_types=types)(emit)(tiles.ref, logarithms, part, heads, out, lse)


def joining(parts: int) -> str:
    """Operands: parts and logarithms in shared memory, results in device memory, this part's number, and heads there
    are.

    Another block's memory is far away, so that what a thread reads there is under way together: first all logarithms,
    32 of them however many parts there are, then the values of some heads at a time, eight pieces of 16 bytes.
    """
    heads, count = HEADS // parts, HEADS // parts // 2
    text = [
        ".reg .b32 me, column, head, near;  .reg .pred nothing, some, first, exists;  .reg .b64 to, log, at;",
        f".reg .b32 logs<{parts}>, values<{parts}>;  .reg .f32 w<{parts * count}>, x<32>, t<4>, base, mass, divisor;",
        "mov.u32 me, %tid.x;  and.b32 column, me, 127;  shr.u32 me, me, 7;",
        f"mad.lo.u32 me, $4, {heads}, me;  setp.eq.u32 first, column, 0;",
        f"cvta.to.global.u64 to, $2;  mad.wide.u32 to, me, {4 * LATENT}, to;  mad.wide.u32 to, column, 16, to;",
        "cvta.to.global.u64 log, $3;  mad.wide.u32 log, me, 4, log;  mad.lo.u32 near, me, 4, $1;",
        *(f"mapa.shared::cluster.u32 logs{part}, near, {part};" for part in range(parts)),
        f"mad.lo.u32 near, me, {4 * PITCH}, $0;  mad.lo.u32 near, column, 16, near;",
        *(f"mapa.shared::cluster.u32 values{part}, near, {part};" for part in range(parts)),
    ]
    for index in range(count):
        text += [
            f"ld.shared::cluster.f32 w{parts * index + part}, [logs{part} + {8 * index}];" for part in range(parts)
        ]
    for index in range(count):
        weights = [f"w{parts * index + part}" for part in range(parts)]
        text.append(f"mov.f32 base, {weights[0]};")
        text += [f"max.f32 base, base, {weight};" for weight in weights[1:]]
        text.append("setp.eq.f32 nothing, base, 0fFF800000;  selp.f32 base, 0f00000000, base, nothing;")
        for weight in weights:
            text.append(f"sub.rn.f32 {weight}, {weight}, base;  mul.rn.f32 {weight}, {weight}, {_float(LOG2E)};")
            text.append(f"ex2.approx.f32 {weight}, {weight};")
        text.append(f"mov.f32 mass, {weights[0]};")
        text += [f"add.rn.f32 mass, mass, {weight};" for weight in weights[1:]]
        text.append(f"setp.gt.f32 some, mass, 0f00000000;  selp.f32 divisor, mass, {_float(1.0)}, some;")
        text += [f"div.full.f32 {weight}, {weight}, divisor;" for weight in weights]
        text.append(f"lg2.approx.f32 mass, mass;  fma.rn.f32 mass, mass, {_float(LN2)}, base;")
        text.append(f"add.u32 head, me, {2 * index};  setp.lt.and.u32 exists, head, $5, first;")
        text.append(f"@exists st.global.f32 [log + {8 * index}], mass;")
    together = 8 // parts  # heads
    for start in range(0, count, together):
        places = [(index, part) for index in range(start, start + together) for part in range(parts)]
        for place, (index, part) in enumerate(places):
            names = ", ".join(f"x{4 * place + i}" for i in range(4))
            address = f"[values{part} + {2 * index * 4 * PITCH}]"
            text.append(f"ld.shared::cluster.v4.f32 {{{names}}}, {address};")
        for place, (index, part) in enumerate(places):
            weight = f"w{parts * index + part}"
            if part == 0:
                text += [f"mul.rn.f32 t{i}, {weight}, x{4 * place + i};" for i in range(4)]
            else:
                text += [f"fma.rn.f32 t{i}, {weight}, x{4 * place + i}, t{i};" for i in range(4)]
            if part == parts - 1:
                text.append(f"add.u32 head, me, {2 * index};  setp.lt.u32 exists, head, $5;")
                text.append(f"@exists st.global.v4.f32 [to + {2 * index * 4 * LATENT}], {{t0, t1, t2, t3}};")
    return "{" + "\n".join(text) + "}"


def _float(value: float) -> str:
    """As PTX writes it."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
