"""Synthetic traces: the formula against loops, the law of its parts, the archetypes against their targets."""

import dataclasses
import math
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from echo_jax.traces import open_trace
from echo_jax.traces.describe import describe, describe_layer
from echo_jax.traces.spec import ARCHETYPES, CHURNY, FIG17_LAYERS, HOT, MEDIAN, SCAN, Archetype, SynthSpec, parse
from echo_jax.traces.synth import DRIFT, FIXED, FRESH, SLOW, SynthTrace, process_of

TARGETS = {
    "hot": (0.86, (0.147, 0.021, 0.011)),
    "median": (0.71, (0.295, 0.108, 0.032)),
    "churny": (0.42, (0.585, 0.413, 0.265)),
    "volatile": (0.40, (0.60, 0.37, 0.14)),
}
"""Overlap, and LRU misses at k, 2k and 4k slots: context 32 k, 192 steps, the first quarter dropped, 4 seeds."""


def take(trace, layer=0, steps=None):
    """Every step of a layer, stacked: a StepScores of [T, R, ...] arrays."""

    @jax.jit
    def run(source):
        times = jnp.arange(steps or trace.info.steps, dtype=jnp.int32)
        return lax.scan(source.step, source.init(), times)[1]

    return jax.tree.map(np.asarray, run(trace.layer(layer)))


# ---- the formula -----------------------------------------------------------------------------------------


def hashed(numbers: int, one: int, two: int) -> int:
    """Three multiplications modulo 2^32, in whole numbers."""
    bits = (numbers * 0x9E3779B9 + one) % 2**32
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) % 2**32
    bits = ((bits ^ (bits >> 15) ^ two) * 0x846CA68B) % 2**32
    return bits ^ (bits >> 16)


def drawn(words, stream, time: int, number: int) -> float:
    """One normal number, through the quantile function of another library."""
    first, second, stream = int(words[0]), int(words[1]), int(stream)
    bits = hashed(number, hashed(time, first, second ^ stream), hashed(time, second, first ^ stream))
    signed = bits - 2**32 if bits >= 2**31 else bits
    return NormalDist().inv_cdf(min(max((signed / 2**31 + 1) / 2, 1e-12), 1 - 1e-12))


@pytest.mark.parametrize(
    "text",
    [
        "synth:median,top_k=4,steps=9,context=21,requests=2,seed=5",
        "synth:churny,top_k=4,steps=12,context=16,requests=3,jump_every=5,jump=0.3",
        "synth:volatile,top_k=3,steps=11,context=9,requests=2,request_steps=4,scanners=1",
    ],
)
def test_scores_follow_the_formula(text):
    """Loops over one number at a time, with S and F drawn as the innovations that the module's first page defines."""
    spec = parse(text)
    trace = SynthTrace(spec)
    got, source = take(trace), trace.layer(0)
    for row in range(spec.requests):
        is_scanner = row >= spec.requests - spec.scanners
        archetype = ARCHETYPES[SCAN] if is_scanner else ARCHETYPES[spec.name]
        a, rho, gain, sigma, deviation, recency, reach = process_of(archetype)

        def number(stream, time, position, row=row):
            return drawn(source.words, stream, time, row * spec.context + position)

        fixed = [a * number(FIXED, 0, s) for s in range(spec.context)]
        slow = [deviation * number(SLOW, 0, s) for s in range(spec.context)]
        drift = 0.4 * number(DRIFT, 0, 0)
        for t in range(spec.steps):
            run = spec.request_steps or spec.steps
            progress = (t + row * run // spec.requests) % run if spec.request_steps else t
            starts = t == 0 or progress == 0
            share = 0.0
            if t and starts:
                share = 1.0
            elif t and spec.jump_every and (t + row * spec.jump_every // spec.requests) % spec.jump_every == 0:
                share = spec.jump
            if share:
                keep, take_new = math.sqrt(1 - share), math.sqrt(share)
                fixed = [keep * f + take_new * a * number(FIXED, t, s) for s, f in enumerate(fixed)]
                slow = [keep * m + take_new * deviation * number(SLOW, t, s) for s, m in enumerate(slow)]
            length = spec.context - run + progress
            assert got.length[t, row] == length and got.starts[t, row] == starts and got.active[t, row]
            for s in range(spec.context):
                e = sigma * number(FRESH, t, s)
                z = fixed[s] + rho * slow[s] + e + recency * math.exp(-(length - s) / (reach * spec.top_k))
                wanted = 2 * z + drift if s <= length else -math.inf
                # f32 arithmetic, and an inverse of erf in f32 whose error grows in the tails
                assert got.score[t, row, s] == pytest.approx(wanted, abs=2e-3, rel=1e-4)
                slow[s] = rho * slow[s] + gain * e
            drift = 0.5 * drift + 0.4 * math.sqrt(0.75) * number(DRIFT, t + 1, 0)


shares = st.floats(0, 1)


@given(fixed=shares, slow=shares, rho=shares)
def test_one_innovation_has_the_law_of_two_processes(fixed, slow, rho):
    """Variance and every autocovariance of b S + c F, from the constants of the innovations form."""
    slow *= 1 - fixed
    a, rho, gain, sigma, deviation, *_ = process_of(Archetype(fixed, slow, rho, 0.0, 1.0))
    fresh = 1 - fixed - slow
    assert a**2 == pytest.approx(fixed)
    assert rho**2 * deviation**2 + gain**2 * sigma**2 == pytest.approx(deviation**2, abs=1e-6), "m is stationary"
    assert rho**2 * deviation**2 + sigma**2 == pytest.approx(slow + fresh, abs=1e-6), "variance of x"
    for lag in (1, 2, 5):
        covariance = rho**lag * (rho**2 * deviation**2 + gain * sigma**2)
        assert covariance == pytest.approx(slow * rho**lag, abs=1e-6)


def test_normal_numbers_are_normal_and_independent():
    """Scores that are all fresh: moments, tails, and no correlation of neighbours, steps, rows, layers and seeds."""
    many = take(open_trace("synth:scan,top_k=64,context=32768,steps=3,requests=4,layers=2"), 0).score
    spread = many - np.mean(many, axis=2, where=np.isfinite(many), keepdims=True)  # without the drift
    flat = spread[np.isfinite(spread)] / 2
    count = len(flat)
    assert np.std(flat) == pytest.approx(1, abs=4 / math.sqrt(2 * count))
    assert np.mean(flat**3) == pytest.approx(0, abs=4 * math.sqrt(15 / count))
    assert np.mean(flat**4) == pytest.approx(3, abs=4 * math.sqrt(96 / count))
    for level in (1.5, 2.5, 3.5):
        share = 1 - NormalDist().cdf(level)
        assert np.mean(flat > level) == pytest.approx(share, abs=4 * math.sqrt(share / count))
        assert np.mean(flat < -level) == pytest.approx(share, abs=4 * math.sqrt(share / count))
    others = {
        "step": spread[1, 0],
        "row": spread[0, 1],
        "layer": take(open_trace("synth:scan,top_k=64,context=32768,steps=3,requests=4,layers=2"), 1).score[0, 0],
        "seed": take(open_trace("synth:scan,top_k=64,context=32768,steps=3,requests=4,seed=1"), 0).score[0, 0],
        "neighbour": np.roll(spread[0, 0], 1),
    }
    for name, other in others.items():
        both = np.isfinite(spread[0, 0]) & np.isfinite(other)
        correlation = np.corrcoef(spread[0, 0][both], other[both])[0, 1]
        assert abs(correlation) < 4 / math.sqrt(both.sum()), name


# ---- the targets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_archetypes_give_their_targets(name):
    """At full size, k 2048 and 65,536 positions, within 15 % or 0.015; four rows are four seeds."""
    found = describe(open_trace(f"synth:{name},requests=4"))[0]
    overlap, misses = TARGETS[name]
    assert found.counted == 4 * 144
    for wanted, got in [(overlap, found.overlap), *zip(misses, found.lru_miss.values(), strict=False)]:
        assert abs(got - wanted) <= max(0.15 * wanted, 0.015), (wanted, got)


def test_statistics_do_not_depend_on_k():
    """So a small trace says what a large one would; recency counts tokens, and one is added a step at any k."""
    small, large = (describe(open_trace(f"synth:median,requests=4,top_k={k}"))[0] for k in (128, 1024))
    assert small.overlap == pytest.approx(large.overlap, abs=0.02)
    assert list(small.lru_miss.values()) == pytest.approx(list(large.lru_miss.values()), abs=0.02)


def test_echos_hit_rates():
    """Figure 17: 97-99 % in most layers, 95 % and 88 % in two, at 10 k slots a request. One of each kind is measured,
    and two of the kind that most layers are."""
    trace = open_trace("synth:echo-fig17,top_k=256,requests=2")
    names = trace.info.archetypes
    assert len(names) == 61 and {names.count(name) for name in ("volatile", "churny")} == {1}
    measured = {layer: describe_layer(trace.layer(layer), trace.info, (10,)) for layer in (0, 1, 2, *FIG17_LAYERS)}
    hits = {layer: 1 - found.lru_miss[10] for layer, found in measured.items()}
    assert hits[12] == pytest.approx(0.95, abs=0.015) and hits[17] == pytest.approx(0.88, abs=0.015)
    assert all(0.965 <= hits[layer] < 0.99 for layer in (0, 1, 2)), hits
    assert hits[1] != hits[2], "layers of one kind have draws of their own"


def test_a_scanner_finds_nothing_kept_and_a_jump_is_felt():
    scan, calm, jumps = (
        describe(open_trace(f"synth:{name},top_k=128,requests=4"))[0]
        for name in ("scan", "median", "median,jump_every=24")
    )
    assert scan.overlap == pytest.approx(1 / 32, abs=0.01)
    assert 0.01 < calm.overlap - jumps.overlap < 0.1 and jumps.lru_miss[4] > calm.lru_miss[4] + 0.01


# ---- sources ---------------------------------------------------------------------------------------------


def test_one_compilation_serves_all_layers_and_jit_changes_nothing():
    trace = open_trace("synth:mix,top_k=8,steps=5,requests=2,jump_every=2,request_steps=4")
    step = jax.jit(lambda source, carry, t: source.step(carry, t))
    for layer in (0, 1, 15):
        source = trace.layer(layer)
        carry = source.init()
        scanned = take(trace, layer)
        for t in range(5):
            carry, one = step(source, carry, jnp.int32(t))
            np.testing.assert_allclose(one.score, scanned.score[t], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(one.starts, scanned.starts[t])
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    assert not np.array_equal(take(trace, 0).score, take(trace, 1).score)


def test_shared_layers_are_the_full_layer_before_them():
    trace = open_trace("synth:glm,layers=12,top_k=8,steps=3")
    kinds = trace.info.layer_kinds
    assert [layer for layer, kind in enumerate(kinds) if kind == "full"] == [0, 1, 2, 6, 10]
    names = trace.info.archetypes
    assert len(set(names[2:6])) == len(set(names[6:10])) == 1
    np.testing.assert_array_equal(take(trace, 5).score, take(trace, 2).score)
    assert not np.array_equal(take(trace, 6).score, take(trace, 5).score)
    with pytest.raises(IndexError, match="12 .*0..11"):
        trace.layer(12)


# ---- names -----------------------------------------------------------------------------------------------


def test_a_mix_has_its_shares():
    names = open_trace("synth:mix").info.archetypes
    assert {name: names.count(name) for name in set(names)} == {HOT: 2, MEDIAN: 11, CHURNY: 3}
    assert open_trace("synth:mix,seed=1").info.archetypes != names, "which layer is which is drawn"
    names = open_trace("synth:mix,layers=10,hot=0,median=1,churny=1,volatile=2").info.archetypes
    assert [names.count(name) for name in ("hot", "median", "churny", "volatile")] == [0, 3, 2, 5]


@pytest.mark.parametrize(
    "text", ["synth:median", "synth:glm,top_k=64,jump=0.5", "synth:mix,hot=0.5,seed=3,context=4096,rho=0.5,reach=2.0"]
)
def test_a_spec_is_its_text(text):
    spec = parse(text)
    assert parse(spec.text()) == spec
    recipe = open_trace(text).info.recipe
    assert parse(recipe["spec"]) == spec


def test_parameters_replace_an_archetypes_own():
    spec = parse("synth:churny,rho=0.1,recency=0")
    assert spec.archetype(0) == dataclasses.replace(ARCHETYPES[CHURNY], rho=0.1, recency=0.0)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("synth:medium", "'medium' .*did you mean 'median'.*echo-fig17"),
        ("synth:", "''.*known"),
        ("synth:mix,layer=3", "'layer'.*did you mean 'layers'"),
        ("synth:mix,layers=three", "layers is 'three'.*whole number"),
        ("synth:mix,hot=nan", "hot is 'nan'.*finite"),
        ("synth:mix,layers", "layers is ''"),
        ("synth:mix,steps=-1", "steps is -1 .*at least 1"),
        ("synth:mix,requests=0", "requests is 0 .*at least 1"),
        ("synth:mix,steps=200,context=100", "200 steps .*context of 100.*raise context"),
        ("synth:mix,top_k=0", "top_k is 0"),
        ("synth:mix,scanners=2", "2 scanners but 1 requests"),
        ("synth:mix,jump=2", "jump is 2"),
        ("synth:mix,hot=-1", "shares"),
        ("synth:median,fixed=0.95", "fixed 0.95 and slow 0.11"),
        ("synth:median,rho=1.5", "rho is 1.5"),
        ("synth:median,reach=0", "reach is 0"),
    ],
)
def test_wrong_names(text, parts):
    with pytest.raises(ValueError, match=parts):
        open_trace(text)


def test_a_spec_is_checked_when_built():
    with pytest.raises(ValueError, match="unknown"):
        SynthSpec("lukewarm")
