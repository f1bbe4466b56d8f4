"""Histories of requests against the oracles: admit, fork, fill, step, roll back, release, drop.

The machine drives the real state functions and a jitted step without a model: scores, thresholds and selections are
drawn, everything else (tables, prefetch, require, write-back, clock) is the library's. A record's bytes say which
request made it, for which layer and position, so that a row in the wrong place shows. After every operation the tables,
the maps of every layer, the predicted thresholds and the clock must equal the oracles' bit for bit, and the invariants
of the design hold.

Named histories of faults worth remembering stand at the end; they use the same machine, without drawing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from echo_jax import _ffi, eviction, hostmem, recall, threshold
from echo_jax import state as state_lib
from echo_jax.config import CacheConfig
from echo_jax.formats import KeyFormat, RecordFormat
from tests.oracles import counting, indexer
from tests.oracles.pool import OraclePool, check_maps
from tests.oracles.tables import OracleTables
from tests.oracles.threshold import EMA
from tests.oracles.words import NO_POSITION, NO_ROW, PAGE

SEATS, CAPACITY, K, T, STAGING, FILL = 3, 256, 5, 2, 6, 64
LEGAL = SEATS * T * (K + 1)
"""The fewest slots that serve every step: what all seats may protect at once."""

BASE = CacheConfig(
    layer_kinds=("full", "full"),
    records=RecordFormat("f32", 4, 2),
    keys=KeyFormat("f32", 4),
    threshold=threshold.Ema(),
    eviction=eviction.Lru(),
    seats=SEATS,
    capacity=CAPACITY,
    host_rows=8 * PAGE,
    device_slots=LEGAL,
    top_k=K,
    tokens_per_step=T,
    staging=STAGING,
    host_memory="jnp",
    slot_manager="jnp",
)

CONFIGS = {
    "ffi_barely_legal": dataclasses.replace(BASE, host_memory="ffi", slot_manager="ffi"),
    "jnp_few_pages_some_cap": dataclasses.replace(
        BASE, host_rows=6 * PAGE, device_slots=LEGAL + 7, eviction=eviction.Lfu(), prefetch_per_position=0.0625
    ),
    "ffi_ample_by_score": dataclasses.replace(
        BASE,
        host_memory="ffi",
        slot_manager="ffi",
        host_rows=10 * PAGE,
        device_slots=200,
        eviction=eviction.ScoreWeighted(bonus_steps=4),
    ),
}


# The step without a model


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def step(state, draw, *, config):
    """One step of T tokens a seat, in the order of `echo_layer`, with what a model would have computed in `draw`."""
    view = state_lib.begin_step(config, state)
    layers, shown = list(state.layers), []
    for number in range(config.num_layers):
        one = jax.tree.map(lambda leaf, number=number: leaf[number], draw)
        layer = layers[number]
        predicted = threshold.predict(config.threshold, layer.threshold, config.seats)
        used = jnp.where(one["use_prediction"], predicted, one["threshold"])
        index = jnp.int32(number)
        staging = recall.prefetch(config, layer, state.host_pool, index, view, one["score"], used)
        layer, slots, moved = recall.require(
            config, layer, state.host_pool, index, view, one["records"], one["selected"], one["selected_score"], staging
        )
        memory = threshold.observe(config.threshold, layer.threshold, one["kth_score"], view.visible > config.top_k)
        layers[number] = layer.replace(threshold=memory)
        shown.append({"slots": slots, "staged": staging.rows, "refused": staging.refused, "moved": moved})
    state = state_lib.finish_step(config, state, layers, list(draw["records"]), view)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *shown)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def fill(state, seat, count, records, *, config):
    """A chunk of a prompt, of up to FILL tokens, as prefill leaves it behind: rows on the host, no slots."""
    view = state_lib.view_of(config, state, FILL)
    is_wanted = (jnp.arange(config.seats)[:, None] == seat) & (jnp.arange(FILL)[None] < count)
    rows = jnp.where(is_wanted, view.new_rows, NO_ROW)
    written = jnp.sum(rows != NO_ROW, axis=1, dtype=jnp.int32)
    wide = jnp.broadcast_to(records[:, None], (config.num_layers, config.seats, *records.shape[1:]))
    return state_lib.close(config, state, state.layers, list(wide), rows.reshape(-1), written)


@functools.partial(jax.jit, static_argnames="config")
def everything(state, *, config):
    """The state's arrays in ordinary memory, the host pool row by row: what the tests look at, in one transfer."""
    all_rows = jnp.arange(config.host_rows, dtype=jnp.int32)
    host = jnp.stack([hostmem.read_rows(state.host_pool, layer, all_rows) for layer in range(config.num_layers)])
    memories = [layer.threshold for layer in state.layers]
    predicted = [threshold.predict(config.threshold, memory, config.seats) for memory in memories]
    slots, records = [layer.slots for layer in state.layers], [layer.records for layer in state.layers]
    return {
        "tables": state.tables, "slots": slots, "records": records, "host": host, "predicted": predicted,
        "step": state.step,
    }  # fmt: skip


def oracle_touch(policy):
    """The eviction policy said again for the oracle: one slot, Python's numbers."""

    def touch(priority, was_filled, when, score):
        match policy:
            case eviction.Lru():
                return when
            case eviction.Lfu():
                return 1 if was_filled else priority + 1
            case eviction.ScoreWeighted(bonus_steps=bonus):
                is_number = score == score
                return when + round(bonus / (1 + float(np.exp(-np.float64(score)))) if is_number else 0)
            case _:
                raise AssertionError(policy)

    return touch


def oracle_rebase(policy):
    """What a live priority becomes when the clock is set back by 2^30."""
    if isinstance(policy, eviction.Lfu):
        return lambda priority, shift: priority
    return lambda priority, shift: max(priority - shift, -(2**31) + 1)


class Cache:
    """The library's state and the oracles' view of it, driven together."""

    def __init__(self, config: CacheConfig):
        self.config = config
        self.layers = range(config.num_layers)
        self.state = state_lib.create(config)
        self.tables = OracleTables(config.seats, config.capacity, config.pages)
        self.pools = [OraclePool(config.host_rows, config.device_slots) for _ in self.layers]
        self.thresholds = [[EMA() for _ in range(config.seats)] for _ in self.layers]
        self.host = np.zeros((config.num_layers, config.host_rows, *config.records.shape), np.float32)
        self.when = 0
        self.writes = 0
        self.requests = 0
        self.request_of = [0] * config.seats
        self.seen = self._look()

    # Operations. Each does the same to both sides, or both refuse and nothing changes.

    def admit(self, seat, positions, shared=()):
        def on_oracle():
            self.tables.admit(seat, positions, shared)
            self._new_request(seat)

        return self._both(lambda: state_lib.admit(self.config, self.state, seat, positions, shared), on_oracle)

    def fork(self, parent, child, positions):
        def on_oracle():
            for source, target in self.tables.fork(parent, child, positions):
                self.host[:, target] = self.host[:, source]
            self._new_request(child)

        return self._both(lambda: state_lib.fork(self.config, self.state, parent, child, positions), on_oracle)

    def release(self, seat, keep_pages=False):
        return self._both(
            lambda: state_lib.release(self.config, self.state, seat, keep_pages),
            lambda: self._drop(self.tables.release(seat, keep_pages)),
        )

    def uncache(self, pages):
        return self._both(lambda: state_lib.uncache(self.config, self.state, pages), lambda: self.tables.uncache(pages))

    def rollback(self, lengths):
        def on_oracle():
            before, dropped = self.tables.lengths.copy(), []
            try:
                for seat in np.flatnonzero(np.asarray(lengths) != before):
                    dropped.extend(self.tables.rollback(int(seat), int(lengths[seat])))
            except ValueError:
                self.tables.lengths[:] = before  # all seats or none
                raise
            self._drop(dropped)

        return self._both(lambda: state_lib.rollback(self.config, self.state, lengths), on_oracle)

    def fill(self, seat, count):
        """Writes up to `count` positions of a seat, as many as it has room for."""
        count = min(count, FILL, self.room(seat))
        length = int(self.tables.lengths[seat])
        records = np.stack([self._records(layer, seat, length, FILL) for layer in self.layers])
        self.state = fill(self.state, np.int32(seat), np.int32(count), records, config=self.config)
        if count:
            rows = self.tables.append(seat, count)
            self.host[:, rows] = records[:, :count]
        self._tick()
        self.check()

    def step(self, choose, scores, thresholds, use_prediction, kth):
        """One decode step. choose(layer, seat, t, visible) -> positions; scores [L, B, T, P], thresholds [L, B], kth
        [L, B, T]: f32. use_prediction [L]: the EMA's value instead of the threshold given."""
        config, tables = self.config, self.tables
        lengths = tables.lengths.copy()
        fits = [min(T, self.room(seat)) if tables.active[seat] else 0 for seat in range(SEATS)]
        selected = np.full((config.num_layers, SEATS, T, K), NO_POSITION, np.int32)
        for layer in self.layers:
            for seat in range(SEATS):
                for t in range(fits[seat]):
                    positions = sorted(choose(layer, seat, t, int(lengths[seat]) + t + 1))
                    selected[layer, seat, t, : len(positions)] = positions
        selected_score = np.take_along_axis(scores, np.maximum(selected, 0), axis=-1)
        records = np.stack(
            [
                np.stack([self._records(layer, seat, int(lengths[seat]), T) for seat in range(SEATS)])
                for layer in self.layers
            ]
        )
        draw = {
            "score": scores, "threshold": thresholds, "use_prediction": np.asarray(use_prediction), "kth_score": kth,
            "selected": selected, "selected_score": selected_score, "records": records,
        }  # fmt: skip
        predicted = [[one.value() for one in seats] for seats in self.thresholds]
        self.state, shown = step(self.state, draw, config=config)
        shown = jax.device_get(shown)

        rows_of = [tables.rows_of(seat) for seat in range(SEATS)]
        new_rows = [tables.append(seat, fits[seat]) if fits[seat] else [] for seat in range(SEATS)]
        for layer in self.layers:
            used = predicted[layer] if use_prediction[layer] else thresholds[layer]
            self._expect_layer(layer, shown, scores, used, selected, selected_score, rows_of, new_rows)
            for seat in range(SEATS):
                for t in range(fits[seat]):
                    self.thresholds[layer][seat].observe(float(kth[layer, seat, t]), int(lengths[seat]) + t + 1, K)
        for seat in range(SEATS):
            for t, row in enumerate(new_rows[seat]):
                self.host[:, row] = records[:, seat, t]
        self._tick()
        self.check()
        self._expect_selected_bytes(selected, shown["slots"])
        return shown

    def _expect_layer(self, layer, shown, scores, used, selected, selected_score, rows_of, new_rows):
        """What one layer's prefetch and require had to do, from the oracles; their pools move on."""
        pool, config = self.pools[layer], self.config
        resident_before = frozenset(pool.slot_of)
        staged = []
        for seat in range(SEATS):
            rows = rows_of[seat]
            cap = config.cap(len(rows))
            resident = [row in pool.slot_of for row in rows]
            found = indexer.candidates_of_one(scores[layer, seat], used[seat], len(rows), resident, cap)
            staged.append([rows[position] for position in found.positions])
            padded = staged[seat] + [NO_ROW] * (STAGING - len(staged[seat]))
            assert shown["staged"][layer, seat].tolist() == padded, (layer, seat)
            assert shown["refused"][layer, seat] == found.refused
            assert len(staged[seat]) <= cap  # invariant 7
        lists, lists_of_scores = [], []
        for seat in range(SEATS):
            every_row = rows_of[seat] + new_rows[seat]
            positions = selected[layer, seat].reshape(-1).tolist()
            lists.append([NO_ROW if position == NO_POSITION else every_row[position] for position in positions])
            lists_of_scores.append(selected_score[layer, seat].reshape(-1).tolist())
        done = pool.require(lists, new_rows, self.when, oracle_touch(config.eviction), lists_of_scores)
        assert shown["slots"][layer].reshape(SEATS, -1).tolist() == done.slots

        counts = counting.count(
            counting.LayerStep(resident_before, lists, new_rows, staged), config.records.bytes_per_row
        )
        moved = {name: int(values[layer]) for name, values in dataclasses.asdict(shown["moved"]).items()}
        copies = sum(len(rows) for rows in staged)
        assert moved == {
            "hits": counts.hit, "useful": counts.useful, "recalled": counts.recall, "staged": copies,
            "refused": int(shown["refused"][layer].sum()), "evicted": len(done.evicted),
            "written": sum(len(rows) for rows in new_rows),
        }  # fmt: skip
        assert counts.wasted == copies - counts.useful <= config.staging * SEATS

    def _expect_selected_bytes(self, selected, slots):
        """Invariant 4: every selected row is resident, and its slot holds the record of that position."""
        for layer in self.layers:
            for seat in range(SEATS):
                chosen = selected[layer, seat] != NO_POSITION
                where, positions = slots[layer, seat][chosen], selected[layer, seat][chosen]
                assert (where >= 0).all() and (slots[layer, seat][~chosen] == -1).all()
                rows = [self.tables.row_of(seat, int(position)) for position in positions]
                got = np.asarray(self.seen["records"][layer])[where]
                np.testing.assert_array_equal(got.view(np.uint32), self.host[layer, rows].view(np.uint32))

    # Comparison.

    def check(self):
        """Tables, maps, records, thresholds and clock against the oracles; invariants 1, 2, 3, 5."""
        self.seen = seen = self._look()
        self.tables.check()
        for name in ("page_table", "page_count", "page_cached", "lengths", "active"):
            np.testing.assert_array_equal(getattr(seen["tables"], name), getattr(self.tables, name), err_msg=name)
        assert seen["step"] == self.when
        for layer, maps in enumerate(seen["slots"]):
            got = maps.slot_of, maps.host_of, maps.priority, maps.free
            check_maps(*got)
            for name, ours, expected in zip(
                ("slot_of", "host_of", "priority", "free"), got, self.pools[layer].maps(), strict=True
            ):
                np.testing.assert_array_equal(ours, expected, err_msg=f"layer {layer} {name}")
            slots = np.flatnonzero(~maps.free)
            rows = maps.host_of[slots]
            assert (self.tables.page_count[rows // PAGE] > 0).all()
            records, host = seen["records"][layer][slots], seen["host"][layer][rows]
            np.testing.assert_array_equal(records.view(np.uint32), host.view(np.uint32), err_msg=f"layer {layer}")
            expected = [one.value() for one in self.thresholds[layer]]
            np.testing.assert_array_equal(seen["predicted"][layer], expected, err_msg=f"layer {layer} threshold")
        # The host holds what was written, where nobody wrote nothing changed, whoever owns the page now.
        np.testing.assert_array_equal(seen["host"].view(np.uint32), self.host.view(np.uint32))

    def room(self, seat):
        return len(self.tables.pages_of(seat)) * PAGE - int(self.tables.lengths[seat])

    def set_clock(self, when):
        """As if so many steps had passed since the last one; nothing else changes."""
        device = next(iter(self.state.step.devices()))
        self.state = self.state.replace(step=jax.device_put(np.int32(when), device))
        self.when = when

    def _look(self):
        return jax.device_get(everything(self.state, config=self.config))

    def _both(self, ours, oracle):
        """True when both sides did it, False when both refused and nothing changed."""
        try:
            oracle()
            refusal = None
        except ValueError as error:
            refusal = error
        try:
            self.state = ours()
            assert refusal is None, f"only the oracle refused: {refusal}"
        except ValueError as error:
            assert refusal is not None, f"only the library refused: {error}"
        self.check()
        return refusal is None

    def _new_request(self, seat):
        self.requests += 1
        self.request_of[seat] = self.requests
        for layer in self.layers:
            self.thresholds[layer][seat].reset()

    def _drop(self, rows):
        for pool in self.pools:
            pool.release(rows)

    def _tick(self):
        self.writes += 1
        self.when += 1
        if self.when >= eviction.REBASE_AT:
            self.when -= eviction.REBASE_AT
            for pool in self.pools:
                pool.rebase(oracle_rebase(self.config.eviction), eviction.REBASE_AT)

    def _records(self, layer, seat, first, count):
        """[count, *record]: request, layer, position, and two numbers that no other record of this run has."""
        positions = np.arange(first, first + count)
        request = np.full(count, self.request_of[seat])
        made = np.full(count, self.writes)  # a position written again after a rollback is another record
        content = np.stack([request, np.full(count, layer + 1), positions, made, -positions, request * 1000 + layer], 1)
        return content.astype(np.float32).reshape(count, *self.config.records.shape)


# The machine


class PoolMachine(RuleBasedStateMachine):
    """Draws histories. A step's numbers come from one drawn seed: they are many, and their kind matters, not they."""

    config = BASE

    def __init__(self):
        super().__init__()
        self.cache = Cache(self.config)

    # Most draws make sense and a tenth are wild, so that refusals are met without drowning the rest. A seat is drawn as
    # a number and counted among the seats that fit.
    numbers = st.integers(0, SEATS - 1)
    wild = st.integers(0, 9).map(lambda number: number == 9)
    positions = st.sampled_from([64, 65, 100, 128, 129, 200, 256]) | st.integers(1, 260)

    def some_seat(self, number, wild, active=True):
        fitting = np.flatnonzero(self.cache.tables.active == active)
        return number if wild or len(fitting) == 0 else int(fitting[number % len(fitting)])

    @initialize(positions=st.sampled_from([130, 200, 256]), count=st.integers(1, FILL))
    def one_request_is_under_way(self, positions, count):
        self.cache.admit(0, positions)
        self.cache.fill(0, FILL)
        self.cache.fill(0, count)

    @precondition(lambda self: not self.cache.tables.active.all())
    @rule(number=numbers, positions=positions, share=st.booleans(), wild=wild)
    def admit(self, number, positions, share, wild):
        """With `share`, the longest run of full pages of another seat, or of cached ones, that leaves the request a
        page to itself; when wild, all of them."""
        tables, shared = self.cache.tables, []
        if share:
            owner = int(np.argmax(tables.lengths))
            shared = np.flatnonzero(tables.page_cached).tolist()
            shared = shared or tables.pages_of(owner)[: int(tables.lengths[owner]) // PAGE]
            shared = shared if wild else shared[: max(0, -(-positions // PAGE) - 1)]
        self.cache.admit(self.some_seat(number, wild, active=False), positions, shared)

    @precondition(lambda self: self.cache.tables.active.any() and not self.cache.tables.active.all())
    @rule(parent=numbers, child=numbers, more=st.sampled_from([1, 2, 20, 64, 100]), wild=wild)
    def fork(self, parent, child, more, wild):
        parent, child = self.some_seat(parent, False), self.some_seat(child, wild, active=False)
        length = int(self.cache.tables.lengths[parent])
        self.cache.fork(parent, child, max(1, length - 1) if wild else min(CAPACITY, length + more))

    @precondition(lambda self: self.cache.tables.active.any())
    @rule(number=numbers, keep_pages=st.booleans(), wild=wild)
    def release(self, number, keep_pages, wild):
        self.cache.release(self.some_seat(number, wild), keep_pages)

    @precondition(lambda self: self.cache.tables.page_cached.any())
    @rule(count=st.integers(0, 2), wild=wild)
    def uncache(self, count, wild):
        self.cache.uncache([*np.flatnonzero(self.cache.tables.page_cached).tolist()[:count], *([0] if wild else [])])

    @precondition(lambda self: self.cache.tables.active.any())
    @rule(drop=st.lists(st.sampled_from([0, 1, 2, 3, 70]), min_size=SEATS, max_size=SEATS), wild=wild)
    def rollback(self, drop, wild):
        lengths = self.cache.tables.lengths - np.array(drop, np.int32)
        self.cache.rollback(lengths if wild else np.maximum(lengths, 0))

    @precondition(lambda self: self.cache.tables.active.any())
    @rule(number=numbers, count=st.sampled_from([1, 30, FILL, FILL]))
    def fill(self, number, count):
        self.cache.fill(self.some_seat(number, False), count)

    @precondition(lambda self: self.cache.tables.active.any())
    @rule(seed=st.integers(0, 2**32 - 1), near=st.sampled_from([8, 40, CAPACITY]), times=st.integers(1, 4))
    def step(self, seed, near, times):
        for number in range(times):
            self.cache.step(**drawn_step(self.config, np.random.default_rng([seed, number]), near))

    @rule(before=st.integers(1, 3))
    def near_the_setting_back_of_the_clock(self, before):
        if self.cache.when < eviction.REBASE_AT - 3:
            self.cache.set_clock(eviction.REBASE_AT - before)

    @invariant()
    def nothing_was_compiled_twice(self):
        """One compilation serves every content, occupancy and length (invariant 8)."""
        configs = {*CONFIGS.values(), *HISTORY_CONFIGS.values()}
        operations: list[Any] = [step, fill, everything]
        for operation in operations:
            assert operation._cache_size() <= len(configs)


def drawn_step(config, random, near):
    """Selections among the first `near` positions or the newest ones, scores with oddities, thresholds good and bad."""

    def choose(layer, seat, t, visible):
        reach = np.unique(np.r_[np.arange(min(near, visible)), np.arange(max(0, visible - 3), visible)])
        count = min(K, len(reach)) if random.random() < 0.9 else random.integers(0, min(K, len(reach)) + 1)
        return random.choice(reach, count, replace=False).tolist()

    # Steps of a quarter, so that no bonus of the score-weighted policy lies at a half, where f32 and f64 might differ.
    scores = random.integers(-12, 13, (config.num_layers, SEATS, T, CAPACITY)).astype(np.float32) / 4
    odd = random.random(scores.shape) < 0.01
    scores = np.where(odd, random.choice([np.nan, np.inf, -np.inf, -0.0], scores.shape), scores).astype(np.float32)
    kinds = [np.inf, -np.inf, np.nan, 0.0, 2.0, 2.75, -1e30]
    kth = random.choice([*kinds[2:], 1.0, 0.5, -3.0], (config.num_layers, SEATS, T)).astype(np.float32)
    return {
        "choose": choose,
        "scores": scores,
        "thresholds": random.choice(kinds, (config.num_layers, SEATS)).astype(np.float32),
        "use_prediction": (random.random(config.num_layers) < 0.5),
        "kth": kth,
    }


def need_host_memory(config):
    reason = _ffi.why_unavailable("cpu") if config.host_memory == "ffi" else None
    if reason is not None:
        pytest.skip(reason)


def run_machine(name, **options):
    need_host_memory(CONFIGS[name])
    machine = type(name, (PoolMachine,), {"config": CONFIGS[name]})
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(machine, settings=settings(suppress_health_check=quiet, **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_random_histories(name):
    run_machine(name, max_examples=20, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CONFIGS)
def test_many_random_histories(name):
    run_machine(name, max_examples=400, stateful_step_count=60)


# Named histories

HISTORY_CONFIGS = {
    "ffi": CONFIGS["ffi_barely_legal"],
    "jnp": dataclasses.replace(CONFIGS["ffi_barely_legal"], host_memory="jnp", slot_manager="jnp"),
}


@pytest.fixture(params=HISTORY_CONFIGS)
def cache(request):
    """An empty cache whose pool is barely legal, in each kind of host memory."""
    need_host_memory(HISTORY_CONFIGS[request.param])
    return Cache(HISTORY_CONFIGS[request.param])


def take(cache, wanted, threshold=np.inf, use_prediction=False, kth=1.0):
    """One step in which every query takes the positions wanted(layer, seat, t, visible), scored 2, all others 1.
    Returns what the step moved, by layer."""
    chosen = {}

    def choose(layer, seat, t, visible):
        chosen[layer, seat, t] = sorted(set(wanted(layer, seat, t, visible)))
        return chosen[layer, seat, t]

    scores = np.ones((2, SEATS, T, CAPACITY), np.float32)
    for layer in range(2):
        for seat in range(SEATS):
            for t in range(T):
                fits = min(T, cache.room(seat)) if cache.tables.active[seat] else 0
                if t < fits:
                    scores[layer, seat, t, wanted(layer, seat, t, int(cache.tables.lengths[seat]) + t + 1)] = 2
    shown = cache.step(
        choose,
        scores,
        np.full((2, SEATS), threshold, np.float32),
        [use_prediction] * 2,
        np.full((2, SEATS, T), kth, np.float32),
    )
    return shown["moved"]


def started(cache, seat, count, positions=CAPACITY):
    assert cache.admit(seat, positions)
    while count > 0:
        cache.fill(seat, count)
        count -= FILL


def resident(cache, layer, seat):
    """The positions of a seat that have a slot in a layer."""
    slot_of = cache.seen["slots"][layer].slot_of
    return [position for position, row in enumerate(cache.tables.rows_of(seat)) if slot_of[row] >= 0]


def test_pool_exactly_full(cache):
    """Every seat protects 2 new rows and 10 others, all different: 36 rows in 36 slots, twice, all replaced."""
    for seat in range(SEATS):
        started(cache, seat, 60, 128)
    moved = take(cache, lambda layer, seat, t, visible: range(10 * layer + 5 * t, 10 * layer + 5 * t + K))
    assert moved.recalled.tolist() == [30, 30] and moved.evicted.tolist() == [0, 0]
    assert not cache.seen["slots"][0].free.any()
    moved = take(cache, lambda layer, seat, t, visible: range(30 + 5 * t, 30 + 5 * t + K))
    assert moved.recalled.tolist() == [30, 30] and moved.evicted.tolist() == [36, 36]
    moved = take(cache, lambda layer, seat, t, visible: range(30 + 5 * t, 30 + 5 * t + K))
    assert moved.hits.tolist() == [30, 30] and moved.evicted.tolist() == [6, 6]


def test_one_slot_short_is_refused_when_the_cache_is_configured():
    with pytest.raises(ValueError, match=r"holds 35 rows but .* needs 36; raise device_slots or lower the batch"):
        dataclasses.replace(BASE, device_slots=LEGAL - 1)


def test_a_row_that_three_seats_miss_at_once_is_recalled_once(cache):
    """Two requests wrote their own marker for the same missing row, and the row got two slots."""
    started(cache, 0, 70, 128)
    assert cache.fork(0, 1, 128)
    assert cache.fork(1, 2, 128)
    moved = take(cache, lambda layer, seat, t, visible: range(20, 20 + K))
    assert moved.recalled.tolist() == [K, K]
    moved = take(cache, lambda layer, seat, t, visible: range(40 - t, 40 - t + K), threshold=1.5)
    # Each of the three stages the same six rows; six are consumed, twelve were in vain.
    assert moved.staged.tolist() == [18, 18] and moved.useful.tolist() == [6, 6] and moved.recalled.tolist() == [0, 0]


def test_partial_pages_are_copied_and_then_differ(cache):
    started(cache, 0, 70)
    take(cache, lambda layer, seat, t, visible: [64, visible - 1])
    assert cache.fork(0, 1, 200)
    assert resident(cache, 0, 1) == []  # records are copied, slots are not
    take(cache, lambda layer, seat, t, visible: [64, 71, visible - 1])
    own = [cache.tables.row_of(seat, 72) for seat in (0, 1)]
    assert own[0] != own[1] and not np.array_equal(cache.seen["host"][0][own[0]], cache.seen["host"][0][own[1]])


def test_a_row_is_evicted_and_selected_again_in_the_next_step(cache):
    for seat in range(SEATS):
        started(cache, seat, 60, 128)
    take(cache, lambda layer, seat, t, visible: range(5 * t, 5 * t + K))
    take(cache, lambda layer, seat, t, visible: range(20 + 5 * t, 20 + 5 * t + K))  # needs all 36 slots
    assert resident(cache, 1, 0) == [*range(20, 30), 62, 63]
    moved = take(cache, lambda layer, seat, t, visible: range(5 * t, 5 * t + K), threshold=1.5)
    assert moved.useful.tolist() == [18, 18]  # six a seat, the rest is recalled
    assert moved.recalled.tolist() == [12, 12]


def test_a_new_row_is_selected_by_its_own_query_and_by_the_next(cache):
    """It is not on the host yet: whoever looks for it there finds what the row's last owner wrote."""
    started(cache, 0, 10)
    moved = take(cache, lambda layer, seat, t, visible: range(visible - 3, visible), threshold=1.5)
    assert moved.useful.tolist() == [2, 2] and moved.recalled.tolist() == [0, 0]  # positions 8 and 9


def test_release_while_shared_leaves_the_rows_of_the_sharer(cache):
    started(cache, 0, 70)
    assert cache.fork(0, 1, 200)
    take(cache, lambda layer, seat, t, visible: [0, 63, 64, 65, 66] if seat == 0 else [1, 63, 64, 65, 67])
    cache.release(0)
    assert resident(cache, 0, 1) == [0, 1, 63, 64, 65, 67, 70, 71]
    moved = take(cache, lambda layer, seat, t, visible: [0, 1, 63, 64, 65])
    assert moved.hits.tolist() == [K, K]
    cache.release(1, keep_pages=True)
    assert cache.seen["slots"][0].free.all()


def test_admission_with_cached_pages_recalls_what_was_kept(cache):
    started(cache, 0, 130)
    first = [cache.tables.row_of(0, position) for position in (0, 127)]
    cache.release(0, keep_pages=True)
    assert np.flatnonzero(cache.seen["tables"].page_cached).tolist() == [0, 1]
    assert not cache.admit(1, 128, shared=[0, 1])  # none of its own
    assert cache.admit(1, 129, shared=[0, 1])
    assert [cache.tables.row_of(1, position) for position in (0, 127)] == first
    moved = take(cache, lambda layer, seat, t, visible: [0, 127, visible - 1])
    assert moved.recalled.tolist() == [2, 2]
    assert cache.admit(2, 200, shared=[0, 1])  # now owned, by seat 1
    take(cache, lambda layer, seat, t, visible: [0, 1, 127, visible - 1])


def test_pages_dropped_from_the_cache_are_written_by_the_next(cache):
    started(cache, 0, 64, 64)
    take(cache, lambda layer, seat, t, visible: [0, 1])  # seat 0 is full: nothing happens
    cache.release(0, keep_pages=True)
    started(cache, 1, 256)
    started(cache, 2, 192, 192)
    assert not cache.admit(0, 64)  # every page is owned or kept
    assert cache.uncache([0])
    assert not cache.uncache([0])
    started(cache, 0, 62, 64)
    moved = take(cache, lambda layer, seat, t, visible: [0, 1, visible - 1])
    assert moved.written.tolist() == [2, 2]


def test_a_seat_given_to_another_request_has_no_threshold(cache):
    started(cache, 0, 20)
    started(cache, 1, 20)
    take(cache, lambda layer, seat, t, visible: range(K), kth=4.0)
    assert cache.seen["predicted"][0].tolist() == [4.0, 4.0, np.inf]
    assert cache.release(0) and cache.admit(0, 100)
    assert cache.seen["predicted"][1].tolist() == [np.inf, 4.0, np.inf]
    assert cache.fork(1, 2, 100)
    assert cache.seen["predicted"][0].tolist() == [np.inf, 4.0, np.inf]
    cache.fill(0, 30)
    moved = take(cache, lambda layer, seat, t, visible: [6, 7, 8], use_prediction=True, kth=0.5)
    assert moved.staged.tolist() == [0, 0]  # no history, or nothing above 4


def test_capacity_reached_writes_nothing(cache):
    """A full seat takes part in the shapes only; its last odd token is written, the one beyond it is not."""
    started(cache, 0, 255, 256)
    started(cache, 1, 63, 64)  # reserved less than a seat may hold
    started(cache, 2, 10, 64)
    moved = take(cache, lambda layer, seat, t, visible: [0, visible - 1])
    assert moved.written.tolist() == [4, 4]
    assert cache.tables.lengths.tolist() == [256, 64, 12]
    for _ in range(3):
        moved = take(cache, lambda layer, seat, t, visible: [0, visible - 1], threshold=-np.inf)
        assert moved.written.tolist() == [2, 2]
    assert cache.tables.lengths.tolist() == [256, 64, 18]


def test_a_step_of_nobody(cache):
    moved = take(cache, lambda layer, seat, t, visible: [0])
    assert all(not counts.any() for counts in dataclasses.asdict(moved).values())
    assert cache.when == 1


def test_rows_rolled_back_are_written_anew(cache):
    """A rejected token's record stayed in its slot, and the next token at that position attended to it."""
    started(cache, 0, 10)
    take(cache, lambda layer, seat, t, visible: [visible - 1])
    assert resident(cache, 0, 0) == [10, 11]
    cache.rollback([11, 0, 0])
    assert resident(cache, 0, 0) == [10]
    take(cache, lambda layer, seat, t, visible: [10, 11])
    cache.rollback([9, 0, 0])
    take(cache, lambda layer, seat, t, visible: [9, 10][: t + 1])
    cache.rollback([0, 0, 0])
    assert cache.seen["slots"][0].free.all()
    take(cache, lambda layer, seat, t, visible: range(visible))


def test_a_rollback_into_a_shared_page_is_refused_for_all_seats(cache):
    started(cache, 0, 66)
    started(cache, 1, 10, 64)
    assert cache.fork(0, 2, 100)
    assert not cache.rollback([63, 9, 66])
    assert cache.rollback([64, 9, 65])


def test_the_clock_is_set_back_in_the_middle_of_a_history(cache):
    """Priorities from before the setting back stay below those after it, through two of them."""
    started(cache, 0, 40, 128)
    for _ in range(2):
        cache.set_clock(eviction.REBASE_AT - 3)
        for number in range(6):  # seven rows a step; five steps' worth of them fit
            take(cache, lambda layer, seat, t, visible, first=5 * number: range(first, first + K))
        assert cache.when == 3
        priorities = cache.seen["slots"][0].priority[~cache.seen["slots"][0].free]
        assert priorities.min() < 0 < priorities.max()


def test_a_machine_that_sees_a_wrong_slot_fails(cache):
    """The comparison itself: one map entry or one bit of one record is enough."""
    started(cache, 0, 20)
    take(cache, lambda layer, seat, t, visible: range(K))
    layer = cache.state.layers[1]
    good = cache.state
    priority = layer.slots.priority.at[3].add(1)
    for broken in (
        layer.replace(slots=layer.slots.replace(priority=priority)),
        layer.replace(records=layer.records.at[3].multiply(-1)),
    ):
        cache.state = good.replace(layers=(good.layers[0], broken))
        with pytest.raises(AssertionError):
            cache.check()
    cache.state = good
    cache.check()
