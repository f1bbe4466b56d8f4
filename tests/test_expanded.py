"""The textbook form of attention says what the absorbed form says, and teaches the indexer and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.models import dsa, expanded
from echo_jax.models.config import DENSE, FULL, MOE, SHARED, DsaConfig, RopeConfig

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
    layer_kinds=(FULL, SHARED, FULL),
    mlp_kinds=(DENSE, MOE, MOE),
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
TOLERANCE = dict(rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def params():
    drawn = dsa.init_params(jax.random.key(3), CONFIG)
    keys = iter(jax.random.split(jax.random.key(4), 200))
    # Norms of one and biases of zero would hide a weight that is not used.
    return jax.tree.map(
        lambda a: a + 0.2 * jax.random.normal(next(keys), a.shape) if a.ndim == 1 else a, drawn
    )


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(5), (BATCH, LENGTH), 0, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def positions():
    steps = jax.random.randint(jax.random.key(6), (BATCH, LENGTH), 1, 4)
    return jnp.cumsum(steps, axis=1, dtype=jnp.int32)


def absorbed_forward(params, tokens, positions, *, sparse):
    """One sequence at a time through `dsa`'s absorbed projections, with the selection by a stable sort in NumPy."""
    logits = []
    for sequence, at in zip(tokens, positions, strict=True):
        x = dsa.embed(params, sequence, CONFIG)
        mask = causal = np.tril(np.ones((LENGTH, LENGTH), bool))
        for layer, kind in zip(params["layers"], CONFIG.mlp_kinds, strict=True):
            inputs = dsa.attention_inputs(layer, dsa.rms_norm(x, layer["input_norm"], CONFIG.rms_norm_eps), at, CONFIG)
            if sparse and inputs.index_query is not None:
                mask = best_by_sorting(numpy_scores(inputs), causal, CONFIG.index_topk)
            scores = jnp.einsum("thd,sd->hts", inputs.query, inputs.record, precision="highest")
            scores = jnp.where(mask[None], scores * CONFIG.attention_scale, -jnp.inf)
            latents = inputs.record[:, : CONFIG.kv_lora_rank]
            attended = jnp.einsum("hts,sr->thr", jax.nn.softmax(scores, axis=-1), latents, precision="highest")
            x = x + dsa.attention_output(layer, attended, CONFIG)
            normed = dsa.rms_norm(x, layer["post_norm"], CONFIG.rms_norm_eps)
            x = x + dsa.feed_forward(layer, normed, CONFIG, kind)
        logits.append(dsa.logits(params, x, CONFIG))
    return jnp.stack(logits)


def numpy_scores(inputs):
    query, weights, key = (np.asarray(a, np.float64) for a in inputs[2:])
    return np.einsum("tg,tgs->ts", weights, np.maximum(np.einsum("tgd,sd->tgs", query, key), 0))


def best_by_sorting(scores, visible, k):
    mask = np.zeros_like(visible)
    for t in range(scores.shape[0]):
        seen = np.flatnonzero(visible[t])
        mask[t, seen[np.argsort(-scores[t, seen], kind="stable")[:k]]] = True
    return mask


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("block", "extents"), [(24, 1), (4, 3)])
def test_expanded_form_equals_absorbed_form(params, tokens, positions, sparse, block, extents):
    forward = jax.jit(
        lambda *args: expanded.forward(*args, CONFIG, sparse=sparse, distil=False, block=block, extents=extents)
    )
    expected = absorbed_forward(params, tokens, positions, sparse=sparse)
    np.testing.assert_allclose(forward(params, tokens, positions).logits, expected, **TOLERANCE)


def test_sparse_differs_from_dense_only_past_the_top_k(params, tokens, positions):
    dense, sparse = (
        expanded.forward(params, tokens, positions, CONFIG, sparse=s, distil=False, block=24).logits for s in (0, 1)
    )
    k = CONFIG.index_topk
    np.testing.assert_allclose(dense[:, :k], sparse[:, :k], **TOLERANCE)
    assert (jnp.abs(dense - sparse).max(axis=-1)[:, k:] > 1e-3).mean() > 0.9


def test_given_dense_attention_is_used(params, tokens, positions):
    def own(query, key, value, scale):
        length = query.shape[1]
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool))[None], (BATCH, length, length))
        return expanded.attend(query, key, value, causal, scale)[0]

    options = dict(sparse=False, distil=False, block=8)
    plain = expanded.forward(params, tokens, positions, CONFIG, **options).logits
    through = expanded.forward(params, tokens, positions, CONFIG, **options, dense_attention=own).logits
    twice = expanded.forward(
        params, tokens, positions, CONFIG, **options, dense_attention=lambda *a: 2 * own(*a)
    ).logits
    np.testing.assert_allclose(plain, through, **TOLERANCE)
    assert jnp.abs(plain - twice).max() > 1e-2


@pytest.mark.parametrize("k", [1, 5, 16, 40])
def test_selection_is_exact_and_ties_go_to_the_lower_position(k):
    scores = jax.random.normal(jax.random.key(k), (3, 16, 16))
    tied = jnp.round(scores * 2) / 2  # many equal scores, zeros of both signs among them
    visible = np.tril(np.ones((16, 16), bool))
    for drawn in (scores, tied, jnp.zeros_like(scores), -jnp.abs(scores)):
        got = expanded.selected_mask(drawn, jnp.broadcast_to(visible[None], drawn.shape), k)
        expected = np.stack([best_by_sorting(np.asarray(one), visible, k) for one in drawn])
        np.testing.assert_array_equal(got, expected)


def test_divergence_is_zero_where_the_indexer_foresees_attention():
    mask = np.tril(np.ones((1, 6, 6), bool))
    distribution = jax.nn.softmax(jnp.where(mask, jax.random.normal(jax.random.key(0), (1, 6, 6)), -jnp.inf), axis=-1)
    shifted = jnp.log(jnp.maximum(distribution, 1e-30)) + 3.0
    np.testing.assert_allclose(expanded.index_divergence(shifted, distribution, mask), 0.0, atol=1e-5)
    flat = expanded.index_divergence(jnp.zeros_like(shifted), distribution, mask)
    entropy = -jnp.where(mask, distribution * jnp.log(jnp.maximum(distribution, 1e-30)), 0.0).sum(axis=-1)
    np.testing.assert_allclose(flat, jnp.log(jnp.arange(1.0, 7.0))[None] - entropy, atol=1e-5)


def gradients_by_part(loss, params):
    """Largest gradient in the indexers and in everything else."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))
    parts = {True: 0.0, False: 0.0}
    for path, leaf in leaves:
        is_indexer = any(getattr(entry, "key", None) == "indexer" for entry in path)
        parts[is_indexer] = max(parts[is_indexer], float(jnp.abs(leaf).max()))
    return parts


@pytest.mark.parametrize("sparse", [False, True])
def test_distillation_reaches_only_the_indexer(params, tokens, positions, sparse):
    def forward(params):
        return expanded.forward(params, tokens, positions, CONFIG, sparse=sparse, distil=True, block=8, extents=3)

    distilled = gradients_by_part(lambda p: forward(p).divergence.sum(), params)
    assert distilled[True] > 1e-4 and distilled[False] == 0.0
    predicted = gradients_by_part(lambda p: forward(p).logits.var(), params)
    assert predicted[True] == 0.0 and predicted[False] > 1e-4


def test_distillation_lowers_the_divergence(params, tokens, positions):
    @jax.jit
    def descend(params):
        def loss(p):
            return expanded.forward(p, tokens, positions, CONFIG, sparse=False, distil=True, block=24).divergence.sum()

        value, gradients = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)

    values = []
    for _ in range(12):
        value, params = descend(params)
        values.append(float(value))
    assert values[-1] < 0.8 * values[0]


def test_mass_is_the_share_of_attention_inside_the_selection(params, tokens, positions):
    everything = expanded.forward(
        params, tokens, positions, CONFIG, sparse=True, distil=True, block=24
    )  # attention lies inside the selection by construction
    np.testing.assert_allclose(everything.mass, 1.0, rtol=1e-5)
    dense = expanded.forward(params, tokens, positions, CONFIG, sparse=False, distil=True, block=24)
    assert (dense.mass > 0.3).all() and (dense.mass < 0.999).all()


def test_mixture_equals_the_models_own_and_loads_sum_to_one(params):
    x = jax.random.normal(jax.random.key(8), (40, CONFIG.hidden_size))
    mixed, load = expanded.mixture(params["layers"][1]["moe"], x, CONFIG)
    np.testing.assert_allclose(mixed, dsa.moe(params["layers"][1]["moe"], x, CONFIG), **TOLERANCE)
    np.testing.assert_allclose(load.sum(), 1.0, rtol=1e-6)


def test_blocks_that_do_not_divide_the_sequence_are_refused(params, tokens, positions):
    with pytest.raises(ValueError, match="24 positions are not a multiple of 5 x 1"):
        expanded.forward(params, tokens, positions, CONFIG, sparse=True, distil=False, block=5)
