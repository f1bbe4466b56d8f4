"""Writes the retrieval prompt: eight numbers of made-up names planted in manual.txt, one of them asked for.

python echo_jax/data/traces/prompts/make_recall.py > echo_jax/data/traces/prompts/recall.txt

From a checkout: the task is `multikey` of examples/long_tasks.py.
"""

import pathlib
import sys

import numpy as np

EXAMPLES = pathlib.Path(__file__).resolve().parents[4] / "examples"
sys.path.append(str(EXAMPLES))
import long_tasks  # noqa: E402  # pyright: ignore[reportMissingImports]

manual = (EXAMPLES / "data" / "manual.txt").read_bytes()
window = long_tasks.example("multikey", 9100, manual, np.random.default_rng(7))
# The answer is left to the model.
sys.stdout.buffer.write(window.tokens[window.roles != long_tasks.ANSWER].tobytes())
