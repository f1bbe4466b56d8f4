"""Rotary frequencies, cosines and sines against a table that transformers computed (`fixtures/make_rope_table.py`)."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.checkpoints.hf_config import config_from_hf
from echo_jax.checkpoints.notes import CheckpointNote
from echo_jax.models.dsa import rope_frequencies, rope_table
from echo_jax.models.presets import PRESETS
from tests.test_hf_config import RELEASED_GLM5, RELEASED_V32, without

TABLE = json.loads((Path(__file__).parent / "fixtures" / "rope-table.json").read_text())["cases"]
RELEASED = {"deepseek_v32": RELEASED_V32, "glm_moe_dsa": RELEASED_GLM5}
NOTED = {
    "scaling_beside_parameters": "rope_scaling replaces rope_parameters whole.*rope_type 'yarn' for 'default'",
    "plain_scaling_beside_yarn": "rope_scaling replaces rope_parameters whole.*factor 'absent' for 40.*for 'yarn'",
    "own_theta_before_the_lost": "rope_scaling replaces rope_parameters whole.*rope_theta 50000 for 10000",
    "rope_type_before_type": "rope_type 'default' and type 'yarn'.*disagree; rope_type counts",
}


@pytest.mark.parametrize("case", TABLE)
def test_frequencies_are_those_of_transformers(case):
    """Every dialect of the settings, alone and beside the other, and the ramp of YaRN at both of its ends."""
    row = TABLE[case]
    raw = without(RELEASED[row["model_type"]], "rope_theta", "rope_scaling", "rope_parameters") | row["config"]
    if case in NOTED:
        with pytest.warns(CheckpointNote, match=NOTED[case]):
            rope = config_from_hf(raw).rope
    else:
        rope = config_from_hf(raw).rope
    # The thetas of released models agree to the bit; torch rounds one power of 50,000 the other way.
    off = 0 if rope.theta != 50000 else 1
    np.testing.assert_array_max_ulp(rope_frequencies(rope, 64), np.array(row["frequencies"], np.float32), maxulp=off)
    assert rope.attention_factor() == pytest.approx(row["factor"], rel=1e-12)


@pytest.mark.parametrize("name", ["v32", "glm5", "glm5.2"])
def test_cosines_and_sines_to_the_last_position(name):
    """To 163,839 in V3.2, to 1,048,575 in GLM-5.2: there one ulp of a frequency is 0.06 radians."""
    row, config = TABLE[name], PRESETS[name]
    assert row["positions"][-1] == config.max_positions - 1
    cosines, sines = rope_table(jnp.array(row["positions"], jnp.int32), config)
    # The angles agree to the bit, so what is left is the rounding of two cosines of one f32.
    np.testing.assert_allclose(cosines, row["cosines"], rtol=0, atol=2.5e-7)
    np.testing.assert_allclose(sines, row["sines"], rtol=0, atol=2.5e-7)
