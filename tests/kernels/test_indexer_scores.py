"""Index scores: the reference against an oracle in f64, the Mosaic kernel against the same, interpreted and compiled.

The tests know the cases and how to run an implementation. What is right is the oracle's word (`cases.Inputs`), which
shares no code with either.
"""

import collections
import functools
import re
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
        Tuning(pages_per_math=1, math=1, stages=2, lookahead=2, blocks=3, run=3),  # the last run of a seat is cut
    ],
    ids=["one_block", "cut_tile", "idle_blocks", "cut_run"],
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


NEEDS_THE_COMPILER = pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))


@functools.cache
def compiled(case):
    """At its tuned tile."""
    score = functools.partial(pallas_kernels.indexer_scores, implementation="mosaic_gpu")
    return aot.compile_for_h200(score, *shapes(case))


@NEEDS_THE_COMPILER
@pytest.mark.parametrize("case", COMPILED, ids=cases.identifier)
def test_the_kernel_compiles_for_an_h200_without_spills(case):
    """Each case at its tuned tile: no spills, no copy of the pool (temp stays far below a page), one kernel."""
    found = compiled(case)
    found.assert_no_spills()
    assert len(found.kernels) == 1
    small = 8 * case.seats * case.rows * (64 + 64 * 128)  # padded weights and query
    assert found.memory.temp_size_in_bytes <= small


@NEEDS_THE_COMPILER
@pytest.mark.parametrize("case", COMPILED[2:4], ids=cases.identifier)
def test_a_page_beyond_two_gib_is_where_the_copies_look(case):
    """A pool of 19.2 million rows. What the compiled kernel hands TMA as a page's coordinate is the 32-bit number that
    it read from the table, moved but not computed with, so there is no product to overflow; TMA multiplies it by the
    descriptor's stride, which is 64 bits wide and here must be a page."""
    ptx = next(text for name, text in compiled(case).files.items() if name.endswith(".ptx"))
    tuning = dispatch.tuned(case.keys == "fp8", case.seats * case.pages)
    sources = [source for _, source in tma_copies(ptx)]
    assert sources.count("page number") >= tuning.lookahead
    assert len(sources) - sources.count("page number") == tuning.lookahead * 2 * case.rows  # queries and weights

    page_bytes = 64 * 132 if case.keys == "fp8" else 64 * 128 * 2
    assert case.pool * page_bytes > 2**31 and case.pool * 64 > 4_000_000
    views = page_views(compiled(case), case.pool)
    assert views == [page_bytes] * (2 if case.keys == "fp8" else 1)  # keys, and scales


def tma_copies(ptx):
    """(instruction, what sets its last coordinate) of each."""
    found = re.findall(r"(cp\.async\.bulk\.tensor\S+) \[\S+\], \[%rd\d+, \{([^}]*)\} ?\]", ptx)
    definitions = definitions_of(ptx)
    return [(name, source_of(definitions, coordinates.split(",")[-1].strip())) for name, coordinates in found]


def source_of(definitions, register):
    """ "page number" if the register is only ever set to 32-bit words of device memory, through moves at most."""
    pending, seen = [register], {register}
    while pending:
        for operation, sources in definitions[pending.pop()]:
            if operation == "mov.b32" and sources.startswith("%r"):
                pending += {sources} - seen
                seen.add(sources)
            elif not re.fullmatch(r"ld\.global(\.v[24])?\.b32", operation):
                return operation
    return "page number"


def definitions_of(ptx):
    """register -> (operation, its other operands) of each line that sets it."""
    found = collections.defaultdict(list)
    for operation, targets, sources in re.findall(
        r"^\s*(?:@\S+\s+)?([a-z][\w.:]*)\s+(\{[^}]*\}|%\w+),\s*(.*);", ptx, re.MULTILINE
    ):
        for register in re.findall(r"%\w+", targets):
            found[register].append((operation, sources))
    return found


def page_views(found, pool):
    """Bytes from one page to the next in each of the TMA descriptors over the pool."""
    log = next(text for name, text in found.files.items() if name.endswith("mlir-passes.log"))
    first = log[: log.index("IR Dump Before", 100)]
    bytes_of = dict(f8E4M3FN=1, bf16=2, f32=4)
    found = []
    for shape, kind, strides in re.findall(
        rf"extract_strided_metadata \S+ : memref<({pool}[\dx]*)x([a-z]\w*)(?:, strided<\[([^\]]*)\]>)?>", first
    ):
        extents = [int(extent) for extent in shape.split("x")]
        stride = int(strides.split(",")[0]) if strides else int(np.prod(extents[1:]))
        found.append(stride * bytes_of[kind])
    return found


@NEEDS_THE_COMPILER
def test_keys_that_are_read_once_say_so():
    """`once` puts a cache policy on the copies of pages, and on no other copy: a query is read by every block."""
    score = functools.partial(pallas_kernels.indexer_scores, implementation="mosaic_gpu", tuning=Tuning(once=True))
    found = aot.compile_for_h200(score, *shapes(COMPILED[-1]))
    ptx = next(text for name, text in found.files.items() if name.endswith(".ptx"))
    assert "createpolicy.fractional.L2::evict_first.b64" in ptx
    copies = tma_copies(ptx)
    assert {source == "page number" for _, source in copies} == {True, False}
    for name, source in copies:
        assert name.endswith(".L2::cache_hint") == (source == "page number")


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
