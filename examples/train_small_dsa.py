"""Trains echo-tiny, a byte-level DSA model, as DSA was trained: dense, then an indexer distilled, then sparse.

Knows the schedule, the optimiser, the checkpoint of an interrupted run and how the weights leave as a Hugging Face
folder. The maths is `echo_jax.models`, the text `corpus.py`, the verdict `evaluate_small_dsa.py`. One segment is one
process of bounded time; segments follow each other through the checkpoint folder:

    python examples/corpus.py --out out/corpus.xz
    for s in first second third; do
        python examples/train_small_dsa.py --segment $s --from out/train --out out/train --corpus out/corpus.xz
    done
    python examples/train_small_dsa.py --export echo_jax/data/echo-tiny --from out/train

A checkpoint holds the f32 weights and the second moments in bf16, in files below 16 MiB. First moments start again from
zero with each segment: their memory is ten steps long.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import pathlib
import time
from typing import Any

import corpus as corpora
import evaluate_small_dsa as judge
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

from echo_jax.checkpoints.safetensors import load_folder, save_folder
from echo_jax.models import dsa, expanded
from echo_jax.models.config import DENSE, FULL, MOE, DsaConfig, RopeConfig

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
    stretched: float = 0.0  # share of sequences whose second part is moved away, to positions up to max_positions
    block: int = 512
    extents: int = 1


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
    "smoke": (
        Stage("dense", 6, 64, tokens=128),
        Stage("distil", 6, 64, tokens=128, distil=True, stretched=0.5, block=32, extents=2),
        Stage("sparse", 6, 128, tokens=128, sparse=True, distil=True, block=32, extents=2),
    ),
}
"""Stages by segment. The learning rate falls along the seconds of all segments but the smoke test."""

PEAK, FLOOR, WARMUP_STEPS = 3e-3, 1e-4, 300
CLIP, WEIGHT_DECAY, BIAS_SPEED = 1.0, 0.05, 1e-3
STEPS_PER_CALL = 4
FILE_BYTES = 15 << 20  # of one checkpoint file at most


# The step


def optimiser() -> optax.GradientTransformation:
    """AdamW without its learning rate, which comes with each step; norms and vectors do not decay."""
    return optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=lambda tree: jax.tree.map(lambda a: a.ndim > 1, tree)),
    )


def init(key: jax.Array, config: DsaConfig) -> dsa.Params:
    """f32 weights; what writes into the residual stream starts smaller by the square root of twice the depth."""
    params = dsa.init_params(key, config)
    shrink = (2 * config.num_layers) ** -0.5

    def scaled(path, leaf):
        return leaf * shrink if getattr(path[-1], "key", "") in ("o", "down") else leaf

    return jax.tree_util.tree_map_with_path(scaled, params)


def as_exported(params: dsa.Params) -> dsa.Params:
    """The weights as the folder will hold them: bf16, the choice bias f32."""

    def cast(path, leaf):
        return leaf if getattr(path[-1], "key", "") == "bias" else leaf.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(cast, params)


def sample_batch(key: jax.Array, text: jax.Array, header: dict, stage: Stage, config: DsaConfig):
    """tokens i32[B, T + 1] from anywhere in the training text, positions i32[B, T]."""
    batch = stage.tokens // stage.context
    group_key, start_key, far_key, cut_key, gap_key = jax.random.split(key, 5)
    groups = list(header["groups"].values())
    weights = jnp.log(jnp.asarray([g["weight"] for g in groups], jnp.float32))
    lows = jnp.asarray([g["start"] for g in groups], jnp.int32)
    rooms = jnp.asarray([g["stop"] - g["start"] - stage.context - 1 for g in groups], jnp.float32)
    group = jax.random.categorical(group_key, weights, shape=(batch,))
    start = lows[group] + (jax.random.uniform(start_key, (batch,)) * rooms[group]).astype(jnp.int32)
    tokens = text[start[:, None] + jnp.arange(stage.context + 1)[None]].astype(jnp.int32)

    # A jump in the positions shows distances that the context is too short for (PoSE, arXiv 2309.10400).
    index = jnp.arange(stage.context)[None]
    cut = jax.random.randint(cut_key, (batch, 1), 1, stage.context)
    gap = jax.random.randint(gap_key, (batch, 1), 0, max(1, config.max_positions - stage.context))
    far = (jax.random.uniform(far_key, (batch, 1)) < stage.stretched) & (index >= cut)
    positions = jnp.where(far, index + gap, jnp.broadcast_to(index, far.shape))
    return tokens, positions


def train_steps(carry, rates, text, header, stage: Stage, config: DsaConfig, dense_attention):
    """As many steps as there are learning rates f32[steps]; ((params, optimiser state, key), metrics)."""
    update = optimiser().update

    def loss_of(params, tokens, positions):
        result = expanded.forward(
            as_exported(params), tokens[:, :-1], positions, config,
            sparse=stage.sparse, distil=stage.distil, block=stage.block, extents=stage.extents,
            dense_attention=dense_attention,
        )  # fmt: skip
        bpb = judge.bits(result.logits, tokens[:, 1:]).mean()
        return bpb * math.log(2) + result.divergence.sum(), (bpb, result)

    def one_step(carry, rate):
        params, state, key = carry
        key, batch_key = jax.random.split(key)
        tokens, positions = sample_batch(batch_key, text, header, stage, config)
        gradients, (bpb, result) = jax.grad(loss_of, has_aux=True)(params, tokens, positions)
        gradients, norm = clip_by_part(gradients)
        updates, state = update(gradients, state, params)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        params = balance(params, result.expert_load, config)
        metrics = {"bpb": bpb, "kl": result.divergence, "mass": result.mass, "norm": norm,
                   "load_max": result.expert_load.max() * config.num_experts}  # fmt: skip
        return (params, state, key), metrics

    carry, metrics = jax.lax.scan(one_step, carry, rates)
    return carry, jax.tree.map(lambda a: a.mean(axis=0), metrics)


def clip_by_part(gradients: dsa.Params) -> tuple[dsa.Params, jax.Array]:
    """Clips the indexer's gradients and all others by their own norms, since they come from separate losses."""

    def is_indexer(path) -> bool:
        return any(getattr(entry, "key", None) == "indexer" for entry in path)

    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    norms = [optax.global_norm([leaf for path, leaf in leaves if is_indexer(path) == part]) for part in (False, True)]
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


def flash(query: jax.Array, key: jax.Array, value: jax.Array, scale: float) -> jax.Array:
    """cuDNN's causal attention; it wants values as wide as keys."""
    width = value.shape[-1]
    value = jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, key.shape[-1] - width)))
    out = jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True, implementation="cudnn")
    return out[..., :width]


def fast_attention(config: DsaConfig):
    """`flash` where it runs and agrees with the textbook form, else None; prints which and why."""
    if jax.default_backend() != "gpu":
        return None
    try:
        keys = jax.random.split(jax.random.key(1), 3)
        widths = (config.qk_nope_head_dim + config.qk_rope_head_dim,) * 2 + (config.v_head_dim,)
        arrays = [
            jax.random.normal(k, (2, 1024, config.num_heads, w), jnp.bfloat16)
            for k, w in zip(keys, widths, strict=True)
        ]

        def in_blocks(query, key, value, scale):
            return expanded.causal_attention(
                query, key, value, None, config, sparse=False, distil=False, block=512, extents=1
            )[0]

        def gradients(attention: expanded.DenseAttention):
            def loss(query, key, value):
                return (attention(query, key, value, config.attention_scale).astype(jnp.float32) ** 2).sum()

            return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)

        ours, theirs = gradients(in_blocks), gradients(flash)
        worst = max(
            float(jnp.abs(a - b).astype(jnp.float32).max() / jnp.abs(a).astype(jnp.float32).max())
            for a, b in zip(ours, theirs, strict=True)
        )
        print(f"cuDNN attention: gradients differ by {worst:.4f} of the largest", flush=True)
        return flash if worst < 0.05 else None
    except Exception as error:  # whatever a missing or unwilling library raises: the blocks still train
        print(f"cuDNN attention does not run here ({str(error)[:300]}); attention in blocks instead", flush=True)
        return None


# A segment


def learning_rate(done_s: float, total_s: float) -> float:
    share = min(max(done_s / total_s, 0.0), 1.0)
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * share))


def run_segment(args, config: DsaConfig) -> None:
    header, raw = corpora.load(args.corpus)
    text = jnp.asarray(np.frombuffer(raw, np.uint8))
    params, second, progress = restore(args.from_, config)
    state: Any = optimiser().init(params)
    count = jnp.asarray(progress["steps"], jnp.int32)
    state = (state[0]._replace(count=count, nu=state[0].nu if second is None else second), *state[1:])
    carry = (params, state, jax.random.key(progress["steps"] + 1))
    attention = fast_attention(config)
    total_s = sum(s.seconds for name in SEGMENTS for s in SEGMENTS[name] if name != "smoke")
    deadline = time.monotonic() + args.limit_s

    for stage in SEGMENTS[args.segment]:
        stage = dataclasses.replace(stage, seconds=stage.seconds * args.time_scale)
        carry = run_stage(carry, text, header, stage, config, attention, progress, total_s, deadline, args)
        save(args.out, carry[0], carry[1][0].nu, progress)
    exported = as_exported(carry[0])
    for found in judge.evaluate(exported, header, raw, config, args.evaluate):
        write_row(args, "held-out bits per byte", found.pop("bpb"), found, progress)
    if args.sample:
        document = next(d for d in header["held_out"] if d["name"] == "library/graphlib")
        print(judge.continuation(exported, raw[document["start"] : document["stop"]], config), flush=True)


def run_stage(carry, text, header, stage, config, attention, progress, total_s, deadline, args):
    """Trains for the stage's seconds; a row for about every eight. One program of STEPS_PER_CALL steps is compiled."""
    step = jax.jit(
        lambda carry, rates, text: train_steps(carry, rates, text, header, stage, config, attention),
        donate_argnums=0,
    )

    def chunk(carry, calls):
        began, found = time.monotonic(), []
        rate = learning_rate(progress["seconds"], total_s)
        for _ in range(calls):
            rates = [rate * min(1.0, (progress["steps"] + i + 1) / WARMUP_STEPS) for i in range(STEPS_PER_CALL)]
            carry, metrics = step(carry, jnp.asarray(rates, jnp.float32), text)
            found.append(metrics)
            progress["steps"] += STEPS_PER_CALL
            progress["bytes"] += STEPS_PER_CALL * stage.tokens
        metrics = jax.tree.map(lambda *a: np.mean([np.asarray(v) for v in a], axis=0), *found)
        return carry, metrics, time.monotonic() - began

    began = time.monotonic()
    carry, _, compile_s = chunk(carry, 1)
    carry, _, elapsed = chunk(carry, 1)
    calls = max(1, round(min(8.0, stage.seconds / 4) / elapsed))
    spent = elapsed
    while spent < stage.seconds and time.monotonic() < deadline:
        carry, metrics, elapsed = chunk(carry, calls)
        progress["seconds"] += elapsed
        spent += elapsed
        found = {
            "stage": stage.name,
            "context": stage.context,
            "gradient_norm": round(float(metrics["norm"]), 4),
            "load_max": round(float(metrics["load_max"]), 3),
            "learning_rate": round(learning_rate(progress["seconds"], total_s), 6),
            "bytes_per_s": round(calls * STEPS_PER_CALL * stage.tokens / elapsed),
        }
        if stage.distil:
            found |= {name: [round(float(v), 4) for v in metrics[name]] for name in ("kl", "mass")}
        write_row(args, "training bits per byte", round(float(metrics["bpb"]), 4), found, progress)
    print(
        f"{stage.name} {stage.context}: {spent:.0f} s of training in {time.monotonic() - began:.0f} s; first "
        f"call, compiled: {compile_s:.0f} s", flush=True,
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


# Checkpoints and the exported folder


def named_leaves(tree) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(getattr(e, "key", getattr(e, "idx", ""))) for e in path): leaf for path, leaf in leaves}


def save(folder: str, params, second, progress: dict) -> None:
    """Weights f32, second moments bf16, in files below FILE_BYTES, and the counters that a next segment starts from."""
    root = pathlib.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    named = {f"params/{k}": np.asarray(v) for k, v in named_leaves(params).items()}
    named |= {f"second/{k}": np.asarray(v.astype(jnp.bfloat16)) for k, v in named_leaves(second).items()}
    files: list[dict[str, np.ndarray]] = [{}]
    for name, array in named.items():
        if sum(a.nbytes for a in files[-1].values()) + array.nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = array
    for old in root.glob("checkpoint-*.safetensors"):
        old.unlink()
    for i, content in enumerate(files):
        save_file(content, root / f"checkpoint-{i}.safetensors")
    (root / "progress.json").write_text(json.dumps(progress))


def restore(folder: str | None, config: DsaConfig):
    """(params, second moments or None, progress) of a checkpoint folder, or a fresh start where it holds none.

    A Hugging Face folder gives its weights, rounded as they were when they left; the optimiser and all counters start
    again.
    """
    fresh = init(jax.random.key(0), config)
    root = pathlib.Path(folder) if folder else None
    if root is not None and (root / "config.json").exists():
        _, params = load_folder(root)
        if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, fresh):
            raise ValueError(f"the weights in {root} have other shapes than ECHO_TINY; change one of the two")
        print(f"starts from the weights in {root}", flush=True)
        params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
        return params, None, {"steps": 0, "bytes": 0, "seconds": 0.0}
    if root is None or not (root / "progress.json").exists():
        count = sum(a.size for a in jax.tree.leaves(fresh))
        print(f"fresh start: {count} parameters, {2 * count / 1e6:.2f} MB in bf16", flush=True)
        return fresh, None, {"steps": 0, "bytes": 0, "seconds": 0.0}
    stored: dict[str, np.ndarray] = {}
    for path in sorted(root.glob("checkpoint-*.safetensors")):
        stored |= load_file(path)
    structure = jax.tree.structure(fresh)

    def tree(part: str):
        leaves = [jnp.asarray(stored[f"{part}/{k}"]).astype(jnp.float32) for k in named_leaves(fresh)]
        return jax.tree.unflatten(structure, leaves)

    progress = json.loads((root / "progress.json").read_text())
    print(f"goes on from {progress}", flush=True)
    return tree("params"), tree("second"), progress


def export(params: dsa.Params, folder: str, config: DsaConfig) -> None:
    """The Hugging Face folder, weights in bf16; a model card that is already there stays."""
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    save_folder(folder, as_exported(params), config, extra_config=tokens, overwrite=True)
    root = pathlib.Path(folder)
    for name, content in (
        ("tokenizer_config.json", {"tokenizer_class": "ByteTokenizer"}),
        ("generation_config.json", tokens | {"do_sample": True, "temperature": 0.7, "top_p": 0.95}),
    ):
        (root / name).write_text(json.dumps(content, indent=1) + "\n")
    print(f"{root}: {sum(file.stat().st_size for file in root.glob('*.safetensors'))} bytes of weights")


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
    parser.add_argument("--evaluate", type=int, nargs="*", default=[2048, 8192], help="contexts to judge at")
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
