"""What a file holds in place of what its name promises: a Git LFS pointer, an HTML page, an archive.

Knows the first bytes of the files that a failed download or a wrong conversion leaves behind, and JSON files. Does not
know what a model needs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_LFS = b"version https://git-lfs"
_MAGIC = (
    (b"\x1f\x8b", "gzip data", "decompress it"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "decompress it"),
    (b"\xfd7zXZ\x00", "xz data", "decompress it"),
    (b"BZh", "bzip2 data", "decompress it"),
    (b"GGUF", "a GGUF model", "fetch the safetensors files of the model"),
    (b"\x89HDF", "an HDF5 file", "convert the weights to safetensors"),
    (b"\x80\x02", "a PyTorch pickle", "convert the weights to safetensors"),
)
_PAGE = re.compile(rb"^\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)", re.IGNORECASE | re.DOTALL)
_START = 4096


def what_is_wrong(file: Path) -> str | None:
    """What `file` holds and the remedy, where it is a kind of file that neither weights nor JSON settings can be; else
    None. Reads its first 4 KiB."""
    with file.open("rb") as stream:
        start = stream.read(_START)
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= file.stat().st_size - 8:
        return None  # the length of a safetensors header may have the bytes of another format, such as 35,615 of gzip
    if start.startswith(_LFS):
        size = re.search(rb"^size (\d+)", start, re.MULTILINE)
        real = f" to a file of {int(size[1]):,} bytes" if size else ""
        return f"is a Git LFS pointer{real}, not the file itself; run `git lfs pull`, or download the file"
    if _PAGE.match(start):
        return "is an HTML page, such as the login or error page of a site; sign in and download the file again"
    if start.lstrip().startswith(b"<?xml"):
        return "is an XML document, such as the error message of a file store; download the file again"
    if start.startswith(b"PK\x03\x04"):
        if b"data.pkl" in start:
            return "is a PyTorch file (a zip archive with data.pkl); convert the weights to safetensors"
        return "is a zip archive; unpack it"
    for magic, kind, remedy in _MAGIC:
        if start.startswith(magic):
            return f"is {kind}; {remedy}"
    return None


def is_text(start: bytes) -> bool:
    """Whether the first bytes of a file are printable ASCII, such as an error message in its place."""
    return bool(start) and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in start)


def read_object(file: Path, holds: str) -> dict[str, Any]:
    """The JSON object in `file`. Raises ValueError that names what the file is, `holds` being what it should hold."""
    if wrong := what_is_wrong(file):
        raise ValueError(f"{str(file)!r} {wrong}")
    try:
        raw = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON ({error}); fetch it again") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{str(file)!r} holds a {type(raw).__name__}, not an object of {holds}; fetch it again")
    return raw


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
