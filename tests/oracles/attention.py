"""Oracle of the sparse attention: absorbed MLA over a list of records, in float64.

Knows one query and the records it may read. Knows nothing of slots, formats or projections: records come as
the numbers they stand for, already gathered or by index.
"""

import math
from collections.abc import Sequence

import numpy as np


def attend_one(query: np.ndarray, records: np.ndarray, indices: Sequence[int], scale: float, latent: int) -> np.ndarray:
    """f64[H, latent]: for each head, the softmax(scale * query . record)-weighted sum of latent parts.

    query: [H, W]  records: [N, W]  indices: into `records`; negative entries are padding and are skipped

    A list without entries gives zeros. A row that is listed twice counts twice.
    """
    query = np.asarray(query).astype(np.float64)
    listed = [np.asarray(records[index]).astype(np.float64) for index in indices if index >= 0]
    output = np.zeros((query.shape[0], latent))
    for head in range(query.shape[0]):
        logits = [scale * float(np.dot(query[head], record)) for record in listed]
        if not logits:
            continue
        largest = max(logits)
        weights = [math.exp(logit - largest) for logit in logits]
        for weight, record in zip(weights, listed, strict=True):
            output[head] += weight / math.fsum(weights) * record[:latent]
    return output


def attend(query: np.ndarray, records: np.ndarray, indices: np.ndarray, scale: float, latent: int) -> np.ndarray:
    """f64[T, H, latent]: `attend_one` for each of T queries. query: [T, H, W]  indices: [T, K]"""
    outputs = []
    for t in range(len(query)):
        outputs.append(attend_one(query[t], records, [int(index) for index in indices[t]], scale, latent))
    return np.stack(outputs)
