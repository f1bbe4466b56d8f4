"""The claims a CPU can answer, measured on echo-tiny with its two shipped documents.

    python -m bench.cpu [ratio] [bytes] [check] [prefill]      (make bench-cpu: all of them)

Knows which claims there are to measure here. How a row is written is in `harness`; how long a fresh clone takes is
measured by `fresh`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import harness
from echo_jax import checkpoints, decode, engine, prefill
from echo_jax import state as state_lib
from echo_jax.checkpoints.safetensors import load_folder

DATA = Path(__file__).resolve().parent.parent / "examples" / "data"
STEPS = 100


def document(name: str, length: int, start: int = 0) -> list[int]:
    """`length` bytes of a shipped document, which is a token each."""
    return list((DATA / name).read_bytes()[start : start + length])


def offload_ratio() -> None:
    """[A.offload_ratio_cpu]: decode steps a second, offloaded over resident, same batch, steps interleaved."""
    model, params = load_folder(checkpoints.resolve_model("echo-tiny"))
    for seats in (4, 1):
        prompts = [document("manual.txt", 8000, 100 * seat) for seat in range(seats)]
        runs = {}
        for offload in (True, False):
            cache = decode.cache_config(model, seats=seats, capacity=8000 + STEPS + 80, offload=offload)
            config = decode.DecodeConfig(model, cache)
            state = state_lib.create(cache)
            for seat, prompt in enumerate(prompts):
                state = state_lib.admit(cache, state, seat, cache.capacity)
                state, output = prefill.prefill(params, state, prompt, seat, config=config)
            tokens = jnp.tile(jnp.argmax(output.logits)[None, None], (seats, 1)).astype(jnp.int32)
            runs[offload] = [config, state, tokens, []]
        for number in range(STEPS + 10):
            for run in runs.values():
                config, state, tokens, seconds = run
                started = time.perf_counter()
                state, output = decode.decode_step(params, state, tokens, config=config)
                jax.block_until_ready((state, output))
                if number >= 10:  # the first steps compile and fill a cold pool
                    seconds.append(time.perf_counter() - started)
                run[1:3] = state, jnp.argmax(output.logits, axis=-1).astype(jnp.int32)
        ratios = np.array(runs[False][3]) / np.array(runs[True][3])
        offloaded, resident = (float(np.median(runs[kind][3]) * 1e3) for kind in (True, False))
        harness.record(
            "A.offload_ratio_cpu" if seats == 4 else None,
            value=harness.Measurement(
                resident / offloaded, *map(float, np.quantile(ratios, (0.1, 0.9))), repeats=STEPS
            ),
            unit="ratio",
            name=f"decode with offload over resident, batch {seats}",
            method="resident step time over offloaded step time, medians of interleaved steps of one process",
            shapes={"seats": seats, "context": 8000, "slots a seat": runs[True][0].cache.device_slots // seats},
            notes=f"resident {resident:.2f} ms, offloaded {offloaded:.2f} ms a step; spread: of the ratio step by step",
        )


def device_bytes() -> None:
    """[A.device_bytes]: bytes of the state's arrays less those of design's formula."""
    model, _ = load_folder(checkpoints.resolve_model("echo-tiny"))
    worst = 0
    for records, keys in (("bf16", "f32"), ("fp8", "fp8"), ("f32", "bf16")):
        cache = decode.cache_config(model, seats=2, capacity=8192, record_format=records, key_format=keys)
        state = state_lib.create(cache)
        difference = engine.bytes_on_device(state) - sum(cache.device_bytes().values())
        worst = max(worst, abs(difference), key=abs)
    harness.record(
        "A.device_bytes",
        value=worst,
        unit="B",
        method="sum of the state's leaves less L [N_G (record + 9) + N_H (key + 4)], worst of three format pairs",
        shapes={"seats": 2, "context": 8192},
    )


def check_differences() -> None:
    """[A.check_differences]: the demo's comparison, over formats."""
    model, params = load_folder(checkpoints.resolve_model("echo-tiny"))
    total, compared = 0, 0
    for records, keys in (("bf16", "f32"), ("fp8", "fp8")):
        cache = decode.cache_config(model, seats=2, capacity=4352, record_format=records, key_format=keys, chunk=256)
        config = decode.DecodeConfig(model, cache)
        prompts = [document("manual.txt", 4096), document("long_manual.txt", 1000)]
        runs = [
            engine.generate(params, which, prompts, 128, keep_record=True)
            for which in (config, engine.resident(config))
        ]
        result = engine.compare(*runs)
        total += result.differences
        compared += result.lists + result.logits + result.digests
    harness.record(
        "A.check_differences",
        value=total,
        unit="",
        method=f"lists, logits rows and digests of every step and prefill chunk against the resident run: {compared}",
        shapes={"prompts": [4096, 1000], "new tokens": 128, "formats": ["bf16/f32", "fp8/fp8"]},
    )


def prefill_seconds() -> None:
    """[A.prefill_32k_s]: a 32,000-byte prompt, compilation not counted."""
    model, params = load_folder(checkpoints.resolve_model("echo-tiny"))
    cache = decode.cache_config(model, seats=1, capacity=32064)
    config = decode.DecodeConfig(model, cache)
    state = state_lib.admit(cache, state_lib.create(cache), 0, cache.capacity)
    prompt = document("long_manual.txt", 32000)
    state, output = prefill.prefill_chunk(
        params, state, np.zeros(cache.chunk, np.int32), np.int32(0), np.int32(0), config=config
    )
    jax.block_until_ready((state, output))
    started = time.perf_counter()
    state, output = prefill.prefill(params, state, prompt, 0, config=config)
    jax.block_until_ready((state, output))
    harness.record(
        "A.prefill_32k_s",
        value=time.perf_counter() - started,
        unit="s",
        method="one run, wall clock, after a warm-up call that compiles",
        shapes={"prompt": 32000, "chunk": cache.chunk, "records": "bf16", "keys": "f32"},
    )


PARTS = {"ratio": offload_ratio, "bytes": device_bytes, "check": check_differences, "prefill": prefill_seconds}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := sorted(set(wanted) - set(PARTS)):
        sys.exit(f"no measurement is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in wanted:
        PARTS[name]()


if __name__ == "__main__":
    main()
