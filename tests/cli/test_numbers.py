"""Numbers on the command line: how they may be written, and that an absurd one is refused in one line by every flag."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import typing

import pytest

from echo_jax import eviction, threshold
from echo_jax.cli import main as main_module
from echo_jax.cli import numbers, policies
from echo_jax.cli import options as options_lib
from echo_jax.cli.errors import InputError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("4k", 4000),
        ("4K", 4000),
        ("1M", 10**6),
        ("64Ki", 65536),
        ("1.5M", 1_500_000),
        ("-1", -1),
        ("1e3", 1000),
    ],
)
def test_counts(text, value):
    assert numbers.count(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "4x", "1.5", "abc", "nan", "inf", "1e400", "9" * 40, "4 k k", "0x10", "1_000", "٣x"]
)
def test_what_is_no_count(text):
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        numbers.count(text)
    assert repr(text) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("141GB", 141 * 10**9),
        ("80 GiB", 80 * 2**30),
        ("1e9", 10**9),
        ("500MB", 5 * 10**8),
        ("0B", 0),
        ("4kB", 4000),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes(text, value):
    assert numbers.size(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("141", "'141' is 141 bytes; write 141GB"),
        ("0", "'0' is 0 bytes; write 0GB"),
        ("-1GB", "lies in 0.."),
        ("1e40GB", "lies in 0.."),
        ("12 parsecs", "has the unit 'PARSECS'"),
        ("GB", "is not a size"),
        ("nan", "is not a size"),
    ],
)
def test_what_is_no_size(text, words):
    """Regression: --device-memory 141 was taken for 141 bytes."""
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        numbers.size(text)


# ---- every flag of every command -------------------------------------------------------------------------------------

ABSURD = ("", "abc", "nan", "-inf", "1e999", "9" * 30, "-" + "9" * 30, "4x", "1,2", "\x00", "{}", "None", "٤", "../..")


def flags_of(command: str) -> list[tuple[str, type]]:
    module = importlib.import_module(f"echo_jax.cli.{command}")
    options = getattr(module, main_module.COMMANDS[command][0])
    kinds = typing.get_type_hints(options)
    return [
        (options_lib.flag(field.name), options_lib._element_type(kinds[field.name])[0])
        for field in dataclasses.fields(options)
        if not field.metadata.get("positional")
    ]


@pytest.mark.parametrize("command", main_module.COMMANDS)
def test_an_absurd_number_is_refused_in_one_line_that_names_the_flag(command, capsys):
    for flag, kind in flags_of(command):
        if kind not in (int, float):
            continue
        for text in ABSURD:
            if kind is float and text in ("-inf", "1e999", "9" * 30, "-" + "9" * 30):
                continue  # numbers, if strange ones: what they mean is the command's to refuse
            with pytest.raises(SystemExit) as ended:
                main_module._parse(["echo-jax", command, f"{flag}={text}"])
            told = capsys.readouterr().err
            assert ended.value.code == 2 and told.count("\n") == 1, (flag, text, told)
            assert flag in told and "invalid" not in told and "Traceback" not in told, told


# ---- policies --------------------------------------------------------------------------------------------------------

PYTHON_ERRORS = (
    "<=",
    "not supported between",
    "__init__",
    "positional argument",
    "unsupported operand",
    "Traceback",
    "<class",
)


@pytest.mark.parametrize("name", sorted({**threshold.POLICIES, **threshold.REPLAY_ONLY}))
@pytest.mark.parametrize(
    "arguments", ["abc", "1e999,2,3,4,5", "0.5,0.5,0.5,0.5,0.5,0.5", "x=1", "None", "[1]", "True", "'a'"]
)
def test_no_python_error_shows_through_a_threshold(name, arguments):
    refused(lambda: policies.parse_threshold(f"{name}:{arguments}", in_replay=True))


@pytest.mark.parametrize("name", sorted({**eviction.POLICIES, **eviction.REPLAY_ONLY}))
@pytest.mark.parametrize(
    "arguments", ["abc", "1,2,3,4", "x=1", "None", "[1]", "True", "2147483647", "1e999", "-1", "0.5"]
)
def test_no_python_error_shows_through_an_eviction_policy(name, arguments):
    refused(lambda: policies.parse_eviction(f"{name}:{arguments}", in_replay=True))


@pytest.mark.parametrize(
    "text", ["fixed:abc", "fixed:-1", "proportional:x", "budgeted:1,2,3,4", "-5", "4x", "fixed:1e9"]
)
def test_no_python_error_shows_through_a_cap(text):
    refused(lambda: policies.parse_cap(text))


def refused(parse) -> None:
    """Either a policy, or one line that says what to write."""
    try:
        parse()
    except InputError as error:
        told = str(error)
        assert "\n" not in told and not any(words in told for words in PYTHON_ERRORS), told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("score:2147483647", "score bonus_steps is 2147483647 steps but must be at least 0, and at most 1073741822"),
        ("clock:0", "clock period is 0 steps but must be at least 1"),
        ("two-queue:1e10", "probation is 10000000000.0 but must be a whole number"),
        ("score:abc", "bonus_steps is 'abc' but must be a whole number"),
    ],
)
def test_a_priority_cannot_be_made_to_wrap(text, words):
    """Regression: score:2147483647 wrapped round, and what was used last was evicted first."""
    with pytest.raises(InputError, match=words):
        policies.parse_eviction(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ema:abc", r"alpha is 'abc' but must be a number; write ema:alpha=0.5"),
        ("quantile:0.5,100000000", "window is 100000000 scores but must lie in 1..4096"),
        ("random:1,seed=-1", "random seed is -1 but must lie in 0..4294967295"),
        ("fixed:1e300", r"threshold is 1e\+300 but must lie within 3.4e\+38"),
    ],
)
def test_numbers_of_thresholds_have_ranges(text, words):
    with pytest.raises(InputError, match=words):
        policies.parse_threshold(text)
