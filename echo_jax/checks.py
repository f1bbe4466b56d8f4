"""Checks of arguments where they are handed in: whole numbers, layer and seat numbers, policies, shapes.

Each raises ValueError with the quantity, what was given and what is needed. Only what the host already knows is looked
at: shapes and types of any array, values of Python and NumPy numbers. A value on a device is never waited for; what is
traced or lies on a device is masked by whoever uses it.
"""

from __future__ import annotations

import inspect
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_I32 = 2**31 - 1


def whole(name: str, value: Any, least: int = -MAX_I32 - 1, most: int = MAX_I32) -> int:
    """`value` as an int in least..most; a bool, a float, a string or a traced value is refused."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} is {value!r} but must be a whole number")
    if not least <= number <= most:
        raise ValueError(f"{name} is {number} but must lie in {least}..{most}")
    return number


def known_number(value: Any) -> bool:
    """Whether the host knows the value: a Python or NumPy number, and not an array of jax."""
    return isinstance(value, numbers.Number | np.bool_) or (isinstance(value, np.ndarray) and value.ndim == 0)


def layer_number(layer: Any, layers: int) -> None:
    """Refuses a layer that the cache does not have, where the host knows its number."""
    if known_number(layer) and not 0 <= whole("layer", layer) < layers:
        raise ValueError(f"layer {layer} does not exist; the cache has layers 0..{layers - 1}")


def shape(name: str, array: Any, wanted: Sequence[int | None], why: str) -> None:
    """Refuses an array of another shape; None stands for any size. `why` says where the sizes come from."""
    given = tuple(np.shape(array))
    if len(given) != len(wanted) or any(w not in (None, g) for g, w in zip(given, wanted, strict=True)):
        asked = ", ".join("any" if size is None else str(size) for size in wanted)
        raise ValueError(f"{name} has shape {list(given)} but must be [{asked}]: {why}")


def integers(name: str, array: Any) -> None:
    """Refuses an array whose values are no integers."""
    dtype = np.asarray(array).dtype if not hasattr(array, "dtype") else array.dtype
    if not np.issubdtype(np.dtype(dtype), np.integer):
        raise ValueError(f"{name} has dtype {np.dtype(dtype).name} but must hold integers, int32")


def policy(name: str, value: Any, methods: Sequence[str], example: str) -> None:
    """Refuses what is no policy object: a string, a class, an object that lacks a method or cannot be hashed.

    name: what the policy is for; example: a policy that would do, as one writes it.
    """
    remedy = f"give a policy object such as {example}"
    if isinstance(value, str):
        raise ValueError(f"{name} is the string {value!r}; {remedy}")
    if inspect.isclass(value):
        raise ValueError(f"{name} is the class {value.__name__}; {remedy}, an instance of it")
    lacking = [method for method in methods if not callable(getattr(value, method, None))]
    if lacking:
        raise ValueError(
            f"{name} {value!r} has no method {lacking[0]!r}, but needs {', '.join(methods)}; add it, or {remedy}"
        )
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"{name} {type(value).__name__} cannot be hashed, but a policy is part of a compiled step's key; make it a "
            "frozen dataclass of hashable fields"
        ) from None
