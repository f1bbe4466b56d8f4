"""Stored formats against the oracle, byte for byte, under jit as the step runs them.

The sign of a NaN code is nobody's business: 0x7F and 0xFF are one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax import formats
from echo_jax.formats import KeyFormat, RecordFormat
from tests.oracles import formats as oracle
from tests.oracles.words import NO_ROW, PAGE

NAN, INF = np.float32("nan"), np.float32("inf")
F32_MAX, SMALLEST_NORMAL = np.finfo(np.float32).max, np.finfo(np.float32).tiny

to_e4m3, hadamard = jax.jit(formats.to_e4m3), jax.jit(formats.hadamard)
encode = jax.jit(lambda form, values: form.encode(values), static_argnums=0)
decode = jax.jit(lambda form, stored: form.decode(stored), static_argnums=0)
append = jax.jit(lambda form, pool, rows, keys: form.append(pool, rows, keys), static_argnums=0)
read_pages = jax.jit(lambda form, pool, pages: form.read_pages(pool, pages), static_argnums=0)
prepare_query = jax.jit(lambda form, query, weights: form.prepare_query(query, weights), static_argnums=0)


def as_codes(codes):
    """Both NaN codes as 0x7F."""
    codes = np.asarray(codes).copy()
    codes[codes == 0xFF] = 0x7F
    return codes


def wild(shape, seed):
    """Values of every magnitude, with zeros of both signs."""
    random = np.random.default_rng(seed)
    values = random.normal(size=shape) * 10.0 ** random.uniform(-6, 5, shape)
    return np.where(random.random(shape) < 0.05, random.choice([0.0, -0.0, 448.0, -1e-4], shape), values).astype(
        np.float32
    )


# e4m3


def test_every_code_is_read_exactly():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(jax.jit(formats.from_e4m3)(codes), oracle.from_e4m3(codes))


def test_codes_at_and_around_every_middle():
    """Between two codes the nearer one, at the middle the even one; a conversion through f16 rounds twice and fails
    here."""
    positive = oracle.from_e4m3(np.arange(0x7F, dtype=np.uint8))
    middles = (positive[1:] + positive[:-1]) / np.float32(2)
    edges = [positive, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1000))]
    values = np.concatenate([*edges, *(-edge for edge in edges)])
    np.testing.assert_array_equal(to_e4m3(values), oracle.to_e4m3(values))


def test_codes_beyond_the_largest_and_below_the_smallest():
    values = [448, 448.1, 464, 480, 1e30, F32_MAX, INF, 2**-9, 2**-10, 2**-10 * 1.0001, 2**-11, 1e-30, SMALLEST_NORMAL]
    values = np.array([*values, 0.0, 1e-40, 1e-45], np.float32)
    values = np.concatenate([values, -values])
    np.testing.assert_array_equal(to_e4m3(values), oracle.to_e4m3(values))
    assert as_codes(to_e4m3(np.array([NAN, -NAN], np.float32))).tolist() == [0x7F, 0x7F]


@given(st.lists(st.floats(width=32), min_size=64, max_size=64))
def test_codes_of_any_float(values):
    values = np.array(values, np.float32)
    np.testing.assert_array_equal(as_codes(to_e4m3(values)), oracle.to_e4m3(values))


# Records

GEOMETRIES = [(512, 64), (128, 2), (256, 30)]
RAGGED = [(5, 3), (1, 1), (100, 27), (188, 4)]


def expected_record(form, values):
    if form.name == "f32":
        return oracle.f32_record(values).view(np.uint32)
    if form.name == "bf16":
        return oracle.bf16_record(values)
    return oracle.fp8_record(values, form.latent)


def record_bits(stored):
    stored = np.asarray(stored)
    return stored.view({2: np.uint16, 4: np.uint32}[stored.dtype.itemsize])


@pytest.mark.parametrize("latent, rope", GEOMETRIES + RAGGED)
@pytest.mark.parametrize("name", ["f32", "bf16", "fp8"])
def test_record_bytes_and_values(name, latent, rope):
    if name == "fp8" and (latent, rope) in RAGGED:
        with pytest.raises(ValueError, match="fp8 records need"):
            RecordFormat(name, latent, rope)
        return
    form = RecordFormat(name, latent, rope)
    values = wild((2, 3, latent + rope), latent)
    stored = encode(form, values)
    assert stored.shape == (2, 3, *form.shape) and stored.dtype == form.dtype
    assert form.bytes_per_row == stored[0, 0].nbytes
    back = np.asarray(decode(form, stored))
    assert back.shape == values.shape and back.dtype == np.float32
    for place in np.ndindex(2, 3):
        bits = record_bits(stored[place])
        np.testing.assert_array_equal(bits, expected_record(form, values[place]))
        if name == "f32":
            expected = values[place]
        elif name == "bf16":
            expected = oracle.from_bf16(bits).reshape(-1)
        else:
            expected = oracle.read_fp8_record(bits, latent)
        np.testing.assert_array_equal(back[place], expected)


def divided_and_multiplied_differ(random):
    """f32[128]: a block whose values take another code where they are multiplied by the scale's rounded reciprocal."""
    positive = oracle.from_e4m3(np.arange(0x7F, dtype=np.uint8))
    middles = (positive[1:] + positive[:-1]) / np.float32(2)
    found = []
    while len(found) < 10:
        amax = np.float32(random.uniform(0.1, 9))
        scale = amax / np.float32(448)
        near = middles * scale
        near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, amax)])
        differ = oracle.to_e4m3(near / scale) != oracle.to_e4m3(near * (np.float32(1) / scale))
        found = near[differ]
    return np.concatenate([[amax], np.resize(found, 127)]).astype(np.float32)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (3,)], ids=str)
def test_values_are_divided_by_their_scale_and_not_multiplied_by_its_reciprocal(lead):
    """XLA turned the division by a broadcast scale into a multiplication: jitted code stored other bytes than eager
    code and than the format says, in one value of some hundred thousand."""
    form, random = RecordFormat("fp8", 128, 4), np.random.default_rng(1)
    values = np.zeros((*lead, 132), np.float32)
    for place in np.ndindex(lead):
        values[place][:128] = divided_and_multiplied_differ(random)
    stored = np.asarray(encode(form, values))
    np.testing.assert_array_equal(stored, form.encode(jnp.asarray(values)))
    for place in np.ndindex(lead):
        np.testing.assert_array_equal(stored[place], oracle.fp8_record(values[place], 128))


def test_record_sizes_of_the_real_models():
    sizes = {name: RecordFormat(name, 512, 64) for name in ("f32", "bf16", "fp8")}
    assert [form.bytes_per_row for form in sizes.values()] == [2304, 1152, 656]
    assert [form.shape for form in sizes.values()] == [(3, 192), (3, 192), (164,)]


def corner_record(kind):
    values = wild(128 + 4, 1)
    if kind == "all_zero":
        values[:] = 0
    elif kind == "all_minus_zero":
        values[:] = -0.0
    elif kind == "below_the_smallest_amax":
        values[:128] *= np.float32(1e-5) / np.abs(values[:128]).max()
    elif kind == "exactly_the_smallest_amax":
        values[:128] = 0
        values[7] = -1e-4
    elif kind == "huge":
        values *= F32_MAX / np.abs(values).max()
    elif kind == "ties_of_the_scale":
        values[:128] = np.resize(np.array([448, 17, 19, 1.0625, 1.1875, -27, 0.0009765625], np.float32), 128)
    elif kind == "one_nan":
        values[5] = NAN
    elif kind == "one_infinity":
        values[5] = -INF
    elif kind == "rope_extremes":
        values[128:] = [NAN, INF, F32_MAX, -1e-38]
    return values


CORNERS = [
    "all_zero", "all_minus_zero", "below_the_smallest_amax", "exactly_the_smallest_amax", "huge", "ties_of_the_scale",
    "one_nan", "one_infinity", "rope_extremes",
]  # fmt: skip


@pytest.mark.parametrize("kind", CORNERS)
def test_fp8_record_corner(kind):
    """The neighbours are ordinary, and stay what they are."""
    form, ordinary = RecordFormat("fp8", 128, 4), wild(132, 2)
    values = np.stack([ordinary, corner_record(kind), ordinary])
    stored = np.asarray(encode(form, values))
    back = np.asarray(decode(form, stored))
    for place in range(3):
        expected = oracle.fp8_record(values[place], 128)
        got_bytes, expected_bytes = stored[place].view(np.uint8), expected.view(np.uint8)
        np.testing.assert_array_equal(as_codes(got_bytes[:128]), as_codes(expected_bytes[:128]))
        np.testing.assert_array_equal(got_bytes[128:132].view(np.float32), expected_bytes[128:132].view(np.float32))
        got_rope, expected_rope = (oracle.from_bf16(x[132:].view(np.uint16)) for x in (got_bytes, expected_bytes))
        np.testing.assert_array_equal(got_rope, expected_rope)
        np.testing.assert_array_equal(back[place], oracle.read_fp8_record(expected, 128))


@pytest.mark.parametrize("name", ["f32", "bf16"])
@pytest.mark.parametrize("kind", CORNERS)
def test_float_record_corner(name, kind):
    form, values = RecordFormat(name, 128, 4), corner_record(kind)
    back = np.asarray(decode(form, encode(form, values)))
    np.testing.assert_array_equal(back, values if name == "f32" else oracle.from_bf16(oracle.to_bf16(values)))


# Index keys

WIDTH = 16
PAGES = 3


def stored_keys(form, rows, keys, garbage=True):
    """A pool full of garbage with the keys appended."""
    shape = (PAGES, *form.page_shape)
    size = int(np.prod(shape)) * np.dtype(form.dtype).itemsize
    start = (np.arange(size) * 7 % 251).astype(np.uint8) if garbage else np.zeros(size, np.uint8)
    pool = jnp.asarray(start.view(np.uint8)).view(form.dtype).reshape(shape)
    return np.asarray(pool), np.asarray(append(form, pool, np.asarray(rows, np.int32), keys))


@pytest.mark.parametrize("name, key_bytes", [("f32", 512), ("bf16", 256), ("fp8", 132)])
def test_key_sizes_of_the_real_models(name, key_bytes):
    form = KeyFormat(name, 128)
    assert form.bytes_per_key == key_bytes
    assert int(np.prod(form.page_shape)) * np.dtype(form.dtype).itemsize == PAGE * key_bytes


def stored_key(form, values):
    """Bytes u8[...] of one key or one head of a query, and its scale, 1 where the form has none."""
    if form.name == "fp8":
        return oracle.quantise(values)
    values = values if form.name == "f32" else oracle.to_bf16(values)
    return values.view(np.uint8), np.float32(1)


def with_keys(form, pages, rows, keys):
    """u8[pages, bytes] of pages u8[pages, bytes] in which the keys stand at their rows, but for those without one."""
    pages = pages.copy()
    for row, key in zip(rows, keys, strict=True):
        if row == NO_ROW:
            continue
        (page, place), (stored, scale) = divmod(int(row), PAGE), stored_key(form, key)
        pages[page, place * stored.size : (place + 1) * stored.size] = stored
        if form.name == "fp8":
            at = PAGE * form.width + 4 * place
            pages[page, at : at + 4] = np.array([scale], "<f4").view(np.uint8)
    return pages


@pytest.mark.parametrize("name", ["f32", "bf16", "fp8"])
def test_appended_keys_are_where_they_belong_and_nothing_else_changes(name):
    """Rows in any order, at both ends of pages, and NO_ROW, which must not reach the last row."""
    form = KeyFormat(name, WIDTH)
    rows = [0, 191, 63, NO_ROW, 64, 127, 70, NO_ROW]
    keys = wild((len(rows), WIDTH), 3)
    before, after = stored_keys(form, rows, keys)
    before, after = (pages.reshape(PAGES, -1).view(np.uint8) for pages in (before, after))
    np.testing.assert_array_equal(after, with_keys(form, before, rows, keys))


def test_a_page_written_key_by_key_is_the_oracles_page_and_read_as_it():
    form, keys = KeyFormat("fp8", WIDTH), wild((PAGE, WIDTH), 4)
    order = np.random.default_rng(4).permutation(PAGE)
    _, pool = stored_keys(form, PAGE + order, keys[order])
    page = oracle.index_key_page(keys)
    np.testing.assert_array_equal(pool[1], page)
    read = np.asarray(read_pages(form, pool, np.array([1, 0, -1, 1], np.int32)))
    np.testing.assert_array_equal(read[:PAGE], oracle.read_index_key_page(page))
    np.testing.assert_array_equal(read[3 * PAGE :], read[:PAGE])
    np.testing.assert_array_equal(read[PAGE : 2 * PAGE], read[2 * PAGE : 3 * PAGE])  # a missing page reads page 0


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_float_pages_are_read_exactly(name):
    form, keys = KeyFormat(name, WIDTH), wild((PAGE, WIDTH), 5)
    _, pool = stored_keys(form, 2 * PAGE + np.arange(PAGE), keys)
    read = np.asarray(read_pages(form, pool, np.array([2], np.int32)))
    np.testing.assert_array_equal(read, keys if name == "f32" else oracle.from_bf16(oracle.to_bf16(keys)))


SCALE_CORNERS = [448.0, 449.0, 447.0, 1.75, 0.875, 1.7500001, 1e-4, 0.9e-4, 0.0, -0.0, 1e-30, 1e30, F32_MAX, 3.5]


@pytest.mark.parametrize("amax", [*SCALE_CORNERS, NAN, INF], ids=str)
def test_scales_are_powers_of_two_found_without_a_logarithm(amax):
    """At 448 * 2^n the quotient is a power of two itself; a logarithm rounds to either side of it."""
    keys = wild((3, WIDTH), 6)
    keys[1] = np.float32(amax) * np.resize(np.array([1, -0.5, 0.25, 0.99], np.float32), WIDTH)
    with np.errstate(over="ignore"):
        above, below = np.nextafter(np.float32(amax), INF), np.nextafter(np.float32(amax), np.float32(0))
    for near in (np.float32(amax), above, below):
        keys[1, 3] = -near
        codes, scales = jax.jit(formats.quantise_key)(keys)
        for place in range(3):
            expected_codes, expected_scale = oracle.quantise(keys[place])
            np.testing.assert_array_equal(scales[place], expected_scale)
            np.testing.assert_array_equal(as_codes(codes[place]), as_codes(expected_codes))


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF], ids=str)
def test_a_key_with_one_bad_value_is_read_as_nan_and_its_neighbours_are_not(bad):
    """A NaN ran the exponent of the scale into the sign bit: the scale was -0 and the key read as zeros and a NaN."""
    form, keys = KeyFormat("fp8", WIDTH), wild((3, WIDTH), 7)
    keys[1, 2] = bad
    _, pool = stored_keys(form, [5, 6, 7], keys, garbage=False)
    read = np.asarray(read_pages(form, pool, np.array([0], np.int32)))[5:8]
    assert np.isnan(read[1]).all() and np.isfinite(read[[0, 2]]).all()


@pytest.mark.parametrize("shape", [(4, WIDTH), (2, 3, WIDTH), (1, WIDTH)], ids=str)
def test_a_quantised_query_folds_each_heads_scale_into_its_weight(shape):
    query, weights = wild(shape, 8), wild(shape[:-1], 9)
    got_query, got_weights = prepare_query(KeyFormat("fp8", WIDTH), query, weights)
    codes, folded = oracle.quantised_index_query(query.reshape(-1, WIDTH), weights.reshape(-1))
    np.testing.assert_array_equal(np.asarray(got_query).reshape(-1, WIDTH), oracle.from_e4m3(codes))
    np.testing.assert_array_equal(np.asarray(got_weights).reshape(-1), folded)


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_a_float_query_is_rounded_like_a_key(name):
    query, weights = wild((2, WIDTH), 10), wild(2, 11)
    got_query, got_weights = prepare_query(KeyFormat(name, WIDTH), query, weights)
    np.testing.assert_array_equal(got_query, query if name == "f32" else oracle.from_bf16(oracle.to_bf16(query)))
    np.testing.assert_array_equal(got_weights, weights)


# Rotation


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_the_hadamard_rotation(width):
    values = np.random.default_rng(width).normal(size=(3, width)).astype(np.float32)
    got = np.asarray(hadamard(values))
    # `width` products and sums, each rounded at most twice, of values whose magnitudes sum to sqrt(width) * the norm.
    bound = 2 * width * 2.0**-24 * width**-0.5 * np.abs(values).sum(-1, keepdims=True) + 1e-12
    for row in range(3):
        assert (np.abs(got[row] - oracle.hadamard(values[row])) <= bound[row]).all()


@pytest.mark.parametrize("name", ["f32", "bf16", "fp8"])
def test_rotated_keys_are_rotated_before_they_are_stored(name):
    plain, rotated = KeyFormat(name, WIDTH), KeyFormat(name, WIDTH, rotated=True)
    keys, query, weights = wild((5, WIDTH), 12), wild((2, WIDTH), 13), wild(2, 14)
    turned = np.asarray(hadamard(keys))
    rows = [3, 70, NO_ROW, 128, 64]
    np.testing.assert_array_equal(stored_keys(rotated, rows, keys)[1], stored_keys(plain, rows, turned)[1])
    got, expected = (prepare_query(form, x, weights) for form, x in ((rotated, query), (plain, hadamard(query))))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(turned, keys)
