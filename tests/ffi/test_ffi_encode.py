"""echo_encode: what a step stores and asks with, by the library, against the oracle of the formats, byte for byte.

The sign and the payload of a NaN are nobody's business.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax import _ffi, layer
from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import Encoded, KeyFormat, RecordFormat, encode_step
from echo_jax.layer import LayerInputs
from echo_jax.recall import StepView
from echo_jax.threshold import Never
from echo_jax.types import LayerState
from tests.ffi.conftest import check_choices, check_choices_without_the_library
from tests.oracles import formats as oracle
from tests.oracles.words import NO_ROW, PAGE
from tests.test_formats import INF, NAN, expected_record, stored_key, wild, with_keys

pytestmark = pytest.mark.usefixtures("library")

PAGES = 3
encode = jax.jit(encode_step, static_argnums=(0, 1, 8))


@dataclasses.dataclass
class Step:
    """Formats, and the NumPy operands of one call."""

    records: RecordFormat
    keys: KeyFormat
    index_keys: np.ndarray
    rows: np.ndarray
    index_key: np.ndarray
    record: np.ndarray
    query: np.ndarray
    weights: np.ndarray

    def encoded(self, implementation: str) -> Encoded:
        arrays = (self.index_keys, self.rows, self.index_key, self.record, self.query, self.weights)
        return encode(self.records, self.keys, *map(jnp.asarray, arrays), implementation)


def step(
    keys, records, rows=(0, 191, 63, NO_ROW, 64, 127), heads=(3, 5), width=128, latent=256, rope=12, rotated=False
):
    """Pages full of garbage; rows in any order, at both ends of pages."""
    keys, records = KeyFormat(keys, width, rotated), RecordFormat(records, latent, rope)
    shape = (PAGES, *keys.page_shape)
    garbage = np.arange(int(np.prod(shape)) * keys.dtype.itemsize) * 7 % 251
    return Step(
        *(records, keys, garbage.astype(np.uint8).view(keys.dtype).reshape(shape), np.array(rows, np.int32)),
        *(wild((len(rows), width), 1), wild((len(rows), latent + rope), 2)),
        *(wild((*heads, width), 3), wild(heads, 4)),
    )


def raw(array) -> np.ndarray:
    """Its bytes, by the first axis."""
    array = np.ascontiguousarray(array)
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.shape[0], array[:1].nbytes)


def expected_pages(given: Step) -> np.ndarray:
    """u8[PAGES, bytes] the pages with the keys in them."""
    return with_keys(given.keys, raw(given.index_keys), given.rows, given.index_key)


def check(given: Step, implementation: str):
    got = given.encoded(implementation)
    np.testing.assert_array_equal(raw(got.index_keys), expected_pages(given))
    assert got.records.shape == (*given.record.shape[:-1], *given.records.shape)
    assert got.records.dtype == given.records.dtype
    np.testing.assert_array_equal(
        raw(got.records), raw(np.stack([expected_record(given.records, record) for record in given.record]))
    )
    assert got.query.dtype == given.keys.query_dtype and got.query.shape == given.query.shape
    heads = [stored_key(given.keys, head) for head in given.query.reshape(-1, given.keys.width)]
    codes = np.array([codes for codes, _ in heads], np.uint8)
    np.testing.assert_array_equal(raw(got.query.reshape(-1, given.keys.width)).reshape(-1), codes.reshape(-1))
    scales = np.array([scale for _, scale in heads], np.float32).reshape(given.weights.shape)
    np.testing.assert_array_equal(np.asarray(got.weights), given.weights * scales)


LIBRARY = ["ffi", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS = ["f32", "bf16", "fp8"]


@pytest.mark.parametrize("implementation", [*LIBRARY, "jnp"])
@pytest.mark.parametrize("records", FORMS)
@pytest.mark.parametrize("keys", FORMS)
def test_stored_forms(keys, records, implementation):
    if implementation == "jnp" and jax.default_backend() != "cpu":
        pytest.skip("XLA's quotients on a GPU may differ by one rounding")
    check(step(keys, records), implementation)


@pytest.mark.parametrize("implementation", LIBRARY)
@pytest.mark.parametrize(
    ("heads", "width", "latent", "rope"),
    [
        ((1, 1), 4, 128, 0),
        ((2, 3), 16, 128, 4),
        ((1, 64), 128, 512, 64),
        ((4, 2, 9), 260, 384, 68),
        ((0, 4), 128, 0, 8),
    ],
)
def test_widths_of_any_multiple_of_four(heads, width, latent, rope, implementation):
    """A warp's lanes are not all busy, or go round more than once; heads of none."""
    for form in ("fp8", "bf16"):
        check(
            step(form, form if latent else "bf16", heads=heads, width=width, latent=latent, rope=rope), implementation
        )


@pytest.mark.parametrize("implementation", LIBRARY)
def test_every_code_and_what_lies_around_the_middles(implementation):
    """Of keys whose largest value is 448, so that their scale is 1: between two codes the nearer one, at the middle the
    even one."""
    positive = oracle.from_e4m3(np.arange(0x7F, dtype=np.uint8))
    middles = (positive[1:] + positive[:-1]) / np.float32(2)
    edges = np.concatenate([positive, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, INF)])
    edges = edges[edges <= 448]
    values = np.resize(np.concatenate([edges, -edges]), (9, 127))
    given = step("fp8", "fp8", heads=(1, 9))
    given.query = np.concatenate([values, np.full((9, 1), 448, np.float32)], axis=1)[None]
    assert {stored_key(given.keys, head)[1] for head in given.query[0]} == {np.float32(1)}
    check(given, implementation)


@pytest.mark.parametrize("implementation", LIBRARY)
def test_bf16_at_and_around_the_middles(implementation):
    """Of the odd and of the even neighbour; with a carry into the exponent, and into infinity."""
    kept = np.array([0x3F80, 0x3F81, 0xC07F, 0x7F7F, 0x0080, 0xBFFE], np.uint32)
    bits = (kept[:, None] << 16) + np.array([0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    given = step("bf16", "bf16", heads=(1, 1))
    given.query = np.resize(bits.view(np.float32), given.query.shape)
    given.record = np.resize(bits.view(np.float32), given.record.shape)
    check(given, implementation)


@pytest.mark.parametrize("implementation", LIBRARY)
def test_scales_at_and_around_powers_of_two(implementation):
    """At 448 * 2^n the quotient is a power of two itself."""
    largest = np.float32(448) * np.float32(2.0) ** np.arange(-24, 24, dtype=np.float32)
    largest = np.concatenate([largest, np.nextafter(largest, np.float32(0)), np.nextafter(largest, INF)])
    given = step("fp8", "fp8", heads=(len(largest), 1), rows=[NO_ROW] * len(largest))
    given.query = wild(given.query.shape, 5) % 1e-4
    given.query[:, 0, 77] = -largest
    given.record = given.record % np.float32(1e-4)
    given.record[:, 200] = largest
    check(given, implementation)


@pytest.mark.parametrize("implementation", LIBRARY)
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF], ids=str)
def test_one_bad_value_spoils_its_block_and_no_other(bad, implementation):
    given = step("fp8", "fp8", rows=(5, 6, 7), heads=(1, 3))
    good = given.encoded(implementation)
    given.index_key[1, 2] = given.record[1, 130] = given.query[0, 1, 127] = bad
    got = given.encoded(implementation)
    read = np.asarray(given.keys.read_pages(got.index_keys, jnp.asarray([0], jnp.int32)))
    assert np.isnan(read[6]).all()
    np.testing.assert_array_equal(
        read[[5, 7]], np.asarray(given.keys.read_pages(good.index_keys, jnp.zeros(1, jnp.int32)))[[5, 7]]
    )
    values = np.asarray(given.records.decode(got.records))
    assert np.isnan(values[1, 128:256]).all()
    others = np.ones(values.shape, bool)
    others[1, 128:256] = False
    np.testing.assert_array_equal(values[others], np.asarray(given.records.decode(good.records))[others])
    weights, codes = np.asarray(got.weights)[0], np.asarray(got.query.astype(jnp.float32))[0]
    with np.errstate(invalid="ignore"):  # infinity times nothing
        assert not np.isfinite(weights[1]) and np.isnan(codes[1] * weights[1]).all()
    np.testing.assert_array_equal(weights[[0, 2]], np.asarray(good.weights)[0, [0, 2]])


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=12, max_size=12))
def test_any_values_are_stored_as_jnp_stores_them(values):
    values = np.array(values, np.float32)
    base = step("fp8", "fp8", rows=(9,), heads=(1, 1), width=4, latent=128, rope=8)
    base.index_key, base.query = values[None, :4], values[None, None, 4:8]
    base.record = np.resize(values, (1, 136))
    ours, theirs = base.encoded("ffi"), base.encoded("jnp")
    for name, a, b in zip(Encoded._fields, ours, theirs, strict=True):
        np.testing.assert_array_equal(raw(a), raw(b), err_msg=name)


@pytest.mark.parametrize("keys", ["f32", "bf16"])
def test_weights_without_a_scale_are_handed_on_as_they_are(keys):
    """Subnormal ones too, which a multiplication takes for zeros."""
    given = step(keys, "f32", heads=(1, 2))
    given.weights = np.array([[1e-39, -1e-40]], np.float32)
    for implementation in ("ffi", "jnp"):
        np.testing.assert_array_equal(raw(given.encoded(implementation).weights), raw(given.weights), implementation)


@pytest.mark.parametrize("implementation", ["ffi", "jnp"])
def test_a_record_of_another_width_is_refused(implementation):
    given = step("fp8", "fp8")
    given.record = given.record[:, :132]
    with pytest.raises(ValueError, match=r"a record has 132 values but its format has 256 \+ 12; project to 268"):
        given.encoded(implementation)


def test_a_rotated_key_and_query(keys="fp8"):
    """Rotated by XLA before either form sees them."""
    given = step(keys, "bf16", rotated=True)
    for name, a, b in zip(Encoded._fields, given.encoded("ffi"), given.encoded("jnp"), strict=True):
        np.testing.assert_array_equal(raw(a), raw(b), err_msg=name)
    plain = dataclasses.replace(given, keys=KeyFormat(keys, 128))
    assert (raw(plain.encoded("ffi").query) != raw(given.encoded("ffi").query)).any()


@pytest.mark.parametrize("implementation", LIBRARY)
def test_pages_are_written_in_place(implementation):
    given = step("fp8", "fp8")
    arrays = [jnp.asarray(array) for array in (given.index_keys, given.rows, given.index_key, given.record)]
    arrays += [jnp.asarray(given.query), jnp.asarray(given.weights)]
    before = arrays[0].unsafe_buffer_pointer()
    donating = jax.jit(encode_step, static_argnums=(0, 1, 8), donate_argnums=2)
    got = donating(given.records, given.keys, *arrays, implementation)
    assert got.index_keys.unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(raw(got.index_keys), expected_pages(given))


@pytest.mark.gpu
@pytest.mark.parametrize("outside", [PAGES * PAGE, 2**31 - 1, -7])
def test_a_row_outside_is_skipped_on_a_gpu(outside):
    given = step("fp8", "fp8", rows=(3, outside, 4))
    got = given.encoded("cuda")
    given.rows = np.array([3, NO_ROW, 4], np.int32)
    np.testing.assert_array_equal(raw(got.index_keys), expected_pages(given))


@pytest.mark.parametrize("implementation", ["ffi", "jnp"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_a_layers_inputs_of_fewer_bits_are_the_float32_numbers_that_they_are(dtype, implementation):
    """As a model computed in bf16 hands them over."""
    given = step("fp8", "fp8", rows=(0, 64), heads=(2, 1, 5), rope=8)
    config = CacheConfig(
        layer_kinds=("full",),
        records=given.records,
        keys=given.keys,
        threshold=Never(),
        eviction=Lru(),
        seats=2,
        capacity=64,
        host_rows=PAGES * PAGE,
        device_slots=10,
        top_k=4,
        encode_implementation=implementation,
    )
    arrays = (given.record[:, None], given.query, given.weights, given.index_key[:, None])
    record, query, weights, key = (jnp.asarray(array % np.float32(100)).astype(dtype) for array in arrays)
    inputs = LayerInputs(jnp.zeros((2, 1, 1, 1)), record, query, weights, key)
    pages = jnp.asarray(given.index_keys)
    state = LayerState(slots=None, records=jnp.zeros((1,)), index_keys=pages, threshold=())
    nothing = jnp.zeros((2, 1), jnp.int32)
    view = StepView(nothing, nothing[:, 0], nothing, jnp.asarray(given.rows)[:, None], nothing, jnp.int32(1))
    got = layer.encode(config, state, view, inputs)
    wider = LayerInputs(*(array.astype(jnp.float32) for array in (inputs.query, record, query, weights, key)))
    expected = layer.encode(config, state, view, wider)
    for name, a, b in zip(Encoded._fields, got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(raw(a), raw(b), err_msg=name)


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU skips the row")
def test_a_row_outside_is_refused_before_anything_is_written():
    given = step("fp8", "fp8", rows=(3, PAGES * PAGE))
    with pytest.raises(Exception, match=r"rows\[1\] is 192 but index_keys holds 192 rows; a value below 192 or a"):
        jax.block_until_ready(given.encoded("ffi"))


def refused(**changes):
    """What the library says to a step whose operands are changed so."""
    given = step("fp8", "fp8")
    shapes = {
        name: jax.typeof(jnp.asarray(getattr(given, name)))
        for name in ("index_keys", "rows", "index_key", "record", "query", "weights")
    }
    stored = jax.ShapeDtypeStruct((6, *given.records.shape), jnp.uint32)
    keywords = {"latent": 256, "stored": stored, "codes": jnp.float8_e4m3fn} | {
        name: value for name, value in changes.items() if name in ("latent", "stored", "codes")
    }
    shapes |= {name: value for name, value in changes.items() if name in shapes}
    zeros = [jnp.zeros(each.shape, each.dtype) for each in shapes.values()]
    with pytest.raises(Exception) as error:
        jax.block_until_ready(jax.jit(lambda *operands: _ffi.encode(*operands, **keywords))(*zeros))
    return str(error.value)


def shape(*dimensions, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dimensions, dtype)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": shape(5, dtype=jnp.int32)}, "index_key has 3072 bytes but 5 rows of 512 bytes need 2560"),
        ({"query": shape(3, 5, 64)}, "the last axis of index_key has length 128 but that of query has length 64"),
        ({"weights": shape(3, 4)}, "query has 7680 bytes but 12 weights of 512 bytes need 6144"),
        ({"record": shape(6, 266)}, "keys of 128 values, and records of 256 + 10, are not all multiples of 4"),
        ({"record": shape(5, 268)}, "record has 5360 bytes but 6 rows of 1072 bytes need 6432"),
        ({"latent": 272}, "latent is 272 but a record has 268 values"),
        ({"latent": 192}, "latent is 192 but FP8 records need a multiple of 128; use records of another form"),
        ({"stored": shape(5, 72, dtype=jnp.uint32)}, "stored has 1440 bytes but 6 rows of 288 bytes need 1728"),
        ({"stored": shape(6, 72, dtype=jnp.int32)}, "stored has element type S32 but U32 (FP8), BF16 or F32 is needed"),
        ({"codes": jnp.bfloat16}, "index_keys has element type U8 but codes has BF16; a query is stored as keys are"),
        (
            {"index_keys": shape(3, 8440, dtype=jnp.uint8)},
            "index_keys has 25320 bytes but 3 pages of 8448 bytes need 25344",
        ),
        ({"index_key": shape(6, 128, dtype=jnp.bfloat16)}, "F32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_operands_that_do_not_fit(changes, said):
    assert said in refused(**changes)


# ---- the choice ------------------------------------------------------------------------------------------


def calls_library(implementation, **widths):
    given = step("fp8", "bf16", **widths)
    arrays = (given.index_keys, given.rows, given.index_key, given.record, given.query, given.weights)
    call = functools.partial(encode_step, given.records, given.keys, implementation=implementation)  # traced anew
    return "custom_call @echo_encode" in jax.jit(call).lower(*map(jnp.asarray, arrays)).as_text()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a process without a GPU is told")
def test_choices():
    check_choices(calls_library)


@pytest.mark.parametrize("widths", [{"width": 6}, {"latent": 254}, {"rope": 2}], ids=str)
def test_widths_that_the_library_does_not_take(widths):
    assert not calls_library("auto", **widths)
    with pytest.raises(RuntimeError, match="must all be multiples of 4; use 'jnp'"):
        calls_library("ffi", **widths)


def test_without_the_library(monkeypatch):
    check_choices_without_the_library(calls_library, monkeypatch)
