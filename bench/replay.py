"""How long a replay takes, and what it says of the paper and of the rivals.

    python -m bench.replay speed        16 layers, 8 requests, 1,000 steps, 32K context, k 2048, 8 policies: seconds
    python -m bench.replay shipped      a trace of this package from a cold start, a process of its own: seconds
    python -m bench.replay h20          the h20 cost model against the paper's gains of prefetch
    python -m bench.replay lossy        share of the exact set that each lossy rival misses
    python -m bench.replay cost         the h200 cost model against the recorded rows of `python -m bench.prefetch`

It knows which traces and settings answer which claim. It does not know how a replay works.
"""

import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bench import harness
from echo_jax.formats import RecordFormat
from echo_jax.replay import cost, rivals
from echo_jax.replay.job import replay
from echo_jax.replay.settings import Setting
from echo_jax.threshold import Always, Clairvoyant, Ema, Last, Margin, Never, Quantile, Trend
from echo_jax.traces import open_trace

SPEED = "synth:mix,layers=16,requests=8,steps=1000,context=32768,top_k=2048,hot=0.125,median=0.6875,churny=0.1875"
POLICIES = {
    "never": Never(),
    "always": Always(),
    "ema": Ema(),
    "last": Last(),
    "quantile": Quantile(),
    "trend": Trend(),
    "margin": Margin(),
    "clairvoyant": Clairvoyant(),
}
SLOTS = 4 * 2048
FILE = "replay.jsonl"


def speed() -> None:
    """G.replay_s, compilation and generation of the scores included."""
    trace = open_trace(SPEED)
    kinds = {kind: trace.info.archetypes.count(kind) for kind in dict.fromkeys(trace.info.archetypes)}
    settings = [Setting(SLOTS, threshold=policy, policy_name=name) for name, policy in POLICIES.items()]
    start = time.perf_counter()
    rows = replay(trace, SPEED, settings, costs=[cost.load("h200")])
    seconds = time.perf_counter() - start
    info = trace.info
    assert len(rows) == info.layers * len(settings)
    harness.record(
        "G.replay_s",
        value=seconds,
        file=FILE,
        unit="s",
        shapes={"layers": info.layers, "kinds": kinds, "requests": info.requests, "steps": info.steps}
        | {"capacity": info.capacity, "top_k": info.top_k, "policies": len(settings), "slots_per_request": SLOTS},
        method="wall clock of one run, compilation and generated scores included; two layers at once",
        fraction_of_limit=seconds / 600,
        command="python -m bench.replay speed",
        notes="limit: the bar of 600 s. 61 layers x 16 requests by extrapolation: "
        f"{seconds * 61 / 16 * 2:,.0f} s, since "
        "every part (scores, selection, candidates, maps) grows with layers and requests",
    )
    print(f"{seconds:.0f} s for {len(rows)} rows")


def shipped() -> None:
    """G.replay_shipped_s: interpreter, imports, compilation, 6 layers and the table."""
    command = ["-m", "echo_jax.cli.main", "replay", "echo-tiny-manual", "--policy", *POLICIES]
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, cwd=harness.ROOT, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    info = open_trace("echo-tiny-manual").info
    harness.record(
        "G.replay_shipped_s",
        value=seconds,
        file=FILE,
        unit="s",
        shapes={"layers": info.layers, "requests": info.requests, "steps": info.steps, "policies": len(POLICIES)},
        method="wall clock of one process from its start to its end, no compilation cache",
        fraction_of_limit=seconds / 30,
        command="python -m bench.replay shipped",
        notes="limit: the bar of 30 s; python " + " ".join(command),
    )
    print(f"{seconds:.1f} s")


def h20() -> None:
    """G.h20_error: with a predictor that finds everything and wastes nothing, and with what EMA 0.5 does on a median
    layer at the paper's batch and context, its cap out of the way."""
    model, bytes_per_row = cost.load("h20"), 1152
    trace = open_trace("synth:median,requests=16,steps=48,context=131072,top_k=2048")
    setting = Setting(SLOTS, rule=rivals.Exact(), cap=rivals.Fixed(2048))
    (row,) = replay(trace, "h20", [setting], skip=16)
    missing = row["useful"] + row["recalled"]
    found, wasted = row["useful"] / missing, row["wasted"] / missing
    errors, lines = [], []
    for point in model.measured["gain"]:
        sizes = {name: int(point[name]) for name in ("requests", "context", "top_k")}
        for who, share, waste in (("ideal", 1.0, 0.0), ("EMA 0.5", found, wasted)):
            gain = cost.gain(
                model, **sizes, bytes_per_row=bytes_per_row, hit_rate=point["hit_rate"], found=share, wasted=waste
            )
            errors.append(abs(gain / point["gain"] - 1))
            lines.append(f"hit {point['hit_rate']}: {who} {gain:.2f}, paper {point['gain']}")
    harness.record(
        "G.h20_error",
        value=max(errors),
        file=FILE,
        unit="ratio",
        shapes={"requests": 16, "context": 131072, "top_k": 2048, "record_bytes": bytes_per_row},
        method="closed form of echo_jax/replay/cost.py; the share found and wasted by EMA 0.5 from a replay",
        command="python -m bench.replay h20",
        notes="; ".join(lines)
        + f"; EMA 0.5 finds {found:.3f} of the missing rows and wastes {wasted:.3f} a missing row",
    )
    print("\n".join(lines), f"\nworst relative error {max(errors):.3f}")


def lossy(names: tuple[str, ...]) -> None:
    """G.lossy_share: the worst, and each rival in the notes. `names`: traces (default: three kinds of layers)."""
    names = names or tuple(
        f"synth:{kind},requests=4,steps=192,context=32768,top_k=2048" for kind in ("hot", "median", "churny")
    )
    shares: dict[str, list[float]] = {}
    for name in names:
        trace = open_trace(name)
        slots = 4 * trace.info.top_k
        chosen = [rivals.RIVALS[rival](trace.info, slots, "full") for rival in rivals.LOSSY]
        for row in replay(trace, name, chosen, skip=trace.info.steps // 4):
            key = row["key"]
            label = f"{key['rule']} ({key['form']}) on {key['archetype']}"
            if row["missed_share"] is not None:
                shares.setdefault(label, []).append(row["missed_share"])
    means = {label: statistics.mean(some) for label, some in shares.items()}
    worst = max(means.values())
    notes = "; ".join(f"{label} {share:.3f}" for label, share in means.items())
    harness.record(
        "G.lossy_share",
        value=worst,
        file=FILE,
        unit="share",
        shapes={"traces": list(names)},
        method="share of the exact set that is not attended, mean over queries and layers, first quarter left out",
        command=" ".join(["python -m bench.replay lossy", *sys.argv[2:]]),
        notes=notes,
    )
    print(notes.replace("; ", "\n"))


# ---- the cost model against measured rows ----------------------------------------------------------------

WAYS = ("resident", "link", "in turn", "fused", "ahead")
"""What bench/prefetch.py measures at a shape, a record format and a hit rate: the indexer alone, a recall alone, one
after the other, scores with prefetch and a recall of what the cap left, and the same without a cap."""

GRID = re.compile(
    r"(?:scores and recall|scores with prefetch|cap \d+), \d+ x \d+, \w+ records, hit rate [\d.]+(?:: .+)?"
)


class Compared(NamedTuple):
    """One measured time beside its prediction; us."""

    way: str
    where: str  # the row's name
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative; positive where the model is too slow."""
        return self.predicted / self.measured - 1


def compared(model: cost.CostModel, rows: Iterable[harness.Row]) -> Iterator[Compared]:
    """Every row of the grid, told by its name and its shapes: seats, length, records, misses and cap of a seat, way; of
    those that say how pages lie, as older ones were taken beside other work."""
    for row in rows:
        way = row.shapes.get("way")
        if not GRID.fullmatch(row.name) or way not in WAYS or "pages" not in row.shapes:
            continue
        size = RecordFormat(row.shapes["records"], 512, 64).bytes_per_row
        seats, misses = int(row.shapes["seats"]), int(row.shapes["misses"])
        staged = seats * min(misses, int(row.shapes["cap"]))
        indexer = float(model.indexer_us(seats * int(row.shapes["length"])))
        recall = float(model.copy_us(seats * misses, size))
        late = max(0.0, float(model.stream_us(staged, size)) - indexer)
        overlapped = indexer + late + float(model.copy_us(seats * misses - staged, size))
        predicted = {"resident": indexer, "link": recall, "in turn": indexer + recall}.get(way, overlapped)
        yield Compared(way, row.name, row.value, predicted)


def cost_error() -> None:
    """G.cost_model_error: scores with prefetch, with and without a cap; everything else is a row of its own."""
    from bench.paper import latest

    model = cost.load("h200")
    found = list(compared(model, latest(harness.read_rows()).values()))
    if not found:
        sys.exit("no row of the grid is recorded; run `python -m bench.prefetch bench` on a GPU first")
    for what in ("fused", "resident", "link", "in turn"):
        ways = ("fused", "ahead") if what == "fused" else (what,)
        some = [one for one in found if one.way in ways]
        if not some:
            continue
        worst = max(some, key=lambda one: abs(one.error))
        error = harness.summarise([abs(one.error) for one in some])
        harness.record(
            "G.cost_model_error" if what == "fused" else None,
            name=f"cost model against the grid: {what}",
            value=error,
            file=FILE,
            unit="ratio",
            shapes={"rows": len(some)},
            method="|predicted / measured - 1| of the h200 file; median, p10, p90 over shapes, hit rates and formats",
            command="python -m bench.replay cost",
            notes=f"worst {worst.error:+.3f}: {worst.where}, measured {worst.measured:.1f} us, predicted "
            f"{worst.predicted:.1f} us; mean of the signed errors {statistics.mean(one.error for one in some):+.3f}",
        )
        print(f"{what}: median error {error.median:.3f}, worst {worst.error:+.3f} ({worst.where})")
        for one in some:
            print(f"    {one.where}: measured {one.measured:.1f}, predicted {one.predicted:.1f}, {one.error:+.1%}")


if __name__ == "__main__":
    parts = {"speed": speed, "shipped": shipped, "h20": h20, "lossy": lambda: lossy(tuple(sys.argv[2:]))}
    (parts | {"cost": cost_error})[sys.argv[1]]()
