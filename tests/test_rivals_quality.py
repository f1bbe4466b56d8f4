"""What lossy rivals lose. A rule really used: under the exact rule the step is the decoder's; any other attends, and
misses, what it says. The bench: its texts, averages and rows; its rules are all those that are called lossy."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import harness
from bench import rivals_quality as quality
from echo_jax import state as state_lib
from echo_jax.checkpoints.safetensors import save_folder
from echo_jax.decode import DecodeConfig, cache_config, decode_step
from echo_jax.engine import resident
from echo_jax.models import dsa
from echo_jax.models.config import DENSE, FULL
from echo_jax.prefill import prefill
from echo_jax.replay import live, rivals
from echo_jax.replay.rivals import FreeKV, InfiniGen, Paged, Resident
from echo_jax.replay.rules import Exact
from echo_jax.types import NO_POSITION
from tests import scenarios

MODEL = dataclasses.replace(
    scenarios.ONE_LAYER, layer_kinds=(FULL,) * 2, mlp_kinds=(DENSE,) * 2, num_experts=0, vocab_size=256
)
K, STEPS = 10, 8
CONFIG = resident(DecodeConfig(MODEL, cache_config(MODEL, seats=3, capacity=128, offload=False)))


@pytest.fixture(scope="module")
def params():
    """Random ones from NumPy; `init_params` would be compiled, which takes longer than any test here."""
    random = np.random.default_rng(3)
    shapes = jax.eval_shape(lambda: dsa.init_params(jax.random.key(0), MODEL))
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.3 * random.standard_normal(leaf.shape) + (leaf.ndim == 1), leaf.dtype), shapes
    )


@pytest.fixture(scope="module")
def state(params):
    """Two requests above K and an idle seat between them."""
    state = state_lib.create(CONFIG.cache)
    for seat, prompt in ((0, list(range(1, 38))), (2, [5, 9, 2] * 25)):
        state = state_lib.admit(CONFIG.cache, state, seat, len(prompt) + STEPS + 1)
        state, _ = prefill(params, state, prompt, seat, config=CONFIG)
    return state


def copied(state):
    return jax.tree.map(jnp.copy, state)


class Decoded(NamedTuple):
    """A continuation by the decoder itself: seat 0 takes its likeliest tokens, seat 2 any."""

    tokens: np.ndarray  # i32[N + 1, B]
    bits: np.ndarray  # f32[N, B]
    is_best: np.ndarray  # bool[N, B]
    sets: np.ndarray  # i32[N, B, K]  of the first layer


@pytest.fixture(scope="module")
def decoded(params, state) -> Decoded:
    random = np.random.default_rng(5)
    own, tokens, found = copied(state), [random.integers(0, 256, 3).astype(np.int32)], []
    for _ in range(STEPS):
        own, output = decode_step(params, own, tokens[-1][:, None], config=CONFIG)
        logs = np.asarray(jax.nn.log_softmax(output.logits[:, 0]))
        following = random.integers(0, 256, 3).astype(np.int32)
        following[0] = logs[0].argmax()
        tokens.append(following)
        bits = -logs[np.arange(3), following] / math.log(2)
        found.append((bits, logs.argmax(axis=1) == following, np.asarray(output.selected[0, :, 0])))
    return Decoded(np.array(tokens), *map(np.array, zip(*found, strict=True)))


def run(params, state, decoded, rule):
    return jax.device_get(live.forced(params, state, decoded.tokens, config=CONFIG, rule=rule))


def test_the_exact_rule_is_the_decoder(params, state, decoded):
    found, (_, bits, best, _) = run(params, state, decoded, Exact()), decoded
    assert best[:, 0].all() and not best[:, 2].all()
    # Lists of K + 1 places, one of them empty, are summed in another order than lists of K.
    np.testing.assert_allclose(found.bits[:, [0, 2]], bits[:, [0, 2]], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found.is_best[:, [0, 2]], best[:, [0, 2]])
    assert (found.missed == 0).all() and found.missed.shape == (STEPS, 2, 3)
    assert (found.wanted[:, :, [0, 2]] == K).all() and (found.wanted[:, :, 1] == 0).all()
    np.testing.assert_array_equal(run(params, state, decoded, Exact()).bits, found.bits)  # the state was not given up


def test_yesterdays_set_misses_what_is_new(params, state, decoded):
    """In the first layer the exact sets depend on tokens alone, so those of the decoder say what is missed."""
    found, (_, bits, _, sets) = run(params, state, decoded, FreeKV(cosine=-2.0)), decoded
    assert (found.missed[0] == 0).all()  # nothing to remember: the exact set
    np.testing.assert_allclose(found.bits[0, [0, 2]], bits[0, [0, 2]], rtol=1e-4, atol=1e-4)
    for seat, length in ((0, 37), (2, 75)):
        for t in range(1, STEPS):
            before, now = (set(sets[step, seat][sets[step, seat] != NO_POSITION]) for step in (t - 1, t))
            assert found.missed[t, 0, seat] == len(now - before - {length + t})
    assert found.missed[1:].sum() > 0 and np.abs(found.bits[1:, [0, 2]] - bits[1:, [0, 2]]).max() > 1e-3


def test_pages_of_one_position_are_bounded_by_its_score(params, state, decoded):
    """So nothing is missed but a position whose place the new token takes."""
    found = run(params, state, decoded, Resident(Paged(1)))
    assert found.missed.max() == 1 and (found.missed.sum(axis=0) < STEPS)[:, [0, 2]].any()
    assert live.page_of(Resident(Paged(8))) == live.page_of(Paged(8)) == 8 and live.page_of(Exact()) is None
    with pytest.raises(ValueError, match="pages of 5 positions do not divide the capacity of 128"):
        run(params, state, decoded, Paged(5))


def test_a_guess_is_not_made_for_the_first_layer(params, state, decoded):
    found = run(params, state, decoded, InfiniGen())
    assert (found.missed[:, 0] == 0).all() and found.missed[:, 1].sum() > 0


# ---- the bench -------------------------------------------------------------------------------------------

UNCORRECTED = quality.UNCORRECTED


def test_pieces_do_not_overlap_and_rests_are_dropped(tmp_path):
    paths = [tmp_path / name for name in ("a", "b")]
    paths[0].write_bytes(bytes(range(100)))
    paths[1].write_bytes(b"short")
    found = quality.pieces(paths, 20, 10)
    assert [(one.tokens[0], one.tokens[-1], one.judged) for one in found] == [(0, 30, 10), (31, 61, 10), (62, 92, 10)]
    with pytest.raises(ValueError, match="no document has 131 bytes; lower the context of 120"):
        quality.pieces(paths, 120, 10)


def test_a_passkey_stands_in_its_prompt_and_at_its_end():
    found = quality.passkeys(quality.DOCUMENTS, 3, 1024)
    for text in found:
        said = bytes(text.tokens.astype(np.uint8))
        assert len(said) == 1024 and said[-text.judged :] in said[: -quality.LEAD - text.judged]
    again = quality.passkeys(quality.DOCUMENTS, 3, 1024)
    assert all(np.array_equal(one.tokens, two.tokens) for one, two in zip(found, again, strict=True))
    assert len({bytes(one.tokens[-one.judged :].astype(np.uint8)) for one in found}) == 3


def test_every_lossy_rival_takes_part_and_all_rows_are_written(params, tmp_path, monkeypatch, capsys):
    """Four texts in three seats, so that a batch has idle seats: the exact bits are those of each text alone."""
    save_folder(tmp_path / "model", params, MODEL)
    monkeypatch.setenv("ECHO_RESULTS", str(tmp_path / "rows"))
    sizes = ["--context", "100", "--new", str(STEPS), "--seats", "3", "--model", str(tmp_path / "model")]
    document = tmp_path / "text"
    document.write_bytes(quality.DOCUMENTS[1].read_bytes()[: 4 * (101 + STEPS)])
    quality.main(["bits", *sizes, "--rules", UNCORRECTED, "--documents", str(document)])
    rows = {row.name: row for row, _ in harness.read_rows(tmp_path / "rows")}
    assert set(rows) == {"rivals: bits per byte, exact"} | {
        f"rivals: {what}, {name}"
        for what, name in (("bits per byte over exact", UNCORRECTED), ("share missed in documents", UNCORRECTED))
    }
    texts = quality.pieces([document], 100, STEPS)
    assert len(texts) == 4 and 0 < rows[f"rivals: share missed in documents, {UNCORRECTED}"].value < 1
    alone = quality.judge(params, MODEL, texts[3:], 3, 0, ["exact"])["exact"]
    together = quality.judge(params, MODEL, texts, 3, 0, ["exact"])["exact"]
    assert rows["rivals: bits per byte, exact"].value == pytest.approx(np.mean(together.bits), abs=1e-4)
    assert together.bits[3] == pytest.approx(alone.bits[0], abs=1e-4) and together.missed_share == 0
    led = quality.Text(texts[0].tokens, 3)  # judged by its last 3 bytes, after 5 that only lead up to them
    state, tokens = quality._prefilled(params, CONFIG, [led], STEPS)
    by_hand = jax.device_get(live.forced(params, state, tokens, config=CONFIG, rule=Exact())).bits[-3:, 0].mean()
    judged = quality.judge(params, MODEL, [led], 3, STEPS - 3, ["exact"])["exact"]
    assert judged.bits == [pytest.approx(float(by_hand), abs=1e-5)]
    with pytest.raises(SystemExit):
        quality.main(["bits", *sizes, "--rules", "quset", "--documents", str(document)])
    assert "rule 'quset' is unknown" in capsys.readouterr().err


def test_the_rules_are_those_called_lossy():
    known = quality.rules(CONFIG)
    assert set(rivals.LOSSY) < set(known) and next(iter(known)) == "exact"
    assert known[UNCORRECTED] == FreeKV(cosine=-2.0) != known["freekv"]
