"""A pass over one layer of a trace: every setting sees the same scores, generated and selected from once.

Knows how steps are strung together, in chunks, so that a pass shows progress and can be interrupted. What a step does
is in `step`; what its counts mean is in `summary`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.replay import step as step_lib
from echo_jax.replay.counts import Record, SharedRecord
from echo_jax.replay.rules import facts_of
from echo_jax.replay.settings import Plan
from echo_jax.replay.step import Ahead
from echo_jax.traces import ScoreSource
from echo_jax.types import NO_POSITION

CHUNK = 50
"""Steps of one compiled call."""

NEVER = -np.inf
"""Minus the step of a next use that never comes."""


class Counts(NamedTuple):
    """What a pass returns: every leaf of `shared` has axes [steps], every leaf of `each` [steps, Z]."""

    shared: SharedRecord
    each: Record


def run_layer(
    plan: Plan,
    source: ScoreSource,
    steps: int,
    *,
    chunk: int = CHUNK,
    progress: Callable[[int], None] = lambda steps: None,
) -> Counts:
    """Replays `steps` steps of one layer under all settings of the plan.

    Deterministic: the same plan and source give the same counts, whatever the chunk. `progress` is told how many steps
    were done since it was last called (a pass that sees ahead goes over the trace twice). ValueError for no steps.
    """
    if steps < 1:
        raise ValueError(f"a replay of {steps} steps has nothing to count; give a trace with at least 1 step")
    uses = next_uses(plan, source, steps, chunk, progress) if plan.sees_ahead else None
    carry = _start(plan, source)
    parts = []
    for first in range(0, steps, chunk):
        last = min(first + chunk, steps)
        ahead = None if uses is None else Ahead(*(_padded(use[first:last], chunk) for use in uses))
        with _one_compilation(plan):
            carry, records = _run_chunk(plan, source, carry, jnp.int32(first), jnp.int32(last), ahead, chunk)
        parts.append(jax.tree.map(lambda leaf, n=last - first: np.asarray(leaf[:n]), records))
        progress(last - first)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


_compiled: set[Plan] = set()
_compiling = threading.Lock()


@contextlib.contextmanager
def _one_compilation(plan: Plan) -> Iterator[None]:
    """Threads that run layers of one trace at once would each compile the same pass: all but the first wait for it."""
    if plan in _compiled:
        yield
        return
    with _compiling:
        yield
        _compiled.add(plan)


@functools.partial(jax.jit, static_argnums=0)
def _start(plan: Plan, source: ScoreSource) -> tuple[Any, Any]:
    return source.init(), step_lib.initial(plan)


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def _run_chunk(plan: Plan, source: ScoreSource, carry, first, last, ahead: Ahead | None, chunk: int):
    """Steps first..last - 1 (at most `chunk`), and their records in the first places of arrays of `chunk`.

    The bounds are values: one compilation serves the last, shorter chunk too, and every layer.
    """

    def one_step(carry, t):
        stream, states = carry
        stream, scores = source.step(stream, t)
        now = None if ahead is None else Ahead(*(use[t - first] for use in ahead))
        states, shared, each = step_lib.layer_step(plan, states, scores, t, now)
        return (stream, states), Counts(shared, each)

    shapes = jax.eval_shape(one_step, carry, first)[1]
    records = jax.tree.map(lambda leaf: jnp.zeros((chunk, *leaf.shape), leaf.dtype), shapes)

    def body(t, carried):
        carry, records = carried
        carry, record = one_step(carry, t)
        return carry, jax.tree.map(lambda all, one: all.at[t - first].set(one), records, record)

    return jax.lax.fori_loop(first, last, body, (carry, records))


def _padded(values: np.ndarray, chunk: int) -> jax.Array:
    missing = chunk - values.shape[0]
    return jnp.asarray(np.pad(values, ((0, missing), *[(0, 0)] * (values.ndim - 1))))


# ---- what later steps select -----------------------------------------------------------------------------


def next_uses(
    plan: Plan, source: ScoreSource, steps: int, chunk: int, progress: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Minus the step in which each row is selected next, -inf where it is not: f32[steps, R, K] of the selected rows
    and f32[steps, R] of the new ones. A row's uses end with its request."""
    stream, parts = _start(plan, source)[0], []
    for first in range(0, steps, chunk):
        last = min(first + chunk, steps)
        stream, found = _select_chunk(plan, source, stream, jnp.int32(first), jnp.int32(last), chunk)
        parts.append(jax.tree.map(lambda leaf, n=last - first: np.asarray(leaf[:n]), found))
        progress(last - first)
    exact, lengths, leaves = (np.concatenate(leaves) for leaves in zip(*parts, strict=True))

    requests = np.arange(plan.requests)
    upcoming = np.full((plan.requests, plan.positions + 1), NEVER, np.float32)  # the last place takes the padding
    selected = np.empty(exact.shape, np.float32)
    new = np.empty(lengths.shape, np.float32)
    for t in range(steps - 1, -1, -1):
        at = np.where(exact[t] == NO_POSITION, plan.positions, exact[t])
        new[t] = upcoming[requests, np.minimum(lengths[t], plan.positions)]
        selected[t] = np.take_along_axis(upcoming, at, axis=1)
        np.put_along_axis(upcoming, at, np.float32(-t), axis=1)
        upcoming[:, -1] = NEVER
        upcoming[leaves[t]] = NEVER
    return selected, new


@functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=2)
def _select_chunk(plan: Plan, source: ScoreSource, stream, first, last, chunk: int):
    """The exact sets i32[chunk, R, K], the lengths i32[chunk, R], and where an earlier request's rows end, bool."""

    def one_step(stream, t):
        stream, scores = source.step(stream, t)
        facts = facts_of(scores, t, plan.top_k)
        return stream, (facts.exact, scores.length, scores.starts | ~scores.active)

    shapes = jax.eval_shape(one_step, stream, first)[1]
    found = jax.tree.map(lambda leaf: jnp.zeros((chunk, *leaf.shape), leaf.dtype), shapes)

    def body(t, carried):
        stream, found = carried
        stream, one = one_step(stream, t)
        return stream, jax.tree.map(lambda all, one: all.at[t - first].set(one), found, one)

    return jax.lax.fori_loop(first, last, body, (stream, found))
