"""`echo-jax plan`: the bill against numbers worked out by hand, without any device."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from echo_jax import state as state_lib
from echo_jax.checkpoints.quantized import weight_bytes
from echo_jax.cli import numbers, plan
from echo_jax.cli.pools import PoolOptions
from echo_jax.engine import bytes_on_device
from echo_jax.models.presets import PRESETS, parameter_count
from echo_jax.prefill import prefill_chunk
from tests.checkpoint_support import GLM_SHARED, HUB_FP8, V32_TINY, copy_folder

V32 = ("plan", "--model", "v32", "--context", 64_000, "--record-format", "fp8", "--key-format", "fp8")


def by_kind(done):
    return {row["kind"]: row["bytes"] for row in done.rows("bill")}


def test_bill_of_v32_by_hand(echo_jax):
    done = echo_jax(*V32, "--seats", 4, "--device-slots", 300_000, "--json")
    bill = by_kind(done)
    rows = 4 * 64_000
    assert bill["cache: records"] == 61 * 300_000 * 656
    assert bill["cache: index keys"] == 61 * rows * 132
    assert bill["cache: metadata"] == 61 * (4 * rows + 9 * 300_000)
    assert bill["host pool"] == 61 * rows * 656
    assert bill["threshold memory"] == 61 * 4 * 4
    assert bill["page tables"] == 4 * 4 * 1000 + 5 * 4000 + 5 * 4 + 4
    # Routers, their biases and the indexers' head weights stay float32.
    wide = 58 * (7168 * 256 + 256) + 61 * 7168 * 64
    assert bill["parameters"] == 2 * parameter_count(PRESETS["v32"]) + 2 * wide
    (token,) = done.rows("token")
    assert token["device_bytes_offloaded"] == 61 * (132 + 4)
    assert token["device_bytes_resident"] == 61 * (656 + 132)


def test_shared_layers_have_no_keys(echo_jax):
    bill = by_kind(echo_jax("plan", "--model", "glm5.2", "--context", 64_000, "--key-format", "bf16", "--json"))
    assert bill["cache: index keys"] == 21 * 64_000 * 256
    assert bill["host pool"] == 78 * 64_000 * 1152


def test_what_fits(echo_jax):
    budget = ("--device-memory", "141GB", "--weight-memory", "90GB")
    done = echo_jax(*V32, *budget, "--json")
    offload, resident = done.rows("fit")
    (limit,) = done.rows("limit")
    assert limit["index_keys_alone_fill_device_at_tokens"] == 51 * 10**9 // (61 * 132)
    assert offload["offload"] and not resident["offload"]
    assert resident["requests"] < offload["requests"] < limit["index_keys_alone_fill_device_at_tokens"] // 64_000
    assert offload["tokens"] == offload["requests"] * 64_000 and offload["limited_by"] == "device memory"
    # One request more than fits does not: the totals of both batches, with the pool that the default gives them.
    for more, fits in ((0, True), (1, False)):
        seats = offload["requests"] + more
        model = PRESETS["v32"]
        options = PoolOptions(record_format="fp8", key_format="fp8")
        config = options.decode_config(model, seats=seats, capacity=64_000)
        assert (plan.device_total(config, 90 * 10**9) <= 141 * 10**9) == fits
    # Host memory and a fixed pool stop it earlier.
    (by_host, _) = echo_jax(*V32, *budget, "--host-memory-size", "10GB", "--json").rows("fit")
    assert (by_host["requests"], by_host["limited_by"]) == (10**10 // (61 * 64_000 * 656), "host memory")
    (by_pool, _) = echo_jax(*V32, *budget, "--device-slots", 5000, "--json").rows("fit")
    assert (by_pool["requests"], by_pool["limited_by"]) == (2, "device slots (5000)")
    (by_weights, _) = echo_jax(*V32, "--device-memory", "141GB", "--json").rows("fit")
    assert (by_weights["requests"], by_weights["limited_by"]) == (0, "weights")


def test_table_says_the_same(echo_jax):
    done = echo_jax(*V32, "--device-memory", "141GB", "--weight-memory", "90GB")
    assert done.status == 0
    assert f"{61 * 64_000 * 132:,}" in done.out
    assert f"{51 * 10**9 // (61 * 132):,} tokens" in done.out


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 * 2**30), ("141 GB", 141 * 10**9), ("1.5tib", 3 * 2**39), ("1e9", 10**9), ("512B", 512)],
)
def test_sizes(text, count):
    assert numbers.size(text) == count


def test_wrong_input(echo_jax):
    assert "'141GX' has the unit 'GX'" in echo_jax(*V32, "--device-memory", "141GX").error()
    assert "--seats is 0" in echo_jax(*V32, "--seats", 0).error()
    assert "163840 positions" in echo_jax("plan", "--model", "v32", "--context", 200_000).error()
    assert "raise device_slots" in echo_jax(*V32, "--device-slots", 2048).error()


def test_bill_is_what_the_state_takes():
    """The exact part of the bill against the arrays, threshold memory and tables included."""
    config = PoolOptions(key_format="fp8").decode_config(PRESETS["tiny"], seats=2, capacity=256)
    state = state_lib.create(config.cache)
    bill = {row["kind"]: row["bytes"] for row in plan.bill_of(config, 0)}
    assert bytes_on_device(state) == sum(count for kind, count in bill.items() if kind.startswith("cache: "))
    thresholds = [layer.threshold for layer in state.layers]
    assert bill["threshold memory"] == sum(leaf.nbytes for leaf in jax.tree.leaves(thresholds))
    assert bill["page tables"] == sum(leaf.nbytes for leaf in jax.tree.leaves((state.tables, state.step)))
    assert state.host_pool is not None and bill["host pool"] == state.host_pool.nbytes


def test_layers_that_read_ahead_hold_their_staging_together():
    kinds = ("full", "shared", "shared", "full", "shared")
    model = dataclasses.replace(PRESETS["tiny"], layer_kinds=kinds, mlp_kinds=("dense",) * len(kinds))
    config = PoolOptions(cap=8).decode_config(model, seats=2, capacity=256)
    ahead = dataclasses.replace(config, cache=dataclasses.replace(config.cache, read_ahead=True))
    one = 2 * 8 * config.cache.records.bytes_per_row
    assert plan.decode_bytes(ahead) - plan.decode_bytes(config) == one


@pytest.mark.slow
def test_workspace_estimate_is_near_what_xla_takes():
    model = PRESETS["tiny"]
    config = PoolOptions(chunk=512).decode_config(model, seats=1, capacity=4096)
    state = state_lib.create(config.cache)
    shapes = jax.eval_shape(lambda: plan_params(model))
    arguments = (shapes, state, np.zeros((512,), np.int32), np.int32(0), np.int32(1))
    taken = prefill_chunk.lower(*arguments, config=config).compile().memory_analysis()
    assert taken is not None and 0.4 < taken.temp_size_in_bytes / plan.prefill_bytes(config) < 1.3


def plan_params(model):
    from echo_jax.models.dsa import init_params

    return init_params(jax.random.key(0), model)


def test_no_device_is_asked(environment):
    """With a platform that does not exist, whatever touches a device fails."""
    command_line = [sys.executable, "-m", "echo_jax.cli.main", *map(str, V32), "--device-memory", "141GB"]
    done = subprocess.run(
        command_line, env=environment | {"JAX_PLATFORMS": "none_such"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "index keys alone" in done.stdout and done.stderr == ""


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8}


def test_plan_of_a_quantised_config_alone(echo_jax, tmp_path):
    """Such a folder is not loaded, but how much memory it would take is known from its config."""
    folder = copy_folder(V32_TINY, tmp_path, dtype="bfloat16", quantization_config=AWQ)
    (folder / "model.safetensors").unlink()
    raw = json.loads((folder / "config.json").read_text())
    shown = []
    for name in (folder, folder / "config.json"):
        done = echo_jax("plan", "--model", name, "--json")
        assert by_kind(done)["parameters"] == weight_bytes(raw)
        shown.append(done.err)
    assert "echo-jax: note: the weights are counted as stored" in shown[0] and "'awq' is not supported" in shown[0]
    bfloat16 = by_kind(echo_jax("plan", "--model", folder, "--dtype", "bfloat16", "--json"))["parameters"]
    assert bfloat16 == weight_bytes({key: value for key, value in raw.items() if key != "quantization_config"})
    given = echo_jax("plan", "--model", folder, "--weight-memory", "7B", "--json")
    assert by_kind(given)["parameters"] == 7
    refused = echo_jax("generate", "--model", folder, "--prompt-file", folder / "config.json")
    assert "convert the weights to bfloat16" in refused.error()
    unknown = copy_folder(GLM_SHARED, tmp_path, quantization_config={"quant_method": "squeeze"})
    assert "give the bytes with --weight-memory" in echo_jax("plan", "--model", unknown).err
    assert echo_jax("plan", "--model", unknown, "--weight-memory", "7B").status == 0


def test_plan_of_an_fp8_config_counts_what_loading_makes_of_it(echo_jax):
    done = echo_jax("plan", "--model", HUB_FP8, "--json")
    raw = json.loads((HUB_FP8 / "config.json").read_text())
    assert by_kind(done)["parameters"] == weight_bytes(raw | {"quantization_config": None})
