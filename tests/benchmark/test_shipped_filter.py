"""The filter that ships with the network of the demo, and who takes it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import ttapca
from ttapca import networks
from ttapca.benchmark import Benchmark, Plan
from ttapca.benchmark.network_source import NetworkSource
from ttapca.errors import DataNotFoundError

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
