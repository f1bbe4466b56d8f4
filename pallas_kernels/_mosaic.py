"""The border to what Pallas Mosaic GPU does not publish, or publishes in a form that type checkers refuse.

It knows how a reference to shared memory is made of a buffer and the transforms that describe it, and how a kernel is
handed an array that lives in host memory; written against jax 0.11.2. No other file of the package names a private
module of JAX.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.pallas.mosaic_gpu import core
from jax._src.state.types import TransformedRef
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

SWIZZLE = 128  # bytes
TILE_ROWS = 8  # rows of a wgmma tile

# Type checkers take these for abstract classes.
_tiling: Any = core.TilingTransform
_swizzle: Any = core.SwizzleTransform
_unswizzle: Any = core.UnswizzleRef

accumulator: Any = core.WGMMAAccumulatorRef
"""(shape, dtype) -> registers that wgmma adds to, zero at first; a scratch type of `pl.run_scoped`."""


def wgmma_operand(shape: tuple[int, ...], dtype: Any) -> Any:
    """Scratch in shared memory laid out as wgmma reads it: the last two dimensions in swizzled 8 x 128-byte tiles."""
    columns = SWIZZLE // dtype.dtype.itemsize
    return plgpu.SMEM(shape, dtype, transforms=(_tiling((TILE_ROWS, columns)), _swizzle(SWIZZLE)))


def plain_rows(operand: Any, slot: Any, first: int, rows: int, width: int) -> Any:
    """Rows first .. first + rows - 1 of `operand[slot]`, swizzled but not tiled: a destination of TMA.

    `operand` is a `wgmma_operand` of shape (slots, N, width) whose width is one tile: its tiles then follow each other
    as plain rows do. Copied through the tiles, the source's row count would have to be a multiple of 8 as well, and
    a page of FP8 keys has 66 rows, scales included. Not for the interpreter, which stores no tiles.
    """
    plain = operand.ref.at[slot, pl.ds(first // TILE_ROWS, rows // TILE_ROWS)].reshape(rows, width)
    return TransformedRef(plain.ref, (*plain.transforms, _unswizzle(SWIZZLE)))


_host_as_device = Primitive("host_as_device")
_host_as_device.def_abstract_eval(lambda array: array.update(memory_space=jax.memory.Space.Device))
mlir.register_lowering(_host_as_device, lambda context, array: [array])


def is_in_host_memory(array: Any) -> bool:
    """Whether `array`, traced or not, is typed as host memory, which neither jnp nor a kernel accepts."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def host_as_device(array: jax.Array) -> jax.Array:
    """The same buffer, typed as device memory: pinned host memory has one address for the processor and the GPU.

    Inside a jitted function only, and straight into a kernel: an XLA operation that is handed the result fails to
    compile or moves all of it. An array in device memory is returned as it is.
    """
    return _host_as_device.bind(array) if is_in_host_memory(array) else array
