"""The page about corruptions runs, and the room stays out of others' business."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_documentations_examples_run():
    page = Path(__file__).parents[2] / "docs" / "corruptions.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)  # each block goes on where the last ended


def test_neither_networks_nor_the_command_line_are_loaded():
    program = (
        "import sys, ttapca; before = set(sys.modules); "
        "import ttapca.corruptions.writing; "
        "print(sorted({'torch', 'typer', 'rich'} & (set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
