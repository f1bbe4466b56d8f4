"""Named inputs of sparse MLA, shared by tests, tuning and benchmarks; NumPy only.

It knows how a record is stored and which corners matter. It knows no implementation.

Queries are bf16 numbers, so that no implementation rounds them. Rows of the pool that no list names are NaN, row 0
included where it is free: a place that is not listed, or a row that is not its own, would show.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import ml_dtypes
import numpy as np

LATENT, WIDTH, TOGETHER = 512, 576, 128
SCALE = 192**-0.5  # of the released models: 128 + 64 values a head before absorption


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of inputs.

    record_format   stored format
    listed          per seat, per query row: how many slots are listed
    places          K of the lists
    heads           query heads
    values          "normal" | "equal": queries of zeros, so every listed row weighs the same, and small integers |
                    "large": some values near the format's largest | "small": the smallest scale that is stored
    slots           "apart": every list has rows of its own | "shared": lists draw from the same rows, with repetition |
                    "ends": the first and the last slot of the pool are listed
    pool            rows of the pool
    """

    name: str
    record_format: Literal["bf16", "fp8"]
    listed: tuple[tuple[int, ...], ...]
    places: int = 128
    heads: int = 8
    values: Literal["normal", "equal", "large", "small"] = "normal"
    slots: Literal["apart", "shared", "ends"] = "apart"
    pool: int | None = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of `sparse_mla`, and the row that each used slot holds: f64[576]."""

    query: np.ndarray
    records: np.ndarray
    slots: np.ndarray
    rows: dict[int, np.ndarray]
    record_format: str

    @property
    def arguments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.query, self.records, self.slots

    def permuted(self, seed: int = 1) -> Inputs:
        """The same rows in other slots."""
        moved = np.random.default_rng(seed).permutation(self.records.shape[0])
        records = np.empty_like(self.records)
        records[moved] = self.records
        rows = {int(moved[slot]): row for slot, row in self.rows.items()}
        slots = np.where(self.slots >= 0, moved[np.maximum(self.slots, 0)], -1).astype(np.int32)
        return dataclasses.replace(self, records=records, slots=slots, rows=rows)

    def judge(self, out: Any, lse: Any, tensor_core: bool) -> float:
        """AssertionError unless both are right: what is empty, exactly; then the values, within what is derived here.

        `tensor_core`: rows and weights are rounded to bf16, as `mosaic_gpu` does. Returns the largest error over what
        is allowed.
        """
        out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
        is_empty = (self.slots < 0).all(axis=-1)
        assert (out[is_empty] == 0).all(), "an empty list must give zeros"
        np.testing.assert_array_equal(np.isneginf(lse), np.broadcast_to(is_empty[..., None], lse.shape))
        assert np.isfinite(out).all(), "a row that is not listed has reached the values"
        worst = 0.0
        for seat, row in np.argwhere(~is_empty):
            wanted, wanted_lse, allowed, allowed_lse = self.oracle(seat, row, tensor_core)
            share = max(
                float(np.max(np.abs(out[seat, row] - wanted) / allowed)),
                float(np.max(np.abs(lse[seat, row] - wanted_lse) / allowed_lse)),
            )
            assert share <= 1, f"seat {seat}, query row {row}: an error is {share:.3f} of what is allowed"
            worst = max(worst, share)
        return worst

    def oracle(self, seat: int, row: int, tensor_core: bool) -> tuple[np.ndarray, ...]:
        """out f64[H, 512], lse f64[H], and how far right f32 numbers may be from each.

        A logit adds 576 products that are exact in f32. 16 of them at a time by a tensor core, which truncates: at most
        (36 + 16) * 2^-23 of the sum of magnitudes; one by one in some order: 576 * 2^-24. Scaling, the subtraction of
        the peak and the exponential each lose 2^-23 of the logit, two in the last place of the weight. An error d of
        a logit changes its weight by at most exp(d) - 1 of it, the sum of values by as much of that row's, and the mass
        too; twice that, for what is left out. Weights rounded to bf16 lose 2^-8 of the mean magnitude, adding K of them
        (K / 16 steps, a rescale each tile, a combine) K * 2^-24 and a few.
        """
        listed = self.slots[seat, row][self.slots[seat, row] >= 0]
        rows = np.stack([self.rows[slot] for slot in listed.tolist()])
        if tensor_core and self.record_format == "fp8":
            rows = rows.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        query = self.query[seat, row].astype(np.float64)
        logits = SCALE * (query @ rows.T)
        peak = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - peak)
        mass = weights.sum(axis=-1, keepdims=True)
        magnitude = SCALE * (np.abs(query) @ np.abs(rows).T)
        lost = (52 * 2.0**-23 if tensor_core else WIDTH * 2.0**-24) * magnitude + 3 * 2.0**-23 * np.abs(logits)
        values = np.abs(rows[:, :LATENT])
        mean = weights @ values / mass
        changed = weights * np.expm1(np.minimum(lost, 700.0)) / mass
        moved = changed.sum(axis=-1, keepdims=True)
        added = (len(listed) + 64) * 2.0**-24
        rounded = 2.0**-8 if tensor_core else 0.0
        allowed = mean * (rounded + added + 2.0**-21) + 2 * (changed @ values + moved * mean) + 1e-30
        allowed_lse = 2 * moved[:, 0] + added + 2.0**-22 * (1 + np.abs(peak[:, 0]))
        return weights @ rows[:, :LATENT] / mass, (peak + np.log(mass))[:, 0], allowed, allowed_lse


CORNERS = (
    Case("k_zero", "bf16", ((0,), (70,))),
    Case("k_zero", "fp8", ((0,), (70,))),
    Case("k_one", "bf16", ((1,), (65,))),
    Case("k_one", "fp8", ((1,), (65,))),
    Case("k_not_filled", "bf16", ((63, 100),)),
    Case("k_not_filled", "fp8", ((63, 100),)),
    Case("first_and_last_slot", "bf16", ((20,),), slots="ends", places=64),
    Case("first_and_last_slot", "fp8", ((20,),), slots="ends", places=64),
    Case("same_slot_twice", "fp8", ((50,), (40,)), slots="shared", places=64),
    Case("neighbours_differ", "bf16", ((64, 30), (10, 64)), heads=70, places=64),
    Case("neighbours_differ", "fp8", ((64, 30), (10, 64)), heads=70, places=64),
    Case("large_magnitude", "bf16", ((90,),), values="large"),
    Case("large_magnitude", "fp8", ((90,),), values="large"),
    Case("all_equal_logits", "bf16", ((96,),), values="equal"),
    Case("all_equal_logits", "fp8", ((96,),), values="equal"),
    Case("smallest_scale", "fp8", ((64,),), values="small", places=64),
)
"""Small enough for the interpreter."""

FULL = (
    Case("full", "bf16", ((2048,), (2047,), (1,)), places=2048, heads=128),
    Case("full", "fp8", ((2048,), (2047,), (1,)), places=2048, heads=128),
    Case("verify", "bf16", ((2048, 1000, 64, 65), (0, 2048, 1984, 1985)), places=2048, heads=128, slots="shared"),
    Case("verify", "fp8", ((2048, 1000, 64, 65), (0, 2048, 1984, 1985)), places=2048, heads=128, slots="shared"),
    Case("few_heads", "bf16", ((1500,), (2048,)), places=2048, heads=16),
    Case("few_heads", "fp8", ((1500,), (2048,)), places=2048, heads=4),
    Case("odd_places", "fp8", ((577,), (600,)), places=600, heads=64),
    Case("many", "bf16", tuple((2048 - seat,) for seat in range(24)), places=2048, heads=128, slots="shared"),
    Case("many", "fp8", tuple((2048 - seat,) for seat in range(24)), places=2048, heads=128, slots="shared"),
    Case("offset_above_4_gib", "bf16", ((600,),), places=640, heads=64, slots="ends", pool=3_800_000),
    Case("offset_above_4_gib", "fp8", ((600,),), places=640, heads=64, slots="ends", pool=6_600_000),
)
"""For the GPU: whole lists, every buffer used again and again, bytes beyond 32 bits."""


def identifier(case: Case) -> str:
    return f"{case.name}-{case.record_format}-{len(case.listed[0])}x{case.heads}"


def make(case: Case, seed: int = 0) -> Inputs:
    """The case's arrays; the same for the same seed."""
    random = np.random.default_rng(seed)
    seats, rows_of_seat = len(case.listed), len(case.listed[0])
    used = (
        sum(sum(row) for row in case.listed) if case.slots == "apart" else max(max(row) for row in case.listed) // 2 + 2
    )
    pool = case.pool or used + 5
    # The used rows of the pool: the last ones, shuffled, so that slot 0 stays NaN unless it is asked for.
    numbers = pool - 1 - random.permutation(used)
    if case.slots == "ends":
        numbers[:2] = 0, pool - 1
        numbers = np.unique(numbers)
        random.shuffle(numbers)
    slots = np.full((seats, rows_of_seat, case.places), -1, np.int32)
    taken = 0
    for seat, row in np.ndindex(seats, rows_of_seat):
        count = case.listed[seat][row]
        if case.slots == "apart":
            slots[seat, row, :count] = numbers[taken : taken + count]
            taken += count
        else:
            slots[seat, row, :count] = random.choice(numbers, count)
            if case.slots == "ends" and count >= 2:
                slots[seat, row, [0, count - 1]] = 0, pool - 1

    query = random.standard_normal((seats, rows_of_seat, case.heads, WIDTH), np.float32)
    query = query.astype(ml_dtypes.bfloat16).astype(np.float32)
    if case.values == "equal":
        query[:] = 0
    encode = _fp8 if case.record_format == "fp8" else _bf16
    records, values = encode(case, random, len(numbers))
    stored = np.zeros((pool, *records.shape[1:]), records.dtype)
    if case.pool is None:
        stored.view(np.uint8)[:] = 0x7F if case.record_format == "fp8" else 0xFF  # NaN in every field
    stored[numbers] = records
    return Inputs(query, stored, slots, dict(zip(numbers.tolist(), values, strict=True)), case.record_format)


def _bf16(case: Case, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    values = _draw(case, random, count, WIDTH, 2.0**12).astype(ml_dtypes.bfloat16)
    return values.reshape(count, 3, 192), values.astype(np.float64)


def _fp8(case: Case, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    codes = _draw(case, random, count, LATENT, 448.0).astype(ml_dtypes.float8_e4m3fn)
    rope = _draw(case, random, count, WIDTH - LATENT, 2.0**12).astype(ml_dtypes.bfloat16)
    scales = np.exp2(random.uniform(-3, 3, (count, LATENT // TOGETHER))).astype(np.float32)
    if case.values == "small":
        scales[:] = np.float32(1e-4) / np.float32(448)
    if case.values == "equal":
        scales[:] = np.exp2(np.round(np.log2(scales)))
    record = np.concatenate([codes.view(np.uint8), scales.view(np.uint8), rope.view(np.uint8)], axis=1)
    latent = codes.astype(np.float64).reshape(count, -1, TOGETHER) * scales[..., None].astype(np.float64)
    values = np.concatenate([latent.reshape(count, -1), rope.astype(np.float64)], axis=1)
    return np.ascontiguousarray(record).view(np.uint32), values


def _draw(case: Case, random: np.random.Generator, count: int, width: int, largest: float) -> np.ndarray:
    if case.values == "equal":
        return random.integers(-3, 4, (count, width)).astype(np.float32)
    values = random.standard_normal((count, width), np.float32)
    if case.values == "large":
        values = np.where(random.random((count, width)) < 0.1, np.sign(values) * np.float32(largest), values)
    return values
