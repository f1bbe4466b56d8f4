"""The answers of docs/findings.md as numbers: recorded rows picked by setting, and rules at equal wasted bytes.

Knows what is computed from rows. Does not know how a replay works, nor what a page looks like.
"""

import math
from collections.abc import Iterable, Sequence

from bench import findings
from echo_jax.report.rows import Line, Section, read

COST = "h200"


def sections(question: str) -> list[Section]:
    """The recorded rows of a question; of a trace that was recorded anew under its name, the later ones."""
    return list({one.name: one for one in read([findings.FOLDER / f"{question}.jsonl"])}.values())


def short(section: Section) -> str:
    """A trace's name without the sizes that all of them have."""
    name = section.name.removeprefix("synth:").replace(f",{findings.SIZES}", "")
    return (
        name.replace(",seed=7", ", other seed")
        .replace(",jump_every=50", ", jumps")
        .replace(",scanners=1", ", a scanner")
    )


def exposed(line: Line) -> float:
    """Microseconds of a layer that copies add, mean over layers."""
    return line.mean("cost", COST, "with_overlap_us", "mean")


def plain(line: Line) -> float:
    """The same if nothing is copied ahead."""
    return line.mean("cost", COST, "without_overlap_us", "mean")


def wasted(line: Line) -> float:
    """KB copied in vain in a layer-step."""
    return line.mean("wasted_bytes_per_step") / 1000


def missing(line: Line) -> float:
    """Selected rows without a slot, in a layer-step of the batch."""
    return line.per_step("useful") + line.per_step("recalled")


def pick(section: Section, **wanted: object) -> Line:
    """The one line with that policy, eviction, cap, pool and slots (in units of k)."""
    if "slots" in wanted:
        wanted["slots_per_request"] = int(float(str(wanted.pop("slots"))) * section.head["top_k"])
    (found,) = [line for line in section.lines if all(line.setting[name] == value for name, value in wanted.items())]
    return found


# ---- equal waste -----------------------------------------------------------------------------------------


def curve(section: Section, rule: str) -> list[tuple[float, float]]:
    """(wasted KB, exposed us) of a rule's shifts and of copying nothing ahead, ascending by waste."""
    names = [findings.shifted(rule, shift) for shift in findings.SHIFTS]
    lines = [pick(section, policy=name) for name in ("never", *names)]
    return sorted((wasted(line), exposed(line)) for line in lines)


def at_waste(points: Sequence[tuple[float, float]], waste: float) -> float:
    """The curve's exposed time at so much waste, linear between its points; NaN beyond them."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x0 <= waste <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (waste - x0) / (x1 - x0)
    return math.nan


def rules_of(section: Section) -> list[str]:
    """Rules whose every shift was tried."""
    tried = {line.setting["policy"] for line in section.lines}
    return [rule for rule in findings.RULES if all(findings.shifted(rule, shift) in tried for shift in findings.SHIFTS)]


def at_equal_waste(some: Iterable[Section]) -> dict[str, dict[str, float]]:
    """trace -> rule -> its exposed time over EMA 0.5's, at the wasted bytes of EMA 0.5."""
    found = {}
    for section in some:
        usual = pick(section, policy="ema")
        found[short(section)] = {
            rule: at_waste(curve(section, rule), wasted(usual)) / exposed(usual) for rule in rules_of(section)
        }
    return found


def best_rule(some: Iterable[Section]) -> str:
    """The rule of the lowest geometric mean over traces."""
    ratios = list(at_equal_waste(some).values())
    return min(ratios[0], key=lambda rule: geometric_mean(one[rule] for one in ratios))


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values if not math.isnan(value)]
    return math.exp(sum(logs) / len(logs))
