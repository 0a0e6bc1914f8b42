"""The numbers that steer the closed form are few, documented, and in one place."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

import ttapca
from ttapca.spectral.constants import Constants

ROOT = Path(__file__).parents[2]
PACKAGE = Path(ttapca.__file__).parent
MOST = 35
FIELDS = [each.name for each in dataclasses.fields(Constants)]
# In each module of the closed form, all numbers at its top that steer nothing: guards against
# rounding, sizes of parts and of samples, seeds, and iterations of which more change nothing.
OTHER_NUMBERS = {
    "spectral/calibration.py": "DRAWS SEED LEEWAY_STEPS MOST_CACHED TINY",
    "spectral/cross_validation.py": "TOGETHER",
    "spectral/resemblance.py": "FEWEST_STRETCHES WILD_BANDS LEAST_VARIANCE",
    "spectral/conditions.py": (
        "HALVES_OF_NORMAL STEPS FEWEST_SOURCE LEAST MOST_LOGARITHM LEAST_DEVIATION"
    ),
    "spectral/image_statistics.py": (
        "NORMAL LOOKED_AT LOOKED_AT_VALUES LARGE STRIP EVERY GLANCED NOISE_VALUES DRAWS SEED "
        "TOGETHER DISTANCES TEXTURES LEAST_SIDE MOST_CHANNELS"
    ),
    "spectral/source_classes.py": (
        "LARGEST_RANK NO_DIRECTION SMALLEST_RATIO MOST_FEATURES IMAGES_A_FEATURE"
    ),
    "spectral/chain.py": "TINY LEAST_PROBABILITY MOST_NATS LARGEST STEPS",
    "spectral/closed_form_rule.py": "TINY LARGE",
    "spectral/closed_form.py": "",
    "spectral/stream_batch.py": "",
    "spectral/stream_state.py": "TINY",
    "adaptation/chain_passes.py": "SMALLEST LEAST_SUM",
    "adaptation/shift_alarm.py": "",
    "adaptation/surfaces/stream_statistics.py": "",
    "adaptation/surfaces/filter_gains.py": "MOST_IMAGES",  # of which units are asked
    "methods/method.py": "",
    "methods/wiener.py": "LEAST_MIRROR_AGREEMENT",  # for an error
}


def test_they_are_few() -> None:
    assert len(FIELDS) <= MOST


def test_each_has_a_unit_a_script_that_chose_it_and_a_meaning() -> None:
    told = re.findall(r"^ {8}(\w+) \(([^;)]+); (\w+)\): ([A-Z].+)", Constants.__doc__ or "", re.M)
    assert [name for name, _, _, _ in told] == FIELDS
    for name, unit, script, _ in told:
        assert unit, name
        assert (ROOT / "scripts" / f"{script}.py").exists(), name


@pytest.mark.parametrize("path", OTHER_NUMBERS)
def test_no_other_module_has_a_number_that_steers(path: str) -> None:
    module = importlib.import_module(f"ttapca.{path.replace('/', '.').removesuffix('.py')}")
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    names = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ast.walk(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(target, ast.Name)
    ]
    numbers = [name for name in names if _is_made_of_numbers(getattr(module, name))]
    assert numbers == OTHER_NUMBERS[path].split()


def _is_made_of_numbers(value: object) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_made_of_numbers, value))
    return isinstance(value, int | float)
