"""The command `ttapca`, with one module for each command or family of commands.

Only this package prints, reads the environment and exits. Results go to standard output, progress
and errors to standard error. Exit codes: 0 for success, 1 for a failure, 2 for a call that makes
no sense, 130 for Ctrl-C.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Run the command line and exit with its code; name the extra when a package is missing."""
    try:
        from ttapca.cli.app import run

        code = run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        words = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))
        extras = [name for name, packages in words["extras"].items() if package in packages]
        if not extras:
            raise
        sys.stderr.write(
            f"error: this command needs the package `{package}`, which is not installed; "
            f"get it with: pip install 'ttapca[{extras[0]}]'\n"
        )
        code = 1
    except KeyboardInterrupt:  # while packages are still being imported
        sys.stderr.write("interrupted\n")
        code = 130
    sys.exit(code)
