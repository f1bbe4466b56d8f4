"""Keeps BUILD true: one target per room, with exactly the dependencies that the room's imports have.

    python tools/build_deps.py           each difference of BUILD and imports; exit status 1 if any
    python tools/build_deps.py --write   write BUILD anew from the imports

A room is a module or package directly under echo_jax, or pallas_kernels. Imports are read from the syntax
tree, those inside functions included; nothing is imported. Which way imports may point is not decided here
(that is the import contracts of pyproject.toml). This file knows BUILD's form and the folders, and nothing of
what the rooms do.
"""

import ast
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY, KERNELS = "echo_jax", "pallas_kernels"

HEADER = """\
# One target per room of echo_jax; the edges are the rooms' imports.
# Written by `python tools/build_deps.py --write`; a test holds it against the imports.
# Installed packages (jax, numpy, ...) are no Bazel targets here, and pytest stays the runner of the tests.

package(default_visibility = ["//visibility:public"])

filegroup(
    name = "ffi",
    srcs = glob(["ffi/**"]),
)
"""

SMOKE = """\
# Any room and what it names must bring every file of echo_jax that it imports, directly or not.
py_test(
    name = "smoke",
    size = "small",
    srcs = ["tools/bazel_smoke.py"],
    main = "tools/bazel_smoke.py",
    python_version = "PY3",
    deps = [":{room}"],
)
"""


@dataclasses.dataclass(frozen=True)
class Room:
    """A target: its name, its source files as BUILD writes them, and the names of the rooms it imports."""

    name: str
    sources: str
    imports: frozenset[str]


def rooms(root: Path = ROOT) -> dict[str, Room]:
    """Every room of the tree by name; the package's own __init__ is the room `echo_jax`."""
    found = {}
    for path in sorted((root / LIBRARY).iterdir()):
        if path.suffix == ".py":
            name = LIBRARY if path.stem == "__init__" else path.stem
            found[name] = (f'["{LIBRARY}/{path.name}"]', [path])
        elif (path / "__init__.py").exists():
            found[path.name] = (f'glob(["{LIBRARY}/{path.name}/**/*.py"])', sorted(path.rglob("*.py")))
    if (root / KERNELS).exists():
        found[KERNELS] = (f'glob(["{KERNELS}/**/*.py"])', sorted((root / KERNELS).rglob("*.py")))
    result = {}
    for name, (sources, files) in found.items():
        imports: set[str] = set()
        for file in files:
            imports |= imported_rooms(file.read_text(encoding="utf-8"), file.relative_to(root), set(found))
        result[name] = Room(name, sources, frozenset(imports - {name}))
    return result


def imported_rooms(source: str, file: Path, names: set[str]) -> set[str]:
    """The rooms one file imports, anywhere in it. `file`, relative to the root, resolves relative imports."""
    found = set()
    for node in ast.walk(ast.parse(source, filename=str(file))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # level 1 is the package the file stands in, each further level the package around it
            package = list(file.parts[: len(file.parts) - node.level]) if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
            # `from echo_jax import pool` needs the room pool; a name that is no room needs __init__ itself
            if base == LIBRARY and all(alias.name in names for alias in node.names):
                modules = modules[1:]
        else:
            continue
        for module in modules:
            head, _, rest = module.partition(".")
            if head == KERNELS:
                found.add(KERNELS)
            elif head == LIBRARY:
                first = rest.partition(".")[0]
                if first in names:
                    found.add(first)
                elif not first:
                    found.add(LIBRARY)
    return found


def declared(text: str) -> dict[str, tuple[set[str], str]]:
    """The py_library targets of a BUILD file (Python syntax): name -> (rooms in deps, srcs as written)."""
    targets = {}
    for statement in ast.parse(text).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "py_library":
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            deps = ast.literal_eval(given["deps"]) if "deps" in given else []
            targets[ast.literal_eval(given["name"])] = (
                {dep.removeprefix(":") for dep in deps},
                ast.unparse(given["srcs"]),
            )
    return targets


def deviations(text: str, tree: dict[str, Room]) -> list[str]:
    """Every way in which a BUILD file and the rooms differ, one sentence each."""
    targets, found = declared(text), []
    found += [f"room {name} has no target" for name in sorted(tree.keys() - targets.keys())]
    found += [f"target {name} is no room" for name in sorted(targets.keys() - tree.keys())]
    for name in sorted(tree.keys() & targets.keys()):
        deps, sources = targets[name]
        room = tree[name]
        found += [f'{name} imports {other}, but its deps lack ":{other}"' for other in sorted(room.imports - deps)]
        found += [
            f'{name} does not import {other}, but its deps hold ":{other}"' for other in sorted(deps - room.imports)
        ]
        if sources != ast.unparse(ast.parse(room.sources)):
            found.append(f"the srcs of {name} are {sources}, not {room.sources}")
    return found


def render(tree: dict[str, Room]) -> str:
    """BUILD, as a text: the rooms in order of name."""
    blocks = [HEADER]
    for room in sorted(tree.values(), key=lambda room: room.name):
        lines = ["py_library(", f'    name = "{room.name}",', f"    srcs = {room.sources},"]
        if room.name == "_ffi":
            lines.append('    data = [":ffi"],')
        if len(room.imports) == 1:
            lines.append(f'    deps = [":{next(iter(room.imports))}"],')
        elif room.imports:
            lines += ["    deps = [", *(f'        ":{name}",' for name in sorted(room.imports)), "    ],"]
        blocks.append("\n".join([*lines, ")", ""]))
    # the room with the longest reach proves the most
    widest = max(tree, key=lambda name: (len(_reach(name, tree)), name))
    return "\n".join([*blocks, SMOKE.format(room=widest)])


def _reach(name: str, tree: dict[str, Room]) -> set[str]:
    reached, todo = set(), [name]
    while todo:
        if (current := todo.pop()) not in reached:
            reached.add(current)
            todo += tree[current].imports
    return reached


def main(arguments: list[str]) -> int:
    path = ROOT / "BUILD"
    if arguments == ["--write"]:
        path.write_text(render(rooms()), encoding="utf-8")
        print(f"{path.name} written: {len(rooms())} rooms")
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    found = deviations(path.read_text(encoding="utf-8"), rooms())
    print("\n".join(found) if found else f"{path.name} agrees with the imports")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
