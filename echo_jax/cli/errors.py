"""Wrong input, and how a command says so: one line that names the quantity, both values and the remedy, and exit 2.

Knows which exceptions are a user's to answer. Everything else is a fault of the library and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator

NO_EVIDENCE = 3
"""Exit status where evidence was required and a run, without a difference, could not have shown one."""


class InputError(Exception):
    """What the user gave cannot be served; the message is one line for them to read."""


@contextlib.contextmanager
def refusing_wrong_input() -> Iterator[None]:
    """Turns what the library raises at its door into an InputError.

    Wrap the checks of a command with it, never its run: a ValueError out of running code is a fault and must not be
    taken for the user's.
    """
    try:
        yield
    except OSError as error:
        named = error.strerror and error.filename
        raise InputError(f"{error.filename!r}: {error.strerror}" if named else str(error)) from error
    except (ValueError, NotImplementedError, RuntimeError, ImportError) as error:
        raise InputError(str(error)) from error


def nearest(word: str, known: Iterable[str]) -> str:
    """For the end of a message: the known word that was perhaps meant, and all there are."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"
