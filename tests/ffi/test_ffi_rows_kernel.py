"""The kernel that moves rows on a GPU, compiled for an emulated one, against loops: all targets, numbers outside too.

What a real GPU shows besides is in test_ffi_gpu.py; this runs wherever a C++ compiler is.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.ffi import loops
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
LAYERS, HOST_ROWS, NEW, STAGED = 3, 23, 4, 3
LOWEST, HIGHEST = -(2**31), 2**31 - 1
GUARD = 64  # bytes on either side of what is written, which must stay as they are


class Sizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("slots", "fresh", "staged", "layers", "rows", "bytes", "length")),
        *((name, ctypes.c_int32) for name in ("is_aligned", "blocks", "helpers")),
        ("seed", ctypes.c_uint64),
    ]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """ffi/src/rows_kernel.cuh and rows_jobs.cuh as a CPU library."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("emulator") / "rows.so"
    folders = [ROOT / "tests/ffi/emulate", ROOT / "ffi/include", ROOT / "ffi/src"]
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"]
    command += ["-DECHO_EMULATE", *(f"-I{folder}" for folder in folders)]
    subprocess.run([*command, str(folders[0] / "rows.cc"), "-o", str(path)], check=True, timeout=HANG_S)
    return ctypes.CDLL(str(path))


def pointer(array):
    return array.ctypes.data_as(ctypes.c_void_p)


def guarded(values: np.ndarray, off: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A copy of `values` that starts `off` bytes behind a multiple of 16, and the bytes around it."""
    room = np.full(values.nbytes + 2 * GUARD + 32, 0xA5, np.uint8)
    first = GUARD + (-room[GUARD:].ctypes.data % 16) + off
    inside = room[first : first + values.nbytes].reshape(values.shape)
    inside[...] = values
    return inside, room


def call(emulator, target, sizes, written, *arguments):
    """Calls a target that writes to `written`, and holds that nothing around it changes; returns it."""
    inside, room = written
    error = ctypes.create_string_buffer(200)
    getattr(emulator, target)(ctypes.byref(sizes), pointer(inside), *map(pointer, arguments), error)
    assert not error.value, error.value.decode()
    outside = np.ones(room.shape, bool)
    first = inside.ctypes.data - room.ctypes.data
    outside[first : first + inside.nbytes] = False
    assert (room[outside] == 0xA5).all(), f"{target} writes outside its operand"
    return inside


def anywhere(generator, size, limit):
    """Numbers of which a third lies outside 0..limit."""
    inside, outside = generator.integers(0, limit, size), generator.choice([-1, limit, LOWEST, HIGHEST], size)
    return np.where(generator.random(size) < 0.33, outside, inside).astype(np.int32)


def skipped(values, limit):
    return np.where((values < 0) | (values >= limit), -1, values)


# bytes of a record, entries, the count, blocks, bytes off a multiple of 16, helpers of a recall. One block has 32 warps
# and lists 1024 rows: below and above that many rows, at ends of the four (or two) rows that a warp takes at once,
# several turns of all warps, and several lists.
CASES = {
    "fp8_a_warp_each": (656, 32, 32, 1, 0, 0),
    "fp8_merged": (656, 33, 33, 1, 0, 0),
    "fp8_several_turns": (656, 301, 298, 2, 0, 0),
    "fp8_several_lists": (656, 2100, 2093, 1, 0, 0),
    "fp8_count_0": (656, 40, 0, 1, 0, 0),
    "fp8_count_negative": (656, 40, LOWEST, 1, 0, 0),
    "fp8_count_above": (656, 40, HIGHEST, 1, 0, 0),
    "bf16_merged": (1152, 71, 70, 1, 0, 0),
    "bf16_a_warp_each": (1152, 20, 19, 1, 0, 0),
    "f32_two_batches_of_loads": (2304, 67, 67, 1, 0, 0),
    "small": (128, 90, 90, 1, 0, 0),
    "one_word": (4, 70, 69, 1, 0, 0),
    "odd_words": (60, 70, 70, 1, 0, 0),
    "long_and_odd": (1156, 40, 40, 1, 0, 0),
    "not_on_16": (656, 40, 40, 1, 4, 0),
    "empty": (656, 0, 0, 1, 0, 0),
    "helped_a_warp_each": (656, 60, 32, 1, 0, 1),
    "helped_merged": (656, 300, 297, 1, 0, 2),
    "helped_several_lists": (128, 1400, 1393, 1, 0, 1),
    "helped_more_movers": (1152, 130, 130, 2, 0, 1),
    "helped_not_on_16": (656, 70, 70, 1, 4, 1),
    "helped_count_0": (656, 40, 0, 1, 0, 1),
}


@pytest.mark.parametrize("record_bytes, entries, count, blocks, off, helpers", CASES.values(), ids=CASES.keys())
def test_every_target(emulator, record_bytes, entries, count, blocks, off, helpers):
    generator = np.random.default_rng(entries + record_bytes)

    def random(*shape):
        return generator.integers(0, 256, (*shape, record_bytes), np.uint8)

    def sizes(length):
        static = (entries + 7, NEW, STAGED, LAYERS, HOST_ROWS, record_bytes, length)
        return Sizes(*static, int(off == 0), blocks, helpers, record_bytes)

    values, records, new, staged = random(LAYERS, HOST_ROWS), random(entries + 7), random(NEW), random(STAGED)
    pool, (given_new, _), (given_staged, _) = (guarded(array, off) for array in (values, new, staged))
    layer = np.asarray([2], np.int32)

    rows = anywhere(generator, entries, HOST_ROWS)
    slots = generator.permutation(entries + 7)[:entries].astype(np.int32)
    slots[::6] = generator.choice([-1, entries + 7, HIGHEST, LOWEST], len(slots[::6]))
    source = np.where(generator.random(entries) < 0.5, -1, anywhere(generator, entries, NEW + STAGED)).astype(np.int32)
    is_wrong = (source < -1) | (source >= NEW + STAGED)
    first = slice(0, max(0, min(count, entries)))
    expected = loops.recall(
        records,
        values,
        2,
        skipped(rows, HOST_ROWS)[first],
        np.where(is_wrong, -1, skipped(slots, entries + 7))[first],
        np.where(is_wrong, 0, source)[first],
        np.concatenate([new, staged]),
    )
    operands = (pool[0], layer, np.asarray([count], np.int32), rows, slots, source, given_new, given_staged)
    found = call(emulator, "EmulateRecall", sizes(entries), guarded(records, off), *operands)
    np.testing.assert_array_equal(found, expected)

    # Of one layer; as many of each of several, of which one is outside.
    for layers in (layer, np.asarray([1, LAYERS, 0], np.int32)):
        each = entries // len(layers)
        asked, out = rows[: each * len(layers)], guarded(random(each * len(layers)), off)
        operands = (pool[0], layers, asked, np.asarray([each], np.int64))
        read = call(emulator, "EmulateReadRows", sizes(len(asked)), out, *operands)
        lists = [skipped(list_, HOST_ROWS) for list_ in np.split(asked, len(layers))]
        of_layer = [
            loops.read_rows(values, number % LAYERS, list_ if number < LAYERS else np.full_like(list_, -1))
            for number, list_ in zip(layers.tolist(), lists, strict=True)
        ]
        np.testing.assert_array_equal(read, np.concatenate(of_layer))

    rows = generator.permutation(HOST_ROWS)[: min(entries, 17)].astype(np.int32)
    rows[::4] = generator.choice([-1, HOST_ROWS, HIGHEST], len(rows[::4]))
    written, _ = guarded(random(LAYERS, len(rows)), off)
    call(emulator, "EmulateWriteBack", sizes(len(rows)), pool, written, rows)
    values = loops.write_back(values, written, skipped(rows, HOST_ROWS))
    np.testing.assert_array_equal(pool[0], values)

    order = generator.permutation(HOST_ROWS).astype(np.int32)
    origin, target = order[:9].copy(), order[9:18].copy()
    origin[::4], target[1::4], target[2] = HOST_ROWS, LOWEST, origin[2]
    call(emulator, "EmulateCopyRows", sizes(9), pool, origin, target)
    expected = loops.copy_rows(values, skipped(origin, HOST_ROWS), skipped(target, HOST_ROWS))
    np.testing.assert_array_equal(pool[0], expected)


@pytest.mark.parametrize("layer", [-1, LAYERS, HIGHEST, LOWEST])
def test_a_layer_outside_leaves_nothing_to_do(emulator, layer):
    generator = np.random.default_rng(5)
    pool, records, new = (generator.integers(0, 256, (*shape, 64), np.uint8) for shape in ((3, 23), (9,), (4,)))
    sizes = Sizes(9, 4, 4, LAYERS, HOST_ROWS, 64, 4, 1, 1, 0, 0)
    rows, number = np.arange(4, dtype=np.int32), np.asarray([layer], np.int32)
    for source in (-1, 0):
        sources, count = np.full(4, source, np.int32), np.asarray([4], np.int32)
        operands = (guarded(pool)[0], number, count, rows, rows, sources, guarded(new)[0], guarded(new)[0])
        np.testing.assert_array_equal(call(emulator, "EmulateRecall", sizes, guarded(records), *operands), records)
    operands = (guarded(pool)[0], number, rows, np.asarray([4], np.int64))
    read = call(emulator, "EmulateReadRows", sizes, guarded(records[:4]), *operands)
    assert not read.any()
