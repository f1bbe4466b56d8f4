"""Text and token ids: bytes as they are, or a `tokenizer.json` through the `tokenizers` package of the `hf` extra.

Knows files of a model folder and text. Knows no model; whether an id is in the vocabulary is asked of the caller's
config. Text that streams out is cut only between whole characters.
"""

from __future__ import annotations

import codecs
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTE_TOKENIZER = "ByteTokenizer"
"""The `tokenizer_class` by which a folder says that its tokens are bytes."""


class TextStream(Protocol):
    """Text of ids that arrive one by one; the pieces together are the text of all."""

    def push(self, token: int) -> str:
        """What can be shown now: whole characters only."""
        ...

    def end(self) -> str:
        """What is left, with a replacement sign where a character stayed incomplete."""
        ...


class Tokenizer(Protocol):
    """What `load_tokenizer` returns."""

    vocab_size: int

    def encode(self, text: bytes | str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stream(self) -> TextStream: ...


class ByteTokenizer:
    """Ids 0-255 are the bytes; higher ids are special and have no text. Any bytes are a prompt."""

    vocab_size = 256

    def encode(self, text: bytes | str) -> list[int]:
        return list(text.encode("utf-8") if isinstance(text, str) else text)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return bytes(token for token in tokens if 0 <= token < 256)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < 256 else ""

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class JsonTokenizer:
    """A `tokenizer.json` of Hugging Face. Adds no start token: the caller decides what a prompt is."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()

    def encode(self, text: bytes | str) -> list[int]:
        """Raises ValueError for bytes that are not UTF-8: such a vocabulary has no tokens for them."""
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"the prompt is not UTF-8 (byte {error.start} is 0x{text[error.start]:02x}); convert it, or use a "
                    "byte-level model, which takes any bytes"
                ) from None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def stream(self) -> TextStream:
        return _JsonStream(self)


class _JsonStream:
    """Shows a token's text as the difference that it makes behind the token(s) shown before it.

    A token cannot be decoded alone, since many vocabularies drop a space at the start of a text; and not with all its
    predecessors, since that grows with the square of their number.
    """

    def __init__(self, tokenizer: JsonTokenizer):
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # what the last piece came from
        self._waiting: list[int] = []  # not yet whole characters

    def push(self, token: int) -> str:
        self._waiting.append(token)
        piece = self._difference()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._shown, self._waiting = self._waiting, []
        return piece

    def end(self) -> str:
        piece, self._waiting = self._difference(), []
        return piece

    def _difference(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._waiting)[len(before) :]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder.

    A folder whose `tokenizer_config.json` names the class "ByteTokenizer" has bytes for tokens and needs nothing else.
    Otherwise `tokenizer.json` is read. Raises FileNotFoundError when neither is there, ValueError for a file that
    cannot be read, ImportError when the `hf` extra is not installed.
    """
    folder = Path(folder)
    stated = folder / TOKENIZER_CONFIG
    if stated.is_file():
        try:
            kind = json.loads(stated.read_text(encoding="utf-8")).get("tokenizer_class")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{str(stated)!r} is not a JSON object ({error}); fetch it again") from None
        if kind == BYTE_TOKENIZER:
            return ByteTokenizer()
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {TOKENIZER_FILE}; fetch it from where the model came from, or, if its tokens are "
            f'bytes, write {TOKENIZER_CONFIG} with {{"tokenizer_class": "{BYTE_TOKENIZER}"}}'
        )
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise ImportError(
            f"reading {str(file)!r} needs the tokenizers package; install it with: pip install 'echo-jax[hf]'"
        ) from None
    try:
        return JsonTokenizer(tokenizers.Tokenizer.from_file(str(file)))
    except Exception as error:  # the package raises bare Exception for a file that it cannot parse
        raise ValueError(f"{str(file)!r} is not a usable tokenizer ({error}); fetch it again") from None


def end_token_ids(folder: str | Path) -> tuple[int, ...]:
    """Ids that end an answer: `eos_token_id` of `generation_config.json`, else of `config.json`, else none."""
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        try:
            stated = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{str(file)!r} is not a JSON object ({error}); fetch it again") from None
        if stated is not None:
            return tuple(stated) if isinstance(stated, list) else (int(stated),)
    return ()
