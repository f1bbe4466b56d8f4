"""Everything a user can get wrong: one line with quantity, values and remedy, exit 2, nothing half-written."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

PROMPT_BYTES, TOP_K = 101, 12


@pytest.fixture
def refused(echo_jax, model_folder, prompt_file, tmp_path):
    """Calls generate with some arguments changed; returns the message of its refusal."""

    def call(*more, model=model_folder, prompt=prompt_file, new=4):
        kept = tmp_path / "rows.jsonl"
        given = ("generate", "--model", model, "--prompt-file", prompt, "--max-new-tokens", new, *more)
        output = () if "--output" in more else ("--output", kept)
        message = echo_jax(*given, *output).error()
        assert not kept.exists() and list(tmp_path.glob(".rows*")) == []
        return message

    return call


def has_all(message: str, *parts: object) -> bool:
    """Whether every part is in the message; shows what is missing otherwise."""
    lacking = [part for part in parts if str(part) not in message]
    assert not lacking, f"{lacking} not in: {message}"
    return True


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--device-slots", TOP_K), ("12", "13", "raise device_slots")),
        (("--capacity", 64), (PROMPT_BYTES, 105, 64, "raise capacity")),
        (("--capacity", 4096), (4096, 1000, "lower it")),
        (("--host-rows", 64), (128, 64, "raise host_rows")),
        (("--top-p", 0), ("top-p", "0", "(0, 1]")),
        (("--top-p", 1.5), ("top-p", "1.5", "(0, 1]")),
        (("--top-p", "nan"), ("top-p", "nan", "is not a number")),
        (("--temperature", -1), ("temperature", "-1", "0")),
        (("--seed", -1), ("--seed", "-1", 2**32 - 1)),
        (("--cap", -1), ("staging", "-1", "0 switches prefetch off")),
        (("--chunk", 100), ("chunk", 100, 64)),
        (("--warm-windows", 10**6), ("warm_windows", 10**6, "128")),
        (("--threshold", "emma"), ("'emma'", "did you mean 'ema'", "never", "MODULE:CLASS")),
        (("--threshold", "ema:2"), ("ema alpha is 2", "(0, 1]", "ema:alpha=0.5")),
        (("--threshold", "ema:beta=2"), ("beta", "ema:alpha=0.5")),
        (("--threshold", "no_such_module:Policy"), ("no_such_module", "current folder")),
        (("--threshold", "math:Sinus"), ("math", "'Sinus'")),
        (("--threshold", "fractions:Fraction:1"), ("has no init, update, value",)),
        (("--eviction", "lruu"), ("'lruu'", "did you mean 'lru'", "clock")),
        (("--eviction", "clock:0"), ("clock period is 0", "at least 1")),
        (("--output", "/proc/no/rows"), ("/proc/no/rows", "cannot be written", "writable")),
        (("--output", "."), ("is a folder", "path of a file")),
        (("--key-format", "fp4"), ("--key-format", "fp4", "fp8")),
        (("--scores", "mosaic_gpu"), ("--scores is mosaic_gpu", "Hopper", "jax runs on cpu", "leave it out")),
        (("--attend", "mosaic_gpu"), ("--attend is mosaic_gpu", "Hopper", "jax runs on cpu", "leave it out")),
        (("--prefetch", "fused"), ("--prefetch is fused", "Hopper", "jax runs on cpu", "--host-memory jnp")),
        (("--device-slotz", 50), ("--device-slotz", "did you mean '--device-slots'?")),
        (("--max-new-tokens", "many"), ("--max-new-tokens", "many")),
        (("--record-format", "fp8"), ("fp8 records", "128", "use record format 'bf16'")),
    ],
)
def test_options(refused, options, parts):
    assert has_all(refused(*options), *parts)


def test_no_new_tokens(refused):
    assert has_all(refused(new=0), "--max-new-tokens is 0", "at least 1")


def test_prompt_beyond_the_model(refused, tmp_path):
    long = tmp_path / "long.txt"
    long.write_bytes(b"x" * 998)
    assert has_all(refused(prompt=long), 998, 1002, 1000, "shorten the prompt")


def test_empty_and_missing_prompt(refused, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    assert has_all(refused(prompt=empty), empty, "0 tokens", "at least 1")
    assert has_all(refused(prompt=tmp_path / "gone.txt"), "gone.txt", "No such file", "existing file")


def test_batch_beyond_the_pool(echo_jax, model_folder, prompt_file):
    given = ("generate", "--model", model_folder, "--prompt-file", prompt_file, prompt_file, "--device-slots", 25)
    assert has_all(echo_jax(*given).error(), "25", "26", "2*1*(12+1)", "lower the batch")


def test_unknown_model(refused, echo_jax, monkeypatch, model_folder):
    known = {"echo-tiny": model_folder}
    monkeypatch.setattr("echo_jax.checkpoints.packaged_models", lambda: known)
    monkeypatch.setattr("echo_jax.cli.models.packaged_models", lambda: known)
    assert has_all(refused(model="echo-tinny"), "'echo-tinny'", "nearest is 'echo-tiny'")
    assert has_all(refused(model="./gone"), "'./gone'", "does not exist")
    assert has_all(refused(model="v32"), "'v32'", "shapes without weights", "echo-tiny")
    assert has_all(echo_jax("plan", "--model", "v33").error(), "'v33'", "did you mean 'v32'", "glm5")


def edit_config(**changes):
    """A change of config.json; None removes a key."""

    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def edit_tensors(edit):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


INDEXER = "model.layers.0.self_attn.indexer.wk.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda folder: (folder / "config.json").unlink(), ("no config.json", "model.safetensors")),
        (
            lambda folder: [(folder / name).unlink() for name in ("config.json", "tokenizer_config.json")],
            ("no config.json",),
        ),
        (lambda folder: (folder / "config.json").write_text("{"), ("config.json", "not JSON")),
        (lambda folder: (folder / "model.safetensors").unlink(), ("model.safetensors", "fetch")),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), ("no tokenizer.json", "ByteTokenizer")),
        (truncate, ("truncated", "bytes", "fetch the file again")),
        (edit_tensors(lambda tensors: tensors.pop(INDEXER)), (INDEXER, "layer 0 is a full layer", "fetch")),
        (
            edit_tensors(lambda tensors: tensors.update({EMBEDDING: np.zeros((256, 33), np.float32)})),
            (EMBEDDING, "[256, 33]", "[256, 32]"),
        ),
        (
            edit_tensors(lambda tensors: tensors.update({EMBEDDING: np.zeros((256, 32), np.int8)})),
            (EMBEDDING, "I8", "BF16"),
        ),
        (
            edit_tensors(
                lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING].astype(ml_dtypes.float8_e4m3fn)})
            ),
            (EMBEDDING, "FP8", "scale_inv"),
        ),
        (edit_config(rope_parameters={"rope_type": "llama3", "rope_theta": 1.0}), ("'llama3'", "'yarn'")),
        (edit_config(dtype="float64"), ("'float64'", "bfloat16")),
        (edit_config(model_type="llama"), ("'llama'", "deepseek_v32")),
        (edit_config(index_topk=None), ("index_topk", "config.json lacks")),
    ],
)
def test_folder(refused, broken_folder, change, parts):
    assert has_all(refused(model=broken_folder(change)), *parts)


def test_shared_library_asked_for_by_name(refused, monkeypatch):
    monkeypatch.setenv("ECHO_JAX_FFI", "0")
    assert has_all(refused("--host-memory", "ffi"), "not available", "ECHO_JAX_FFI")


def test_memory_that_no_machine_has(echo_jax, model_folder, prompt_file):
    """XLA's refusal of an allocation is an answer to the user, not a fault."""
    given = ("generate", "--model", model_folder, "--prompt-file", prompt_file, "--host-memory", "jnp")
    message = echo_jax(*given, "--host-rows", 2**31 - 64, "--device-slots", 13, "--record-format", "f32").error()
    assert has_all(message, "out of memory", "echo-jax plan")


def test_no_command_and_a_wrong_one(echo_jax):
    assert has_all(echo_jax().error(), "COMMAND", "--help")
    assert has_all(echo_jax("genrate").error(), "'genrate'", "'generate'")


def test_output_is_tried_before_anything_is_read(echo_jax, tmp_path):
    given = (
        "generate",
        "--model",
        "no-such-model",
        "--prompt-file",
        "gone",
        "--output",
        tmp_path / "no" / "rows.jsonl",
    )
    assert has_all(echo_jax(*given).error(), "cannot be written")


def test_a_refusal_keeps_the_file_that_was_there(echo_jax, model_folder, prompt_file, tmp_path):
    kept = tmp_path / "rows.jsonl"
    kept.write_text("of an earlier run\n")
    given = ("generate", "--model", model_folder, "--prompt-file", prompt_file, "--top-p", 2, "--output", kept)
    echo_jax(*given).error()
    assert kept.read_text() == "of an earlier run\n"
