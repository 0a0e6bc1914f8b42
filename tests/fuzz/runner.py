"""Read damaged files in a child process, and sort what comes of it."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from fuzz.targets import MODULES

Kind = Literal["data", "refused", "unnamed", "raw", "hang", "crash", "memory"]
GOOD: tuple[Kind, ...] = ("data", "refused")
BAD: tuple[Kind, ...] = ("unnamed", "raw", "hang", "crash", "memory")
MOST_SECONDS = 10  # of processor time: a busy machine does not make a file hang
PATIENCE = 120.0  # seconds of the clock, for a child that waits for something that never comes
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """What reading one damaged file led to.

    Attributes:
        target: Which kind of file.
        seed: What decided the damage.
        kind: `data`: it was read. `refused`: an error of the library that names the file.
            `unnamed`: one that does not. `raw`: any other error. `hang`: more than ten seconds of
            processor time. `crash`: the process ended. `memory`: over 1.5 GB, or asked for it.
        detail: The traceback, or how the process ended.
    """

    target: str
    seed: str | None
    kind: Kind
    detail: str

    @property
    def headline(self) -> str:
        """The last line of the traceback."""
        lines = self.detail.strip().splitlines()
        return lines[-1][:200] if lines else ""


class Runner:
    """A child process that is started when it is needed, and again when a file ended it.

    Args:
        keep: A folder for the files that were badly dealt with; none are kept without it.
        modules: Where the targets are defined.
        seconds: Processor time that a file may take.
    """

    def __init__(
        self,
        keep: Path | None = None,
        modules: Sequence[str] = MODULES,
        seconds: int = MOST_SECONDS,
    ) -> None:
        self.keep = keep
        self._arguments = [str(seconds), *modules]
        self._scratch = Path(tempfile.mkdtemp(prefix="ttapca-fuzz-"))
        self._child: subprocess.Popen[str] | None = None
        self._count = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_child()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def run(self, target: str, seed: str | None) -> Outcome:
        """Make a target's file, damage it by a seed (`None`: not at all) and read it."""
        self._count += 1
        folder = self._scratch / f"file-{self._count}"
        folder.mkdir()
        kind, detail = self._ask({"target": target, "seed": seed, "folder": str(folder)})
        outcome = Outcome(target, seed, kind, detail)
        if self.keep is not None and kind in BAD:
            self._keep(outcome, folder, self.keep)
        shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _keep(self, outcome: Outcome, folder: Path, keep: Path) -> None:
        place = keep / f"{outcome.kind}-{outcome.target}-{outcome.seed}".replace(":", "-")
        shutil.copytree(folder, place, dirs_exist_ok=True)
        (place / "outcome.txt").write_text(outcome.detail, encoding="utf-8", errors="replace")

    def _ask(self, job: dict[str, str | None]) -> tuple[Kind, str]:
        child = self._child or self._start_child()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(job) + "\n")
        child.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            if not selector.select(PATIENCE):
                self._end_child()
                return "hang", f"no answer in {PATIENCE:.0f} seconds"
        answer = child.stdout.readline()
        if answer:
            result = json.loads(answer)
            return result["kind"], result["detail"]
        code = child.wait()
        self._end_child()
        if code == -signal.SIGXCPU:
            return "hang", "more processor time than any file may take"
        said = (self._scratch / "stderr").read_text(errors="replace")
        return "crash", f"{said[-2000:]}\nthe process ended with {code}"

    def _start_child(self) -> subprocess.Popen[str]:
        paths = [str(TESTS), *(path for path in sys.path if path)]
        with (self._scratch / "stderr").open("w") as said:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "fuzz.child", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                encoding="utf-8",
            )
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.wait()
