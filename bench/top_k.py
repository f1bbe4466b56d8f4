"""Exact selection on a GPU: is it the CPU's to the bit, and how long does it take beside jax.lax.top_k and torch.topk?

    JAX_PLATFORMS=cuda,cpu python -m bench.top_k [check] [offsets] [bench] [listed]     (all: about a minute on an H200)

It knows echo_top_k of the shared library and the named corners of tests/selections.py. It does not know what makes
scores.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from bench import events
from bench.gpu_timing import L2_BYTES, device_bandwidth, kernel_times
from bench.harness import Measurement, record, summarise
from echo_jax import _ffi
from tests import selections

TOP_K = 2048
FILE = "gpu_top_k.jsonl"
CLAIMS = {(1, 131072): "B.top_k_1_us", (32, 131072): "B.top_k_32_us", (102, 98304): "B.top_k_102_us"}
CHECKED_ROWS = 10

# Lists that a bound leaves, in multiples of k: what a good bound gives, and bounds that mislead.
GOOD, MISLEADING = {"1.15 k": 1.15, "3 k": 3.0}, {"0.9 k": 0.9, "7 k": 7.0}

select = jax.jit(_ffi.top_k, static_argnames="k")

# ---- scores --------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def index_scores(rows: int, length: int, heads: int = 64, bias: float = 0.0) -> jax.Array:
    """As selections.index_scores, made on the device: sum over heads of weight * relu(normal + bias)."""

    def add_head(total, key):
        weight, product = jax.random.split(key)
        products = jnp.maximum(jax.random.normal(product, (rows, length), jnp.float32) + bias, 0)
        return total + jax.random.normal(weight, (rows, 1), jnp.float32) * products, None

    return lax.scan(add_head, jnp.zeros((rows, length), jnp.float32), jax.random.split(jax.random.key(7), heads))[0]


# ---- check ---------------------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, np.ndarray, np.ndarray, int]]:
    """(name, score, visible, k): every corner at a length that leaves rows unaligned, and at a real one."""
    kinds: tuple[tuple[int, Any, int], ...] = (
        (40001, np.float32, TOP_K),
        (40001, ml_dtypes.bfloat16, TOP_K),
        (40001, np.float32, 4096),
        (40001, np.float32, 1),
        (131072, np.float32, TOP_K),
    )
    for length, dtype, k in kinds:
        visible = selections.lengths(CHECKED_ROWS, length, k)
        for corner in selections.CORNERS:
            score = selections.make(corner, CHECKED_ROWS, length, dtype, seed=k)
            yield f"{corner}, {np.dtype(dtype).name} {CHECKED_ROWS} x {length}, k {k}", score, visible, k
    # One row takes the most blocks, many rows one block each; a row longer than what is emitted at once.
    for rows, length in ((1, 131072), (3, 1000003), (32, 131072), (102, 98304), (140, 33333)):
        visible = np.full(rows, length, np.int32)
        visible[1::3] = length - 1 - np.arange(len(visible[1::3])) * 7
        for is_best in (False, True):
            yield (
                f"fooled, best sampled: {is_best}, {rows} x {length}",
                selections.fooled(rows, length, TOP_K, is_best),
                visible,
                TOP_K,
            )
        for name, bias in (("index scores", 0.0), ("index scores, many zero", -3.2)):
            score = np.asarray(index_scores(rows, length, 64 if bias == 0 else 4, bias))
            yield f"{name}, {rows} x {length}", score, visible, TOP_K


def got(score: Any, visible: Any, k: int, device: Any = None) -> tuple[np.ndarray, np.ndarray]:
    positions, kth_score = select(*jax.device_put((score, visible), device), k=k)
    return np.asarray(positions), np.asarray(kth_score).view(np.uint32)


def check() -> None:
    """Every case against the CPU's twin, two rows of each against sorting, and the call again against itself."""
    _ffi.register_for("cpu")
    cpu, device = jax.devices("cpu")[0], jax.devices()[0]
    failures, compared, started = [], 0, time.perf_counter()
    for name, score, visible, k in cases():
        result = got(score, visible, k, device)
        expected = got(score, visible, k, cpu)
        difference = selections.first_difference(result, expected)
        if difference is None:
            difference = selections.first_difference(
                (result[0][:2], result[1][:2]), selections.answer(score[:2], visible[:2], k)
            )
        if difference is None:
            difference = selections.first_difference(got(score, visible, k, device), result)
            difference = f"not the same again: {difference}" if difference else None
        compared += len(score)
        if difference is not None:
            failures.append(f"{name}: {difference}")
            print(f"  DIFFERS  {failures[-1]}", flush=True)
    print(f"check: {len(failures)} cases differ, {compared} rows compared, {time.perf_counter() - started:.1f} s")
    record(
        name="top-k: cases that differ from the CPU twin, from sorting, or from themselves when repeated",
        value=len(failures),
        unit="",
        file=FILE,
        method="positions and k-th scores compared by bits",
        shapes={"corners": len(selections.CORNERS), "rows": compared},
    )
    if failures:
        sys.exit(1)


def offsets() -> None:
    """Rows that begin behind element 2^31 of the scores, and behind byte 2^31 of the positions, are themselves."""
    rows, length, k = 2200, 1_000_003, 256

    @jax.jit
    def make():
        """Cheap and different in every row: a hash of row and position."""
        row, position = jnp.arange(rows, dtype=jnp.uint32)[:, None], jnp.arange(length, dtype=jnp.uint32)[None]
        mixed = (row * jnp.uint32(0x9E3779B1)) ^ (position * jnp.uint32(0x85EBCA6B))
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
        return (mixed >> 8).astype(jnp.float32)

    score = make()
    positions, bits = got(score, jnp.full((rows,), length, jnp.int32), k)
    checked = [0, 2146, 2147, 2148, rows - 1]
    for row in checked:
        expected = selections.answer(np.asarray(score[row])[None], np.array([length]), k)
        difference = selections.first_difference((positions[row : row + 1], bits[row : row + 1]), expected)
        if difference is not None:
            sys.exit(f"offsets: row {row} of {rows} x {length}: {difference}")
    print(f"offsets: rows {checked} of {rows} x {length} agree")


# ---- bench ---------------------------------------------------------------------------------------------------


def write_down(
    name: str, score: jax.Array, took: Measurement, method: str, claim: str | None = None, **more: Any
) -> None:
    rows, length = score.shape
    kind = "f32" if score.dtype == jnp.float32 else score.dtype.name
    print(
        f"  {name:<40}{rows:>5} x {length:<8}{kind:<9}{took.median:8.1f} us  [{took.p10:.1f}, {took.p90:.1f}]"
        f"  {more.get('notes', '')}",
        flush=True,
    )
    shapes = {"rows": rows, "positions": length, "k": TOP_K, "dtype": score.dtype.name}
    record(claim, value=took, unit="us", file=FILE, name=name, shapes=shapes, method=method, **more)


def ours(name: str, score: jax.Array, bytes_per_s: float, claim: str | None = None) -> None:
    run: Callable[..., Any] = jax.jit(functools.partial(_ffi.top_k, k=TOP_K))
    visible = jnp.full((score.shape[0],), score.shape[1], jnp.int32)
    took = kernel_times(run, score, visible).total
    reading = score.nbytes / bytes_per_s * 1e6
    notes = f"limit: reading once, {reading:.1f} us at {bytes_per_s / 1e12:.2f} TB/s"
    limit = {"fraction_of_limit": reading / took.median, "notes": notes}
    write_down(f"echo_top_k, {name}", score, took, CUPTI, **limit)
    if claim is not None:
        by_clock = events.claim_time(run, score, visible, file=FILE)
        write_down(f"echo_top_k, {name}", score, by_clock, events.CLOCK, claim, kernel_us=took.median, **limit)


def torch_times(score: np.ndarray, repeats: int = 30) -> Measurement | None:
    """torch.topk, not sorted, by the clock of the claims (`events.CLOCK`); None where there is no torch."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    values, swept = torch.from_numpy(score).cuda(), torch.empty(4 * L2_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        torch.topk(values, TOP_K, sorted=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.topk(values, TOP_K, sorted=False)
    durations = []
    for _ in range(repeats + 3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        swept.zero_()
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        durations.append(before.elapsed_time(after) * 1e3)
    return summarise(durations[3:])


CUPTI = "CUPTI time of the kernels of a call, L2 overwritten before each"


IN_L2 = "CUPTI time of the kernels of a call, what they read still in the L2 as the scorer leaves it"


def bench() -> None:
    bytes_per_s = device_bandwidth().read
    claimed = {shape: index_scores(*shape) for shape in CLAIMS}
    for shape, claim in CLAIMS.items():
        ours("index scores", claimed[shape], bytes_per_s, claim)
    for shape, score in claimed.items():
        ours("index scores", score.astype(jnp.bfloat16), bytes_per_s)
        ours("few scores not zero", index_scores(*shape, 4, -3.2), bytes_per_s)
        ours("all equal", jnp.zeros(shape, jnp.float32), bytes_per_s)
        for is_best in (False, True):
            score = jnp.asarray(selections.fooled(*shape, TOP_K, is_best))
            ours(f"sample too {'good' if is_best else 'bad'}, row searched", score, bytes_per_s)
    for shape in ((8, 131072), (16, 131072), (64, 131072), (512, 32768), (1, 1048576)):
        ours("index scores", index_scores(*shape), bytes_per_s)
    for score in claimed.values():
        of_xla = jax.jit(lambda score: lax.top_k(score, TOP_K))
        kernels = kernel_times(of_xla, score).total.median
        took = events.claim_time(of_xla, score, file=FILE)
        write_down("jax.lax.top_k, index scores", score, took, events.CLOCK, kernel_us=kernels)
    for score in claimed.values():
        took = torch_times(np.asarray(score))
        if took is not None:
            write_down("torch.topk, index scores", score, took, events.CLOCK)


# ---- bounds and lists ----------------------------------------------------------------------------------------


@jax.jit
def bounds(score: jax.Array, ranks: jax.Array) -> jax.Array:
    """f32[rows]: the score of a row that its ranks[row] best exceed."""
    return jnp.take_along_axis(-jnp.sort(-score, axis=1), ranks[:, None], axis=1)[:, 0]


@jax.jit
def marks(score: jax.Array, bound: jax.Array) -> jax.Array:
    """As selections.marks, made on the device."""
    rows, length = score.shape
    above = jnp.pad(score > bound[:, None], ((0, 0), (0, -length % 32))).reshape(rows, -1, 32)
    return jnp.sum(above.astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def check_hints() -> None:
    """On the GPU, every corner with bounds that leave too few keys, enough, and too many, alone and marked: the answer
    without any."""
    rows, length, failures, compared = CHECKED_ROWS, 131072, [], 0
    visible = selections.lengths(rows, length, TOP_K)
    for corner in selections.CORNERS:
        score = jnp.asarray(selections.make(corner, rows, length))
        expected = got(score, visible, TOP_K)
        for rank in (TOP_K // 2, TOP_K, 2 * TOP_K, 7 * TOP_K):
            bound = bounds(score, jnp.full((rows,), rank))
            for hint in ((bound,), (bound, marks(score, bound))):
                positions, kth_score = select(score, visible, TOP_K, *hint)
                result = np.asarray(positions), np.asarray(kth_score).view(np.uint32)
                compared += rows
                if difference := selections.first_difference(result, expected):
                    failures.append(f"{corner}, rank {rank}, {'marked' if len(hint) > 1 else 'bounded'}: {difference}")
                    print(f"  DIFFERS  {failures[-1]}", flush=True)
    record(
        name="top-k with bounds and lists: cases that differ from the row searched without",
        value=len(failures),
        unit="",
        file=FILE,
        method="positions and k-th scores compared by bits",
        shapes={"corners": len(selections.CORNERS), "rows": compared},
    )
    print(f"hints: {len(failures)} cases differ, {compared} rows compared")
    if failures:
        sys.exit(1)


def listed() -> None:
    """What a bound saves, and what the fused kernel's list does; what it costs where the bound was bad."""
    check_hints()
    bytes_per_s = device_bandwidth().read
    run: Callable[..., Any] = jax.jit(functools.partial(_ffi.top_k, k=TOP_K))
    for rows, length in ((32, 131072), (1, 131072), (8, 131072), (102, 98304)):
        score, visible = index_scores(rows, length), jnp.full((rows,), length, jnp.int32)
        ours("index scores", score, bytes_per_s, CLAIMS.get((rows, length)))
        expected, slowest = run(score, visible), None
        mixed = np.random.default_rng(rows).uniform(1.0, 3.0, rows)
        for name, multiple in (GOOD | {"1 to 3 k": mixed} | MISLEADING).items():
            bound = bounds(score, jnp.asarray(np.broadcast_to(np.int32(np.float64(multiple) * TOP_K), (rows,))))
            above = marks(score, bound)
            for hint, what in (((bound, above), "listed"), ((bound,), "bounded")):
                timed = jax.jit(lambda score, visible, *hint: _ffi.top_k(score, visible, TOP_K, *hint))
                if any((x != y).any() for x, y in zip(timed(score, visible, *hint), expected, strict=True)):
                    sys.exit(f"{what}, {name}, {rows} x {length}: not the row's answer")
                took = kernel_times(timed, score, visible, *hint).total
                write_down(f"echo_bounded_top_k, {what}, {name}", score, took, CUPTI)
                if name in GOOD:
                    took_warm = kernel_times(timed, score, visible, *hint, sweep=False).total
                    write_down(f"echo_bounded_top_k, {what}, {name}, in L2", score, took_warm, IN_L2)
                if what == "listed" and name in GOOD and (slowest is None or took.median > slowest[1].median):
                    slowest = name, took, events.claim_time(timed, score, visible, *hint, file=FILE)
        if (rows, length) == (32, 131072):
            assert slowest is not None
            name, took, by_clock = slowest
            notes = f"the slower of lists of {' and '.join(GOOD)}: {name}"
            more = {"notes": notes, "kernel_us": took.median}
            write_down(
                "echo_bounded_top_k, the list as kept", score, by_clock, events.CLOCK, "D.listed_top_k_us", **more
            )


PARTS = {"check": check, "offsets": offsets, "bench": bench, "listed": listed}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := sorted(set(wanted) - set(PARTS)):
        sys.exit(f"no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    reason = _ffi.why_unavailable()
    if reason is not None:
        sys.exit(f"echo_top_k cannot be called here: {reason}")
    print(f"echo_top_k on {jax.devices()[0].device_kind}")
    for name in wanted:
        started = time.perf_counter()
        PARTS[name]()
        print(f"{name} took {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
