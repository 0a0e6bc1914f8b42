"""The command `ttapca`, with one module for each command or family of commands.

Only this package prints, reads the environment and exits. Results go to standard output, progress
and errors to standard error. Exit codes: 0 for success, 1 for a failure, 2 for a call that makes
no sense, 130 for Ctrl-C.
"""

from __future__ import annotations

import sys

EXTRA_OF_PACKAGE = {
    "typer": "cli",
    "rich": "cli",
    "sklearn": "demo",
    "scipy": "data",
    "cv2": "data",
    "PIL": "data",
    "pooch": "data",
    "joblib": "data",
    "cloudpickle": "data",
    "distributed": "cluster",
    "tensorboard": "train",
    "matplotlib": "report",
    "jinja2": "report",
    "pandas": "report",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "python_multipart": "serve",
    "optuna": "tune",
    "onnx": "onnx",
    "onnxscript": "onnx",
}


def main() -> None:
    """Run the command line and exit with its code; name the extra when a package is missing."""
    try:
        from ttapca.cli.app import run

        code = run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF_PACKAGE:
            raise
        sys.stderr.write(
            f"error: this command needs the package `{package}`, which is not installed; "
            f"get it with: pip install 'ttapca[{EXTRA_OF_PACKAGE[package]}]'\n"
        )
        code = 1
    except KeyboardInterrupt:  # while packages are still being imported
        sys.stderr.write("interrupted\n")
        code = 130
    sys.exit(code)
