"""`echo-jax report`: rows of replays become a page of tables and figures; or one decode step a page to step through.

Knows options and files. What is drawn is the business of `report`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from echo_jax.cli import output
from echo_jax.cli.errors import InputError, refusing_wrong_input
from echo_jax.cli.options import option
from echo_jax.report import pages
from echo_jax.report.rows import read

EXAMPLES = """\
examples:
  echo-jax replay synth:median --policy never ema last --sweep slots=2k,4k,8k --series --output rows.jsonl
  echo-jax report rows.jsonl --output median-report

exit status: 0 written, 2 wrong input"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Draws what replays counted: report.md with figures, and one self-contained report.html."""

    rows: tuple[Path, ...] = option(
        "files of `echo-jax replay --output`; those of `--series` add the k-th score over time",
        positional=True,
        metavar="ROWS",
        group="input",
    )
    output: Path = option(
        "the folder to write; a report that is there is replaced", Path("report"), metavar="FOLDER", group="output"
    )


def execute(options: ReportOptions) -> int:
    """Runs the command."""
    with refusing_wrong_input():
        if options.output.exists() and not options.output.is_dir():
            raise InputError(f"--output {str(options.output)!r} is a file; give a folder")
        report = pages.make(read(options.rows), [str(path) for path in options.rows], str(options.output))
        written = pages.write(report, options.output)
    console = output.console()
    for path in written[-2:]:
        console.print(f"{path}: {output.size(path.stat().st_size)}")
    return 0
