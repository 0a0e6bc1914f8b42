"""The loop: what is finished is skipped, what fails is written down, the rest goes on."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ttapca.benchmark.cells import Outcome, Row
from ttapca.benchmark.grid import Unit
from ttapca.benchmark.machine import machine, versions
from ttapca.benchmark.protocol import Measured, measure
from ttapca.benchmark.results import Results
from ttapca.benchmark.subject import Subject
from ttapca.datasets import Images
from ttapca.support.memory import forget_peak_memory, peak_memory

Command = Callable[[Unit], Sequence[str]]
LONGEST_REASON = 1000  # letters


class Watcher:
    """Told how a run goes; this one does nothing, others show it."""

    def waits(self, holder: str) -> None:
        """Another run fills the file: `holder` says which."""

    def starts(self, todo: Sequence[Unit], finished: int) -> None:
        """These units are to be run; so many were finished before."""

    def unit_starts(self, unit: Unit) -> None:
        """A unit is run from now on."""

    def batch(self, images: int, wrong: int) -> None:
        """A batch of the unit is done."""

    def unit_ends(self, rows: Sequence[Row]) -> None:
        """A unit is done or has failed, and is in the file."""


def run(
    units: Sequence[Unit],
    subject: Subject,
    results: Results,
    *,
    watcher: Watcher | None = None,
    retry_failed: bool = False,
    command: Command | None = None,
) -> None:
    """Run what is not in the file yet.

    A unit is written in one transaction when it is done: a run that was killed at any moment goes
    on where it was, and ends with the file that it would have ended with.

    Args:
        units: What `expand` gives.
        subject: What they are run on.
        results: Where finished cells are found and put.
        watcher: Told how it goes.
        retry_failed: Whether cells that have failed before are run again.
        command: Gives the words that reproduce a unit, to be kept with it.

    Raises:
        StorageError: The disk is full or refuses; what was finished is in the file.
        DataNotFoundError: Corrupted images cannot be made or read.
    """
    watcher = watcher or Watcher()
    with results.reserved(watcher.waits):
        statuses = results.statuses()
        over = {"done"} if retry_failed else {"done", "failed"}
        todo = [
            unit for unit in units if not all(statuses.get(cell) in over for cell in unit.cells)
        ]
        subject.source.check([condition for unit in todo for condition in unit.conditions])
        watcher.starts(todo, len(units) - len(todo))
        for unit in todo:
            images = subject.source.images(unit.conditions)  # without, there is nothing to find
            watcher.unit_starts(unit)
            rows, found = _finished(unit, subject, images, watcher, command)
            looks = [one.observation for one in found if one.observation is not None]
            results.add(rows, looks)
            watcher.unit_ends(rows)


def _finished(
    unit: Unit, subject: Subject, images: Images, watcher: Watcher, command: Command | None
) -> tuple[list[Row], list[Measured]]:
    """Run a unit; a method that fails is a finding too, and no reason to stop."""
    words = shlex.join(command(unit)) if command else ""
    forget_peak_memory()
    try:
        found = measure(unit, subject, images, watcher.batch)
    except Exception as error:  # whatever a method or a network may raise
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        outcome = _outcome(None, reason, words)
        return [Row(cell, outcome) for cell in unit.cells], []
    rows = [
        Row(cell, _outcome(measured, "", words))
        for cell, measured in zip(unit.cells, found, strict=True)
    ]
    return rows, found


def _outcome(measured: Measured | None, reason: str, command: str) -> Outcome:
    evaluation = measured.evaluation if measured else None
    return Outcome(
        status="done" if measured else "failed",
        reason=reason,
        error=evaluation.error if evaluation else None,
        calibration_error=evaluation.calibration_error if evaluation else None,
        entropy=evaluation.entropy if evaluation else None,
        error_stream=evaluation.error_stream if evaluation else (),
        entropy_stream=evaluation.entropy_stream if evaluation else (),
        updates=measured.updates if measured else 0,
        skipped=measured.skipped if measured else 0,
        parameters=measured.parameters if measured else 0,
        seconds=evaluation.seconds if evaluation else 0.0,
        peak_memory=peak_memory(),
        versions=versions(),
        machine=machine(),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
    )
