"""The command tree, and how errors become exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from ttapca import __version__
from ttapca.cli import (
    bench,
    corrupt,
    evaluate,
    export,
    figure,
    fit,
    list_layers,
    methods,
    report,
    reproduce,
    train,
)
from ttapca.cli.console import on_the_command_line
from ttapca.cli.data import data_app, get, list_
from ttapca.errors import (
    DataNotFoundError,
    FilterExistsError,
    LayerNotFoundError,
    OptionError,
    TtapcaError,
    TtapcaWarning,
    refused_memory,
)

INTERRUPTED = 130
FAILED = 1
USAGE = 2

# What was asked for makes no sense or is not there: no run could have gone better.
USAGE_ERRORS = (OptionError, LayerNotFoundError, DataNotFoundError, FilterExistsError)


class _PlainFlags:
    """Help in which a switch has no type: `--json`, and not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, as the help lists them."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return found


class _Command(_PlainFlags, TyperCommand):
    pass


class _Group(_PlainFlags, TyperGroup):
    pass


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": reproduce.demo,
    "layers": list_layers.layers,
    "train": train.train,
    "fit": fit.fit,
    "eval": evaluate.evaluate,
    "bench": bench.bench,
    "reproduce": reproduce.reproduce,
    "report": report.report,
    "export": export.export,
    "figure": figure.figure,
    "corrupt": corrupt.corrupt,
    "methods": methods.methods,
}

app = typer.Typer(
    name="ttapca",
    cls=_Group,
    help="Repair a trained network at test time with a PCA spectral filter.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for name, command in COMMANDS.items():
    app.command(name, cls=_Command)(command)
data_app.command("get", cls=_Command)(get)
data_app.command("list", cls=_Command)(list_)
app.add_typer(data_app, cls=_Group)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ttapca {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        Option(
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
    _write_what_the_terminal_can()
    try:
        with _spoken_warnings():
            app(arguments, standalone_mode=True)
    except TtapcaError as error:
        return _say(str(error), USAGE if isinstance(error, USAGE_ERRORS) else FAILED)
    except KeyboardInterrupt:
        return _interrupted()
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer has made an exit of Ctrl-C, without a word
            return _interrupted()
        return stop.code if isinstance(stop.code, int) else FAILED
    except OSError as error:  # a disk or a right that nobody foresaw
        return _say(f"{error.strerror or error}: {error.filename}", FAILED)
    except (MemoryError, RuntimeError) as error:
        refused = refused_memory(error)
        if refused is None:
            raise
        advice = "Use fewer or smaller images, smaller batches, or close other programs."
        return _say(f"This needs more memory than there is: {refused}. {advice}", FAILED)
    return 0


def _write_what_the_terminal_can() -> None:
    """Print `?` for letters that a terminal's encoding has not, instead of failing at them."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and stream.encoding.lower() not in ("utf-8", "utf8"):
            reconfigure(errors="replace")


def _interrupted() -> int:
    sys.stderr.write("interrupted\n")
    return INTERRUPTED


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"error: {on_the_command_line(text)}\n")
    return code


@contextmanager
def _spoken_warnings() -> Iterator[None]:
    """Show the library's warnings as sentences, without the line of code they come from."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, TtapcaWarning):
                sys.stderr.write(f"warning: {on_the_command_line(str(message))}\n")
            else:
                others(message, category, *rest)

        warnings.showwarning = show  # type: ignore[assignment]
        yield
