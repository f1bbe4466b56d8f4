"""Can a host pool of nearly the machine's memory be made, filled from the GPU and freed, and what does that take?

    python -m bench.host_pool [--gib 90] [--owner library xla]      about 70 s for each owner at 90 GiB

Each owner of pinned memory (echo_jax/_pinned.py) gets a process of its own, started with XLA's limit just above the
pool. It makes the pool, writes every row of every layer from the GPU, reads a sample back, frees the pool and ends; the
parent looks at how it ended, and records a pool that was zero, stayed where it was and held what was written. A second
copy would show in the device's peak, or in the machine's available memory.

It knows the clock and /proc; what a pool is for it does not know.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from bench import harness

LAYERS, WORDS = 61, 288  # a bf16 record of 1152 bytes in each of 61 layers
ROWS_A_CALL = 16_384  # 1.15 GB of records
OWNERS = ("library", "xla")


def child(gib: float, owner: str) -> dict[str, float]:
    """Makes, fills, reads and frees a pool; what that took."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from echo_jax import _pinned, hostmem, pinning

    device = jax.devices()[0]
    rows = int(gib * 2**30 // (LAYERS * WORDS * 4)) // ROWS_A_CALL * ROWS_A_CALL
    shape, on_host = (LAYERS, rows, WORDS), jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    hostmem.choose(device.platform, "cuda")  # says why where it cannot be
    jax.block_until_ready(jnp.zeros((8,)))
    found: dict[str, float] = {"pool_gib": LAYERS * rows * WORDS * 4 / 2**30}

    def seconds(name, function):
        before, started = pinning.available_bytes() or 0, time.perf_counter()
        result = function()
        found[f"{name}_s"] = time.perf_counter() - started
        found[f"{name}_took_gib"] = (before - (pinning.available_bytes() or 0)) / 2**30
        print(
            f"  {name}: {found[f'{name}_s']:.1f} s, available memory less {found[f'{name}_took_gib']:.1f} GiB",
            flush=True,
        )
        return result

    make = _pinned.from_library if owner == "library" else _pinned.from_xla
    pool = seconds("create", lambda: jax.block_until_ready(make(shape, np.dtype(np.uint32), on_host)))
    found["held_by_library_gib"] = _pinned.held_by_library() / 2**30
    pointer = pool.unsafe_buffer_pointer()
    sample = np.random.default_rng(0).integers(0, rows, 2000).astype(np.int32)
    read = jax.jit(hostmem.read_rows)
    found["not_zero"] = int(sum(np.asarray(read(pool, layer, sample)).any() for layer in (0, 30, 60)))

    def value(layer, row, column):
        return row * jnp.uint32(61) + layer + (column << 22)

    @jax.jit
    def records(first):
        layer = jax.lax.broadcasted_iota(jnp.uint32, (LAYERS, ROWS_A_CALL, WORDS), 0)
        row = jax.lax.broadcasted_iota(jnp.uint32, (LAYERS, ROWS_A_CALL, WORDS), 1) + first
        return value(layer, row, jax.lax.broadcasted_iota(jnp.uint32, (LAYERS, ROWS_A_CALL, WORDS), 2))

    write = jax.jit(hostmem.write_back, donate_argnums=0)

    def fill(pool):
        for first in range(0, rows, ROWS_A_CALL):
            pool = write(pool, records(np.uint32(first)), np.arange(first, first + ROWS_A_CALL, dtype=np.int32))
        return jax.block_until_ready(pool)

    holder = [pool]
    del pool
    pool = seconds("fill", lambda: fill(holder.pop()))
    found["fill_gb_s"] = pool.nbytes / found["fill_s"] / 1e9
    found["moved"] = int(pool.unsafe_buffer_pointer() != pointer)
    differing = 0
    for layer in (0, 30, 60):
        with np.errstate(over="ignore"):
            column = np.arange(WORDS, dtype=np.uint32) << 22
            expected = sample.astype(np.uint32)[:, None] * np.uint32(61) + np.uint32(layer) + column
        differing += int((np.asarray(read(pool, layer, sample)) != expected).any(axis=1).sum())
    found["differing_rows"] = differing
    found["device_peak_gib"] = (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
    pool.delete()
    holder.append(pool)
    del pool
    seconds("free", holder.clear)
    found["still_held_by_library_gib"] = _pinned.held_by_library() / 2**30
    status = open("/proc/self/status").read()
    found["process_peak_gib"] = int(status.split("VmHWM:")[1].split()[0]) / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=90.0, help="size of the pool, GiB")
    parser.add_argument("--owner", nargs="+", default=list(OWNERS), choices=OWNERS, help="whose pinned memory")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.gib, options.owner[0])))
        return
    failures = []
    for owner in options.owner:
        print(f"{owner}, {options.gib:.0f} GiB", flush=True)
        command = [sys.executable, "-m", "bench.host_pool", "--child", "--gib", str(options.gib), "--owner", owner]
        environment = {**os.environ, "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(int(options.gib) + 2)}
        started = time.perf_counter()
        lines = []
        with subprocess.Popen(command, env=environment, cwd=harness.ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if line.startswith("  "):
                    print(line, end="", flush=True)
        whole = time.perf_counter() - started
        if process.returncode != 0 or not lines:
            failures.append(f"{owner} ended with status {process.returncode} after {whole:.0f} s")
            continue
        found = json.loads(lines[-1])
        text = ", ".join(f"{name} {number:.2f}" for name, number in found.items())
        print(f"  {text}; the whole process {whole:.0f} s, status 0", flush=True)
        if wrong := [f"{name} {found[name]:.0f}" for name in ("not_zero", "moved", "differing_rows") if found[name]]:
            failures.append(f"{owner}: {', '.join(wrong)}, all of which must be 0")
            continue
        import jax  # for the machine's name; the child has gone by now

        jax.devices()
        harness.record(
            value=found["create_s"],
            unit="s",
            file="gpu_host_pool.jsonl",
            name=f"making a host pool of {found['pool_gib']:.0f} GiB, pinned by {owner}",
            method="one run in a process of its own, wall clock, zeros included",
            shapes={"layers": LAYERS, "bytes": WORDS * 4, "GiB": round(found["pool_gib"], 1)},
            notes=text,
        )
    if failures:
        sys.exit("; ".join(failures))


if __name__ == "__main__":
    main()
