"""What the words of a command line mean: numbers, ranges, shapes, places."""

from __future__ import annotations

import tomllib

import pytest
from torch import nn

from ttapca.benchmark.session import toml_value
from ttapca.cli.arguments import input_shape, value_of, whole_numbers
from ttapca.errors import OptionError

LONG = "1" * 5000  # digits; Python refuses to read such a number


def test_lists_of_whole_numbers() -> None:
    assert whole_numbers("--seeds", None) is None
    assert whole_numbers("--seeds", "5, 1-3,2-2") == (5, 1, 2, 3, 2)


@pytest.mark.parametrize("words", ["3-1", "0,3-1", "-3", "3-", "1-2-3", LONG, f"1-{LONG}"])
def test_numbers_that_cannot_be(words: str) -> None:
    with pytest.raises(OptionError, match="--components takes whole numbers, such as 1,3 or 0-2"):
        whole_numbers("--components", words)


@pytest.mark.parametrize("words", ["3x0x4", "3x", f"3x{LONG}x4"])
def test_shapes_that_cannot_be(words: str) -> None:
    with pytest.raises(OptionError, match="--input takes a shape such as 3x32x32"):
        input_shape(words, nn.Identity())


@pytest.mark.parametrize("value", ['a "b"', "a\\b", "a\nb", ["é", True, 0.5], 1e-5, False, "plain"])
def test_values_are_read_as_they_were_written(value: object) -> None:
    assert value_of(toml_value(value)) == value
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value
