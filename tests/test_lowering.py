"""The step as it leaves JAX, for another platform than this one: nothing in it is bound to the CPU.

This is lowering only. That XLA's GPU passes make one captured graph of it is for the compile tests of the GPU path.
"""

from __future__ import annotations

import numpy as np
import pytest

from echo_jax import decode
from echo_jax import state as state_lib
from tests import scenarios
from tests.test_lossless import GLM, PLAIN


@pytest.mark.parametrize("memory", ["ffi", "jnp"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_step_lowers_for_cuda(memory, tokens):
    """One module; with the library the pool stays host memory and is written by one call, whatever the layers."""
    config = scenarios.cache(PLAIN | {"memory": memory, "tokens": tokens}, offload=True, model=GLM)
    state = state_lib.create(config.cache)
    step = decode.decode_step.trace(
        scenarios.parameters(GLM), state, np.zeros((3, tokens), np.int32), config=config
    ).lower(lowering_platforms=("cuda",))
    text = step.as_text()
    layers = config.cache.num_layers
    assert text.count("custom_call @echo_require") == (layers if memory == "ffi" else 0)
    assert text.count("custom_call @echo_write_back") == (1 if memory == "ffi" else 0)
    assert state.host_pool is not None
    assert ("pinned_host" in text) == (memory == "ffi")
    assert "callback" not in text, "a call back into Python would leave the graph"


def test_every_layer_reads_the_whole_pool():
    """Layer numbers are operands and the pool is never sliced: a slice would copy it."""
    config = scenarios.cache(PLAIN, offload=True, model=GLM)
    state = state_lib.create(config.cache)
    assert state.host_pool is not None
    text = decode.decode_step.lower(
        scenarios.parameters(GLM), state, np.zeros((3, 1), np.int32), config=config
    ).as_text()
    pool = "x".join(map(str, state.host_pool.shape)) + "xbf16"
    readers = [line for line in text.splitlines() if "custom_call @echo_require" in line]
    assert readers and all(f"tensor<{pool}>" in line for line in readers)
    assert not [line for line in text.splitlines() if "slice" in line and f"tensor<{pool}>" in line]
