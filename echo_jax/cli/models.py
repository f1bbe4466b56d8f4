"""What `--model` may name: a folder, a model of this package, or (for plans) a preset.

Knows how a name becomes a config, and what a prompt file becomes. Does not know what is done with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from echo_jax.checkpoints import load_folder, packaged_models, read_config, resolve_model
from echo_jax.checkpoints.chat import chat_text, parse_messages
from echo_jax.checkpoints.contents import read_object
from echo_jax.checkpoints.hf_config import check_quantization, config_from_hf
from echo_jax.checkpoints.notes import CheckpointNote, note
from echo_jax.checkpoints.quantized import weight_bytes
from echo_jax.checkpoints.tokenizer import Tokenizer
from echo_jax.cli.errors import InputError, nearest
from echo_jax.cli.options import option
from echo_jax.models.config import DsaConfig
from echo_jax.models.dsa import Params
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
    raw = _config_json(name)
    if raw is None:
        return PRESETS[name]
    with notes_as_lines():
        return config_from_hf(raw)


def planned_shape(name: str) -> DsaConfig:
    """As `shape_of`, for a plan: `name` may also be a config.json alone, and its weights quantised in any way."""
    raw = _config_json(name)
    if raw is None:
        return PRESETS[name]
    with notes_as_lines():
        return config_from_hf(raw, any_quantization=True)


def stored_weight_bytes(name: str) -> int | None:
    """Bytes of weights that are quantised in a way that is not loaded, as the folder has them; None for all others."""
    raw = _config_json(name)
    if raw is None:
        return None
    with notes_as_lines():
        try:
            check_quantization(raw)
        except ValueError as refusal:
            note(f"the weights are counted as stored, in a form that is planned for and not loaded: {refusal}")
            return weight_bytes(raw)
    return None


def _config_json(name: str) -> dict[str, Any] | None:
    """What config.json says of a model; None for a preset."""
    known = packaged_models()
    if name in PRESETS and not Path(name).is_dir():
        return None
    if name.endswith(".json") and Path(name).is_file():
        return read_object(Path(name), "settings")
    is_path = Path(name).exists() or "/" in name
    if not is_path and name not in known:
        raise InputError(f"model {name!r} is neither a folder nor known here; {nearest(name, [*known, *PRESETS])}")
    return read_config(resolve_model(name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """What a command that loads a model folder lets pass."""

    allow_extra: bool = option("drop tensors of the folder that this model has no place for", False, group="weights")
    allow_unindexed: bool = option("ignore tensors of the shards that the index does not name", False, group="weights")
    allow_nonfinite: bool = option("load weights that hold NaN or infinities", False, group="weights")

    def load(self, folder: Path, dtype: str | None) -> tuple[DsaConfig, Params]:
        """The model in a folder. What it lets pass is said in a line."""
        allowed = {field.name: getattr(self, field.name) for field in dataclasses.fields(FolderOptions)}
        with notes_as_lines():
            return load_folder(folder, dtype=dtype, **allowed)


_SHOWN: set[str] = set()


@contextlib.contextmanager
def notes_as_lines() -> Iterator[None]:
    """A `CheckpointNote` becomes a line on stderr, once in a process; other warnings pass."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointNote)
        try:
            yield
        finally:
            texts = [str(one.message) for one in caught if issubclass(one.category, CheckpointNote)]
            for text in dict.fromkeys(text for text in texts if text not in _SHOWN):
                print(f"echo-jax: note: {text}", file=sys.stderr)
            _SHOWN.update(texts)
    for one in caught:
        if not issubclass(one.category, CheckpointNote):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


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


def read_prompts(
    paths: Sequence[Path], tokenizer: Tokenizer, *, special_tokens: bool = True, chat: Path | None = None
) -> list[Prompt]:
    """Every file's bytes as tokens. InputError, naming the file, for one that is missing or has no token.

    chat: a model folder, by whose chat template the file is read as messages.
    """
    prompts = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(
                f"prompt file {str(path)!r} cannot be read ({error.strerror}); give an existing file"
            ) from None
        try:
            if chat is not None:
                content = chat_text(chat, parse_messages(content.decode("utf-8")))
            tokens = tokenizer.encode(content, add_special_tokens=special_tokens)
        except ValueError as error:
            raise InputError(f"prompt file {str(path)!r}: {error}") from None
        if not tokens:
            raise InputError(f"prompt file {str(path)!r} has 0 tokens; give at least 1")
        prompts.append(Prompt(path, tokens))
    return prompts
