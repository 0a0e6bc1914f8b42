"""Units of work in other processes: what they are sent, and in which order they do it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from ttapca.benchmark.image_shelf import ImageShelf
from ttapca.benchmark.measurement import Written, run_unit
from ttapca.benchmark.plan import Unit
from ttapca.benchmark.subject import Condition, ImageSource, Subject
from ttapca.engines.artifacts import Artifact, folder_beside, write_artifact
from ttapca.support.disk import make_folder

MOST_INTERLEAVED = 8  # conditions; the images of two more are kept, on the disk of the workers
_one_at_a_time = Lock()  # a network has one method on it; a worker of dask may have many threads


class Assignment(NamedTuple):
    """A unit, and the command that runs it again."""

    unit: Unit
    command: str


@dataclass(frozen=True)
class UnitWork:
    """Runs units wherever it is sent; it is small, and opens what it needs.

    Attributes:
        subject: What they are run on.
        images: Its clean images, as an artifact of their own.
        conditions: Of all units: the images that are going to be made or read.
    """

    subject: Artifact[Subject]
    images: Artifact[Any]
    conditions: tuple[Condition, ...]

    def __call__(self, assignment: Assignment) -> Written:
        """Run a unit, and return what is written of it."""
        with _one_at_a_time:
            subject, unit = self._opened(), assignment.unit
            images = subject.source.images(unit.conditions)
            return run_unit(unit, subject, images, assignment.command)

    def check(self) -> None:
        """Raise now if this worker lacks an artifact or a file: a run would stop hours later."""
        with _one_at_a_time:
            self._opened().source.check(self.conditions)

    def _opened(self) -> Subject:
        subject = self.subject.open()
        if subject.source.shelf is None:
            subject.source.shelf = ImageShelf(folder_beside(self.subject), MOST_INTERLEAVED + 2)
        return subject


@contextmanager
def packed(subject: Subject, units: Sequence[Unit], folder: Path) -> Iterator[UnitWork]:
    """Write what workers need into a folder, which is there as long as the block.

    Args:
        subject: What the units are run on.
        units: That are to be run.
        folder: What a killed run has left there is removed.

    Raises:
        EngineError: The network cannot be pickled.
        StorageError: The folder cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    try:
        source = subject.source
        images = write_artifact(source.clean, folder, "the images", fallback=source.again)
        places = (_absolute(source.folder), source.seed, _absolute(source.textures))
        bare = replace(subject, source=ImageSource(source.clean, *places, source.rows))
        whole = write_artifact(bare, folder, "network and filter", parts={id(source.clean): images})
        conditions = dict.fromkeys(each for unit in units for each in unit.conditions)
        yield UnitWork(whole, images, tuple(conditions))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def interleaved(units: Iterable[Unit], workers: int) -> list[Unit]:
    """Return the units in an order that lets each of several workers begin with other images.

    A plan has all methods for one corruption, then for the next. In that order, all workers would
    wait for the first images, which one of them makes, then for the next ones.

    Args:
        units: In the order of the plan.
        workers: How many there are; more than 8 begin with the same images after all.

    Example:
        >>> from ttapca.benchmark.cells import Cell
        >>> def unit(corruption: str, method: str) -> Unit:
        ...     facts = (5, "online", method, "{}", "", 0, 200, 0, 0.0, 100, 0)
        ...     return Unit((Cell("net", "w", "data", "generated", corruption, *facts),))
        >>> planned = [unit(name, method) for name in ("fog", "snow", "blur") for method in "ab"]
        >>> [each.title[:4] + each.title[-1] for each in interleaved(planned, 2)]
        ['fog a', 'snowa', 'fog b', 'snowb', 'blura', 'blurb']
    """
    groups: dict[tuple[Condition, ...], list[Unit]] = {}
    for unit in units:
        groups.setdefault(tuple(unit.conditions), []).append(unit)
    remaining, order = iter(groups.values()), list[Unit]()
    while some := list(islice(remaining, min(workers, MOST_INTERLEAVED))):
        turns = chain.from_iterable(zip_longest(*some))
        order += [unit for unit in turns if unit is not None]
    return order
