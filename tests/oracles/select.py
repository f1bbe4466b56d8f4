"""Oracle of the selection: the exact top-k of one query, under the one order of scores.

Knows scores and positions. Knows nothing of where the rows are.

The order, best first: greater score; among equal scores (-0 equals +0) the lower position; a visible NaN
after every visible number, -inf included, and among NaNs the lower position. Positions at or beyond the
length are not visible and never selected, whatever their score.
"""

import math
from collections.abc import Sequence

import numpy as np

from tests.oracles.words import NO_POSITION


def ranking(scores: Sequence[float] | np.ndarray, length: int) -> list[int]:
    """All visible positions, best first."""

    def place(position: int) -> tuple[bool, float, int]:
        score = float(scores[position])
        return (True, 0.0, position) if math.isnan(score) else (False, -score, position)

    return sorted(range(length), key=place)


def top_k(scores: Sequence[float] | np.ndarray, length: int, k: int) -> tuple[list[int], float]:
    """The selected positions in ascending order, and the score of the worst of them.

    With at most k visible positions all are selected. The score is the k-th best when there are at least k,
    NaN when the k-th best is a NaN or nothing is visible.
    """
    chosen = ranking(scores, length)[:k]
    return sorted(chosen), float(scores[chosen[-1]]) if chosen else math.nan


def kth_gap(scores: Sequence[float] | np.ndarray, length: int, k: int) -> float:
    """How far the k-th best score stands above the next: how much rounding the selected set survives.

    +inf where all visible positions are selected; NaN where the two are not both numbers with a difference.
    """
    best_first = ranking(scores, length)
    if length <= k:
        return math.inf
    with np.errstate(invalid="ignore"):
        return float(np.float64(scores[best_first[k - 1]]) - np.float64(scores[best_first[k]]))


def padded(positions: Sequence[int], k: int) -> np.ndarray:
    """i32[k]: the list with NO_POSITION at its end."""
    return np.array([*positions, *[NO_POSITION] * (k - len(positions))], np.int32)
