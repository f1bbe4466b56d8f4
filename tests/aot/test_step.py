"""The whole step, compiled for an H200: one captured graph, everything in place, and the host pool never copied.

What only the GPU can show (bits, time) is not here; what XLA made of the step is. A variant that leaves the graph, or
that makes XLA copy a pool, is found on a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from echo_jax import decode
from echo_jax import state as state_lib
from echo_jax.config import COMPILER_OPTIONS
from echo_jax.threshold import Listing
from tests import scenarios
from tests.aot.compile import Compiled, compile_for_h200, cpu_mesh, device, host, need_cuda_handlers, why_not
from tests.test_lossless import GLM, PLAIN

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

SEATS = 3
VARIANTS = {
    "plain": {},
    "no_prefetch": {"staging": 0},
    "four_tokens": {"tokens_per_step": 4, "threshold": Listing()},
    "jnp_manager": {"slot_manager": "jnp"},
    "read_ahead": {"read_ahead": True, "layer_kinds": ("full", "shared", "shared")},
    "fp8": {"fp8": True},
    "four_tokens_jnp_manager_read_ahead": {"tokens_per_step": 4, "slot_manager": "jnp", "read_ahead": True},
    "mosaic_scores": {"fp8": True, "score_implementation": "mosaic_gpu"},
    "mosaic_scores_four_tokens": {"tokens_per_step": 4, "score_implementation": "mosaic_gpu"},
    "fused_prefetch": {
        "fp8": True,
        "read_ahead": True,
        "score_implementation": "mosaic_gpu",
        "prefetch_implementation": "fused",
        "threshold": Listing(),
    },
    "second_stream": {"prefetch_implementation": "second_stream", "read_ahead": True},
    "mosaic_attend": {"fp8": True, "attend_implementation": "mosaic_gpu"},
    "resident": {"offload": False},
    "resident_four_tokens": {"offload": False, "tokens_per_step": 4},
}


@pytest.fixture(scope="module", autouse=True)
def cuda_handlers():
    need_cuda_handlers()


def configure(offload: bool = True, fp8: bool = False, tokens_per_step: int = 1, **changes) -> decode.DecodeConfig:
    setting = PLAIN | {"tokens": tokens_per_step} | ({"records": "fp8", "keys": "fp8"} if fp8 else {})
    if changes.get("score_implementation") == "mosaic_gpu":  # which covers the keys of released models
        setting |= {"keys": setting["keys"] if fp8 else "bf16"}
        model = dataclasses.replace(GLM, index_head_dim=128)
    else:
        model = GLM
    if changes.get("attend_implementation") == "mosaic_gpu":
        model = dataclasses.replace(model, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    model = dataclasses.replace(model, layer_kinds=changes.get("layer_kinds", model.layer_kinds))
    config = scenarios.cache(setting, offload=offload, model=model)
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, **changes))


def arguments(config: decode.DecodeConfig):
    """Parameters, state and tokens as shapes, each in its memory."""

    def shapes(tree):
        return jax.tree.map(lambda leaf: device(leaf.shape, leaf.dtype), tree)

    state = jax.eval_shape(lambda: state_lib.create(dataclasses.replace(config.cache, host_memory="jnp")))
    placed = shapes(state)
    if state.host_pool is not None:
        placed = placed.replace(host_pool=host(state.host_pool.shape, state.host_pool.dtype))
    return shapes(scenarios.parameters(config.model)), placed, device((SEATS, config.cache.tokens_per_step), jnp.int32)


def compile_step(config: decode.DecodeConfig) -> Compiled:
    def step(params, state, tokens):
        return decode.step(params, state, tokens, config=config)

    return compile_for_h200(step, *arguments(config), donate_argnums=1, flags=COMPILER_OPTIONS)


def bytes_of(tree) -> int:
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def top_level(compiled: Compiled) -> list[str]:
    """Kinds of the thunks that the host launches one by one."""
    return re.findall(r"^\d+: (k\w+)", compiled.thunks, flags=re.MULTILINE)


def copies_of(compiled: Compiled, shape: tuple[int, ...]) -> list[str]:
    dimensions = re.escape(f"[{','.join(map(str, shape))}]")
    return re.findall(rf"^.*{dimensions}\S* copy(?:-start)?\(.*$", compiled.text, flags=re.MULTILINE)


def operands_of(compiled: Compiled) -> dict[str, tuple[str, list[str]]]:
    """Of every instruction of the step, by name: the custom call's target, if it is one, and the names it reads."""
    entry = compiled.text[compiled.text.index("ENTRY") :]
    instructions = re.findall(r"^ +(?:ROOT )?%?(\S+) = (.*)$", entry, flags=re.MULTILINE)
    names = {name for name, _ in instructions}
    found = {}
    for name, text in instructions:
        target = re.search(r'custom_call_target="(\w+)"', text)
        read = [word for word in re.findall(r"[\w.\-]+", text.partition("metadata=")[0]) if word in names]
        found[name] = (target[1] if target else "", read)
    return found


def targets_before(operands: dict[str, tuple[str, list[str]]], name: str) -> set[str]:
    """Targets of the custom calls that an instruction of `operands_of` waits for, near and far."""
    seen, left = {name}, [name]
    while left:
        new = set(operands[left.pop()][1]) - seen
        seen |= new
        left += new
    return {operands[other][0] for other in seen - {name}}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_step_is_one_graph_in_place(variant):
    config = configure(**VARIANTS[variant])
    compiled = compile_step(config)
    _, state, _ = arguments(config)

    assert top_level(compiled) == ["kCommandBuffer"], f"launched one by one: {top_level(compiled)}"
    memory = compiled.memory
    on_host = bytes_of(state.host_pool)
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes == on_host
    assert memory.alias_size_in_bytes == bytes_of(state) - on_host, "some part of the state is not updated in place"
    assert memory.host_temp_size_in_bytes == 0
    assert not copies_of(compiled, state.layers[0].records.shape)
    asked = (config.cache.score_implementation, config.cache.attend_implementation)
    assert ("mosaic_gpu" in compiled.text) == ("mosaic_gpu" in asked)
    if state.host_pool is not None:
        assert not copies_of(compiled, state.host_pool.shape)
        calls = re.findall(r'custom_call_target="(echo_\w+)"', compiled.text)
        layers = config.cache.num_layers
        # Maps and records in one call; two where jnp keeps the maps.
        at_once = layers if config.cache.slot_manager == "auto" else 0
        assert calls.count("echo_require") == at_once and calls.count("echo_recall") == layers - at_once
        assert calls.count("echo_write_back") == 1 and "echo_allocate" not in calls
        full = config.cache.layer_kinds.count("full")
        bounded = isinstance(config.cache.threshold, Listing)
        assert calls.count("echo_bounded_top_k") == (full if bounded else 0)
        separate = config.cache.staging and config.cache.prefetch_implementation != "fused"
        # One call reads ahead for all layers that share a list.
        lists = sum(len(config.cache.sharers_of(layer)) > 0 for layer in range(layers))
        ahead = (full if separate else 0) + (lists if config.cache.read_ahead else 0)
        assert calls.count("echo_read_rows") == ahead
        if variant == "read_ahead":  # the copies wait for what the full layer recalls
            operands = operands_of(compiled)
            reads = [name for name, (target, _) in operands.items() if target == "echo_read_rows"]
            assert sum("echo_require" in targets_before(operands, name) for name in reads) == lists
        beside = re.findall(r"kAsyncStart .*stream=computation_stream\[1\]", compiled.thunks)
        assert len(beside) == (ahead if config.cache.prefetch_implementation == "second_stream" else 0)


def test_a_step_without_graphs_is_told_apart():
    """The test above can fail: with command buffers switched off the host launches everything itself."""
    config = configure(offload=False)

    def step(params, state, tokens):
        return decode.step(params, state, tokens, config=config)

    compiled = compile_for_h200(step, *arguments(config), donate_argnums=1, flags={"xla_gpu_enable_command_buffer": ""})
    assert top_level(compiled) != ["kCommandBuffer"]


def test_several_steps_in_one_loop_copy_no_pool():
    """`decode_many` scans over tokens: the loop runs on the host, each turn is a graph, and the pools stay in place."""
    config = configure()
    params, state, _ = arguments(config)

    def many(params, state, tokens, seeds):
        unjitted = getattr(decode.decode_many, "__wrapped__")  # noqa: B009  jax refuses a jit with options in a jit
        return unjitted(params, state, tokens, seeds, config=config, steps=4)

    given = params, state, device((SEATS,), jnp.int32), device((SEATS,), jnp.uint32)
    compiled = compile_for_h200(many, *given, donate_argnums=1, flags=COMPILER_OPTIONS)
    assert "kWhile" in compiled.thunks and "kCommandBuffer" in compiled.thunks
    assert compiled.memory.host_temp_size_in_bytes == 0
    assert compiled.memory.host_alias_size_in_bytes == bytes_of(state.host_pool)
    assert state.host_pool is not None and not copies_of(compiled, state.host_pool.shape)


def test_eight_gpus_under_shard_map():
    """Every GPU steps its own seats, pools and host pool; the step is one graph on each."""
    config, workers = configure(), 8
    if jax.device_count() < workers:
        pytest.skip(f"needs {workers} CPU devices to lower on, there are {jax.device_count()}")
    mesh = cpu_mesh(workers, "worker")
    params, state, tokens = arguments(config)
    specs = decode.partition_specs(state, "worker")

    def whole(leaf, spec):
        shape = list(leaf.shape)
        for dimension, name in enumerate(spec):
            shape[dimension] *= workers if name else 1
        kind = leaf.sharding.memory_kind
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=NamedSharding(mesh, spec, memory_kind=kind))

    everywhere = PartitionSpec()
    states = jax.tree.map(whole, state, specs)
    replicated = jax.tree.map(lambda leaf: whole(leaf, everywhere), params)
    step = jax.shard_map(
        lambda params, state, tokens: decode.step(params, state, tokens, config=config),
        mesh=mesh,
        in_specs=(everywhere, specs, PartitionSpec("worker")),
        out_specs=(specs, decode.output_specs("worker")),
        check_vma=False,
    )
    compiled = compile_for_h200(
        *(step, replicated, states, whole(tokens, PartitionSpec("worker"))),
        donate_argnums=1,
        devices=workers,
        flags=COMPILER_OPTIONS,
    )
    assert top_level(compiled) == ["kCommandBuffer"]
    assert compiled.memory.host_temp_size_in_bytes == 0
    assert compiled.memory.host_alias_size_in_bytes == bytes_of(state.host_pool)
    assert compiled.memory.alias_size_in_bytes == bytes_of(state) - bytes_of(state.host_pool)
    assert state.host_pool is not None and not copies_of(compiled, state.host_pool.shape)
