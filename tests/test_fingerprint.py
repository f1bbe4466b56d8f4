"""A model's fingerprint follows every bit of its weights and every field of its configuration, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import echo_jax as echo
from tests import scenarios

PARAMS = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": [np.zeros((3,), ml_dtypes.bfloat16)]}
MODEL = scenarios.ONE_LAYER


def test_the_same_model_has_the_same_fingerprint_on_host_and_device():
    found = echo.model_fingerprint(PARAMS, MODEL)
    assert len(found) == 32 and found == echo.model_fingerprint(jax.tree.map(jnp.asarray, PARAMS), MODEL)


def changed(path: str, change) -> dict:
    copied = jax.tree.map(np.array, PARAMS)
    leaf = copied["a"] if path == "a" else copied["b"][0]
    change(leaf)
    return copied


def swap(leaf):
    leaf[0, 0], leaf[0, 1] = leaf[0, 1], leaf[0, 0].copy()


def swap_rows(leaf):
    leaf[[0, 1]] = leaf[[1, 0]]


def negate_zero(leaf):
    leaf[1] = -0.0


@pytest.mark.parametrize(
    "other",
    [
        changed("a", lambda leaf: leaf.view(np.uint32).__setitem__((3, 5), leaf.view(np.uint32)[3, 5] ^ 1)),
        changed("a", swap),
        changed("a", swap_rows),
        changed("b", negate_zero),
        {"a": PARAMS["a"].reshape(6, 4), "b": PARAMS["b"]},
        {"a": PARAMS["a"], "c": PARAMS["b"]},
        {"a": PARAMS["a"], "b": [PARAMS["b"][0].astype(np.float16)]},
        {"a": PARAMS["a"]},
    ],
    ids=["one_bit", "two_swapped", "rows_swapped", "sign_of_zero", "shape", "name", "dtype", "leaf_missing"],
)
def test_any_change_of_the_weights_shows(other):
    assert echo.model_fingerprint(other, MODEL) != echo.model_fingerprint(PARAMS, MODEL)


def test_any_change_of_the_configuration_shows():
    other = dataclasses.replace(MODEL, rms_norm_eps=2e-6)
    assert echo.model_fingerprint(PARAMS, other) != echo.model_fingerprint(PARAMS, MODEL)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e8m0fnu, jnp.uint8, jnp.bool_, jnp.int32, jnp.float16])
def test_every_stored_dtype_is_served(dtype):
    one = {"w": jnp.ones((5, 7), dtype)}
    other = {"w": jnp.ones((5, 7), dtype).at[4, 6].set(jnp.zeros((), dtype))}
    if dtype == jnp.float8_e8m0fnu:  # it has no zero
        other = {"w": jnp.ones((5, 7), dtype).at[4, 6].set(jnp.asarray(2.0, dtype))}
    assert echo.model_fingerprint(one, MODEL) != echo.model_fingerprint(other, MODEL)


def test_arrays_spread_over_devices_count_as_one():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = {"w": np.arange(64, dtype=np.float32).reshape(8, 8)}
    placed = {"w": jax.device_put(whole["w"], spread)}
    assert echo.model_fingerprint(placed, MODEL) == echo.model_fingerprint(whole, MODEL)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
def test_no_copy_of_a_leaf_is_made(dtype):
    """Regression: two reductions kept the mixed words, four times the bytes of a bf16 leaf."""
    from echo_jax import fingerprint

    compiled = fingerprint._digest.lower(jax.ShapeDtypeStruct((1024, 1024), dtype)).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 1024
