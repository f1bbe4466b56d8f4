"""A small random model in a folder, prompts, and the command line called in this process."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from echo_jax.checkpoints import save_folder
from echo_jax.cli.main import main
from echo_jax.models.config import DENSE, FULL, SHARED, DsaConfig
from echo_jax.models.dsa import init_params

MODEL = DsaConfig(
    vocab_size=256,
    hidden_size=32,
    num_heads=2,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
    index_heads=4,
    index_head_dim=16,
    index_topk=12,
    layer_kinds=(FULL, SHARED),
    mlp_kinds=(DENSE, DENSE),
    intermediate_size=48,
    max_positions=1000,
)
PROMPT = (
    b"An offloaded cache answers as a resident one does; only the place of its rows differs. \xff\xfe\x00 And so on."
)


class Outcome(NamedTuple):
    """What a call of the command line did."""

    status: int
    out: str
    err: str

    def rows(self, kind: str) -> list[dict]:
        return [row for row in map(json.loads, self.out.splitlines()) if row["row"] == kind]

    def error(self) -> str:
        """The message of a refusal, which is one line and nothing else."""
        assert self.status == 2, self
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("echo-jax: error: "), self.err
        assert self.out == ""
        return lines[0]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A random model of two layers, the second sharing the first one's selected set, with bytes for tokens."""
    folder = tmp_path_factory.mktemp("models") / "random"
    shapes, random = jax.eval_shape(lambda: init_params(jax.random.key(0), MODEL)), np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: (0.3 * random.standard_normal(leaf.shape)).astype(np.float32), shapes)
    save_folder(folder, params, MODEL)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    return folder


@pytest.fixture
def broken_folder(model_folder, tmp_path) -> Callable[..., Path]:
    """A copy of the model folder in which `change(folder)` has spoiled something."""

    def make(change: Callable[[Path], None]) -> Path:
        folder = tmp_path / "broken"
        shutil.copytree(model_folder, folder)
        change(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory) -> Path:
    """Bytes that are no text: any bytes are a prompt for a byte model."""
    path = tmp_path_factory.mktemp("prompts") / "prompt.txt"
    path.write_bytes(PROMPT)
    return path


@pytest.fixture
def echo_jax(capsys, monkeypatch, tmp_path) -> Callable[..., Outcome]:
    """Calls the command line in this process, in an empty folder of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capsys.readouterr())

    return call


@pytest.fixture
def environment() -> dict[str, str]:
    """For a process of its own: this repository's packages, whatever is installed."""
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": root, "XLA_FLAGS": ""}
