"""From logits to tokens: greedy, temperature, top-p. A seat's draw depends on its own seed and position only, so the
same request gives the same text in any batch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

LEAST_TEMPERATURE = 1e-30
"""Below, logits divided by it leave the range of float32, and what is drawn would be NaN's choice."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy, as is one below LEAST_TEMPERATURE; top_p keeps the smallest set of tokens whose
    probabilities reach it."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature} but must be 0 (greedy) or above, and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p is {self.top_p} but must lie in (0, 1]; 1 keeps every token")


GREEDY = Sampling()


def sample(logits: jax.Array, seeds: jax.Array, positions: jax.Array, sampling: Sampling) -> jax.Array:
    """logits f32[B, V], seeds u32[B], positions i32[B] of the tokens to be drawn -> i32[B]."""
    if sampling.temperature < LEAST_TEMPERATURE:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(_sample_one, in_axes=(0, 0, 0, None))(logits, seeds, positions, sampling)


def _sample_one(logits: jax.Array, seed: jax.Array, position: jax.Array, sampling: Sampling) -> jax.Array:
    scaled = logits / sampling.temperature
    if sampling.top_p < 1:
        order = jnp.argsort(scaled, descending=True, stable=True)
        probabilities = jax.nn.softmax(scaled[order])
        before = jnp.cumsum(probabilities) - probabilities  # the best token is kept always: nothing comes before it
        keep = jnp.zeros(logits.shape, bool).at[order].set(before < sampling.top_p)
        scaled = jnp.where(keep, scaled, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.categorical(key, scaled).astype(jnp.int32)
