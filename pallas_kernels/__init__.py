"""Kernels: they know arrays, never caches.

One folder a kernel, with the same files in each: its meaning (`reference`), named data (`cases`), one file for each
backend, tile sizes (`tuned.json`). Callers come through `dispatch`, whose functions are here by name.
"""

from pallas_kernels.dispatch import indexer_prefetch, indexer_scores, scores_on_this_gpu
from pallas_kernels.sparse_mla.dispatch import sparse_mla

__all__ = ["indexer_prefetch", "indexer_scores", "scores_on_this_gpu", "sparse_mla"]
