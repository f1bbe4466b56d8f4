"""Index scores with prefetch: reference and Mosaic kernel against the contract's loops, interpreted and compiled.

The tests know the cases and how to run an implementation. What is right is the judge's word (`cases.Inputs`), which
shares no code with either. The PTX that the interpreter cannot run is read in test_indexer_prefetch_ptx.py.
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
from pallas_kernels import dispatch
from pallas_kernels.indexer_prefetch import cases
from pallas_kernels.indexer_prefetch.shape import Tuning as PrefetchTuning
from pallas_kernels.indexer_scores import cases as scores
from pallas_kernels.indexer_scores.mosaic_gpu import Tuning
from tests.aot import compile as aot

CORNERS = pytest.mark.parametrize("case", cases.CORNERS, ids=cases.identifier)
TINY = Tuning(pages_per_math=1, math=2, stages=2, lookahead=2, blocks=1)


@functools.cache
def jitted(kernel, **options):
    return jax.jit(functools.partial(kernel, **options))


def plain_scores(inputs, **options):
    return np.asarray(jitted(pallas_kernels.indexer_scores, **options)(*inputs.scored))


def prefetch(inputs, **options):
    run = jitted(pallas_kernels.indexer_prefetch, staging=inputs.staging, **options)
    return jax.tree.map(np.asarray, run(*inputs.arguments))


@functools.cache
def interpreted(kernel, tuning, **options):
    # Blocks meet in a seat's list by atomics, which the interpreter's plain accesses stand for: it runs one block after
    # another, and its detector, which does not count on that, is asked about one block only.
    parameters = plgpu.InterpretGPUParams(detect_races=tuning.blocks == 1)
    return jax.jit(
        functools.partial(kernel, implementation="mosaic_gpu", tuning=tuning, interpret=parameters, **options)
    )


def interpret(inputs, tuning):
    """The kernel's result and the plain kernel's scores in the interpreter; fails where two threads race."""
    try:
        kernel = interpreted(pallas_kernels.indexer_prefetch, tuning, staging=inputs.staging)
        result = jax.tree.map(np.asarray, kernel(*inputs.arguments))
        races = interpret_pallas_call.get_races()
        assert tuning.blocks > 1 or (races is not None and not races.races_found)
        plain = np.asarray(interpreted(pallas_kernels.indexer_scores, tuning)(*inputs.scored))
    finally:
        interpret_pallas_call.reset_gpu_interpret_mode_state()
    return result, plain


@CORNERS
def test_the_reference_keeps_its_promises(case):
    inputs = cases.make(case)
    inputs.judge(prefetch(inputs, implementation="reference"), plain_scores(inputs, implementation="reference"))


@CORNERS
def test_the_kernel_keeps_its_promises_when_interpreted(case):
    inputs = cases.make(case)
    inputs.judge(*interpret(inputs, TINY))


def test_every_tuning_stages_as_many():
    """Blocks share a seat's list, so the cap holds for all of them together; the last tile of a seat is cut, and two
    of the blocks have no work."""
    inputs = cases.make(next(case for case in cases.CORNERS if case.name == "list_overflows"))
    inputs.judge(*interpret(inputs, PrefetchTuning(math=3, stages=3, lookahead=3, blocks=6)))


def test_the_corners_are_what_their_names_say():
    """Caps bind, lists overflow, both kinds of row are met: else the tests above would pass for nothing."""
    found = {}
    for case in cases.CORNERS:
        inputs = cases.make(case)
        found[case.name] = inputs.judge(
            prefetch(inputs, implementation="reference"), plain_scores(inputs, implementation="reference")
        )
    assert min(found["list_overflows"]) > 8 and min(found["cap_zero_and_one"]) > 1
    assert found["threshold_nan_and_infinite"] == [0, 0] and found["nobody_is_absent"] == [0, 0]
    assert found["length_zero_and_one"] == [0, 1] and found["staging_exactly_full"] == [256, 255]
    assert found["cap_outside_staging"][0] > 256
    assert found["idle_seat"][0] == 0 and found["idle_seat"][1] > 0
    shared = cases.make(next(case for case in cases.CORNERS if case.name == "shared_prefix"))
    found_scores = plain_scores(shared, implementation="reference")
    twice = [set(shared.candidates(seat, found_scores[seat])) for seat in (0, 1)]
    assert twice[0] & twice[1], "no row is a candidate of both seats"


COMPILED = (
    (scores.Case("decode", "fp8", ((131_072,),) * 32, pages=2048, heads=64, pool=65_600), "fp8", 64),
    (scores.Case("verify", "fp8", ((98_304,) * 4,) * 8, pages=1536, heads=64, pool=300_000), "bf16", 1024),
    (scores.Case("crowd", "bf16", ((98_304,),) * 102, pages=1536, heads=64, pool=300_000), "fp8", 64),
)


@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize(("case", "records", "staging"), COMPILED, ids=[each[0].name for each in COMPILED])
def test_the_kernel_compiles_for_an_h200_without_spills(case, records, staging):
    """Each case at its tuned tile: no spills, one kernel, and a host pool of which XLA copies nothing."""
    tuning = dispatch.tuned(case.keys == "fp8", case.seats * case.pages, "indexer_prefetch")
    options = dict(implementation="mosaic_gpu", staging=staging, tuning=tuning)
    prefetch = functools.partial(pallas_kernels.indexer_prefetch, **options)
    stored = jnp.float8_e4m3fn if case.keys == "fp8" else jnp.bfloat16
    record, word = ((164,), jnp.uint32) if records == "fp8" else ((3, 192), jnp.bfloat16)
    host_rows = case.pool * 64
    compiled = aot.compile_for_h200(
        prefetch,
        aot.device((case.seats, case.rows, case.heads, 128), stored),
        aot.device((case.seats, case.rows, case.heads), jnp.float32),
        aot.device((case.pool, 64 * 132), jnp.uint8)
        if case.keys == "fp8"
        else aot.device((case.pool, 64, 128), stored),
        aot.device((case.seats, case.pages), jnp.int32),
        aot.device((case.seats, case.rows), jnp.int32),
        aot.device((case.seats,), jnp.float32),
        aot.device((case.seats,), jnp.int32),
        aot.device((case.seats,), jnp.int32),
        aot.device((host_rows,), jnp.int32),
        aot.host((3, host_rows, *record), word),
        aot.device((), jnp.int32),
    )
    compiled.assert_no_spills()
    assert len(compiled.kernels) == 1
    assert compiled.memory.host_temp_size_in_bytes == 0
    assert not [line for line in compiled.text.splitlines() if " copy" in line and f",{host_rows}," in line]
    assert compiled.memory.temp_size_in_bytes < 4096  # counts, and nothing of the size of a list


ARGUMENTS = (
    *("query", "weights", "pages", "page_numbers", "visible", "threshold"),
    *("lengths", "cap", "slot_of", "host_pool", "layer"),
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(threshold=np.zeros((3,), np.float32)), r"threshold is float32\[3\].*need float32\[2\]"),
        (dict(cap=np.zeros((2,), np.int16)), r"cap is int16\[2\].*need int32\[2\]"),
        (dict(slot_of=np.zeros((64,), np.int32)), r"slot_of is int32\[64\].*need int32\[832\]"),
        (dict(host_pool=np.zeros((3, 832), np.uint32)), r"host_pool has shape \[3, 832\]"),
        (dict(host_pool=np.zeros((3, 832, 3), np.uint8)), "a record has 3 bytes"),
        (dict(weights=np.zeros((2, 1, 7), np.float32)), "weights has shape"),
        (dict(staging=0), "staging is 0"),
        (dict(implementation="cuda"), "'cuda' is unknown"),
        (dict(implementation="mosaic_gpu", tuning=Tuning(pages_per_math=2)), "pages_per_math is 2"),
    ],
)
def test_wrong_input_is_refused(change, words):
    inputs = cases.make(cases.CORNERS[0])
    given: dict[str, Any] = dict(zip(ARGUMENTS, inputs.arguments, strict=True)) | dict(staging=256) | change
    with pytest.raises(ValueError, match=words):
        pallas_kernels.indexer_prefetch(**given)


def placed(memory):
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)


def test_a_pinned_pool_is_not_for_the_reference():
    """jnp cannot index it; the error says what can."""
    inputs = cases.make(cases.CORNERS[0])
    given: dict[str, Any] = dict(zip(ARGUMENTS, inputs.arguments, strict=True))
    given["host_pool"] = jax.device_put(inputs.host_pool, placed("pinned_host"))
    with pytest.raises(NotImplementedError, match="pinned memory.*implementation='mosaic_gpu'"):
        pallas_kernels.indexer_prefetch(**given, staging=8, implementation="reference")


def test_the_tuned_table_covers_every_size():
    for is_fp8 in (True, False):
        for pages in (1, 1536, 102 * 1536, 10**8):
            assert dispatch.tuned(is_fp8, pages, "indexer_prefetch").pages_per_math == 1


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("case", cases.CORNERS + cases.FAR, ids=cases.identifier)
def test_the_kernel_on_the_gpu(case, memory):
    inputs = cases.make(case)
    *before, pool, layer = jax.device_put(inputs.arguments)
    pool = jax.device_put(inputs.host_pool, placed(memory))
    run = jitted(pallas_kernels.indexer_prefetch, staging=inputs.staging, implementation="mosaic_gpu")
    plain = plain_scores(inputs, implementation="mosaic_gpu")
    for _ in range(3):
        inputs.judge(run(*before, pool, layer), plain)
