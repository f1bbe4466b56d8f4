"""Models and folders that the tests of checkpoints share: random parameters, copies of fixtures to be spoilt."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from echo_jax.checkpoints import safetensors as folders
from echo_jax.checkpoints.layout import is_never_narrowed, stored_tensors
from echo_jax.models.config import DENSE, FULL, MOE, SHARED
from echo_jax.models.presets import TINY

FIXTURES = Path(__file__).parent / "fixtures"
V32_TINY, HUB_FP8, GLM_SHARED = (FIXTURES / name for name in ("dev-v32-tiny", "hub-fp8-tiny", "glm-shared-tiny"))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

SMALL = dataclasses.replace(
    TINY, layer_kinds=(FULL, SHARED, FULL), mlp_kinds=(DENSE, MOE, MOE), num_experts=4, vocab_size=40
)


def random_params(config, dtype="float32"):
    """A value of its own in every place, so that one tensor in the place of another shows."""
    draw = np.random.default_rng(0)
    shapes = {leaf: one.leaf_shape(leaf) for one in stored_tensors(config) for leaf in one.leaves}
    kept = {leaf: np.float32 if is_never_narrowed(leaf) else np.dtype(dtype) for leaf in shapes}
    return folders.nest({leaf: draw.normal(size=shape).astype(kept[leaf]) for leaf, shape in shapes.items()})


def assert_same(left, right):
    left, right = folders.flatten(left), folders.flatten(right)
    assert left.keys() == right.keys()
    for leaf in left:
        assert left[leaf].dtype == right[leaf].dtype, leaf
        assert np.asarray(left[leaf]).tobytes() == np.asarray(right[leaf]).tobytes(), leaf


def copy_folder(source, into, **changes):
    """A copy of a fixture folder without its answers, its config changed."""
    folder = into / source.name
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.npz"))
    if changes:
        raw = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(raw))
    return folder


def rewrite(folder, change):
    """Gives the tensors of a single-file folder to `change` and stores what it returns."""
    tensors = load_file(folder / SINGLE)
    changed = change(tensors)
    save_file(tensors if changed is None else changed, folder / SINGLE)


def four_devices():
    return jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def experts_apart(mesh):
    """Experts over the devices, everything else on each of them."""

    def place(leaf, shape):
        split = "/moe/" in leaf and len(shape) == 3
        return NamedSharding(mesh, PartitionSpec("x") if split else PartitionSpec())

    return place


def stored(file):
    """Name -> (dtype, shape, bytes) of a safetensors file. The safetensors package has no NumPy form of FP8."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (one["dtype"], one["shape"], data[start + one["data_offsets"][0] : start + one["data_offsets"][1]])
        for name, one in header.items()
    }


def store(file, tensors):
    """The inverse of `stored`."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def reshard(folder, shard_of):
    """Writes the tensors of a folder again, each into the shard (a path in the folder) that `shard_of(name)` says."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= stored(file)
        file.unlink()
    weight_map = {name: shard_of(name) for name in tensors}
    for shard in set(weight_map.values()):
        store(folder / shard, {name: one for name, one in tensors.items() if weight_map[name] == shard})
    write_index(folder, weight_map)


def read_index(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
