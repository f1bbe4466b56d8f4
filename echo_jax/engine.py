"""Requests in, tokens out: a batch of prompts is prefilled, decoded and measured.

Knows when a request starts and ends. Knows nothing of how a step works. `generate` runs a batch; `compare` holds two
runs of it against each other, which is how losslessness is measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import attend
from echo_jax import state as state_lib
from echo_jax.decode import DecodeConfig, decode_step
from echo_jax.models.dsa import Params
from echo_jax.prefill import PrefillOutput, prefill, prefill_chunk
from echo_jax.sampling import GREEDY, Sampling, sample
from echo_jax.stats import Totals
from echo_jax.types import PAGE


@dataclasses.dataclass
class Record:
    """Everything two runs must agree on, in the order it happened. Kept on the host."""

    prefill_lists: list[np.ndarray] = dataclasses.field(default_factory=list)  # u32[L, C] fingerprints of the lists
    prefill_digests: list[np.ndarray] = dataclasses.field(default_factory=list)  # u32[L, C]
    prefill_logits: list[np.ndarray] = dataclasses.field(default_factory=list)  # f32[V] of each chunk's last token
    lists: list[np.ndarray] = dataclasses.field(default_factory=list)  # i32[L, B, T, K] of each step
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)  # f32[B, T, V]
    digests: list[np.ndarray] = dataclasses.field(default_factory=list)  # u32[L, B, T]


@dataclasses.dataclass
class Generation:
    """What a run produced and what it took."""

    tokens: list[list[int]]  # of each prompt
    moved: Totals
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    device_bytes: int  # of the state, read from the arrays
    record: Record | None = None

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second, all seats together; the first token of a request comes from its prefill."""
        decoded = sum(max(0, len(tokens) - 1) for tokens in self.tokens)
        return decoded / self.decode_seconds if self.decode_seconds else float("nan")


def check_requests(config: DecodeConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuses what cannot be served, before anything is allocated."""
    cache = config.cache
    if max_new_tokens < 1:
        raise ValueError(f"max-new-tokens is {max_new_tokens} but must be at least 1")
    if not 1 <= len(prompts) <= cache.seats:
        raise ValueError(f"{len(prompts)} prompts do not fit {cache.seats} seats; raise seats or split the batch")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} has 0 tokens; give at least 1")
        if len(prompt) + max_new_tokens > cache.capacity:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens and {max_new_tokens} new ones were asked for, together "
                f"{len(prompt) + max_new_tokens}, but a seat holds {cache.capacity}; shorten the prompt or raise "
                "capacity"
            )
        top = max(prompt)
        if min(prompt) < 0 or top >= config.model.vocab_size:
            raise ValueError(
                f"prompt {number} holds token {top if top >= config.model.vocab_size else min(prompt)} but the model "
                f"knows 0..{config.model.vocab_size - 1}; use the model's own tokenizer"
            )
    pages = sum(-(-(len(prompt) + max_new_tokens) // PAGE) for prompt in prompts)
    if pages > cache.pages:
        raise ValueError(
            f"the prompts and their {max_new_tokens} new tokens need {pages * PAGE} host rows in pages of {PAGE} but "
            f"the host pool holds {cache.host_rows}; raise host_rows or split the batch"
        )


def generate(
    params: Params,
    config: DecodeConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    keep_record: bool = False,
    on_prefill: Callable[[int, int], None] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> Generation:
    """Continues every prompt by up to max_new_tokens tokens; a seat stops at a stop token.

    on_prefill(prompt, tokens done) and on_token(prompt, token) are called as things happen. Raises ValueError before
    anything is allocated when the requests do not fit.
    """
    check_requests(config, prompts, max_new_tokens)
    cache = config.cache
    state = state_lib.create(cache)
    device_bytes = bytes_on_device(state)
    record = Record() if keep_record else None
    compile_seconds = _compile(params, state, config)
    seeds = jnp.asarray(np.arange(cache.seats, dtype=np.uint32) + np.uint32(seed))
    current = np.zeros((cache.seats,), np.int32)
    tokens: list[list[int]] = [[] for _ in prompts]

    started = time.perf_counter()
    for seat, prompt in enumerate(prompts):
        state = state_lib.admit(cache, state, seat, len(prompt) + max_new_tokens)
        state, logits = _prefill(params, state, config, seat, prompt, record, on_prefill)
        first = sample(logits[None], seeds[seat : seat + 1], jnp.full((1,), len(prompt), jnp.int32), sampling)
        current[seat] = int(first[0])
        tokens[seat].append(int(first[0]))
        if on_token is not None:
            on_token(seat, tokens[seat][-1])
    prefill_seconds = time.perf_counter() - started

    moved = Totals(cache.records.bytes_per_row)
    running = {seat for seat in range(len(prompts)) if tokens[seat][-1] not in stop_tokens}
    for seat in set(range(len(prompts))) - running:
        state = state_lib.release(cache, state, seat)
    started = time.perf_counter()
    for _ in range(max_new_tokens - 1):
        if not running:
            break
        state, output = decode_step(params, state, jnp.asarray(current)[:, None], config=config)
        drawn = np.asarray(sample(output.logits[:, 0], seeds, state.tables.lengths, sampling))
        moved.add(output.moved)
        if record is not None:
            record.lists.append(np.asarray(output.selected))
            record.logits.append(np.asarray(output.logits))
            record.digests.append(np.asarray(output.digests))
        for seat in sorted(running):
            current[seat] = drawn[seat]
            tokens[seat].append(int(drawn[seat]))
            if on_token is not None:
                on_token(seat, tokens[seat][-1])
            if tokens[seat][-1] in stop_tokens:
                running.discard(seat)
                state = state_lib.release(cache, state, seat)
    jax.block_until_ready(state)
    decode_seconds = time.perf_counter() - started
    return Generation(tokens, moved, prefill_seconds, decode_seconds, compile_seconds, device_bytes, record)


def _compile(params: Params, state, config: DecodeConfig) -> float:
    """Seconds to compile the two programs, so that they are not counted as prefill or decode."""
    started = time.perf_counter()
    chunk = np.zeros((config.cache.chunk,), np.int32)
    prefill_chunk.lower(params, state, chunk, np.int32(0), np.int32(1), config=config).compile()
    step = np.zeros((config.cache.seats, 1), np.int32)
    decode_step.lower(params, state, step, config=config).compile()
    return time.perf_counter() - started


def _prefill(params, state, config: DecodeConfig, seat: int, prompt, record: Record | None, on_prefill):
    """The prompt, chunk by chunk; returns the state and the last token's logits f32[V]."""
    before = 0

    def progress(done: int, output: PrefillOutput):
        nonlocal before
        if record is not None:
            record.prefill_lists.append(np.asarray(_fingerprint(output.selected))[:, : done - before])
            record.prefill_digests.append(np.asarray(output.digests)[:, : done - before])
            record.prefill_logits.append(np.asarray(output.logits))
        before = done
        if on_prefill is not None:
            jax.block_until_ready(output)
            on_prefill(seat, done)

    state, output = prefill(params, state, prompt, seat, config=config, progress=progress)
    return state, output.logits


@jax.jit
def _fingerprint(lists: jax.Array) -> jax.Array:
    """u32[L, C]: a digest of each list i32[L, C, K]."""
    flat = jax.lax.bitcast_convert_type(lists, jnp.float32).reshape(-1, 1, lists.shape[-1])
    return attend.digest(flat).reshape(lists.shape[:2])


def bytes_on_device(state) -> int:
    """Device bytes of a state's layers, counted from its arrays; threshold memory is left out (it is a policy's)."""
    layers = [layer.replace(threshold=None) for layer in state.layers]
    return sum(leaf.nbytes for leaf in jax.tree.leaves(layers))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How many things two runs were compared in, and how many differed."""

    lists: int
    logits: int
    digests: int
    tokens: int
    differences: int
    first: str | None  # where the first difference is


def resident(config: DecodeConfig) -> DecodeConfig:
    """The same everything without offload: what every claim of losslessness is measured against."""
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, offload=False))


def compare(ours: Generation, reference: Generation) -> Comparison:
    """Bits of two runs of the same batch: selected lists and attended digests of every layer and query, logits of
    every step, tokens."""
    assert ours.record is not None and reference.record is not None
    counts = {"lists": 0, "logits": 0, "digests": 0}
    differences, first = 0, None
    for name, kind, axes in (
        ("prefill_lists", "lists", 0),
        ("prefill_digests", "digests", 0),
        ("prefill_logits", "logits", 1),
        ("lists", "lists", 1),
        ("logits", "logits", 1),
        ("digests", "digests", 0),
    ):
        one, other = getattr(ours.record, name), getattr(reference.record, name)
        if len(one) != len(other):
            differences += abs(len(one) - len(other))
            first = first or f"{name}: {len(one)} entries against {len(other)}"
        for number, (a, b) in enumerate(zip(one, other, strict=False)):
            differs = a.view(np.uint32) != b.view(np.uint32)  # bits, so that NaN equals itself and -0 is not 0
            differs = differs.any(axis=-1) if axes else differs
            counts[kind] += differs.size
            if differs.any():
                first = first or f"{name}, entry {number}, index {tuple(map(int, np.argwhere(differs)[0]))}"
                differences += int(differs.sum())
    unequal = sum(a != b for a, b in zip(ours.tokens, reference.tokens, strict=True))
    if unequal:
        differences += unequal
        first = first or "tokens"
    return Comparison(**counts, tokens=sum(map(len, ours.tokens)), differences=differences, first=first)
