"""The border to the shared library: finds it, registers its targets once, and calls them.

Knows names, argument orders and versions; the meaning of each target stands in
`ffi/include/echo_ffi/targets.h`. Does not know where a pool lives or when to call what: that is `hostmem`.
Importing this module loads and compiles nothing; the library is looked for on the first question.

`ECHO_JAX_FFI=0` in the environment switches the library off, as if it had not been built.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import _compat

ENVIRONMENT_SWITCH = "ECHO_JAX_FFI"
LIBRARY_VERSION = 11  # kLibraryVersion in targets.h
BUILD_COMMAND = "pip install scikit-build-core cmake ninja && pip install --no-build-isolation --no-deps -e ."
CUDA_BUILD_COMMAND = f"export CUDACXX=/usr/local/cuda/bin/nvcc && {BUILD_COMMAND}"

# Which form of an operation that the library and jnp both have: the best there is, the library, the library on a CUDA
# device, or jnp.
IMPLEMENTATIONS = ("auto", "ffi", "cuda", "jnp")

# Python's platform name -> (XLA's platform name, suffix of the handler symbols).
_PLATFORMS = {"cpu": ("cpu", "Cpu"), "gpu": ("CUDA", "Cuda"), "cuda": ("CUDA", "Cuda")}
_TARGETS = {
    "echo_zeros": "EchoZeros",
    "echo_recall": "EchoRecall",
    "echo_read_rows": "EchoReadRows",
    "echo_write_back": "EchoWriteBack",
    "echo_copy_rows": "EchoCopyRows",
    "echo_allocate": "EchoAllocate",
    "echo_require": "EchoRequire",
    "echo_release": "EchoRelease",
    "echo_encode": "EchoEncode",
    "echo_locate": "EchoLocate",
    "echo_top_k": "EchoTopK",
    "echo_bounded_top_k": "EchoBoundedTopK",
}

# kMaxTopK in top_k_kernel.cuh: what a GPU selects by echo_top_k lies in shared memory.
GPU_MAX_TOP_K = 4096


# ---- is it there? ----------------------------------------------------------------------------------------


def is_available(platform: str | None = None) -> bool:
    """Whether the targets can be called on `platform` ("cpu", "gpu"; default: the default backend)."""
    return why_unavailable(platform) is None


def why_unavailable(platform: str | None = None) -> str | None:
    """None where the targets can be called on `platform`; else one sentence with the reason and the remedy.

    The first call initialises JAX's backend and loads the library.
    """
    if os.environ.get(ENVIRONMENT_SWITCH) == "0":
        return f"switched off by {ENVIRONMENT_SWITCH}=0; unset it to use the library"
    platform = jax.default_backend() if platform is None else platform
    if platform not in _PLATFORMS:
        return f"the library has no handlers for platform {platform!r}, only for {sorted(_PLATFORMS)}"
    return _register(*_PLATFORMS[platform])


def serves(what: str, implementation: str, platform: str | None = None, unfit: str | None = None) -> bool:
    """Whether `implementation` of `what` (words for the error) means the library on `platform` (default: the default
    backend). `unfit`: why the library cannot do what is asked of it here, with the remedy, if so.

    "auto" is the library where it can be called, "jnp" never. "ffi" is the library or RuntimeError with the reason and
    the remedy; "cuda" the same, and the platform must be a CUDA device. ValueError for another word.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{what} is {implementation!r} but must be one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "jnp":
        return False
    platform = jax.default_backend() if platform is None else platform
    reason = why_unavailable(platform)
    if implementation == "cuda" and reason is None and _PLATFORMS[platform][0] != "CUDA":
        reason = (
            f"it needs a CUDA device but runs on {platform!r}; start with JAX_PLATFORMS=cuda,cpu on a machine with an "
            "NVIDIA GPU, or use 'ffi', which is the library on any platform it serves"
        )
    reason = unfit if reason is None else reason
    if reason is not None and implementation != "auto":
        raise RuntimeError(f"{what} {implementation!r} is not available: {reason}")
    return reason is None


def register_for(platform: str) -> None:
    """Registers the targets for a platform that this process need not have, as ahead-of-time compiles want it.

    RuntimeError, with the reason and the remedy, where the library has none.
    """
    reason = why_unavailable(platform)
    if reason is not None:
        raise RuntimeError(f"the library's targets cannot be registered for {platform!r}: {reason}")


def library_path() -> Path | None:
    """Where the installed library lies, or None. It is package data, so an editable install finds it too."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    resource = importlib.resources.files("echo_jax").joinpath("_library", f"libecho_ffi{suffix}")
    path = Path(str(resource))
    return path if path.is_file() else None


def open_library(path: Path) -> ctypes.CDLL:
    """The library at `path`, loaded and of the right versions.

    Raises RuntimeError, with both versions and the remedy, for a file that is no library of this project, for
    one built from other sources, and for one built against an FFI that the installed jaxlib does not speak.
    """
    try:
        library = ctypes.CDLL(str(path))
        version, major, minor = (
            int(getattr(library, name)()) for name in ("EchoLibraryVersion", "EchoXlaFfiApiMajor", "EchoXlaFfiApiMinor")
        )
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{path} cannot be loaded ({error}); rebuild it with: {BUILD_COMMAND}") from error
    if version != LIBRARY_VERSION:
        raise RuntimeError(
            f"{path} is version {version} but this echo_jax needs version {LIBRARY_VERSION}; "
            f"rebuild it with: {BUILD_COMMAND}"
        )
    installed = _compat.xla_ffi_api_version()
    # Older minors are XLA's promise to keep; where it no longer does, registration fails and says so.
    if installed is not None and (major != installed[0] or minor > installed[1]):
        raise RuntimeError(
            f"{path} was built against XLA FFI {major}.{minor} but the installed jaxlib speaks "
            f"{installed[0]}.{installed[1]}; rebuild it with: {BUILD_COMMAND}"
        )
    return library


@functools.cache
def opened() -> ctypes.CDLL | str:
    """The library, opened once, or why there is none."""
    path = library_path()
    if path is None:
        return (
            "the shared library was not built when echo_jax was installed (it needs a C++ compiler and jax); "
            f"build it with: {BUILD_COMMAND}"
        )
    try:
        return open_library(path)
    except RuntimeError as error:
        return str(error)


@functools.cache
def _register(xla_platform: str, suffix: str) -> str | None:
    """Registers every target for one platform, once; None, or why it could not be done."""
    library = opened()
    if isinstance(library, str):
        return library
    devices = jax.devices()  # a registration before the backend exists would be deferred, and its errors with it
    if suffix == "Cuda" and (reason := _why_other_gpu(cuda_architectures(library), devices)):
        return reason
    missing = []
    for target, symbol in _TARGETS.items():
        handler = getattr(library, symbol + suffix, None)
        if handler is None:
            missing.append(target)
            continue
        try:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform=xla_platform)
        except Exception as error:  # whatever XLA answers, the answer to the caller is the same
            return f"XLA refused {target}: {error}; rebuild it with: {BUILD_COMMAND}"
    if not missing:
        return None
    what = "" if len(missing) == len(_TARGETS) else f" for {', '.join(missing)}"
    if suffix == "Cuda":
        return (
            f"the library was built without CUDA handlers{what}, as where no nvcc is found that compiles for the GPU; "
            f"build it with: {CUDA_BUILD_COMMAND}"
        )
    return f"the library was built without handlers{what}; rebuild it with: {BUILD_COMMAND}"


def cuda_architectures(library: ctypes.CDLL) -> tuple[str, ...]:
    """What the CUDA handlers were compiled for, as ("90a",); empty where there are none."""
    library.EchoCudaArchitectures.restype = ctypes.c_char_p
    return tuple(name for name in library.EchoCudaArchitectures().decode().split(",") if name)


def _why_other_gpu(architectures: Sequence[str], devices: Sequence[Any]) -> str | None:
    """Why code for `architectures` does not run on the GPUs among `devices`, or None: without a GPU nothing is refused.

    An architecture that ends in a letter ("90a") runs on that one only; a plain number on its generation from there on.
    """
    if not architectures:
        return None  # no handlers at all, which is said elsewhere
    for device in devices:
        capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
        if capability is None:
            continue
        number = int(str(capability).replace(".", ""))
        if not any(_runs_on(architecture, number) for architecture in architectures):
            built_for = ", ".join(f"sm_{architecture}" for architecture in architectures)
            return (
                f"the library was built for {built_for} but this GPU is sm_{number} ({device.device_kind}); build it "
                f"with -C cmake.define.ECHO_CUDA_ARCHITECTURES={number} added to: {CUDA_BUILD_COMMAND}"
            )
    return None


def _runs_on(architecture: str, number: int) -> bool:
    architecture = architecture.partition("-")[0]  # CMake's "90a-real" is code for 90a
    if architecture[-1].isalpha():
        return architecture[:-1] == str(number)
    built = int(architecture)
    return built <= number and built // 10 == number // 10


# ---- the targets -----------------------------------------------------------------------------------------
# Thin on purpose: shapes, types and numbers are checked by the library. `vmap` runs one call after another,
# in place.


def zeros(buffer: jax.Array) -> jax.Array:
    """echo_zeros: `buffer` with zeros in it, in place if it is donated or made in the same program."""
    return _call("echo_zeros", jax.typeof(buffer), (buffer,), aliases={0: 0})


def recall(
    records: jax.Array,
    host_pool: jax.Array,
    layer: jax.Array,
    count: jax.Array,
    host_rows: jax.Array,
    slots: jax.Array,
    source: jax.Array,
    new: jax.Array,
    staged: jax.Array,
) -> jax.Array:
    """echo_recall: `records` [N_G, record] with slots filled; in place if `records` is donated."""
    operands = (records, host_pool, layer, count, host_rows, slots, source, new, staged)
    return _call("echo_recall", jax.typeof(records), operands, aliases={0: 0})


def read_rows(host_pool: jax.Array, layer: jax.Array, rows: jax.Array) -> jax.Array:
    """echo_read_rows: the records [M, record] of rows i32[M] in a layer, or [G, M, record] of rows i32[G, M] in layers
    i32[G]; zeros for negative rows."""
    result = jax.ShapeDtypeStruct((rows.size, *host_pool.shape[2:]), host_pool.dtype)
    records = _call("echo_read_rows", result, (host_pool, layer, rows.reshape(-1)))
    return records.reshape(*rows.shape, *host_pool.shape[2:])


def write_back(host_pool: jax.Array, records: jax.Array, rows: jax.Array) -> jax.Array:
    """echo_write_back: `host_pool` with `records` [L, M, record] in its `rows`; in place if donated."""
    return _call("echo_write_back", jax.typeof(host_pool), (host_pool, records, rows), aliases={0: 0})


def copy_rows(host_pool: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """echo_copy_rows: `host_pool` with `source` rows copied to `target` rows; in place if donated."""
    return _call("echo_copy_rows", jax.typeof(host_pool), (host_pool, source, target), aliases={0: 0})


def encode(
    index_keys: jax.Array,
    rows: jax.Array,
    index_key: jax.Array,
    record: jax.Array,
    query: jax.Array,
    weights: jax.Array,
    *,
    latent: int,
    stored: jax.ShapeDtypeStruct,
    codes: Any,
) -> tuple[jax.Array, ...]:
    """echo_encode: `index_keys` with index_key f32[M, D] in rows i32[M], in place if donated; record f32[M, W] as
    `stored`; query f32[N, G, D] as `codes`, a dtype; weights f32[N, G] times the query's scales."""
    results = (jax.typeof(index_keys), stored, jax.ShapeDtypeStruct(query.shape, codes), jax.typeof(weights))
    operands = (index_keys, rows, index_key, record, query, weights)
    return tuple(_call("echo_encode", results, operands, {0: 0}, latent=np.int64(latent)))


def locate(
    slot_of: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    page_count: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    new: jax.Array,
    staged_rows: jax.Array,
    staged: jax.Array,
    host_pool: jax.Array,
    *,
    device_slots: int,
) -> tuple[jax.Array, jax.Array]:
    """echo_locate: places i32[B, T, K] of positions i32[B, T, K], and the records [B T + B T K, record] that they name
    beyond the slots."""
    count = new.shape[0] * new.shape[1] + positions.size
    results = (jax.typeof(positions), jax.ShapeDtypeStruct((count, *host_pool.shape[2:]), host_pool.dtype))
    operands = (slot_of, layer, page_table, page_count, lengths, positions, new, staged_rows, staged, host_pool)
    places, fetched = _call("echo_locate", results, operands, device_slots=np.int64(device_slots))
    return places, fetched


def top_k(
    score: jax.Array, visible: jax.Array, k: int, bound: jax.Array | None = None, above: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """echo_top_k: positions i32[N, k] and kth_score f32[N] of score f32|bf16[N, P] below visible i32[N].

    With bound f32[N] echo_bounded_top_k, whose answer is the same; above u32[N, ceil(P / 32)] is the bound put to every
    score.
    """
    rows = score.shape[0]
    results = (jax.ShapeDtypeStruct((rows, k), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32))
    if bound is None:
        positions, kth_score = _call("echo_top_k", results, (score, visible), k=np.int64(k))
    else:
        above = jnp.zeros((rows, 0), jnp.uint32) if above is None else above
        operands = (score, visible, bound, above)
        positions, kth_score = _call("echo_bounded_top_k", results, operands, k=np.int64(k))
    return positions, kth_score


def allocate_scratch(length: int) -> int:
    """Words of scratch of `allocate` for a list of that length: AllocateScratch in slots.h."""
    return 12 * length + 20


def allocate(
    slot_of: jax.Array,
    host_of: jax.Array,
    priority: jax.Array,
    free: jax.Array,
    rows: jax.Array,
    touched: jax.Array,
    staged: jax.Array,
    *,
    per_seat: int,
    new_per_seat: int,
    blocks: int = 0,
) -> tuple[jax.Array, ...]:
    """echo_allocate: the four maps, in place if donated; slots, four lists of fills, all i32[M]; and six counts
    i32[]. touched is i32[M], or i32[1] for all entries."""
    maps, numbers = (slot_of, host_of, priority, free), functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    lists, scratch = (numbers(rows.shape),) * 5, numbers((allocate_scratch(rows.shape[0]),))
    results = (*map(jax.typeof, maps), *lists, *(numbers(()),) * 6, scratch)
    attributes = {"per_seat": np.int64(per_seat), "new_per_seat": np.int64(new_per_seat), "blocks": np.int64(blocks)}
    operands, aliases = (*maps, rows, touched, staged), {index: index for index in range(4)}
    return tuple(_call("echo_allocate", results, operands, aliases, **attributes))[:-1]


def require(
    maps: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    table: jax.Array,
    new_rows: jax.Array,
    positions: jax.Array,
    touched: jax.Array,
    staged: jax.Array,
    records: jax.Array,
    host_pool: jax.Array,
    layer: jax.Array,
    new: jax.Array,
    staged_records: jax.Array,
) -> tuple[jax.Array, ...]:
    """echo_require: the four maps and `records` [N_G, record], in place if donated; slots i32[B, S] of positions
    i32[B, S]; six counts i32[]. touched is i32[B (T + S)], or i32[1] for all entries."""
    numbers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    length = new_rows.size + positions.size
    scratch = numbers((allocate_scratch(length) + 4 * length,))  # RequireScratch in slots.h
    results = (*map(jax.typeof, (*maps, records)), numbers(positions.shape), *(numbers(()),) * 6, scratch)
    operands = (*maps, table, new_rows, positions, touched, staged, records, host_pool, layer, new, staged_records)
    aliases = {0: 0, 1: 1, 2: 2, 3: 3, 9: 4}
    return tuple(_call("echo_require", results, operands, aliases))[:-1]


def release(
    slot_of: jax.Array, host_of: jax.Array, priority: jax.Array, free: jax.Array, is_dropped: jax.Array
) -> tuple[jax.Array, ...]:
    """echo_release: the four maps without the rows of is_dropped bool[N_H]; in place if donated."""
    maps = (slot_of, host_of, priority, free)
    return tuple(_call("echo_release", tuple(map(jax.typeof, maps)), (*maps, is_dropped), {i: i for i in range(4)}))


def _call(
    target: str,
    result: Any,
    operands: tuple[jax.Array, ...],
    aliases: Mapping[int, int] | None = None,
    **attributes: np.generic,
):
    # An aliased result has the type of its operand, memory space included: the pool stays on the host.
    call = jax.ffi.ffi_call(
        target, result, vmap_method="sequential", input_output_aliases=dict(aliases) if aliases else None
    )
    return jax.tree.map(lambda array: _compat.varying_like(array, operands), call(*operands, **attributes))
