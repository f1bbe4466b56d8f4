"""`echo-jax doctor`: what it says where things are missing or broken."""

import json
import subprocess
import sys

from echo_jax import _ffi
from echo_jax.cli import doctor


def test_everything_needed_is_there(echo_jax):
    done = echo_jax("doctor", "--json")
    assert done.status == 0, done.out
    states = {row["name"]: row["state"] for row in done.rows("check")}
    assert {"python", "packages", "devices", "shared library", "pinned host memory", "models"} <= set(states)
    assert states["python"] == states["packages"] == states["devices"] == "ok"
    assert "everything needed works" in echo_jax("doctor").out


def test_what_jax_says_of_absent_accelerators_is_kept_from_people(environment):
    """absl's app raises the verbosity to INFO, and jax then reports each backend that it could not start."""
    del environment["JAX_PLATFORMS"]
    command_line = [sys.executable, "-m", "echo_jax.cli.main", "doctor"]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_without_the_shared_library(echo_jax, monkeypatch):
    monkeypatch.setenv(_ffi.ENVIRONMENT_SWITCH, "0")
    done = echo_jax("doctor", "--json")
    assert done.status == 0  # it is optional
    rows = {row["name"]: row for row in done.rows("check")}
    assert rows["shared library"]["state"] == "missing" and "ECHO_JAX_FFI=0" in rows["shared library"]["detail"]
    assert rows["shared library"]["remedy"] == "unset it to use the library"
    assert "ordinary" in rows["host memory in use"]["detail"]


def test_a_needed_package_is_missing(echo_jax, monkeypatch):
    monkeypatch.setattr(doctor, "NEEDED_PACKAGES", ("jax", "no-such-package"))
    done = echo_jax("doctor", "--json")
    assert done.status == 1
    (row,) = [row for row in done.rows("check") if row["state"] == "broken"]
    assert row["name"] == "packages" and row["remedy"] == "pip install no-such-package"
    assert "1 needed part is broken" in echo_jax("doctor").out


def test_without_a_device(environment):
    """The other questions are still answered, and the reason names the variable."""
    command_line = [sys.executable, "-m", "echo_jax.cli.main", "doctor", "--json"]
    done = subprocess.run(
        command_line, env=environment | {"JAX_PLATFORMS": "none_such"}, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert rows["devices"]["state"] == "broken" and "none_such" in rows["devices"]["detail"]
    assert rows["shared library"]["detail"] == "not asked: there is no device"
    assert rows["python"]["state"] == "ok"
