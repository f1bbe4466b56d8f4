"""A model that echo_jax has never seen, in somebody's own `jax.jit`, on a cache whose records live on the host.

    python examples/own_model.py [--tokens 400]

The model is a small transformer with random weights. What echo_jax asks of it is a latent record per token (MLA), a
query against whole records, and an indexer's query, weights and key. It is run twice over the same tokens, offloaded
and resident, and every bit of every logit is compared. Exit status 1 if one differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import echo_jax as echo
from echo_jax.stats import Totals

VOCAB, HIDDEN, HEADS, LATENT, ROTATED = 256, 64, 4, 128, 64  # a record is LATENT values and ROTATED ones, made from x
INDEX_HEADS, INDEX_WIDTH = 4, 64
LAYERS, SEATS, TOP_K = 2, 2, 32
SCALE = (LATENT + ROTATED) ** -0.5


# readme:begin
@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def step(params, state, tokens, config):
    """tokens i32[B, T] -> the next state, logits f32[B, T, V], and what each layer did."""
    view = echo.begin_step(config, state)  # reads the page tables, once for all layers
    x, layers, outputs = params["embed"][tokens], list(state.layers), []
    for number, weights in enumerate(params["layers"]):
        inputs = project(weights, x, view.positions)  # yours: query, record; index query, weights, key
        layers[number], output = echo.echo_layer(
            config, layers[number], state.host_pool, number, view, inputs, scale=SCALE
        )
        x = x + combine(weights, x, output.attended)  # yours: output projection, feed-forward
        outputs.append(output)
    state = echo.finish_step(config, state, layers, [output.new_records for output in outputs], view)
    return state, x @ params["unembed"], outputs


# readme:end


def project(weights, x, positions) -> echo.LayerInputs:
    """x f32[B, T, E] -> what the cache needs of this layer's new tokens."""
    x = normed(x)
    query, record = x @ weights["query"], x @ weights["record"]
    query = query.reshape(*x.shape[:2], HEADS, LATENT + ROTATED)
    return echo.LayerInputs(
        query=jnp.concatenate([query[..., :LATENT], rotate(query[..., LATENT:], positions[..., None])], axis=-1),
        record=jnp.concatenate([record[..., :LATENT], rotate(record[..., LATENT:], positions)], axis=-1),
        index_query=(x @ weights["index_query"]).reshape(*x.shape[:2], INDEX_HEADS, INDEX_WIDTH),
        index_weights=x @ weights["index_weights"],
        index_key=normed(x @ weights["index_key"]),
    )


def combine(weights, x, attended) -> jax.Array:
    """attended f32[B, T, H, LATENT] -> f32[B, T, E]."""
    mixed = attended.reshape(*x.shape[:2], HEADS * LATENT) @ weights["out"]
    return mixed + jax.nn.gelu(normed(x + mixed) @ weights["up"]) @ weights["down"]


def normed(x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x, positions):
    """Turns pairs (i, i + d/2) of the last axis by angles that grow with the position."""
    frequencies = jnp.asarray(1000.0 ** -np.linspace(0, 1, x.shape[-1] // 2), jnp.float32)
    angles = jnp.einsum("...,f->...f", positions.astype(jnp.float32), frequencies)
    first, second = jnp.split(x, 2, axis=-1)
    cosines, sines = jnp.broadcast_to(jnp.cos(angles), first.shape), jnp.broadcast_to(jnp.sin(angles), first.shape)
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def random_params(seed: int = 0):
    random = np.random.default_rng(seed)

    def matrix(rows, columns):
        return jnp.asarray(random.normal(size=(rows, columns)) * rows**-0.5, jnp.float32)

    def layer():
        widths = {"query": HEADS * (LATENT + ROTATED), "record": LATENT + ROTATED, "up": 4 * HIDDEN}
        widths |= {"index_query": INDEX_HEADS * INDEX_WIDTH, "index_weights": INDEX_HEADS, "index_key": INDEX_WIDTH}
        weights = {name: matrix(HIDDEN, width) for name, width in widths.items()}
        return weights | {"out": matrix(HEADS * LATENT, HIDDEN), "down": matrix(4 * HIDDEN, HIDDEN)}

    return {
        "embed": matrix(VOCAB, HIDDEN) * 16,
        "unembed": matrix(HIDDEN, VOCAB),
        "layers": tuple(layer() for _ in range(LAYERS)),
    }


def make_config(tokens: int) -> echo.CacheConfig:
    """A device pool for few more records than one step selects; room for every token on the host."""
    capacity = -(-tokens // 64) * 64  # whole pages
    return echo.CacheConfig(
        layer_kinds=("full",) * LAYERS,
        records=echo.RecordFormat("bf16", LATENT, ROTATED),
        keys=echo.KeyFormat("fp8", INDEX_WIDTH),
        threshold=echo.threshold.Ema(),
        eviction=echo.eviction.Lru(),
        seats=SEATS,
        capacity=capacity,
        host_rows=SEATS * capacity,
        device_slots=SEATS * (TOP_K + 1) + 30,
        top_k=TOP_K,
    )


def run(params, config: echo.CacheConfig, tokens: np.ndarray):
    """Feeds tokens i32[B, N] one by one; returns the last state, logits f32[N, B, V] and what moved."""
    state, logits, moved = echo.state.create(config), [], Totals(config.records.bytes_per_row)
    for seat in range(SEATS):
        state = echo.state.admit(config, state, seat, tokens.shape[1])
    for number in range(tokens.shape[1]):
        state, answer, outputs = step(params, state, tokens[:, number : number + 1], config)
        logits.append(np.asarray(answer[:, 0]))
        moved.add(jax.tree.map(lambda *counts: np.stack(counts), *[output.moved for output in outputs]))
    return state, np.stack(logits), moved.total()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Somebody's own model on an offloaded cache, compared bit by bit.")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each of the two requests")
    tokens = parser.parse_args(argv).tokens
    if tokens < 1:
        parser.error(f"--tokens is {tokens} but must be at least 1")

    config = make_config(tokens)
    fed = np.random.default_rng(1).integers(0, VOCAB, (SEATS, tokens)).astype(np.int32)
    params, logits = random_params(), []
    for name, one in ("resident", dataclasses.replace(config, offload=False)), ("offloaded", config):
        state, answers, moved = run(params, one, fed)
        logits.append(answers)
        on_device = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))
        on_host = 0 if state.host_pool is None else state.host_pool.nbytes
        print(f"{name:<9} {on_device:>9,} bytes on the device, {on_host:>9,} on the host")
    print("of the selected rows {hits:,} were resident, {useful:,} prefetched, {recalled:,} recalled".format(**moved))
    differences = int((logits[0].view(np.uint32) != logits[1].view(np.uint32)).sum())
    print(f"{logits[0].size} logits of {tokens} steps compared: {differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
