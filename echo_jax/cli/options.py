"""One dataclass is at once a command's flags, its help and its record.

Knows how a field becomes an argparse argument and how the parsed values become the dataclass again. Does not know what
any option means, nor what absl does with the rest of the command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo_jax.cli import numbers

REQUIRED = dataclasses.MISSING

GROUPS = (
    "input",
    "weights",
    "cache",
    "prefetch and eviction",
    "implementations",
    "sampling",
    "comparison",
    "budget",
    "output",
)
"""Titles in `--help`, in this order."""


def option(help: str, default: Any = REQUIRED, *, group: str, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option.

    The annotation gives its type: int (also written 4k or 1M), float, str or Path (each also `| None`), bool for a
    switch, tuple[Path, ...] for one or more values. `more`: positional=True, choices=..., parse=function of the given
    text.
    """
    metadata = {"help": help, "group": group, "metavar": metavar} | more
    return dataclasses.field(default=default, metadata=metadata)


def add_arguments(parser: argparse.ArgumentParser, command: type) -> None:
    """Gives the parser one argument per field, under the titles of GROUPS."""
    fields, types_of = dataclasses.fields(command), typing.get_type_hints(command)
    for title in GROUPS:
        members = [field for field in fields if field.metadata["group"] == title]
        group = parser.add_argument_group(title) if members else None
        for field in members:
            _add(group, field, types_of[field.name])
    assert {field.metadata["group"] for field in fields} <= set(GROUPS)


def flag(name: str) -> str:
    """The option that sets a field."""
    return "--" + name.replace("_", "-")


def _add(group: Any, field: dataclasses.Field, annotation: Any) -> None:
    kind, many = _element_type(annotation)
    is_required = field.default is REQUIRED
    names = [field.name] if field.metadata.get("positional") else [flag(field.name)]
    text = field.metadata["help"].replace("%", "%%")
    if kind is bool:
        group.add_argument(*names, action="store_true", default=field.default, help=text)
        return
    parse = {int: numbers.count, float: numbers.real}.get(kind, kind)
    settings: dict[str, Any] = {"help": text, "type": field.metadata.get("parse", parse)}
    settings["metavar"] = field.metadata["metavar"]
    if choices := field.metadata.get("choices"):
        settings["choices"] = choices
    if many:
        settings["nargs"] = "*" if field.metadata.get("positional") and not is_required else "+"
    if not is_required:
        settings["default"] = field.default
        if field.default not in (None, ()):
            settings["help"] += " (default: %(default)s)"
    elif not field.metadata.get("positional"):
        settings["required"] = True
    group.add_argument(*names, **settings)


def _element_type(annotation: Any) -> tuple[type, bool]:
    """The type of one value, and whether there may be several."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        annotation = next(one for one in typing.get_args(annotation) if one is not type(None))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def from_namespace[T](command: type[T], namespace: argparse.Namespace) -> T:
    """The dataclass that the parsed command line says."""
    values = {field.name: getattr(namespace, field.name) for field in dataclasses.fields(command)}  # type: ignore[arg-type]
    return command(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def record(options: Any) -> dict[str, Any]:
    """The options as one JSON row."""
    return {name: _plain(value) for name, value in dataclasses.asdict(options).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
