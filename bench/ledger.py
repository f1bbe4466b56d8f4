"""The ledger of recorded rows: what a line is called, which lines are superseded, and that lines are only ever added.

    python -m bench.ledger                                   what is wrong with bench/results, if anything
    python -m bench.ledger show CLAIM                        the rows of a claim with their digests
    python -m bench.ledger supersede DIGEST --reason "..."   a new line that takes a row out of the judgement
    python -m bench.ledger collect FOLDER                    append the rows that a run on another machine left there

It knows lines, git and nothing of what was measured. From the commit on that added bench/results/APPEND_ONLY, a
results file starts with its parent's bytes in every commit, and every added line carries the digest of its content.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
MARKER = "bench/results/APPEND_ONLY"
EMPTY_REASON = "a reason says why the row no longer counts; give one with --reason"


def digest_of(data: Mapping[str, Any]) -> str:
    """16 hexadecimal digits of a line's content; its own "digest" does not count."""
    told = json.dumps(
        {key: value for key, value in data.items() if key != "digest"}, sort_keys=True, ensure_ascii=False
    )
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def is_superseding(data: Mapping[str, Any]) -> bool:
    """Whether a line takes another one out of the judgement, and is no row itself."""
    return "supersedes" in data


def lines_of(results: Path = RESULTS) -> Iterator[tuple[dict[str, Any], Path, int]]:
    """Every line of the top folder's files with its file and number; ValueError for one that is no JSON object."""
    for path in sorted(results.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            if isinstance(data, dict):
                yield data, path, number


def superseded(results: Path = RESULTS) -> dict[str, str]:
    """digest -> reason of every row that no longer counts."""
    return {data["supersedes"]: data.get("reason", "") for data, _, _ in lines_of(results) if is_superseding(data)}


def supersede(digest: str, reason: str, results: Path = RESULTS) -> Path:
    """Appends the line that takes every row with this digest out of the judgement, to the file of the row.

    ValueError when no row has the digest, when it is superseded already, or when the reason is empty.
    """
    if not reason.strip():
        raise ValueError(EMPTY_REASON)
    found = [path for data, path, _ in lines_of(results) if not is_superseding(data) and digest_of(data) == digest]
    if not found:
        raise ValueError(f"no row has digest {digest}; `python -m bench.ledger show CLAIM` prints digests")
    if digest in superseded(results):
        raise ValueError(f"row {digest} is superseded already: {superseded(results)[digest]}")
    line: dict[str, Any] = {"supersedes": digest, "reason": reason.strip()}
    line["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line["digest"] = digest_of(line)
    with open(found[-1], "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    return found[-1]


def collect(folder: Path, results: Path = RESULTS) -> dict[str, int]:
    """Appends every row of the folder's files to the files of the same names; name -> lines.

    ValueError, before anything is written, where a line lacks the digest of its content, and where a file stands in the
    ledger already as it is.
    """
    found = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jsonl"))}
    if not found:
        raise ValueError(f"{folder} holds no .jsonl file")
    for name, text in found.items():
        for number, line in enumerate(text.splitlines(), start=1):
            data = json.loads(line)
            if data.get("digest") != digest_of(data):
                raise ValueError(f"{name}:{number} lacks the digest of its content; a bench writes it (harness.record)")
        if (results / name).is_file() and text in (results / name).read_text(encoding="utf-8"):
            raise ValueError(f"the rows of {folder / name} are in the ledger already")
    for name, text in found.items():
        with open(results / name, "a", encoding="utf-8") as stream:
            stream.write(text)
    return {name: len(text.splitlines()) for name, text in found.items()}


# ---- only ever added to ----------------------------------------------------------------------------------------------


def why_unknown(root: Path = ROOT) -> str | None:
    """Why git cannot say how the ledger grew, or None."""
    try:
        if _git(root, "rev-parse", "--is-shallow-repository").strip() == "true":
            return "the clone is shallow, so the history of the ledger is not here"
        if not _start(root):
            return f"no commit adds {MARKER}"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"git does not answer: {error}"
    return None


def changes(root: Path = ROOT) -> list[str]:
    """What happened to results files since the marker that is more than lines added: one sentence each."""
    start, wrong = _start(root), []
    commits = _git(root, "rev-list", "--reverse", f"{start}..HEAD").split()  # all: a merge may drop lines of one side
    for commit in [*commits, None]:
        parents = [_git(root, "rev-parse", "HEAD").strip()]
        if commit is not None:
            parents = _git(root, "rev-list", "--parents", "-n", "1", commit).split()[1:]
        for parent in parents:
            wrong += _between(root, parent, commit)
    return wrong


def added_lines(root: Path = ROOT) -> Iterator[tuple[dict[str, Any], str]]:
    """Every line of the top folder's files that is not in the marker's commit, with its place."""
    start = _start(root)
    for path in sorted((root / "bench/results").glob("*.jsonl")):
        name = path.relative_to(root).as_posix()
        before = len(_bytes(root, start, name).splitlines())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[before:], start=before + 1):
            if line.strip():
                yield json.loads(line), f"{name}:{number}"


def _between(root: Path, parent: str, commit: str | None) -> list[str]:
    """Files that do not start with their parent's bytes; `commit` None is the working tree."""
    told = ["diff", "--name-status", "-M", "-z", parent, *([commit] if commit else []), "--", "bench/results"]
    fields, wrong = _git(root, *told).split("\0"), []
    where = f"commit {commit[:12]}" if commit else "the working tree"
    while fields and fields[0]:
        status, old = fields[0], fields[1]
        new = fields[2] if status.startswith("R") else old
        fields = fields[3:] if status.startswith("R") else fields[2:]
        if not old.endswith(".jsonl") or status.startswith("A"):
            continue
        before = _bytes(root, parent, old)
        if status.startswith("D"):
            wrong.append(f"{where} deletes {old}, {len(before.splitlines())} lines")
        elif not _after(root, commit, new).startswith(before):
            wrong.append(f"{where} changes or drops lines of {old} that {parent[:12]} had")
    return wrong


def _after(root: Path, commit: str | None, name: str) -> bytes:
    return _bytes(root, commit, name) if commit else (root / name).read_bytes()


def _start(root: Path) -> str:
    return (_git(root, "log", "--diff-filter=A", "--format=%H", "--reverse", "--", MARKER).split() or [""])[0]


def _bytes(root: Path, commit: str, name: str) -> bytes:
    """A file's content in a commit; empty where it is not there."""
    told = subprocess.run(
        ["git", "-C", str(root), "cat-file", "blob", f"{commit}:{name}"], capture_output=True, check=False
    )
    return told.stdout if told.returncode == 0 else b""


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout


# ---- the command -----------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ledger", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command")
    shown = commands.add_parser("show", help="the rows of a claim, with digests")
    shown.add_argument("claim")
    taken = commands.add_parser("supersede", help="take a row out of the judgement, with a reason")
    taken.add_argument("digest")
    taken.add_argument("--reason", required=True)
    brought = commands.add_parser("collect", help="append the rows that a run on another machine left in a folder")
    brought.add_argument("folder", type=Path)
    flags = parser.parse_args(arguments)
    try:
        if flags.command == "collect":
            for name, lines in collect(flags.folder).items():
                print(f"{name}: {lines} lines")
            return 0
        if flags.command == "supersede":
            print(f"superseded in {supersede(flags.digest, flags.reason).name}")
            return 0
        if flags.command == "show":
            gone = superseded()
            for data, path, number in lines_of():
                if data.get("claim") == flags.claim:
                    digest = digest_of(data)
                    state = f"superseded: {gone[digest]}" if digest in gone else ""
                    print(digest, f"{path.name}:{number}", data["date"], data["value"], data["unit"], state)
            return 0
        reason = why_unknown()
        wrong = [reason] if reason else changes()
    except ValueError as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 2
    print("\n".join(wrong) or "lines were only added")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
