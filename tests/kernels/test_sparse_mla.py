"""Sparse MLA: the reference against an oracle in f64, the Mosaic kernel against the same, interpreted and compiled.

The tests know the cases and how to run an implementation. What is right is the oracle's word (`cases.Inputs`), which
shares no code with either. `test_sparse_mla_gather.py` has what the interpreter cannot run.
"""

import dataclasses
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


def interpret(case, inputs, splits=1):
    """What the kernel computes in the interpreter; fails where two threads race."""
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    try:
        result = run(case, inputs, implementation="mosaic_gpu", tuning=Tuning(splits), interpret=parameters)
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


@CORNERS
def test_the_kernel_agrees_with_the_oracle_when_interpreted(case):
    inputs = cases.make(case)
    inputs.judge(*interpret(case, inputs), tensor_core=True)


@pytest.mark.parametrize("record_format", ["bf16", "fp8"])
def test_a_split_list_is_combined_and_the_slots_do_not_matter(record_format):
    """Parts: one full, one whose list ends in it, one empty; the same bits from other slots."""
    case = cases.Case("split", record_format, ((100,),), places=192)
    inputs = cases.make(case)
    first = interpret(case, inputs, splits=3)
    inputs.judge(*first, tensor_core=True)
    moved = inputs.permuted()
    assert not np.array_equal(moved.slots, inputs.slots)
    for one, other in zip(first, interpret(case, moved, splits=3), strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_every_stage_is_used_again():
    """Five tiles through two stages, cut unevenly: parts of three tiles and of two."""
    case = cases.Case("stages", "fp8", ((300,),), places=320)
    inputs = cases.make(case)
    inputs.judge(*interpret(case, inputs), tensor_core=True)
    inputs.judge(*interpret(case, inputs, splits=2), tensor_core=True)


def shapes(case):
    pool = (100_000, 164) if case.record_format == "fp8" else (100_000, 3, 192)
    stored = jnp.uint32 if case.record_format == "fp8" else jnp.bfloat16
    seats, rows = len(case.listed), len(case.listed[0])
    return (
        aot.device((seats, rows, case.heads, 576), jnp.bfloat16),
        aot.device(pool, stored),
        aot.device((seats, rows, case.places), jnp.int32),
    )


COMPILED = tuple(
    cases.Case(f"b{seats}", record_format, ((2048,) * rows,) * seats, places=2048, heads=heads)
    for record_format in ("bf16", "fp8")
    for seats, rows, heads in ((1, 1, 128), (8, 4, 128), (128, 1, 128))
)


@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize("case", COMPILED, ids=cases.identifier)
def test_the_kernel_compiles_for_an_h200_without_spills(case):
    """No spills, no copy of the pool: one kernel, or two and the parts between them."""
    attend = functools.partial(
        pallas_kernels.sparse_mla, scale=cases.SCALE, record_format=case.record_format, implementation="mosaic_gpu"
    )
    compiled = aot.compile_for_h200(attend, *shapes(case))
    compiled.assert_no_spills()
    rows = len(case.listed) * len(case.listed[0])
    splits = dispatch.tuned(rows * 2).splits
    assert len(compiled.kernels) == (1 if splits == 1 else 2)
    parts = 0 if splits == 1 else rows * splits * 128 * (512 + 1) * 4
    assert compiled.memory.temp_size_in_bytes <= parts + 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(record_format="f32", records=np.zeros((9, 3, 192), np.float32)), "records are f32"),
        (dict(query=np.zeros((2, 1, 129, 576), np.float32)), "129 heads"),
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
        assert dispatch.tuned(units).splits >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize("case", cases.CORNERS + cases.FULL, ids=cases.identifier)
def test_the_kernel_on_the_gpu(case, splits):
    inputs = cases.make(case)
    first = run(case, inputs, implementation="mosaic_gpu", tuning=Tuning(splits))
    inputs.judge(*first, tensor_core=True)
    again = run(case, inputs, implementation="mosaic_gpu", tuning=Tuning(splits))
    moved = inputs if case.pool else inputs.permuted()
    others = run(case, dataclasses.replace(moved), implementation="mosaic_gpu", tuning=Tuning(splits))
    for one, two, three in zip(first, again, others, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint32), np.asarray(two).view(np.uint32))
        np.testing.assert_array_equal(np.asarray(one).view(np.uint32), np.asarray(three).view(np.uint32))
