"""`echo-jax report`: rows of replays become a page of tables and figures, or decode steps a page to step through.

Knows options and files. What is drawn is the business of `report`.
"""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from echo_jax.cli import output
from echo_jax.cli.errors import InputError, refusing_wrong_input
from echo_jax.cli.options import option
from echo_jax.cli.policies import parse_threshold
from echo_jax.cli.replay import parse_slots
from echo_jax.report import explainer, pages
from echo_jax.report.moments import moments, pool_config
from echo_jax.report.rows import read
from echo_jax.traces import open_trace

EXAMPLES = """\
examples:
  echo-jax replay synth:median --policy never ema last --sweep slots=2k,4k,8k --series --output rows.jsonl
  echo-jax report rows.jsonl --output median-report
  echo-jax report --explain echo-tiny

exit status: 0 written, 2 wrong input"""

EXPLAINED = "explained.html"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Draws what replays counted: report.md with figures, and one self-contained report.html. With --explain, one page
    that steps through decode steps of a trace."""

    rows: tuple[Path, ...] = option(
        "files of `echo-jax replay --output`; those of `--series` add the k-th score over time",
        (),
        positional=True,
        metavar="ROWS",
        group="input",
    )
    explain: str | None = option(
        f"a trace whose steps to explain, as for `replay`; {explainer.ECHO_TINY} is {explainer.ECHO_TINY_TRACE}, with "
        "its document",
        None,
        metavar="TRACE",
        group="input",
    )
    layers: tuple[int, ...] | None = option(
        f"--explain: these layers (default: up to {explainer.LAYERS})", None, metavar="LAYER", group="input"
    )
    step: int | None = option(
        f"--explain: the first of {explainer.STEPS} steps (default: in the middle)", None, metavar="N", group="input"
    )
    slots: str = option("--explain: device slots, such as 1024 or 2k", "2k", metavar="N", group="cache")
    policy: str = option("--explain: the threshold policy", "ema", metavar="POLICY", group="prefetch and eviction")
    cap: int = option("--explain: most rows copied ahead", 64, metavar="S", group="prefetch and eviction")
    output: Path = option(
        "the folder to write; a report that is there is replaced", Path("report"), metavar="FOLDER", group="output"
    )


def execute(options: ReportOptions) -> int:
    """Runs the command."""
    with refusing_wrong_input():
        if options.output.exists() and not options.output.is_dir():
            raise InputError(f"--output {str(options.output)!r} is a file; give a folder")
        if bool(options.rows) == (options.explain is not None):
            raise InputError(
                f"report got {len(options.rows)} files of rows and {'a' if options.explain else 'no'} trace to "
                "explain; give files of rows, or --explain TRACE"
            )
    written = [_explain(options, options.explain)] if options.explain is not None else _report(options)
    console = output.console()
    for path in written:
        console.print(f"{path}: {output.size(path.stat().st_size)}")
    return 0


def _report(options: ReportOptions) -> list[Path]:
    with refusing_wrong_input():
        sections = read(options.rows)
        options.output.mkdir(parents=True, exist_ok=True)
    report = pages.make(sections, [str(path) for path in options.rows], str(options.output))
    pages.write(report, options.output)
    return [options.output / pages.MARKDOWN, options.output / pages.HTML]


def _explain(options: ReportOptions, name: str) -> Path:
    with refusing_wrong_input():
        trace = open_trace(explainer.ECHO_TINY_TRACE if name == explainer.ECHO_TINY else name)
        info = trace.info
        layers, steps = options.layers or explainer.usual_layers(info), explainer.usual_steps(info)
        if options.step is not None:
            last = max(options.step + 1, min(options.step + explainer.STEPS, info.steps))
            steps = list(range(options.step, last))
        slots, policy = parse_slots(options.slots, info.top_k), parse_threshold(options.policy)
        config = pool_config(info, layers, steps, slots, policy, options.cap)
        options.output.mkdir(parents=True, exist_ok=True)
    found = []
    with output.progress("explain", len(layers), "layers") as bar:
        for layer in layers:
            found += moments(trace, config, layer, steps)
            bar.advance(1)
    if not found:
        raise InputError(f"request 0 has no query in steps {steps[0]}..{steps[-1]}; choose others with --step")
    page = explainer.as_html(
        name, info, found, policy=options.policy, staging=options.cap, command=_command(options, name)
    )
    path = options.output / EXPLAINED
    pages.write_whole({path: page})
    return path


def _command(options: ReportOptions, name: str) -> str:
    words = ["echo-jax", "report", "--explain", name]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in ("rows", "explain") and value != field.default:
            words += [f"--{field.name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)
