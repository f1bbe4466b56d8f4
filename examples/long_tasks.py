"""Retrieval tasks over long text: pass keys, numbers, tables of keys and values, chains of variables, many needles.

Knows how facts are planted into a haystack of real bytes and how they are asked for; every draw comes from a seed.
Knows nothing of models: an answer counts as given when each of its bytes is the most likely one after the true bytes
before it, which is exact match of greedy decoding, in one forward pass. Look at some:

    python examples/long_tasks.py --corpus out/corpus.xz --length 1024

The forms follow RULER (arXiv 2404.06654) and the passkey test (arXiv 2305.16300), in bytes and with invented names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

TEXT, PLANTED, ANSWER = 0, 1, 2
"""Roles of a byte: the haystack and the words of a form; what nobody can foresee; what a reader of the window knows."""

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SURPRISE = 4
"""First bytes of a sentence that was put in: where it stands cannot be foreseen either."""


class Piece(NamedTuple):
    text: bytes
    role: int


Sentence = list[Piece]


class Fact(NamedTuple):
    """What is planted, in this order, and how it is asked for: `question` ends where `answer` begins."""

    planted: list[Sentence]
    question: Sentence
    answer: bytes


class Example(NamedTuple):
    tokens: np.ndarray  # u8[length]
    roles: np.ndarray  # u8[length]


def name(rng: np.random.Generator) -> bytes:
    """Five letters that can be spoken; 68,600 of them, so two in a window are rarely the same."""
    letters = (CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS)
    return "".join(kind[rng.integers(len(kind))] for kind in letters).encode()


def digits(rng: np.random.Generator, count: int) -> bytes:
    return "".join(str(d) for d in rng.integers(10, size=count)).encode()


def sentence(*parts: bytes | tuple[bytes]) -> Sentence:
    """Words of the form as they are, unforeseeable parts as one-tuples."""
    return [Piece(part[0], PLANTED) if isinstance(part, tuple) else Piece(part, TEXT) for part in parts]


# Facts


def passkey(rng: np.random.Generator) -> Fact:
    """One key, said twice in one sentence."""
    value = digits(rng, 5)
    planted = sentence(b"The pass key is ", (value,), b". Remember it: ", value, b" is the pass key.\n")
    return Fact([planted], sentence(b"What is the pass key? The pass key is "), value)


def number(rng: np.random.Generator) -> Fact:
    """The number of a name."""
    key, value = name(rng), digits(rng, 7)
    return Fact(
        [sentence(b"The special number of ", (key,), b" is ", (value,), b".\n")],
        sentence(b"What is the special number of ", (key,), b"? The special number of ", key, b" is "),
        value,
    )


TABLE = 8
"""Lines of one table."""


def table(rng: np.random.Generator) -> Fact:
    """One line of a table of names and numbers."""
    pairs = [(name(rng), digits(rng, 5)) for _ in range(TABLE)]
    lines = [part for key, value in pairs for part in ((key,), b": ", (value,), b"\n")]
    key, value = pairs[rng.integers(TABLE)]
    return Fact(
        [sentence(b"Table of values.\n", *lines)], sentence(b"Look up the value. ", (key,), b": "), value
    )  # fmt: skip


def chain(rng: np.random.Generator) -> Fact:
    """A variable followed through three others to its value; the answer names all of them."""
    names, value = [name(rng) for _ in range(4)], digits(rng, 5)
    steps = [sentence(b"Let ", (names[0],), b" = ", (value,), b".\n")]
    steps += [sentence(b"Let ", (b,), b" = ", (a,), b".\n") for a, b in zip(names, names[1:], strict=False)]
    answer = b" = ".join((names[2], names[1], names[0], value))
    return Fact(steps, sentence(b"Trace the variable. ", (names[3],), b" = "), answer)


class Task(NamedTuple):
    """The fact that is asked for, and how many others of its kind stand beside it in a window of so many bytes."""

    fact: Callable[[np.random.Generator], Fact]
    others: Callable[[int], int]


TASKS = {
    "passkey": Task(passkey, lambda length: 0),
    "number": Task(number, lambda length: 0),
    "kv": Task(table, lambda length: max(1, min(64, length // 64) // TABLE) - 1),  # up to 64 lines in all
    "vt": Task(chain, lambda length: 1),
    "multikey": Task(number, lambda length: 7 if length >= 2048 else 3),
}


# Windows


def example(task: str, length: int, text: bytes, rng: np.random.Generator) -> Example:
    """A window that ends with the answer, its facts planted at random places of a haystack from `text`."""
    fact = TASKS[task].fact(rng)
    asked = _flat([Piece(b"\n", TEXT), *fact.question, Piece(fact.answer, ANSWER)])
    inserts = _planted(fact, rng, 1.0)
    for _ in range(TASKS[task].others(length)):
        inserts += _planted(TASKS[task].fact(rng), rng, 1.0)
    return _window(length, text, rng, inserts, asked)


def examples(task: str, length: int, text: bytes, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(tokens u8[count, length], is_answer bool[count, length]): the same for the same arguments."""
    rng = np.random.default_rng([seed, length, sorted(TASKS).index(task)])
    found = [example(task, length, text, rng) for _ in range(count)]
    return np.stack([one.tokens for one in found]), np.stack([one.roles == ANSWER for one in found])


BYTES_PER_FACT = 384
"""Practice windows hold a fact for so many of their bytes; a sparser window teaches little, a fuller one is no text."""


def practice(length: int, text: bytes, rng: np.random.Generator) -> Example:
    """A window to learn from: a pass key and facts of all kinds, asked for anywhere after they were planted.

    Every fact is a distractor for the others of its kind. Nothing that is asked for can mean two facts: there is one
    pass key, and names hardly repeat.
    """
    kinds = (number, number, table, chain)
    facts = [passkey(rng)] + [kinds[rng.integers(len(kinds))](rng) for _ in range(length // BYTES_PER_FACT)]
    inserts: list[tuple[float, Example]] = []
    for place, fact in enumerate(facts):
        inserts += _planted(fact, rng, 0.95)
        last = inserts[-1][0]
        asked = _flat([*fact.question, Piece(fact.answer, ANSWER), Piece(b".\n", TEXT)])
        near_the_end = rng.random() < 0.5
        inserts.append((rng.uniform(max(last, 0.9) if near_the_end else last, 1.0), asked))
        if place == 0:
            inserts.append((rng.uniform(max(last, 0.9), 1.0), asked))
    return _window(length, text, rng, inserts, None)


def _planted(fact: Fact, rng: np.random.Generator, end: float) -> list[tuple[float, Example]]:
    """The sentences of a fact in their order, at random shares of the haystack up to `end`."""
    places = np.sort(rng.random(len(fact.planted))) * end
    return [(float(place), _flat(planted)) for place, planted in zip(places, fact.planted, strict=True)]


def _flat(pieces: Sequence[Piece]) -> Example:
    tokens = np.frombuffer(b"".join(piece.text for piece in pieces), np.uint8)
    roles = np.repeat(np.array([p.role for p in pieces], np.uint8), [len(p.text) for p in pieces])
    if len(pieces) > 1:
        roles[:SURPRISE] = PLANTED
    return Example(tokens, roles)


def _window(
    length: int,
    text: bytes,
    rng: np.random.Generator,
    inserts: list[tuple[float, Example]],
    asked: Example | None,
) -> Example:
    """The haystack with the inserts, each at the first line that begins after its share of it; `asked` at the end.

    Practice windows may overflow: what does not fit is cut off at the end, so no `asked` can be there with them.
    """
    room = length - sum(len(insert.tokens) for _, insert in inserts) - (0 if asked is None else len(asked.tokens))
    if room < 0 and asked is not None:
        raise ValueError(f"{length} bytes hold no haystack beside {length - room} bytes of facts; raise the length")
    room = max(room, length // 8)
    start = int(rng.integers(max(1, len(text) - room)))
    haystack = text[start : start + room]
    hay = Example(np.frombuffer(haystack, np.uint8), np.zeros(len(haystack), np.uint8))
    parts, at = [], 0
    for place, insert in sorted(inserts, key=lambda item: item[0]):
        here = max(at, int(place * len(haystack)))
        line = haystack.find(b"\n", here, here + 200)
        here = line + 1 if line >= 0 else here
        parts += [Example(hay.tokens[at:here], hay.roles[at:here]), insert]
        at = here
    parts.append(Example(hay.tokens[at:], hay.roles[at:]))
    if asked is not None:
        parts.append(asked)
    joined = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
    if len(joined[0]) < length:
        raise ValueError(f"a text of {len(text)} bytes gives no haystack of {room} bytes; use a longer text")
    return Example(*(array[:length] for array in joined))


def main() -> None:
    import corpus as corpora

    parser = argparse.ArgumentParser(description="Show one window of each task, and one to practise on")
    parser.add_argument("--corpus", default="out/corpus.xz", help="packed corpus of corpus.py")
    parser.add_argument("--length", type=int, default=1024, help="bytes of a window")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    header, raw = corpora.load(args.corpus)
    text = corpora.held_out_text(header, raw, "python-docs")
    rng = np.random.default_rng(args.seed)
    shown = [(task, example(task, args.length, text, rng)) for task in TASKS]
    for task, window in [*shown, ("practice", practice(args.length, text, rng))]:
        answers = bytes(np.where(window.roles == ANSWER, window.tokens, ord("."))).decode(errors="replace")
        print(f"=== {task}\n{window.tokens.tobytes().decode(errors='replace')}\n--- answers: {answers.strip('.')}")


if __name__ == "__main__":
    main()
