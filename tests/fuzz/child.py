"""The process that damages and reads files, one after another, and says what came of each.

It is told on standard input (a line of JSON a file) and answers on standard output. Processor time
and memory are limited by the system, so that a file that hangs ends this process and no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import traceback
import warnings
from pathlib import Path
from random import Random

from fuzz.mutations import files_in
from fuzz.targets import Target, all_targets
from ttapca.errors import TtapcaError
from ttapca.support.progress import forget_peak_memory, peak_memory

MOST_MEMORY = 1500.0  # MB
TORCH_IS_OUT_OF_MEMORY = "can't allocate memory"


def serve() -> None:
    """Answer until the input ends. The arguments are the seconds a file may take, and modules."""
    seconds = int(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    warnings.simplefilter("ignore")
    targets = all_targets(sys.argv[2:])
    _limit_memory()
    for line in sys.stdin:
        job = json.loads(line)
        kind, detail = attempt(targets[job["target"]], Path(job["folder"]), job["seed"], seconds)
        print(json.dumps({"kind": kind, "detail": detail}), file=answers, flush=True)


def attempt(target: Target, folder: Path, seed: str | None, seconds: int) -> tuple[str, str]:
    """Make a target's file in an empty folder, damage it by a seed (or not at all), and read it."""
    path = _fresh(target, folder)
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
    _limit_seconds(seconds)  # judging and clearing up have time of their own
    if peak_memory() > MOST_MEMORY:
        kind, detail = "memory", f"{peak_memory():.0f} MB\n{detail}"
    return kind, detail


_made: dict[str, tuple[Path, Path]] = {}  # by target: a valid copy, and its path below the folder


def _fresh(target: Target, folder: Path) -> Path:
    if target.name not in _made:
        original = folder.parent / f"valid-{os.getpid()}-{target.name}"
        original.mkdir()
        _made[target.name] = original, target.make(original).relative_to(original)
    original, inner = _made[target.name]
    shutil.copytree(original, folder, dirs_exist_ok=True)
    return folder / inner


def _judge(error: BaseException, path: Path) -> str:
    if any(_is_out_of_memory(each) for each in _chain(error)):
        return "memory"
    if not isinstance(error, TtapcaError):
        return "raw"
    names = {path.name, *(file.name for file in files_in(path) if path.is_dir())}
    return "refused" if any(name in str(error) for name in names) else "unnamed"


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or TORCH_IS_OUT_OF_MEMORY in str(error)


def _limit_memory() -> None:
    """Let this process ask for so much more than it has, touched or not."""
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

        used = resource.getrusage(resource.RUSAGE_SELF)
        soon = int(used.ru_utime + used.ru_stime) + seconds + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (soon, hard))


if __name__ == "__main__":
    serve()
