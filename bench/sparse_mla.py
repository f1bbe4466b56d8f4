"""Sparse MLA on an H200: right, then how fast, against what the tensor cores can do and XLA's own form.

    python -m bench.sparse_mla [check] [bench] [tuned] [tune] [once] [beyond]      (none: check, then bench)

check   every case of `pallas_kernels.sparse_mla.cases` against its oracle: masks, values, each call twice, and the rows
        in other slots; who gathers, without a bit changed; about 40 s
bench   the claims E.b*, E.heads*, E.xla_ratio_b32, bf16 and FP8 records, the best of a few tunings; about 120 s; writes
        rows
tuned   the same with the tuning of the table alone, about 45 s
tune    kernels alone for each of a few tunings, about 45 s; prints only
once    a small call of each format and nothing else, for a profiler or compute-sanitizer
beyond  one call whose list names a row far behind the pool: what compute-sanitizer must find

Kernels are compiled by several threads, ahead of what is measured. The file knows shapes, claims and how operations are
counted: 2 * heads * k * (576 + 512) a query row. How time is taken is in `gpu_timing`, how a row is written in
`harness`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from bench import events, gpu_timing, harness
from pallas_kernels.sparse_mla import cases, dispatch, mosaic_gpu
from pallas_kernels.sparse_mla.mosaic_gpu import Tuning

WIDTH, LATENT, K, CONTEXT = 576, 512, 2048, 65_536
BF16_TFLOPS = 790  # dense matrix products of random numbers on this kind of machine
BYTES = {"bf16": 1152, "fp8": 656}
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
    (1, 128): (Tuning(32), Tuning(16), Tuning(32, 2)),
    (8, 16): (Tuning(16), Tuning(8), Tuning(16, 2)),
    (32, 64): (Tuning(4), Tuning(4, 2)),
}
# Where the other number of gathering warpgroups is tried too: two for bf16, one for FP8 records.
OTHER_GATHERERS = {(8, 128): Tuning(8), (128, 128): Tuning(1)}
THREADS = 8  # that compile
REPEATS = gpu_timing.REPEATS
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

    @property
    def pool(self) -> int:
        """Rows. Above 32 seats, seats share 32 contexts: the pool stays at 2.4 GB."""
        return min(self.seats, 32) * CONTEXT

    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Of `arguments`, to compile for."""
        record, dtype = ((3, WIDTH // 3), jnp.bfloat16) if self.record_format == "bf16" else ((164,), jnp.uint32)
        return (
            jax.ShapeDtypeStruct((self.seats, 1, self.heads, WIDTH), jnp.bfloat16),
            jax.ShapeDtypeStruct((self.pool, *record), dtype),
            jax.ShapeDtypeStruct((self.seats, 1, K), jnp.int32),
        )

    def tuned(self) -> Tuning:
        return dispatch.tuned(self.seats * -(-self.heads // 64))

    def describe(self) -> dict[str, Any]:
        return dict(seats=self.seats, heads=self.heads, k=K, records=self.record_format, context=CONTEXT)


RATIO_SHAPE = Shape(32, 128, "bf16")  # where XLA's form is timed too


def arguments(shape: Shape) -> tuple[jax.Array, ...]:
    """Query, pool and lists on the device."""
    pool, distinct = shape.pool, 4096

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


def compiled(jobs: Sequence[tuple[str, Tuning, Sequence[Any]]]) -> Iterator[Any]:
    """The kernel of each (format, tuning, arguments' shapes), in order; several threads compile ahead."""

    def compile_one(job):
        record_format, tuning, structs = job
        return kernel(record_format, tuning).lower(*structs).compile()

    with ThreadPoolExecutor(THREADS) as threads:
        yield from threads.map(compile_one, jobs)


def event_program(function: Any) -> Any:
    """The program of `events.event_time`, to be compiled ahead: REPEATS times overwrite the L2, record, call, record.

    It returns what waits for all of that. A call waits for its first event through its list of slots.
    """

    def record(array, number):
        shape = jax.typeof(array)
        call = jax.ffi.ffi_call("bench_record_event", shape, input_output_aliases={0: 0}, has_side_effect=True)
        return call(array, number=np.int64(number))

    def program(query, records, slots):
        before = number = jnp.zeros((1,), jnp.uint32)
        for index in range(REPEATS):
            zero = gpu_timing.overwrite(number, before)[:1] >> 31
            slots = record(slots + zero[0].astype(jnp.int32), 2 * index)
            before = record(function(query, records, slots)[0], 2 * index + 1).reshape(-1)[:1]
        return before

    return jax.jit(program)


def event_times(program: Any, inputs: tuple[jax.Array, ...]) -> harness.Measurement:
    """Microseconds of a call by the program compiled of `event_program`, in the last of four runs."""
    elapsed = events.build().BenchElapsed
    for _ in range(4):
        jax.block_until_ready(program(*inputs))
    return harness.summarise([1e3 * float(elapsed(2 * index, 2 * index + 1)) for index in range(REPEATS)])


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
        found += [Tuning(8, 4), Tuning(32, 8)]
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
    kernels, programs = compiled_ahead([(shape, tuning) for shape in shapes for tuning in wanted[shape]])
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    print(
        "heads x B  records  parts/cluster   us of a replay [p10 p90]  a call  kernels   TFLOP/s  of 790   FlashMLA us",
        flush=True,
    )
    slower: tuple[harness.Measurement, Shape, Tuning] | None = None
    for shape in shapes:
        inputs = arguments(shape)
        tuning, times = best_tuning({one: kernels[shape, one] for one in wanted[shape]}, inputs)
        event, graph = (event_times(program, inputs) for program in programs[shape, tuning])
        if shape == RATIO_SHAPE:
            write_ratio(times, kernels[shape, tuning], inputs)
        report(shape, tuning, event, graph, times)
        write(shape, tuning, event, graph, times)
        del inputs
        if slower is None or graph.median > slower[0].median:
            slower = graph, shape, tuning
        if shape.record_format == FORMATS[-1]:
            write_claims(*slower)
            slower = None


def compiled_ahead(jobs: Sequence[tuple[Shape, Tuning]]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """For each shape and tuning its kernel, and the programs that take its time: of plain calls, of graph replays."""
    events.build()

    def compile_one(job):
        shape, tuning = job
        attend = kernel(shape.record_format, tuning)
        program = event_program(attend).lower(*shape.structs())
        graph = program.compile(compiler_options={"xla_gpu_graph_min_graph_size": 1})  # of one kernel too
        return attend.lower(*shape.structs()).compile(), (program.compile(), graph)

    with ThreadPoolExecutor(THREADS) as threads:
        xla = threads.submit(lambda: xla_form.lower(*RATIO_SHAPE.structs()).compile())
        found = list(threads.map(compile_one, jobs))
        xla.result()
    kernels, programs = zip(*found, strict=True)
    return dict(zip(jobs, kernels, strict=True)), dict(zip(jobs, programs, strict=True))


def write_claims(graph: harness.Measurement, shape: Shape, tuning: Tuning) -> None:
    """Of the slower format, timed as FlashMLA was."""
    for claim in CLAIMS[shape.seats, shape.heads]:
        harness.record(
            claim,
            value=graph,
            unit="us",
            file=FILE,
            shapes=dict(shape.describe(), **cut_of(tuning)),
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
    """Parts/cluster; g: gatherers, where they are not the kernel's choice."""
    gatherers = f"g{tuning.gatherers}" if tuning.gatherers else ""
    return f"{tuning.splits}/{tuning.cluster}{gatherers}"


def teraflops(shape: Shape, microseconds: float) -> float:
    return shape.operations / microseconds * 1e-6


def report(
    shape: Shape,
    tuning: Tuning,
    event: harness.Measurement,
    graph: harness.Measurement,
    times: gpu_timing.KernelTimes,
) -> None:
    speed = teraflops(shape, graph.median)
    beside = f"{FLASHMLA[shape.seats]:8.1f}" if shape.heads == 128 else "       -"
    parts = " + ".join(f"{one.median:.1f}" for _, one in times.kernels)
    print(
        f"{shape.heads:4} x {shape.seats:3} {shape.record_format:>7} {describe(tuning):>6}   {graph.median:8.1f} "
        f"[{graph.p10:.1f} {graph.p90:.1f}]   {event.median:8.1f}  {parts:>16} {speed:8.0f} {speed / BF16_TFLOPS:7.2f} "
        f"{beside}",
        flush=True,
    )


def write(
    shape: Shape,
    tuning: Tuning,
    event: harness.Measurement,
    graph: harness.Measurement,
    times: gpu_timing.KernelTimes,
) -> None:
    common: dict[str, Any] = dict(unit="us", file=FILE, shapes=dict(shape.describe(), **cut_of(tuning)))
    what = f"sparse MLA, {shape.record_format}, {shape.heads} heads, B {shape.seats}"
    for name, around, time_us in (
        ("a call", "a call", event),
        ("a replay", "the replay of a graph of one call", graph),
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


def write_ratio(times: gpu_timing.KernelTimes, attend: Any, inputs: tuple[jax.Array, ...]) -> None:
    xla = gpu_timing.kernel_times(xla_form, *inputs).total
    difference = float(jnp.max(jnp.abs(xla_form(*inputs) - attend(*inputs)[0][:, 0])))
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
