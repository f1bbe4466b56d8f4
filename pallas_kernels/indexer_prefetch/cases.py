"""Named inputs of index scores with prefetch, shared by tests and benchmarks, and the judge of a result; NumPy only.

It knows the contract as loops and which corners matter. It knows no implementation. Keys, queries and pages are those
of `indexer_scores.cases`; what is added here is who is resident, what passes, and how much may be staged.

Every host row of every layer holds other bytes, so a record from a wrong place shows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.indexer_scores import cases as scores

PAGE, NO_ROW, NO_SLOT = scores.PAGE, -1, -1
LAYERS = 3
NAN, INFINITE = float("nan"), float("inf")
RECORDS = {"fp8": (164,), "bf16": (288,), "words": (3,), "pairs": (2, 5)}
"""Record shapes in u32 words: 656 and 1152 bytes, and two that move 4 and 8 bytes at a time. No kernel looks inside."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs.

    scored      keys, query, pages and what each query row sees
    threshold   per seat: a quantile of its visible scores, or NaN or an infinity as it is
    cap         per seat
    staging     places of a seat
    resident    share of the host rows that have a slot
    shared      pages at the beginning of seat 1 that are seat 0's too
    records     a key of RECORDS
    """

    scored: scores.Case
    threshold: tuple[float, ...]
    cap: tuple[int, ...]
    staging: int = 256
    resident: float = 0.5
    shared: int = 0
    records: str = "fp8"

    @property
    def name(self) -> str:
        return self.scored.name


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of `indexer_prefetch`, in its order."""

    scored: tuple[np.ndarray, ...]  # query, weights, pages, page_numbers, visible
    threshold: np.ndarray
    lengths: np.ndarray
    cap: np.ndarray
    slot_of: np.ndarray
    host_pool: np.ndarray
    layer: np.ndarray
    staging: int

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return *self.scored, self.threshold, self.lengths, self.cap, self.slot_of, self.host_pool, self.layer

    def candidates(self, seat: int, found: np.ndarray) -> list[int]:
        """Host rows that may be staged, by the scores f32[T, P] that were `found`."""
        rows = []
        for position in range(int(self.lengths[seat])):
            page = int(self.scored[3][seat, position // PAGE])
            row = page * PAGE + position % PAGE
            passes = any(score > self.threshold[seat] for score in found[:, position])
            if passes and 0 <= row < len(self.slot_of) and self.slot_of[row] == NO_SLOT:
                rows.append(row)
        return rows

    def judge(self, result, wanted_scores: np.ndarray) -> list[int]:
        """AssertionError unless `result`, a Prefetched, keeps its promises; wanted_scores are those of indexer_scores.

        Returns the number of candidates of each seat.
        """
        found, rows, records, count, refused = (np.asarray(part) for part in result[:5])
        np.testing.assert_array_equal(found.view(np.uint32), np.asarray(wanted_scores).view(np.uint32))
        totals = []
        for seat in range(len(self.cap)):
            candidates = self.candidates(seat, found[seat])
            staged = min(max(int(self.cap[seat]), 0), self.staging, len(candidates))
            assert (count[seat], refused[seat]) == (staged, len(candidates) - staged), f"counts of seat {seat}"
            listed = rows[seat, :staged].tolist()
            assert len(set(listed)) == staged and set(listed) <= set(candidates), f"rows of seat {seat}"
            assert (rows[seat, staged:] == NO_ROW).all(), f"padding of seat {seat}"
            for place, row in enumerate(listed):
                np.testing.assert_array_equal(records[seat, place], self.host_pool[int(self.layer), row])
            totals.append(len(candidates))
        return totals


def _two(name: str, *visible: int, pages: int = 5, **others) -> scores.Case:
    return scores.Case(name, "fp8", tuple((seen,) for seen in visible), pages=pages, **others)


SOME = (0.8, 0.6)
CORNERS = (
    Case(_two("some", 256, 200), SOME, (256, 256)),
    Case(_two("list_overflows", 256, 200), (-INFINITE, 0.3), (8, 8)),
    Case(_two("cap_zero_and_one", 256, 200), SOME, (0, 1)),
    Case(_two("cap_outside_staging", 310, 200), (-INFINITE, 0.3), (1000, -5), resident=0.0),
    Case(_two("threshold_nan_and_infinite", 256, 200), (NAN, INFINITE), (8, 8)),
    Case(_two("everything_passes", 256, 200), (-INFINITE, -INFINITE), (256, 256)),
    Case(_two("staging_exactly_full", 257, 256), (-INFINITE, -INFINITE), (256, 256), resident=0.0),
    Case(_two("nobody_is_absent", 256, 200), (-INFINITE, 0.3), (8, 8), resident=1.0),
    Case(_two("idle_seat", 0, 130), (-INFINITE, 0.5), (8, 8)),
    Case(_two("length_zero_and_one", 1, 2), (-INFINITE, -INFINITE), (8, 8), resident=0.0),
    Case(_two("shared_prefix", 256, 256), (0.7, 0.7), (64, 64), resident=0.2, shared=3),
    Case(scores.Case("rows_differ", "fp8", ((64, 65, 66), (0, 1, 256)), heads=16), SOME, (8, 8), staging=64),
)
"""Small enough for the interpreter, and of as few shapes as will do: it compiles once for each."""

FAR = (
    Case(scores.Case("bf16", "bf16", ((100,), (256,))), SOME, (64, 3), staging=64, records="bf16"),
    Case(_two("record_of_words", 256, 200), SOME, (8, 8), records="words"),
    Case(_two("record_of_pairs", 256, 200), SOME, (8, 8), records="pairs"),
    Case(_two("one_long_seat", 30_000, pages=469, heads=64), (0.98,), (512,), 512),
    Case(_two("many_seats", *(450 * seat for seat in range(17)), pages=120, heads=64), (0.9,) * 17, (64,) * 17, 64),
    Case(_two("all_refused", *((5000,) * 12), pages=80, heads=64), (-INFINITE,) * 12, (7,) * 12, 64, resident=0.1),
    Case(_two("prefix_of_two", 9000, 9600, pages=150, heads=64), (0.9, 0.95), (999, 999), 999, 0.3, shared=140),
    Case(
        scores.Case("verify", "fp8", tuple((4000 + n, 4001 + n, 4002 + n, 4003 + n) for n in range(6)), 63, 64),
        *((0.9,) * 6, (256,) * 6, 256),
        records="bf16",
    ),
    Case(scores.Case("many_seats", "bf16", tuple((5000 - 613 * (n % 8),) for n in range(31)), 79, 32), SOME[:1] * 31,
         tuple(range(31)), 40, records="bf16"),
)  # fmt: skip
"""For the GPU: many tiles a block, lists that overflow from all sides at once."""


def identifier(case: Case) -> str:
    return f"{case.name}-{case.scored.keys}-{case.scored.rows}x{case.scored.heads}-{case.records}"


def make(case: Case, seed: int = 0) -> Inputs:
    """The case's arrays; the same for the same seed."""
    random = np.random.default_rng(seed)
    made = scores.make(case.scored, seed)
    page_numbers = made.page_numbers.copy()
    if case.shared:
        page_numbers[1, : case.shared] = page_numbers[0, : case.shared]
    oracle = made.oracle()
    threshold = [
        np.quantile(seen, wanted) if 0 <= wanted <= 1 and (seen := scored[np.isfinite(scored)]).size else wanted
        for wanted, scored in zip(case.threshold, oracle, strict=True)
    ]
    host_rows = made.pages.shape[0] * PAGE
    words = np.arange(int(np.prod(RECORDS[case.records])), dtype=np.uint32).reshape(RECORDS[case.records])
    numbers = np.arange(LAYERS * host_rows, dtype=np.uint32).reshape(LAYERS, host_rows, *([1] * words.ndim))
    slot_of = np.where(random.random(host_rows) < case.resident, random.integers(0, 1000, host_rows), NO_SLOT)
    return Inputs(
        scored=(made.query, made.weights, made.pages, page_numbers, made.visible),
        threshold=np.array(threshold, np.float32),
        lengths=np.maximum(made.visible[:, -1] - case.scored.rows, 0).astype(np.int32),
        cap=np.array(case.cap, np.int32),
        slot_of=slot_of.astype(np.int32),
        host_pool=numbers * np.uint32(0x9E3779B1) + words * np.uint32(0x85EBCA6B),
        layer=np.array(LAYERS - 1, np.int32),
        staging=case.staging,
    )
