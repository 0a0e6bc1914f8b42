"""Progress on standard error: a bar on a terminal, a line a file elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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
