"""What the benches of sparse MLA run: arguments of a shape, kernels compiled ahead, and programs that events time.

It knows shapes, record formats and threads that compile. It knows no claim, and prints nothing. Lowering is most of a
compile and holds Python's lock, so that threads hide XLA and ptxas only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from bench import events
from pallas_kernels.sparse_mla import cases, dispatch
from pallas_kernels.sparse_mla.mosaic_gpu import Tuning

WIDTH, LATENT, K, CONTEXT = 576, 512, 2048, 65_536
BYTES = {"bf16": 1152, "fp8": 656}
THREADS = 8  # that compile


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


def compiled_with_programs(jobs: Sequence[tuple[Shape, Tuning]]) -> list[tuple[Any, tuple[Any, Any]]]:
    """For each shape and tuning its kernel, and the programs that take its time: of plain calls, of graph replays."""
    events.build()

    def compile_one(job):
        shape, tuning = job
        attend = kernel(shape.record_format, tuning)
        program = jax.jit(events.event_program(attend)).lower(*shape.structs())
        graph = program.compile(compiler_options=dict(events.AS_GRAPH))
        return attend.lower(*shape.structs()).compile(), (program.compile(), graph)

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(compile_one, jobs))
