"""ECHO's rivals, each as a rule over the same traces. One paragraph each: what is modelled, and what is not.

Knows which rows each system attends and fetches ahead. Knows no pool: `step` runs them all on the same slots. A rival
that needs something a trace does not carry runs in an idealised form, which `form` says; idealised is in the rival's
favour. One thing is not: neighbouring tokens of a synthetic trace have nothing to do with each other, so that whatever
works by pages looks as bad there as it can; judge pages on recorded traces. Rivals that are lossy report the share of
the exact set that they miss; what that costs in answers only a model can say, which `live` lets one do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from echo_jax import indexer
from echo_jax.replay.caps import Cap, Fixed
from echo_jax.replay.rules import INDEXER, LAYER, Choice, Exact, Rule
from echo_jax.replay.settings import SHARED, SPLIT, Setting
from echo_jax.threshold import Ema, Never
from echo_jax.traces import LOOKAHEAD_SCORE, PAGE_BOUND, PROMPT_SELECTED, QUERY_COSINE, TraceInfo
from echo_jax.types import NO_POSITION, ThresholdPolicy

RECORDED, IDEALISED = "recorded", "idealised"


@dataclasses.dataclass(frozen=True)
class FreeKV:
    """Attends what the step before selected, fetched while that step ran; corrects itself where the query has turned.

    Modelled: at step t the set of step t-1 is attended, its absent rows were copied a step ahead; where the cosine of
    this step's index query with the last one's is below `cosine`, the exact set is attended instead and what is absent
    of it is recalled in the open. The new token is attended besides. Idealised (no cosine in the trace): a correction
    happens where the set before holds less than `overlap` of the exact one, which FreeKV could not know. Not modelled:
    correction by groups of heads (an index has one set), page-wise summaries, the layout of its two-tier pool.
    """

    cosine: float = 0.8
    overlap: float = 0.5
    hides_behind: ClassVar[str] = LAYER

    def init(self, requests, positions, top_k):
        return jnp.full((requests, top_k), NO_POSITION, jnp.int32)

    def choose(self, memory, facts):
        scores = facts.scores
        last = jnp.where(scores.starts[:, None], NO_POSITION, memory)
        has_last = last[:, 0] != NO_POSITION
        if scores.query_cosine is None:
            in_exact = jnp.take_along_axis(facts.is_exact, jnp.maximum(last, 0), axis=1) & (last != NO_POSITION)
            kept = jnp.sum(in_exact, axis=1).astype(jnp.float32)
            turned = kept < self.overlap * jnp.sum(facts.exact != NO_POSITION, axis=1).astype(jnp.float32)
        else:
            turned = scores.query_cosine < self.cosine
        newest = jnp.where(scores.active, scores.length, NO_POSITION)[:, None]
        stale = jnp.concatenate([last, newest], axis=1)
        attended = jnp.where((turned | ~has_last)[:, None], _padded(facts.exact, stale.shape[1]), stale)
        memory = jnp.where(scores.active[:, None], facts.exact, memory)
        return memory, Choice(attended, last, scores.active)


@dataclasses.dataclass(frozen=True)
class InfiniGen:
    """Guesses a layer's set one layer ahead, from the layer before it, and attends what it guessed.

    Modelled: the top-k of the trace's guessed scores is copied while the layer before runs, and is attended; the new
    token is attended besides. Where there is no guess, as in the first layer, the exact set is recalled in the open.
    Idealised (no guesses in the trace): the guess is perfect, so nothing is missed and everything absent is hidden
    behind one layer. Not modelled: its partial query weights, the SVD that makes them predictable, and its variable
    number of tokens (K are always attended).
    """

    hides_behind: ClassVar[str] = LAYER

    def init(self, requests, positions, top_k):
        return ()

    def choose(self, memory, facts):
        scores, top_k = facts.scores, facts.exact.shape[1]
        guess = scores.lookahead_score
        if guess is None:
            return memory, Choice(facts.exact, facts.exact, scores.active)
        has_guess = jnp.any(jnp.isfinite(guess), axis=1)[:, None]
        older = jnp.where(scores.active, scores.length, 0)
        listed = _padded(indexer.select(guess, older, top_k).positions, top_k)
        newest = jnp.where(scores.active, scores.length, NO_POSITION)[:, None]
        guessed = jnp.concatenate([listed, newest], axis=1)
        attended = jnp.where(has_guess, guessed, _padded(facts.exact, top_k + 1))
        return memory, Choice(attended, jnp.where(has_guess, listed, NO_POSITION), scores.active)


@dataclasses.dataclass(frozen=True)
class Paged:
    """Selects whole pages by a bound on their scores: Quest, and with an offloaded cache ArkVale.

    Modelled: the floor(K / page) pages of the highest bound are attended whole, the page of the new token among them;
    ArkVale keeps pages in an LRU pool and recalls those that are missing on demand, in the open. Quest offloads nothing
    (`resident`): it moves no row and is here for what it misses. Idealised (no bound in the trace): a page's bound is
    its best score, the tightest there is. Not modelled: that one bound serves a group of heads, and how ArkVale ranks
    evicted pages by digests of their keys.
    """

    page: int = 32
    hides_behind: ClassVar[str] = INDEXER

    def __post_init__(self):
        if self.page < 1:
            raise ValueError(f"page is {self.page} but must be at least 1 position")

    def init(self, requests, positions, top_k):
        if top_k < self.page:
            raise ValueError(f"a page of {self.page} positions exceeds top_k {top_k}; give a smaller page")
        return ()

    def choose(self, memory, facts):
        scores, top_k = facts.scores, facts.exact.shape[1]
        positions = scores.score.shape[1]
        pages, page = -(-positions // self.page), self.page
        if scores.page_bound is None or scores.page_bound.shape[1] != pages:
            padded = jnp.pad(scores.score, ((0, 0), (0, pages * page - positions)), constant_values=-jnp.inf)
            bound = jnp.max(padded.reshape(scores.score.shape[0], pages, page), axis=2)
        else:
            bound = scores.page_bound
        newest = jnp.where(scores.active, scores.length // page, pages)
        requests = jnp.arange(bound.shape[0], dtype=jnp.int32)
        bound = bound.at[requests, newest].set(jnp.inf, mode="drop")
        visible_pages = -(-facts.visible // page)
        chosen = indexer.select(bound, visible_pages, top_k // page).positions
        offsets = jnp.arange(page, dtype=jnp.int32)
        listed = chosen[..., None] * page + offsets[None, None]
        is_real = (chosen[..., None] != NO_POSITION) & (listed < facts.visible[:, None, None])
        attended = jnp.where(is_real, listed, NO_POSITION).reshape(bound.shape[0], -1)
        return memory, Choice(_padded(attended, top_k), None, scores.active)


@dataclasses.dataclass(frozen=True)
class Ess:
    """An LRU cache that begins warm: the sets of a prompt's last queries are resident before the first step.

    Modelled: exact selection, LRU, recall on demand, and the warm-up from the trace's sets of the prompt's last
    queries, oldest first, not counted as recalls. Idealised (no such sets in the trace): the first step's own set is
    resident. Not modelled: its two-batch overlap, which hides a recall behind another batch's layer.
    """

    hides_behind: ClassVar[str] = INDEXER

    def init(self, requests, positions, top_k):
        return ()

    def choose(self, memory, facts):
        given = facts.scores.prompt_selected
        newest = facts.scores.length[:, None]
        if given is None:  # the new token is no row yet
            warm = jnp.where(facts.exact == newest, NO_POSITION, facts.exact)[:, None]
        else:
            warm = given
        return memory, Choice(facts.exact, None, facts.scores.active, warm)


@dataclasses.dataclass(frozen=True)
class SparseServe:
    """Runs only as many requests as have their working sets in the pool; the others wait.

    Modelled: a request's working set is the rows it selected in the last `window` steps (at least K before it has run);
    in order of their seats, requests take part while the sum of working sets fits the pool. One that waits loses that
    step of its trace and its slots may go; the share of waiting is reported, and speed must be judged with it. Not
    modelled: a fair order of waiting, its layer-segmented prefill, and its block-wise transfers.
    """

    slots: int
    window: int = 12
    hides_behind: ClassVar[str] = INDEXER

    def init(self, requests, positions, top_k):
        return jnp.full((requests, positions), -(2**30), jnp.int32)

    def choose(self, memory, facts):
        scores = facts.scores
        memory = jnp.where(scores.starts[:, None], -(2**30), memory)
        working = jnp.sum(facts.step - memory <= self.window, axis=1, dtype=jnp.int32)
        working = jnp.maximum(working, facts.exact.shape[1] + 1)
        needed = jnp.cumsum(jnp.where(scores.active, working, 0), dtype=jnp.int32)
        first = jnp.cumsum(scores.active, dtype=jnp.int32) == 1  # somebody always runs
        runs = scores.active & ((needed <= self.slots) | first)
        memory = jnp.where(facts.is_exact & runs[:, None], facts.step, memory)
        return memory, Choice(facts.exact, None, runs)


@dataclasses.dataclass(frozen=True)
class HiSparse:
    """Each request keeps slots of its own, by LRU; what is missing is swapped in on demand.

    Modelled: exact selection, a pool split into equal parts, recall in the open. Nothing is idealised. Not modelled:
    that its swap-in kernel looks up, evicts and copies in one launch (a cost model charges every copy one launch all
    the same), and slots that move between requests of different lengths.
    """

    hides_behind: ClassVar[str] = INDEXER

    def init(self, requests, positions, top_k):
        return ()

    def choose(self, memory, facts):
        return memory, Choice(facts.exact, None, facts.scores.active)


@dataclasses.dataclass(frozen=True)
class IndexShare:
    """Layers that share the set of a full layer before them know their rows a layer ahead (GLM-5).

    Modelled: in a shared layer everything absent is copied ahead and hidden behind one layer, without any prediction;
    in a full layer nothing is known and recall is in the open. Exact for a model trained that way. Idealised: a trace
    without shared layers is replayed as if each layer's set had been chosen by the layer before it. Not modelled: what
    sharing costs a model that was not trained for it.
    """

    all_layers: bool = False
    hides_behind: ClassVar[str] = LAYER

    def init(self, requests, positions, top_k):
        return ()

    def choose(self, memory, facts):
        nothing = jnp.full((facts.exact.shape[0], 0), NO_POSITION, jnp.int32)
        return memory, Choice(facts.exact, facts.exact if self.all_layers else nothing, facts.scores.active)


@dataclasses.dataclass(frozen=True)
class Resident:
    """No offload: every row of every request is on the device.

    Modelled: nothing is ever missing, nothing moves; the pool has a slot for every position, and how many requests that
    leaves room for is a question for `echo-jax plan`. With `selects`, another rule's selection on a resident cache. Not
    modelled: waiting for a free place, which is what a system without offload does with the requests that do not fit.
    """

    selects: Rule = Exact()
    hides_behind: ClassVar[str] = INDEXER

    def init(self, requests, positions, top_k):
        return self.selects.init(requests, positions, top_k)

    def choose(self, memory, facts):
        memory, choice = self.selects.choose(memory, facts)
        positions = facts.scores.score.shape[1]
        old = jnp.arange(positions, dtype=jnp.int32)[None]
        everything = jnp.where(old < facts.scores.length[:, None], old, NO_POSITION)
        return memory, choice._replace(warm=everything[:, None])


def _padded(positions: jax.Array, count: int) -> jax.Array:
    missing = count - positions.shape[1]
    return jnp.pad(positions, ((0, 0), (0, max(0, missing))), constant_values=NO_POSITION)


# ---- by name ---------------------------------------------------------------------------------------------


def _form(info: TraceInfo, field: str) -> str:
    return RECORDED if field in info.fields else IDEALISED


def _pages(info: TraceInfo, default: int) -> int:
    return info.page_size if PAGE_BOUND in info.fields and info.page_size else min(default, info.top_k)


def _setting(
    name: str,
    slots: int,
    rule: Rule,
    form: str = "",
    *,
    pool: str = SHARED,
    threshold: ThresholdPolicy | None = None,
    cap: Cap | None = None,
) -> Setting:
    policy = Never() if threshold is None else threshold
    return Setting(
        slots_per_request=slots,
        threshold=policy,
        cap=Fixed(0) if cap is None else cap,
        pool=pool,
        rule=rule,
        policy_name="never" if threshold is None else "ema",
        cap_name="fixed:0" if cap is None else "fixed",
        rule_name=name,
        form=form,
    )


def _index_share(info: TraceInfo, slots: int, kind: str) -> Setting:
    has_shared = "shared" in info.layer_kinds
    rule = IndexShare(all_layers=kind == "shared" or not has_shared)
    return _setting("index-share", slots, rule, RECORDED if has_shared else IDEALISED)


RIVALS: dict[str, Callable[[TraceInfo, int, str], Setting]] = {
    "echo": lambda info, slots, kind: _setting("echo", slots, Exact(), threshold=Ema(), cap=Fixed(64)),
    "no-prefetch": lambda info, slots, kind: _setting("no-prefetch", slots, Exact()),
    "freekv": lambda info, slots, kind: _setting("freekv", slots, FreeKV(), _form(info, QUERY_COSINE)),
    "infinigen": lambda info, slots, kind: _setting("infinigen", slots, InfiniGen(), _form(info, LOOKAHEAD_SCORE)),
    "arkvale": lambda info, slots, kind: _setting("arkvale", slots, Paged(_pages(info, 32)), _form(info, PAGE_BOUND)),
    "quest": lambda info, slots, kind: _setting(
        "quest", _all_rows(info), Resident(Paged(_pages(info, 16))), _form(info, PAGE_BOUND)
    ),
    "ess": lambda info, slots, kind: _setting("ess", slots, Ess(), _form(info, PROMPT_SELECTED)),
    "sparseserve": lambda info, slots, kind: _setting("sparseserve", slots, SparseServe(slots * info.requests)),
    "hisparse": lambda info, slots, kind: _setting("hisparse", slots, HiSparse(), pool=SPLIT),
    "index-share": _index_share,
    "no-offload": lambda info, slots, kind: _setting("no-offload", _all_rows(info), Resident()),
}
"""(header, slots per request, kind of layer) -> the setting. `echo` and `no-prefetch` are there to compare with."""

LOSSY = ("freekv", "infinigen", "arkvale", "quest")
"""Those that attend something else than the exact top-k."""


def _all_rows(info: TraceInfo) -> int:
    """A slot for every position of a request, and at least what one step needs."""
    return max(-(-info.capacity // 64) * 64, info.top_k + 1)
