"""How long a newcomer waits: the committed tree is cloned, and the README's two commands are run in the clone.

    python -m bench.fresh [--no-test]

Measures [A.demo_fresh_s], [A.demo_again_s] and [A.test_s]. pip's own download cache stays as it is on this machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import harness

COMMANDS = (
    ("A.demo_fresh_s", ["make", "demo"], "clone, install and demo, first run"),
    ("A.demo_again_s", ["make", "demo"], "the same command again"),
    ("A.test_s", ["make", "test"], "lint and all tests, development tools already installed"),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "echo_jax"
        started = time.perf_counter()
        subprocess.run(["git", "clone", "--quiet", str(harness.ROOT), str(clone)], check=True)
        for claim, command, what in COMMANDS:
            if claim == "A.test_s":
                if "--no-test" in sys.argv:
                    continue
                subprocess.run(["make", "setup-dev"], cwd=clone, check=True)
            if claim != "A.demo_fresh_s":
                started = time.perf_counter()
            subprocess.run(command, cwd=clone, check=True)
            harness.record(
                claim,
                value=time.perf_counter() - started,
                unit="s",
                name=what,
                method="one run, wall clock, nothing else running; pip's download cache as it was",
            )


if __name__ == "__main__":
    main()
