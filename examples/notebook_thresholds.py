# %% [markdown]
# # From a trace to a table of threshold policies
#
# A notebook in percent format: open it as one in VS Code or with jupytext, or run it from the root of the repository,
# `python examples/notebook_thresholds.py`. It asks how well the k-th best index score can be predicted, without GPU or
# model.

# %% A trace: what an indexer scored, step by step. This one was recorded from the packaged model on real documentation.
from echo_jax.replay.caps import Fixed
from echo_jax.replay.job import replay
from echo_jax.replay.settings import Setting
from echo_jax.threshold import Clairvoyant, Ema, Last, Never
from echo_jax.traces import open_trace

TRACE = "echo-tiny-manual"
trace = open_trace(TRACE)
info = trace.info
print(f"{info.layers} layers, {info.steps} steps, the best {info.top_k} of {info.capacity} positions")

# %% Policies are values. Each gets pools of its own and sees the same scores; `clairvoyant` knows the answer. The cap
# is out of the way, so that what is judged is the prediction.
POLICIES = {"never": Never(), "last": Last(), "ema 0.5": Ema(), "ema 0.25": Ema(0.25), "clairvoyant": Clairvoyant()}
settings = [
    Setting(2 * info.top_k, threshold=policy, policy_name=name, cap=Fixed(info.top_k))
    for name, policy in POLICIES.items()
]
LAYERS = (1, 4)
rows = replay(trace, TRACE, settings, layers=LAYERS, skip=info.steps // 4)

# %% Of the rows that were missing, how many had been copied ahead? And how many were copied in vain, a missing row?
print(f"{'policy':<12}" + "".join(f"{f'layer {layer}':>24}" for layer in LAYERS))
table = {name: [row for row in rows if row["key"]["policy"] == name] for name in POLICIES}
for name, found in table.items():
    missing = [row["useful"] + row["recalled"] for row in found]
    cells = [
        f"{row['useful'] / count:>8.0%} found {row['wasted'] / count:>5.2f} wasted"
        for row, count in zip(found, missing, strict=True)
    ]
    print(f"{name:<12}" + "".join(f"{cell:>24}" for cell in cells))

# %% [markdown]
# Whatever the policy says, the same rows are attended: hits and missing rows are equal in every line. Try your own, a
# frozen dataclass with `init`, `update` and `value` (`custom_threshold.py` has one), or another trace,
# `open_trace("synth:churny,requests=4")`.
