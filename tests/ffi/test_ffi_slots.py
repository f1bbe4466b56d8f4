"""echo_allocate, echo_require and echo_release at the border, and the GPU's kernels on a CPU.

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

from echo_jax import _ffi, hostmem, pool, recall
from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.threshold import Never
from echo_jax.types import FREE_PRIORITY, NO_ROW, NO_SLOT, LayerState, SlotMaps, Staging
from tests import slot_histories as histories
from tests.ffi.conftest import CPU, on_device
from tests.limits import HANG_S
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


# Two seats, each with a new row and five selected ones, of rows 0 to 5 in slots 0 to 5 of 8.
WAYS = {
    "guessed": (40, 1, 41, 2, 41, -1, 42, 3, 40, 1, 43, -1),
    "counted": (40, 41, 42, 43, 40, 41, 42, 43, 40, 41, 0, 1),  # more mentions of missing rows than slots
    "one_missing": (0, 1, 2, 3, -1, -1, 40, 4, 1, -1, -1, -1),  # its slot is the lowest of all
    "new_rows_with_slots": (0, 2, 3, -1, -1, -1, 1, 4, 5, -1, -1, -1),  # each once
    "nothing_to_fill": (-1, 1, 2, 3, 5, -1, -1, 4, 2, 0, 3, -1),
}


def few_rows() -> SlotMaps:
    """The maps of WAYS, by NumPy."""
    slots, used = np.arange(SLOTS, dtype=np.int32), 6
    slot_of, arrays = np.full(HOST_ROWS, NO_SLOT, np.int32), {}
    slot_of[:used] = slots[:used]
    arrays["host_of"] = np.where(slots < used, slots, NO_ROW)
    arrays["priority"] = np.where(slots < used, slots, FREE_PRIORITY).astype(np.int32)
    return SlotMaps(slot_of=slot_of, free=slots >= used, **arrays)  # pyright: ignore[reportArgumentType]


def test_every_way_of_a_call(device):
    """What the kernel decides by: rows missing or none, few or many; small enough to be watched access by access."""
    maps = jax.tree.map(on_device, few_rows())
    forms = functools.partial(pool.allocate, per_seat=6, new_per_seat=1)
    ours, specified = (jax.jit(functools.partial(forms, implementation=form)) for form in ("ffi", "jnp"))
    for number, way in enumerate(WAYS.values()):
        lists = numbers(*way), numbers(*range(20 * number, 20 * number + len(way))), numbers(41, -1, 43, 50)
        assert_equal(*jax.device_get((ours(maps, *lists), specified(maps, *lists))))


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
    """A replay steps the maps of many settings together, on a CPU; on a GPU that is refused: it is not in place."""
    one = some_maps()
    rows = np.asarray([[7, 8, 9, 1], [5, 5, 20, -1], [-1, -1, -1, -1]], np.int32)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(rows)), one)
    run = jax.jit(jax.vmap(allocate))
    if device.platform == "gpu":  # where XLA hands a call in a loop a copy of its part
        with pytest.raises(Exception, match="slot_of and its result are two buffers"):
            jax.block_until_ready(run(many, on_device(rows), on_device(rows)))
        return
    maps, allocation = run(many, on_device(rows), on_device(rows))
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


# ---- require: maps and records in one call ---------------------------------------------------------------------------

SEATS, CAPACITY, SELECTED = 2, 256, 24
FORMATS = {
    "fp8": RecordFormat("fp8", 512, 64),
    "bf16": RecordFormat("bf16", 512, 64),
    "few_words": RecordFormat("f32", 4, 2),  # of no whole 16 bytes
}


def cache_of(records: RecordFormat, slot_manager: str) -> CacheConfig:
    return CacheConfig(
        layer_kinds=("full", "full"),
        records=records,
        keys=KeyFormat("f32", 4),
        threshold=Never(),
        eviction=Lru(),
        seats=SEATS,
        capacity=CAPACITY,
        host_rows=SEATS * CAPACITY,
        device_slots=60,
        top_k=SELECTED,
        staging=8,
        slot_manager=slot_manager,
    )


@pytest.mark.parametrize("records", FORMATS)
def test_require_in_one_call_is_allocate_then_recall(library, device, records):
    """Records are random bytes, and those staged are not those on the host: where each came from shows."""
    random = np.random.default_rng(7)
    by_form = {manager: cache_of(FORMATS[records], manager) for manager in ("ffi", "jnp")}
    config = by_form["ffi"]
    shape, dtype = config.records.shape, np.dtype(config.records.dtype)

    def draw(*leading):
        size = int(np.prod((*leading, *shape))) * dtype.itemsize
        return random.integers(0, 256, size, np.uint8).view(dtype).reshape(*leading, *shape)

    memory = hostmem.HostMemory.PINNED
    host_pool = hostmem.create_pool((2, config.host_rows, *shape), dtype, memory, device)
    every = on_device(np.arange(config.host_rows, dtype=np.int32))
    fill = jax.jit(hostmem.write_back, donate_argnums=0)
    host_pool = fill(host_pool, on_device(draw(2, config.host_rows)), every)
    slots = jax.tree.map(on_device, pool.initial(config.host_rows, config.device_slots))
    empty = LayerState(slots=slots, records=on_device(draw(config.device_slots)), index_keys=None, threshold=())
    states = dict.fromkeys(by_form, empty)
    require = jax.jit(recall.require, static_argnums=0)
    table = random.permutation(config.host_rows).reshape(SEATS, CAPACITY).astype(np.int32)
    moved = None
    for step in range(5):
        length = np.full(SEATS, 200 + step, np.int32)
        view = recall.StepView(
            *(
                on_device(array)
                for array in (table, length, length[:, None], table[:, 200 + step, None], length[:, None])
            ),
            step=on_device(np.int32(step)),
        )
        near = np.stack([np.sort(random.choice(60, SELECTED, replace=False)) for _ in range(SEATS)]) + 8 * step
        selected = on_device(near[:, None].astype(np.int32))
        staged = np.where(random.random((SEATS, 8)) < 0.7, np.take_along_axis(table, near[:, :8], axis=1), NO_ROW)
        staging = Staging(
            on_device(staged.astype(np.int32)), on_device(draw(SEATS, 8)), on_device(np.zeros(SEATS, np.int32))
        )
        operands = (
            host_pool,
            jnp.int32(1),
            view,
            on_device(draw(SEATS, 1)),
            selected,
            jnp.zeros(selected.shape),
            staging,
        )
        made = {name: require(by_form[name], states[name], *operands) for name in by_form}
        states = {name: result[0] for name, result in made.items()}
        assert_equal(*(jax.tree.map(as_bytes, jax.device_get(made[name])) for name in ("ffi", "jnp")))
        moved = made["ffi"][2]
    assert moved is not None and int(moved.evicted) > 0 and int(moved.recalled) > 0 and int(moved.useful) > 0


def as_bytes(leaf) -> np.ndarray:
    """NaNs are equal where their bits are."""
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


def test_pools_that_do_not_fit_the_maps_are_refused(library):
    maps, records = some_maps(), jnp.zeros((SLOTS, 4))
    pool_of = functools.partial(jnp.zeros, dtype=jnp.float32)
    none = jnp.zeros((0, 4))
    for slots, rows, new, message in (
        (SLOTS - 1, HOST_ROWS, none, "host_of has length 8 but records has length 7"),
        (SLOTS, HOST_ROWS + 1, none, "slot_of has length 64 but axis 1 of host_pool has length 65"),
        (SLOTS, HOST_ROWS, records, "new rows has length 0 but new has length 8"),
    ):
        operands = numbers(1), numbers(), pool_of((slots, 4)), pool_of((2, rows, 4)), jnp.int32(0), new, none
        lists = numbers(1, 2)[None], numbers()[None], numbers(0)[None]
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(jax.jit(_ffi.require)(pool.leaves(maps), *lists, *operands))


def test_positions_outside_the_table_are_refused_on_a_cpu(library, device):
    if device.platform != "cpu":
        pytest.skip("on a GPU they are skipped")
    maps, records = some_maps(), jnp.zeros((SLOTS, 4))
    operands = numbers(1, 1), numbers(), records, jnp.zeros((2, HOST_ROWS, 4)), jnp.int32(0), records[:0], records[:0]
    lists = numbers(1, 2)[None], numbers()[None], numbers(0, 2)[None]
    with pytest.raises(Exception, match=r"positions\[1\] is 2 but table holds 2 positions"):
        jax.block_until_ready(jax.jit(_ffi.require)(pool.leaves(maps), *lists, *operands))


@pytest.mark.parametrize(
    "lists, message",
    [
        ((numbers(1, 2), numbers()[None], numbers(0)[None]), r"table has shape \[2\] but needs one list a seat"),
        ((numbers(1, 2)[None], jnp.zeros((2, 0), jnp.int32), numbers(0)[None]), "table has length 1 but new_rows has"),
        ((numbers(1, 2)[None], numbers()[None], numbers(0, 1, 0)[None]), "rows has length 3 but touched has length 2"),
    ],
)
def test_positions_that_do_not_fit_are_refused(library, lists, message):
    maps, records = some_maps(), jnp.zeros((SLOTS, 4))
    operands = numbers(1, 1), numbers(), records, jnp.zeros((2, HOST_ROWS, 4)), jnp.int32(0), records[:0], records[:0]
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(_ffi.require)(pool.leaves(maps), *lists, *operands))


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
    subprocess.run([*command, str(folders[0] / "slots.cc"), "-o", str(path)], check=True, timeout=HANG_S)
    library = ctypes.CDLL(str(path))
    library.EmulateAllocateBytes.restype = ctypes.c_int64
    return library


def pointers_to(arrays):
    pointers = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)) for array in arrays]
    return (ctypes.POINTER(ctypes.c_int32) * len(pointers))(*pointers)


def sizes_of(*sizes):
    return (ctypes.c_int32 * len(sizes))(*sizes)


def garbage(random, *sizes) -> list[np.ndarray]:
    return [random.integers(-(2**31), 2**31, size).astype(np.int32) for size in sizes]


class Moved(ctypes.Structure):
    """As in emulate/slots.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("records", "pool", "fresh", "staged", "layer")),
        *((name, ctypes.c_void_p) for name in ("table", "new_rows", "positions")),
        *((name, ctypes.c_int64) for name in ("layers", "bytes")),
        ("is_aligned", ctypes.c_int32),
    )


def emulate(
    emulator,
    maps,
    rows,
    priority,
    staged,
    *,
    per_seat,
    new_per_seat,
    blocks,
    shared_limit,
    seed,
    moved=None,
    table_width=0,
):
    """pool.allocate's results by the emulated kernel; every buffer it should write holds garbage before.

    With `moved` those of echo_require, whose slots are those of the positions alone.
    """
    random = np.random.default_rng(seed)
    length = len(rows)
    kept = [np.array(array) for array in (maps.slot_of, maps.host_of, maps.priority)]
    free = np.array(maps.free)
    given = [np.array(array, np.int32) for array in (rows, priority, staged)]
    selected = length // per_seat * (per_seat - new_per_seat)
    with_slots = length if moved is None else selected
    results = garbage(random, with_slots, *[length] * 4, *[1] * 6, _ffi.allocate_scratch(length))
    error = ctypes.create_string_buffer(200)
    emulator.Emulate(
        pointers_to([*kept, *given, *results]),
        free.ctypes.data_as(ctypes.c_void_p),
        sizes_of(
            *(len(maps.slot_of), len(free), length, len(staged), per_seat, new_per_seat, table_width),
            len(priority) == 1,
        ),
        moved,
        ctypes.c_int(blocks),
        ctypes.c_int64(shared_limit),
        ctypes.c_uint64(seed),
        error,
    )
    assert not error.value, error.value.decode()
    slot_of, host_of, updated, is_free = map(jnp.asarray, (*kept, free))
    if moved is not None:  # the fills are listed for the kernel's own use
        for listed in results[1:5]:
            listed[results[5][0] :] = -1
    slots, fill_rows, fill_slots, mention, source = map(jnp.asarray, results[:5])
    to_fill, hits, useful, recalled, written, evicted = (jnp.asarray(count[0]) for count in results[5:11])
    fills = pool.Fills(fill_rows, fill_slots, mention, source, to_fill)
    allocation = pool.Allocation(slots, fills, hits, useful, recalled, written, evicted)
    return SlotMaps(slot_of=slot_of, host_of=host_of, priority=updated, free=is_free), allocation


RECORD_WORDS = 8
LAYERS, LAYER = 2, 1


def said_by_positions(random, rows, new_per_seat):
    """New rows, a table and positions that say `rows` i32[B, T + S]: padding is a position that is none, or is outside
    the table, or one that has no row."""
    seats, selected = rows.shape[0], rows.shape[1] - new_per_seat
    table = np.full((seats, selected + 5), NO_ROW, np.int32)
    places = np.stack([random.permutation(table.shape[1])[:selected] for _ in range(seats)])
    np.put_along_axis(table, places, rows[:, new_per_seat:], axis=1)
    odd = np.where(random.random(places.shape) < 0.5, -1, table.shape[1] + 3)
    is_odd = (rows[:, new_per_seat:] == NO_ROW) & (random.random(places.shape) < 0.7)
    positions = np.where(is_odd, odd, places).astype(np.int32)
    return np.ascontiguousarray(rows[:, :new_per_seat]), table, positions


def check_records(emulator, maps, rows, priority, staged, expected, *, per_seat, new_per_seat, **run):
    """echo_require by the emulated kernel: the maps of echo_allocate, and every record where its fills say."""
    shapes = (len(maps.host_of),), (LAYERS, len(maps.slot_of)), (len(rows) // per_seat * new_per_seat,), (len(staged),)
    random = np.random.default_rng(run["seed"])
    records, host, fresh, ahead = (
        random.integers(0, 2**31, (*shape, RECORD_WORDS)).astype(np.int32) for shape in shapes
    )
    filled, fills = records.copy(), expected[1].fills
    for row, slot, source in zip(fills.rows, fills.slots, fills.source, strict=True):
        if slot >= 0:
            filled[slot] = host[LAYER, row] if source < 0 else np.concatenate([fresh, ahead])[source]
    layer, pointer = np.asarray(LAYER, np.int32), ctypes.c_void_p
    new_rows, table, positions = said_by_positions(random, rows.reshape(-1, per_seat), new_per_seat)
    addresses = (
        pointer(array.ctypes.data) for array in (records, host, fresh, ahead, layer, table, new_rows, positions)
    )
    moved = Moved(*addresses, LAYERS, 4 * RECORD_WORDS, run["seed"] % 2)
    made = emulate(
        emulator,
        maps,
        rows,
        priority,
        staged,
        per_seat=per_seat,
        new_per_seat=new_per_seat,
        moved=ctypes.byref(moved),
        table_width=table.shape[1],
        **run,
    )
    of_positions = expected[1].slots.reshape(-1, per_seat)[:, new_per_seat:].reshape(-1)
    assert_equal(made, (expected[0], expected[1]._replace(slots=of_positions)))
    # A step's new rows differ, those of a drawn list need not: a slot that is filled twice may hold either record.
    is_clear = np.bincount(fills.slots[: fills.count], minlength=len(records)) < 2
    np.testing.assert_array_equal(records[is_clear], filled[is_clear])


allocate_by_twin = jax.jit(allocate, static_argnames=("per_seat", "new_per_seat"))


def by_twin(maps, rows, priority, staged, **sizes):
    """pool.allocate's results by the library on a CPU."""
    return jax.device_get(allocate_by_twin(*jax.device_put((maps, rows, priority, staged), CPU), **sizes))


def check_history(emulator, case, seed, steps, *, blocks, is_tight=False):
    """The emulated kernel against the CPU twin. `is_tight`: shared memory holds neither the priorities nor the list."""
    limit = emulator.EmulateAllocateBytes(blocks) + case.slots // 8 + 128 if is_tight else GPU_SHARED_BYTES
    random = np.random.default_rng(seed)
    maps = histories.draw_maps(random, case)
    sizes = {"per_seat": case.per_seat, "new_per_seat": case.new_per_seat}
    for step in range(steps):
        rows = histories.draw_rows(random, case, maps)
        priority = histories.draw_priorities(random, case, step, len(rows))
        staged = histories.draw_staged(random, case, rows)
        expected = by_twin(maps, rows, priority, staged, **sizes)
        run = {"blocks": blocks, "shared_limit": limit, "seed": step}
        if step % 2 == 0:
            assert_equal(emulate(emulator, maps, rows, priority, staged, **sizes, **run), expected)
        else:
            check_records(emulator, maps, rows, priority, staged, expected, **sizes, **run)
        maps = expected[0]


@pytest.mark.parametrize("is_tight", [False, True], ids=["shared", "reread"])
@pytest.mark.parametrize("case", histories.CASES, ids=lambda case: case.name)
def test_the_kernel_of_the_gpu_emulated(library, emulator, case, is_tight):
    """A cluster of two blocks of 1024 threads."""
    check_history(emulator, case, 1, 4, blocks=2, is_tight=is_tight)


@pytest.mark.parametrize(("slots", "length"), [(SLOTS, 0), (0, 0), (0, 12)], ids=["list", "both", "pool"])
def test_lists_and_pools_of_nothing_emulated(library, emulator, slots, length):
    """Nothing is cut into parts of 0 entries, and nothing divides by them."""
    maps = few_rows()
    if slots == 0:
        of_slots = {name: getattr(maps, name)[:0] for name in ("host_of", "priority", "free")}
        maps = maps.replace(slot_of=np.full(HOST_ROWS, NO_SLOT, np.int32), **of_slots)
    lists = np.full(length, NO_ROW, np.int32), np.arange(length, dtype=np.int32), np.asarray([41, -1], np.int32)
    sizes = {"per_seat": 6, "new_per_seat": 1}
    expected = by_twin(maps, *lists, **sizes)
    for blocks in (2, 16):
        run = {"blocks": blocks, "shared_limit": GPU_SHARED_BYTES, "seed": blocks}
        assert_equal(emulate(emulator, maps, *lists, **sizes, **run), expected)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_the_kernel_emulated(library, emulator, way):
    """The second seat is the twelfth here, so that both blocks have a part of the list."""
    rows = np.full(72, NO_ROW, np.int32)
    rows[:6], rows[-6:] = WAYS[way][:6], WAYS[way][6:]
    lists = rows, np.arange(len(rows), dtype=np.int32), np.asarray([41, -1, 43, 50], np.int32)
    sizes = {"per_seat": 6, "new_per_seat": 1}
    expected = by_twin(few_rows(), *lists, **sizes)
    for seed in range(16):
        run = {"blocks": 2, "shared_limit": GPU_SHARED_BYTES, "seed": seed}
        assert_equal(emulate(emulator, few_rows(), *lists, **sizes, **run), expected)
    rows, _, staged = lists
    expected = by_twin(few_rows(), rows, np.full(len(rows), 3, np.int32), staged, **sizes)
    assert_equal(by_twin(few_rows(), rows, np.int32(3), staged, **sizes), expected)
    assert_equal(emulate(emulator, few_rows(), rows, np.asarray([3], np.int32), staged, **sizes, **run), expected)


def test_division_by_a_number_known_at_the_launch(emulator):
    random = np.random.default_rng(0)
    divisors = [1, 2, 3, 7, 128, 2049, 2**30 + 1, 2**31 - 1, *random.integers(1, 2**31, 50)]
    for by in map(int, divisors):
        near = [count * by + more for count in (1, 2, (2**31 - 1) // by) for more in (-1, 0, 1)]
        for value in [0, 2**31 - 1, *near, *map(int, random.integers(0, 2**31, 50))]:
            if 0 <= value < 2**31:
                assert emulator.Divide(value, by) == value // by, (value, by)


@pytest.mark.parametrize("missing", [1, 6])
def test_the_lowest_slots_are_selected_themselves(library, emulator, missing):
    """Of a sample of all slots the lowest are protected, so that what is guessed from it is too few; one row that is
    missing takes the lowest that is not."""
    case = histories.Case("full", 9000, 5000, 1, 1, warm=1.0, ages=100)
    random = np.random.default_rng(missing)
    maps = histories.draw_maps(random, case)
    lowest = np.argsort(maps.priority, kind="stable")[:3000]
    absent = np.flatnonzero(maps.slot_of == NO_SLOT)[:missing]
    rows = random.permutation(np.concatenate([maps.host_of[lowest], absent])).astype(np.int32)
    lists, sizes = (rows, np.full(len(rows), 5, np.int32), absent[:1]), {"per_seat": len(rows), "new_per_seat": 0}
    expected = by_twin(maps, *lists, **sizes)
    for seed in range(3):
        run = {"blocks": 2, "shared_limit": GPU_SHARED_BYTES, "seed": seed}
        assert_equal(emulate(emulator, maps, *lists, **sizes, **run), expected)


@pytest.mark.parametrize("ages", [1, 7, 200, "in turn"])
@pytest.mark.parametrize(
    ("blocks", "missing", "is_guessed"), [(8, 900, True), (16, 40, True), (16, 2300, True), (2, 3500, False)]
)
def test_slots_of_a_large_pool(library, emulator, blocks, missing, is_guessed, ages):
    """By a guess beyond what the groups of one warp can tell, and by going through words of slots in two rounds.

    "in turn": the oldest are neighbours, as LRU leaves them that goes round a pool; no block may have too many of them.
    """
    case = histories.Case("large", 300_000, 150_000, 1, 1, warm=1.0, ages=1 if ages == "in turn" else ages)
    random = np.random.default_rng(missing)
    maps = histories.draw_maps(random, case)
    if ages == "in turn":
        maps = maps.replace(priority=((np.arange(case.slots) + 70_000) % case.slots // 50 - 3000).astype(np.int32))
    absent = random.choice(np.flatnonzero(maps.slot_of == NO_SLOT), missing, replace=False)
    rows = random.permutation(np.concatenate([random.choice(maps.host_of, 3000, replace=False), absent]))
    lists = rows.astype(np.int32), np.full(len(rows), 5, np.int32), absent[:9]
    sizes = {"per_seat": 1, "new_per_seat": 0}
    expected = by_twin(maps, *lists, **sizes)
    run = {"blocks": blocks, "shared_limit": GPU_SHARED_BYTES, "seed": missing}
    assert_equal(emulate(emulator, maps, *lists, **sizes, **run), expected)
    assert bool(emulator.EmulateHasSelected()) != is_guessed


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [8, 16])
@pytest.mark.parametrize("case", histories.CASES, ids=lambda case: case.name)
def test_the_kernel_of_the_gpu_emulated_in_full(library, emulator, case, blocks):
    check_history(emulator, case, blocks, 3, blocks=blocks)
