"""Prefill and decode by hand: what `echo-jax generate` does for one prompt, in the calls that it is made of.

    python examples/decode_tiny.py [--model echo-tiny] [--prompt-file examples/data/manual.txt] [--bytes 600] [--new 48]

One half of the new tokens is taken step by step, the other in one compiled loop.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import echo_jax as echo
from echo_jax import checkpoints, prefill, stats

MANUAL = Path(__file__).parent / "data" / "manual.txt"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prefill and decode by hand.")
    parser.add_argument("--model", default="echo-tiny", help="a packaged model, or a Hugging Face folder")
    parser.add_argument("--prompt-file", type=Path, default=MANUAL)
    parser.add_argument("--bytes", type=int, default=600, help="how much of the file is the prompt")
    parser.add_argument("--new", type=int, default=48, help="tokens to add")
    flags = parser.parse_args(argv)
    if min(flags.bytes, flags.new) < 1:
        parser.error(f"--bytes is {flags.bytes} and --new is {flags.new} but both must be at least 1")
    folder = checkpoints.resolve_model(flags.model)
    model, params = checkpoints.load_folder(folder)
    tokenizer = checkpoints.load_tokenizer(folder)
    prompt = tokenizer.encode(flags.prompt_file.read_bytes()[: flags.bytes])

    cache = echo.cache_config(model, seats=1, capacity=len(prompt) + flags.new, device_slots=model.index_topk + 64)
    config = echo.DecodeConfig(model, cache)
    state = echo.state.admit(cache, echo.state.create(cache), 0, len(prompt) + flags.new)
    state, output = prefill.prefill(params, state, prompt, 0, config=config)
    tokens, moved = [int(np.argmax(output.logits))], stats.Totals(cache.records.bytes_per_row)

    for _ in range(flags.new // 2):
        state, output = echo.decode_step(params, state, np.asarray([tokens[-1:]], np.int32), config=config)
        tokens.append(int(np.argmax(output.logits[0, 0])))
        moved.add(output.moved)

    last, seeds = jnp.asarray(tokens[-1:], jnp.int32), jnp.zeros((1,), jnp.uint32)
    missing = flags.new - len(tokens)
    state, (more, outputs) = echo.decode_many(params, state, last, seeds, config=config, steps=missing)
    moved.add(outputs.moved)

    print(tokenizer.decode(prompt[-80:] + tokens + np.asarray(more)[:, 0].tolist()))
    for row in moved.by_layer():
        print("layer {layer}: hit rate {hit_rate:.2f}, {useful} rows moved ahead, {recalled} when asked".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
