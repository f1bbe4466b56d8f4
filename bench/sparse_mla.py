"""Sparse MLA on an H200: right, then how fast, against what the tensor cores can do and XLA's own form.

    python -m bench.sparse_mla [check] [bench] [tune] [once]      (none: check, then bench)

check  every case of `pallas_kernels.sparse_mla.cases` against its oracle: masks, values, each call twice, and the rows
       in other slots; about 60 s
bench  the claims E.b*, E.heads*, E.xla_ratio_b32, bf16 and FP8 records, the best of a few tunings; about 90 s; writes
       rows
tune   parts and clusters at five shapes, about 75 s; prints only
once   a few calls of each format at B 8 and nothing else, for a profiler or compute-sanitizer

It knows shapes, claims and how operations are counted: 2 * heads * k * (576 + 512) a query row. How time is taken is in
`gpu_timing`, how a row is written in `harness`.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from bench import events, gpu_timing, harness
from pallas_kernels.sparse_mla import cases, dispatch
from pallas_kernels.sparse_mla.mosaic_gpu import Tuning

WIDTH, LATENT, K, CONTEXT = 576, 512, 2048, 65_536
BF16_TFLOPS = 790  # dense matrix products of random numbers on this kind of machine
BYTES = {"bf16": 1152, "fp8": 656}
FORMATS = ("bf16", "fp8")
# Microseconds of FlashMLA 1.0.0 on an H200, FP8 records, 128 heads, by CUDA graph replay.
FLASHMLA = {1: 20.7, 8: 29.8, 32: 66.3, 128: 188.8}
CLAIMS = {
    (1, 128): ("E.b1", "E.b1_goal"),
    (8, 128): ("E.b8", "E.b8_goal"),
    (32, 128): ("E.b32",),
    (128, 128): ("E.b128",),
    (8, 16): ("E.heads16_b8_us",),
    (32, 64): ("E.heads64_b32_us",),
}
TUNINGS = {
    (1, 128): (Tuning(32, 8), Tuning(32), Tuning(16, 8)),
    (8, 128): (Tuning(8, 8), Tuning(8)),
    (32, 128): (Tuning(2, 2), Tuning(2)),
    (128, 128): (Tuning(1), Tuning(2, 2)),
    (8, 16): (Tuning(16, 8), Tuning(8, 8)),
    (32, 64): (Tuning(4, 4),),
}
FILE = "sparse_mla.jsonl"
METHOD = "median of 30; L2 overwritten before each call; 2048 random rows out of 65536 a seat; query already in bf16"


@dataclasses.dataclass(frozen=True)
class Shape:
    seats: int
    heads: int
    record_format: str

    @property
    def operations(self) -> int:
        return 2 * self.seats * self.heads * K * (WIDTH + LATENT)

    @property
    def gathered_bytes(self) -> int:
        return self.seats * K * BYTES[self.record_format]

    def describe(self) -> dict[str, Any]:
        return dict(seats=self.seats, heads=self.heads, k=K, records=self.record_format, context=CONTEXT)


def arguments(shape: Shape) -> tuple[jax.Array, ...]:
    """Query, pool and lists on the device. Above 32 seats, seats share 32 contexts: the pool stays at 2.4 GB."""
    pool, distinct = min(shape.seats, 32) * CONTEXT, 4096

    @jax.jit
    def fill(key):
        values = jax.random.normal(key, (distinct, WIDTH))
        if shape.record_format == "bf16":
            stored = values.astype(jnp.bfloat16).reshape(distinct, 3, WIDTH // 3)
        else:
            codes = jnp.clip(80 * values[:, :LATENT], -448, 448).astype(jnp.float8_e4m3fn)  # beyond is NaN
            codes = lax.bitcast_convert_type(codes.reshape(distinct, -1, 4), jnp.uint32)
            scales = lax.bitcast_convert_type(jnp.full((distinct, 4), 1 / 80, jnp.float32), jnp.uint32)
            rope = values[:, LATENT:].astype(jnp.bfloat16).reshape(distinct, -1, 2)
            stored = jnp.concatenate([codes, scales, lax.bitcast_convert_type(rope, jnp.uint32)], axis=1)
        return jnp.take(stored, jnp.arange(pool) % distinct, axis=0)

    random = np.random.default_rng(0)
    query = jnp.asarray(random.standard_normal((shape.seats, 1, shape.heads, WIDTH), np.float32)).astype(jnp.bfloat16)
    lists = [random.choice(CONTEXT, K, replace=False) + (seat % 32) * CONTEXT for seat in range(shape.seats)]
    slots = jnp.asarray(np.stack(lists)[:, None].astype(np.int32))
    return jax.block_until_ready((query, fill(jax.random.key(0)), slots))


def kernel(record_format: str, tuning: Tuning | None = None) -> Any:
    def sparse_mla(query, records, slots):
        return pallas_kernels.sparse_mla(
            query,
            records,
            slots,
            cases.SCALE,
            record_format=record_format,  # type: ignore
            implementation="mosaic_gpu",
            tuning=tuning,
        )

    return jax.jit(sparse_mla)


@jax.jit
def xla_form(query, records, slots):
    """What XLA makes of it at its best: a gather, two bf16 einsums with f32 sums, and a softmax between them."""

    def row(query, slots):
        rows = records[slots].reshape(K, WIDTH)
        logits = jnp.einsum("hd,kd->hk", query, rows, preferred_element_type=jnp.float32) * cases.SCALE
        weights = jax.nn.softmax(logits, axis=-1).astype(jnp.bfloat16)
        return jnp.einsum("hk,kd->hd", weights, rows[:, :LATENT], preferred_element_type=jnp.float32)

    return jax.vmap(row)(query[:, 0], slots[:, 0])


def check() -> None:
    print("check: largest error over what is allowed; then the same bits again, and from other slots", flush=True)
    failed = []
    for case in cases.CORNERS + cases.FULL:
        started = time.perf_counter()
        inputs = cases.make(case)
        heads = -(-case.heads // 64)
        tunings = [dispatch.tuned(len(case.listed) * len(case.listed[0]) * heads)]
        if case.name == "verify" or cases.identifier(case).startswith("k_zero-fp8"):
            tunings += [Tuning(1), Tuning(5), Tuning(2, 2)]
        shares = []
        for tuning in tunings:
            attend = kernel(case.record_format, tuning)
            on_device = jax.device_put(inputs.arguments)
            first = jax.tree.map(np.asarray, attend(*on_device))
            try:
                shares.append(inputs.judge(*first, tensor_core=True))
                same_bits(first, attend(*on_device))
                if case.pool is None:
                    same_bits(first, attend(*jax.device_put(inputs.permuted().arguments)))
            except AssertionError as error:
                failed.append(f"{cases.identifier(case)} {describe(tuning)}")
                print(f"  {cases.identifier(case)} {describe(tuning)}: {str(error).strip()[:300]}", flush=True)
            del on_device
        seconds = time.perf_counter() - started
        text = "  ".join(f"{share:.4f}" for share in shares)
        cut = " ".join(map(describe, tunings))
        print(f"  {cases.identifier(case):32} parts/cluster {cut:20} {text:36} {seconds:5.1f} s", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")


def same_bits(first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), np.asarray(other).view(np.uint32))


def bench() -> None:
    print(
        "heads x B  records  parts/cluster   us by events [p10 p90]   kernels us   TFLOP/s  of 790   FlashMLA us",
        flush=True,
    )
    for (seats, heads), claims in CLAIMS.items():
        slower = None
        for record_format in FORMATS:
            shape = Shape(seats, heads, record_format)
            inputs = arguments(shape)
            tuning, times = best_tuning(shape, inputs)
            event = events.event_time(kernel(record_format, tuning), *inputs)
            if (seats, heads, record_format) == (32, 128, "bf16"):
                write_ratio(times, inputs)
            report(shape, tuning, event, times)
            write(shape, tuning, event, times)
            if slower is None or event.median > slower[0].median:
                slower = event, shape, tuning
            del inputs
        assert slower is not None
        event, shape, tuning = slower
        for claim in claims:
            harness.record(
                claim,
                value=event,
                unit="us",
                file=FILE,
                shapes=dict(shape.describe(), **dataclasses.asdict(tuning)),
                method="CUDA events around a call; " + METHOD,
                fraction_of_limit=round(teraflops(shape, event.median) / BF16_TFLOPS, 4),
                notes=f"the slower of bf16 and FP8 records; limit: {BF16_TFLOPS} TFLOP/s of bf16 matrix products",
            )


def best_tuning(shape: Shape, inputs: tuple[jax.Array, ...]) -> tuple[Tuning, gpu_timing.KernelTimes]:
    timed = [
        (tuning, gpu_timing.kernel_times(kernel(shape.record_format, tuning), *inputs))
        for tuning in TUNINGS[shape.seats, shape.heads]
    ]
    print("     ", "   ".join(f"{describe(tuning)}: {times.total.median:.1f}" for tuning, times in timed), flush=True)
    return min(timed, key=lambda pair: pair[1].total.median)


def describe(tuning: Tuning) -> str:
    return f"{tuning.splits}/{tuning.cluster}"


def teraflops(shape: Shape, microseconds: float) -> float:
    return shape.operations / microseconds * 1e-6


def report(shape: Shape, tuning: Tuning, event: harness.Measurement, times: gpu_timing.KernelTimes) -> None:
    speed = teraflops(shape, event.median)
    beside = f"{FLASHMLA[shape.seats]:8.1f}" if shape.heads == 128 else "       -"
    parts = " + ".join(f"{one.median:.1f}" for _, one in times.kernels)
    print(
        f"{shape.heads:4} x {shape.seats:3} {shape.record_format:>7} {describe(tuning):>6}   {event.median:8.1f} "
        f"[{event.p10:.1f} {event.p90:.1f}]   {parts:>16} {speed:8.0f} {speed / BF16_TFLOPS:7.2f} {beside}",
        flush=True,
    )


def write(shape: Shape, tuning: Tuning, event: harness.Measurement, times: gpu_timing.KernelTimes) -> None:
    common: dict[str, Any] = dict(unit="us", file=FILE, shapes=dict(shape.describe(), **dataclasses.asdict(tuning)))
    what = f"sparse MLA, {shape.record_format}, {shape.heads} heads, B {shape.seats}"
    rate = shape.gathered_bytes / event.median * 1e-3
    harness.record(
        value=event,
        name=f"{what}: a call",
        method="CUDA events around a call; " + METHOD,
        fraction_of_limit=round(teraflops(shape, event.median) / BF16_TFLOPS, 4),
        notes=f"limit: {BF16_TFLOPS} TFLOP/s; {teraflops(shape, event.median):.0f} reached; {rate:.0f} GB/s of records",
        **common,
    )
    harness.record(
        value=times.total,
        name=f"{what}: kernel time",
        method="sum of kernel times (CUPTI), " + METHOD,
        notes=", ".join(f"{name} {one.median:.2f} us" for name, one in times.kernels),
        **common,
    )


def write_ratio(times: gpu_timing.KernelTimes, inputs: tuple[jax.Array, ...]) -> None:
    xla = gpu_timing.kernel_times(xla_form, *inputs).total
    difference = float(jnp.max(jnp.abs(xla_form(*inputs) - kernel("bf16")(*inputs)[0][:, 0])))
    print(f"      XLA's form: {xla.median:.1f} us; the largest difference is {difference:.3g}", flush=True)
    harness.record(
        "E.xla_ratio_b32",
        value=xla.median / times.total.median,
        unit="ratio",
        file=FILE,
        shapes=Shape(32, 128, "bf16").describe(),
        method="sums of kernel times (CUPTI), " + METHOD,
        notes=f"a gather, two bf16 einsums and a softmax: {xla.median:.1f} us",
    )


def tune() -> None:
    print("tune: kernel us (attend + combine) for each parts/cluster", flush=True)
    for seats, heads in ((4, 128), (8, 128), (16, 128), (32, 128)):
        for record_format in FORMATS if seats == 8 else ("fp8",):
            inputs = arguments(Shape(seats, heads, record_format))
            units = seats * heads // 64
            found = []
            for splits in (1, 2, 4, 8, 16, 32):
                for cluster in sorted({1, min(splits, 8)}):
                    if 60 <= units * splits <= 264:
                        times = gpu_timing.kernel_times(
                            kernel(record_format, Tuning(splits, cluster)), *inputs, repeats=15
                        )
                        parts = " + ".join(f"{one.median:.1f}" for _, one in times.kernels)
                        found.append(f"{splits}/{cluster}: {times.total.median:.1f} ({parts})")
            print(f"  {heads} x {seats:3} {record_format:>5}   " + "   ".join(found), flush=True)
            del inputs


def once() -> None:
    for record_format in FORMATS:
        inputs = cases.make(cases.Case("once", record_format, ((2048,), (1000,)), places=2048, heads=128))
        attend = kernel(record_format, Tuning(8, 4))
        for _ in range(2):
            out = attend(*jax.device_put(inputs.arguments))
        print(record_format, inputs.judge(*out, tensor_core=True), "of what is allowed")


if __name__ == "__main__":
    sys.exit(gpu_timing.run_parts(dict(check=check, bench=bench, tune=tune, once=once), sys.argv[1:]))
