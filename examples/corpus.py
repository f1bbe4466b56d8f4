"""The text that echo-tiny is trained on: Python's documentation and standard library, and public-domain books.

Knows where Debian's packages put their files, which documents are held out, and how to pack the rest into one file.
Knows nothing of models. Build it (Debian 12, as root, then as anyone):

    apt-get install python3.11-doc docutils-doc sphinx-doc python-sqlalchemy-doc bible-kjv bible-kjv-text \\
        r-cran-janeaustenr jargon-text dict-devil
    python examples/corpus.py --out out/corpus.xz

A packed corpus is an xz file: one JSON line, then the bytes of all documents, each followed by one zero byte. Groups
lie one after another, held-out documents last, so a sampler needs only the ranges in the JSON line.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import pathlib
import re
import subprocess
import sysconfig
import zlib
from collections.abc import Iterator
from typing import NamedTuple

SEPARATOR = b"\0"
"""What stands after each document."""

HELD_OUT = {
    "python-docs": (
        "library/graphlib", "library/urllib.parse", "library/contextvars", "library/selectors", "library/statistics",
        "library/tarfile", "library/ipaddress", "howto/ipaddress", "library/argparse", "howto/argparse",
        "howto/sorting", "tutorial/classes", "reference/simple_stmts", "faq/design", "c-api/dict", "library/enum",
        "howto/enum",
    ),
    "python-library": ("graphlib", "urllib/parse", "contextvars", "selectors", "statistics", "tarfile", "ipaddress",
                       "argparse", "enum"),
    "python-tests": ("test/test_graphlib", "test/test_urlparse", "test/test_context", "test/test_selectors",
                     "test/test_statistics", "test/test_tarfile", "test/test_ipaddress", "test/test_argparse",
                     "test/test_enum"),
    "other-docs": (),
    "books": ("austen/persuasion", "kjv/Ruth", "kjv/Jonah"),
}  # fmt: skip
"""Documents never trained on, by group and name. A page goes together with its module and that module's tests."""

WEIGHTS = {"python-docs": 0.40, "other-docs": 0.12, "python-library": 0.26, "python-tests": 0.06, "books": 0.16}
"""How often a training window starts in each group."""

# Tables, copies of the documentation, and files that are broken or binary on purpose.
LIBRARY_SKIPS = ("site-packages/", "__pycache__/", "encodings/", "pydoc_data/", "lib2to3/tests/", "ensurepip/",
                 "config-", "turtledemo/", "test/cjkencodings/", "test/encoded_modules/", "idlelib/Icons/")  # fmt: skip
TESTS_AT_MOST = 6 << 20  # bytes of the standard library's tests
NOVELS = {
    "Sense and Sensibility": "sense_and_sensibility", "Pride and Prejudice": "pride_and_prejudice",
    "Mansfield Park": "mansfield_park", "Emma": "emma", "Northanger Abbey": "northanger_abbey",
    "Persuasion": "persuasion",
}  # fmt: skip


class Document(NamedTuple):
    group: str
    name: str
    text: bytes


def documents() -> Iterator[Document]:
    """Every document found on this machine; says which sources are missing."""
    docs = pathlib.Path("/usr/share/doc")
    yield from _folder("python-docs", docs / "python3.11/html/_sources", "**/*.rst.txt", "python3.11-doc")
    for package, folder, pattern in (
        ("docutils-doc", "docutils-doc/docs", "**/*.txt"),
        ("sphinx-doc", "sphinx-doc/html/_sources", "**/*.txt"),
        ("python-sqlalchemy-doc", "python-sqlalchemy-doc/rst", "**/*.rst"),
    ):
        yield from _folder("other-docs", docs / folder, pattern, package, prefix=package + "/")
    yield from _standard_library(pathlib.Path(sysconfig.get_path("stdlib")))
    yield from _bible()
    yield from _austen(pathlib.Path("/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"))
    yield from _gzipped("jargon", docs / "jargon-text/jargon.txt.gz", "jargon-text")
    yield from _gzipped("devils-dictionary", pathlib.Path("/usr/share/dictd/devil.dict.dz"), "dict-devil")


def _missing(what: str, remedy: str) -> None:
    print(f"left out: {what} is not here ({remedy})")


def _folder(group: str, root: pathlib.Path, pattern: str, package: str, prefix: str = "") -> Iterator[Document]:
    if not root.is_dir():
        return _missing(str(root), f"apt-get install {package}")
    for path in sorted(root.glob(pattern)):
        name = re.sub(r"(\.rst)?\.(txt|rst)$", "", str(path.relative_to(root)))
        if path.is_file() and "changelog_" not in name:
            yield Document(group, prefix + name, path.read_bytes())


def _standard_library(root: pathlib.Path) -> Iterator[Document]:
    budget = TESTS_AT_MOST
    for path in sorted(root.glob("**/*.py")):
        name = str(path.relative_to(root).with_suffix(""))
        if any(skip in f"{name}/" if skip.endswith("/") else name.startswith(skip) for skip in LIBRARY_SKIPS):
            continue
        text = path.read_bytes()
        is_test = "test/" in name or "tests/" in name or "idle_test" in name
        if is_test and name not in HELD_OUT["python-tests"]:
            if len(text) > 120_000 or (budget := budget - len(text)) < 0:
                continue
        yield Document("python-tests" if is_test else "python-library", name, text)


def _bible() -> Iterator[Document]:
    """The King James Bible, one document a book, printed by Debian's own reader."""
    try:
        run = subprocess.run(
            ["bible", "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return _missing("the program `bible`", "apt-get install bible-kjv bible-kjv-text")
    books: dict[str, str] = {}
    pieces = re.split(r"\n(?=\n[A-Z1-3][A-Za-z ]* \d+\n\n)", "\n" + run.stdout)  # a title stands over each chapter
    for chapter in pieces:
        title = " ".join(chapter.split("\n\n", 1)[0].split()[:-1])
        books[title] = books.get(title, "") + chapter + "\n"
    for title, text in books.items():
        if title:
            yield Document("books", f"kjv/{title}", text.encode())


def _austen(path: pathlib.Path) -> Iterator[Document]:
    """Jane Austen's novels out of an R data file: zlib streams that hold length-prefixed strings."""
    if not path.is_file():
        return _missing(str(path), "apt-get install r-cran-janeaustenr")
    packed, start, lines = path.read_bytes(), 0, []
    while (start := packed.find(b"\x78", start)) >= 0:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(packed[start:])
        except zlib.error:
            start += 1
            continue
        start = len(packed) - len(stream.unused_data)
        lines = _r_strings(data)
        title = next((name for name in NOVELS if lines and name.upper() in lines[0].upper()), None)
        if title is not None:
            yield Document("books", f"austen/{NOVELS[title]}", "\n".join(lines).encode() + b"\n")


def _r_strings(data: bytes) -> list[str]:
    """The character vector in R's binary serialisation: a CHARSXP is four bytes of flags ending in 9, then a length."""
    found, at = [], 0
    while (at := data.find(b"\0\x09", at)) >= 0:
        length = int.from_bytes(data[at + 2 : at + 6], "big", signed=True)
        is_string = 0 <= length < 4096 and data[at - 2 : at - 1] == b"\0" and at + 6 + length <= len(data)
        if is_string:
            found.append(data[at + 6 : at + 6 + length].decode("utf-8", "replace"))
        at += 6 + length if is_string else 1
    return found


def _gzipped(name: str, path: pathlib.Path, package: str) -> Iterator[Document]:
    if not path.is_file():
        return _missing(str(path), f"apt-get install {package}")
    yield Document("books", name, gzip.decompress(path.read_bytes()))


def is_held_out(document: Document) -> bool:
    return document.name in HELD_OUT[document.group]


def pack(found: list[Document]) -> tuple[dict, bytes]:
    """(header, bytes): groups in the order of WEIGHTS, documents shuffled by the hash of their names."""
    parts: list[bytes] = []
    at, groups, held = 0, {}, []
    seen: set[bytes] = set()

    def add(document: Document) -> tuple[int, int]:
        nonlocal at
        parts.extend((document.text.replace(SEPARATOR, b""), SEPARATOR))
        start, at = at, at + len(parts[-2]) + 1
        return start, at

    order = sorted(found, key=lambda d: hashlib.sha256(d.name.encode()).digest())
    for group in WEIGHTS:
        start = at
        for document in order:
            digest = hashlib.sha256(document.text).digest()
            if document.group == group and not is_held_out(document) and digest not in seen and document.text:
                seen.add(digest)
                add(document)
        groups[group] = {"start": start, "stop": at, "weight": WEIGHTS[group]}
    for document in order:
        if is_held_out(document):
            start, stop = add(document)
            held.append({"group": document.group, "name": document.name, "start": start, "stop": stop - 1})
    return {"groups": groups, "held_out": held, "bytes": at}, b"".join(parts)


def load(path: str | pathlib.Path) -> tuple[dict, bytes]:
    """Header and bytes of a packed corpus."""
    with lzma.open(path) as file:
        header = json.loads(file.readline())
        return header, file.read()


def held_out_text(header: dict, raw: bytes, group: str | None = None) -> bytes:
    """The held-out documents of a group, or of all, one after another, a zero byte after each."""
    return b"".join(raw[d["start"] : d["stop"] + 1] for d in header["held_out"] if group in (None, d["group"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack the training corpus of echo-tiny")
    parser.add_argument("--out", default="out/corpus.xz", help="packed corpus to write")
    path = pathlib.Path(parser.parse_args().out)
    header, text = pack(list(documents()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wb", preset=6) as file:
        file.write(json.dumps(header).encode() + b"\n" + text)
    for name, group in header["groups"].items():
        print(f"{name:16} {group['stop'] - group['start']:>10} bytes   weight {group['weight']}")
    for document in header["held_out"]:
        print(f"held out  {document['group']:16} {document['name']:32} {document['stop'] - document['start']:>8} bytes")
    print(f"{path}: {header['bytes']} bytes, packed {path.stat().st_size}")


if __name__ == "__main__":
    main()
