"""The TPU-style prefetch under TPU interpretation: promises kept, races looked for, and found where a wait is missing.

The tests know the cases and what a role of the kernel may forget. What is right is the judge's word (`cases.Inputs`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels.indexer_prefetch import cases, mosaic_tpu
from pallas_kernels.indexer_scores import cases as scores

INFINITE, NAN = float("inf"), float("nan")


def case(name: str, *visible: tuple[int, ...], threshold: tuple[float, ...], cap: tuple[int, ...], **others):
    """Keys of small integers, so that every implementation gives the same bits."""
    pages = others.pop("pages", 3)
    return cases.Case(
        scores.Case(name, "bf16", visible, pages=pages, heads=4), threshold, cap, 16, records="pairs", **others
    )


SEATS = case(
    "seats",
    *((100, 101), (128, 128), (64, 65), (0, 0), (120, 121)),
    threshold=(0.5, -INFINITE, NAN, -INFINITE, 0.2),
    cap=(16, 1000, 16, 16, 7),
    pages=2,
)
"""Each buffer is filled, left alone and filled again; caps below, at and beyond the places there are."""

ONE_SEAT = case("one_seat", (64,), threshold=(0.5,), cap=(16,), pages=1)
TIGHT = case("tight", *(((64,),) * 4), threshold=(-INFINITE,) * 4, cap=(2,) * 4, pages=1, resident=0.0)
"""A page a seat: nothing but the waits keeps a buffer's old rows from its new ones."""


def run(inputs: cases.Inputs, mode: Any = "on_wait") -> tuple[Any, bool]:
    """The kernel's result, and whether accesses raced."""
    parameters = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    kernel = functools.partial(mosaic_tpu.score_and_prefetch, staging=inputs.staging, interpret=parameters)
    arguments = [jnp.asarray(argument) for argument in inputs.arguments]
    try:
        made = jax.tree.map(np.asarray, jax.jit(kernel)(*arguments))
        races = interpret_pallas_call.races
        assert races is not None
        return made, races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def plain_scores(inputs: cases.Inputs) -> np.ndarray:
    return np.asarray(pallas_kernels.indexer_scores(*map(jnp.asarray, inputs.scored), implementation="reference"))


@pytest.mark.parametrize(
    ("one", "mode"), [(SEATS, "on_wait"), (TIGHT, "eager"), (ONE_SEAT, "on_wait")], ids=["seats", "tight", "one_seat"]
)
def test_promises_are_kept_without_a_race(one, mode):
    """A copy may run when it is started or as late as it is waited for."""
    inputs = cases.make(one)
    made, raced = run(inputs, mode)
    totals = inputs.judge(made, plain_scores(inputs))
    assert not raced
    if one is SEATS:
        assert made.count.tolist() == [16, 16, 0, 0, 7] and min(totals[0], totals[1], totals[4]) > 16
        prefetch = functools.partial(pallas_kernels.indexer_prefetch, staging=inputs.staging)
        reference = prefetch(*map(jnp.asarray, inputs.arguments), implementation="reference")
        np.testing.assert_array_equal(made.rows, reference.rows)  # the lowest positions, here as there


@pytest.mark.parametrize(("forgotten", "staging"), [("wait_until_landed", 3), ("wait_until_left", 4)])
def test_a_forgotten_wait_is_a_race(forgotten, staging, monkeypatch, capfd):
    """Rows that leave before they have arrived; a buffer that is filled again before it has left. Found even where the
    copies happened to be fast enough (`eager`) and the records are right."""
    inputs = cases.make(dataclasses.replace(TIGHT, staging=staging))  # its own shape: traces of a kernel are kept
    monkeypatch.setattr(mosaic_tpu, forgotten, lambda *_: None)
    assert run(inputs, "eager")[1]
    assert "RACE DETECTED" in capfd.readouterr().out


def test_it_lowers_for_a_tpu():
    """Through Mosaic's checks of block shapes, memories and scalars, at the sizes of DeepSeek-V3.2."""
    seats, rows, heads, width, pages, staging = 4, 2, 64, 128, 12, 64

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    arguments = (
        of(jnp.float32, seats, rows, heads, width),
        of(jnp.float32, seats, rows, heads),
        of(jnp.bfloat16, pages, 64, width),
        of(jnp.int32, seats, 3),
        of(jnp.int32, seats, rows),
        of(jnp.float32, seats),
        *[of(jnp.int32, seats)] * 2,
        of(jnp.int32, pages * 64),
        of(jnp.bfloat16, 2, pages * 64, 3, 192),
        of(jnp.int32),
    )
    device = AbstractDevice(device_kind="TPU v5e", platform="tpu", num_cores=1)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        kernel = jax.jit(functools.partial(mosaic_tpu.score_and_prefetch, staging=staging))
        lowered = kernel.trace(*arguments).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


def test_what_is_not_covered_is_said():
    inputs = cases.make(cases.CORNERS[0])
    with pytest.raises(NotImplementedError, match="keys are uint8"):
        mosaic_tpu.score_and_prefetch(*map(jnp.asarray, inputs.arguments), staging=inputs.staging)
    inputs = cases.make(ONE_SEAT)
    with pytest.raises(NotImplementedError, match="staging is 0"):
        mosaic_tpu.score_and_prefetch(*map(jnp.asarray, inputs.arguments), staging=0)
