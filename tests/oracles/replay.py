"""Oracle of the replay: one layer's cache over a trace, in loops over requests, rows and steps.

Knows scores, lengths, and what a policy answers. Shares no code with the library; slots, selection and the counting of
hits, prefetches and recalls are the other oracles'. A row of request r at position p is r * capacity + p in one shared
pool; with one pool per request it is p.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.oracles.counting import LayerStep, count
from tests.oracles.pool import OraclePool
from tests.oracles.select import top_k as exact_top_k
from tests.oracles.words import NO_ROW

RESELECT_WINDOW = 16


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one layer; arrays with one entry, or row of scores, a request."""

    score: np.ndarray  # f32[R, P]
    length: Sequence[int]
    active: Sequence[bool]
    starts: Sequence[bool]


@dataclasses.dataclass
class Ways:
    """How a cache is run."""

    top_k: int
    capacity: int
    slots_per_request: int
    threshold: Callable[[], Any]  # a new request's predictor: value(), observe(kth, visible, top_k), reset()
    touch: Callable[[int, bool, int, float], int]
    allowed: Callable[[list[int], list[int]], list[int]]  # (contexts, candidates) -> rows each may copy ahead
    split: bool = False
    is_shared_layer: bool = False
    knows_outcome: bool = False  # the predictor is shown a step's k-th score before it predicts it
    knows_uses: bool = False  # touch is given minus the step of the next use as the score
    told: Callable[[int, int, int], None] = lambda request, staged, useful: None  # of every request, after every step
    began: Callable[[int], None] = lambda request: None  # when a request starts
    attended: Callable[[int, int, list[int]], list[int]] | None = None  # (step, request, exact set) -> attended set
    ahead: Callable[[int, int], list[int]] | None = None  # (step, request) -> positions fetched ahead


def replay(steps: Sequence[Step], ways: Ways) -> list[dict[str, float]]:
    """The counts of every step, summed over requests."""
    requests = len(steps[0].length)
    in_pool = 1 if ways.split else requests
    pools = [OraclePool(in_pool * ways.capacity, in_pool * ways.slots_per_request) for _ in range(requests // in_pool)]
    evicted_at: list[dict[int, int]] = [{} for _ in pools]
    predictors = [ways.threshold() for _ in range(requests)]
    results = []

    for t, step in enumerate(steps):
        for r in range(requests):
            pool, base = _place(r, in_pool, ways.capacity)
            if step.starts[r] or not step.active[r]:
                rows = range(base, base + ways.capacity)
                pools[pool].release(list(rows))
                for row in rows:
                    evicted_at[pool].pop(row, None)
            if step.starts[r]:
                predictors[r].reset()
                ways.began(r)

        exact, kth = [], []
        for r in range(requests):
            visible = step.length[r] + 1 if step.active[r] else 0
            chosen, score = exact_top_k(step.score[r], visible, ways.top_k)
            exact.append(chosen)
            kth.append(score)

        out = dict.fromkeys(("candidates", "refused", "predictions", "above", "missed"), 0)
        out |= dict.fromkeys(("error", "absolute_error", "relative_error", "rank_error"), 0.0)
        staged: list[list[int]] = []
        for r in range(requests):
            visible = step.length[r] + 1 if step.active[r] else 0
            if ways.knows_outcome:
                predictors[r].observe(kth[r], visible, ways.top_k)
            predicted = float(predictors[r].value())
            staged.append(_candidates(step, r, t, predicted, ways, pools, in_pool, out))
            if not ways.is_shared_layer:
                if visible > ways.top_k and math.isfinite(predicted) and math.isfinite(kth[r]):
                    error = float(np.float32(predicted) - np.float32(kth[r]))
                    out["predictions"] += 1
                    found = sum(bool(step.score[r][p] > np.float32(predicted)) for p in range(step.length[r]))
                    out["rank_error"] += abs(found / ways.top_k - 1)
                    out["above"] += predicted > kth[r]
                    out["error"] += error
                    out["absolute_error"] += abs(error)
                    out["relative_error"] += abs(error) / max(abs(kth[r]), float(np.finfo(np.float32).tiny))
                if not ways.knows_outcome:
                    predictors[r].observe(kth[r], visible, ways.top_k)

        if ways.ahead is None and not ways.is_shared_layer:
            caps = ways.allowed([n if a else 0 for n, a in zip(step.length, step.active, strict=True)],
                                [len(found) for found in staged])  # fmt: skip
            out["refused"] = sum(max(0, len(found) - cap) for found, cap in zip(staged, caps, strict=True))
            staged = [found[:cap] for found, cap in zip(staged, caps, strict=True)]

        wanted = [list(chosen) for chosen in exact]
        if ways.attended is not None:
            wanted = [ways.attended(t, r, chosen) if step.active[r] else [] for r, chosen in enumerate(exact)]
            out["missed"] = sum(len(set(exact[r]) - set(wanted[r])) for r in range(requests))
        out |= _require(steps, t, wanted, staged, ways, pools, evicted_at, in_pool)
        results.append(out)
    return results


def _place(request: int, in_pool: int, capacity: int) -> tuple[int, int]:
    """The pool of a request and its first row there."""
    return request // in_pool, request % in_pool * capacity


def _candidates(step, r, t, predicted, ways, pools, in_pool, out) -> list[int]:
    """Positions that request r would copy ahead, were there no cap."""
    pool, base = _place(r, in_pool, ways.capacity)
    old = [p for p in range(step.length[r])] if step.active[r] else []
    if not ways.is_shared_layer:
        out["candidates"] += sum(bool(step.score[r][p] > np.float32(predicted)) for p in old)
    if ways.ahead is not None:
        return [p for p in ways.ahead(t, r) if p in old and base + p not in pools[pool].slot_of]
    if ways.is_shared_layer:
        return []
    return [p for p in old if step.score[r][p] > np.float32(predicted) and base + p not in pools[pool].slot_of]


def _require(steps, t, wanted, staged, ways, pools, evicted_at, in_pool) -> dict[str, int]:
    step, sums = steps[t], dict[str, int]()
    sums |= dict.fromkeys(("hits", "useful", "recalled", "staged", "evicted", "written", "reselected"), 0)
    for number, pool in enumerate(pools):
        members = range(number * in_pool, (number + 1) * in_pool)
        rows = [[_place(r, in_pool, ways.capacity)[1] + p for p in wanted[r]] for r in members]
        copied = [[_place(r, in_pool, ways.capacity)[1] + p for p in staged[r]] for r in members]
        new = [[_place(r, in_pool, ways.capacity)[1] + step.length[r] if step.active[r] else NO_ROW] for r in members]
        if ways.knows_uses:
            scores = [[-_next_use(steps, t, r, p, wanted, ways) for p in wanted[r]] for r in members]
        else:
            scores = [[float(step.score[r][p]) for p in wanted[r]] for r in members]
        counts = count(LayerStep(frozenset(pool.slot_of), rows, new, copied), 1)
        made = pool.require(rows, new, t, ways.touch, scores)
        if ways.knows_uses:
            for r, (row,) in zip(members, new, strict=True):
                if row != NO_ROW:
                    use = -_next_use(steps, t, r, step.length[r], wanted, ways)
                    pool.priority[pool.slot_of[row]] = ways.touch(0, False, t, use)
        fresh = {row for (row,) in new}
        sums["reselected"] += sum(
            row not in fresh and row in evicted_at[number] and t - evicted_at[number][row] <= RESELECT_WINDOW
            for row, _ in made.placed
        )
        evicted_at[number] |= dict.fromkeys((row for row, _ in made.evicted), t)
        sums["hits"] += counts.hit
        sums["useful"] += counts.useful
        sums["recalled"] += counts.recall
        sums["staged"] += sum(len(one) for one in copied)
        sums["evicted"] += len(made.evicted)
        sums["written"] += len(fresh - {NO_ROW})
        for r, one, needed in zip(members, copied, rows, strict=True):
            ways.told(r, len(one), len(set(one) & set(needed)))
    return sums


def _next_use(steps, t, request, position, wanted, ways) -> float:
    """The next step in which the request selects the position, before another request starts in its place."""
    for later in range(t + 1, len(steps)):
        step = steps[later]
        if step.starts[request] or not step.active[request]:
            return math.inf
        if position in exact_top_k(step.score[request], step.length[request] + 1, ways.top_k)[0]:
            return later
    return math.inf
