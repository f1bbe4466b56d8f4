"""No test fails because a machine is slow: limits end what hangs, and nothing else is timed."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parent.parent
LEAST_S = 600
WAITS = {"wait", "join", "communicate", "result", "acquire", "timeout"}  # whose only positional number is a time
CLOCKS = {"perf_counter", "perf_counter_ns", "process_time", "process_time_ns", "thread_time", "timeit"}


def problems(source: str) -> Iterator[tuple[int, str]]:
    """Line and reason of every limit below LEAST_S, and of every clock by which a test could judge speed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            limits = [word.value for word in node.keywords if word.arg == "timeout"]
            if called in WAITS and len(node.args) == 1 and isinstance(node.args[0], ast.Constant | ast.UnaryOp):
                limits += node.args if _number(node.args[0]) is not None else []
            for limit in limits:
                if not _is_long(limit):
                    yield node.lineno, f"{called}(timeout={ast.unparse(limit)})"
            if called in CLOCKS:
                yield node.lineno, f"{called}()"
            for word in node.keywords:
                if word.arg == "deadline" and not (isinstance(word.value, ast.Constant) and word.value.value is None):
                    yield node.lineno, f"{called}(deadline={ast.unparse(word.value)})"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            clock, limit = ast.unparse(node.left), node.right
            if clock in ("time.monotonic()", "time.time()") and not _is_long(limit):
                yield node.lineno, f"{clock} + {ast.unparse(limit)}"


def _number(node: ast.expr) -> float | None:
    """The number that is written there; booleans are none."""
    value = node.value if isinstance(node, ast.Constant) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_long(limit: ast.expr) -> bool:
    if isinstance(limit, ast.Constant) and limit.value is None:
        return True
    number = HANG_S if isinstance(limit, ast.Name) and limit.id == "HANG_S" else _number(limit)
    return number is not None and number >= LEAST_S


def test_every_limit_is_a_guard_against_hangs():
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in problems(path.read_text(encoding="utf-8"))
    ]
    assert len(files) > 50
    assert not found, "\n".join([*found, "remedy: timeout=HANG_S of tests.limits, and no assertion about time"])


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(command, timeout=599)",
        "process.communicate(timeout=some_seconds)",
        "barrier.wait(60)",
        "thread.join(5.0)",
        "deadline = time.monotonic() + 5",
        "start = time.perf_counter()",
        "@settings(deadline=200)\ndef test(): ...",
        "@pytest.mark.timeout(30)\ndef test(): ...",
    ],
)
def test_a_short_limit_is_found(line):
    assert list(problems(line))


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run(command, timeout=HANG_S)",
        "event.wait(timeout=None)",
        "', '.join(names)",
        "deadline = time.monotonic() + HANG_S",
        "@settings(deadline=None)\ndef test(): ...",
        "@pytest.mark.timeout(3600)\ndef test(): ...",
    ],
)
def test_a_guard_is_not(line):
    assert not list(problems(line))


def test_the_guard_of_every_test_is_longer_than_those_inside():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["timeout"] > HANG_S >= LEAST_S


def test_hypothesis_judges_no_time():
    settings = hypothesis.settings.default
    assert settings is not None
    assert settings.deadline is None and hypothesis.HealthCheck.too_slow in settings.suppress_health_check
