"""Boundaries that a change could cross unseen: each is held by numbers that can be counted on one hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import prefill
from echo_jax import state as state_lib
from echo_jax.replay import rivals, summary
from echo_jax.replay.counts import shared_record
from echo_jax.replay.rules import INDEXER, LAYER
from tests import scenarios
from tests.test_replay_cost import ROUND, STEPS, replayed

NONE = -1


def facts(**given: Any) -> Any:
    """What a rule is told of one step, of as many requests as `exact` has rows."""
    exact = jnp.asarray(given.pop("exact"), jnp.int32)
    requests, positions = exact.shape[0], given.pop("positions", 16)
    is_exact = np.zeros((requests, positions), bool)
    for request, row in enumerate(np.asarray(exact)):
        is_exact[request, row[row != NONE]] = True
    scores = {
        "active": jnp.ones((requests,), bool),
        "starts": jnp.zeros((requests,), bool),
        "length": jnp.full((requests,), positions - 1, jnp.int32),
        "query_cosine": None,
    } | given.pop("scores", {})
    return SimpleNamespace(exact=exact, is_exact=jnp.asarray(is_exact), scores=SimpleNamespace(**scores), **given)


@pytest.mark.parametrize(("kind", "predictable"), [("full", 1), ("shared", 0)])
def test_a_query_is_predictable_where_it_sees_more_than_k(kind, predictable):
    """K positions are all selected, whatever their scores: there is nothing to predict."""
    plan: Any = SimpleNamespace(positions=8, top_k=5, kind=kind)
    visible = jnp.asarray([4, 5, 6], jnp.int32)
    given: Any = SimpleNamespace(
        visible=visible,
        scores=SimpleNamespace(active=visible > 0, score=jnp.zeros((3, 8))),
        exact=jnp.zeros((3, 5), jnp.int32),
        kth_score=jnp.zeros((3,)),
    )
    assert int(shared_record(plan, given).predictable) == predictable


@pytest.mark.parametrize(("kept", "is_exact"), [(2, False), (1, True)])
def test_freekv_corrects_itself_below_the_overlap_and_not_at_it(kept, is_exact):
    """Of four selected rows two are half: the set before is attended still. One is less: the exact set is."""
    rule = rivals.FreeKV(overlap=0.5)
    before, exact = [0, 1, 8, 9], [[0, 1][:kept] + [4, 5, 6][: 4 - kept]]
    _, choice = rule.choose(jnp.asarray([before], jnp.int32), facts(exact=exact))
    attended = set(np.asarray(choice.attended)[0].tolist()) - {NONE}
    assert attended == (set(exact[0]) if is_exact else {*before, 15})


@pytest.mark.parametrize(("cosine", "is_exact"), [(0.8, False), (0.79, True)])
def test_freekv_corrects_itself_below_the_cosine_and_not_at_it(cosine, is_exact):
    told = {"query_cosine": jnp.asarray([cosine], jnp.float32)}
    _, choice = rivals.FreeKV(cosine=0.8).choose(jnp.asarray([[0, 1]], jnp.int32), facts(exact=[[2, 3]], scores=told))
    assert (set(np.asarray(choice.attended)[0].tolist()) - {NONE} == {2, 3}) == is_exact


def test_what_is_known_a_layer_ahead_hides_behind_a_layer():
    """The docstrings: FreeKV fetches while the step before runs, InfiniGen and shared layers while a layer does."""
    a_layer = {rivals.FreeKV, rivals.InfiniGen, rivals.IndexShare}
    rules = [rivals.FreeKV, rivals.InfiniGen, rivals.IndexShare, rivals.Ess, rivals.SparseServe, rivals.HiSparse]
    assert {rule: rule.hides_behind for rule in rules} == {
        rule: LAYER if rule in a_layer else INDEXER for rule in rules
    }


@pytest.mark.parametrize(("steps_ago", "runs"), [(2, False), (3, True)])
def test_sparseserve_counts_rows_of_the_last_window_steps(steps_ago, runs):
    """Five rows were selected two steps ago and fill the pool beside the first request's two; a step later they do not
    belong to the working set any more, and the second request takes part."""
    rule = rivals.SparseServe(slots=6, window=2)
    memory = np.full((2, 16), -(2**30), np.int32)
    memory[1, :5] = 10 - steps_ago
    _, choice = rule.choose(jnp.asarray(memory), facts(exact=[[0], [1]], step=jnp.int32(10)))
    assert np.asarray(choice.runs).tolist() == [True, runs]


@pytest.mark.parametrize(("kind", "positions"), [("full", None), ("shared", 0)])
def test_a_shared_layer_is_not_charged_for_scores(kind, positions):
    made, counts = replayed()
    row = summary.rows_of(dataclasses.replace(made, kind=kind), counts, 1152, [ROUND], STEPS - 1)[0]
    scored = np.asarray(counts.shared.positions)[-1] if positions is None else positions
    assert row["cost"]["round"]["indexer_us"] == pytest.approx(float(ROUND.indexer_us(scored)))


@pytest.mark.parametrize("prompt", [90, 128])
def test_the_last_windows_of_a_prompt_are_warm_and_no_others(prompt):
    """After prefill exactly the rows that the last `warm_windows` queries of each chunk selected have slots."""
    setting = dict(records="bf16", keys="f32", tokens=1, threshold="never", cap=0, pool="ample", memory="jnp")
    config = scenarios.cache(setting | {"eviction": "lru", "warm": 2}, offload=True, model=scenarios.ONE_LAYER)
    assert config.cache.warm_windows == 2
    state = state_lib.admit(config.cache, state_lib.create(config.cache), 1, 192)
    tokens = np.random.default_rng(3).integers(0, scenarios.VOCAB, prompt)
    selected = []

    def keep(done: int, output: prefill.PrefillOutput) -> None:
        count = done - 64 * len(selected)
        selected.append(np.asarray(output.selected)[0, :count])

    params = scenarios.parameters(scenarios.ONE_LAYER)
    assert config.cache.chunk == 64
    state, _ = prefill.prefill(params, state, tokens, 1, config=config, progress=keep)
    maps, table = state.layers[0].slots, np.asarray(state.tables.page_table)[1]
    assert maps is not None
    resident = set(np.flatnonzero(np.asarray(maps.slot_of) >= 0).tolist())
    # Every chunk warms its own last windows; the pool has room for all of them.
    wanted = np.concatenate([one[-2:] for one in selected]).reshape(-1)
    wanted = wanted[wanted >= 0]
    assert resident == {int(table[position // 64]) * 64 + int(position) % 64 for position in wanted}
    others = np.concatenate([one[:-2] for one in selected]).reshape(-1)
    assert set(others[others >= 0].tolist()) - set(wanted.tolist()), "other queries selected other rows"
