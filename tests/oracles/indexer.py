"""Oracle of the lightning indexer: scores, and the rows that are worth copying ahead.

Knows queries, keys, weights and a threshold. Knows nothing of formats: keys are the numbers they stand for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def scores(query: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """f64[T, N]: score(t, s) = sum over heads of weights[t, g] * max(0, query[t, g] . keys[s]).

    query: [T, G, D]  weights: [T, G], every scale folded in  keys: [N, D]

    A NaN in a dot product stays a NaN.
    """
    query, weights, keys = (np.asarray(array).astype(np.float64) for array in (query, weights, keys))
    result = np.zeros((query.shape[0], keys.shape[0]))
    for t in range(query.shape[0]):
        for s in range(keys.shape[0]):
            for g in range(query.shape[1]):
                dot = 0.0
                for d in range(query.shape[2]):
                    dot += float(query[t, g, d]) * float(keys[s, d])
                result[t, s] += float(weights[t, g]) * (0.0 if dot < 0 else dot)
    return result


class Candidates(NamedTuple):
    """What one request would copy ahead in one layer-step."""

    positions: list[int]  # ascending, at most the cap
    refused: int  # candidates the cap turned away


def candidates_of_one(
    scores: np.ndarray, threshold: float, length_before: int, resident: Sequence[bool] | np.ndarray, cap: int
) -> Candidates:
    """The candidates of one request: the first `cap` of them by position, and how many the cap turned away.

    scores: [T, >= length_before]  resident: [>= length_before], whether a position's row has a slot

    A position is a candidate when it was written before this step, its row is not resident, and at least one
    of the T queries scores it strictly above the threshold. A NaN score is above nothing; nothing is above a
    NaN threshold.
    """
    found = []
    for position in range(length_before):
        passes = False
        for t in range(len(scores)):
            passes = passes or float(scores[t][position]) > float(threshold)
        if passes and not resident[position]:
            found.append(position)
    return Candidates(found[:cap], max(0, len(found) - cap))


def prefetch_candidates(scores, threshold, lengths_before, resident, cap: int) -> list[Candidates]:
    """`candidates_of_one` for each of B requests.

    scores: [B, T, P]  threshold: [B]  lengths_before: [B], 0 for an empty seat  resident: [B, P]
    """
    result = []
    for seat in range(len(lengths_before)):
        result.append(candidates_of_one(scores[seat], threshold[seat], int(lengths_before[seat]), resident[seat], cap))
    return result
