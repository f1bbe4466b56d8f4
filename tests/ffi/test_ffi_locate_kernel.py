"""The kernel of echo_locate, compiled for an emulated GPU, against the loops of the oracle.

What a real GPU shows besides is in tests/test_locate.py; this runs wherever a C++ compiler is.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import locate_cases
from tests.locate_cases import CASES
from tests.oracles import locate as oracle

ROOT = Path(__file__).resolve().parents[2]
GUARD = 0xA5A5A5A5


class Sizes(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "seats",
                "tokens",
                "listed",
                "pages",
                "staging",
                "device_slots",
                "layers",
                "host_rows",
                "bytes",
            )
        ),
        *((name, ctypes.c_int32) for name in ("entries", "is_aligned")),
        ("seed", ctypes.c_uint64),
    ]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """ffi/src/locate_kernel.cuh as a CPU library."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    path = tmp_path_factory.mktemp("emulator") / "locate.so"
    folders = [ROOT / "tests/ffi/emulate", ROOT / "ffi/include", ROOT / "ffi/src"]
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE"]
    command += ["-DECHO_EMULATE", "-isystem", jax.ffi.include_dir(), *(f"-I{folder}" for folder in folders)]
    subprocess.run([*command, str(folders[0] / "locate.cc"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


def aligned(values: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 16 bytes."""
    room = np.zeros(values.nbytes + 16, np.uint8)
    first = -room.ctypes.data % 16
    inside = room[first : first + values.nbytes].view(values.dtype).reshape(values.shape)
    inside[...] = values
    return inside


@pytest.mark.parametrize("entries", [8, 16])
@pytest.mark.parametrize("name", [name for name in CASES if name != "many_lists"])
def test_the_kernel_answers_as_the_loops(emulator, name, entries):
    case = CASES[name]
    for seed in range(2):
        made = {key: aligned(np.asarray(value)) for key, value in locate_cases.make(case, seed).items()}
        seats, tokens, listed = made["positions"].shape
        layers, host_rows, words = made["host_pool"].shape
        places = np.full(made["positions"].shape, -77, np.int32)
        fetched = aligned(np.full((seats * tokens * (1 + listed), words), GUARD, np.uint32))
        shape = (seats, tokens, listed, made["page_table"].shape[1], case.staging, case.device_slots, layers, host_rows)
        sizes = Sizes(*shape, words * 4, entries, words % 4 == 0, seed)
        operands = ("slot_of", "layer", "page_table", "page_count", "lengths", "positions", "new_records")
        operands += ("staged_rows", "staged", "host_pool")
        pointers = [made[key].ctypes.data_as(ctypes.c_void_p) for key in operands]
        error = ctypes.create_string_buffer(200)
        emulator.Locate(
            ctypes.byref(sizes),
            *pointers,
            places.ctypes.data_as(ctypes.c_void_p),
            fetched.ctypes.data_as(ctypes.c_void_p),
            error,
        )
        assert not error.value, error.value.decode()
        wanted, held = oracle.locate(
            made["slot_of"],
            int(made["layer"]),
            made["page_table"],
            made["lengths"],
            made["positions"],
            made["new_records"],
            made["staged_rows"],
            made["staged"],
            made["host_pool"],
            case.device_slots,
        )
        np.testing.assert_array_equal(places, wanted, err_msg=f"seed {seed}")
        for place, record in enumerate(fetched, start=case.device_slots):
            expected = held.get(place, np.full(words, GUARD, np.uint32))
            np.testing.assert_array_equal(record, expected, err_msg=f"seed {seed}, place {place}")
