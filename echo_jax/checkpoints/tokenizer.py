"""Text and token ids: bytes as they are, or a `tokenizer.json` through the `tokenizers` package of the `hf` extra.

Knows files of a model folder and text. Knows no model; whether an id is in the vocabulary is asked of the caller's
config. Text that streams out is cut only between whole characters.
"""

from __future__ import annotations

import codecs
import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from echo_jax.checkpoints.contents import read_object

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

    def encode(self, text: bytes | str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text, with the start and end tokens that the folder asks for and the text does not bring."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stream(self) -> TextStream: ...


class ByteTokenizer:
    """Ids 0-255 are the bytes; higher ids are special and have no text. Any bytes are a prompt."""

    vocab_size = 256

    def encode(self, text: bytes | str, add_special_tokens: bool = True) -> list[int]:
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


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """What `tokenizer_config.json` says of start and end tokens. None for a switch: the post-processor decides."""

    start: str | None = None
    end: str | None = None
    adds_start: bool | None = None
    adds_end: bool | None = None


class JsonTokenizer:
    """A `tokenizer.json` of Hugging Face, read by the `tokenizers` package.

    Start and end tokens are added where the folder says so (`SpecialTokens`), and not where the text brings them.
    """

    def __init__(self, tokenizer: Any, special: SpecialTokens | None = None):
        self._tokenizer = tokenizer
        self.special = special or SpecialTokens()
        self.vocab_size: int = tokenizer.get_vocab_size()

    def encode(self, text: bytes | str, add_special_tokens: bool = True) -> list[int]:
        """Raises ValueError for bytes that are not UTF-8: such a vocabulary has no tokens for them."""
        if isinstance(text, bytes):
            try:
                text = text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"the prompt is not UTF-8 (byte {error.start} is 0x{text[error.start]:02x}); convert it, or use a "
                    "byte-level model, which takes any bytes"
                ) from None
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if not add_special_tokens:
            return ids
        start, end = self._around(text)
        ids = ids if ids[: len(start)] == start else start + ids
        return ids if end and ids[-len(end) :] == end else ids + end

    def _around(self, text: str) -> tuple[list[int], list[int]]:
        """Ids before and behind a text: as tokenizer_config.json states, else as the file's own post-processor adds."""
        plain = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        added = list(self._tokenizer.encode(text, add_special_tokens=True).ids)
        place = next((n for n in range(len(added) + 1) if added[n : n + len(plain)] == plain), 0)
        start, end = added[:place], added[place + len(plain) :]
        if self.special.adds_start is not None:
            start = self._ids(self.special.start) if self.special.adds_start else []
        if self.special.adds_end is not None:
            end = self._ids(self.special.end) if self.special.adds_end else []
        return start, end

    def _ids(self, token: str | None) -> list[int]:
        found = None if token is None else self._tokenizer.token_to_id(token)
        return [] if found is None else [found]

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
    stated = (
        read_object(folder / TOKENIZER_CONFIG, "tokenizer settings") if (folder / TOKENIZER_CONFIG).is_file() else {}
    )
    if stated.get("tokenizer_class") == BYTE_TOKENIZER:
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
        read = tokenizers.Tokenizer.from_file(str(file))
        read.no_truncation()  # settings of the training run, which would clip or pad a prompt in silence
        read.no_padding()
    except Exception as error:  # the package raises bare Exception for a file that it cannot parse
        raise ValueError(f"{str(file)!r} is not a usable tokenizer ({error}); fetch it again") from None
    return JsonTokenizer(read, _special_tokens(folder / TOKENIZER_CONFIG, stated, read))


def _special_tokens(file: Path, stated: dict[str, Any], tokenizer: Any) -> SpecialTokens:
    """What tokenizer_config.json says; ValueError for a token that is to be added and that the vocabulary lacks."""
    found: dict[str, Any] = {}
    for field, token, switch in (("start", "bos_token", "add_bos_token"), ("end", "eos_token", "add_eos_token")):
        found[field], adds = token_text(stated.get(token)), stated.get(switch)
        if adds is not None and not isinstance(adds, bool):
            raise ValueError(f"{switch} in {str(file)!r} is {adds!r} but must be true or false")
        if adds and (found[field] is None or tokenizer.token_to_id(found[field]) is None):
            raise ValueError(
                f"{switch} in {str(file)!r} is true but {token} {found[field]!r} is no token of {TOKENIZER_FILE}; "
                "fetch both files from one checkpoint"
            )
        found[f"adds_{field}"] = adds
    return SpecialTokens(**found)


def token_text(stated: Any) -> str | None:
    """A special token as configurations write it, a text or an object with its content."""
    return stated.get("content") if isinstance(stated, dict) else stated


def end_token_ids(folder: str | Path, vocab_size: int | None = None) -> tuple[int, ...]:
    """Ids that end an answer: `eos_token_id` of `generation_config.json`, else of `config.json`, else none.

    vocab_size: of the model. Raises ValueError, with the file's name, for anything that is not a token id of it: a
    string, a fraction, a bool, a negative number, or one that no answer can contain.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        stated = read_object(file, "settings").get("eos_token_id")
        if stated is not None:
            ids = stated if isinstance(stated, list) else [stated]
            for one in ids:
                if isinstance(one, bool) or not isinstance(one, int) or one < 0 or (vocab_size and one >= vocab_size):
                    known = f"0..{vocab_size - 1}" if vocab_size else "0 or above"
                    raise ValueError(
                        f"eos_token_id in {str(file)!r} holds {one!r}, which is no token id; write numbers of the "
                        f"vocabulary, {known}"
                    )
            return tuple(ids)
    return ()
