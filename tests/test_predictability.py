"""What bench/predictability.py compares are the scores it says, and the pages say what the rows say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import echo_tiny_page, predictability
from echo_jax.models import dsa, expanded
from echo_jax.models.config import DENSE, FULL, DsaConfig, RopeConfig

TINY = DsaConfig(
    vocab_size=40, hidden_size=16, num_heads=2, q_lora_rank=8, kv_lora_rank=12, qk_nope_head_dim=4, qk_rope_head_dim=4,
    v_head_dim=4, index_heads=2, index_head_dim=8, index_topk=6, layer_kinds=(FULL,), mlp_kinds=(DENSE,),
    intermediate_size=16, rope=RopeConfig(theta=500.0), dtype="float32",
)  # fmt: skip
LENGTH, QUERIES = 32, 20


@pytest.fixture(scope="module")
def found():
    """Scores of the one layer, by kind, and the share of attention that the model itself says is selected."""
    drawn = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: dsa.init_params(jax.random.key(0), TINY))
    params = jax.tree.map(lambda a: jnp.asarray(0.5 * drawn.normal(size=a.shape), jnp.float32), shapes)
    tokens = jnp.asarray(drawn.integers(TINY.vocab_size, size=LENGTH), jnp.int32)

    @jax.jit
    def both(params, tokens):
        positions = jnp.arange(LENGTH)[None]
        told = expanded.forward(params, tokens[None], positions, TINY, sparse=False, distil=True)
        return predictability.scores(params, tokens, TINY, LENGTH), told.mass

    (by_kind,), mass = both(params, tokens)
    return jax.tree.map(np.asarray, by_kind), float(mass[0])


def best(scores: np.ndarray, first: int, k: int) -> list[set[int]]:
    """The k best visible positions of each query."""
    return [set(np.argsort(-row[: first + t + 1], kind="stable")[:k]) for t, row in enumerate(scores)]


def test_kinds_of_scores_are_what_they_are_called(found):
    by_kind, mass = found
    assert set(by_kind) == set(predictability.KINDS)
    attention, causal = by_kind["attention"], np.tril(np.ones((LENGTH, LENGTH), bool))
    np.testing.assert_allclose(np.where(causal, attention, 0).sum(axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.exp(by_kind["log attention"]), attention, rtol=1e-5)
    shares = {}
    for kind in ("trained", "untrained"):
        chosen = best(by_kind[kind], 0, TINY.index_topk)
        shares[kind] = np.mean([attention[t, sorted(one)].sum() for t, one in enumerate(chosen)])
    assert shares["trained"] == pytest.approx(mass, rel=1e-4)
    assert np.abs(by_kind["untrained"] - by_kind["trained"]).max() > 0.01


def test_statistics_are_those_of_the_sets(found):
    """Overlap and k-th scores, for each case and with its own k, by sorting."""
    by_kind = {kind: scores[-QUERIES:] for kind, scores in found[0].items()}
    first = LENGTH - QUERIES
    rows = predictability.rows_of(predictability.SHOWN, (by_kind,), TINY.index_topk)
    assert [(row["kind"], row["top_k"]) for row in rows] == [
        (kind, int(TINY.index_topk * factor)) for kind, factor in predictability.CASES
    ]
    for row in rows:
        k, scores = row["top_k"], by_kind[row["kind"]]
        sets = best(scores, first, k)
        begun = QUERIES // 4
        overlaps = [len(sets[t] & sets[t - 1]) / k for t in range(begun, QUERIES) if first + t > k]
        assert row["overlap"] == pytest.approx(np.mean(overlaps), abs=1e-6)
        if "kth" in row:
            kth = [sorted(scores[t, : first + t + 1])[-k] for t in range(QUERIES)]
            np.testing.assert_array_equal(row["kth"], np.asarray(kth, np.float32))
    assert ["kth" in row for row in rows] == [(row["kind"], row["top_k"]) == ("trained", 6) for row in rows]


@pytest.mark.parametrize("page", echo_tiny_page.BLOCKS, ids=lambda page: page.name)
def test_a_page_and_its_figures_are_made_from_the_recorded_rows(page):
    text = page.read_text(encoding="utf-8")
    made, files = echo_tiny_page.rewrite(page, text)
    assert made == text, "run `python -m bench.echo_tiny_page`"
    assert files == {name: (echo_tiny_page.FIGURES / name).read_text(encoding="utf-8") for name in files}
    assert all(f"/{name})" in text for name in files) and len(files) == text.count("figures/echo-tiny-")


def test_a_page_without_a_block_is_refused():
    with pytest.raises(ValueError, match="has blocks"):
        echo_tiny_page.rewrite(echo_tiny_page.PAGE, "<!-- echo-tiny:begin kth -->\n<!-- echo-tiny:end -->")


def test_the_newest_of_rows_that_say_the_same_counts(monkeypatch):
    row = echo_tiny_page.newest(predictability.FILE, "document", "kind", "top_k", "layer")[0]
    later = dataclasses.replace(row, value=0.125, date="2099-01-01T00:00:00+00:00")
    others = [(one, f"{predictability.FILE}:1") for one in (later, row)]
    monkeypatch.setattr(echo_tiny_page.harness, "read_rows", lambda: [*others, (row, "another.jsonl:1")])
    (found,) = echo_tiny_page.newest(predictability.FILE, "document", "kind", "top_k", "layer")
    assert found.value == 0.125
