"""What lossy selection costs in answers: each lossy rival decodes a model after an exact prefill that all share.

    python -m bench.rivals_quality                     bits per byte and passkeys
    python -m bench.rivals_quality bits|passkeys [--model FOLDER] [--context 4096] [--samples 50] [--seats 10]

It knows texts, batches and what is averaged. How a rule becomes a model's selection is in `echo_jax.replay.live`, what
a rule is in `echo_jax.replay.rivals`. On a CPU and on a GPU the same; `python -m bench.findings write` makes the table.

Bits per byte: held-out documentation is cut into pieces of context + NEW bytes; the context is prefilled exactly, the
bytes after it are decoded as given. Passkeys: a number is hidden in such text and asked for at its end; all but the
last LEAD bytes of the prompt are prefilled exactly, so that a rule has forgotten the exact prefill when the answer
begins. It counts where every digit is what greedy decoding would have said.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import harness
from echo_jax import state as state_lib
from echo_jax.checkpoints.safetensors import load_folder
from echo_jax.decode import DecodeConfig, cache_config
from echo_jax.engine import resident
from echo_jax.models import dsa
from echo_jax.models.config import DsaConfig
from echo_jax.prefill import prefill
from echo_jax.replay import live, rivals
from echo_jax.replay.rules import INDEXER, Choice, Exact, Rule
from echo_jax.traces import LOOKAHEAD_SCORE, PAGE_BOUND, QUERY_COSINE, TraceInfo
from echo_jax.types import NO_POSITION
from examples import long_tasks

FILE = "rivals.jsonl"
MODEL = harness.ROOT / "echo_jax" / "data" / "echo-tiny"
DOCUMENTS = tuple(harness.ROOT / "examples" / "data" / name for name in ("long_manual.txt", "manual.txt"))
"""Python documentation that the packaged model's training left out by name."""

EXACT, RECENT, UNCORRECTED, GUESS_AND_RECENT = "exact", "recent", "freekv-uncorrected", "infinigen-and-recent"
NEW, LEAD = 256, 16


@dataclasses.dataclass(frozen=True)
class Recent:
    """The last K tokens and nothing else: what a rule that knows nothing of scores loses."""

    hides_behind: ClassVar[str] = INDEXER

    def init(self, requests, positions, top_k):
        return ()

    def choose(self, memory, facts):
        back = jnp.arange(facts.exact.shape[1], dtype=jnp.int32)[::-1]
        listed = facts.visible[:, None] - 1 - back[None]
        return memory, Choice(jnp.where(listed >= 0, listed, NO_POSITION), None, facts.scores.active)


@dataclasses.dataclass(frozen=True)
class GuessAndRecent(rivals.InfiniGen):
    """InfiniGen whose guess always holds the last `kept` tokens, which a cache on the device would have anyway."""

    kept: int = 64

    def choose(self, memory, facts):
        scores = facts.scores
        position = jnp.arange(scores.score.shape[1], dtype=jnp.int32)[None]
        length = scores.length[:, None]
        is_recent = (position >= length - self.kept) & (position < length)
        has_guess = jnp.any(jnp.isfinite(scores.lookahead_score), axis=1)[:, None]
        guess = jnp.where(is_recent & has_guess, jnp.inf, scores.lookahead_score)
        return super().choose(memory, facts._replace(scores=scores._replace(lookahead_score=guess)))


def rules(config: DecodeConfig) -> dict[str, Rule]:
    """By name: the exact top-k first, the lossy rivals in their recorded form, and three to compare them with."""
    cache = config.cache
    info = TraceInfo(
        cache.num_layers, cache.seats, 1, cache.capacity, cache.top_k, cache.layer_kinds,
        ("recorded",) * cache.num_layers, "record", 0, fields=(LOOKAHEAD_SCORE, PAGE_BOUND, QUERY_COSINE),
    )  # fmt: skip
    lossy = {name: rivals.RIVALS[name](info, 4 * cache.top_k, "full").rule for name in rivals.LOSSY}
    never = rivals.FreeKV(cosine=-2.0)  # no cosine is below it
    return {EXACT: Exact(), **lossy, UNCORRECTED: never, GUESS_AND_RECENT: GuessAndRecent(), RECENT: Recent()}


class Text(NamedTuple):
    """One request: its bytes, and how many at the end are judged."""

    tokens: np.ndarray  # i32
    judged: int


def pieces(documents: Sequence[Path], context: int, new: int) -> list[Text]:
    """Documents cut into context + new bytes and one that starts the decode; rests are dropped.

    ValueError where no document is long enough.
    """
    size, found = context + new + 1, []
    for path in documents:
        text = np.frombuffer(path.read_bytes(), np.uint8).astype(np.int32)
        found += [Text(text[start : start + size], new) for start in range(0, len(text) - size + 1, size)]
    if not found:
        raise ValueError(f"no document has {size} bytes; lower the context of {context}, or give longer documents")
    return found


def passkeys(documents: Sequence[Path], count: int, context: int) -> list[Text]:
    """Prompts with their answers, of context bytes together: the task of examples/long_tasks.py, in those documents.

    Equal arguments give equal prompts. ValueError where the documents are too short, or the context.
    """
    hay = b"\n".join(path.read_bytes() for path in documents)
    tokens, is_answer = long_tasks.examples("passkey", context, hay, count)
    found = []
    for row, answer in zip(tokens, is_answer, strict=True):
        digits = int(answer.sum())
        assert answer[-digits:].all(), "an answer stands at the end"
        found.append(Text(row.astype(np.int32), digits))
    return found


@dataclasses.dataclass
class Judged:
    """What a rule did to all texts."""

    bits: list[float] = dataclasses.field(default_factory=list)  # of each text, mean over its judged bytes
    is_right: list[bool] = dataclasses.field(default_factory=list)  # every judged byte was the likeliest
    missed: int = 0  # rows of the exact sets, over layers and steps
    wanted: int = 0

    @property
    def missed_share(self) -> float:
        return self.missed / self.wanted


def judge(params: dsa.Params, model: DsaConfig, texts: Sequence[Text], seats: int, lead: int,
          chosen: Sequence[str] = ()) -> dict[str, Judged]:  # fmt: skip
    """Every text under every rule (or the chosen ones): prefilled once, the last lead + judged bytes decoded as given.

    A batch that the texts do not fill leaves seats idle. ValueError for an unknown rule.
    """
    longest = max(len(text.tokens) for text in texts)
    cache = cache_config(model, seats=seats, capacity=longest, offload=False)
    config = resident(DecodeConfig(model, cache))
    known = rules(config)
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(f"rule {unknown[0]!r} is unknown; known: {', '.join(known)}")
    found = {name: Judged() for name in known if name in chosen or not chosen}
    for batch in itertools.batched(texts, seats):
        steps = lead + max(text.judged for text in batch)
        started = time.perf_counter()
        state, tokens = _prefilled(params, config, batch, steps)
        print(f"  {len(batch)} prompts: {time.perf_counter() - started:.0f} s", flush=True)
        for name, judged in found.items():
            started = time.perf_counter()
            result = jax.device_get(live.forced(params, state, tokens, config=config, rule=known[name]))
            for seat, text in enumerate(batch):
                judged.bits.append(float(result.bits[-text.judged :, seat].mean()))
                judged.is_right.append(bool(result.is_best[-text.judged :, seat].all()))
            judged.missed += int(result.missed.sum())
            judged.wanted += int(result.wanted.sum())
            print(f"    {name}: {time.perf_counter() - started:.1f} s", flush=True)
        state_lib.destroy(state)
    return found


def _prefilled(params: dsa.Params, config: DecodeConfig, batch: Sequence[Text], steps: int) -> tuple[Any, jax.Array]:
    """The state before the last steps + 1 bytes of each text, and these as i32[steps + 1, B]."""
    state = state_lib.create(config.cache)
    tokens = np.zeros((steps + 1, config.cache.seats), np.int32)
    for seat, text in enumerate(batch):
        before = len(text.tokens) - steps - 1
        state = state_lib.admit(config.cache, state, seat, len(text.tokens))
        state, _ = prefill(params, state, text.tokens[:before], seat, config=config)
        tokens[:, seat] = text.tokens[before:]
    return jax.block_until_ready(state), jnp.asarray(tokens)


# ---- rows ------------------------------------------------------------------------------------------------


class _Recorder:
    """Writes the rows of one model and one size, and prints them."""

    def __init__(self, args: argparse.Namespace, model: DsaConfig):
        digest = hashlib.sha256()
        for path in sorted(args.model.glob("*.safetensors")):
            digest.update(path.read_bytes())
        weights = digest.hexdigest()[:12]
        sizes = {"context": args.context, "top_k": model.index_topk, "seats": args.seats}
        self.shapes: dict[str, Any] = {"model": args.model.name, "weights": weights, **sizes}

    def __call__(self, name: str, value: Any, unit: str, **fields: Any) -> None:
        shapes = self.shapes | fields.pop("shapes", {})
        row = harness.record(name=f"rivals: {name}", value=value, unit=unit, file=FILE, shapes=shapes, **fields)
        print(f"{row.name}: {row.value:.4f}", flush=True)


def bits(args: argparse.Namespace, params: dsa.Params, model: DsaConfig) -> None:
    """Bits per byte of held-out documentation, and what each rule adds."""
    texts = pieces(args.documents, args.context, args.new)
    record = functools.partial(_Recorder(args, model), shapes={"texts": len(texts), "new": args.new})
    found = judge(params, model, texts, args.seats, 0, args.rules)
    method = "bytes decoded as given after an exact prefill of the context; mean over texts"
    exact = np.array(found[EXACT].bits)
    record("bits per byte, exact", float(exact.mean()), "bits", method=method)
    for name, judged in found.items():
        if name == EXACT:
            continue
        added = np.array(judged.bits) - exact
        spread = (float(np.quantile(added, 0.1)), float(np.quantile(added, 0.9)))
        fields = {"spread": spread, "repeats": len(texts)}
        record(f"bits per byte over exact, {name}", float(added.mean()), "bits", method=method, **fields)
        record(f"share missed in documents, {name}", judged.missed_share, "share", method=_MISSED)


def answers(args: argparse.Namespace, params: dsa.Params, model: DsaConfig) -> None:
    """Passkeys that are answered right."""
    texts = passkeys(args.documents, args.samples, args.context)
    record = functools.partial(_Recorder(args, model), shapes={"lead": LEAD, "samples": len(texts)})
    method = "every digit of the answer is the likeliest byte; exact prefill but for the last bytes of the prompt"
    for name, judged in judge(params, model, texts, args.seats, LEAD, args.rules).items():
        record(f"passkeys answered, {name}", sum(judged.is_right) / len(texts), "share", method=method,
               repeats=len(texts))  # fmt: skip
        if name != EXACT:
            record(f"share missed in passkeys, {name}", judged.missed_share, "share", method=_MISSED)


_MISSED = (
    "rows of the exact set that were not attended, of all, over layers, steps and texts; exact of the scores that "
    "the rule's own decode computed"
)
PARTS = {"bits": bits, "passkeys": answers}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rivals_quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} (default: both)")
    parser.add_argument(
        "--model", type=Path, default=MODEL, help="folder of a byte-level DSA model (default: echo-tiny)"
    )
    parser.add_argument("--documents", type=Path, nargs="+", default=DOCUMENTS, help="held-out text files")
    parser.add_argument("--context", type=int, default=4096, help="bytes prefilled, or of a passkey prompt")
    parser.add_argument("--new", type=int, default=NEW, help="bytes decoded of each piece")
    parser.add_argument("--samples", type=int, default=50, help="passkeys")
    parser.add_argument("--seats", type=int, default=10, help="texts at once")
    parser.add_argument("--rules", nargs="+", default=(), help="which ones besides the exact top-k (default: all)")
    args = parser.parse_args(arguments)
    if args.rules:
        args.rules = (EXACT, *args.rules)
    try:
        chosen = [PARTS[name] for name in args.parts or PARTS]
    except KeyError as error:
        parser.error(f"no part is called {error}; there are {', '.join(PARTS)}")
    try:
        model, params = load_folder(args.model)
        if model.vocab_size != 256:
            raise ValueError(f"{args.model} knows {model.vocab_size} tokens but texts are read as bytes, 256 of them")
        for part in chosen:
            started = time.perf_counter()
            part(args, params, model)
            print(f"{part.__name__}: {time.perf_counter() - started:.0f} s", flush=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
