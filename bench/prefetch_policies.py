"""Threshold policies in the fused kernel on an H200: what each copies ahead, in vain or not, and what a step takes.

    python -m bench.prefetch_policies [--policies "ema margin:ema,1 module:Class"] [--bands 128,512] [--hits 0.5,0.9]

A step is the whole road of `prefetch_calls`: scores with prefetch by the policy's threshold, exact top-k, slots, and
recall. The pool keeps what the steps before left in it, 6144 slots a request, LRU; the history does not grow. 40 s.

Queries have a locality of their choosing: q_t = a u + b v_t + c w_t, a direction that is fixed, one that turns slowly
and one that is fresh at each step, drawn for every seat and head; b is 0.3, a^2 + b^2 + c^2 = 1, and c is found by
bisection so that so many of the selected rows are resident. Every policy sees the same queries.

Beside the policies, another way: a *band* of m ranks behind the k-th is copied after each step, for the next one. A
model would do it while its MLP runs, so what it takes is no part of the step's time.

It knows queries, policies and counts. What a call is stands in `prefetch_calls`, how long it takes in
`prefetch_timing`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")

import jax
import jax.numpy as jnp
import numpy as np

from bench import harness
from bench import prefetch_calls as calls
from bench import prefetch_timing as timing
from bench.prefetch_calls import FORMATS, HEADS, SLOTS, WIDTH, Inputs, K
from bench.prefetch_checks import FILE, Watchdog
from echo_jax import hostmem, indexer, pool, recall, threshold
from echo_jax.cli.policies import parse_threshold
from echo_jax.threshold import Listing, Never
from echo_jax.types import NO_POSITION, NO_ROW, NO_SLOT, Staging, ThresholdPolicy

SHAPE = (16, 131_072)
RECORDS = "fp8"
STAGING = 512
TURNING = 0.3  # b
PERIOD = 256  # steps of a whole turn of v_t
WARM = 32  # steps before the counted ones
HALVINGS = 7
POLICIES = (
    "never",
    "always",
    "random",
    "last",
    "ema",
    "ema:0.25",
    "trend",
    "quantile:0.25",
    "margin:ema,1",
    "margin:ema,3",
)
MIDDLE = 2  # the mark between a step and its band
COUNTS = ("hits", "useful", "recalled", "staged", "refused")


@functools.partial(jax.jit, static_argnames="seats")
def query_at(step: jax.Array, fresh: jax.Array, seats: int) -> jax.Array:
    """e4m3[B, 1, G, 128]: the query of a step, `fresh` the weight c."""

    def drawn(number):
        return jax.random.normal(jax.random.fold_in(jax.random.key(5), number), (seats, 1, HEADS, WIDTH))

    angle = 2 * jnp.pi * step.astype(jnp.float32) / PERIOD
    turning = jnp.cos(angle) * drawn(1) + jnp.sin(angle) * drawn(2)
    fixed = jnp.sqrt(jnp.maximum(1 - TURNING**2 - fresh**2, 0.0))
    return (fixed * drawn(0) + TURNING * turning + fresh * drawn(1000 + step)).astype(jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Of one policy, counted a step and seat."""

    us: harness.Measurement
    hit: float
    useful: float
    wasted: float
    refused: float
    recalled: float


def program(policy: ThresholdPolicy, config: Any, way: str) -> timing.Program:
    """((records, maps, memory, moved, step), (start, query), shared, layer) -> the same after a step of this policy."""

    def run(state, changing, shared, layer):
        records, maps, memory, _, step = state
        start, query = changing
        predicted = threshold.predict(policy, memory, config.seats)
        bound = threshold.bound(policy, memory, config.seats)
        asked = ((records, maps), (start, query, predicted, bound), shared, layer, config, way, step)
        (records, maps), slots, positions, kth, moved, _ = calls.layer_of(*asked)
        memory = threshold.observe(policy, memory, kth, start.visible > K)
        return (records, maps, memory, moved, step + 1), (slots, positions)

    return run


def band(config: Any, width: int) -> timing.Program:
    """((records, maps, staging, moved, step), (start, query), shared, layer) -> the same after a step that took what it
    could from the band of the step before, and copied its own; MIDDLE lies between the two."""

    def run(state, changing, shared, layer):
        records, maps, staging, _, step = state
        start, query = changing
        asked = ((records, maps), (start, query, None, None), shared, layer, config, "in turn", step)
        (records, maps), slots, positions, kth, moved, scores = calls.layer_of(*asked, staging=staging)
        scores, maps, records = timing.mark((scores, maps, records), (slots, positions), number=MIDDLE)
        wide = indexer.select(scores[:, 0], start.visible[:, 0], K + width).positions
        of_wide = jnp.take_along_axis(scores[:, 0], jnp.maximum(wide, 0), axis=1)
        rows = recall.rows_at(shared.rows, jnp.where(wide < shared.lengths[:, None], wide, NO_POSITION))
        wanted = (of_wide < kth) & (pool.lookup(maps, rows) == NO_SLOT)
        rows = jax.lax.top_k(jnp.where(wanted, rows, NO_ROW), width)[0]
        copied = hostmem.read_rows(shared.pool, layer, rows.reshape(-1)).reshape(*rows.shape, *config.records.shape)
        nobody = jnp.zeros((config.seats,), jnp.int32)
        return (records, maps, Staging(rows, copied, nobody), moved, step + 1), (slots, positions)

    return run


@dataclasses.dataclass
class Bench:
    """The shape and its arrays."""

    given: Inputs
    config: Any
    shared: Any
    start: Any

    def state(self, policy: ThresholdPolicy | int) -> Any:
        """Nobody is resident, and nothing is known; of a band, its width is given."""
        form, seats = FORMATS[RECORDS], self.given.seats
        records = jnp.zeros((self.config.device_slots, *form.shape), form.dtype)
        maps = pool.initial(self.config.host_rows, self.config.device_slots)
        moved = calls.Moved(*(jnp.zeros((), jnp.int32) for _ in range(7)))  # a buffer each: all are donated
        if isinstance(policy, int):
            rows = jnp.full((seats, policy), NO_ROW, jnp.int32)
            copied = jnp.zeros((seats, policy, *form.shape), form.dtype)
            memory = Staging(rows, copied, jnp.zeros((seats,), jnp.int32))
        else:
            memory = threshold.initial(policy, seats)
        return records, maps, memory, moved, jnp.int32(1)

    def run(self, compiled: Any, policy: ThresholdPolicy | int, fresh: float, steps: int) -> Steps:
        holder, counts = [self.state(policy)], []
        first: list[float] = []
        weight = jnp.float32(fresh)

        def keep(state: Any) -> None:
            holder[0] = state
            counts.append([int(getattr(state[3], name)) for name in COUNTS])
            if isinstance(policy, int):
                first.append(timing.elapsed_us(timing.BEGIN, MIDDLE))

        changing = [(self.start, query_at(jnp.int32(t), weight, self.given.seats)) for t in range(WARM + steps)]
        us = timing.time_calls(
            *(compiled, lambda call: holder[0], changing, self.shared, self.shared.pool.shape[0], steps),
            keep=keep,
            warmup=WARM,
        )
        hits, useful, recalled, staged, refused = np.mean(counts[WARM:], axis=0) / self.given.seats
        us = harness.summarise(first[WARM:]) if first else us
        return Steps(us, hits / (hits + useful + recalled), useful, staged - useful, refused, recalled)

    def fresh_for(self, compiled: Any, hit: float) -> tuple[float, float]:
        """The weight c at which so many of the selected rows are resident, and how many are."""
        low, high = 0.0, float(np.sqrt(1 - TURNING**2))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            found = self.run(compiled, Listing(Never()), middle, 16).hit
            low, high = (middle, high) if found > hit else (low, middle)
        return (low + high) / 2, found


def made(pool_array: Any, cap: int) -> Bench:
    given = calls.inputs(*SHAPE)
    config = calls.config_of(*SHAPE, RECORDS, pool_array.shape[1], STAGING)
    return Bench(given, config, calls.shared_of(given, pool_array, cap), calls.start_of(given, STAGING))


def measure(
    policies: dict[str, ThresholdPolicy], bands: tuple[int, ...], hits: tuple[float, ...], steps: int, cap: int
) -> None:
    clock, host_rows = timing.Clock(), SHAPE[0] * SHAPE[1]
    timing.build()
    bench = made(calls.pool_of(RECORDS, host_rows)[0], cap)
    clock.lap("pool and inputs")

    def compiled(item: tuple[Any, str]) -> Any:
        policy, way = item
        first = (bench.start, bench.given.sets[0].query)
        run = band(bench.config, policy) if way == "band" else program(policy, bench.config, way)
        return timing.compile_one(timing.Job(run, bench.state(policy), first, bench.shared))

    # Every policy with the same bound for the selection, whose cost is not what is compared.
    listing = {name: Listing(policy) for name, policy in policies.items()}
    jobs: dict[str, tuple[Any, str]] = {name: (policy, "fused") for name, policy in listing.items()}
    jobs |= {"in turn": (Listing(Never()), "in turn")} | {f"band {width}": (width, "band") for width in bands}
    with ThreadPoolExecutor(8) as threads:
        programs = dict(zip(jobs, threads.map(compiled, jobs.values()), strict=True))
    clock.lap(f"{len(jobs)} programs")
    for wanted in hits:
        fresh, _ = bench.fresh_for(programs["in turn"], wanted)
        print(f"\nhit rate {wanted}: c = {fresh:.3f}; of a seat and step: useful, wasted, refused, recalled; us")
        for name in jobs:
            found = bench.run(programs[name], jobs[name][0], fresh, steps)
            report(name, wanted, fresh, found, cap, steps)
        clock.lap(f"hit rate {wanted}")


def report(name: str, wanted: float, fresh: float, found: Steps, cap: int, steps: int) -> None:
    seats, length = SHAPE
    print(
        f"  {name:20} {found.hit:6.3f} {found.useful:8.1f} {found.wasted:8.1f} {found.refused:8.1f} "
        f"{found.recalled:8.1f}  {found.us.median:8.1f} [{found.us.p10:.1f} {found.us.p90:.1f}]",
        flush=True,
    )
    counts = {key: round(getattr(found, key), 3) for key in ("useful", "wasted", "refused", "recalled")}
    harness.record(
        value=found.us,
        unit="us",
        file=FILE,
        name=f"threshold policy, {seats} x {length}, {RECORDS} records, hit rate {wanted}: {name}",
        shapes=dict(
            seats=seats, length=length, pages=calls.USUALLY, records=RECORDS, hit=round(found.hit, 4), wanted_hit=wanted
        )
        | dict(policy=name, cap=cap, slots=SLOTS, fresh=round(fresh, 4))
        | counts,
        method=f"scores to filled slots, {steps} steps after {WARM}, events around each; counts are means of a seat "
        "and step; queries a u + b v_t + c w_t, b 0.3, c by bisection of the hit rate; L2 overwritten before each step",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def several(kind: Callable[[str], Any], separator: str = ",") -> Callable[[str], tuple[Any, ...]]:
        return lambda text: tuple(kind(part) for part in text.split(separator))

    parser.add_argument("--policies", type=several(str, " "), default=POLICIES, help="separated by blanks")
    parser.add_argument("--bands", type=several(int), default=(128, 512), help="widths in ranks")
    parser.add_argument("--hits", type=several(float), default=(0.5, 0.8, 0.9, 0.95, 0.97, 0.99))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--cap", type=int, default=224, help="of a seat; the rule's, which bench.prefetch prints")
    given = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"this needs an NVIDIA GPU; jax sees {jax.devices()[0].platform}")
    with Watchdog("policies", 300):
        policies = {name: parse_threshold(name) for name in given.policies}
        measure(policies, given.bands, given.hits, given.steps, given.cap)


if __name__ == "__main__":
    main()
