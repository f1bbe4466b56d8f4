"""`echo-jax plan`: the memory bill of a model and a cache before anything is allocated.

Knows sizes. Allocates no array and asks no device: it plans for a machine that may not be this one. The bill of the
cache is the formula of `config`; weights are counted from their shapes; what a step needs in passing is an estimate
from the shapes of the portable implementation's largest values, and says so.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from echo_jax import pinning, threshold
from echo_jax.checkpoints.layout import is_never_narrowed, stored_tensors
from echo_jax.cli import numbers, output
from echo_jax.cli import options as options_lib
from echo_jax.cli.errors import InputError, refusing_wrong_input
from echo_jax.cli.models import DTYPES, planned_shape, stored_weight_bytes
from echo_jax.cli.options import option
from echo_jax.cli.pools import PoolOptions
from echo_jax.config import CacheConfig
from echo_jax.decode import DecodeConfig
from echo_jax.models.config import FULL, DsaConfig

EXAMPLES = """\
examples:
  echo-jax plan --model v32 --context 100000 --record-format fp8 --key-format fp8 \\
      --device-memory 141GB --weight-memory 90GB --host-memory-size 1TiB
  echo-jax plan --model echo-tiny --seats 4 --context 8192 --json

exit status: 0 done, 2 wrong input"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(PoolOptions):
    """Prints device and host bytes of a model and its cache before anything is allocated."""

    model: str = option(
        "a preset, a model of this package, a Hugging Face folder or its config.json alone",
        metavar="NAME|FOLDER",
        group="input",
    )
    dtype: str = option(
        "of the parameters; auto and stored are what the model says, quantised or not",
        "auto",
        choices=DTYPES,
        group="input",
    )
    seats: int = option("requests that run together", 1, metavar="B", group="cache")
    context: int | None = option(
        "positions of each request, the capacity of a seat (default: what the model knows, at most 131072)",
        None,
        metavar="P",
        group="cache",
    )
    tokens_per_step: int = option(
        "new tokens of each request in a step, as speculative decoding verifies them", 1, metavar="T", group="cache"
    )
    device_memory: int | None = option(
        "memory of the device, such as 141GB or 80GiB: how much fits?",
        None,
        metavar="SIZE",
        parse=numbers.size,
        group="budget",
    )
    host_memory_size: int | None = option(
        "host memory for the pool (default: no limit)", None, metavar="SIZE", parse=numbers.size, group="budget"
    )
    weight_memory: int | None = option(
        "the part of the weights on this device (default: all of them)",
        None,
        metavar="SIZE",
        parse=numbers.size,
        group="budget",
    )
    json: bool = option("print JSON rows instead of tables", False, group="output")
    output: Path | None = option("also write the rows to this file", None, metavar="FILE", group="output")


def execute(options: PlanOptions) -> int:
    """Runs the command."""
    with refusing_wrong_input():
        if options.seats < 1:
            raise InputError(f"--seats is {options.seats} but must be at least 1")
        model, weights = planned_shape(options.model), options.weight_memory
        if options.dtype in ("float32", "bfloat16"):
            model = dataclasses.replace(model, dtype=options.dtype)
        elif weights is None:
            weights = stored_weight_bytes(options.model)
        context = min(model.max_positions, 131072) if options.context is None else options.context
        config = options.decode_config(
            model, seats=options.seats, capacity=context, tokens_per_step=options.tokens_per_step
        )
        rows = output.Rows(options.json, options.output)
    with rows:
        weights = parameter_bytes(model) if weights is None else weights
        bill = bill_of(config, weights)
        facts = _facts(config)
        fits = [] if options.device_memory is None else _fits(options, config, weights, context)
        pinning = {"row": "pinning", "bytes": config.cache.host_bytes(), "seconds": pinning_seconds(config)}
        for row in ({"row": "config", "command": "plan"} | options_lib.record(options), *bill, facts, pinning, *fits):
            rows.add(row)
        if not options.json:
            _print(options, config, bill, facts, fits)
    return 0


# ---- the bill --------------------------------------------------------------------------------------------


def parameter_bytes(model: DsaConfig) -> int:
    """Bytes of all parameters in the model's dtype; the router and its like keep float32."""
    narrow = jnp.dtype(model.dtype).itemsize
    return sum(
        math.prod(tensor.shape) * (4 if is_never_narrowed(tensor.leaves[0]) else narrow)
        for tensor in stored_tensors(model)
    )


def bill_of(config: DecodeConfig, weights: int) -> list[dict[str, Any]]:
    """One row per kind of memory: where it is, its bytes, and whether the number is exact or an estimate."""
    cache = config.cache
    exact = [("device", f"cache: {kind}", count) for kind, count in cache.device_bytes().items()]
    extras = [("device", "threshold memory", _threshold_bytes(cache)), ("device", "page tables", _table_bytes(cache))]
    passing = [
        ("device", "parameters", weights),
        ("device", "prefill workspace", prefill_bytes(config)),
        ("device", "decode workspace", decode_bytes(config)),
    ]
    rows = [*exact, *extras, ("host", "host pool", cache.host_bytes())]
    made = [{"row": "bill", "where": where, "kind": kind, "bytes": count, "exact": True} for where, kind, count in rows]
    return made + [
        {"row": "bill", "where": where, "kind": kind, "bytes": count, "exact": False} for where, kind, count in passing
    ]


def _threshold_bytes(cache: CacheConfig) -> int:
    memory = jax.eval_shape(lambda: threshold.initial(cache.threshold, cache.seats))
    return cache.layer_kinds.count(FULL) * sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(memory)
    )


def _table_bytes(cache: CacheConfig) -> int:
    """Page table, counts and marks of pages, length and mark of each seat, the clock."""
    return 4 * cache.seats * cache.pages_per_seat + 5 * cache.pages + 5 * cache.seats + 4


def prefill_bytes(config: DecodeConfig) -> int:
    """An estimate: one layer's records and decoded keys of a seat, and one block's index products, twice: XLA may keep
    them before and after the relu."""
    model, cache = config.model, config.cache
    rows = cache.capacity * cache.records.bytes_per_row if cache.offload else 0
    keys = 4 * cache.capacity * cache.keys.width
    products = 4 * cache.block * 2 * (model.index_heads + 1) * cache.capacity
    gathered = 4 * cache.block * cache.top_k * (model.record_width + model.num_heads)
    return rows + keys + max(products, gathered)


def decode_bytes(config: DecodeConfig) -> int:
    """An estimate: decoded keys and index products of every seat in one layer, staging (of all layers that share a list
    at once, where they read ahead), and the gathered records."""
    model, cache = config.model, config.cache
    queries = cache.seats * cache.tokens_per_step
    keys = 4 * cache.seats * cache.capacity * cache.keys.width
    products = 4 * queries * 2 * (model.index_heads + 1) * cache.capacity
    together = max([1, *(len(cache.sharers_of(layer)) for layer in range(cache.num_layers) if cache.read_ahead)])
    staged = together * cache.seats * cache.staging * cache.records.bytes_per_row if cache.offload else 0
    gathered = queries * cache.top_k * (cache.records.bytes_per_row + 4 * (model.record_width + model.num_heads))
    return max(keys + products, gathered) + staged


def device_total(config: DecodeConfig, weights: int) -> int:
    """Device bytes at the worst moment: prefill and decode do not run together."""
    workspace = max(prefill_bytes(config), decode_bytes(config))
    extras = _threshold_bytes(config.cache) + _table_bytes(config.cache)
    return weights + sum(config.cache.device_bytes().values()) + extras + workspace


def pinning_seconds(config: DecodeConfig) -> float:
    """An estimate of how long the host pool's pages take to be locked, once, on a machine with a GPU."""
    return round(config.cache.host_bytes() / 2**30 * pinning.SECONDS_PER_PINNED_GIB, 1)


# ---- what fits -------------------------------------------------------------------------------------------


def _facts(config: DecodeConfig) -> dict[str, Any]:
    """Bytes that one more token costs."""
    cache = config.cache
    record = cache.num_layers * cache.records.bytes_per_row
    return {
        "row": "token",
        "record_bytes": record,
        "index_key_bytes": cache.layer_kinds.count(FULL) * cache.keys.bytes_per_key,
        "device_bytes_offloaded": cache.bytes_per_position(),
        "device_bytes_resident": record + cache.layer_kinds.count(FULL) * cache.keys.bytes_per_key,
        "host_bytes_offloaded": record,
    }


def _fits(options: PlanOptions, config: DecodeConfig, weights: int, context: int) -> list[dict[str, Any]]:
    """How many requests of `context` positions fit, with and without offload, and where index keys alone end it."""
    budget, key_bytes = (
        options.device_memory or 0,
        config.cache.layer_kinds.count(FULL) * config.cache.keys.bytes_per_key,
    )
    rows = []
    for offload in (True, False):
        requests, limit = most_requests(options, config, weights, offload)
        row = {"row": "fit", "offload": offload, "context": context, "requests": requests, "tokens": requests * context}
        rows.append(row | {"limited_by": limit})
    alone = max(0, budget - weights) // key_bytes
    return [*rows, {"row": "limit", "index_keys_alone_fill_device_at_tokens": alone}]


def most_requests(options: PlanOptions, config: DecodeConfig, weights: int, offload: bool) -> tuple[int, str]:
    """The largest batch that fits the budgets, and what stops the next request."""
    budget, host_budget = options.device_memory or 0, options.host_memory_size
    # Every limit that a batch has: slots for one step, host rows, device memory, host memory.

    def what_stops(seats: int) -> str | None:
        cache = config.cache
        rows = seats * cache.capacity
        if offload and options.host_rows is not None and rows > cache.host_rows:
            return f"host rows ({cache.host_rows})"
        needed = seats * cache.tokens_per_step * (cache.top_k + 1)
        ample = max(needed, cache.warm_windows * cache.top_k, min(4 * seats * cache.top_k, rows))
        slots = options.device_slots or ample
        if offload and slots < needed:
            return f"device slots ({slots})"
        sizes = {"seats": seats, "host_rows": rows, "device_slots": slots, "offload": offload}
        grown = dataclasses.replace(config, cache=dataclasses.replace(cache, **sizes))
        if device_total(grown, weights) > budget:
            return "weights" if weights > budget else "device memory"
        if host_budget is not None and grown.cache.host_bytes() > host_budget:
            return "host memory"
        return None

    fitting, stopping = 0, 1
    while what_stops(stopping) is None:
        fitting, stopping = stopping, 2 * stopping
    while stopping - fitting > 1:
        middle = (fitting + stopping) // 2
        fitting, stopping = (middle, stopping) if what_stops(middle) is None else (fitting, middle)
    return fitting, what_stops(stopping) or ""


# ---- for people ------------------------------------------------------------------------------------------


def _print(options: PlanOptions, config: DecodeConfig, bill: list, facts: dict, fits: list) -> None:
    console, cache = output.console(), config.cache
    full, records, keys = cache.layer_kinds.count(FULL), cache.records, cache.keys
    console.print(
        f"{options.model}: {cache.num_layers} layers, {full} with their own indexer, top_k {cache.top_k}; records "
        f"{records.name} of {records.bytes_per_row} B, index keys {keys.name} of {keys.bytes_per_key} B"
    )
    console.print(
        f"{cache.seats} request{'s' if cache.seats > 1 else ''} of {cache.capacity:,} positions, "
        f"{cache.device_slots:,} device slots a layer, {cache.host_rows:,} host rows\n"
    )
    table = output.table("memory", ("where", "kind", "size", "bytes", ""), text=(0, 1, 4))
    for row in bill:
        table.add_row(
            row["where"],
            row["kind"],
            output.size(row["bytes"]),
            f"{row['bytes']:,}",
            "" if row["exact"] else "estimate",
        )
    weights = next(row["bytes"] for row in bill if row["kind"] == "parameters")
    total = device_total(config, weights)
    note = "estimate; one workspace at a time"
    table.add_row("device", "together", output.size(total), f"{total:,}", note, style="bold")
    output.show(table, "exact: summed from array shapes; estimate: the largest arrays of the portable implementation")
    console.print(
        f"\none more token: {output.size(facts['device_bytes_offloaded'])} on the device and "
        f"{output.size(facts['host_bytes_offloaded'])} on the host; without offload "
        f"{output.size(facts['device_bytes_resident'])} on the device"
    )
    console.print(
        f"on a GPU the host pool of {output.size(cache.host_bytes())} is locked in memory, once: about "
        f"{pinning_seconds(config):.1f} s, on the GPU's own NUMA node (`echo-jax doctor` names it)"
    )
    if not fits:
        console.print("\ngive --device-memory to see what fits")
        return
    console.print()
    table = output.table(
        f"what fits in {output.size(options.device_memory or 0)}",
        ("", "requests", "tokens", "the next is stopped by"),
        (0, 3),
    )
    for row in fits[:-1]:
        name = "with offload" if row["offload"] else "without offload"
        table.add_row(name, f"{row['requests']:,}", f"{row['tokens']:,}", row["limited_by"])
    output.show(table, "requests of the context above that run together, and the first limit that the next one passes")
    alone = fits[-1]["index_keys_alone_fill_device_at_tokens"]
    console.print(
        f"\nresident index keys alone fill the device, beside the weights, at {alone:,} tokens of context in all"
    )
    if weights > (options.device_memory or 0):
        console.print(
            "the weights alone do not fit; give --weight-memory, what one device holds when experts are spread"
        )
