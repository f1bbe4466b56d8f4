"""Which commands made the rows of a section: what a reader types to have them again.

Knows the options of `echo-jax replay` and nothing of what they do. The commands are rebuilt from what the rows say of
themselves; running them gives rows with the same keys.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from echo_jax.report.rows import Line, Section, distinct
from echo_jax.traces import open_trace

OWN_SLOTS = ("quest", "no-offload")
"""Rivals that keep everything on the device, whatever the pool."""


def replay_commands(section: Section, output: str, lines: Sequence[Line] | None = None) -> list[str]:
    """The `echo-jax replay` commands behind lines of a section (default: all), their rows appended to `output`.

    One command serves all settings that form a product of policies, evictions, slots, caps and pools; rivals have one
    of their own.
    """
    lines = section.lines if lines is None else lines
    found: dict[tuple, list[str]] = {}
    for line in distinct((line for line in lines if line.is_echo), lambda line: line.setting["policy"]):
        policy = line.setting["policy"]
        own = [one for one in lines if one.is_echo and one.setting["policy"] == policy]
        for product in _products([_sizes(one) for one in own]):
            found.setdefault(product, []).append(policy)
    rivals: dict[tuple, list[str]] = {}
    for line in distinct((line for line in lines if not line.is_echo), lambda line: line.setting["rule"]):
        rule = line.setting["rule"]
        slots = tuple(sorted({one.slots for one in lines if one.setting["rule"] == rule}))
        rivals.setdefault(slots if rule not in OWN_SLOTS else (), []).append(rule)
    some = {name for slots, names in rivals.items() if slots for name in names}
    if () in rivals and some:  # those that take no slots may go along with any others
        rivals[next(slots for slots in rivals if slots)] += rivals.pop(())
    words = [["--policy", *policies, *_eviction(product), *_swept(product)] for product, policies in found.items()] + [
        ["--rival", *names, *_swept((("lru",), slots, (), ()))] for slots, names in rivals.items()
    ]
    return [
        shlex.join(["echo-jax", "replay", section.name, *one, *_common(section), "--output", output]) for one in words
    ]


def report_command(files: Sequence[str], folder: str) -> str:
    """The `echo-jax report` command over those files."""
    return shlex.join(["echo-jax", "report", *files, "--output", folder])


def _sizes(line: Line) -> tuple:
    return tuple(line.setting[name] for name in ("eviction", "slots_per_request", "cap", "pool"))


def _products(sizes: list[tuple]) -> list[tuple]:
    """Sets of (eviction, slots, cap, pool) as products of values: one if they are one, else one for each eviction, and
    where not even those are, each by itself."""
    axes = tuple(tuple(dict.fromkeys(one[place] for one in sizes)) for place in range(4))
    count = len(axes[0]) * len(axes[1]) * len(axes[2]) * len(axes[3])
    if count == len(set(sizes)):
        return [axes]
    if len(axes[0]) > 1:
        return [made for name in axes[0] for made in _products([one for one in sizes if one[0] == name])]
    return [tuple((value,) for value in one) for one in dict.fromkeys(sizes)]


def _eviction(product: tuple) -> list[str]:
    return [] if product[0] == ("lru",) else ["--eviction", *product[0]]


def _swept(product: tuple) -> list[str]:
    """The options for slots, caps and pools; what is the default is left out."""
    _, slots, caps, pools = product
    usual = {"cap": ("64",), "pool": ("shared",), "slots": ()}
    words, swept = [], []
    for name, values in (("slots", slots), ("cap", caps), ("pool", pools)):
        values = tuple(map(str, values))
        if values in (usual[name], ()):
            continue
        if len(values) == 1:
            words += [f"--{name}", values[0]]
        else:
            # A separator that no value has; one at the end where only it can say which it is.
            between = ";" if any("," in value for value in values) else ","
            swept.append(f"{name}={between.join(values)}")
    return [*words, *(["--sweep", *swept] if swept else [])]


def _common(section: Section) -> list[str]:
    head, words = section.head, []
    try:
        info = open_trace(section.name).info
        steps, layers = info.steps, info.layers
    except (OSError, ValueError):  # a folder that is elsewhere now: everything is said in full
        steps = layers = None
    if section.layers != (None if layers is None else tuple(range(layers))):
        words += ["--layers", *map(str, section.layers)]
    if head["steps"] != steps:
        words += ["--steps", str(head["steps"])]
    if head["skip"]:
        words += ["--skip", str(head["skip"])]
    if head["record_format"] != "bf16":
        words += ["--record-format", head["record_format"]]
    if head["cost_models"] != ["h200"]:
        words += ["--cost", *head["cost_models"]]
    if any(line.series for line in section.lines):
        words.append("--series")
    return words
