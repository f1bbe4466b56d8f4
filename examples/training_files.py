"""The weights of a training run: how they begin, how a run that stops keeps them, and how they leave.

Knows files and their sizes: a checkpoint holds the f32 weights and the second moments in bf16, in files below 16 MiB;
what leaves is a Hugging Face folder in bf16. Knows no step and no schedule; `train_small_dsa.py` does.
"""

from __future__ import annotations

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from echo_jax.checkpoints.safetensors import load_folder, save_folder
from echo_jax.models import dsa
from echo_jax.models.config import DsaConfig

FILE_BYTES = 15 << 20  # of one checkpoint file at most


def init(key: jax.Array, config: DsaConfig) -> dsa.Params:
    """f32 weights; what writes into the residual stream starts smaller by the square root of twice the depth."""
    params = dsa.init_params(key, config)
    shrink = (2 * config.num_layers) ** -0.5

    def scaled(path, leaf):
        return leaf * shrink if getattr(path[-1], "key", "") in ("o", "down") else leaf

    return jax.tree_util.tree_map_with_path(scaled, params)


def as_exported(params: dsa.Params) -> dsa.Params:
    """The weights as the folder will hold them: bf16, the choice bias f32."""

    def cast(path, leaf):
        return leaf if getattr(path[-1], "key", "") == "bias" else leaf.astype(jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(cast, params)


def named_leaves(tree) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(getattr(e, "key", getattr(e, "idx", ""))) for e in path): leaf for path, leaf in leaves}


def save(folder: str, params, second, progress: dict) -> None:
    """Weights f32, second moments bf16, in files below FILE_BYTES, and the counters that a next segment starts from."""
    root = pathlib.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    named = {f"params/{k}": np.asarray(v) for k, v in named_leaves(params).items()}
    named |= {f"second/{k}": np.asarray(v).astype(jnp.bfloat16) for k, v in named_leaves(second).items()}
    files: list[dict[str, np.ndarray]] = [{}]
    for name, array in named.items():
        if sum(a.nbytes for a in files[-1].values()) + array.nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = array
    # Whoever stops this half-way finds the old files, or all of the new ones and at worst an old counter.
    for i, content in enumerate(files):
        save_file(content, root / f"checkpoint-{i}.new")
    for i in range(len(files)):
        os.replace(root / f"checkpoint-{i}.new", root / f"checkpoint-{i}.safetensors")
    (root / "progress.json").write_text(json.dumps(progress))


def restore(folder: str | None, config: DsaConfig):
    """(params, second moments or None, progress) of a checkpoint folder, or a fresh start where it holds none.

    A Hugging Face folder gives its weights, rounded as they were when they left; the optimiser and all counters start
    again.
    """
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
    root = pathlib.Path(folder) if folder else None
    if root is not None and (root / "config.json").exists():
        _, params = load_folder(root)
        if jax.tree.map(jnp.shape, params) != jax.tree.map(lambda a: a.shape, shapes):
            raise ValueError(f"the weights in {root} have other shapes than the model to train; change one of the two")
        print(f"starts from the weights in {root}", flush=True)
        return params, None, {"steps": 0, "bytes": 0, "seconds": 0.0}
    if root is None or not (root / "progress.json").exists():
        fresh = jax.jit(lambda: init(jax.random.key(0), config))()
        count = sum(a.size for a in jax.tree.leaves(fresh))
        print(f"fresh start: {count} parameters, {2 * count / 1e6:.2f} MB in bf16", flush=True)
        return fresh, None, {"steps": 0, "bytes": 0, "seconds": 0.0}
    stored: dict[str, np.ndarray] = {}
    for path in sorted(root.glob("checkpoint-*.safetensors")):
        stored |= load_file(path)
    structure = jax.tree.structure(shapes)

    def tree(part: str):
        leaves = [jnp.asarray(stored[f"{part}/{k}"].astype(np.float32)) for k in named_leaves(shapes)]
        return jax.tree.unflatten(structure, leaves)

    progress = json.loads((root / "progress.json").read_text())
    print(f"goes on from {progress}", flush=True)
    return tree("params"), tree("second"), progress


def export(params: dsa.Params, folder: str, config: DsaConfig) -> None:
    """The Hugging Face folder, weights in bf16; a model card that is already there stays."""
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    save_folder(folder, as_exported(params), config, extra_config=tokens, overwrite=True)
    root = pathlib.Path(folder)
    for name, content in (
        ("tokenizer_config.json", {"tokenizer_class": "ByteTokenizer"}),
        ("generation_config.json", tokens | {"do_sample": True, "temperature": 0.7, "top_p": 0.95}),
    ):
        (root / name).write_text(json.dumps(content, indent=1) + "\n")
    print(f"{root}: {sum(file.stat().st_size for file in root.glob('*.safetensors'))} bytes of weights")
