"""Prints groups of requirements of pyproject.toml, one requirement a line, for `pip install -r`.

    python tools/requirements.py build runtime dev

`build` is what the build back end needs, `runtime` is what the package needs, every other name is an extra.
It lets the Makefile install everything in one resolution, and then the package itself without dependencies or
isolation, so the library is compiled against the versions it will run with. It knows pyproject.toml and
nothing else.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

# Where cmake and ninja are not on the machine, the build back end would fetch them into its isolated
# environment. There is no isolation here, so they are named; the wheels are small, and every machine builds
# with the same ones.
BUILD_TOOLS = ["cmake", "ninja"]


def requirements(group: str, pyproject: Path = PYPROJECT) -> list[str]:
    """The requirements of one group, as written in pyproject.toml; ValueError names the groups there are."""
    data = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    groups = {
        "build": data["build-system"]["requires"] + BUILD_TOOLS,
        "runtime": data["project"]["dependencies"],
        **data["project"].get("optional-dependencies", {}),
    }
    if group not in groups:
        raise ValueError(f"no group {group!r} in {pyproject.name}; there are {', '.join(sorted(groups))}")
    return list(groups[group])


if __name__ == "__main__":
    try:
        print("\n".join(line for group in sys.argv[1:] for line in requirements(group)))
    except ValueError as error:
        sys.exit(str(error))
