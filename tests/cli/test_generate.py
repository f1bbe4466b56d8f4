"""`echo-jax generate` by execution: text, rows, the check, batches, a user's own policy, an interrupted run."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from echo_jax import _compat
from echo_jax.checkpoints import ByteTokenizer
from echo_jax.cli import generate as command
from echo_jax.cli import output, text
from echo_jax.cli.models import Prompt
from tests.limits import HANG_S

NEW = 20
LENGTH = 101  # bytes of the prompt


@pytest.fixture
def arguments(model_folder, prompt_file):
    """One run of them all, so that its two programs compile once in this process."""
    return (
        *("generate", "--model", model_folder, "--prompt-file", prompt_file, "--max-new-tokens", NEW),
        *("--device-slots", 20, "--cap", 4, "--threshold", "ema:0.7"),
    )


def test_text_then_table_then_no_difference(echo_jax, arguments):
    done = echo_jax(*arguments, "--check")
    assert done.status == 0, done.err
    assert done.err == ""
    lines = done.out.splitlines()
    assert "\ufffd\ufffd\x00 And so on.]" in done.out  # the end of the prompt, whatever its bytes, then the join
    assert f"what moved in {NEW - 1} decode steps (rows)" in done.out
    assert [line.split()[0] for line in lines if line.endswith("B") and "%" in line] == ["0", "1", "all"]
    assert lines[-1].strip() == "0 differences"
    # Two layers; the prompt is one chunk, whose last logits are compared, and the last token is never fed back.
    queries, logits = 2 * (LENGTH + NEW - 1), 1 + NEW - 1
    assert f"{queries:,} lists, {logits:,} logits rows, {queries:,} layer digests and {NEW} tokens" in done.out


def test_other_implementations_give_the_same_text(echo_jax, arguments):
    """jnp in the place of the library: nothing that is printed of the text or of what moved differs."""
    flags = ("--slot-manager", "--top-k", "--encode", "--host-memory")
    by_jnp = (*(word for flag in flags for word in (flag, "jnp")), "--scores", "reference")
    ours, other = (echo_jax(*arguments, *more, "--json") for more in ((), by_jnp))
    assert ours.status == other.status == 0, other.err
    assert ours.rows("text")[0]["text"] == other.rows("text")[0]["text"]
    assert ours.rows("layer") == other.rows("layer")
    assert other.rows("config")[0]["slot_manager"] == "jnp"


@pytest.mark.parametrize(
    "platforms, before, after",
    [
        (None, "", "--xla_gpu_autotune_level=0"),
        ("cuda,cpu", "--a", "--a --xla_gpu_autotune_level=0"),
        ("cuda", "--xla_gpu_autotune_level=2", "--xla_gpu_autotune_level=2"),
        ("cpu", "--a", "--a"),
    ],
)
def test_a_check_does_not_let_xla_time_matrix_products(monkeypatch, platforms, before, after):
    """On an H200 two programs that had been tuned one by one differed in 153 of 1,536 lists; untuned, in none."""
    monkeypatch.setenv("XLA_FLAGS", before)
    monkeypatch.delenv("JAX_PLATFORMS") if platforms is None else monkeypatch.setenv("JAX_PLATFORMS", platforms)
    _compat.choose_products_without_timing()
    assert os.environ["XLA_FLAGS"] == after


def test_rows_say_the_same_and_add_up(echo_jax, arguments, tmp_path, model_folder):
    kept = tmp_path / "rows.jsonl"
    done = echo_jax(*arguments, "--check", "--json", "--output", kept)
    assert done.status == 0, done.err
    assert kept.read_text() == done.out  # the file has the printed rows
    assert list(tmp_path.glob(".*")) == []  # and nothing is left beside it

    (config,), (total,), (text_row,), (check,) = (done.rows(kind) for kind in ("config", "total", "text", "check"))
    layers = done.rows("layer")
    assert config["model"] == str(model_folder) and config["cap"] == 4
    assert config["resolved"]["capacity"] == 128 and config["resolved"]["device_slots"] == 20
    assert [row["layer"] for row in layers] == [0, 1]
    for name in ("hits", "useful", "recalled", "staged", "wasted", "refused", "evicted", "host_to_device_bytes"):
        assert total[name] == sum(row[name] for row in layers)
    assert total["evicted"] > 0 and total["useful"] > 0 and total["recalled"] > 0
    # Every selected row is a hit, was staged, or was recalled; 12 are selected of more than 12 visible ones. The row
    # of the token itself is new: neither hit nor miss.
    wanted = total["hits"] + total["useful"] + total["recalled"]
    assert 2 * (NEW - 1) * 11 <= wanted <= 2 * (NEW - 1) * 12
    assert layers[0]["wasted"] <= 4 * (NEW - 1) and layers[1]["staged"] == 0
    record_bytes = 2 * (16 + 8)
    assert total["host_to_device_bytes"] == (total["useful"] + total["recalled"] + total["wasted"]) * record_bytes
    assert total["device_to_host_bytes"] == 2 * (NEW - 1) * record_bytes
    assert total["device_bytes"] == sum(total["device_bytes_by_kind"].values())
    assert total["host_bytes"] == 2 * 128 * record_bytes
    assert total["new_tokens"] == len(text_row["tokens"]) == NEW and text_row["complete"]
    assert text_row["text"] == bytes(text_row["tokens"]).decode("utf-8", errors="replace")
    assert check["differences"] == 0 and check["first"] is None and check["tokens"] == NEW


def test_streamed_text_is_the_text_of_the_rows(echo_jax, arguments):
    rows, shown = echo_jax(*arguments, "--json"), echo_jax(*arguments)
    (row,) = rows.rows("text")
    assert f"And so on.]{row['text']}" in shown.out


def test_a_terminal_gets_no_control_sequences_from_a_model(capsys, monkeypatch, prompt_file):
    """The end of the prompt is dim; an escape that the model says is replaced, a line break is not."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printer = text.Printer([Prompt(prompt_file, list(b"say: "))], ByteTokenizer(), 8, (), is_silent=False)
    with output.progress("", 1) as bar:
        for token in b"a\x1b[2J\n\xc3\xa9":
            printer.add(0, token, bar)
    assert capsys.readouterr().out == "\x1b[2msay: \x1b[0ma\ufffd[2J\n\u00e9\n"


def test_a_difference_is_named_and_exits_1(echo_jax, arguments, monkeypatch):
    """One bit of one logit in the resident run."""
    runs = []

    def disturbed(*given, **options):
        run = command_generate(*given, **options)
        runs.append(run)
        if len(runs) == 2 and run.record is not None:
            logits = np.array(run.record.logits[3])
            logits.view(np.uint32)[0, 0, 7] ^= 1
            run.record.logits[3] = logits
        return run

    command_generate = command.generate
    monkeypatch.setattr(command, "generate", disturbed)
    done = echo_jax(*arguments, "--check", "--json")
    assert done.status == 1
    (check,) = done.rows("check")
    assert check["differences"] == 1 and check["first"].startswith("logits, entry 3")

    runs.clear()
    done = echo_jax(*arguments, "--check")
    assert done.status == 1 and done.out.splitlines()[-1].strip().startswith("1 differences, first: logits, entry 3")


def test_interrupted_keeps_the_rows_so_far(echo_jax, arguments, monkeypatch, tmp_path):
    def interrupt(printer, prompt, token, bar):
        add(printer, prompt, token, bar)
        if len(printer.tokens[prompt]) == 5:
            raise KeyboardInterrupt

    add = text.Printer.add
    monkeypatch.setattr(text.Printer, "add", interrupt)
    kept = tmp_path / "rows.jsonl"
    done = echo_jax(*arguments, "--output", kept)
    assert done.status == 130
    assert done.err.strip() == "echo-jax: interrupted"
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["row"] for row in rows] == ["config", "text"]
    assert len(rows[1]["tokens"]) == 5 and not rows[1]["complete"]
    assert list(tmp_path.glob(".*")) == []


def test_a_failed_run_leaves_no_file_behind(echo_jax, arguments, monkeypatch, tmp_path):
    """A fault of the library keeps its traceback; the file that was begun goes."""

    def fail(*given, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(command, "generate", fail)
    with pytest.raises(ZeroDivisionError):
        echo_jax(*arguments, "--output", tmp_path / "rows.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_batch_of_several_lengths_under_a_policy_of_ones_own(echo_jax, model_folder, prompt_file, tmp_path):
    """The class lies in the current folder; seats draw with their own seeds; an end token ends a seat early."""
    (tmp_path / "here" / "my_policies.py").write_text(
        "import dataclasses, jax.numpy as jnp\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Shifted:\n"
        "    by: float = 0.0\n"
        "    def init(self): return jnp.float32(jnp.inf)\n"
        "    def update(self, memory, kth_score): return kth_score\n"
        "    def value(self, memory): return memory - self.by\n"
    )
    short = tmp_path / "short.txt"
    short.write_bytes(b"ab")
    arguments = (
        *("generate", "--model", model_folder, "--prompt-file", prompt_file, short, "--max-new-tokens", 6),
        *("--threshold", "my_policies:Shifted:by=0.5", "--eviction", "clock:4", "--warm-windows", 4),
        *("--temperature", 0.8, "--top-p", 0.9, "--seed", 5),
    )
    done = echo_jax(*arguments)
    assert done.status == 0, done.err
    assert f"--- {short}: 2 tokens and 6 new\n[ab]" in done.out
    assert f"--- {prompt_file}: {LENGTH} tokens and 6 new\n" in done.out
    rows = echo_jax(*arguments, "--json")
    (config,) = rows.rows("config")
    assert config["resolved"]["threshold"] == "Shifted(by=0.5)" and config["resolved"]["seats"] == 2
    assert config["resolved"]["eviction"] == "Clock(period=4)"
    assert [row["prompt_tokens"] for row in rows.rows("text")] == [LENGTH, 2]
    again = echo_jax(*arguments, "--json")
    assert [row["tokens"] for row in again.rows("text")] == [row["tokens"] for row in rows.rows("text")]


def test_end_token_ends_a_request_unless_ignored(echo_jax, arguments, broken_folder):
    """The second token of the usual continuation is declared the end."""
    (row,) = echo_jax(*arguments, "--json").rows("text")
    end = row["tokens"][1]
    first = row["tokens"].index(end)

    def declare(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))

    folder = broken_folder(declare)
    changed = [folder if argument == arguments[2] else argument for argument in arguments]
    (ended,) = echo_jax(*changed, "--json").rows("text")
    assert ended["tokens"] == row["tokens"][: first + 1]
    assert ended["text"] == bytes(ended["tokens"][:-1]).decode("utf-8", errors="replace")
    (ignored,) = echo_jax(*changed, "--json", "--ignore-eos").rows("text")
    assert ignored["tokens"] == row["tokens"]


def test_ctrl_c_in_a_process_of_its_own(model_folder, prompt_file, tmp_path, environment):
    """The config row is printed at once; whatever the process does after it, it ends cleanly and keeps its rows."""
    kept = tmp_path / "rows.jsonl"
    # Where the tests run in the background, a shell has made their children deaf to the interrupt.
    hearing = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command_line = [sys.executable, "-c", hearing, sys.executable, "-m", "echo_jax.cli.main", "generate"]
    command_line += ["--model", str(model_folder), "--prompt-file", str(prompt_file), "--max-new-tokens", "800"]
    command_line += ["--json", "--output", str(kept)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command_line, env=environment, **pipes) as process:
        assert process.stdout is not None
        config = json.loads(process.stdout.readline())
        assert config["row"] == "config"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err and err.strip().endswith("echo-jax: interrupted")
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert rows == [config, *map(json.loads, out.splitlines())]
    assert not rows[-1]["complete"]
