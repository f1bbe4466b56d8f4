"""The programs of the prefetch benches, and how they are compiled: side by side, while pools are made.

It knows which ways there are and the shapes of their arguments. It does not know what is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp

from bench import prefetch_calls as calls
from bench import prefetch_timing as timing
from bench.prefetch_calls import FORMATS, SLOTS, Shared, Start
from echo_jax.types import SlotMaps

STAGING = {"short": 1024, "whole": 512}  # places of a seat
WAYS = ("resident", "in turn", "fused", "second stream")
MIDDLE = 2  # the mark between scores and recall, where they are timed apart


def jobs_of(seats: int, length: int, records: str, pool: Any, is_whole: bool) -> dict[str, timing.Job]:
    """Every program of a shape and a format, by name; of arrays only shapes and types are needed."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    form, host_rows, slots = FORMATS[records], pool.shape[1], seats * SLOTS
    held = array(slots, *form.shape, dtype=form.dtype)
    maps = SlotMaps(array(host_rows), array(slots), array(slots), array(slots, dtype=bool))
    pages = array(seats * length // calls.PAGE, calls.PAGE * (calls.WIDTH + 4), dtype=jnp.uint8)
    shared = Shared(
        *(array(seats, 1, calls.HEADS, dtype=jnp.float32), pages, array(seats, length // calls.PAGE)),
        *(array(seats, length), array(seats), array(seats), pool),
    )
    query = array(seats, 1, calls.HEADS, calls.WIDTH, dtype=jnp.float8_e4m3fn)
    limits = array(seats, dtype=jnp.float32)
    entry = array(seats * calls.MOST_MISSES)

    def start(road: str) -> Start:
        return Start(array(seats, 1), (array(seats), array(seats, STAGING[road])))

    found = {}
    changing = (start("short"), query, limits, array(host_rows), calls.Lists(entry, entry, entry, array()))
    sized = dict(staging=STAGING["short"])
    for name, program in (
        *(("resident", calls.resident), ("link", calls.link), ("in turn", calls.in_turn)),
        ("fused", functools.partial(calls.fused, **sized)),
        ("timeline", functools.partial(calls.fused, **sized, middle=MIDDLE)),
    ):
        found[name] = timing.Job(program, held, changing, shared)
    if is_whole:
        config = calls.config_of(seats, length, records, host_rows, STAGING["whole"])
        for way in WAYS:
            program = functools.partial(calls.whole, config=config, way=way)
            found[f"whole {way}"] = timing.Job(program, held, (start("whole"), query, limits, limits, maps), shared)
    return found


class Compiling:
    """Programs on their way, compiled side by side while pools are made; `result` waits for one."""

    def __init__(self, threads: int):
        timing.build()
        self.executor = ThreadPoolExecutor(threads)
        self.futures: dict[Any, Future[Any]] = {}

    def add(self, key: Any, jobs: dict[str, timing.Job]) -> None:
        for name, job in jobs.items():
            self.futures[key, name] = self.executor.submit(timing.compile_one, job)

    def add_unmarked(self, key: Any, name: str, function: Callable[..., Any], *arguments: Any) -> None:
        """A function to be called as it is; of the arguments only shapes and types are needed."""
        self.futures[key, name] = self.executor.submit(lambda: jax.jit(function).lower(*arguments).compile())

    def wait(self, key: Any) -> None:
        """For every program of the key, so that no compiler runs beside what is measured."""
        wait([future for (of, _), future in self.futures.items() if of == key])

    def result(self, key: Any, name: str) -> Any:
        return self.futures[key, name].result()
