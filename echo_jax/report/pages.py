"""A report as Markdown with its figures beside it, and as one HTML file that needs nothing else.

Knows pages. Does not know what is drawn.
"""

from __future__ import annotations

import dataclasses
import html
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from echo_jax.report import figures, svg
from echo_jax.report.commands import replay_commands, report_command
from echo_jax.report.figures import Figure
from echo_jax.report.rows import Section

MARKDOWN, HTML, FIGURES = "report.md", "report.html", "figures"

PAGE_STYLE = """\
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 2rem 0 .5rem; } p { max-width: 44rem; } .faint { color: var(--faint); }
figure { margin: 0; } figcaption { color: var(--faint); font-size: .9rem; max-width: 40rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; padding: .5rem; border-radius: 4px;
  border: 1px solid var(--grid); }
"""


@dataclasses.dataclass(frozen=True)
class Report:
    """Sections with their figures, and the commands that make them."""

    sections: tuple[tuple[Section, tuple[Figure, ...]], ...]
    files: tuple[str, ...]  # the rows' files, as they were given
    folder: str

    @property
    def output(self) -> str:
        """The file that the commands write rows to: the first one read."""
        return self.files[0]


def make(sections: Sequence[Section], files: Sequence[str], folder: str) -> Report:
    """All figures of all sections."""
    return Report(tuple((one, tuple(figures.figures(one))) for one in sections), tuple(files), folder)


def write(report: Report, folder: Path) -> list[Path]:
    """Writes the folder: report.md, figures/, report.html. Returns what was written."""
    texts = {
        _file(place, figure): svg.standalone(figure.chart)
        for place, (_, some) in enumerate(report.sections)
        for figure in some
    }
    texts |= {MARKDOWN: as_markdown(report), HTML: as_html(report)}
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    return write_whole({folder / name: text for name, text in texts.items()})


def write_whole(texts: Mapping[Path, str]) -> list[Path]:
    """Writes files all or none: beside their places first, and renamed when every one is there. Returns their paths."""
    partial = {path: path.with_name(f".{path.name}.partial") for path in texts}
    try:
        for path, text in texts.items():
            partial[path].write_text(text, encoding="utf-8")
        for path in texts:
            os.replace(partial[path], path)
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return list(texts)


def _file(place: int, figure: Figure) -> str:
    name = re.sub(r"[^a-zA-Z0-9.-]+", "-", figure.name)
    return f"{FIGURES}/{place + 1}-{name}.svg"


def _commands(report: Report, section: Section, figure: Figure | None = None) -> list[str]:
    lines = None if figure is None else figure.lines
    files = [report.output] if figure is not None else report.files
    return [*replay_commands(section, report.output, lines), report_command(files, report.folder)]


def as_markdown(report: Report) -> str:
    """The report as Markdown; its figures are files beside it."""
    parts = ["# Replays", ""]
    for place, (section, some) in enumerate(report.sections):
        parts += [f"## `{section.name}`", "", *figures.notes(section), ""]
        columns, rows = figures.table(section)
        parts += [_row(columns), _row(["---", *["---:"] * (len(columns) - 1)]), *map(_row, rows), ""]
        parts += [figures.COLUMN_NOTES, "", *_block(_commands(report, section)), ""]
        for figure in some:
            parts += [f"### {figure.title}", "", f"![{figure.title}]({_file(place, figure)})", "", figure.caption, ""]
            parts += [*_block(_commands(report, section, figure)), ""]
    return "\n".join(parts)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _block(lines: Sequence[str]) -> list[str]:
    return ["```sh", *lines, "```"]


def as_html(report: Report) -> str:
    """The report as one page: no file, no font and no script from anywhere else."""
    parts = ["<h1>Replays</h1>"]
    for section, some in report.sections:
        parts.append(f"<h2><code>{html.escape(section.name)}</code></h2>")
        parts += [f"<p>{html.escape(note)}</p>" for note in figures.notes(section)]
        columns, rows = figures.table(section)
        parts.append('<div class="wide" tabindex="0"><table><thead>' + _cells("th", columns) + "</thead><tbody>")
        parts += [_cells("td", row) for row in rows]
        parts.append(f'</tbody></table></div><p class="faint">{html.escape(figures.COLUMN_NOTES)}</p>')
        parts.append(_pre(_commands(report, section)))
        for figure in some:
            parts.append(f"<h3>{html.escape(figure.title)}</h3><figure>{figure.chart}")
            parts.append(f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>")
            parts.append(_pre(_commands(report, section, figure)))
    return document("Replays", "\n".join(parts), svg.STYLE + PAGE_STYLE)


def document(title: str, body: str, style: str) -> str:
    """A whole HTML page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _cells(kind: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"


def _pre(lines: Sequence[str]) -> str:
    return f"<pre>{html.escape(chr(10).join(lines))}</pre>"
