"""What jnp does not say of values in wgmma's registers: one rounding for two operations, and nothing kept for a mask.

It knows wgmma's layout. It knows no softmax. The interpreter has jnp bodies here.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def numbers_of_columns(columns: int, is_interpreted: bool) -> Any:
    """i32[columns], 0 and up, laid out as wgmma has one value a column: a thread's pair of every eight.

    Made anew wherever it is asked for: an iota would stay in 16 registers through a loop over tiles.
    """
    if is_interpreted:
        return jnp.arange(columns, dtype=jnp.int32)

    def emit(context):
        del context
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), i32)
        text = "mov.u32 $0, %laneid;  and.b32 $0, $0, 3;  shl.b32 $0, $0, 1;"
        own = vector.broadcast(pair, utils.inline_ptx(text, result_types=i32, has_side_effects=True))
        registers = np.empty((columns // 8, 1, 1), object)
        for index in range(columns // 8):
            steps = ir.DenseElementsAttr.get(np.array([8 * index, 8 * index + 1], np.int32), type=pair)
            registers[index, 0, 0] = arith.addi(own, arith.constant(pair, steps))
        return mgpu.FragmentedArray(_registers=registers, _layout=COLUMNS.to_mgpu(), _is_signed=True)

    return plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((columns,), jnp.int32, layout=COLUMNS))(emit)()


def multiply_add(values: Any, factor: float, addend: Any, is_interpreted: bool) -> Any:
    """f32 values * factor + addend, both arrays in wgmma's layout, by one instruction each."""
    if is_interpreted:
        return values * jnp.float32(factor) + addend

    def emit(context, values, addend):
        del context
        pair = values.registers.flat[0].type
        factors = arith.constant(pair, ir.DenseElementsAttr.get_splat(pair, ir.FloatAttr.get_f32(factor)))
        registers = np.empty_like(values.registers)
        for index in np.ndindex(registers.shape):
            registers[index] = vector.fma(values.registers[index], factors, addend.registers[index])
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    types = (plgpu.Layout.WGMMA, plgpu.Layout.WGMMA)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(emit)(values, addend)
