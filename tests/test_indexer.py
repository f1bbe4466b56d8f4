"""The indexer against loops: scores by tolerance, selection exactly, whatever the scores are."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax import _ffi, indexer
from tests.oracles import indexer as oracle
from tests.oracles.select import padded, top_k

NAN, INF = float("nan"), float("inf")
POSITIONS = 12

select, score_all = jax.jit(indexer.select, static_argnums=(2, 3)), jax.jit(indexer.scores)


def check_selection(scores, visible, k):
    """jnp's, row by row, against the oracle; the library's, where it is, against jnp's to the bit."""
    scores, visible = np.asarray(scores, np.float32), np.asarray(visible, np.int32)
    got = select(scores, visible, k, "jnp")
    if _ffi.is_available("cpu"):  # tests/ffi fails where it ought to be and is not
        by_library = select(scores, visible, k, "ffi")
        np.testing.assert_array_equal(by_library.positions, got.positions)
        np.testing.assert_array_equal(bits(by_library.kth_score), bits(got.kth_score))
    width = min(k, scores.shape[1])
    assert got.positions.shape == (len(scores), width) and got.positions.dtype == jnp.int32
    for row in range(len(scores)):
        chosen, kth = top_k(scores[row], int(visible[row]), k)
        np.testing.assert_array_equal(got.positions[row], padded(chosen, width), err_msg=f"row {row}: {scores[row]}")
        np.testing.assert_equal(float(got.kth_score[row]) + 0.0, kth + 0.0)
    return got


def bits(kth_score):
    return np.asarray(kth_score).view(np.uint32)


CORNERS = {
    "all_tied": [7.0] * POSITIONS,
    "tie_at_threshold": [1, 7, 7, 8, 7, 0, 7, 7, 9, 7, 7, 7],
    "signed_zeros": [-0.0, 0.0, -0.0, 0.0, -1.0, 0.0, -0.0, 1.0, -0.0, 0.0, -0.0, 0.0],
    "negative_zeros_first": [-0.0] * 6 + [0.0] * 6,
    "nan_below_minus_infinity": [NAN, -INF, NAN, 5, -INF, NAN, 4, -INF, NAN, NAN, -INF, 3],
    "all_nan": [NAN] * POSITIONS,
    "all_minus_infinity": [-INF] * POSITIONS,
    "infinities": [INF, 5, INF, -INF, INF, 1, 2, -INF, INF, 0, 3, INF],
    "negative_nan": [-NAN, 1, -NAN, NAN, 2, -NAN, 3, NAN, 4, 5, -INF, -NAN],
    "subnormals": [1e-45, 0.0, -1e-45, 2e-45, -0.0, 1e-38, -1e-38, 1e-45, 0.0, 0.0, 0.0, 3e-45],
    "extremes": [3.4e38, -3.4e38, 3.3e38, 1, -1, 0, 1e-38, 3.4e38, -3.4e38, 2, 2, 2],
    "neighbours": np.nextafter(np.float32(1), np.float32(2)) * np.ones(POSITIONS) - np.arange(12) % 3 * 2.0**-23,
}


@pytest.mark.parametrize("name", CORNERS)
def test_selection_corner(name):
    """Every visible length, so that a bad score lies inside, outside and at the edge of what is seen."""
    rows = np.tile(np.asarray(CORNERS[name], np.float32), (POSITIONS + 1, 1))
    for k in (1, 4, POSITIONS):
        check_selection(rows, np.arange(POSITIONS + 1), k)


def test_top_k_larger_than_the_positions():
    got = check_selection([[3, 1, 2], [NAN, 1, 2]], [3, 2], 9)
    assert got.positions.shape == (2, 3)


def test_zero_visible_selects_nothing_and_has_no_score():
    got = check_selection([[3, 1, 2], [NAN, INF, 2]], [0, 0], 2)
    assert np.isnan(got.kth_score).all()


def test_one_odd_row_does_not_change_its_neighbours():
    """A NaN in one row sends the whole batch through the other algorithm; the answers of the rest are the same."""
    plain = np.random.default_rng(5).normal(size=(6, 50)).round(1).astype(np.float32)
    odd = plain.copy()
    odd[2, 10] = NAN
    visible = np.array([50, 49, 30, 5, 4, 0])
    first, second = check_selection(plain, visible, 5), check_selection(odd, visible, 5)
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(first.positions[others,], second.positions[others,])
    np.testing.assert_array_equal(first.kth_score[others,], second.kth_score[others,])


@pytest.mark.parametrize("k", [7, 64])
def test_selection_of_random_scores_with_ties(k):
    random = np.random.default_rng(k)
    scores = random.normal(size=(40, 200)).round(1)
    check_selection(scores, random.integers(0, 201, 40), k)
    scores[random.random(scores.shape) < 0.02] = NAN
    scores[random.random(scores.shape) < 0.02] = -INF
    check_selection(scores, random.integers(0, 201, 40), k)


@given(
    st.lists(
        st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, NAN, INF, -INF]), min_size=8, max_size=8),
        min_size=3, max_size=3,
    ),
    st.lists(st.integers(0, 8), min_size=3, max_size=3),
    st.sampled_from([1, 3, 8]),
)  # fmt: skip
def test_selection_of_any_floats(scores, visible, k):
    check_selection(scores, visible, k)


def test_order_keys_are_the_order_of_scores():
    ordered = [NAN, -INF, -3.4e38, -1.0, -1e-38, -1e-45, 0.0, 1e-45, 1e-38, 1.0, 3.4e38, INF]
    keys = np.asarray(indexer.order_keys(jnp.array(ordered, jnp.float32), jnp.ones(len(ordered), bool)))
    for lower, higher in itertools.pairwise(keys.tolist()):
        assert 0 < lower < higher
    zeros = np.asarray(indexer.order_keys(jnp.array([0.0, -0.0, NAN, -NAN]), jnp.ones(4, bool)))
    assert zeros[0] == zeros[1] and zeros[2] == zeros[3]
    assert np.asarray(indexer.order_keys(jnp.array([INF, NAN]), jnp.zeros(2, bool))).tolist() == [0, 0]


# Scores

U = 2.0**-24  # half the distance of 1 and the next float32: the relative error of one rounding


@pytest.mark.parametrize("tokens, heads, width, positions", [(1, 1, 1, 1), (3, 4, 32, 70), (2, 5, 7, 13)])
def test_scores(tokens, heads, width, positions):
    random = np.random.default_rng(width)
    query = random.normal(size=(tokens, heads, width)).astype(np.float32)
    weights = random.normal(size=(tokens, heads)).astype(np.float32)
    keys = random.normal(size=(positions, width)).astype(np.float32)
    got = np.asarray(score_all(query, weights, keys))
    expected = oracle.scores(query, weights, keys)
    # A dot of D products loses at most D roundings of the sum of magnitudes; the weighted sum over G heads adds G + 1.
    sizes = np.einsum("tgd,sd->tgs", np.abs(query), np.abs(keys))
    bound = np.einsum("tg,tgs->ts", np.abs(weights), sizes).astype(np.float64) * (width + heads + 1) * U
    assert (np.abs(got - expected) <= bound).all()
    np.testing.assert_array_equal(got, score_all(query, weights, keys))


def test_scores_by_hand_of_negative_products_and_weights():
    query = np.array([[[1, 2], [0, -1]], [[-1, 0], [1, 1]]], np.float32)
    weights = np.array([[2, -3], [1, 0.5]], np.float32)
    keys = np.array([[1, 1], [1, -2], [-3, 0]], np.float32)
    assert np.asarray(score_all(query, weights, keys)).tolist() == [[6, -6, 0], [1, 0, 3]]


def test_a_nan_key_spoils_its_own_position_only():
    query, weights = np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.float32)
    keys = np.ones((5, 4), np.float32)
    keys[2, 1] = NAN
    assert np.isnan(score_all(query, weights, keys)).tolist() == [[False, False, True, False, False]] * 2


def test_what_is_not_visible_is_masked_whatever_it_scores():
    score = np.array([[1, NAN, INF, 4]] * 3, np.float32)
    masked = np.asarray(indexer.mask_invisible(jnp.asarray(score), jnp.array([0, 2, 4], jnp.int32)))
    np.testing.assert_array_equal(masked, [[-INF] * 4, [1, NAN, -INF, -INF], [1, NAN, INF, 4]])
