"""Which implementation of a kernel runs: asked for none, the best there is; asked for by name, that one or an error.

It knows names, backends, what each implementation covers, and the tuned tables. Nothing falls back in silence. The
meaning of a kernel is its `reference`, its speed its own file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.indexer_scores import mosaic_gpu, reference

type Implementation = Literal["reference", "mosaic_gpu"] | None

PAGE = reference.PAGE


def indexer_scores(
    query: jax.Array,
    weights: jax.Array,
    pages: jax.Array,
    page_numbers: jax.Array,
    visible: jax.Array,
    *,
    implementation: Implementation = None,
    tuning: mosaic_gpu.Tuning | None = None,
    interpret: Any = None,
) -> jax.Array:
    """score[b, t, p] = sum_g weights[b, t, g] * relu(query[b, t, g] . key[b, p]), and -inf where p >= visible[b, t].

    Returns f32[B, T, 64 N].

    query          [B, T, G, D]  values of the stored format: f32, or already in its type (e4m3, bf16)
    weights        f32[B, T, G]  a quantised query's scale is in its head's weight
    pages          the pool as stored: u8[M, 64 (D + 4)] (e4m3 codes, then 64 f32 scales), bf16 or f32 [M, 64, D]
    page_numbers   i32[B, N]     page of positions 64 n .. 64 n + 63; any number where nothing is visible
    visible        i32[B, T]     positions 0 .. visible - 1 are scored; 0 for a padded seat

    The reference covers everything. `mosaic_gpu` runs on a Hopper GPU (anywhere with `interpret`, the parameters of
    the GPU interpreter) and covers T of 1 to 4, G up to 64, D = 128 and keys in FP8 or bf16; asked for by name, it
    raises NotImplementedError with the quantity that it does not cover. `tuning` replaces its tuned tile sizes.
    Bits are the same for every tuning and every `N`; they differ between implementations.
    """
    query, weights, pages = jnp.asarray(query), jnp.asarray(weights), jnp.asarray(pages)
    page_numbers, visible = jnp.asarray(page_numbers), jnp.asarray(visible)
    _check(query, weights, pages, page_numbers, visible)
    if implementation not in (None, "reference", "mosaic_gpu"):
        raise ValueError(f"implementation {implementation!r} is unknown; use None, 'reference' or 'mosaic_gpu'")
    if implementation is None:
        runs = _is_hopper() and _why_not_mosaic(query, pages) is None
        implementation = "mosaic_gpu" if runs else "reference"
    if implementation == "reference":
        return reference.indexer_scores(query, weights, pages, page_numbers, visible)
    if (reason := _why_not_mosaic(query, pages)) is not None:
        raise NotImplementedError(f"mosaic_gpu index scores: {reason}; implementation='reference' covers it")

    heads = query.shape[2]
    padded = -(-heads // 8) * 8  # the columns of a wgmma come in eights
    query = query.astype(jnp.float8_e4m3fn if pages.dtype == jnp.uint8 else jnp.bfloat16)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padded - heads), (0, 0)))
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, mosaic_gpu.WEIGHTS - heads)))
    if tuning is None:
        tuning = tuned(pages.dtype == jnp.uint8, page_numbers.size)
    return mosaic_gpu.score_pages(query, weights, pages, page_numbers, visible, tuning, interpret)


def tuned(is_fp8: bool, pages: int) -> mosaic_gpu.Tuning:
    """Tile sizes for `pages` pages in all seats together: the first entry of the table that reaches so far."""
    for entry in _table():
        if entry["keys"] == ("fp8" if is_fp8 else "bf16") and pages <= entry["up_to_pages"]:
            return dataclasses.replace(mosaic_gpu.Tuning(**entry["tuning"]), blocks=_multiprocessors())
    raise AssertionError("the last entry of tuned.json reaches any number of pages")


@functools.cache
def _table() -> list[dict[str, Any]]:
    path = Path(__file__).resolve().parent / "indexer_scores" / "tuned.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _why_not_mosaic(query: jax.Array, pages: jax.Array) -> str | None:
    _, rows, heads, width = query.shape
    if pages.dtype not in (jnp.uint8, jnp.bfloat16):
        return f"keys are {pages.dtype}, and fp8 (uint8 pages) and bfloat16 are supported"
    if width != mosaic_gpu.WIDTH:
        return f"the index key has {width} values, and {mosaic_gpu.WIDTH} are supported"
    if heads > mosaic_gpu.WEIGHTS:
        return f"there are {heads} index heads, and at most {mosaic_gpu.WEIGHTS} are supported"
    if rows > 4:
        return f"there are {rows} query rows a seat, and at most 4 are supported"
    return None


@functools.cache
def _is_hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


@functools.cache
def _multiprocessors() -> int:
    """Of this GPU; of an H200 where there is none, for a compile ahead of time."""
    return getattr(jax.devices()[0], "core_count", 132) if _is_hopper() else 132


def _check(query: Any, weights: Any, pages: Any, page_numbers: Any, visible: Any) -> None:
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, G, D], not {list(query.shape)}")
    seats, rows, heads, width = query.shape
    page_shape = (PAGE * (width + 4),) if pages.dtype == jnp.uint8 else (PAGE, width)
    pages_of_a_seat = page_numbers.shape[-1] if page_numbers.ndim else 0
    for name, shape, wanted in (
        ("weights", weights.shape, (seats, rows, heads)),
        ("visible", visible.shape, (seats, rows)),
        ("page_numbers", page_numbers.shape, (seats, pages_of_a_seat)),
        ("one page", pages.shape[1:], page_shape),
    ):
        if tuple(shape) != wanted:
            raise ValueError(
                f"{name} has shape {list(shape)}, but a query of {list(query.shape)} and pages of {pages.dtype} "
                f"need {list(wanted)}"
            )
    for name, array, wanted in (
        ("weights", weights, jnp.float32),
        ("page_numbers", page_numbers, jnp.int32),
        ("visible", visible, jnp.int32),
    ):
        if array.dtype != wanted:
            raise ValueError(f"{name} must be {jnp.dtype(wanted)}, not {array.dtype}")
