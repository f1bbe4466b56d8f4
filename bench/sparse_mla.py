"""Sparse MLA on an H200: right, then how fast, against what the tensor cores can do and XLA's own form.

    python -m bench.sparse_mla [check] [bench] [tuned] [tune] [once] [beyond]      (none: check, then bench)

check   every case of `pallas_kernels.sparse_mla.cases` against its oracle: masks, values, each call twice, and the rows
        in other slots; who gathers, without a bit changed; about 65 s
bench   the claims E.b*, E.heads*, E.xla_ratio_b32, bf16 and FP8 records, the best of a few tunings; about 120 s; writes
        rows
tuned   the same with the tuning of the table alone, about 45 s
tune    kernels alone for each of a few tunings, about 45 s; prints only
once    a small call of each format and nothing else, for a profiler or compute-sanitizer
beyond  one call whose list names a row far behind the pool: what compute-sanitizer must find

Kernels are compiled by several threads, ahead of what is measured. The file knows shapes, claims and how operations are
counted: 2 * heads * k * (576 + 512) a query row. What is called is in `sparse_mla_calls`, how time is taken in
`gpu_timing`, how a row is written in `harness`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import events, gpu_timing, harness
from bench.sparse_mla_calls import (
    THREADS,
    Shape,
    arguments,
    compiled,
    compiled_with_programs,
    kernel,
    xla_form,
)
from pallas_kernels.sparse_mla import cases, dispatch, mosaic_gpu
from pallas_kernels.sparse_mla.mosaic_gpu import Tuning

BF16_TFLOPS = 790  # dense matrix products of random numbers on this kind of machine
FORMATS = ("bf16", "fp8")
# Microseconds of FlashMLA 1.0.0 on an H200, FP8 records, 128 heads, by CUDA graph replay.
FLASHMLA = {1: 20.7, 8: 29.8, 32: 66.3, 128: 188.8}
CLAIMS = {
    (128, 128): ("E.b128",),
    (32, 128): ("E.b32",),
    (8, 128): ("E.b8", "E.b8_goal"),
    (1, 128): ("E.b1", "E.b1_goal"),
    (8, 16): ("E.heads16_b8_us",),
    (32, 64): ("E.heads64_b32_us",),
}
TUNINGS = {
    (8, 128): (Tuning(8), Tuning(8, 2)),
    (32, 128): (Tuning(2, 2), Tuning(2), Tuning(4, 2)),
    (128, 128): (Tuning(1),),
    (1, 128): (Tuning(32), Tuning(32, heads=32), Tuning(32, 2)),
    (8, 16): (Tuning(16), Tuning(8), Tuning(16, 2)),
    (32, 64): (Tuning(4), Tuning(4, 2)),
}
# Where the other number of gathering warpgroups is tried too: two for bf16, one for FP8 records.
OTHER_GATHERERS = {(8, 128): Tuning(8), (128, 128): Tuning(1)}
FILE = "sparse_mla.jsonl"
METHOD = "median of 30; L2 overwritten before each call; 2048 random rows out of 65536 a seat; query already in bf16"


RATIO_SHAPE = Shape(32, 128, "bf16")  # where XLA's form is timed too


def check() -> None:
    print("check: largest error over what is allowed; then the same bits again, and from other slots", flush=True)
    every = sorted(cases.FULL + cases.CORNERS, key=lambda case: (case.pool is not None, case.record_format != "fp8"))
    with ThreadPoolExecutor(THREADS) as threads:
        inputs = list(threads.map(cases.make, every))
    wanted = [tunings_to_check(case) for case in every]
    kernels = compiled(
        [
            (case.record_format, tuning, tuple(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in given.arguments))
            for case, given, some in zip(every, inputs, wanted, strict=True)
            for tuning in some
        ]
    )
    failed = []
    for case, given, some in zip(every, inputs, wanted, strict=True):
        started = time.perf_counter()
        shares, bits = [], {}
        on_device = jax.device_put(given.arguments)
        moved = None if case.pool else jax.device_put(given.permuted().arguments)
        for tuning in some:
            attend = next(kernels)
            first = jax.tree.map(np.asarray, attend(*on_device))
            try:
                shares.append(given.judge(*first, tensor_core=True))
                same_bits(first, attend(*on_device))
                if moved is not None:
                    same_bits(first, attend(*moved))
                same_bits(first, bits.setdefault((tuning.splits, tuning.cluster), first))  # whoever gathers, and when
            except AssertionError as error:
                failed.append(f"{cases.identifier(case)} {describe(tuning)}")
                print(f"  {cases.identifier(case)} {describe(tuning)}: {str(error).strip()[:300]}", flush=True)
        del on_device, moved
        seconds = time.perf_counter() - started
        text = "  ".join(f"{share:.4f}" for share in shares)
        cut = " ".join(map(describe, some))
        print(f"  {cases.identifier(case):32} parts/cluster {cut:22} {text:40} {seconds:5.1f} s", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")


def tunings_to_check(case: cases.Case) -> list[Tuning]:
    """The tuned one; for some cases other parts too, joined and combined, and what may not change a bit."""
    found = [dispatch.tuned(len(case.listed) * len(case.listed[0]) * -(-case.heads // 64))]
    if case.name == "verify":
        found += [Tuning(1), Tuning(1, 1, other_gatherers(case.record_format)), Tuning(2, 2)]
    elif case.name == "k_zero":
        found += [Tuning(2, 2), Tuning(5)]
    elif case.name == "full":
        found += [Tuning(8, 4), Tuning(32, 8), Tuning(16, heads=32)]
    return found


def other_gatherers(record_format: str) -> int:
    return 3 - mosaic_gpu.GATHERERS[record_format]


def same_bits(first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), np.asarray(other).view(np.uint32))


def bench(is_tuned: bool = False) -> None:
    """The best of `tunings`, or the tuning that a caller gets. Everything is compiled before anything is timed."""
    shapes = [Shape(*size, record_format) for size in CLAIMS for record_format in FORMATS]
    wanted = {shape: [shape.tuned()] if is_tuned else tunings(shape) for shape in shapes}
    started = time.perf_counter()
    jobs = [(shape, tuning) for shape in shapes for tuning in wanted[shape]]
    ready = dict(zip(jobs, compiled_with_programs(jobs), strict=True))
    xla = xla_form.lower(*RATIO_SHAPE.structs()).compile()
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    print(
        "heads x B  records  parts/cluster   us of a replay [p10 p90]  a call  kernels   TFLOP/s  of 790   FlashMLA us",
        flush=True,
    )
    slower: Timed | None = None
    for shape in shapes:
        inputs = arguments(shape)
        tuning, times = best_tuning({one: ready[shape, one][0] for one in wanted[shape]}, inputs)
        attend, programs = ready[shape, tuning]
        event, graph = (events.run_and_read(program, inputs, runs=3) for program in programs)
        timed = Timed(shape, tuning, event, graph, times)
        if shape == RATIO_SHAPE:
            write_ratio(times, attend, xla, inputs)
        report(timed)
        write(timed)
        del inputs
        if slower is None or graph.median > slower.graph.median:
            slower = timed
        if shape.record_format == FORMATS[-1]:
            write_claims(slower)
            slower = None


def write_claims(timed: Timed) -> None:
    """Of the slower format, timed as FlashMLA was."""
    shape, graph = timed.shape, timed.graph
    for claim in CLAIMS[shape.seats, shape.heads]:
        harness.record(
            claim,
            value=graph,
            unit="us",
            file=FILE,
            shapes=dict(shape.describe(), tuning=cut_of(timed.tuning)),
            method="CUDA events around the replay of a graph of one call; " + METHOD,
            fraction_of_limit=round(teraflops(shape, graph.median) / BF16_TFLOPS, 4),
            notes=f"the slower of bf16 and FP8 records; limit: {BF16_TFLOPS} TFLOP/s of bf16 matrix products",
        )


def tunings(shape: Shape) -> list[Tuning]:
    found = list(TUNINGS[shape.seats, shape.heads])
    if (other := OTHER_GATHERERS.get((shape.seats, shape.heads))) is not None:
        found.append(dataclasses.replace(other, gatherers=other_gatherers(shape.record_format)))
    return found


def best_tuning(
    kernels: dict[Tuning, Callable[..., Any]], inputs: tuple[jax.Array, ...]
) -> tuple[Tuning, gpu_timing.KernelTimes]:
    timed = [(tuning, gpu_timing.kernel_times(attend, *inputs)) for tuning, attend in kernels.items()]
    print("     ", "   ".join(f"{describe(tuning)}: {times.total.median:.1f}" for tuning, times in timed), flush=True)
    return min(timed, key=lambda pair: pair[1].total.median)


def cut_of(tuning: Tuning) -> dict[str, int]:
    return {name: int(value) for name, value in dataclasses.asdict(tuning).items() if value is not None}


def describe(tuning: Tuning) -> str:
    """Parts/cluster; g: gatherers, where they are not the kernel's choice; h: heads of a block, where not 64."""
    gatherers = f"g{tuning.gatherers}" if tuning.gatherers else ""
    heads = f"h{tuning.heads}" if tuning.heads < mosaic_gpu.HEADS else ""
    return f"{tuning.splits}/{tuning.cluster}{gatherers}{heads}"


def teraflops(shape: Shape, microseconds: float) -> float:
    return shape.operations / microseconds * 1e-6


@dataclasses.dataclass(frozen=True)
class Timed:
    """A shape at a tuning by three clocks."""

    shape: Shape
    tuning: Tuning
    event: harness.Measurement  # around a plain call
    graph: harness.Measurement  # around the replay of its graph
    kernels: gpu_timing.KernelTimes


def report(timed: Timed) -> None:
    shape, event, graph = timed.shape, timed.event, timed.graph
    speed = teraflops(shape, graph.median)
    beside = f"{FLASHMLA[shape.seats]:8.1f}" if shape.heads == 128 else "       -"
    parts = " + ".join(f"{one.median:.1f}" for _, one in timed.kernels.kernels)
    print(
        f"{shape.heads:4} x {shape.seats:3} {shape.record_format:>7} {describe(timed.tuning):>6}   {graph.median:8.1f} "
        f"[{graph.p10:.1f} {graph.p90:.1f}]   {event.median:8.1f}  {parts:>16} {speed:8.0f} {speed / BF16_TFLOPS:7.2f} "
        f"{beside}",
        flush=True,
    )


def write(timed: Timed) -> None:
    shape, tuning, times = timed.shape, timed.tuning, timed.kernels
    common: dict[str, Any] = dict(unit="us", file=FILE, shapes=dict(shape.describe(), tuning=cut_of(tuning)))
    what = f"sparse MLA, {shape.record_format}, {shape.heads} heads, B {shape.seats}"
    for name, around, time_us in (
        ("a call", "a call", timed.event),
        ("a replay", "the replay of a graph of one call", timed.graph),
    ):
        rate = shape.gathered_bytes / time_us.median * 1e-3
        speed = teraflops(shape, time_us.median)
        harness.record(
            value=time_us,
            name=f"{what}: {name}",
            method=f"CUDA events around {around}; " + METHOD,
            fraction_of_limit=round(speed / BF16_TFLOPS, 4),
            notes=f"limit: {BF16_TFLOPS} TFLOP/s; {speed:.0f} reached; {rate:.0f} GB/s of records",
            **common,
        )
    harness.record(
        value=times.total,
        name=f"{what}: kernel time",
        method="sum of kernel times (CUPTI), " + METHOD,
        notes=", ".join(f"{name} {one.median:.2f} us" for name, one in times.kernels),
        **common,
    )


def write_ratio(times: gpu_timing.KernelTimes, attend: Any, form: Any, inputs: tuple[jax.Array, ...]) -> None:
    xla = gpu_timing.kernel_times(form, *inputs).total
    difference = float(jnp.max(jnp.abs(form(*inputs) - attend(*inputs)[0][:, 0])))
    print(f"      XLA's form: {xla.median:.1f} us; the largest difference is {difference:.3g}", flush=True)
    harness.record(
        "E.xla_ratio_b32",
        value=xla.median / times.total.median,
        unit="ratio",
        file=FILE,
        shapes=RATIO_SHAPE.describe(),
        method="sums of kernel times (CUPTI), " + METHOD,
        notes=f"a gather, two bf16 einsums and a softmax: {xla.median:.1f} us",
    )


def tune() -> None:
    print("tune: kernel us (attend + combine) for each parts/cluster", flush=True)
    shapes = [Shape(*size, record_format) for size in CLAIMS for record_format in FORMATS]
    jobs = [(shape.record_format, cut, shape.structs()) for shape in shapes for cut in tunings(shape)]
    kernels = iter(list(compiled(jobs)))  # all of them before the first is timed
    for shape in shapes:
        inputs, found = arguments(shape), []
        for tuning in tunings(shape):
            times = gpu_timing.kernel_times(next(kernels), *inputs, repeats=15)
            parts = " + ".join(f"{one.median:.1f}" for _, one in times.kernels)
            found.append(f"{describe(tuning)}: {times.total.median:.1f} ({parts})")
        print(f"  {shape.heads:3} x {shape.seats:3} {shape.record_format:>5}   " + "   ".join(found), flush=True)
        del inputs


def once() -> None:
    for record_format in FORMATS:
        inputs = cases.make(cases.Case("once", record_format, ((256,), (100,)), places=256, heads=64))
        out = kernel(record_format, Tuning(4, 2))(*jax.device_put(inputs.arguments))
        print(record_format, inputs.judge(*out, tensor_core=True), "of what is allowed")


def beyond() -> None:
    inputs = cases.make(cases.Case("beyond", "fp8", ((64,),), places=64, heads=64))
    query, records, slots = inputs.arguments
    slots[0, 0, 5] = 2**20 * records.shape[0]
    jax.block_until_ready(kernel("fp8", Tuning(1))(*jax.device_put((query, records, slots))))


if __name__ == "__main__":
    parts = dict(
        check=check, bench=bench, tuned=functools.partial(bench, is_tuned=True), tune=tune, once=once, beyond=beyond
    )
    sys.exit(gpu_timing.run_parts(parts, sys.argv[1:]))
