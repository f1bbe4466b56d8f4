"""`echo-jax doctor`: what is available on this machine, and why not.

Knows what to ask and of whom. Changes nothing, and survives whatever is broken: a question that fails is an answer.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from echo_jax import pinning
from echo_jax.cli import output
from echo_jax.cli.errors import refusing_wrong_input
from echo_jax.cli.options import option

EXAMPLES = """\
exit status: 0 everything needed works (optional parts may be missing), 1 something needed is broken"""

OK, MISSING, BROKEN = "ok", "missing", "broken"

NEEDED_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "safetensors", "orbax-checkpoint", "absl-py", "rich")
OPTIONAL_PACKAGES = {
    "tokenizers": ("models with a tokenizer.json", "pip install 'echo-jax[hf]'"),
    "transformers": ("comparing with another implementation", "pip install 'echo-jax[hf]'"),
    "matplotlib": ("reports with pictures", "pip install 'echo-jax[report]'"),
    "jax-cuda13-plugin": ("NVIDIA GPUs", "pip install 'echo-jax[cuda13]'"),
}


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Says what is available on this machine, and why not."""

    json: bool = option("print JSON rows instead of a table", False, group="output")
    output: Path | None = option("also write the rows to this file", None, metavar="FILE", group="output")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was asked."""

    name: str
    state: str  # OK, MISSING (an optional part is not there) or BROKEN (a needed one does not work)
    detail: str
    remedy: str = ""

    def row(self) -> dict:
        return {"row": "check"} | dataclasses.asdict(self)


def execute(options: DoctorOptions) -> int:
    """Runs the command; 1 when something needed is broken."""
    with refusing_wrong_input():
        rows = output.Rows(options.json, options.output)
    with rows:
        findings = list(examine())
        for finding in findings:
            rows.add(finding.row())
        if not options.json:
            _print(findings)
    return 1 if any(finding.state == BROKEN for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """Every question, in an order in which a later one may build on an earlier."""
    yield _answered("python", _python)
    yield _answered("packages", _packages)
    devices = _answered("devices", _devices)
    yield devices
    of_a_device = {"shared library": _library, "pinned host memory": _pinned, "host memory in use": _host_memory}
    for name, ask in of_a_device.items():
        yield _answered(name, ask) if devices.state == OK else Finding(name, MISSING, "not asked: there is no device")
    yield _answered("models", _models)
    for name, (purpose, remedy) in OPTIONAL_PACKAGES.items():
        version = _version(name)
        yield (
            Finding(name, OK, f"{version}, for {purpose}")
            if version
            else Finding(name, MISSING, f"for {purpose}", remedy)
        )


def _answered(name: str, ask: Callable[[str], Finding]) -> Finding:
    try:
        return ask(name)
    except Exception as error:  # whatever is broken here, the other questions are still worth asking
        return Finding(name, BROKEN, f"{type(error).__name__}: {' '.join(str(error).split())}", "see the message")


def _python(name: str) -> Finding:
    return Finding(name, OK, f"{platform.python_version()} at {sys.executable}")


def _packages(name: str) -> Finding:
    versions = {package: _version(package) for package in ("echo-jax", *NEEDED_PACKAGES)}
    lacking = [package for package, version in versions.items() if version is None]
    if lacking:
        return Finding(name, BROKEN, f"{', '.join(lacking)} missing", f"pip install {' '.join(lacking)}")
    return Finding(name, OK, ", ".join(f"{package} {version}" for package, version in versions.items()))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(name: str) -> Finding:
    import jax

    try:
        devices = jax.devices()
    except Exception as error:  # jax raises RuntimeError, or AssertionError for a platform that has no plug-in
        asked = os.environ.get("JAX_PLATFORMS")
        said = " ".join(str(error).split()) or type(error).__name__
        remedy = "correct or unset JAX_PLATFORMS" if asked else "reinstall jax and jaxlib of the same version"
        return Finding(name, BROKEN, f"jax finds no device (JAX_PLATFORMS is {asked!r}): {said}", remedy)
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in devices})
    text = f"{len(devices)} x {', '.join(kinds)}"
    if devices[0].platform == "cpu" and Path("/dev/nvidiactl").exists():
        return Finding(
            name, OK, f"{text}; this machine has an NVIDIA GPU that jax does not see", "pip install 'echo-jax[cuda13]'"
        )
    return Finding(name, OK, text)


def _library(name: str) -> Finding:
    from echo_jax import _ffi

    reason = _ffi.why_unavailable()
    if reason is None:
        return Finding(name, OK, f"version {_ffi.LIBRARY_VERSION} at {_ffi.library_path()}")
    text, _, remedy = reason.partition("; ")
    return Finding(
        name, MISSING, f"{text} (everything still works, rows move more slowly)", remedy or _ffi.BUILD_COMMAND
    )


def _pinned(name: str) -> Finding:
    import jax

    from echo_jax import _compat

    device = jax.devices()[0]
    kinds = sorted({memory.kind for memory in device.addressable_memories()})
    if _compat.HOST_KIND not in kinds:
        return Finding(name, MISSING, f"{device.platform} has {', '.join(kinds)}", "use a jax of 0.11.2 or newer")
    text = f"{device.platform} has {', '.join(kinds)}"
    if device.platform == "cpu":
        return Finding(name, OK, f"{text}; on a CPU nothing is locked")
    return Finding(name, OK, f"{text}; {_pinning()}")


def _pinning() -> str:
    """What a pool could take, on which NUMA node it should lie, and how long locking its pages takes."""
    parts = [f"XLA locks at most {pinning.limit_gb()} GB ({pinning.LIMIT_VARIABLE})"]
    if (available := pinning.available_bytes()) is not None:
        parts.insert(0, f"{output.size(available)} of host memory available")
    parts.append(f"about {pinning.SECONDS_PER_PINNED_GIB} s for each GiB")
    parts += [f"GPU {bus} is on NUMA node {node}" for bus, node in pinning.numa_nodes().items()]
    return ", ".join(parts)


def _host_memory(name: str) -> Finding:
    from echo_jax import hostmem

    chosen = hostmem.choose()
    if chosen is hostmem.HostMemory.PINNED:
        return Finding(name, OK, "pinned, rows moved in place by the shared library")
    return Finding(name, OK, "ordinary, an array of the device: nothing is saved on a GPU", "build the shared library")


def _models(name: str) -> Finding:
    from echo_jax.checkpoints import packaged_models

    known = packaged_models()
    if not known:
        return Finding(name, MISSING, "no model comes with this installation", "give --model a Hugging Face folder")
    return Finding(name, OK, ", ".join(known))


def _print(findings: list[Finding]) -> None:
    console = output.console()
    styles = {OK: "green", MISSING: "yellow", BROKEN: "bold red"}
    for finding in findings:
        console.print(f"{finding.state:8}", style=styles[finding.state], end="")
        console.print(f"{finding.name}: {finding.detail}", soft_wrap=True)
        if finding.remedy:
            console.print(f"{'':8}  -> {finding.remedy}", style="dim", soft_wrap=True)
    broken = sum(finding.state == BROKEN for finding in findings)
    parts = "1 needed part is" if broken == 1 else f"{broken} needed parts are"
    console.print(f"\n{parts} broken" if broken else "\neverything needed works")
