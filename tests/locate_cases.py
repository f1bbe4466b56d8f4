"""Situations for `locate`: tables, lists, maps and pools that a step may meet, made from a seed. NumPy only."""

import dataclasses
from typing import Any

import numpy as np

PAGE = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and shares; what lies where is drawn."""

    seats: int = 2
    tokens: int = 1
    listed: int = 24
    pages: int = 3  # of a seat
    device_slots: int = 200
    staging: int = 8
    layers: int = 3
    layer: int = 1
    hit: float = 0.6  # share of the written rows that have a slot
    staged: float = 0.5  # share of the missing listed rows that are staged
    shared_pages: int = 0  # of every seat, the same for all
    words: int = 4  # 32-bit words of a record
    full_lists: bool = False  # else lists end in padding of drawn length
    idle: bool = False  # seat 0 holds no request
    is_odd: bool = False  # slots and positions just outside, and seat 0 shorter than the pages it shares


CASES = {
    "plain": Case(),
    "no_slots": Case(device_slots=0, hit=0.0),
    "nothing_missing": Case(hit=1.0, device_slots=400),
    "all_missing": Case(hit=0.0, full_lists=True),
    "no_staging": Case(staging=0),
    "all_staged": Case(hit=0.0, staging=48, staged=1.0),
    "staging_beyond_a_warp": Case(hit=0.0, staging=160, staged=0.9, listed=150),
    "shared_pages": Case(seats=4, shared_pages=2, hit=0.3),
    "sixteen_forks": Case(seats=16, pages=5, shared_pages=3, hit=0.2, device_slots=64),
    "several_tokens": Case(tokens=3, hit=0.4),
    "several_tokens_shared": Case(seats=3, tokens=4, shared_pages=1, hit=0.2),
    "sixty_four_tokens": Case(seats=1, tokens=64, pages=4, hit=0.5, listed=40),
    "list_not_a_multiple_of_a_warp": Case(listed=37, full_lists=True, hit=0.1),
    "list_of_one": Case(listed=1, hit=0.0),
    "first_layer": Case(layer=0),
    "last_layer": Case(layer=2),
    "fp8_record": Case(words=164, hit=0.3),
    "bf16_record": Case(words=288, hit=0.3, tokens=2),
    "odd_record": Case(words=5, hit=0.3),
    "idle_seat": Case(idle=True),
    "numbers_just_outside": Case(seats=3, tokens=2, shared_pages=2, hit=0.4, is_odd=True, full_lists=True),
    "many_lists": Case(seats=40, listed=420, pages=9, device_slots=6000, hit=0.7, staging=64),
}


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    """Operands of `locate` by name. Every record in every array is different, so that a wrong source shows."""
    draw = np.random.default_rng(seed)
    total_pages = case.seats * case.pages + 2
    order = draw.permutation(total_pages).astype(np.int32)
    table = order[: case.seats * case.pages].reshape(case.seats, case.pages).copy()
    table[:, : case.shared_pages] = table[0, : case.shared_pages]
    lengths = draw.integers(case.shared_pages * PAGE + 1, case.pages * PAGE - case.tokens, case.seats).astype(np.int32)
    if case.is_odd:
        lengths[0] = case.shared_pages * PAGE - 40  # its new positions are old ones of the others
    for seat, length in enumerate(lengths):  # pages that the request has not reached
        table[seat, -(-(int(length) + case.tokens) // PAGE) :] = -1
    if case.idle:
        table[0], lengths[0] = -1, 0
    count = np.bincount(table[table >= 0], minlength=total_pages).astype(np.int32)

    host_rows = total_pages * PAGE
    slot_of = np.full((case.layers, host_rows), -1, np.int32)
    for layer in range(case.layers):
        chosen = draw.permutation(host_rows)[: min(case.device_slots, int(round(case.hit * host_rows)))]
        slot_of[layer, chosen] = draw.permutation(case.device_slots)[: len(chosen)]
    if case.hit == 1.0:  # every row of every table, wherever the slots suffice
        slot_of[:] = np.arange(host_rows) % max(case.device_slots, 1)

    if case.is_odd:
        slot_of[slot_of >= 0] += (slot_of[slot_of >= 0] % 5 == 0) * case.device_slots
        slot_of[:, ::7] = case.device_slots
    positions = np.full((case.seats, case.tokens, case.listed), -1, np.int32)
    for seat in range(case.seats):
        for token in range(case.tokens):
            visible = int(lengths[seat]) + token + 1
            most = min(case.listed, visible)
            size = most if case.full_lists else int(draw.integers(0, most + 1))
            chosen = set(draw.permutation(visible)[:size].tolist())
            if size and draw.random() < 0.7:  # a query usually sees itself
                chosen.discard(max(chosen))
                chosen.add(visible - 1)
            if case.idle and seat == 0:
                chosen = set()
            if case.is_odd:
                chosen |= {int(lengths[seat]), int(lengths[seat]) + case.tokens}
            listed = sorted(chosen)[-case.listed :]
            positions[seat, token, : len(listed)] = listed

    staged_rows = np.full((case.seats, case.staging), -1, np.int32)
    for seat in range(case.seats):
        listed = {int(p) for p in positions[seat].reshape(-1) if 0 <= p < lengths[seat]}
        rows = [int(table[seat, p // PAGE]) * PAGE + p % PAGE for p in sorted(listed)]
        missing = [row for row in rows if slot_of[case.layer, row] < 0]
        wanted = [row for row in missing if draw.random() < case.staged]
        wasted = [int(row) for row in draw.integers(0, host_rows, 3)]
        both = draw.permutation(np.asarray((wanted + wasted)[: case.staging], np.int32))
        staged_rows[seat, : len(both)] = both
        if len(both) > 1 and draw.random() < 0.5:
            staged_rows[seat, len(both) - 1] = both[0]  # staged twice: the first place counts

    def records(*shape: int) -> np.ndarray:
        return draw.integers(0, 2**32, (*shape, case.words), np.uint32)

    return {
        "slot_of": slot_of,
        "layer": np.int32(case.layer),
        "page_table": table,
        "page_count": count,
        "lengths": lengths,
        "positions": positions,
        "new_records": records(case.seats, case.tokens),
        "staged_rows": staged_rows,
        "staged": records(case.seats, case.staging),
        "host_pool": records(case.layers, host_rows),
    }
