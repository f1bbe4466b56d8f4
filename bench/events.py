"""CUDA events around a jitted call: from the moment the GPU reaches it to the moment it is done, launches included.

`claim_time` is the one clock of the claims: events around the replay of the graph of one call, launch included, the L2
overwritten before each call. Every run that records claims also records, once, what the clock says of an empty graph
and of a copy of 1 GiB (`record_references`): runs whose references are more than 5 % apart are not compared.

It knows how to compile and register events.cu on the spot, and how to tie events to a call. Kernels of other projects
are usually timed like this: overwrite the L2, record, call, record, all of it enqueued ahead of the GPU.
Importing it compiles nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import gpu_timing, on_the_spot
from bench.harness import COPY_RATE, EMPTY_GRAPH, Measurement, record, summarise

AS_GRAPH = {"xla_gpu_graph_min_graph_size": 1}
"""Has XLA make a CUDA graph of whatever lies between two events, of one kernel too."""


@functools.cache
def build() -> ctypes.CDLL:
    """Compiles and registers the events; RuntimeError without nvcc."""
    opened = on_the_spot.build("events.cu", {"bench_record_event": "RecordEventCuda"}, "-O2")
    opened.BenchElapsed.restype = ctypes.c_float
    opened.BenchElapsed.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return opened


def event_time(
    function: Callable[..., Any],
    *arguments: Any,
    repeats: int = gpu_timing.REPEATS,
    sweep: bool = True,
    runs: int = 2,
    as_graph: bool = False,
) -> Measurement:
    """Microseconds of function(*arguments), jittable and without donation: median, p10 and p90 of `repeats` calls.

    `as_graph` times the replay of the graph of one call.
    """
    build()
    run = jax.jit(event_program(function, repeats, sweep), compiler_options=AS_GRAPH if as_graph else None)
    return run_and_read(run, arguments, repeats, runs)


CLOCK = "CUDA events around the replay of the graph of one call, launch included, L2 overwritten before each; 30 calls"


def claim_time(function: Callable[..., Any], *arguments: Any, file: str, sweep: bool = True) -> Measurement:
    """us of function(*arguments) by the clock of the claims; the run's references go to `file` once."""
    record_references(file)
    return event_time(function, *arguments, sweep=sweep, as_graph=True)


@functools.cache
def record_references(file: str) -> None:
    """What the clock says of next to nothing and of a device copy of 1 GiB, as rows of this run."""
    number, gibibyte = jnp.zeros((1,), jnp.uint32), jnp.zeros((2**28,), jnp.uint32)
    empty = event_time(lambda x: x + jnp.uint32(1), number, as_graph=True)
    copy = event_time(lambda x: x ^ jnp.uint32(1), gibibyte, repeats=10, as_graph=True)
    record(name=EMPTY_GRAPH, value=empty, unit="us", file=file, method=CLOCK)
    median, slow, fast = (2 * gibibyte.nbytes / us / 1e6 for us in (copy.median, copy.p90, copy.p10))
    rate = Measurement(median, slow, fast, copy.repeats)
    record(name=COPY_RATE, value=rate, unit="TB/s", file=file, method=CLOCK, notes="bytes read and bytes written")


def event_program(
    function: Callable[..., Any], repeats: int = gpu_timing.REPEATS, sweep: bool = True
) -> Callable[..., jax.Array]:
    """What `event_time` compiles, of the function's arguments; whoever compiles it ahead calls `build` first.

    All calls are one program: overwrite the L2, record, call, record. The call waits for its first event through its
    smallest argument, the second event for the call through the call's first result, which is written in place.
    """

    def program(*arguments):
        leaves, tree = jax.tree.flatten(arguments)
        smallest = min(range(len(leaves)), key=lambda index: leaves[index].size)
        before = number = jnp.zeros((1,), jnp.uint32)
        for index in range(repeats):
            zero = gpu_timing.overwrite(number, before)[:1] >> 31 if sweep else _zero_after(before)
            leaves[smallest] = record_event(leaves[smallest] + zero[0].astype(leaves[smallest].dtype), 2 * index)
            first = jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))[0]
            before = record_event(first, 2 * index + 1).reshape(-1)[:1]
        return before

    return program


def run_and_read(
    program: Callable[..., Any], arguments: Sequence[Any], repeats: int = gpu_timing.REPEATS, runs: int = 2
) -> Measurement:
    """Microseconds of a call by the compiled `event_program`, of the last of `runs` runs after a first one."""
    library = build()
    for _ in range(1 + runs):
        jax.block_until_ready(program(*arguments))
    return summarise([1e3 * float(library.BenchElapsed(2 * index, 2 * index + 1)) for index in range(repeats)])


def _zero_after(before: jax.Array) -> jax.Array:
    """u32[1] that is 0 and waits for `before`, whatever its bits are."""
    bits = jax.lax.bitcast_convert_type(before, jnp.uint32 if before.dtype.itemsize == 4 else jnp.uint16)
    return jnp.minimum(bits.astype(jnp.uint32), jnp.uint32(0))


def record_event(array: jax.Array, number: int) -> jax.Array:
    call = jax.ffi.ffi_call("bench_record_event", jax.typeof(array), input_output_aliases={0: 0}, has_side_effect=True)
    return call(array, number=np.int64(number))
