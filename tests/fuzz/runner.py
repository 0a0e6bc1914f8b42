"""Damage and read files in a child process, and sort what comes of it.

The system limits the child's processor time and memory: a file that hangs ends the child only.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Literal

import torch

from fuzz.mutations import Target, files_in
from ttapca.errors import TtapcaError
from ttapca.support.process import forget_peak_memory, peak_memory

Kind = Literal["data", "refused", "unnamed", "raw", "hang", "crash", "memory"]
GOOD: tuple[Kind, ...] = ("data", "refused")
BAD: tuple[Kind, ...] = ("unnamed", "raw", "hang", "crash", "memory")
MODULES = tuple(sorted(f"fuzz.{path.stem}" for path in Path(__file__).parent.glob("*_targets.py")))
MOST_SECONDS = 10  # of processor time: on a busy machine a file may take longer
PATIENCE = 600.0  # seconds of the clock, for a child that waits for something that never comes
MOST_MEMORY = 1500.0  # MB
TORCH_IS_OUT_OF_MEMORY = "can't allocate memory"


def all_targets(modules: Sequence[str] = MODULES) -> dict[str, Target]:
    """Return every target of some modules, by name."""
    found = [target for name in modules for target in importlib.import_module(name).TARGETS]
    assert len({target.name for target in found}) == len(found), "two targets have one name"
    return {target.name: target for target in found}


@dataclass(frozen=True)
class Outcome:
    """What reading one damaged file led to.

    Attributes:
        target: Which kind of file.
        seed: What decided the damage.
        kind: `data`: it was read. `refused`: an error of the library that names the file.
            `unnamed`: one that does not. `raw`: any other error. `hang`: more than ten seconds of
            processor time. `crash`: the process ended. `memory`: it took or asked for over 1.5 GB.
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
        keep: A folder for the files that led to a bad outcome; none are kept without it.
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
        self._modules, self._seconds = modules, seconds
        self._scratch = Path(tempfile.mkdtemp(prefix="ttapca-fuzz-"))
        self._child: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_child()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def run(self, target: str, seed: str | None) -> Outcome:
        """Make a target's file, damage it by a seed (`None`: not at all) and read it."""
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        outcome = Outcome(target, seed, *self._ask(target, folder, seed))
        if self.keep is not None and outcome.kind in BAD:
            place = self.keep / f"{outcome.kind}-{target}-{seed}".replace(":", "-")
            shutil.copytree(folder, place, dirs_exist_ok=True)
            (place / "outcome.txt").write_text(outcome.detail, encoding="utf-8", errors="replace")
        shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _ask(self, target: str, folder: Path, seed: str | None) -> tuple[Kind, str]:
        if self._child is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, end = spawn.Pipe()
            arguments = (end, self._modules, self._seconds)
            self._child = spawn.Process(target=_serve, args=arguments, daemon=True)
            self._child.start()
            end.close()
        self._pipe.send((target, folder, seed))
        if not self._pipe.poll(PATIENCE):
            self._end_child()
            return "hang", f"no answer in {PATIENCE:.0f} seconds"
        try:
            kind, detail = self._pipe.recv()
            return kind, detail
        except (EOFError, ConnectionResetError):
            self._child.join()
            code = self._child.exitcode
            self._end_child()
        if code == -signal.SIGXCPU:
            return "hang", "more processor time than any file may take"
        return "crash", f"the process ended with {code}"

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._pipe.close()
            self._child = None


# In the child ------------------------------------------------------------------------------------

_valid: dict[str, tuple[Path, Path]] = {}  # by target: a folder, and the path of its file in it


def _serve(pipe: Connection, modules: Sequence[str], seconds: int) -> None:
    """Answer until the other end is closed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    targets = all_targets(modules)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the warnings of libraries written in C
    _limit_memory()
    with contextlib.suppress(EOFError):
        while True:
            target, folder, seed = pipe.recv()
            pipe.send(_attempt(targets[target], folder, seed, seconds))


def _attempt(target: Target, folder: Path, seed: str | None, seconds: int) -> tuple[str, str]:
    """Make a target's file in an empty folder, damage it by a seed (or not at all), and read it."""
    if target.name not in _valid:
        original = Path(tempfile.mkdtemp(dir=folder.parent))
        _valid[target.name] = original, target.make(original).relative_to(original)
    original, inner = _valid[target.name]
    shutil.copytree(original, folder, dirs_exist_ok=True)
    path = folder / inner
    if seed is not None:
        random = Random(seed)
        random.choice(target.mutators)(path, random)
    forget_peak_memory()
    _limit_seconds(seconds)
    try:
        target.read(path)
        kind, detail = "data", ""
    except BaseException as error:
        kind, detail = _judge(error, path), "".join(traceback.format_exception(error))
    _limit_seconds(seconds)  # judging and clearing up have their own time
    if peak_memory() > MOST_MEMORY:
        kind, detail = "memory", f"{peak_memory():.0f} MB\n{detail}"
    return kind, detail


def _judge(error: BaseException, path: Path) -> str:
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:
        if isinstance(cause, MemoryError) or TORCH_IS_OUT_OF_MEMORY in str(cause):
            return "memory"
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    if not isinstance(error, TtapcaError):
        return "raw"
    names = {path.name, *(file.name for file in files_in(path) if path.is_dir())}
    return "refused" if any(name in str(error) for name in names) else "unnamed"


def _limit_memory() -> None:
    """Let this process ask for so much more memory than it has now, touched or not."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        now = int(status["VmData"].split()[0]) * 1024
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (now + int(MOST_MEMORY * 1e6), hard))


def _limit_seconds(seconds: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = sum(os.times()[:2])
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + seconds + 1, hard))
