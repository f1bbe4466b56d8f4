"""echo_locate compiled for an H200: one call in a graph, nothing copied, nothing aliased."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax.numpy as jnp
import pytest

from echo_jax.locate import locate
from echo_jax.types import PAGE, Staging, Tables
from tests.aot.compile import compile_for_h200, device, host, need_cuda_handlers, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

LAYERS, SEATS, TOKENS, TOP_K, STAGING, POSITIONS = 6, 4, 2, 2048, 64, 8192
HOST_ROWS, RECORD = SEATS * POSITIONS, (164,)


@pytest.fixture(scope="module", autouse=True)
def cuda_handlers():
    need_cuda_handlers()


def test_a_layer_number_is_an_operand_and_no_pool_is_copied():
    i32: Any = functools.partial(device, dtype=jnp.int32)
    boolean: Any = functools.partial(device, dtype=jnp.bool_)
    words: Any = functools.partial(device, dtype=jnp.uint32)
    tables = Tables(
        page_table=i32((SEATS, POSITIONS // PAGE)),
        page_count=i32((HOST_ROWS // PAGE,)),
        page_cached=boolean((HOST_ROWS // PAGE,)),
        lengths=i32((SEATS,)),
        active=boolean((SEATS,)),
    )
    staging = Staging(i32((SEATS, STAGING)), words((SEATS, STAGING, *RECORD)), i32((SEATS,)))
    pool = host((LAYERS, HOST_ROWS, *RECORD), jnp.uint32)

    def all_layers(slot_of, tables, positions, new, staging, pool):
        found = []
        for layer in range(LAYERS):
            located = locate(slot_of, layer, tables, positions, new, staging, pool, device_slots=4096)
            positions = positions + jnp.minimum(located.places, 0)  # the next layer waits for this one
            found.append(located.fetched[:, 0].sum())
        return positions, found

    lists = i32((SEATS, TOKENS, TOP_K)), words((SEATS, TOKENS, *RECORD))
    compiled = compile_for_h200(all_layers, i32((LAYERS, HOST_ROWS)), tables, *lists, staging, pool)
    assert compiled.text.count('custom_call_target="echo_locate"') == LAYERS
    assert compiled.memory.host_temp_size_in_bytes == 0
    for shape in (f"s32[{LAYERS},{HOST_ROWS}]", f"u32[{LAYERS},{HOST_ROWS},164]", f"s32[{HOST_ROWS}]"):
        copies = re.findall(rf"= {re.escape(shape)}\S* (copy|slice|dynamic-slice|fusion)\(", compiled.text)
        assert not copies, f"{shape} is copied: {copies}"
    assert compiled.thunks.count("kCommandBuffer") == 1, compiled.thunks
    fetched = SEATS * TOKENS * (1 + TOP_K) * 4 * RECORD[0]
    assert compiled.memory.temp_size_in_bytes < 1.2 * fetched, "the fetched records of one layer, not of each"
