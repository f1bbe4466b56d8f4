"""Which sources a claim rests on, a digest of them that prose and layout do not change, and the commit of this tree.

    python -m bench.sources write     bench/COMMIT: commit and file digests, for a run on a machine without git

A row keeps the digest of its claim's sources as they were when it was measured (`sources` in bench/claims.toml), so
that a later change shows as "stale". Of Python it is the syntax tree without docstrings, of C++ and CUDA the tokens
without comments; other files count byte for byte. Names do not count, so a file that is moved unchanged changes
nothing; where an old commit is asked, bench/moved.toml says what a file was called then.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = Path(__file__).resolve().parent / "claims.toml"
MOVED = Path(__file__).resolve().parent / "moved.toml"
COMMIT = Path(__file__).resolve().parent / "COMMIT"
MEASURED = (
    "echo_jax/**/*.py",
    "pallas_kernels/**/*.py",
    "pallas_kernels/**/*.json",
    "ffi/**/*",
    "bench/*.py",
    "bench/*.cu",
)

_C_TOKENS = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|\w+|\S", re.DOTALL)


# ---- of a claim ------------------------------------------------------------------------------------------------------


@functools.cache
def globs_of(claim: str) -> tuple[str, ...]:
    """What a claim rests on: its own `sources`, else those of its part; empty where neither says."""
    data = tomllib.loads(CLAIMS.read_text(encoding="utf-8"))
    own = data["claims"].get(claim, {}).get("sources")
    return tuple(own if own is not None else data.get("sources", {}).get(claim.partition(".")[0], ()))


def digest_now(claim: str, root: Path = ROOT) -> str:
    """The digest of a claim's sources in the working tree; "" where the claim names none."""
    globs = globs_of(claim)
    return _digest_now(globs, root) if globs else ""


@functools.cache
def _digest_now(globs: tuple[str, ...], root: Path) -> str:
    names = sorted({path.relative_to(root).as_posix() for glob in globs for path in root.glob(glob) if path.is_file()})
    return _together(_digest_of(Path(name).suffix, (root / name).read_bytes()) for name in names if _counts(name))


@functools.cache
def digest_at(globs: tuple[str, ...], commit: str, root: Path = ROOT) -> str | None:
    """The digest in a commit of this repository; None where git or the commit is not here."""
    listed = _git(root, "ls-tree", "-r", commit)
    if listed is None:
        return None
    wanted, found = [_as_regex(glob) for glob in globs], []
    for line in listed.splitlines():
        blob, name = line.split(" ", 2)[2].split("\t", 1)
        if _counts(name) and any(one.fullmatch(moved().get(name, name)) for one in wanted):
            found.append(_digest_of_blob(root, blob, Path(name).suffix))
    return _together(found)


@functools.cache
def _digest_of_blob(root: Path, blob: str, suffix: str) -> str:
    content = subprocess.run(["git", "-C", str(root), "cat-file", "blob", blob], capture_output=True, check=True).stdout
    return _digest_of(suffix, content)


@functools.cache
def moved() -> dict[str, str]:
    """Old path -> new path of every file that was moved."""
    return tomllib.loads(MOVED.read_text(encoding="utf-8"))["moved"] if MOVED.is_file() else {}


def commit_before(date: str, root: Path = ROOT) -> str | None:
    """The last commit before a moment, for rows that do not name theirs; None where git cannot say."""
    found = _git(root, "rev-list", "-1", f"--before={date}", "HEAD")
    return (found or "").strip() or None


def _counts(name: str) -> bool:
    return "__pycache__" not in name and "/_library/" not in name and not name.endswith(".md")


def _together(digests: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()[:16]


def _digest_of(suffix: str, content: bytes) -> str:
    return hashlib.sha256(meaning(suffix, content)).hexdigest()


def meaning(suffix: str, content: bytes) -> bytes:
    """A file without what no compiler sees: comments, layout, and docstrings in Python."""
    if suffix == ".py":
        tree = ast.parse(content)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                    if isinstance(node.body[0].value.value, str):
                        node.body = node.body[1:]
        return ast.dump(tree).encode()
    if suffix in (".h", ".cuh", ".cu", ".cc", ".cpp"):
        tokens = _C_TOKENS.findall(content.decode("utf-8"))
        return "\n".join(token for token in tokens if not token.startswith(("//", "/*"))).encode()
    return content


def _as_regex(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*)", glob)
    kinds = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.compile("".join(kinds.get(part, re.escape(part)) for part in parts))


# ---- of this tree ----------------------------------------------------------------------------------------------------


def commit_of_tree(root: Path = ROOT, told: Path = COMMIT) -> str:
    """This tree's commit, "+" behind it where files differ from it; "" where neither bench/COMMIT nor git can say.

    bench/COMMIT counts first, if it was written for just these files: a copy of a tree may have a git folder that knows
    an older commit only.
    """
    noted = json.loads(told.read_text(encoding="utf-8")) if told.is_file() else None
    if noted is not None and noted["files"] == _file_digests(root, noted["files"]):
        return noted["commit"]
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if head is not None and head.strip():
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
        return head.strip() + ("+" if changed else "")
    return noted["commit"].rstrip("+") + "+" if noted is not None else ""


def write_commit(root: Path = ROOT, told: Path = COMMIT) -> str:
    """Writes bench/COMMIT, which git ignores; it goes along with the tree to a machine without git."""
    told.unlink(missing_ok=True)  # what an earlier call wrote says nothing of this tree
    commit = commit_of_tree(root, told)
    if not commit:
        raise ValueError("git does not know this tree's commit; run it in a clone")
    wanted = [_as_regex(glob) for glob in MEASURED]
    names = [name for name in (_git(root, "ls-files") or "").splitlines() if any(one.fullmatch(name) for one in wanted)]
    told.write_text(json.dumps({"commit": commit, "files": _file_digests(root, names)}), encoding="utf-8")
    return commit


def _file_digests(root: Path, names: Iterable[str]) -> dict[str, str]:
    return {
        name: hashlib.sha256((root / name).read_bytes()).hexdigest()[:16] if (root / name).is_file() else "missing"
        for name in names
    }


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def main(arguments: Sequence[str]) -> int:
    if list(arguments) != ["write"]:
        print("python -m bench.sources write", file=sys.stderr)
        return 2
    print(f"{COMMIT.relative_to(ROOT)}: {write_commit()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
