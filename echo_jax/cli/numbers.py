"""Numbers as people write them on a command line: `4k` positions, `1M` rows, `141GB` of memory.

k, M and G are thousands, millions and thousands of millions; with an i (Ki, Mi, Gi) they are powers of 1024. Sizes in
bytes take the same letters with a B. Each function raises what argparse shows as it is: one line, no Python error.
"""

from __future__ import annotations

import argparse
import math
import re

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FACTORS |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

MAX_COUNT = 2**63 - 1
LEAST_SIZE = 10**6
"""Bytes that a size without a unit must have: below, the unit was forgotten."""

_NUMBER = re.compile(r"([+-]?[0-9]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


def count(text: str) -> int:
    """ "64", "4k", "1.5M" or "64Ki" -> a whole number."""
    number, unit = _split(text, "a whole number", "64, 4k, 1M or 64Ki")
    if unit not in _FACTORS:
        raise argparse.ArgumentTypeError(f"{text!r} has the unit {unit.lower()!r}; write 64, 4k, 1M or 64Ki")
    value = number * _FACTORS[unit]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is {value:g} but must be a whole number")
    if abs(value) > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is beyond {MAX_COUNT}, the largest number there is here")
    return int(value)


def size(text: str) -> int:
    """ "141GB", "80 GiB" or "1e9" -> bytes."""
    number, unit = _split(text, "a size", "141GB, 80GiB or 500MB")
    if unit.removesuffix("B") not in _FACTORS:
        raise argparse.ArgumentTypeError(
            f"{text!r} has the unit {unit!r}; write B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    value = number * _FACTORS[unit.removesuffix("B")]
    if value < 0 or value > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is {value:g} bytes but a size lies in 0..{MAX_COUNT}")
    if not unit and value < LEAST_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r} is {value:g} bytes; write {text.strip()}GB or another unit")
    return int(value)


def real(text: str) -> float:
    """ "0.5", "1e-3" or "inf" -> a number that is not NaN."""
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write 0.5, 1e-3 or inf")
    return value


def _split(text: str, what: str, examples: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        number = float(match[1]) if set(match[1]) & set(".eE") else int(match[1])
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}; write {examples}") from None
    if math.isinf(number):
        raise argparse.ArgumentTypeError(f"{text!r} is beyond {MAX_COUNT}, the largest number there is here")
    return number, match[2].upper()
