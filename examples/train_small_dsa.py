"""Trains echo-tiny, a byte-level DSA model, as DSA was trained: dense, then an indexer distilled, then sparse.

Knows the schedule, the optimiser and the step. The maths is `echo_jax.models`, attention on a GPU `fast_attention.py`,
the text `corpus.py`, what is planted in it `long_tasks.py`, where weights come from and go to `training_files.py`, the
verdict `evaluate_small_dsa.py`. One segment is one process of bounded time; segments follow each other through the
checkpoint folder:

    python examples/corpus.py --out out/corpus.xz
    for s in first second third fourth fifth; do
        python examples/train_small_dsa.py --segment $s --from out/train --out out/train --corpus out/corpus.xz
    done
    python examples/train_small_dsa.py --export echo_jax/data/echo-tiny --from out/train

First moments start again from zero with each segment: their memory is ten steps long.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import math
import pathlib
import time
from typing import Any

import corpus as corpora
import evaluate_small_dsa as judge
import fast_attention
import jax
import jax.numpy as jnp
import long_tasks
import numpy as np
import optax
from training_files import as_exported, export, restore, save

from echo_jax.models import dsa, expanded
from echo_jax.models.config import DENSE, FULL, MOE, DsaConfig, RopeConfig
from echo_jax.models.selection import Lesson

ECHO_TINY = DsaConfig(
    vocab_size=256,
    hidden_size=256,
    num_heads=4,
    q_lora_rank=128,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    index_heads=4,
    index_head_dim=128,
    index_topk=256,
    layer_kinds=(FULL,) * 6,
    mlp_kinds=(DENSE, DENSE, MOE, DENSE, MOE, DENSE),
    intermediate_size=576,
    moe_intermediate_size=128,
    num_experts=8,
    num_shared_experts=1,
    experts_per_token=2,
    expert_groups=4,
    expert_groups_kept=2,
    rope=RopeConfig(theta=100000.0),
    max_positions=32768,
    dtype="bfloat16",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training with one kind of step."""

    name: str
    seconds: float  # of training; compiling comes on top
    context: int
    tokens: int = 65536  # in one step
    sparse: bool = False
    distil: bool = False
    every: int = 1  # the indexer learns from every so-many-th query
    tasks: float = 0.0  # share of windows with facts planted and asked for
    stretched: float = 0.0  # share of sequences whose second part is moved away, to positions up to max_positions
    block: int = 512
    extents: int = 1

    @property
    def windows(self) -> tuple[int, int]:
        """Windows of plain text and windows with facts, in one step."""
        batch = self.tokens // self.context
        with_facts = round(batch * self.tasks)
        return batch - with_facts, with_facts


SEGMENTS: dict[str, tuple[Stage, ...]] = {
    "first": (
        Stage("dense", 335, 1024),
        Stage("distil", 50, 2048, distil=True, stretched=0.3),
    ),
    "second": (
        Stage("dense", 310, 4096, stretched=0.3),
        Stage("distil", 70, 2048, distil=True, stretched=0.3),
    ),
    "third": (Stage("sparse", 340, 8192, sparse=True, distil=True, stretched=0.3, extents=2),),
    "fourth": (Stage("dense", 140, 4096, distil=True, every=16, tasks=0.5, stretched=0.5),),
    "fifth": (
        Stage("sparse", 130, 16384, sparse=True, distil=True, every=16, tasks=0.5, stretched=0.5, extents=2),
        Stage("sparse", 50, 32768, sparse=True, distil=True, every=32, tasks=0.5, block=256, extents=2),
    ),
    "smoke": (
        Stage("dense", 6, 64, tokens=128, distil=True, every=2, stretched=0.5, block=32),
        Stage("sparse", 6, 512, tokens=1024, sparse=True, distil=True, every=4, tasks=0.5, block=64, extents=2),
    ),
}
"""Stages by segment."""

ROUNDS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("first", "second", "third"), 3e-3, 1e-4),
    (("fourth", "fifth"), 1.2e-3, 3e-5),
    (("smoke",), 3e-3, 1e-4),
)
"""Segments that share one fall of the learning rate, a cosine along their seconds, and where it begins and ends."""

WARMUP_STEPS = 200  # of a round
CLIP, WEIGHT_DECAY, BIAS_SPEED = 1.0, 0.05, 1e-3
LOSS_WEIGHTS = (1.0, 0.0, 5.0)
"""By role of the byte that is foretold (`long_tasks`): answers are rare; what nobody can foresee teaches nothing."""
COUNTED = (long_tasks.TEXT, long_tasks.ANSWER)
"""Roles whose bytes are counted in what is reported: the text alone, and the answers alone."""

STEPS_PER_CALL = 4


# The step


def optimiser() -> optax.GradientTransformation:
    """AdamW without its learning rate, which comes with each step; norms and vectors do not decay."""
    return optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=lambda tree: jax.tree.map(lambda a: a.ndim > 1, tree)),
    )


def sample_batch(key: jax.Array, text: jax.Array, header: dict, stage: Stage) -> jax.Array:
    """tokens i32[B, T + 1] of windows from anywhere in the training text."""
    batch = stage.windows[0]
    group_key, start_key = jax.random.split(key)
    groups = list(header["groups"].values())
    weights = jnp.log(jnp.asarray([g["weight"] for g in groups], jnp.float32))
    lows = jnp.asarray([g["start"] for g in groups], jnp.int32)
    rooms = jnp.asarray([g["stop"] - g["start"] - stage.context - 1 for g in groups], jnp.float32)
    group = jax.random.categorical(group_key, weights, shape=(batch,))
    start = lows[group] + (jax.random.uniform(start_key, (batch,)) * rooms[group]).astype(jnp.int32)
    return text[start[:, None] + jnp.arange(stage.context + 1)[None]].astype(jnp.int32)


def sample_positions(key: jax.Array, stage: Stage, config: DsaConfig) -> jax.Array:
    """i32[B, T]: counted from 0, or with one jump on the way.

    A jump shows distances that the context is too short for (PoSE, arXiv 2309.10400).
    """
    batch = sum(stage.windows)
    far_key, cut_key, gap_key = jax.random.split(key, 3)
    index = jnp.arange(stage.context)[None]
    cut = jax.random.randint(cut_key, (batch, 1), 1, stage.context)
    gap = jax.random.randint(gap_key, (batch, 1), 0, max(1, config.max_positions - stage.context))
    far = (jax.random.uniform(far_key, (batch, 1)) < stage.stretched) & (index >= cut)
    return jnp.where(far, index + gap, jnp.broadcast_to(index, far.shape))


def train_steps(carry, rates, text, facts, header, stage: Stage, config: DsaConfig, attention):
    """As many steps as there are learning rates f32[steps]; ((params, optimiser state, key), metrics).

    facts: windows with facts of each step, tokens and roles u8[steps, B, T + 1] (`long_tasks.practice`).
    """
    update = optimiser().update

    def loss_of(params, tokens, roles, positions, phase):
        weights = jnp.asarray(LOSS_WEIGHTS, jnp.float32)[roles[:, 1:]]
        result = expanded.forward(
            as_exported(params), tokens[:, :-1], positions, config,
            sparse=stage.sparse, distil=stage.distil, block=stage.block, extents=stage.extents,
            attention=attention, lesson=Lesson(stage.every, phase), weights=weights,
        )  # fmt: skip
        costs = judge.bits(result.logits, tokens[:, 1:])
        loss = (costs * weights).sum() / weights.sum() * math.log(2) + result.divergence.sum()
        is_text, is_answer = ((roles[:, 1:] == role).astype(jnp.float32) for role in COUNTED)
        is_right = (result.logits.argmax(axis=-1) == tokens[:, 1:]).astype(jnp.float32)
        found = {
            "bpb": (costs * is_text).sum() / is_text.sum(),
            "answer_bits": (costs * is_answer).sum() / jnp.maximum(is_answer.sum(), 1.0),
            "answer_right": (is_right * is_answer).sum() / jnp.maximum(is_answer.sum(), 1.0),
            "kl": result.divergence,
            "mass": result.mass,
            "load_max": result.expert_load.max(initial=0.0) * config.num_experts,
        }
        return loss, (found, result.expert_load)

    def one_step(carry, inputs):
        rate, with_facts, roles = inputs
        params, state, key = carry
        key, batch_key, position_key, phase_key = jax.random.split(key, 4)
        plain = sample_batch(batch_key, text, header, stage)
        tokens = jnp.concatenate([plain, with_facts.astype(jnp.int32)])
        roles = jnp.concatenate([jnp.zeros(plain.shape, jnp.int32), roles.astype(jnp.int32)])
        positions = sample_positions(position_key, stage, config)
        phase = jax.random.randint(phase_key, (), 0, stage.every)
        gradients, (found, load) = jax.grad(loss_of, has_aux=True)(params, tokens, roles, positions, phase)
        gradients, norm = clip_by_part(gradients)
        updates, state = update(gradients, state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        return (balance(params, load, config), state, key), found | {"norm": norm}

    carry, metrics = jax.lax.scan(one_step, carry, (rates, *facts))
    return carry, jax.tree.map(lambda a: a.mean(axis=0), metrics)


def clip_by_part(gradients: dsa.Params) -> tuple[dsa.Params, jax.Array]:
    """Clips the indexer's gradients and all others by their own norms, since they come from separate losses."""

    def is_indexer(path) -> bool:
        return any(getattr(entry, "key", None) == "indexer" for entry in path)

    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    norms = [optax.tree.norm([leaf for path, leaf in leaves if is_indexer(path) == part]) for part in (False, True)]
    scales = [jnp.minimum(1.0, CLIP / (norm + 1e-6)) for norm in norms]
    clipped = jax.tree_util.tree_map_with_path(lambda path, g: g * scales[int(is_indexer(path))], gradients)
    return clipped, norms[0]


def balance(params: dsa.Params, load: jax.Array, config: DsaConfig) -> dsa.Params:
    """Moves each expert's choice bias against its load (auxiliary-loss-free balancing, arXiv 2408.15664)."""
    layers, at = [], 0
    for layer, kind in zip(params["layers"], config.mlp_kinds, strict=True):
        if kind == MOE:
            step = BIAS_SPEED * jnp.sign(1 / config.num_experts - load[at])
            layer, at = layer | {"moe": layer["moe"] | {"bias": layer["moe"]["bias"] + step}}, at + 1
        layers.append(layer)
    return params | {"layers": tuple(layers)}


# A segment


def learning_rate(segment: str, done_s: float, step: int) -> float:
    """After so many seconds and steps of the segment's round."""
    members, peak, floor = next(one for one in ROUNDS if segment in one[0])
    total_s = sum(stage.seconds for member in members for stage in SEGMENTS[member])
    share = min(max(done_s / total_s, 0.0), 1.0)
    return (floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * share))) * min(1.0, (step + 1) / WARMUP_STEPS)


def run_segment(args, config: DsaConfig) -> None:
    header, raw = corpora.load(args.corpus)
    text = jnp.asarray(np.frombuffer(raw, np.uint8))
    params, second, progress = restore(args.from_, config)
    if "round_began" not in progress or any(args.segment == members[0] for members, *_ in ROUNDS):
        progress["round_began"] = {"seconds": progress["seconds"], "steps": progress["steps"]}
    state: Any = optimiser().init(params)
    count = jnp.asarray(progress["steps"], jnp.int32)
    state = (state[0]._replace(count=count, nu=state[0].nu if second is None else second), *state[1:])
    carry = (params, state, jax.random.key(progress["steps"] + 1))
    attention = fast_attention.best(config)
    deadline = time.monotonic() + args.limit_s

    stages = [dataclasses.replace(s, seconds=s.seconds * args.time_scale) for s in SEGMENTS[args.segment]]
    with concurrent.futures.ThreadPoolExecutor(1) as compiler:
        # The next stage is compiled while one trains.
        programs = [compiler.submit(compile_stage, carry, text, header, s, config, attention) for s in stages]
        for stage, program in zip(stages, programs, strict=True):
            carry = run_stage(carry, text, header, raw, stage, program.result(), progress, deadline, args)
            save(args.out, carry[0], carry[1][0].nu, progress)
    if args.sample:
        exported = as_exported(carry[0])
        document = next(d for d in header["held_out"] if d["name"] == "library/graphlib")
        print(judge.continuation(exported, raw[document["start"] : document["stop"]], config), flush=True)


def compile_stage(carry, text, header, stage: Stage, config: DsaConfig, attention):
    """The program of STEPS_PER_CALL steps of a stage; its first argument is donated."""
    began = time.monotonic()
    step = jax.jit(
        lambda carry, rates, text, facts: train_steps(carry, rates, text, facts, header, stage, config, attention),
        donate_argnums=0,
    )
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (carry, text))
    window = jax.ShapeDtypeStruct((STEPS_PER_CALL, stage.windows[1], stage.context + 1), jnp.uint8)
    rates = jax.ShapeDtypeStruct((STEPS_PER_CALL,), jnp.float32)
    program = step.lower(shapes[0], rates, shapes[1], (window, window)).compile()
    memory = program.memory_analysis()
    print(
        f"compiled {stage.name} {stage.context} in {time.monotonic() - began:.0f} s; "
        f"{(getattr(memory, 'temp_size_in_bytes', 0)) / 1e9:.1f} GB of temporaries", flush=True,
    )  # fmt: skip
    return program


def draw_facts(stage: Stage, header: dict, raw: bytes, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Windows with facts for STEPS_PER_CALL steps, their haystacks from the groups as often as plain windows."""
    groups = list(header["groups"].values())
    shares = np.array([group["weight"] for group in groups])
    shape = (STEPS_PER_CALL, stage.windows[1], stage.context + 1)
    tokens, roles = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    for step, window in np.ndindex(shape[:2]):
        group = groups[rng.choice(len(groups), p=shares / shares.sum())]
        start = int(rng.integers(group["start"], max(group["start"] + 1, group["stop"] - shape[2])))
        text = raw[start : min(start + shape[2], group["stop"])]
        tokens[step, window], roles[step, window] = long_tasks.practice(shape[2], text, rng)
    return tokens, roles


SAVED_EVERY_S = 60.0


def run_stage(carry, text, header, raw, stage: Stage, program, progress, deadline: float, args):
    """Trains for the stage's seconds; a row for about every eight, a checkpoint for about every sixty."""
    rng = np.random.default_rng(progress["steps"])
    began_at = progress["round_began"]

    def rate(step: int) -> float:
        return learning_rate(args.segment, progress["seconds"] - began_at["seconds"], step - began_at["steps"])

    def chunk(carry, calls):
        began, found = time.monotonic(), []
        for _ in range(calls):
            rates = [rate(progress["steps"] + i) for i in range(STEPS_PER_CALL)]
            facts = draw_facts(stage, header, raw, rng)
            carry, metrics = program(carry, jnp.asarray(rates, jnp.float32), text, jax.tree.map(jnp.asarray, facts))
            found.append(metrics)
            progress["steps"] += STEPS_PER_CALL
            progress["bytes"] += STEPS_PER_CALL * stage.tokens
        metrics = jax.tree.map(lambda *a: np.mean([np.asarray(v) for v in a], axis=0), *found)
        elapsed = time.monotonic() - began
        progress["seconds"] += elapsed
        return carry, metrics, elapsed

    began = saved = time.monotonic()
    spent, calls = 0.0, 1
    while spent == 0 or (spent < stage.seconds and time.monotonic() < deadline):
        carry, metrics, elapsed = chunk(carry, calls)
        spent += elapsed
        found = {
            "stage": stage.name,
            "context": stage.context,
            "gradient_norm": round(float(metrics["norm"]), 4),
            "load_max": round(float(metrics["load_max"]), 3),
            "learning_rate": round(rate(progress["steps"]), 6),
            "bytes_per_s": round(calls * STEPS_PER_CALL * stage.tokens / elapsed),
        }
        if stage.tasks:
            found |= {name: round(float(metrics[name]), 4) for name in ("answer_bits", "answer_right")}
        if stage.distil:
            found |= {name: [round(float(v), 4) for v in metrics[name]] for name in ("kl", "mass")}
        write_row(args, "training bits per byte", round(float(metrics["bpb"]), 4), found, progress)
        calls = max(1, round(calls * min(8.0, stage.seconds / 4) / elapsed))
        if time.monotonic() - saved > SAVED_EVERY_S:
            save(args.out, carry[0], carry[1][0].nu, progress)
            saved = time.monotonic()
    print(
        f"{stage.name} {stage.context}: {spent:.0f} s of training in {time.monotonic() - began:.0f} s", flush=True
    )  # fmt: skip
    return carry


def write_row(args, name: str, bpb: float, found: dict[str, Any], progress: dict) -> None:
    """Appends a row of the form of bench/harness.py, and prints it short."""
    counters = {"step": progress["steps"], "bytes_seen": progress["bytes"], "seconds": round(progress["seconds"], 1)}
    row = {
        "name": f"echo-tiny: {name}",
        "value": bpb,
        "unit": "bits/byte",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": args.machine,
        "versions": {"jax": jax.__version__, "optax": optax.__version__},
        "shapes": {"segment": args.segment} | counters | found,
        "command": f"python examples/train_small_dsa.py --segment {args.segment}",
    }
    path = pathlib.Path(args.rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{name} {bpb:.4f} at step {counters['step']}, {counters['bytes_seen'] / 1e6:.0f} MB: {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train echo-tiny, one segment a run")
    parser.add_argument("--segment", choices=sorted(SEGMENTS), help="the segment to train")
    parser.add_argument("--corpus", default="out/corpus.xz", help="packed corpus of corpus.py")
    parser.add_argument(
        "--from",
        dest="from_",
        help="checkpoint folder to go on from, or a Hugging Face folder whose weights to start from",
    )
    parser.add_argument("--out", default="out/train", help="checkpoint folder to write")
    parser.add_argument("--rows", default="out/train/training.jsonl", help="rows of losses, appended to")
    parser.add_argument("--machine", default="unknown", help="the machine's name in the rows")
    parser.add_argument("--limit-s", type=float, default=480, help="no training starts after this many seconds")
    parser.add_argument("--time-scale", type=float, default=1.0, help="stretches every stage")
    parser.add_argument("--sample", action="store_true", help="print continuations at the end")
    parser.add_argument("--export", help="write the Hugging Face folder here instead of training")
    args = parser.parse_args()
    if args.export:
        export(restore(args.from_, ECHO_TINY)[0], args.export, ECHO_TINY)
    elif args.segment:
        run_segment(args, ECHO_TINY)
    else:
        parser.error("say --segment to train or --export to write the model")


if __name__ == "__main__":
    main()
