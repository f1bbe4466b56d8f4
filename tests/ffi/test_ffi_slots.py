"""echo_allocate and echo_release at the border, and the GPU's kernel on a CPU.

That the library's maps are those of jnp is test_slot_manager.py's business. Here: what is refused, in place, under vmap
and shard_map; and the CUDA source of the slot manager, compiled for an emulated GPU, against the CPU twin.
"""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from echo_jax import _ffi, pool
from echo_jax.types import NO_ROW, SlotMaps
from tests import slot_histories as histories
from tests.ffi.conftest import CPU, on_device
from tests.test_slot_manager import assert_equal

HOST_ROWS, SLOTS = 64, 8

allocate = functools.partial(pool.allocate, implementation="ffi")


def some_maps() -> SlotMaps:
    """Rows 0 to 5 in slots 0 to 5, the oldest first."""
    maps = jax.tree.map(on_device, pool.initial(HOST_ROWS, SLOTS))
    return jax.jit(allocate)(maps, jnp.arange(6, dtype=jnp.int32), jnp.arange(6, dtype=jnp.int32))[0]


def numbers(*values) -> jax.Array:
    return on_device(np.asarray(values, np.int32))


def test_maps_are_updated_in_place(device):
    step, drop = (
        jax.jit(allocate, donate_argnums=0),
        jax.jit(pool.release, donate_argnums=0, static_argnames="implementation"),
    )
    maps = some_maps()
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(maps)]
    for start in range(0, 60, 4):
        rows = start + np.arange(4, dtype=np.int32)
        maps, allocation = step(maps, on_device(rows), on_device(rows))
        assert int(allocation.fills.count) == 4 - int(allocation.hits)
        maps = drop(maps, on_device(np.arange(HOST_ROWS) == start), implementation="ffi")
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(maps)] == before


def test_without_donation_the_argument_stays(device):
    maps = some_maps()
    kept = jax.tree.map(np.array, maps)
    jax.block_until_ready(jax.jit(allocate)(maps, numbers(9, 10, 11, 12), numbers(9, 9, 9, 9)))
    assert_equal(jax.device_get(maps), kept)


REFUSED = {
    # rows, touched, staged; per_seat and new_per_seat; what is said
    "a_row_beyond_the_host": (([3, HOST_ROWS], [1, 1], []), {}, r"rows\[1\] is 64 but slot_of holds 64 rows"),
    "a_staged_row_beyond_the_host": (([3], [1], [NO_ROW, 70]), {}, r"staged\[1\] is 70 but slot_of holds 64 rows"),
    "more_rows_than_slots": (
        ([*range(9)], [*range(9)], []),
        {},
        "the list has 9 different rows but the pool holds 8; raise device_slots",
    ),
    "a_broken_seat": (([1, 2, 3], [1, 2, 3], []), {"per_seat": 2}, "rows has length 3, per_seat is 2"),
    "too_many_new_rows": (([1, 2], [1, 2], []), {"per_seat": 2, "new_per_seat": 3}, "new_per_seat is 3"),
    "too_few_priorities": (([1, 2, 3], [1, 2], []), {}, "rows has length 3 but touched has length 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_changed(library, case):
    arguments, sizes, message = REFUSED[case]
    maps = some_maps()
    kept = jax.tree.map(np.array, maps)
    with pytest.raises(Exception, match=message):
        lists = (numbers(*values) for values in arguments)
        jax.block_until_ready(jax.jit(functools.partial(allocate, **sizes))(maps, *lists))
    assert_equal(jax.device_get(maps), kept)


def test_maps_of_different_lengths_are_refused(library):
    maps = some_maps()
    broken = maps.replace(free=jnp.ones((SLOTS + 1,), bool))
    with pytest.raises(Exception, match="host_of has length 8 but free has length 9"):
        jax.block_until_ready(jax.jit(allocate)(broken, numbers(1), numbers(1)))
    with pytest.raises(Exception, match="slot_of has length 64 but is_dropped has length 63"):
        jax.block_until_ready(jax.jit(functools.partial(pool.release, implementation="ffi"))(maps, np.ones(63, bool)))


def test_any_negative_row_is_padding(device):
    _, allocation = jax.jit(allocate)(some_maps(), numbers(-7, 3, NO_ROW), numbers(1, 1, 1), numbers(-2))
    assert np.asarray(allocation.slots).tolist() == [-1, 3, -1]


def test_an_empty_list(device):
    maps = some_maps()
    after, allocation = jax.jit(allocate)(maps, numbers(), numbers())
    assert_equal(jax.device_get(after), jax.device_get(maps))
    assert int(allocation.fills.count) == int(allocation.hits) == int(allocation.evicted) == 0


def test_vmap_is_one_call_after_another(device):
    """A replay steps the maps of many settings together."""
    one = some_maps()
    rows = np.asarray([[7, 8, 9, 1], [5, 5, 20, -1], [-1, -1, -1, -1]], np.int32)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(rows)), one)
    maps, allocation = jax.jit(jax.vmap(allocate))(many, on_device(rows), on_device(rows))
    for index, row in enumerate(rows):
        expected = jax.jit(allocate)(one, on_device(row), on_device(row))
        got = jax.tree.map(lambda leaf, index=index: leaf[index], (maps, allocation))
        assert_equal(jax.device_get(got), jax.device_get(expected))


def test_shard_map_each_device_its_own_maps(library):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("x")
    split = NamedSharding(mesh, spec)
    one = some_maps()
    rows = np.asarray([[7, 8, 9, 1], [5, 5, 20, -1], [-1, 3, -1, -1], [60, 61, 62, 63]], np.int32)
    maps = jax.device_put(jax.tree.map(lambda leaf: np.tile(leaf, 4), one), split)
    lists = jax.device_put(rows.reshape(-1), split)

    def step(maps, rows):
        maps, allocation = allocate(maps, rows, rows)
        return maps, allocation.slots, allocation.hits[None]

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec), donate_argnums=0)
    maps, slots, hits = jax.device_get(run(maps, lists))
    for index, row in enumerate(rows):
        expected, allocation = jax.device_get(jax.jit(allocate)(one, on_device(row), on_device(row)))
        assert_equal(jax.tree.map(lambda leaf, index=index: np.split(leaf, 4)[index], maps), expected)
        assert slots.reshape(4, -1)[index].tolist() == allocation.slots.tolist() and hits[index] == allocation.hits


def nominate(maps: SlotMaps) -> pool.Nomination:
    nomination = pool.nominate(maps, implementation="ffi")
    assert nomination is not None
    return nomination


def test_nominees_are_the_lowest_slots(device):
    random = np.random.default_rng(0)
    for case in histories.CASES:
        maps = jax.tree.map(on_device, histories.draw_maps(random, case))
        slots = jax.jit(nominate)(maps).slots
        assert slots.shape == (min(case.slots, _ffi.MOST_NOMINEES),)
        np.testing.assert_array_equal(slots, jax.jit(pool.in_order)(maps.priority)[: slots.shape[0]])


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_fewer_nominees_change_no_result(device, count):
    """Slot 0 and 1 are named first and selected; 6 and 7 are free. Seven are enough, three are not."""

    def by_nominees(maps, rows):
        nomination = nominate(maps)
        return allocate(maps, rows, rows, None, nomination._replace(slots=nomination.slots[:count]))

    rows = numbers(0, 20, 1, 21, 22, 20)
    expected = jax.jit(functools.partial(pool.allocate, implementation="jnp"))(some_maps(), rows, rows)
    assert_equal(jax.device_get(jax.jit(by_nominees)(some_maps(), rows)), jax.device_get(expected))


def test_nominees_of_other_maps_are_refused(library):
    maps, rows = some_maps(), numbers(20)
    nomination = jax.jit(nominate)(maps)
    for broken, message in (
        (nomination._replace(slots=numbers(SLOTS)), r"nominees\[0\] is 8 but host_of holds 8 slots"),
        (nomination._replace(marks=numbers(*range(40))), "marks wanted has length 9 but marks has length 40"),
    ):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(jax.jit(allocate)(maps, rows, rows, None, broken))
    with pytest.raises(Exception, match="9 nominees of 8 slots are asked for"):
        jax.block_until_ready(_ffi.nominate(maps.priority, SLOTS + 1))


def test_jnp_has_no_use_for_nominees():
    assert pool.nominate(pool.initial(HOST_ROWS, SLOTS), implementation="jnp") is None


@pytest.mark.parametrize("implementation, message", [("cuda", "CUDA device"), ("triton", "must be one of")])
def test_a_named_implementation_works_or_says_why_not(library, implementation, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        pool.allocate(some_maps(), numbers(1), numbers(1), implementation=implementation)


# ---- the kernel of the GPU, emulated ---------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
GPU_SHARED_BYTES = 227 * 1024  # what one block of an H200 may have


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """ffi/src/slots_kernel.cuh as a CPU library."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("emulator") / "slots.so"
    folders = [ROOT / "tests/ffi/emulate", ROOT / "ffi/include", ROOT / "ffi/src"]
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"]
    command += ["-DECHO_EMULATE", *(f"-I{folder}" for folder in folders), "-isystem", jax.ffi.include_dir()]
    subprocess.run([*command, str(folders[0] / "slots.cc"), "-o", str(path)], check=True, timeout=100)
    library = ctypes.CDLL(str(path))
    library.EmulateAllocateBytes.restype = library.EmulateNominateBytes.restype = ctypes.c_int64
    return library


def pointers_to(arrays):
    pointers = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)) for array in arrays]
    return (ctypes.POINTER(ctypes.c_int32) * len(pointers))(*pointers)


def sizes_of(*sizes):
    return (ctypes.c_int32 * len(sizes))(*sizes)


def garbage(random, *sizes) -> list[np.ndarray]:
    return [random.integers(-(2**31), 2**31, size).astype(np.int32) for size in sizes]


def emulate_nominate(emulator, priority, count, *, blocks, shared_limit, seed):
    """Nominees and marks by the emulated kernel; every buffer it should write holds garbage before."""
    given = np.array(priority, np.int32)
    results = garbage(np.random.default_rng(seed), count, 8 + -(-len(given) // 32))
    error = ctypes.create_string_buffer(200)
    emulator.EmulateNominate(
        pointers_to([given, *results]),
        sizes_of(len(given), count),
        ctypes.c_int(blocks),
        ctypes.c_int64(shared_limit),
        ctypes.c_uint64(seed),
        error,
    )
    assert not error.value, error.value.decode()
    np.testing.assert_array_equal(given, priority)
    return results[0], results[1]


def emulate(
    emulator, maps, rows, priority, staged, nominees, *, per_seat, new_per_seat, blocks, clusters, shared_limit, seed
):
    """pool.allocate's results by the emulated kernel; every buffer it should write holds garbage before."""
    random = np.random.default_rng(seed)
    length = len(rows)
    kept = [np.array(array) for array in (maps.slot_of, maps.host_of, maps.priority)]
    free = np.array(maps.free)
    given = [np.array(array, np.int32) for array in (rows, priority, staged, nominees)]
    marks = np.zeros(8 + -(-len(free) // 32), np.int32)
    results = garbage(random, *[length] * 5, *[1] * 6, 8 * length + 8)
    error = ctypes.create_string_buffer(200)
    emulator.EmulateAllocate(
        pointers_to([*kept, *given, marks, *results]),
        free.ctypes.data_as(ctypes.c_void_p),
        sizes_of(len(maps.slot_of), len(free), length, len(staged), per_seat, new_per_seat, len(nominees)),
        ctypes.c_int(blocks),
        ctypes.c_int(clusters),
        ctypes.c_int64(shared_limit),
        ctypes.c_uint64(seed),
        error,
    )
    assert not error.value, error.value.decode()
    slot_of, host_of, updated, is_free = map(jnp.asarray, (*kept, free))
    slots, fill_rows, fill_slots, mention, source = map(jnp.asarray, results[:5])
    to_fill, hits, useful, recalled, written, evicted = (jnp.asarray(count[0]) for count in results[5:11])
    fills = pool.Fills(fill_rows, fill_slots, mention, source, to_fill)
    allocation = pool.Allocation(slots, fills, hits, useful, recalled, written, evicted)
    return SlotMaps(slot_of=slot_of, host_of=host_of, priority=updated, free=is_free), allocation


@functools.partial(jax.jit, static_argnames="count")
def lowest(priority, count):
    return pool.in_order(priority)[:count]


def check_history(emulator, case, seed, steps, *, blocks, clusters, nominated, is_tight=False):
    """The emulated kernels against the CPU twin. `nominated`: of each step's list, a share of the most there can be.
    `is_tight`: shared memory holds neither the priorities nor the list."""
    marks_bytes = case.slots // 8 + 128
    nominate_limit = emulator.EmulateNominateBytes() + marks_bytes if is_tight else GPU_SHARED_BYTES
    allocate_limit = emulator.EmulateAllocateBytes() + marks_bytes if is_tight else GPU_SHARED_BYTES
    random = np.random.default_rng(seed)
    maps = histories.draw_maps(random, case)
    sizes = {"per_seat": case.per_seat, "new_per_seat": case.new_per_seat}
    by_twin = jax.jit(functools.partial(allocate, **sizes))
    for step in range(steps):
        rows = histories.draw_rows(random, case, maps)
        priority = histories.draw_priorities(random, case, step, len(rows))
        staged = histories.draw_staged(random, case, rows)
        expected = jax.device_get(by_twin(*jax.device_put((maps, rows, priority, staged), CPU)))
        count = int(min(case.slots, 1024) * nominated[step % len(nominated)])
        nominees = np.asarray(lowest(jax.device_put(maps.priority, CPU), count))
        named, marks = emulate_nominate(
            emulator, maps.priority, count, blocks=min(blocks, 8), shared_limit=nominate_limit, seed=step
        )
        np.testing.assert_array_equal(named, nominees)
        assert not marks.any()
        run = {"blocks": blocks, "clusters": clusters, "shared_limit": allocate_limit, "seed": step}
        assert_equal(emulate(emulator, maps, rows, priority, staged, nominees, **sizes, **run), expected)
        maps = expected[0]


@pytest.mark.parametrize("is_tight", [False, True], ids=["shared", "reread"])
@pytest.mark.parametrize("case", histories.CASES, ids=lambda case: case.name)
def test_the_kernels_of_the_gpu_emulated(library, emulator, case, is_tight):
    """Clusters of two blocks of 1024 threads: one, with all nominees or none; or three, with few nominees."""
    clusters, nominated = (3, [0.1, 1.0]) if is_tight else (1, [1.0, 0.0])
    run = {"blocks": 2, "clusters": clusters, "nominated": nominated, "is_tight": is_tight}
    check_history(emulator, case, 1, 4, **run)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [8, 16])
@pytest.mark.parametrize("case", histories.CASES, ids=lambda case: case.name)
def test_the_kernels_of_the_gpu_emulated_in_full(library, emulator, case, blocks):
    check_history(emulator, case, blocks, 3, blocks=blocks, clusters=2, nominated=[1.0, 0.5, 0.0])
