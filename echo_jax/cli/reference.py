"""Reads a reference file: what another implementation computed for a few requests of one model.

Knows the names and shapes in such a file and refuses what does not have them, so that a comparison never fails half
way. Does not know how the answers are compared: that is `verify`.

For request r, with P prompt tokens, N cached decode steps, V words, L layers and M = P + N:

    r{r}_prompt_ids       [P]               r{r}_prefill_logits   [P, V]
    r{r}_greedy_ids       [N + 1]           r{r}_decode_logits    [N, V]
    r{r}_selected_bits    [L, M, ceil(M / 8)]  bit j of a row: position j is attended to, lowest bit first
    r{r}_topk_gap         [L, M]   optional: from the k-th to the next index score; inf where all positions fit
    r{r}_kth_score        [L, M]   optional: the k-th index score
"""

from __future__ import annotations

import dataclasses
import re
import zipfile
from pathlib import Path

import numpy as np

from echo_jax.models.config import DsaConfig


@dataclasses.dataclass(frozen=True)
class Request:
    """The known answers of one request."""

    number: int
    prompt: np.ndarray  # i32[P]
    greedy: np.ndarray  # i32[N + 1]
    prefill_logits: np.ndarray  # f32[P, V]
    decode_logits: np.ndarray  # f32[N, V]
    selected: np.ndarray  # bool[L, M, M]
    topk_gap: np.ndarray  # f64[L, M]; inf where the file does not say
    kth_score: np.ndarray | None  # f64[L, M]

    @property
    def length(self) -> int:
        """M: positions written when the last step is done."""
        return len(self.prompt) + len(self.decode_logits)

    @property
    def logits(self) -> np.ndarray:
        """f32[M, V], prompt and decode rows in order of position."""
        return np.concatenate([self.prefill_logits, self.decode_logits])


def read(path: Path, model: DsaConfig) -> list[Request]:
    """Every request in the file, by number. Raises ValueError, or FileNotFoundError, for what is no such file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"reference file {str(path)!r} does not exist; give an .npz file of the form in `--help`"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"reference file {str(path)!r} is not a readable .npz ({error}); write it with numpy.savez"
        ) from None
    numbers = sorted({int(match[1]) for name in arrays if (match := re.match(r"r(\d+)_", name))})
    if not numbers:
        found = ", ".join(sorted(arrays)[:4]) or "nothing"
        raise ValueError(
            f"reference file {str(path)!r} has no request (it holds {found}); the first is named r0_prompt_ids"
        )
    return [_request(path, arrays, number, model) for number in numbers]


def _request(path: Path, arrays: dict[str, np.ndarray], number: int, model: DsaConfig) -> Request:
    """One request, every shape checked against the prompt, the greedy tokens and the model."""

    def take(name: str, kinds: str, *shape: int) -> np.ndarray:
        array = arrays.get(f"r{number}_{name}")
        if array is None:
            raise ValueError(
                f"reference file {str(path)!r} has no r{number}_{name}; write it beside r{number}_prompt_ids"
            )
        if array.dtype.kind not in kinds:
            raise ValueError(f"r{number}_{name} has dtype {array.dtype} but {_KINDS[kinds]} are needed; convert it")
        if len(array.shape) != len(shape) or any(
            want not in (-1, have) for want, have in zip(shape, array.shape, strict=True)
        ):
            wanted = [size if size >= 0 else "any" for size in shape]
            raise ValueError(
                f"r{number}_{name} has shape {list(array.shape)} but the prompt, the greedy tokens and the model make "
                f"it {wanted}; write the file for this model"
            )
        return array

    prompt, greedy = (take(name, "iu", -1) for name in ("prompt_ids", "greedy_ids"))
    for name, tokens in (("prompt_ids", prompt), ("greedy_ids", greedy)):
        if not len(tokens):
            raise ValueError(f"r{number}_{name} has 0 tokens; give at least 1")
        outside = tokens[(tokens < 0) | (tokens >= model.vocab_size)]
        if len(outside):
            raise ValueError(
                f"r{number}_{name} holds token {outside[0]} but the model knows 0..{model.vocab_size - 1}; write the "
                "file for this model"
            )
    steps, layers, words = len(greedy) - 1, model.num_layers, model.vocab_size
    length = len(prompt) + steps
    bits = take("selected_bits", "u", layers, length, -(-length // 8))
    if bits.dtype != np.uint8:
        raise ValueError(
            f"r{number}_selected_bits has dtype {bits.dtype} but packed bits are uint8; use numpy.packbits"
        )
    has = {name: f"r{number}_{name}" in arrays for name in ("topk_gap", "kth_score")}
    gap = take("topk_gap", "f", layers, length) if has["topk_gap"] else np.full((layers, length), np.inf)
    return Request(
        number=number,
        prompt=prompt.astype(np.int32),
        greedy=greedy.astype(np.int32),
        prefill_logits=take("prefill_logits", "f", len(prompt), words),
        decode_logits=take("decode_logits", "f", steps, words),
        selected=np.unpackbits(bits, axis=-1, bitorder="little")[..., :length].astype(bool),
        topk_gap=gap.astype(np.float64),
        kth_score=take("kth_score", "f", layers, length).astype(np.float64) if has["kth_score"] else None,
    )


_KINDS = {"iu": "integers", "f": "floats", "u": "unsigned integers"}
