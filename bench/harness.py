"""How a number is measured, and what is written down with it: one JSON object a row under bench/results/.

It knows the form of a row, this machine and the clock. It does not know the claims (bench/claims.py) nor what
is being measured. jax is used only to wait for a result and to name the device; rows can be read without it.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench import ledger, sources

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

# The two rows by which GPU runs are told to be comparable; bench/events.py records them.
EMPTY_GRAPH, COPY_RATE = "reference: an empty graph", "reference: a device copy of 1 GiB"

VERSIONED = ("jax", "jaxlib", "numpy", "flax", "jax-cuda13-plugin")


@dataclasses.dataclass(frozen=True)
class Row:
    """One recorded number, and what a reader needs to judge or repeat it.

    value             finite number, in `unit`
    unit              "s", "us", "ratio", ...; "" for a bare number
    date              ISO 8601; rows without a time zone are read as UTC
    machine           one line: processor, cores, memory and accelerator
    versions          name -> version of what computed it, `commit` included
    claim             the id this row answers, or None for a number that no claim asks for
    name              what was measured, where no claim says it
    shapes            sizes it was measured at
    method            clock, warm-up, cache state, statistic
    spread            [p10, p90] in `unit`, or None for a single run
    repeats           how many measurements the value stands for, or None
    fraction_of_limit value relative to the bound it cannot pass (named in `notes`), or None
    command           what to run to get it again
    notes             anything else
    kernel_us         where the value is by events around a graph: the kernels' own time, launches left out
    run               the process that recorded it: rows of one run were measured side by side
    sources           digest of the claim's sources as they were measured (bench/sources.py)
    digest            of all other fields (bench/ledger.py); a change by hand shows
    """

    value: float
    unit: str
    date: str
    machine: str
    versions: Mapping[str, str]
    claim: str | None = None
    name: str = ""
    shapes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str = ""
    spread: tuple[float, float] | None = None
    repeats: int | None = None
    fraction_of_limit: float | None = None
    command: str = ""
    notes: str = ""
    kernel_us: float | None = None
    run: str = ""
    sources: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            raise ValueError(f"value must be a finite number, not {self.value!r}")
        for field, kind in (
            ("unit", str),
            ("date", str),
            ("machine", str),
            ("versions", Mapping),
            ("notes", str),
        ):
            if not isinstance(getattr(self, field), kind):
                raise ValueError(f"{field} must be a {kind.__name__}, not {getattr(self, field)!r}")
        if not self.machine.strip():
            raise ValueError("machine must name the machine, not be empty")
        if not self.claim and not self.name:
            raise ValueError("a row needs the id of a claim, or a name")
        self.when()

    def when(self) -> datetime.datetime:
        """The date as a moment with a time zone, so that any two rows compare."""
        try:
            moment = datetime.datetime.fromisoformat(self.date)
        except ValueError:
            raise ValueError(f"date must be ISO 8601, as 2026-01-31T12:00:00+00:00, not {self.date!r}") from None
        return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def parse_row(line: str) -> Row:
    """The row written on one line; ValueError says what is wrong with it, an unknown field included."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"a row is a JSON object, not {type(data).__name__}")
    fields = {field.name: field for field in dataclasses.fields(Row)}
    if unknown := sorted(set(data) - set(fields)):
        raise ValueError(f"unknown field {unknown[0]!r}; a row has {', '.join(fields)}")
    required = [name for name, field in fields.items() if _has_no_default(field)]
    if missing := [name for name in required if name not in data]:
        raise ValueError(f"field {missing[0]!r} is missing; every row has {', '.join(required)}")
    return Row(**data)


def read_rows(results: Path = RESULTS) -> list[tuple[Row, str]]:
    """The rows of a folder that count, each with the place it was read from ("file:line"), by file name and line.

    A row that a later line supersedes does not count, nor does that line. ValueError names file and line of the first
    malformed row. A folder that does not exist holds no rows.
    """
    rows, gone = [], ledger.superseded(results)
    for path in sorted(results.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                if isinstance(data, dict) and (ledger.is_superseding(data) or ledger.digest_of(data) in gone):
                    continue
                rows.append((parse_row(line), f"{path.name}:{number}"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    return rows


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Durations in seconds of repeated calls: the median, and the 10th and 90th percentile."""

    median: float
    p10: float
    p90: float
    repeats: int

    def scaled(self, factor: float) -> "Measurement":
        """The same in another unit: `scaled(1e6)` is in microseconds, `scaled(1 / steps)` is per step."""
        return dataclasses.replace(self, median=self.median * factor, p10=self.p10 * factor, p90=self.p90 * factor)


def measure(function: Callable[[], Any], repeats: int = 30, warmup: int = 3) -> Measurement:
    """Calls `function` warmup + repeats times and times the last `repeats`, each until its result is ready.

    The result of a call may be any pytree of arrays (waited for with jax.block_until_ready) or anything else.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"measure needs at least 1 repeat and 0 warm-up calls, not {repeats} and {warmup}")
    ready = _waiter()
    for _ in range(warmup):
        ready(function())
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        ready(function())
        durations.append(time.perf_counter() - start)
    return summarise(durations)


def summarise(durations: list[float]) -> Measurement:
    """Median and p10 .. p90 (linear between neighbours) of at least one duration."""
    ordered = sorted(durations)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Measurement(statistics.median(ordered), quantile(0.1), quantile(0.9), len(ordered))


def record(
    claim: str | None = None,
    *,
    value: float | Measurement,
    unit: str,
    file: str = "cpu.jsonl",
    results: Path | None = None,
    command: str | None = None,
    **fields: Any,
) -> Row:
    """Appends one row to `results / file` and returns it; machine, versions, date and command are filled in.

    A Measurement gives value, spread and repeats at once, and must already be in `unit`. `fields` are those
    of Row. The folder is bench/results, or the one ECHO_RESULTS names (for a run on a machine whose files are
    brought back). Nothing is written when the row is malformed.
    """
    if isinstance(value, Measurement):
        fields = {"spread": (value.p10, value.p90), "repeats": value.repeats, **fields}
        value = value.median
    row = Row(
        value=value,
        unit=unit,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=fields.pop("machine", None) or machine(),
        versions=fields.pop("versions", None) or versions(),
        claim=claim,
        command=_command() if command is None else command,
        run=run_id(),
        sources=sources.digest_now(claim) if claim else "",
        **fields,
    )
    folder = results or Path(os.environ.get("ECHO_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / file, "a", encoding="utf-8") as stream:
        line = json.loads(json.dumps(_compact(row)))  # as it is read back
        stream.write(json.dumps(line | {"digest": ledger.digest_of(line)}, ensure_ascii=False) + "\n")
    return row


@functools.cache
def run_id() -> str:
    """8 hexadecimal digits of this process: what it records was measured side by side."""
    return os.urandom(4).hex()


@functools.cache
def machine() -> str:
    """One line: processor model, usable cores, memory, and the GPUs jax sees, if jax has been imported."""
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores"]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts.append(f"{memory_gib:.0f} GiB")
    if "jax" in sys.modules:
        gpus = [device.device_kind for device in sys.modules["jax"].devices() if device.platform == "gpu"]
        parts += [f"{gpus.count(kind)} x {kind}" for kind in sorted(set(gpus))]
    return ", ".join(parts)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Python and of what computes, and this repository's commit (`+` where files differ)."""
    found = {"python": platform.python_version()}
    for package in VERSIONED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if commit := sources.commit_of_tree():
        found["commit"] = commit
    return found


def _waiter() -> Callable[[Any], Any]:
    """jax.block_until_ready where jax is in use; a function measured without jax has nothing to wait for."""
    jax = sys.modules.get("jax")
    return jax.block_until_ready if jax is not None else lambda result: result


def _processor() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _command() -> str:
    """How this process was started, as someone would type it at the root of the repository."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["-m", spec.name] if spec is not None and spec.name else [Path(sys.argv[0]).name]
    return " ".join(["python", *program, *sys.argv[1:]])


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _compact(row: Row) -> dict[str, Any]:
    """The fields that say something, `claim` first; an empty field says the same by its absence."""
    data = dataclasses.asdict(row)
    return {
        "claim": data.pop("claim"),
        **{key: item for key, item in data.items() if item not in (None, "", {}) or key == "unit"},
    }
