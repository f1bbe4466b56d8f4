"""Index scores on an H200: right, then how fast, against the bandwidth of the same run and XLA's own form.

    python -m bench.indexer_scores [check] [bench] [tune] [once]      (none: check, then bench)

check  every case of `pallas_kernels.indexer_scores.cases` against its oracle, each call twice, about 50 s
bench  the claims C.* and the table beside DeepGEMM's, about 70 s; writes rows
tune   tunings at the twelve shapes of that table, all bitwise the same scores, about 90 s; prints only

It knows shapes, claims and which bytes count: 132 read (FP8) or 256 (bf16) and 4 written for each position. How time is
taken is in `gpu_timing` and `events`, how a row is written in `harness`; `profile_kernel` has the GPU's own counters.

Three clocks. A claim is answered by the one by which DeepGEMM was timed: events around the replay of a CUDA graph of
one call. Events around a plain call leave the graph out, and CUPTI's time of the kernel leaves out the launch as well.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from bench import events, gpu_timing, harness
from pallas_kernels.indexer_scores import cases, reference
from pallas_kernels.indexer_scores.mosaic_gpu import Tuning

HEADS, WIDTH, PAGE = 64, 128, 64
LENGTHS, BATCHES = (98_304, 65_536, 32_768), (1, 8, 32, 102)
CLAIMS = {seats: f"C.fp8_{seats}x98k" for seats in BATCHES}
# Microseconds of DeepGEMM 2.6.1 on an H200, by CUDA graph replay; the bars of the claims come from the last column.
DEEPGEMM = {
    1: {32_768: 7.2, 65_536: 9.0, 98_304: 10.4},
    8: {32_768: 17.6, 65_536: 28.1, 98_304: 38.0},
    32: {32_768: 46.3, 65_536: 81.1, 98_304: 114.8},
    102: {32_768: 121.7, 65_536: 230.7, 98_304: 339.0},
}
FILE = "indexer_scores.jsonl"
METHOD = "median of 30; L2 overwritten before each call; pages of a seat scattered over the pool; query already in FP8"
VARIANTS = {
    "as first written": Tuning(),
    "once": Tuning(once=True),
    "runs of 4": Tuning(run=4),
    "once, runs of 4": Tuning(run=4, once=True),
    "once, runs of 2": Tuning(run=2, once=True),
    "once, runs of 8 tiles of 128": Tuning(math=2, stages=12, lookahead=8, run=8, once=True),
    "once, runs of 4 tiles of 192": Tuning(math=3, stages=8, run=4, once=True),
    "once, runs of 4, two pages each": Tuning(pages_per_math=2, math=2, run=4, once=True),
    "once, runs of 4, 8 tiles ahead": Tuning(lookahead=8, run=4, once=True),
}
POLICIES, MOST_LIKELY = tuple(VARIANTS)[:5], ("once, runs of 4",)
DECIDING = {
    (8, 98_304): tuple(VARIANTS),
    (1, 98_304): tuple(VARIANTS),
    (102, 32_768): tuple(VARIANTS),
    (102, 98_304): POLICIES,
    (32, 98_304): POLICIES,
}
"""The shapes that decide, and what is tried there; elsewhere only the most likely."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """One measurement: the kernel by CUPTI, a call by events, the graph of a call by events; us."""

    kernel: harness.Measurement
    event: harness.Measurement
    graph: harness.Measurement
    bytes_moved: int

    def bandwidth(self) -> float:
        return self.bytes_moved / (self.kernel.median * 1e-6)


def arguments(keys: str, seats: int, length: int, are_scattered: bool = True) -> tuple[jax.Array, ...]:
    """Random stored keys on the device; every seat has its own pages, scattered over the pool, or one after another as
    admission to an empty pool gives them."""
    pool = seats * length // PAGE

    @functools.partial(jax.jit, static_argnums=1)
    def fill(key, distinct):
        values = jax.random.normal(key, (distinct, PAGE, WIDTH))
        if keys == "bf16":
            return jnp.take(values.astype(jnp.bfloat16), jnp.arange(pool) % distinct, axis=0)
        # Beyond 448 there is no e4m3 value but NaN, which a stored key never holds.
        codes = jnp.clip(100 * values, -448, 448).astype(jnp.float8_e4m3fn)
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
        scales = jnp.exp2(jnp.round(jax.random.normal(key, (distinct, PAGE)))) / 128
        scales = lax.bitcast_convert_type(scales, jnp.uint8).reshape(distinct, -1)
        page = jnp.concatenate([codes.reshape(distinct, -1), scales], axis=1)
        return jnp.take(page, jnp.arange(pool) % distinct, axis=0)

    random = np.random.default_rng(0)
    stored = jnp.float8_e4m3fn if keys == "fp8" else jnp.bfloat16
    query = jnp.asarray(random.standard_normal((seats, 1, HEADS, WIDTH), np.float32)).astype(stored)
    weights = jnp.asarray(random.standard_normal((seats, 1, HEADS), np.float32))
    order = random.permutation(pool) if are_scattered else np.arange(pool)
    numbers = jnp.asarray(order.reshape(seats, -1).astype(np.int32))
    visible = jnp.full((seats, 1), length, jnp.int32)
    return jax.block_until_ready((query, weights, fill(jax.random.key(0), min(pool, 4096)), numbers, visible))


def kernel(tuning: Tuning | None = None) -> Any:
    return jax.jit(functools.partial(pallas_kernels.indexer_scores, implementation="mosaic_gpu", tuning=tuning))


@jax.jit
def xla_form(query, weights, pages, numbers, visible):
    """What XLA makes of it at its best: gather, one bf16 einsum (exact products, f32 sums), and element-wise work."""

    def seat(query, weights, numbers, visible):
        stored = pages[numbers]
        if pages.dtype == jnp.uint8:
            codes = lax.bitcast_convert_type(stored[:, : PAGE * WIDTH], jnp.float8_e4m3fn).reshape(-1, WIDTH)
            scales = lax.bitcast_convert_type(stored[:, PAGE * WIDTH :].reshape(-1, PAGE, 4), jnp.float32).reshape(-1)
        else:
            codes, scales = stored.reshape(-1, WIDTH), jnp.ones((1,), jnp.float32)
        products = jnp.einsum(
            "tgd,pd->tgp",
            query.astype(jnp.bfloat16),
            codes.astype(jnp.bfloat16),
            preferred_element_type=jnp.float32,
        )
        score = jnp.sum(jax.nn.relu(products) * weights[..., None], axis=1) * scales[None]
        return jnp.where(jnp.arange(score.shape[-1])[None] < visible[:, None], score, -jnp.inf)

    return jax.vmap(seat)(query, weights, numbers, visible)


def measure(function: Any, inputs: tuple[jax.Array, ...]) -> Timed:
    positions = inputs[3].size * PAGE
    per_key = WIDTH + 4 if inputs[2].dtype == jnp.uint8 else 2 * WIDTH
    return Timed(
        gpu_timing.kernel_times(function, *inputs).total,
        events.event_time(function, *inputs),
        events.event_time(function, *inputs, runs=3, as_graph=True),
        positions * (per_key + 4),
    )


def check() -> None:
    print("check: largest error over what is allowed; 0 where scores must be equal", flush=True)
    for case in cases.CORNERS + cases.FAR:
        started = time.perf_counter()
        inputs = cases.make(case)
        on_device = jax.device_put(inputs.arguments)
        score = kernel()
        first, second = np.asarray(score(*on_device)), np.asarray(score(*on_device))
        share = inputs.judge(first, is_exact=case.values == "exact", tensor_core=True)
        np.testing.assert_array_equal(first.view(np.uint32), second.view(np.uint32))
        print(f"  {cases.identifier(case):40} {share:8.4f}   {time.perf_counter() - started:5.1f} s", flush=True)


def bench() -> None:
    limit = gpu_timing.device_bandwidth()
    print(f"copy {limit.copy / 1e12:.2f} TB/s, read {limit.read / 1e12:.2f} TB/s in this run")
    for name, value in (("copy", limit.copy), ("read", limit.read)):
        harness.record(
            value=value / 1e12, unit="TB/s", name=f"device memory, {name} by XLA, 1 GiB", file=FILE, method="CUPTI"
        )
    print("FP8, 64 heads    us: kernel [p10 p90]   call    graph [p10 p90]    DeepGEMM  kernel's TB/s, of the copy's")
    for length in LENGTHS:
        for seats in BATCHES:
            inputs = arguments("fp8", seats, length)
            timed = measure(kernel(), inputs)
            beside = DEEPGEMM[seats][length]
            report(f"{seats:3} x {length:6}", timed, beside, limit)
            write("fp8", seats, length, timed, limit, CLAIMS[seats] if length == LENGTHS[0] else None)
            if (seats, length) == (32, LENGTHS[0]):
                xla = gpu_timing.kernel_times(xla_form, *inputs).total
                worst = np.nanmax(np.abs(np.asarray(kernel()(*inputs)) - np.asarray(xla_form(*inputs))))
                print(f"      XLA's form: {xla.median:.1f} us; the largest difference is {worst:.3g}")
                harness.record(
                    "C.xla_ratio_32x98k",
                    value=xla.median / timed.kernel.median,
                    unit="ratio",
                    file=FILE,
                    shapes=dict(seats=seats, length=length, heads=HEADS, keys="fp8"),
                    method="sums of kernel times (CUPTI), " + METHOD,
                    notes=f"gather, one bf16 einsum, element-wise work: {xla.median:.1f} us",
                )
            del inputs
    inputs = arguments("bf16", 32, LENGTHS[0])
    timed = measure(kernel(), inputs)
    report("bf16 32 x  98304", timed, None, limit)
    write("bf16", 32, LENGTHS[0], timed, limit, None)
    harness.record(
        "C.bf16_32x98k_fraction",
        value=timed.bandwidth() / limit.copy,
        unit="ratio",
        file=FILE,
        shapes=dict(seats=32, length=LENGTHS[0], heads=HEADS, keys="bf16"),
        method="kernel time (CUPTI), " + METHOD,
        notes=f"{timed.kernel.median:.1f} us; the limit is the copy bandwidth of the run, {limit.copy / 1e12:.2f} TB/s",
    )


def report(label: str, timed: Timed, beside: float | None, limit: gpu_timing.Bandwidth) -> None:
    def spread(time_us: harness.Measurement) -> str:
        return f"{time_us.median:8.1f} {f'[{time_us.p10:.1f} {time_us.p90:.1f}]':16}"

    other = f"{beside:8.1f}" if beside else "       -"
    bandwidth = f"{timed.bandwidth() / 1e12:8.2f} {timed.bandwidth() / limit.copy:8.2f}"
    event = f"{timed.event.median:7.1f}"
    print(f"{label:16} {spread(timed.kernel)} {event} {spread(timed.graph)} {other} {bandwidth}", flush=True)


def write(keys: str, seats: int, length: int, timed: Timed, limit: gpu_timing.Bandwidth, claim: str | None) -> None:
    """The graph of a call, which answers the claim, the call and the kernel, a row each."""
    what = f"index scores, {keys}, {HEADS} heads, {seats} x {length}"
    for value, answers, name, clock in (
        (timed.graph, claim, "graph of a call", "CUDA events around the replay of a CUDA graph of one call"),
        (timed.event, None, "a call", "CUDA events around a call"),
        (timed.kernel, None, "kernel time", "kernel time (CUPTI)"),
    ):
        harness.record(
            answers,
            value=value,
            unit="us",
            name="" if answers else f"{what}: {name}",
            file=FILE,
            shapes=dict(seats=seats, length=length, heads=HEADS, keys=keys, rows=1),
            method=f"{clock}; {METHOD}",
            fraction_of_limit=round(timed.bandwidth() / limit.copy, 4),
            notes=f"limit: copy bandwidth of the run, {limit.copy / 1e12:.2f} TB/s; the kernel reached "
            f"{timed.bandwidth() / 1e12:.2f} TB/s",
        )


def differing(scores: jax.Array, others: jax.Array) -> int:
    """How many scores have other bits."""
    bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint32)
    return int(jnp.sum(bits(scores) != bits(others)))


def tune() -> None:
    """Kernel time of each variant, DeepGEMM's graph time, and how many scores differ from the first variant's."""
    shapes = [
        *DECIDING,
        *((seats, length) for length in LENGTHS for seats in BATCHES if (seats, length) not in DECIDING),
    ]
    with ThreadPoolExecutor(4) as pool:
        for seats, length in shapes:
            print(f"tune: {seats} x {length}, FP8: kernel us; DeepGEMM's graph {DEEPGEMM[seats][length]}", flush=True)
            inputs, first = arguments("fp8", seats, length), None
            names = DECIDING.get((seats, length), MOST_LIKELY)
            compiled = [(name, pool.submit(kernel(VARIANTS[name]).lower(*inputs).compile)) for name in names]
            for name, score in [(name, future.result()) for name, future in compiled]:
                time_us = gpu_timing.kernel_times(score, *inputs).total
                scores = score(*inputs)
                first = scores if first is None else first
                other = differing(scores, first)  # where a tile's shape changes the order of a sum, the last bits
                text = f"{other} scores have other bits" if other else ""
                print(f"  {name:36} {time_us.median:8.1f} [{time_us.p10:.1f} {time_us.p90:.1f}] {text}", flush=True)


if __name__ == "__main__":
    assert reference.PAGE == PAGE
    sys.exit(gpu_timing.run_parts(dict(check=check, bench=bench, tune=tune), sys.argv[1:]))
