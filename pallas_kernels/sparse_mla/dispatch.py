"""Which implementation of sparse MLA runs: asked for none, the best there is; asked for by name, that one or an error.

It knows names, backends, what each implementation covers, and the tuned table. Nothing falls back in silence.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.sparse_mla import gather, mosaic_gpu, reference

type Implementation = Literal["reference", "mosaic_gpu"] | None

MOST_HEADS, MOST_ROWS = 128, 4
RECORDS = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint32}


def sparse_mla(
    query: jax.Array,
    records: jax.Array,
    slots: jax.Array,
    scale: float,
    *,
    record_format: Literal["f32", "bf16", "fp8"],
    latent: int = gather.LATENT,
    implementation: Implementation = None,
    tuning: mosaic_gpu.Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """out = sum_k softmax_k(scale * query . row[k]) * row[k, :latent]: for each head, over its query row's list.

    Returns (out f32[B, T, H, latent], lse f32[B, T, H]): lse is the natural logarithm of the sum of exponentials. An
    empty list gives zeros and -inf. Bits depend on the rows and their order, never on the slots they are in.

    query           f32 or bf16 [B, T, H, width]; `mosaic_gpu` rounds it to bf16
    records         the pool as stored: [N, *record shape] of the format; "fp8" is u32[N, 164] for 512 + 64
    slots           i32[B, T, K]  in list order, each below N, and -1 from the end of the list on
    scale           a Python number: part of the compiled kernel
    record_format   of the pool
    latent          values of a row that are summed; the rest of it takes part in the logits only

    The reference covers everything. `mosaic_gpu` runs on a Hopper GPU (anywhere with `interpret`, the parameters of
    the GPU interpreter) and covers bf16 and FP8 records of 512 + 64 values, up to 128 heads, T of 1 to 4 and positive
    scales; asked for by name, it raises NotImplementedError with the quantity that it does not cover. `tuning` replaces
    its tuned one.
    """
    _check(query, records, slots, record_format, latent)
    if implementation not in (None, "reference", "mosaic_gpu"):
        raise ValueError(f"implementation {implementation!r} is unknown; use None, 'reference' or 'mosaic_gpu'")
    if implementation is None:
        runs = _is_hopper() and _why_not_mosaic(query, record_format, latent, scale) is None
        implementation = "mosaic_gpu" if runs else "reference"
    if implementation == "reference":
        return reference.sparse_mla(query, records, slots, scale, latent)
    if (reason := _why_not_mosaic(query, record_format, latent, scale)) is not None:
        raise NotImplementedError(f"mosaic_gpu sparse MLA: {reason}; implementation='reference' covers it")

    seats, rows, heads, width = query.shape
    missing = -heads % mosaic_gpu.HEADS_TOGETHER
    query = jnp.pad(query.astype(jnp.bfloat16).reshape(-1, heads, width), ((0, 0), (0, missing), (0, 0)))
    lists = slots.reshape(seats * rows, -1)
    lists = jnp.pad(lists, ((0, 0), (0, -lists.shape[1] % gather.TILE)), constant_values=-1)
    if tuning is None:
        tuning = tuned(query.shape[0] * -(-heads // mosaic_gpu.HEADS))
    out, lse = mosaic_gpu.attend_rows(query, records, lists, scale, tuning, interpret)
    return out[:, :heads].reshape(seats, rows, heads, latent), lse[:, :heads].reshape(seats, rows, heads)


def tuned(units: int) -> mosaic_gpu.Tuning:
    """How to cut the lists of `units` pairs of a query row and 64 heads: the first entry that reaches so far."""
    for entry in _table():
        if units <= entry["up_to_units"]:
            return mosaic_gpu.Tuning(**entry["tuning"])
    raise AssertionError("the last entry of tuned.json reaches any number of units")


@functools.cache
def _table() -> list[dict[str, Any]]:
    return json.loads((Path(__file__).resolve().parent / "tuned.json").read_text(encoding="utf-8"))


def _why_not_mosaic(query: jax.Array, record_format: str, latent: int, scale: float) -> str | None:
    _, rows, heads, width = query.shape
    if record_format == "f32":
        return "records are f32, and bf16 and fp8 are supported"
    if (width, latent) != (gather.WIDTH, gather.LATENT):
        return f"a record has {latent} + {width - latent} values, and 512 + 64 are supported"
    if heads > MOST_HEADS:
        return f"there are {heads} heads, and at most {MOST_HEADS} are supported"
    if not scale > 0:
        return f"the scale is {scale}, and only scales above 0 are supported"
    if rows > MOST_ROWS:
        return f"there are {rows} query rows a seat, and at most {MOST_ROWS} are supported"
    return None


@functools.cache
def _is_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


def _check(query: Any, records: Any, slots: Any, record_format: str, latent: int) -> None:
    if record_format not in RECORDS:
        raise ValueError(f"record format {record_format!r} is unknown; use 'f32', 'bf16' or 'fp8'")
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, H, width], not {list(query.shape)}")
    if slots.ndim != 3 or slots.shape[:2] != query.shape[:2] or slots.shape[2] == 0:
        raise ValueError(
            f"slots must be [B, T, K] with K > 0, not {list(slots.shape)}, for a query of {list(query.shape)}"
        )
    if slots.dtype != jnp.int32:
        raise ValueError(f"slots must be int32, not {slots.dtype}")
    if records.dtype != RECORDS[record_format]:
        raise ValueError(
            f"records of format {record_format!r} must be {jnp.dtype(RECORDS[record_format])}, not {records.dtype}"
        )
    width = query.shape[3]
    words = (latent + 4 * (latent // reference.SCALED_TOGETHER) + 2 * (width - latent)) // 4
    wanted = words if record_format == "fp8" else width
    found = functools.reduce(lambda a, b: a * b, records.shape[1:], 1)
    if found != wanted or (record_format == "fp8") != (records.ndim == 2):
        raise ValueError(
            f"one {record_format} record has shape {list(records.shape[1:])}, but {latent} + {width - latent} values "
            f"need {wanted} {'words' if record_format == 'fp8' else 'values in two dimensions'}"
        )
