"""The ten hottest lines of a command of `ttapca`, by looking where it is every few milliseconds.

A second thread looks which line of this project (or which line that it called) the main thread is
at. Torch lets go of the interpreter while it computes, so that a line is charged with the time that
its computation takes.

    python benchmarks/hottest.py bench WEIGHTS --normalise cifar10 --images 400 ...
"""

from __future__ import annotations

import argparse
import collections
import linecache
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import measuring
from measuring import Result, Table

PERIOD = 0.005
PACKAGE = str(Path(__file__).parents[1] / "src")
Line = tuple[str, int]


class Sampler:
    """Counts the lines at which another thread is found."""

    def __init__(self, thread: int) -> None:
        self.counts: collections.Counter[Line] = collections.Counter()
        self._thread = thread
        self._done = threading.Event()
        self._own = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._own.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._own.join()

    def _run(self) -> None:
        while not self._done.wait(PERIOD):
            line = _own_line(sys._current_frames().get(self._thread))
            if line is not None:
                self.counts[line] += 1


def _own_line(frame: FrameType | None) -> Line | None:
    """The innermost line of the package."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def run(options: argparse.Namespace) -> Result:
    from ttapca.cli import main as ttapca_main

    sys.argv = ["ttapca", *options.command]
    start = time.process_time()
    with Sampler(threading.main_thread().ident or 0) as sampler:
        try:
            ttapca_main()
        except SystemExit as stop:
            if stop.code:
                raise
    seconds = time.process_time() - start
    total = sum(sampler.counts.values())
    rows = [
        [f"{100 * count / total:.1f} %", _place(line), f"`{linecache.getline(*line).strip()}`"]
        for line, count in sampler.counts.most_common(10)
    ]
    shown = " ".join(Path(word).name for word in options.command)
    return Result(
        title="The hottest lines",
        text=f"`ttapca {shown}`: {seconds:.0f} s of processor time, {total:,} looks.",
        tables=[Table("Ten lines", ["share", "where", "line"], rows)],
        numbers={"samples": total},
    )


def _place(line: Line) -> str:
    return f"{Path(line[0]).relative_to(PACKAGE)}:{line[1]}".removeprefix("ttapca/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what comes after `ttapca`")
    # Options of this script come first; what follows the command's name is the command's own.
    measuring.command("hottest", run, parser)


if __name__ == "__main__":
    main()
