"""Judges a byte-level DSA model on held-out documents: bits per byte by position, dense and sparse, and a look at text.

Knows how text is cut and averaged; the forward pass is the expanded form of `echo_jax.models`, so no cache takes part.

    python examples/evaluate_small_dsa.py --model echo_jax/data/echo-tiny --corpus out/corpus.xz --contexts 2048
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

import corpus as corpora
import jax
import jax.numpy as jnp
import numpy as np
import optax

from echo_jax.checkpoints.safetensors import load_folder
from echo_jax.models import dsa, expanded
from echo_jax.models.config import DsaConfig

BUCKETS = (0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
"""Edges of the ranges of positions that are averaged apart."""


def bits(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Bits each target byte costs, f32[B, T]; logits f32[B, T, 256], targets i32[B, T]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets) * (1 / math.log(2))


def held_out_text(header: dict, raw: bytes, group: str) -> bytes:
    """The held-out documents of a group one after another, a zero byte after each."""
    return b"".join(raw[d["start"] : d["stop"] + 1] for d in header["held_out"] if d["group"] == group)


def windows_of(text: bytes, context: int, at_most: int, batch: int) -> np.ndarray:
    """i32[W, context + 1]: the text cut into windows that share one byte with the next; W a multiple of batch."""
    # A zero byte stands before every document, so one stands before the first.
    array = np.frombuffer(b"\0" + text, np.uint8).astype(np.int32)
    count = max(0, min(at_most, (len(array) - 1) // context)) // batch * batch
    cut = [array[i * context : (i + 1) * context + 1] for i in range(count)]
    return np.stack(cut) if cut else np.zeros((0, context + 1), np.int32)


def evaluate(
    params: dsa.Params,
    header: dict,
    raw: bytes,
    config: DsaConfig,
    contexts: list[int],
    at_most: int = 24,
    batch: int = 4,
) -> Iterator[dict[str, Any]]:
    """One dict per context, group and form ("dense", "sparse") on at most so many windows.

    bpb, bpb_by_position; by layer kl (of attention from index scores, in nats) and mass (share of attention inside the
    selected set). Windows follow each other in the concatenated documents, so one can begin inside a document.
    """

    @jax.jit
    def measure(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1)[None], (tokens.shape[0], tokens.shape[1] - 1))
        found = {}
        for form in ("dense", "sparse"):
            result = expanded.forward(
                params, tokens[:, :-1], positions, config, sparse=form == "sparse", distil=True,
                block=256, extents=max(1, positions.shape[1] // 2048),
            )  # fmt: skip
            found[form] = (bits(result.logits, tokens[:, 1:]), result.divergence, result.mass)
        return found

    for context in contexts:
        for group in header["groups"]:
            cut = windows_of(held_out_text(header, raw, group), context, at_most, batch)
            if not len(cut):
                continue
            parts = [measure(params, jnp.asarray(cut[i : i + batch])) for i in range(0, len(cut), batch)]
            for form in ("dense", "sparse"):
                costs = np.concatenate([np.asarray(part[form][0]) for part in parts])
                by_layer = [np.mean([np.asarray(part[form][i]) for part in parts], axis=0) for i in (1, 2)]
                yield {
                    "group": group, "form": form, "context": context, "windows": len(cut),
                    "bpb": round(float(costs.mean()), 4),
                    "bpb_by_position": {
                        f"{low}-{high}": round(float(costs[:, low:high].mean()), 4)
                        for low, high in zip(BUCKETS, BUCKETS[1:], strict=False)
                        if low < context
                    },
                    "kl": [round(float(value), 4) for value in by_layer[0]],
                    "mass": [round(float(value), 4) for value in by_layer[1]],
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out bits per byte of a byte-level DSA model")
    parser.add_argument("--model", default="echo_jax/data/echo-tiny", help="Hugging Face folder")
    parser.add_argument("--corpus", default="out/corpus.xz", help="packed corpus of corpus.py")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048], help="window lengths, multiples of 256")
    parser.add_argument("--windows", type=int, default=8, help="windows of each group at most")
    parser.add_argument("--batch", type=int, default=1, help="windows at once")
    args = parser.parse_args()
    config, params = load_folder(args.model)
    header, raw = corpora.load(args.corpus)
    for row in evaluate(params, header, raw, config, args.contexts, args.windows, args.batch):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
