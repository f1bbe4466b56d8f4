"""Scores to select from: named corners of any size, and their answers by sorting.

Shared by the tests of the selection and by bench/top_k.py, which brings them to real sizes. Knows NumPy only; the loops
of tests/oracles/select.py say the same for small rows, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.oracles.words import NO_POSITION

NAN, INF = float("nan"), float("inf")
TINY = float(np.float32(1e-45))  # the least subnormal number

Random = np.random.Generator


def index_scores(random: Random, length: int, heads: int = 64, bias: float = 0.0) -> np.ndarray:
    """Shaped as an indexer's: the sum over heads of weight * relu(normal + bias).

    With few heads and a bias well below zero most sums are exactly zero.
    """
    total = np.zeros(length, np.float32)
    for weight in random.standard_normal(heads, np.float32):
        total += weight * np.maximum(random.standard_normal(length, np.float32) + np.float32(bias), 0)
    return total


def chosen(odd: list[float], chances: list[float]) -> Callable[[Random, int], np.ndarray]:
    return lambda random, length: random.choice(odd, length, p=chances)


def one_ulp_apart(random: Random, length: int) -> np.ndarray:
    return (np.float32(1).view(np.uint32) + random.integers(0, 64, length, np.uint32)).view(np.float32)


def wide_exponents(random: Random, length: int) -> np.ndarray:
    """Of all sizes, subnormal ones included, where index scores have few exponents."""
    return np.exp2(random.uniform(-140, 120, length)) * random.choice([-1, 1], length)


def hidden_from_a_stride(random: Random, length: int) -> np.ndarray:
    """The best lie beside every 16th position: a regular sample sees nothing of them."""
    return np.where(np.arange(length) % 16 == 0, -1.0, 1.0) * random.random(length)


def all_best_at_the_end(random: Random, length: int) -> np.ndarray:
    return np.where(np.arange(length) >= length - length // 16, 1e3, 0) + random.random(length)


CORNERS: dict[str, Callable[[Random, int], np.ndarray]] = {
    "normal": lambda random, length: random.standard_normal(length),
    "index_scores": index_scores,
    "mostly_zero": lambda random, length: index_scores(random, length, heads=4, bias=-2.3),
    "rising": lambda random, length: np.arange(length),
    "falling": lambda random, length: -np.arange(length),
    "tie_at_threshold": lambda random, length: random.integers(0, 5, length),
    "all_equal": lambda random, length: np.full(length, -7.0),
    "all_zero": lambda random, length: np.zeros(length),
    "all_nan": lambda random, length: np.full(length, NAN),
    "all_minus_infinity": lambda random, length: np.full(length, -INF),
    "signed_zeros": chosen([-0.0, 0.0, -1.0, 1.0], [0.8, 0.1, 0.05, 0.05]),
    "subnormals": lambda random, length: random.integers(-900, 900, length) * TINY,
    "infinities": chosen([INF, -INF, 1.0, 2.0], [0.01, 0.5, 0.24, 0.25]),
    "nan_among_minus_infinity": chosen([NAN, -NAN, -INF, 1.0], [0.5, 0.3, 0.19, 0.01]),
    "one_ulp_apart": one_ulp_apart,
    "wide_exponents": wide_exponents,
    "hidden_from_a_stride": hidden_from_a_stride,
    "all_best_at_the_end": all_best_at_the_end,
}


def make(name: str, rows: int, length: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    """[rows, length] scores of a corner, each row drawn anew, rounded to `dtype` (float32 or ml_dtypes.bfloat16)."""
    random = np.random.default_rng([seed, *name.encode()])
    with np.errstate(over="ignore", under="ignore"):
        return np.stack([np.asarray(CORNERS[name](random, length), np.float32).astype(dtype) for _ in range(rows)])


def sampled_positions(length: int, k: int) -> np.ndarray:
    """The positions that Bracket in ffi/src/top_k_kernel.cuh samples."""
    samples = 2048
    while samples < 8192 and samples * k < 32 * length:
        samples *= 2
    index = np.arange(samples + 1, dtype=np.uint64)
    start = (index * np.uint64(length)) // np.uint64(samples)
    draw = ((index[:-1] + np.uint64(1)) * np.uint64(2654435769)) & np.uint64(0xFFFFFFFF)
    return (start[:-1] + ((draw * np.diff(start)) >> np.uint64(32))).astype(np.int64)


def fooled(rows: int, length: int, k: int, sample_is_best: bool) -> np.ndarray:
    """f32[rows, length] whose sample says too much (too few keys lie above the bracket) or too little (too many do)."""
    random = np.random.default_rng(rows)
    score = random.random((rows, length), np.float32)
    at = sampled_positions(length, k)
    score[:, at] += 5 if sample_is_best else -5
    return score


def lengths(rows: int, length: int, k: int) -> np.ndarray:
    """i32[rows] visible lengths, the special ones first: all, none, one, around k, not a multiple of anything."""
    special = [length, 0, 1, k, k - 1, k + 1, length - 1, length // 2 + 3, 2 * k + 5, length - 7]
    return np.clip(np.resize(special, rows), 0, length).astype(np.int32)


def bounds(score: np.ndarray, visible: np.ndarray, rank: int) -> np.ndarray:
    """f32[rows]: the score behind the `rank` best of each row, so that as many exceed it where none ties with it."""
    found = np.full(len(score), np.inf, np.float32)
    for row in range(len(score)):
        seen = score[row, : max(int(visible[row]), 0)].astype(np.float32)
        if len(seen):
            descending = -np.sort(np.where(np.isnan(seen), np.float32(INF), -seen))
            found[row] = descending[min(rank, len(seen) - 1)]
    return found


def marks(score: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """u32[rows, ceil(length / 32)]: bit p mod 32 of word p / 32 says that position p scores above the row's bound."""
    rows, length = score.shape
    above = np.zeros((rows, -(-length // 32) * 32), bool)
    with np.errstate(invalid="ignore"):
        above[:, :length] = score.astype(np.float64) > bound[:, None].astype(np.float64)
    return np.packbits(above, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def answer(score: np.ndarray, visible: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """positions i32[N, k] and the bits u32[N] of kth_score, by sorting every row; -0 as +0, and one NaN."""
    rows, length = score.shape
    positions = np.full((rows, k), NO_POSITION, np.int32)
    kth = np.full(rows, NAN, np.float32)
    for row in range(rows):
        seen = score[row, : min(max(int(visible[row]), 0), length)].astype(np.float64)  # exact, subnormals too
        is_nan = np.isnan(seen)
        ranking = np.lexsort((np.where(is_nan, 0.0, -seen), is_nan))  # stable: ties to the lower position
        chosen = ranking[:k]
        positions[row, : len(chosen)] = np.sort(chosen)
        if len(chosen) and not is_nan[chosen[-1]]:
            kth[row] = np.float32(seen[chosen[-1]]) + np.float32(0)
    return positions, kth.view(np.uint32)


def first_difference(got: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]) -> str | None:
    """None where positions and k-th scores agree bit for bit, else what differs first, in words."""
    for row in range(len(expected[0])):
        if not np.array_equal(got[0][row], expected[0][row]):
            at = int(np.argmax(got[0][row] != expected[0][row]))
            extra = sorted(set(got[0][row].tolist()) - set(expected[0][row].tolist()))[:5]
            missing = sorted(set(expected[0][row].tolist()) - set(got[0][row].tolist()))[:5]
            return (
                f"row {row} entry {at}: position {got[0][row][at]} for {expected[0][row][at]}; "
                f"extra {extra}, missing {missing}"
            )
        if got[1][row] != expected[1][row]:
            return f"row {row}: kth_score bits {int(got[1][row]):#x} for {int(expected[1][row]):#x}"
    return None
