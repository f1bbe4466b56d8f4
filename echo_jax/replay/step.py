"""One layer-step of a replay: the decoder's own integers, without a byte.

Selection is `indexer.select`, prediction `threshold`, the candidates `recall.prefetch_candidates`, the slots
`recall.plan` on the decoder's `SlotMaps`. What is added here are counts. Each setting has maps of its own; scores and
the exact top-k are shared by all.

Letters: `R` requests, `P` positions, `K` selected, `Z` settings of a group, `G` pools of a setting (1, or R where the
pool is split), `r = R / G` requests of a pool, `V = Z * G` pools of a group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax import pool, recall, threshold
from echo_jax.recall import StepView
from echo_jax.replay import counts
from echo_jax.replay.counts import Record, SharedRecord
from echo_jax.replay.rules import Choice, Facts, facts_of
from echo_jax.replay.settings import RESELECT_WINDOW, Group, Plan
from echo_jax.stats import Moved
from echo_jax.traces import StepScores
from echo_jax.types import NO_POSITION, NO_ROW, SlotMaps

LONG_AGO = -(2**30)
"""When a row that never lost a slot lost it."""


class GroupState(NamedTuple):
    """What one group carries from step to step."""

    maps: SlotMaps  # of every pool, leading axis V
    evicted_at: jax.Array  # i32[V, N_H]  the step in which a row last lost its slot
    thresholds: tuple[Any, ...]  # policy memories, one per setting
    cap: Any  # leading axis Z
    rule: Any  # one for the group: a rule sees no pool


class Ahead(NamedTuple):
    """What only a policy that sees ahead is told: minus the step of the next use, -inf for none."""

    selected: jax.Array  # f32[R, K]  of this step's selected rows
    new: jax.Array  # f32[R]  of this step's new row


def initial(plan: Plan) -> tuple[GroupState, ...]:
    """Empty pools, no history."""

    def one(group: Group) -> GroupState:
        copies, settings = len(group.settings) * group.pools, group.settings
        maps = pool.initial(group.config.host_rows, group.config.device_slots)
        maps = jax.tree.map(lambda leaf: jnp.tile(leaf[None], (copies, 1)), maps)
        cap = jax.tree.map(
            lambda leaf: jnp.tile(leaf[None], (len(settings), *[1] * leaf.ndim)), group.first.cap.init(plan.requests)
        )
        return GroupState(
            maps=maps,
            evicted_at=jnp.full((copies, group.config.host_rows), LONG_AGO, jnp.int32),
            thresholds=tuple(threshold.initial(setting.threshold, plan.requests) for setting in settings),
            cap=cap,
            rule=group.first.rule.init(plan.requests, plan.positions, plan.top_k),
        )

    return tuple(one(group) for group in plan.groups)


def _scores_at(score: jax.Array, positions: jax.Array) -> jax.Array:
    """f32[R, A]: -inf for NO_POSITION."""
    found = jnp.take_along_axis(score, jnp.maximum(positions, 0), axis=1)
    return jnp.where(positions == NO_POSITION, -jnp.inf, found)


def layer_step(
    plan: Plan, states: tuple[GroupState, ...], scores: StepScores, step: jax.Array, ahead: Ahead | None
) -> tuple[tuple[GroupState, ...], SharedRecord, Record]:
    """One step of all settings; the records' axis Z runs over `plan.settings`."""
    facts = facts_of(scores, step, plan.top_k)
    exact_scores = _scores_at(scores.score, facts.exact)
    updated, records = [], []
    for group, state in zip(plan.groups, states, strict=True):
        state, record = _group_step(plan, group, state, facts, exact_scores, ahead)
        updated.append(state)
        records.append(record)
    together = jax.tree.map(lambda *parts: jnp.concatenate(parts), *records)
    return tuple(updated), counts.shared_record(plan, facts), together


def _group_step(
    plan: Plan, group: Group, state: GroupState, facts: Facts, exact_scores: jax.Array, ahead: Ahead | None
) -> tuple[GroupState, Record]:
    scores, settings = facts.scores, group.settings
    is_informative = facts.visible > plan.top_k
    state = _begin_requests(plan, group, state, scores)
    rule_memory, choice = group.first.rule.choose(state.rule, facts)
    if choice.warm is not None:
        state = state._replace(maps=_warm(plan, group, state.maps, choice.warm, scores, facts.step))
    view = _views(plan, group, scores, choice.runs, facts.step)

    # Prediction. A policy that sees ahead learns the step's outcome first.
    predicted, thresholds = [], []
    for setting, memory in zip(settings, state.thresholds, strict=True):
        observed = threshold.observe(setting.threshold, memory, facts.kth_score[:, None], is_informative[:, None])
        knows = getattr(setting.threshold, "sees_ahead", False)
        predicted.append(threshold.predict(setting.threshold, observed if knows else memory, plan.requests))
        thresholds.append(observed if plan.kind == "full" else memory)
    predicted = jnp.stack(predicted)

    # Movement, as hint and as promise.
    is_old = jnp.arange(plan.positions, dtype=jnp.int32)[None] < jnp.where(choice.runs, scores.length, 0)[:, None]
    is_absent = is_old[None] & ~_is_resident(plan, group, state.maps, view)
    staged, refused = _stage(plan, group, state, facts, predicted, is_absent, choice)
    attended = jnp.where(choice.runs[:, None], choice.attended, NO_POSITION)
    values = exact_scores if choice.attended is facts.exact else _scores_at(scores.score, attended)
    if group.sees_ahead:
        assert ahead is not None
        values = ahead.selected
    maps, moved, useful, evicted_at, reselected = _require(
        plan, group, state, view, attended, values, staged, refused, facts.step
    )
    if group.sees_ahead:
        assert ahead is not None
        maps = _touch_new(plan, group, maps, view, ahead.new, facts.step)

    is_staged = staged != NO_POSITION
    cap = jax.vmap(group.first.cap.update)(state.cap, jnp.sum(is_staged, axis=-1, dtype=jnp.int32), useful)
    record = counts.record(plan, facts, predicted, is_old, moved, reselected, choice)
    return GroupState(maps, evicted_at, tuple(thresholds), cap, rule_memory), record


def _begin_requests(plan: Plan, group: Group, state: GroupState, scores: StepScores) -> GroupState:
    """A request that starts finds neither slots nor history of the one before it; one that ended leaves its slots."""

    def by_request(old, fresh):
        return jnp.where(scores.starts.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

    thresholds = tuple(
        jax.tree.map(by_request, memory, threshold.initial(setting.threshold, plan.requests))
        for setting, memory in zip(group.settings, state.thresholds, strict=True)
    )
    fresh_cap = group.first.cap.init(plan.requests)
    cap = jax.tree.map(lambda old, fresh: jax.vmap(lambda one: by_request(one, fresh))(old), state.cap, fresh_cap)

    def drop(maps: SlotMaps, evicted_at: jax.Array) -> tuple[SlotMaps, jax.Array]:
        leaves = (scores.starts | ~scores.active).reshape(group.pools, -1)
        rows = jnp.repeat(leaves, group.config.capacity, axis=1)  # [G, N_H]
        rows = jnp.tile(rows, (len(group.settings), 1))
        return jax.vmap(pool.release)(maps, rows), jnp.where(rows, LONG_AGO, evicted_at)

    changes = jnp.any(scores.starts | ~scores.active)
    maps, evicted_at = lax.cond(changes, drop, lambda *kept: kept, state.maps, state.evicted_at)
    return state._replace(maps=maps, evicted_at=evicted_at, thresholds=thresholds, cap=cap)


def _views(plan: Plan, group: Group, scores: StepScores, runs: jax.Array, step: jax.Array) -> StepView:
    """The tables of each of a setting's pools, leading axis G: request n of a pool owns rows n * capacity onwards."""
    seats, positions = group.config.seats, plan.positions
    rows = jnp.arange(seats, dtype=jnp.int32)[:, None] * group.config.capacity
    rows = jnp.tile((rows + jnp.arange(positions, dtype=jnp.int32)[None])[None], (group.pools, 1, 1))
    lengths = scores.length.reshape(group.pools, seats)
    writes = runs.reshape(group.pools, seats) & (lengths < positions)
    new_rows = jnp.where(writes, rows[:, :, 0] + lengths, NO_ROW)[..., None]
    return StepView(
        rows=rows,
        lengths=lengths,
        positions=lengths[..., None],
        new_rows=new_rows,
        visible=jnp.where(new_rows == NO_ROW, 0, lengths[..., None] + 1),
        step=jnp.broadcast_to(step, (group.pools,)),
    )


def _each_setting(group: Group, values: Any) -> Any:
    """[G, ...] -> [V, ...]: the same for every setting."""
    return jax.tree.map(lambda leaf: jnp.tile(leaf, (len(group.settings), *[1] * (leaf.ndim - 1))), values)


def _is_resident(plan: Plan, group: Group, maps: SlotMaps, view: StepView) -> jax.Array:
    """bool[Z, R, P]."""
    slots = jax.vmap(pool.lookup)(maps, _each_setting(group, view.rows))
    return (slots >= 0).reshape(len(group.settings), plan.requests, plan.positions)


def _stage(
    plan: Plan,
    group: Group,
    state: GroupState,
    facts: Facts,
    predicted: jax.Array,
    is_absent: jax.Array,
    choice: Choice,
) -> tuple[jax.Array, jax.Array]:
    """Positions copied ahead, i32[Z, R, S], and how many the cap refused, i32[Z, R]."""
    cap, count = group.first.cap, len(group.settings)
    none = jnp.zeros((count, plan.requests), jnp.int32)
    if choice.ahead is not None:
        listed = jnp.where(choice.runs[:, None], choice.ahead, NO_POSITION)
        at = jnp.broadcast_to(jnp.maximum(listed, 0)[None], (count, *listed.shape))
        absent = jnp.take_along_axis(is_absent, at, axis=2) & (listed != NO_POSITION)[None]
        return jnp.where(absent, listed[None], NO_POSITION), none
    if cap.rows == 0 or plan.kind != "full":
        return jnp.full((count, plan.requests, 0), NO_POSITION, jnp.int32), none

    def one_setting(memory, predicted, is_absent):
        passes = (facts.scores.score > predicted[:, None]) & is_absent
        candidates = jnp.sum(passes, axis=1, dtype=jnp.int32)
        allowed = jnp.clip(cap.allowed(memory, facts.scores.length, candidates), 0, cap.rows)
        return recall.prefetch_candidates(facts.scores.score[:, None], predicted, is_absent, allowed, cap.rows)

    return jax.vmap(one_setting)(state.cap, predicted, is_absent)


def _require(plan, group: Group, state: GroupState, view: StepView, attended, values, staged, refused, step):
    """The step's rows become resident. Returns maps, Moved, useful rows i32[Z, R], evicted_at and the early returns."""
    count, seats = len(group.settings), group.config.seats
    places = staged.shape[-1]

    def one_pool(maps, evicted_at, view, attended, values, staged):
        staged_rows = recall.rows_at(view.rows, staged)
        before = maps.host_of
        maps, made = recall.plan(group.config, maps, view, attended[:, None], values[:, None], staged_rows)
        fills = made.fills
        is_fill = fills.slots >= 0
        lost = jnp.where(is_fill, before[jnp.maximum(fills.slots, 0)], NO_ROW)
        lost = jnp.where(lost == fills.rows, NO_ROW, lost)
        is_new = is_fill & (fills.source >= 0) & (fills.source < seats)
        back = is_fill & ~is_new & (step - evicted_at[jnp.maximum(fills.rows, 0)] <= RESELECT_WINDOW)
        outside = jnp.where(lost == NO_ROW, evicted_at.shape[0], lost)
        evicted_at = evicted_at.at[outside].set(step, mode="drop")
        place = fills.source - seats
        from_seat = jnp.where(is_fill & (place >= 0), place // max(places, 1), seats)
        useful = jnp.zeros((seats,), jnp.int32).at[from_seat].add(1, mode="drop")
        sums = (made.hits, made.useful, made.recalled, made.evicted, made.written, jnp.sum(back, dtype=jnp.int32))
        return maps, evicted_at, useful, sums

    maps, evicted_at, useful, sums = jax.vmap(one_pool)(
        state.maps,
        state.evicted_at,
        _each_setting(group, view),
        _pooled(group, attended),
        _pooled(group, values),
        staged.reshape(count * group.pools, seats, places),
    )
    hits, taken, recalled, evicted, written, back = (
        jnp.sum(one.reshape(count, -1), axis=1, dtype=jnp.int32) for one in sums
    )
    moved = Moved(
        hits=hits,
        useful=taken,
        recalled=recalled,
        staged=jnp.sum(staged != NO_POSITION, axis=(1, 2), dtype=jnp.int32),
        refused=jnp.sum(refused, axis=1, dtype=jnp.int32),
        evicted=evicted,
        written=written,
    )
    return maps, moved, useful.reshape(count, -1), evicted_at, back


def _pooled(group: Group, values: jax.Array) -> jax.Array:
    """[R, ...] -> [V, r, ...]."""
    split = values.reshape(group.pools, group.config.seats, *values.shape[1:])
    return jnp.tile(split, (len(group.settings), *[1] * (split.ndim - 1)))


def _touch_new(plan, group: Group, maps: SlotMaps, view: StepView, next_use: jax.Array, step: jax.Array) -> SlotMaps:
    """Gives the new rows the priority that a policy which sees ahead wants for them; they are resident already."""

    def one_pool(maps, rows, next_use):
        rows = rows.reshape(-1)
        priority = group.config.eviction.touch(*pool.before_touch(maps, rows), step, next_use)
        return pool.allocate(maps, rows, priority)[0]

    return jax.vmap(one_pool)(maps, _each_setting(group, view.new_rows), _pooled(group, next_use))


def _warm(plan, group: Group, maps: SlotMaps, warm: jax.Array, scores: StepScores, step: jax.Array) -> SlotMaps:
    """Rows of a prompt's last windows become resident where a request starts, as prefill's warm-up does; one window
    after the other, so that a pool that cannot hold them all keeps the last."""
    listed = _pooled(group, jnp.where(scores.starts[:, None, None], warm, NO_POSITION))  # [V, r, W, A]
    windows = warm.shape[1]

    def one_window(window, maps: SlotMaps) -> SlotMaps:
        def one_pool(maps, positions):
            seats = jnp.arange(group.config.seats, dtype=jnp.int32)[:, None] * group.config.capacity
            rows = jnp.where(positions == NO_POSITION, NO_ROW, seats + positions).reshape(-1)
            worth = jnp.zeros(rows.shape, jnp.float32)
            earlier = step - windows + window
            priority = group.config.eviction.touch(*pool.before_touch(maps, rows), earlier, worth)
            return pool.allocate(maps, rows, priority)[0]

        return jax.vmap(one_pool)(maps, lax.dynamic_index_in_dim(listed, window, axis=2, keepdims=False))

    def fill(maps: SlotMaps) -> SlotMaps:
        return lax.fori_loop(0, windows, one_window, maps)

    return lax.cond(jnp.any(scores.starts), fill, lambda kept: kept, maps)
