"""The textbook form of attention says what the absorbed form says, and teaches the indexer and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.models import dsa, expanded
from echo_jax.models.config import DENSE, FULL, MOE, SHARED, DsaConfig, RopeConfig
from echo_jax.models.selection import Lesson

CONFIG = DsaConfig(
    vocab_size=50,
    hidden_size=24,
    num_heads=3,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
    index_heads=5,
    index_head_dim=14,
    index_topk=7,
    layer_kinds=(FULL, SHARED),
    mlp_kinds=(DENSE, MOE),
    intermediate_size=20,
    moe_intermediate_size=11,
    num_experts=6,
    num_shared_experts=1,
    experts_per_token=2,
    expert_groups=3,
    expert_groups_kept=2,
    routed_scaling_factor=1.7,
    rope=RopeConfig(theta=500.0, kind="yarn", factor=4.0, original_max_positions=16, mscale_all_dim=1.0),
    dtype="float32",
)
BATCH, LENGTH = 2, 24


# Both forms add the same products in another order; sums are at most 24 terms of size about 1, in float32.
def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def params():
    """Drawn without jax, which would compile a program for each shape; norms near one and biases near zero, since exact
    ones and zeros would hide a weight that is not used."""
    draw = np.random.default_rng(3)

    def filled(path, leaf):
        name = path[-1].key
        if leaf.ndim == 1:
            return jnp.asarray(0.2 * draw.normal(size=leaf.shape) + (0.0 if "bias" in name else 1.0), jnp.float32)
        return jnp.asarray(draw.normal(size=leaf.shape) * 0.25, jnp.float32)

    shapes = jax.eval_shape(lambda: dsa.init_params(jax.random.key(0), CONFIG))
    return jax.tree_util.tree_map_with_path(filled, shapes)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(5), (BATCH, LENGTH), 0, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def positions():
    steps = jax.random.randint(jax.random.key(6), (BATCH, LENGTH), 1, 4)
    return jnp.cumsum(steps, axis=1, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames="sparse")
def absorbed_forward(params, sequence, positions, sparse):
    """One sequence through `dsa`'s absorbed projections; the selection is a stable sort."""
    x = dsa.embed(params, sequence, CONFIG)
    mask = causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer, kind in zip(params["layers"], CONFIG.mlp_kinds, strict=True):
        normed = dsa.rms_norm(x, layer["input_norm"], CONFIG.rms_norm_eps)
        inputs = dsa.attention_inputs(layer, normed, positions, CONFIG)
        if sparse and "indexer" in layer:
            products = jnp.einsum("tgd,sd->tgs", inputs.index_query, inputs.index_key, precision="highest")
            scores = jnp.einsum("tg,tgs->ts", inputs.index_weights, jax.nn.relu(products), precision="highest")
            order = jnp.argsort(jnp.where(causal, -scores, jnp.inf), axis=-1, stable=True)
            mask = causal & (jnp.argsort(order, axis=-1) < CONFIG.index_topk)
        logits = jnp.einsum("thd,sd->hts", inputs.query, inputs.record, precision="highest")
        weights = jax.nn.softmax(jnp.where(mask[None], logits * CONFIG.attention_scale, -jnp.inf), axis=-1)
        latents = inputs.record[:, : CONFIG.kv_lora_rank]
        attended = jnp.einsum("hts,sr->thr", weights, latents, precision="highest")
        x = x + dsa.attention_output(layer, attended, CONFIG)
        normed = dsa.rms_norm(x, layer["post_norm"], CONFIG.rms_norm_eps)
        x = x + dsa.feed_forward(layer, normed, CONFIG, kind)
    return dsa.logits(params, x, CONFIG)


def best_by_sorting(scores, visible, k):
    mask = np.zeros_like(visible)
    for t in range(scores.shape[0]):
        seen = np.flatnonzero(visible[t])
        mask[t, seen[np.argsort(-scores[t, seen], kind="stable")[:k]]] = True
    return mask


@pytest.fixture(scope="module")
def dense_and_sparse(params, tokens, positions):
    """Both forms with everything that distillation measures."""

    @functools.partial(jax.jit, static_argnames="sparse")
    def forward(params, tokens, positions, sparse):
        return expanded.forward(params, tokens, positions, CONFIG, sparse=sparse, distil=True, block=24)

    return tuple(forward(params, tokens, positions, sparse) for sparse in (False, True))


@pytest.mark.parametrize("sparse", [False, True])
def test_expanded_form_equals_absorbed_form_in_one_block_and_in_many(
    dense_and_sparse, params, tokens, positions, sparse
):
    @jax.jit
    def in_blocks(params, tokens, positions):
        found = expanded.forward(params, tokens, positions, CONFIG, sparse=sparse, distil=False, block=4, extents=3)
        return found.logits

    expected = jnp.stack([absorbed_forward(params, tokens[i], positions[i], sparse) for i in range(BATCH)])
    assert_close(dense_and_sparse[int(sparse)].logits, expected)
    assert_close(in_blocks(params, tokens, positions), expected)


def test_sparse_differs_from_dense_only_past_the_top_k(dense_and_sparse):
    dense, sparse = (forward.logits for forward in dense_and_sparse)
    k = CONFIG.index_topk
    assert_close(dense[:, :k], sparse[:, :k])
    assert (jnp.abs(dense - sparse).max(axis=-1)[:, k:] > 1e-3).mean() > 0.9


def test_mass_is_the_share_of_attention_inside_the_selection(dense_and_sparse):
    dense, sparse = (forward.mass for forward in dense_and_sparse)
    np.testing.assert_allclose(sparse, 1.0, rtol=1e-5)  # sparse attention lies inside the selection by construction
    assert (dense > 0.3).all() and (dense < 0.999).all()


def test_given_dense_attention_is_used(dense_and_sparse, params, tokens, positions):
    def own(query, key, value, mask, scale):
        assert mask is None
        length = query.shape[1]
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool))[None], (BATCH, length, length))
        return expanded.attend(query, key, value, causal, scale)[0]

    @functools.partial(jax.jit, static_argnames="attention")
    def through(attention):
        found = expanded.forward(params, tokens, positions, CONFIG, sparse=False, distil=False, attention=attention)
        return found.logits

    plain = dense_and_sparse[0].logits
    assert_close(plain, through(own))
    assert jnp.abs(plain - through(lambda *inputs: 2 * own(*inputs))).max() > 1e-2


@pytest.mark.parametrize("sparse", [False, True])
def test_through_a_given_attention_and_on_few_queries(dense_and_sparse, params, tokens, positions, sparse):
    """A given attention gets the selection as its mask; every second query teaches half of what all of them do."""

    def own(query, key, value, mask, scale):
        length = query.shape[1]
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool))[None], (BATCH, length, length))
        return expanded.attend(query, key, value, causal if mask is None else mask, scale)[0]

    @functools.partial(jax.jit, static_argnames="every")
    def through(every, phase, weights):
        return expanded.forward(
            params, tokens, positions, CONFIG, sparse=sparse, distil=True, block=4, extents=3, attention=own,
            lesson=Lesson(every, phase), weights=weights,
        )  # fmt: skip

    ones = jnp.ones((BATCH, LENGTH), jnp.float32)
    found = through(1, 0, ones)
    assert_close(found.logits, dense_and_sparse[int(sparse)].logits)
    if not sparse:
        assert_close(found.divergence, dense_and_sparse[0].divergence)
        assert_close(found.mass, dense_and_sparse[0].mass)
        return
    assert (found.mass < 0.999).all()  # it is dense attention that teaches
    halves = [through(2, phase, ones) for phase in (0, 1)]
    assert_close((halves[0].divergence + halves[1].divergence) / 2, found.divergence)
    assert jnp.abs(halves[0].divergence - halves[1].divergence).min() > 1e-3
    even = jnp.broadcast_to((jnp.arange(LENGTH) % 2 == 0).astype(jnp.float32)[None], ones.shape)
    assert_close(through(1, 0, even).divergence, halves[0].divergence)


@pytest.mark.parametrize("k", [1, 5, 40])
def test_selection_is_exact_and_ties_go_to_the_lower_position(k):
    scores = jax.random.normal(jax.random.key(k), (3, 16, 16))
    tied = jnp.round(scores * 2) / 2  # many equal scores, zeros of both signs among them
    visible = np.tril(np.ones((16, 16), bool))
    select = jax.jit(lambda scores, visible: expanded.selected_mask(scores, visible, k))
    for drawn in (scores, tied, jnp.zeros_like(scores), -jnp.abs(scores), scores * 1e-40):  # the last are subnormal
        got = select(drawn, jnp.broadcast_to(visible[None], drawn.shape))
        expected = np.stack([best_by_sorting(np.asarray(one), visible, k) for one in drawn])
        np.testing.assert_array_equal(got, expected)


def test_divergence_is_zero_where_the_indexer_foresees_attention():
    mask = jnp.tril(jnp.ones((1, 6, 6), bool))
    distribution = jax.nn.softmax(jnp.where(mask, jax.random.normal(jax.random.key(0), (1, 6, 6)), -jnp.inf), axis=-1)
    shifted = jnp.log(jnp.maximum(distribution, 1e-30)) + 3.0
    np.testing.assert_allclose(expanded.index_divergence(shifted, distribution, mask), 0.0, atol=1e-5)
    flat = expanded.index_divergence(jnp.zeros_like(shifted), distribution, mask)
    entropy = -jnp.where(mask, distribution * jnp.log(jnp.maximum(distribution, 1e-30)), 0.0).sum(axis=-1)
    np.testing.assert_allclose(flat, jnp.log(jnp.arange(1.0, 7.0))[None] - entropy, atol=1e-5)


def largest_gradient(gradients, of_indexer):
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return max(
        float(jnp.abs(leaf).max())
        for path, leaf in leaves
        if any(getattr(entry, "key", None) == "indexer" for entry in path) == of_indexer
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_distillation_reaches_only_the_indexer_and_lowers_its_divergence(params, tokens, positions, sparse):
    @jax.jit
    @jax.value_and_grad
    def divergence(params):
        forward = expanded.forward(params, tokens, positions, CONFIG, sparse=sparse, distil=True, block=24)
        return forward.divergence.sum()

    before, gradients = divergence(params)
    assert largest_gradient(gradients, of_indexer=True) > 1e-4
    assert largest_gradient(gradients, of_indexer=False) == 0.0
    for _ in range(10):
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)
        after, gradients = divergence(params)
    assert after < 0.9 * before


def test_who_watches_sees_what_the_layer_compares(params, tokens, positions, dense_and_sparse):
    """Attention and selection made again from it, by sorting, give the mass that `forward` tells."""

    @jax.jit
    def watched(params, tokens, positions):
        result = expanded.forward(
            params, tokens, positions, CONFIG, sparse=False, distil=True, block=24, watch=lambda seen: seen._asdict()
        )
        return result.watched

    (seen,) = watched(params, tokens, positions)  # the second layer shares the first one's indexer
    assert seen["layer"] == 0 and seen["q_latent"].shape == (BATCH * LENGTH, CONFIG.q_lora_rank)
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))
    masses = []
    for query, key, index_query, index_weights, index_key in zip(
        seen["query"], seen["key"], *(np.asarray(a) for a in seen["indexer"]), strict=True
    ):
        logits = np.einsum("thd,shd->hts", query, key) * CONFIG.attention_scale
        powers = np.where(causal, np.exp(logits), 0.0)
        attention = (powers / powers.sum(axis=-1, keepdims=True)).mean(axis=0)
        products = np.maximum(np.einsum("tgd,sd->tgs", index_query, index_key), 0.0)
        scores = np.einsum("tg,tgs->ts", index_weights, products)
        masses.append((attention * best_by_sorting(scores, causal, CONFIG.index_topk)).sum(axis=-1).mean())
    # Near-ties may fall differently: one query's share of at most 1/24 of the mean would show, rounding does not.
    np.testing.assert_allclose(np.mean(masses), dense_and_sparse[0].mass[0], rtol=1e-4)


def test_prediction_does_not_reach_the_indexer(params, tokens, positions):
    @jax.jit
    @jax.grad
    def prediction(params):
        return expanded.forward(params, tokens, positions, CONFIG, sparse=True, distil=False, block=24).logits.var()

    gradients = prediction(params)
    assert largest_gradient(gradients, of_indexer=True) == 0.0
    assert largest_gradient(gradients, of_indexer=False) > 1e-4


def test_mixture_equals_the_models_own_and_loads_sum_to_one(params):
    x = jax.random.normal(jax.random.key(8), (40, CONFIG.hidden_size))
    mixed, load = jax.jit(lambda w: expanded.mixture(w, x, CONFIG))(params["layers"][1]["moe"])
    assert_close(mixed, dsa.moe(params["layers"][1]["moe"], x, CONFIG))
    np.testing.assert_allclose(load.sum(), 1.0, rtol=1e-6)


def test_blocks_that_do_not_divide_the_sequence_are_refused(params, tokens, positions):
    with pytest.raises(ValueError, match="24 positions are not a multiple of 5 x 1"):
        expanded.forward(params, tokens, positions, CONFIG, sparse=True, distil=False, block=5)
