"""What Tab offers in a shell, asked for as a shell asks."""

from __future__ import annotations

import sys

import pytest

from ttapca.cli.app import run
from ttapca.cli.arguments import COMPLETE_CORRUPTIONS, method_names, network_names
from ttapca.corruptions import CORRUPTIONS
from ttapca.methods import METHODS
from ttapca.networks import packaged


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
