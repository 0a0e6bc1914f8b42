"""Show a long operation on standard error: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


def warn(text: str) -> None:
    """Write a warning to standard error."""
    typer.secho(f"warning: {text}", err=True, fg=typer.colors.YELLOW, bold=True)


class Drawn:
    """Bars that are drawn inside a `with` block and cleared at its end."""

    _progress: Progress

    def __enter__(self) -> Self:
        """Start to draw."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Clear the bars, whatever happened."""
        self._progress.stop()


class _Bars(Drawn):
    """What all reporters share: finished sentences stay, the bars are cleared at the end."""

    def __init__(self, title: str, console: Console | None, *columns: ProgressColumn) -> None:
        self._title = title
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *columns,
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def note(self, text: str) -> None:
        """Write one sentence above the bars."""
        self._console.print(f"{self._title}: {text}", markup=False, highlight=False)


class ConsoleReporter(_Bars):
    """A `Reporter` for people: bytes that arrive or are checked.

    Args:
        title: What each sentence starts with.
        console: Where to write; standard error by default.

    Example:
        >>> with ConsoleReporter("cifar10", Console(quiet=True)) as report:
        ...     report.note("already there")
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        super().__init__(title, console, DownloadColumn(), TransferSpeedColumn())
        self._tasks: dict[str, TaskID] = {}

    def advance(self, task: str, done: int, total: int) -> None:
        """Move the bar of a task, and take it away when the task is finished."""
        if task not in self._tasks:
            self._tasks[task] = self._progress.add_task(task, total=total)
        self._progress.update(self._tasks[task], completed=done, total=total)
        if done >= total:
            self._progress.remove_task(self._tasks.pop(task))


class _Count(MofNCompleteColumn):
    """How many are done, of how many; nothing where that is not known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class StepReporter(_Bars):
    """One bar for a known number of steps, with the time left; call it to wrap the steps.

    Args:
        title: What stands beside the bar, and what each sentence starts with.
        total: Steps in all; by default as many as there are in what was wrapped so far.
        done: Steps that were done before.
        console: Where to write; standard error by default.

    Example:
        >>> with StepReporter("training", console=Console(quiet=True)) as steps:
        ...     sum(steps([1, 2, 3]))
        6
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        done: int = 0,
        console: Console | None = None,
    ) -> None:
        super().__init__(title, console, _Count())
        self._task = self._progress.add_task(title, total=total, completed=done)
        self._fixed = total is not None
        self._total = total or 0

    def stage(self, name: str) -> None:
        """Say what is done now, where nobody can tell how much of it is left."""
        self._progress.update(self._task, description=f"{self._title}: {name}")
        self._progress.tasks[0].total = None  # `update` takes None for no change

    def __call__(self, steps: Iterable[Any]) -> Iterator[Any]:
        """Give the steps one by one, and move the bar."""
        if not self._fixed and isinstance(steps, Sized):
            self._total += len(steps)
            self._progress.update(self._task, description=self._title, total=self._total)
        for step in steps:
            yield step
            self._progress.advance(self._task)


@contextmanager
def file_progress(total: int) -> Iterator[Callable[[str, int, int], None]]:
    """Show how far a run is that writes files one after another.

    Args:
        total: Items in all files together.

    Yields:
        A function to call with a file's name, its items done, and its items in all.
    """
    console = Console(stderr=True)
    if not console.is_terminal:

        def say(name: str, done: int, of: int) -> None:
            if done == of:
                console.print(f"{name}: done", highlight=False)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        whole = bar.add_task("starting", total=total)
        before: dict[str, int] = {}

        def advance(name: str, done: int, of: int) -> None:
            del of
            bar.update(whole, description=name, advance=done - before.get(name, 0))
            before[name] = done

        yield advance
