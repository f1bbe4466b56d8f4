"""Oracle of `locate`: the place of every list entry, and the record that must be there. Loops, one entry at a time."""

import numpy as np

from tests.oracles.words import NO_ROW, NO_SLOT

PAGE = 64
NO_PLACE = -1


def locate(slot_of, layer, page_table, lengths, positions, new_records, staged_rows, staged, host_pool, device_slots):
    """places i32[B, T, K], and {place: record} of every place at or beyond device_slots that holds something.

    All arguments are NumPy arrays as echo_jax.locate takes them; `layer` may lie outside the pool.
    """
    seats, tokens, listed = positions.shape
    has_layer = 0 <= layer < host_pool.shape[0]
    places = np.full(positions.shape, NO_PLACE, np.int32)
    held = {}
    for seat in range(seats):
        for token in range(tokens):
            held[device_slots + seat * tokens + token] = new_records[seat, token]

    place_of_row = {}  # of the rows that were fetched
    for seat in range(seats):
        for token in range(tokens):
            for k in range(listed):
                position = int(positions[seat, token, k])
                if position < 0:
                    continue
                if position >= lengths[seat]:
                    if position < lengths[seat] + tokens:
                        places[seat, token, k] = device_slots + seat * tokens + position - lengths[seat]
                    continue
                if position // PAGE >= page_table.shape[1]:
                    continue
                page = int(page_table[seat, position // PAGE])
                if not 0 <= page < host_pool.shape[1] // PAGE:
                    continue
                row = page * PAGE + position % PAGE
                slot = int(slot_of[layer, row]) if has_layer else NO_SLOT
                if 0 <= slot < device_slots:
                    places[seat, token, k] = slot
                    continue
                if row not in place_of_row:
                    place = device_slots + seats * tokens + (seat * tokens + token) * listed + k
                    place_of_row[row] = place
                    held[place] = _record(row, layer, has_layer, staged_rows[seat], staged[seat], host_pool)
                places[seat, token, k] = place_of_row[row]
    return places, held


def _record(row, layer, has_layer, staged_rows, staged, host_pool):
    for at, staged_row in enumerate(staged_rows):
        if staged_row == row and row != NO_ROW:
            return staged[at]
    return host_pool[layer, row] if has_layer else np.zeros(host_pool.shape[2:], host_pool.dtype)
