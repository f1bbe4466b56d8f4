"""README by execution: what it shows is what the repository does."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
from typing import Any

import jax.numpy as jnp
import pytest

from tests import scenarios
from tools import readme

TEXT = readme.README.read_text(encoding="utf-8")


def test_the_example_is_the_executed_file():
    """tests/test_examples.py runs examples/own_model.py; the README shows its core, letter for letter."""
    shown = readme.between(TEXT, "example")
    assert shown == readme.example(), "README.md is behind examples/own_model.py; python -m tools.readme"
    assert len(shown.strip().splitlines()) - 2 <= 20


def test_the_demo_shown_ends_without_differences():
    shown = readme.between(TEXT, "demo")
    assert "0 differences" in shown and "hit rate" in shown


@pytest.mark.parametrize("command", re.findall(r"`(echo-jax [^`]+)`", TEXT))
def test_every_command_shown_is_understood(command):
    """Flags and values of the commands in the text parse; what they do is tested in tests/cli."""
    from echo_jax.cli import main

    words = shlex.split(command)[1:]
    namespace = main._parse(["echo-jax", *words])
    assert words[0] in str(vars(namespace))


def test_every_room_named_exists():
    table = TEXT[TEXT.index("## The rooms") : TEXT.index("## What lossless means")]
    names = [
        name for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[2:] for name in re.findall(r"`(.*?)`", cell)
    ]
    assert len(names) > 15
    for name in names:
        if name.endswith("/"):
            assert (readme.ROOT / name).is_dir(), name
        else:
            assert importlib.util.find_spec(f"echo_jax.{name}") is not None, name


def test_the_policy_shown_works_and_changes_nothing():
    """The twenty-line policy of the README, in a run under pressure, against the resident run."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "class Slope" in b)
    names: dict[str, Any] = {"dataclasses": dataclasses, "jnp": jnp}
    exec(block, names)
    setting = scenarios.TRIPLES[0]
    reference = scenarios.resident(*setting, "plain", scenarios.ONE_LAYER)
    config = scenarios.cache(
        dict(zip(("records", "keys", "tokens"), setting, strict=True))
        | dict(threshold="ema", cap=6, pool="barely", memory="jnp", eviction="lru", warm=0),
        offload=True,
        model=scenarios.ONE_LAYER,
    )
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, threshold=names["Slope"]()))
    run = scenarios.Run(config, scenarios.parameters(scenarios.ONE_LAYER)).history()
    assert scenarios.differences(run, reference) == []
    assert sum(int(moved.staged.sum()) for moved in run.moved) > 0, "the policy never copied a row ahead"
