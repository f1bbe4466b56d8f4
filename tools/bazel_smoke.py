"""Run by Bazel: every room that a file of this target imports is among the target's files.

It reads the files beside it and imports none of them, because the Python that Bazel finds may be one without
jax, or too old for their syntax. It fails when BUILD's deps leave out a room that something needs.
"""

import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[0]).absolute().parent.parent
DOTTED = re.compile(r"^\s*(?:from|import) +(echo_jax|pallas_kernels)(?:\.(\w+))?", re.MULTILINE)
LISTED = re.compile(r"^\s*from +echo_jax +import +(?:\(([^)]*)\)|(.+))", re.MULTILINE)


def needed(text: str) -> set[str]:
    """Paths below the root, without suffix, that the import statements of one file name."""
    paths = set()
    for package, room in DOTTED.findall(text):
        if package == "pallas_kernels":
            paths.add("pallas_kernels")
        elif room:
            paths.add(f"echo_jax/{room}")
    for inside, plain in LISTED.findall(text):
        names = re.sub(r"#.*", "", inside or plain).split(",")
        paths |= {f"echo_jax/{name.split()[0]}" for name in names if name.split()}
    return paths


def main() -> int:
    files = sorted([*ROOT.glob("echo_jax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")])
    if not files:
        print("no file of echo_jax is here")
        return 1
    missing = [
        f"{file.relative_to(ROOT)} imports {path}, which is not among the files of this target"
        for file in files
        for path in sorted(needed(file.read_text(encoding="utf-8")))
        if not (ROOT / f"{path}.py").exists() and not (ROOT / path / "__init__.py").exists()
    ]
    print("\n".join(missing) if missing else f"{len(files)} files, and all rooms they import")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
