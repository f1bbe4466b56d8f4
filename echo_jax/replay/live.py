"""A selection rule really used: a model decodes, and every scoring layer attends what the rule chooses.

Knows how a rule of `rules` becomes the selector of a layer, and what a text costs under it. The step is the recorder's,
so there is no second decoder; the rule is the replay's, with the fields that it needs computed from the model. Moves
nothing: everything is resident, since what is lost depends on what is attended and not on where it lies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax.decode import DecodeConfig
from echo_jax.engine import resident
from echo_jax.indexer import Selection
from echo_jax.models import dsa
from echo_jax.models.config import FULL
from echo_jax.replay.rivals import Paged, Resident
from echo_jax.replay.rules import Rule, facts_of, missed
from echo_jax.traces import LOOKAHEAD_SCORE, PAGE_BOUND, QUERY_COSINE, StepScores
from echo_jax.traces.record import Watch, no_queries, watched_step
from echo_jax.types import EchoState

SPARE = 1
"""Positions that a rule may attend beyond K: the new token, where a set known ahead cannot hold it."""


class Forced(NamedTuple):
    """What a given continuation cost, token by token; N of them in B seats."""

    bits: jax.Array  # f32[N, B]  -log2 of the token's probability
    is_best: jax.Array  # bool[N, B]  no token was likelier: greedy decoding would have taken it
    missed: jax.Array  # i32[N, L, B]  of the exact sets of the L scoring layers, rows that were not attended
    wanted: jax.Array  # i32[N, L, B]  rows of those sets


def page_of(rule: Rule) -> int | None:
    """Positions of the pages that a rule selects by, or None."""
    inner = rule.selects if isinstance(rule, Resident) else rule
    return inner.page if isinstance(inner, Paged) else None


@functools.partial(jax.jit, static_argnames=("config", "rule"))
def forced(params: dsa.Params, state: EchoState, tokens: jax.Array, *, config: DecodeConfig, rule: Rule) -> Forced:
    """Decodes tokens i32[N + 1, B] as given, N steps, every step's selection by the rule.

    `state` holds what stands before them, made by `prefill` with `resident(config)`; it is not given up, so that other
    rules can start from the same. All seats begin a request for the rule: it knows nothing of the prompt's steps.
    ValueError for pages that do not divide the capacity.
    """
    top_k = config.cache.top_k
    page = page_of(rule) or config.cache.capacity
    if config.cache.capacity % page:
        raise ValueError(f"pages of {page} positions do not divide the capacity of {config.cache.capacity}")
    watch = Watch((LOOKAHEAD_SCORE, PAGE_BOUND, QUERY_COSINE), page_size=page)
    wide = resident(config)
    wide = dataclasses.replace(wide, cache=dataclasses.replace(wide.cache, top_k=top_k + SPARE))
    full = [layer for layer, kind in enumerate(config.model.layer_kinds) if kind == FULL]
    memories = {layer: rule.init(config.cache.seats, config.cache.capacity, top_k) for layer in full}

    def one(carry, given):
        state, queries, memories = carry
        token, following, t = given
        used = _Used(rule, top_k, t, memories)
        state, logits, queries, _ = watched_step(
            params, state, token[:, None], queries, config=wide, watch=watch, choose=used.choose
        )
        logs = jax.nn.log_softmax(logits)
        own = jnp.take_along_axis(logs, following[:, None], axis=1)[:, 0]
        kept = Forced(
            -own / math.log(2), own >= jnp.max(logs, axis=1), jnp.stack(used.missed), jnp.stack(used.wanted)
        )  # fmt: skip
        return (state, queries, used.memories), kept

    steps = jnp.arange(tokens.shape[0] - 1, dtype=jnp.int32)
    return lax.scan(one, (state, no_queries(config), memories), (tokens[:-1], tokens[1:], steps))[1]


class _Used:
    """A rule in the layers of one step, which are traced one after the other: its memories, and what it missed."""

    def __init__(self, rule: Rule, top_k: int, t: jax.Array, memories: dict[int, Any]):
        self.rule, self.top_k, self.t, self.memories = rule, top_k, t, dict(memories)
        self.missed: list[jax.Array] = []
        self.wanted: list[jax.Array] = []

    def choose(self, layer: int, step: StepScores, width: int) -> Selection:
        facts = facts_of(step._replace(starts=step.active & (self.t == 0)), self.t, self.top_k)
        self.memories[layer], choice = self.rule.choose(self.memories[layer], facts)
        assert choice.attended.shape[1] <= width, "a rule attends more than K + SPARE positions"
        self.missed.append(jnp.where(step.active, missed(facts, choice), 0))
        self.wanted.append(jnp.sum(facts.is_exact & step.active[:, None], axis=1, dtype=jnp.int32))
        return Selection(choice.attended, facts.kth_score)
