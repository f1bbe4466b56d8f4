"""The decode step: where a model and a cache meet.

`decode_step` is one pure function of fixed shapes: compiled once, it serves every cache content, occupancy and length.
Each layer reads top to bottom: project, echo_layer (append, score, prefetch, select, require, attend, observe), finish.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax import checks, recall
from echo_jax import state as state_lib
from echo_jax.config import COMPILER_OPTIONS, CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.layer import LayerInputs, LayerOutput, echo_layer
from echo_jax.models import dsa
from echo_jax.models.config import SHARED, DsaConfig
from echo_jax.sampling import GREEDY, Sampling, sample
from echo_jax.stats import Moved
from echo_jax.threshold import Ema
from echo_jax.types import NO_ROW, NO_TOKEN, PAGE, EchoState


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """A model and the cache that serves it; they must agree in layers, widths and top_k."""

    model: DsaConfig
    cache: CacheConfig

    def __post_init__(self):
        model, cache = self.model, self.cache
        for what, wanted, given in (
            ("layer kinds", model.layer_kinds, cache.layer_kinds),
            ("record latent width", model.kv_lora_rank, cache.records.latent),
            ("record rope width", model.qk_rope_head_dim, cache.records.rope),
            ("index key width", model.index_head_dim, cache.keys.width),
        ):
            if wanted != given:
                raise ValueError(f"the model's {what} is {wanted} but the cache's is {given}; use cache_config(model)")
        if cache.capacity > model.max_positions:
            raise ValueError(
                f"capacity {cache.capacity} exceeds the model's {model.max_positions} positions; lower the capacity"
            )


def cache_config(
    model: DsaConfig,
    *,
    seats: int,
    capacity: int,
    host_rows: int | None = None,
    device_slots: int | None = None,
    record_format: str = "bf16",
    key_format: str = "f32",
    rotate_index_keys: bool = False,
    **options: Any,
) -> CacheConfig:
    """The cache of a model. Sizes are rounded up to pages; without host_rows every seat can be full at once, without
    device_slots the pool holds 4 K rows a seat (at least what one step and the warm windows need, else at most every
    host row)."""
    capacity = -(-capacity // PAGE) * PAGE
    host_rows = seats * capacity if host_rows is None else -(-host_rows // PAGE) * PAGE
    top_k = options.pop("top_k", model.index_topk)
    needed = seats * options.get("tokens_per_step", 1) * (top_k + 1)
    warmed = options.get("warm_windows", 0) * top_k
    ample = max(needed, warmed, min(4 * seats * top_k, host_rows))
    options = {"threshold": Ema(), "eviction": Lru()} | options
    return CacheConfig(
        layer_kinds=model.layer_kinds,
        records=RecordFormat(record_format, model.kv_lora_rank, model.qk_rope_head_dim),
        keys=KeyFormat(key_format, model.index_head_dim, rotate_index_keys),
        seats=seats,
        capacity=capacity,
        host_rows=host_rows,
        device_slots=ample if device_slots is None else device_slots,
        top_k=top_k,
        **options,
    )


class StepOutput(struct.PyTreeNode):
    """What a step returns besides the state."""

    logits: jax.Array  # f32[B, T, V]
    selected: jax.Array  # i32[L, B, T, K]  attended positions, ascending, then NO_POSITION
    digests: jax.Array  # u32[L, B, T]  fingerprints of each layer's attended outputs
    is_full: jax.Array  # bool[B]  no room for all its tokens: those were not written, the logits mean nothing
    moved: Moved  # i32[L] each


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state", compiler_options=COMPILER_OPTIONS)
def decode_step(
    params: dsa.Params, state: EchoState, tokens: jax.Array, *, config: DecodeConfig
) -> tuple[EchoState, StepOutput]:
    """One step for every seat: tokens i32[B, T] are appended, attended from and answered.

    Idle seats, and seats whose capacity is used up (`StepOutput.is_full`), take part in the shapes only: they write
    nothing and their logits mean nothing. `state` is donated. With T > 1 each token selects for itself, as if the
    steps had been taken one by one; `rollback` drops the ones that are rejected. It has compiler options of its own
    (`config.COMPILER_OPTIONS`), which jax refuses inside another jit or trace: call `step` there.
    """
    return step(params, state, tokens, config=config)


def step(params: dsa.Params, state: EchoState, tokens: jax.Array, *, config: DecodeConfig):
    """decode_step without its own jit, for callers who bring theirs, with or without its compiler options."""
    model, cache = config.model, config.cache
    checks.integers("tokens", tokens)
    checks.shape("tokens", tokens, (cache.seats, None), "seats, new tokens per seat")
    view = state_lib.begin_step(cache, state, tokens.shape[1])
    is_full = state.tables.active & jnp.any(view.new_rows == NO_ROW, axis=1)
    positions = view.positions.reshape(-1)
    hidden = dsa.embed(params, tokens.reshape(-1), model)

    layers, outputs, ahead = list(state.layers), [], {}
    for index, weights in enumerate(params["layers"]):
        inputs = _by_seat(dsa.project(weights, hidden, positions, model), tokens.shape)
        shared = outputs[-1] if model.layer_kinds[index] == SHARED else None
        layers[index], output = echo_layer(
            cache,
            layers[index],
            state.host_pool,
            index,
            view,
            inputs,
            scale=model.attention_scale,
            shared=shared,
            staging=ahead.pop(index, None),
        )
        if cache.read_ahead and state.host_pool is not None and (sharers := cache.sharers_of(index)):
            theirs, selected = {number: layers[number] for number in sharers}, output.selection.positions
            ahead = recall.read_ahead(cache, theirs, state.host_pool, view, selected, after=output.moved.recalled)
        attended = output.attended.reshape(positions.shape[0], *output.attended.shape[2:])
        hidden = dsa.finish(weights, hidden, attended, model, model.mlp_kinds[index])
        outputs.append(output)

    state = state_lib.finish_step(cache, state, layers, [output.new_records for output in outputs], view)
    logits = dsa.logits(params, hidden, model).reshape(*tokens.shape, -1)
    selected, digests, moved = _stacked(outputs)
    return state, StepOutput(logits, selected, digests, is_full, moved)


def _by_seat(inputs: dsa.AttentionInputs, shape: tuple[int, ...]) -> LayerInputs:
    """[B * T, ...] -> [B, T, ...]."""
    return LayerInputs(*jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), inputs))


def _stacked(outputs: list[LayerOutput]):
    selected = jnp.stack([output.selection.positions for output in outputs])
    digests = jnp.stack([output.digest for output in outputs])
    moved = jax.tree.map(lambda *counts: jnp.stack(counts), *[output.moved for output in outputs])
    return selected, digests, moved


@functools.partial(
    jax.jit,
    static_argnames=("config", "steps", "sampling"),
    donate_argnames="state",
    compiler_options=COMPILER_OPTIONS,
)
def decode_many(
    params: dsa.Params,
    state: EchoState,
    tokens: jax.Array,
    seeds: jax.Array,
    *,
    config: DecodeConfig,
    steps: int,
    sampling: Sampling = GREEDY,
) -> tuple[EchoState, tuple[jax.Array, StepOutput]]:
    """`steps` steps with sampling between them, as one compiled loop: the same bits as calling decode_step.

    tokens i32[B] are the first inputs, seeds u32[B] each seat's own. Returns the sampled tokens i32[steps, B] and the
    outputs of every step, stacked. From the step on in which a seat is full its tokens are NO_TOKEN. Not inside another
    jit, as decode_step: scan over `step` there.
    """
    checks.whole("steps", steps, least=0)
    for name, array in (("tokens", tokens), ("seeds", seeds)):
        checks.integers(name, array)
        checks.shape(name, array, (config.cache.seats,), "seats")

    def one(carry, _):
        state, tokens = carry
        next_position = state.tables.lengths + 1
        state, output = step(params, state, tokens[:, None], config=config)
        sampled = sample(output.logits[:, 0], seeds, next_position, sampling)
        sampled = jnp.where(output.is_full, NO_TOKEN, sampled)
        return (state, sampled), (sampled, output)

    (state, _), outputs = lax.scan(one, (state, tokens), None, length=steps)
    return state, outputs


def partition_specs(state: EchoState, axis: str) -> EchoState:
    """PartitionSpecs that give every device of a mesh axis its own seats, pools, tables and host pool.

    Build the state with `stack_states`; inside `shard_map` each device then sees a whole state of its own.
    """
    specs = jax.tree.map(lambda leaf: PartitionSpec(axis), state)
    host = None if state.host_pool is None else PartitionSpec(None, axis)
    return specs.replace(host_pool=host, step=PartitionSpec())


def output_specs(axis: str) -> StepOutput:
    """PartitionSpecs of what `step` returns beside the state: seats of all devices in order.

    The counts become i32[devices * L], each device's layers in turn; what moved on one link is not added to another's.
    """
    first: Any = PartitionSpec(axis)
    second: Any = PartitionSpec(None, axis)
    return StepOutput(first, second, second, first, Moved(*[first] * len(dataclasses.fields(Moved))))


def stack_states(states: Sequence[EchoState], mesh: Mesh, axis: str) -> EchoState:
    """One global state of the states of the mesh's devices, each made by `state.create(config, device)`.

    Nothing is copied or moved: the global arrays are the local ones side by side, the host pools in host memory too,
    and the local states are given up. Maps and tables keep counting inside their own device. Raises ValueError unless
    there is one state per device of a mesh that has only this axis, in its order, all at the same step.
    """
    devices = list(mesh.devices.flat)
    if mesh.axis_names != (axis,) or len(states) != len(devices):
        raise ValueError(
            f"{len(states)} states do not fit axis {axis!r} of a mesh of {dict(mesh.shape)}; give one state per device "
            "of a mesh with that axis alone"
        )
    for number, (local, device) in enumerate(zip(states, devices, strict=True)):
        if local.step.devices() != {device}:
            raise ValueError(
                f"state {number} is on {sorted(map(str, local.step.devices()))} but the mesh has {device} there; "
                "create each state on its own device"
            )
    steps = [int(local.step) for local in states]
    if len(set(steps)) > 1:
        raise ValueError(f"the states are at steps {steps} but one clock serves all; stack states that step together")

    def side_by_side(spec: PartitionSpec, *parts: jax.Array) -> jax.Array:
        shape = list(parts[0].shape)
        for dimension, name in enumerate(spec):
            shape[dimension] *= 1 if name is None else len(parts)
        sharding = NamedSharding(mesh, spec, memory_kind=parts[0].sharding.memory_kind)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))

    specs = partition_specs(states[0], axis)
    return jax.tree.map(side_by_side, specs, *states, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def unstack_states(state: EchoState) -> list[EchoState]:
    """The states that `stack_states` put side by side, in its order, again without a copy: to admit, fork or release
    requests of one device. The global state is given up. Of several processes each gets its own devices' states."""
    sharding = state.step.sharding
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)

    def on(device):
        # A shard of host memory comes out typed as device memory (jax 0.11.2); put where it is, it is typed anew.
        def own(leaf):
            part = next(shard.data for shard in leaf.addressable_shards if shard.device == device)
            return jax.device_put(part, part.sharding, donate=True)

        return own

    devices = [device for device in sharding.mesh.devices.flat if device in sharding.addressable_devices]
    return [jax.tree.map(on(device), state) for device in devices]
