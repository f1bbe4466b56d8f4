"""The examples run, compare what they say they compare, and can fail; the package's names load lazily."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import echo_jax
from echo_jax import checkpoints
from examples import custom_threshold, decode_tiny, own_model
from tests import scenarios
from tests.checkpoint_support import random_params

ROOT = Path(__file__).resolve().parent.parent


def test_own_model_is_the_same_offloaded_and_resident(capsys):
    assert own_model.main(["--tokens", "90"]) == 0
    printed = capsys.readouterr().out
    bytes_on_device = re.findall(r"(\w+) +([\d,]+) bytes on the device, +([\d,]+) on the host", printed)
    (resident, most, nothing), (offloaded, less, host) = [
        (name, *(int(number.replace(",", "")) for number in numbers)) for name, *numbers in bytes_on_device
    ]
    assert (resident, offloaded, nothing) == ("resident", "offloaded", 0) and less < most and host > 0
    moved = re.search(r"([\d,]+) were resident, ([\d,]+) prefetched, ([\d,]+) recalled", printed)
    assert moved and all(int(count.replace(",", "")) > 50 for count in moved.groups()), "no pressure, no proof"
    assert f"{90 * own_model.SEATS * own_model.VOCAB} logits of 90 steps compared: 0 differences" in printed
    assert getattr(own_model.step, "_cache_size")() == 2, "one program each"  # noqa: B009


def test_own_model_sees_a_difference(monkeypatch, capsys):
    """One bit of one logit of the offloaded run."""
    really = own_model.run

    def spoilt(params, config, tokens):
        state, logits, moved = really(params, config, tokens)
        if config.offload:
            logits.view("uint32")[3, 1, 7] ^= 1
        return state, logits, moved

    monkeypatch.setattr(own_model, "run", spoilt)
    assert own_model.main(["--tokens", "90"]) == 1  # as above, so that nothing compiles again
    assert ": 1 differences" in capsys.readouterr().out


def test_the_step_between_the_markers_fits_a_readme():
    text = (ROOT / "examples" / "own_model.py").read_text()
    block = text.split("# readme:begin\n")[1].split("# readme:end")[0].strip().splitlines()
    assert 10 < len(block) <= 20 and block[-1].startswith("    return ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A byte model of one layer with random weights: the same code, compiled in seconds."""
    model = dataclasses.replace(scenarios.ONE_LAYER, vocab_size=256)
    path = tmp_path_factory.mktemp("models") / "random"
    checkpoints.save_folder(path, jax.tree.map(jnp.asarray, random_params(model)), model)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    return path


def test_decode_tiny_prints_the_text_and_what_moved(folder, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(bytes(range(97, 123)) * 6)
    arguments = ["--model", str(folder), "--prompt-file", str(prompt), "--bytes", "150"]
    assert decode_tiny.main([*arguments, "--new", "12"]) == 0
    text, moved = capsys.readouterr().out.rsplit("\nlayer 0: ", 1)
    assert text.startswith(prompt.read_text()[70:150]) and len(text) > 80
    assert re.fullmatch(r"hit rate 0\.\d\d, \d+ rows moved ahead, \d+ when asked\n", moved)
    with pytest.raises(SystemExit, match="2"):
        decode_tiny.main([*arguments, "--new", "0"])
    assert "--bytes is 150 and --new is 0 but both must be at least 1" in capsys.readouterr().err


def test_a_custom_threshold_is_compared_with_seven_others(tmp_path, capsys):
    """In fewer than 40 lines. Its predictions differ from those of every other policy, and all share one hit rate."""
    assert len((ROOT / "examples" / "custom_threshold.py").read_text().splitlines()) < 40
    custom_threshold.main("synth:median,requests=2,top_k=32,steps=40,context=512", str(tmp_path / "plot.svg"))
    head, *lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    found = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    assert list(found) == ["reverting", "ema", "last", "quantile", "trend", "never", "always", "clairvoyant"]
    assert len({line["hit"] for line in found.values()}) == 1
    assert len({line["off by"] for line in found.values()}) == 7  # never and always predict nothing
    assert found["never"]["wasted"] == "0.0" and float(found["always"]["wasted"]) > float(found["reverting"]["wasted"])
    plot = (tmp_path / "plot.svg").read_text()
    assert plot.count("<circle") == 8 and "reverting" in plot


def test_importing_the_package_loads_no_jax_and_its_names_start_no_backend():
    """A platform that does not exist would be complained about by the first use of a backend."""
    program = (
        "import sys, echo_jax; assert 'jax' not in sys.modules; "
        "[getattr(echo_jax, name) for name in dir(echo_jax)]; import jax; print(len(dir(echo_jax)))\n"
        "try: jax.devices()\nexcept RuntimeError: print('no backend')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"JAX_PLATFORMS": "nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "no backend"


def test_public_names_are_those_that_type_checkers_see():
    tree = ast.parse(Path(echo_jax.__file__ or "").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, name.name) for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    lazy = {("echo_jax", room) for room in getattr(echo_jax, "_ROOMS")}  # noqa: B009
    lazy |= {(f"echo_jax.{room}", name) for name, room in getattr(echo_jax, "_ROOM_OF").items()}  # noqa: B009
    assert seen == lazy
    assert all(getattr(echo_jax, name) is not None for _, name in lazy)
    with pytest.raises(AttributeError, match="no attribute 'decode_stpe'"):
        getattr(echo_jax, "decode_stpe")  # noqa: B009
