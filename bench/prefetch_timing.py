"""How long one program takes between two marks on the GPU: one call at a time, its state handed over and taken back.

It knows the L2, CUDA events, and how to compile many programs at once. It does not know what is timed. Every time is in
microseconds.

A program is (state, changing, shared, layer) -> (state, what it must wait for). It is compiled as

    copy what changes  ->  overwrite the L2  ->  mark 0  ->  the program  ->  mark 1

and called again and again with other `changing` and another layer. The state is donated, so what is updated in place is
updated in place here too. The GPU is busy with the L2 while the calls behind it are enqueued: their launches cost what
they cost between kernels, and no wait of the host is in the time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import gpu_timing, on_the_spot
from bench.harness import Measurement, summarise
from echo_jax.config import COMPILER_OPTIONS

NO_EVENT = -1
BEGIN, END = 0, 1

type Program = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]


@functools.cache
def build() -> ctypes.CDLL:
    """Compiles and registers the marks; RuntimeError without nvcc."""
    opened = on_the_spot.build("prefetch_marks.cu", {"bench_mark": "MarkCuda", "bench_sweep": "SweepCuda"}, "-O2")
    opened.MarkElapsed.restype = ctypes.c_float
    opened.MarkElapsed.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return opened


def mark(passed: Any, waited: Any = (), number: int = NO_EVENT) -> Any:
    """`passed`, a pytree, in place, once it and `waited` are there; with a number, an event is recorded in between."""
    leaves, tree = jax.tree.flatten(passed)
    results = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    call = jax.ffi.ffi_call(
        "bench_mark", results, input_output_aliases={place: place for place in range(len(leaves))}, has_side_effect=True
    )
    return jax.tree.unflatten(tree, call(*leaves, *jax.tree.leaves(waited), number=np.int64(number)))


def sweep(waited: Any) -> jax.Array:
    """Zeros, once `waited` is there: all that lay in the L2 is driven out."""
    swept = jax.ShapeDtypeStruct((gpu_timing.SWEPT_BYTES // 4,), jnp.uint32)
    return jax.ffi.ffi_call("bench_sweep", swept, has_side_effect=True)(*jax.tree.leaves(waited))


def marked(program: Program) -> Callable[..., Any]:
    """(state, changing, shared, layer) -> state: `program` between its marks.

    What changes from call to call is copied first of all, to where it lay at the call before: a CUDA graph is recorded
    again when an address changes, and the time of that is not the program's. Such copies may be written to.
    """

    def run(state, changing, shared, layer):
        moved = mark((changing, layer))  # in place, of arguments that are not donated: XLA copies them
        (changing, layer), state = mark((moved, state), sweep(moved), number=BEGIN)
        state, waited = program(state, changing, shared, layer)
        return mark(state, waited, number=END)

    return run


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to be timed, and arguments like those it will be called with: arrays, or their shapes and types."""

    program: Program
    state: Any
    changing: Any
    shared: Any


def compile_one(job: Job) -> Any:
    """The job's compiled program. Compiling takes longer than measuring: let several threads do it."""
    build()
    # Shapes, so that no thread holds an array that another call donates.
    arguments = jax.tree.map(_shaped, (job.state, job.changing, job.shared, jnp.int32(0)))
    lowered = jax.jit(marked(job.program), donate_argnums=0).lower(*arguments)
    return lowered.compile(compiler_options=COMPILER_OPTIONS)


def _shaped(array: Any) -> jax.ShapeDtypeStruct:
    if isinstance(array, jax.ShapeDtypeStruct):
        return array
    if jax.typeof(array).memory_space == jax.memory.Space.Host:
        return on_host(array.shape, array.dtype)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def on_host(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A shape in pinned memory. Of a sharding without a mesh a shape forgets the memory kind (jax 0.11.2), and what is
    traced for it moves rows by jnp."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(), memory_kind="pinned_host")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def time_calls(
    compiled: Any,
    state: Callable[[int], Any],
    changing: Sequence[Any],
    shared: Any,
    layers: int,
    repeats: int,
    keep: Callable[[Any], None] = lambda state: None,
    warmup: int = 2,
) -> Measurement:
    """us from mark 0 to mark 1. Call k has state(k), changing[k mod all of them], and a layer of its own for as long as
    there are any; its state goes to `keep`."""
    library, durations, sets = build(), [], len(changing)
    for call in range(warmup + repeats):
        layer = jnp.int32((call + call // sets) % layers)
        keep(jax.block_until_ready(compiled(state(call), changing[call % sets], shared, layer)))
        if call >= warmup:
            durations.append(1e3 * float(library.MarkElapsed(BEGIN, END)))
    return summarise(durations)


def elapsed_us(first: int, second: int) -> float:
    """Between two marks of the last call."""
    return 1e3 * float(build().MarkElapsed(first, second))


@dataclasses.dataclass
class Clock:
    """Says what took how long, on the host."""

    started: float = dataclasses.field(default_factory=time.perf_counter)

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        print(f"    ({what}: {now - self.started:.1f} s)", flush=True)
        self.started = now
