"""echo_top_k: the library and jnp against sorting, bit for bit, on rows that need every step of a selection."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax import _ffi, indexer
from tests import selections
from tests.ffi.conftest import check_choices, check_choices_without_the_library
from tests.limits import HANG_S
from tests.oracles.select import padded, top_k

pytestmark = pytest.mark.usefixtures("library")

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / "ffi" / "src" / "top_k_kernel.cuh"
LENGTH, ROWS = 3001, 10  # odd, so that rows of bfloat16 lie at odd addresses
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}

select = jax.jit(indexer.select, static_argnums=(2, 3))


def got_by(implementation, score, visible, k, bound=None):
    got = select(score, visible, k, implementation, bound)
    return np.asarray(got.positions), np.asarray(got.kth_score).view(np.uint32)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("corner", selections.CORNERS)
def test_corner(corner, dtype):
    score = selections.make(corner, ROWS, LENGTH, dtype)
    for k in (1, 250):
        visible = selections.lengths(ROWS, LENGTH, k)
        expected = selections.answer(score, visible, k)
        for implementation in ("ffi", "jnp"):
            difference = selections.first_difference(got_by(implementation, score, visible, k), expected)
            assert difference is None, f"{implementation}, k {k}: {difference}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("corner", selections.CORNERS)
def test_corner_on_a_gpu(corner, dtype):
    """Rows long enough to be sampled, and divided among blocks; where the sample misleads, too."""
    length, k = 40001, 2048
    score = selections.make(corner, ROWS, length, dtype)
    for rows, visible in ((ROWS, selections.lengths(ROWS, length, k)), (1, np.array([length], np.int32))):
        expected = selections.answer(score[:rows], visible, k)
        difference = selections.first_difference(got_by("cuda", score[:rows], visible, k), expected)
        assert difference is None, f"{rows} rows: {difference}"


def hint(*arrays: np.ndarray) -> indexer.Bound:
    return indexer.Bound(*map(jnp.asarray, arrays))


def hints(score, visible, k):
    """Bounds that leave too few, just enough, and enough, each alone and with its marks; and bounds of no use."""
    for rank in (k - 1, k, 2 * k):
        bound = selections.bounds(score, visible, rank)
        yield f"rank {rank}", hint(bound)
        yield f"rank {rank}, marked", hint(bound, selections.marks(score, bound))
    for value in (np.nan, np.inf, -np.inf):
        bound = np.full(len(score), value, np.float32)
        yield f"{value}", hint(bound)
        yield f"{value}, marked", hint(bound, selections.marks(score, bound))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("corner", selections.CORNERS)
def test_a_bound_changes_nothing(corner, dtype):
    score, k = selections.make(corner, ROWS, LENGTH, dtype), 250
    visible = selections.lengths(ROWS, LENGTH, k)
    expected = selections.answer(score, visible, k)
    for name, bound in hints(score, visible, k):
        difference = selections.first_difference(got_by("ffi", score, visible, k, bound), expected)
        assert difference is None, f"{name}: {difference}"
    assert selections.first_difference(got_by("jnp", score, visible, k, bound), expected) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("corner", selections.CORNERS)
def test_a_bound_changes_nothing_on_a_gpu(corner, dtype):
    length, k = 40001, 2048
    score = selections.make(corner, ROWS, length, dtype)
    visible = selections.lengths(ROWS, length, k)
    expected = selections.answer(score, visible, k)
    for name, bound in hints(score, visible, k):
        difference = selections.first_difference(got_by("cuda", score, visible, k, bound), expected)
        assert difference is None, f"{name}: {difference}"


def test_marks_stand_for_the_row():
    """What is not marked is not looked at, where enough is: the promise is used. Bits behind the last visible position
    mean nothing."""
    score, visible = np.arange(40, dtype=np.float32)[None], np.array([37], np.int32)
    few = selections.marks(score % 8 == 0, np.zeros(1))  # 0, 8, 16, 24, 32: five
    got = got_by("ffi", score, visible, 4, hint(np.zeros(1, np.float32), few))
    np.testing.assert_array_equal(got[0], [[8, 16, 24, 32]])
    beyond = np.array([[0, 0xFF]], np.uint32)  # 32 to 39, of which three are not visible
    got = got_by("ffi", score, visible, 6, hint(np.zeros(1, np.float32), beyond))
    np.testing.assert_array_equal(got[0], [[31, 32, 33, 34, 35, 36]])
    got = got_by(
        "ffi", score, visible, 4, hint(np.full(1, 16, np.float32), few)
    )  # only two of the marked ones exceed it
    np.testing.assert_array_equal(got[0], [[33, 34, 35, 36]])


@given(st.data(), st.integers(1, 4), st.integers(1, 90), st.integers(1, 100), st.sampled_from(list(DTYPES)))
def test_any_bits(data, rows, length, k, dtype):
    """Scores of any bits, NaNs of every payload included, of a few kinds only so that ties are many."""
    width = {"f32": 32, "bf16": 16}[dtype]
    kinds = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=6))
    seed = data.draw(st.integers(0, 2**16))
    drawn = np.random.default_rng(seed).choice(np.array(kinds, f"u{width // 8}"), (rows, length))
    visible = np.array(data.draw(st.lists(st.integers(-2, length + 2), min_size=rows, max_size=rows)), np.int32)
    score, expected = drawn.view(DTYPES[dtype]), None
    bound = np.array(data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=rows, max_size=rows)), np.uint32)
    bound = np.where(seed % 2, bound, np.uint32(kinds[0]) << (32 - width)).view(np.float32)
    operands = jnp.asarray(score), jnp.asarray(visible)
    for wanted in ((), hint(bound), hint(bound, selections.marks(score, bound))):
        positions, kth_score = map(np.asarray, _ffi.top_k(*operands, k, *wanted))
        got = positions, kth_score.view(np.uint32)
        expected = selections.answer(score, visible, k) if expected is None else expected
        difference = selections.first_difference(got, expected)
        assert difference is None, difference


def test_sorting_and_the_loops_agree():
    """The answers used here are those of the oracle that everything else is judged by."""
    for corner, k in itertools.product(selections.CORNERS, (1, 9)):
        score, visible = selections.make(corner, 5, 40), np.array([40, 0, 1, 9, 23], np.int32)
        positions, bits = selections.answer(score, visible, k)
        for row in range(5):
            chosen, kth = top_k(score[row], int(visible[row]), k)
            np.testing.assert_array_equal(positions[row], padded(chosen, k))
            np.testing.assert_equal(float(bits[row : row + 1].view(np.float32)[0]), kth + 0.0)


def test_more_wanted_than_positions():
    """The library lists k entries whatever the row's length; `select` asks for no more than there are."""
    score, visible = jnp.asarray([[3.0, -0.0, 2.0]]), jnp.asarray([9], jnp.int32)
    positions, kth_score = _ffi.top_k(score, visible, 5)
    np.testing.assert_array_equal(positions, [[0, 1, 2, -1, -1]])
    assert np.asarray(kth_score).view(np.uint32).tolist() == [0]
    assert indexer.select(score, visible, 5, "ffi").positions.shape == (1, 3)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_nothing_beyond_the_visible_length_is_looked_at(dtype):
    """What lies there is better than anything that is visible."""
    score = selections.make("normal", 4, 100, dtype)
    visible = np.array([60, 7, 0, 99], np.int32)
    expected = got_by("ffi", score, visible, 8)
    score[np.arange(100) >= visible[:, None]] = np.inf
    assert selections.first_difference(got_by("ffi", score, visible, 8), expected) is None


def test_vmap_is_a_batch_of_calls():
    score = selections.make("tie_at_threshold", 6, 50).reshape(3, 2, 50)
    visible = np.array([[50, 3], [0, 49], [20, 21]], np.int32)
    got = jax.vmap(lambda score, visible: indexer.select(score, visible, 6, "ffi"))(score, visible)
    flat = indexer.select(jnp.asarray(score.reshape(6, 50)), jnp.asarray(visible.reshape(6)), 6, "jnp")
    np.testing.assert_array_equal(got.positions.reshape(6, 6), flat.positions)
    np.testing.assert_array_equal(got.kth_score.reshape(6), flat.kth_score)


# ---- the kernel of the GPU, emulated -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """ffi/src/top_k_kernel.cuh as a CPU library."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("emulator") / "top_k.so"
    folders = [ROOT / "tests/ffi/emulate", ROOT / "ffi/include", ROOT / "ffi/src"]
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"]
    command += ["-DECHO_EMULATE", *(f"-I{folder}" for folder in folders)]
    subprocess.run([*command, str(folders[0] / "top_k.cc"), "-o", str(path)], check=True, timeout=HANG_S)
    return ctypes.CDLL(str(path))


@dataclasses.dataclass(frozen=True)
class Emulated:
    answer: tuple[np.ndarray, np.ndarray]
    reads: int  # loads of scores


def emulate(emulator, score, k, blocks, ahead, bound=None, above=None):
    """The kernel's answer for one row, which begins `ahead` scores behind a boundary of 16 bytes."""
    room = np.zeros(len(score) + 32, score.dtype)
    boundary = (-room.ctypes.data % 16) // score.itemsize
    row = room[boundary + ahead :][: len(score)]
    row[:] = score
    positions, bits = np.full((1, k), 77, np.int32), np.full(1, 77, np.uint32)
    error, reads = ctypes.create_string_buffer(200), ctypes.c_int64()
    pointer = ctypes.c_void_p
    emulator.EmulateTopK(
        row.ctypes.data_as(pointer), ctypes.c_int(score.itemsize == 2), ctypes.c_uint32(len(score)),
        ctypes.c_uint32(k), None if bound is None else bound.ctypes.data_as(pointer),
        None if above is None else above.ctypes.data_as(pointer), ctypes.c_uint32(blocks),
        ctypes.c_uint64(blocks + ahead), positions.ctypes.data_as(pointer), bits.ctypes.data_as(pointer),
        ctypes.byref(reads), error,
    )  # fmt: skip
    assert not error.value, error.value.decode()
    return Emulated((positions, bits), reads.value)


def check_emulated(emulator, score, k, blocks, ahead, bound=None, above=None):
    got = emulate(emulator, score, k, blocks, ahead, bound, above)
    difference = selections.first_difference(got.answer, selections.answer(score[None], np.array([len(score)]), k))
    assert difference is None, difference
    return got.reads


# Above 12,288 scores the kernel samples; fooled samples send it to the row itself.
EMULATED = [*selections.CORNERS, "fooled_too_high", "fooled_too_low"]


def emulated_score(corner, length, k, dtype):
    if corner in selections.CORNERS:
        return selections.make(corner, 1, length, dtype)[0]
    return selections.fooled(1, length, k, sample_is_best=corner == "fooled_too_high")[0].astype(dtype)


@pytest.mark.parametrize("corner", EMULATED)
def test_corner_emulated(emulator, corner):
    length, k = 16411, 700
    check_emulated(emulator, emulated_score(corner, length, k, np.float32), k, blocks=2, ahead=3)
    check_emulated(emulator, emulated_score(corner, length, k, ml_dtypes.bfloat16), k, blocks=3, ahead=5)


@pytest.mark.parametrize("length", [0, 1, 699, 700, 701, 12288, 12289])
def test_length_emulated(emulator, length):
    check_emulated(emulator, selections.make("normal", 1, length)[0], 700, blocks=2, ahead=1)


@pytest.mark.parametrize("corner", ["normal", "tie_at_threshold"])
def test_a_row_longer_than_what_is_emitted_at_once_emulated(emulator, corner):
    check_emulated(emulator, selections.make(corner, 1, 131072 + 5000)[0], 4096, blocks=1, ahead=0)


@pytest.mark.parametrize(
    "corner", ["index_scores", "tie_at_threshold", "nan_among_minus_infinity", "all_best_at_the_end"]
)
@pytest.mark.parametrize("rank", [0, 699, 700, 1500], ids=lambda rank: f"bound_{rank}")
def test_bound_emulated(emulator, corner, rank):
    """Whether or not a bound leaves enough keys; by the row, and by its marks."""
    length, k = 16411, 700
    score = selections.make(corner, 1, length)
    bound = selections.bounds(score, np.array([length]), rank)
    above = selections.marks(score, bound)
    check_emulated(emulator, score[0], k, 2, 3, bound)
    reads = check_emulated(emulator, score[0], k, 3, 1, bound, above[0])
    listed = int(np.bitwise_count(above).sum())
    assert (reads == listed) == (k <= listed <= 12288), f"{reads} scores read for a list of {listed}"


def test_a_good_bound_saves_the_sample_emulated(emulator):
    """Which the row is read for beforehand; a bound that is too low or too high costs a pass over the row."""
    length, k = 20000, 700
    score = selections.make("normal", 1, length)
    reads = [
        check_emulated(emulator, score[0], k, 2, 0, selections.bounds(score, np.array([length]), rank))
        for rank in (1000, 699, 13000)
    ]
    without = check_emulated(emulator, score[0], k, 2, 0)
    assert reads[0] < without < min(reads[1:])


def test_a_bound_that_is_no_number_is_none_emulated(emulator):
    score = selections.make("normal", 1, 20000)[0]
    without = check_emulated(emulator, score, 700, 2, 0)
    for value in (np.nan, np.inf, -np.inf):
        assert check_emulated(emulator, score, 700, 2, 0, np.array([value], np.float32)) == without


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_marks_that_are_too_many_emulated(emulator, bound):
    """More may be marked than exceeds the bound; whether enough of it does decides if the rest is looked at."""
    score, k = selections.make("normal", 1, 3001), 700
    loosely = selections.marks(score, np.zeros(1))[0]
    reads = check_emulated(emulator, score[0], k, 3, 1, np.full(1, bound, np.float32), loosely)
    assert (reads == np.bitwise_count(loosely).sum()) == ((score > bound).sum() >= k)


def test_marks_beyond_the_visible_scores_are_not_looked_at_emulated(emulator):
    score = selections.make("normal", 1, 3001)[0]
    everything = np.full(94, 0xFFFFFFFF, np.uint32)
    assert check_emulated(emulator, score, 700, 3, 1, np.zeros(1, np.float32), everything) == 3001


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 4, 7, 8])
@pytest.mark.parametrize("corner", EMULATED)
def test_corner_emulated_in_full(emulator, corner, blocks):
    for (length, k), dtype in itertools.product(((12289, 1), (40001, 2048), (300001, 4096)), DTYPES.values()):
        score = emulated_score(corner, length, k, dtype)
        check_emulated(emulator, score, k, blocks, ahead=length % 4)
        for rank in (k, 2 * k):
            bound = selections.bounds(score[None], np.array([length]), rank)
            check_emulated(emulator, score, k, blocks, length % 4, bound)
            check_emulated(emulator, score, k, blocks, length % 4, bound, selections.marks(score[None], bound)[0])


# ---- the choice ------------------------------------------------------------------------------------------


def calls_library(implementation):
    shapes = jax.ShapeDtypeStruct((2, 8), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    text = jax.jit(lambda score, visible: indexer.select(score, visible, 4, implementation)).lower(*shapes).as_text()
    return "custom_call @echo_top_k" in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a process without a GPU is told")
def test_choices():
    check_choices(calls_library)


def test_without_the_library(monkeypatch):
    check_choices_without_the_library(calls_library, monkeypatch)


def test_not_built(monkeypatch):
    monkeypatch.setattr(_ffi, "why_unavailable", lambda platform=None: f"build it with: {_ffi.BUILD_COMMAND}")
    assert not calls_library("auto")
    with pytest.raises(RuntimeError, match="pip install --no-build-isolation"):
        calls_library("ffi")


def test_a_gpu_has_a_largest_k(monkeypatch):
    """jnp serves what lies above it, and asking for the library says so."""
    assert f"kMaxTopK = {_ffi.GPU_MAX_TOP_K};" in KERNEL.read_text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_ffi, "why_unavailable", lambda platform=None: None)
    too_many = _ffi.GPU_MAX_TOP_K + 1
    assert indexer.uses_library(too_many - 1) and not indexer.uses_library(too_many)
    with pytest.raises(RuntimeError, match="top_k is 4097 but a GPU selects at most 4096 by the library"):
        indexer.uses_library(too_many, "ffi")


# ---- misused ---------------------------------------------------------------------------------------------

SCORE, VISIBLE = np.zeros((2, 8), np.float32), np.zeros(2, np.int32)
WRONG_CALLS = {
    "k": (SCORE, VISIBLE, 0, "k is 0 and positions has shape [2, 0]"),
    "half": (SCORE.astype(np.float16), VISIBLE, 1, "score has element type F16 but F32 or BF16 is needed"),
    "one_axis": (SCORE[0], VISIBLE, 1, "score has shape [8] but must be [rows, positions]"),
    "visible": (SCORE, VISIBLE[:1], 1, "axis 0 of score has length 2 but visible has length 1"),
}


BOUND, ABOVE = np.zeros(2, np.float32), np.zeros((2, 1), np.uint32)
WRONG_HINTS = {
    "bound": (BOUND[:1], ABOVE, "axis 0 of score has length 2 but bound has length 1"),
    "words": (
        BOUND,
        np.zeros((2, 2), np.uint32),
        "above has shape [2, 2] but 2 rows of 8 scores need [2, 1], or [2, 0]",
    ),
    "rows": (BOUND, ABOVE[:1], "above has shape [1, 1] but 2 rows"),
}


@pytest.mark.parametrize("bound, above, message", WRONG_HINTS.values(), ids=WRONG_HINTS.keys())
def test_library_refuses_hints(bound, above, message):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(
            _ffi.top_k(jnp.asarray(SCORE), jnp.asarray(VISIBLE), 1, *map(jnp.asarray, (bound, above)))
        )
    assert "INVALID_ARGUMENT" in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("score, visible, k, message", WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_library_refuses(score, visible, k, message):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(_ffi.top_k(jnp.asarray(score), jnp.asarray(visible), k))
    assert "INVALID_ARGUMENT" in str(caught.value) and message in str(caught.value)


def test_select_refuses():
    with pytest.raises(ValueError, match="top_k is 0 but must be at least 1"):
        indexer.select(jnp.asarray(SCORE), jnp.asarray(VISIBLE), 0)
    with pytest.raises(ValueError, match="score is float16 but must be float32 or bfloat16"):
        indexer.select(jnp.asarray(SCORE, jnp.float16), jnp.asarray(VISIBLE), 1)
