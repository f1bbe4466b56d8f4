"""The same layer as a flax.nnx module: its projections are Params, its cache is a Variable of its own kind.

Knows flax.nnx, the attention of `models.dsa` and one ECHO layer. What the layers of a worker share (page tables, host
pool, clock) lives once, in an `EchoWorker`; what one layer keeps lives in its `EchoAttention`. An `EchoStep` ties them
together for one step and exists only while that is traced. Norms, residual stream and feed-forward are the caller's.

    >>> import dataclasses
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from echo_jax import decode, state
    >>> from echo_jax.models.presets import TINY
    >>> from echo_jax.nnx import EchoAttention, EchoWorker
    >>> model = dataclasses.replace(TINY, layer_kinds=("full", "shared"), mlp_kinds=("dense", "dense"))
    >>> layers = nnx.List([EchoAttention(model, number, rngs=nnx.Rngs(number)) for number in (0, 1)])
    >>> worker = EchoWorker(decode.cache_config(model, seats=2, capacity=128), layers)
    >>> worker.update(layers, state.admit(worker.config, worker.state(layers), seat=0, positions=128))
    >>> @nnx.jit(donate_argnames=("worker", "layers"))
    ... def attentions(worker, layers, hidden):
    ...     step = worker.begin_step(hidden.shape[1])
    ...     for layer in layers:
    ...         hidden = hidden + layer(hidden, step)
    ...     step.finish()
    ...     return hidden
    >>> attentions(worker, layers, jnp.ones((2, 1, model.hidden_size))).shape
    (2, 1, 64)
    >>> worker.tables.get_value().lengths.tolist()
    [1, 0]
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from echo_jax import checks, recall
from echo_jax import state as state_lib
from echo_jax.config import CacheConfig
from echo_jax.decode import DecodeConfig
from echo_jax.layer import LayerInputs, LayerOutput, echo_layer
from echo_jax.models import dsa
from echo_jax.models.config import DENSE, FULL, SHARED, DsaConfig
from echo_jax.types import EchoState, Staging


class EchoCache(nnx.Variable):
    """What a cache holds, as against what a model has learned: `nnx.split(model, nnx.Param, EchoCache)` parts them."""


class EchoAttention(nnx.Module):
    """Attention of one layer over an offloaded cache: MLA, with a lightning indexer in full layers.

    weights are the layer's of `models.dsa`, of which "attention" and "indexer" are held (not copied: who donates the
    module gives them up); without them they are drawn with rngs. There is no cache until an `EchoWorker` makes it.
    """

    def __init__(
        self, model: DsaConfig, number: int, *, weights: dsa.Params | None = None, rngs: nnx.Rngs | None = None
    ):
        if rngs is not None and weights is None:
            weights = _draw(model, model.layer_kinds[number], rngs.params())
        elif rngs is not None or weights is None:
            raise ValueError("give either weights or rngs: a layer has parameters from a model, or draws them")
        self.model = model
        self.number = number
        self.attention = nnx.Dict({name: nnx.Param(value) for name, value in weights["attention"].items()})
        self.indexer = nnx.Dict({name: nnx.Param(value) for name, value in weights.get("indexer", {}).items()})
        self.cache = EchoCache(None)  # a LayerState

    def __call__(self, x: jax.Array, step: EchoStep) -> jax.Array:
        """x [B, T, E], the normed hidden state of the step's new tokens -> [B, T, E], to be added to the stream."""
        wanted = (*step.view.positions.shape, self.model.hidden_size)
        checks.shape("x", x, wanted, "seats, tokens of this step, hidden size of the model")
        weights = self.weights()
        flat, positions = x.reshape(-1, x.shape[-1]), step.view.positions.reshape(-1)
        inputs = dsa.attention_inputs(weights, flat, positions, self.model)
        output = step.attend(self, LayerInputs(*jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[1:]), inputs)))
        attended = output.attended.reshape(-1, *output.attended.shape[2:])
        return dsa.attention_output(weights, attended, self.model).reshape(x.shape)

    def weights(self) -> dsa.Params:
        """The parameters in the form of `models.dsa`."""
        parts = {"attention": self.attention, "indexer": self.indexer}
        arrays = {part: {name: value.get_value() for name, value in held.items()} for part, held in parts.items()}
        return {part: held for part, held in arrays.items() if held}


def _draw(model: DsaConfig, kind: str, key: jax.Array) -> dsa.Params:
    """Parameters of one layer's attention."""
    layer = _draw_full(dataclasses.replace(model, layer_kinds=(FULL,), mlp_kinds=(DENSE,)), key)
    return layer if kind == FULL else {"attention": layer["attention"]}


@functools.partial(jax.jit, static_argnames="alone")
def _draw_full(alone: DsaConfig, key: jax.Array) -> dsa.Params:
    """Jitted, so that the rest of the model is never made, and once for all its layers."""
    layer = dsa.init_params(key, alone)["layers"][0]
    return {part: layer[part] for part in ("attention", "indexer")}


class EchoWorker(nnx.Module):
    """What the layers of one worker share; with the layers' caches it makes up one `EchoState`."""

    def __init__(self, config: CacheConfig, layers: Sequence[EchoAttention], device: Any = None):
        numbers = [layer.number for layer in layers]
        if numbers != list(range(config.num_layers)):
            raise ValueError(
                f"the layers are {numbers} but the cache is of {config.num_layers}; give each once, in order"
            )
        for layer in layers:
            DecodeConfig(layer.model, config)  # refuses what does not fit, with both values
        state = state_lib.create(config, device)
        self.config = config
        self.tables = EchoCache(state.tables)
        self.host_pool = EchoCache(state.host_pool)
        self.clock = EchoCache(state.step)
        self.update(layers, state)

    def begin_step(self, tokens_per_seat: int | None = None) -> EchoStep:
        """Opens a step of T tokens per seat: call every layer with it, in order, and then `finish`."""
        return EchoStep(self, tokens_per_seat)

    def state(self, layers: Iterable[EchoAttention]) -> EchoState:
        """The state that worker and layers hold. The functions of `state` donate it, so `update` comes after."""
        caches = tuple(layer.cache.get_value() for layer in layers)
        return EchoState(self.tables.get_value(), caches, self.host_pool.get_value(), self.clock.get_value())

    def update(self, layers: Iterable[EchoAttention], state: EchoState) -> None:
        """Worker and layers hold `state` from now on."""
        self.tables.set_value(state.tables)
        self.host_pool.set_value(state.host_pool)
        self.clock.set_value(state.step)
        for layer, cache in zip(layers, state.layers, strict=True):
            layer.cache.set_value(cache)

    def close(self, layers: Iterable[EchoAttention]) -> None:
        """Gives the memory of the cache back at once, host pool included; worker and layers cannot step again."""
        layers = tuple(layers)
        state_lib.destroy(self.state(layers))


class EchoStep:
    """One step of a worker. A value of the trace, not a module: nothing of it stays behind."""

    def __init__(self, worker: EchoWorker, tokens_per_seat: int | None):
        self.worker = worker
        self.view = state_lib.begin_step(worker.config, worker.state(()), tokens_per_seat)
        self.layers: list[EchoAttention] = []
        self.outputs: list[LayerOutput] = []  # selections, digests and counts, for who wants to return them
        self.staged: dict[int, Staging] = {}  # read ahead, by layer

    def attend(self, layer: EchoAttention, inputs: LayerInputs) -> LayerOutput:
        """`echo_layer` on the layer's cache; the new records wait for `finish`."""
        config, number = self.worker.config, len(self.layers)
        if layer.number != number:
            raise ValueError(f"layer {layer.number} was called when layer {number} was due; call each once, in order")
        shared = self.outputs[-1] if config.layer_kinds[number] == SHARED else None
        if shared is not None:
            self.read_ahead([layer])
        cache, output = echo_layer(
            config,
            layer.cache.get_value(),
            self.worker.host_pool.get_value(),
            number,
            self.view,
            inputs,
            scale=layer.model.attention_scale,
            shared=shared,
            staging=self.staged.pop(number, None),
        )
        layer.cache.set_value(cache)
        self.layers.append(layer)
        self.outputs.append(output)
        return output

    def read_ahead(self, layers: Iterable[EchoAttention]) -> None:
        """Copies what shared layers miss, once the full layer before them was called (`recall.read_ahead`).

        With `CacheConfig.read_ahead` a layer does so when it is called; told right behind the full layer, with all
        layers that share its list, the copies have until then to cross the link, if kernels of the graph may run side
        by side. nnx.jit takes no compiler options (flax 0.12): XLA_FLAGS has to say
        --xla_gpu_command_buffer_scheduling_mode=CONCURRENT. Nothing is copied without that setting of the cache, in a
        resident one, or twice.
        """
        config, held = self.worker.config, {layer.number: layer for layer in layers}
        full = [number for number in range(len(self.layers)) if config.layer_kinds[number] != SHARED]
        sharers = [number for number in config.sharers_of(full[-1]) if number >= len(self.layers)] if full else []
        if not set(held) <= set(sharers):
            raise ValueError(
                f"layers {[*held]} were to read ahead where {sharers} can: those that share the list of the last full "
                "layer that was called, and were not called yet; say it right behind that layer"
            )
        theirs = {number: layer.cache.get_value() for number, layer in held.items() if number not in self.staged}
        host_pool = self.worker.host_pool.get_value()
        if theirs and host_pool is not None and config.read_ahead:
            last = self.outputs[full[-1]]
            selected, recalled = last.selection.positions, last.moved.recalled
            self.staged |= recall.read_ahead(config, theirs, host_pool, self.view, selected, after=recalled)

    def finish(self) -> None:
        """Writes the new records of all layers to the host in one call; lengths and clock move on."""
        config, worker = self.worker.config, self.worker
        if len(self.layers) != config.num_layers:
            raise ValueError(f"{len(self.layers)} of {config.num_layers} layers were called; call all before finish")
        state = worker.state(self.layers)
        records = [output.new_records for output in self.outputs]
        worker.update(self.layers, state_lib.finish_step(config, state, state.layers, records, self.view))
