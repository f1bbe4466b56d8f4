"""What a command lets pass in a model folder: refused in a line by default, said in a line where it is allowed."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from echo_jax.cli import models

WEIGHTS, EMBED, UNUSED = "model.safetensors", "model.embed_tokens.weight", 1


def spoil(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors[EMBED][UNUSED, 3] = np.nan
    save_file(tensors, folder / WEIGHTS)


@pytest.fixture
def commands(prompt_file, tmp_path):
    """The command lines that load a folder."""

    def make(folder):
        prompt = ("--prompt-file", prompt_file, "--max-new-tokens", 2)
        return {
            "generate": ("generate", "--model", folder, *prompt),
            "trace": ("trace", "record", "--model", folder, *prompt, "--out", tmp_path / "trace"),
            "verify": ("verify", folder, "--reference", tmp_path / "missing.npz"),
        }

    return make


@pytest.mark.parametrize("command", ["generate", "trace", "verify"])
def test_nan_is_refused_by_name_unless_allowed(echo_jax, broken_folder, commands, command, monkeypatch):
    monkeypatch.setattr(models, "_SHOWN", set())
    arguments = commands(broken_folder(spoil))[command]
    message = echo_jax(*arguments).error()
    assert f"{EMBED} in " in message and "holds 1 NaN or infinite values" in message and "--allow-nonfinite" in message
    done = echo_jax(*arguments, "--allow-nonfinite")
    first, *others = done.err.splitlines()
    assert first.startswith("echo-jax: note: 1 tensors with NaN or infinities were loaded: model.embed_tokens.weight")
    if command == "verify":  # the weights are loaded; the reference is what is missing
        assert done.status == 2 and "missing.npz" in others[0]
    else:
        assert done.status == 0 and not any("note" in line for line in others)


def stray(folder):
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"stray": np.ones(2, np.float32), "model.mtp.weight": np.ones(2, np.float32)}, folder / WEIGHTS)
    names = {name: WEIGHTS for name in tensors} | {"model.mtp.weight": WEIGHTS}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_extra_and_unindexed_tensors_have_flags_of_their_own(echo_jax, broken_folder, commands, monkeypatch):
    monkeypatch.setattr(models, "_SHOWN", set())
    arguments = commands(broken_folder(stray))["verify"]
    assert "model.mtp.weight" in (message := echo_jax(*arguments).error()) and "--allow-extra" in message
    assert "first stray in" in (message := echo_jax(*arguments, "--allow-extra").error()) and "-unindexed" in message
    done = echo_jax(*arguments, "--allow-extra", "--allow-unindexed")
    note, refusal = done.err.splitlines()
    assert note.startswith("echo-jax: note: model.safetensors.index.json does not name 1 tensors of its shards")
    assert "missing.npz" in refusal


def test_a_note_about_a_config_is_one_line(echo_jax, broken_folder, commands, monkeypatch):
    """The config is read for its shapes first, then with the weights, which are refused here."""
    monkeypatch.setattr(models, "_SHOWN", set())

    def change(folder):
        spoil(folder)
        raw = json.loads((folder / "config.json").read_text())
        raw |= {"rope_scaling": {"type": "default", "rope_theta": 500.0}}
        (folder / "config.json").write_text(json.dumps(raw))

    done = echo_jax(*commands(broken_folder(change))["generate"])
    line, refusal = done.err.splitlines()
    assert done.status == 2 and EMBED in refusal
    assert line.startswith("echo-jax: note: config.json has rope_scaling and rope_parameters; rope_scaling replaces")
    assert "rope_theta 500.0 for 10000.0" in line
