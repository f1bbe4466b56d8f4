"""Parameters in orbax's form: each device writes and reads its own shards, config beside them.

Knows orbax and paths. This is the form for models that are trained or resharded here; the form that others read is
`safetensors`. Every field of the config is kept, also those that a `config.json` cannot say.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from echo_jax.checkpoints.layout import stored_tensors
from echo_jax.checkpoints.notes import note
from echo_jax.checkpoints.safetensors import Shardings, flatten, nest
from echo_jax.models.config import DsaConfig, RopeConfig
from echo_jax.models.dsa import Params


def save_params(path: str | Path, params: Params, config: DsaConfig, *, overwrite: bool = False) -> None:
    """Writes params and config to the folder `path`, which appears whole or not at all.

    Raises FileExistsError for an existing folder unless `overwrite`.
    """
    path = Path(path).absolute()
    if path.exists() and not overwrite:
        raise FileExistsError(f"{str(path)!r} exists; pass overwrite=True or another path")
    items = ocp.args.Composite(
        params=ocp.args.StandardSave(flatten(params)), config=ocp.args.JsonSave(dataclasses.asdict(config))
    )
    with _checkpointer() as checkpointer:
        checkpointer.save(path, items, force=overwrite)


def restore_params(
    path: str | Path, sharding: Shardings = None, *, allow_nonfinite: bool = False
) -> tuple[DsaConfig, Params]:
    """Config and params of a folder of `save_params`, each array straight onto its sharding, in its stored dtype.

    sharding: as in `load_folder`; None puts everything on the default device. It need not be the one that was saved.
    allow_nonfinite: restore NaN and infinities, with a `CheckpointNote` that names the parameters, instead of refusing.
    Raises FileNotFoundError for a missing folder and ValueError for one that `save_params` did not write, or whose
    shapes are not those of its config.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"checkpoint {str(path)!r} does not exist; give a folder written by save_params")
    if not (path / "params").is_dir() or not (path / "config").is_dir():
        raise ValueError(f"{str(path)!r} has no params and config parts; give a folder written by save_params")
    with _checkpointer() as checkpointer:
        raw = checkpointer.restore(path, ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
        config = _config_from_dict(raw, path)
        stored = checkpointer.metadata(path).item_metadata["params"].tree
        _check_shapes({leaf: tuple(array.shape) for leaf, array in stored.items()}, config, path)
        target = {
            leaf: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_place(leaf, array.shape, sharding))
            for leaf, array in stored.items()
        }
        restored = checkpointer.restore(path, ocp.args.Composite(params=ocp.args.StandardRestore(target)))
    params = restored["params"]
    if odd := sorted(leaf for leaf, value in params.items() if not _is_finite(value)):
        shown = ", ".join(odd[:3]) + ", ..." * (len(odd) > 3)
        text = f"{len(odd)} parameters in {str(path)!r} hold NaN or infinities: {shown}"
        if not allow_nonfinite:
            raise ValueError(f"{text}; restore an earlier checkpoint, or pass allow_nonfinite=True")
        note(text)
    return config, nest(params)


@jax.jit
def _is_finite(value: jax.Array) -> jax.Array:
    """Where the shards are; no second array of this size."""
    return jnp.isfinite(value).all()


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(params=ocp.StandardCheckpointHandler(), config=ocp.JsonCheckpointHandler())
    )


def _place(leaf: str, shape: tuple[int, ...], sharding: Shardings) -> jax.sharding.Sharding:
    if sharding is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return sharding(leaf, shape) if callable(sharding) else sharding


def _config_from_dict(raw: dict[str, Any], path: Path) -> DsaConfig:
    """JSON has lists where the config has tuples, and a dictionary for the rope."""
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in raw.items()}
    try:
        values["rope"] = RopeConfig(**values["rope"])
        return DsaConfig(**values)
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"the config in {str(path)!r} is not one of this version ({error}); save the model again with save_params"
        ) from None


def _check_shapes(stored: dict[str, tuple[int, ...]], config: DsaConfig, path: Path) -> None:
    asked = {leaf: tensor.leaf_shape(leaf) for tensor in stored_tensors(config) for leaf in tensor.leaves}
    for leaf in sorted(asked.keys() | stored.keys()):
        if asked.get(leaf) != stored.get(leaf):
            raise ValueError(
                f"parameter {leaf} in {str(path)!r} has shape {stored.get(leaf)} but its config asks for "
                f"{asked.get(leaf)}; params and config are of different models, save them again"
            )
