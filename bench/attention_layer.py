"""The attention part of one layer on an H200, end to end: scores, select, require, attend; offloaded and resident.

    python -m bench.attention_layer [layer] [light] [timeline]      (none: all three; about 80 s)

layer      B 32 x 98,304 at a hit rate of 0.97: E.layer_us, E.layer_resident_us
light      B 1 x 98,304 in a pool that holds two thirds of the context: D.light_load_us; its first 16 steps apart
timeline   the kernels of one step of either, one by one, offloaded and resident

The rooms are the library's own: `echo_layer` with FP8 keys and records, 64 index heads, 128 attention heads, T of 1,
prefetch in the scorer ("fused"), after it ("separate"), beside the selection ("second_stream") or not at all ("none").
Everything a model would add is left out: projections before, the output after, and the write-back, which is one call a
step for all layers. Several steps are one program, each waiting for the attended values of the one before it; every
seat is full but for one position, which each step writes. What a call is given lies where it lay at the call before:
its queries are made ahead and found by number, its counts are kept beside them. Where addresses change, XLA records the
graph again, and one seat is done before that is.

How a hit rate is made: the index query of a seat is a sum of a fixed direction, one that turns slowly, and a fresh one,
each drawn for every head. The weight of the fresh one decides how much of the selected set is new at every step; it is
found by bisection of the measured hit rate, after enough steps that the pool has been turned over.

It knows shapes, queries and claims. How kernels are timed is in `gpu_timing`, how a row is written in `harness`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import gpu_timing, harness
from bench.harness import Measurement, summarise
from echo_jax import hostmem, pool, threshold
from echo_jax import layer as layer_lib
from echo_jax.config import COMPILER_OPTIONS, CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat, quantise_key
from echo_jax.layer import LayerInputs
from echo_jax.recall import StepView
from echo_jax.stats import Moved
from echo_jax.types import PAGE, LayerState

FILE = "attention_layer.jsonl"
INDEX_HEADS, HEADS, K, LATENT, ROPE = 64, 128, 2048, 512, 64
SCALE = 192**-0.5
CONTEXT = 98_304
HIT = 0.97
WAYS = ("resident", "none", "separate", "second_stream", "fused")
STAGING = 128  # of a seat
# Rows that cross the link while scores are made: 115 us for 32 x 98,304 positions, 36 rows a us beside them.
PREFETCH_PER_POSITION = threshold.rows_per_position(115, 36, 32 * 98_304)
TURN = 0.01  # radians a step, of a part of half the fixed one's weight
DISTINCT = 4096  # records
CALLS = 8  # that follow each other without a wait
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured."""

    seats: int
    slots: int  # N_G
    steps: int  # in one program
    context: int = CONTEXT
    attend: str = "mosaic_gpu"

    @property
    def kept(self) -> int:
        """Steps whose queries and counts are kept."""
        return max(CALLS * self.steps, 16)

    def config(self, way: str) -> CacheConfig:
        return CacheConfig(
            layer_kinds=("full",),
            records=RecordFormat("fp8", LATENT, ROPE),
            keys=KeyFormat("fp8", 128),
            threshold=threshold.Ema(0.5),
            eviction=Lru(),
            seats=self.seats,
            capacity=self.context,
            host_rows=self.seats * self.context,
            device_slots=self.slots,
            top_k=K,
            staging=0 if way == "none" else STAGING,
            prefetch_per_position=PREFETCH_PER_POSITION,
            offload=way != "resident",
            prefetch_implementation="separate" if way in ("resident", "none") else way,
            attend_implementation=self.attend,
        )

    def shapes(self) -> dict[str, Any]:
        return dict(B=self.seats, P=self.context, T=1, K=K, N_G=self.slots, N_H=self.seats * self.context) | dict(
            index_heads=INDEX_HEADS, heads=HEADS, keys="fp8", records="fp8"
        )


TIMELINES = ("fused", "none", "resident")
LAYER = Size(seats=32, slots=32 * 6144, steps=4)
LIGHT = Size(seats=1, slots=65_536, steps=8)


class Fixed(NamedTuple):
    """What every step is given besides its index query; arrays on the device."""

    view: StepView
    query: jax.Array  # bf16[B, 1, H, 576]  as a projection leaves it
    record: jax.Array  # f32[B, 1, 576]
    weights: jax.Array  # f32[B, 1, G]
    key: jax.Array  # f32[B, 1, 128]


class Carry(NamedTuple):
    """What a call takes and gives back, in place."""

    state: LayerState
    clock: jax.Array  # i32[]
    after: jax.Array  # f32[]  a zero that only the attended values before can tell
    queries: jax.Array  # f32[kept, B, 1, G, 128]  of the steps to come
    moved: jax.Array  # i32[kept, fields of Moved]  of the steps done; one array, so that one kernel writes it
    at: jax.Array  # i32[]  how many are done


class Directions(NamedTuple):
    """Of index queries: f32[B, 1, G, 128] each, values of variance 1."""

    fixed: jax.Array
    start: jax.Array
    quarter: jax.Array  # where the turning part is a quarter turn later


# ---- one step, and several in a program ------------------------------------------------------------------------------


def one_step(config: CacheConfig, host_pool, state: LayerState, fixed: Fixed, index_query, clock, after):
    """Returns the state, a zero that only the attended values can tell, and what moved."""
    view = fixed.view._replace(step=clock)
    inputs = LayerInputs(fixed.query, fixed.record, index_query, fixed.weights + after, fixed.key)
    state, out = layer_lib.echo_layer(config, state, host_pool, 0, view, inputs, scale=SCALE)
    # What is counted is kept once the values are there: before, it would stand between a record and its use.
    attended, moved = jax.lax.optimization_barrier((out.attended, out.moved))
    return state, jnp.minimum(jnp.abs(attended[0, 0, 0, 0]), 0.0), moved


def program(config: CacheConfig, steps: int):
    """`steps` steps one after another: (Carry, host pool, Fixed) -> Carry."""
    step = jax.jit(functools.partial(one_step, config))  # traced once

    def run(carry: Carry, host_pool, fixed):
        for _ in range(steps):
            at = carry.at % carry.queries.shape[0]
            query = jax.lax.dynamic_index_in_dim(carry.queries, at, keepdims=False)
            state, after, moved = step(host_pool, carry.state, fixed, query, carry.clock, carry.after)
            kept = carry.moved.at[at].set(jnp.stack(jax.tree.leaves(moved)))
            carry = Carry(state, carry.clock + 1, after, carry.queries, kept, carry.at + 1)
        return carry

    return jax.jit(run, donate_argnums=0)


@functools.partial(jax.jit, donate_argnums=0)
def with_queries(carry: Carry, directions: Directions, fresh: jax.Array, first: jax.Array) -> Carry:
    """Index queries of steps from `first`; `fresh` is the weight of what is new at every step."""

    def one(step):
        turned = jnp.cos(TURN * step) * directions.start + jnp.sin(TURN * step) * directions.quarter
        new = jax.random.normal(jax.random.fold_in(jax.random.key(7), step), turned.shape)
        return (directions.fixed + 0.5 * turned + fresh * new) / jnp.sqrt(1.25 + fresh * fresh)

    return carry._replace(queries=jax.vmap(one)(first + jnp.arange(carry.queries.shape[0])), at=jnp.int32(0))


def first_carry(size: Size, config: CacheConfig) -> Carry:
    """An empty pool, or the resident run's full one; the same index keys for all."""
    queries = jnp.zeros((size.kept, size.seats, 1, INDEX_HEADS, 128), jnp.float32)
    moved = jnp.zeros((size.kept, len(dataclasses.fields(Moved))), jnp.int32)
    return Carry(first_state(config, jax.random.key(3)), jnp.int32(1), jnp.float32(0), queries, moved, jnp.int32(0))


# ---- a layer with its state ------------------------------------------------------------------------------------------


class Layer:
    """One way of one size: its program, its state, and where in time it is."""

    def __init__(self, size: Size, way: str, host_pool: Any, fixed: Fixed, directions: Directions, compiled: Future):
        self.size, self.config = size, size.config(way)
        self.host_pool, self.fixed, self.directions = host_pool, fixed, directions
        self.compiled: Any = compiled.result()
        self.begin()

    def begin(self) -> None:
        made = jax.jit(functools.partial(first_carry, self.size, self.config))()
        self.carry = jax.device_put(made, jax.devices()[0])
        self.time = 0

    def prepare(self, fresh: float) -> None:
        """Queries of the next steps, where those before lay."""
        self.carry = with_queries(self.carry, self.directions, jnp.float32(fresh), jnp.int32(self.time))
        jax.block_until_ready(self.carry)

    def call(self) -> None:
        self.carry = self.compiled(self.carry, self.host_pool, self.fixed)
        self.time += self.size.steps

    def run(self, fresh: float, calls: int = CALLS) -> tuple[float, Moved]:
        """Microseconds a step of `calls` <= CALLS calls that follow each other without a wait, and what moved in each
        step."""
        self.prepare(fresh)
        started = time.perf_counter()
        for _ in range(calls):
            self.call()
        jax.block_until_ready(self.carry)
        elapsed = (time.perf_counter() - started) * 1e6
        steps = calls * self.size.steps
        return elapsed / steps, Moved(*jax.device_get(self.carry.moved)[:steps].T)

    def turn_over(self, fresh: float, steps: int) -> None:
        for _ in range(-(-steps // (CALLS * self.size.steps))):
            self.run(fresh)


@functools.partial(jax.jit, static_argnames="config")
def first_state(config: CacheConfig, key: jax.Array) -> LayerState:
    rows = config.host_rows
    codes, scales = quantise_key(jax.random.normal(key, (config.pages, PAGE, 128)))
    scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    keys = jnp.concatenate([codes.reshape(config.pages, -1), scales.reshape(config.pages, -1)], axis=1)
    if config.offload:
        records = jnp.zeros((config.pool_rows, *config.records.shape), config.records.dtype)
    else:
        records = jnp.take(distinct_records(config), jnp.arange(rows) % DISTINCT, axis=0)
    return LayerState(
        slots=pool.initial(rows, config.device_slots) if config.offload else None,
        records=records,
        index_keys=keys,
        threshold=threshold.initial(config.threshold, config.seats),
    )


def distinct_records(config: CacheConfig) -> jax.Array:
    return config.records.encode(jax.random.normal(jax.random.key(5), (DISTINCT, LATENT + ROPE)))


def filled_host_pool(config: CacheConfig) -> jax.Array:
    """The same records as the resident pool's, row by row."""
    device = jax.devices()[0]
    memory = hostmem.choose(device.platform, "auto")
    host_pool = hostmem.create_pool((1, config.host_rows, *config.records.shape), config.records.dtype, memory, device)
    write = jax.jit(hostmem.write_back, donate_argnums=0, out_shardings=host_pool.sharding)
    together = min(65_536, config.host_rows)
    records = jnp.tile(distinct_records(config), (-(-together // DISTINCT), 1))[None, :together]
    for first in range(0, config.host_rows, together):  # both are multiples of DISTINCT, or there is one piece
        rows = first + jnp.arange(together, dtype=jnp.int32)
        host_pool = write(host_pool, records, jnp.where(rows < config.host_rows, rows, -1))
    return jax.block_until_ready(host_pool)


def arrays(size: Size) -> tuple[Fixed, Directions]:
    seats, context = size.seats, size.context
    names = jax.random.split(jax.random.key(1), 7)
    rows = jnp.arange(seats * context, dtype=jnp.int32).reshape(seats, context)
    length = jnp.full((seats,), context - 1, jnp.int32)
    view = StepView(rows, length, length[:, None], rows[:, -1:], length[:, None] + 1, jnp.int32(0))
    fixed = Fixed(
        view,
        jax.random.normal(names[0], (seats, 1, HEADS, LATENT + ROPE), jnp.bfloat16),
        jax.random.normal(names[1], (seats, 1, LATENT + ROPE)),
        jnp.abs(jax.random.normal(names[2], (seats, 1, INDEX_HEADS))),
        jax.random.normal(names[3], (seats, 1, 128)),
    )
    directions = Directions(*(jax.random.normal(name, (seats, 1, INDEX_HEADS, 128)) for name in names[4:]))
    return jax.device_put((fixed, directions), jax.devices()[0])


class Bench:
    """Layers of several sizes and ways; programs are compiled by threads, as soon as it is known that they are due."""

    def __init__(self, jobs: list[tuple[Size, str, bool]]):
        self.threads = ThreadPoolExecutor(8)
        self.shared: dict[Size, tuple[Any, Fixed, Directions]] = {}
        for size in dict.fromkeys(size for size, _, _ in jobs):
            self.shared[size] = (filled_host_pool(size.config("fused")), *arrays(size))
        self.programs = {job: self.threads.submit(self.compile, *job) for job in jobs}

    def compile(self, size: Size, way: str, is_timeline: bool) -> Any:
        config = size.config(way)
        host_pool, fixed, _ = self.shared[size]
        carry = jax.eval_shape(functools.partial(first_carry, size, config))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        carry = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), carry)
        lowered = program(config, size.steps).lower(carry, host_pool if config.offload else None, fixed)
        return lowered.compile(compiler_options=NO_GRAPHS if is_timeline else COMPILER_OPTIONS)

    def layer(self, size: Size, way: str, is_timeline: bool = False) -> Layer:
        host_pool, fixed, directions = self.shared[size]
        host_pool = None if way == "resident" else host_pool
        return Layer(size, way, host_pool, fixed, directions, self.programs[size, way, is_timeline])


# ---- measuring -------------------------------------------------------------------------------------------------------


def shares(*moved: Moved) -> dict[str, float]:
    """Hit rate, and rows a step that were staged, useful and recalled."""
    each = {name: float(np.mean([getattr(one, name) for one in moved])) for name in vars(moved[0])}
    missing = each["useful"] + each["recalled"]
    names = ("staged", "useful", "recalled", "evicted")
    return dict(hit=each["hits"] / (each["hits"] + missing), **{name: each[name] for name in names})


def calibrate(layer: Layer, wanted: float, steps: int) -> float:
    """The weight of the fresh direction at which the hit rate is `wanted`, within 0.002."""
    low, high = 0.0, 2.0  # nothing new but the turning part; hardly anything old
    fresh = 0.1
    for _ in range(10):
        layer.turn_over(fresh, steps)
        hit = shares(layer.run(fresh)[1])["hit"]
        print(f"  fresh directions of weight {fresh:.4f}: hit rate {hit:.4f}", flush=True)
        if abs(hit - wanted) < 0.002:
            break
        low, high = (fresh, high) if hit > wanted else (low, fresh)
        fresh = math.sqrt(max(low, 1e-3) * high)
    return fresh


def measure(layers: dict[str, Layer], fresh: float, steps: int, groups: int = 10):
    """Each way in turn, so that what drifts meets all of them: us a step, and what moved."""
    times: dict[str, list[float]] = {way: [] for way in layers}
    moved: dict[str, list[Moved]] = {way: [] for way in layers}
    for layer in layers.values():
        layer.turn_over(fresh, steps)
    for _ in range(groups):
        for way, layer in layers.items():
            elapsed, counts = layer.run(fresh)
            times[way].append(elapsed)
            moved[way].append(counts)
    return {way: summarise(each) for way, each in times.items()}, {way: shares(*each) for way, each in moved.items()}


def describe(share: dict[str, float]) -> str:
    rows = ", ".join(f"{name} {share[name]:.0f}" for name in ("staged", "useful", "recalled", "evicted"))
    return f"hit rate {share['hit']:.4f}; rows a step: {rows}"


METHOD = (
    "{steps} chained steps in one program, 8 calls without a wait, wall clock a step, median of 10, the ways in turn; "
    "no address changes from call to call; "
    "everything of `echo_layer` from given projections to attended values, without the write-back"
)


def record(size: Size, claim: str | None, name: str, value: Measurement | float, unit: str, notes: str, **fields: Any):
    fields.setdefault("method", METHOD.format(steps=size.steps))
    harness.record(
        claim,
        name="" if claim else name,
        value=value,
        unit=unit,
        file=FILE,
        shapes=size.shapes(),
        notes=notes,
        **fields,
    )


def layer(bench: Bench, size: Size = LAYER) -> float:
    """[E.layer_us], [E.layer_resident_us]; the weight of fresh directions that was found."""
    layers = {way: bench.layer(size, way) for way in WAYS}
    fresh = calibrate(layers["separate"], HIT, 96)
    times, share = measure(layers, fresh, 96)
    best = min(WAYS[1:], key=lambda way: times[way].median)
    for way in WAYS:
        claim = {"resident": "E.layer_resident_us", best: "E.layer_us"}.get(way)
        notes = f"prefetch {way}; {describe(share[way])}" if way != "resident" else "everything on the device"
        print(
            f"B {size.seats} {way:>9}: {times[way].median:7.1f} us [{times[way].p10:.1f} {times[way].p90:.1f}]  {notes}"
        )
        record(size, claim, f"attention part of a layer, B {size.seats}, {way}", times[way], "us", notes)
    return fresh


def light(bench: Bench, size: Size = LIGHT, fresh: float | None = None) -> None:
    """[D.light_load_us], and the first 16 steps from an empty pool."""
    layers = {way: bench.layer(size, way) for way in WAYS}
    for way, one in layers.items():  # the programs run once before anything is timed
        one.run(0.1, 1)
        one.begin()
        elapsed, moved = one.run(fresh or 0.1, 16 // size.steps)
        notes = describe(shares(moved)) if way != "resident" else ""
        print(f"B {size.seats} {way:>9}: the first 16 steps {elapsed:.1f} us each  {notes}", flush=True)
        name = f"attention part of a layer, B {size.seats}, {way}: the first 16 steps from an empty pool"
        record(size, None, name, elapsed, "us", notes, method="wall clock of the first 16 steps and one wait, over 16")
    if fresh is None:
        fresh = calibrate(layers["separate"], HIT, 256)
    times, share = measure(layers, fresh, 256)
    for way in WAYS:
        notes = f"prefetch {way}; {describe(share[way])}" if way != "resident" else "everything on the device"
        print(
            f"B {size.seats} {way:>9}: {times[way].median:7.1f} us [{times[way].p10:.1f} {times[way].p90:.1f}]  {notes}"
        )
        record(size, None, f"attention part of a layer, B {size.seats}, {way}", times[way], "us", notes)
    best = min(WAYS[1:], key=lambda way: times[way].median)
    ratio = times[best].median / times["resident"].median
    notes = f"prefetch {best}: {times[best].median:.1f} us over {times['resident'].median:.1f}; {describe(share[best])}"
    print(f"B {size.seats}: offloaded over resident {ratio:.3f} ({notes})", flush=True)
    record(size, "D.light_load_us", "", ratio, "ratio", notes)


def timeline(bench: Bench, size: Size, fresh: float) -> None:
    """The kernels of one step, in order; without graphs, one stream."""
    for way in TIMELINES:
        one = bench.layer(size, way, is_timeline=True)
        one.turn_over(fresh, 96)
        one.prepare(fresh)
        times = gpu_timing.kernel_times(lambda one=one: (one.call(), one.carry.at)[1], repeats=12)
        lines = [f"{each.median:6.1f}  {name}" for name, each in times.kernels if each.median >= 1]
        rest = [each.median for _, each in times.kernels if each.median < 1]
        print(
            f"B {size.seats} {way}: {times.total.median:.1f} us of kernels, {len(rest)} below 1 us ({sum(rest):.1f} us)"
        )
        print("\n".join(f"    {line}" for line in lines), flush=True)
        record(
            size,
            None,
            f"timeline of the attention part of a layer, B {size.seats}, {way}: sum of kernel times",
            times.total,
            "us",
            "; ".join(f"{name[:48]} {each.median:.1f}" for name, each in times.kernels if each.median >= 1)
            + f"; {len(rest)} more below 1 us: {sum(rest):.1f}",
            method="kernel times (CUPTI), median of 12 steps, no graph, L2 overwritten before each",
        )


def main(parts: list[str]) -> int:
    known = ("layer", "light", "timeline")
    if gpu_timing.refuses(known, parts):
        return 2
    parts = parts or list(known)
    steps = [dataclasses.replace(size, steps=1) for size in (LAYER, LIGHT)]
    jobs = [(size, way, False) for part, size in (("layer", LAYER), ("light", LIGHT)) if part in parts for way in WAYS]
    started = time.perf_counter()
    bench = Bench(jobs + [(step, way, True) for step in steps for way in TIMELINES if "timeline" in parts])
    fresh = None
    if "layer" in parts:
        fresh = layer(bench)
        print(f"layer: done after {time.perf_counter() - started:.0f} s", flush=True)
    if "light" in parts:
        light(bench, fresh=fresh)
        print(f"light: done after {time.perf_counter() - started:.0f} s", flush=True)
    if "timeline" in parts:
        for step in steps:
            timeline(bench, step, fresh or 0.1)
        print(f"timeline: done after {time.perf_counter() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
