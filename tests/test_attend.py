"""Sparse attention against loops in float64, and the fingerprint of its output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import attend
from echo_jax.formats import RecordFormat
from tests.oracles import attention as oracle
from tests.oracles.words import NO_POSITION

LATENT, ROPE, HEADS, K = 24, 8, 3, 9
F32 = RecordFormat("f32", LATENT, ROPE)
U = 2.0**-24

run, digest = jax.jit(attend.attend, static_argnums=(3, 4)), jax.jit(attend.digest)


def case(seed, count=4, heads=HEADS, size=1.0):
    """query [N, H, W], records [N, K, W] (each query its own), lists [N, K] of different lengths."""
    random = np.random.default_rng(seed)
    query = (random.normal(size=(count, heads, LATENT + ROPE)) * size).astype(np.float32)
    records = random.normal(size=(count, K, LATENT + ROPE)).astype(np.float32)
    lists = np.tile(np.arange(K), (count, 1))
    return query, records, lists


def attended(query, records, lists, scale):
    return np.asarray(run(query, F32.encode(jnp.asarray(records)), lists >= 0, scale, F32))


def check(query, records, lists, scale):
    got = attended(query, records, lists, scale)
    for n in range(len(query)):
        expected = oracle.attend_one(query[n], records[n], lists[n].tolist(), scale, LATENT)
        # An error d of a logit changes its weight by the factor e^d, so the output by at most 2 d of the largest
        # latent; d is at most (W + 2) roundings of the sum of magnitudes. The exponential, the sum of K weights, the
        # mixing and the division add about 2 K + 8 roundings.
        listed = records[n][lists[n] >= 0]
        if len(listed) == 0:
            assert not got[n].any()
            continue
        d = (LATENT + ROPE + 2) * U * scale * np.max(np.abs(query[n]) @ np.abs(listed).T)
        bound = (2 * d + (2 * K + 8) * U) * np.abs(listed[:, :LATENT]).max()
        assert np.abs(got[n] - expected).max() <= bound, n
    np.testing.assert_array_equal(got, attended(query, records, lists, scale))
    return got


@pytest.mark.parametrize("heads", [1, 3])
def test_full_lists(heads):
    check(*case(1, heads=heads), scale=0.2)


def test_lists_of_every_length_and_empty():
    query, records, lists = case(2, count=K + 1)
    for n in range(K + 1):
        lists[n, n:] = NO_POSITION
    check(query, records, lists, 0.2)


def test_padding_in_the_middle_of_a_list():
    query, records, lists = case(3)
    lists[:, 2:5] = NO_POSITION
    check(query, records, lists, 0.2)


def test_one_row_is_its_own_latent():
    query, records, lists = case(4)
    lists[:, 1:] = NO_POSITION
    got = check(query, records, lists, 0.2)
    for head in range(HEADS):
        np.testing.assert_array_equal(got[:, head], records[:, 0, :LATENT])


def test_an_empty_list_gives_zeros_whatever_lies_there():
    query, records, lists = case(5)
    lists[:] = NO_POSITION
    records[:] = np.nan
    assert not attended(query, records, lists, 0.2).any()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38], ids=str)
def test_garbage_in_records_that_are_not_listed_does_not_leak(garbage):
    query, records, lists = case(6)
    lists[:, 5:] = NO_POSITION
    clean = attended(query, records, lists, 0.2)
    records[:, 5:] = garbage
    np.testing.assert_array_equal(attended(query, records, lists, 0.2), clean)


def test_a_listed_nan_shows_in_its_own_query_only():
    query, records, lists = case(7)
    records[1, 2, 0] = np.nan
    got = attended(query, records, lists, 0.2)
    assert np.isnan(got[1]).any() and np.isfinite(got[[0, 2, 3]]).all()


def test_huge_logits_give_the_best_row():
    """Logits near 1e6 overflow the exponential unless the largest is taken off first."""
    query, records, lists = case(8, size=1e5)
    got = attended(query, records, lists, 1.0)
    assert np.isfinite(got).all()
    best = np.einsum("nhd,nkd->nhk", query.astype(np.float64), records.astype(np.float64)).argmax(-1)
    for n in range(len(query)):
        for head in range(HEADS):
            np.testing.assert_array_equal(got[n, head], records[n, best[n, head], :LATENT])


def test_equal_logits_give_the_mean():
    query, records, lists = case(9)
    query[:] = 0
    lists[:, 4:] = NO_POSITION
    np.testing.assert_allclose(
        attended(query, records, lists, 0.2),
        np.tile(records[:, :4, :LATENT].mean(1)[:, None], (1, HEADS, 1)),
        atol=4 * U,
    )


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_stored_formats_are_read_as_they_are_stored(name):
    """The oracle gets the numbers that the stored bytes stand for."""
    form = RecordFormat(name, 128, 8)
    random = np.random.default_rng(10)
    query = random.normal(size=(2, HEADS, 136)).astype(np.float32)
    stored = form.encode(jnp.asarray(random.normal(size=(2, K, 136)).astype(np.float32)))
    values = np.asarray(form.decode(stored))
    got = np.asarray(run(query, stored, jnp.ones((2, K), bool), 0.1, form))
    for n in range(2):
        expected = oracle.attend_one(query[n], values[n], range(K), 0.1, 128)
        # As in `check`, with sums of magnitudes of about 136 * 0.1 * 0.64 and latents below 4.
        np.testing.assert_allclose(got[n], expected, rtol=0, atol=4 * (2 * 138 * U * 10 + 26 * U))


# Digest


def test_the_digest_sees_every_bit_and_every_place():
    values = np.random.default_rng(11).normal(size=(1, HEADS, LATENT)).astype(np.float32)
    first = int(digest(values)[0])
    assert int(digest(values.copy())[0]) == first
    seen = {first}
    bits = values.reshape(-1).view(np.uint32)
    for place in range(bits.size):
        for bit in (0, 31):  # the last bit of the mantissa, and the sign
            changed = bits.copy()
            changed[place] ^= np.uint32(1) << np.uint32(bit)
            seen.add(int(digest(changed.view(np.float32).reshape(values.shape))[0]))
    assert len(seen) == 1 + 2 * bits.size
    swapped = values.copy()
    swapped[0, 0, [0, 1]] = values[0, 0, [1, 0]]
    assert int(digest(swapped)[0]) != first


def test_the_digest_is_of_one_query_alone():
    values = np.random.default_rng(12).normal(size=(3, HEADS, LATENT)).astype(np.float32)
    alone = [int(digest(values[n : n + 1])[0]) for n in range(3)]
    assert np.asarray(digest(values)).tolist() == alone
    assert len(set(alone)) == 3
    zeros = np.stack([np.zeros((HEADS, LATENT), np.float32), -np.zeros((HEADS, LATENT), np.float32)])
    assert len(set(np.asarray(digest(zeros)).tolist())) == 2  # it is of bits, and -0 has other bits than +0
