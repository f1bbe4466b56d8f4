"""`echo-jax generate`: continues prompts from an offloaded cache, shows what moved, and proves that nothing changed.

Knows options, files and the order in which things are checked: everything that can be refused is refused before the
weights are read. How requests are run and compared is the business of `engine`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import jax

from echo_jax import _compat, hostmem
from echo_jax.checkpoints import end_token_ids, load_tokenizer
from echo_jax.checkpoints.tokenizer import Tokenizer
from echo_jax.cli import options as options_lib
from echo_jax.cli import output, signals
from echo_jax.cli.errors import NO_EVIDENCE, InputError, refusing_wrong_input
from echo_jax.cli.models import DTYPES, FolderOptions, Prompt, find_model, parameter_dtype, read_prompts, shape_of
from echo_jax.cli.options import option
from echo_jax.cli.pools import PoolOptions
from echo_jax.cli.text import Printer
from echo_jax.decode import DecodeConfig
from echo_jax.engine import Comparison, Generation, check_requests, compare, generate, resident
from echo_jax.sampling import Sampling

EXAMPLES = """\
examples:
  echo-jax generate --model echo-tiny --prompt-file manual.txt --max-new-tokens 200
  echo-jax generate --model ./my-model --prompt-file a.txt b.txt --device-slots 1200 --check
  echo-jax generate --model echo-tiny --prompt-file manual.txt --threshold ema:0.7 --cap 128 --json --output run.jsonl
  echo-jax generate --model echo-tiny --prompt-file manual.txt --threshold my_policies:Slope:0.1

exit status: 0 done (and, with --check, no difference), 1 --check found a difference, 2 wrong input, 3 --require-sparse
found nothing to prove, 130 interrupted, 143 terminated"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(FolderOptions, PoolOptions):
    """Continues prompts with a DSA model whose KV cache lives in host memory."""

    model: str = option(
        "a model of this package (echo-tiny) or a Hugging Face folder", metavar="NAME|FOLDER", group="input"
    )
    prompt_file: tuple[Path, ...] = option(
        "prompts, one a file; several of any lengths form a batch", metavar="FILE", group="input"
    )
    max_new_tokens: int = option("tokens to add to each prompt", 128, metavar="N", group="input")
    chat: bool = option(
        "read each prompt file as messages, by the checkpoint's chat template (DeepSeek-V3.2 has its own form): plain "
        "text is one message of the user, a JSON list holds several",
        False,
        group="input",
    )
    no_special_tokens: bool = option(
        "add no start or end token to prompts; otherwise as add_bos_token and add_eos_token of tokenizer_config.json "
        "say, else as tokenizer.json does, and never where the text brings them",
        False,
        group="input",
    )
    ignore_eos: bool = option("go on after an end token", False, group="input")
    dtype: str = option(
        "of parameters and activations; auto is float32 on a CPU, as stored elsewhere",
        "auto",
        choices=DTYPES,
        group="input",
    )
    capacity: int | None = option(
        "positions that each request can hold (default: the longest prompt and its new tokens)",
        None,
        metavar="P",
        group="cache",
    )
    host_memory: str = option(
        "how host memory is reached: ffi (the shared library, pinned), jnp (an ordinary array), or the best there is",
        "auto",
        choices=hostmem.IMPLEMENTATIONS,
        group="cache",
    )
    temperature: float = option("0 is greedy", 0.0, metavar="X", group="sampling")
    top_p: float = option(
        "smallest set of tokens whose probabilities reach this, in (0, 1]", 1.0, metavar="X", group="sampling"
    )
    seed: int = option("request number r draws with seed + r", 0, metavar="N", group="sampling")
    require_sparse: bool = option(
        "with --check, exit 3 where the run proves nothing: no query selected among more than top_k positions, or no "
        "row had to be fetched",
        False,
        group="output",
    )
    check: bool = option(
        "run again without offload and compare lists, logits and layer digests, bit for bit", False, group="output"
    )
    json: bool = option("print JSON rows instead of text and tables", False, group="output")
    output: Path | None = option(
        "also write the rows to this file, whole or not at all", None, metavar="FILE", group="output"
    )


@dataclasses.dataclass(frozen=True)
class _Job:
    """Everything that was asked for, checked and ready to run."""

    options: GenerateOptions
    config: DecodeConfig
    params: Any
    prompts: list[Prompt]
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    memory: hostmem.HostMemory


def execute(options: GenerateOptions) -> int:
    """Runs the command; 0 when done, 1 when --check found a difference."""
    if options.check:
        _compat.choose_products_without_timing()
    with refusing_wrong_input():
        rows = output.Rows(options.json, options.output)
    with rows:
        with refusing_wrong_input():
            folder = find_model(options.model)
            shape_of(options.model)  # any other folder is told that it is no model, not that its tokenizer is missing
            tokenizer = load_tokenizer(folder)
            job = _prepare(options, _read_prompts(options, folder, tokenizer))
        printer = Printer(job.prompts, tokenizer, options.max_new_tokens, job.stop_tokens, is_silent=options.json)
        try:
            rows.add(_config_row(job))
            ours = _run(job, job.config, "prefill", printer)
        except KeyboardInterrupt:
            signals.acknowledge()
            printer.interrupted()
            for row in printer.rows(is_complete=False):
                rows.add(row)
            raise
        for row in (*_moved_rows(job, ours), *printer.rows()):
            rows.add(row)
        if not options.json:
            _print_moved(job, ours)
        if not options.check:
            return 0
        reference = _run(job, resident(job.config), "check: resident run", None)
        comparison = compare(ours, reference)
        evidence = _evidence(job, ours)
        rows.add(_check_row(comparison, reference) | {"evidence": evidence})
        if not options.json:
            _print_check(comparison, ours, reference)
            for words in _lacking(job, evidence):
                output.console().print(f"         {words}", style="yellow")
    if comparison.differences:
        return 1
    return NO_EVIDENCE if options.require_sparse and _lacking(job, evidence) else 0


def _read_prompts(options: GenerateOptions, folder: Path, tokenizer: Tokenizer) -> list[Prompt]:
    chat = folder if options.chat else None
    return read_prompts(options.prompt_file, tokenizer, special_tokens=not options.no_special_tokens, chat=chat)


def _prepare(options: GenerateOptions, prompts: list[Prompt]) -> _Job:
    """Checks in order of cost: options, sizes, host memory, and the weights last."""
    sampling = Sampling(options.temperature, options.top_p)
    if options.require_sparse and not options.check:
        raise InputError("--require-sparse asks for evidence, which only --check makes; add --check")
    if not 0 <= options.seed < 2**32:
        raise InputError(f"--seed is {options.seed} but must lie in 0..{2**32 - 1}")
    if options.max_new_tokens < 1:
        raise InputError(f"--max-new-tokens is {options.max_new_tokens} but must be at least 1")
    folder, model = find_model(options.model), shape_of(options.model)
    longest = max(len(prompt.tokens) for prompt in prompts)
    needed = longest + options.max_new_tokens
    if needed > model.max_positions:
        raise InputError(
            f"the longest prompt has {longest} tokens and {options.max_new_tokens} new ones were asked for, together "
            f"{needed}, but the model knows {model.max_positions} positions; shorten the prompt or lower "
            "--max-new-tokens"
        )
    capacity = needed if options.capacity is None else options.capacity
    sizes = {"seats": len(prompts), "capacity": capacity, "host_memory": options.host_memory, "longest": longest}
    config = options.decode_config(model, **sizes)
    check_requests(config, [prompt.tokens for prompt in prompts], options.max_new_tokens)
    memory = hostmem.choose(implementation=options.host_memory)
    _refuse_absent_kernels(options, memory, jax.default_backend())
    stop_tokens = () if options.ignore_eos else end_token_ids(folder, model.vocab_size)
    model, params = options.load(folder, parameter_dtype(options.dtype))
    return _Job(options, options.decode_config(model, **sizes), params, prompts, sampling, stop_tokens, memory)


def _refuse_absent_kernels(options: GenerateOptions, memory: hostmem.HostMemory, platform: str) -> None:
    """A kernel that was asked for by name, where jax computes without a GPU."""
    if platform == "gpu":
        return
    for name, asked in (("--scores", options.scores), ("--attend", options.attend)):
        if asked == "mosaic_gpu":
            raise InputError(f"{name} is {asked}, a kernel for Hopper GPUs, but jax runs on {platform}; leave it out")
    if options.prefetch == "fused" and memory is hostmem.HostMemory.PINNED:
        raise InputError(
            f"--prefetch is fused, a kernel for Hopper GPUs, but jax runs on {platform}, where its plain form reads no "
            "pinned memory; add --host-memory jnp, or leave it out"
        )


def _run(job: _Job, config: DecodeConfig, name: str, printer: Printer | None) -> Generation:
    """One run of the batch under a progress bar. Text is shown by the printer, if there is one."""
    lengths = [len(prompt.tokens) for prompt in job.prompts]
    done = [0] * len(lengths)
    with output.progress("compiling", total=sum(lengths)) as bar:

        def on_prefill(prompt: int, count: int) -> None:
            bar.describe(name)
            bar.advance(count - done[prompt])
            done[prompt] = count

        def on_token(prompt: int, token: int) -> None:
            if printer is not None:
                printer.add(prompt, token, bar)

        return generate(
            job.params,
            config,
            [prompt.tokens for prompt in job.prompts],
            job.options.max_new_tokens,
            sampling=job.sampling,
            seed=job.options.seed,
            stop_tokens=job.stop_tokens,
            keep_record=job.options.check,
            on_prefill=on_prefill,
            on_token=on_token,
        )


# ---- rows ------------------------------------------------------------------------------------------------


def _config_row(job: _Job) -> dict[str, Any]:
    """What was asked for, and under `resolved` what became of it."""
    cache, device = job.config.cache, jax.devices()[0]
    resolved = {
        "layers": cache.num_layers,
        "seats": cache.seats,
        "capacity": cache.capacity,
        "host_rows": cache.host_rows,
        "device_slots": cache.device_slots,
        "top_k": cache.top_k,
        "chunk": cache.chunk,
        "threshold": repr(cache.threshold),
        "eviction": repr(cache.eviction),
        "dtype": job.config.model.dtype,
        "host_memory": job.memory.value,
        "device": f"{device.platform} {device.device_kind}",
        "echo_jax": importlib.metadata.version("echo-jax"),
        "jax": jax.__version__,
    }
    return {"row": "config", "command": "generate"} | options_lib.record(job.options) | {"resolved": resolved}


def _evidence(job: _Job, run: Generation) -> dict[str, Any]:
    """What the comparison could have caught: queries that selected among more positions than top_k, and the rows that
    decode steps had to move."""
    lengths = [len(prompt.tokens) + len(tokens) - 1 for prompt, tokens in zip(job.prompts, run.tokens, strict=True)]
    sparse = sum(max(0, length - job.config.cache.top_k) for length in lengths)
    moved = run.moved.total() if run.moved.steps else {}
    counts = {name: int(moved.get(name, 0)) for name in ("evicted", "useful", "recalled")}
    return {"sparse_queries": sparse} | counts


def _lacking(job: _Job, evidence: dict[str, Any]) -> list[str]:
    """What the comparison does not prove, in words."""
    if not evidence["sparse_queries"]:
        return [
            f"nothing was sparse: no context exceeds top_k, {job.config.cache.top_k}, so every position was selected; "
            "take a longer prompt"
        ]
    if not evidence["useful"] + evidence["recalled"]:
        return ["nothing was fetched: every selected row was resident; lower --device-slots, or continue for longer"]
    return []


def _moved_rows(job: _Job, run: Generation) -> list[dict[str, Any]]:
    """One row a layer and one of totals. Without a decode step (one new token) no row of a layer exists."""
    has_steps = run.moved.steps > 0
    layers = [{"row": "layer"} | row for row in run.moved.by_layer()] if has_steps else []
    total = {
        "row": "total",
        "steps": run.moved.steps,
        "prompt_tokens": sum(len(prompt.tokens) for prompt in job.prompts),
        "new_tokens": sum(map(len, run.tokens)),
        "compile_seconds": run.compile_seconds,
        "prefill_seconds": run.prefill_seconds,
        "decode_seconds": run.decode_seconds,
        "tokens_per_second": run.tokens_per_second,
        "device_bytes": run.device_bytes,
        "device_bytes_by_kind": job.config.cache.device_bytes(),
        "host_bytes": job.config.cache.host_bytes(),
    }
    return [*layers, total | (run.moved.total() if has_steps else {})]


def _check_row(comparison: Comparison, reference: Generation) -> dict[str, Any]:
    timing = {"prefill_seconds": reference.prefill_seconds, "tokens_per_second": reference.tokens_per_second}
    flags = os.environ.get("XLA_FLAGS", "")
    return {"row": "check"} | dataclasses.asdict(comparison) | {"resident": timing, "xla_flags": flags}


# ---- for people ------------------------------------------------------------------------------------------

_COLUMNS = ("layer", "hit rate", "hits", "useful", "wasted", "recalled", "refused", "evicted", "to device", "to host")

_LEGEND = (
    "of the selected rows: hits were on the device, useful were prefetched, recalled were fetched on demand; wasted: "
    "prefetched, not selected; refused: over the cap; evicted: lost their slot"
)


def _print_moved(job: _Job, run: Generation) -> None:
    console = output.console()
    rows = _moved_rows(job, run)
    total = rows.pop()
    if rows:
        console.print()
        table = output.table(f"what moved in {total['steps']} decode steps (rows)", _COLUMNS)
        for row in (*rows, total):
            table.add_row(*_cells(row), style="bold" if row is total else None)
        output.show(table, _LEGEND)
    else:
        console.print("\nno decode step: the first token of a request comes from its prefill")
    prefill, decoded = total["prefill_seconds"], total["new_tokens"] - len(job.prompts)
    speed = total["prompt_tokens"] / prefill
    console.print(f"\nprefill  {total['prompt_tokens']:,} tokens in {prefill:.2f} s ({speed:,.0f} tokens/s)")
    if decoded:
        console.print(
            f"decode   {decoded:,} tokens in {total['decode_seconds']:.2f} s "
            f"({total['tokens_per_second']:,.1f} tokens/s)"
        )
    console.print(f"compile  {total['compile_seconds']:.2f} s before either")
    kinds = ", ".join(f"{kind} {output.size(count)}" for kind, count in total["device_bytes_by_kind"].items())
    console.print(f"device   {output.size(total['device_bytes'])}: {kinds}")
    console.print(f"host     {output.size(total['host_bytes'])} of {job.memory.value} memory")


def _cells(row: dict[str, Any]) -> list[str]:
    rate = row["hit_rate"]
    counts = [f"{row[name]:,}" for name in ("hits", "useful", "wasted", "recalled", "refused", "evicted")]
    sizes = [output.size(row[name]) for name in ("host_to_device_bytes", "device_to_host_bytes")]
    return [str(row.get("layer", "all")), "" if rate != rate else f"{100 * rate:.1f} %", *counts, *sizes]


def _print_check(comparison: Comparison, ours: Generation, reference: Generation) -> None:
    console = output.console()
    console.print(
        f"check    against the resident run: {comparison.lists:,} lists, {comparison.logits:,} logits rows, "
        f"{comparison.digests:,} layer digests and {comparison.tokens:,} tokens compared"
    )
    if ours.moved.steps:
        ratio = ours.tokens_per_second / reference.tokens_per_second
        console.print(
            f"         resident decode {reference.tokens_per_second:,.1f} tokens/s; with offload {ratio:.2f} of that"
        )
    if comparison.differences:
        console.print(f"         {comparison.differences} differences, first: {comparison.first}", style="bold red")
    else:
        console.print("         0 differences", style="bold green")
