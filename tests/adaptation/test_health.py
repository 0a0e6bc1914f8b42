"""`Health`: what it says of a stream, beside plain loops; and that asking changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ttapca
from adapters import CASES, DATA, X, adapted
from oracles import images, small_convnet
from ttapca.errors import ShapeError
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.closed_form_rule import independent_images
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.image_statistics import SourceOutliers

FITTED = ttapca.fit(small_convnet(), "conv1", DATA)
NEW = images(400)[150:]  # like DATA, which a basis knows better than any others
BROKEN = X.where(torch.arange(12).reshape(12, 1, 1, 1) != 5, math.nan)
MISSING = ("p_value", "shift", "size", "composition", "ordered", "run_length", "skew")
MISSING += ("outliers", "shifted")


def wiener(**options: object) -> ttapca.Adapter:
    options = {"filter": FITTED, "forgetting": "online", **options}
    return ttapca.adapt(small_convnet(), "wiener", **options)


def band_energies(samples: Tensor) -> list[list[float]]:
    """For every image the mean of component^2 / variance in bands of 1, 2, 4, ... components."""
    centred = samples.flatten(1) - FITTED.center_
    components = FITTED.basis.project(centred.to(FITTED.center_)).double()
    rows = []
    for image in components:
        scaled = [float(c**2 / v) for c, v in zip(image, FITTED.source_variance_, strict=True)]
        row, start = [], 0
        while start < len(scaled):
            band = scaled[start : 2 * start + 1]
            row.append(sum(band) / len(band))
            start = 2 * start + 1
        rows.append(row)
    return rows


def distances(log_energies: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Squared Mahalanobis distances from the mean of the reference, over the number of bands."""
    mean, bands = reference.mean(0), reference.shape[1]
    inverse = np.linalg.inv(np.cov(reference.T) + CONSTANTS.ridge * np.eye(bands))
    return np.array([(row - mean) @ inverse @ (row - mean) / bands for row in log_energies])


@pytest.mark.parametrize("number", range(5))
def test_the_p_values_of_one_image_are_shares_of_source_images(number: int) -> None:
    image = (1 + 0.4 * number) * DATA[number : number + 1] + 0.05 * number
    adapter = wiener(outliers=False)
    adapter(image)
    health = adapter.health
    source = np.log(FITTED.energies_.double().numpy())
    (energies,) = band_energies(image)
    (mine,) = distances(np.log([energies]), source)
    farther = sum(other >= mine for other in distances(source, source))
    # How source images vary is known from some of them only, for which distances allow.
    assert health.p_value == pytest.approx((farther + 1) / (len(source) + 1), abs=0.1)
    for band, energy, column in zip(health.bands, energies, source.T, strict=True):
        assert band.ratio == pytest.approx(energy, rel=1e-4)
        above = sum(each >= math.log(energy) for each in column)
        below = sum(each <= math.log(energy) for each in column)
        expected = min(1.0, 2 * (min(above, below) + 1) / (len(column) + 1))
        assert band.p_value == pytest.approx(expected, abs=0.1)
    assert health.size == pytest.approx(
        math.sqrt(sum(math.log2(energy) ** 2 for energy in energies) / len(energies)), rel=1e-4
    )
    assert [(band.layer, band.first) for band in health.bands[:3]] == [
        ("conv1", 1),
        ("conv1", 2),
        ("conv1", 4),
    ]
    assert health.bands[-1].last == FITTED.n_components_


@pytest.mark.parametrize("factor", [1.0, 1.06, 1.12, 2.0])
def test_the_p_value_of_a_stream_is_a_share_of_source_batches(factor: float) -> None:
    """Of batches that numpy draws, so that the two agree as well as chance allows."""
    adapter = wiener(outliers=False)
    batch = factor * NEW[40:80]
    adapter(batch)
    source, size = FITTED.energies_.double().numpy(), len(batch)
    generator = np.random.default_rng(7)
    drawn = np.array(
        [np.log(source[generator.integers(len(source), size=size)].mean(0)) for _ in range(2000)]
    )
    wider = drawn.mean(0) + (drawn - drawn.mean(0)) * math.sqrt(1 + size / len(source))
    (mine,) = distances(np.log([np.mean(band_energies(batch), 0)]), wider)
    expected = np.mean(distances(wider, wider) >= mine)
    assert adapter.health.p_value == pytest.approx(expected, abs=0.15)
    assert adapter.health.p_value == ttapca.explain(adapter)[0].p_value
    assert adapter.health.shift == ttapca.explain(adapter)[0].shift


def test_images_of_one_class_count_for_fewer() -> None:
    """As the p-value of a smaller batch with the same energies."""
    adapter = wiener()
    (surface,) = (each for each in adapter.surfaces if isinstance(each, ttapca.SpectralGains))
    gain = surface.closed_form
    assert isinstance(gain, ClosedFormGain)
    energies = torch.full((len(gain.edges) - 1,), 1.15, dtype=torch.float64)
    assert independent_images(200.0, 1.0) == 200 / (1 + 200 * CONSTANTS.likeness)
    alike = gain.evidence(energies, 200.0, independent_images(200.0, 1.0))
    few = gain.evidence(energies, 200 / (1 + 200 * CONSTANTS.likeness))
    assert alike.p_value == few.p_value > gain.evidence(energies, 200.0).p_value


@pytest.mark.parametrize(("method", "norm"), CASES)
def test_every_method_counts_images_and_broken_batches_by_stream(method: str, norm: str) -> None:
    """And says None of what it cannot tell; all of it as JSON has it."""
    adapter = adapted(method, norm)
    camera = adapter.stream("camera")
    assert camera.health.images == 0
    assert "camera" not in adapter.streams
    for batch in (X, BROKEN, X + 0.2, BROKEN):
        camera(batch)
    adapter(BROKEN)
    mine, other = adapter.health, camera.health
    assert (mine.stream, mine.images, mine.skipped) == ("default", 0, 1)
    assert (other.stream, other.images, other.skipped) == ("camera", 24, 2)
    assert adapter.skipped == 3
    closed = any(getattr(each, "in_closed_form", False) for each in adapter.surfaces)
    assert (other.p_value is not None) == closed
    assert mine.p_value is None
    assert mine.bands == ()
    if not closed:
        assert all(getattr(other, name) is None for name in MISSING)
    assert json.loads(json.dumps(other.to_dict(), allow_nan=False)) == other.to_dict()
    assert "\n" not in repr(other)
    assert "24 samples" in repr(other)
    assert repr(other).endswith("2 batches skipped)")


@pytest.mark.parametrize("forgetting", ["episodic", "online", "continual"])
def test_counts_outlast_forgetting_and_files_but_no_reset(
    forgetting: ttapca.adaptation.adapter.Forgetting, tmp_path: Path
) -> None:
    adapter = wiener(forgetting=forgetting)
    camera = adapter.stream("camera")
    for batch in (X, BROKEN, 2 * X, 2 * X[:5]):
        camera(batch)
    before = camera.health
    assert (before.images, before.skipped) == (29, 1)
    camera.save(tmp_path / "stream")
    loaded, restored = wiener(forgetting=forgetting), wiener(forgetting=forgetting)
    loaded.stream("camera").load(tmp_path / "stream")
    restored.load_state_dict(adapter.state_dict())
    for twin in (loaded, restored, copy.deepcopy(adapter)):
        assert twin.stream("camera").health == before
        twin.stream("camera")(BROKEN)
        assert twin.stream("camera").health.skipped == 2
    assert camera.health == before
    camera.reset()
    assert (camera.health.images, camera.health.skipped, camera.health.p_value) == (0, 0, None)


def test_what_raises_is_neither_seen_nor_skipped() -> None:
    adapter = wiener()
    adapter(X)
    before = adapter.health
    with pytest.raises(ShapeError, match="fitted on samples of shape"):
        adapter(X[..., :5])
    assert adapter.health == before


def test_a_guard_that_goes_back_does_not_hide_broken_batches() -> None:
    guard = ttapca.CollapseGuard("rollback", window=1, classes=0.99, entropy=0.99)
    adapter = ttapca.adapt(small_convnet(), "tent", forgetting="online", guard=guard, lr=10.0)
    for batch in (X, BROKEN, X, X, X):
        adapter(batch)
    assert adapter.events  # it did go back
    assert (adapter.health.images, adapter.health.skipped) == (48, 1)


def test_the_weight_of_the_batch_is_that_of_its_layers() -> None:
    adapter = wiener(order="shuffled")  # so that each image counts for one
    adapter(3 * X)
    adapter(3 * X)
    health = adapter.health
    seen = 12 * math.exp(-12 / 200) + 12
    by_layer = [end * health.shift * seen / (seen + 16) for end in (0.1, 0.9)]
    assert health.batch_weight == pytest.approx(sum(by_layer) / 2)
    clean = wiener()
    clean(NEW)
    assert (clean.health.shift, clean.health.batch_weight) == (0.0, 0.0)
    plain = ttapca.adapt(small_convnet(), "bn")
    assert plain.health.batch_weight == 1.0


def test_outliers_and_classes_are_those_that_were_found() -> None:
    adapter = wiener(order="auto")
    hit = torch.rand(X.shape, generator=torch.Generator().manual_seed(0)) < 0.1
    batches = [X.where(~hit, 30.0), X[:5].where(~hit[5:10], 30.0)]
    logits = [adapter(batch) for batch in batches][-1]
    first, second = (SourceOutliers(FITTED.outliers_).repaired(each)[1] for each in batches)
    faded, health = 12 * math.exp(-5 / 200), adapter.health
    assert health.outliers == pytest.approx((faded * first + 5 * second) / (faded + 5))
    assert first != second
    assert min(first, second) > 0.02
    assert len(health.composition) == logits.shape[1]
    assert sum(health.composition) == pytest.approx(1.0)
    assert 0 <= health.ordered <= 1
    assert health.run_length >= 2
    assert health.skew is None  # the order tells for how many images they count
    quiet = wiener(outliers=False, order="shuffled")
    quiet(X)
    found = quiet.health
    assert (found.outliers, found.composition, found.skew) == (None,) * 3
    assert (found.ordered, found.run_length) == (None, None)


def test_conditions_are_read_from_the_stream() -> None:
    adapter = wiener()
    assert adapter.health.conditions == 1
    adapter(20 * X)
    assert adapter.health.conditions == 1
    adapter(X)
    assert adapter.health.conditions == 2
    assert "2 conditions" in repr(adapter.health)
    assert adapter.stream("new").health.conditions == 1
    start = adapter.new_state()
    size = start.conditions.centres.shape[1]
    three = dataclasses.replace(start.conditions, centres=np.zeros((3, size)), weights=np.ones(3))
    state = dataclasses.replace(start, conditions=three)
    assert adapter.facts_of(state)["conditions"] == 3


def test_asking_changes_nothing() -> None:
    asked, left_alone = wiener(), wiener()
    for batch in (X, 2 * X, X[:1], 0.5 * X):
        assert torch.equal(asked.stream("a")(batch), left_alone.stream("a")(batch))
        assert asked.health.images == 0
        assert asked.stream("a").health == asked.stream("a").health
        assert asked.stream("never called").health.images == 0
    assert asked.streams == left_alone.streams == ("default", "a")


def test_several_filters_are_judged_together() -> None:
    model = small_convnet()
    both = [FITTED, ttapca.fit(model, "conv2", DATA)]
    adapter = ttapca.adapt(model, "wiener", filter=both, outliers=False)
    adapter(1.1 * X)
    health, found = adapter.health, ttapca.explain(adapter)
    assert health.p_value == min(1.0, 2 * min(each.p_value for each in found))
    assert health.shift == max(each.shift for each in found)
    assert {band.layer for band in health.bands} == {"conv1", "conv2"}
    assert len(health.bands) == sum(len(each.bands) for each in found)
