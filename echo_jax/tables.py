"""Which host rows belong to which request: page tables, reference counts, lengths. Integers only.

A page is owned (some seat refers to it), cached (nobody does, its rows are kept for reuse) or free; exactly one of the
three. Free pages are given out in ascending order. A request's pages are reserved for its whole capacity when it is
admitted, so a decode step never allocates and can never run out half-way.

Functions that change tables are traced and trust their arguments; `check_*` run at the door, on concrete values, and
say what is short.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import checks
from echo_jax.config import CacheConfig
from echo_jax.types import NO_PAGE, NO_ROW, PAGE, Tables


def initial(config: CacheConfig) -> Tables:
    """Tables without requests: every page is free."""
    return Tables(
        page_table=jnp.full((config.seats, config.pages_per_seat), NO_PAGE, jnp.int32),
        page_count=jnp.zeros((config.pages,), jnp.int32),
        page_cached=jnp.zeros((config.pages,), bool),
        lengths=jnp.zeros((config.seats,), jnp.int32),
        active=jnp.zeros((config.seats,), bool),
    )


def rows_of_positions(tables: Tables) -> jax.Array:
    """i32[B, P]: the host row of every position a seat has a page for, else NO_ROW."""
    seats, pages = tables.page_table.shape
    rows = tables.page_table[..., None] * PAGE + jnp.arange(PAGE, dtype=jnp.int32)[None, None]
    return jnp.where(tables.page_table[..., None] == NO_PAGE, NO_ROW, rows).reshape(seats, pages * PAGE)


def new_rows(tables: Tables, count: int) -> tuple[jax.Array, jax.Array]:
    """positions i32[B, count] of the next tokens and their host rows; NO_ROW in an idle seat and past capacity."""
    positions = tables.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    capacity = tables.page_table.shape[1] * PAGE
    page = jnp.take_along_axis(tables.page_table, jnp.minimum(positions, capacity - 1) // PAGE, axis=1)
    exists = tables.active[:, None] & (positions < capacity) & (page != NO_PAGE)
    return positions, jnp.where(exists, page * PAGE + positions % PAGE, NO_ROW)


def free_pages(tables: Tables) -> jax.Array:
    """bool[pages]: neither owned nor cached."""
    return (tables.page_count == 0) & ~tables.page_cached


def admit(tables: Tables, seat, pages_needed, shared_pages, shared_count, length) -> Tables:
    """Gives a seat its pages: `shared_count` of `shared_pages` i32[P // PAGE] first, then the lowest free ones.

    pages_needed counts both. `length` is how many positions are already written, those of the shared pages (and, in a
    fork, of the copied partial page).
    """
    places = jnp.arange(tables.page_table.shape[1], dtype=jnp.int32)
    is_free = free_pages(tables)
    order = jnp.nonzero(is_free, size=places.shape[0], fill_value=NO_PAGE)[0].astype(jnp.int32)
    own = order[jnp.maximum(places - shared_count, 0)]
    pages = jnp.where(places < shared_count, shared_pages, jnp.where(places < pages_needed, own, NO_PAGE))
    return tables.replace(
        page_table=tables.page_table.at[seat].set(pages),
        page_count=tables.page_count.at[_or_outside(pages, tables)].add(1, mode="drop"),
        page_cached=tables.page_cached.at[_or_outside(pages, tables)].set(False, mode="drop"),
        lengths=tables.lengths.at[seat].set(length),
        active=tables.active.at[seat].set(True),
    )


def release(tables: Tables, seat, keep_pages) -> tuple[Tables, jax.Array]:
    """Takes a seat's pages away; also returns bool[N_H], the rows whose count reached 0: they lose their slots.

    With keep_pages the full pages nobody else refers to become cached instead of free.
    """
    pages = tables.page_table[seat]
    places = jnp.arange(pages.shape[0], dtype=jnp.int32)
    count = tables.page_count.at[_or_outside(pages, tables)].add(-1, mode="drop")
    touched = jnp.zeros(count.shape, bool).at[_or_outside(pages, tables)].set(True, mode="drop")
    is_full = places < tables.lengths[seat] // PAGE
    keep = jnp.zeros(count.shape, bool).at[_or_outside(pages, tables)].set(is_full & keep_pages, mode="drop")
    orphaned = touched & (count == 0)
    released = tables.replace(
        page_table=tables.page_table.at[seat].set(NO_PAGE),
        page_count=count,
        page_cached=tables.page_cached | (orphaned & keep),
        lengths=tables.lengths.at[seat].set(0),
        active=tables.active.at[seat].set(False),
    )
    return released, jnp.repeat(orphaned, PAGE)


def uncache(tables: Tables, is_dropped: jax.Array) -> Tables:
    """Cached pages where bool[pages] says so become free."""
    return tables.replace(page_cached=tables.page_cached & ~is_dropped)


def rollback(tables: Tables, lengths: jax.Array) -> tuple[Tables, jax.Array]:
    """Shortens seats to lengths i32[B] (never lengthens); also returns bool[N_H], the rows that were dropped."""
    lengths = jnp.clip(lengths, 0, tables.lengths)
    rows = rows_of_positions(tables)
    positions = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    is_dropped = (positions >= lengths[:, None]) & (positions < tables.lengths[:, None]) & (rows != NO_ROW)
    host_rows = tables.page_count.shape[0] * PAGE
    dropped = jnp.zeros((host_rows,), bool)
    dropped = dropped.at[jnp.where(is_dropped, rows, host_rows).reshape(-1)].set(True, mode="drop")
    return tables.replace(lengths=lengths), dropped


def check_seat(tables: Tables, seat: int, must_be_active: bool) -> None:
    """Refuses a seat that does not exist, or is in the wrong state."""
    seats = tables.active.shape[0]
    if not 0 <= checks.whole("seat", seat) < seats:
        raise ValueError(f"seat {seat} does not exist; the configuration has seats 0..{seats - 1}")
    if bool(tables.active[seat]) != must_be_active:
        has, remedy = ("no", "admit one first") if must_be_active else ("a", "release it first or choose another")
        raise ValueError(f"seat {seat} holds {has} request; {remedy}")


def pages_for(tables: Tables, positions: int) -> int:
    """Pages that hold `positions` positions; refuses more than a seat's table has places for."""
    capacity = tables.page_table.shape[1] * PAGE
    if not 1 <= checks.whole("positions", positions) <= capacity:
        raise ValueError(
            f"a request of {positions} positions does not fit a seat's capacity of {capacity}; shorten it or build the "
            "cache with a larger capacity"
        )
    return -(-positions // PAGE)


def check_free_pages(tables: Tables, own_pages: int) -> None:
    """Refuses an admission for which the host pool has too few free pages."""
    free = int(free_pages(tables).sum())
    if free < own_pages:
        cached = int(tables.page_cached.sum())
        raise ValueError(
            f"the host pool has {free} free pages but the request needs {own_pages} of {PAGE} rows; release a request,"
            f" drop cached pages ({cached} now) or raise host_rows"
        )


def check_shared_pages(tables: Tables, shared_pages: np.ndarray, pages_needed: int) -> None:
    """Refuses to share a page that does not hold PAGE written rows, a page twice, or all pages the request has."""
    if len(shared_pages) >= pages_needed:
        raise ValueError(
            f"{len(shared_pages)} shared pages leave none of the request's {pages_needed} to itself, but its last "
            "prompt token is always recomputed into an own page; share one less"
        )
    if len(set(shared_pages.tolist())) < len(shared_pages):
        raise ValueError(f"shared pages {shared_pages.tolist()} name a page twice; a request holds a page once")
    idle, lengths, table = np.asarray(free_pages(tables)), np.asarray(tables.lengths), np.asarray(tables.page_table)
    for page in shared_pages:
        if not 0 <= page < idle.shape[0] or idle[page]:
            raise ValueError(f"page {page} holds no rows to share; share owned or cached pages only")
        for seat, place in np.argwhere(table == page):
            written = max(0, lengths[seat] - place * PAGE)
            if written < PAGE:
                raise ValueError(
                    f"page {page} of seat {seat} holds {written} of {PAGE} rows, but only full pages are shared; "
                    "share fewer, or fork the seat"
                )


def check_rollback(tables: Tables, lengths: np.ndarray) -> None:
    """Refuses to lengthen a seat, and to roll it back into a page that another seat also refers to."""
    table, count = np.asarray(tables.page_table), np.asarray(tables.page_count)
    old = np.asarray(tables.lengths)
    if lengths.shape != old.shape:
        raise ValueError(f"{lengths.shape} lengths for {old.shape[0]} seats; give one per seat")
    for seat, length in enumerate(lengths):
        if length < 0 or length > old[seat]:
            raise ValueError(f"seat {seat} holds {old[seat]} positions and cannot be rolled back to {length}")
        if length == old[seat]:
            continue
        pages = table[seat, length // PAGE : -(-int(old[seat]) // PAGE)]
        if (count[pages] > 1).any():
            raise ValueError(
                f"seat {seat} cannot be rolled back to {length}: page {pages[count[pages] > 1][0]} there is shared "
                "with another request; fork again from a shorter prefix instead"
            )


def _or_outside(pages: jax.Array, tables: Tables) -> jax.Array:
    """Pages with NO_PAGE replaced by one past the end, so that mode='drop' drops it."""
    return jnp.where(pages == NO_PAGE, tables.page_count.shape[0], pages)
