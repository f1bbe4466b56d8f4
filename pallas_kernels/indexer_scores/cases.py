"""Named inputs of index scores, shared by tests, tuning and benchmarks; NumPy only.

It knows how a page is stored and which corners matter. It knows no implementation.

Most cases hold small integers, with scales and weights that are powers of two or small integers: every product and
sum is then exact in f32, and in the 14 bits in which an FP8 tensor core adds, so their scores must be *equal* to the
oracle's, whatever the implementation. Cases of normal numbers come with a derived tolerance (`Inputs.tolerance`).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import ml_dtypes
import numpy as np

PAGE, WIDTH = 64, 128
E4M3_BITS_ADDED = 13
"""Fraction bits that survive when an FP8 tensor core aligns 32 products and the sum so far to the largest of them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs.

    keys        stored format
    visible     per seat, per query row: how many positions it sees
    pages       of each seat's table
    heads       index heads
    values      "exact" small integers | "normal" | "large" near the format's largest | "small" at the smallest scale
    pool        pages in the pool; the used ones are the last of them, in shuffled order
    """

    name: str
    keys: Literal["fp8", "bf16"]
    visible: tuple[tuple[int, ...], ...]
    pages: int = 4
    heads: int = 8
    values: Literal["exact", "normal", "large", "small"] = "exact"
    pool: int | None = None

    @property
    def seats(self) -> int:
        return len(self.visible)

    @property
    def rows(self) -> int:
        return len(self.visible[0])


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of `indexer_scores`, and the keys they stand for.

    keys, scales   f64[B, 64 N, WIDTH] codes and f64[B, 64 N] scales, decoded: what an oracle multiplies
    """

    query: np.ndarray
    weights: np.ndarray
    pages: np.ndarray
    page_numbers: np.ndarray
    visible: np.ndarray
    keys: np.ndarray
    scales: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.query, self.weights, self.pages, self.page_numbers, self.visible

    def oracle(self) -> np.ndarray:
        """f64[B, T, 64 N], one seat and query row at a time."""
        scores = np.full((*self.visible.shape, self.keys.shape[1]), -np.inf)
        for seat, row in np.ndindex(self.visible.shape):
            seen = self.visible[seat, row]
            for head in range(self.query.shape[2]):
                product = self.keys[seat, :seen] @ self.query[seat, row, head].astype(np.float64)
                added = float(self.weights[seat, row, head]) * np.maximum(product, 0.0)
                scores[seat, row, :seen] = added + (scores[seat, row, :seen] if head else 0.0)
            scores[seat, row, :seen] *= self.scales[seat, :seen]
        return scores

    def judge(self, scores: np.ndarray, is_exact: bool, tensor_core: bool) -> float:
        """AssertionError unless `scores` are right: what is hidden, exactly; then the values, equal where they can be.

        Returns the largest error over what is allowed.
        """
        scores, wanted = np.asarray(scores, np.float64), self.oracle()
        np.testing.assert_array_equal(np.isneginf(scores), np.isneginf(wanted))
        seen = ~np.isneginf(wanted)
        if is_exact:
            np.testing.assert_array_equal(scores[seen], wanted[seen])
            return 0.0
        share = np.abs(scores[seen] - wanted[seen]) / self.tolerance(tensor_core)[seen]
        assert (share <= 1).all(), f"an error is {np.max(share):.3f} of what is allowed"
        return float(np.max(share))

    def tolerance(self, tensor_core: bool) -> np.ndarray:
        """f64[B, T, 64 N]: how far a right f32 score may be from the oracle.

        A product of two stored values is exact in f32. Adding 128 of them loses at most 128 * 2^-24 of the sum of
        magnitudes A (2^-23 where a tensor core truncates). An FP8 tensor core adds 32 products and the sum so far at
        a time, each truncated to 2^-13 of the largest: 4 * 33 * 2^-13 * M with M the largest magnitude that is
        added. M is at most the largest of |product| and of the partial sums, here bounded by sqrt(A * the largest
        product), which is at least the partial sums' size for the random signs of these cases. The sum over heads
        loses (heads + 2) * 2^-24 of its own sum of magnitudes.
        """
        magnitudes = np.zeros((*self.visible.shape, self.keys.shape[1]))
        lost = np.zeros_like(magnitudes)
        is_fp8 = self.pages.dtype == np.uint8
        for seat, row in np.ndindex(self.visible.shape):
            keys = np.abs(self.keys[seat])
            for head in range(self.query.shape[2]):
                query = np.abs(self.query[seat, row, head].astype(np.float64))
                weight = abs(float(self.weights[seat, row, head]))
                total = keys @ query
                largest = (keys * query).max(axis=-1)
                if tensor_core and is_fp8:
                    error = 4 * 33 * 2.0**-E4M3_BITS_ADDED * np.sqrt(total * largest)
                else:
                    error = WIDTH * 2.0 ** (-23 if tensor_core else -24) * total
                magnitudes[seat, row] += weight * total
                lost[seat, row] += weight * error
        return (lost + (self.query.shape[2] + 2) * 2.0**-24 * magnitudes) * self.scales[:, None]


CORNERS = (
    Case("zero_length", "fp8", ((0,), (130,))),
    Case("length_one", "fp8", ((1,), (1,))),
    Case("length_not_multiple_of_page", "fp8", ((100,), (193,))),
    Case("all_padded", "fp8", ((0,), (0,))),
    Case("neighbours_differ", "fp8", ((256,), (256,))),
    Case("large_magnitude", "fp8", ((130,), (256,)), values="large"),
    Case("smallest_scale", "fp8", ((130,), (256,)), values="small"),
    Case("length_not_multiple_of_page", "bf16", ((100,), (193,))),
    Case("neighbours_differ", "bf16", ((256,), (256,))),
    Case("large_magnitude", "bf16", ((130,), (256,)), values="large"),
    Case("rows_differ", "fp8", ((64, 65, 66), (0, 1, 256)), heads=16),
    Case("rows_differ", "bf16", ((64, 65, 66, 67), (253, 254, 255, 256)), heads=16),
    Case("four_heads", "fp8", ((150,),), heads=4),  # padded to the eight columns of the narrowest wgmma
    Case("normal", "fp8", ((190, 191), (256, 100)), heads=64, values="normal"),
    Case("normal", "bf16", ((190, 191), (256, 100)), heads=64, values="normal"),
)
"""Small enough for the interpreter, and of as few shapes as will do: it compiles once for each."""

FAR = (
    Case("page_id_above_65536", "fp8", ((1000,), (1024,)), pages=16, heads=64, pool=65_600),
    Case("page_id_above_65536", "bf16", ((1000,), (1024,)), pages=16, heads=64, pool=65_600),
    Case("offset_above_4_gib", "fp8", ((1024,),), pages=16, pool=520_000),
    Case("many_tiles", "fp8", tuple((9000 + 37 * seat,) for seat in range(12)), pages=150, heads=64),
    Case("many_tiles", "fp8", tuple((900 * seat, 901 * seat, 902 * seat, 7) for seat in range(9)), pages=131, heads=64),
    Case("many_tiles", "bf16", tuple((5000 - 613 * (seat % 8),) for seat in range(31)), pages=79, heads=32),
    Case("many_tiles_normal", "fp8", tuple((9000 + 37 * seat,) for seat in range(12)), 150, 64, "normal"),
)
"""For the GPU: row ids above 4 million, bytes beyond 32 bits, every stage and buffer used many times."""


def identifier(case: Case) -> str:
    return f"{case.name}-{case.keys}-{case.rows}x{case.heads}"


def make(case: Case, seed: int = 0) -> Inputs:
    """The case's arrays; the same for the same seed."""
    random = np.random.default_rng(seed)
    is_fp8 = case.keys == "fp8"
    stored = ml_dtypes.float8_e4m3fn if is_fp8 else ml_dtypes.bfloat16
    largest = 448.0 if is_fp8 else 2.0**40
    positions = case.pages * PAGE

    def draw(*shape: int) -> np.ndarray:
        if case.values == "exact":
            return random.integers(-2, 3, shape).astype(stored)
        values = random.standard_normal(shape, np.float32)
        if case.values == "large":
            values = np.where(random.random(shape) < 0.1, np.sign(values) * largest, values)
        return values.astype(stored)

    keys = draw(case.seats, positions, WIDTH)
    query = draw(case.seats, case.rows, case.heads, WIDTH).astype(np.float32)
    if case.values == "exact":
        weights = random.integers(-4, 5, (case.seats, case.rows, case.heads)).astype(np.float32)
        scales = 2.0 ** random.integers(-3, 4, (case.seats, positions))
    else:
        weights = random.standard_normal((case.seats, case.rows, case.heads), np.float32)
        scales = 2.0 ** random.integers(-10, 3, (case.seats, positions))
    if case.values == "small":
        scales = np.full_like(scales, 2.0**-22)  # 2^ceil(log2(1e-4 / 448)): of a key of zeros, or next to it
    scales = scales if is_fp8 else np.ones_like(scales)

    used = case.seats * case.pages
    pool = case.pool or used + 3
    numbers = (pool - 1 - random.permutation(used)).reshape(case.seats, case.pages).astype(np.int32)
    if is_fp8:
        pages = np.zeros((pool, PAGE * (WIDTH + 4)), np.uint8)
        pages[: min(pool, 2)] = 0x7F  # pages that nobody may see are NaN
        pages[numbers, : PAGE * WIDTH] = keys.view(np.uint8).reshape(case.seats, case.pages, -1)
        of_page = scales.astype(np.float32).reshape(case.seats, case.pages, PAGE)
        pages[numbers, PAGE * WIDTH :] = of_page.view(np.uint8)
    else:
        pages = np.zeros((pool, PAGE, WIDTH), ml_dtypes.bfloat16)
        pages[: min(pool, 2)] = np.nan
        pages[numbers] = keys.reshape(case.seats, case.pages, PAGE, WIDTH)
    visible = np.array(case.visible, np.int32)
    for seat in range(case.seats):  # pages of which nothing is visible have no number
        numbers[seat, -(-int(visible[seat].max()) // PAGE) :] = (-1, 2**31 - 1)[seat % 2]
    return Inputs(query, weights, pages, numbers, visible, keys.astype(np.float64), scales)
