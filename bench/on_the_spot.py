"""CUDA sources of the benches, compiled where they are used: bench kernels are no part of the library.

It knows nvcc and what XLA's headers want. It does not know what is in a source, or what its targets mean.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax

BENCH = Path(__file__).resolve().parent


def build(source: str, targets: Mapping[str, str], *flags: str) -> ctypes.CDLL:
    """The library made of bench/`source` for sm_90a, its targets (name -> symbol) registered for CUDA.

    `flags` are nvcc's, optimisation and include folders. RuntimeError without nvcc.
    """
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise RuntimeError(f"{source} is compiled on the spot, which needs nvcc; put CUDA's bin folder on PATH")
    library = Path(tempfile.mkdtemp(prefix="echo_bench_")) / Path(source).with_suffix(".so").name
    subprocess.run(
        [
            *(nvcc, "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "--Werror=all-warnings"),
            *("-Xcompiler=-fPIC,-Wall,-Wextra", "-shared", "-isystem", jax.ffi.include_dir(), *flags),
            *("-o", str(library), str(BENCH / source)),
        ],
        check=True,
    )
    jax.devices()  # a registration before the backend exists would be deferred
    opened = ctypes.CDLL(str(library))
    for target, symbol in targets.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(opened, symbol)), platform="CUDA")
    return opened
