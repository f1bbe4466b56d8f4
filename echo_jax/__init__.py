"""echo_jax: lossless KV-cache offload for natively sparse attention.

The names most people need. Each is loaded when it is first used: importing the package costs nothing, and no import of
it starts a jax backend. What else there is stands in the rooms themselves, `echo_jax.state`, `echo_jax.threshold`, ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echo_jax import eviction as eviction
    from echo_jax import state as state
    from echo_jax import threshold as threshold
    from echo_jax.config import COMPILER_OPTIONS as COMPILER_OPTIONS
    from echo_jax.config import CacheConfig as CacheConfig
    from echo_jax.decode import DecodeConfig as DecodeConfig
    from echo_jax.decode import cache_config as cache_config
    from echo_jax.decode import decode_many as decode_many
    from echo_jax.decode import decode_step as decode_step
    from echo_jax.engine import generate as generate
    from echo_jax.fingerprint import model_fingerprint as model_fingerprint
    from echo_jax.formats import KeyFormat as KeyFormat
    from echo_jax.formats import RecordFormat as RecordFormat
    from echo_jax.layer import LayerInputs as LayerInputs
    from echo_jax.layer import echo_layer as echo_layer
    from echo_jax.prefill import prefill_chunk as prefill_chunk
    from echo_jax.state import begin_step as begin_step
    from echo_jax.state import finish_step as finish_step
    from echo_jax.state_files import restore_state as restore_state
    from echo_jax.state_files import save_state as save_state
    from echo_jax.types import EchoState as EchoState

_ROOMS = ("eviction", "state", "threshold")
_NAMES = {
    "config": ("COMPILER_OPTIONS", "CacheConfig"),
    "decode": ("DecodeConfig", "cache_config", "decode_many", "decode_step"),
    "engine": ("generate",),
    "fingerprint": ("model_fingerprint",),
    "formats": ("KeyFormat", "RecordFormat"),
    "layer": ("LayerInputs", "echo_layer"),
    "prefill": ("prefill_chunk",),
    "state": ("begin_step", "finish_step"),
    "state_files": ("restore_state", "save_state"),
    "types": ("EchoState",),
}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"echo_jax.{name}")
    if name in _ROOM_OF:
        return getattr(importlib.import_module(f"echo_jax.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module 'echo_jax' has no attribute {name!r}")


__all__ = [*_ROOMS, *_ROOM_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
