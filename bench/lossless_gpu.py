"""Does the offloaded run stay the resident run on a GPU, at the shapes of a released model?

    python -m bench.lossless_gpu [--seats 8] [--context 100000] [--steps 256] [--records bf16] [--keys fp8] ...

A model of random weights with DeepSeek-V3.2's attention (128 heads, index 64 x 128, top_k 2048) and small dense blocks
steps over a cache that is filled with synthetic records, twice in lockstep: offloaded with a pool a little above what a
step needs, and resident. Selected lists, digests of attended outputs and logits of every step must be equal to the bit.

It knows how a cache is filled without a prompt (records of random values, stored through the library's own write-back).
It does not know how a model is prefilled; `echo-jax generate --check` shows that with a real one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.harness import record
from echo_jax import _compat, decode, hostmem
from echo_jax import state as state_lib
from echo_jax.cli.policies import parse_threshold
from echo_jax.models import dsa, presets
from echo_jax.types import EchoState

ROWS_AT_ONCE = 8192


def model(layers: int) -> dsa.DsaConfig:
    """V3.2's attention in a few dense layers: what decides over lists and bits, without 600 GB of experts."""
    return dataclasses.replace(
        presets.V32,
        layer_kinds=("full",) * layers,
        mlp_kinds=("dense",) * layers,
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=2048,
        num_experts=0,
        num_shared_experts=0,
        experts_per_token=0,
        expert_groups=1,
        expert_groups_kept=1,
    )


def configuration(arguments: argparse.Namespace, offload: bool) -> decode.DecodeConfig:
    config = model(arguments.layers)
    needed = arguments.seats * arguments.tokens * (config.index_topk + 1)
    cache = decode.cache_config(
        config,
        seats=arguments.seats,
        capacity=arguments.context + arguments.steps * arguments.tokens,
        device_slots=needed + arguments.spare,
        record_format=arguments.records,
        key_format=arguments.keys,
        tokens_per_step=arguments.tokens,
        threshold=parse_threshold(arguments.threshold),
        staging=arguments.staging,
        slot_manager=arguments.slot_manager,
        prefetch_implementation=arguments.prefetch,
        attend_implementation=arguments.attend,
        offload=offload,
    )
    return decode.DecodeConfig(config, cache)


def fill(config: decode.DecodeConfig, state: EchoState, context: int) -> EchoState:
    """Every seat holds `context` positions of random records and index keys, other ones in every layer and row."""
    cache = config.cache
    for seat in range(cache.seats):
        state = state_lib.admit(cache, state, seat, cache.capacity)
    lengths = jnp.full((cache.seats,), context, jnp.int32)
    layers = [_fill_layer(cache, index, layer) for index, layer in enumerate(state.layers)]
    host_pool = state.host_pool
    if host_pool is not None:
        store = jax.jit(hostmem.write_back, donate_argnums=0)
        for first in range(0, cache.host_rows, ROWS_AT_ONCE):
            rows = first + np.arange(ROWS_AT_ONCE, dtype=np.int32)
            rows = np.where(rows < cache.host_rows, rows, -1).astype(np.int32)
            made = jnp.stack([_records(cache, layer, jnp.asarray(rows)) for layer in range(cache.num_layers)])
            host_pool = store(host_pool, made, rows)
    tables = state.tables.replace(lengths=jax.device_put(lengths, state.tables.lengths.sharding))
    return state.replace(tables=tables, layers=tuple(layers), host_pool=host_pool)


@functools.partial(jax.jit, static_argnums=0)
def _records(cache, layer, rows: jax.Array) -> jax.Array:
    """The stored records of host rows i32[M] of one layer: a function of their numbers, so any order gives them."""

    def one(row):
        return jax.random.normal(jax.random.fold_in(jax.random.key(layer), row), (cache.records.width,), jnp.float32)

    return cache.records.encode(jax.vmap(one)(rows))


def _fill_layer(cache, index: int, layer):
    """Index keys of all pages; in the resident run the records too."""

    @functools.partial(jax.jit, donate_argnums=0)
    def keys(stored, number):
        values = jax.random.normal(jax.random.fold_in(jax.random.key(index), number), (ROWS_AT_ONCE, cache.keys.width))
        rows = number * ROWS_AT_ONCE + jnp.arange(ROWS_AT_ONCE, dtype=jnp.int32)
        return cache.keys.append(stored, jnp.where(rows < cache.host_rows, rows, -1), values)

    @functools.partial(jax.jit, donate_argnums=0)
    def records(pool, number):
        rows = number * ROWS_AT_ONCE + jnp.arange(ROWS_AT_ONCE, dtype=jnp.int32)
        return pool.at[rows].set(_records(cache, index, rows), mode="drop")

    stored, pool = layer.index_keys, layer.records
    for number in range(-(-cache.host_rows // ROWS_AT_ONCE)):
        stored = keys(stored, jnp.int32(number))
        if not cache.offload:
            pool = records(pool, jnp.int32(number))
    return layer.replace(index_keys=stored, records=pool)


@jax.jit
def differences(ours: decode.StepOutput, reference: decode.StepOutput) -> jax.Array:
    """i32[3]: lists, digests and rows of logits of one step that are not the same bits."""
    bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
    lists = jnp.any(ours.selected != reference.selected, axis=-1)
    logits = jnp.any(bits(ours.logits) != bits(reference.logits), axis=-1)
    return jnp.stack([jnp.sum(x, dtype=jnp.int32) for x in (lists, ours.digests != reference.digests, logits)])


def _where(ours: decode.StepOutput, reference: decode.StepOutput) -> str:
    """The first layer and the seats whose lists or digests differ, to know where to look."""
    lists = np.any(np.asarray(ours.selected != reference.selected), axis=(2, 3))
    digests = np.any(np.asarray(ours.digests != reference.digests), axis=2)
    layer = int(np.argmax(np.any(lists | digests, axis=1)))
    seats = (
        f"lists of seats {np.flatnonzero(lists[layer]).tolist()}, digests of {np.flatnonzero(digests[layer]).tolist()}"
    )
    return f"layer {layer}: {seats}"


def run(arguments: argparse.Namespace) -> int:
    """Prints what happened, records a row; returns the number of differences."""
    offloaded, resident = (configuration(arguments, offload) for offload in (True, False))
    params = jax.jit(dsa.init_params, static_argnums=1)(jax.random.key(7), offloaded.model)
    states = []
    for config in (offloaded, resident):
        start = time.perf_counter()
        states.append(jax.block_until_ready(fill(config, state_lib.create(config.cache), arguments.context)))
        print(f"filled {'offloaded' if config.cache.offload else 'resident'} in {time.perf_counter() - start:.1f} s")
    tokens = jnp.arange(arguments.seats * arguments.tokens, dtype=jnp.int32).reshape(arguments.seats, -1)
    found, moved, elapsed = np.zeros(3, np.int64), [], {True: [], False: []}
    for _ in range(arguments.steps):
        outputs = []
        for index, config in enumerate((offloaded, resident)):
            start = time.perf_counter()
            states[index], output = decode.decode_step(params, states[index], tokens, config=config)
            jax.block_until_ready(output.logits)
            elapsed[config.cache.offload].append((time.perf_counter() - start) * 1e6)
            outputs.append(output)
        found += (now := np.asarray(differences(*outputs)))
        if now.any() and not (found - now).any():
            print(f"first differences at step {len(moved)}: {now.tolist()}; {_where(*outputs)}")
        moved.append(jax.tree.map(lambda count: int(jnp.sum(count)), outputs[0].moved))
        tokens = jnp.argmax(outputs[1].logits, axis=-1).astype(jnp.int32)

    total = jax.tree.map(lambda *counts: sum(counts), *moved)
    times = {
        name: float(np.median(elapsed[is_offloaded]))
        for name, is_offloaded in (("offloaded", True), ("resident", False))
    }
    print(f"differences (lists, digests, logits): {found.tolist()}   moved: {total}")
    print("median step, us:", {name: round(value) for name, value in times.items()})
    record(
        "B.check_differences_gpu",
        value=int(found.sum()),
        unit="",
        file="lossless_gpu.jsonl",
        shapes={name: value for name, value in vars(arguments).items()},
        method="offloaded and resident stepped in one process in lockstep; lists, digests, logits compared by bits",
        notes=f"hits {total.hits}, useful {total.useful}, recalled {total.recalled}, evicted {total.evicted}, "
        f"staged {total.staged}; XLA_FLAGS={_flags()}",
    )
    return int(found.sum())


def _flags() -> str:
    import os

    return os.environ.get("XLA_FLAGS", "")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seats", type=int, default=8)
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1, help="new tokens per seat and step")
    parser.add_argument("--spare", type=int, default=4096, help="slots beyond what one step needs")
    parser.add_argument("--records", default="bf16")
    parser.add_argument("--keys", default="fp8")
    parser.add_argument("--threshold", default="ema")
    parser.add_argument("--staging", type=int, default=64)
    parser.add_argument("--slot-manager", default="auto")
    parser.add_argument("--prefetch", default="auto")
    parser.add_argument("--attend", default="reference")
    return parser.parse_args(argv)


if __name__ == "__main__":
    _compat.choose_products_without_timing()
    sys.exit(run(parse(sys.argv[1:])) > 0)
