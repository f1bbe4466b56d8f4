"""The promise: whatever the policies do, even nonsense, the offloaded run is the resident run, bit for bit.

Selected lists of every layer, digests of attended outputs and logits of every step, over a history with forks, shared
prefixes, a cancelled request, a reused seat and rejected tokens, under eviction pressure.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import decode, prefill
from echo_jax import state as state_lib
from echo_jax.config import COMPILER_OPTIONS
from echo_jax.types import NO_POSITION
from tests import scenarios

SETTINGS = scenarios.pairwise(scenarios.AXES, scenarios.TRIPLES)
PLAIN = dict(
    records="bf16", keys="f32", tokens=1, threshold="ema", cap=6, pool="barely", memory="ffi", eviction="lru", warm=0
)
GLM = dataclasses.replace(scenarios.MODEL, layer_kinds=("full", "shared", "full"), mlp_kinds=("dense", "moe", "dense"))


def run_both(setting: dict, scores: str = "plain", model=scenarios.MODEL, **changes) -> scenarios.Run:
    """The offloaded run, which has been held against the resident one; `changes` are of its CacheConfig."""
    reference = scenarios.resident(setting["records"], setting["keys"], setting["tokens"], scores, model)
    config = scenarios.cache(setting, offload=True, model=model)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, **changes))
    ours = scenarios.Run(config, scenarios.parameters(model, scores)).history()
    assert scenarios.differences(ours, reference) == []
    scenarios.check_invariants(ours)
    check_counts(ours, setting)
    return ours


def check_counts(run: scenarios.Run, setting: dict):
    """Invariant 7: the counts add up, and no more is wasted than the cap lets through."""
    seats, layers = run.config.cache.seats, run.config.cache.num_layers
    step_lists = [array for name, array in run.seen if name == "step" and array.ndim == 4]
    for lists, moved in zip(step_lists, run.moved, strict=True):
        moved = jax.tree.map(np.asarray, moved)
        staged_at_most = setting["cap"] * seats
        assert (moved.staged <= staged_at_most).all() and (moved.useful <= moved.staged).all()
        assert (moved.written <= seats * setting["tokens"]).all()
        selections = (lists != NO_POSITION).reshape(layers, -1).sum(axis=1)
        assert (moved.hits + moved.useful + moved.recalled <= selections).all()
        assert (moved.evicted <= moved.useful + moved.recalled + moved.written).all()
        if setting["cap"] == 0 or setting["threshold"] in ("never", "nan"):
            assert (moved.staged == 0).all()


def ident(setting: dict) -> str:
    return "-".join(f"{value}" for value in setting.values())


@pytest.mark.parametrize("setting", SETTINGS, ids=ident)
def test_pairwise(setting):
    run_both(setting, model=scenarios.ONE_LAYER)


def test_pairwise_meets_every_pair():
    """The choice above is what it says: leave one setting out and a pair is missing somewhere."""
    names = list(scenarios.AXES)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            met = {(setting[a], setting[b]) for setting in SETTINGS}
            assert met == {(x, y) for x in scenarios.AXES[a] for y in scenarios.AXES[b]}


def test_pressure_was_real():
    """The history evicts, recalls and uses what was staged; otherwise the tests above would prove little."""
    run = run_both(PLAIN | {"threshold": "random"})
    totals = jax.tree.map(lambda *counts: np.sum(counts, axis=0), *run.moved)
    for name in ("hits", "useful", "recalled", "evicted"):
        assert (getattr(totals, name) > 0).all(), name
    assert (totals.staged - totals.useful > 0).any(), "no prefetch was ever wrong"


@pytest.mark.parametrize("scores", ["tied", "odd"])
def test_scores_without_an_order(scores):
    """All scores equal, and scores among which are infinities and NaN: selection is still one answer."""
    run = run_both(PLAIN | {"threshold": "always"}, scores)
    if scores == "tied":  # ties fall to the lowest position: the first K, always
        lists = [array for name, array in run.seen if name == "step" and array.ndim == 4][-1]
        filled = lists[:, 2, 0]
        assert (filled == np.arange(scenarios.TOP_K)).all()


def test_some_scores_really_are_not_finite():
    """`odd` parameters do what their name says, so that the test above means something."""
    from echo_jax.models import dsa

    params = scenarios.parameters(scores="odd")
    tokens, positions = jnp.arange(40, dtype=jnp.int32), jnp.arange(40, dtype=jnp.int32)
    hidden = dsa.embed(params, tokens, scenarios.MODEL)
    x = dsa.rms_norm(hidden, params["layers"][0]["input_norm"], 1e-6)
    inputs = dsa.attention_inputs(params["layers"][0], x, positions, scenarios.MODEL)
    from echo_jax import indexer

    assert inputs.index_query is not None and inputs.index_weights is not None and inputs.index_key is not None
    score = np.asarray(indexer.scores(inputs.index_query, inputs.index_weights, inputs.index_key))
    assert np.isnan(score).any() and np.isinf(score).any() and np.isfinite(score).any()


def test_shared_index_layers():
    """GLM: a shared layer attends to the list of the full layer before it, and its own pool holds those rows."""
    run_both(PLAIN | {"tokens": 2, "eviction": "clock"}, model=GLM)


@pytest.mark.parametrize("cap", [1, scenarios.TOP_K])
def test_a_shared_layers_rows_are_read_ahead(cap):
    """What the full layer selected is known a layer early: the shared layer's misses come from staging, and nothing
    that is read ahead is wasted but a row that two seats share."""
    setting = PLAIN | {"cap": cap, "threshold": "never"}
    config = scenarios.cache(setting, offload=True, model=GLM)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, read_ahead=True))
    ours = scenarios.Run(config, scenarios.parameters(GLM))
    ours.history()
    reference = scenarios.resident(setting["records"], setting["keys"], setting["tokens"], "plain", GLM)
    assert scenarios.differences(ours, reference) == []
    scenarios.check_invariants(ours)
    total = jax.tree.map(lambda *counts: np.sum(counts, axis=0), *ours.moved)
    assert total.staged[1] > 0 and (total.staged[[0, 2]] == 0).all(), "only the shared layer reads ahead"
    assert total.useful[1] > 0.7 * total.staged[1]
    assert (total.recalled[1] == 0) == (cap == scenarios.TOP_K), "the cap, and nothing else, leaves rows to recall"


@pytest.mark.parametrize("eviction", ["score", "clock"])
def test_rotated_keys_and_the_other_evictions(eviction):
    threshold = {"score": "garbage", "clock": "random"}[eviction]
    run_both(PLAIN | {"keys": "fp8 rotated", "eviction": eviction, "threshold": threshold, "memory": "jnp"})


@pytest.fixture(scope="module")
def prompt():
    return np.random.default_rng(5).integers(0, scenarios.VOCAB, 150)


def start(config, prompt, seats=(0, 2)):
    state = state_lib.create(config.cache)
    outputs = []
    for seat in seats:
        state = state_lib.admit(config.cache, state, seat, scenarios.CAPACITY)
        part = prompt[: len(prompt) - 40 * seat]
        state, output = prefill.prefill(scenarios.parameters(), state, part, seat, config=config)
        outputs.append(output)
    return state, outputs


def test_steps_bring_their_compiler_options():
    """By what jax says where a function with options of its own is called inside another."""
    config, params = scenarios.cache(PLAIN, offload=True), scenarios.parameters()
    state = jax.eval_shape(lambda: state_lib.create(dataclasses.replace(config.cache, host_memory="jnp")))
    seats, refused = jnp.zeros((3,), jnp.int32), pytest.raises(ValueError, match=re.escape(str(COMPILER_OPTIONS)))
    with refused:
        jax.eval_shape(lambda state: decode.decode_step(params, state, seats[:, None], config=config), state)
    with refused:
        jax.eval_shape(lambda state: decode.decode_many(params, state, seats, seats, config=config, steps=2), state)


def test_decode_many_is_decode_step_repeated(prompt):
    """The loop inside the program gives the bits of the loop outside."""
    config, params = scenarios.cache(PLAIN, offload=True), scenarios.parameters()
    first = jnp.asarray([5, 6, 7], jnp.int32)
    seeds = jnp.zeros((3,), jnp.uint32)
    state, _ = start(config, prompt)
    _, (tokens, together) = decode.decode_many(params, state, first, seeds, config=config, steps=6)

    state, _ = start(config, prompt)
    current = first
    for number in range(6):
        state, output = decode.decode_step(params, state, current[:, None], config=config)
        for ours, theirs in zip(jax.tree.leaves(output), jax.tree.leaves(together), strict=True):
            assert np.asarray(ours).tobytes() == np.asarray(theirs[number]).tobytes()
        current = jnp.argmax(output.logits[:, 0], axis=-1).astype(jnp.int32)
        assert (np.asarray(current) == np.asarray(tokens[number])).all()


def test_decode_many_needs_no_more_room_for_more_steps():
    """Pools are a carry updated in place: temporaries do not grow with the number of steps."""
    config, params = (
        scenarios.cache(PLAIN, offload=True, model=scenarios.ONE_LAYER),
        scenarios.parameters(scenarios.ONE_LAYER),
    )
    state = state_lib.create(config.cache)
    tokens, seeds = jnp.zeros((3,), jnp.int32), jnp.zeros((3,), jnp.uint32)
    sizes = []
    for steps in (2, 200):
        lowered = decode.decode_many.lower(params, state, tokens, seeds, config=config, steps=steps)
        use = lowered.compile().memory_analysis()
        assert use is not None
        sizes.append(use.temp_size_in_bytes)
        assert use.alias_size_in_bytes + use.host_alias_size_in_bytes >= 0.99 * sum(
            leaf.nbytes for leaf in jax.tree.leaves(state)
        )
    assert sizes[1] <= sizes[0] + 4096


def test_chunk_shapes_agree_bit_for_bit(prompt):
    """Chunks of 64, 128 and 512 leave the same cache and the same last logits on this backend: readers see stored
    forms, and queries are scored and attended in blocks of one shape."""
    seen = []
    for chunk in (64, 128, 512):
        config = scenarios.cache(PLAIN, offload=True)
        config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, chunk=chunk))
        state, outputs = start(config, prompt, seats=(0,))
        seen.append(
            (np.asarray(outputs[0].logits), np.asarray(state.host_pool), np.asarray(state.layers[1].index_keys))
        )
    for other in seen[1:]:
        for ours, theirs in zip(seen[0], other, strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_several_tokens_at_once_are_several_steps(prompt):
    """T = 4 selects and answers as four steps of T = 1 do. The two programs multiply other shapes, so floats agree to
    rounding and a near-tie may fall either way; here none does."""
    params = scenarios.parameters()
    tokens = np.random.default_rng(8).integers(0, scenarios.VOCAB, (3, 4)).astype(np.int32)
    one, four = (scenarios.cache(PLAIN | {"records": "f32", "tokens": t}, offload=True) for t in (1, 4))
    state, _ = start(four, prompt)
    _, together = decode.decode_step(params, state, tokens, config=four)
    state, _ = start(one, prompt)
    for t in range(4):
        state, output = decode.decode_step(params, state, tokens[:, t : t + 1], config=one)
        for seat in (0, 2):
            assert (output.selected[:, seat, 0] == together.selected[:, seat, t]).all()
            np.testing.assert_allclose(output.logits[seat, 0], together.logits[seat, t], rtol=1e-4, atol=1e-4)


def test_one_program_serves_everything_in_place(prompt):
    """Invariant 8, and donation that works: one compilation for every occupancy and length, pools keep their place."""
    config, params = scenarios.cache(PLAIN | {"cap": 3}, offload=True), scenarios.parameters()
    before = compilations()
    state, _ = start(config, prompt)
    places = pointers(state)
    for number in range(8):
        state, _ = decode.decode_step(params, state, np.full((3, 1), number, np.int32), config=config)
        if number == 3:
            state = state_lib.release(config.cache, state, 2)
        if number == 5:
            state = state_lib.admit(config.cache, state, 1, 64)
    assert compilations() == [count + 1 for count in before]
    assert pointers(state) == places


def compilations() -> list[int]:
    """How often each of the two programs has been compiled in this process."""
    return [getattr(program, "_cache_size")() for program in (decode.decode_step, prefill.prefill_chunk)]  # noqa: B009


def pointers(state) -> list[int]:
    arrays = [state.host_pool] + [x for layer in state.layers for x in (layer.records, layer.index_keys)]
    return [array.unsafe_buffer_pointer() for array in arrays]


@pytest.mark.parametrize("memory", ["ffi", "jnp"])
def test_the_compiled_step_aliases_its_pools(memory):
    """Every large array of the state is updated where it lies; temporaries are smaller than one layer's pool."""
    config, params = scenarios.cache(PLAIN | {"pool": "ample", "memory": memory}, offload=True), scenarios.parameters()
    state = state_lib.create(config.cache)
    tokens = np.zeros((3, 1), np.int32)
    compiled = decode.decode_step.lower(params, state, tokens, config=config).compile()
    memory_use = compiled.memory_analysis()
    assert memory_use is not None
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    aliased = memory_use.alias_size_in_bytes + getattr(memory_use, "host_alias_size_in_bytes", 0)
    assert aliased >= 0.99 * state_bytes
    text = compiled.as_text() or ""
    assert "input_output_alias" in text
    assert state.host_pool is not None
    for pool in (state.layers[0].records, state.host_pool):
        shape = f"[{','.join(map(str, pool.shape))}]"
        assert not [line for line in text.splitlines() if shape in line and " copy(" in line]


def test_device_bytes_are_the_formula():
    """Leaves of the state, summed, are what the configuration promises: L [N_G (record + 9) + N_H (key + 4)]."""
    for setting in (PLAIN, PLAIN | {"records": "fp8", "keys": "fp8"}):
        config = scenarios.cache(setting, offload=True, model=GLM)
        state = state_lib.create(config.cache)
        layers = [layer.replace(threshold=None) for layer in state.layers]
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) == sum(config.cache.device_bytes().values())
        assert state.host_pool is not None and state.host_pool.nbytes == config.cache.host_bytes()
        cache = config.cache
        metadata = sum(leaf.nbytes for layer in layers for leaf in jax.tree.leaves(layer.slots))
        assert metadata == cache.num_layers * (4 * cache.host_rows + 9 * cache.device_slots)
