"""The command tree, and how errors become exit codes."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from ttapca import __version__, errors
from ttapca.cli import (
    bench,
    data,
    evaluate,
    feed,
    fit,
    listings,
    publish,
    reproduce,
    serve,
    train,
    tune,
)
from ttapca.cli.configuration import Configured
from ttapca.cli.console import HELP, on_the_command_line

FAILED, USAGE, INTERRUPTED = 1, 2, 130

# The call makes no sense or names something that does not exist: running it again cannot help.
# `NotEnoughDataError` too: more images, components or larger batches were asked for than there are.
USAGE_ERRORS = (
    errors.OptionError,
    errors.LayerNotFoundError,
    errors.DataNotFoundError,
    errors.FilterExistsError,
    errors.NotEnoughDataError,
)

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": reproduce.demo,
    "layers": listings.layers,
    "train": train.train,
    "fit": fit.fit,
    "eval": evaluate.evaluate,
    "bench": bench.bench,
    "tune": tune.tune,
    "reproduce": reproduce.reproduce,
    "report": publish.report,
    "export": publish.export,
    "figure": publish.figure,
    "serve": serve.serve,
    "feed": feed.feed,
    "export-onnx": serve.export_onnx,
    "corrupt": data.corrupt,
    "methods": listings.methods,
}
DATA_COMMANDS: dict[str, Callable[..., None]] = {"get": data.get, "list": data.list_}


class _Worded:
    """Help with the words of `words.toml`; a switch has no type there, as `--json <bool>` would."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        words = HELP["all"] | HELP.get(ctx.command.name, {})
        for parameter in found:
            if not getattr(parameter, "help", None):
                parameter.help = words.get(parameter.name)
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return found


class _Command(_Worded, TyperCommand): ...


class _Service(Configured, _Command): ...


class _Group(_Worded, TyperGroup): ...


def _flat(name: str, command: Callable[..., None]) -> Callable[..., None]:
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for key, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[key] = parameter.annotation
            parameters.extend(inspect.signature(groups[key], eval_str=True).parameters.values())
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**given: Any) -> None:
        for key, group in groups.items():
            given[key] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    call.__doc__ = "\n\n".join(filter(None, (command.__doc__, HELP.get(name, {}).get("about"))))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


app = typer.Typer(
    name="ttapca",
    cls=_Group,
    help="Repair a trained network at test time with a PCA spectral filter.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(
    name="data", help="Get CIFAR and CIFAR-C, and list what is there.", no_args_is_help=True
)
for tree, commands in ((app, COMMANDS), (data_app, DATA_COMMANDS)):
    for name, command in commands.items():
        tree.command(name, cls=_Service if name == "serve" else _Command)(_flat(name, command))
app.add_typer(data_app, cls=_Group)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ttapca {__version__}")
        raise typer.Exit


VERSION = Option("--version", callback=_show_version, is_eager=True, help="Print the version.")


@app.callback()
def _options(version: Annotated[bool, VERSION] = False) -> None:
    del version  # its callback has handled it


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process, and return its exit code."""
    for stream in (sys.stdout, sys.stderr):  # print `?` for letters the terminal does not have
        if hasattr(stream, "reconfigure") and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _plainly(warnings.showwarning)
            app(arguments)
    except errors.TtapcaError as error:
        code = USAGE if isinstance(error, USAGE_ERRORS) else FAILED
        return _end(f"error: {on_the_command_line(str(error))}", code)
    except KeyboardInterrupt:
        return _end("interrupted", INTERRUPTED)
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # typer has turned Ctrl-C into an exit without a message
            return _end("interrupted", INTERRUPTED)
        return stop.code if isinstance(stop.code, int) else FAILED
    except OSError as error:  # such as a full disk or a missing permission
        place = f": {error.filename}" if error.filename is not None else ""  # none for a stream
        return _end(f"error: {error.strerror or error}{place}", FAILED)
    except (MemoryError, RuntimeError) as error:
        refused = errors.refused_memory(error)
        if refused is None:
            raise
        advice = "Use fewer or smaller images, smaller batches, or close other programs."
        text = f"error: This needs more memory than there is: {refused}. {advice}"
        return _end(text, FAILED)
    return 0


def _end(text: str, code: int) -> int:
    sys.stderr.write(f"{text}\n")
    return code


def _plainly(others: Callable[..., None]) -> Callable[..., None]:
    """Show warnings of the library as sentences, without the line of code they come from."""

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, errors.TtapcaWarning):
            sys.stderr.write(f"warning: {on_the_command_line(str(message))}\n")
        else:
            others(message, category, *rest)

    return show
