"""`echo-jax replay`: a trace, many policies, one table.

Knows how options become settings and how rows are shown. What a setting does is the business of `replay`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo_jax import eviction as eviction_lib
from echo_jax import threshold
from echo_jax.cli import output
from echo_jax.cli.errors import InputError, nearest, refusing_wrong_input
from echo_jax.cli.options import option
from echo_jax.cli.policies import SYNTAX, parse_cap, parse_eviction, parse_threshold
from echo_jax.formats import RecordFormat
from echo_jax.replay import cost, rivals
from echo_jax.replay.job import Job
from echo_jax.replay.rows import RowFile
from echo_jax.replay.settings import SHARED, SPLIT, Setting
from echo_jax.traces import TraceInfo, open_trace

EXAMPLES = """\
examples:
  echo-jax replay synth:median --policy never ema last clairvoyant
  echo-jax replay synth:mix,requests=8 --policy ema trend --sweep slots=2k,4k,8k --output rows.jsonl
  echo-jax replay TRACE --policy my_module:MyPolicy:0.3 ema --eviction lru belady --cost h200 gh200
  echo-jax replay TRACE --rival all

slots are per request; 4k is 4 top_k. A rerun with the same --output computes only what is missing.
exit status: 0 done, 2 wrong input"""

SWEPT = ("slots", "cap", "pool")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Runs the decoder's cache manager over a trace, under one policy or many, and prints what would have moved."""

    trace: str = option(
        "a folder, a trace of this package, or synth:NAME[,KEY=VALUE...]",
        metavar="TRACE",
        group="input",
        positional=True,
    )
    layers: tuple[int, ...] | None = option("only these layers (default: all)", None, metavar="LAYER", group="input")
    steps: int | None = option("only the first so many steps (default: all)", None, metavar="N", group="input")
    skip: int = option("leave the first so many steps out of every number", 0, metavar="N", group="input")
    slots: str = option("device slots of a layer per request, such as 8192 or 4k", "4k", metavar="N", group="cache")
    pool: str = option("one pool for the batch, or one per request", SHARED, choices=(SHARED, SPLIT), group="cache")
    record_format: str = option("stored form of a record", "bf16", choices=("bf16", "f32", "fp8"), group="cache")
    policy: tuple[str, ...] | None = option(
        f"threshold policies: {', '.join((*threshold.POLICIES, *threshold.REPLAY_ONLY))}. {SYNTAX} (default: ema, "
        "unless rivals are all that is asked for)",
        None,
        metavar="POLICY",
        group="prefetch and eviction",
    )
    eviction: tuple[str, ...] | None = option(
        f"who loses its slot: {', '.join((*eviction_lib.POLICIES, *eviction_lib.REPLAY_ONLY))} (default: lru)",
        None,
        metavar="POLICY",
        group="prefetch and eviction",
    )
    cap: str = option(
        "most rows copied ahead per request: a number, fixed:S, proportional:c,S or budgeted:BUDGET,S",
        "64",
        metavar="CAP",
        group="prefetch and eviction",
    )
    sweep: tuple[str, ...] | None = option(
        "several values of an option, all combinations: slots=2k,4k pool=shared,split; ';' between values with commas",
        None,
        metavar="NAME=V,V...",
        group="comparison",
    )
    rival: tuple[str, ...] | None = option(
        f"other systems on the same trace: all, {', '.join(rivals.RIVALS)}", None, metavar="NAME", group="comparison"
    )
    cost: tuple[str, ...] | None = option(
        f"cost models: {', '.join(cost.packaged())}, or TOML files (default: h200)",
        None,
        metavar="MODEL",
        group="comparison",
    )
    jobs: int | None = option("layers that run at once (default: one per core)", None, metavar="N", group="budget")
    series: bool = option("also a row with the numbers of every step", False, group="output")
    json: bool = option("print JSON rows instead of tables", False, group="output")
    output: Path | None = option(
        "append the rows to this file; a rerun skips what is there", None, metavar="FILE", group="output"
    )


def execute(options: ReplayOptions) -> int:
    """Runs the command."""
    with refusing_wrong_input():
        trace = open_trace(options.trace)
        kinds = set(trace.info.layer_kinds)
        job = Job(
            trace,
            options.trace,
            {kind: settings_of(options, trace.info, kind) for kind in kinds},
            records=RecordFormat(options.record_format, 512, 64),
            costs=tuple(cost.load(name) for name in options.cost or ("h200",)),
            layers=options.layers,
            steps=options.steps,
            skip=options.skip,
            workers=options.jobs,
            series=options.series,
        )
        rows = RowFile(options.output)
    computed = len(job.todo(rows))
    with output.progress("replay", job.work(rows), "layer-steps") as bar:
        job.run(rows, bar.advance)
    found = job.rows(rows)
    if options.json:
        with output.Rows(True, None) as shown:
            for row in found:
                shown.add(row)
    else:
        _print(options, job, [row for row in found if row["row"] == "replay"], computed)
    return 0


# ---- from options to settings ----------------------------------------------------------------------------


def named_setting(slots: int, policy: str, eviction: str, cap: str, pool: str) -> Setting:
    """A setting of `slots` slots a request by the names that the command line takes."""
    return Setting(
        slots_per_request=slots,
        threshold=parse_threshold(policy, in_replay=True),
        eviction=parse_eviction(eviction, in_replay=True),
        cap=parse_cap(cap),
        pool=pool,
        policy_name=policy,
        eviction_name=eviction,
        cap_name=cap,
    )


def settings_of(options: ReplayOptions, info: TraceInfo, kind: str) -> list[Setting]:
    """All combinations that the options ask for, then the rivals. InputError, ValueError for what cannot be."""
    swept = {"slots": [options.slots], "cap": [options.cap], "pool": [options.pool]} | _sweeps(options.sweep or ())
    policies = options.policy or (() if options.rival else ("ema",))
    slots = [parse_slots(text, info.top_k) for text in swept["slots"]]
    made = [
        named_setting(count, policy, eviction, cap, pool)
        for policy, eviction, count, cap, pool in itertools.product(
            policies, options.eviction or ("lru",), slots, swept["cap"], swept["pool"]
        )
    ]
    chosen = options.rival or ()
    names = list(rivals.RIVALS) if "all" in chosen else chosen
    for name in names:
        if name not in rivals.RIVALS:
            raise InputError(f"rival {name!r} is unknown; {nearest(name, [*rivals.RIVALS, 'all'])}")
        made += [rivals.RIVALS[name](info, count, kind) for count in slots]
    return made


def parse_slots(text: str, top_k: int) -> int:
    """ "8192" or "4k" (times top_k) -> slots per request."""
    number, is_multiple = (text[:-1], True) if text.endswith("k") else (text, False)
    try:
        count = float(number) * top_k if is_multiple else int(number)
    except ValueError:
        raise InputError(f"slots {text!r} is no number; write 8192, or 4k for 4 top_k") from None
    if not 1 <= count < 2**31:
        raise InputError(f"slots {text!r} is {count:g} but must be at least 1 and below 2^31")
    return int(count)


def _sweeps(texts: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if name in ("policy", "eviction"):
            raise InputError(f"--sweep {text!r}: give several values to --{name} instead")
        if name not in SWEPT or not equals:
            raise InputError(f"--sweep {text!r} is not NAME=V,V...; {nearest(name, SWEPT)}")
        found[name] = [value for value in values.split(";" if ";" in values else ",") if value]
        if not found[name]:
            raise InputError(f"--sweep {text!r} has no values; write {name}=A,B")
        if name == "pool" and (wrong := set(found[name]) - {SHARED, SPLIT}):
            raise InputError(
                f"--sweep {text!r}: pool {min(wrong)!r} is unknown; {nearest(min(wrong), (SHARED, SPLIT))}"
            )
    return found


# ---- for people ------------------------------------------------------------------------------------------


def _print(options: ReplayOptions, job: Job, rows: list[dict[str, Any]], ran: int) -> None:
    console, info = output.console(), job.trace.info
    console.print(
        f"{options.trace}: {len(job.passes)} layers x {job.steps} steps, {info.requests} requests of up to "
        f"{info.capacity:,} positions, top_k {info.top_k}; {ran} of {len(job.passes)} layers computed now\n"
    )
    # "off by": |candidates / k - 1|, since k-th scores near zero make a relative error of their own.
    names = [model.name for model in job.costs]
    columns = [
        "policy",
        "eviction",
        "rule",
        "slots",
        "cap",
        "pool",
        "hit",
        "prefetched",
        "wasted/step",
        "recalled/step",
    ]
    columns += ["off by", "cand./k", "missed", *(f"{name}: plain" for name in names), *names]
    table = output.table("mean over layers; copies that nobody hides in us per layer", columns, text=(0, 1, 2, 5))
    for head, group in _by_setting(rows).items():
        wasted = _mean([row["wasted"] / row["counted_steps"] for row in group])
        cells = [*head[:3], f"{head[3]:,}", *head[4:6]]
        cells += [_share(_mean([row[name] for row in group])) for name in ("hit_rate", "prefetched_share")]
        cells += [f"{wasted:.1f}", f"{_mean([row['recalled_per_step'] for row in group]):.1f}"]
        cells += [_share(_mean([row["threshold_error"]["rank"] for row in group]))]
        cells += [f"{_mean([row['candidates_per_k'] for row in group]):.2f}"]
        cells += [_share(_mean([row["missed_share"] for row in group]))]
        for kind in ("without_overlap_us", "with_overlap_us"):
            cells += [f"{_mean([row['cost'][name][kind]['mean'] for row in group]):.1f}" for name in names]
        table.add_row(*cells)
    output.show(
        table,
        "hit: selected rows that were resident; prefetched: of the missing ones; off by: error of the threshold in "
        "rows of k; cand./k: rows above it; missed: by lossy rules; NAME: exposed us, plain without overlap",
    )
    nan = sum(row["nan_scores"] for row in _by_setting(rows)[next(iter(_by_setting(rows)))]) if rows else 0
    if nan:
        console.print(f"\n{nan:,} visible scores are NaN; they rank below every number")
    idealised = sorted({row["key"]["rule"] for row in rows if row["key"]["form"] == rivals.IDEALISED})
    if idealised:
        console.print(f"\nidealised, since the trace lacks what they need: {', '.join(idealised)}")


def _by_setting(rows: list[dict[str, Any]]) -> dict[tuple, list[dict[str, Any]]]:
    grouped: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        key = row["key"]
        head = tuple(key[name] for name in ("policy", "eviction", "rule", "slots_per_request", "cap", "pool"))
        grouped.setdefault(head, []).append(row)
    return grouped


def _mean(values: list[float | None]) -> float:
    """Of the numbers among them; NaN, or null in a row, is no number."""
    numbers = [value for value in values if value is not None and value == value]
    return sum(numbers) / len(numbers) if numbers else float("nan")


def _share(value: float) -> str:
    return "-" if value != value else f"{100 * value:.2f} %"
