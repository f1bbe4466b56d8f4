"""Traces: what an indexer scored, step by step, without the model that scored it.

Knows what one step of one layer looks like and how a trace is opened by name. Knows no pool, no policy and no cost;
`replay` does. Where scores come from is the business of three modules: `format` (a stored folder), `synth` (generated
from a seed), `record` (a model run); `describe` says how local they are.

A layer's scores are a stream: `source.init()`, then `source.step(carry, t)` for t = 0, 1, ..., pure and jittable, made
for `lax.scan`. A source is a pytree: its arrays are leaves and its sizes are static, and all layers of a trace have the
same structure and shapes. Pass it to a jitted function as an argument and one compilation serves every layer.

House letters: `L` layers, `R` rows of the batch (a row holds one request after another), `P` positions a row can hold,
`K` selected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

SCHEMA_VERSION = 1
"""Of stored traces and of the header's fields. A reader refuses every other."""

SYNTHETIC = "synth:"
"""How the name of a generated trace begins."""

LOOKAHEAD_SCORE, PAGE_BOUND, QUERY_COSINE = "lookahead_score", "page_bound", "query_cosine"
PROMPT_SELECTED = "prompt_selected"
OPTIONAL_FIELDS = (LOOKAHEAD_SCORE, PAGE_BOUND, QUERY_COSINE, PROMPT_SELECTED)
"""What a trace may carry for the rivals that need it; fields of StepScores, None where a trace lacks them."""


class StepScores(NamedTuple):
    """One decode step of one layer, all rows of the batch.

    A row's query is its token at position `length`: it sees positions 0..length, itself included. `selected`, where it
    is given, is what the run selected; it is the answer even if the stored scores, rounded, would give another.
    """

    score: jax.Array  # f32[R, P]  -inf at invisible positions, and where a band does not know the score
    length: jax.Array  # i32[R]  positions written before this step; 0 in an idle row
    active: jax.Array  # bool[R]  the row has a query in this step
    starts: jax.Array  # bool[R]  a new request begins in this row with this step; its older positions are on the host
    floor: jax.Array  # f32[R]  scores that are not listed are at most this; -inf where all are known
    selected: jax.Array | None = None  # i32[R, K]  ascending, then NO_POSITION
    kth_score: jax.Array | None = None  # f32[R]  the lowest selected score, as computed; NaN where nothing is selected
    lookahead_score: jax.Array | None = None  # f32[R, P]  this layer's scores of older positions as guessed from the
    # layer before it; -inf where there is no guess. Where scores are a band, the best K guesses.
    page_bound: jax.Array | None = None  # f32[R, P // page_size]  upper bound of every score in a page
    query_cosine: jax.Array | None = None  # f32[R]  of this step's index query and the last one's; -1 without a last
    prompt_selected: jax.Array | None = None  # i32[R, W, K]  sets of the prompt's last W queries, oldest first; a
    # request that `starts` here begins after them. Means nothing in other steps and rows.

    @property
    def visible(self) -> jax.Array:
        """i32[R]: positions the query sees; 0 in an idle row."""
        return jnp.where(self.active, self.length + 1, 0)


class ScoreSource(Protocol):
    """One layer's steps as a stream; a pytree. `t` counts from 0 and every step is taken, in order."""

    def init(self) -> Any:
        """The carry before step 0: a pytree of arrays of fixed shapes."""
        ...

    def step(self, carry: Any, t: jax.Array) -> tuple[Any, StepScores]:
        """The carry after step t i32[], and the step."""
        ...


@dataclasses.dataclass(frozen=True)
class TraceInfo:
    """The header of a trace: its sizes, and everything needed to make it again."""

    layers: int
    requests: int  # R, rows of the batch
    steps: int
    capacity: int  # P
    top_k: int
    layer_kinds: tuple[str, ...]  # "full", or "shared": its set is that of the full layer before it, known ahead
    archetypes: tuple[str, ...]  # of each layer; "recorded" for a model's
    source: str  # "synth" or "record"
    seed: int
    band: int | None = None  # the best so many scores of a row are known; None: all of them
    score_dtype: str = "float32"  # as stored
    page_size: int | None = None  # positions of a page, where there is page_bound
    fields: tuple[str, ...] = ()  # which of OPTIONAL_FIELDS there are
    nan_scores: int | None = None  # visible scores that are NaN; None: not counted
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)  # command, parameters, versions
    schema: int = SCHEMA_VERSION


class Trace(Protocol):
    """A whole trace, opened."""

    @property
    def info(self) -> TraceInfo: ...

    def layer(self, index: int) -> ScoreSource:
        """The steps of one layer; those of the full layer before it for a shared one."""
        ...


def open_trace(name: str | Path) -> Trace:
    """The trace of that name: a folder, a trace of this package, or `synth:NAME[,KEY=VALUE...]`.

    Nothing large is computed or read before a layer is asked for. Raises ValueError for an unknown name or parameter
    (with the nearest), another schema version, a truncated or an empty trace; FileNotFoundError for a missing folder.
    """
    from echo_jax.traces import format, synth

    if str(name).startswith(SYNTHETIC):
        return synth.from_spec(str(name))
    return format.open_folder(format.find(name))
