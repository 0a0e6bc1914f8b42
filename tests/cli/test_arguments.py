"""What the words of a command line mean: numbers, ranges, shapes; and what Tab offers."""

from __future__ import annotations

import sys
import tomllib

import pytest
from torch import nn

from ttapca.benchmark.session import toml_value
from ttapca.cli.app import run
from ttapca.cli.arguments import (
    COMPLETE_CORRUPTIONS,
    input_shape,
    method_names,
    network_names,
    value_of,
    whole_numbers,
)
from ttapca.corruptions import CORRUPTIONS
from ttapca.errors import OptionError
from ttapca.methods import METHODS
from ttapca.networks import packaged

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


def ask(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command prints when a shell asks it for something."""
    monkeypatch.setenv("_TTAPCA_COMPLETE", what)
    monkeypatch.setattr(sys, "argv", ["ttapca"])
    # Otherwise the program's name is that of the module which Python runs: `python -m pytest`.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    run()
    return capsys.readouterr().out


def test_all_names_are_known() -> None:
    assert set(method_names()) == set(METHODS)
    assert network_names() == sorted({"digits", *packaged()})
    assert COMPLETE_CORRUPTIONS("") == ["standard", "extra", "all", "clean", *CORRUPTIONS]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ttapca eval --method wi", ["wiener"]),
        ("ttapca bench --methods bn,two", ["bn,two-sided"]),
        ("ttapca bench --corruptions fog,gaussian_", ["fog,gaussian_noise", "fog,gaussian_blur"]),
        ("ttapca bench cifar10-res", ["cifar10-resnet20"]),
        ("ttapca tune digits rot", ["rotta"]),
        ("ttapca fit digits --data cifar100", ["cifar100", "cifar100-c"]),
        ("ttapca data get fr", ["frost"]),
        ("ttapca bench my-weights.p", []),  # so that the shell offers files
    ],
)
def test_bash_is_answered(
    line: str,
    offered: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert ask("complete_bash", monkeypatch, capsys).split() == offered


def test_bash_is_given_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = ask("source_bash", monkeypatch, capsys)
    assert "complete -o default" in program  # files, where no name fits
    assert "_TTAPCA_COMPLETE=complete_bash" in program
