"""Print the Python block under a heading of README.md, so that a release can be tried with it.

python scripts/readme_example.py "Ten lines of use" > example.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def example(markdown: str, heading: str) -> str:
    """Return the first Python block of the section called `heading`."""
    section = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", markdown, flags=re.MULTILINE | re.DOTALL
    )
    if section is None:
        raise SystemExit(f"README.md has no section called {heading!r}.")
    block = re.search(r"^```python\n(.*?)^```", section[1], flags=re.MULTILINE | re.DOTALL)
    if block is None:
        raise SystemExit(f"The section {heading!r} of README.md has no Python block.")
    return block[1]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(example(README.read_text(encoding="utf-8"), sys.argv[1]), end="")
