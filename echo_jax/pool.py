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

from echo_jax.types import FREE_PRIORITY, NO_ROW, NO_SLOT, SlotMaps

PROTECTED = 2**31 - 1
"""Stands in for the priority of a protected slot while victims are chosen; above every priority a slot may have."""


class Allocation(NamedTuple):
    """Where the rows of one step went. M is the length of the list handed in."""

    slots: jax.Array  # i32[M]  slot of every row, NO_SLOT for padding
    is_filled: jax.Array  # bool[M]  the first mention of a row that was missing: its slot must be filled now
    was_used: jax.Array  # bool[N_G]  the slot held a wanted row before
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


def allocate(maps: SlotMaps, rows: jax.Array) -> tuple[SlotMaps, Allocation]:
    """Makes rows i32[M] resident, duplicates and NO_ROW allowed; all of them are protected while this happens.

    The new slots' priorities are left for the eviction policy to write. The pool holds at least M rows (checked when
    the configuration was built), so every missing row gets a slot.
    """
    count, host_rows, device_slots = rows.shape[0], maps.slot_of.shape[0], maps.host_of.shape[0]
    is_row = rows != NO_ROW
    row_or_outside = jnp.where(is_row, rows, host_rows)
    slots = lookup(maps, rows)
    was_used = _mark(jnp.zeros((device_slots,), bool), slots)

    # Each missing row once: all its mentions write their marker below NO_SLOT into the map, the first mention's is the
    # lowest and stays. The markers are overwritten by real slots before this function returns.
    is_missing = is_row & (slots == NO_SLOT)
    marker = jnp.arange(count, dtype=jnp.int32) - count - 1
    slot_of = maps.slot_of.at[jnp.where(is_missing, rows, host_rows)].min(marker, mode="drop")
    is_filled = is_missing & (slot_of[jnp.maximum(rows, 0)] == marker)

    # The slots of lowest (priority, slot), as many as could be missing; a missing row takes the one at its rank.
    priority = jnp.where(was_used, PROTECTED, maps.priority)
    _, order = lax.sort((priority, jnp.arange(device_slots, dtype=jnp.int32)), num_keys=1, is_stable=True)
    rank = jnp.cumsum(is_filled.astype(jnp.int32)) - 1
    taken = jnp.where(is_filled, order[jnp.clip(rank, 0, device_slots - 1)], NO_SLOT)
    taken_or_outside = jnp.where(is_filled, taken, device_slots)

    victims = jnp.where(is_filled, maps.host_of[jnp.maximum(taken, 0)], NO_ROW)
    slot_of = slot_of.at[jnp.where(victims == NO_ROW, host_rows, victims)].set(NO_SLOT, mode="drop")
    slot_of = slot_of.at[jnp.where(is_filled, row_or_outside, host_rows)].set(taken, mode="drop", unique_indices=True)
    updated = maps.replace(
        slot_of=slot_of,
        host_of=maps.host_of.at[taken_or_outside].set(rows, mode="drop", unique_indices=True),
        free=maps.free.at[taken_or_outside].set(False, mode="drop", unique_indices=True),
    )
    evicted = jnp.sum(victims != NO_ROW, dtype=jnp.int32)
    return updated, Allocation(lookup(updated, rows), is_filled, was_used, evicted)


def before_touch(maps: SlotMaps, allocation: Allocation) -> tuple[jax.Array, jax.Array]:
    """What an eviction policy is told of each row's slot: its priority i32[M], and bool[M] whether it was just filled.

    The priority of a slot just filled is FREE_PRIORITY, also where a victim left it: what the victim was worth says
    nothing of the row that took its place. Padding gets slot 0's.
    """
    slots = jnp.maximum(allocation.slots, 0)
    was_filled = ~allocation.was_used[slots]
    return jnp.where(was_filled, FREE_PRIORITY, maps.priority[slots]), was_filled


def touch(maps: SlotMaps, slots: jax.Array, priority: jax.Array) -> SlotMaps:
    """Writes priority i32[M] of slots i32[M] (NO_SLOT is skipped); mentions of one slot must agree or the highest wins.

    FREE_PRIORITY and PROTECTED are not a policy's to give: they become the next one inside.
    """
    safe = clamp(priority)
    outside = jnp.where(slots == NO_SLOT, maps.host_of.shape[0], slots)
    cleared = maps.priority.at[outside].set(FREE_PRIORITY, mode="drop")
    return maps.replace(priority=cleared.at[outside].max(safe, mode="drop"))


def clamp(priority: jax.Array) -> jax.Array:
    """The nearest priority that a slot in use may have."""
    return jnp.clip(priority, FREE_PRIORITY + 1, PROTECTED - 1)


def release(maps: SlotMaps, is_dropped: jax.Array) -> SlotMaps:
    """Rows where bool[N_H] says so lose their slots."""
    loses = ~maps.free & is_dropped[jnp.maximum(maps.host_of, 0)]
    return SlotMaps(
        slot_of=jnp.where(is_dropped, NO_SLOT, maps.slot_of),
        host_of=jnp.where(loses, NO_ROW, maps.host_of),
        priority=jnp.where(loses, FREE_PRIORITY, maps.priority),
        free=maps.free | loses,
    )


def _mark(mask: jax.Array, slots: jax.Array) -> jax.Array:
    return mask.at[jnp.where(slots == NO_SLOT, mask.shape[0], slots)].set(True, mode="drop")
