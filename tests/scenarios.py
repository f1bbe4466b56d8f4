"""A history of requests that puts a cache under pressure, run twice: offloaded and resident.

Shared by tests/test_lossless.py (a pairwise choice of settings) and bench/lossless.py (the whole grid). Layers, seats
and prompts are made different on purpose, so that one leaking into another shows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import decode, eviction, prefill, threshold
from echo_jax import state as state_lib
from echo_jax.models import dsa
from echo_jax.models.config import DsaConfig

TOP_K = 10
CAPACITY = 192
VOCAB = 64

MODEL = DsaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_heads=2,
    q_lora_rank=24,
    kv_lora_rank=128,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    index_heads=4,
    index_head_dim=16,
    index_topk=TOP_K,
    layer_kinds=("full", "full"),
    mlp_kinds=("dense", "moe"),
    intermediate_size=48,
    moe_intermediate_size=16,
    num_experts=4,
    num_shared_experts=1,
    experts_per_token=2,
    expert_groups=2,
    expert_groups_kept=1,
)


ONE_LAYER = dataclasses.replace(MODEL, layer_kinds=("full",), mlp_kinds=("dense",))
"""For the pairwise choice, where compiling is what takes time."""


@dataclasses.dataclass(frozen=True)
class NanThreshold(threshold.Fixed):
    """A broken policy: never a number."""

    threshold: float = float("nan")


@dataclasses.dataclass(frozen=True)
class Garbage:
    """A broken policy: its value is the bits of a counter read as a float."""

    def init(self):
        return jnp.uint32(0)

    def update(self, memory, kth_score):
        return memory * jnp.uint32(1664525) + jnp.uint32(1013904223)

    def value(self, memory):
        return jax.lax.bitcast_convert_type(memory, jnp.float32)


@dataclasses.dataclass(frozen=True)
class AnyBound(threshold.Listing):
    """Its bound is a good one after one score of six; after the others too high, too low, infinite or no number."""

    def bound(self, memory):
        level = memory[1]
        bounds = [super().bound(memory), level + 1, level - 1e6, jnp.inf, -jnp.inf, jnp.nan]
        drawn = jax.lax.bitcast_convert_type(level, jnp.uint32) % len(bounds)
        return jnp.stack([jnp.asarray(bound, jnp.float32) for bound in bounds])[drawn]


THRESHOLDS = {
    "never": threshold.Never(),
    "always": threshold.Always(),
    "ema": threshold.Ema(),
    "fixed": threshold.Fixed(0.1),
    "nan": NanThreshold(),
    "random": AnyBound(threshold.Random(0.2)),
    "garbage": Garbage(),
}
EVICTIONS = {
    "lru": eviction.Lru(),
    "lfu": eviction.Lfu(),
    "score": eviction.ScoreWeighted(),
    "clock": eviction.Clock(4),
}
POOLS = {"barely": 0, "some": 25, "ample": 400}  # slots beyond what one step needs
STAGING = 6

AXES = {
    "records": ("f32", "bf16", "fp8"),
    "keys": ("f32", "bf16", "fp8"),
    "tokens": (1, 2, 4),
    "threshold": ("never", "always", "ema", "fixed", "nan", "random"),
    "cap": (0, 1, STAGING),
    "pool": tuple(POOLS),
    "memory": ("ffi", "jnp"),
    "eviction": ("lru", "lfu"),
    "warm": (0, 2),
}

TRIPLES = tuple((r, k, t) for i, r in enumerate(AXES["records"]) for j, k in enumerate(AXES["keys"])
                for t in (AXES["tokens"][(i + j) % 3],))  # fmt: skip
"""(records, keys, tokens): a Latin square, in which every two values of every two of the three meet."""


def cache(setting: dict, *, offload: bool, model: DsaConfig = MODEL, seats: int = 3):
    """The DecodeConfig of one point of the grid."""
    per_step = seats * setting["tokens"] * (TOP_K + 1)
    return decode.DecodeConfig(
        model,
        decode.cache_config(
            model,
            seats=seats,
            capacity=CAPACITY,
            host_rows=768,
            device_slots=max(per_step + POOLS[setting["pool"]], setting["warm"] * TOP_K),
            record_format=setting["records"],
            key_format=setting["keys"].split()[0],
            rotate_index_keys=setting["keys"].endswith("rotated"),
            tokens_per_step=setting["tokens"],
            threshold=THRESHOLDS[setting["threshold"]],
            eviction=EVICTIONS[setting["eviction"]],
            staging=setting["cap"],
            warm_windows=setting["warm"],
            host_memory=setting["memory"],
            offload=offload,
            chunk=64,
        ),
    )


@functools.cache
def parameters(model: DsaConfig = MODEL, scores: str = "plain") -> dsa.Params:
    """Random parameters. scores: "plain", "tied" (every index score equal) or "odd" (infinities and NaN among them)."""
    params = jax.jit(dsa.init_params, static_argnums=1)(jax.random.key(3), model)  # one compilation, not one a shape
    for number, layer in enumerate(params["layers"]):
        indexer = layer.get("indexer")
        if indexer is None:
            continue
        if scores == "tied":
            indexer["weights"] = jnp.zeros_like(indexer["weights"])
        elif scores == "odd":
            # Some products overflow to infinity; heads of both signs then give +inf, -inf and NaN.
            indexer["k_norm_weight"] = indexer["k_norm_weight"] * (2.0e19 if number == 0 else 3.0e18)
            indexer["q_b"] = indexer["q_b"] * 1.2e19
    return params


class Run:
    """One cache with its history; everything that must not change is kept in `seen`."""

    def __init__(self, config: decode.DecodeConfig, params: dsa.Params):
        self.config, self.params = config, params
        self.state = state_lib.create(config.cache)
        self.seen: list[tuple[str, np.ndarray]] = []
        self.moved: list = []
        self.random = np.random.default_rng(11)

    def _keep(self, name: str, *arrays: jax.Array):
        self.seen += [(name, np.asarray(array)) for array in arrays]

    def admit(self, seat: int, prompt: int, shared_from: int | None = None):
        """A request with `prompt` random tokens; shared_from gives it that seat's full pages as a prefix."""
        shared = ()
        if shared_from is not None:
            full = int(self.state.tables.lengths[shared_from]) // 64
            shared = np.asarray(self.state.tables.page_table[shared_from])[:full]
        self.state = state_lib.admit(self.config.cache, self.state, seat, CAPACITY - 3 * seat, shared_pages=shared)
        tokens = self.random.integers(0, VOCAB, prompt)
        self.state, output = prefill.prefill(self.params, self.state, tokens, seat, config=self.config)
        count = (prompt - 1) % self.config.cache.chunk + 1
        self._keep(f"prefill of seat {seat}", output.logits, output.selected[:, :count], output.digests[:, :count])

    def steps(self, count: int):
        cache = self.config.cache
        for _ in range(count):
            tokens = self.random.integers(0, VOCAB, (cache.seats, cache.tokens_per_step)).astype(np.int32)
            self.state, output = decode.decode_step(self.params, self.state, tokens, config=self.config)
            self._keep("step", output.logits, output.selected, output.digests)
            self.moved.append(output.moved)

    def fork(self, parent: int, child: int):
        self.state = state_lib.fork(self.config.cache, self.state, parent, child, CAPACITY)

    def release(self, seat: int, keep_pages: bool = False):
        self.state = state_lib.release(self.config.cache, self.state, seat, keep_pages)

    def rollback(self, dropped: int):
        lengths = np.asarray(self.state.tables.lengths)
        active = np.asarray(self.state.tables.active)
        self.state = state_lib.rollback(self.config.cache, self.state, lengths - np.where(active, dropped, 0))

    def history(self):
        """Contexts that cross K, a fork, a cancelled request, a reused seat, shared prefixes, rejected tokens."""
        self.admit(0, 90)
        self.admit(1, 3)
        self.steps(4)
        self.fork(0, 2)
        self.steps(3)
        self.release(1, keep_pages=True)
        self.steps(1)
        self.admit(1, 40, shared_from=0)
        self.steps(3)
        if self.config.cache.tokens_per_step > 1:
            self.rollback(1)
        self.steps(1)
        self.release(0)
        self.steps(3)
        return self


@functools.cache
def resident(records: str, keys: str, tokens: int, scores: str, model: DsaConfig = MODEL) -> Run:
    """The resident run depends on formats and T only; one serves every cache setting."""
    setting = dict(records=records, keys=keys, tokens=tokens, threshold="never", cap=0, pool="barely", memory="jnp")
    config = cache(setting | {"eviction": "lru", "warm": 0}, offload=False, model=model)
    return Run(config, parameters(model, scores)).history()


def differences(ours: Run, reference: Run) -> list[str]:
    """Where two histories differ in a bit; empty when they do not."""
    assert len(ours.seen) == len(reference.seen)
    found = []
    for number, ((name, a), (_, b)) in enumerate(zip(ours.seen, reference.seen, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype
        count = int((a.view(np.uint32) != b.view(np.uint32)).sum())
        if count:
            found.append(f"{name}, array {number}: {count} of {a.size} differ")
    return found


def compared(run: Run) -> int:
    """How many 32-bit words of a history are held against the reference."""
    return sum(array.size for _, array in run.seen)


def grid(axes: dict[str, tuple]) -> list[dict]:
    """Every point."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairwise(axes: dict[str, tuple], triples: tuple[tuple, ...]) -> list[dict]:
    """A small set of points in which every two values of every two axes meet. Greedy and deterministic.

    The first three axes (records, keys, tokens) take only the values of `triples`, which must themselves be pairwise:
    each triple needs a resident run of its own.
    """
    names = list(axes)

    def pairs(point: dict) -> set:
        return {(a, point[a], b, point[b]) for a, b in itertools.combinations([n for n in names if n in point], 2)}

    open_pairs = set().union(*(pairs({a: x, b: y}) for a, b in itertools.combinations(names, 2)
                               for x in axes[a] for y in axes[b]))  # fmt: skip
    chosen = []
    while open_pairs:
        # Start from the triple, then take each further axis's value, that closes most open pairs.
        best: dict = {}
        for triple in triples:
            point = dict(zip(names[:3], triple, strict=True))
            for name in names[3:]:
                value = max(axes[name], key=lambda value: len(pairs(point | {name: value}) & open_pairs))  # noqa: B023
                point[name] = value
            if not best or len(pairs(point) & open_pairs) > len(pairs(best) & open_pairs):
                best = point
        if not pairs(best) & open_pairs:  # the greedy axes hid the last ones: take one of them as it is
            a, x, b, y = min(open_pairs, key=str)
            fits = next(t for t in triples if dict(zip(names, t, strict=False)).get(a, x) == x
                        and dict(zip(names, t, strict=False)).get(b, y) == y)  # fmt: skip
            best = best | dict(zip(names[:3], fits, strict=True)) | {a: x, b: y}
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


def check_invariants(run: Run):
    """Invariants 1, 2, 3 and 5 of a quiescent state, read from its arrays."""
    tables = jax.tree.map(np.asarray, run.state.tables)
    assert not (tables.page_cached & (tables.page_count > 0)).any()
    references = np.zeros_like(tables.page_count)
    for page in tables.page_table[tables.page_table >= 0]:
        references[page] += 1
    assert (references == tables.page_count).all()
    host = None if run.state.host_pool is None else np.asarray(run.state.host_pool)
    for number, layer in enumerate(run.state.layers):
        if layer.slots is None:
            continue
        maps = jax.tree.map(np.asarray, layer.slots)
        live = np.flatnonzero(maps.host_of >= 0)
        assert (maps.free == (maps.host_of < 0)).all() and (maps.free == (maps.priority == -(2**31))).all()
        assert (maps.slot_of[maps.host_of[live]] == live).all() and (maps.slot_of >= 0).sum() == len(live)
        assert (tables.page_count[maps.host_of[live] // 64] > 0).all()
        assert host is not None
        records = np.asarray(layer.records)
        assert records[live].tobytes() == host[number, maps.host_of[live]].tobytes()
