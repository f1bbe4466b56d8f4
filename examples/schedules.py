"""Schedules: when to score, move and attend, as values.

Knows stages, rounds, buffers and two engines. Does not know what a stage computes nor how long it takes.

A *schedule* says over what a pipeline runs (requests of a layer, bands of a context, layers of a step) and in which
round each stage takes an item: stage s takes item i in round i + lag(s). Stages of one round that do not wait for each
other may overlap; what a stage leaves for a later round stands in a buffer. Nothing else is in a schedule, so the same
value drives three things:

    run(schedule, count, stages, parts)          a scan over rounds, on any device; `unroll=True` for one captured graph
    timeline(schedule, count, durations)         when the last stage would end on a machine with two engines
    schedule.rounds(count)                       the order as a list, for whoever issues kernels by hand

A schedule decides when a row travels, never which rows are attended. `pipelining.py` proves that on real layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

REQUESTS, BANDS, LAYERS = "requests", "bands", "layers"
ENGINE = {"guess": "compute", "score": "compute", "attend": "compute", "prefetch": "link", "require": "link"}
"""Who does it. `prefetch` is a hint and may bring the wrong rows; `require` brings whatever is missing."""

USES = {
    "guess": (),
    "score": (),
    "prefetch": ("guess", "score"),
    "require": ("score", "prefetch"),
    "attend": ("score", "require"),
}
"""Whose results for an item a stage needs, of those that a schedule lists before it."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """over: what an item is. lags: (stage, rounds after an item's number), in the order in which results are used."""

    over: str
    lags: tuple[tuple[str, int], ...]

    def __post_init__(self):
        rounds = [lag for _, lag in self.lags]
        unknown = [name for name, _ in self.lags if name not in ENGINE]
        if self.over not in (REQUESTS, BANDS, LAYERS) or unknown or not rounds:
            raise ValueError(
                f"a schedule over {self.over!r} of {[name for name, _ in self.lags]} must run over {REQUESTS}, {BANDS} "
                f"or {LAYERS} and have stages among {', '.join(ENGINE)}"
            )
        if rounds != sorted(rounds):
            raise ValueError(f"lags {dict(self.lags)} fall: a stage would use what a later round makes; raise the lag")

    def rounds(self, count: int) -> list[list[tuple[str, int]]]:
        """(stage, item) of every round, in the order in which they are issued.

        A hint that nobody waits for in its round comes last: the link serves a promise first.
        """
        first, last = self.lags[0][1], self.lags[-1][1]
        in_order = [one for one in self.lags if not self._can_wait(*one)]
        in_order += [one for one in self.lags if self._can_wait(*one)]
        return [
            [(name, number - lag) for name, lag in in_order if 0 <= number - lag < count]
            for number in range(first, count + last)
        ]

    def uses(self, name: str) -> list[str]:
        """The stages whose results this one is given."""
        names = [one for one, _ in self.lags]
        return [earlier for earlier in names[: names.index(name)] if earlier in USES[name]]

    def _can_wait(self, name: str, lag: int) -> bool:
        later = self.lags[self.lags.index((name, lag)) + 1 :]
        return name == "prefetch" and all(other > lag for _, other in later)


DEPTH_0 = Schedule(REQUESTS, (("score", 0), ("require", 0), ("attend", 0)))
SCHEDULES = {
    # One after the other: what is missing is known after scoring and moves in the open.
    "depth 0": DEPTH_0,
    # The rows of one request move while the next is scored.
    "depth 1": Schedule(REQUESTS, (("score", 0), ("require", 1), ("attend", 1))),
    # ... and while the one before it is attended.
    "depth 2": Schedule(REQUESTS, (("score", 0), ("require", 1), ("attend", 2))),
    # A layer's set is guessed from the input of the layer before it, and moves while that layer computes.
    "cross-layer": Schedule(LAYERS, (("guess", -1), ("prefetch", -1), ("score", 0), ("require", 0), ("attend", 0))),
    # ECHO: what scores above the predicted k-th score in one band of the context moves while the next band is scored.
    "band": Schedule(BANDS, (("score", 0), ("prefetch", 1))),
}

type Stage = Callable[[jax.Array, Mapping[str, Any], Mapping[str, Any]], tuple[Any, Any]]
"""(item i32[], the parts as the round began, results for this item of the stages it uses) -> (own part, its result).

A stage alone changes its own part; reading the others' as they were is what leaves stages of a round independent.
"""


def run(
    schedule: Schedule,
    count: int,
    stages: Mapping[str, Stage],
    parts: Mapping[str, Any],
    keep: Sequence[str] = ("attend",),
    unroll: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Takes items 0 .. count - 1 through the pipeline; the parts after it, and the results of the stages in `keep`,
    stacked by item.

    The rounds in which all stages are busy are one scan, whose carry holds the buffers: of each stage, its results of
    the last rounds, newest first, as many as the last stage lags behind. `unroll` leaves no loop.
    """
    lags = dict(schedule.lags)
    names, first, last = list(lags), schedule.lags[0][1], schedule.lags[-1][1]
    parts = {name: parts.get(name, ()) for name in names}

    def one_round(number, parts, buffers, busy):
        after, made = dict(parts), {}
        for name in names:
            if name in busy:
                given = {}
                for earlier in schedule.uses(name):
                    back = lags[name] - lags[earlier]
                    given[earlier] = buffers[earlier][back - 1] if back else made[earlier]
                after[name], made[name] = stages[name](jnp.asarray(number - lags[name], jnp.int32), parts, given)
        buffers = {name: (made.get(name), *buffers[name])[: last - lags[name]] for name in names}
        return after, buffers, {name: made[name] for name in keep if name in made}

    buffers: dict[str, tuple] = {name: () for name in names}
    filled: list[Any] = []
    # Rounds with every stage busy. Without a scan over them each number is a constant, by which XLA can pick an item.
    full = 0 if unroll else max(0, count - (last - first))
    for number, round_ in zip(range(first, count + last), schedule.rounds(count), strict=True):
        if full and number == last:

            def body(carry, number):
                parts, buffers = carry
                parts, buffers, kept = one_round(number, parts, buffers, names)
                return (parts, buffers), kept

            numbers = jnp.arange(last, last + full, dtype=jnp.int32)
            (parts, buffers), kept = lax.scan(body, (parts, buffers), numbers)
            filled.append(kept)
        elif not full or not last <= number < last + full:
            parts, buffers, kept = one_round(number, parts, buffers, [name for name, _ in round_])
            filled.append(jax.tree.map(lambda leaf: leaf[None], kept))
    return parts, {
        name: jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[one[name] for one in filled if name in one])
        for name in keep
    }


def timeline(schedule: Schedule, count: int, durations: Mapping[str, Sequence[Any]]) -> Any:
    """When the last stage ends. durations[stage][item]: microseconds, numbers or arrays of one shape.

    An engine takes its stages in the order of `rounds`, each once what it uses is there; nothing is interrupted.
    """
    free: dict[str, Any] = {"compute": 0.0, "link": 0.0}
    done: dict[tuple[str, int], Any] = {}
    for round_ in schedule.rounds(count):
        for name, item in round_:
            begin = free[ENGINE[name]]
            for earlier in schedule.uses(name):
                begin = np.maximum(begin, done[earlier, item])
            free[ENGINE[name]] = done[name, item] = begin + durations[name][item]
    return np.maximum(free["compute"], free["link"])
