"""Does compute-sanitizer find anything in the library's kernels? memcheck and racecheck over a short list of GPU tests.

    python -m bench.sanitize [ffi | indexer_scores | indexer_prefetch] [--limit 65] [--parts slots,require]

The tests of a target named below are run by both tools, part by part, in processes side by side, and the tools look at
the kernels whose names the target's filter takes; XLA's own are not ours to judge. racecheck follows every access to
shared memory and is slow where memcheck is not, above all in the slot manager's cluster of 16,384 threads: it is given
that kernel's ways once each, at the smallest sizes that take them. Each tool must also find the faults of
bench/faulty.cu, by the filter of ffi: where nothing is found there, nothing found here says nothing. XLA allocates
every buffer by itself, so that a step past the end of one shows, and forms no CUDA graphs.

The number recorded (for ffi, of all its parts, as B.sanitizer) is the sum of both tools' findings, less those that are
meant (`Mailbox`). Nothing is recorded where a tool did not end or lost track of the program, a test failed, or the
faults were not found; the exit code says so.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import harness

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")


@dataclasses.dataclass(frozen=True)
class Mailbox:
    """Words that say themselves that they are there: one role stores them (volatile, one word at once), another looks
    until they are. No barrier lies between, which is all that racecheck knows, so it reports every pair.

    module          file, from the root
    writer, reader  functions in it whose instructions store and look
    """

    module: str
    writer: str
    reader: str

    def has(self, kind: str, file: str, line: int) -> bool:
        """Whether an access ("Write" or "Read") at that place is one of its own."""
        name = self.writer if kind == "Write" else self.reader
        return file == Path(self.module).name and line in lines_of(ROOT / self.module, name)


@functools.cache
def lines_of(path: Path, function: str) -> range:
    """Of a function at the top of a file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    raise ValueError(f"{path} has no function {function!r} at its top")


@dataclasses.dataclass(frozen=True)
class Target:
    """Kernels to look at, and tests that run them at sizes that end soon.

    kernels        compute-sanitizer's filter of names
    claim          that the number answers, if any
    parts          tests by the process that runs them
    memcheck_only  more tests of a part, too many launches for racecheck
    mailbox        whose accesses are no finding; how many there were is said
    """

    kernels: str
    claim: str | None
    parts: dict[str, tuple[str, ...]]
    memcheck_only: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    mailbox: Mailbox | None = None

    def tests(self, tool: str, part: str) -> tuple[str, ...]:
        return self.parts[part] + (self.memcheck_only.get(part, ()) if tool == "memcheck" else ())


SCORES = "tests/kernels/test_indexer_scores.py::test_the_kernel_on_the_gpu"
PREFETCH = "tests/kernels/test_indexer_prefetch.py::test_the_kernel_on_the_gpu"
VERDICTS = Mailbox("pallas_kernels/indexer_prefetch/ahead.py", writer="mark", reader="prefetch")
TARGETS = {
    # Rows of whole 16 bytes and of single words, lists longer than the warps, numbers outside; slots by every way of
    # the kernel, and with their records; rows of scores that are sampled and divided among blocks; stored forms.
    "ffi": Target(
        "kns=echo_ffi",
        "B.sanitizer",
        {
            "rows": (
                "tests/ffi/test_ffi_rows.py::test_read_rows[pinned-gpu-bf16-mixed]",
                "tests/ffi/test_ffi_rows.py::test_recall[pinned-gpu-bf16-mixed]",
                "tests/ffi/test_ffi_rows.py::test_recall[pinned-gpu-f32-mixed]",
                "tests/ffi/test_ffi_rows.py::test_write_back[pinned-gpu-bf16-with_padding]",
                "tests/ffi/test_ffi_rows.py::test_copy_rows[pinned-gpu-bf16-padding_on_either_side]",
                "tests/ffi/test_ffi_gpu.py::test_numbers_outside_are_skipped[u32]",
                "tests/ffi/test_ffi_gpu.py::test_a_long_list_of_many_lengths",
            ),
            "slots": ("tests/ffi/test_ffi_slots.py::test_every_way_of_a_call[gpu]",),
            "require": (
                "tests/ffi/test_ffi_slots.py::test_require_in_one_call_is_allocate_then_recall[gpu-few_words]",
            ),
            "top_k": (
                "tests/ffi/test_ffi_top_k.py::test_corner_on_a_gpu[tie_at_threshold-f32]",
                "tests/ffi/test_ffi_top_k.py::test_corner_on_a_gpu[normal-bf16]",
                "tests/ffi/test_ffi_top_k.py::test_corner_on_a_gpu[hidden_from_a_stride-f32]",
                "tests/ffi/test_ffi_top_k.py::test_a_bound_changes_nothing_on_a_gpu[normal-f32]",
            ),
            "encode": (
                "tests/ffi/test_ffi_encode.py::test_stored_forms[fp8-fp8-cuda]",
                "tests/ffi/test_ffi_encode.py::test_stored_forms[bf16-f32-cuda]",
                "tests/ffi/test_ffi_encode.py::test_a_row_outside_is_skipped_on_a_gpu[192]",
                "tests/ffi/test_ffi_encode.py::test_widths_of_any_multiple_of_four[heads3-260-384-68-cuda]",
            ),
        },
        {
            "slots": (
                "tests/ffi/test_ffi_slots.py::test_maps_are_updated_in_place[gpu]",
                "tests/ffi/test_ffi_slots.py::test_any_negative_row_is_padding[gpu]",
                "tests/test_slot_manager.py::test_a_random_history[duplicates-gpu]",
            ),
        },
    ),
    # Lengths of nothing, one and an odd number, a cut tile, pages without a number, several query rows, both formats,
    # and every stage and buffer used again.
    "indexer_scores": Target(
        "kns=indexer_scores",
        None,
        {
            "scores": (
                f"{SCORES}[zero_length-fp8-1x8]",
                f"{SCORES}[length_not_multiple_of_page-fp8-1x8]",
                f"{SCORES}[length_not_multiple_of_page-bf16-1x8]",
                f"{SCORES}[rows_differ-fp8-3x16]",
                f"{SCORES}[rows_differ-bf16-4x16]",
                f"{SCORES}[four_heads-fp8-1x4]",
                f"{SCORES}[normal-fp8-2x64]",
                f"{SCORES}[many_tiles-fp8-4x64]",
                f"{SCORES}[many_tiles-bf16-1x32]",
            )
        },
    ),
    # Lists that overflow, thresholds that are no number, every record format, several query rows; in either memory.
    "indexer_prefetch": Target(
        "kns=indexer_prefetch",
        None,
        {
            "prefetch": (
                f"{PREFETCH}[list_overflows-fp8-1x8-fp8-pinned_host]",
                f"{PREFETCH}[threshold_nan_and_infinite-fp8-1x8-fp8-device]",
                f"{PREFETCH}[rows_differ-fp8-3x16-fp8-pinned_host]",
                f"{PREFETCH}[bf16-bf16-1x8-bf16-pinned_host]",
                f"{PREFETCH}[record_of_words-fp8-1x8-words-pinned_host]",
                f"{PREFETCH}[one_long_seat-fp8-1x64-fp8-pinned_host]",
            )
        },
        mailbox=VERDICTS,
    ),
}

TESTS = tuple(test for target in TARGETS.values() for part in target.parts for test in target.tests("memcheck", part))

SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
LOST = "Internal Sanitizer Error"  # the tool's own: it counts itself, and what it did not see it did not judge
ACCESS = re.compile(r"(Write|Read) access(?: at \S+ in (\S+):(\d+))?")


def findings(log: str) -> int | None:
    """What a tool's log counts, or None where it has no summary, as when the tool was stopped, or the tool gave up."""
    counts = [] if LOST in log else [int(first or second) for first, second in SUMMARY.findall(log)]
    return sum(counts) if counts else None


def in_mailbox(log: str, mailbox: Mailbox) -> int:
    """How many of the hazards in a log of racecheck's are a look and a store of the mailbox's, and nothing else."""
    count = 0
    for text in log.split("Race reported between")[1:]:  # one access, then those that it met
        accesses = ACCESS.findall(text.partition("\n========= \n")[0])
        are_its_own = all(bool(line) and mailbox.has(kind, file, int(line)) for kind, file, line in accesses)
        has_met = len(accesses) > 1 and all(kind != accesses[0][0] for kind, *_ in accesses[1:])
        count += are_its_own and has_met
    return count


@dataclasses.dataclass
class Run:
    """A program under one tool, on its way."""

    name: str
    process: subprocess.Popen
    log: Path
    output: Path
    started: float
    mailbox: Mailbox | None = None

    def found(self, deadline: float) -> tuple[int | None, int | None, float]:
        """Findings, the program's exit status (either None if it did not end in time) and seconds."""
        try:
            status = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own group, with what it started
            self.process.wait()
            status = None
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        return findings(log), status, time.monotonic() - self.started

    def reported(self, label: str, deadline: float, ended: str, failure: str) -> tuple[int, str, list[str]]:
        """Findings, the line that was printed of them, and what speaks against recording; `ended` and `failure` are
        words for what ran. Where something was found, or might have been, the ends of log and output are printed."""
        count, status, seconds = self.found(deadline)
        has_failed = count is None or status != 0
        line = f"{label}: {count} findings, {ended} with status {status}, {seconds:.0f} s"
        if count and self.mailbox is not None:
            meant = in_mailbox(self.log.read_text(errors="replace"), self.mailbox)
            line += f"; {meant} of them are pairs of {self.mailbox.writer} and {self.mailbox.reader}, as is meant"
            count -= meant
        print(line, flush=True)
        if count or has_failed:
            for path in (self.log, self.output):
                text = path.read_text(errors="replace") if path.exists() else ""
                print(f"--- {path.name}, its end\n{text[-2500:]}")
        against = [f"{label} did not end, lost track, or {failure}: status {status}"] if has_failed else []
        return count or 0, line, against


def start(
    sanitizer: str, tool: str, name: str, kernels: str, program: list[str], folder: Path, mailbox: Mailbox | None = None
) -> Run:
    log, output = folder / f"{name}.log", folder / f"{name}.out"
    command = [
        *(sanitizer, "--tool", tool, "--kernel-name", kernels, "--report-api-errors", "no"),
        *("--target-processes", "application-only", "--print-limit", "1000", "--log-file", str(log)),
    ]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    with open(output, "w") as stream:
        process = subprocess.Popen(
            [*command, *program],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Run(name, process, log, output, time.monotonic(), mailbox)


def tool_path(name: str) -> str:
    found = shutil.which(name) or shutil.which(f"/usr/local/cuda/bin/{name}")
    if found is None:
        sys.exit(f"{name} is neither on PATH nor in /usr/local/cuda/bin; install CUDA's toolkit")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", nargs="?", default="ffi", choices=TARGETS)
    parser.add_argument("--limit", type=float, default=65.0, help="seconds until what still runs is stopped")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="of the target; all of them where not said")
    options = parser.parse_args()
    target, looked_at = TARGETS[options.target], " and ".join(options.parts or [options.target])
    if options.parts is not None:
        parts = {part: target.parts[part] for part in options.parts}
        target = dataclasses.replace(target, parts=parts, claim=None)
    deadline = time.monotonic() + options.limit
    sanitizer, nvcc = tool_path("compute-sanitizer"), tool_path("nvcc")
    folder = Path(tempfile.mkdtemp(prefix="echo_sanitize_"))

    pytest = [sys.executable, "-m", "pytest", "-v", "--durations=0", "-p", "no:cacheprovider", "-m", "gpu"]
    pytest += ["-o", "timeout=0"]  # a test's own limit is made for its usual speed; here `--limit` is what counts
    runs = {
        (tool, part): start(
            *(sanitizer, tool, f"{tool}_{part}", target.kernels, [*pytest, *target.tests(tool, part)], folder),
            target.mailbox,
        )
        for tool in reversed(TOOLS)  # the slower one first
        for part in target.parts
    }
    faulty = folder / "faulty"
    subprocess.run([nvcc, "-arch=sm_90a", str(ROOT / "bench" / "faulty.cu"), "-o", str(faulty)], check=True)
    controls = {
        tool: start(sanitizer, tool, f"{tool}_control", TARGETS["ffi"].kernels, [str(faulty)], folder) for tool in TOOLS
    }

    problems, total, said = [], 0, []
    for tool in TOOLS:
        seeded, _, _ = controls[tool].found(deadline)
        if not seeded:
            problems.append(f"{tool} found {seeded} faults in bench/faulty.cu, which has some")
    for (tool, part), run in reversed(runs.items()):
        count, line, against = run.reported(f"{tool} of {part}", deadline, "tests ended", "a test failed")
        said.append(line)
        problems += against
        total += count
    if problems:
        sys.exit("nothing is recorded: " + "; ".join(problems))

    import jax  # for the machine's name; the others have gone by now

    jax.devices()
    harness.record(
        target.claim,
        value=total,
        name="" if target.claim else f"compute-sanitizer's findings in {looked_at}",
        unit="",
        file="gpu_sanitizer.jsonl",
        method="sum of memcheck's errors and racecheck's hazards; both find the faults of bench/faulty.cu",
        shapes={"tests": sum(len(target.tests("memcheck", part)) for part in target.parts)},
        notes="; ".join(said),
    )
    print(f"recorded: {total} findings; both tools found the faults of bench/faulty.cu")


if __name__ == "__main__":
    main()
