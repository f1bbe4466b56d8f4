"""echo_top_k: the library and jnp against sorting, bit for bit, on rows that need every step of a selection."""

from __future__ import annotations

import ctypes
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
from tests.oracles.select import padded, top_k

pytestmark = pytest.mark.usefixtures("library")

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / "ffi" / "src" / "top_k_kernel.cuh"
LENGTH, ROWS = 3001, 10  # odd, so that rows of bfloat16 lie at odd addresses
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}

select = jax.jit(indexer.select, static_argnums=(2, 3))


def got_by(implementation, score, visible, k):
    got = select(score, visible, k, implementation)
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


@given(st.data(), st.integers(1, 4), st.integers(1, 90), st.integers(1, 100), st.sampled_from(list(DTYPES)))
def test_any_bits(data, rows, length, k, dtype):
    """Scores of any bits, NaNs of every payload included, of a few kinds only so that ties are many."""
    width = {"f32": 32, "bf16": 16}[dtype]
    kinds = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=6))
    seed = data.draw(st.integers(0, 2**16))
    drawn = np.random.default_rng(seed).choice(np.array(kinds, f"u{width // 8}"), (rows, length))
    visible = np.array(data.draw(st.lists(st.integers(-2, length + 2), min_size=rows, max_size=rows)), np.int32)
    score = drawn.view(DTYPES[dtype])
    positions, kth_score = map(np.asarray, _ffi.top_k(jnp.asarray(score), jnp.asarray(visible), k))
    difference = selections.first_difference(
        (positions, kth_score.view(np.uint32)), selections.answer(score, visible, k)
    )
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
    subprocess.run([*command, str(folders[0] / "top_k.cc"), "-o", str(path)], check=True, timeout=100)
    return ctypes.CDLL(str(path))


def emulate(emulator, score, k, blocks, ahead):
    """The kernel's answer for one row, which begins `ahead` scores behind a boundary of 16 bytes."""
    room = np.zeros(len(score) + 32, score.dtype)
    boundary = (-room.ctypes.data % 16) // score.itemsize
    row = room[boundary + ahead :][: len(score)]
    row[:] = score
    positions, bits = np.full((1, k), 77, np.int32), np.full(1, 77, np.uint32)
    error = ctypes.create_string_buffer(200)
    emulator.EmulateTopK(
        row.ctypes.data_as(ctypes.c_void_p), ctypes.c_int(score.itemsize == 2), ctypes.c_uint32(len(score)),
        ctypes.c_uint32(k), ctypes.c_uint32(blocks), ctypes.c_uint64(blocks + ahead),
        positions.ctypes.data_as(ctypes.c_void_p), bits.ctypes.data_as(ctypes.c_void_p), error,
    )  # fmt: skip
    assert not error.value, error.value.decode()
    return positions, bits


def check_emulated(emulator, score, k, blocks, ahead):
    difference = selections.first_difference(
        emulate(emulator, score, k, blocks, ahead), selections.answer(score[None], np.array([len(score)]), k)
    )
    assert difference is None, difference


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
    check_emulated(emulator, emulated_score(corner, length, k, ml_dtypes.bfloat16), k, blocks=4, ahead=5)


@pytest.mark.parametrize("length", [0, 1, 699, 700, 701, 12288, 12289])
def test_length_emulated(emulator, length):
    check_emulated(emulator, selections.make("normal", 1, length)[0], 700, blocks=2, ahead=1)


@pytest.mark.parametrize("corner", ["normal", "tie_at_threshold"])
def test_a_row_longer_than_what_is_emitted_at_once_emulated(emulator, corner):
    check_emulated(emulator, selections.make(corner, 1, 131072 + 5000)[0], 4096, blocks=1, ahead=0)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 4, 8])
@pytest.mark.parametrize("corner", EMULATED)
def test_corner_emulated_in_full(emulator, corner, blocks):
    for (length, k), dtype in itertools.product(((12289, 1), (40001, 2048), (300001, 4096)), DTYPES.values()):
        check_emulated(emulator, emulated_score(corner, length, k, dtype), k, blocks, ahead=length % 4)


# ---- the choice ------------------------------------------------------------------------------------------


def calls_library(implementation):
    shapes = jax.ShapeDtypeStruct((2, 8), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    text = jax.jit(lambda score, visible: indexer.select(score, visible, 4, implementation)).lower(*shapes).as_text()
    return "custom_call @echo_top_k" in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a process without a GPU is told")
def test_choices():
    assert calls_library("auto") and calls_library("ffi") and not calls_library("jnp")
    with pytest.raises(ValueError, match="'rdma' but must be one of auto, ffi, cuda, jnp"):
        calls_library("rdma")
    with pytest.raises(RuntimeError, match="'cuda' is not available: it needs a CUDA device but runs on 'cpu'"):
        calls_library("cuda")


def test_without_the_library(monkeypatch):
    monkeypatch.setenv("ECHO_JAX_FFI", "0")
    assert not calls_library("auto")
    with pytest.raises(RuntimeError, match="'ffi' is not available: switched off by ECHO_JAX_FFI=0"):
        calls_library("ffi")


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
