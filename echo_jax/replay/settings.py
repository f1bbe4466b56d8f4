"""What is replayed: one setting is one way to run a cache, checked when it is built.

Knows sizes and policies, and how much memory a set of them needs. Knows no trace beyond its header.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from echo_jax.config import CacheConfig
from echo_jax.eviction import Lru
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.replay.caps import Cap, Fixed
from echo_jax.replay.rules import Exact, Rule
from echo_jax.threshold import Ema
from echo_jax.traces import TraceInfo
from echo_jax.types import PAGE, EvictionPolicy, ThresholdPolicy

RESELECT_WINDOW = 16
"""A row that comes back within so many steps of losing its slot was evicted too early."""

SHARED, SPLIT = "shared", "split"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run a layer's cache. Names are for the rows; everything else is what the step uses."""

    slots_per_request: int  # N_G / R
    threshold: ThresholdPolicy = Ema()
    eviction: EvictionPolicy = Lru()
    cap: Cap = Fixed()
    pool: str = SHARED  # one pool for the batch, or SPLIT: each request keeps its own slots
    rule: Rule = Exact()
    policy_name: str = "ema"
    eviction_name: str = "lru"
    cap_name: str = "fixed"
    rule_name: str = "exact"
    form: str = ""  # of a rival: "recorded" or "idealised"

    def names(self) -> dict[str, str | int]:
        """The setting as a row has it; equal exactly where two settings are."""
        return {
            "policy": self.policy_name,
            "eviction": self.eviction_name,
            "cap": self.cap_name,
            "slots_per_request": self.slots_per_request,
            "pool": self.pool,
            "rule": self.rule_name,
            "form": self.form,
        }


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings that differ in nothing but the threshold policy: they are mapped over as one."""

    settings: tuple[Setting, ...]
    config: CacheConfig  # of ONE pool: the whole batch's, or one request's where the pool is split
    pools: int  # pools of one setting: 1, or R

    @property
    def first(self) -> Setting:
        return self.settings[0]

    @property
    def sees_ahead(self) -> bool:
        """The eviction policy needs to know the next uses."""
        return getattr(self.first.eviction, "sees_ahead", False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one compiled pass does with a layer. Static and hashable."""

    requests: int
    positions: int
    top_k: int
    kind: str  # "full" or "shared": the latter's set is known ahead, it predicts and scores nothing
    groups: tuple[Group, ...]

    @property
    def settings(self) -> tuple[Setting, ...]:
        """In the order of the pass's results."""
        return tuple(setting for group in self.groups for setting in group.settings)

    @property
    def sees_ahead(self) -> bool:
        return any(group.sees_ahead for group in self.groups)


def plan(info: TraceInfo, kind: str, settings: Sequence[Setting], records: RecordFormat) -> Plan:
    """Groups the settings of a pass. ValueError where a pool is too small for the trace's batch, or a setting asks for
    what cannot be."""
    groups: dict[tuple, list[Setting]] = {}
    for setting in settings:
        key = (setting.eviction, setting.cap, setting.slots_per_request, setting.pool, setting.rule)
        groups.setdefault(key, []).append(setting)
    made = tuple(
        Group(tuple(members), cache_config(info, members[0], records), _pools(info, members[0]))
        for members in groups.values()
    )
    return Plan(info.requests, info.capacity, info.top_k, kind, made)


def cache_config(info: TraceInfo, setting: Setting, records: RecordFormat) -> CacheConfig:
    """The configuration of one pool of the setting, refused where it could not decode."""
    if setting.pool not in (SHARED, SPLIT):
        raise ValueError(f"pool is {setting.pool!r} but must be {SHARED!r} or {SPLIT!r}")
    if getattr(setting.eviction, "sees_ahead", False) and not isinstance(setting.rule, Exact):
        raise ValueError(f"eviction {setting.eviction_name!r} knows the next uses of exact sets, not of another rule's")
    seats = info.requests // _pools(info, setting)
    capacity = -(-info.capacity // PAGE) * PAGE
    return CacheConfig(
        layer_kinds=("full",),
        records=records,
        keys=KeyFormat("fp8", 128),
        threshold=setting.threshold,
        eviction=setting.eviction,
        seats=seats,
        capacity=capacity,
        host_rows=seats * capacity,
        device_slots=seats * setting.slots_per_request,
        top_k=info.top_k,
        staging=setting.cap.rows,
    )


def pass_bytes(plan: Plan, steps: int, chunk: int) -> int:
    """Host memory of one pass over a layer: maps and eviction times of every setting, one step's scores and masks,
    the results of a chunk, and the next uses where a policy sees ahead. An estimate; what a source needs is its own."""
    cells = plan.requests * plan.positions
    total = 16 * cells
    for group in plan.groups:
        copies = len(group.settings) * group.pools
        total += copies * (8 * group.config.host_rows + 9 * group.config.device_slots)  # maps, and when evicted
        total += len(group.settings) * 10 * cells  # masks and running counts of one step
        total += len(group.settings) * chunk * 4 * 24
    if plan.sees_ahead:
        total += 8 * steps * plan.requests * plan.top_k
    return total


def _pools(info: TraceInfo, setting: Setting) -> int:
    return info.requests if setting.pool == SPLIT else 1
