"""What the cache costs in a decode step on a GPU: bookkeeping, recall and write-back, without the model's maths.

    python -m bench.step [zero | step | shared | kernels | compile | rerecord] ...

zero     critical path that offloading adds to a layer when nothing is missing, over the resident step (B 1 and 16)
step     61 layers, 40 misses each, and the one write-back; graphs on and off; launches a step
shared   one full layer and three that share its list, 64 misses a seat: rows read ahead beside the maths, or not, in
         graphs whose branches run side by side and in graphs as XLA makes them by default
kernels  what a layer launches in both, how often and how long each takes
compile  a whole step of 61 layers of DeepSeek-V3.2, from trace to executable
rerecord buffers elsewhere than when the graph was recorded; a pool that was not committed to the device

Layers are chained as a model chains them: what a layer selects depends on what the layer before it was given. The
dependence is one addition, a kernel of its own, that both sides of a ratio pay.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_timing import kernel_times
from bench.harness import Measurement, record, summarise
from echo_jax import decode, hostmem, pool, recall
from echo_jax import layer as layer_lib
from echo_jax import state as state_lib
from echo_jax.config import COMPILER_OPTIONS, CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.models import dsa, presets
from echo_jax.recall import StepView
from echo_jax.threshold import Never
from echo_jax.types import PAGE, LayerState

FILE = "step.jsonl"
LAYERS, K = 61, 2048
STEPS = 16  # in one call
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
IN_LINE: dict[str, Any] = {}
"""Options of XLA's own choice: the kernels of a graph one after the other."""


def cache(
    seats: int, context: int, slots: int, offload: bool, kinds: tuple[str, ...] = ("full",) * LAYERS, **more: Any
) -> CacheConfig:
    """FP8 records; the rows of index keys are not touched here."""
    context = -(-context // PAGE) * PAGE
    return CacheConfig(
        layer_kinds=kinds,
        records=RecordFormat("fp8", 512, 64),
        keys=KeyFormat("fp8", 128),
        threshold=Never(),
        eviction=Lru(),
        seats=seats,
        capacity=context,
        host_rows=seats * context,
        device_slots=slots,
        top_k=K,
        offload=offload,
        **{"staging": 0, **more},
    )


def layer_states(config: CacheConfig, resident: np.ndarray) -> tuple[LayerState, ...]:
    """Pools whose first slots hold the host rows of the list, never used since step 0; without index keys."""
    rows = jnp.asarray(resident, jnp.int32)
    slots = jnp.arange(rows.shape[0], dtype=jnp.int32)

    @jax.jit
    def one() -> LayerState:
        records = jnp.zeros((config.pool_rows, *config.records.shape), config.records.dtype)
        if not config.offload:
            return LayerState(slots=None, records=records, index_keys=None, threshold=())
        maps = pool.initial(config.host_rows, config.device_slots)
        maps = maps.replace(
            slot_of=maps.slot_of.at[rows].set(slots),
            host_of=maps.host_of.at[slots].set(rows),
            priority=maps.priority.at[slots].set(0),
            free=maps.free.at[slots].set(False),
        )
        return LayerState(slots=maps, records=records, index_keys=None, threshold=())

    return tuple(jax.device_put(one(), jax.devices()[0]) for _ in range(config.num_layers))


def orders(config: CacheConfig) -> np.ndarray:
    """i32[B, P - 1]: in what order each seat's old positions come into its selected set."""
    generator = np.random.default_rng(0)
    return np.stack([generator.permutation(config.capacity - 1).astype(np.int32) for _ in range(config.seats)])


def lists(config: CacheConfig, misses: int, steps: int) -> np.ndarray:
    """i32[steps, B, K] ascending positions: windows of K that slide over `orders`; from one step to the next `misses`
    rows of all seats together are new."""
    seats, by_seat = config.seats, orders(config)
    chosen = np.empty((steps, seats, K), np.int32)
    for step in range(steps):
        for seat, order in enumerate(by_seat):
            moved = (step * misses * (seat + 1)) // seats - (step * misses * seat) // seats
            chosen[step, seat] = np.sort(order[(moved + np.arange(K)) % order.shape[0]])
    return chosen


def last_rows(config: CacheConfig) -> np.ndarray:
    """Host rows that fill the pool and are selected last of all: every miss evicts, and none of them is hit."""
    each = config.device_slots // config.seats
    at = orders(config)[:, -each:] + np.arange(config.seats, dtype=np.int32)[:, None] * config.capacity
    return at.reshape(-1)


def view_of(config: CacheConfig, step: jax.Array) -> StepView:
    """Every seat is full but for one position, which this step writes; rows lie seat after seat."""
    seats, context = config.seats, config.capacity
    rows = jnp.arange(seats * context, dtype=jnp.int32).reshape(seats, context)
    length = jnp.full((seats,), context - 1, jnp.int32)
    return StepView(rows, length, length[:, None], rows[:, -1:], length[:, None] + 1, step)


def products(after: jax.Array, operands: tuple[jax.Array, jax.Array]) -> jax.Array:
    """i32[]: 0, after a matrix product of 48 GFLOP that waits for `after`: some 60 us, in place of a layer's maths."""
    zeros, weights = operands
    made = (zeros + after.astype(zeros.dtype)) @ weights
    return jnp.max(jnp.abs(made)).astype(jnp.int32)


def one_step(config: CacheConfig, host_pool, layers, chosen, new_records, step, maths=None):
    """`require` in every layer, each waiting for the one before it, and one write-back; with `maths`, the operands of
    `products`, that comes first in every layer, so that what depends on no maths can run beside it. For shared layers
    rows may be read ahead once the full layer before them has its own."""
    view = view_of(config, step)
    scores = jnp.zeros(chosen.shape, jnp.float32)
    moved, after, ahead = [], jnp.int32(0), {}
    layers = list(layers)
    for index in range(config.num_layers):
        # As a selection leaves it: in memory. Else XLA would add in whatever reads it, where something of XLA's does.
        selected = jax.lax.optimization_barrier(chosen + (after if maths is None else products(after, maths)))
        if config.offload:
            staging = ahead.pop(index, recall.no_staging(config, config.seats))
            layers[index], slots, counts = recall.require(
                config,
                layers[index],
                host_pool,
                jnp.int32(index),
                view,
                new_records,
                selected,
                scores,
                staging,
            )
            if config.read_ahead and (sharers := config.sharers_of(index)):
                theirs = {number: layers[number] for number in sharers}
                ahead = recall.read_ahead(config, theirs, host_pool, view, selected, after=counts.recalled)
        else:
            layers[index], slots, counts = layer_lib.keep_resident(config, layers[index], view, new_records, selected)
        # 0, which only the result of this layer can tell: the next layer waits for its slots and for its records.
        word = layers[index].records.reshape(-1)[0].astype(jnp.int32)
        after = jnp.minimum(slots.reshape(-1)[0], 0) * (word | 1)
        moved.append(counts)
    if host_pool is not None:
        stacked = jnp.stack([new_records.reshape(-1, *config.records.shape)] * len(layers))
        host_pool, stacked, layers = jax.lax.optimization_barrier((host_pool, stacked, tuple(layers)))
        host_pool = hostmem.write_back(host_pool, stacked, view.new_rows.reshape(-1))
    return host_pool, tuple(layers), jax.tree.map(lambda *counts: jnp.stack(counts), *moved), step + 1


def initial(config: CacheConfig, is_full: bool) -> tuple[Any, tuple[LayerState, ...], jax.Array]:
    """Host pool, layers and clock before the first step; with `is_full`, the slots hold rows that are selected last."""
    device, host_pool = jax.devices()[0], None
    resident = last_rows(config) if is_full else np.zeros((0,), np.int32)
    if config.offload:
        memory = hostmem.choose("gpu" if device.platform == "gpu" else device.platform, "auto")
        shape = (config.num_layers, config.host_rows, *config.records.shape)
        host_pool = hostmem.create_pool(shape, config.records.dtype, memory, device)
    return host_pool, layer_states(config, resident), jax.device_put(jnp.int32(1), device)


def no_records(config: CacheConfig) -> jax.Array:
    zeros = jnp.zeros((config.seats, 1, *config.records.shape), config.records.dtype)
    return jax.device_put(zeros, jax.devices()[0])


@dataclasses.dataclass
class Stepper:
    """A compiled loop of steps and its state; compiled as a step is, where no options are given."""

    config: CacheConfig
    misses: int
    options: dict[str, Any] | None = None
    is_full: bool = False
    with_maths: bool = False
    period: int = 1024

    def __post_init__(self):
        config, device = self.config, jax.devices()[0]
        self.chosen = jax.device_put(lists(config, self.misses, self.period)[:, :, None], device)
        self.new = no_records(config)
        maths = None
        if self.with_maths:
            weights = jax.random.normal(jax.random.key(0), (4096, 2816), jnp.bfloat16)
            maths = jax.device_put((jnp.zeros((2048, 4096), jnp.bfloat16), weights), device)
        self.state = initial(config, self.is_full)
        self.taken = 0

        def step(state, chosen, number, new, maths):
            host_pool, layers, clock = state
            host_pool, layers, moved, clock = one_step(config, host_pool, layers, chosen[number], new, clock, maths)
            return (host_pool, layers, clock), moved

        def steps(state, chosen, first, new, maths):
            """A loop in the program: handing hundreds of buffers over at each step would be what is timed."""
            state, moved = step(state, chosen, first, new, maths)
            turn = lambda index, carry: step(carry[0], chosen, first + index, new, maths)  # noqa: E731
            return jax.lax.fori_loop(1, STEPS, turn, (state, moved))

        self.operands = (self.chosen, self.new, maths)
        arguments = (self.state, self.chosen, jnp.int32(0), self.new, maths)
        options = COMPILER_OPTIONS if self.options is None else self.options
        start = time.perf_counter()
        self.compiled = jax.jit(steps, donate_argnums=0).lower(*arguments).compile(compiler_options=options)
        self.compile_s = time.perf_counter() - start
        self.numbers = [jax.device_put(jnp.int32(number), device) for number in range(0, self.period, STEPS)]

    def run(self, loops: int = 1):
        """`loops` times STEPS steps; the counts of the last one."""
        moved = None
        for _ in range(loops):
            number = self.numbers[self.taken % len(self.numbers)]
            chosen, new, maths = self.operands
            self.state, moved = self.compiled(self.state, chosen, number, new, maths)
            self.taken += 1
        return jax.block_until_ready(moved)

    def time_us(self, repeats: int = 30) -> Measurement:
        """Microseconds a step, STEPS of them in one call."""
        self.run(4)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            self.run()
            times.append((time.perf_counter() - start) / STEPS * 1e6)
        return summarise(times)


def per_layer(time_us: Measurement, layers: int) -> Measurement:
    return Measurement(time_us.median / layers, time_us.p10 / layers, time_us.p90 / layers, time_us.repeats)


def zero() -> None:
    """Offloaded less resident, a layer, with every selected row in the pool: beside maths, and without any."""
    for seats, context, slots, claim in (
        (1, 16384, 8192, "B.added_zero_miss_us_b1"),
        (16, 4096, 40960, "B.added_zero_miss_us_b16"),
    ):
        for with_maths in (True, False):
            times = {}
            for offload in (True, False):
                config = cache(seats, context, slots, offload)
                stepper = Stepper(config, misses=0, with_maths=with_maths, period=STEPS)
                times[offload] = stepper.time_us()
                del stepper
            added = (times[True].median - times[False].median) / LAYERS
            beside = "beside maths" if with_maths else "alone"
            each = " and ".join(f"{times[offload].median / LAYERS:.2f}" for offload in (True, False))
            print(f"B {seats} {beside}: offloaded and resident {each} us a layer, {added:.2f} us added")
            record(
                claim if with_maths else None,
                name="" if with_maths else f"time added per layer at zero misses, B {seats}, without maths to hide in",
                value=added,
                unit="us",
                file=FILE,
                spread=((times[True].p10 - times[False].p90) / LAYERS, (times[True].p90 - times[False].p10) / LAYERS),
                repeats=times[True].repeats,
                shapes={"B": seats, "K": K, "N_G": slots, "N_H": seats * context, "layers": LAYERS}
                | {"record_bytes": 656, "maths": with_maths},
                method="61 chained layers, offloaded (bookkeeping, recall, write-back of the new rows) less resident "
                "(its scatter of the new rows), 16 steps in one call, divided by layers"
                + ("; a matrix product of 48 GFLOP in each layer before `require`" if with_maths else ""),
                notes=f"a layer {each} us, offloaded and resident",
            )


def step(context: int = 16384, misses: int = 40) -> None:
    """61 layers of bookkeeping, recall of 40 misses and the write-back, B 16."""
    for name, options in (("on", None), ("off", NO_GRAPHS)):
        config = cache(16, context, 65536, offload=True)
        stepper = Stepper(config, misses, options, is_full=True)
        measured = per_layer(stepper.time_us(), LAYERS)
        moved = stepper.run(1)
        recalled, evicted = np.asarray(moved.recalled).mean(), np.asarray(moved.evicted).mean()
        print(f"graphs {name}: {measured.median:.2f} us a layer; recalled {recalled:.1f}, evicted {evicted:.1f}")
        record(
            "B.step_us_per_layer" if name == "on" else None,
            name="" if name == "on" else "bookkeeping, recall of 40 misses and write-back, per layer of 61, graphs off",
            value=measured,
            unit="us",
            file=FILE,
            shapes={
                "B": 16,
                "K": K,
                "N_G": config.device_slots,
                "N_H": config.host_rows,
                "layers": LAYERS,
                "record_bytes": 656,
            },
            method="chained layers without maths, 16 steps in one call",
            notes=f"command buffers {name}; rows recalled a layer {recalled:.1f}, evicted {evicted:.1f}; "
            f"launches a step: {launches(stepper.compiled)}; compiled in {stepper.compile_s:.1f} s",
        )
        del stepper


def shared(seats: int = 32, context: int = 98_304, misses_of_seat: int = 64) -> None:
    """GLM's pattern, a layer: rows of shared layers recalled by each, or read ahead beside the maths."""
    kinds = ("full", "shared", "shared", "shared")
    ahead = {"offload": True, "read_ahead": True, "staging": 2 * misses_of_seat}
    ways = {
        "resident": ({"offload": False}, None),
        "recalled": ({"offload": True}, None),
        "read ahead": (ahead, None),
        "read ahead, second stream": (ahead | {"prefetch_implementation": "second_stream"}, None),
        "recalled, a graph in line": ({"offload": True}, IN_LINE),
        "read ahead, a graph in line": (ahead, IN_LINE),
    }
    for way, (more, options) in ways.items():
        config = cache(seats, context, seats * 6144, kinds=kinds, **more)
        # Long enough that a row is out of the pool when it is selected again.
        stepper = Stepper(config, seats * misses_of_seat, options, is_full=True, with_maths=True, period=16 * STEPS)
        measured = per_layer(stepper.time_us(), len(kinds))
        counts = jax.tree.map(lambda each: np.asarray(each)[1:].mean(), stepper.run(1))
        notes = f"rows of a shared layer: staged {counts.staged:.0f}, useful {counts.useful:.0f}, recalled "
        notes += f"{counts.recalled:.0f}; launches a step: {launches(stepper.compiled)}"
        print(f"{way}: {measured.median:.1f} us a layer; {notes}", flush=True)
        record(
            None,
            name=f"one full layer and three that share its list, beside maths, a layer: {way}",
            value=measured,
            unit="us",
            file=FILE,
            shapes={"B": seats, "P": context, "K": K, "N_G": config.device_slots, "N_H": config.host_rows}
            | {"layers": len(kinds), "record_bytes": 656, "misses": seats * misses_of_seat},
            method="4 chained layers, in each a matrix product of 48 GFLOP before `require`, and one write-back; "
            "16 steps in one call, divided by layers",
            notes=notes,
        )
        del stepper


def kernels() -> None:
    """Printed, not recorded: where the time of `zero` and of `step` goes, in kernels and between them."""
    for seats, context, slots, misses, offload in (
        (1, 16384, 8192, 0, True),
        (1, 16384, 8192, 0, False),
        (16, 4096, 40960, 0, True),
        (16, 16384, 65536, 40, True),
    ):
        config = cache(seats, context, slots, offload)
        # Long enough that no call finds the rows of an earlier turn still there.
        stepper = Stepper(config, misses, is_full=misses > 0, period=STEPS * (64 if misses else 1))
        whole = stepper.time_us(10).median / LAYERS
        of_name: dict[str, list[float]] = {}
        for name, took in kernel_times(stepper.run, repeats=1, sweep=False, warmup=0).kernels:
            of_name.setdefault(re.sub(r"\(anonymous namespace\)::|void |echo_ffi::", "", name)[:40], []).append(
                took.median
            )
        per_layer_us = {name: sum(times) / LAYERS / STEPS for name, times in of_name.items()}
        print(
            f"B {seats}, {misses} misses, {'offloaded' if offload else 'resident'}: {whole:.2f} us a layer, "
            f"{sum(per_layer_us.values()):.2f} of it in kernels"
        )
        for name in sorted(of_name, key=lambda name: -per_layer_us[name])[:5]:
            times = of_name[name]
            print(
                f"  {name:<40} {len(times) / LAYERS / STEPS:5.2f} a layer, {np.median(times):7.2f} us each", flush=True
            )
        del stepper


def launches(compiled: Any) -> str:
    """What the executable launches, as XLA counts its own instructions: calls of the library, and other kernels."""
    text = compiled.as_text()
    calls = re.findall(r'custom_call_target="(echo_\w+)"', text)
    entry = text[text.index("ENTRY") :]
    fusions = len(re.findall(r"= \S+ fusion\(", entry))
    return f"{len(calls)} calls of the library, {fusions} fusions"


def compile_whole(layers: int = LAYERS) -> None:
    """DeepSeek-V3.2's own sizes, from shapes alone: no weight is made."""
    model = dataclasses.replace(presets.V32, layer_kinds=("full",) * layers, mlp_kinds=presets.V32.mlp_kinds[:layers])
    made = decode.cache_config(
        model, seats=16, capacity=65536, device_slots=65536, record_format="fp8", key_format="fp8"
    )
    config = decode.DecodeConfig(model, made)
    # Of a sharding without a mesh a shape forgets the memory kind (jax 0.11.2).
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    pinned = sharding.with_memory_kind("pinned_host")

    def shaped(tree, where=sharding):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree)

    params = shaped(
        jax.eval_shape(functools.partial(dsa.init_params, config=model, dtype="bfloat16"), jax.random.key(0))
    )
    empty = jax.eval_shape(lambda: state_lib.create(dataclasses.replace(made, host_memory="jnp")))
    state = shaped(empty).replace(host_pool=shaped(empty.host_pool, pinned))
    start = time.perf_counter()
    lowered = decode.decode_step.lower(params, state, shaped(jnp.zeros((16, 1), jnp.int32)), config=config)
    lowered_s = time.perf_counter() - start
    lowered.compile()
    elapsed = time.perf_counter() - start
    print(f"compiled {layers} layers of V3.2 in {elapsed:.1f} s, {lowered_s:.1f} s of it tracing and lowering")
    record(
        "B.compile_61_s" if layers == LAYERS else None,
        name="" if layers == LAYERS else f"compilation of a step of {layers} layers",
        value=elapsed,
        unit="s",
        file=FILE,
        shapes={"model": "DeepSeek-V3.2", "layers": layers, "B": 16, "P": 65536},
        method="trace, lower and compile, once, no compilation cache",
        notes=f"{lowered_s:.1f} s of it tracing and lowering; layers unrolled",
    )


def rerecord() -> None:
    """What it costs that buffers are elsewhere than when the graph was recorded; and a pool that nobody committed."""
    config = cache(1, 16384, 8192, offload=True)
    one = jax.jit(functools.partial(one_step, config), donate_argnums=(0, 1))
    states = [initial(config, is_full=False) for _ in range(2)]
    chosen, new = jax.device_put(lists(config, 0, 1)[0][:, None], jax.devices()[0]), no_records(config)

    def time_us(alternate: bool) -> Measurement:
        times = []
        for _ in range(33):
            start = time.perf_counter()
            for number in range(20):
                at = number % 2 if alternate else 0
                host_pool, layers, clock = states[at]
                host_pool, layers, _, clock = one(host_pool, layers, chosen, new, clock)
                states[at] = (host_pool, layers, clock)
            jax.block_until_ready(states)
            times.append((time.perf_counter() - start) / 20 * 1e6)
        return summarise(times[3:])

    shapes = {"B": 1, "K": K, "N_G": 8192, "layers": LAYERS, "record_bytes": 656}
    for name, alternate in (("one state", False), ("two states in turn", True)):
        measured = time_us(alternate)
        print(f"{name}: {measured.median:.0f} us a step of {LAYERS} layers without maths")
        record(
            name=f"a step of {LAYERS} layers without maths, {name}",
            value=measured,
            unit="us",
            file=FILE,
            shapes=shapes,
            method="20 donated calls streamed, wall clock a call; handing the buffers over included",
            notes="two states have their buffers in two places, so the graph is updated at every call"
            if alternate
            else "",
        )
    for state in states:
        for leaf in jax.tree.leaves(state):
            leaf.delete()
    _uncommitted()


def _uncommitted() -> None:
    """A recall of 2048 rows into a donated pool, timed over its first calls in a loop, as one would at first."""
    device = jax.devices()[0]
    shape = (1, 262144, 3, 192)
    host_pool = hostmem.create_pool(shape, jnp.bfloat16, hostmem.choose("gpu"), device)
    rows = jax.device_put(jnp.arange(0, 262144, 128, dtype=jnp.int32), device)
    slots = jax.device_put(jnp.arange(K, dtype=jnp.int32), device)
    none = jax.device_put(jnp.zeros((0, 3, 192), jnp.bfloat16), device)
    for name in ("committed", "uncommitted"):
        call = jax.jit(hostmem.recall, donate_argnums=0)
        zeros = jnp.zeros((65536, 3, 192), jnp.bfloat16)
        pool_records = jax.device_put(zeros, device) if name == "committed" else zeros
        arguments = (host_pool, 0, jnp.int32(K), rows, slots, jnp.full((K,), -1, jnp.int32), none, none)
        pool_records = jax.block_until_ready(call(pool_records, *arguments))
        times = []
        for _ in range(4):
            start = time.perf_counter()
            for _ in range(50):
                pool_records = call(pool_records, *arguments)
            jax.block_until_ready(pool_records)
            times.append((time.perf_counter() - start) / 50 * 1e6)
        programs, later = call._cache_size(), min(times[1:])  # pyright: ignore[reportAttributeAccessIssue]
        print(f"{name} pool: first 50 calls {times[0]:.0f} us each, later {later:.0f} us; compiled {programs} x")
        record(
            name=f"recall of 2,048 rows of 1,152 B into a donated, {name} pool: the first 50 calls after one",
            value=times[0],
            unit="us",
            file=FILE,
            shapes={"rows": K, "record_bytes": 1152, "N_G": 65536},
            method="wall clock of 50 streamed calls over 50",
            notes=f"later calls {later:.0f} us; the function was compiled {programs} times",
        )


PARTS: dict[str, Callable[[], None]] = {
    "zero": zero,
    "step": step,
    "shared": shared,
    "kernels": kernels,
    "compile": compile_whole,
    "rerecord": rerecord,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    for part in parser.parse_args().parts or list(PARTS):
        print(f"-- {part}")
        PARTS[part]()
