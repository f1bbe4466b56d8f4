"""Writing a trace: steps go in, layer by layer and in order; a folder comes out, whole or not at all.

Knows what of a step is kept and in which form (`format` says how it is read). Does not know whose steps they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import indexer
from echo_jax.models.config import FULL
from echo_jax.traces import (
    LOOKAHEAD_SCORE,
    PAGE_BOUND,
    PROMPT_SELECTED,
    QUERY_COSINE,
    StepScores,
    Trace,
    TraceInfo,
)
from echo_jax.traces.format import HEADER, STEPS, layer_file, lookahead_band
from echo_jax.types import NO_POSITION

SCORE_DTYPES = ("float16", "float32")


class UnwritableTrace(ValueError):
    """What came cannot be stored in the form that was asked for; known only once it came."""


class Writer:
    """A trace being written to the folder `path`.

    Use as a context: the folder appears when the block ends well, and nothing is left of it otherwise. `info.steps` and
    `info.nan_scores` are set to what came. Raises ValueError for an unknown score dtype or a band below top_k,
    FileExistsError for an existing path unless `overwrite` and it is a trace; later UnwritableTrace for no step at all,
    or a score beyond the score dtype.
    """

    def __init__(self, path: str | Path, info: TraceInfo, *, overwrite: bool = False):
        if info.score_dtype not in SCORE_DTYPES:
            raise ValueError(f"score dtype {info.score_dtype!r} is unknown; use one of: {', '.join(SCORE_DTYPES)}")
        if info.band is not None and info.band < info.top_k:
            raise ValueError(
                f"a band of {info.band} scores does not hold the {info.top_k} selected ones; raise the band to at "
                f"least {info.top_k}"
            )
        self.path, self.info = Path(path), info
        if self.path.exists() and not (overwrite and (self.path / HEADER).is_file()):
            remedy = "it is no trace, give another path" if overwrite else "give another path, or overwrite it"
            raise FileExistsError(f"{str(path)!r} exists; {remedy}")
        self._layers = {number: _Layer(info) for number, kind in enumerate(info.layer_kinds) if kind == FULL}
        self._steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._lengths: dict[int, int] = {}
        self._nan_scores = 0

    def __enter__(self) -> Writer:
        parent = self.path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=parent))
        return self

    def add(self, layer: int, step: StepScores) -> None:
        """The next step of a layer, which must not be a shared one. Every layer gets every step."""
        arrays: Any = jax.tree.map(np.asarray, step)
        if layer == 0:
            self._steps.append((arrays.length, arrays.active, arrays.starts))
        self._layers[layer].add(arrays)

    def finish_layer(self, layer: int) -> None:
        """Writes the layer's file and frees its memory; for those who have all steps of a layer before the next one."""
        kept = self._layers[layer]
        self._lengths[layer] = kept.steps
        _save(self._folder / layer_file(layer), kept.arrays())
        self._nan_scores += kept.nan_scores
        self._layers[layer] = _Layer(self.info)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _finish(self) -> None:
        for layer in self._layers:
            if layer not in self._lengths:
                self.finish_layer(layer)
        if len(set(self._lengths.values())) != 1:
            raise ValueError(f"layers have {self._lengths} steps; add every step to every layer that scores")
        if not self._steps:
            raise UnwritableTrace(
                "the trace would be empty: 0 steps; a request needs at least 2 new tokens, since its first one comes "
                "from its prefill"
            )
        lengths, active, starts = (np.stack(one) for one in zip(*self._steps, strict=True))
        np.savez_compressed(
            self._folder / STEPS,
            length=lengths.astype(np.int32),
            active=active.astype(bool),
            starts=starts.astype(bool),
        )
        self.info = dataclasses.replace(self.info, steps=len(self._steps), nan_scores=self._nan_scores)
        header = json.dumps(dataclasses.asdict(self.info), indent=1)
        (self._folder / HEADER).write_text(header + "\n", encoding="utf-8")
        os.chmod(self._folder, 0o755)
        if self.path.exists():
            shutil.rmtree(self.path)
        os.rename(self._folder, self.path)


class _Layer:
    """The steps of one layer, in stored form."""

    def __init__(self, info: TraceInfo):
        self.info = info
        self.nan_scores = 0
        self._kept: dict[str, list[np.ndarray]] = {}
        self.steps = 0

    def add(self, step: Any) -> None:
        """A StepScores of NumPy arrays."""
        self.steps += 1
        visible = np.where(step.active, step.length + 1, 0)
        is_visible = np.arange(self.info.capacity) < visible[:, None]
        self.nan_scores += int(np.sum(np.isnan(step.score) & is_visible))
        self._add_scores("score", step.score, is_visible, self.info.band)
        self._keep("selected_gap", gaps(step.selected, self.info.capacity))
        self._keep("kth_score", step.kth_score.astype(np.float32))
        for name in self.info.fields:
            value = getattr(step, name)
            if value is None:
                raise ValueError(f"the trace is to carry {name} but a step has none; leave it out of the fields")
            if name == LOOKAHEAD_SCORE:
                self._add_scores(name, value, is_visible, lookahead_band(self.info))
            elif name == PAGE_BOUND:
                self._keep(name, rounded_up(value, self.info.score_dtype))
            elif name == QUERY_COSINE:
                self._keep(name, value.astype(np.float32))
            elif name == PROMPT_SELECTED:
                for row in np.flatnonzero(step.starts):
                    self._keep(f"{name}_gap", gaps(value[row], self.info.capacity))

    def _add_scores(self, name: str, score: np.ndarray, is_visible: np.ndarray, band: int | None) -> None:
        """The best of them, or all."""
        finite = np.where(is_visible & np.isfinite(score), score, 0)
        largest, limit = np.max(np.abs(finite)), np.finfo(self.info.score_dtype).max
        if largest > limit:
            raise UnwritableTrace(
                f"a score of {largest:g} does not fit {self.info.score_dtype}; store scores as float32"
            )
        stored = np.where(is_visible, score, 0).astype(self.info.score_dtype)
        if band is None:
            self._keep(name, stored)
            return
        positions = np.full((score.shape[0], band), NO_POSITION, np.int32)
        values = np.zeros(positions.shape, stored.dtype)
        for row in range(score.shape[0]):
            best = _best(score[row, : int(is_visible[row].sum())], band)
            positions[row, : len(best)], values[row, : len(best)] = best, stored[row, best]
        self._keep(f"{name}_gap", gaps(positions, self.info.capacity))
        self._keep(name, values)

    def _keep(self, name: str, value: np.ndarray) -> None:
        self._kept.setdefault(name, []).append(value)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: np.stack(values) for name, values in self._kept.items()}


def _save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez_compressed(path, **arrays)


def _best(score: np.ndarray, band: int) -> np.ndarray:
    """Ascending positions of the highest scores, a NaN lowest; all of them where there are no more than `band`."""
    if len(score) <= band:
        return np.arange(len(score))
    order = np.where(np.isnan(score), -np.inf, score)
    return np.sort(np.argpartition(-order, band - 1)[:band])


def gaps(positions: np.ndarray, capacity: int) -> np.ndarray:
    """Distances between ascending positions i32[..., N], the first from -1; 0 where there is NO_POSITION."""
    before = np.concatenate([np.full_like(positions[..., :1], -1), positions[..., :-1]], axis=-1)
    distance = np.where(positions == NO_POSITION, 0, positions - before)
    return distance.astype(np.uint16 if capacity < 2**16 else np.uint32)


def rounded_up(bounds: np.ndarray, dtype: str) -> np.ndarray:
    """In the dtype, and never below what they were: an upper bound stays one."""
    rounded = bounds.astype(dtype)
    too_low = rounded.astype(np.float32) < bounds
    return np.where(too_low, np.nextafter(rounded, np.asarray(np.inf, dtype)), rounded)


def store(trace: Trace, writer: Writer, on_step: Callable[[int, int], None] | None = None) -> TraceInfo:
    """Writes any trace, a synthetic one above all, a layer at a time; returns the header that was written.

    The writer's header is the trace's, with a band and a score dtype of choice. Selected sets are computed from the
    scores where the trace does not bring them. on_step(layer, step) is called as things happen.
    """
    info = writer.info

    @jax.jit
    def advance(source, carry, t):
        carry, step = source.step(carry, t)
        if step.selected is None:
            chosen = indexer.select(step.score, step.visible, info.top_k)
            missing = info.top_k - chosen.positions.shape[1]
            positions = jnp.pad(chosen.positions, ((0, 0), (0, missing)), constant_values=NO_POSITION)
            step = step._replace(selected=positions, kth_score=chosen.kth_score)
        return carry, step

    with writer:
        for layer, kind in enumerate(info.layer_kinds):
            if kind != FULL:
                continue
            source = trace.layer(layer)
            carry = source.init()
            for t in range(info.steps):
                carry, step = advance(source, carry, jnp.int32(t))
                writer.add(layer, step)
                if on_step is not None:
                    on_step(layer, t)
            writer.finish_layer(layer)
    return writer.info


def stored_bytes(info: TraceInfo) -> int:
    """About how many bytes a synthetic trace takes: its scores and sets, before compression, which saves a third."""
    scored = info.layer_kinds.count(FULL) * info.steps * info.requests
    width = np.dtype(info.score_dtype).itemsize
    kept = info.capacity * width if info.band is None else info.band * (width + 2)
    return scored * (kept + 2 * info.top_k)
