"""The repository keeps its word about itself: contracts, targets, pins, Makefile, CI, our own text."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parent.parent
LINT_IMPORTS = str(Path(sys.executable).parent / "lint-imports")


def load_tool(name: str):
    """tools/ is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_deps = load_tool("build_deps")
requirements = load_tool("requirements")


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, **options)


# --------------------------------------------------------------------------------------- rooms and targets


def test_import_contracts_hold():
    """Imports point down, models know no cache, kernels know no caches: the contracts of pyproject.toml."""
    done = run(LINT_IMPORTS, "--no-logo", "--no-cache", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_contracts_can_break(tmp_path):
    """Wrong imports in a copy of the packages are found, so the contracts do read what is there."""
    site = sysconfig.get_path("purelib")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("echo_jax", "pallas_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, statement in [
        ("echo_jax/types.py", "import echo_jax.threshold"),
        ("echo_jax/models/__init__.py", "import echo_jax.pool"),
        ("pallas_kernels/__init__.py", "import echo_jax.types"),
    ]:
        with open(tmp_path / file, "a") as stream:
            stream.write(f"\n\ndef wrong():\n    {statement}\n")
    # -S: without it the finder of the editable install would lead back to the tree that was copied
    program = (
        f"import sys; sys.path[:0] = {[str(tmp_path), site]!r}; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(no_cache=True, no_logo=True))"
    )
    done = run(sys.executable, "-S", "-c", program, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for contract in ("Imports point down", "A model knows no cache", "Kernels know arrays, never caches"):
        assert f"{contract} BROKEN" in done.stdout, done.stdout


def test_build_targets_have_the_dependencies_of_the_imports():
    found = build_deps.deviations((ROOT / "BUILD").read_text(), build_deps.rooms())
    assert not found, "\n".join([*found, "remedy: python tools/build_deps.py --write"])


def test_every_kind_of_import_and_deviation_is_seen(tmp_path):
    files = {
        "echo_jax/__init__.py": "from echo_jax.pool import take\n",
        "echo_jax/words.py": "import numpy\n",
        "echo_jax/pool.py": "import echo_jax.words as words\nfrom pallas_kernels.top_k import reference\n",
        "echo_jax/layer.py": "def f():\n    from echo_jax import pool, words\n",
        "echo_jax/models/__init__.py": "",
        "echo_jax/models/dsa.py": "from ..words import NO_SLOT\nfrom . import presets\n",
        "echo_jax/models/presets.py": "from echo_jax.models import dsa\nfrom echo_jax import take\n",
        "pallas_kernels/__init__.py": "",
        "pallas_kernels/top_k/__init__.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tree = build_deps.rooms(tmp_path)
    assert {name: set(room.imports) for name, room in tree.items()} == {
        "echo_jax": {"pool"},
        "words": set(),
        "pool": {"words", "pallas_kernels"},
        "layer": {"pool", "words"},
        "models": {"words", "echo_jax"},
        "pallas_kernels": set(),
    }
    text = build_deps.render(tree)
    assert build_deps.deviations(text, tree) == []
    for old, new in [
        (
            'name = "echo_jax",\n    srcs = ["echo_jax/__init__.py"],\n    deps = [":pool"]',
            'name = "echo_jax",\n    srcs = ["echo_jax/__init__.py"],\n    deps = [":words"]',
        ),
        ('"echo_jax/layer.py"', '"echo_jax/lair.py"'),
        ('name = "pallas_kernels"', 'name = "kernels"'),
    ]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert build_deps.deviations(text, tree) == [
        "room pallas_kernels has no target",
        "target kernels is no room",
        'echo_jax imports pool, but its deps lack ":pool"',
        'echo_jax does not import words, but its deps hold ":words"',
        "the srcs of layer are ['echo_jax/lair.py'], not [\"echo_jax/layer.py\"]",
    ]


# ------------------------------------------------------------------------------- environment, Makefile, CI


def test_every_requirement_has_a_pin_that_fits():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert re.fullmatch(r"[0-9][\w.]*", version), f"{line!r} is not a pin"
            pins[canonicalize_name(name)] = version
    groups = ("build", "runtime", "dev", "cuda13", "metrics")
    for requirement in [Requirement(line) for group in groups for line in requirements.requirements(group)]:
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} has no pin in constraints.txt"
        assert requirement.specifier.contains(pin), f"{requirement} does not admit the pin {pin}"
    with pytest.raises(ValueError, match="no group 'deb'.* dev"):
        requirements.requirements("deb")


def test_ci_entry_is_executable_and_runs_the_tests():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert run("bash", "-n", str(script)).returncode == 0
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines and lines[-1] == "make test"


@pytest.fixture
def made(tmp_path):
    """A copy of what the Makefile depends on, with an environment that looks finished; `make` runs it dry."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "ffi").mkdir()
    (tmp_path / "ffi" / "recall.cc").write_text("")
    (tmp_path / ".venv").mkdir()
    now = (tmp_path / "ffi" / "recall.cc").stat().st_mtime
    for number, stamp in enumerate((".made-runtime", ".made-development"), start=1):
        (tmp_path / ".venv" / stamp).touch()
        os.utime(tmp_path / ".venv" / stamp, (now + number, now + number))

    def make(*arguments: str) -> str:
        # the variables by which an outer make speaks to an inner one would change what is printed
        environment = {name: value for name, value in os.environ.items() if not name.startswith("M")}
        done = run("make", "--dry-run", *arguments, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return tmp_path, make


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        ("demo", ["echo-jax generate --model echo-tiny --prompt-file", "--max-new-tokens 128 ", " --check"]),
        ("test", ["ruff check", "ruff format --quiet --check", "pyright", "lint-imports", "-m pytest -n auto"]),
        ("claims", ["-m bench.claims"]),
        ("bench-cpu", ["-m bench.cpu"]),
        ("bazel", ["bazel --batch test"]),
        ("clean", ["rm -rf .venv build"]),
    ],
)
def test_make_targets_run_what_they_say_and_install_nothing_twice(made, target, commands):
    printed = made[1](target)
    assert all(command in printed for command in commands), printed
    assert "pip install" not in printed


def test_make_installs_anew_when_what_it_was_made_from_changes(made):
    folder, make = made
    later = (folder / ".venv" / ".made-development").stat().st_mtime + 10
    for name in ("pyproject.toml", "constraints.txt", "ffi/recall.cc"):
        before = (folder / name).stat().st_mtime
        os.utime(folder / name, (later, later))
        printed = make("setup")
        assert printed.count("pip install") == printed.count("-c constraints.txt") == 2, f"{name}: {printed}"
        os.utime(folder / name, (before, before))
        assert "pip install" not in make("setup")


def test_plain_make_prints_every_target():
    done = run("make", "--no-print-directory", cwd=ROOT, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    for target in ("setup", "demo", "test", "lint", "claims", "bench-cpu", "bazel", "clean"):
        assert re.search(rf"^  {target} +\w", done.stdout, re.MULTILINE), target


def test_a_python_is_taken_only_after_it_has_run(tmp_path):
    """A shim that refuses to start and a python3 that is too old are passed over, with reasons."""
    finder, shims, pyenv = str(ROOT / "tools" / "find_python"), tmp_path / "bin", tmp_path / "pyenv"

    def script(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    script(shims / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    script(shims / "python3", "echo 'is Python 3.11' >&2; exit 1")
    for tool in ("sh", "tail", "cat"):
        (shims / tool).symlink_to(shutil.which(tool) or "")
    environment = {"PATH": str(shims), "PYENV_ROOT": str(pyenv), "HOME": str(tmp_path)}
    done = run("sh", finder, env=environment)
    assert done.returncode == 1 and not done.stdout
    assert "needs Python 3.12 or newer" in done.stderr and "PYTHON=" in done.stderr
    assert "python3.12: pyenv: python3.12: command not found" in done.stderr
    assert "python3: is Python 3.11" in done.stderr
    script(pyenv / "versions" / "3.12.9" / "bin" / "python", f'exec "{sys.executable}" "$@"')
    done = run("sh", finder, env=environment)
    assert done.returncode == 0 and Path(done.stdout.strip()).is_file(), done.stderr
    refused = run("sh", finder, str(shims / "python3"), env=environment)
    assert refused.returncode == 1 and "is Python 3.11" in refused.stderr, "a named one has no substitute"


def test_versions_and_licence_agree():
    """A citation file names one licence, that of the software; what else is shipped is test_licences.py's business."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license'].partition(' AND ')[0]}\n" in citation
    assert (ROOT / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert all((ROOT / package / "py.typed").exists() for package in ("echo_jax", "pallas_kernels"))


# ------------------------------------------------------------------------------------------- our own text

# Put together from pieces, so that this file does not hold what it looks for.
LOCAL_FOLDER = r"(?:^|[^a-zA-Z0-9_.])/(?:wo" + "rk|ro" + "ot)/"
REGISTRY_HOST = r"(?:py" + "pi|python" + "hosted|npm" + r"js)[.][a-z]"
SHARED_FOLDER = r"[.][.]/sha" + "red/"
FORBIDDEN = re.compile("|".join([LOCAL_FOLDER, REGISTRY_HOST, SHARED_FOLDER]).encode(), re.MULTILINE)


def test_no_file_names_a_folder_of_one_machine_or_the_host_of_a_registry():
    """Documents under examples/data are other people's text, and weights are bytes; all else is ours."""
    listed = run("git", "-C", str(ROOT), "ls-files", "-z")
    assert listed.returncode == 0, listed.stderr
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert "Makefile" in names
    found = []
    for name in names:
        data = (ROOT / name).read_bytes()
        if not name.startswith("examples/data/") and b"\0" not in data[:8192]:
            found += [f"{name}: {match[0].decode().strip()}" for match in FORBIDDEN.finditer(data)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text", ["/wo" + "rk/x", "at /ro" + "ot/x", "py" + "pi.org", "../sha" + "red/x"])
def test_what_is_forbidden_is_recognised(text):
    assert FORBIDDEN.search(text.encode())


def test_tests_run_under_strict_settings_on_eight_devices():
    """tests/conftest.py came before jax was imported, or none of its settings would hold."""
    import jax
    import jax.numpy as jnp

    if os.environ["JAX_PLATFORMS"] == "cpu":
        assert jax.device_count() == 8
    with pytest.raises(jax.dtypes.TypePromotionError, match="dtype_promotion=strict"):
        jnp.add(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.bfloat16))
    with pytest.raises(ValueError, match="rank_promotion=.raise"):
        jnp.add(jnp.ones((2, 2)), jnp.ones(2))
