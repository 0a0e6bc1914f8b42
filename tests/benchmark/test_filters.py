"""Filters that ship, and filters that are fitted once and kept."""

from __future__ import annotations

import re
import shlex
import threading
from pathlib import Path

import pytest

import ttapca
from benchmark.worlds import Recorder, small_subject
from ttapca import networks
from ttapca.benchmark import Benchmark, Plan
from ttapca.benchmark.filters import kept_filter
from ttapca.errors import DataNotFoundError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.networks.source import NetworkSource

NAME = "cifar10-resnet20"
PLAN = Plan(
    NAME,
    "cifar10-500",
    ("wiener",),
    ("contrast",),
    settings=("online",),
    batch_sizes=(20,),
    images=20,
)


def test_it_is_small_and_drops_nothing() -> None:
    folder = networks.packaged_filters()[NAME]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 400_000
    fitted = ttapca.load(folder)
    assert (fitted.layer, fitted.route, fitted.n_samples_) == ("conv1", "dct", 50_000)
    assert fitted.n_components_ == 3 * 32 * 32
    assert fitted.dropped_variance_ == 0
    assert not fitted.drops_too_much  # although the file rounds the variances
    assert 0 < 1 - float(fitted.explained_variance_ratio_.sum()) < 1e-3
    assert networks.packaged_filters().keys() <= networks.packaged().keys()


def test_photographs_without_training_images_take_it(tmp_path: Path) -> None:
    [row] = Benchmark(PLAN).run(tmp_path / "r.sqlite")
    assert row.outcome.status == "done"
    assert (row.cell.layer, row.cell.components) == ("conv1, cifar10-resnet20-filter", 3072)
    words = shlex.split(row.outcome.command)
    assert words[words.index("--data") + 1] == "cifar10-500"
    assert not {"--layer", "--filter", "--route"}.intersection(words)
    assert [path.name for path in tmp_path.glob("*-filters")] == []  # none was fitted
    [unit] = Benchmark(PLAN).units()
    assert unit.cells == (row.cell,)


@pytest.mark.parametrize(
    ("plan", "network"),
    [
        (PLAN.changed(route="dct"), None),
        (PLAN.changed(layer="conv1"), None),
        (PLAN.changed(model="cifar10-cct2"), None),
        (PLAN, NetworkSource(NAME, normalisation="none")),  # another network by its numbers
    ],
)
def test_what_it_does_not_fit_asks_for_training_images(
    plan: Plan, network: NetworkSource | None, tmp_path: Path
) -> None:
    with pytest.raises(DataNotFoundError, match="`cifar10-500` has test images only"):
        Benchmark(plan, network).run(tmp_path / "r.sqlite")


def test_two_processes_fit_one_filter(tmp_path: Path) -> None:
    """The second waits for the first, and loads what it has kept."""
    folder, fits, notes = tmp_path / "filters" / "one", [], Recorder()
    waits, found = threading.Event(), []
    fitted = small_subject().fitted
    assert fitted is not None

    class Second(Recorder):
        def note(self, text: str) -> None:
            super().note(text)
            waits.set()

    later = Second()
    second = threading.Thread(target=lambda: found.append(kept_filter(folder, fit, later)))

    def fit() -> FittedFilter:
        fits.append(1)
        if len(fits) == 1:
            second.start()
            assert waits.wait(600)
        return fitted

    found.append(kept_filter(folder, fit, notes))
    second.join()
    assert (len(fits), len(found), notes.notes) == (1, 2, [])
    assert re.match(r"another process fits this filter \(process \d+ on", later.notes[0])
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
