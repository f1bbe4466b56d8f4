"""A schedule, or the fused kernel's order, as one program over the stages of `prefetch_stages`; and its arguments.

A program is (records of the pools and Output, Changing, Shared, layer) -> (the same after it, what must be kept), as
`prefetch_timing` takes them. Another form of it has the stages in turn, with an event before and after each.

It knows `schedules.run` and shapes. It does not know what is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench import prefetch_calls as calls
from bench import prefetch_timing as timing
from bench.prefetch_calls import HEADS, PAGE, WIDTH
from bench.prefetch_stages import FUSED, RECORDS, Changing, Line, Output, Own, Part, Shared, Sizes, Stages
from echo_jax.types import SlotMaps, Staging
from examples.schedules import BANDS, REQUESTS, SCHEDULES, Schedule, Stage, run
from pallas_kernels import indexer_prefetch

FINISH = "finish"  # what follows the bands: selection, require and attention of the whole batch
SMALL = 2**17  # values


def program(sizes: Sizes, line: Line, is_marked: bool = False) -> timing.Program:
    """((records of the items' pools, Output), Changing, Shared, layer) -> the same after a layer, or after all of a
    cross-layer schedule's. `is_marked`: every stage in turn, between two events."""
    schedule = in_turn(line.schedule) if is_marked else SCHEDULES.get(line.name, SCHEDULES["depth 0"])

    def one(state, changing: Changing, shared: Shared, layer):
        stages = Stages(sizes, schedule, changing.items, shared, layer)
        if line.name == FUSED:
            records, output, kept = _fused(stages, changing, state[0])
        elif schedule.over == BANDS:
            records, output, kept = _banded(stages, changing, state[0], line.count, is_marked)
        else:
            parts = stages.first_parts(changing.maps, state[0])
            parts, made = run(schedule, line.count, _asked(stages, is_marked), parts, unroll=True)
            records, output = tuple(one for one, _ in parts["require"].kept), made["attend"]
            kept = stages.left(parts)
        # Maps would be a step's state; here they are made anew for every call.
        return (records, output), kept

    return one


def in_turn(schedule: Schedule) -> Schedule:
    """The same stages, each round all of them."""
    return dataclasses.replace(schedule, lags=tuple((name, 0) for name, _ in schedule.lags))


def _banded(stages: Stages, changing: Changing, records: tuple[jax.Array, ...], count: int, is_marked: bool):
    parts = stages.first_parts(changing.maps, records)
    asked = _asked(stages, is_marked, parts["require"])  # bands only look into the maps of their common pool
    ahead, made = run(stages.schedule, count, asked, parts, keep=("score", "prefetch"), unroll=True)

    def finish(records, given):
        staging = given["prefetch"]
        scores = jnp.concatenate(list(given["score"]), axis=-1)
        # Whose place in staging is whose matters to nobody: slots are filled by row.
        staging = Staging(staging.rows.reshape(changing.whole.rows.shape[0], -1), staging.records, staging.refused[0])
        records, output, kept = stages.rest(changing.whole, changing.maps[0], records[0], scores, staging)
        return (records,), output, kept

    begin, end = marks_of(len(asked))
    if is_marked:
        records, made = timing.mark((records, made), number=begin)
    found = finish(records, made)
    records, output, kept = timing.mark(found, number=end) if is_marked else found
    return records, output, (kept, stages.left(ahead))


def _fused(stages: Stages, changing: Changing, records: tuple[jax.Array, ...]):
    """ECHO's order: scores and prefetch in one kernel, selection, require, attention."""
    sizes, shared, whole, maps = stages.sizes, stages.shared, changing.whole, changing.maps[0]
    found = indexer_prefetch(
        *(whole.query, whole.weights, shared.pages, whole.numbers, whole.visible, whole.threshold),
        *(whole.visible[:, 0], shared.cap, maps.slot_of, shared.pool, stages.layer),
        staging=sizes.staging,
        implementation=sizes.implementation,
    )
    staging = Staging(found.rows, found.records, found.refused)
    only, output, kept = stages.rest(whole, maps, records[0], lax.optimization_barrier(found.scores), staging)
    return (only,), output, kept


def _asked(stages: Stages, is_marked: bool, required: Own | None = None) -> dict[str, Stage]:
    found = stages.by_name(required)
    if not is_marked:
        return found
    return {name: between_marks(stage, number) for number, (name, stage) in enumerate(found.items())}


# ---- events ----------------------------------------------------------------------------------------------------------


def between_marks(stage: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The stage with an event before it and one after it. Of several items the last one's remain."""
    begin, end = marks_of(number)

    def marked(item, parts, given):
        words, given = _mark(({name: own.word for name, own in parts.items()}, given), (), begin)
        own, result = stage(item, {name: own._replace(word=words[name]) for name, own in parts.items()}, given)
        found, result = _mark((own.word, result), own, end)
        return own._replace(word=found), result

    return marked


def _mark(passed: Any, others: Any, number: int) -> Any:
    """`passed` once all is there, the event in between. What is large or also among the others is only waited for: to
    pass it on in place would be to copy it first."""
    leaves, tree = jax.tree.flatten(passed)
    shared = {id(leaf) for leaf in jax.tree.leaves(others)}
    is_passed = [leaf.size <= SMALL and id(leaf) not in shared for leaf in leaves]
    passed = [leaf for leaf, passes in zip(leaves, is_passed, strict=True) if passes]
    waited = [leaf for leaf, passes in zip(leaves, is_passed, strict=True) if not passes]
    marked = iter(timing.mark(passed, (waited, others), number))
    return jax.tree.unflatten(
        tree, [next(marked) if passes else leaf for leaf, passes in zip(leaves, is_passed, strict=True)]
    )


def names_of(line: Line) -> list[str]:
    """The stages between events, in the order of their numbers."""
    return [name for name, _ in line.schedule.lags] + ([FINISH] if line.over == BANDS else [])


def marks_of(number: int) -> tuple[int, int]:
    return timing.END + 1 + 2 * number, timing.END + 2 + 2 * number


# ---- arguments -------------------------------------------------------------------------------------------------------


def job_of(sizes: Sizes, line: Line, host_pool: Any, is_marked: bool = False) -> timing.Job:
    """The line's program, and arguments of which only shapes and types are known."""

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def part(seats: int, length: int) -> Part:
        query = array(seats, 1, HEADS, WIDTH, dtype=jnp.float8_e4m3fn)
        weights = array(seats, 1, HEADS, dtype=jnp.float32)
        others = array(seats, length // PAGE), array(seats, 1), array(seats, length)
        attending = array(seats, 1, sizes.heads, RECORDS.width, dtype=jnp.bfloat16)
        return Part(query, query, array(seats, dtype=jnp.float32), weights, *others, attending)

    def maps(seats: int) -> SlotMaps:
        slots = seats * calls.SLOTS
        return SlotMaps(array(sizes.host_rows), array(slots), array(slots), array(slots, dtype=bool))

    seats, pools = _seats_and_pools(sizes, line)
    length = sizes.length // (line.count if line.over == BANDS else 1)
    changing = Changing((part(seats, length),) * line.count, part(sizes.seats, sizes.length), (maps(seats),) * pools)
    pages = array(sizes.host_rows // PAGE, PAGE * (WIDTH + 4), dtype=jnp.uint8)
    return timing.Job(
        program(sizes, line, is_marked),
        jax.eval_shape(lambda: state_of(sizes, line)),
        changing,
        Shared(pages, host_pool, array(sizes.seats)),
    )


def _seats_and_pools(sizes: Sizes, line: Line) -> tuple[int, int]:
    """Requests of an item, and how many pools there are."""
    if line.over == REQUESTS:
        return sizes.seats // line.count, line.count
    return sizes.seats, 1 if line.over == BANDS else line.count


def state_of(sizes: Sizes, line: Line) -> tuple[tuple[jax.Array, ...], Output]:
    """Empty pools, and where the output of a call goes."""
    seats, pools = _seats_and_pools(sizes, line)
    outputs = 1 if line.over == BANDS else line.count
    return tuple(jnp.zeros((seats * calls.SLOTS, *RECORDS.shape), RECORDS.dtype) for _ in range(pools)), Output(
        jnp.zeros((outputs, seats, 1, calls.K), jnp.int32),
        jnp.zeros((outputs, seats, 1, sizes.heads, RECORDS.latent)),
        jnp.zeros((outputs, 3), jnp.int32),
    )
