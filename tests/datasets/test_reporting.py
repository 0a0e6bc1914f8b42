from __future__ import annotations

import io

from rich.console import Console

from ttapca.cli.reporting import ConsoleReporter


def show(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=120, soft_wrap=True)
    with ConsoleReporter("cifar10", console) as report:
        report.advance("downloading [x].tar", 1, 2)
        report.note("source [1]: failed")
        report.advance("downloading [x].tar", 2, 2)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    assert show(terminal=False) == "cifar10: source [1]: failed\n"


def test_a_bar_on_a_terminal() -> None:
    text = show(terminal=True)
    assert "cifar10: source [1]: failed" in text
    assert "downloading [x].tar" in text
