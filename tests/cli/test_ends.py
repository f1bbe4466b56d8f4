"""How a command ends when it does not end by itself: signals, a full disk, a closed pipe, mostly in its own process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from echo_jax.cli import main as main_module
from echo_jax.cli import output
from echo_jax.replay.rows import RowFile
from echo_jax.report import pages
from tests.limits import HANG_S

PROGRAM = [sys.executable, "-m", "echo_jax"]


def start(arguments, environment, stdout: Any = subprocess.PIPE) -> subprocess.Popen:
    return subprocess.Popen([*PROGRAM, *arguments], env=environment, text=True, stdout=stdout, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_keeps_the_rows_so_far(tmp_path, environment, model_folder, prompt_file, number, status, words):
    """Regression: SIGTERM left a hidden partial file behind, and exit status -15."""
    rows = tmp_path / "rows.jsonl"
    arguments = ["generate", "--model", str(model_folder), "--prompt-file", str(prompt_file), "--max-new-tokens", "800"]
    process = start([*arguments, "--json", "--output", str(rows)], environment)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["row"] == "config"  # the sign that work has begun
    process.send_signal(number)
    _, told = process.communicate(timeout=HANG_S)
    assert process.returncode == status, told
    assert told.strip().splitlines()[-1] == f"echo-jax: {words}" and "Traceback" not in told
    assert [row["row"] for row in map(json.loads, rows.read_text().splitlines())] == ["config", "text"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_signal_is_answered_while_python_does_not_run(environment):
    """A handler waits for Python; the answer in words does not. Hashing stands in for a compilation: it lets other
    threads run, and hears no signal."""
    program = "import hashlib\nfrom echo_jax.cli import signals\nsignals.listen()\nwhile True:\n    try:\n"
    program += "        print('ready', flush=True)\n        hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    program += "    except KeyboardInterrupt:\n        pass\n"  # where the signal comes before the hashing
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, stdout=-1, stderr=-1)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert [process.stderr.readline(), process.stderr.readline()] == [
        *("\n", "echo-jax: terminating after what is being computed\n")
    ]
    process.kill()
    process.communicate(timeout=HANG_S)


def test_a_signal_that_a_callback_swallows_is_sent_again(environment):
    """Regression: jax's callback of the garbage collector swallowed Ctrl-C, and the run went on to its end."""
    program = """
import os, signal, sys, time
from echo_jax.cli import signals
signals.listen()

class Swallows:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)

one = Swallows()
sys.unraisablehook = lambda args: None
try:
    del one
    print("swallowed", flush=True)
    while True:
        time.sleep(600)
except signals.Terminated:
    signals.acknowledge()
    print("raised", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment, text=True, capture_output=True)
    assert done.stdout == "swallowed\nraised\n" and done.returncode == 0, done.stderr


def test_a_second_ctrl_c_ends_at_once(environment):
    program = "import time\nfrom echo_jax.cli import signals\nsignals.listen()\nprint('ready', flush=True)\n"
    program += "while True:\n    try:\n        time.sleep(600)\n    except KeyboardInterrupt:\n        pass\n"
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, stdout=-1, stderr=-1)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "once more ends at once" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130


@pytest.mark.parametrize(
    "arguments",
    [["doctor"], ["plan", "--model", "v32"], ["plan", "--model", "v32", "--json"], ["--help"]],
    ids=" ".join,
)
def test_a_closed_pipe_is_141_everywhere(environment, arguments):
    """Regression: rich ended the process with 1."""
    read, write = os.pipe()
    os.close(read)
    process = start(arguments, environment, stdout=write)
    os.close(write)
    _, told = process.communicate(timeout=HANG_S)
    assert (process.returncode, told) == (main_module.BROKEN_PIPE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize("arguments", [["doctor"], ["plan", "--model", "v32"], ["plan", "--model", "v32", "--json"]])
def test_a_full_standard_output_is_one_line(environment, arguments):
    with open("/dev/full", "w") as full:
        process = start(arguments, environment, stdout=full)
        _, told = process.communicate(timeout=HANG_S)
    assert process.returncode == 2 and told.count("\n") == 1, told
    assert told.startswith("echo-jax: error: output cannot be written: No space left on device; free some space")


def test_a_full_disk_leaves_nothing_behind(tmp_path, environment):
    """A file may not grow beyond a limit, as on a full disk; with EFBIG in place of ENOSPC."""
    program = "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\nfrom echo_jax.cli.main import main\n"
    program += "sys.exit(main(sys.argv[1:]))\n"
    target = tmp_path / "bill.jsonl"
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, "plan", "--model", "v32", "--output", str(target)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


class Full:
    """A stream on a full disk."""

    def __init__(self, name: str):
        self.name = name

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_rows_that_cannot_be_flushed_are_no_file(tmp_path):
    """The last rows are written when the file is closed: a full disk then must not leave a part."""
    target = tmp_path / "rows.jsonl"
    with pytest.raises(OSError, match="No space"), output.Rows(False, target) as rows:
        rows.add({"row": 1})
        assert rows._stream is not None
        rows._stream.close()
        rows._stream = Full(rows._stream.name)
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    kept = tmp_path / "report.md"
    kept.write_text("before")
    real, count = Path.write_text, []

    def write(path, text, **more):
        count.append(path)
        if len(count) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, text, **more)

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(OSError, match="No space"):
        pages.write_whole({kept: "after", tmp_path / "report.html": "after"})
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"] and kept.read_text() == "before"


@pytest.mark.parametrize("has_rows", [False, True])
def test_rows_of_a_replay_on_a_full_disk_are_as_they_were(tmp_path, monkeypatch, has_rows):
    path = tmp_path / "rows.jsonl"
    row = {"row": "replay", "key": {"n": 1}, "schema": 0}
    if has_rows:
        RowFile(path).add([row])
    before = path.read_bytes() if has_rows else None
    file = RowFile.__new__(RowFile)
    file.path, file._lock, file._known, file._is_new = path, threading.Lock(), {}, not has_rows
    path.touch()
    real = Path.open

    class Short:
        """A stream that takes half of what it is given."""

        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.stream.close()

        def write(self, text):
            self.stream.write(text[: len(text) // 2])
            self.stream.flush()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, *more, **named: Short(real(path, *more, **named)))
    with pytest.raises(OSError, match="No space"):
        file.add([row | {"key": {"n": 2}}])
    monkeypatch.undo()
    assert (path.read_bytes() if path.exists() else None) == before


def test_the_package_is_a_program(environment):
    done = subprocess.run([*PROGRAM, "plan", "--model", "v33"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("echo-jax: error: ")
