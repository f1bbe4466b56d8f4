"""`echo-jax verify` against a model with known answers, and against answers that were spoiled in one place each.

The spoiled files have the shapes of the true one, so the programs are compiled once for all of these tests.
"""

from pathlib import Path

import numpy as np
import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDER = FIXTURES / "dev-v32-tiny"


@pytest.fixture
def spoiled(tmp_path):
    """The reference file after `change(arrays)`."""

    def make(change=lambda arrays: None):
        with np.load(FOLDER / "logits.npz") as file:
            arrays = {name: file[name] for name in file.files}
        change(arrays)
        path = tmp_path / "spoiled.npz"
        np.savez(path, **arrays)
        return path

    return make


def test_agrees_with_and_without_offload(echo_jax):
    done = echo_jax("verify", FOLDER, "--reference", FOLDER / "logits.npz", "--tolerance", 1e-4, "--json")
    assert done.status == 0, done.out + done.err
    findings, (result,) = done.rows("finding"), done.rows("result")
    # 72 + 24 and 6 + 24 positions in 3 layers, each in two runs; no near-ties.
    sets = [row for row in findings if row["quantity"] == "selected sets"]
    assert [(row["request"], row["run"], row["compared"], row["excluded"]) for row in sets] == [
        (0, "offload", 288, 0),
        (0, "resident", 288, 0),
        (1, "offload", 90, 0),
        (1, "resident", 90, 0),
    ]
    compared = {(row["request"], row["run"], row["quantity"]): row["compared"] for row in findings}
    assert compared[0, "offload", "greedy tokens"] == 25 and compared[0, "offload", "prefill logits"] == 72
    assert compared[1, "resident", "decode logits"] == 24
    # Prefill shows the last query of each chunk, decode every query that sees more than K = 12 positions.
    assert compared[0, "offload", "k-th scores"] == 3 * (2 + 24) and compared[1, "offload", "k-th scores"] == 3 * 18
    assert compared[0, "offload = resident", "bits"] == 2 * 288 + 96
    assert result["differing"] == 0 and result["requests"] == 2
    assert 0 < result["largest_logit_difference"] < 2e-5
    assert result["evicted_rows"] > 100  # the pool was too small to keep what had been selected


def test_table(echo_jax, spoiled):
    done = echo_jax("verify", FOLDER, "--reference", spoiled())
    assert done.status == 0
    assert "0 differences" in done.out and "largest logit difference" in done.out


def change_logit(arrays):
    arrays["r1_decode_logits"][5, 9] += 0.01


def change_prefill_logit(arrays):
    arrays["r1_prefill_logits"][2, 100] = np.nan


def change_set(arrays):
    arrays["r1_selected_bits"][2, 20, 0] ^= 1


def change_token(arrays):
    arrays["r1_greedy_ids"][-1] ^= 1  # the last one: it is never fed back


def change_kth_score(arrays):
    arrays["r1_kth_score"][1, 25] += 0.01


@pytest.mark.parametrize(
    ("change", "quantity", "where"),
    [
        (change_logit, "decode logits", "position 11 word 9"),
        (change_prefill_logit, "prefill logits", "position 2 word 100"),
        (change_set, "selected sets", "layer 2 position 20"),
        (change_token, "greedy tokens", "token 24"),
        (change_kth_score, "k-th scores", "layer 1 position 25"),
    ],
)
def test_disagreement_is_found_and_located(echo_jax, spoiled, change, quantity, where):
    done = echo_jax("verify", FOLDER, "--reference", spoiled(change), "--json")
    assert done.status == 1
    wrong = [row for row in done.rows("finding") if row["differing"]]
    assert [(row["quantity"], row["where"], row["differing"]) for row in wrong] == [(quantity, where, 1)] * 2
    assert {row["run"] for row in wrong} == {"offload", "resident"}
    assert done.rows("result")[0]["differing"] == 2


def test_near_ties_are_left_out_and_counted(echo_jax, spoiled):
    """A set that differs where the gap is below the tolerance is nobody's fault, and what follows from it neither:
    deeper layers and the logits, from that position on."""

    def near_tie(arrays):
        change_set(arrays)
        arrays["r1_topk_gap"][2, 20] = 1e-7
        arrays["r1_decode_logits"][16] += 1.0  # position 22

    done = echo_jax("verify", FOLDER, "--reference", spoiled(near_tie), "--json")
    assert done.status == 0
    assert {row["excluded"] for row in done.rows("finding") if row["request"] == 0} == {0}
    excluded = {(row["run"], row["quantity"]): row["excluded"] for row in done.rows("finding") if row["request"] == 1}
    assert excluded["offload", "selected sets"] == 1
    assert excluded["resident", "decode logits"] == 10  # positions 20 to 29
    assert excluded["offload", "greedy tokens"] == 10 and excluded["offload", "prefill logits"] == 0

    def before(arrays):
        near_tie(arrays)
        arrays["r1_decode_logits"][13] += 1.0  # position 19 does not follow from position 20

    assert echo_jax("verify", FOLDER, "--reference", spoiled(before)).status == 1


def test_tolerance_decides(echo_jax, spoiled):
    path = spoiled(change_logit)
    assert echo_jax("verify", FOLDER, "--reference", path, "--tolerance", 0.1).status == 0


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda arrays: arrays.clear(), ("no request", "r0_prompt_ids")),
        (lambda arrays: arrays.pop("r1_selected_bits"), ("no r1_selected_bits",)),
        (lambda arrays: arrays.pop("r1_decode_logits"), ("no r1_decode_logits",)),
        (lambda arrays: arrays.update(r1_prompt_ids=np.zeros(0, np.int32)), ("r1_prompt_ids has 0 tokens",)),
        (lambda arrays: arrays.update(r1_prompt_ids=np.array([1, 2, 128], np.int32)), ("token 128", "0..127")),
        (lambda arrays: arrays.update(r1_prompt_ids=np.zeros(6)), ("float64", "integers")),
        (lambda arrays: arrays.update(r1_prefill_logits=arrays["r1_prefill_logits"][:, :9]), ("[6, 9]", "[6, 128]")),
        (lambda arrays: arrays.update(r1_decode_logits=arrays["r1_decode_logits"][1:]), ("[23, 128]", "[24, 128]")),
        (lambda arrays: arrays.update(r1_selected_bits=arrays["r1_selected_bits"][:2]), ("[2, 30, 4]", "[3, 30, 4]")),
        (lambda arrays: arrays.update(r1_topk_gap=np.zeros((3, 29))), ("r1_topk_gap", "[3, 29]", "[3, 30]")),
        (lambda arrays: arrays.update(r1_greedy_ids=np.array(["a"], object)), ("Object arrays",)),
    ],
)
def test_malformed_reference_is_wrong_input(echo_jax, spoiled, change, parts):
    message = echo_jax("verify", FOLDER, "--reference", spoiled(change)).error()
    assert [part for part in parts if part not in message] == [], message


def test_wrong_files_and_numbers(echo_jax, tmp_path, spoiled, model_folder):
    no_archive = tmp_path / "logits.npz"
    no_archive.write_bytes(b"not a zip file")
    assert "not a readable .npz" in echo_jax("verify", FOLDER, "--reference", no_archive).error()
    assert "does not exist" in echo_jax("verify", FOLDER, "--reference", tmp_path / "gone.npz").error()
    assert "does not exist" in echo_jax("verify", tmp_path / "gone", "--reference", spoiled()).error()
    assert "--tolerance is -1.0" in echo_jax("verify", FOLDER, "--reference", spoiled(), "--tolerance", -1).error()
    # A reference of another model: its layers and words do not fit.
    assert "r0_" in echo_jax("verify", model_folder, "--reference", spoiled()).error()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm-shared-tiny", "hub-fp8-tiny"])
def test_other_models_agree(echo_jax, name):
    done = echo_jax("verify", FIXTURES / name, "--reference", FIXTURES / name / "logits.npz", "--tolerance", 1e-4)
    assert done.status == 0, done.out
