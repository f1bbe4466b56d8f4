"""Models on disk: from a name or a folder to a config and parameters, and back.

Knows which models come with the package. Files and formats are next door: `safetensors` (Hugging Face folders),
`orbax` (sharded parameters of our own), `tokenizer`.
"""

from __future__ import annotations

import difflib
import os
from importlib import resources
from pathlib import Path

from echo_jax.checkpoints.notes import CheckpointNote
from echo_jax.checkpoints.orbax import restore_params, save_params
from echo_jax.checkpoints.quantized import weight_bytes
from echo_jax.checkpoints.safetensors import load_folder, read_config, save_folder
from echo_jax.checkpoints.tokenizer import ByteTokenizer, JsonTokenizer, end_token_ids, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "CheckpointNote",
    "JsonTokenizer",
    "end_token_ids",
    "load_folder",
    "load_tokenizer",
    "packaged_models",
    "read_config",
    "resolve_model",
    "restore_params",
    "save_folder",
    "save_params",
    "weight_bytes",
]


def packaged_models() -> dict[str, Path]:
    """Name -> folder of every model that comes with the package."""
    # An editable install has two roots; only a child of them is one path.
    data = Path(str(resources.files("echo_jax") / "data"))
    if not data.is_dir():
        return {}
    return {folder.name: folder for folder in sorted(data.iterdir()) if (folder / "config.json").is_file()}


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of a model: an existing folder is taken as it is, otherwise a name of `packaged_models`.

    Raises FileNotFoundError for a path that does not exist and ValueError for an unknown name, with the nearest one.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    known = packaged_models()
    name = str(name_or_path)
    if name in known:
        return known[name]
    if path.exists():
        raise ValueError(f"model {name!r} is a file; give the folder that holds config.json and the safetensors files")
    if os.sep in name or name.startswith((".", "~")):
        raise FileNotFoundError(f"model folder {name!r} does not exist; give a Hugging Face folder{_known(known)}")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise ValueError(
        f"model {name!r} is neither a folder nor a model of this package{hint}; give a Hugging Face folder"
        f"{_known(known)}"
    )


def _known(known: dict[str, Path]) -> str:
    return f" or one of: {', '.join(known)}" if known else " (this installation has no packaged models)"
