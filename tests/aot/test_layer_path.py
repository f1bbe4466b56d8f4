"""What stands between a layer's selection and its attended values on an H200, where every small kernel is 2 us more.

Two steps of a layer of released shapes, in the order in which XLA launches them. What they need besides is counted:
kernels that store what is new, and kernels that make the scorer's operands.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from echo_jax import layer as layer_lib
from echo_jax import pool, threshold
from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.layer import LayerInputs
from echo_jax.recall import StepView
from echo_jax.types import LayerState
from tests.aot.compile import compile_for_h200, device, host, need_cuda_handlers, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

CONTEXT, SLOTS, K = 8192, 98_304, 2048
HEADS, INDEX_HEADS, WIDTH, KEY = 128, 64, 576, 128

BEFORE_SCORES = {"none": 7, "fused": 11}
"""The key takes one, the record two, the query three, page numbers one; what is staged, blank lists and a cap."""


@pytest.fixture(scope="module", autouse=True)
def cuda_handlers():
    need_cuda_handlers()


def config_of(prefetch: str, seats: int) -> CacheConfig:
    return CacheConfig(
        layer_kinds=("full",),
        records=RecordFormat("fp8", 512, 64),
        keys=KeyFormat("fp8", KEY),
        threshold=threshold.Ema(),
        eviction=Lru(),
        seats=seats,
        capacity=CONTEXT,
        host_rows=seats * CONTEXT,
        device_slots=SLOTS,
        top_k=K,
        staging=0 if prefetch == "none" else 128,
        prefetch_implementation="auto" if prefetch == "none" else prefetch,
        score_implementation="mosaic_gpu",
        attend_implementation="mosaic_gpu",
    )


def launched(prefetch: str, seats: int) -> list[str]:
    """The kernels of two steps of a layer in the order of their launch: targets of custom calls, and XLA's own."""
    config = config_of(prefetch, seats)

    def two_steps(state, host_pool, view, inputs):
        attended = jnp.zeros(())
        for _ in range(2):  # the second waits for the first
            after = inputs._replace(index_weights=inputs.index_weights + attended.reshape(-1)[0])
            state, out = layer_lib.echo_layer(config, state, host_pool, 0, view, after, scale=1.0)
            attended = out.attended
        return state, attended

    def initial() -> LayerState:
        return LayerState(
            slots=pool.initial(config.host_rows, config.device_slots),
            records=jnp.zeros((config.pool_rows, *config.records.shape), config.records.dtype),
            index_keys=jnp.zeros((config.pages, *config.keys.page_shape), config.keys.dtype),
            threshold=threshold.initial(config.threshold, config.seats),
        )

    shape: Any = device
    numbers, floats = functools.partial(shape, dtype=jnp.int32), functools.partial(shape, dtype=jnp.float32)
    view = StepView(
        *(numbers((seats, CONTEXT)), numbers((seats,)), numbers((seats, 1)), numbers((seats, 1))),
        *(numbers((seats, 1)), numbers(())),
    )
    inputs = LayerInputs(
        *(shape((seats, 1, HEADS, WIDTH), jnp.bfloat16), floats((seats, 1, WIDTH))),
        *(floats((seats, 1, INDEX_HEADS, KEY)), floats((seats, 1, INDEX_HEADS)), floats((seats, 1, KEY))),
    )
    records = host((1, config.host_rows, *config.records.shape), config.records.dtype)
    compiled = compile_for_h200(two_steps, jax.eval_shape(initial), records, view, inputs, donate_argnums=0)
    kernel = r'^  %?\S+ = .*? (?:fusion\(.*kind=(\w+)|custom-call\(.*custom_call_target="(\w+)"|(copy)\()'
    return [next(filter(None, kinds)) for kinds in re.findall(kernel, compiled.text, re.MULTILINE)]


@pytest.mark.parametrize(("prefetch", "seats"), [("none", 32), ("fused", 4)])
def test_nothing_stands_between_selection_and_attention(prefetch, seats):
    kernels = launched(prefetch, seats)
    for selection in (index for index, kernel in enumerate(kernels) if kernel == "echo_top_k"):
        between = kernels[selection - 1 : selection + 3]
        assert between == ["mosaic_gpu_v2", "echo_top_k", "echo_require", "mosaic_gpu_v2"], kernels
    assert kernels.count("echo_top_k") == 2
    scores = kernels.index("mosaic_gpu_v2")
    assert scores <= BEFORE_SCORES[prefetch], f"{scores} kernels before the scores: {kernels[:scores]}"
