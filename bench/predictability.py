"""Is predictability a property of the trained indexer? The rows behind docs/echo-tiny.md, on a CPU.

    python -m bench.predictability run [DOCUMENT...]    rows of bench/results/predictability.jsonl; wants out/corpus.xz
    python -m bench.echo_tiny_page                      the page, from these rows and those of the evaluation

It knows which texts are read and which scores are compared on them. One pass of the model over the last CONTEXT bytes
of a held-out document, attention sparse as always; its last QUERIES queries are taken as decode steps, one after
another. All kinds of scores come from the hidden states of that one pass, so nothing differs but what scores the
positions. What is said of them is `echo_jax.traces.describe`.
"""

import argparse
import dataclasses
import importlib
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import harness
from echo_jax import checkpoints
from echo_jax.checkpoints.safetensors import load_folder
from echo_jax.models import dsa, expanded
from echo_jax.models.config import DsaConfig
from echo_jax.models.selection import index_scores, precision
from echo_jax.traces import StepScores, TraceInfo, describe

FILE = "predictability.jsonl"
NAME = "predictability: overlap of a set with the one before"

CONTEXT, QUERIES = 8192, 512
KINDS = ("trained", "untrained", "attention", "log attention")
"""The indexer; one with the weights it began with; what attention gives each position, mean over heads, dense; its
logarithm, which is what the indexer was taught to foresee (up to a constant)."""

CASES = (*((kind, 1.0) for kind in KINDS), ("trained", 0.5), ("trained", 2.0))
"""Kinds, and multiples of the model's own k, that are described."""

DOCUMENTS = ("documentation", "module", "book", "tasks")
HELD_OUT = {"documentation": "library/graphlib", "module": "statistics", "book": "austen/persuasion"}
SHOWN = "documentation"
"""The trained indexer's k-th scores of it are kept step by step."""

UNTRAINED_SEED = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """Queries one after another as decode steps of one request: a source of `echo_jax.traces`."""

    score: jax.Array  # f32[T, P]
    first: jax.Array  # i32[]  position of the first query

    def init(self) -> tuple[()]:
        return ()

    def step(self, carry: tuple[()], t: jax.Array) -> tuple[tuple[()], StepScores]:
        at = self.first + t
        row = jnp.where(jnp.arange(self.score.shape[1]) <= at, self.score[t], -jnp.inf)
        always = jnp.ones((1,), bool)
        return carry, StepScores(row[None], at[None], always, (t == 0)[None], jnp.full((1,), -jnp.inf))


def document(name: str) -> bytes:
    """The last CONTEXT bytes of a held-out document, or a window to practise on, its haystack held out too."""
    examples = str(harness.ROOT / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    corpus, long_tasks = map(importlib.import_module, ("corpus", "long_tasks"))

    header, raw = corpus.load(harness.ROOT / "out" / "corpus.xz")
    if name == "tasks":
        text = corpus.held_out_text(header, raw, "python-docs")
        return long_tasks.practice(CONTEXT, text, np.random.default_rng(0)).tokens.tobytes()
    found = next(one for one in header["held_out"] if one["name"] == HELD_OUT[name])
    return raw[found["start"] : found["stop"]][-CONTEXT:]


def scores(params: dsa.Params, tokens: jax.Array, config: DsaConfig, queries: int) -> tuple[dict[str, jax.Array], ...]:
    """By layer, scores f32[queries, T] by kind, of the last queries of tokens i32[T]; positions not yet seen hold
    anything."""
    length = tokens.shape[0]
    positions = jnp.arange(length)
    last = slice(length - queries, length)
    untrained = dsa.init_params(jax.random.key(UNTRAINED_SEED), config)["layers"]

    def watch(seen: expanded.Seen) -> dict[str, jax.Array]:
        fresh = expanded.indexer_of(untrained[seen.layer], seen.normed, seen.q_latent, positions, config, (1, length))
        found = {
            kind: index_scores(one.query[:, last], one.weights[:, last], one.key)[0]
            for kind, one in (("trained", seen.indexer), ("untrained", fresh))
        }
        logits = jnp.einsum("thd,shd->hts", seen.query[0, last], seen.key[0], precision=precision(seen.query))
        visible = positions[None] <= positions[last, None]
        logits = jnp.where(visible[None], logits * config.attention_scale, -jnp.inf)
        by_head = jax.nn.log_softmax(logits, axis=-1)
        found["log attention"] = jax.nn.logsumexp(by_head, axis=0) - math.log(config.num_heads)
        found["attention"] = jnp.exp(found["log attention"])
        return found

    return expanded.forward(
        params, tokens[None], positions[None], config, sparse=True, distil=False, block=256, extents=4, watch=watch
    ).watched


def rows_of(name: str, found: tuple[dict[str, np.ndarray], ...], top_k: int) -> list[dict[str, Any]]:
    """One dict per case and layer, from scores f32[T, P] by kind; `kth` are k-th scores step by step where shown."""
    rows = []
    for kind, factor in CASES:
        k = int(top_k * factor)
        for layer, by_kind in enumerate(found):
            score = by_kind[kind]
            steps, capacity = score.shape
            info = TraceInfo(1, 1, steps, capacity, k, ("full",), ("recorded",), "record", 0)
            said = describe.describe_layer(Steps(jnp.asarray(score), jnp.int32(capacity - steps)), info)
            row = {
                "document": name, "kind": kind, "top_k": k, "layer": layer, "context": capacity, "steps": steps,
                "overlap": said.overlap, "lru_miss": {str(m): miss for m, miss in said.lru_miss.items()},
                "first_use": said.first_use, "candidates": said.candidates, "kth_score": said.kth_score,
                "kth_deviation": said.kth_deviation, "kth_error": said.kth_error,
                "kth_error_rms": said.kth_error_deviation,
            }  # fmt: skip
            if (name, kind, factor) == (SHOWN, "trained", 1.0):
                visible = np.tril(np.ones(score.shape, bool), capacity - steps)
                row["kth"] = np.partition(np.where(visible, score, -np.inf), capacity - k, axis=1)[:, capacity - k]
            rows.append(row)
    return rows


def _rounded(value: Any) -> Any:
    """Five digits, as no figure shows more."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float | np.floating) else value


def run(names: list[str]) -> None:
    config, params = load_folder(checkpoints.resolve_model("echo-tiny"))
    judge = jax.jit(lambda params, tokens: scores(params, tokens, config, QUERIES))
    for name in names:
        tokens = jnp.asarray(np.frombuffer(document(name), np.uint8), jnp.int32)
        found = jax.tree.map(np.asarray, judge(params, tokens))
        for row in rows_of(name, found, config.index_topk):
            value = row.pop("overlap")
            harness.record(None, name=NAME, value=round(value, 5), unit="share", file=FILE, shapes=_rounded(row))
        print(f"{name}: done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Statistics of what scores positions, on held-out documents")
    parser.add_argument("action", choices=("run",))
    parser.add_argument("documents", nargs="*", default=DOCUMENTS, metavar="DOCUMENT", help=", ".join(DOCUMENTS))
    args = parser.parse_args()
    if unknown := set(args.documents) - set(DOCUMENTS):
        parser.error(f"document {sorted(unknown)} is unknown; known: {', '.join(DOCUMENTS)}")
    run(list(args.documents))


if __name__ == "__main__":
    main()
