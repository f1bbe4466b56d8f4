"""The transformer's maths without any cache, against models with known answers.

A plain forward: every query scores every earlier position, NumPy picks the exact top-k by sorting, softmax over the
selected records. Selected sets and greedy tokens must be those of the fixture exactly (its smallest gaps are far
above f32 rounding), logits within 1e-4, which is what another f32 implementation may differ by.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.checkpoints.safetensors import load_folder
from echo_jax.models import dsa
from echo_jax.models.config import FULL

FIXTURES = Path(__file__).parent / "fixtures"
FOLDERS = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "logits.npz").is_file())
LOGIT_TOLERANCE = 1e-4  # two f32 computations of these models agree to 4e-6; a wrong eps or rotation shows at 1e-3


def top_positions(scores: np.ndarray, count: int) -> np.ndarray:
    """bool[N, N]: for each query the `count` best visible positions, ties to the lower one; all while they fit."""
    selected = np.zeros(scores.shape, bool)
    for query in range(len(scores)):
        visible = scores[query, : query + 1]
        selected[query, np.lexsort((np.arange(query + 1), -visible))[:count]] = True
    return selected


@functools.partial(jax.jit, static_argnames="config")
def before_selection(layer, hidden, positions, config):
    """The layer's inputs and, in a full layer, the score of every position for every query, f32[N, N]."""
    inputs = dsa.attention_inputs(
        layer, dsa.rms_norm(hidden, layer["input_norm"], config.rms_norm_eps), positions, config
    )
    if inputs.index_key is None:
        return inputs, None
    dots = jnp.einsum("ngd,md->ngm", inputs.index_query, inputs.index_key, precision="highest")
    return inputs, jnp.einsum("ngm,ng->nm", jax.nn.relu(dots), inputs.index_weights, precision="highest")


@functools.partial(jax.jit, static_argnames=("kind", "config"))
def after_selection(layer, hidden, inputs, selected, kind, config):
    """Attention over the selected records, then the feed-forward block."""
    dots = jnp.einsum("nhd,md->nhm", inputs.query, inputs.record, precision="highest") * config.attention_scale
    weights = jax.nn.softmax(jnp.where(selected[:, None], dots, -jnp.inf), axis=-1)
    latents = inputs.record[:, : config.kv_lora_rank]
    attended = jnp.einsum("nhm,mr->nhr", weights, latents, precision="highest")
    hidden = hidden + dsa.attention_output(layer, attended, config)
    x = dsa.rms_norm(hidden, layer["post_norm"], config.rms_norm_eps)
    return hidden + dsa.feed_forward(layer, x, config, kind)


def plain_forward(params, tokens, config):
    """tokens i32[N] -> logits f32[N, V], selected sets bool[L, N, N], index scores f32[full layers, N, N]."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    hidden = dsa.embed(params, jnp.asarray(tokens, jnp.int32), config)
    sets, all_scores, selected = [], [], None
    for layer, layer_kind, mlp_kind in zip(params["layers"], config.layer_kinds, config.mlp_kinds, strict=True):
        inputs, scores = before_selection(layer, hidden, positions, config)
        if layer_kind == FULL:
            all_scores.append(np.asarray(scores))
            selected = top_positions(all_scores[-1], config.index_topk)
        sets.append(selected)
        hidden = after_selection(layer, hidden, inputs, jnp.asarray(selected), mlp_kind, config)
    return np.asarray(dsa.logits(params, hidden, config)), np.stack(sets), np.stack(all_scores)


@pytest.mark.parametrize("name", FOLDERS)
def test_sets_tokens_and_logits_are_those_of_the_fixture(name):
    config, params = load_folder(FIXTURES / name, dtype="float32")
    expected = np.load(FIXTURES / name / "logits.npz")
    full_layers = [index for index, kind in enumerate(config.layer_kinds) if kind == FULL]
    longest = len(expected["r0_selected_bits"][0])
    for request in (0, 1):
        prompt, greedy = expected[f"r{request}_prompt_ids"], expected[f"r{request}_greedy_ids"]
        prompt_count, total = len(prompt), len(prompt) + len(greedy) - 1
        # Both requests at one length, so that they compile once; what follows a token cannot reach it.
        padded = np.zeros(longest, np.int32)
        padded[:total] = [*prompt, *greedy[:-1]]
        logits, sets, scores = plain_forward(params, padded, config)
        logits, sets, scores = logits[:total], sets[:, :total, :total], scores[:, :total, :total]
        bits = np.unpackbits(expected[f"r{request}_selected_bits"], axis=-1, bitorder="little")[..., :total]
        np.testing.assert_array_equal(sets, bits.astype(bool))
        assert (sets.sum(axis=-1) < np.arange(1, total + 1)).any() or request == 1, "no query had to choose"
        np.testing.assert_array_equal(logits[prompt_count - 1 :].argmax(axis=-1), greedy)
        np.testing.assert_allclose(
            logits[:prompt_count], expected[f"r{request}_prefill_logits"], rtol=0, atol=LOGIT_TOLERANCE
        )
        np.testing.assert_allclose(
            logits[prompt_count:], expected[f"r{request}_decode_logits"], rtol=0, atol=LOGIT_TOLERANCE
        )
        stored = expected[f"r{request}_decode_index_scores"][full_layers]
        visible = np.isfinite(stored)
        np.testing.assert_allclose(scores[:, prompt_count:][visible], stored[visible], rtol=0, atol=1e-4)
