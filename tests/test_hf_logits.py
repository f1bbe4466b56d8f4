"""The packaged model says in `transformers` what it says here; runs where transformers and torch are installed.

pip install torch transformers
python -m pytest tests/test_hf_logits.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import checkpoints
from echo_jax.checkpoints.safetensors import load_folder
from echo_jax.models import expanded

FOLDER = checkpoints.resolve_model("echo-tiny")
LENGTH = 700
"""Bytes; from the 257th on the selection leaves some out."""

TOLERANCE = 1e-3


def theirs(text: bytes) -> np.ndarray:
    """f32[T, V] of transformers' own DeepSeek-V3.2, attention in its plain form."""
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    assert type(model).__name__ == "DeepseekV32ForCausalLM"
    with torch.no_grad():
        return model(torch.tensor(list(text))[None], use_cache=False).logits[0].numpy()


@pytest.mark.filterwarnings("default")  # theirs are not ours to mend
def test_transformers_gives_the_same_logits(request):
    text = (request.config.rootpath / "examples" / "data" / "manual.txt").read_bytes()[:LENGTH]
    expected = theirs(text)
    config, params = load_folder(FOLDER)
    assert config.dtype == "float32" and config.index_topk < LENGTH // 2
    tokens = jnp.asarray(np.frombuffer(text, np.uint8), jnp.int32)[None]

    @jax.jit
    def forward(params, tokens):
        positions = jnp.arange(LENGTH)[None]
        return expanded.forward(params, tokens, positions, config, sparse=True, distil=False, block=LENGTH).logits[0]

    found = np.asarray(forward(params, tokens))
    worst = np.abs(found - expected).max()
    print(f"largest difference of a logit: {worst:.2e}")
    assert worst < TOLERANCE
    np.testing.assert_array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))
