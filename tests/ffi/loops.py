"""What each movement means, in loops over NumPy arrays: slow, exact, and sharing nothing with the library.

Every function returns a new array and leaves its arguments alone.
"""

from __future__ import annotations

import numpy as np


def recall(records, host_pool, layer, host_rows, slots, source, extra) -> np.ndarray:
    result = records.copy()
    for row, slot, origin in zip(host_rows, slots, source, strict=True):
        if row >= 0 and slot >= 0:
            result[slot] = host_pool[layer, row] if origin == -1 else extra[origin]
    return result


def read_rows(host_pool, layer, rows):
    result = np.zeros((len(rows), *host_pool.shape[2:]), host_pool.dtype)
    for index, row in enumerate(rows):
        if row >= 0:
            result[index] = host_pool[layer, row]
    return result


def write_back(host_pool, records, rows):
    result = host_pool.copy()
    for layer in range(host_pool.shape[0]):
        for index, row in enumerate(rows):
            if row >= 0:
                result[layer, row] = records[layer, index]
    return result


def copy_rows(host_pool, source, target):
    result = host_pool.copy()
    for layer in range(host_pool.shape[0]):
        for origin, row in zip(source, target, strict=True):
            if origin >= 0 and row >= 0:
                result[layer, row] = host_pool[layer, origin]
    return result
