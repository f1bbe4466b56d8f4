"""What stands between a layer's selection and its attended values on an H200, where every small kernel is 2 us more.

The steps of bench/attention_layer.py, in the order in which XLA launches them. What they need besides is counted: one
kernel that stores what is new and makes the scorer's operands, and what a program needs once.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from bench import attention_layer
from tests.aot.compile import compile_for_h200, device, host, need_cuda_handlers, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

BEFORE_SCORES = {"none": 2, "fused": 6}
"""Page numbers, and what is new in its stored forms; for what is staged, blank lists and a cap."""


@pytest.fixture(scope="module", autouse=True)
def cuda_handlers():
    need_cuda_handlers()


def launched(prefetch: str, seats: int) -> list[str]:
    """The kernels of two steps of a layer in the order of their launch: targets of custom calls, and XLA's own."""
    size = attention_layer.Size(seats=seats, slots=98_304, steps=2, context=8192)
    config = dataclasses.replace(size.config(prefetch), score_implementation="mosaic_gpu")

    def two_steps(state, host_pool, fixed, index_query):
        after = jnp.zeros(())
        for clock in range(2):  # the second waits for the first
            state, after, _ = attention_layer.one_step(
                config, host_pool, state, fixed, index_query, jnp.int32(clock), after
            )
        return state, after

    state = jax.eval_shape(functools.partial(attention_layer.first_state, config), jax.random.key(0))
    fixed, directions = jax.eval_shape(functools.partial(attention_layer.arrays, size))
    records = host((1, config.host_rows, *config.records.shape), config.records.dtype)
    query = device(directions.fixed.shape, directions.fixed.dtype)
    compiled = compile_for_h200(two_steps, state, records, fixed, query, donate_argnums=0)
    kernel = r'^  %?\S+ = .*? (?:fusion\(.*kind=(\w+)|custom-call\(.*custom_call_target="(\w+)"|(copy)\()'
    return [next(filter(None, kinds)) for kinds in re.findall(kernel, compiled.text, re.MULTILINE)]


@pytest.mark.parametrize(("prefetch", "seats"), [("none", 32), ("fused", 4)])
def test_nothing_stands_between_selection_and_attention(prefetch, seats):
    kernels = launched(prefetch, seats)
    for selection in (index for index, kernel in enumerate(kernels) if kernel == "echo_top_k"):
        between = kernels[selection - 1 : selection + 3]
        assert between == ["mosaic_gpu_v2", "echo_top_k", "echo_require", "mosaic_gpu_v2"], kernels
    assert kernels.count("echo_top_k") == kernels.count("echo_encode") == 2
    scores = kernels.index("mosaic_gpu_v2")
    assert scores <= BEFORE_SCORES[prefetch], f"{scores} kernels before the scores: {kernels[:scores]}"
