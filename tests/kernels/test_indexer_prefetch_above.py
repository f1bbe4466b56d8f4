"""Which scores exceed a bound, as the fused kernel keeps it: reference, interpreter, PTX, a compile for an H200.

Judged by NumPy's own packing of bits. The rest of the kernel's result is judged as without a bound.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels.indexer_prefetch import above, cases
from pallas_kernels.indexer_scores import cases as scores
from pallas_kernels.indexer_scores.mosaic_gpu import Tuning
from tests import selections
from tests.aot import compile as aot
from tests.kernels.warp import LANES, Warp

NAMES = ("some", "idle_seat", "threshold_nan_and_infinite", "rows_differ")
CASES = [case for case in cases.CORNERS if case.name in NAMES]
TINY = Tuning(pages_per_math=1, math=2, stages=2, lookahead=2, blocks=1)


@functools.cache
def jitted(staging, **options):
    kernel = functools.partial(pallas_kernels.indexer_prefetch, staging=staging, **options)
    return jax.jit(lambda *arguments, bound: kernel(*arguments, bound=bound))


def check(inputs, run) -> int:
    """Judges everything that `run` finds with bounds between the scores, and how many exceed them."""
    count, seats = 0, len(inputs.threshold)
    others = [np.resize(np.array(pair, np.float32), seats) for pair in ([0.5, np.nan], [np.inf, -np.inf])]
    for bound in (inputs.threshold, *others):
        found = jax.tree.map(np.asarray, run(*inputs.arguments, bound=bound))
        inputs.judge(found, found.scores)
        flat = found.scores.reshape(-1, found.scores.shape[-1])
        wanted = selections.marks(flat, np.repeat(bound, found.scores.shape[1]))
        np.testing.assert_array_equal(found.above.reshape(wanted.shape), wanted)
        count += int(np.bitwise_count(wanted).sum())
    return count


@pytest.mark.parametrize("case", CASES, ids=cases.identifier)
def test_the_reference_keeps_what_exceeds_the_bound(case):
    inputs = cases.make(case)
    assert check(inputs, jitted(inputs.staging, implementation="reference")) > 0


def test_the_kernel_keeps_it_when_interpreted():
    inputs = cases.make(CASES[-1])  # several query rows a seat, each with bits of its own
    parameters = plgpu.InterpretGPUParams(detect_races=True)
    run = jitted(inputs.staging, implementation="mosaic_gpu", tuning=TINY, interpret=parameters)
    try:
        assert check(inputs, run) > 0
        races = interpret_pallas_call.get_races()
        assert races is not None and not races.races_found
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + list(cases.FAR), ids=cases.identifier)
def test_the_kernel_keeps_it_on_a_gpu(case):
    inputs = cases.make(case)
    assert check(inputs, jitted(inputs.staging, implementation="mosaic_gpu")) > 0


def test_without_a_bound_nothing_is_kept():
    inputs = cases.make(CASES[0])
    kernel = functools.partial(pallas_kernels.indexer_prefetch, staging=8, implementation="reference")
    assert jax.eval_shape(kernel, *inputs.arguments).above is None


def test_a_bound_for_each_seat():
    arguments = map(jax.numpy.asarray, cases.make(CASES[0]).arguments)
    with pytest.raises(ValueError, match=r"bound is float32\[3\].*need float32\[2\]"):
        pallas_kernels.indexer_prefetch(*arguments, staging=8, bound=jax.numpy.zeros(3))


def test_the_ptx_of_four_warps_makes_a_pages_words():
    """A lane has the scores of two positions, its quad the same ones; NaN exceeds nothing, whatever the bound."""
    random = np.random.default_rng(3)
    values = random.standard_normal(64, np.float32)
    values[[5, 17, 40]] = np.nan, np.inf, -np.inf
    for bound in (0.0, values[9], np.nan, -np.inf, np.inf):
        kept = np.full(16, 0xFF, np.uint8)
        for warp in (2, 0, 3, 1):
            place = 16 * warp + np.arange(LANES) // 4
            pair = [values[place + high].view(np.uint32) for high in (0, 8)]
            Warp(4 + warp, {64: kept}).run(above.PROGRAM, 64, 4, np.array([bound], np.float32).view(np.uint32), *pair)
        wanted = selections.marks(values[None], np.array([bound], np.float32))[0]
        assert kept.view("<u4").tolist() == [0xFFFFFFFF, 0xFFFFFFFF, *wanted.tolist()]  # page 1, and nothing of page 0


@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize("rows", [1, 4])
def test_the_kernel_compiles_with_it_without_spills(rows):
    pool, pages = 300_000, 1536
    case = scores.Case("decode", "fp8", ((98_304,) * rows,) * 8, pages=pages, heads=64, pool=pool)
    kernel = functools.partial(pallas_kernels.indexer_prefetch, implementation="mosaic_gpu", staging=64)
    host_rows = pool * 64
    compiled = aot.compile_for_h200(
        lambda *arguments: kernel(*arguments[:-1], bound=arguments[-1]),
        aot.device((case.seats, rows, 64, 128), jax.numpy.float8_e4m3fn),
        aot.device((case.seats, rows, 64), np.float32),
        aot.device((pool, 64 * 132), np.uint8),
        aot.device((case.seats, pages), np.int32),
        aot.device((case.seats, rows), np.int32),
        aot.device((case.seats,), np.float32),
        aot.device((case.seats,), np.int32),
        aot.device((case.seats,), np.int32),
        aot.device((host_rows,), np.int32),
        aot.host((3, host_rows, 164), np.uint32),
        aot.device((), np.int32),
        aot.device((case.seats,), np.float32),
    )
    compiled.assert_no_spills()
    assert len(compiled.kernels) == 1 and "st.global.b16" in "".join(compiled.files.values())
