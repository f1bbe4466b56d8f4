"""A threshold policy of your own against seven others: python examples/custom_threshold.py [TRACE [PLOT.svg]]"""

import dataclasses
import sys
from pathlib import Path

import jax.numpy as jnp

from echo_jax.replay import cost, job, settings
from echo_jax.report import figures, rows, svg
from echo_jax.threshold import NO_HISTORY, Always, Clairvoyant, Ema, Last, Never, Quantile, Trend
from echo_jax.traces import open_trace


@dataclasses.dataclass(frozen=True)
class Reverting:  # expects each k-th score to return to its long mean, `pull` of the way in one step
    pull: float = 0.5
    init = staticmethod(lambda: (jnp.float32(NO_HISTORY), jnp.float32(NO_HISTORY)))  # next score, long mean
    value = staticmethod(lambda memory: memory[0])

    def update(self, memory, kth_score):
        mean = jnp.where(jnp.isfinite(memory[1]), 0.95 * memory[1] + 0.05 * kth_score, kth_score)
        return kth_score + self.pull * (mean - kth_score), mean


def main(name: str = "echo-tiny-manual", plot: str = "custom_threshold.svg") -> None:
    trace, model = open_trace(name), cost.load("h200")
    policies = [Reverting(), Ema(), Last(), Quantile(), Trend(), Never(), Always(), Clairvoyant()]
    names, slots = [type(policy).__name__.lower() for policy in policies], 2 * trace.info.top_k
    tried = [settings.Setting(slots, policy, policy_name=name) for policy, name in zip(policies, names, strict=True)]
    (section,) = rows.sections(job.replay(trace, name, tried, costs=[model]))
    columns, cells = figures.table(section)
    for line in [columns, *cells]:
        print("".join(cell.rjust(12) for cell in line))
    Path(plot).write_text(svg.standalone(figures.pareto(section, model.name).chart))


if __name__ == "__main__":
    main(*sys.argv[1:])
