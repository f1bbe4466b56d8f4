"""A stored trace: a folder with a header, the rows' lengths, and one file of arrays per scoring layer.

Knows files, their schema and their integrity; reads them, `writing` writes them. Does not know where scores come from
or what they are used for.

    header.json     the fields of TraceInfo, `schema` among them: everything needed to make the trace again
    steps.npz       length i32[T, R]   active bool[T, R]   starts bool[T, R]
    layer_NNN.npz   one for each layer of kind "full"; T steps, R rows
      score             [T, R, P] float16 or float32, 0 where invisible; or, with a band of N,
      score_gap         [T, R, N] positions of the best N visible scores, as gaps, and `score` [T, R, N] in that order
      selected_gap      [T, R, K] what the run selected, as gaps      kth_score f32[T, R] as computed, before rounding
      lookahead_score   as score; where there is a band, the best K, with lookahead_score_gap
      page_bound        [T, R, P // page_size], rounded up       query_cosine f32[T, R]
      prompt_selected_gap [starts, W, K], a request after the other in order of (step, row)

Ascending positions are stored as gaps, each the distance from the one before (the first from -1); 0 is padding. They
compress to about a byte each.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import zipfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from echo_jax.models.config import FULL
from echo_jax.traces import (
    LOOKAHEAD_SCORE,
    PAGE_BOUND,
    PROMPT_SELECTED,
    QUERY_COSINE,
    SCHEMA_VERSION,
    SYNTHETIC,
    StepScores,
    TraceInfo,
)
from echo_jax.types import NO_POSITION

HEADER, STEPS = "header.json", "steps.npz"
PACKAGED = Path(__file__).resolve().parent.parent / "data" / "traces"


def find(name: str | Path) -> Path:
    """The folder of a trace: an existing one is taken as it is, otherwise the name of one of this package."""
    known = packaged()
    if Path(name).is_dir():
        return Path(name)
    if str(name) in known:
        return PACKAGED / name
    if os.sep in str(name):
        raise FileNotFoundError(f"trace {str(name)!r} does not exist; give a folder written by `echo-jax trace`")
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    raise ValueError(
        f"trace {str(name)!r} is neither a folder nor known here; "
        + (f"did you mean {close[0]!r}? " if close else "")
        + f"known: {', '.join(known) or 'none packaged here'}; or {SYNTHETIC}NAME for a synthetic one"
    )


def packaged() -> list[str]:
    """Names of the traces that come with this package."""
    return sorted(path.parent.name for path in PACKAGED.glob(f"*/{HEADER}"))


def layer_file(layer: int) -> str:
    """The file of a layer's arrays."""
    return f"layer_{layer:03}.npz"


def lookahead_band(info: TraceInfo) -> int | None:
    """Guesses kept of a row: those of a set where scores are kept in a band, else all."""
    return None if info.band is None else info.top_k


def open_folder(path: str | Path) -> StoredTrace:
    """The trace in a folder. Layers are read when they are asked for; that all are there is checked now.

    Raises FileNotFoundError for a missing folder, ValueError for one that is no trace, of another schema version,
    truncated, or empty.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"trace {str(path)!r} does not exist; give a folder written by `echo-jax trace`")
    if not (path / HEADER).is_file():
        raise ValueError(f"{str(path)!r} has no {HEADER}; give a folder written by `echo-jax trace`")
    info = _read_header(path / HEADER)
    steps = _read(path / STEPS)
    sizes = (info.steps, info.requests)
    for name in ("length", "active", "starts"):
        _check_shape(path / STEPS, steps, name, sizes)
    if not steps["active"].any():
        raise ValueError(f"trace {str(path)!r} has no request in any of its {info.steps} steps; record it again")
    for number, kind in enumerate(info.layer_kinds):
        if kind == FULL:
            _check_whole(path / layer_file(number))
    return StoredTrace(path, info, steps)


class StoredTrace:
    """A trace in a folder."""

    def __init__(self, path: Path, info: TraceInfo, steps: dict[str, np.ndarray]):
        self.path, self.info = path, info
        self._steps = steps

    def layer(self, index: int) -> StoredSource:
        """The stream of a layer, read now. ValueError for a file that is damaged or does not fit the header."""
        info = self.info
        if not 0 <= index < info.layers:
            raise IndexError(f"layer {index} does not exist; the trace has layers 0..{info.layers - 1}")
        while info.layer_kinds[index] != FULL:
            index -= 1
        file = self.path / layer_file(index)
        stored = _read(file)
        lead = (info.steps, info.requests)
        width = info.capacity if info.band is None else info.band
        wanted: dict[str, tuple[int, ...]] = {"score": (*lead, width), "selected_gap": (*lead, info.top_k)}
        wanted["kth_score"] = lead
        if LOOKAHEAD_SCORE in info.fields:
            wanted[LOOKAHEAD_SCORE] = (*lead, lookahead_band(info) or info.capacity)
        if info.band is not None:
            wanted |= {f"{name}_gap": wanted[name] for name in ("score", LOOKAHEAD_SCORE) if name in wanted}
        if PAGE_BOUND in info.fields:
            wanted[PAGE_BOUND] = (*lead, info.capacity // (info.page_size or info.capacity))
        if QUERY_COSINE in info.fields:
            wanted[QUERY_COSINE] = lead
        for name, shape in wanted.items():
            _check_shape(file, stored, name, shape)
        windows = None
        if PROMPT_SELECTED in info.fields:
            windows = stored.get(f"{PROMPT_SELECTED}_gap")
            begun = int(self._steps["starts"].sum())
            if windows is None or windows.ndim != 3 or windows.shape[0] != begun or windows.shape[2] != info.top_k:
                raise ValueError(f"{str(file)!r} lacks the prompt's sets of {begun} requests; record the trace again")
        number = np.maximum(np.cumsum(self._steps["starts"].reshape(-1)) - 1, 0).reshape(lead).astype(np.int32)

        def optional(name: str, form=jnp.asarray):
            return form(stored[name]) if name in wanted else None

        return StoredSource(
            length=jnp.asarray(self._steps["length"]),
            active=jnp.asarray(self._steps["active"]),
            starts=jnp.asarray(self._steps["starts"]),
            score=jnp.asarray(stored["score"]),
            score_positions=optional("score_gap", _positions),
            selected=_positions(stored["selected_gap"]),
            kth_score=jnp.asarray(stored["kth_score"]),
            lookahead=optional(LOOKAHEAD_SCORE),
            lookahead_positions=optional(f"{LOOKAHEAD_SCORE}_gap", _positions),
            page_bound=optional(PAGE_BOUND),
            query_cosine=optional(QUERY_COSINE),
            prompt_selected=None if windows is None else _positions(windows),
            request_number=None if windows is None else jnp.asarray(number),
            capacity=info.capacity,
        )


class StoredSource(struct.PyTreeNode):
    """One layer of a stored trace: arrays over T steps and R rows, of which a step takes its own."""

    length: jax.Array  # i32[T, R]
    active: jax.Array  # bool[T, R]
    starts: jax.Array  # bool[T, R]
    score: jax.Array  # [T, R, P], or [T, R, N] in a band
    score_positions: jax.Array | None  # i32[T, R, N]
    selected: jax.Array  # i32[T, R, K]
    kth_score: jax.Array  # f32[T, R]
    lookahead: jax.Array | None
    lookahead_positions: jax.Array | None
    page_bound: jax.Array | None  # [T, R, P // page_size]
    query_cosine: jax.Array | None  # f32[T, R]
    prompt_selected: jax.Array | None  # i32[starts, W, K]
    request_number: jax.Array | None  # i32[T, R]  which of them began last, of all rows
    capacity: int = struct.field(pytree_node=False)

    def init(self) -> tuple[()]:
        return ()

    def step(self, carry: tuple[()], t: jax.Array) -> tuple[tuple[()], StepScores]:
        length, active = self.length[t], self.active[t]
        visible = jnp.where(active, length + 1, 0)
        score, floor = self._scores(self.score[t], self.score_positions, t, visible)
        lookahead = None
        if self.lookahead is not None:
            lookahead, _ = self._scores(self.lookahead[t], self.lookahead_positions, t, visible)
        windows = None
        if self.prompt_selected is not None:
            assert self.request_number is not None
            windows = self.prompt_selected[self.request_number[t]]
        return carry, StepScores(
            score=score,
            length=length,
            active=active,
            starts=self.starts[t],
            floor=floor,
            selected=self.selected[t],
            kth_score=self.kth_score[t],
            lookahead_score=lookahead,
            page_bound=None if self.page_bound is None else self.page_bound[t].astype(jnp.float32),
            query_cosine=None if self.query_cosine is None else self.query_cosine[t],
            prompt_selected=windows,
        )

    def _scores(self, stored: jax.Array, positions: jax.Array | None, t, visible) -> tuple[jax.Array, jax.Array]:
        """f32[R, P] scores, -inf where they are unknown or nothing is visible, and the floor f32[R]."""
        stored = stored.astype(jnp.float32)
        unbounded = jnp.full(visible.shape, -jnp.inf)
        if positions is None:
            is_visible = jnp.arange(self.capacity, dtype=jnp.int32)[None] < visible[:, None]
            return jnp.where(is_visible, stored, -jnp.inf), unbounded
        at = positions[t]
        rows = jnp.arange(at.shape[0], dtype=jnp.int32)[:, None]
        empty = jnp.full((at.shape[0], self.capacity), -jnp.inf)
        score = empty.at[rows, jnp.where(at == NO_POSITION, self.capacity, at)].set(stored, mode="drop")
        lowest = jnp.min(jnp.where((at == NO_POSITION) | jnp.isnan(stored), jnp.inf, stored), axis=1)
        return score, jnp.where(visible > at.shape[1], lowest, unbounded)


def _read_header(path: Path) -> TraceInfo:
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(path)!r} is truncated or no header of a trace ({error}); record it again") from None
    version = header.get("schema") if isinstance(header, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{str(path)!r} has schema version {version!r} but this version of echo_jax reads {SCHEMA_VERSION}; record "
            "the trace again, its header says how"
        )
    names = {field.name for field in dataclasses.fields(TraceInfo)}
    if names != header.keys():
        raise ValueError(f"{str(path)!r} lacks or adds the fields {sorted(names ^ header.keys())}; record it again")
    for name in ("layer_kinds", "archetypes", "fields"):
        header[name] = tuple(header[name])
    info = TraceInfo(**header)
    for name in ("layers", "requests", "steps"):
        if getattr(info, name) < 1:
            raise ValueError(f"trace {str(path.parent)!r} is empty: {getattr(info, name)} {name}; record it again")
    if len(info.layer_kinds) != info.layers or info.layer_kinds[0] != FULL:
        raise ValueError(f"{str(path)!r}: {info.layers} layers but kinds {info.layer_kinds}; record it again")
    return info


_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, OSError)


def _check_whole(path: Path) -> None:
    """The file is there and its table of contents, which a zip file has at its end, can be read."""
    if not path.is_file():
        raise ValueError(f"trace {str(path.parent)!r} lacks {path.name}; it is truncated, record or copy it again")
    try:
        zipfile.ZipFile(path).close()
    except _DAMAGED as error:
        raise _damaged(path, error) from None


def _read(path: Path) -> dict[str, np.ndarray]:
    """Every array of a file. Checksums are part of the file's format."""
    _check_whole(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except _DAMAGED as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{str(path)!r} is truncated or damaged ({error}); record or copy the trace again")


def _check_shape(path: Path, arrays: dict[str, np.ndarray], name: str, wanted: tuple[int, ...]) -> None:
    found = arrays[name].shape if name in arrays else None
    if found != wanted:
        what = "is missing" if found is None else f"has shape {list(found)}"
        raise ValueError(
            f"{name} in {str(path)!r} {what} but the header says {list(wanted)}; record or copy the trace again"
        )


def _positions(gaps: np.ndarray) -> jax.Array:
    """i32 positions of gaps, NO_POSITION for padding."""
    summed = np.cumsum(gaps, axis=-1, dtype=np.int64) - 1
    return jnp.asarray(np.where(gaps == 0, NO_POSITION, summed).astype(np.int32))
