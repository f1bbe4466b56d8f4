"""`echo-jax verify`: does this library compute what another implementation computed, for the same weights?

Knows a model folder and a reference file, runs every request through chunked prefill and cached decode, with and
without offload, and says where the answers are furthest apart. Does not know how the reference was made.

Rows that no one can be held to are left out and counted: where the reference's k-th and next index score are closer
than the tie tolerance, float32 may choose either, and where it did choose otherwise, everything computed from that row
may differ too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax import state as state_lib
from echo_jax.cli import options as options_lib
from echo_jax.cli import output, reference
from echo_jax.cli.errors import InputError, refusing_wrong_input
from echo_jax.cli.models import FolderOptions
from echo_jax.cli.options import option
from echo_jax.cli.reference import Request
from echo_jax.decode import DecodeConfig, cache_config, decode_step
from echo_jax.engine import resident
from echo_jax.models.config import FULL, DsaConfig
from echo_jax.models.dsa import Params
from echo_jax.prefill import prefill_chunk
from echo_jax.stats import Totals
from echo_jax.threshold import Last
from echo_jax.types import PAGE

EXAMPLES = """\
examples:
  echo-jax verify ./my-model --reference logits.npz
  echo-jax verify ./my-model --reference logits.npz --tolerance 1e-4 --json

a reference file holds, for each request r = 0, 1, ... (P prompt tokens, N cached decode steps, M = P + N):
  r0_prompt_ids [P]            r0_prefill_logits [P, V]
  r0_greedy_ids [N+1]          r0_decode_logits [N, V]     the step at position P+t reads greedy_ids[t]
  r0_selected_bits [L, M, ceil(M/8)]                       attended positions, packed, lowest bit first
  r0_topk_gap [L, M]           optional: k-th less (k+1)-th index score, inf where all positions fit
  r0_kth_score [L, M]          optional: k-th index score

exit status: 0 all agrees, 1 something differs, 2 wrong input"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions(FolderOptions):
    """Compares a model folder against answers computed elsewhere, in float32, with and without offload."""

    folder: Path = option("Hugging Face folder of the model", metavar="FOLDER", positional=True, group="input")
    reference: Path = option(
        "answers to compare with, an .npz file (its form is below)", metavar="FILE.npz", group="input"
    )
    tolerance: float = option(
        "largest absolute difference of a logit or an index score that counts as agreement",
        1e-3,
        metavar="X",
        group="comparison",
    )
    tie_tolerance: float = option(
        "rows whose topk_gap, and tokens whose gap between the two best logits, is below this are only counted",
        1e-5,
        metavar="X",
        group="comparison",
    )
    json: bool = option("print JSON rows instead of tables", False, group="output")
    output: Path | None = option("also write the rows to this file", None, metavar="FILE", group="output")

    def __post_init__(self):
        for name in ("tolerance", "tie_tolerance"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{options_lib.flag(name)} is {getattr(self, name)} but must be 0 or more")


@dataclasses.dataclass
class Answers:
    """What this library says about one request."""

    selected: np.ndarray  # bool[L, M, M]
    logits: np.ndarray  # f32[M, V]
    kth_score: np.ndarray  # f32[L, M]; NaN where it was not observed
    digests: np.ndarray  # u32[L, M]
    moved: Totals  # of the decode steps


@dataclasses.dataclass(frozen=True)
class Finding:
    """One quantity of one request in one run."""

    request: int
    run: str  # "offload" or "resident"; "offload = resident" for the bits of one against the other
    quantity: str
    compared: int  # rows (or tokens) held against the reference
    excluded: int  # rows left out because of near-ties
    differing: int
    largest: float | None  # largest absolute difference, where there is one
    where: str  # where that is, or the first row that differs

    def row(self) -> dict:
        return {"row": "finding"} | dataclasses.asdict(self)


def execute(options: VerifyOptions) -> int:
    """Runs the command; 0 where everything agrees, 1 where something differs."""
    with refusing_wrong_input():
        model, params = options.load(options.folder, "float32")
        requests = reference.read(options.reference, model)
        config = barely_legal(model, requests)
        rows = output.Rows(options.json, options.output)
    with rows:
        rows.add({"row": "config", "command": "verify"} | options_lib.record(options) | _sizes(config, requests))
        findings, evicted = [], 0
        runs = {"offload": config, "resident": resident(config)}
        with output.progress("verify", total=len(runs) * sum(request.length for request in requests)) as bar:
            answers = {name: answer_all(params, run, requests, bar) for name, run in runs.items()}
        for request, ours, plain in zip(requests, answers["offload"], answers["resident"], strict=True):
            evicted += int(ours.moved.total()["evicted"]) if ours.moved.steps else 0
            for name, one in (("offload", ours), ("resident", plain)):
                findings.extend(compare(request, name, one, options, model))
            findings.append(compare_runs(request, ours, plain))
        for finding in findings:
            rows.add(finding.row())
        result = _result(findings, requests, evicted)
        rows.add(result)
        if not options.json:
            _print(options, findings, result)
    return 1 if result["differing"] else 0


def barely_legal(model: DsaConfig, requests: list[Request]) -> DecodeConfig:
    """One seat that holds the longest request, and the smallest pool that serves it, so that rows are evicted whenever
    a context passes K. The policy `last` remembers each step's k-th score, which is how it is read here."""
    capacity = -(-max(request.length for request in requests) // PAGE) * PAGE
    if (longest := max(request.length for request in requests)) > model.max_positions:
        raise InputError(
            f"the reference's longest request has {longest} positions but the model knows {model.max_positions}; write "
            "shorter requests, or correct max_position_embeddings"
        )
    model = dataclasses.replace(model, max_positions=max(model.max_positions, capacity))  # whole pages
    cache = cache_config(
        model,
        seats=1,
        capacity=capacity,
        device_slots=model.index_topk + 1,
        record_format="f32",
        key_format="f32",
        threshold=Last(),
        staging=min(64, model.index_topk),
        chunk=PAGE,
    )
    return DecodeConfig(model, cache)


def answer_all(params: Params, config: DecodeConfig, requests: list[Request], bar: output.Bar) -> list[Answers]:
    """Every request in turn, in the same seat."""
    state = state_lib.create(config.cache)
    answers = []
    for request in requests:
        state = state_lib.admit(config.cache, state, 0, request.length)
        state, answer = _answer(params, state, config, request, bar)
        state = state_lib.release(config.cache, state, 0)
        answers.append(answer)
    return answers


def _answer(params, state, config: DecodeConfig, request: Request, bar: output.Bar):
    """Chunked prefill with all logits, then cached decode over the reference's own tokens."""
    chunk, prompt, length = config.cache.chunk, request.prompt, request.length
    lists, logits, digests = [], [], []
    kth_score = np.full((config.model.num_layers, length), np.nan, np.float32)
    for start in range(0, len(prompt), chunk):
        count = min(chunk, len(prompt) - start)
        tokens = np.zeros((chunk,), np.int32)
        tokens[:count] = prompt[start : start + count]
        state, out = prefill_chunk(params, state, tokens, np.int32(0), np.int32(count), config=config, all_logits=True)
        lists.append(np.asarray(out.selected)[:, :count])
        logits.append(np.asarray(out.logits)[:count])
        digests.append(np.asarray(out.digests)[:, :count])
        kth_score[:, start + count - 1] = _observed(config, state, start + count)
        bar.advance(count)
    moved = Totals(config.cache.records.bytes_per_row)
    for step, token in enumerate(request.greedy[:-1]):
        state, out = decode_step(params, state, jnp.full((1, 1), token, jnp.int32), config=config)
        lists.append(np.asarray(out.selected)[:, 0])
        logits.append(np.asarray(out.logits)[0])
        digests.append(np.asarray(out.digests)[:, 0])
        kth_score[:, len(prompt) + step] = _observed(config, state, len(prompt) + step + 1)
        moved.add(out.moved)
        bar.advance(1)
    selected = _as_sets(np.concatenate(lists, axis=1), length)
    return state, Answers(selected, np.concatenate(logits), kth_score, np.concatenate(digests, axis=1), moved)


def _observed(config: DecodeConfig, state, visible: int) -> np.ndarray:
    """f32[L]: the k-th score of the newest query, from the memory of the policy `last`; NaN where there is none."""
    scores = [np.nan if layer.threshold is None else float(layer.threshold[0]) for layer in state.layers]
    return np.where(visible > config.cache.top_k, np.asarray(scores, np.float32), np.float32(np.nan))


def _as_sets(lists: np.ndarray, length: int) -> np.ndarray:
    """i32[L, M, K] lists padded with negative numbers -> bool[L, M, length]."""
    sets = np.zeros((*lists.shape[:2], length + 1), bool)  # one more place, for the padding
    np.put_along_axis(sets, np.where(lists < 0, length, lists), True, axis=-1)
    return sets[..., :length]


def compare(
    request: Request, run: str, answers: Answers, options: VerifyOptions, model: DsaConfig
) -> Iterator[Finding]:
    """Selected sets, greedy tokens, logits and k-th scores of one request in one run, against the reference."""
    differs = (answers.selected != request.selected).any(axis=-1)  # [L, M]
    is_near_tie = request.topk_gap < options.tie_tolerance
    upstream = _computed_from(differs & is_near_tie)
    is_fair = ~is_near_tie & ~upstream[:-1]
    yield _finding(request, run, "selected sets", differs & is_fair, is_fair, "layer {} position {}")

    is_fair_token = ~upstream[-1]  # the logits follow the last layer
    prompt = len(request.prompt)
    yield _greedy(request, run, answers, options, is_fair_token)
    distance = np.abs(answers.logits.astype(np.float64) - request.logits)
    for quantity, first, last in (("prefill logits", 0, prompt), ("decode logits", prompt, request.length)):
        places = [f"position {position}" for position in range(first, last)]
        fair = is_fair_token[first:last]
        yield _distances(request, run, quantity, distance[first:last], fair, places, options.tolerance, "word")

    if request.kth_score is not None:
        known = ~np.isnan(answers.kth_score) & np.array([[kind == FULL] for kind in model.layer_kinds])
        distance = np.abs(answers.kth_score.astype(np.float64) - request.kth_score)[known][:, None]
        places = [f"layer {layer} position {position}" for layer, position in np.argwhere(known)]
        fair = ~upstream[:-1][known]
        yield _distances(request, run, "k-th scores", distance, fair, places, options.tolerance)


def _computed_from(differs: np.ndarray) -> np.ndarray:
    """bool[L + 1, M]: what depends on a set that differs, bool[L, M]: the same and later positions of deeper layers."""
    from_position = np.logical_or.accumulate(differs, axis=1)
    in_layers = np.logical_or.accumulate(from_position, axis=0)
    return np.concatenate([np.zeros_like(in_layers[:1]), in_layers])


def _finding(request, run, quantity, differs, is_fair, where) -> Finding:
    first = where.format(*np.argwhere(differs)[0]) if differs.any() else ""
    fair = int(is_fair.sum())
    return Finding(request.number, run, quantity, fair, is_fair.size - fair, int(differs.sum()), None, first)


def _greedy(request: Request, run: str, answers: Answers, options: VerifyOptions, is_fair_token) -> Finding:
    """The tokens that our logits choose, from the last prompt row on."""
    rows = slice(len(request.prompt) - 1, None)
    best = np.sort(request.logits[rows].astype(np.float64), axis=-1)
    is_near_tie = best[:, -1] - best[:, -2] < options.tie_tolerance if best.shape[1] > 1 else np.zeros(len(best), bool)
    is_fair = is_fair_token[rows] & ~is_near_tie
    differs = (answers.logits[rows].argmax(axis=-1) != request.greedy) & is_fair
    return _finding(request, run, "greedy tokens", differs, is_fair, "token {}")


def _distances(request, run, quantity, distance, is_fair, places, tolerance, column_name="") -> Finding:
    """Distances [rows, columns] of the fair rows; a row differs when any of it is beyond the tolerance or is NaN."""
    fair = np.nan_to_num(distance, nan=np.inf)[is_fair]
    fair_places = [place for place, counts in zip(places, is_fair, strict=True) if counts]
    largest, where = None, ""
    if fair.size:
        row, column = divmod(int(fair.argmax()), fair.shape[1])
        largest, where = float(fair.max()), fair_places[row] + (f" {column_name} {column}" if column_name else "")
    differing = int((fair > tolerance).any(axis=-1).sum())
    return Finding(request.number, run, quantity, len(fair), len(distance) - len(fair), differing, largest, where)


def compare_runs(request: Request, ours: Answers, plain: Answers) -> Finding:
    """The bits of the offloaded run against the resident one: lists and digests of every layer, logits of every row."""
    lists = (ours.selected != plain.selected).any(axis=-1).sum()
    digests = (ours.digests != plain.digests).sum()
    logits = (ours.logits.view(np.uint32) != plain.logits.view(np.uint32)).any(axis=-1).sum()
    compared = 2 * ours.digests.size + len(ours.logits)
    differing = int(lists + digests + logits)
    where = f"{lists} lists, {digests} digests, {logits} logits rows" if differing else ""
    return Finding(request.number, "offload = resident", "bits", compared, 0, differing, None, where)


def _sizes(config: DecodeConfig, requests: list[Request]) -> dict:
    cache = config.cache
    return {
        "requests": len(requests),
        "layers": cache.num_layers,
        "top_k": cache.top_k,
        "capacity": cache.capacity,
        "device_slots": cache.device_slots,
        "chunk": cache.chunk,
        "backend": jax.default_backend(),
    }


def _result(findings: list[Finding], requests: list[Request], evicted: int) -> dict:
    def of(*quantities: str) -> list[Finding]:
        return [one for one in findings if one.quantity in quantities]

    largest = [one.largest for one in of("prefill logits", "decode logits") if one.largest is not None]
    return {
        "row": "result",
        "requests": len(requests),
        "compared": sum(one.compared for one in findings),
        "excluded": sum(one.excluded for one in findings),
        "differing": sum(one.differing for one in findings),
        "largest_logit_difference": max(largest, default=None),
        "evicted_rows": evicted,
    }


def _print(options: VerifyOptions, findings: list[Finding], result: dict) -> None:
    columns = ("request", "run", "quantity", "compared", "excluded", "differing", "largest difference", "where")
    table = output.table(f"{options.folder} against {options.reference}", columns, text=(1, 2, 7))
    for one in findings:
        largest = "" if one.largest is None else f"{one.largest:.2e}"
        counts = (str(one.compared), str(one.excluded), str(one.differing))
        table.add_row(str(one.request), one.run, one.quantity, *counts, largest, one.where)
    console = output.console()
    output.show(
        table,
        "compared: rows or tokens; excluded: near-ties and what is computed from them; differing: beyond tolerance",
    )
    largest = result["largest_logit_difference"]
    console.print(
        f"\n{result['compared']} rows compared, {result['excluded']} excluded as near-ties "
        f"(below {options.tie_tolerance:g}); {result['evicted_rows']} rows evicted"
    )
    if largest is not None:
        console.print(f"largest logit difference {largest:.2e}, tolerance {options.tolerance:g}")
    console.print(f"{result['differing']} differences", style="bold green" if not result["differing"] else "bold red")
