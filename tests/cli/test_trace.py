"""`echo-jax trace`: recorded, made, described; what a user can get wrong; the traces that ship."""

import json
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import echo_jax as package
from echo_jax.cli.main import main
from echo_jax.traces import OPTIONAL_FIELDS, open_trace
from echo_jax.traces.format import PACKAGED, packaged

ROOT = Path(package.__file__).parents[1]
TOP_K, PROMPT_BYTES = 12, 101
SMALL = "synth:churny,top_k=16,steps=12,requests=2"


def has_all(message: str, *parts: object) -> bool:
    """Whether every part is in the message; shows what is missing otherwise."""
    lacking = [part for part in parts if str(part) not in message]
    assert not lacking, f"{lacking} not in: {message}"
    return True


def test_record_then_describe(echo_jax, model_folder, prompt_file, tmp_path):
    """A model whose second layer shares the first one's set; the tokens are those of `generate`."""
    model = ("--model", model_folder, "--prompt-file", prompt_file, "--max-new-tokens", 9, "--ignore-eos")
    out = tmp_path / "trace"
    done = echo_jax("trace", "record", *model, "--fields", "all", "--windows", 4, "--band", 20, "--out", out, "--json")
    assert done.status == 0, done.err
    (row,) = done.rows("trace")
    assert (row["layer_kinds"], row["steps"], row["band"]) == (["full", "shared"], 8, 20)
    assert row["fields"] == list(OPTIONAL_FIELDS) and row["nan_scores"] == 0
    assert sorted(path.name for path in out.iterdir()) == ["header.json", "layer_000.npz", "steps.npz"]
    recipe = json.loads((out / "header.json").read_text())["recipe"]
    assert recipe["options"]["max_new_tokens"] == 9 and recipe["prompts"][0]["tokens"] == PROMPT_BYTES
    assert len(recipe["prompts"][0]["sha256"]) == 64 and len(recipe["model"]) == 1
    again = [word if word != str(out) else str(tmp_path / "again") for word in shlex.split(recipe["command"])]
    assert echo_jax(*again[1:]).status == 0
    assert (tmp_path / "again" / "layer_000.npz").read_bytes() == (out / "layer_000.npz").read_bytes()

    done = echo_jax("trace", "describe", out, "--json", "--output", tmp_path / "rows.jsonl")
    assert done.status == 0 and (tmp_path / "rows.jsonl").read_text() == done.out
    (layer,) = done.rows("locality")
    assert layer["layer"] == 0 and layer["counted"] == 6 and 0 < layer["overlap"] < 1
    text = echo_jax("trace", "describe", out).out
    assert has_all(text, "2 layers, 1 requests, 8 steps", "the best 20 scores", "recorded", "overlap", "LRU 16k", "NaN")


def test_synth_then_describe(echo_jax, tmp_path):
    """What is stored has the statistics of what is generated."""
    done = echo_jax("trace", "synth", SMALL, "--out", tmp_path / "trace", "--score-dtype", "float32")
    assert done.status == 0 and has_all(done.out, "1 layers, 2 requests, 12 steps, 512 positions, k 16, all scores")
    made, stored = echo_jax("trace", "describe", SMALL, tmp_path / "trace", "--json").rows("locality")
    assert made["path"] == SMALL and stored["path"] == str(tmp_path / "trace")
    assert made["counted"] == stored["counted"] == 18
    for name in ("overlap", "lru_miss", "first_use", "candidates", "kth_score", "kth_error_deviation"):
        assert stored[name] == pytest.approx(made[name], abs=1e-5), name
    again = echo_jax("trace", "synth", SMALL.removeprefix("synth:"), "--out", tmp_path / "trace", "--overwrite")
    assert again.status == 0 and open_trace(tmp_path / "trace").info.score_dtype == "float16"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("rekord",), ("'rekord'", "did you mean 'record'", "synth")),
        (("describe",), ("needs a trace", "synth:median")),
        (("describe", "synth:medium"), ("'medium'", "did you mean 'median'")),
        (("describe", "synth:median,layer=2"), ("'layer'", "did you mean 'layers'")),
        (("describe", "no/such/trace"), ("no/such/trace", "does not exist")),
        (("describe", "."), ("has no header.json",)),
        (("synth", SMALL), ("--out is missing", "name synth:churny")),
        (("synth", SMALL, SMALL, "--out", "t"), ("2 names", "give one")),
        (("synth", SMALL, "--out", "t", "--band", 9), ("band of 9", "16", "raise the band")),
        (("synth", SMALL, "--out", "."), ("exists", "another path")),
        (("synth", SMALL, "--out", "t", "--score-dtype", "int8"), ("--score-dtype", "int8", "float16")),
        (("record", "--model", "echo-tiny", "--prompt-file", "p"), ("--out is missing",)),
        (("record", "--out", "t"), ("needs --model and --prompt-file",)),
        (("record", "name", "--out", "t"), ("takes no name", "name")),
        (("record", "--fields", "colour"), ("--fields", "colour", "page_bound")),
    ],
)
def test_wrong_input(echo_jax, arguments, parts):
    assert has_all(echo_jax("trace", *arguments).error(), *parts)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--max-new-tokens", 1), ("--max-new-tokens is 1", "at least 2")),
        (("--max-new-tokens", 2000), (2000 + PROMPT_BYTES, 1000)),
        (("--fields", "page_bound", "--page-size", 48), ("page size 48", 256)),
        (("--fields", "page_bound", "--page-size", 0), ("--page-size is 0",)),
        (("--fields", "all", "--windows", 0), ("--windows is 0",)),
        (("--band", 5), ("band of 5", TOP_K)),
        (("--temperature", -1), ("temperature", "-1")),
        (("--seed", -1), ("--seed is -1",)),
        (("--prompt-file", "missing"), ("missing", "cannot be read")),
    ],
)
def test_wrong_recording(echo_jax, model_folder, prompt_file, options, parts):
    given = ("--model", model_folder, "--prompt-file", prompt_file, "--out", "trace")
    assert has_all(echo_jax("trace", "record", *given, *options).error(), *parts)
    assert list(Path.cwd().iterdir()) == []


def test_scores_that_no_half_precision_holds(echo_jax):
    """Known only once they come; nothing half-written stays."""
    given = ("synth:hot,top_k=4,context=32,steps=3,recency=1e6", "--out", "trace")
    assert has_all(echo_jax("trace", "synth", *given).error(), "does not fit float16", "store scores as float32")
    assert list(Path.cwd().iterdir()) == []
    assert echo_jax("trace", "synth", *given, "--score-dtype", "float32").status == 0


# ---- the traces that ship --------------------------------------------------------------------------------


def test_shipped_traces_are_small_whole_and_say_how_they_were_made(echo_jax):
    assert len(packaged()) >= 3
    assert sum(path.stat().st_size for path in PACKAGED.rglob("*") if path.is_file()) < 3_000_000
    for name in packaged():
        info = open_trace(name).info
        command = info.recipe["command"]
        assert command.startswith("echo-jax trace record --model echo-tiny") and info.nan_scores == 0
        words = shlex.split(command)
        prompt = ROOT / words[words.index("--prompt-file") + 1]
        assert len(prompt.read_bytes()) == info.recipe["prompts"][0]["tokens"] > 8000
        assert trace_has_scores(name, info.layers)
    rows = echo_jax("trace", "describe", "echo-tiny-code", "--json").rows("locality")
    assert len(rows) == 6 and all(0.2 < row["overlap"] < 1 for row in rows)


def trace_has_scores(name: str, layers: int) -> bool:
    """Every layer can be read, and every set lies in its band."""
    for layer in range(layers):
        source: Any = jax.tree.map(np.asarray, open_trace(name).layer(layer))
        for t in (0, -1):
            assert np.isin(source.selected[t], source.score_positions[t]).all()
            assert np.min(source.score[t]) < source.kth_score[t, 0] < np.max(source.score[t])
    return True


@pytest.mark.slow
def test_a_shipped_trace_is_what_its_command_makes(tmp_path, monkeypatch):
    """Sets of every layer and step, bit for bit on one machine; on another one near-ties may fall differently."""
    monkeypatch.chdir(ROOT)
    shipped = open_trace("echo-tiny-code")
    words = shlex.split(shipped.info.recipe["command"])[1:]
    words[words.index("--out") + 1] = str(tmp_path / "again")
    assert main([word for word in words if word != "--overwrite"]) == 0
    again = open_trace(tmp_path / "again")
    for layer in range(shipped.info.layers):
        one: Any = shipped.layer(layer)
        other: Any = again.layer(layer)
        differing = np.mean(np.asarray(one.selected) != np.asarray(other.selected))
        assert differing == 0, f"layer {layer}: {100 * differing:.2f} % of the list entries differ"
