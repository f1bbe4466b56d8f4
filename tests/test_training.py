"""The example that trains a model: tasks can be answered, segments follow each other, and what is judged is told."""

from __future__ import annotations

import dataclasses
import importlib
import json
import lzma
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.models import expanded
from echo_jax.models.config import DENSE, FULL

# Scripts find each other beside themselves.
sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
judge, fast_attention, long_tasks, train = map(
    importlib.import_module, ("evaluate_small_dsa", "fast_attention", "long_tasks", "train_small_dsa")
)

TEXT = b"".join(b"line %d of a text that says nothing much\n" % i for i in range(4000))


def by_role(window, role: int) -> list[bytes]:
    """Runs of bytes of a role."""
    marks = np.flatnonzero(np.diff(np.concatenate([[False], window.roles == role, [False]]).astype(int)))
    return [window.tokens[a:b].tobytes() for a, b in marks.reshape(-1, 2)]


@pytest.mark.parametrize("task", long_tasks.TASKS)
def test_an_answer_ends_the_window_and_was_said_before(task):
    for length in (1024, 4097):
        tokens, is_answer = long_tasks.examples(task, length, TEXT, count=20, seed=1)
        again, _ = long_tasks.examples(task, length, TEXT, count=20, seed=1)
        other, _ = long_tasks.examples(task, length, TEXT, count=20, seed=2)
        np.testing.assert_array_equal(tokens, again)
        assert tokens.shape == is_answer.shape == (20, length) and (tokens != other).any(axis=1).all()
        places = []
        for window, answers in zip(tokens, is_answer, strict=True):
            answer = window[answers].tobytes()
            start = int(np.argmax(answers))
            assert answers[start:].all() and 5 <= len(answer) <= 30
            value = answer.split(b" = ")[-1]
            before = window[:start].tobytes()
            places.append(before.index(value) / length)
            if task == "vt":  # each link of the chain stands there, in its order
                third, second, first, value = answer.split(b" = ")
                asked = re.findall(rb"Trace the variable. (\w+) = $", before)[0]
                chain = [b"Let %s = %s." % pair for pair in ((first, value), (second, first), (third, second))]
                at = [before.index(link) for link in [*chain, b"Let %s = %s." % (asked, third)]]
                assert at == sorted(at)
            if task in ("number", "multikey"):
                key = re.findall(rb"The special number of (\w+) is $", before)[0]
                assert b"The special number of %s is %s." % (key, value) in before
                planted = len(re.findall(rb"The special number of \w+ is \d{7}\.", before))
                assert planted == (1 if task == "number" else 4 if length < 2048 else 8)
        assert min(places) < 0.3 and max(places) > 0.4, "facts stand anywhere"


def test_practice_asks_only_for_what_was_said():
    rng = np.random.default_rng(0)
    asked = 0
    for _ in range(20):
        window = long_tasks.practice(2049, TEXT, rng)
        text = window.tokens.tobytes()
        assert len(text) == len(window.roles) == 2049
        for answer in by_role(window, long_tasks.ANSWER)[:-1]:  # the last may be cut
            asked += 1
            assert text.count(answer.split(b" = ")[-1]) >= 2
        planted = b"".join(by_role(window, long_tasks.PLANTED))
        assert sum(byte in b"0123456789" for byte in planted) >= 5
    assert asked > 60
    with pytest.raises(ValueError, match="use a longer text"):
        long_tasks.practice(2049, TEXT[:500], rng)
    with pytest.raises(ValueError, match="raise the length"):
        long_tasks.example("kv", 128, TEXT, rng)


def test_attention_in_blocks_is_attention():
    drawn = np.random.default_rng(0)
    query, key, value = (jnp.asarray(drawn.normal(size=(2, 24, 3, 8)), jnp.float32) for _ in range(3))
    causal = np.broadcast_to(np.tril(np.ones((24, 24), bool)), (2, 24, 24))
    mask = causal & ((drawn.random(causal.shape) < 0.4) | np.eye(24, dtype=bool))

    @jax.jit
    def both(query, key, value):
        return [
            (
                fast_attention.in_blocks(query, key, value, given, 0.3, 8),
                expanded.attend(query, key, value, jnp.asarray(meant), 0.3)[0],
            )
            for given, meant in ((None, causal), (mask, mask))
        ]

    for found, expected in both(query, key, value):
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_what_cudnn_refuses_goes_in_blocks(monkeypatch):
    """An evaluation in f32 once stopped at cuDNN, which takes 16 bits only."""
    asked = []

    def flash(query, key, value, mask, scale, causal=True):
        asked.append((query.dtype, mask is None))
        return fast_attention.in_blocks(query, key, value, mask, scale)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(fast_attention, "flash", flash)
    monkeypatch.setattr(fast_attention, "_agrees", lambda *_, **__: True)
    attention = fast_attention.best(train.ECHO_TINY, backwards=False)
    mask = jnp.tril(jnp.ones((1, 8, 8), bool))
    for dtype in (jnp.float32, jnp.bfloat16):
        array = jax.random.normal(jax.random.key(0), (1, 8, 2, 4)).astype(dtype)
        plain, masked = (attention(array, array, array, m, 0.5) for m in (None, mask))
        np.testing.assert_array_equal(plain, masked)
    assert asked == [(jnp.bfloat16, True), (jnp.bfloat16, False)]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Two groups of text, of which one has a held-out document."""
    body = TEXT[:60000] + b"\0" + TEXT[70000:110000] + b"\0"
    held = body + TEXT[120000:] + b"\0"
    header = {
        "groups": {"a": {"start": 0, "stop": 60001, "weight": 0.5}, "b": {"start": 60001, "stop": 100002, "weight": 1}},
        "held_out": [{"group": "a", "name": "library/graphlib", "start": len(body), "stop": len(held) - 1}],
        "bytes": len(held),
    }
    path = tmp_path / "corpus.xz"
    with lzma.open(path, "wb", preset=0) as file:
        file.write(json.dumps(header).encode() + b"\n" + held)
    return path


@pytest.fixture
def loose_and_quick():
    """optax multiplies floats by integer counters, and compiling well would take longer than it saves; a `with` would
    not reach the thread that compiles."""
    wanted = {
        "jax_numpy_dtype_promotion": "standard", "jax_disable_most_optimizations": True, "jax_default_prng_impl": "rbg",
    }  # fmt: skip
    before = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("loose_and_quick")
def test_segments_follow_each_other_and_leave_a_model_that_is_judged(corpus, tmp_path, monkeypatch, capsys):
    """Of one layer and a few steps, stopped between, exported, judged; one program, as compiling is what takes time."""
    tiny = dataclasses.replace(
        train.ECHO_TINY, hidden_size=32, num_heads=2, q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, index_heads=2, index_head_dim=16, index_topk=8, layer_kinds=(FULL,),
        mlp_kinds=(DENSE,), intermediate_size=32, max_positions=2048,
    )  # fmt: skip
    monkeypatch.setattr(train, "ECHO_TINY", tiny)
    monkeypatch.setattr(train, "STEPS_PER_CALL", 2)
    stage = dataclasses.replace(train.SEGMENTS["smoke"][1], seconds=0.01, every=8, extents=1)
    for segment in ("fourth", "fifth"):
        monkeypatch.setitem(train.SEGMENTS, segment, (stage,))
    compiled, really = {}, train.compile_stage

    def compile_once(carry, text, header, stage, *others):
        if stage not in compiled:
            compiled[stage] = really(carry, text, header, stage, *others)
        return compiled[stage]

    monkeypatch.setattr(train, "compile_stage", compile_once)
    checkpoint, rows = tmp_path / "train", tmp_path / "rows.jsonl"
    common = ["--corpus", str(corpus), "--rows", str(rows), "--machine", "here"]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_small_dsa.py", *(str(a) for a in arguments)])
        train.main()
        return json.loads((checkpoint / "progress.json").read_text())

    first = run("--segment", "fourth", "--out", checkpoint, *common)
    before, second_moments, _ = train.restore(str(checkpoint), tiny)
    second = run("--segment", "fifth", "--from", checkpoint, "--out", checkpoint, *common)
    after, _, _ = train.restore(str(checkpoint), tiny)
    assert second["steps"] == 2 * first["steps"] == 2 * train.STEPS_PER_CALL
    assert second["seconds"] > first["seconds"] > 0 and second["round_began"] == first["round_began"]
    assert max(np.asarray(leaf).max() for leaf in jax.tree.leaves(second_moments)) > 0
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), before, after)
    assert min(jax.tree.leaves(moved["layers"][0]["indexer"])) > 0 and moved["embed"] > 0

    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["shapes"]["segment"] for row in written] == ["fourth", "fifth"] and len(compiled) == 1
    for row in written:
        found = row["shapes"]
        assert 2 < row["value"] < 12 and 2 < found["answer_bits"] < 12 and 0 <= found["answer_right"] < 0.3
        assert found["kl"][0] > 0 and 0 < found["mass"][0] < 1

    folder = tmp_path / "model"
    run("--export", folder, "--from", checkpoint)
    capsys.readouterr()
    exported, _, counters = train.restore(str(folder), tiny)
    assert counters["steps"] == 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8, atol=1e-9), exported, after)

    monkeypatch.setenv("ECHO_RESULTS", str(tmp_path))
    monkeypatch.setattr(judge, "CLAIMED_CONTEXT", 512)
    arguments = ["--contexts", "512", "--lengths", "512", "--windows", "2", "--count", "2", "--batch", "2"]
    monkeypatch.setattr(
        sys, "argv", ["e", "--model", str(folder), "--corpus", str(corpus), *arguments, "--record", "judged.jsonl"]
    )
    judge.main()
    judged = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    claims = {row["claim"]: row["value"] for row in judged if row["claim"]}
    assert set(claims) == {"F.bpb_sparse_over_dense", "F.mass_median", "F.size_mb"}
    assert claims["F.size_mb"] == round((folder / "model.safetensors").stat().st_size / 1e6, 3)
    forms = {row["shapes"]["form"]: row["value"] for row in judged if "group" in row["shapes"]}
    assert claims["F.bpb_sparse_over_dense"] == pytest.approx(forms["sparse"] / forms["dense"], abs=1e-4)
    tasks = [row["shapes"] for row in judged if "task" in row["shapes"]]
    assert {(t["task"], t["form"]) for t in tasks} == {(t, f) for t in long_tasks.TASKS for f in judge.FORMS}


def test_an_answer_counts_only_when_each_of_its_bytes_is_right():
    tokens, is_answer = long_tasks.examples("number", 1025, TEXT, count=4)

    def knows_all_but_one(params, batch):
        """Right everywhere but on the last byte of the first window and before the answer of the second."""
        is_right = np.ones((len(batch), 1024), bool)
        is_right[0, -1] = is_right[1, 10] = False
        zero = jnp.zeros((1,))
        return {
            form: judge.Verdict(jnp.zeros(is_right.shape), jnp.asarray(is_right), zero, zero) for form in judge.FORMS
        }

    found = list(judge.retrieval({}, TEXT, "number", 1024, 4, knows_all_but_one, batch=4))
    assert [(row["form"], row["accuracy"]) for row in found] == [("dense", 0.75), ("sparse", 0.75)]
    assert {row["bytes_right"] for row in found} == {round(1 - 1 / is_answer[:, 1:].sum(), 4)}


def test_the_learning_rate_falls_along_a_round_and_rises_at_its_beginning():
    seconds = sum(stage.seconds for name in ("fourth", "fifth") for stage in train.SEGMENTS[name])
    rates = [train.learning_rate("fifth", share * seconds, 10**6) for share in (0, 0.5, 1, 2)]
    assert rates == pytest.approx([1.2e-3, (1.2e-3 + 3e-5) / 2, 3e-5, 3e-5])
    assert train.learning_rate("fifth", 0, 0) == pytest.approx(1.2e-3 / train.WARMUP_STEPS)
