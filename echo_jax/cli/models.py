"""What `--model` may name: a folder, a model of this package, or (for plans) a preset.

Knows how a name becomes a config, and what a prompt file becomes. Does not know what is done with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from echo_jax.checkpoints import packaged_models, read_config, resolve_model
from echo_jax.checkpoints.hf_config import config_from_hf
from echo_jax.checkpoints.tokenizer import Tokenizer
from echo_jax.cli.errors import InputError, nearest
from echo_jax.models.config import DsaConfig
from echo_jax.models.presets import PRESETS

DTYPES = ("auto", "float32", "bfloat16", "stored")


def find_model(name: str) -> Path:
    """The folder of a model. InputError or ValueError for an unknown name, with the nearest; FileNotFoundError for a
    folder that is not there."""
    known = packaged_models()
    if name in PRESETS and name not in known and not Path(name).exists():
        raise InputError(
            f"model {name!r} is a preset: shapes without weights, for `echo-jax plan`; give a folder or one of: "
            f"{', '.join(known) or 'none packaged here'}"
        )
    return resolve_model(name)


def shape_of(name: str) -> DsaConfig:
    """The config of a folder, a packaged model or a preset, without its weights."""
    known = packaged_models()
    if name in PRESETS and not Path(name).is_dir():
        return PRESETS[name]
    is_path = Path(name).exists() or "/" in name
    if not is_path and name not in known:
        raise InputError(f"model {name!r} is neither a folder nor known here; {nearest(name, [*known, *PRESETS])}")
    return config_from_hf(read_config(resolve_model(name)))


def parameter_dtype(choice: str) -> str | None:
    """The dtype to load a model in, None as stored: float32 on a CPU, as stored elsewhere, unless chosen."""
    if choice == "auto":
        return "float32" if jax.default_backend() == "cpu" else None
    return None if choice == "stored" else choice


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt file and its tokens."""

    path: Path
    tokens: list[int]


def read_prompts(paths: Sequence[Path], tokenizer: Tokenizer) -> list[Prompt]:
    """Every file's bytes as tokens. InputError, naming the file, for one that is missing or has no token."""
    prompts = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(
                f"prompt file {str(path)!r} cannot be read ({error.strerror}); give an existing file"
            ) from None
        try:
            tokens = tokenizer.encode(content)
        except ValueError as error:
            raise InputError(f"prompt file {str(path)!r}: {error}") from None
        if not tokens:
            raise InputError(f"prompt file {str(path)!r} has 0 tokens; give at least 1")
        prompts.append(Prompt(path, tokens))
    return prompts
