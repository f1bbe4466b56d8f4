"""What every test runs under: eight CPU devices, strict dtypes and ranks, a hypothesis that repeats itself.

It knows environment variables and pytest, and imports jax only to ask whether there is a GPU. The settings
are given as environment variables and before jax is imported, so that the command line, which tests start as
a process of its own, runs under them too.
"""

import functools
import os
import sys

import hypothesis
import pytest

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set it up; a pytest plugin imports it")

# Eight CPU devices, for the tests of shard_map and to lower for as many GPUs. Whoever gives a number keeps it.
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
if _DEVICE_COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICE_COUNT}=8".strip()

# The GPU tests are run by hand: JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# The CUDA plug-in, for compiling ahead of time alone, lies beside the packages and not among them: without a GPU's
# libraries it would complain at every start of every program in the environment.
_PLUGIN = os.path.join(sys.prefix, "compile-only")
if os.path.isdir(_PLUGIN):
    sys.path.append(_PLUGIN)

# jax's persistent compilation cache stays off. CI starts from a fresh clone, so only a second process of the
# same run could gain; on a developer's machine a kept executable would hide that the code no longer compiles.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

# CI must fail for a change, never for a draw. `HYPOTHESIS_PROFILE=explore` draws anew each time, and more.
# Nor for a slow machine: no deadline for an example, and no health check of the time that drawing takes.
_UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile(
    "ci", derandomize=True, database=None, print_blob=True, max_examples=50, **_UNTIMED
)
hypothesis.settings.register_profile("explore", database=None, print_blob=True, max_examples=500, **_UNTIMED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@functools.cache
def _why_no_gpu() -> str | None:
    """Why the tests marked `gpu` cannot run here, or None where they can."""
    import jax

    if any(device.platform == "gpu" for device in jax.devices()):
        return None
    platform, asked = jax.devices()[0].platform, os.environ["JAX_PLATFORMS"]
    return f"needs an NVIDIA GPU; jax sees {platform} (JAX_PLATFORMS={asked})"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := _why_no_gpu()) is not None:
        pytest.skip(reason)
