"""The stages of a layer that the schedules of `examples/schedules.py` put in order on a GPU.

Scores and exact top-k ("score", and "guess" with a query that is a little off); the rows above the threshold, or
guessed, read ahead from the host pool ("prefetch"); slots, and a recall into them ("require"); sparse MLA ("attend").
Slots are given in "score" where nothing is staged beforehand: then "require" is the copy alone.

Order. What a captured graph may overlap is what does not touch each other's buffers, so an order is made of data. The
kernels of a program run in the order of its rounds: each adds to a small operand of its own a 0 that is read from what
the one before left behind. Only copies over the link stand beside them, each as soon as its list is there. A buffer
that is used again is an order too, so what a copy reads is kept to the end of the program, and copies are on a stream
of their own: in a graph that is a branch which no kernel shares a buffer with.

Requests are cut into groups with a pool each: what one group moves must not evict what another is about to attend. The
lists of sparse MLA are cut alike for groups of any size, because its bits depend on that.

It knows arrays and stages. It knows no clock, and not where a hit rate comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compute_on import compute_on

from bench import prefetch_calls as calls
from bench.prefetch_calls import FORMATS
from echo_jax import hostmem, indexer, pool, recall
from echo_jax.recall import StepView
from echo_jax.types import NO_ROW, NO_SLOT, SlotMaps, Staging
from examples.schedules import BANDS, ENGINE, LAYERS, REQUESTS, SCHEDULES, Schedule, Stage
from pallas_kernels import indexer_scores, sparse_mla
from pallas_kernels.sparse_mla import dispatch as attention

RECORDS = FORMATS["fp8"]
SCALE = 192**-0.5
FUSED = "fused"
NEVER = np.uint32(0xFFC0DEAD).view(np.int32)
"""A word that nothing here makes: no position, no stored record (its code would be a NaN), no NaN of a GPU's."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    seats: int = 16
    length: int = 98_304
    heads: int = 128
    groups: tuple[int, ...] = (1, 2, 4)  # into how many the requests are cut
    bands: int = 4
    layers: int = 4  # of the cross-layer schedule
    staging: int = 512  # places of a seat
    cap: int = 107  # rows that cross while 16 x 98,304 are scored: 30 a us (bench/attention_layer.py has the rates)
    streams: int = 2  # copies have one of their own, or not
    implementation: Any = None  # of all kernels

    @property
    def host_rows(self) -> int:
        return self.seats * self.length

    @property
    def cut(self) -> Any:
        """How the lists of sparse MLA are cut, in every line: as for half of the requests."""
        return attention.tuned(self.seats // 2 * -(-self.heads // 64))

    def count(self, over: str) -> int:
        return {BANDS: self.bands, LAYERS: self.layers}[over]


class Line(NamedTuple):
    """What is measured: a schedule by its name, or FUSED, over so many items."""

    name: str
    count: int

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.name]

    @property
    def over(self) -> str:
        return REQUESTS if self.name == FUSED else self.schedule.over

    @property
    def layers(self) -> int:
        """That one call goes through."""
        return self.count if self.over == LAYERS else 1

    def describe(self) -> str:
        return self.name if self.name == FUSED else f"{self.name}, {self.count} {self.over_what()}"

    def over_what(self) -> str:
        return {REQUESTS: "groups of requests", BANDS: "bands", LAYERS: "layers"}[self.over]


def lines_of(sizes: Sizes) -> list[Line]:
    """The first one is what the others are compared with: one after the other, the batch as one item."""
    found = []
    for groups in sizes.groups:
        names = [name for name, one in SCHEDULES.items() if one.over == REQUESTS]
        found += [Line(name, groups) for name in (names if groups > 1 else names[:1])]
    found += [Line(name, sizes.count(one.over)) for name, one in SCHEDULES.items() if one.over != REQUESTS]
    return [*found, Line(FUSED, 1)]


class Part(NamedTuple):
    """What an item works on: some requests, over all or a band of their context. P is a multiple of 64."""

    query: jax.Array  # e4m3[B, 1, G, 128]
    guess: jax.Array  # e4m3[B, 1, G, 128]  what a layer before would take the query for
    threshold: jax.Array  # f32[B]
    weights: jax.Array  # f32[B, 1, G]
    numbers: jax.Array  # i32[B, P / 64]
    visible: jax.Array  # i32[B, 1]
    rows: jax.Array  # i32[B, P]
    attending: jax.Array  # bf16[B, 1, H, 576]


class Chosen(NamedTuple):
    """What is attended to, and what must be copied for it."""

    positions: jax.Array  # i32[B, K]
    slots: jax.Array  # i32[B, 1, K]  of the positions
    read: tuple[jax.Array, ...]  # of the recall: i32[] count, i32[B * K] rows, slots and sources
    moved: jax.Array  # i32[3]  hits, rows filled from staging, rows recalled


class Own(NamedTuple):
    """What a stage keeps: a word of its last result; maps, if it is the one that gives slots; and of every item what
    else it changes, or what must not be used again."""

    word: jax.Array
    maps: tuple[SlotMaps, ...] = ()
    kept: tuple[Any, ...] = ()


class Changing(NamedTuple):
    """What differs from call to call."""

    items: tuple[Part, ...]
    whole: Part  # all requests, all of their context
    maps: tuple[SlotMaps, ...]  # of the items; of bands, of the whole


class Shared(NamedTuple):
    pages: jax.Array
    pool: jax.Array  # [L, N_H, *record]
    cap: jax.Array  # i32[B]


class Output(NamedTuple):
    """Of every item: what must be equal, then what may differ."""

    positions: jax.Array  # i32[N, B, 1, K]
    attended: jax.Array  # f32[N, B, 1, H, 512]
    moved: jax.Array  # i32[N, 3]  hits, rows filled from staging, rows recalled


# ---- what stages are made of -----------------------------------------------------------------------------------------


def word(array: jax.Array) -> jax.Array:
    """i32[]: the first four bytes of an array of 4-byte values."""
    return lax.bitcast_convert_type(array.reshape(-1)[0], jnp.int32)


def after(number: jax.Array, words: list[jax.Array]) -> jax.Array:
    """`number`, i32[...], once the words are there. XLA cannot know that none of them is NEVER."""
    return number + sum(((one == NEVER).astype(jnp.int32) for one in words), jnp.int32(0))


def pick(item: jax.Array, values: tuple[Any, ...]) -> Any:
    """values[item]. Where the item is a constant, as in a schedule without a loop, XLA keeps the branch it means: the
    very buffers, where a slice of stacked ones would be a copy."""
    if len(values) == 1:
        return values[0]
    return lax.switch(item, [lambda value=value: value for value in values])


def put(item: jax.Array, values: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
    """`values` with `new` in place of values[item]."""
    if len(values) == 1:
        return (new,)
    return tuple(
        lax.cond(item == index, lambda new, _: new, lambda _, old: old, new, old) for index, old in enumerate(values)
    )


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages over some items."""

    sizes: Sizes
    schedule: Schedule
    items: tuple[Part, ...]
    shared: Shared
    layer: jax.Array
    traced: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the round that is being traced

    @property
    def allocator(self) -> str:
        """The stage that gives slots: where nothing is staged beforehand, as soon as it is known what is selected."""
        return "require" if any(name == "prefetch" for name, _ in self.schedule.lags) else "score"

    def by_name(self, required: Own | None = None) -> dict[str, Stage]:
        """As `schedules.run` wants them; `required` is the part of that stage where a schedule has none."""
        found = {name: getattr(self, name) for name, _ in self.schedule.lags}
        if required is not None:
            found = {name: _told(stage, required) for name, stage in found.items()}
        return found

    def first_parts(self, maps: tuple[SlotMaps, ...], records: tuple[jax.Array, ...]) -> dict[str, Own]:
        places = self.items[0].rows.shape[0] * calls.K
        lists = (jnp.int32(0), *(jnp.full((places,), -1, jnp.int32),) * 3)
        rows = (jnp.int32(0), jnp.full((self.staged_rows,), NO_ROW, jnp.int32))
        parts = dict.fromkeys(ENGINE, Own(jnp.int32(0)))
        parts["prefetch"] = parts["prefetch"]._replace(kept=(rows,) * len(self.items))
        parts["require"] = parts["require"]._replace(kept=tuple((one, lists) for one in records))
        return parts | {self.allocator: parts[self.allocator]._replace(maps=maps)}

    def left(self, parts: Mapping[str, Own]) -> Any:
        """What stages keep but for pools: maps, and what must not be used again while the program runs."""
        lists = [lists for _, lists in parts["require"].kept] if "require" in parts else ()
        return [own.maps for own in parts.values()], lists, parts["prefetch"].kept if "prefetch" in parts else ()

    # -- order

    def copying(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """On the second stream, which takes no function that calls a jitted one: calls of the library alone."""
        if self.sizes.streams == 1:
            return function
        return compute_on(function, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)

    def order(self, parts: Mapping[str, Own]) -> list[jax.Array]:
        """Words of the kernels that a stage waits for, besides what it is given: of the stage before it in this round,
        which `run` calls with the same parts, or of the rounds before."""
        if self.traced.get("parts") is parts:
            return [self.traced["word"]]
        return [own.word for own in parts.values()]

    def done(self, parts: Mapping[str, Own], result: jax.Array) -> jax.Array:
        """The word that says so."""
        found = word(result)
        self.traced.update(parts=parts, word=found)
        return found

    # -- compute

    def guess(self, item, parts, given):
        part = pick(item, self.items)
        found = self.select(part, self.scores(part, part.guess, parts))
        return parts["guess"]._replace(word=self.done(parts, found)), found

    def score(self, item, parts, given):
        part, own = pick(item, self.items), parts["score"]
        found = self.scores(part, part.query, parts)
        if self.schedule.over != BANDS:
            found = self.select(part, found)
        last = found
        if self.schedule.over == REQUESTS:
            maps, found = self.allocate(part, pick(item, own.maps), found)
            own, last = own._replace(maps=put(item, own.maps, maps)), found.slots
        return own._replace(word=self.done(parts, last)), found

    def attend(self, item, parts, given):
        chosen, records = given["require"]
        output = self.attended(pick(item, self.items), chosen, records, self.order(parts))
        return parts["attend"]._replace(word=self.done(parts, output.attended)), output

    # -- link

    def prefetch(self, item, parts, given):
        """Of a band, what scores above the threshold; of a guessed set, all of it."""
        part, own, maps = pick(item, self.items), parts["prefetch"], pick(item, parts["require"].maps)
        if self.schedule.over == BANDS:
            rows, scores, limit = part.rows, given["score"], part.threshold
        else:
            rows = recall.rows_at(part.rows, given["guess"])
            scores, limit = jnp.ones((rows.shape[0], 1, rows.shape[1])), jnp.zeros((rows.shape[0],))
        # One hint after the other, or XLA makes a kernel of all.
        rows, places = after(rows, [own.word]), self.staged_rows // rows.shape[0]
        is_absent = (rows != NO_ROW) & (pool.lookup(maps, rows) == NO_SLOT)
        most = jnp.full((rows.shape[0],), places, jnp.int32)
        found, refused = recall.prefetch_candidates(scores, limit, is_absent, most, places)
        rows = recall.rows_at(rows, found)
        own = own._replace(word=self.done(parts, rows))
        read = self.layer_of(item), rows.reshape(-1)
        records = self.copying(hostmem.read_rows)(self.shared.pool, *read)
        own = own._replace(kept=put(item, own.kept, read))
        return own, lax.optimization_barrier(Staging(rows, records, refused))

    def require(self, item, parts, given):
        own, chosen, staging = parts["require"], given["score"], given.get("prefetch")
        if self.allocator == "require":
            maps, chosen = self.allocate(pick(item, self.items), pick(item, own.maps), chosen, staging)
            own = own._replace(maps=put(item, own.maps, maps))
        records = self.recalled(pick(item, own.kept)[0], chosen, self.layer_of(item), staging)
        own = own._replace(kept=put(item, own.kept, (records, chosen.read)))
        return own, (chosen, records)

    # -- the library's, as every line calls it

    def scores(self, part: Part, query: jax.Array, parts: Mapping[str, Own]) -> jax.Array:
        """f32[B, 1, P]"""
        visible = after(part.visible, self.order(parts))
        asked = (query, part.weights, self.shared.pages, part.numbers, visible)
        return lax.optimization_barrier(indexer_scores(*asked, implementation=self.sizes.implementation))

    def select(self, part: Part, scores: jax.Array) -> jax.Array:
        """i32[B, K]"""
        return lax.optimization_barrier(indexer.select(scores[:, 0], part.visible[:, 0], calls.K).positions)

    def allocate(self, part: Part, maps: SlotMaps, positions, staging: Staging | None = None):
        """The maps, with a slot for every position i32[B, K], and what is to be copied. No row is new in this step."""
        seats, length = part.rows.shape
        config = calls.config_of(seats, length, "fp8", self.sizes.host_rows, self.sizes.staging)
        visible, nobody = part.visible[:, 0], jnp.zeros((seats, 0), jnp.int32)
        view = StepView(part.rows, visible, nobody, nobody, part.visible, jnp.int32(2))
        unread = jnp.zeros((seats, 1, calls.K))  # LRU asks for no scores
        staged = nobody if staging is None else staging.rows
        maps, made = recall.plan(config, maps, view, positions[:, None], unread, staged)
        read = made.fills.count, made.fills.rows, made.fills.slots, made.fills.source
        moved = jnp.stack([made.hits, made.useful, made.recalled])
        chosen = Chosen(positions, made.slots.reshape(seats, 1, calls.K), read, moved)
        return maps, lax.optimization_barrier(chosen)

    def recalled(self, records: jax.Array, chosen: Chosen, layer, staging: Staging | None = None) -> jax.Array:
        nothing = jnp.zeros((0, *RECORDS.shape), RECORDS.dtype)
        staged = nothing if staging is None else staging.records.reshape(-1, *RECORDS.shape)
        fill = self.copying(hostmem.recall)
        return lax.optimization_barrier(fill(records, self.shared.pool, layer, *chosen.read, nothing, staged))

    def attended(self, part: Part, chosen: Chosen, records, compute=()) -> Output:
        asked = (part.attending, records, after(chosen.slots, list(compute)), SCALE)
        how = dict(implementation=self.sizes.implementation, tuning=self.sizes.cut)
        out, _ = sparse_mla(*asked, record_format="fp8", **how)
        return Output(chosen.positions[:, None], lax.optimization_barrier(out), chosen.moved)

    def rest(self, whole: Part, maps: SlotMaps, records, scores, staging: Staging) -> tuple[jax.Array, Output, Any]:
        """All requests at once, from scores to attended values: the pool, the only output, and what must be kept."""
        maps, chosen = self.allocate(whole, maps, self.select(whole, scores), staging)
        records = self.recalled(records, chosen, self.layer, staging)
        output = self.attended(whole, chosen, records)
        return records, jax.tree.map(lambda leaf: leaf[None], output), (maps, chosen.read)

    @property
    def staged_rows(self) -> int:
        """Places for all requests of an item."""
        places = self.sizes.staging // (self.sizes.bands if self.schedule.over == BANDS else 1)
        return places * self.items[0].rows.shape[0]

    def layer_of(self, item: jax.Array) -> jax.Array:
        return (self.layer + item) % self.shared.pool.shape[0] if self.schedule.over == LAYERS else self.layer


def _told(stage: Callable[..., Any], required: Any) -> Callable[..., Any]:
    return lambda item, parts, given: stage(item, {**parts, "require": required}, given)
