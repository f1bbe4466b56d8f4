"""The grid of settings of tests/test_lossless.py, by hand; CI runs a pairwise choice of it.

    python -m bench.lossless [FIRST:LAST]      (a part of the points; all by default)

Formats x T x caps x pools x thresholds. Host memory, eviction and warming take turns over the points. Every point is a
history of requests, offloaded, against the resident run: lists, digests and logits bit for bit. One row is recorded:
settings, words compared, words that differ.

The threshold policies of a point sit behind one `Switch`, so that they share a compilation.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time

import jax
import jax.numpy as jnp

from bench import harness
from echo_jax import decode
from tests import scenarios

KINDS = tuple(scenarios.THRESHOLDS)
MODEL = scenarios.ONE_LAYER


@dataclasses.dataclass(frozen=True)
class Switch:
    """Every policy of the grid; the memory says which one speaks."""

    def init(self):
        return (jnp.int32(0), tuple(policy.init() for policy in scenarios.THRESHOLDS.values()))

    def update(self, memory, kth_score):
        kind, memories = memory
        policies = scenarios.THRESHOLDS.values()
        return (kind, tuple(p.update(m, kth_score) for p, m in zip(policies, memories, strict=True)))

    def value(self, memory):
        kind, memories = memory
        values = [p.value(m) for p, m in zip(scenarios.THRESHOLDS.values(), memories, strict=True)]
        return jnp.stack(values)[kind]


class SwitchedRun(scenarios.Run):
    """A run whose every request uses one kind of threshold."""

    def __init__(self, config: decode.DecodeConfig, kind: int):
        super().__init__(config, scenarios.parameters(MODEL))
        self.kind = kind

    def admit(self, seat: int, prompt: int, shared_from: int | None = None):
        super().admit(seat, prompt, shared_from)
        self._choose()

    def fork(self, parent: int, child: int):
        super().fork(parent, child)
        self._choose()

    def _choose(self):
        layers = []
        for layer in self.state.layers:
            kind, memories = layer.threshold
            layers.append(layer.replace(threshold=(jnp.full_like(kind, self.kind), memories)))
        self.state = self.state.replace(layers=tuple(layers))


def points() -> list[dict]:
    axes = {name: scenarios.AXES[name] for name in ("records", "keys", "tokens", "cap", "pool")}
    turns = itertools.cycle(itertools.product(("ffi", "jnp"), scenarios.EVICTIONS, (0, 2)))
    found = []
    for point in scenarios.grid(axes):
        memory, eviction, warm = next(turns)
        found.append(point | {"memory": memory, "eviction": eviction, "warm": warm, "threshold": "never"})
    return found


def main() -> None:
    every = points()
    first, last = map(int, sys.argv[1].split(":")) if sys.argv[1:] else (0, len(every))
    mine = every[first:last]
    settings, words, different, started = 0, 0, 0, time.perf_counter()
    for number, point in enumerate(mine):
        reference = scenarios.resident(point["records"], point["keys"], point["tokens"], "plain", MODEL)
        config = scenarios.cache(point, offload=True, model=MODEL)
        config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, threshold=Switch()))
        for kind, name in enumerate(KINDS):
            run = SwitchedRun(config, kind).history()
            scenarios.check_invariants(run)
            if found := scenarios.differences(run, reference):
                print(f"{point} threshold {name}: {found[0]}", flush=True)
                different += len(found)
            settings += 1
            words += scenarios.compared(run)
        if number % 10 == 9:
            print(f"{number + 1}/{len(mine)} points, {time.perf_counter() - started:.0f} s", flush=True)
            jax.clear_caches()
    harness.record(
        None,
        value=different,
        unit="",
        name="lossless grid",
        method="every setting's history against the resident run, bit for bit; invariants checked at its end",
        shapes={"settings": settings, "points": f"{first}:{last} of {len(every)}", "words compared": words},
        file="lossless.jsonl",
        notes=f"{time.perf_counter() - started:.0f} s; {len(KINDS)} thresholds a point",
    )


if __name__ == "__main__":
    main()
