"""Synthetic traces: scores with a stated locality, made from a seed while they are read, stored only when asked.

Knows how scores move from step to step. Knows no query and no key: there is nothing behind these scores. Which kinds of
layers there are, and how a trace is named, stands in `spec`.

The score of the token at position s in step t of one row, age = length - s:

    score = 2 z + drift_t        z = a P_s + b S_t(s) + c F_t(s) + r0 exp(-age / (tau K))        a^2 + b^2 + c^2 = 1

P is fixed for a token (what it is about), S is AR(1) with coefficient rho (what the text is about for a while), F is
fresh in every step, all standard normal; the last term favours the newest tokens. drift moves all scores of a row
together, AR(1) with standard deviation 0.4 and coefficient 0.5: it changes no set, only what a threshold has to follow.

b S + c F is drawn as one process with one normal number a step. The sum of an AR(1) process and white noise is
Gaussian, and so is its innovations form (the steady state of the Kalman filter that observes it)

    x_t = rho m_{t-1} + e_t      m_t = rho m_{t-1} + gain e_t      e ~ N(0, sigma^2)

with the same covariances, hence with the same law. Normal numbers are a hash of (seed, layer, step, row, position) put
through the inverse of erf: there is no generator state, and XLA fuses it all into one loop over positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from echo_jax.models.config import FULL
from echo_jax.traces import StepScores, TraceInfo
from echo_jax.traces.spec import ARCHETYPES, SCAN, Archetype, SynthSpec, parse

SCALE, DRIFT_DEVIATION, DRIFT_COEFFICIENT = 2.0, 0.4, 0.5

FIXED, SLOW, FRESH, DRIFT = np.array([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], np.uint32)
"""Streams of normal numbers, by any four words (here digits of pi); each is drawn per step, row and position."""


class SynthTrace:
    """A synthetic trace; nothing is computed before a layer's steps are taken."""

    def __init__(self, spec: SynthSpec):
        self.spec = spec
        self.info = TraceInfo(
            layers=spec.layers,
            requests=spec.requests,
            steps=spec.steps,
            capacity=spec.context,
            top_k=spec.top_k,
            layer_kinds=spec.layer_kinds,
            archetypes=spec.archetype_names(),
            source="synth",
            seed=spec.seed,
            nan_scores=0,
            recipe={"spec": spec.text()},
        )

    def layer(self, index: int) -> SynthSource:
        """The stream of a layer. Row by row, layer by layer, all draws are different."""
        if not 0 <= index < self.info.layers:
            raise IndexError(f"layer {index} does not exist; the trace has layers 0..{self.info.layers - 1}")
        while self.info.layer_kinds[index] != FULL:
            index -= 1
        spec, own = self.spec, self.spec.archetype(index)
        is_scanner = np.arange(spec.requests) >= spec.requests - spec.scanners
        of_rows = [ARCHETYPES[SCAN] if scans else own for scans in is_scanner]
        return SynthSource(
            words=jnp.asarray(np.random.SeedSequence([spec.seed, index]).generate_state(2)),
            process=RowProcess(*jnp.asarray([process_of(one) for one in of_rows], jnp.float32).T),
            jump=jnp.float32(spec.jump),
            capacity=spec.context,
            steps=spec.steps,
            top_k=spec.top_k,
            jump_every=spec.jump_every,
            request_steps=spec.request_steps,
        )


def from_spec(text: str) -> SynthTrace:
    """The trace of `synth:NAME[,KEY=VALUE...]`. ValueError as `spec.parse`."""
    return SynthTrace(parse(text))


class RowProcess(NamedTuple):
    """The constants of z, one per row: f32[R] each."""

    fixed: jax.Array  # a
    rho: jax.Array
    gain: jax.Array
    sigma: jax.Array  # deviation of e
    slow: jax.Array  # stationary deviation of m
    recency: jax.Array  # r0
    reach: jax.Array  # tau, in units of K


def process_of(archetype: Archetype) -> tuple[float, ...]:
    """The RowProcess of an archetype, as numbers."""
    rho, slow = archetype.rho, archetype.slow
    fresh = max(0.0, 1 - archetype.fixed - slow)
    enters = slow * (1 - rho**2)  # variance that enters b S in a step
    # Its variance given the past, before a step is seen: p = rho^2 p fresh / (p + fresh) + enters.
    half = (fresh * (1 - rho**2) - enters) / 2
    unseen = -half + math.sqrt(half**2 + enters * fresh)
    total = unseen + fresh
    if total < 1e-12:  # nothing moves, and nothing is learned by looking
        gain, known = 0.0, slow
    else:
        gain, known = unseen / total, slow - unseen * fresh / total
    deviation = math.sqrt(max(0.0, known))
    return math.sqrt(archetype.fixed), rho, gain, math.sqrt(total), deviation, archetype.recency, archetype.reach


class SynthCarry(NamedTuple):
    """What lasts from step to step."""

    fixed: jax.Array  # f32[R, P]  a P
    slow: jax.Array  # f32[R, P]  m
    drift: jax.Array  # f32[R]


class SynthSource(struct.PyTreeNode):
    """One layer's scores, from a seed. Sizes are static; everything that tells layers apart is a leaf."""

    words: jax.Array  # u32[2]  from the seed and the layer
    process: RowProcess
    jump: jax.Array  # f32[]  share of the lasting parts' variance that a jump replaces
    capacity: int = struct.field(pytree_node=False)
    steps: int = struct.field(pytree_node=False)
    top_k: int = struct.field(pytree_node=False)
    jump_every: int = struct.field(pytree_node=False)
    request_steps: int = struct.field(pytree_node=False)

    def init(self) -> SynthCarry:
        return self._lasting(jnp.uint32(0))

    def step(self, carry: SynthCarry, t: jax.Array) -> tuple[SynthCarry, StepScores]:
        process, time = self.process, t.astype(jnp.uint32)
        starts, progress = self._requests(t)
        carry = self._changed(carry, t, starts)
        length = self.capacity - (self.request_steps or self.steps) + progress
        age = length[:, None] - jnp.arange(self.capacity, dtype=jnp.int32)[None]

        fresh = process.sigma[:, None] * self._normal(FRESH, time)
        remembered = process.rho[:, None] * carry.slow
        reach = process.reach[:, None] * self.top_k
        recency = process.recency[:, None] * jnp.exp(-age.astype(jnp.float32) / reach)
        z = carry.fixed + remembered + fresh + recency
        score = jnp.where(age >= 0, SCALE * z + carry.drift[:, None], -jnp.inf)

        new_drift = DRIFT_DEVIATION * math.sqrt(1 - DRIFT_COEFFICIENT**2) * self._normal(DRIFT, time + 1)[:, 0]
        drift = DRIFT_COEFFICIENT * carry.drift + new_drift
        after = SynthCarry(carry.fixed, remembered + process.gain[:, None] * fresh, drift)
        active = jnp.ones(length.shape, bool)
        return after, StepScores(score, length, active, starts, jnp.full(length.shape, -jnp.inf))

    def _requests(self, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """bool[R] a request begins, i32[R] steps it has run. Rows begin one after another, evenly."""
        rows = self.process.fixed.shape[0]
        if not self.request_steps:
            return jnp.full((rows,), t == 0), jnp.full((rows,), t, jnp.int32)
        progress = (t + self._stagger(self.request_steps)) % self.request_steps
        return (progress == 0) | (t == 0), progress

    def _stagger(self, period: int) -> jax.Array:
        rows = self.process.fixed.shape[0]
        return jnp.arange(rows, dtype=jnp.int32) * period // rows

    def _changed(self, carry: SynthCarry, t: jax.Array, starts: jax.Array) -> SynthCarry:
        """A new request has new tokens; a topic jump replaces a share of what they are about."""
        if not self.request_steps and not self.jump_every:
            return carry
        share = jnp.zeros(starts.shape, jnp.float32)
        if self.jump_every:
            jumps = (t + self._stagger(self.jump_every)) % self.jump_every == 0
            share = jnp.where(jumps, self.jump, share)
        share = jnp.where(t > 0, jnp.where(starts, 1.0, share), 0.0)[:, None]

        def mixed(carry):
            new = self._lasting(t.astype(jnp.uint32))
            keep, take = jnp.sqrt(1 - share), jnp.sqrt(share)
            return carry._replace(fixed=keep * carry.fixed + take * new.fixed, slow=keep * carry.slow + take * new.slow)

        return lax.cond(jnp.any(share > 0), mixed, lambda carry: carry, carry)

    def _lasting(self, time: jax.Array) -> SynthCarry:
        """Fixed and slow parts drawn anew, as if the process had always run."""
        process = self.process
        drift = DRIFT_DEVIATION * self._normal(DRIFT, time)[:, 0]
        fixed = process.fixed[:, None] * self._normal(FIXED, time)
        return SynthCarry(fixed, process.slow[:, None] * self._normal(SLOW, time), drift)

    def _normal(self, stream: np.uint32, time: jax.Array) -> jax.Array:
        """f32[R, P] standard normal numbers of a stream at a time u32[]."""
        rows = self.process.fixed.shape[0]
        numbers = jnp.arange(rows, dtype=jnp.uint32)[:, None] * np.uint32(self.capacity)
        numbers = numbers + jnp.arange(self.capacity, dtype=jnp.uint32)[None]
        one = _hash(time, self.words[0], self.words[1] ^ stream)
        two = _hash(time, self.words[1], self.words[0] ^ stream)
        bits = _hash(numbers, one, two)
        uniform = bits.astype(jnp.int32).astype(jnp.float32) * np.float32(2**-31)
        inside = np.float32(1 - 2**-24)  # the outermost numbers are 5.3 deviations from 0
        return np.float32(math.sqrt(2)) * lax.erf_inv(jnp.clip(uniform, -inside, inside))


def _hash(numbers: jax.Array, one: jax.Array, two: jax.Array) -> jax.Array:
    """u32 -> u32: a bijection for each pair of key words, in three multiplications.

    The shifts and factors of the last two rounds are those of Wellons' lowbias32 (public domain). The second word
    enters between them, so that streams whose first words lie close together are no shifted copies of each other.
    """
    bits = numbers * np.uint32(0x9E3779B9) + one
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15) ^ two) * np.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
