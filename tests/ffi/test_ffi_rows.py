"""Every movement against loops: the library and jnp, each record type, byte for byte."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import _ffi, hostmem
from tests.ffi import loops
from tests.ffi.conftest import on_device

LAYERS, HOST_ROWS, SLOTS = 3, 37, 11
RECORDS = {
    "f32": ((3, 5), jnp.float32),
    "bf16": ((3, 192), jnp.bfloat16),
    "bf16_odd": ((1, 6), jnp.bfloat16),
    "u32": ((164,), jnp.uint32),
    "u8_one_word": ((4,), jnp.uint8),
    "fp8": ((2, 2, 3), jnp.float8_e4m3fn),
}


def cases(lists, richest):
    """Parametrises by (record, lists): every list with one record, every record with the richest list."""
    pairs = [("bf16", name) for name in lists] + [(record, richest) for record in RECORDS if record != "bf16"]
    arguments = [pytest.param(RECORDS[record], lists[name], id=f"{record}-{name}") for record, name in pairs]
    return pytest.mark.parametrize("record, lists", arguments)


def random_records(generator, shape, record):
    """Random bytes, NaNs of every payload included: a movement must not look at values."""
    record_shape, dtype = record
    count = int(np.prod((*shape, *record_shape)))
    raw = generator.integers(0, 256, count * jnp.dtype(dtype).itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(*shape, *record_shape)


def assert_same_bytes(actual, expected):
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(
        np.ascontiguousarray(hostmem.as_numpy(actual)).reshape(-1).view(np.uint8),
        np.ascontiguousarray(expected).reshape(-1).view(np.uint8),
    )


def numbers(*values):
    return np.asarray(values, np.int32)


READS = {
    "mixed": numbers(4, -1, 36, 0, 4, 4, 17),  # padding, the ends, a row three times
    "neighbours": numbers(7, 8, 9, -1, -1, 10, 12, 11),  # runs travel together; a falling pair is no run
    "all_padding": numbers(-1, -7, np.iinfo(np.int32).min),
    "empty": numbers(),
    "whole_layer": np.arange(HOST_ROWS, dtype=np.int32),
}


@cases(READS, richest="mixed")
def test_read_rows(pool_of, record, lists):
    rows = lists
    values = random_records(np.random.default_rng(1), (LAYERS, HOST_ROWS), record)
    pool = pool_of(values)
    read = jax.jit(hostmem.read_rows)
    for layer in range(LAYERS):
        result = read(pool, layer, on_device(rows))
        assert_same_bytes(result, loops.read_rows(values, layer, rows))
        assert hostmem.memory_of(result) is hostmem.HostMemory.ORDINARY
    # A list in each of several layers, one of them twice; rows of the second continue a run that ends the first.
    layers, last = numbers(1, 0, 1), rows[-1] if len(rows) else 0
    lists = np.stack([rows, (last + 1 + np.arange(len(rows), dtype=np.int32)) % HOST_ROWS, rows])
    expected = np.stack([loops.read_rows(values, layer, each) for layer, each in zip(layers, lists, strict=True)])
    assert_same_bytes(read(pool, on_device(layers), on_device(lists)), expected)


RECALLS = {  # host_rows, slots, source
    "from_host": (numbers(5, 36, 0), numbers(10, 0, 3), numbers(-1, -1, -1)),
    "from_extra": (numbers(5, 36, 0), numbers(10, 0, 3), numbers(2, 0, 2)),
    "mixed": (numbers(5, 36, 0, 9), numbers(10, 0, 3, 4), numbers(-1, 3, -1, 0)),
    "one_host_row_twice": (numbers(8, 8), numbers(1, 2), numbers(-1, -1)),
    "no_row": (numbers(-1, 6, -9), numbers(1, 2, 3), numbers(0, -1, -1)),
    "no_slot": (numbers(4, 6, 7), numbers(-1, 2, -5), numbers(-1, 1, 2)),
    "skipped_with_source_out_of_range": (numbers(-1, 6), numbers(1, 2), numbers(77, -1)),
    "all_skipped": (numbers(-1, -1), numbers(-1, -1), numbers(-1, -1)),
    "empty": (numbers(), numbers(), numbers()),
    "every_slot": (
        np.arange(SLOTS, dtype=np.int32)[::-1].copy(),
        np.arange(SLOTS, dtype=np.int32),
        np.full(SLOTS, -1, np.int32),
    ),
}


@cases(RECALLS, richest="mixed")
def test_recall(pool_of, record, lists):
    host_rows, slots, source = lists
    count = np.int32(len(slots))
    generator = np.random.default_rng(2)
    values = random_records(generator, (LAYERS, HOST_ROWS), record)
    records = random_records(generator, (SLOTS,), record)
    extra = random_records(generator, (4,), record)
    pool = pool_of(values)
    recall = jax.jit(hostmem.recall)
    for layer in range(LAYERS):
        for new in range(5):  # the border between new and staged records may lie anywhere
            given = (on_device(extra[:new]), on_device(extra[new:]))
            result = recall(on_device(records), pool, layer, count, *map(on_device, lists), *given)
            assert_same_bytes(result, loops.recall(records, values, layer, host_rows, slots, source, extra))


@pytest.mark.parametrize("count", [-1, 0, 1, 2])
def test_recall_looks_at_count_entries(pool_of, count):
    record = RECORDS["bf16"]
    generator = np.random.default_rng(9)
    values = random_records(generator, (LAYERS, HOST_ROWS), record)
    records = random_records(generator, (SLOTS,), record)
    none = random_records(generator, (0,), record)
    lists = (numbers(5, 36, 3), numbers(10, 0, 3), numbers(-1, -1, -1))
    first = lists[0][: max(count, 0)], lists[1][: max(count, 0)], lists[2][: max(count, 0)]
    at_rows, at_slots, source = map(on_device, lists)
    given = on_device(none)
    result = jax.jit(hostmem.recall)(
        on_device(records), pool_of(values), 1, np.int32(count), at_rows, at_slots, source, given, given
    )
    assert_same_bytes(result, loops.recall(records, values, 1, *first, none))


def test_recall_without_extra(pool_of):
    record = RECORDS["f32"]
    generator = np.random.default_rng(3)
    values = random_records(generator, (LAYERS, HOST_ROWS), record)
    records = random_records(generator, (SLOTS,), record)
    extra = random_records(generator, (0,), record)
    lists = (numbers(5, 36, -1), numbers(10, 0, 3), numbers(-1, -1, -1))
    recall = jax.jit(hostmem.recall)
    none = on_device(extra)
    result = recall(on_device(records), pool_of(values), 1, np.int32(3), *map(on_device, lists), none, none)
    assert_same_bytes(result, loops.recall(records, values, 1, *lists, extra))


WRITES = {
    "ends": numbers(0, 36, 7),
    "with_padding": numbers(-1, 5, -1, 0),
    "all_padding": numbers(-3, -1, -1),
    "empty": numbers(),
}


@cases(WRITES, richest="with_padding")
def test_write_back(pool_of, record, lists):
    rows = lists
    generator = np.random.default_rng(4)
    values = random_records(generator, (LAYERS, HOST_ROWS), record)
    records = random_records(generator, (LAYERS, len(rows)), record)
    result = jax.jit(hostmem.write_back)(pool_of(values), on_device(records), on_device(rows))
    assert_same_bytes(result, loops.write_back(values, records, rows))


COPIES = {
    "one_page_to_another": (numbers(1, 2, 3), numbers(20, 36, 22)),
    "one_source_for_two": (numbers(1, 1), numbers(20, 21)),
    "padding_on_either_side": (numbers(-1, 2, 3), numbers(20, -1, 0)),
    "onto_itself": (numbers(5, 6), numbers(5, 30)),
    "empty": (numbers(), numbers()),
}


@cases(COPIES, richest="padding_on_either_side")
def test_copy_rows(pool_of, record, lists):
    values = random_records(np.random.default_rng(5), (LAYERS, HOST_ROWS), record)
    result = jax.jit(hostmem.copy_rows)(pool_of(values), *map(on_device, lists))
    assert_same_bytes(result, loops.copy_rows(values, *lists))


def test_random_lists_agree_with_loops(pool_of):
    """Long lists with everything in them, one pool after the other operation."""
    record = RECORDS["bf16"]
    generator = np.random.default_rng(6)
    values = random_records(generator, (LAYERS, HOST_ROWS), record)
    records = random_records(generator, (SLOTS,), record)
    pool, slots_array = pool_of(values), on_device(records)
    write_back = jax.jit(hostmem.write_back, donate_argnums=0)
    recall = jax.jit(hostmem.recall, donate_argnums=0)
    for step in range(20):
        rows = np.where(generator.random(16) < 0.3, -1, generator.permutation(HOST_ROWS)[:16]).astype(np.int32)
        written = random_records(generator, (LAYERS, 16), record)
        values = loops.write_back(values, written, rows)
        pool = write_back(pool, on_device(written), on_device(rows))
        lists = (
            generator.integers(-2, HOST_ROWS, SLOTS, dtype=np.int32),
            np.where(generator.random(SLOTS) < 0.3, -1, generator.permutation(SLOTS)).astype(np.int32),
            generator.integers(-1, 5, SLOTS, dtype=np.int32),
        )
        extra = random_records(generator, (5,), record)
        records = loops.recall(records, values, step % LAYERS, *lists, extra)
        given = (on_device(extra[:2]), on_device(extra[2:]))
        slots_array = recall(slots_array, pool, step % LAYERS, np.int32(SLOTS), *map(on_device, lists), *given)
    assert_same_bytes(slots_array, records)
    assert_same_bytes(jax.jit(hostmem.copy_rows)(pool, on_device(numbers()), on_device(numbers())), values)


def test_offsets_pass_32_bits(library):
    """A row beyond 4 GiB is read from where it lies: offsets are 64-bit, in bytes and in layers x rows.

    The pool is 5 GiB of untouched pages, shared with NumPy, so only the rows that are written exist.
    """
    layers, rows, words = 4, 1_200_000, 288
    untouched = np.zeros(layers * rows * words + 16, np.uint32)
    first = (-untouched.ctypes.data % 64) // 4  # JAX shares memory only where it is aligned to 64 bytes
    values = untouched[first:][: layers * rows * words].reshape(layers, rows, words)
    for layer in range(layers):
        values[layer, 0] = 10 + layer
        values[layer, rows - 1] = 20 + layer
    pool = jax.dlpack.from_dlpack(values)
    assert pool.unsafe_buffer_pointer() == values.ctypes.data, "the test must not copy 5 GiB"
    result = np.asarray(_ffi.read_rows(pool, jnp.int32(3), jnp.asarray([0, rows - 1], jnp.int32)))
    np.testing.assert_array_equal(result[:, 0], [13, 23])
