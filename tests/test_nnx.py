"""The nnx module is the layer of decode_step: same bits, same cache, in place; and its example runs."""

from __future__ import annotations

import dataclasses
import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import echo_jax.nnx
from echo_jax import decode
from echo_jax import state as state_lib
from echo_jax.layer import LayerInputs
from echo_jax.models import dsa
from echo_jax.models.config import DsaConfig
from echo_jax.models.presets import TINY
from echo_jax.nnx import EchoAttention, EchoCache, EchoWorker
from tests import scenarios

MODEL = dataclasses.replace(scenarios.MODEL, layer_kinds=("full", "shared"), mlp_kinds=("dense", "dense"))
SETTING = dict(
    records="bf16", keys="fp8", tokens=1, threshold="ema", cap=6, pool="barely", memory="auto", eviction="lru", warm=0
)


class Model(nnx.Module):
    """Somebody's model around EchoAttention: all else is plain parameters and functions."""

    def __init__(self, config: DsaConfig, params: dsa.Params, ahead: tuple[tuple[int, ...], ...] = ()):
        self.config = config
        self.ahead = ahead  # layers that are told to read ahead as soon as the first one was called, one call each
        self.layers = nnx.List([EchoAttention(config, n, weights=w) for n, w in enumerate(params["layers"])])
        others = [{name: w[name] for name in ("input_norm", "post_norm", "mlp")} for w in params["layers"]]
        self.others = nnx.Param(
            {name: params[name] for name in ("embed", "final_norm", "lm_head")} | {"layers": others}
        )

    def __call__(self, tokens, worker: EchoWorker):
        config, others = self.config, self.others.get_value()
        step = worker.begin_step(tokens.shape[1])
        hidden = dsa.embed(others, tokens.reshape(-1), config)
        for layer, weights in zip(self.layers, others["layers"], strict=True):
            x = dsa.rms_norm(hidden, weights["input_norm"], config.rms_norm_eps)
            hidden = hidden + layer(x.reshape(*tokens.shape, -1), step).reshape(hidden.shape)
            for numbers in self.ahead if layer.number == 0 else ():
                step.read_ahead(self.layers[number] for number in numbers)
            x = dsa.rms_norm(hidden, weights["post_norm"], config.rms_norm_eps)
            hidden = lax.optimization_barrier(hidden + dsa.mlp(weights["mlp"], x))
        step.finish()
        return dsa.logits(others, hidden, config).reshape(*tokens.shape, -1), step.outputs


@pytest.mark.parametrize("ahead", [None, ((1,), (2, 1))], ids=["", "read_ahead"])
def test_bits_and_cache_are_those_of_decode_step_in_place(ahead):
    """Under pressure, with shared layers, a seat that starts late and one that ends: every output of every step and
    the whole cache at the end. Pools keep their place, and one trace serves it all. Of three shared layers one is told
    twice to read ahead, one once, and one does when it is called: what is staged and of use does not depend on that."""
    of_model = MODEL if ahead is None else dataclasses.replace(MODEL, **layers_like(("full",) + ("shared",) * 3))
    config, params = scenarios.cache(SETTING, offload=True, model=of_model), scenarios.parameters(of_model)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, read_ahead=ahead is not None))
    cache, model, traces = config.cache, Model(of_model, jax.tree.map(jnp.copy, params), ahead or ()), []
    worker = EchoWorker(cache, model.layers)

    @nnx.jit(donate_argnames=("model", "worker"))
    def step(model, worker, tokens):
        traces.append(tokens)
        logits, outputs = model(tokens, worker)
        return logits, [(output.selection.positions, output.digest, output.moved) for output in outputs]

    expected = state_lib.create(cache)
    places, random, moved = pointers(worker.state(model.layers)), np.random.default_rng(2), []
    for number in range(40):
        change = {0: (state_lib.admit, 0, 64), 3: (state_lib.admit, 2, 64), 35: (state_lib.release, 0)}.get(number)
        if change:
            function, *arguments = change
            expected = function(cache, expected, *arguments)
            worker.update(model.layers, function(cache, worker.state(model.layers), *arguments))
        tokens = random.integers(0, scenarios.VOCAB, (3, 1)).astype(np.int32)
        expected, wanted = decode.decode_step(params, expected, tokens, config=config)
        logits, layers = step(model, worker, tokens)
        assert_same_bits(logits, wanted.logits)
        for layer, (positions, digest, counts) in enumerate(layers):
            assert_same_bits((positions, digest), (wanted.selected[layer], wanted.digests[layer]))
            assert_same_bits(counts, jax.tree.map(lambda x, layer=layer: x[layer], wanted.moved))
            moved.append((int(counts.evicted), int(counts.staged) if layer > 0 else 0))
    evicted, staged = np.sum(moved, axis=0)
    assert evicted > 20, "no pressure, no proof"
    assert (staged > 20) == (ahead is not None)
    assert_same_bits(worker.state(model.layers), expected)
    assert pointers(worker.state(model.layers)) == places and len(traces) == 1


def layers_like(kinds: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {"layer_kinds": kinds, "mlp_kinds": ("dense",) * len(kinds)}


def pointers(state) -> list[int]:
    return [state.host_pool.unsafe_buffer_pointer(), *(layer.records.unsafe_buffer_pointer() for layer in state.layers)]


def assert_same_bits(one, other):
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


def layers_of(model: DsaConfig) -> list[EchoAttention]:
    return [EchoAttention(model, number, weights=w) for number, w in enumerate(scenarios.parameters(MODEL)["layers"])]


def test_cache_and_parameters_are_told_apart():
    """What is trained or saved as a model holds nothing of a cache, and the other way round; drawn parameters have
    the form of given ones."""
    layers = nnx.List(layers_of(MODEL))
    cache = scenarios.cache(SETTING, offload=True, model=MODEL).cache
    worker = EchoWorker(cache, layers)
    _, learned, cached = nnx.split(nnx.Dict(layers=layers, worker=worker), nnx.Param, EchoCache)
    assert len(jax.tree.leaves(learned)) == len(jax.tree.leaves([layer.weights() for layer in layers]))
    assert len(jax.tree.leaves(cached)) == len(jax.tree.leaves(state_lib.create(cache)))
    drawn = EchoAttention(TINY, 0, rngs=nnx.Rngs(0)).weights()
    given = jax.eval_shape(lambda: dsa.init_params(jax.random.key(0), TINY))["layers"][0]
    assert jax.tree.map(form, drawn) == {part: jax.tree.map(form, given[part]) for part in ("attention", "indexer")}
    assert np.std(np.asarray(drawn["attention"]["o"])) > 0.05


def form(array: jax.Array):
    return array.shape, array.dtype


def test_layers_out_of_order_are_refused():
    cache, layers = scenarios.cache(SETTING, offload=True, model=MODEL).cache, layers_of(MODEL)
    with pytest.raises(ValueError, match=r"the layers are \[1, 0\] but the cache is of 2; give each once, in order"):
        EchoWorker(cache, layers[::-1])
    with pytest.raises(ValueError, match="the model's index key width is 32 but the cache's is 16"):
        EchoWorker(cache, layers_of(dataclasses.replace(MODEL, index_head_dim=32)))
    with pytest.raises(ValueError, match="give either weights or rngs"):
        EchoAttention(MODEL, 0)
    step = EchoWorker(cache, layers).begin_step()
    with pytest.raises(ValueError, match="layer 1 was called when layer 0 was due; call each once, in order"):
        step.attend(layers[1], LayerInputs(jnp.zeros(0), jnp.zeros(0)))
    with pytest.raises(ValueError, match="0 of 2 layers were called; call all before finish"):
        step.finish()
    with pytest.raises(ValueError, match=r"layers \[1\] were to read ahead where \[\] can: .* right behind that layer"):
        step.read_ahead(layers[1:])
    step.read_ahead([])


@pytest.mark.parametrize("changes", [{"offload": False, "read_ahead": True}, {"read_ahead": False}], ids=str)
def test_nothing_is_read_ahead_where_nothing_can_be_or_nobody_asked(changes):
    """The resident run is the same model with another configuration, so a call that has nothing to do is no error."""
    config = scenarios.cache(SETTING, offload=True, model=MODEL)
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, **changes))
    model = Model(MODEL, scenarios.parameters(MODEL), ((1,),))
    worker = EchoWorker(config.cache, model.layers)
    outputs = nnx.eval_shape(lambda model, worker: model(jnp.zeros((3, 1), jnp.int32), worker)[1], model, worker)
    assert len(outputs) == 2


def test_the_example_in_the_docstring_runs():
    failed, tried = doctest.testmod(echo_jax.nnx)
    assert failed == 0 and tried > 8
