"""A cache on disk: saved between two steps, restored later, continued bit for bit.

Knows orbax, the leaves of a state and the choices that give them their meaning. Knows no model but its fingerprint: the
caller brings the parameters, and a cache that another model filled is refused. Nothing is left out: page tables, slot
maps, records, index keys with their scales, the memory of the threshold policies, the clock, the host pool.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from echo_jax import hostmem
from echo_jax import state as state_lib
from echo_jax.config import CacheConfig
from echo_jax.types import PAGE, EchoState

HOST_POOL, MODEL = "host_pool", "model"

FREE_FIELDS = frozenset(
    {
        "tokens_per_step",
        "staging",
        "prefetch_per_position",
        "host_memory",
        "slot_manager",
        "score_implementation",
        "attend_implementation",
        "prefetch_implementation",
        "top_k_implementation",
        "encode_implementation",
        "read_ahead",
        "chunk",
        "warm_windows",
    }
)
"""What a cache may be restored with anew: these decide how rows move and arrive, not what the saved arrays mean."""


def save_state(
    path: str | Path, state: EchoState, config: CacheConfig, *, model: str | None = None, overwrite: bool = False
) -> None:
    """Writes one worker's state to the folder `path`, which appears whole or not at all; the state stays usable.

    model: `model_fingerprint(params, config)` of the model that filled the cache, which `restore_state` then asks for.
    Of several workers (`decode.unstack_states`) each has a folder of its own. Raises FileExistsError for an existing
    folder unless `overwrite`.
    """
    path = Path(path).absolute()
    if path.exists() and not overwrite:
        raise FileExistsError(f"{str(path)!r} exists; pass overwrite=True or another path")
    leaves = {name: hostmem.as_numpy(leaf) if name == HOST_POOL else leaf for name, leaf in _by_name(state).items()}
    meaning = _meaning(config) | ({} if model is None else {MODEL: model})
    items = ocp.args.Composite(state=ocp.args.StandardSave(leaves), config=ocp.args.JsonSave(meaning))
    with _checkpointer() as checkpointer:
        checkpointer.save(path, items, force=overwrite)


def restore_state(
    path: str | Path,
    config: CacheConfig,
    device: Any = None,
    *,
    model: str | None = None,
    allow_other_model: bool = False,
) -> EchoState:
    """The state in a folder of `save_state`, committed to the device (a jax.Device; the first one by default).

    model: `model_fingerprint(params, config)` of the model that will go on. It must be the one that the cache was saved
    with; a cache saved without one is restored without one. allow_other_model skips that comparison, and nothing else.

    Decoding goes on as if it had never stopped, without compiling again. FREE_FIELDS of the config may differ from
    those of the saved cache, host memory among them: a cache saved with the FFI library is restored without it, and
    the other way round. Takes the host pool's size once more in ordinary memory while it runs. Raises
    FileNotFoundError for a missing folder and ValueError for one that `save_state` did not write or that holds another
    cache.
    """
    path, device = Path(path).absolute(), device or jax.devices()[0]
    if not path.is_dir():
        raise FileNotFoundError(f"cache {str(path)!r} does not exist; give a folder written by save_state")
    if not (path / "state").is_dir() or not (path / "config").is_dir():
        raise ValueError(f"{str(path)!r} has no state and config parts; give a folder written by save_state")
    expected = jax.eval_shape(lambda: state_lib.create(dataclasses.replace(config, host_memory="jnp"), device))
    with _checkpointer() as checkpointer:
        saved = checkpointer.restore(path, ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
        _check_model(saved.pop(MODEL, None), model, allow_other_model, path)
        _check_meaning(saved, _meaning(config), path)
        wanted = {name: _target(name, leaf, device) for name, leaf in _by_name(expected).items()}
        stored = checkpointer.metadata(path).item_metadata["state"].tree
        _check_forms(_forms(stored), _forms(wanted), path)
        leaves = checkpointer.restore(path, ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))["state"]
    if HOST_POOL in leaves:
        leaves[HOST_POOL] = _to_host_memory(leaves[HOST_POOL], config, device)
    names = list(_by_name(expected))
    return jax.tree.unflatten(jax.tree.structure(expected), [leaves[name] for name in names])


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(state=ocp.StandardCheckpointHandler(), config=ocp.JsonCheckpointHandler())
    )


def _by_name(state: EchoState) -> dict[str, Any]:
    """Every leaf, under a name such as `layers.0.index_keys`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(state)
    }


def _meaning(config: CacheConfig) -> dict[str, str]:
    """The fields that give the arrays their shapes and their meaning, as text; policies with their parameters."""
    fields = [field.name for field in dataclasses.fields(config) if field.name not in FREE_FIELDS]
    return {name: _told(getattr(config, name)) for name in fields}


def _told(value: Any) -> str:
    """The repr of a field. Of a policy that does not come with the library its module too: two classes of one name may
    write different priorities."""
    kind = type(value)
    is_own = kind.__module__.split(".")[0] not in ("builtins", "echo_jax")
    return f"{kind.__module__}.{value!r}" if is_own else repr(value)


def _check_model(saved: str | None, wanted: str | None, allow_other_model: bool, path: Path) -> None:
    if allow_other_model or saved == wanted:
        return
    remedy = "restore it with the parameters it was filled with, or pass allow_other_model=True"
    if saved is None:
        raise ValueError(f"the cache in {str(path)!r} was saved without a model but model is {wanted}; {remedy}")
    if wanted is None:
        raise ValueError(
            f"the cache in {str(path)!r} was filled by model {saved} but no model was given; pass "
            "model=model_fingerprint(params, config), or allow_other_model=True"
        )
    raise ValueError(f"the cache in {str(path)!r} was filled by model {saved} but model is {wanted}; {remedy}")


def _check_meaning(saved: dict[str, str], wanted: dict[str, str], path: Path) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"the cache in {str(path)!r} was saved with {name} = {saved.get(name)} but the config has "
                f"{wanted.get(name)}; restore it with the saved value"
            )


def _check_forms(stored: dict[str, str], wanted: dict[str, str], path: Path) -> None:
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            raise ValueError(
                f"{name} in {str(path)!r} is {stored.get(name)} but this version of the cache has {wanted.get(name)}; "
                "the folder was written by another version, prefill the requests again"
            )


def _forms(leaves: dict[str, Any]) -> dict[str, str]:
    """Of each leaf, such as `int32[3]`."""
    return {name: f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}" for name, leaf in leaves.items()}


def _target(name: str, leaf: jax.ShapeDtypeStruct, device: Any) -> Any:
    """What orbax is to make of a leaf: an array on the device, or for the host pool one of NumPy."""
    if name == HOST_POOL:
        return np.empty(leaf.shape, leaf.dtype)  # read for its shape only; untouched pages take no memory
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def _to_host_memory(records: np.ndarray, config: CacheConfig, device: Any) -> jax.Array:
    """The host pool, a page of all layers at a time: never as a whole through the device."""
    memory = hostmem.choose(device.platform, config.host_memory)
    host_pool = hostmem.create_pool(records.shape, records.dtype, memory, device)
    for start in range(0, records.shape[1], PAGE):
        rows = np.arange(start, start + PAGE, dtype=np.int32)
        page = jax.device_put((records[:, start : start + PAGE], rows), device)
        host_pool = _write(host_pool, *page)
    return host_pool


@functools.partial(jax.jit, donate_argnums=0)
def _write(host_pool: jax.Array, records: jax.Array, rows: jax.Array) -> jax.Array:
    return hostmem.write_back(host_pool, records, rows)
