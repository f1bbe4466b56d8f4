"""Every file that is shipped beside the sources has a copyright and a licence, and every licence has its text."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("echo_jax", "pallas_kernels", "examples")
SOURCES = (".py", ".pyc", ".so", ".dylib")
TEXTS = (".txt", ".rst")  # may be other people's, so each has an annotation by its own name
LICENCE_TEXTS = {"Apache-2.0": "LICENSE", "PSF-2.0": "LICENSES/PSF-2.0.txt"}
ANNOTATIONS = tomllib.loads((ROOT / "REUSE.toml").read_text(encoding="utf-8"))["annotations"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def patterns(annotation: dict) -> list[str]:
    paths = annotation["path"]
    return [paths] if isinstance(paths, str) else paths


def matches(pattern: str, name: str) -> bool:
    """As REUSE has it: `*` is anything within a folder, `**` anything."""
    parts = {"**": ".*", "*": "[^/]*"}
    return (
        re.fullmatch("".join(parts.get(part, re.escape(part)) for part in re.split(r"(\*+)", pattern)), name)
        is not None
    )


def annotations_of(name: str) -> list[dict]:
    by_name = name.endswith(TEXTS)
    return [
        annotation
        for annotation in ANNOTATIONS
        if any(pattern == name if by_name else matches(pattern, name) for pattern in patterns(annotation))
    ]


def shipped_files() -> list[str]:
    files = (path for folder in SHIPPED for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(str(path.relative_to(ROOT)) for path in files if not path.name.endswith(SOURCES))


def test_every_shipped_file_has_one_licence():
    names = shipped_files()
    assert "examples/data/manual.txt" in names and "echo_jax/data/traces/prompts/code.txt" in names
    found = {name: len(annotations_of(name)) for name in names}
    wrong = {name: count for name, count in found.items() if count != 1}
    assert not wrong, f"annotations in REUSE.toml, which must be one each (a text by its own name): {wrong}"


def test_a_new_text_is_not_taken_for_ours():
    assert not annotations_of("echo_jax/data/echo-tiny/novel.txt") and not annotations_of("pallas_kernels/manual.rst")
    assert len(annotations_of("echo_jax/data/echo-tiny/config.json")) == 1


def test_no_annotation_is_left_over():
    names = shipped_files()
    unused = [
        pattern for one in ANNOTATIONS for pattern in patterns(one) if not any(matches(pattern, name) for name in names)
    ]
    assert not unused


def test_every_licence_is_declared_and_has_its_text():
    used = {licence for one in ANNOTATIONS for licence in one["SPDX-License-Identifier"].split(" AND ")}
    assert used == set(LICENCE_TEXTS) == set(PROJECT["license"].split(" AND "))
    assert all(one["SPDX-FileCopyrightText"] for one in ANNOTATIONS)
    text = (ROOT / LICENCE_TEXTS["PSF-2.0"]).read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text and "All Rights Reserved" in text
    assert "2022, 2023 Python Software Foundation" in text and "8. By copying, installing" in text


def test_who_has_the_text_has_the_notice():
    """What came from Python says so where it lies, and names the licence."""
    for annotation in ANNOTATIONS:
        if "PSF-2.0" in annotation["SPDX-License-Identifier"]:
            for name in patterns(annotation):
                readme = (
                    next(folder for folder in (ROOT / name).parents if (folder / "README.md").exists()) / "README.md"
                )
                said = readme.read_text(encoding="utf-8")
                assert Path(name).name in said and "2001-2023 Python Software Foundation" in said, name
                assert "PSF-2.0" in said, name


def test_a_wheel_carries_the_licences(tmp_path):
    """Its metadata are made as pip makes them; nothing is compiled for it."""
    pytest.importorskip("scikit_build_core", reason="the build back end is not installed here")
    program = (
        "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare; "
        "print(prepare(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / done.stdout.split()[-1]
    metadata = (folder / "METADATA").read_text(encoding="utf-8")
    assert f"\nLicense-Expression: {PROJECT['license']}\n" in metadata
    for name in (*LICENCE_TEXTS.values(), "REUSE.toml"):
        assert f"\nLicense-File: {name}\n" in metadata
        assert (folder / "licenses" / name).read_bytes() == (ROOT / name).read_bytes()
