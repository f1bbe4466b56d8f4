"""Rows that outlive an interruption: appended layer by layer, and found again by what they say of themselves.

Knows one file of JSON rows. Two rows are about the same thing when their `key` is the same: everything that decides
the numbers, and nothing else.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
"""Of replay rows. A file of another version is not appended to."""


class RowFile:
    """A file of rows that grows. `None` for a path keeps the rows in memory only."""

    def __init__(self, path: Path | None):
        """Reads what is there; a last line that was cut off is dropped. ValueError for a file that holds other
        rows, OSError for one that cannot be written."""
        self.path, self._lock = path, threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        self._is_new = not path.exists()
        path.open("a").close()  # a file that cannot be written is refused now and not after the work
        text = path.read_text("utf-8")
        whole = text[: text.rfind("\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            row = _parsed(path, number, line)
            self._known[_text(row["key"]) + row["row"]] = row
        if whole != text:
            os.truncate(path, len(whole.encode()))

    def find(self, key: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of that key: the counts, and the series if there is one."""
        return [self._known[name] for kind in ("replay", "series") if (name := _text(key) + kind) in self._known]

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Appends the rows that are not there."""
        rows = [_finite(row) for row in rows]
        with self._lock:
            rows = [row for row in rows if _text(row["key"]) + row["row"] not in self._known]
            if self.path is not None:
                self._append(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            for row in rows:
                self._known[_text(row["key"]) + row["row"]] = row

    def _append(self, path: Path, text: str) -> None:
        """All of the text or nothing: on a full disk the file is what it was, and is gone if it was made for this."""
        before = path.stat().st_size
        try:
            with path.open("a", encoding="utf-8") as stream:
                stream.write(text)
        except OSError:
            os.truncate(path, before)
            if before == 0 and self._is_new:
                path.unlink()
            raise


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number} is no JSON row ({error}); give another output file") from None
    if not isinstance(row, dict) or row.get("row") not in ("replay", "series") or "key" not in row:
        raise ValueError(f"{path}:{number} is no row of a replay; give another output file")
    if row.get("schema") != SCHEMA_VERSION:
        raise ValueError(
            f"{path}:{number} has schema {row.get('schema')} but this version writes {SCHEMA_VERSION}; give another "
            "output file"
        )
    return row


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(_finite(key), sort_keys=True)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: NaN becomes null, infinities become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
