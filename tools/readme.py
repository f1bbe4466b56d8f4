"""README.md's generated parts: the demo's ending, the example lifted from examples/own_model.py, the claims' table.

python -m tools.readme [--demo FILE]     rewrite them; FILE holds what `make demo` printed
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def between(text: str, name: str) -> str:
    """What stands between <!-- name:begin --> and <!-- name:end -->."""
    found = re.search(rf"<!-- {name}:begin[^>]*-->\n(.*?)<!-- {name}:end -->", text, re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no markers for {name!r}")
    return found[1]


def replace(text: str, name: str, body: str) -> str:
    begin = re.search(rf"<!-- {name}:begin[^>]*-->\n", text)
    if begin is None:
        raise ValueError(f"README.md has no markers for {name!r}")
    return text[: begin.end()] + body + text[text.index(f"<!-- {name}:end -->") :]


def example() -> str:
    """The marked part of examples/own_model.py, as a code block."""
    source = (ROOT / "examples" / "own_model.py").read_text()
    found = re.search(r"# readme:begin\n(.*?)# readme:end", source, re.DOTALL)
    if found is None:
        raise ValueError("examples/own_model.py has no part marked readme:begin .. readme:end")
    return f"```python\n{found[1].rstrip()}\n```\n"


def main() -> None:
    text = replace(README.read_text(), "example", example())
    if "--demo" in sys.argv:
        printed = Path(sys.argv[sys.argv.index("--demo") + 1]).read_text().rstrip()
        text = replace(text, "demo", f"```\n{printed}\n```\n")
    README.write_text(text)


if __name__ == "__main__":
    main()
