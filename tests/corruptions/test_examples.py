"""Every example in a docstring of this room runs, and the room stays out of others' business."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import ttapca.corruptions

MODULES = [
    "ttapca.cli.corrupt",
    *(
        f"ttapca.corruptions.{each.name}"
        for each in pkgutil.iter_modules(ttapca.corruptions.__path__)
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_neither_torch_nor_the_command_line_is_loaded():
    program = (
        "import sys, ttapca.corruptions, ttapca.corruptions.export, ttapca.corruptions.sheet; "
        "print(sorted({'torch', 'typer', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
