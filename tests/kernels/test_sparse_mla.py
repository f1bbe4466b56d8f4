"""Sparse MLA: the reference against an oracle in f64, the Mosaic kernel against the same, interpreted and compiled.

The tests know the cases and how to run an implementation. What is right is the oracle's word (`cases.Inputs`), which
shares no code with either. `test_sparse_mla_ptx.py` has what the interpreter cannot run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.sparse_mla import cases, dispatch
from pallas_kernels.sparse_mla.mosaic_gpu import Tuning
from tests.aot import compile as aot

CORNERS = pytest.mark.parametrize("case", cases.CORNERS, ids=cases.identifier)


def run(case, inputs, **options):
    query, records, slots = (jnp.asarray(array) for array in inputs.arguments)
    return pallas_kernels.sparse_mla(query, records, slots, cases.SCALE, record_format=case.record_format, **options)


def interpret(case, inputs, splits=1, **tuning):
    """What the kernel computes in the interpreter; fails where two threads race."""
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    try:
        tuning = Tuning(splits, **tuning)
        result = run(case, inputs, implementation="mosaic_gpu", tuning=tuning, interpret=parameters)
        result = jax.tree.map(np.asarray, result)
        races = interpret_pallas_call.get_races()
        assert races is not None and not races.races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return result


@CORNERS
def test_the_reference_agrees_with_the_oracle(case):
    inputs = cases.make(case)
    inputs.judge(*run(case, inputs, implementation="reference"), tensor_core=False)


# What differs between formats is PTX, which is not interpreted, and how many tiles start ahead.
INTERPRETED = [case for case in cases.CORNERS if case.record_format == "fp8" or case.name in ("k_zero", "k_one")]


@pytest.mark.parametrize("case", INTERPRETED, ids=cases.identifier)
def test_the_kernel_agrees_with_the_oracle_when_interpreted(case):
    inputs = cases.make(case)
    inputs.judge(*interpret(case, inputs), tensor_core=True)


def test_the_slots_do_not_matter():
    """Rows in other slots, listed in the same order, give the same bits."""
    case = cases.Case("moved", "fp8", ((50,),), places=64)
    inputs = cases.make(case)
    moved = inputs.permuted()
    assert not np.array_equal(moved.slots, inputs.slots)
    for one, other in zip(interpret(case, inputs), interpret(case, moved), strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_a_split_list_is_combined():
    """Five tiles asked for in four parts give three: two, two and one. One list fills them, one leaves parts empty."""
    case = cases.Case("split", "bf16", ((300,), (70,)), places=320)
    inputs = cases.make(case)
    inputs.judge(*interpret(case, inputs, splits=4), tensor_core=True)


def test_a_block_can_have_fewer_heads_than_a_product_has_rows():
    """Blocks of 16 heads, and one of the 8 that are left."""
    case = cases.Case("heads", "fp8", ((100,),), heads=40)
    inputs = cases.make(case)
    inputs.judge(*interpret(case, inputs, heads=16), tensor_core=True)


def test_every_stage_is_used_again():
    """Seven tiles through two stages."""
    case = cases.Case("stages", "fp8", ((430,),), places=448)
    inputs = cases.make(case)
    inputs.judge(*interpret(case, inputs), tensor_core=True)


def test_two_warpgroups_gather_bf16_rows():
    """That this changes no bit shows on a GPU only: here, narrower products are added in another order."""
    case = cases.Case("others", "bf16", ((100,),))
    inputs = cases.make(case)
    inputs.judge(*interpret(case, inputs, gatherers=2), tensor_core=True)


def shapes(case):
    pool = (100_000, 164) if case.record_format == "fp8" else (100_000, 3, 192)
    stored = jnp.uint32 if case.record_format == "fp8" else jnp.bfloat16
    seats, rows = len(case.listed), len(case.listed[0])
    return (
        aot.device((seats, rows, case.heads, 576), jnp.bfloat16),
        aot.device(pool, stored),
        aot.device((seats, rows, case.places), jnp.int32),
    )


def decode_case(record_format: Any, seats: int, rows: int) -> cases.Case:
    return cases.Case(f"b{seats}", record_format, ((2048,) * rows,) * seats, places=2048, heads=128)


COMPILED = tuple(
    decode_case(*sizes) for sizes in (("fp8", 1, 1), ("fp8", 32, 1), ("bf16", 8, 4), ("bf16", 128, 1), ("fp8", 128, 1))
)


@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize("case", COMPILED, ids=cases.identifier)
def test_the_kernel_compiles_for_an_h200_without_spills(case):
    """As tuned, clusters and all. No spills, no copy of the pool: one kernel, or two and the parts between them."""
    attend = functools.partial(
        pallas_kernels.sparse_mla, scale=cases.SCALE, record_format=case.record_format, implementation="mosaic_gpu"
    )
    compiled = aot.compile_for_h200(attend, *shapes(case))
    compiled.assert_no_spills()
    rows = len(case.listed) * len(case.listed[0])
    tuning = dispatch.tuned(rows * 2)
    parts = tuning.splits // tuning.cluster
    assert len(compiled.kernels) == (1 if parts == 1 else 2)
    between = 0 if parts == 1 else rows * parts * 128 * (512 + 1) * 4
    assert compiled.memory.temp_size_in_bytes <= between + 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(record_format="f32", records=np.zeros((9, 3, 192), np.float32)), "records are f32"),
        (dict(query=np.zeros((2, 1, 129, 576), np.float32)), "129 heads"),
        (dict(scale=-1.0), "the scale is -1.0"),
        (dict(query=np.zeros((2, 5, 8, 576), np.float32), slots=np.zeros((2, 5, 64), np.int32)), "5 query rows"),
        (
            dict(
                query=np.zeros((2, 1, 8, 192), np.float32),
                records=np.zeros((9, 1, 192), np.float32),
                record_format="f32",
                latent=128,
            ),
            "f32",
        ),
        (dict(query=np.zeros((2, 1, 8, 192)), records=jnp.zeros((9, 1, 192), jnp.bfloat16), latent=128), "128 \\+ 64"),
    ],
)
def test_what_the_kernel_does_not_cover_is_named(change, words):
    arguments: dict[str, Any] = dict(
        query=np.zeros((2, 1, 8, 576), np.float32),
        records=jnp.zeros((9, 3, 192), jnp.bfloat16),
        slots=np.zeros((2, 1, 64), np.int32),
        scale=1.0,
        record_format="bf16",
    )
    arguments = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in
                 {**arguments, **change}.items()}  # fmt: skip
    with pytest.raises(NotImplementedError, match=words):
        pallas_kernels.sparse_mla(**arguments, implementation="mosaic_gpu")
    out, lse = pallas_kernels.sparse_mla(**arguments, implementation="reference")
    assert out.shape == (*arguments["query"].shape[:3], arguments.get("latent", 512)) and lse.shape == out.shape[:3]


def test_wrong_input_is_refused_with_both_values():
    query, slots = jnp.zeros((2, 1, 8, 576)), jnp.zeros((2, 1, 64), jnp.int32)
    records = jnp.zeros((9, 3, 192), jnp.bfloat16)
    attend = functools.partial(pallas_kernels.sparse_mla, scale=1.0, record_format="bf16")
    with pytest.raises(ValueError, match=r"slots must be .* not \[1, 1, 64\], for a query of \[2, 1, 8, 576\]"):
        attend(query, records, slots[:1])
    with pytest.raises(ValueError, match="slots must be int32, not float32"):
        attend(query, records, slots.astype(jnp.float32))
    with pytest.raises(ValueError, match="'bf16' must be bfloat16, not float32"):
        attend(query, records.astype(jnp.float32), slots)
    with pytest.raises(ValueError, match=r"record has shape \[3, 128\], but 512 \+ 64 values need 576"):
        attend(query, records[..., :128], slots)
    with pytest.raises(ValueError, match="'triton' is unknown"):
        attend(query, records, slots, implementation="triton")  # type: ignore
    with pytest.raises(ValueError, match="'fp4' is unknown"):
        attend(query, records, slots, record_format="fp4")  # type: ignore


def test_the_tuned_table_covers_every_size():
    for units in (1, 2, 16, 64, 256, 10**6):
        tuning = dispatch.tuned(units)
        assert tuning.splits % tuning.cluster == 0 and units * tuning.splits >= min(64, units)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tuning", [Tuning(1), Tuning(1, 1, 1), Tuning(4, 4), Tuning(32, 8), Tuning(5), Tuning(2, heads=32)], ids=str
)
@pytest.mark.parametrize("case", cases.CORNERS + cases.FULL, ids=cases.identifier)
def test_the_kernel_on_the_gpu(case, tuning):
    inputs = cases.make(case)
    first = run(case, inputs, implementation="mosaic_gpu", tuning=tuning)
    inputs.judge(*first, tensor_core=True)
    again = run(case, inputs, implementation="mosaic_gpu", tuning=tuning)
    moved = inputs if case.pool else inputs.permuted()
    others = run(case, moved, implementation="mosaic_gpu", tuning=tuning)
    for one, two, three in zip(first, again, others, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint32), np.asarray(two).view(np.uint32))
        np.testing.assert_array_equal(np.asarray(one).view(np.uint32), np.asarray(three).view(np.uint32))
