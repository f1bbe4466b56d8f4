"""TMA copies of what is read once: their lines are the first that the L2 gives up.

It knows how Pallas Mosaic GPU makes a TMA copy of a reference, and where the instruction takes its cache policy, which
Pallas does not publish; a border to JAX's private modules like `pallas_kernels._mosaic`, written against jax 0.11.2.
It does not know what is copied, or whether it pays.

An ordinary copy of n bytes into a full L2 makes room by dropping n bytes of whatever lies there, and where these are
results of other kernels that were never written to memory, by writing them first. Lines that go first make room for
each other.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.lowering import register_lowering_rule
from jax._src.state.primitives import get_ref_and_transforms
from jax.experimental.mosaic import gpu as mosaic
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

_copy_once = Primitive("copy_gmem_to_smem_once")
_copy_once.multiple_results = True
_copy_once.def_effectful_abstract_eval(primitives._copy_gmem_to_smem_abstract_eval)

_POLICY = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
_Copy: Any = nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp


def copy_once(source: Any, target: Any, barrier: Any) -> None:
    """`plgpu.copy_gmem_to_smem`, but the lines that it brings into the L2 are the first to leave. Not interpreted."""
    pairs = [get_ref_and_transforms(reference, None, "copy_once") for reference in (source, target, barrier)]
    flat = [jax.tree.flatten(transforms) for _, transforms in pairs]
    _copy_once.bind(
        *(reference for reference, _ in pairs),
        *(leaf for leaves, _ in flat for leaf in leaves),
        src_transforms_treedef=flat[0][1],
        dst_transforms_treedef=flat[1][1],
        barrier_transforms_treedef=flat[2][1],
        collective_axes=None,
        leader_tracked=None,
        oob_mode=None,
        has_barrier=True,
        has_user_predicate=False,
    )


def _lower(context: Any, *arguments: Any, **parameters: Any) -> Any:
    """As an ordinary copy is lowered; then its instruction, the last one, is replaced by one with a policy."""
    results = primitives._copy_gmem_to_smem_lowering(context, *arguments, **parameters)
    plain: Any = list(ir.InsertionPoint.current.block.operations)[-1]
    assert isinstance(plain, _Copy), f"a TMA copy ends in {plain.name}, which takes no cache policy"
    policy = llvm.inline_asm(ir.IntegerType.get_signless(64), [], _POLICY, "=l", has_side_effects=False)
    _Copy(
        plain.dstMem,
        plain.tmaDescriptor,
        list(plain.coordinates),
        plain.mbar,
        list(plain.im2colOffsets),
        l2CacheHint=policy,
        predicate=plain.predicate,
    )
    plain.operation.erase()
    return results


register_lowering_rule(_copy_once, mosaic.LoweringSemantics.Lane)(_lower)
