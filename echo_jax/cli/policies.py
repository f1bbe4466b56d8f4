"""Policies by name: `ema`, `ema:0.7`, `random:1.0,seed=3`, `margin:last,2`, or a user's class, `my_module:Mine:0.5`.

Knows how a policy is named on a command line and whether an object can serve as one. Does not know what policies do:
`threshold`, `eviction` and `replay.caps` do.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import math
import numbers
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from echo_jax import eviction, threshold
from echo_jax.cli.errors import InputError, nearest
from echo_jax.replay.caps import CAPS, Cap
from echo_jax.types import EvictionPolicy, ThresholdPolicy

MAX_FLOAT32 = 3.4e38

SYNTAX = "NAME[:ARGS] or MODULE:CLASS[:ARGS], ARGS as in 0.7 or 0.7,seed=3; MODULE may be a file in the current folder"


def parse_threshold(text: str, *, in_replay: bool = False) -> ThresholdPolicy:
    """The threshold policy that `text` names, tried once without computing anything. InputError for what is none.

    Those that need a step's outcome before the step are for a replay only.
    """
    known = _known(text, threshold.POLICIES, threshold.REPLAY_ONLY, in_replay, "threshold policy")
    policy = _parse(text, known, ThresholdPolicy, "threshold policy")

    def once():
        memory = jax.tree.map(jnp.asarray, policy.init())
        return memory, policy.update(memory, jnp.float32(0.0)), policy.value(memory)

    memory, updated, value = _try_out(text, once)
    if jax.tree.map(jnp.shape, memory) != jax.tree.map(jnp.shape, updated):
        raise InputError(
            f"threshold policy {text!r}: update returns {_shapes(updated)} but init returns {_shapes(memory)}; return "
            "memory of the same structure and shapes"
        )
    if jnp.shape(value) != ():
        raise InputError(
            f"threshold policy {text!r}: value has shape {list(jnp.shape(value))} but must be one number; policies are "
            "written for one request, the library maps them over seats"
        )
    return policy


def parse_eviction(text: str, *, in_replay: bool = False) -> EvictionPolicy:
    """The eviction policy that `text` names, tried once without computing anything. InputError for what is none.

    Those that need to know what later steps select are for a replay only.
    """
    known = _known(text, eviction.POLICIES, eviction.REPLAY_ONLY, in_replay, "eviction policy")
    policy = _parse(text, known, EvictionPolicy, "eviction policy")

    def once():
        slots = jnp.zeros((2,), jnp.int32)
        touched = policy.touch(slots, slots == 0, jnp.int32(1), slots.astype(jnp.float32))
        return touched, policy.rebase(slots, jnp.int32(0))

    shapes = {"touch": ((2,), ()), "rebase": ((2,),)}
    for (method, allowed), result in zip(shapes.items(), _try_out(text, once), strict=True):
        if result.shape not in allowed or result.dtype != jnp.int32:
            raise InputError(
                f"eviction policy {text!r}: {method} returns {result.dtype}{list(result.shape)} for 2 slots but must "
                f"return {' or '.join(f'int32{list(shape)}' for shape in allowed)}; policies are elementwise over slots"
            )
    return policy


def parse_cap(text: str) -> Cap:
    """The cap on prefetch that `text` names, tried once without computing anything; a bare number is a fixed cap."""
    cap = _parse(f"fixed:{text}" if text.isdigit() else text, CAPS, Cap, "cap")

    def once():
        memory, counts = cap.init(2), jnp.zeros((2,), jnp.int32)
        return memory, cap.update(memory, counts, counts), cap.allowed(memory, counts, counts)

    memory, updated, allowed = _try_out(text, once)
    if jax.tree.map(jnp.shape, memory) != jax.tree.map(jnp.shape, updated):
        raise InputError(f"cap {text!r}: update returns {_shapes(updated)} but init returns {_shapes(memory)}")
    if jnp.shape(allowed) != (2,) or allowed.dtype != jnp.int32:
        raise InputError(f"cap {text!r}: allowed returns {allowed.dtype}{list(jnp.shape(allowed))}, not int32[2] for 2")
    return cap


def _known(text: str, known: Mapping[str, type], replay_only: Mapping[str, type], in_replay: bool, what: str):
    if in_replay:
        return {**known, **replay_only}
    if (name := text.partition(":")[0]) in replay_only:
        raise InputError(f"{what} {name!r} needs to know the future, which only `echo-jax replay` does; take another")
    return known


def _parse(text: str, known: Mapping[str, type], protocol: type, what: str) -> Any:
    name, _, rest = text.partition(":")
    if name in known:
        made, arguments = known[name], rest
    else:
        class_name, _, arguments = rest.partition(":")
        if not class_name.isidentifier():
            raise InputError(f"{what} {text!r} is unknown; {nearest(name, known)}; or give MODULE:CLASS")
        made = _users_class(name, class_name, known, what)
    positional, named = _arguments(arguments, text, what)
    try:
        given = inspect.signature(made).bind(*positional, **named)
        if isinstance(inner := given.arguments.get("policy"), str):  # a policy that wraps another one
            given.arguments["policy"] = _parse(inner, known, protocol, what)
        _check_types(made, given.arguments)
        policy = made(*given.args, **given.kwargs)
    except (TypeError, ValueError) as error:
        # What Python says of a call is no message for a reader; what a policy says of its own numbers is.
        said = "its arguments do not fit" if isinstance(error, TypeError) else str(error)
        raise InputError(f"{what} {text!r}: {said}; write {_usage(text, made)}") from error
    except Exception as error:  # a user's class may raise anything when it is made
        raise InputError(f"{what} {text!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(policy, protocol):
        methods = ("init", "update", "value", "touch", "rebase", "allowed", "rows")
        wanted = [method for method in methods if hasattr(protocol, method)]
        lacking = ", ".join(method for method in wanted if not hasattr(policy, method))
        raise InputError(f"{what} {text!r} has no {lacking}; a policy has the methods {', '.join(wanted)}")
    try:
        hash(policy)
    except TypeError:
        raise InputError(
            f"{what} {text!r} cannot be hashed, but a policy is a static choice of a compiled step; make its class a "
            "@dataclasses.dataclass(frozen=True)"
        ) from None
    return policy


def _check_types(made: Any, given: Mapping[str, Any]) -> None:
    """ValueError where a number was asked for and something else was given, or one that no float32 holds."""
    kinds = (
        {field.name: str(field.type) for field in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else {}
    )
    for name, value in given.items():
        wanted = {"int": numbers.Integral, "float": numbers.Real}.get(kinds.get(name, ""))
        if wanted is None:
            continue
        if isinstance(value, bool) or not isinstance(value, wanted):
            what = "a whole number" if wanted is numbers.Integral else "a number"
            raise ValueError(f"{name} is {value!r} but must be {what}")
        if abs(value) > MAX_FLOAT32 and not math.isinf(value):
            raise ValueError(f"{name} is {value!r} but must lie within {MAX_FLOAT32:.4g}")


def _usage(text: str, made: Any) -> str:
    """How the policy is written: "ema:alpha=0.5", with its defaults."""
    name = (
        text.split(":")[0]
        if text.split(":")[0] in {**threshold.POLICIES, **threshold.REPLAY_ONLY, **CAPS}
        or text.split(":")[0] in {**eviction.POLICIES, **eviction.REPLAY_ONLY}
        else ":".join(text.split(":")[:2])
    )
    parameters = inspect.signature(made).parameters.values()
    shown = [one.name if one.default is one.empty else f"{one.name}={one.default!r}" for one in parameters]
    return f"{name}:{','.join(shown)}" if shown else name


def _users_class(module_name: str, class_name: str, known: Mapping[str, type], what: str) -> Any:
    with _current_folder_importable():
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # a user's module may raise anything while it is imported
            raise InputError(
                f"{what}: module {module_name!r} cannot be imported ({error!r}); {nearest(module_name, known)}; a "
                "module is looked for in the current folder and among the installed ones"
            ) from error
    made = getattr(module, class_name, None)
    if not callable(made):
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        raise InputError(f"{what}: module {module_name!r} has no class {class_name!r}; {nearest(class_name, classes)}")
    return made


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """A console script does not look in the current folder by itself."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _arguments(text: str, spec: str, what: str) -> tuple[list[Any], dict[str, Any]]:
    """ "0.7,seed=3" -> ([0.7], {"seed": 3}). Words that are no Python literal, inf or nan stay strings."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals and named:
            raise InputError(f"{what} {spec!r}: {part!r} follows a named argument; give it a name or put it first")
        if equals:
            named[name.strip()] = _literal(value.strip())
        else:
            positional.append(_literal(part.strip()))
    return positional, named


def _literal(text: str) -> Any:
    for convert in (ast.literal_eval, float):
        with contextlib.suppress(ValueError, SyntaxError):
            return convert(text)
    return text


def _try_out(text: str, once: Any) -> Any:
    """Shapes of what a policy returns. Whatever a user's class raises here, it would raise inside the step."""
    try:
        return jax.eval_shape(once)
    except Exception as error:
        raise InputError(f"policy {text!r} fails when it is tried out: {str(error).splitlines()[0]}") from error


def _shapes(memory: Any) -> str:
    return str(jax.tree.map(lambda leaf: list(jnp.shape(leaf)), memory))
