"""`echo-jax trace`: records a model's index scores, makes synthetic ones, says how local a trace is.

Knows options, files and tables. What a trace is, and how its statistics are defined, is the business of `traces`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from echo_jax.checkpoints import end_token_ids, load_tokenizer
from echo_jax.cli import options as options_lib
from echo_jax.cli import output
from echo_jax.cli.errors import InputError, nearest, refusing_wrong_input
from echo_jax.cli.models import DTYPES, FolderOptions, Prompt, find_model, parameter_dtype, read_prompts, shape_of
from echo_jax.cli.options import option
from echo_jax.cli.pools import FORMATS, PoolOptions
from echo_jax.decode import DecodeConfig
from echo_jax.engine import check_requests
from echo_jax.models.config import FULL
from echo_jax.sampling import Sampling
from echo_jax.traces import OPTIONAL_FIELDS, PAGE_BOUND, PROMPT_SELECTED, SYNTHETIC, Trace, TraceInfo, open_trace
from echo_jax.traces.describe import MULTIPLES, Locality, describe_layer
from echo_jax.traces.record import Watch, record, trace_info
from echo_jax.traces.writing import SCORE_DTYPES, UnwritableTrace, Writer, store, stored_bytes

RECORD, SYNTH, DESCRIBE = ACTIONS = ("record", "synth", "describe")

EXAMPLES = """\
examples:
  echo-jax trace describe synth:median synth:churny
  echo-jax trace describe synth:mix,layers=16,requests=4,context=32768
  echo-jax trace record --model echo-tiny --prompt-file manual.txt --max-new-tokens 100 --out manual-trace
  echo-jax trace synth synth:echo-fig17,layers=20 --band 4096 --out fig17-trace
  echo-jax trace describe manual-trace

A synthetic trace is generated from its name wherever a trace is named; store one only to hand it on. Names:
  synth:NAME[,KEY=VALUE...]   NAME a kind of layer (hot, median, churny, volatile, scan) or a model of them (mix,
  echo-fig17, glm); keys layers, requests, steps, top_k, context, seed, hot, median, churny, volatile, jump_every, jump,
  request_steps, scanners, group, and fixed, slow, rho, recency, reach, which replace a kind's own

exit status: 0 done, 2 wrong input, 130 interrupted"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions(FolderOptions):
    """Records index scores of a model (record), makes synthetic ones (synth), says how local they are (describe)."""

    action: tuple[str, ...] = option(
        f"record; synth NAME; or describe TRACE..., a folder, a trace of this package, or {SYNTHETIC}NAME",
        positional=True,
        metavar="ACTION",
        group="input",
    )
    model: str | None = option(
        "record: a model of this package (echo-tiny) or a Hugging Face folder",
        None,
        metavar="NAME|FOLDER",
        group="input",
    )
    prompt_file: tuple[Path, ...] | None = option(
        "record: prompts, one a file; several form a batch", None, metavar="FILE", group="input"
    )
    max_new_tokens: int = option(
        "record: tokens to add to each prompt; the first comes from the prefill, each other one is a step of the trace",
        128,
        metavar="N",
        group="input",
    )
    ignore_eos: bool = option("record: go on after an end token", False, group="input")
    dtype: str = option(
        "record: of parameters and activations; auto is float32 on a CPU, as stored elsewhere",
        "auto",
        choices=DTYPES,
        group="input",
    )
    record_format: str = option("record: stored form of a record", "bf16", choices=FORMATS, group="cache")
    key_format: str = option("record: stored form of an index key", "f32", choices=FORMATS, group="cache")
    rotate_index_keys: bool = option("record: Hadamard rotation of index queries and keys", False, group="cache")
    chunk: int | None = option(
        "record: prompt tokens of one prefill call (default: as `generate`)", None, metavar="N", group="cache"
    )
    temperature: float = option("record: 0 is greedy", 0.0, metavar="X", group="sampling")
    top_p: float = option(
        "record: smallest set of tokens whose probabilities reach this", 1.0, metavar="X", group="sampling"
    )
    seed: int = option("record: request number r draws with seed + r", 0, metavar="N", group="sampling")
    out: Path | None = option(
        "record, synth: the folder to write, whole or not at all", None, metavar="FOLDER", group="output"
    )
    overwrite: bool = option("record, synth: replace a trace that is there", False, group="output")
    band: int | None = option(
        "record, synth: keep only the best N scores of a step and row (default: all of them)",
        None,
        metavar="N",
        group="output",
    )
    score_dtype: str = option("record, synth: stored form of a score", "float16", choices=SCORE_DTYPES, group="output")
    fields: tuple[str, ...] | None = option(
        f"record: more for ECHO's rivals, of {', '.join(OPTIONAL_FIELDS)}, or all",
        None,
        choices=(*OPTIONAL_FIELDS, "all"),
        metavar="FIELD",
        group="output",
    )
    page_size: int = option("record: positions of a page of page_bound", 16, metavar="N", group="output")
    windows: int = option("record: queries of prompt_selected", 32, metavar="N", group="output")
    json: bool = option("print JSON rows instead of tables", False, group="output")
    output: Path | None = option(
        "also write the rows to this file, whole or not at all", None, metavar="FILE", group="output"
    )


def execute(options: TraceOptions) -> int:
    """Runs the command; 0 when done."""
    action, *names = options.action
    with refusing_wrong_input():
        if action not in ACTIONS:
            raise InputError(f"trace has no action {action!r}; {nearest(action, ACTIONS)}")
        if action == RECORD and names:
            raise InputError(f"trace record takes no name, got {' '.join(names)}; give prompts with --prompt-file")
        if action != RECORD and not names:
            raise InputError(f"trace {action} needs a trace; give a folder or {SYNTHETIC}NAME, such as synth:median")
        rows = output.Rows(options.json, options.output)
    with rows:
        if action == RECORD:
            info = _record(options)
        elif action == SYNTH:
            info = _synthesise(options, names)
        else:
            _describe(options, names, rows)
            return 0
        rows.add({"row": "trace", "path": str(options.out)} | dataclasses.asdict(info))
        if not options.json:
            assert options.out is not None
            size = sum(file.stat().st_size for file in options.out.iterdir())
            console = output.console()
            console.print(f"{options.out}: {_sizes(info)}; {output.size(size)}")
            if info.nan_scores:
                console.print(f"{info.nan_scores:,} visible scores are NaN", style="bold red")
    return 0


@contextlib.contextmanager
def _refusing_unwritable() -> Iterator[None]:
    """While a trace is written: what only its steps could show to be wrong input."""
    try:
        yield
    except (UnwritableTrace, OSError) as error:
        raise InputError(str(error)) from error


def _out(options: TraceOptions) -> Path:
    if options.out is None:
        raise InputError("--out is missing; give the folder to write")
    return options.out


# ---- record ----------------------------------------------------------------------------------------------


def _record(options: TraceOptions) -> TraceInfo:
    with refusing_wrong_input():
        _out(options)
        if options.model is None or not options.prompt_file:
            raise InputError("trace record needs --model and --prompt-file; `echo-jax trace --help` has an example")
        folder = find_model(options.model)
        shape = shape_of(options.model)
        prompts = read_prompts(options.prompt_file, load_tokenizer(folder))
        sampling = Sampling(options.temperature, options.top_p)
        if not 0 <= options.seed < 2**32:
            raise InputError(f"--seed is {options.seed} but must lie in 0..{2**32 - 1}")
        if options.max_new_tokens < 2:
            raise InputError(
                f"--max-new-tokens is {options.max_new_tokens} but must be at least 2: the first token comes from the "
                "prefill, and a trace needs a decode step"
            )
        tokens = [prompt.tokens for prompt in prompts]
        config = _config(options, shape, tokens)
        check_requests(config, tokens, options.max_new_tokens)
        watch = _watch(options)
        info = _header(options, config, watch, prompts, folder)
        writer = Writer(_out(options), info, overwrite=options.overwrite)
        stop_tokens = () if options.ignore_eos else end_token_ids(folder, shape.vocab_size)
        shape, params = options.load(folder, parameter_dtype(options.dtype))
        config = _config(options, shape, tokens)
    done = [0] * len(prompts)
    steps = len(prompts) * options.max_new_tokens
    with output.progress("compiling", total=sum(map(len, tokens)) + steps) as bar, _refusing_unwritable(), writer:

        def on_prefill(prompt: int, count: int) -> None:
            bar.describe("prefill")
            bar.advance(count - done[prompt])
            done[prompt] = count

        def on_token(prompt: int, token: int) -> None:
            bar.describe("record")
            bar.advance(1)

        record(
            params,
            config,
            tokens,
            options.max_new_tokens,
            writer,
            watch,
            sampling=sampling,
            seed=options.seed,
            stop_tokens=stop_tokens,
            on_prefill=on_prefill,
            on_token=on_token,
        )
    return writer.info


def _config(options: TraceOptions, model: Any, tokens: list[list[int]]) -> DecodeConfig:
    """As `generate` would have it, so that the tokens are the same."""
    longest = max(map(len, tokens))
    pool = PoolOptions(
        record_format=options.record_format,
        key_format=options.key_format,
        rotate_index_keys=options.rotate_index_keys,
        chunk=options.chunk,
    )
    capacity = longest + options.max_new_tokens
    return pool.decode_config(model, seats=len(tokens), capacity=capacity, longest=longest)


def _watch(options: TraceOptions) -> Watch:
    asked = options.fields or ()
    fields = tuple(name for name in OPTIONAL_FIELDS if name in asked or "all" in asked)
    if PAGE_BOUND in fields and options.page_size < 1:
        raise InputError(f"--page-size is {options.page_size} but must be at least 1")
    if PROMPT_SELECTED in fields and options.windows < 1:
        raise InputError(f"--windows is {options.windows} but must be at least 1")
    return Watch(fields, options.page_size, options.windows if PROMPT_SELECTED in fields else 0)


def _header(
    options: TraceOptions, config: DecodeConfig, watch: Watch, prompts: list[Prompt], folder: Path
) -> TraceInfo:
    recipe = {
        "command": _command(options),
        "options": {name: value for name, value in options_lib.record(options).items() if name != "output"},
        "prompts": [{"file": prompt.path.name, "tokens": len(prompt.tokens), "sha256": _digest(prompt.path)}
                    for prompt in prompts],
        "model": {file.name: _digest(file) for file in sorted(folder.glob("*.safetensors"))},
        "dtype": parameter_dtype(options.dtype) or "as stored",
        "echo_jax": importlib.metadata.version("echo-jax"),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }  # fmt: skip
    return trace_info(
        config,
        watch,
        requests=len(prompts),
        steps=options.max_new_tokens - 1,
        band=options.band,
        score_dtype=options.score_dtype,
        seed=options.seed,
        recipe=recipe,
    )


def _command(options: TraceOptions) -> str:
    """The command line that says the options, those left out that have their default."""
    words = ["echo-jax", "trace", *options.action]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and not field.metadata.get("positional"):
            words.append(options_lib.flag(field.name))
            if value is not True:
                words += map(str, value if isinstance(value, tuple) else (value,))
    return shlex.join(words)


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- synth -----------------------------------------------------------------------------------------------


def _synthesise(options: TraceOptions, names: list[str]) -> TraceInfo:
    with refusing_wrong_input():
        if len(names) != 1:
            raise InputError(f"trace synth makes one trace, got {len(names)} names; give one")
        name = names[0] if names[0].startswith(SYNTHETIC) else SYNTHETIC + names[0]
        trace = open_trace(name)
        info = dataclasses.replace(trace.info, band=options.band, score_dtype=options.score_dtype)
        size = output.size(stored_bytes(info))
        if options.out is None:
            raise InputError(
                f"--out is missing; give the folder to write (about {size}), or name {name} where a trace is wanted: "
                "it is generated as it is read"
            )
        writer = Writer(options.out, info, overwrite=options.overwrite)
    total = info.layer_kinds.count(FULL) * info.steps
    with output.progress(f"synth, about {size}", total=total, unit="layer-steps") as bar, _refusing_unwritable():
        return store(trace, writer, lambda layer, t: bar.advance(1))


# ---- describe --------------------------------------------------------------------------------------------

_COLUMNS = ("layer", "kind", "overlap", *(f"LRU {m}k" for m in MULTIPLES), "first use", "cand. p10", "p50", "p90",
            "k-th score", "deviation", "EMA error", "rms", "below band", "NaN")  # fmt: skip


def _describe(options: TraceOptions, names: list[str], rows: output.Rows) -> None:
    with refusing_wrong_input():
        traces = [(name, open_trace(name)) for name in names]
    for name, trace in traces:
        info = trace.info
        rows.add({"row": "trace", "path": name} | dataclasses.asdict(info))
        table = output.table(f"{name}: {_sizes(info)}", _COLUMNS, text=(0, 1))
        with output.progress(name, total=info.layers, unit="layers") as bar:
            for layer, kind, found in _layers(trace):
                bar.advance(1)
                rows.add({"row": "locality", "path": name, "layer": layer, "kind": kind} | dataclasses.asdict(found))
                table.add_row(str(layer), kind, *_cells(found))
        if not options.json:
            output.show(
                table,
                "overlap: with the step before; LRU: share missed by so many k slots, empty at first; candidates: "
                "above the EMA (0.5) of the k-th score, per k. Definitions: echo_jax/traces/describe.py",
            )


def _layers(trace: Trace) -> Iterator[tuple[int, str, Locality]]:
    for layer, kind in enumerate(trace.info.layer_kinds):
        if kind == FULL:
            with refusing_wrong_input():
                source = trace.layer(layer)
            yield layer, trace.info.archetypes[layer], describe_layer(source, trace.info)


def _cells(found: Locality) -> list[str]:
    rates = [found.overlap, *found.lru_miss.values(), found.first_use]
    scores = [found.kth_score, found.kth_deviation, found.kth_error, found.kth_error_deviation]
    return [
        *(f"{rate:.3f}" for rate in rates),
        *(f"{count:.2f}" for count in found.candidates),
        *(f"{score:.3f}" for score in scores),
        f"{100 * found.below_band:.0f} %",
        f"{found.nan_scores:,}",
    ]


def _sizes(info: TraceInfo) -> str:
    kept = "all scores" if info.band is None else f"the best {info.band:,} scores"
    return (
        f"{info.layers} layers, {info.requests} requests, {info.steps} steps, {info.capacity:,} positions, k "
        f"{info.top_k:,}, {kept}" + (f", {', '.join(info.fields)}" if info.fields else "")
    )
