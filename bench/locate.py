"""echo_locate on an H200: what finding and fetching records adds to a look-up, and how near it comes to a plain gather.

    JAX_PLATFORMS=cuda,cpu python -m bench.locate [check] [bench]        (both: about a minute)

Clock: CUDA events around the replay of a graph of one call, launch included, the L2 overwritten before each call. Every
call looks up another list in another page table, and misses host rows that no call of the program read before; the
program that is timed runs on other tables than the one that warmed up. The look-up is the resident run's, as XLA
compiles it, on the same lists. It knows `locate` and the plain gather of plain_rows.cu, and nothing of a model.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "100")

import jax
import jax.numpy as jnp
import numpy as np

from bench import events, gpu_timing, harness, plain_rows
from echo_jax import hostmem, recall
from echo_jax.locate import locate
from echo_jax.types import NO_ROW, PAGE, Staging, Tables

FILE = "gpu_locate.jsonl"
REPEATS = gpu_timing.REPEATS
POSITIONS, TOP_K = 98_304, 2048
RECORD = (164,)  # u32: an FP8 record, 656 B
POOL_BYTES = 14 * 2**30
METHOD = (
    "CUDA events around graph replay, launch included, L2 overwritten; another page table, list and layer in each call;"
    " look-up, gather and an empty graph in the same process"
)


@dataclasses.dataclass(frozen=True)
class Load:
    """Seats, and the rows that each call misses: of all seats together, or all of one seat's."""

    seats: int
    missing: int
    of_one_seat: bool = False


LOADS = {
    "b1_0": Load(1, 0),
    "b1_9": Load(1, 9),
    "b1_100": Load(1, 100),
    "b8_40": Load(8, 40),
    "b13_0": Load(13, 0),
    "b13_cold": Load(13, TOP_K - 1, of_one_seat=True),
    "b16_0": Load(16, 0),
    "b16_40": Load(16, 40),
    "b16_656": Load(16, 656),
    "b32_0": Load(32, 0),
    "b32_2078": Load(32, 2078),
}


@dataclasses.dataclass(frozen=True)
class Situation:
    """REPEATS calls' operands on the device; `rows` are the host rows that each call misses, for the gather."""

    tables: tuple[jax.Array, ...]  # i32[B, P // PAGE] each
    positions: tuple[jax.Array, ...]  # i32[B, 1, K] each
    slot_of: jax.Array  # i32[L, N_H]
    lengths: jax.Array  # i32[B]
    rows: tuple[jax.Array, ...]  # i32[missing] each
    device_slots: int
    missing: tuple[int, ...]  # counted, of each call


def situation(load: Load, layers: int, host_rows: int, seed: int) -> Situation:
    """Lists are uniform over the context, with the new token at their end. Call r asks layer r mod L through a page
    table of its own, so its missing rows are new to the link. A slot number may stand for several rows, which `locate`
    does not check."""
    draw = np.random.default_rng(seed)
    pages, device_slots = POSITIONS // PAGE, 4 * load.seats * TOP_K
    length = POSITIONS - 1
    slot_of = np.full((layers, host_rows), -1, np.int32)
    tables, lists, wanted = [], [], []
    for call in range(REPEATS):
        layer = call % layers
        table = draw.permutation(host_rows // PAGE)[: load.seats * pages].astype(np.int32).reshape(load.seats, pages)
        positions = np.sort(
            np.stack([draw.choice(length, TOP_K - 1, replace=False) for _ in range(load.seats)]), axis=1
        ).astype(np.int32)
        rows = np.take_along_axis(table, positions // PAGE, axis=1) * PAGE + positions % PAGE
        slot_of[layer, rows.reshape(-1)] = draw.integers(0, device_slots, rows.size)
        among = np.arange(rows.shape[1]) if load.of_one_seat else np.arange(rows.size)
        missing = np.sort(draw.choice(among, load.missing, replace=False))
        tables.append(table)
        lists.append(np.concatenate([positions, np.full((load.seats, 1), length, np.int32)], axis=1)[:, None])
        wanted.append((layer, rows, rows.reshape(-1)[missing]))
    for layer, _, missing in wanted:
        slot_of[layer, missing] = -1
    counted = [int((slot_of[layer, rows] < 0).sum()) for layer, rows, _ in wanted]
    return Situation(
        tables=tuple(map(jnp.asarray, tables)),
        positions=tuple(map(jnp.asarray, lists)),
        slot_of=jnp.asarray(slot_of),
        lengths=jnp.full((load.seats,), length, jnp.int32),
        rows=tuple(jnp.asarray(missing, jnp.int32) for _, _, missing in wanted),
        device_slots=device_slots,
        missing=tuple(counted),
    )


# ---- what is timed -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timed:
    """call(number, gate, carry, *operands) -> arrays. Each call's `gate` waits for its first event and its first result
    is what the second event waits for; `carry` is the first result of the call before, or None."""

    call: Callable[..., Any]
    gates: tuple[jax.Array, ...]
    operands: tuple[Any, ...]


def locating(given: Situation, pool: jax.Array) -> Timed:
    """`locate` with nothing prefetched, behind its lists of positions."""
    seats, layers = given.lengths.shape[0], pool.shape[0]

    def call(number: int, positions, _, tables, slot_of, lengths, counts, new, pool):
        of_step = Tables(tables[number], counts, counts > 1, lengths, lengths > 0)
        staging = Staging(
            jnp.full((seats, 0), NO_ROW, jnp.int32),
            jnp.zeros((seats, 0, *RECORD), jnp.uint32),
            jnp.zeros((seats,), jnp.int32),
        )
        lists = positions, new, staging, pool
        return locate(slot_of, number % layers, of_step, *lists, device_slots=given.device_slots)

    counts, new = jnp.ones((pool.shape[1] // PAGE,), jnp.int32), jnp.ones((seats, 1, *RECORD), jnp.uint32)
    return Timed(call, given.positions, (given.tables, given.slot_of, given.lengths, counts, new, pool))


def looking_up(given: Situation) -> Timed:
    """The resident run's look-up, slot = host row: XLA's gather from the table of rows."""
    offsets = jnp.arange(PAGE, dtype=jnp.int32)
    rows = [(table[:, :, None] * PAGE + offsets).reshape(table.shape[0], -1) for table in given.tables]

    def call(number: int, positions, _, rows):
        return recall.rows_at(rows[number], positions[:, 0])

    return Timed(call, given.positions, (tuple(rows),))


def gathering(given: Situation, pool: jax.Array) -> Timed:
    """A plain gather of the missing rows, behind their list."""
    count, layers = given.rows[0].shape[0], pool.shape[0]
    blocks = max(1, min(132, count // 32))

    def call(number: int, rows, carry, slots, records, pool):
        records = records if carry is None else carry
        return plain_rows.plain_gather(records, pool, jnp.int32(number % layers), rows, slots, blocks=blocks)

    slots, records = jnp.arange(count, dtype=jnp.int32), jnp.zeros((count, *RECORD), jnp.uint32)
    return Timed(call, given.rows, (slots, records, pool))


def nothing(given: Situation) -> Timed:
    """A kernel that does next to nothing: what a launch costs by this clock."""

    def call(number: int, lengths, _):
        return lengths + 1

    return Timed(call, (given.lengths,) * REPEATS, ())


def timed(make: Callable[[Situation], Timed], both: list[Situation]) -> harness.Measurement:
    """us of a call, of the second situation, after the program ran on the first one."""
    call = make(both[0]).call
    number = jnp.zeros((1,), jnp.uint32)

    def program(gates, operands):
        before, carry = number, None
        for index in range(REPEATS):
            zero = gpu_timing.overwrite(number, before)[:1] >> 31
            gate = events.record_event(gates[index] + zero[0].astype(jnp.int32), 2 * index)
            first = jax.tree.leaves(call(index, gate, carry, *operands))[0]
            carry = events.record_event(first, 2 * index + 1)
            before = carry.reshape(-1)[:1].astype(jnp.uint32)
        return before

    library = events.build()
    run = jax.jit(program, compiler_options=events.AS_GRAPH)
    for given in (both[0], both[0], both[1]):
        one = make(given)
        jax.block_until_ready(run(one.gates, one.operands))
    return harness.summarise([1e3 * float(library.BenchElapsed(2 * i, 2 * i + 1)) for i in range(REPEATS)])


@functools.cache
def pool_of(host_rows: int) -> jax.Array:
    layers = max(1, POOL_BYTES // (host_rows * 4 * RECORD[0]))
    shape = (layers, host_rows, *RECORD)
    return jax.block_until_ready(hostmem.create_pool(shape, jnp.uint32, hostmem.HostMemory.PINNED))


def measure() -> dict[str, dict[str, harness.Measurement]]:
    """us by load and by what is timed."""
    plain_rows.build()
    events.record_references(FILE)
    pool = pool_of(32 * POSITIONS)
    layers, host_rows = pool.shape[:2]
    print(f"host pool {list(pool.shape)} u32, {pool.nbytes / 2**30:.1f} GiB", flush=True)
    found: dict[str, dict[str, harness.Measurement]] = {}
    for name, load in LOADS.items():
        both = [situation(load, layers, host_rows, seed) for seed in (1, 2)]
        times = {"locate": timed(lambda given: locating(given, pool), both)}
        times |= {"lookup": timed(looking_up, both), "empty": timed(nothing, both)}
        if load.missing:
            times["gather"] = timed(lambda given: gathering(given, pool), both)
        found[name] = times
        missing = float(np.mean(both[1].missing))
        told = ", ".join(f"{what} {time.median:.1f} [{time.p10:.1f}, {time.p90:.1f}]" for what, time in times.items())
        print(f"{name:9} missing {missing:7.1f}  {told}", flush=True)
        for what, time in times.items():
            shapes = {"seats": load.seats, "positions": POSITIONS, "top_k": TOP_K, "missing": missing}
            shapes |= {"record_bytes": 4 * RECORD[0], "layers": layers, "host_rows": host_rows}
            harness.record(name=f"{what}, {name}", value=time, unit="us", shapes=shapes, file=FILE, method=METHOD)
    return found


def bench() -> None:
    """All loads, and the claims made of them."""
    found = {name: {what: time.median for what, time in times.items()} for name, times in measure().items()}

    def over_lookup(load: str) -> float:
        return found[load]["locate"] - found[load]["lookup"]

    many, none = found["b32_2078"], found["b32_0"]
    cold = found["b13_cold"]
    for claim, value, unit, notes in (
        ("L.locate_b1_us", over_lookup("b1_9"), "us", _parts(found["b1_9"])),
        ("L.locate_b16_us", over_lookup("b16_40"), "us", _parts(found["b16_40"])),
        ("L.locate_zero_us", over_lookup("b16_0"), "us", _parts(found["b16_0"])),
        (
            "L.locate_rate",
            (many["gather"] - many["empty"]) / (many["locate"] - none["locate"]),
            "ratio",
            f"gather less an empty graph, over locate less locate with nothing missing; {_parts(many)}",
        ),
        ("L.locate_cold_us", cold["locate"] - cold["gather"], "us", _parts(cold)),
    ):
        harness.record(claim, value=value, unit=unit, file=FILE, method=METHOD, notes=notes)
        print(f"{claim} {value:.3g} {unit}", flush=True)


def _parts(times: dict[str, float]) -> str:
    return ", ".join(f"{what} {time:.2f} us" for what, time in times.items())


def main() -> int:
    return gpu_timing.run_parts({"check": check, "bench": bench}, sys.argv[1:])


def check() -> None:
    """Every case of tests/locate_cases.py against the loops of the oracle."""
    from tests import locate_cases, test_locate

    differing = []
    for name, case in locate_cases.CASES.items():
        made = locate_cases.make(case, seed=5)
        try:
            test_locate.hold(made, case.device_slots, *test_locate.ask(made, case.device_slots, "cuda", "gpu"), name)
        except AssertionError as error:
            differing.append(f"{name}: {error}")
    harness.record(
        name="locate: cases that differ from the loops of the oracle",
        value=len(differing),
        unit="",
        file=FILE,
        method="places, and the records in every place that is named, compared by bits",
        shapes={"cases": len(locate_cases.CASES)},
    )
    print(f"check: {len(differing)} of {len(locate_cases.CASES)} cases differ", *differing, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
