"""In place, wherever a step may run: donation, scan, shard_map, vmap. Pointers are compared, not timings."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from echo_jax import hostmem
from echo_jax.hostmem import SOURCE_HOST, HostMemory
from tests.ffi import loops
from tests.ffi.conftest import CPU, on_device

LAYERS, HOST_ROWS, SLOTS, RECORD = 2, 64, 8, (3, 4)
NEW = 3


def one_step(state, rows):
    """What a decode step does with the pool: a recall in each layer, then one write tied behind them all.

    The new records depend on the recalled ones, so that nothing may be left out or moved.
    """
    records, pool = state
    slots = jnp.arange(NEW, dtype=jnp.int32)
    source = jnp.full((NEW,), SOURCE_HOST, jnp.int32)
    none = jnp.zeros((0, *RECORD), jnp.float32)
    recalled = tuple(
        hostmem.recall(layer_records, pool, layer, jnp.int32(NEW), rows, slots, source, none, none)
        for layer, layer_records in enumerate(records)
    )
    pool, recalled = jax.lax.optimization_barrier((pool, recalled))
    new = jnp.stack([layer_records[:NEW] + jnp.float32(1 + layer) for layer, layer_records in enumerate(recalled)])
    return recalled, hostmem.write_back(pool, new, jnp.where(rows < 0, rows, rows + 1))


def one_step_in_loops(state, rows):
    records, pool = state
    slots, source = np.arange(NEW), np.full(NEW, -1)
    extra = np.zeros((0, *RECORD), np.float32)
    recalled = tuple(
        loops.recall(layer_records, pool, layer, rows, slots, source, extra)
        for layer, layer_records in enumerate(records)
    )
    new = np.stack([layer_records[:NEW] + np.float32(1 + layer) for layer, layer_records in enumerate(recalled)])
    return recalled, loops.write_back(pool, new, np.where(rows < 0, rows, rows + 1))


def start(pool_of):
    generator = np.random.default_rng(0)
    values = generator.normal(size=(LAYERS, HOST_ROWS, *RECORD)).astype(np.float32)
    records = tuple(generator.normal(size=(SLOTS, *RECORD)).astype(np.float32) for _ in range(LAYERS))
    return (records, values), (tuple(map(on_device, records)), pool_of(values))


def assert_states_equal(state, expected):
    for layer, layer_records in enumerate(expected[0]):
        np.testing.assert_array_equal(np.asarray(state[0][layer]), layer_records)
    np.testing.assert_array_equal(np.asarray(state[1]), expected[1])


def pointers(state):
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(state)]


ROWS = np.asarray([[0, 10, 20], [30, -1, 1], [1, 11, 21], [-1, -1, -1], [62, 40, 2]], np.int32)


def test_steps_in_place_without_out_shardings(pool_of, memory):
    """The result of a donated step is the donated memory, in the same kind of memory, compiled once."""
    expected, state = start(pool_of)
    sharding, before = state[1].sharding, pointers(state)
    step = jax.jit(lambda state, rows: one_step(state, rows), donate_argnums=0)  # a compile count of its own
    for rows in ROWS:
        expected = one_step_in_loops(expected, rows)
        state = step(state, on_device(rows))
        assert state[1].sharding == sharding and hostmem.memory_of(state[1]) is memory
        assert pointers(state) == before
    assert_states_equal(state, expected)
    assert step._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_a_step_copies_no_pool(pool_of):
    _, state = start(pool_of)
    compiled = jax.jit(one_step, donate_argnums=0).lower(state, on_device(ROWS[0])).compile()
    statistics = compiled.memory_analysis()
    assert statistics is not None
    aliased = statistics.alias_size_in_bytes + statistics.host_alias_size_in_bytes
    assert aliased == sum(array.nbytes for array in jax.tree.leaves(state))
    assert statistics.host_temp_size_in_bytes == 0
    assert statistics.temp_size_in_bytes < state[1].nbytes
    assert not re.search(rf"\[{LAYERS},{HOST_ROWS},[0-9,]*\]\S* copy\(", str(compiled.as_text()))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_lowered_result_is_host_memory(library, platform):
    """Why no out_shardings: the result's memory kind stands in the lowered program, for a GPU too."""
    pool = hostmem.create_pool((LAYERS, HOST_ROWS, *RECORD), jnp.float32, HostMemory.PINNED, CPU)
    arguments = (pool, jnp.zeros((LAYERS, 1, *RECORD)), jnp.zeros((1,), jnp.int32))
    traced = jax.jit(hostmem.write_back, donate_argnums=0).trace(*arguments)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    result = re.search(r"-> \((.*)\) \{", text)
    assert result is not None and 'mhlo.memory_kind = "pinned_host"' in result.group(1)


def test_without_donation_the_argument_stays(pool_of):
    expected, state = start(pool_of)
    before = np.asarray(state[1])
    result = jax.jit(one_step)(state, on_device(ROWS[0]))
    assert_states_equal(result, one_step_in_loops(expected, ROWS[0]))
    assert_states_equal(state, expected)
    np.testing.assert_array_equal(np.asarray(state[1]), before)


def test_scan_carry_in_place(pool_of, memory):
    expected, state = start(pool_of)
    before = pointers(state)

    def many(state, rows):
        return jax.lax.scan(lambda carry, row: (one_step(carry, row), row.sum()), state, rows)[0]

    jitted = jax.jit(many, donate_argnums=0)
    statistics = jitted.lower(state, on_device(ROWS)).compile().memory_analysis()
    assert statistics is not None and statistics.temp_size_in_bytes < state[1].nbytes
    state = jitted(state, on_device(ROWS))
    for rows in ROWS:
        expected = one_step_in_loops(expected, rows)
    assert_states_equal(state, expected)
    assert pointers(state) == before and hostmem.memory_of(state[1]) is memory


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shard_map_each_device_its_own_pool(memory_of_four, check_vma, axis_type):
    """Four devices, each with its own host pool and slots, equal four separate runs; in place on each."""
    devices = 4
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(axis_type,))
    generator = np.random.default_rng(7)
    pool_sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    split = NamedSharding(mesh, PartitionSpec("x"))
    pool = hostmem.create_pool((LAYERS, devices * HOST_ROWS, *RECORD), jnp.float32, memory_of_four, pool_sharding)
    values = generator.normal(size=pool.shape).astype(np.float32)
    records = generator.normal(size=(LAYERS, devices * SLOTS, *RECORD)).astype(np.float32)
    lists = ROWS[:4].reshape(-1)  # each device has a list of its own

    def over_devices(function, in_specs, out_specs, donate_argnums: tuple[int, ...] = (0,)):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
        return jax.jit(mapped, donate_argnums=donate_argnums)

    pool_spec, spec = PartitionSpec(None, "x"), PartitionSpec("x")
    fill = over_devices(hostmem.write_back, (pool_spec, pool_spec, spec), pool_spec)
    every_row = np.tile(np.arange(HOST_ROWS, dtype=np.int32), devices)
    pool = fill(pool, jax.device_put(values, pool_sharding), jax.device_put(every_row, split))
    state = (tuple(jax.device_put(jnp.array(layer_records), split) for layer_records in records), pool)

    def shard_pointers(array):
        return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]

    before = jax.tree.map(shard_pointers, state)
    state_spec = ((spec,) * LAYERS, pool_spec)
    step = over_devices(one_step, (state_spec, spec), state_spec)
    state = step(state, jax.device_put(lists, split))
    assert jax.tree.map(shard_pointers, state) == before
    assert hostmem.memory_of(state[1]) is memory_of_four
    # One row of the pool, read back from each device: a per-device result, which check_vma must know.
    read = over_devices(lambda pool, rows: hostmem.read_rows(pool, 1, rows), (pool_spec, spec), spec, ())
    rows_read = np.asarray([1, 31, 2, 0], np.int32)
    read_back = read(state[1], jax.device_put(rows_read, split))

    for device in range(devices):
        part = (
            tuple(layer_records[device * SLOTS : (device + 1) * SLOTS] for layer_records in records),
            values[:, device * HOST_ROWS : (device + 1) * HOST_ROWS],
        )
        expected = one_step_in_loops(part, ROWS[device])
        actual = jax.tree.map(lambda array, device=device: array.addressable_shards[device].data, state)
        assert_states_equal(actual, expected)
        np.testing.assert_array_equal(np.asarray(read_back)[device], expected[1][1, rows_read[device]])


def test_check_vma_knows_that_rows_differ_by_device(memory_of_four):
    """A read that differs from device to device cannot leave shard_map as one value for all."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    pool = hostmem.create_pool((LAYERS, HOST_ROWS, *RECORD), jnp.float32, memory_of_four, sharding)
    read = jax.shard_map(
        lambda pool, rows: hostmem.read_rows(pool, 0, rows),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("x")),
        out_specs=PartitionSpec(),
    )
    rows = jax.device_put(np.arange(4, dtype=np.int32), NamedSharding(mesh, PartitionSpec("x")))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(read)(pool, rows)


def test_vmap_is_one_call_after_another(pool_of):
    _, (_, pool) = start(pool_of)
    values = np.asarray(pool)
    rows = np.asarray([[0, 5], [-1, 63], [7, 7]], np.int32)
    result = jax.jit(jax.vmap(lambda pool, rows: hostmem.read_rows(pool, 1, rows), in_axes=(None, 0)))(
        pool, on_device(rows)
    )
    np.testing.assert_array_equal(np.asarray(result), np.stack([loops.read_rows(values, 1, row) for row in rows]))


def test_the_first_donation_is_in_place(memory, device):
    """A pool made from NumPy's zeros kept NumPy's memory whenever that was aligned, and donation then copied it.

    One pool in four was, so several are made.
    """
    write = jax.jit(hostmem.write_back, donate_argnums=0)
    records, rows = on_device(np.ones((LAYERS, 1, *RECORD), np.float32)), on_device(np.zeros(1, np.int32))
    for _ in range(30):
        pool = hostmem.create_pool((LAYERS, HOST_ROWS, *RECORD), jnp.float32, memory, device)
        before = pool.unsafe_buffer_pointer()
        assert write(pool, records, rows).unsafe_buffer_pointer() == before


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_a_pool_read_as_numpy_is_donated_all_the_same(memory, device, dtype):
    """np.asarray left a reference in the pool, and the next step failed on a GPU and copied the pool on a CPU."""
    write = jax.jit(hostmem.write_back, donate_argnums=0)
    pool = hostmem.create_pool((LAYERS, HOST_ROWS, 4), dtype, memory, device)
    records, rows = on_device(np.ones((LAYERS, 1, 4), dtype)), on_device(np.full(1, 5, np.int32))
    before = pool.unsafe_buffer_pointer()
    assert not hostmem.as_numpy(pool).astype(np.float32).any()
    written = write(pool, records, rows)
    assert written.unsafe_buffer_pointer() == before
    expected = np.zeros((LAYERS, HOST_ROWS, 4), np.float32)
    expected[:, 5] = 1
    np.testing.assert_array_equal(hostmem.as_numpy(written).astype(np.float32), expected)
