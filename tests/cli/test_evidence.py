"""--check says what it could not have caught, and --require-sparse makes that an exit status of its own."""

from __future__ import annotations

import json

import pytest


@pytest.mark.parametrize(
    ("prompt", "new", "slots", "words", "status"),
    [
        (b"short", 4, None, "nothing was sparse: no context exceeds top_k, 12", 3),
        (bytes(range(65, 91)) * 3, 1, None, "nothing was fetched: every selected row was resident", 3),
        (bytes(range(65, 91)) * 3, 8, 26, "", 0),
    ],
    ids=["nothing_sparse", "nothing_fetched", "evidence"],
)
def test_a_check_without_teeth_says_so(echo_jax, model_folder, tmp_path, prompt, new, slots, words, status):
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt)
    command = ["generate", "--model", model_folder, "--prompt-file", file, "--max-new-tokens", new, "--check"]
    command += [] if slots is None else ["--device-slots", slots]
    done = echo_jax(*command, "--require-sparse")
    assert done.status == status, done.err
    assert words in done.out and ("nothing was" in done.out) == bool(words)
    assert echo_jax(*command).status == 0, "without the flag no difference is a success"
    [row] = [row for row in map(json.loads, echo_jax(*command, "--json").out.splitlines()) if row["row"] == "check"]
    evidence = row["evidence"]
    assert evidence["sparse_queries"] == max(0, len(prompt) + new - 1 - 12)
    assert (evidence["recalled"] + evidence["useful"] == 0) == ("nothing was fetched" in words)


def test_evidence_needs_a_check(echo_jax, model_folder, prompt_file):
    command = ["generate", "--model", model_folder, "--prompt-file", prompt_file, "--require-sparse"]
    assert "only --check makes; add --check" in echo_jax(*command).error()


@pytest.mark.parametrize(
    ("arguments", "requests", "limit"),
    [
        (("--host-rows", 64), 0, "host rows (64)"),
        (("--host-rows", "256k"), 4, "host rows (256000)"),
        (("--device-slots", "50k"), 24, "device slots (50000)"),
        (("--device-slots", "50k", "--tokens-per-step", 4), 6, "device slots (50000)"),
        (("--warm-windows", 8), None, "device memory"),
    ],
)
def test_every_limit_takes_part_in_what_fits(echo_jax, arguments, requests, limit):
    """Regression: 26 requests of 8,192 "fit" 64 host rows, and --warm-windows 8 ended in a traceback."""
    command = ["plan", "--model", "v32", "--context", 64_000, "--key-format", "fp8", "--record-format", "fp8"]
    command += ["--device-memory", "2TB", "--weight-memory", "1GB", "--json", *arguments]
    done = echo_jax(*command)
    assert done.status == 0, done.err
    [fit] = [row for row in map(json.loads, done.out.splitlines()) if row["row"] == "fit" and row["offload"]]
    assert fit["limited_by"] == limit and (requests is None or fit["requests"] == requests), fit


@pytest.mark.parametrize("command", [["plan", "--model", "echo-tiny", "--device-memory", "1GB"]])
def test_tables_have_a_legend_of_one_line(echo_jax, command):
    lines = echo_jax(*command).out.splitlines()
    assert any(line.startswith("exact: summed from array shapes") for line in lines)
    assert any(line.startswith("requests of the context above") for line in lines)
