"""The words of the library: names for missing things, and the shapes of the state.

This module knows what the arrays are called and how large they are. It knows nothing of what is done with them:
`tables`, `pool` and `recall` move numbers, `hostmem` moves bytes, `decode` moves a whole step.

House letters: `B` seats, `T` new tokens per seat and step, `L` layers, `P` positions a request can hold, `N_H` host
rows, `N_G` device slots of one layer, `K` selected rows, `S` staging places of a seat, `G` index heads, `H` attention
heads, `D` width of a record in values.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct

NO_SLOT = -1
"""The host row has no slot in this layer's device pool."""

NO_ROW = -1
"""The slot holds no host row; or: this entry of a row list is padding."""

NO_PAGE = -1
"""The request has no page for these positions."""

NO_TOKEN = -1
"""A seat that was full when a token was due has none."""

NO_PLACE = -1
"""A list entry that is padding has no record and no place."""

NO_POSITION = -1
"""Padding of a list of selected positions; always at the end of the list."""

FREE_PRIORITY = -(2**31)
"""Priority of a free slot. It is below every priority a policy may write, so slots in order of (priority, slot) are
the free ones first, ascending, and then the victims: one order serves allocation and eviction."""

SOURCE_HOST = -1
"""Where a slot is filled from: the host pool. Numbers from 0 up count records that are on the device already."""

PAGE = 64
"""Host rows in a page; pages are shared and freed whole."""


class SlotMaps(struct.PyTreeNode):
    """Who is where in one layer: integers only, so a replay without any bytes uses the same functions.

    slot_of and host_of are inverse partial maps; `free[s]`, `host_of[s] == NO_ROW` and `priority[s] == FREE_PRIORITY`
    say the same thing.
    """

    slot_of: jax.Array  # i32[N_H]  device slot of each host row, or NO_SLOT
    host_of: jax.Array  # i32[N_G]  host row of each slot, or NO_ROW
    priority: jax.Array  # i32[N_G]  the lowest unprotected one is evicted first
    free: jax.Array  # bool[N_G]


class LayerState(struct.PyTreeNode):
    """What one layer keeps on the device between steps."""

    slots: SlotMaps | None  # None in the resident run, where slot = host row
    records: jax.Array  # [N_G, *record shape]  the device pool; [N_H, ...] in the resident run
    index_keys: jax.Array | None  # [N_H // PAGE, ...]  stored index keys, page by page; None in a shared layer
    threshold: Any  # policy memory, one row per seat; None in a shared layer


class Tables(struct.PyTreeNode):
    """Which host rows belong to which request. A page is owned (count > 0), cached (kept for reuse) or free."""

    page_table: jax.Array  # i32[B, P // PAGE]  page of each run of PAGE positions, or NO_PAGE
    page_count: jax.Array  # i32[N_H // PAGE]  how many seats refer to the page
    page_cached: jax.Array  # bool[N_H // PAGE]  kept although no seat refers to it
    lengths: jax.Array  # i32[B]  positions already written
    active: jax.Array  # bool[B]  the seat holds a request


class EchoState(struct.PyTreeNode):
    """Everything a decode step reads and writes; donated to it and returned by it."""

    tables: Tables
    layers: tuple[LayerState, ...]
    host_pool: jax.Array | None  # [L, N_H, *record shape]  None in the resident run
    step: jax.Array  # i32[]  steps taken; the clock of the eviction policies

    def remaining(self) -> jax.Array:
        """i32[B]: positions that each seat can still take, 0 in an idle one. A seat with 0 left is full: a step writes
        nothing for it, and its logits mean nothing."""
        reserved = jnp.sum(self.tables.page_table != NO_PAGE, axis=1, dtype=jnp.int32) * PAGE
        return jnp.where(self.tables.active, reserved - self.tables.lengths, 0)


class Staging(NamedTuple):
    """Records that were copied ahead for one layer-step. A value, never state: `require` consumes it."""

    rows: jax.Array  # i32[B, S]  host row of each staged record, or NO_ROW
    records: jax.Array  # [B, S, *record shape]
    refused: jax.Array  # i32[B]  candidates the cap turned away


@runtime_checkable
class ThresholdPolicy(Protocol):
    """Predicts the k-th best index score of one request in one layer. Unbatched: the library vmaps it over seats.

    Whatever `value` returns changes which rows travel early, never which rows are attended. `+inf` prefetches
    nothing, `-inf` everything up to the cap, NaN nothing. A policy may have another method, `bound(memory)` f32[]: a
    score that it expects somewhat more than K positions to exceed, which may save the selection time
    (`threshold.Listing` gives any policy one).
    """

    def init(self) -> Any:
        """Memory of a request without history: a pytree of fixed-shape arrays."""
        ...

    def update(self, memory: Any, kth_score: jax.Array) -> Any:
        """Memory after the true k-th score, f32[], of one query has been seen."""
        ...

    def value(self, memory: Any) -> jax.Array:
        """f32[]: rows scoring above this are copied ahead."""
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Writes the priority of slots that a step used. Unbatched: elementwise over slots."""

    def touch(self, priority: jax.Array, was_free: jax.Array, step: jax.Array, score: jax.Array) -> jax.Array:
        """i32: the new priority of a used slot; its old one, whether it was just filled, the step, its best score.

        A slot that was just filled has the old priority FREE_PRIORITY, also where its victim had another. A scalar is
        the priority of all, and spares the GPU a list of them.
        """
        ...

    def rebase(self, priority: jax.Array, shift: jax.Array) -> jax.Array:
        """i32: the priority after the step counter has been lowered by `shift`, order kept."""
        ...
