"""Oracle of the threshold policies: the predicted k-th score of one request in one layer.

Knows one number and its history. Knows nothing of scores, rows or staging. All arithmetic is in float32, one
rounding per operation, as the formulas below are written.
"""

import math

import numpy as np

NO_HISTORY = np.float32(math.inf)
"""The prediction before anything was observed: nothing scores above it, so nothing is prefetched."""


class Fixed:
    """The same prediction at every step, history or not."""

    def __init__(self, value: float):
        self._value = np.float32(value)

    def value(self) -> np.float32:
        return self._value

    def observe(self, kth_score: float, visible: int, top_k: int) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""


class Never(Fixed):
    """Nothing is ever predicted to be selected."""

    def __init__(self):
        super().__init__(math.inf)


class Always(Fixed):
    """Everything that scores above -inf is predicted to be selected."""

    def __init__(self):
        super().__init__(-math.inf)


class Last:
    """The k-th score of the last step that had one."""

    def __init__(self):
        self.reset()

    def value(self) -> np.float32:
        """+inf without history."""
        return self._value

    def observe(self, kth_score: float, visible: int, top_k: int) -> None:
        """Learn the true k-th score of one query that saw `visible` positions.

        Nothing changes while all visible positions are selected (visible <= top_k), or when the score is NaN.
        With several queries in a step, call this once per query, in order.
        """
        if visible <= top_k or math.isnan(kth_score):
            return
        self._value = self._next(np.float32(kth_score))

    def reset(self) -> None:
        """The seat goes to a new request, which has no history."""
        self._value = NO_HISTORY

    def _next(self, kth_score: np.float32) -> np.float32:
        return kth_score


class EMA(Last):
    """Moving average: alpha * k-th score + (1 - alpha) * prediction; the first k-th score as it is.

    An infinite prediction is no history: it could never become finite again by averaging, so the next k-th score
    is taken as it is.
    """

    def __init__(self, alpha: float = 0.5):
        super().__init__()
        self._alpha = np.float32(alpha)

    def _next(self, kth_score: np.float32) -> np.float32:
        if not math.isfinite(self._value):
            return kth_score
        with np.errstate(invalid="ignore", over="ignore"):
            return self._alpha * kth_score + (np.float32(1) - self._alpha) * self._value
