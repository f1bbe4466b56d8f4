"""A whole replay: layers of a trace, each under the same settings, several at once, resumable.

Knows in which order layers are run, what a row says of itself, and which rows are there already. What a setting does in
one layer is the business of `run` and `summary`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echo_jax.formats import RecordFormat
from echo_jax.replay import run, summary
from echo_jax.replay.cost import CostModel
from echo_jax.replay.rows import SCHEMA_VERSION, RowFile
from echo_jax.replay.settings import Setting, pass_bytes, plan
from echo_jax.traces import Trace

BF16 = RecordFormat("bf16", 512, 64)
"""Records of DeepSeek-V3.2 and GLM-5, 1152 bytes."""


class Stopped(Exception):
    """A layer was given up because the whole replay is."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One layer of the trace under the settings of its kind."""

    layer: int
    kind: str
    settings: tuple[Setting, ...]


@dataclasses.dataclass
class Job:
    """A replay, checked when it is built.

    settings: those of full layers and, where they differ, of shared ones, by kind
    layers, steps: which to run (default: all); skip: steps at the beginning that no number counts
    workers: layers at once (default: one a core)
    """

    trace: Trace
    name: str  # of the trace, for the rows
    settings: Mapping[str, Sequence[Setting]]
    records: RecordFormat = BF16
    costs: Sequence[CostModel] = ()
    layers: Sequence[int] | None = None
    steps: int | None = None
    skip: int = 0
    workers: int | None = None
    series: bool = False  # also a row with the numbers of every step

    def __post_init__(self):
        info = self.trace.info
        self.steps = info.steps if self.steps is None else self.steps
        if not 1 <= self.steps <= info.steps:
            raise ValueError(f"steps is {self.steps} but must lie in 1..{info.steps}, the trace's steps")
        if not 0 <= self.skip < self.steps:
            raise ValueError(f"skip is {self.skip} but must lie in 0..{self.steps - 1}, to leave steps to count")
        layers = list(range(info.layers) if self.layers is None else dict.fromkeys(self.layers))
        if wrong := [layer for layer in layers if not 0 <= layer < info.layers]:
            raise ValueError(f"layer {wrong[0]} is not one of the trace's, 0..{info.layers - 1}")
        self.passes = [
            Pass(layer, kind, tuple(dict.fromkeys(self.settings[kind])))
            for layer, kind in ((layer, info.layer_kinds[layer]) for layer in layers)
        ]
        cores = len(os.sched_getaffinity(0))
        self.workers = max(1, min(len(layers), cores if self.workers is None else self.workers))
        self._check_memory()
        self._stopped = False
        self._trace_digest = _digest(repr(info))
        self._costs = {model.name: _digest(repr(model)) for model in self.costs}

    def _check_memory(self) -> None:
        """Refuses what does not fit, before anything runs. Building the plans also checks every pool."""
        info, workers = self.trace.info, self.workers or 1
        kinds = {one.kind: one.settings for one in self.passes}
        sizes = [
            pass_bytes(plan(info, kind, some, self.records), self.steps or 0, run.CHUNK) for kind, some in kinds.items()
        ]
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if max(sizes) * workers > free:
            raise ValueError(
                f"{max(map(len, kinds.values()))} settings of {info.requests} requests need about "
                f"{max(sizes) / 2**30:.1f} GiB in each of {workers} layers at once, but {free / 2**30:.1f} GiB are "
                "free; sweep fewer values at a time, or run fewer layers at once"
            )

    def key(self, one: Pass, setting: Setting) -> dict[str, Any]:
        """Everything that decides the numbers of one layer under one setting."""
        info = self.trace.info
        own = {
            name: _source_digest(policy)
            for name, policy in (
                (setting.policy_name, setting.threshold),
                (setting.eviction_name, setting.eviction),
                (setting.cap_name, setting.cap),
            )
            if any(not type(one).__module__.startswith("echo_jax.") for one in _nested(policy))
        }
        return {
            "trace": self.name,
            "trace_digest": self._trace_digest,
            "seed": info.seed,
            "archetype": info.archetypes[one.layer],
            "kind": one.kind,
            "layer": one.layer,
            "requests": info.requests,
            "capacity": info.capacity,
            "top_k": info.top_k,
            "steps": self.steps,
            "skip": self.skip,
            "record_format": self.records.name,
            "record_bytes": self.records.bytes_per_row,
            "cost_models": self._costs,
            **setting.names(),
            "own_classes": own,
        }

    def missing(self, one: Pass, rows: RowFile) -> list[Setting]:
        """The settings of a pass whose rows are not there."""
        wanted = 2 if self.series else 1
        return [setting for setting in one.settings if len(rows.find(self.key(one, setting))) < wanted]

    def todo(self, rows: RowFile) -> list[Pass]:
        """The passes that miss rows."""
        return [one for one in self.passes if self.missing(one, rows)]

    def work(self, rows: RowFile) -> int:
        """Layer-steps that are still to do; a pass that sees ahead counts twice."""
        plans = [plan(self.trace.info, one.kind, self.missing(one, rows), self.records) for one in self.todo(rows)]
        return sum((self.steps or 0) * (2 if made.sees_ahead else 1) for made in plans)

    def run(self, rows: RowFile, progress: Callable[[int], None] = lambda steps: None) -> None:
        """Appends what is missing, layer by layer. Interrupted, it keeps the layers that are done."""
        with concurrent.futures.ThreadPoolExecutor(self.workers) as pool:
            running = [pool.submit(self._run_pass, one, rows, progress) for one in self.todo(rows)]
            try:
                for done in concurrent.futures.as_completed(running):
                    done.result()
            except BaseException:
                self._stopped = True
                for one in running:
                    one.cancel()
                raise

    def _run_pass(self, one: Pass, rows: RowFile, progress: Callable[[int], None]) -> None:
        def going_on(steps: int) -> None:
            if self._stopped:
                raise Stopped
            progress(steps)

        made = plan(self.trace.info, one.kind, self.missing(one, rows), self.records)
        counts = run.run_layer(made, self.trace.layer(one.layer), self.steps or 0, progress=going_on)
        numbers = summary.rows_of(made, counts, self.records.bytes_per_row, self.costs, self.skip)
        added = []
        for place, (setting, row) in enumerate(zip(made.settings, numbers, strict=True)):
            head = {"schema": SCHEMA_VERSION, "key": self.key(one, setting)}
            added.append({"row": "replay"} | head | row)
            if self.series:
                added.append({"row": "series"} | head | summary.series_of(made, counts, place))
        rows.add(added)

    def rows(self, rows: RowFile) -> list[dict[str, Any]]:
        """The rows of this replay, in order of layer and setting."""
        return [row for one in self.passes for setting in one.settings for row in rows.find(self.key(one, setting))]


def replay(trace: Trace, name: str, settings: Sequence[Setting], **options: Any) -> list[dict[str, Any]]:
    """Rows of every layer of a trace under every setting, kept in memory. `options` are fields of Job."""
    job, rows = Job(trace, name, {"full": settings, "shared": settings}, **options), RowFile(None)
    job.run(rows)
    return job.rows(rows)


def _source_digest(policy: Any) -> str:
    """Of what a user's class says, so that a changed class is not taken for the one whose rows are there."""
    text = repr(policy)
    for one in _nested(policy):
        with contextlib.suppress(OSError, TypeError):
            text += inspect.getsource(type(one))
    return _digest(text)


def _nested(policy: Any) -> list[Any]:
    """A policy, and the one it wraps, and so on."""
    inner = getattr(policy, "policy", None)
    return [policy] if inner is None else [policy, *_nested(inner)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
