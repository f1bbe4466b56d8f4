"""Pipelines of score, move and attend: equal in bits, unequal in time.

    python -m examples.pipelining [--steps 8] [--trace synth:median,requests=8,steps=32,context=32768,top_k=2048]

Every schedule of `schedules.py` is run for real on the small layers of `pipelined_layers.py`, and every word of what is
attended, selected and observed is compared with depth 0: exit status 1 if one differs. On a CPU nothing overlaps: the
times of that part are what a schedule adds. Then each is costed on the machines of `echo_jax.replay.cost`, with the
misses of a trace.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from echo_jax.replay import cost, rivals
from echo_jax.replay.caps import Proportional
from echo_jax.replay.job import BF16
from echo_jax.replay.rules import LAYER, Choice
from echo_jax.replay.run import run_layer
from echo_jax.replay.settings import Setting, plan
from echo_jax.traces import open_trace
from examples import pipelined_layers
from examples.schedules import BANDS, DEPTH_0, LAYERS, REQUESTS, SCHEDULES, Schedule, timeline


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Copies the guessed set of a layer ahead, and attends the exact one. Without guesses in a trace, perfect ones."""

    hides_behind: ClassVar[str] = LAYER

    def init(self, requests, positions, top_k):
        return ()

    def choose(self, memory, facts):
        guess = rivals.InfiniGen().choose((), facts)[1]
        return memory, Choice(facts.exact, guess.ahead, guess.runs)


class Work(NamedTuple):
    """One layer of a trace, arrays over steps; rows of the whole batch."""

    requests: int
    bytes_per_row: int
    positions: np.ndarray
    missing: np.ndarray
    by_threshold: dict[str, tuple[np.ndarray, np.ndarray]]  # of each machine: staged, and what is recalled then
    by_guess: tuple[np.ndarray, np.ndarray]


def work_of(name: str, models: Sequence[cost.CostModel], layer: int = -1, slots: int = 4) -> Work:
    """Counts of one layer of the trace, its first quarter left out, with `slots` * top_k slots a request.

    By threshold: EMA 0.5, with as many rows at most as the machine's link moves while its indexer scores the context,
    which is ECHO's cap. By guess: `Lookahead`.
    """
    trace = open_trace(name)
    info, skip, size = trace.info, trace.info.steps // 4, BF16.bytes_per_row
    shares = [model.indexer_position_us / float(model.stream_us(1, size)) for model in models]
    each = slots * info.top_k
    settings = [Setting(each, cap=Proportional(share, info.top_k), cap_name=str(share)) for share in shares]
    settings.append(Setting(each, rule=Lookahead(), rule_name="lookahead"))
    layer = layer % info.layers
    made = plan(info, info.layer_kinds[layer], settings, BF16)
    counts = run_layer(made, trace.layer(layer), info.steps)
    moved = counts.each.moved
    by_setting = {
        setting: [np.asarray(part)[skip:, place] for part in (moved.staged, moved.recalled, moved.useful)]
        for place, setting in enumerate(made.settings)
    }
    staged, recalled, useful = by_setting[settings[-1]]
    return Work(
        requests=info.requests,
        bytes_per_row=size,
        positions=np.asarray(counts.shared.positions)[skip:],
        missing=useful + recalled,
        by_threshold={
            model.name: (by_setting[one][0], by_setting[one][1])
            for model, one in zip(models, settings[:-1], strict=True)
        },
        by_guess=(staged, recalled),
    )


def layer_us(schedule: Schedule, model: cost.CostModel, work: Work, count: int) -> np.ndarray:
    """f64[steps]: microseconds of a layer. count: groups of requests, bands, or layers.

    A group has its share of the rows and of the attention, which is kind to small groups: a real kernel is less
    efficient on them. Bands are parts of one kernel, so only the first is launched. Every item is as large as the next.
    """
    size, rest = work.bytes_per_row, np.full(work.positions.shape, model.layer_us)
    if schedule.over == REQUESTS:
        share = {
            "score": model.indexer_us(work.positions / count),
            "require": model.copy_us(work.missing / count, size),
            "attend": rest / count,
        }
        return timeline(schedule, count, {name: [us] * count for name, us in share.items()})
    if schedule.over == BANDS:
        (staged, recalled), whole = work.by_threshold[model.name], model.indexer_us(work.positions)
        band = (whole - model.indexer_launch_us) / count
        scores = [band + model.indexer_launch_us] + [band] * (count - 1)
        ahead = [model.stream_us(staged / count, size)] * count
        return timeline(schedule, count, {"score": scores, "prefetch": ahead}) + model.copy_us(recalled, size) + rest
    staged, recalled = work.by_guess
    score = model.indexer_us(work.positions)
    durations = {"guess": score, "prefetch": model.copy_us(staged, size), "score": score}
    durations |= {"require": model.copy_us(recalled, size), "attend": rest}
    return timeline(schedule, count, {name: [us] * count for name, us in durations.items()}) / count


COUNTS = {REQUESTS: (1, 2, 4, 8), BANDS: (16,), LAYERS: (32,)}
"""How many items are tried; the best mean is shown."""


def costs(work: Work, models: Sequence[cost.CostModel]) -> list[dict[str, Any]]:
    """One row per machine and schedule: mean and P99 of a layer; what of it is beyond scoring once and its other
    work; and the mean of depth 0, the batch as one item, over it."""
    rows = []
    for model in models:
        serial = float(np.mean(layer_us(DEPTH_0, model, work, 1)))
        unavoidable = float(np.mean(model.indexer_us(work.positions))) + model.layer_us
        for name, schedule in SCHEDULES.items():
            tried = {
                count: layer_us(schedule, model, work, count)
                for count in COUNTS[schedule.over]
                if schedule.over != REQUESTS or work.requests % count == 0
            }
            count = min(tried, key=lambda count: float(np.mean(tried[count])))
            mean = float(np.mean(tried[count]))
            row = {"machine": model.name, "schedule": name, "items": count, "mean_us": mean}
            row |= {"p99_us": float(np.percentile(tried[count], 99)), "exposed_us": mean - unavoidable}
            rows.append(row | {"speedup": serial / mean})
    return rows


def compare(steps: int) -> int:
    """Runs every schedule and prints a line for each; words that differ from depth 0.

    On a GPU without loops: a captured graph is then all of a step, and what may overlap does.
    """
    sizes, expected, wrong = pipelined_layers.Sizes(), None, 0
    unroll = jax.default_backend() == "gpu"
    for name, schedule in SCHEDULES.items():
        outputs, seconds = pipelined_layers.decode(sizes, schedule, steps, unroll)
        expected = outputs if expected is None else expected
        found = pipelined_layers.differences(outputs, expected)
        wrong += found
        hits, useful, recalled, staged = outputs.moved.sum(axis=(0, 1, 2)).tolist()
        words = sum(part.size for part in outputs[:3])
        print(
            f"{name:<12} {found} of {words:,} words differ from depth 0; {hits:,} hits, {recalled:,} recalled, "
            f"{useful:,} of {staged:,} staged used; {np.median(seconds[1:]) * 1e3:.1f} ms a step"
        )
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Pipelines of score, move and attend: equal in bits, unequal in time.")
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are run and compared")
    parser.add_argument(
        "--trace", default="synth:median,requests=8,steps=32,context=32768,top_k=2048", help="whose misses are costed"
    )
    parser.add_argument("--cost", nargs="+", default=["h200", "h20", "gh200"], help="cost models, by name or file")
    flags = parser.parse_args(argv)
    if flags.steps < 2:
        parser.error(f"--steps is {flags.steps} but must be at least 2: nothing is prefetched in the first")

    wrong = compare(flags.steps)
    models = [cost.load(name) for name in flags.cost]
    work = work_of(flags.trace, models)
    print(f"\n{flags.trace}: {work.missing.mean():.0f} rows missing a layer-step of {work.requests} requests")
    print(f"{'machine':<8} {'schedule':<12} {'items':>5} {'mean us':>9} {'P99 us':>9} {'exposed':>9} {'speed':>6}")
    line = "{machine:<8} {schedule:<12} {items:>5} {mean_us:>9.1f} {p99_us:>9.1f} {exposed_us:>9.1f} {speedup:>5.2f}x"
    for row in costs(work, models):
        print(line.format(**row))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
