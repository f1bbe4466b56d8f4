"""The decode step with its layers in a `lax.scan`, compiled for an H200 without one: what XLA copies, and the seconds.

    python -m bench.scan_form [unrolled | carry | collected] ... [--layers 61]      5 minutes on two slow cores

unrolled   `decode.step` as it is: a tuple of layers, one after the other
carry      all layers' states stacked in the loop's carry; a turn takes its layer out and puts it back
collected  the stacked states are what the loop reads, the new ones what it collects

The host pool is closed over and read only; all new records go to it in one call behind the loop. The layers are equal:
of DeepSeek-V3.2's sizes, "full" and dense. It shows what docs/scan.md says; nothing here runs, so nothing is recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax import _ffi, decode
from echo_jax import state as state_lib
from echo_jax.layer import echo_layer
from echo_jax.models import dsa, presets
from tests.aot.compile import Compiled, compile_for_h200, device, host, why_not

SEATS, CONTEXT, SLOTS = 16, 65536, 65536
LARGE = 2**20  # bytes; smaller arrays are not worth a line


def configure(layers: int) -> decode.DecodeConfig:
    model = dataclasses.replace(presets.V32, layer_kinds=("full",) * layers, mlp_kinds=("dense",) * layers)
    cache = decode.cache_config(
        model, seats=SEATS, capacity=CONTEXT, device_slots=SLOTS, record_format="fp8", key_format="fp8"
    )
    return decode.DecodeConfig(model, cache)


def scanned(config: decode.DecodeConfig, is_carried: bool) -> Callable[..., Any]:
    """`decode.step` for stacked layers: params["layers"] and state.layers[0] have a leading axis of layers."""
    model, cache = config.model, config.cache

    def step(params, state, tokens):
        view = state_lib.begin_step(cache, state, tokens.shape[1])
        positions = view.positions.reshape(-1)

        def one(hidden, weights, layer, index):
            inputs = decode._by_seat(dsa.project(weights, hidden, positions, model), tokens.shape)
            layer, made = echo_layer(cache, layer, state.host_pool, index, view, inputs, scale=model.attention_scale)
            attended = made.attended.reshape(positions.shape[0], *made.attended.shape[2:])
            hidden = dsa.finish(weights, hidden, attended, model, model.mlp_kinds[0])
            return hidden, layer, (made.new_records, made.selection.positions, made.digest, made.moved)

        def collected(hidden, turn):
            hidden, layer, made = one(hidden, *turn)
            return hidden, (layer, made)

        def carried(carry, turn):
            (hidden, stacked), (weights, index) = carry, turn
            layer = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked)
            hidden, layer, made = one(hidden, weights, layer, index)
            put = functools.partial(lax.dynamic_update_index_in_dim, index=index, axis=0)
            return (hidden, jax.tree.map(put, stacked, layer)), made

        hidden, (stacked,) = dsa.embed(params, tokens.reshape(-1), model), state.layers
        numbers = jnp.arange(model.num_layers, dtype=jnp.int32)
        if is_carried:
            (hidden, stacked), made = lax.scan(carried, (hidden, stacked), (params["layers"], numbers))
        else:
            hidden, (stacked, made) = lax.scan(collected, hidden, (params["layers"], stacked, numbers))
        records, *others = made
        state = state_lib.finish_step(cache, state, (stacked,), list(records), view)
        return state, (dsa.logits(params, hidden, model).reshape(*tokens.shape, -1), *others)

    return step


def placed(tree, *leading: int):
    return jax.tree.map(lambda leaf: device((*leading, *leaf.shape), leaf.dtype), tree)


def bytes_of(*leaves) -> int:
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def compile_form(config: decode.DecodeConfig, form: str) -> tuple[Compiled, Any, float]:
    """The executable, the state's shapes, and seconds from trace to executable."""
    make = functools.partial(dsa.init_params, config=config.model, dtype="bfloat16")
    params = jax.eval_shape(make, jax.random.key(0))
    empty = jax.eval_shape(lambda: state_lib.create(dataclasses.replace(config.cache, host_memory="jnp")))
    state = placed(empty).replace(host_pool=host(empty.host_pool.shape, empty.host_pool.dtype))
    weights, step = placed(params), functools.partial(decode.step, config=config)
    if form != "unrolled":
        layers, step = config.cache.num_layers, scanned(config, form == "carry")
        weights = weights | {"layers": placed(params["layers"][0], layers)}
        state = state.replace(layers=(placed(empty.layers[0], layers),))
    started = time.perf_counter()
    made = compile_for_h200(step, weights, state, device((SEATS, 1), jnp.int32), donate_argnums=1)
    return made, (state, empty.layers[0], params["layers"][0]), time.perf_counter() - started


def sliced(compiled: Compiled, tree, layers: int) -> dict[str, int]:
    """Bytes of a layer's large arrays that a turn copies out of the stack, that it copies back, and that the program
    copies whole. A slice that a larger kernel takes for itself, as a product may, is no copy: what counts as one is a
    kernel that cuts it and whose result has its shape."""
    found: dict[str, int] = {"out": 0, "back": 0, "whole": 0}
    kernels = compiled.text.split("\n}\n")
    for leaf in jax.tree.leaves(tree):
        if bytes_of(leaf) < LARGE:
            continue
        shape = re.escape(",".join(map(str, leaf.shape)))
        cuts = [kernel for kernel in kernels if re.search(rf"\[1,{shape}\]\S* dynamic-slice\(", kernel)]
        is_copied = any(re.search(rf"ROOT %\S+ = [^=]*?\[(?:1,)?{shape}\][^=]*? [\w-]+\(", kernel) for kernel in cuts)
        found["out"] += bytes_of(leaf) * is_copied
        for name, operation in (("back", "dynamic-update-slice"), ("whole", "copy")):
            is_there = re.search(rf"\w+\[{layers},{shape}\]\S* {operation}\(", compiled.text)
            found[name] += bytes_of(leaf) * (is_there is not None)
    return found


def report(form: str, layers: int) -> None:
    compiled, (state, layer, weights), seconds = compile_form(configure(layers), form)
    memory, on_host = compiled.memory, bytes_of(state.host_pool)
    on_device = bytes_of(*jax.tree.leaves(state)) - on_host
    top = re.findall(r"^\d+: (k\w+)", compiled.thunks, flags=re.MULTILINE)
    print(f"{form}: {layers} layers in {seconds:.0f} s; launched by the host: {', '.join(top)}")
    print(
        f"  host pool updated in place: {memory.host_alias_size_in_bytes == on_host}, host temp "
        f"{memory.host_temp_size_in_bytes}; the rest of the state too: {memory.alias_size_in_bytes == on_device}; "
        f"temp {memory.temp_size_in_bytes:,}"
    )
    for what, tree in (("state", layer), ("weights", weights)):
        found = sliced(compiled, tree, layers)
        print(
            f"  of a layer's {bytes_of(*jax.tree.leaves(tree)):,} bytes of {what}: {found['out']:,} copied out of the "
            f"stack, {found['back']:,} back into it, {found['whole']:,} in copies of the whole stack",
            flush=True,
        )


def main() -> None:
    forms = ("unrolled", "carry", "collected")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("forms", nargs="*", choices=[*forms, []], default=[])
    parser.add_argument("--layers", type=int, default=61)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"nothing can be compiled for an H200 here: {reason}")
    _ffi.register_for("gpu")
    for form in options.forms or forms:
        report(form, options.layers)


if __name__ == "__main__":
    main()
