"""Which implementation of a kernel runs: asked for none, the best there is; asked for by name, that one or an error.

It knows names, backends, what each implementation covers, and the tuned tables. Nothing falls back in silence. The
meaning of a kernel is its `reference`, its speed its own file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels.indexer_prefetch import mosaic_gpu as prefetch_mosaic_gpu
from pallas_kernels.indexer_prefetch import reference as prefetch_reference
from pallas_kernels.indexer_prefetch.reference import Prefetched
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
    if _chosen(implementation, query, pages) == "reference":
        return reference.indexer_scores(query, weights, pages, page_numbers, visible)
    query, weights = _padded(query, weights, pages)
    if tuning is None:
        tuning = tuned(pages.dtype == jnp.uint8, page_numbers.size)
    return mosaic_gpu.score_pages(query, weights, pages, page_numbers, visible, tuning, interpret)


def indexer_prefetch(
    query: jax.Array,
    weights: jax.Array,
    pages: jax.Array,
    page_numbers: jax.Array,
    visible: jax.Array,
    threshold: jax.Array,
    lengths: jax.Array,
    cap: jax.Array,
    slot_of: jax.Array,
    host_pool: jax.Array,
    layer: jax.Array,
    *,
    staging: int,
    blank: tuple[jax.Array, jax.Array] | None = None,
    bound: jax.Array | None = None,
    implementation: Implementation = None,
    tuning: mosaic_gpu.Tuning | None = None,
    interpret: Any = None,
) -> Prefetched:
    """`indexer_scores`, and the records of likely rows copied from the host while they are made.

    A position is a candidate if any query row of its seat scores above the seat's threshold, it is older than this
    step, and its host row, 64 * page number + place in the page, has no slot. min(cap, staging, candidates) of a seat
    are staged; which of them, and in what order, may differ from call to call. Scores never do: they are bitwise
    those of the same implementation of `indexer_scores`.

    query .. visible   as in `indexer_scores`
    threshold      f32[B]        +inf and NaN have no candidates
    lengths        i32[B]        positions written before this step
    cap            i32[B]        most rows a seat may stage; 0 or less for none
    slot_of        i32[N_H]      device slot of each host row, or NO_SLOT
    host_pool      [L, N_H, *record]  records of whole 4-byte words, in device or pinned host memory; only read
    layer          i32[]         in 0 .. L - 1, the caller's promise
    staging        S, at least 1: places of a seat
    blank          `indexer_prefetch.ahead.blank(B, S)`, for who wants it made early; it is written to in place
    bound          f32[B] or None: with it, the result says of every score whether it exceeds its seat's bound

    The reference needs a pool in device memory. `mosaic_gpu` covers what it covers in `indexer_scores`, takes pools in
    either memory, inside a jitted function and not under vmap, and reads pinned ones over the link without a copy.
    """
    query, weights, pages = jnp.asarray(query), jnp.asarray(weights), jnp.asarray(pages)
    page_numbers, visible = jnp.asarray(page_numbers), jnp.asarray(visible)
    threshold, lengths, cap = jnp.asarray(threshold), jnp.asarray(lengths), jnp.asarray(cap)
    slot_of, layer = jnp.asarray(slot_of), jnp.asarray(layer, jnp.int32)
    _check(query, weights, pages, page_numbers, visible)
    _check_prefetch(page_numbers.shape[0], threshold, lengths, cap, slot_of, host_pool, staging, bound)
    if _chosen(implementation, query, pages) == "reference":
        if _mosaic.is_in_host_memory(host_pool):
            raise NotImplementedError(
                "reference index scores with prefetch: the host pool is in pinned memory, which jnp cannot index; use "
                "a pool in device memory, or implementation='mosaic_gpu' on a Hopper GPU"
            )
        scores = reference.indexer_scores(query, weights, pages, page_numbers, visible)
        asked = threshold, lengths, cap, slot_of, host_pool, layer, staging, bound
        return prefetch_reference.stage(scores, page_numbers, *asked)
    query, weights = _padded(query, weights, pages)
    if tuning is None:
        tuning = tuned(pages.dtype == jnp.uint8, page_numbers.size, "indexer_prefetch")
    return prefetch_mosaic_gpu.score_and_prefetch(
        *(query, weights, pages, page_numbers, visible, threshold, lengths, cap, slot_of, host_pool, layer, staging),
        *(tuning, interpret, blank, bound),
    )


def _chosen(implementation: Implementation, query: jax.Array, pages: jax.Array) -> str:
    """Of the two kernels that score: what runs, or NotImplementedError for a named one that cannot."""
    if implementation not in (None, "reference", "mosaic_gpu"):
        raise ValueError(f"implementation {implementation!r} is unknown; use None, 'reference' or 'mosaic_gpu'")
    reason = _why_not_mosaic(query, pages)
    if implementation is None:
        return "mosaic_gpu" if _is_hopper() and reason is None else "reference"
    if implementation == "mosaic_gpu" and reason is not None:
        raise NotImplementedError(f"mosaic_gpu index scores: {reason}; implementation='reference' covers it")
    return implementation


def scores_on_this_gpu(query: jax.Array, pages: jax.Array) -> bool:
    """Whether a GPU is there whose kernel scores these keys: what implementation=None takes then."""
    return _chosen(None, jnp.asarray(query), jnp.asarray(pages)) == "mosaic_gpu"


def _padded(query: jax.Array, weights: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As the kernels take them: the query in the keys' type, heads in eights, as the columns of a wgmma come."""
    heads = query.shape[2]
    query = query.astype(jnp.float8_e4m3fn if pages.dtype == jnp.uint8 else jnp.bfloat16)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, -heads % 8), (0, 0)))
    return query, jnp.pad(weights, ((0, 0), (0, 0), (0, mosaic_gpu.WEIGHTS - heads)))


def tuned(is_fp8: bool, pages: int, kernel: str = "indexer_scores") -> mosaic_gpu.Tuning:
    """Tile sizes for `pages` pages in all seats together: the first entry of the table that reaches so far."""
    for entry in _table(kernel):
        if entry["keys"] == ("fp8" if is_fp8 else "bf16") and pages <= entry["up_to_pages"]:
            return dataclasses.replace(mosaic_gpu.Tuning(**entry["tuning"]), blocks=_multiprocessors())
    raise AssertionError("the last entry of tuned.json reaches any number of pages")


@functools.cache
def _table(kernel: str) -> list[dict[str, Any]]:
    path = Path(__file__).resolve().parent / kernel / "tuned.json"
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


def _check_prefetch(
    seats: int, threshold: Any, lengths: Any, cap: Any, slot_of: Any, host_pool: Any, staging: int, bound: Any
):
    if staging < 1:
        raise ValueError(f"staging is {staging} but must be at least 1; without places call indexer_scores")
    if host_pool.ndim < 3:
        raise ValueError(f"host_pool has shape {list(host_pool.shape)} but must be [L, N_H, *record]")
    record_bytes = math.prod(host_pool.shape[2:]) * host_pool.dtype.itemsize
    if record_bytes % 4:
        raise ValueError(f"a record has {record_bytes} bytes, not a multiple of 4; pad the record")
    for name, array, shape, dtype in (
        ("threshold", threshold, (seats,), jnp.float32),
        *([] if bound is None else [("bound", bound, (seats,), jnp.float32)]),
        ("lengths", lengths, (seats,), jnp.int32),
        ("cap", cap, (seats,), jnp.int32),
        ("slot_of", slot_of, (host_pool.shape[1],), jnp.int32),
    ):
        if tuple(array.shape) != shape or array.dtype != dtype:
            raise ValueError(
                f"{name} is {array.dtype}{list(array.shape)}, but {seats} seats and a host pool of "
                f"{list(host_pool.shape)} need {jnp.dtype(dtype)}{list(shape)}"
            )
