"""Who is where in one layer: slots are looked up, allocated, evicted and released. Integers only, no bytes move.

The rule, which every implementation must reproduce bit for bit: missing rows, each once, in list order, take slots in
ascending order of (priority, slot) among the unprotected ones. A free slot has the lowest priority there is, so free
slots go first, in ascending order, and exactly the shortage is evicted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax import _ffi
from echo_jax.types import FREE_PRIORITY, NO_ROW, NO_SLOT, SOURCE_HOST, SlotMaps

PROTECTED = 2**31 - 1
"""Stands in for the priority of a protected slot while victims are chosen; above every priority a slot may have."""


class Fills(NamedTuple):
    """What must be copied into slots now: the first `count` entries, in list order, then NO_ROW, NO_SLOT and -1."""

    rows: jax.Array  # i32[M]  host row
    slots: jax.Array  # i32[M]  where its record goes; distinct
    mention: jax.Array  # i32[M]  place of the row's first mention in the list handed in
    source: jax.Array  # i32[M]  SOURCE_HOST, a place among the new rows, or (count of new rows) + a place in staging
    count: jax.Array  # i32[]


class Allocation(NamedTuple):
    """Where the rows of one step went. M is the length of the list handed in."""

    slots: jax.Array  # i32[M]  slot of every row, NO_SLOT for padding
    fills: Fills
    hits: jax.Array  # i32[]  wanted rows that had a slot before, each once
    useful: jax.Array  # i32[]  rows filled from staging
    recalled: jax.Array  # i32[]  rows filled from the host
    written: jax.Array  # i32[]  new rows
    evicted: jax.Array  # i32[]  rows that lost their slot


def initial(host_rows: int, device_slots: int) -> SlotMaps:
    """Maps of an empty pool."""
    return SlotMaps(
        slot_of=jnp.full((host_rows,), NO_SLOT, jnp.int32),
        host_of=jnp.full((device_slots,), NO_ROW, jnp.int32),
        priority=jnp.full((device_slots,), FREE_PRIORITY, jnp.int32),
        free=jnp.ones((device_slots,), bool),
    )


def lookup(maps: SlotMaps, rows: jax.Array) -> jax.Array:
    """Slots of rows i32[...]: NO_SLOT for padding and for rows that are not resident."""
    return jnp.where(rows == NO_ROW, NO_SLOT, maps.slot_of[jnp.maximum(rows, 0)])


def before_touch(maps: SlotMaps, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What an eviction policy is told of rows i32[M] that are about to be allocated: the priority i32[M] of each row's
    slot, and bool[M] whether the slot is about to be filled.

    The priority of a slot about to be filled is FREE_PRIORITY, whoever holds it now: what a victim was worth says
    nothing of the row that takes its place. Padding is told the same.
    """
    slots = lookup(maps, rows)
    is_absent = slots == NO_SLOT
    return jnp.where(is_absent, FREE_PRIORITY, maps.priority[jnp.maximum(slots, 0)]), is_absent


def allocate(
    maps: SlotMaps,
    rows: jax.Array,
    priority: jax.Array,
    staged: jax.Array | None = None,
    *,
    per_seat: int | None = None,
    new_per_seat: int = 0,
    implementation: str = "auto",
) -> tuple[SlotMaps, Allocation]:
    """Makes rows i32[M] resident, duplicates and NO_ROW allowed, and gives their slots priority i32[M], or one i32[].

    The list is the seats' lists of per_seat entries one after another (default: one seat), each beginning with
    new_per_seat new rows: those are filled from this step's records even if they had a slot. Rows found in staged
    i32[E] (host rows that were copied ahead, or NO_ROW) are filled from there, from the first place where one is staged
    twice; all others from the host. Every row of the list is protected while this happens. The pool holds at least as
    many rows as the list has different ones (checked when the configuration was built): every missing row gets a slot.

    Of several priorities for one slot the highest wins; FREE_PRIORITY and PROTECTED are not a policy's to give and
    become the next one inside.

    implementation: who keeps the maps, one of _ffi.IMPLEMENTATIONS; the result is the same. A named one works or raises
    RuntimeError with the reason and the remedy.
    """
    per_seat = max(rows.shape[0], 1) if per_seat is None else per_seat
    staged = jnp.zeros((0,), jnp.int32) if staged is None else staged
    if not is_by_library(implementation):
        return _allocate_by_jnp(maps, rows, priority, staged, per_seat, new_per_seat)
    return _allocate_by_library(maps, rows, priority, staged, per_seat, new_per_seat)


def _allocate_by_jnp(maps: SlotMaps, rows, priority, staged, per_seat: int, new_per_seat: int):
    """The specification."""
    host_rows, device_slots = maps.slot_of.shape[0], maps.host_of.shape[0]
    priority = jnp.broadcast_to(priority, rows.shape)
    is_row = rows != NO_ROW
    slots = lookup(maps, rows)
    was_used = _mark(jnp.zeros((device_slots,), bool), slots)

    # Each missing row once: all its mentions write their marker below NO_SLOT into the map, the first mention's is the
    # lowest and stays. The markers are overwritten by real slots before this function returns.
    mention = jnp.arange(rows.shape[0], dtype=jnp.int32)
    is_missing = is_row & (slots == NO_SLOT)
    marker = mention - rows.shape[0] - 1
    slot_of = maps.slot_of.at[jnp.where(is_missing, rows, host_rows)].min(marker, mode="drop")
    is_first = is_missing & (slot_of[jnp.maximum(rows, 0)] == marker)

    # The slots of lowest (priority, slot), as many as could be missing; a missing row takes the one at its rank.
    order = in_order(jnp.where(was_used, PROTECTED, maps.priority))
    rank = jnp.cumsum(is_first.astype(jnp.int32)) - 1
    taken = jnp.where(is_first, order[jnp.clip(rank, 0, device_slots - 1)], NO_SLOT)
    taken_or_outside = jnp.where(is_first, taken, device_slots)

    victims = jnp.where(is_first, maps.host_of[jnp.maximum(taken, 0)], NO_ROW)
    slot_of = slot_of.at[jnp.where(victims == NO_ROW, host_rows, victims)].set(NO_SLOT, mode="drop")
    slot_of = slot_of.at[jnp.where(is_first, rows, host_rows)].set(taken, mode="drop", unique_indices=True)
    updated = maps.replace(
        slot_of=slot_of,
        host_of=maps.host_of.at[taken_or_outside].set(rows, mode="drop", unique_indices=True),
        free=maps.free.at[taken_or_outside].set(False, mode="drop", unique_indices=True),
    )
    slots = lookup(updated, rows)

    is_new = is_row & (mention % per_seat < new_per_seat)
    new_place = mention // per_seat * new_per_seat + mention % per_seat
    staged_place = place_in(staged, rows)
    is_staged = ~is_new & (staged_place >= 0)
    source = jnp.where(is_staged, rows.shape[0] // per_seat * new_per_seat + staged_place, SOURCE_HOST)
    source = jnp.where(is_new, new_place, source)
    must_fill = is_first | is_new

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, dtype=jnp.int32)

    def filled(listed: jax.Array) -> jax.Array:
        return _compact(must_fill, listed)

    return _touch(updated, slots, priority), Allocation(
        slots=slots,
        fills=Fills(filled(rows), filled(slots), filled(mention), filled(source), count(must_fill)),
        hits=count(was_used),
        useful=count(is_first & is_staged),
        recalled=count(is_first & (source == SOURCE_HOST)),
        written=count(is_new),
        evicted=count(victims != NO_ROW),
    )


def in_order(priority: jax.Array) -> jax.Array:
    """i32[N_G]: the slots in ascending order of (priority, slot)."""
    slots = jnp.arange(priority.shape[0], dtype=jnp.int32)
    return lax.sort((priority, slots), num_keys=1, is_stable=True)[1]


def _compact(mask: jax.Array, listed: jax.Array) -> jax.Array:
    """The entries of i32[M] where the mask is set, in order, then -1: the value of NO_ROW and NO_SLOT too."""
    place = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, mask.shape[0])
    return jnp.full(mask.shape, -1, jnp.int32).at[place].set(listed, mode="drop")


def place_in(staged: jax.Array, rows: jax.Array) -> jax.Array:
    """i32[M]: the first place of each row in staged i32[E], or -1; padding is nowhere."""
    if staged.shape[0] == 0:
        return jnp.full(rows.shape, -1, jnp.int32)
    order = jnp.argsort(staged, stable=True).astype(jnp.int32)
    ordered = staged[order]
    at = jnp.minimum(jnp.searchsorted(ordered, rows, method="scan_unrolled"), staged.shape[0] - 1)
    return jnp.where((ordered[at] == rows) & (rows != NO_ROW), order[at], -1)


def _touch(maps: SlotMaps, slots: jax.Array, priority: jax.Array) -> SlotMaps:
    """Writes priority i32[M] of slots i32[M]; NO_SLOT is skipped, of several priorities for a slot the highest wins."""
    outside = jnp.where(slots == NO_SLOT, maps.host_of.shape[0], slots)
    cleared = maps.priority.at[outside].set(FREE_PRIORITY, mode="drop")
    return maps.replace(priority=cleared.at[outside].max(clamp(priority), mode="drop"))


def clamp(priority: jax.Array) -> jax.Array:
    """The nearest priority that a slot in use may have."""
    return jnp.clip(priority, FREE_PRIORITY + 1, PROTECTED - 1)


def release(maps: SlotMaps, is_dropped: jax.Array, *, implementation: str = "auto") -> SlotMaps:
    """Rows where bool[N_H] says so lose their slots."""
    if is_by_library(implementation):
        slot_of, host_of, priority, free = _ffi.release(*leaves(maps), is_dropped)
        return SlotMaps(slot_of=slot_of, host_of=host_of, priority=priority, free=free)
    loses = ~maps.free & is_dropped[jnp.maximum(maps.host_of, 0)]
    return SlotMaps(
        slot_of=jnp.where(is_dropped, NO_SLOT, maps.slot_of),
        host_of=jnp.where(loses, NO_ROW, maps.host_of),
        priority=jnp.where(loses, FREE_PRIORITY, maps.priority),
        free=maps.free | loses,
    )


def _mark(mask: jax.Array, slots: jax.Array) -> jax.Array:
    return mask.at[jnp.where(slots == NO_SLOT, mask.shape[0], slots)].set(True, mode="drop")


def _allocate_by_library(maps: SlotMaps, rows, priority, staged, per_seat: int, new_per_seat: int, blocks: int = 0):
    sizes = {"per_seat": per_seat, "new_per_seat": new_per_seat, "blocks": blocks}
    results = _ffi.allocate(*leaves(maps), rows, jnp.atleast_1d(priority), staged, **sizes)
    slot_of, host_of, updated_priority, free, slots = results[:5]
    updated = SlotMaps(slot_of=slot_of, host_of=host_of, priority=updated_priority, free=free)
    return updated, Allocation(slots, Fills(*results[5:10]), *results[10:])


def leaves(maps: SlotMaps) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The maps in the order of the library."""
    return maps.slot_of, maps.host_of, maps.priority, maps.free


def is_by_library(implementation: str) -> bool:
    """Whether `implementation` (one of _ffi.IMPLEMENTATIONS) means the library on the default backend, or its error."""
    served = _ffi.serves("slot manager", implementation)
    # What is traced in a process with a GPU may be placed on its CPU, where the targets must be known too.
    return served and _ffi.is_available("cpu")
