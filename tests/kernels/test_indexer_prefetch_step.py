"""A decode step that copies rows ahead inside the scorer: still the resident run, bit for bit.

On a CPU the scorer is its reference, so what is held here is the wiring: which threshold, cap, lengths and maps the
kernel is handed, and what becomes of what it staged.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import layer
from pallas_kernels import dispatch, indexer_prefetch
from tests import scenarios
from tests.scenarios import ONE_LAYER
from tests.test_lossless import PLAIN, run_both

SETTING = PLAIN | {"memory": "jnp", "threshold": "random", "tokens": 2}


def run(prefetch):
    return run_both(SETTING, model=ONE_LAYER, prefetch_implementation=prefetch)


def test_fused_prefetch_is_the_resident_run(monkeypatch):
    calls = []

    def watched(*arguments, **options):
        calls.append((options["staging"], options["bound"] is not None))
        return indexer_prefetch(*arguments, **options)

    monkeypatch.setattr(layer, "indexer_prefetch", watched)
    fused = run("fused")
    assert set(calls) == {(scenarios.cache(SETTING, offload=True, model=ONE_LAYER).cache.staging, True)}
    assert sum(int(np.sum(moved.useful)) for moved in fused.moved) > 0
    assert sum(int(np.sum(moved.refused)) for moved in fused.moved) > 0


def test_a_second_stream_changes_nothing():
    """On a CPU there is one, so that what is held is that the copies are the same."""
    found, separate = run("second_stream"), run("separate")
    assert [moved.useful.tolist() for moved in found.moved] == [moved.useful.tolist() for moved in separate.moved]
    assert sum(int(np.sum(moved.useful)) for moved in found.moved) > 0


def test_an_unknown_way_to_prefetch_is_refused():
    config = scenarios.cache(PLAIN, offload=True, model=ONE_LAYER).cache
    with pytest.raises(ValueError, match="prefetch_implementation 'third_stream' is unknown"):
        dataclasses.replace(config, prefetch_implementation="third_stream")


def test_auto_is_the_kernel_of_a_gpu_where_there_is_one(monkeypatch):
    """The GPU, the keys and what was asked for decide."""
    config = scenarios.cache(SETTING, offload=True, model=ONE_LAYER).cache
    query, keys = jnp.zeros((2, 1, 64, 128)), jnp.zeros((4, 64 * 132), jnp.uint8)
    wanted = functools.partial(layer.prefetch_way, query=query, keys=keys)
    assert config.prefetch_implementation == "auto" and wanted(config) == "separate"  # on a CPU

    monkeypatch.setattr(dispatch, "_is_hopper", lambda: True)
    large = dataclasses.replace(config, capacity=layer.LEAST_POSITIONS_TO_HIDE_BEHIND)
    assert wanted(large) == "fused" and wanted(config) == "none"
    assert layer.prefetch_way(large, query, jnp.zeros((4, 64, 128), jnp.float32)) == "separate"  # no kernel for these
    for change, way in (
        ({"prefetch_implementation": "separate"}, "separate"),
        ({"score_implementation": "reference"}, "separate"),
        ({"staging": 0}, "none"),
        ({"offload": False}, "none"),
    ):
        assert wanted(dataclasses.replace(large, **change)) == way
    assert wanted(dataclasses.replace(config, prefetch_implementation="fused")) == "fused"


def test_where_nothing_can_be_hidden_nothing_is_copied_ahead(monkeypatch):
    """And the run is the resident one all the same."""
    monkeypatch.setattr(layer, "scores_on_this_gpu", lambda query, keys: True)
    found = run("auto")
    assert sum(int(np.sum(moved.staged)) for moved in found.moved) == 0
