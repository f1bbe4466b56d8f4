"""What all commands share: help, absl's flags, options as dataclasses, tables, policies, files of rows."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import logging

from echo_jax import eviction, threshold
from echo_jax.cli import main as main_module
from echo_jax.cli import options as options_lib
from echo_jax.cli import output, policies
from echo_jax.cli.errors import InputError
from echo_jax.cli.generate import GenerateOptions


def test_help_of_the_program_is_immediate(environment):
    """It names every command and imports no jax."""
    code = "import sys; from echo_jax.cli.main import main; main(['--help']); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in main_module.COMMANDS:
        assert f"\n    {command}" in done.stdout
    assert "echo-jax COMMAND --help" in done.stdout


@pytest.mark.parametrize("command", main_module.COMMANDS)
def test_help_of_a_command(echo_jax, command):
    done = echo_jax(command, "--help")
    assert done.status == 0
    assert "exit status: 0" in done.out
    assert max(map(len, done.out.splitlines())) <= 125


def test_help_shows_groups_defaults_and_examples(echo_jax):
    text = " ".join(echo_jax("generate", "--help").out.split())
    for part in (
        "prefetch and eviction:",
        "(default: ema)",
        "(default: 128)",
        "examples: echo-jax generate",
        "[:ARGS]",
    ):
        assert part in text
    for name in (*threshold.POLICIES, *eviction.POLICIES):
        assert name in text


def test_absl_flags_work_on_both_sides_of_the_command(echo_jax):
    verbosity = logging.get_verbosity()
    try:
        assert echo_jax("--verbosity=-1", "doctor", "--json").status == 0 and logging.get_verbosity() == -1
        done = echo_jax("plan", "--verbosity=1", "--model", "v33")
        assert done.status == 2
        assert "Traceback" in done.err and done.err.splitlines()[-1].startswith("echo-jax: error: model 'v33'")
    finally:
        logging.set_verbosity(verbosity)


def test_console_entry_exits_with_the_status(environment):
    command_line = [sys.executable, "-m", "echo_jax.cli.main", "plan", "--model", "v33", "--verbosity=0"]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("echo-jax: error: ") and done.stderr.count("\n") == 1


def test_options_are_the_record():
    options = GenerateOptions(model="m", prompt_file=(Path("a"), Path("b")), output=Path("c"))
    record = options_lib.record(options)
    assert record["prompt_file"] == ["a", "b"] and record["output"] == "c" and record["cap"] == 64
    assert set(record) == {field.name for field in dataclasses.fields(GenerateOptions)}


def test_gone_reader_is_no_fault(environment):
    """`echo-jax doctor | head -0`"""
    read, write = os.pipe()
    os.close(read)
    command_line = [sys.executable, "-m", "echo_jax.cli.main", "plan", "--model", "v32", "--json"]
    done = subprocess.run(command_line, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == main_module.BROKEN_PIPE and done.stderr == ""


# ---- policies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("ema", threshold.Ema()),
        ("ema:0.7", threshold.Ema(0.7)),
        ("ema:alpha=0.7", threshold.Ema(0.7)),
        ("fixed:-inf", threshold.Fixed(float("-inf"))),
        ("fixed:3", threshold.Fixed(3)),
        ("random:2.5,seed=4", threshold.Random(2.5, seed=4)),
        ("echo_jax.threshold:Last", threshold.Last()),
    ],
)
def test_threshold_by_name(text, policy):
    assert policies.parse_threshold(text) == policy


def test_every_policy_can_be_named():
    assert [type(policies.parse_threshold(name)) for name in threshold.POLICIES] == list(threshold.POLICIES.values())
    assert [type(policies.parse_eviction(name)) for name in eviction.POLICIES] == list(eviction.POLICIES.values())
    assert policies.parse_eviction("score:bonus_steps=4") == eviction.ScoreWeighted(4)


@pytest.fixture
def users_class(tmp_path, monkeypatch):
    """Writes a class of the user's own into the current folder; returns its name for the command line."""

    def write(module: str, base: str, body: str) -> str:
        source = f"import jax.numpy as jnp\nfrom {module} import {base}\nclass Faulty({base}):\n{body}\n"
        (tmp_path / "faulty.py").write_text(source)
        return "faulty:Faulty"

    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    yield write
    monkeypatch.delitem(sys.modules, "faulty", raising=False)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("    def update(self, memory, kth_score): return (memory, memory)", "same structure"),
        ("    def update(self, memory, kth_score): return memory.nothing", "fails when it is tried out"),
        ("    def value(self, memory): return jnp.zeros((3,))", "one number"),
        ("    __hash__ = None", "frozen=True"),
    ],
)
def test_a_users_class_that_cannot_serve(users_class, tmp_path, body, part):
    with pytest.raises(InputError, match=part):
        policies.parse_threshold(users_class("echo_jax.threshold", "Last", body))
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("    def touch(self, *told): return jnp.int32(3)", None),
        (
            "    def touch(self, priority, was_free, step, score): return score",
            r"touch returns float32\[2\].*int32\[2\] or int32\[\]",
        ),
        ("    def rebase(self, priority, shift): return shift", r"rebase returns int32\[\].*must return int32\[2\];"),
    ],
    ids=["one_priority_for_all", "no_priorities", "one_rebased_for_all"],
)
def test_a_users_eviction(users_class, body, part):
    with pytest.raises(InputError, match=part) if part else contextlib.nullcontext():
        policies.parse_eviction(users_class("echo_jax.eviction", "Lfu", body))


# ---- rows and sizes --------------------------------------------------------------------------------------


def test_rows_are_json_whatever_the_numbers(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    with output.Rows(True, path) as rows:
        rows.add({"row": "a", "rate": float("nan"), "cap": float("inf"), "text": "\ufffd\n"})
        assert not path.exists()  # whole or not at all
    assert (
        path.read_text() == '{"row": "a", "rate": null, "cap": "inf", "text": "\ufffd\\n"}\n' == capsys.readouterr().out
    )


def test_rows_follow_a_link_and_write_to_a_device(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in (tmp_path / "link", Path("/dev/null")):
        with output.Rows(False, path) as rows:
            rows.add({"row": "a"})
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == '{"row": "a"}\n'
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1023 KiB"),
        (2**40, "1 TiB"),
        (5 * 2**50, "5120 TiB"),
    ],
)
def test_size(count, text):
    assert output.size(count) == text
