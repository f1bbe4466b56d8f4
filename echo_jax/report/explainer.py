"""A page that steps through real decode steps: scores and the threshold line, what was staged, selected, recalled,
evicted. One HTML file with its data in it; nothing is fetched.

Knows which moments go on the page and in which form. How the page looks and moves is `explainer.html`'s business, what
happened in a step that of `moments`.
"""

from __future__ import annotations

import hashlib
import html
import importlib.resources
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from echo_jax.models.config import FULL
from echo_jax.report import svg
from echo_jax.report.moments import Moment
from echo_jax.traces import TraceInfo
from echo_jax.traces.format import PACKAGED

ECHO_TINY = "echo-tiny"
"""Stands for the trace below: the packaged model, recorded while it continued a document that is packaged too."""
ECHO_TINY_TRACE = "echo-tiny-code"

STEPS, LAYERS = 4, 6
"""What fits a page, unless it is chosen."""


def usual_steps(info: TraceInfo) -> list[int]:
    """Steps in the middle, after the pool has filled."""
    first = max(0, min(info.steps // 2, info.steps - STEPS))
    return list(range(first, min(first + STEPS, info.steps)))


def usual_layers(info: TraceInfo) -> list[int]:
    """Scoring layers, evenly chosen if there are many."""
    full = [layer for layer, kind in enumerate(info.layer_kinds) if kind == FULL]
    return full if len(full) <= LAYERS else [full[place * (len(full) - 1) // (LAYERS - 1)] for place in range(LAYERS)]


def document_of(info: TraceInfo) -> bytes | None:
    """The prompt of a recorded trace of one request, byte for byte, if it is one of this package's and its tokens are
    bytes; else None. The tokens that the model added are not stored."""
    prompts = info.recipe.get("prompts", ())
    if len(prompts) != 1:
        return None
    for path in sorted((PACKAGED / "prompts").glob("*.txt")):
        content = path.read_bytes()
        is_it = hashlib.sha256(content).hexdigest() == prompts[0].get("sha256")
        if is_it and len(content) == prompts[0].get("tokens"):
            return content
    return None


def as_html(name: str, info: TraceInfo, found: Sequence[Moment], *, policy: str, staging: int, command: str) -> str:
    """The page. `found` holds the moments of every layer and step shown."""
    document = document_of(info)
    data = {
        "trace": name,
        "top_k": info.top_k,
        "band": info.band,
        "policy": policy,
        "staging": staging,
        "text": None if document is None else document.decode("latin-1"),
        "moments": [_plain(moment) for moment in found],
    }
    template = importlib.resources.files("echo_jax.report").joinpath("explainer.html").read_text("utf-8")
    # "</" would end the script that holds the data.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    filled = {"PALETTE": svg.PALETTE, "NAME": html.escape(name), "COMMAND": html.escape(command), "DATA": text}
    # In one pass: a trace may be called anything.
    return re.sub(r"\[\[([A-Z]+)\]\]", lambda match: filled[match[1]], template)


def _plain(moment: Moment) -> dict[str, Any]:
    """JSON knows no NaN and no infinity; both become null."""
    row: dict[str, Any] = {}
    for field, value in vars(moment).items():
        if isinstance(value, int):
            row[field] = value
        elif isinstance(value, float):
            row[field] = _number(value)
        elif field == "scores":
            row[field] = [_number(one) for one in value.tolist()]
        else:
            row[field] = value.tolist()
    return row


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
