"""Parameters in orbax's form: every bit, the whole config, onto any sharding."""

import dataclasses

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from echo_jax.checkpoints import load_folder, restore_params, save_params
from tests.checkpoint_support import (
    SMALL,
    V32_TINY,
    assert_same,
    experts_apart,
    four_devices,
    random_params,
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_orbax_keeps_every_bit_and_the_whole_config(tmp_path, dtype):
    config = dataclasses.replace(SMALL, latent_norm_eps=1e-5, dtype=dtype)
    params = jax.tree.map(jax.numpy.asarray, random_params(config, dtype))
    save_params(tmp_path / "model", params, config)
    again_config, again = restore_params(tmp_path / "model")
    assert again_config == config
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert_same(params, again)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save_params(tmp_path / "model", params, config)
    save_params(tmp_path / "model", params, dataclasses.replace(config, rms_norm_eps=1e-4), overwrite=True)
    assert restore_params(tmp_path / "model")[0].rms_norm_eps == 1e-4


def test_orbax_restores_onto_another_sharding(tmp_path):
    mesh = four_devices()
    config, params = load_folder(V32_TINY, sharding=experts_apart(mesh))
    save_params(tmp_path / "model", params, config)
    _, alone = restore_params(tmp_path / "model")
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(alone))
    assert_same(params, alone)
    rows = NamedSharding(mesh, PartitionSpec(None, "x"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    _, turned = restore_params(tmp_path / "model", lambda leaf, shape: rows if leaf == "embed" else everywhere)
    assert turned["embed"].sharding == rows
    assert turned["embed"].addressable_shards[0].data.shape == (128, 8)
    assert_same(params, turned)


def test_orbax_refuses_what_it_did_not_write(tmp_path):
    with pytest.raises(FileNotFoundError, match="give a folder written by save_params"):
        restore_params(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no params and config parts"):
        restore_params(tmp_path)
    params = jax.tree.map(jax.numpy.asarray, random_params(SMALL))
    save_params(tmp_path / "model", params, dataclasses.replace(SMALL, vocab_size=41))
    with pytest.raises(ValueError, match=r"embed .* has shape \(40, 64\) but its config asks for \(41, 64\)"):
        restore_params(tmp_path / "model")
