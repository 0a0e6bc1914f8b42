"""Every public name of the room has an example, and the page about it runs."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from ttapca import networks

# Tables, and records whose fields say all there is to say.
WITHOUT = {"ARCHITECTURES", "NORMALISATIONS", "EpochRecord", "LayerFacts"}


@pytest.mark.parametrize("name", sorted(set(networks.__all__) - WITHOUT - {"LayerTable"}))
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(networks, name).__doc__ or "")


def test_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "networks.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0
