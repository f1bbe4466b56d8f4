"""What only a GPU does: it judges numbers where they are, on the device, and skips what lies outside.

Everything that CPU and GPU have in common stands in the other files and runs on both.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from echo_jax import hostmem
from tests.ffi import loops
from tests.ffi.conftest import on_device
from tests.ffi.test_ffi_rows import RECORDS, assert_same_bytes, random_records

pytestmark = pytest.mark.gpu

LAYERS, HOST_ROWS, SLOTS = 3, 37, 29
LOWEST, HIGHEST = -(2**31), 2**31 - 1


@pytest.fixture
def device():
    """The GPU alone."""
    chosen = jax.devices("gpu")[0]
    with jax.default_device(chosen):
        yield chosen


def pool_with(values):
    """Of the tests below, each of which is on the GPU."""
    pool = hostmem.create_pool(values.shape, values.dtype, hostmem.HostMemory.PINNED, jax.devices("gpu")[0])
    return jax.jit(hostmem.write_back, donate_argnums=0)(
        pool, on_device(values), on_device(np.arange(HOST_ROWS, dtype=np.int32))
    )


def anywhere(generator, size, limit):
    """Numbers of which a third lies outside 0..limit, at its ends and far away."""
    inside = generator.integers(0, limit, size)
    outside = generator.choice([-1, limit, limit + 1, LOWEST, HIGHEST], size)
    return np.where(generator.random(size) < 0.33, outside, inside).astype(np.int32)


def skipped(values, limit):
    """The same with -1 for every number outside, as the loops want it."""
    return np.where((values < 0) | (values >= limit), -1, values).astype(np.int32)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())
def test_numbers_outside_are_skipped(device, record):
    generator = np.random.default_rng(11)
    values = random_records(generator, (LAYERS, HOST_ROWS), record)
    records = random_records(generator, (SLOTS,), record)
    new, staged = (random_records(generator, (size,), record) for size in (4, 3))
    pool = pool_with(values)
    for _ in range(5):
        rows = anywhere(generator, 200, HOST_ROWS)
        read = jax.jit(hostmem.read_rows)(pool, 1, on_device(rows))
        assert_same_bytes(read, loops.read_rows(values, 1, skipped(rows, HOST_ROWS)))

        rows = anywhere(generator, SLOTS, HOST_ROWS)
        slots = generator.permutation(SLOTS).astype(np.int32)
        slots[::5] = generator.choice([SLOTS, HIGHEST, LOWEST], len(slots[::5]))
        source = np.where(generator.random(SLOTS) < 0.5, -1, anywhere(generator, SLOTS, 7)).astype(np.int32)
        is_wrong_source = (source < -1) | (source >= 7)
        expected_slots = np.where(is_wrong_source, -1, skipped(slots, SLOTS))
        expected = loops.recall(
            *(records, values, 2, skipped(rows, HOST_ROWS), expected_slots, np.where(is_wrong_source, 0, source)),
            np.concatenate([new, staged]),
        )
        at_rows, at_slots, sources = map(on_device, (rows, slots, source))
        for count in (SLOTS, HIGHEST):
            result = jax.jit(hostmem.recall)(
                on_device(records),
                pool,
                2,
                np.int32(count),
                at_rows,
                at_slots,
                sources,
                on_device(new),
                on_device(staged),
            )
            assert_same_bytes(result, expected)

        rows = generator.permutation(HOST_ROWS)[:20].astype(np.int32)
        rows[::4] = generator.choice([-1, HOST_ROWS, HIGHEST], len(rows[::4]))
        written = random_records(generator, (LAYERS, 20), record)
        pool = jax.jit(hostmem.write_back, donate_argnums=0)(pool, on_device(written), on_device(rows))
        values = loops.write_back(values, written, skipped(rows, HOST_ROWS))

        order = generator.permutation(HOST_ROWS).astype(np.int32)
        source, target = order[:12].copy(), order[12:24].copy()
        source[::5], target[1::5] = HOST_ROWS, HIGHEST
        pool = jax.jit(hostmem.copy_rows, donate_argnums=0)(pool, on_device(source), on_device(target))
        values = loops.copy_rows(values, skipped(source, HOST_ROWS), skipped(target, HOST_ROWS))
        assert_same_bytes(pool, values)


@pytest.mark.parametrize("layer", [-1, LAYERS, HIGHEST, LOWEST])
def test_a_layer_outside_leaves_nothing_to_do(device, layer):
    record = RECORDS["bf16"]
    generator = np.random.default_rng(12)
    pool = pool_with(random_records(generator, (LAYERS, HOST_ROWS), record))
    records, new = random_records(generator, (SLOTS,), record), random_records(generator, (4,), record)
    rows = on_device(np.arange(4, dtype=np.int32))
    for source in (-1, 0):
        sources = on_device(np.full(4, source, np.int32))
        result = jax.jit(hostmem.recall)(
            on_device(records), pool, layer, np.int32(4), rows, rows, sources, on_device(new), on_device(new)
        )
        assert_same_bytes(result, records)
    assert not np.asarray(jax.jit(hostmem.read_rows)(pool, layer, rows)).view(np.uint16).any()


def test_a_long_list_of_many_lengths(device):
    """More rows than warps, so that a warp moves several at once: every count around the borders of that."""
    record = RECORDS["u32"]
    generator = np.random.default_rng(13)
    values = random_records(generator, (LAYERS, HOST_ROWS), record)
    pool, none = pool_with(values), np.zeros((0, 164), np.uint32)
    slots = 4500
    records = random_records(generator, (slots,), record)
    rows = generator.integers(0, HOST_ROWS, slots, dtype=np.int32)
    lists = (rows, np.arange(slots, dtype=np.int32), np.full(slots, -1, np.int32))
    at_rows, at_slots, from_host = map(on_device, lists)
    for count in (0, 1, 511, 512, 513, 2047, 2048, 2049, 2051, slots):
        first = lists[0][:count], lists[1][:count], lists[2][:count]
        result = jax.jit(hostmem.recall)(
            on_device(records), pool, 1, np.int32(count), at_rows, at_slots, from_host, on_device(none), on_device(none)
        )
        assert_same_bytes(result, loops.recall(records, values, 1, *first, none))
