"""The promise on a GPU that copies rows ahead while the indexer scores: the histories of scenarios.py, bit for bit.

By hand, on a Hopper GPU; some minutes of compiling:

    XLA_FLAGS=--xla_gpu_autotune_level=0 JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu -n 8 tests/test_lossless_gpu.py
"""

from __future__ import annotations

import dataclasses
import os

import jax
import numpy as np
import pytest

from tests import scenarios
from tests.test_lossless import PLAIN, run_both

AUTOTUNING = "--xla_gpu_autotune_level=0"
MODEL = dataclasses.replace(scenarios.ONE_LAYER, index_head_dim=128)  # as wide as the kernel's keys
SETTING = PLAIN | {"records": "fp8", "keys": "fp8", "memory": "auto"}


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("cap", scenarios.AXES["cap"])
@pytest.mark.parametrize("threshold", ["nan", "never", "always", "random", "ema"])
def test_copies_ahead_while_scoring_change_nothing(threshold, cap, tokens):
    """Contexts that cross K, a fork, a cancelled request, a reused seat, a shared prefix and rejected tokens, with a
    pool just above what a step needs. "never" is a threshold of +inf, "always" of -inf."""
    if AUTOTUNING not in os.environ.get("XLA_FLAGS", ""):
        pytest.skip(f"XLA may choose other products in the two programs; set XLA_FLAGS={AUTOTUNING}")
    setting = SETTING | {"threshold": threshold, "cap": cap, "tokens": tokens}
    ours = run_both(setting, model=MODEL, prefetch_implementation="fused")
    staged = sum(int(np.sum(moved.staged)) for moved in jax.device_get(ours.moved))
    assert (staged > 0) == (cap > 0 and threshold in ("always", "random", "ema"))
