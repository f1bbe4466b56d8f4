"""Where every selected record is: a slot of the device pool, a new record of this step, or a record fetched now.

`locate` is a pure function. It reads maps, tables, staging and the host pool, writes none of them, and chooses no
victim: attention needs the address of a record, and nothing else. Which fetched rows stay on the device is decided
once a step, after the last layer.

A place is an i32. Attention reads two arrays by it, the device pool and `Located.fetched`:

    [0, N_G)                     a slot of the device pool
    N_G + b T + t                new record t of seat b, recognised by its position (the seat's length + t)
    N_G + B T + (b T + t) K + k  the fetched record of entry k in the list of query t of seat b
    NO_PLACE                     padding

Places are deterministic. A missing row is fetched once, to the place of the first list entry that names it, and every
later entry (of another query of the seat, or of a seat that shares its page) has that place too. The rule needs no
counting across the lists, so a GPU needs no exchange between thread blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax import _ffi, hostmem, pool
from echo_jax.types import NO_PLACE, NO_ROW, NO_SLOT, PAGE, Staging, Tables


class Located(NamedTuple):
    """The answer of `locate`.

    places: i32[B, T, K]  where the record of each list entry is (see the module).
    fetched: [B T + B T K, *record]  the step's new records, then one place for each list entry. Only places that are
        named hold a record; the others are undefined and nothing may read them.
    """

    places: jax.Array
    fetched: jax.Array


def locate(
    slot_of: jax.Array,
    layer: jax.Array | int,
    tables: Tables,
    positions: jax.Array,
    new_records: jax.Array,
    staging: Staging,
    host_pool: jax.Array,
    *,
    device_slots: int,
    implementation: str = "auto",
) -> Located:
    """Finds or fetches the record of every selected position; on return each has a place that holds it.

    slot_of: i32[L, N_H]  device slot of each host row in each layer, or NO_SLOT
    layer: i32[]  outside 0..L-1 no row has a slot and fetched records are zero
    tables: page_table i32[B, P // PAGE], page_count and lengths are read
    positions: i32[B, T, K]  each list strictly ascending, then NO_POSITION
    new_records: [B, T, *record]  stored form, of positions lengths[b] + t
    staging: rows that were prefetched for this layer; what the first entry's seat has there is not read from the host
    host_pool: [L, N_H, *record]
    device_slots: N_G; 0 is served

    A position without a page, or beyond the step's new tokens, has NO_PLACE.
    implementation: one of _ffi.IMPLEMENTATIONS; places, and the fetched records that they name, are the same bits.
    """
    layer = jnp.asarray(layer, jnp.int32)
    _check(slot_of, tables, positions, new_records, staging, host_pool, device_slots)
    if pool.is_by_library(implementation) and hostmem.uses_library(host_pool):
        return Located(
            *_ffi.locate(
                slot_of,
                layer,
                tables.page_table,
                tables.page_count,
                tables.lengths,
                positions,
                new_records,
                staging.rows,
                staging.records,
                host_pool,
                device_slots=device_slots,
            )
        )
    return _locate_by_jnp(slot_of, layer, tables, positions, new_records, staging, host_pool, device_slots)


def _locate_by_jnp(
    slot_of, layer, tables: Tables, positions, new_records, staging: Staging, host_pool, device_slots: int
):
    """The specification."""
    seats, tokens, listed = positions.shape
    host_rows, record = slot_of.shape[1], host_pool.shape[2:]
    new, entries = seats * tokens, positions.size
    length = tables.lengths[:, None, None]

    token = positions - length
    is_new = (token >= 0) & (token < tokens)
    of_seat = jnp.arange(seats, dtype=jnp.int32)[:, None, None]
    new_place = device_slots + of_seat * tokens + token

    page_index = positions // PAGE
    has_page = (positions >= 0) & (positions < length) & (page_index < tables.page_table.shape[1])
    page = tables.page_table[of_seat, jnp.where(has_page, page_index, 0)]
    is_old = has_page & (page >= 0) & (page < host_rows // PAGE)
    row = jnp.where(is_old, page * PAGE + positions % PAGE, NO_ROW)
    slot = slot_of.at[jnp.where(layer < 0, slot_of.shape[0], layer), jnp.maximum(row, 0)].get(
        mode="fill", fill_value=NO_SLOT
    )
    is_resident = is_old & (slot >= 0) & (slot < device_slots)
    is_missing = is_old & ~is_resident

    entry = jnp.arange(entries, dtype=jnp.int32).reshape(positions.shape)
    first_of = jnp.full((host_rows,), entries, jnp.int32)
    first_of = first_of.at[jnp.where(is_missing, row, host_rows)].min(entry, mode="drop")
    first = first_of[jnp.maximum(row, 0)]

    places = jnp.where(is_missing, device_slots + new + first, NO_PLACE)
    places = jnp.where(is_resident, slot, places)
    places = jnp.where(is_new, new_place, places)

    wanted = jnp.where(is_missing & (first == entry), row, NO_ROW).reshape(-1)
    staged = jax.vmap(pool.place_in)(staging.rows, wanted.reshape(seats, -1))  # among those of its own seat
    is_staged = (staged >= 0).reshape(-1)
    fetched = hostmem.read_rows(host_pool, layer, jnp.where(is_staged, NO_ROW, wanted))
    if staging.rows.size > 0:
        given = staging.records[jnp.arange(seats)[:, None], jnp.maximum(staged, 0)].reshape(-1, *record)
        fetched = jnp.where(is_staged.reshape(-1, *(1,) * len(record)), given, fetched)
    return Located(places, jnp.concatenate([new_records.reshape(-1, *record), fetched]))


def _check(slot_of, tables: Tables, positions, new_records, staging: Staging, host_pool, device_slots: int) -> None:
    """Shapes that do not fit each other are refused while tracing, with both values."""
    if positions.ndim != 3 or positions.dtype != jnp.int32:
        raise ValueError(
            f"positions is {positions.dtype.name}{list(positions.shape)} but must be int32[B, T, K], a list a query"
        )
    if device_slots < 0:
        raise ValueError(f"device_slots is {device_slots} but must be 0 or more")
    seats, tokens, _ = positions.shape
    record = host_pool.shape[2:]
    for name, given, wanted in (
        ("slot_of", slot_of.shape, host_pool.shape[:2]),
        ("lengths", tables.lengths.shape, (seats,)),
        ("page_table", tables.page_table.shape[:1], (seats,)),
        ("page_count", tables.page_count.shape, (host_pool.shape[1] // PAGE,)),
        ("new_records", new_records.shape, (seats, tokens, *record)),
        ("staging.rows", staging.rows.shape[:1], (seats,)),
        ("staging.records", staging.records.shape, (*staging.rows.shape, *record)),
    ):
        if tuple(given) != tuple(wanted):
            raise ValueError(
                f"{name} has shape {list(given)} but positions {list(positions.shape)} and host_pool "
                f"{list(host_pool.shape)} need {list(wanted)}"
            )
    for name, array in (("new_records", new_records), ("staging.records", staging.records)):
        if array.dtype != host_pool.dtype:
            raise ValueError(f"{name} is {array.dtype.name} but host_pool is {host_pool.dtype.name}; store it alike")
