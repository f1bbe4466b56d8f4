"""Judges a byte-level DSA model: held-out text by position, dense and sparse; retrieval tasks by length; rows of both.

Knows how text is cut and averaged, and which number answers which claim. The forward pass is the expanded form of
`echo_jax.models`, so no cache takes part; the tasks are `long_tasks.py`.

    python examples/evaluate_small_dsa.py --corpus out/corpus.xz --contexts 2048 --windows 4          # a look, on a CPU
    python examples/evaluate_small_dsa.py --corpus out/corpus.xz --contexts 8192 32768 \\
        --lengths 1024 4096 8192 16384 32768 --record echo_tiny.jsonl                                  # all of it
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import corpus as corpora
import fast_attention
import jax
import jax.numpy as jnp
import long_tasks
import numpy as np

from echo_jax.checkpoints.safetensors import load_folder
from echo_jax.models import dsa, expanded
from echo_jax.models.config import DsaConfig
from echo_jax.models.selection import Lesson

BUCKETS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
"""Edges of the ranges of positions that are averaged apart."""

FORMS = ("dense", "sparse")

TOKENS_AT_ONCE = 131072
"""In one forward pass; the masks of a sparse one take this times the context, in bytes, thrice."""

TEXT_AT_MOST = 1 << 18
"""Bytes of held-out text judged in one group, so that a long context costs no more windows than it must."""


class Verdict(NamedTuple):
    """Of one form on B windows of T + 1 bytes."""

    costs: jax.Array  # f32[B, T]  bits of each byte
    is_right: jax.Array  # bool[B, T]  whether it was the most likely one
    divergence: jax.Array  # f32[L]  of dense attention from the index scores, in nats
    mass: jax.Array  # f32[L]  share of dense attention inside the selected set


Judge = Callable[[dsa.Params, jax.Array], dict[str, Verdict]]


def bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Bits each target byte costs, f32[B, T]; logits f32[B, T, V], targets i32[B, T]."""
    hit = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)  # a product has no scatter in its gradient
    return (jax.nn.logsumexp(logits, axis=-1) - (logits * hit).sum(axis=-1)) * (1 / math.log(2))


def batch_of(context: int) -> int:
    """Windows judged at once."""
    return max(1, min(64, TOKENS_AT_ONCE // context))


def judge_of(params: dsa.Params, config: DsaConfig, context: int, attention: expanded.Attention, batch: int) -> Judge:
    """The compiled program for windows i32[batch, context + 1]; by form. Divergence and mass on every 16th query."""

    def judge(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(context)[None], (batch, context))
        found = {}
        for form in FORMS:
            result = expanded.forward(
                params, tokens[:, :-1], positions, config, sparse=form == "sparse", distil=form == "dense",
                block=256, extents=max(1, min(4, context // 2048)), attention=attention,
                lesson=Lesson(min(16, context // 64), 0),
            )  # fmt: skip
            is_right = result.logits.argmax(axis=-1) == tokens[:, 1:]
            found[form] = Verdict(bits(result.logits, tokens[:, 1:]), is_right, result.divergence, result.mass)
        return found

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    return jax.jit(judge).lower(shapes, jax.ShapeDtypeStruct((batch, context + 1), jnp.int32)).compile()


def windows_of(text: bytes, context: int, at_most: int, batch: int) -> np.ndarray:
    """i32[W, context + 1]: the text cut into windows that share one byte with the next; W a multiple of batch."""
    # A zero byte stands before every document, so one stands before the first.
    array = np.frombuffer(b"\0" + text[:TEXT_AT_MOST], np.uint8).astype(np.int32)
    count = max(0, min(at_most, (len(array) - 1) // context)) // batch * batch
    cut = [array[i * context : (i + 1) * context + 1] for i in range(count)]
    return np.stack(cut) if cut else np.zeros((0, context + 1), np.int32)


def documents(
    params: dsa.Params, header: dict, raw: bytes, context: int, at_most: int, judge: Judge, batch: int
) -> Iterator[dict[str, Any]]:
    """One dict per group and form, on at most so many windows and TEXT_AT_MOST bytes of held-out text.

    bpb, bpb_by_position; by layer kl (of dense attention from index scores, in nats) and mass (share of it inside the
    selected set). Windows follow each other in the concatenated documents, so one can begin inside a document.
    """
    for group in header["groups"]:
        cut = windows_of(corpora.held_out_text(header, raw, group), context, at_most, batch)
        if not len(cut):
            continue
        parts = [judge(params, jnp.asarray(cut[i : i + batch])) for i in range(0, len(cut), batch)]
        for form in FORMS:
            costs = np.concatenate([np.asarray(part[form].costs) for part in parts])
            found = {
                "group": group, "form": form, "context": context, "windows": len(cut),
                "bpb": round(float(costs.mean()), 4),
                "bpb_by_position": {
                    f"{low}-{high}": round(float(costs[:, low:high].mean()), 4)
                    for low, high in zip(BUCKETS, BUCKETS[1:], strict=False)
                    if low < context
                },
            }  # fmt: skip
            if form == "dense":
                for name, place in (("kl", 2), ("mass", 3)):
                    by_layer = np.mean([np.asarray(part[form][place]) for part in parts], axis=0)
                    found[name] = [round(float(value), 4) for value in by_layer]
            yield found


def retrieval(
    params: dsa.Params, text: bytes, task: str, length: int, count: int, judge: Judge, batch: int, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """One dict per form: the share of `count` windows of a task whose whole answer is given, and of its bytes."""
    tokens, is_answer = long_tasks.examples(task, length + 1, text, -(-count // batch) * batch, seed)
    parts = [judge(params, jnp.asarray(tokens[i : i + batch], jnp.int32)) for i in range(0, len(tokens), batch)]
    asked = is_answer[:count, 1:]
    for form in FORMS:
        is_right = np.concatenate([np.asarray(part[form].is_right) for part in parts])[:count]
        yield {
            "task": task, "form": form, "length": length, "count": count,
            "accuracy": round(float((is_right | ~asked).all(axis=1).mean()), 4),
            "bytes_right": round(float(is_right[asked].mean()), 4),
        }  # fmt: skip


def continuation(params: dsa.Params, text: bytes, config: DsaConfig, prompt: int = 1500, new: int = 500) -> str:
    """A greedy and a sampled continuation of the text's first bytes; everything is recomputed for each byte."""
    length = prompt + new
    length += -length % 256
    tokens = np.zeros((2, length), np.int32)
    tokens[:, :prompt] = np.frombuffer(text[:prompt], np.uint8)

    def one(i, carry):
        tokens, key = carry
        positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
        logits = expanded.forward(params, tokens, positions, config, sparse=True, distil=False, block=256).logits
        row = logits[:, prompt + i - 1]
        key, use = jax.random.split(key)
        chosen = jnp.stack([row[0].argmax(), jax.random.categorical(use, row[1] / 0.7)])
        return tokens.at[:, prompt + i].set(chosen.astype(jnp.int32)), key

    tokens, _ = jax.jit(lambda t: jax.lax.fori_loop(0, new, one, (t, jax.random.key(0))))(jnp.asarray(tokens))
    shown = [bytes(row[prompt - 200 : prompt + new].astype(np.uint8)).decode(errors="replace") for row in tokens]
    return "\n".join(f"=== {name}\n{text}" for name, text in zip(("greedy", "temperature 0.7"), shown, strict=True))


CLAIMS = {
    ("passkey", 8192): "F.passkey_8k", ("passkey", 16384): "F.passkey_16k", ("kv", 4096): "F.kv_4k",
    ("vt", 4096): "F.vt_4k", ("multikey", 8192): "F.multikey_8k",
}  # fmt: skip
CLAIMED_CONTEXT = 8192


class Rows:
    """Prints what is found, keeps it for the claims that need several numbers, and records it where a file is named."""

    def __init__(self, file: str | None, model: str):
        self.file, self.model = file, model
        self.found: list[dict[str, Any]] = []

    def add(self, name: str, value: float, unit: str, shapes: dict[str, Any], claim: str | None = None) -> None:
        shown = " ".join(f"{key}={item}" for key, item in shapes.items())
        print(f"{claim or name:34} {value:8.4f} {unit}  {shown}", flush=True)
        self.found.append({"name": name, "value": value, **shapes})
        if self.file:
            root = str(pathlib.Path(__file__).resolve().parent.parent)
            if root not in sys.path:
                sys.path.append(root)
            from bench import harness

            command = " ".join(["python examples/evaluate_small_dsa.py", *sys.argv[1:]])
            harness.record(claim, name=name, value=value, unit=unit, file=self.file, shapes=shapes, command=command)

    def add_documents(self, found: dict[str, Any]) -> None:
        self.add("echo-tiny: held-out bits per byte", found.pop("bpb"), "bits/byte", found)

    def add_task(self, found: dict[str, Any]) -> None:
        claim = CLAIMS.get((found["task"], found["length"])) if found["form"] == "sparse" else None
        name = f"echo-tiny: {found['task']}, whole answers right"
        self.add(name, found.pop("accuracy"), "share", found, claim)

    def conclude(self) -> None:
        """The claims about text, from the windows of CLAIMED_CONTEXT bytes; nothing where there were none."""
        judged = [row for row in self.found if row.get("context") == CLAIMED_CONTEXT]
        shapes = {"context": CLAIMED_CONTEXT, "groups": sorted({row["group"] for row in judged})}
        if judged:
            means = [statistics.fmean(r["value"] for r in judged if r["form"] == form) for form in FORMS]
            ratio = round(means[1] / means[0], 5)
            self.add("echo-tiny: sparse over dense", ratio, "ratio", shapes, "F.bpb_sparse_over_dense")
            mass = [share for row in judged if row["form"] == "dense" for share in row["mass"]]
            over = shapes | {"over": "layers and groups"}
            self.add("echo-tiny: mass", round(statistics.median(mass), 4), "share", over, "F.mass_median")
        for row in judged:
            if (row["group"], row["form"]) == ("python-docs", "sparse"):
                self.add("echo-tiny: documentation", row["value"], "bits/byte", row | {"value": None}, "F.bpb_docs")


def everything(args, rows: Rows) -> None:
    """Documents and tasks, the claimed context first, then the short ones; programs are compiled side by side."""
    began = time.monotonic()
    # On a GPU with the weights as they are stored, since its attention is made for those; else in f32.
    config, params = load_folder(args.model, dtype=None if jax.default_backend() == "gpu" else "float32")
    size = sum(path.stat().st_size for path in pathlib.Path(args.model).glob("*.safetensors"))
    rows.add("echo-tiny: weights", round(size / 1e6, 3), "MB", {"bytes": size}, "F.size_mb")
    header, raw = corpora.load(args.corpus)
    attention = fast_attention.best(config, backwards=False)
    contexts = sorted({*args.contexts, *args.lengths}, key=lambda context: (context != CLAIMED_CONTEXT, context))
    batches = {c: min(args.batch or batch_of(c), args.windows if c in args.contexts else args.count) for c in contexts}

    def is_late() -> bool:
        return time.monotonic() - began > args.limit_s

    with concurrent.futures.ThreadPoolExecutor(max(1, len(contexts))) as compiler:
        judges = {c: compiler.submit(judge_of, params, config, c, attention, batches[c]) for c in contexts}
        for context in contexts:
            judge, batch = judges[context].result(), batches[context]
            print(f"--- {context}: {time.monotonic() - began:.0f} s since the start", flush=True)
            if context in args.contexts and not is_late():
                for found in documents(params, header, raw, context, args.windows, judge, batch):
                    rows.add_documents(found)
                if context == CLAIMED_CONTEXT:
                    rows.conclude()
            text = corpora.held_out_text(header, raw)
            for task in long_tasks.TASKS if context in args.lengths else ():
                if is_late():
                    print(f"no time for {task} at {context}", flush=True)
                    continue
                for found in retrieval(params, text, task, context, args.count, judge, batch):
                    rows.add_task(found)
    print(f"--- {time.monotonic() - began:.0f} s in all", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out text and retrieval tasks of a byte-level DSA model")
    parser.add_argument("--model", default="echo_jax/data/echo-tiny", help="Hugging Face folder")
    parser.add_argument("--corpus", default="out/corpus.xz", help="packed corpus of corpus.py")
    parser.add_argument("--contexts", type=int, nargs="*", default=[], help="windows of text, multiples of 1024")
    parser.add_argument("--windows", type=int, default=24, help="windows of each group at most")
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="windows of tasks, multiples of 1024")
    parser.add_argument("--count", type=int, default=64, help="windows of each task and length")
    parser.add_argument("--batch", type=int, help="windows at once, in place of what an H200 holds")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="nothing is begun after so many seconds")
    parser.add_argument("--record", metavar="FILE", help="write rows to this file of bench/results (or ECHO_RESULTS)")
    args = parser.parse_args()
    everything(args, Rows(args.record, args.model))


if __name__ == "__main__":
    main()
