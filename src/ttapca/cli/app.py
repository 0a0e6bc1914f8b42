"""The command tree, and how errors become exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ttapca._version import __version__
from ttapca.cli import (
    bench,
    corrupt,
    demo,
    evaluate,
    export,
    figure,
    fit,
    layers,
    methods,
    report,
    reproduce,
    train,
)
from ttapca.cli.data import data_app
from ttapca.errors import OptionError, TtapcaError

app = typer.Typer(
    name="ttapca",
    help="Repair a trained network at test time with a PCA spectral filter.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.demo)
app.command("layers")(layers.layers)
app.command("train")(train.train)
app.command("fit")(fit.fit)
app.command("eval")(evaluate.evaluate)
app.command("bench")(bench.bench)
app.command("reproduce")(reproduce.reproduce)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("figure")(figure.figure)
app.command("corrupt")(corrupt.corrupt)
app.command("methods")(methods.methods)
app.add_typer(data_app)


INTERRUPTED = 130


def _interrupted() -> int:
    sys.stderr.write("interrupted\n")
    return INTERRUPTED


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ttapca {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    del version  # handled by its callback before any command runs


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: The words after `ttapca`; those of the process by default.

    Returns:
        The exit code.
    """
    try:
        app(arguments, standalone_mode=True)
    except TtapcaError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, OptionError) else 1
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer has made an exit of Ctrl-C, without a word
            return _interrupted()
        return stop.code if isinstance(stop.code, int) else 1
    return 0
