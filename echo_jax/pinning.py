"""What is known of host memory before any of it is locked: how much there is, where, and how long locking takes.

Reads files of the operating system and knows no arrays. Everything here is a forecast for people; whether a pool can be
had is decided where it is created.
"""

from __future__ import annotations

import os
from pathlib import Path

SECONDS_PER_PINNED_GIB = 0.43
"""cudaHostAlloc of 90 GiB on the host of an H200: 38.6 s."""

LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Read by XLA when the GPU backend starts: the most pinned memory it hands out, in GB."""

DEFAULT_LIMIT_GB = 64


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Host memory that can be had without swapping, as the kernel estimates it; None where it does not say."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def limit_gb() -> int:
    """The most pinned memory that XLA hands out in this environment, in GB."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    return int(text) if text.isdigit() else DEFAULT_LIMIT_GB


def numa_nodes(
    driver: Path = Path("/proc/driver/nvidia/gpus"), bus: Path = Path("/sys/bus/pci/devices")
) -> dict[str, int]:
    """PCI address of every NVIDIA GPU -> its NUMA node; -1 where the machine has only one or does not say."""
    if not driver.is_dir():
        return {}
    nodes = {}
    for gpu in sorted(path.name for path in driver.iterdir()):
        try:
            nodes[gpu] = int((bus / gpu / "numa_node").read_text(encoding="ascii"))
        except (OSError, ValueError):
            nodes[gpu] = -1
    return nodes
