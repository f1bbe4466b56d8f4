"""Arguments that cannot be served are refused where they are handed in; a wrong number that is traced touches nobody.

Each case was once answered quietly: with another request's rows, with zeros, or with an error long after.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import decode, eviction, layer, prefill, threshold
from echo_jax import state as state_lib
from echo_jax.nnx import EchoAttention, EchoWorker
from echo_jax.types import NO_TOKEN
from tests import scenarios

MODEL = scenarios.ONE_LAYER
PARAMS = scenarios.parameters(MODEL)
SETTING = dict(
    records="bf16", keys="f32", tokens=1, threshold="ema", cap=6, pool="barely", memory="jnp", eviction="lru", warm=0
)
CONFIG = scenarios.cache(SETTING, offload=True, model=MODEL)
SEATS = CONFIG.cache.seats


def one_request(config=CONFIG, seat=1, length=70):
    """A cache in which one seat has read `length` tokens."""
    state = state_lib.admit(config.cache, state_lib.create(config.cache), seat, 128)
    tokens = np.random.default_rng(5).integers(0, scenarios.VOCAB, length)
    state, _ = prefill.prefill(PARAMS, state, tokens, seat, config=config)
    return state


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_of_more_tokens_than_the_pool_holds_is_refused():
    """Regression: decode_step with tokens i32[B, 4] on a pool for T = 1 gave logits that differed by up to 7."""
    state = one_request()
    with pytest.raises(ValueError, match=r"device pool holds 33 rows but B\*T\*\(K\+1\) = 3\*4\*\(10\+1\) needs 132"):
        decode.decode_step(PARAMS, state, np.zeros((SEATS, 4), np.int32), config=CONFIG)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.zeros((SEATS - 1, 1), np.int32), r"tokens has shape \[2, 1\] but must be \[3, any\]"),
        (np.zeros((SEATS,), np.int32), r"tokens has shape \[3\] but must be \[3, any\]"),
        (np.zeros((SEATS, 1), np.float32), "tokens has dtype float32 but must hold integers"),
        (np.zeros((SEATS, 0), np.int32), "tokens per seat is 0 but must lie in 1"),
    ],
)
def test_tokens_of_another_shape_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        decode.decode_step(PARAMS, state_lib.create(CONFIG.cache), tokens, config=CONFIG)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1"])
def test_begin_step_takes_a_whole_number_of_tokens(value):
    with pytest.raises(ValueError, match="tokens per seat is"):
        state_lib.begin_step(CONFIG.cache, state_lib.create(CONFIG.cache), value)


def test_a_state_of_another_size_is_refused():
    other = dataclasses.replace(CONFIG.cache, seats=2)
    with pytest.raises(ValueError, match=r"page_table has shape \[3, 3\] but must be \[2, 3\]"):
        state_lib.begin_step(other, state_lib.create(CONFIG.cache))


def test_finish_step_takes_every_layer_once():
    state = state_lib.create(CONFIG.cache)
    view = state_lib.begin_step(CONFIG.cache, state)
    with pytest.raises(ValueError, match="new_records holds 0 layers but the cache has 1"):
        state_lib.finish_step(CONFIG.cache, state, state.layers, [], view)
    with pytest.raises(ValueError, match=r"new_records\[0\] has shape \[3, 1, 3\]"):
        state_lib.finish_step(CONFIG.cache, state, state.layers, [jnp.zeros((3, 1, 3))], view)


# ---- a layer ---------------------------------------------------------------------------------------------------------


def inputs(**changes) -> layer.LayerInputs:
    made = layer.LayerInputs(
        query=jnp.ones((SEATS, 1, 2, 136)),
        record=jnp.ones((SEATS, 1, 136)),
        index_query=jnp.ones((SEATS, 1, 4, 16)),
        index_weights=jnp.ones((SEATS, 1, 4)),
        index_key=jnp.ones((SEATS, 1, 16)),
    )
    return made._replace(**changes)


def attend(number=0, **changes):
    state = state_lib.create(CONFIG.cache)
    view = state_lib.begin_step(CONFIG.cache, state)
    return layer.echo_layer(CONFIG.cache, state.layers[0], state.host_pool, number, view, inputs(**changes), scale=0.1)


@pytest.mark.parametrize("number", [1, 30, -1, np.int64(2)])
def test_a_layer_that_does_not_exist_is_refused(number):
    """Regression: echo_layer(layer=30) on a pool of one layer read zeros."""
    with pytest.raises(ValueError, match=rf"layer {number} does not exist; the cache has layers 0..0"):
        attend(number)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_query": None}, "index_query is None but layer 0 is a full layer"),
        ({"index_weights": None}, "index_weights is None"),
        ({"index_key": None}, "index_key is None"),
        ({"query": jnp.ones((SEATS, 1, 2, 100))}, r"query has shape \[3, 1, 2, 100\] but must be \[3, 1, any, 136\]"),
        ({"record": jnp.ones((SEATS, 2, 136))}, r"record has shape \[3, 2, 136\] but must be \[3, 1, 136\]"),
        ({"query": jnp.ones((2, 1, 2, 136))}, r"query has shape \[2, 1, 2, 136\]"),
        ({"index_key": jnp.ones((SEATS, 1, 8))}, r"index_key has shape \[3, 1, 8\] but must be \[3, 1, 16\]"),
        ({"index_weights": jnp.ones((SEATS, 1, 3))}, r"index_weights has shape \[3, 1, 3\] but must be \[3, 1, 4\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_inputs_that_do_not_fit_the_cache_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        attend(**changes)


def test_a_shared_layer_needs_the_layer_whose_set_it_shares():
    model = dataclasses.replace(MODEL, layer_kinds=("full", "shared"), mlp_kinds=("dense", "dense"))
    config = scenarios.cache(SETTING, offload=True, model=model).cache
    state = state_lib.create(config)
    view = state_lib.begin_step(config, state)
    with pytest.raises(ValueError, match="layer 1 is a shared layer, without index keys; pass shared="):
        layer.echo_layer(config, state.layers[1], state.host_pool, 1, view, inputs(), scale=0.1)


def test_modules_refuse_another_batch():
    layers = [EchoAttention(MODEL, 0, weights=PARAMS["layers"][0])]
    worker = EchoWorker(CONFIG.cache, layers)
    with pytest.raises(ValueError, match=r"x has shape \[2, 1, 32\] but must be \[3, 1, 32\]"):
        layers[0](jnp.ones((2, 1, MODEL.hidden_size)), worker.begin_step(1))
    with pytest.raises(ValueError, match="needs 132"):
        worker.begin_step(4)


# ---- seats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seat", "tokens", "message"),
    [
        (-1, [1, 2], r"seat -1 does not exist; the configuration has seats 0..2"),
        (7, [1, 2], r"seat 7 does not exist"),
        (1.0, [1, 2], "seat is 1.0 but must be a whole number"),
        (0, [1, 2], "seat 0 holds no request; admit one first"),
        (1, [1] * 59, "the prompt has 59 tokens but seat 1 has room for 58 more"),
        (1, [1, 64], r"the prompt holds token 64 but the model knows 0..63"),
        (1, [-1], r"the prompt holds token -1"),
        (1, [], "the prompt has 0 tokens"),
        (1, [0.5], "the prompt has dtype float64 but must hold integers"),
        (1, [[1, 2]], r"the prompt has shape \[1, 2\] but must be \[any\]"),
    ],
)
def test_prefill_refuses_and_changes_nothing(seat, tokens, message):
    """Regression: seat 7 of 2 was taken for the last seat, whose request it spoilt; a long prompt lost its end."""
    state = one_request()
    before = bits(state)
    with pytest.raises(ValueError, match=message):
        prefill.prefill(PARAMS, state, tokens, seat, config=CONFIG)
    assert bits(state) == before


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("seat", [-1, SEATS, 7, 0])
def test_a_traced_seat_that_does_not_exist_writes_nothing(seat, offload):
    """Also not an idle one. The clock moves, and nothing else."""
    config = dataclasses.replace(CONFIG, cache=dataclasses.replace(CONFIG.cache, offload=offload, warm_windows=2))
    state = one_request(config, seat=SEATS - 1)
    before = bits(state.replace(step=None))
    chunk = np.arange(config.cache.chunk, dtype=np.int32) % scenarios.VOCAB
    state, output = prefill.prefill_chunk(PARAMS, state, chunk, np.int32(seat), np.int32(20), config=config)
    assert bits(state.replace(step=None)) == before
    assert (np.asarray(output.selected) == -1).all()


def test_a_traced_count_beyond_the_room_writes_no_other_seat():
    state = one_request()
    state = state_lib.admit(CONFIG.cache, state, 0, 64)
    keys = state.layers[0].index_keys
    assert keys is not None
    others = bits([state.tables.lengths[1], keys[np.asarray(state.tables.page_table)[1, :2]]])
    chunk = np.arange(CONFIG.cache.chunk, dtype=np.int32) % scenarios.VOCAB
    state, _ = prefill.prefill_chunk(PARAMS, state, chunk, np.int32(0), np.int32(10**6), config=CONFIG)
    assert int(state.tables.lengths[0]) == 64 and int(state.remaining()[0]) == 0
    table, keys = np.asarray(state.tables.page_table), state.layers[0].index_keys
    assert keys is not None and bits([state.tables.lengths[1], keys[table[1, :2]]]) == others


@pytest.mark.parametrize("length", [100, 0])
def test_a_chunk_is_whole_blocks(length):
    with pytest.raises(ValueError, match=f"a chunk of {length} tokens is no multiple of the block of 64"):
        prefill.prefill_chunk(
            PARAMS, state_lib.create(CONFIG.cache), np.zeros(length, np.int32), np.int32(0), np.int32(1), config=CONFIG
        )


@pytest.mark.parametrize("value", [0.5, True, "0", None])
def test_seats_and_positions_are_whole_numbers(value):
    state, cache = one_request(), CONFIG.cache
    before = bits(state)
    for call in (
        lambda: state_lib.admit(cache, state, value, 64),
        lambda: state_lib.admit(cache, state, 0, value),
        lambda: state_lib.admit(cache, state, 0, 128, shared_pages=[value]),
        lambda: state_lib.fork(cache, state, value, 2, 128),
        lambda: state_lib.fork(cache, state, 1, value, 128),
        lambda: state_lib.fork(cache, state, 1, 2, value),
        lambda: state_lib.release(cache, state, value),
        lambda: state_lib.rollback(cache, state, [value] * SEATS),
        lambda: state_lib.uncache(cache, state, [value]),
    ):
        with pytest.raises(ValueError, match="whole number|must hold integers|does not exist"):
            call()
    assert bits(state) == before


# ---- full seats ------------------------------------------------------------------------------------------------------


def test_a_full_seat_says_so_and_writes_nothing():
    """Regression: the logits of a full seat looked like any others."""
    state = one_request(seat=1, length=126)
    assert state.remaining().tolist() == [0, 2, 0]
    state = state_lib.admit(CONFIG.cache, state, 0, 64)
    tokens = np.ones((SEATS, 1), np.int32)
    told = []
    for _ in range(4):
        state, output = decode.decode_step(PARAMS, state, tokens, config=CONFIG)
        told.append((np.asarray(output.is_full).tolist(), state.remaining().tolist(), state.tables.lengths.tolist()))
    assert [full for full, _, _ in told] == [[False, False, False]] * 2 + [[False, True, False]] * 2
    assert told[-1][1:] == ([60, 0, 0], [4, 128, 0])


def test_decode_many_ends_a_full_seat():
    state = one_request(seat=1, length=126)
    state = state_lib.admit(CONFIG.cache, state, 0, 64)
    seeds = np.zeros(SEATS, np.uint32)
    _, (sampled, output) = decode.decode_many(PARAMS, state, np.ones(SEATS, np.int32), seeds, config=CONFIG, steps=5)
    sampled = np.asarray(sampled)
    assert (sampled[:2, 1] >= 0).all() and (sampled[2:, 1] == NO_TOKEN).all() and (sampled[:, 0] >= 0).all()
    assert np.asarray(output.is_full)[:, 1].tolist() == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.ones((SEATS, 1), np.int32)}, r"tokens has shape \[3, 1\] but must be \[3\]"),
        ({"seeds": np.zeros(2, np.uint32)}, r"seeds has shape \[2\] but must be \[3\]"),
        ({"steps": -1}, "steps is -1 but must lie in 0"),
    ],
)
def test_decode_many_refuses(changes, message):
    asked = {"tokens": np.ones(SEATS, np.int32), "seeds": np.zeros(SEATS, np.uint32), "steps": 2} | changes
    with pytest.raises(ValueError, match=message):
        decode.decode_many(PARAMS, state_lib.create(CONFIG.cache), **asked, config=CONFIG)


# ---- policies --------------------------------------------------------------------------------------------------------


class NoValue:
    def init(self):
        return ()

    def update(self, memory, kth_score):
        return memory


@dataclasses.dataclass  # not frozen: no hash
class Unhashable:
    def init(self):
        return ()

    def update(self, memory, kth_score):
        return memory

    def value(self, memory):
        return jnp.float32(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": "ema:0.5"}, r"threshold is the string 'ema:0.5'; give a policy object such as Ema\(0.5\)"),
        ({"threshold": threshold.Ema}, "threshold is the class Ema; give a policy object"),
        ({"threshold": None}, "threshold None has no method 'init'"),
        ({"threshold": NoValue()}, "has no method 'value', but needs init, update, value"),
        ({"threshold": Unhashable()}, "threshold Unhashable cannot be hashed.*frozen dataclass"),
        ({"eviction": "lru"}, r"eviction is the string 'lru'; give a policy object such as Lru\(\)"),
        ({"eviction": eviction.Lru}, "eviction is the class Lru"),
        ({"eviction": threshold.Ema()}, r"eviction Ema\(alpha=0.5\) has no method 'touch'"),
        ({"prefetch_per_position": "0.5"}, "prefetch_per_position is '0.5' but must be a number"),
        ({"staging": 2.5}, "staging is 2.5 but must be a whole number"),
        ({"seats": "2"}, "seats is '2' but must be a whole number"),
        ({"top_k": True}, "top_k is True but must be a whole number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_policy_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG.cache, **changes)


# ---- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", [True, False])
def test_a_fork_is_a_request_that_was_prefilled_alone(offload):
    """Regression of a mutant: where the index keys of the partial page are not copied, the offloaded and the resident
    run of a fork are wrong alike. So the fork is held to another cache, in which the child read the prompt itself."""
    config = scenarios.cache(SETTING, offload=offload, model=MODEL)
    prompt = np.random.default_rng(8).integers(0, scenarios.VOCAB, 90)

    def started():
        state = state_lib.admit(config.cache, state_lib.create(config.cache), 0, 192)
        return prefill.prefill(PARAMS, state, prompt, 0, config=config)[0]

    forked = state_lib.fork(config.cache, started(), 0, 2, 192)
    alone = state_lib.admit(config.cache, started(), 2, 192)
    alone, _ = prefill.prefill(PARAMS, alone, prompt, 2, config=config)
    assert forked.tables.lengths.tolist() == alone.tables.lengths.tolist() == [90, 0, 90]

    query = jax.random.normal(jax.random.key(1), (SEATS, 1, 4, 16))
    weights = jnp.ones((SEATS, 1, 4))

    @jax.jit
    def scores(state):
        view = state_lib.begin_step(config.cache, state)
        found = layer.scores_of(config.cache, view, query, weights, state.layers[0].index_keys)
        return found[2, 0, :90]

    assert bits(scores(forked)) == bits(scores(alone)) and np.isfinite(np.asarray(scores(alone))).all()
    random = np.random.default_rng(9)
    for _ in range(12):
        tokens = random.integers(0, scenarios.VOCAB, (SEATS, 1)).astype(np.int32)
        forked, one = decode.decode_step(PARAMS, forked, tokens, config=config)
        alone, other = decode.decode_step(PARAMS, alone, tokens, config=config)
        for a, b in ((one.logits[2], other.logits[2]), (one.selected[:, 2], other.selected[:, 2])):
            assert bits(a) == bits(b)
        assert bits(one.digests[:, 2]) == bits(other.digests[:, 2])
        assert bits(scores(forked)) == bits(scores(alone))
