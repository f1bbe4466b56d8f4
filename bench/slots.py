"""The slot manager on a GPU: are the library's maps those of jnp, and what do they cost a layer?

    JAX_PLATFORMS=cuda,cpu python -m bench.slots [check] [bench]        (about 15 and 25 s on an H200)

It knows pool.allocate, recall.plan and the histories of tests/slot_histories.py. Every layer that is
timed has maps of its own, as in a decode step, and the L2 is overwritten before the first, so none finds them there.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.gpu_timing import KernelTimes, kernel_times
from bench.harness import Measurement, record, summarise
from echo_jax import _ffi, eviction, pool, recall, threshold
from echo_jax.config import CacheConfig
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.types import NO_ROW, SlotMaps
from tests import slot_histories
from tests.slot_histories import Case

FILE = "slots.jsonl"
CLUSTERS = (8, 16)
LAYERS = 3
STEPS = 8  # in one call, where a layer is timed among layers
TOP_K = 2048

# ---- check -----------------------------------------------------------------------------------------------------------

# Sizes of real pools. Few missing rows are settled by a guess; many, or few after a bad guess, by a radix select.
# Cases of one shape share what is compiled.
CHECKED = (
    Case("decode", 2_097_152, 200_000, 16, 2049, 1, staged=1024, fresh=0.001, warm=1.0, releases=0.2, steps=6),
    Case("cold", 2_097_152, 200_000, 16, 2049, 1, staged=1024, fresh=0.9, releases=0.0, steps=3),
    Case("one_priority", 2_097_152, 200_000, 16, 2049, 1, staged=1024, fresh=0.02, warm=1.0, priorities="one", steps=4),
    Case("shared", 2_097_152, 200_000, 16, 2049, 1, staged=1024, different=2500, fresh=0.02, warm=1.0, steps=4),
    Case("exactly_full", 2_097_152, 65_568, 32, 2049, 1, staged=2048, fresh=0.5, warm=1.0, releases=0.0, steps=3),
    Case("largest", 8_388_608, 524_288, 32, 2049, 1, staged=4096, fresh=0.3, warm=1.0, releases=0.0, steps=3),
    Case("any_priority", 2_097_152, 300_000, 16, 2049, 0, fresh=0.02, warm=0.99, priorities="any", steps=4),
    Case(
        "bad_guess",
        2_097_152,
        65_568,
        32,
        2049,
        1,
        staged=64,
        different=65_000,
        fresh=0.0005,
        warm=1.0,
        steps=3,
        releases=0.0,
    ),
    Case("batch_of_one", 262_144, 65_536, 1, 2049, 1, staged=256, fresh=0.003, warm=1.0, releases=0.0, steps=6),
)


@functools.cache
def specified_by_jnp(per_seat: int, new_per_seat: int) -> Callable[..., Any]:
    sizes = {"per_seat": per_seat, "new_per_seat": new_per_seat}
    return jax.jit(functools.partial(pool.allocate, **sizes, implementation="jnp"))


@functools.cache
def forms_of_library(per_seat: int, new_per_seat: int) -> Callable[..., Any]:
    """pool.allocate by the library, all its forms in one program: either cluster."""

    def run(maps, rows, priority, staged):
        lists = rows, priority, staged, per_seat, new_per_seat
        return {f"{blocks} blocks": pool._allocate_by_library(maps, *lists, blocks=blocks) for blocks in CLUSTERS}

    return jax.jit(run)


@jax.jit
def differences(got, expected) -> list[jax.Array]:
    """Of every array: how many entries differ."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return [jnp.sum(ours != theirs, dtype=jnp.int32) for ours, theirs in pairs]


def describe(got, expected, counts) -> str:
    """Where the results part: the arrays in the order in which the kernel makes them, the first entries of each."""
    lines = []
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    for name, ours, theirs, count in zip(names, jax.tree.leaves(got), jax.tree.leaves(expected), counts, strict=True):
        if not count:
            continue
        ours, theirs = np.atleast_1d(np.asarray(ours)), np.atleast_1d(np.asarray(theirs))
        at = np.flatnonzero(ours != theirs)[:4]
        lines.append(f"{name}: {int(count)} differ, at {at.tolist()} {ours[at].tolist()} for {theirs[at].tolist()}")
    return "; ".join(lines)


def check() -> int:
    """The library, in all its forms, against jnp on the same device, over histories; how many lists differ."""
    device, failed, compared = jax.devices()[0], 0, 0
    release = {name: jax.jit(functools.partial(pool.release, implementation=name)) for name in ("ffi", "jnp")}
    for case in CHECKED:
        random = np.random.default_rng(len(case.name))
        maps = slot_histories.draw_maps(random, case)
        specified = specified_by_jnp(case.per_seat, case.new_per_seat)
        library = forms_of_library(case.per_seat, case.new_per_seat)
        missed = []
        for step in range(case.steps):
            rows = slot_histories.draw_rows(random, case, maps)
            priority = slot_histories.draw_priorities(random, case, step, len(rows))
            arguments = jax.device_put((maps, rows, priority, slot_histories.draw_staged(random, case, rows)), device)
            expected = specified(*arguments)
            allocation = expected[1]
            missed.append(int(allocation.useful + allocation.recalled + allocation.written))
            compared += 1
            for form, got in library(*arguments).items():
                counts = jax.device_get(differences(got, expected))
                compared += 1
                if any(counts):
                    failed += 1
                    where = describe(got, expected, counts)
                    print(f"  DIFFERS {case.name}, step {step}, {form}, {missed[-1]} missing: {where}")
            updated = expected[0]
            if random.random() < case.releases:
                dropped = jax.device_put(random.random(case.host_rows) < random.choice([0.02, 0.3]), device)
                expected = release["jnp"](updated, dropped)
                got = release["ffi"](updated, dropped)
                counts = jax.device_get(differences(got, expected))
                compared += 1
                if any(counts):
                    failed += 1
                    print(f"  DIFFERS {case.name}, step {step}, release: {describe(got, expected, counts)}")
                updated = expected
            maps = jax.device_get(updated)
        print(f"  {case.name:<14} missing {min(missed)} to {max(missed)} of {case.seats * case.per_seat}", flush=True)
    failed += check_side_by_side(CHECKED[0], device)
    print(f"check: {failed} of {compared} lists differ")
    record(
        name="slot manager: lists whose maps or fills differ from the jnp form",
        value=failed,
        unit="",
        file=FILE,
        method="CUDA against jnp on the same GPU, every array; clusters of 8 and 16 blocks",
        shapes={"cases": [case.name for case in CHECKED], "lists": compared},
    )
    return failed


def check_side_by_side(case: Case, device) -> int:
    """Four layers in one program, which XLA may run beside each other."""
    random = np.random.default_rng(0)
    every = [slot_histories.draw_maps(random, case) for _ in range(4)]
    lists = [slot_histories.draw_rows(random, case, maps) for maps in every]
    arguments = jax.device_put((every, lists), device)

    def all_layers(every, lists, implementation):
        allocate = functools.partial(pool.allocate, per_seat=case.per_seat, new_per_seat=1)
        return [
            allocate(maps, rows, rows, implementation=implementation) for maps, rows in zip(every, lists, strict=True)
        ]

    run = jax.jit(all_layers, static_argnames="implementation")
    expected = run(*arguments, implementation="jnp")
    failed = 0
    for _ in range(5):
        got = run(*arguments, implementation="ffi")
        counts = jax.device_get(differences(got, expected))
        if any(counts):
            failed += 1
            print(f"  DIFFERS four side by side: {describe(got, expected, counts)}")
    return failed


# ---- bench -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Load:
    """What one layer is asked for: `missing` selected rows that have no slot, beside a new row of each seat. `in_turn`:
    the slots used longest ago are neighbours, as LRU leaves them when it has gone round the pool."""

    name: str
    seats: int
    host_rows: int
    slots: int
    missing: int
    new: bool = True
    in_turn: bool = False


LOADS = (
    Load("300K slots, 40 missing", 16, 2_097_152, 300_000, 40),
    Load("200K slots, 40 missing", 16, 2_097_152, 200_000, 40),
    Load("B 16, new rows alone", 16, 2_097_152, 200_000, 0),
    Load("B 16, nothing at all", 16, 2_097_152, 200_000, 0, new=False),
    Load("B 1, new row alone", 1, 131_072, 65_536, 0),
    Load("B 1, nothing at all", 1, 131_072, 65_536, 0, new=False),
    Load("B 16, 1000 missing", 16, 2_097_152, 200_000, 1000),
    Load("B 16, 2000 missing", 16, 2_097_152, 200_000, 2000),
    Load("200K slots, 40 missing, in turn", 16, 2_097_152, 200_000, 40, in_turn=True),
    Load("B 32, 2078 missing", 32, 3_145_728, 196_608, 2078),  # as in bench.attention_layer
    Load("B 32, 2078 missing, in turn", 32, 3_145_728, 196_608, 2078, in_turn=True),
    Load("cold, everything missing", 16, 2_097_152, 200_000, 32_768),
)


@functools.cache
def full_maps(load: Load, layer: int) -> SlotMaps:
    """A pool in use to the last slot, its rows used up to 500 steps ago."""
    case = Case("full", load.host_rows, load.slots, 1, 1, warm=1.0, ages=500)
    maps = slot_histories.draw_maps(np.random.default_rng(layer), case)
    if not load.in_turn:
        return maps
    return maps.replace(priority=np.roll(np.sort(maps.priority), load.slots // 3))


@functools.partial(jax.jit, static_argnames=("load", "steps"))
def draw_lists(maps: SlotMaps, key: jax.Array, load: Load, steps: int) -> tuple[jax.Array, jax.Array]:
    """New rows i32[steps, B, 1] and selected rows i32[steps, B, K], different all of them: of the selected ones
    `missing` have no slot, others at each step; of the rest most were used lately, as in a decode."""
    of_slots, of_rows, of_places = jax.random.split(key, 3)
    wanted = load.seats * TOP_K
    late = jax.random.uniform(of_slots, (load.slots,)) + 0.01 * maps.priority.astype(jnp.float32)
    _, lately_used = jax.lax.top_k(late, wanted)
    draw = jnp.where(maps.slot_of < 0, jax.random.uniform(of_rows, (load.host_rows,)), -1.0)
    _, absent = jax.lax.top_k(draw, steps * (load.missing + load.seats))
    absent = absent.reshape(steps, -1)
    resident = maps.host_of[lately_used][: wanted - load.missing]
    selected = jnp.concatenate([jnp.tile(resident, (steps, 1)), absent[:, load.seats :]], axis=1)
    selected = selected[:, jax.random.permutation(of_places, wanted)].reshape(steps, load.seats, TOP_K)
    new = absent[:, : load.seats] if load.new else jnp.full((steps, load.seats), NO_ROW, jnp.int32)
    return new[:, :, None].astype(jnp.int32), selected.astype(jnp.int32)


def config_of(load: Load, slot_manager: str) -> CacheConfig:
    return CacheConfig(
        layer_kinds=("full",),
        records=RecordFormat("bf16", 512, 64),
        keys=KeyFormat("f32", 128),
        threshold=threshold.Ema(),
        eviction=eviction.Lru(),
        seats=load.seats,
        capacity=load.host_rows // load.seats // 64 * 64,
        host_rows=load.host_rows,
        device_slots=load.slots,
        top_k=TOP_K,
        slot_manager=slot_manager,
    )


class Layers:
    """Maps of some layers, stepped together in place so many times a call, each with lists of its own.

    All lists of `calls` calls are drawn before the first: a call finds every buffer where the one before it did, or XLA
    would record its graphs again.
    """

    def __init__(self, load: Load, step: Callable[..., Any], count: int, calls: int, steps: int = 1):
        self.load, self.step_of_layer, self.steps = load, step, steps
        maps = [jax.device_put(full_maps(load, layer)) for layer in range(count)]
        keys = jax.random.split(jax.random.key(0), count)
        drawn = [draw_lists(one, key, load, calls * steps) for one, key in zip(maps, keys, strict=True)]
        self.lists = jax.block_until_ready(drawn)
        self.state = maps, jax.device_put(jnp.int32(0))
        self.call = jax.jit(self._call, donate_argnums=0)

    def _step(self, state, lists):
        (maps, number), updated, counts, tie = state, [], None, jnp.int32(0)
        for one, (new, selected) in zip(maps, lists, strict=True):
            # A layer's list comes from the layer before it; nothing is evicted a negative number of times.
            one, allocation = self.step_of_layer(one, new[number], selected[number] + tie, number + 1)
            tie = jnp.minimum(allocation.evicted, 0)
            counts = allocation._replace(slots=None, fills=allocation.fills.count)
            updated.append(one)
        return (updated, number + 1), counts

    def _call(self, state, lists):
        """A loop in the program: handing the buffers over at each step would be what is timed."""

        def turn(_, carry):
            return self._step(carry[0], lists)

        return jax.lax.fori_loop(1, self.steps, turn, turn(0, (state, None)))

    def run(self):
        """One call; the counts of its last step and layer."""
        self.state, counts = self.call(self.state, self.lists)
        return counts


def step_of_kernel(load: Load, blocks: int):
    """The library's kernel and nothing else: every slot is given the step as priority."""

    def step(maps, new, selected, number):
        rows = jnp.concatenate([new, selected], axis=1).reshape(-1)
        return pool._allocate_by_library(maps, rows, number, jnp.zeros((0,), jnp.int32), TOP_K + 1, 1, blocks=blocks)

    return step


def step_of_plan(load: Load, slot_manager: str):
    """All of a layer's bookkeeping, from positions to fills, as `require` does it."""
    config = config_of(load, slot_manager)

    def step(maps, new, selected, number):
        # Positions are places in the list of rows, so that nothing but the look-up is left of the tables.
        view = recall.StepView(
            rows=selected,
            lengths=jnp.full((load.seats,), TOP_K, jnp.int32),
            positions=jnp.full((load.seats, 1), TOP_K, jnp.int32),
            new_rows=new,
            visible=jnp.full((load.seats, 1), TOP_K, jnp.int32),
            step=number,
        )
        at = jnp.broadcast_to(jnp.arange(TOP_K, dtype=jnp.int32), (load.seats, 1, TOP_K))
        scores = jnp.broadcast_to(number.astype(jnp.float32), at.shape)
        staged = jnp.full((load.seats, 0), NO_ROW, jnp.int32)
        return recall.plan(config, maps, view, at, scores, staged)

    return step


def time_of(times: KernelTimes, name: str, launch: int = 0) -> float:
    """us of the `launch`-th kernel whose name holds `name`; 0 where there is none, as no look is launched for a short
    list."""
    found = [time.median for kernel, time in times.kernels if name in kernel]
    return found[launch] if found else 0.0


def kernel_time_of(load: Load, blocks: int, calls: int = 10) -> tuple[Measurement, Measurement, Any]:
    """us of one call's look and of both its kernels, CUPTI, over LAYERS layers and some calls; the last counts."""
    layers, looks, both = Layers(load, step_of_kernel(load, blocks), LAYERS, calls + 2), [], []
    layers.run()
    for _ in range(calls):
        times = kernel_times(layers.run, repeats=1, sweep=True, warmup=0)
        for layer in range(LAYERS):
            looks.append(time_of(times, "LookKernel", layer))
            both.append(looks[-1] + time_of(times, "AllocateKernel", layer))
    return summarise(looks), summarise(both), jax.device_get(layers.run())


def layer_time(load: Load, step, few: int, many: int, calls: int = 30) -> tuple[Measurement, float]:
    """us of a layer among layers that wait for each other, launches and gaps included: a program of `many` of them less
    one of `few`, over the layers between, STEPS times in a call. The spread is the longer program's. And how much of a
    layer of that is kernels, by CUPTI."""
    medians, in_kernels = [], 0.0
    for count in (few, many):
        layers, durations = Layers(load, step, count, calls + 3, STEPS), []
        for index in range(calls + 2):
            started = time.perf_counter()
            jax.block_until_ready(layers.run())
            if index >= 2:
                durations.append((time.perf_counter() - started) * 1e6 / STEPS)
        medians.append(summarise(durations))
        in_kernels = kernel_times(layers.run, repeats=1, sweep=False, warmup=0).total.median / STEPS / count
    short, long = medians
    spread = (long.p10 - short.median, long.p90 - short.median)
    whole = Measurement(long.median - short.median, *spread, long.repeats)
    return whole.scaled(1 / (many - few)), in_kernels


def shapes_of(load: Load) -> dict[str, int]:
    missing = load.missing + (load.seats if load.new else 0)
    return {"seats": load.seats, "N_H": load.host_rows, "N_G": load.slots, "missing": missing}


def bench() -> None:
    print(f"{'kernels alone':<28}{'blocks':>7}{'us, both':>24}{'look':>8}   hits, to fill, evicted")
    claims = {("300K slots, 40 missing", 16): "B.alloc_free_us"}
    for load in LOADS:
        for blocks in CLUSTERS if load.missing <= 40 else CLUSTERS[-1:]:
            look, took, counts = kernel_time_of(load, blocks)
            column = f"{took.median:10.2f} [{took.p10:.1f}, {took.p90:.1f}]"
            last = f"{counts.hits}, {counts.fills}, {counts.evicted}"
            print(f"{load.name:<28}{blocks:>7}{column:>24}{look.median:8.2f}   {last}", flush=True)
            record(
                claims.get((load.name, blocks)),
                value=took,
                unit="us",
                file=FILE,
                name=f"slot manager: {load.name}, look and a cluster of {blocks}",
                shapes=shapes_of(load),
                method="CUPTI time of both kernels, not of the gap between them; layers with maps of their own, L2 "
                "overwritten before the first",
                notes=f"{counts.hits} hits, {counts.evicted} evicted by the last list; the look {look.median:.2f} us",
            )
    bench_bookkeeping(LOADS[1])
    bench_release()


def bench_bookkeeping(load: Load) -> None:
    for name, claim, (few, many) in (("ffi", "B.bookkeeping_us", (4, 16)), ("jnp", "B.jnp_manager_us", (1, 3))):
        whole, in_kernels = layer_time(load, step_of_plan(load, name), few, many)
        column = f"{whole.median:10.2f} [{whole.p10:.1f}, {whole.p90:.1f}]"
        print(f"recall.plan by {name:<28}{column} us a layer, {in_kernels:.2f} of it in kernels", flush=True)
        record(
            claim,
            value=whole,
            unit="us",
            file=FILE,
            shapes=shapes_of(load),
            method=f"recall.plan of {many} layers that wait for each other less that of {few}, over the layers "
            f"between, {STEPS} steps in one call, wall clock",
            notes=f"rows of positions, before_touch, the policy (LRU), allocate; {in_kernels:.2f} us in kernels",
        )


def bench_release() -> None:
    load = LOADS[1]
    maps = jax.device_put(full_maps(load, 0))
    dropped = jnp.arange(load.host_rows) < load.host_rows // load.seats
    run = jax.jit(functools.partial(pool.release, implementation="ffi"))
    times = kernel_times(run, maps, dropped)
    took = next(time for name, time in times.kernels if "ReleaseKernel" in name)
    print(f"{'release of one of 16 seats':<28}{took.median:10.2f} [{took.p10:.1f}, {took.p90:.1f}] us")
    record(
        None,
        value=took,
        unit="us",
        file=FILE,
        name="slot manager: release of one of 16 requests, one layer",
        shapes={"N_H": load.host_rows, "N_G": load.slots},
        method="CUPTI time of the kernel, L2 overwritten before each call",
    )


PARTS = {"check": check, "bench": bench}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := sorted(set(wanted) - set(PARTS)):
        sys.exit(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    if not _ffi.serves("slot manager", "cuda"):
        sys.exit("the slot manager cannot be called here")
    _ffi.register_for("cpu")
    failed = 0
    for name in wanted:
        started = time.perf_counter()
        failed += PARTS[name]() or 0
        print(f"{name} took {time.perf_counter() - started:.1f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
