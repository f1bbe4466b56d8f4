"""Index scores: the reference against an oracle in f64, the Mosaic kernel against the same, interpreted and compiled.

The tests know the cases and how to run an implementation. What is right is the oracle's word (`cases.Inputs`), which
shares no code with either.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import dispatch
from pallas_kernels.indexer_scores import cases
from pallas_kernels.indexer_scores.mosaic_gpu import Tuning
from tests.aot import compile as aot

CORNERS = pytest.mark.parametrize("case", cases.CORNERS, ids=cases.identifier)
TINY = Tuning(pages_per_math=1, math=2, stages=2, lookahead=2, blocks=2)


def judge(case, inputs, scores, tensor_core=False):
    inputs.judge(np.asarray(scores), is_exact=case.values == "exact", tensor_core=tensor_core)


@functools.cache
def interpreted(tuning):
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(
        functools.partial(
            pallas_kernels.indexer_scores, implementation="mosaic_gpu", tuning=tuning, interpret=parameters
        )
    )


def interpret(inputs, tuning):
    """The kernel's scores in the interpreter; fails where two threads race."""
    try:
        scores = np.asarray(interpreted(tuning)(*inputs.arguments))
        races = interpret_pallas_call.get_races()
        assert races is not None and not races.races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return scores


@CORNERS
def test_the_reference_agrees_with_the_oracle(case):
    inputs = cases.make(case)
    score = jax.jit(functools.partial(pallas_kernels.indexer_scores, implementation="reference"))
    judge(case, inputs, score(*inputs.arguments))


@CORNERS
def test_the_kernel_agrees_with_the_oracle_when_interpreted(case):
    inputs = cases.make(case)
    judge(case, inputs, interpret(inputs, TINY))


@pytest.mark.parametrize(
    "tuning",
    [
        Tuning(pages_per_math=2, math=1, stages=2, lookahead=1, blocks=1),  # every buffer used again and again
        Tuning(pages_per_math=1, math=3, stages=3, lookahead=3, blocks=2),  # the last tile of a seat is cut
        Tuning(pages_per_math=1, math=1, stages=4, lookahead=2, blocks=16),  # more blocks than work
    ],
    ids=["one_block", "cut_tile", "idle_blocks"],
)
def test_every_tuning_gives_the_same_scores(tuning):
    """A tile size is no part of the meaning: same bits as with the tiles of the other tests."""
    case = cases.Case("tunings", "fp8", ((200, 190), (0, 0), (64, 7), (230, 256)), heads=8, values="normal")
    inputs = cases.make(case)
    scores = interpret(inputs, tuning)
    judge(case, inputs, scores)
    np.testing.assert_array_equal(scores, interpret(inputs, TINY))


def test_pages_that_no_seat_has_are_nan():
    """So a page read by mistake shows in every case, behind a length of zero too."""
    for case in cases.CORNERS:
        stray = cases.make(case).pages[0]
        codes = stray[: 64 * 128].view(ml_dtypes.float8_e4m3fn) if case.keys == "fp8" else stray
        assert np.isnan(codes.astype(np.float32)).all()


def shapes(case):
    inputs = cases.make(case) if case.pool is None else None
    stored = jnp.float8_e4m3fn if case.keys == "fp8" else jnp.bfloat16
    pool = case.pool or (inputs.pages.shape[0] if inputs is not None else 0)
    return (
        aot.device((case.seats, case.rows, case.heads, 128), stored),
        aot.device((case.seats, case.rows, case.heads), jnp.float32),
        aot.device((pool, 64 * 132), jnp.uint8) if case.keys == "fp8" else aot.device((pool, 64, 128), jnp.bfloat16),
        aot.device((case.seats, case.pages), jnp.int32),
        aot.device((case.seats, case.rows), jnp.int32),
    )


COMPILED = (
    cases.Case("decode", "fp8", ((98_304,),) * 32, pages=1536, heads=64, pool=65_600),
    cases.Case("decode", "bf16", ((98_304,),) * 32, pages=1536, heads=64, pool=65_600),
    cases.Case("verify", "fp8", ((98_304,) * 4,) * 8, pages=1536, heads=64, pool=300_000),
    cases.Case("verify", "bf16", ((98_304,) * 4,) * 8, pages=1536, heads=64, pool=300_000),
    cases.Case("few_heads", "fp8", ((8_000, 8_000),), pages=125, heads=4),
)


@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize("case", COMPILED, ids=cases.identifier)
def test_the_kernel_compiles_for_an_h200_without_spills(case):
    """Each case at its tuned tile: no spills, no copy of the pool (temp stays far below a page), one kernel."""
    score = functools.partial(pallas_kernels.indexer_scores, implementation="mosaic_gpu")
    compiled = aot.compile_for_h200(score, *shapes(case))
    compiled.assert_no_spills()
    assert len(compiled.kernels) == 1
    small = 8 * case.seats * case.rows * (64 + 64 * 128)  # padded weights and query
    assert compiled.memory.temp_size_in_bytes <= small


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(pages=np.zeros((4, 64, 128), np.float32)), "keys are float32"),
        (dict(query=np.zeros((2, 1, 65, 128), np.float32), weights=np.zeros((2, 1, 65), np.float32)), "65 index heads"),
        (
            dict(query=np.zeros((2, 1, 8, 64), np.float32), pages=np.zeros((4, 64 * 68), np.uint8)),
            "index key has 64 values",
        ),
        (
            dict(
                query=np.zeros((2, 5, 8, 128), np.float32),
                weights=np.zeros((2, 5, 8), np.float32),
                visible=np.zeros((2, 5), np.int32),
            ),
            "5 query rows",
        ),
    ],
)
def test_what_the_kernel_does_not_cover_is_named(change, words):
    inputs = cases.make(cases.CORNERS[0])
    names = ("query", "weights", "pages", "page_numbers", "visible")
    arguments: dict[str, Any] = {**dict(zip(names, inputs.arguments, strict=True)), **change}
    with pytest.raises(NotImplementedError, match=words):
        pallas_kernels.indexer_scores(**arguments, implementation="mosaic_gpu")
    assert pallas_kernels.indexer_scores(**arguments, implementation="reference").shape == (
        *arguments["visible"].shape,
        arguments["page_numbers"].shape[1] * 64,
    )


def test_a_wrong_shape_is_refused_with_both_shapes():
    arguments: list[Any] = list(cases.make(cases.CORNERS[0]).arguments)
    query, weights, pages, numbers, visible = arguments
    with pytest.raises(ValueError, match=r"weights has shape \[2, 1, 7\].*need \[2, 1, 8\]"):
        pallas_kernels.indexer_scores(query, weights[..., :7], pages, numbers, visible)
    with pytest.raises(ValueError, match="one page"):
        pallas_kernels.indexer_scores(query, weights, pages[:, :-1], numbers, visible)
    with pytest.raises(ValueError, match="visible must be int32"):
        pallas_kernels.indexer_scores(query, weights, pages, numbers, visible.astype(np.float32))
    with pytest.raises(ValueError, match="'triton' is unknown"):
        pallas_kernels.indexer_scores(query, weights, pages, numbers, visible, implementation="triton")  # type: ignore


def test_the_tuned_table_covers_every_size():
    for is_fp8 in (True, False):
        for pages in (1, 1536, 102 * 1536, 10**8):
            assert dispatch.tuned(is_fp8, pages).math >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CORNERS + cases.FAR, ids=cases.identifier)
def test_the_kernel_on_the_gpu(case):
    inputs = cases.make(case)
    score = jax.jit(functools.partial(pallas_kernels.indexer_scores, implementation="mosaic_gpu"))
    arguments = jax.device_put(inputs.arguments)
    first = np.asarray(score(*arguments))
    judge(case, inputs, first, tensor_core=True)
    np.testing.assert_array_equal(first, np.asarray(score(*arguments)))
