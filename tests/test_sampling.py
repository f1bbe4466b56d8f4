"""From logits to tokens: which tokens may be drawn, how often, and that a draw is the seat's own affair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.sampling import GREEDY, Sampling, sample

VOCAB, DRAWS = 12, 4000

sampled = jax.jit(sample, static_argnums=3)


def draws(logits, sampling, count=DRAWS):
    """i32[count]: one token of each of `count` seeds, all at one position."""
    logits = np.tile(np.asarray(logits, np.float32), (count, 1))
    seeds, positions = jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 7, jnp.int32)
    # Not jitted: every sampling would compile anew. That both give the same is tested once.
    return np.asarray(sample(jnp.asarray(logits), seeds, positions, sampling))


def probabilities(logits, temperature):
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def kept(logits, temperature, top_p):
    """The smallest set of tokens, best first and equals by number, whose probabilities reach top_p."""
    chances = probabilities(logits, temperature)
    tokens, total = [], 0.0
    for token in sorted(range(len(chances)), key=lambda token: (-chances[token], token)):
        tokens.append(token)
        total += chances[token]
        if total >= top_p:
            break
    return sorted(tokens)


LOGITS = np.array([2.0, -1.0, 1.5, 2.0, 0.0, -3.0, 1.0, 0.5, -0.5, 2.5, 1.9, -8.0])


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = np.array([[1, 3, 3, 0], [0, 0, 0, 0], [-5, -np.inf, -5, -6], [-np.inf, -np.inf, 2, 2], [-0.0, 0, 0, -1]])
    got = sampled(logits.astype(np.float32), np.arange(5, dtype=np.uint32), np.arange(5, dtype=np.int32), GREEDY)
    assert np.asarray(got).tolist() == [1, 0, 0, 2, 0] and got.dtype == jnp.int32


def test_greedy_ignores_seed_and_top_p():
    assert set(draws(LOGITS, Sampling(temperature=0.0, top_p=0.01), 20)) == {9}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies(temperature):
    """A token's count is binomial; five deviations of it are not reached by chance, and seeds are fixed anyway."""
    counts = np.bincount(draws(LOGITS, Sampling(temperature)), minlength=VOCAB)
    expected = probabilities(LOGITS, temperature)
    deviation = np.sqrt(DRAWS * expected * (1 - expected))
    assert (np.abs(counts - DRAWS * expected) <= 5 * deviation + 1).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.2, 0.5, 0.8, 0.95])
def test_top_p_keeps_the_smallest_set_that_reaches_it(temperature, top_p):
    expected = kept(LOGITS, temperature, top_p)
    got = draws(LOGITS, Sampling(temperature, top_p))
    assert sorted(set(got.tolist())) == expected
    counts = np.bincount(got, minlength=VOCAB)
    chances = np.where(np.isin(np.arange(VOCAB), expected), probabilities(LOGITS, temperature), 0)
    chances /= chances.sum()
    deviation = np.sqrt(DRAWS * chances * (1 - chances))
    assert (np.abs(counts - DRAWS * chances) <= 5 * deviation + 1).all()


def test_top_p_of_one_keeps_every_possible_token():
    logits = np.array([0.0, 0.1, -np.inf, 0.2])
    assert sorted(set(draws(logits, Sampling(1.0, 1.0)).tolist())) == [0, 1, 3]
    assert sorted(set(draws(logits, Sampling(1.0, 0.9999)).tolist())) == [0, 1, 3]


@pytest.mark.parametrize("top_p, expected", [(0.25, [1]), (0.26, [1, 2]), (0.5, [1, 2]), (0.51, [1, 2, 4])])
def test_equal_tokens_at_the_edge_of_top_p_are_kept_in_order(top_p, expected):
    """Four tokens of exactly a quarter each; the set ends where its sum has reached top_p."""
    logits = np.full(6, -np.inf)
    logits[[1, 2, 4, 5]] = 3.0
    assert sorted(set(draws(logits, Sampling(1.0, top_p)).tolist())) == expected


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_even():
    assert set(draws(LOGITS, Sampling(1e-4))) == {9}
    counts = np.bincount(draws(LOGITS, Sampling(1e6)), minlength=VOCAB)
    assert counts.min() > 0.7 * DRAWS / VOCAB


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, 0.9)], ids=["temperature", "top_p"])
def test_a_draw_depends_on_its_own_seed_and_position_only(sampling):
    """The same request gives the same text in any seat of any batch."""
    random = np.random.default_rng(2)
    logits = random.normal(size=(6, VOCAB)).astype(np.float32)
    seeds, positions = np.arange(6, dtype=np.uint32), np.array([5, 5, 9, 9, 1, 1], np.int32)
    together = np.asarray(sampled(logits, seeds, positions, sampling))
    order = np.array([3, 0, 5, 1, 4, 2])
    np.testing.assert_array_equal(sampled(logits[order], seeds[order], positions[order], sampling), together[order])
    for seat in range(6):
        alone = sampled(logits[seat : seat + 1], seeds[seat : seat + 1], positions[seat : seat + 1], sampling)
        assert int(alone[0]) == together[seat]


def test_jitted_or_not_the_draws_are_the_same():
    logits = np.tile(LOGITS.astype(np.float32), (300, 1))
    seeds, positions, sampling = np.arange(300, dtype=np.uint32), np.full(300, 7, np.int32), Sampling(0.8, 0.9)
    np.testing.assert_array_equal(sampled(logits, seeds, positions, sampling), draws(LOGITS, sampling, 300))


def test_seeds_and_positions_both_matter():
    logits = np.zeros((200, VOCAB), np.float32)
    numbers = np.arange(200)
    by_seed = np.asarray(sampled(logits, numbers.astype(np.uint32), np.zeros(200, np.int32), Sampling(1.0)))
    by_position = np.asarray(sampled(logits, np.zeros(200, np.uint32), numbers.astype(np.int32), Sampling(1.0)))
    assert len(set(by_seed.tolist())) == len(set(by_position.tolist())) == VOCAB
    assert not np.array_equal(by_seed, by_position)
    large = np.array([2**32 - 1], np.uint32)
    assert 0 <= int(sampled(logits[:1], large, np.zeros(1, np.int32), Sampling(1.0))[0]) < VOCAB
