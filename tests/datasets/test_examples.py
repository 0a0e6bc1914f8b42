"""Every example in the docstrings of the data room runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import ttapca.datasets

MODULES = [module.name for module in pkgutil.iter_modules(ttapca.datasets.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"ttapca.datasets.{name}")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", ttapca.datasets.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    thing = getattr(ttapca.datasets, name)
    if name in {"DATA_SETS", "Order", "Split"}:
        pytest.skip("a table or a type has no docstring of its own")
    assert ">>>" in (thing.__doc__ or "")


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="has no `read_everything`"):
        ttapca.datasets.read_everything  # noqa: B018


def test_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "data.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0
