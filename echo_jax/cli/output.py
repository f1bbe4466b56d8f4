"""What a command prints and writes: tables for people, the same content as JSON rows, progress on the terminal.

Knows files, terminals and units. Does not know what the rows mean.

A file of rows appears whole: it is written beside its place, which is tried before the work begins, and renamed at the
end. A command that is interrupted keeps the rows it has.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from echo_jax.cli import signals


class Rows:
    """JSON rows: printed as they come with `to_stdout`, and kept for the file `path`.

    Use as a context: the file takes its place when the block ends well or is interrupted, and nothing is left of it
    when the block fails. Raises OSError at once when the file could not be written.
    """

    def __init__(self, to_stdout: bool, path: Path | None):
        self.to_stdout = to_stdout
        self._stream, self._final = (None, None) if path is None else _open_beside(path)

    def add(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(_finite(row), ensure_ascii=False)
        if self._stream is not None:  # first, so that no row has been seen that an interrupted command does not keep
            self._stream.write(line + "\n")
        if self.to_stdout:
            # A character that the terminal lacks must not end the run.
            print(line if _can_print(line) else json.dumps(_finite(row)), flush=True)

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._stream is None:
            return
        keeps = kind is None or issubclass(kind, KeyboardInterrupt)
        if kind is not None and keeps:
            signals.acknowledge()
        try:
            self._stream.close()  # where the last rows are written, or are not
        except OSError:
            keeps = False
            if kind is None:
                raise
        finally:
            if self._final is not None and not keeps:
                os.unlink(self._stream.name)
        if self._final is not None and keeps:
            os.replace(self._stream.name, self._final)


def _open_beside(path: Path) -> tuple[Any, str | None]:
    """A stream for the rows, and where its file goes when whole; None for a pipe or a device, written directly."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"output {str(path)!r} is a folder; give the path of a file")
        if not stat.S_ISREG(mode):
            return path.open("w", encoding="utf-8"), None
    final = os.path.realpath(path)  # through a link, so that the link stays
    folder, name = os.path.split(final)
    try:
        if os.path.exists(final) and not os.access(final, os.W_OK):
            raise PermissionError(0, "Permission denied")
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".partial", dir=folder)
    except OSError as error:
        raise OSError(
            f"output {str(path)!r} cannot be written ({error.strerror}); give a file in a writable folder"
        ) from None
    os.fchmod(handle, 0o666 & ~_umask())
    stream = os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace")
    return _Named(stream, temporary), final


class _Named:
    """A stream and the path of its file (a stream made from a descriptor knows only the number)."""

    def __init__(self, stream: Any, name: str):
        self.write, self.close, self.name = stream.write, stream.close, name


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _can_print(line: str) -> bool:
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: NaN becomes null, infinities become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


# ---- for people ------------------------------------------------------------------------------------------


def console() -> Console:
    """Standard output. Away from a terminal lines are long enough for every table, and nothing is coloured."""
    plain = _Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    return (
        plain if plain.is_terminal else _Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=160)
    )


class _Console(Console):
    """A reader that has gone is the caller's to answer, not this package's to end the process for."""

    def on_broken_pipe(self) -> None:
        raise


def table(title: str, columns: Sequence[str], text: Sequence[int] = (0,)) -> Table:
    """An empty table; columns are numbers, aligned right, except those in `text`. `show` prints it."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number in text else "right", no_wrap=True)
    return made


def show(table: Table, legend: str) -> None:
    """Prints a table, and below it one line that says what its columns count."""
    shown = console()
    shown.print(table)
    shown.print(legend, style="dim", soft_wrap=True)


def size(count: float) -> str:
    """1536 -> "1.5 KiB". Exact up to 1023 bytes."""
    if abs(count) < 1024:
        return f"{count:g} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.4g} {unit}" if abs(count) < 1000 else f"{count:.0f} {unit}"
    raise AssertionError


class Bar(Protocol):
    """What a command tells its progress bar."""

    def describe(self, text: str) -> None: ...

    def advance(self, count: int) -> None: ...

    def stop(self) -> None:
        """The bar goes; what follows is written to the terminal by somebody else."""
        ...

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """The bar goes for as long as the block writes to the terminal."""
        ...


class _NoBar:
    def describe(self, text: str) -> None:
        pass

    def advance(self, count: int) -> None:
        pass

    def stop(self) -> None:
        pass

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class _RichBar:
    def __init__(self, progress: Progress, task: Any):
        self._progress, self._task = progress, task

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def advance(self, count: int) -> None:
        self._progress.advance(self._task, count)

    def stop(self) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._progress.stop()
        yield
        self._progress.start()


@contextlib.contextmanager
def progress(description: str, total: int, unit: str = "tokens") -> Iterator[Bar]:
    """A bar on standard error while the block runs, counting `unit`; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield _NoBar()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield _RichBar(shown, shown.add_task(description, total=total))
