"""Whether the fused kernel keeps its promises on a GPU: every case, a long one, and a thousand calls under a watchdog.

It knows the cases and what must hold. It knows no time and no claim but D.stress.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import harness
from bench.prefetch_calls import FORMATS, SETS, K, Start, inputs, missing, pool_of, prefetch, score, shared_of
from echo_jax import hostmem
from echo_jax.types import NO_SLOT
from pallas_kernels import indexer_prefetch, indexer_scores
from pallas_kernels.indexer_prefetch import ahead, cases
from pallas_kernels.indexer_prefetch.shape import Tuning

LONG = (16, 131_072)
STRESSED = (8, 65_536)
CALLS = 1000
FILE = "prefetch.jsonl"


class Watchdog:
    """Ends the process, and says where, if a part takes longer than `seconds`: a hang must not cost a machine."""

    def __init__(self, what: str, seconds: float):
        self.timer = threading.Timer(seconds, self.bark, (what, seconds))

    @staticmethod
    def bark(what: str, seconds: float) -> None:
        print(f"{what} did not end within {seconds:.0f} s", flush=True)
        os._exit(3)

    def __enter__(self) -> None:
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *failure: object) -> None:
        self.timer.cancel()


any_scores = jax.jit(functools.partial(indexer_scores, implementation="mosaic_gpu"))
any_prefetch = jax.jit(functools.partial(indexer_prefetch, implementation="mosaic_gpu"), static_argnames="staging")
long_scores = jax.jit(score)
long_prefetch = jax.jit(prefetch, static_argnames=("staging", "tuning"))


def check() -> None:
    """Exits unless every promise is kept."""
    with Watchdog("check", 150):
        on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        for case in cases.CORNERS + cases.FAR:
            started = time.perf_counter()
            made = cases.make(case)
            arguments = [jax.device_put(array) for array in made.arguments]
            arguments[9] = jax.device_put(made.host_pool, on_host)
            scores = np.asarray(any_scores(*arguments[:5]))
            for _ in range(3):
                totals = made.judge(any_prefetch(*arguments, staging=made.staging), scores)
            seconds = time.perf_counter() - started
            print(f"  {cases.identifier(case):45} {sum(totals):7} candidates {seconds:6.1f} s", flush=True)
        check_every_format()


def check_every_format() -> None:
    """Exits unless the long case is right in every record format."""
    for records in FORMATS:
        started = time.perf_counter()
        differing = check_long(records)
        seconds = time.perf_counter() - started
        print(f"  {LONG[0]} x {LONG[1]}, {records} records: {differing} differ {seconds:6.1f} s", flush=True)
        if differing:
            sys.exit(1)


def check_long(records: str, tuning: Tuning | None = None) -> int:
    """At the measured shape, what staged records, lists, counts and scores are not as they should be."""
    given, misses = inputs(*LONG), K // 2
    host_rows = given.seats * given.length
    host_pool = pool_of(records, host_rows)[0]
    maps, of_position = missing(given, misses, host_rows), np.asarray(given.rows)
    start, differing = Start(given.visible, ahead.blank(given.seats, misses)), 0
    for number, cap in ((0, K), (1, misses), (2, 100)):
        shared = shared_of(given, host_pool, cap)
        one, layer = given.sets[number], jnp.int32(number % host_pool.shape[0])
        asked_of = (start, one.query, one.threshold, maps[number].slot_of, shared, layer)
        found = long_prefetch(*asked_of, staging=misses, tuning=tuning)
        wanted = long_scores(start, one.query, shared)
        again = jax.jit(hostmem.read_rows)(host_pool, layer, found.rows.reshape(-1))
        is_staged = np.asarray(found.rows).reshape(-1) >= 0
        differing += int(jnp.sum(_bits(found.scores) != _bits(wanted)))
        differs = _bits(again) != _bits(found.records.reshape(again.shape))
        differing += int(np.sum(np.asarray(differs).reshape(is_staged.size, -1)[is_staged]))
        is_old = np.arange(given.length)[None] < np.asarray(given.lengths)[:, None]
        is_candidate = is_old & (np.asarray(maps[number].slot_of)[of_position] == NO_SLOT)
        is_candidate &= np.asarray(wanted)[:, 0] > np.asarray(one.threshold)[:, None]
        for seat, listed in enumerate(np.asarray(found.rows)):
            candidates = set(of_position[seat, is_candidate[seat]].tolist())
            staged, kept = min(cap, misses, len(candidates)), listed[listed >= 0].tolist()
            differing += len(set(kept) - candidates) + abs(len(set(kept)) - staged) + abs(len(kept) - staged)
            differing += int(np.sum(listed[staged:] != -1))
            differing += int(found.count[seat] != staged) + int(found.refused[seat] != len(candidates) - staged)
    return differing


def _bits(array: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(array, jnp.uint32 if array.dtype.itemsize == 4 else jnp.uint16)


def stress() -> None:
    """[D.stress]: 1,000 calls; what is counted each time must be what the scores say."""
    (seats, length), staging = STRESSED, 256
    given, host_rows = inputs(seats, length), LONG[0] * LONG[1]
    host_pool = pool_of("fp8", host_rows)[0]
    maps = [one.slot_of for one in missing(given, K // 2, host_rows)]

    @jax.jit
    def broken(number, query, threshold, slot_of, given_arrays):
        weights, pages, numbers, of_position, host_pool = given_arrays
        random = functools.partial(jax.random.uniform, jax.random.fold_in(jax.random.key(1), number), (seats,))
        lengths = (random() * (length - 1)).astype(jnp.int32)
        kind = number % 5
        limits = jnp.array([jnp.nan, -jnp.inf, jnp.inf], jnp.float32)
        threshold = jnp.where(kind < 3, limits[jnp.minimum(kind, 2)], threshold)
        cap = (random(maxval=1.5) * staging).astype(jnp.int32)
        layer = number % host_pool.shape[0]
        found = indexer_prefetch(
            *(query, weights, pages, numbers, lengths[:, None] + 1, threshold, lengths, cap, slot_of, host_pool, layer),
            staging=staging,
            implementation="mosaic_gpu",
        )
        is_old = jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]
        passes = (found.scores[:, 0] > threshold[:, None]) & is_old & (slot_of[of_position] < 0)
        total = jnp.sum(passes, axis=1, dtype=jnp.int32)
        wanted = jnp.minimum(total, jnp.minimum(cap, staging))
        listed = jnp.sum(found.rows >= 0, axis=1, dtype=jnp.int32)
        again = hostmem.read_rows(host_pool, layer, found.rows.reshape(-1))
        is_staged = (found.rows >= 0).reshape(-1, 1)
        same = jnp.where(is_staged, again == found.records.reshape(again.shape), True)
        ordered = jnp.sort(found.rows, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        counts = (found.count != wanted) | (found.refused != total - wanted) | (listed != wanted)
        return jnp.sum(counts) + jnp.sum(~same) + jnp.sum(twice)

    arrays, total = (given.weights, given.pages, given.numbers, given.rows, host_pool), jnp.int32(0)
    with Watchdog("stress", 100):
        for number in range(CALLS):
            one = given.sets[number % SETS]
            total += broken(jnp.int32(number), one.query, one.threshold, maps[number % SETS], arrays)
        count = int(total)
    print(f"stress: {count} broken counts, lists or records in {CALLS} calls", flush=True)
    harness.record(
        "D.stress",
        value=count,
        unit="",
        file=FILE,
        shapes=dict(seats=seats, length=length, calls=CALLS, staging=staging, records="fp8"),
        method="calls of the kernel, not of a model's step; lengths, caps and thresholds (NaN, both infinities, a k-th "
        "score) change from call to call; counts, lists and records are compared with what the scores say",
    )
