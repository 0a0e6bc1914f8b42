"""Options of `ttapca serve` in the environment and in a file; those of the call go first.

The option `--max-batch` is the variable `TTAPCA_SERVE_MAX_BATCH`, and `max-batch` in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Context, Option

from ttapca._checks import FLAG, Either, Number, Record, Text, conform
from ttapca.errors import OptionError
from ttapca.support.parsing import parse_toml, read_bounded

PREFIX = "TTAPCA_SERVE_"
VALUE = Either([FLAG, Number(), Text()], "text, a number, true or false")
ELSEWHERE = ("help", "config", "check")  # options that a file does not have


def named(parameters: list[Any]) -> dict[str, Any]:
    """Return parameters by name: MODEL rather than --model, which is another way to give it."""
    return {max(each.opts, key=len).lstrip("-"): each for each in reversed(parameters)}


class Configured:
    """A command whose parameters are also read from the environment."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, each with its variable."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for name, parameter in named(found).items():
            if name not in ("help", "check"):
                parameter.envvar = PREFIX + name.replace("-", "_").upper()
                parameter.show_envvar = False  # it would fill the help
        return found

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the call; a network that it names replaces one from elsewhere."""
        rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        source = ctx.get_parameter_source("model")
        if ctx.params["model_option"] is not None and source.name != "COMMANDLINE":
            ctx.params["model"] = None
        return rest


def _read(ctx: Context, path: Path | None) -> Path | None:
    """Let the values of a file be the defaults."""
    if path is not None:
        content = parse_toml(read_bounded(path, OptionError), str(path), OptionError)
        known = named(ctx.command.get_params(ctx))
        rules = dict.fromkeys([name for name in known if name not in ELSEWHERE], VALUE)
        conform(content, Record(optional=rules), str(path), OptionError)
        ctx.default_map = {known[name].name: value for name, value in content.items()}
    return path


ConfigFile = Annotated[
    Path | None, Option(metavar="FILE", exists=True, dir_okay=False, is_eager=True, callback=_read)
]
