"""How often a network is wrong, without labels: loops, drawn labels and photographs."""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ttapca
from ttapca import datasets, networks
from ttapca.adaptation.expected_error import ExpectedError, estimate_of, sums_after
from ttapca.corruptions import corrupt
from ttapca.datasets import to_tensor
from ttapca.errors import NotEnoughDataError, OptionError
from ttapca.fitting.temperature import temperature_of
from ttapca.serving import StreamPool

NAME = "cifar10-resnet20"


def drawn(samples: int, classes: int, temperature: float, seed: int) -> tuple[Tensor, Tensor]:
    """Logits, and labels that are drawn from their softmax at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, classes, generator=generator)
    labels = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)[:, 0]
    return logits, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_that_labels_were_drawn_at_is_found(temperature: float) -> None:
    logits, labels = drawn(20_000, 6, temperature, seed=0)
    found = temperature_of(logits, labels)
    assert found == pytest.approx(temperature, rel=0.05)
    # No other one makes them likelier.
    likelihood = [
        float((logits / each).log_softmax(1).gather(1, labels[:, None]).mean())
        for each in (found * 0.97, found, found * 1.03)
    ]
    assert likelihood[1] == max(likelihood)


def test_labels_that_are_always_right_or_wrong_have_a_temperature_all_the_same() -> None:
    logits = torch.eye(4).repeat(30, 1)
    assert 0.01 < temperature_of(logits, logits.argmax(1)) < 0.1
    assert 10 < temperature_of(logits, logits.argmin(1)) < 30


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1000))
def test_sums_are_those_of_a_loop(size: int, batches: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sums, expected = torch.zeros(2, 3, dtype=torch.float64), np.zeros((2, 3))
    for _ in range(batches):
        adapted, untouched = torch.randn(2, size, 5, generator=generator)
        sums = sums_after(sums, adapted, untouched, 1.5)
        expected *= math.exp(-size / 200)
        for sure, other in zip(adapted.double() / 1.5, untouched, strict=True):
            odds = [math.exp(float(each)) for each in sure]
            for row, chosen in enumerate((int(sure.argmax()), int(other.argmax()))):
                wrong = 1 - odds[chosen] / sum(odds)
                expected[row] += [1, wrong, wrong * (1 - wrong)]
    np.testing.assert_allclose(sums.numpy(), expected, rtol=1e-4)
    first, second = map(estimate_of, sums)
    assert first is not None
    assert second is not None
    assert first.share <= second.share  # which the adapted network is to believe
    assert 0 < first.low < first.share < first.high < 1


def test_intervals_hold_the_truth_and_become_narrow() -> None:
    logits, labels = drawn(4000, 6, 1.0, seed=1)
    nothing, widths = torch.zeros(2, 3, dtype=torch.float64), []
    for size in (50, 400, 4000):
        found = estimate_of(sums_after(nothing, logits[:size], None, 1.0)[0])
        truth = float((logits[:size].argmax(1) != labels[:size]).double().mean())
        assert found is not None
        assert found.low < truth < found.high
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True)
    assert estimate_of(nothing[0]) is None
    assert repr(ExpectedError(0.142, 0.1, 0.19)) == "ExpectedError(about 14 %, 10 to 19)"


@functools.cache
def world() -> tuple[nn.Module, ttapca.FittedFilter, Tensor, Tensor]:
    """The network that ships, with a temperature of 100 photographs, and the 400 others."""
    network, found = networks.load(NAME), datasets.load("cifar10-500")
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0)).numpy()
    images, labels = found.images[order], torch.as_tensor(found.labels[order])
    held_out = [(to_tensor(images[:100]), labels[:100])]
    fitted = ttapca.fit(network, "conv1", to_tensor(images), labelled=held_out, route="dct")
    assert fitted.temperature_ is not None
    return network, fitted, torch.from_numpy(images[100:]), labels[100:]


@pytest.mark.parametrize("corruption", ["clean", "gaussian_noise", "defocus_blur", "contrast"])
def test_photographs_are_wrong_about_as_often_as_is_said(corruption: str) -> None:
    network, fitted, images, labels = world()
    pixels = images.numpy() if corruption == "clean" else corrupt(images.numpy(), corruption, 5)
    given_images = to_tensor(pixels)
    with torch.no_grad():
        plain = network(given_images)
    adapted = ttapca.adapt(network, "wiener", filter=fitted, forgetting="online", compare=True)
    with adapted:
        found = torch.cat([adapted(batch) for batch in given_images.split(100)])
        health = adapted.health
    for logits, estimate in (
        (found, health.expected_error),
        (plain, health.expected_error_untouched),
    ):
        truth = float((logits.argmax(1) != labels).double().mean())
        assert estimate is not None
        assert abs(estimate.share - truth) < 0.08
        assert estimate.low - 0.03 < truth < estimate.high + 0.03
    assert f"about {100 * health.expected_error.share:.0f} % wrong" in repr(health)
    assert health.to_dict()["expected_error"]["share"] == health.expected_error.share


def test_comparing_changes_no_prediction_and_a_stream_remembers(tmp_path: Path) -> None:
    network, fitted, images, _ = world()
    batches = to_tensor(images.numpy()[:90]).split(30)
    options = {"filter": fitted, "forgetting": "online"}
    with ttapca.adapt(network, "wiener", **options) as adapted:
        expected = [adapted(batch) for batch in batches]
        alone = adapted.health
    with ttapca.adapt(network, "wiener", compare=True, **options) as adapted:
        assert adapted.health.expected_error is None
        for batch, logits in zip(batches[:2], expected, strict=False):
            assert torch.equal(adapted(batch), logits)
        adapted.stream("default").save(tmp_path / "stream")
        adapted.reset()
        adapted.stream("default").load(tmp_path / "stream")
        assert torch.equal(adapted(batches[2]), expected[2])
        assert adapted.health.expected_error == alone.expected_error
        assert adapted.health.expected_error_untouched is not None
        broken = torch.full_like(batches[0], torch.nan)
        before = adapted.health.expected_error
        adapted(broken)
        assert adapted.health.expected_error == before
    assert alone.expected_error_untouched is None


def test_a_service_says_the_same_and_in_shadow_both() -> None:
    network, fitted, images, _ = world()
    batches = to_tensor(images.numpy()[:60]).split(30)
    options = {"filter": fitted, "forgetting": "online", "compare": True}
    with ttapca.adapt(network, "wiener", **options) as adapted:
        for batch in batches:
            adapted(batch)
        wanted = adapted.health
    for mode in ("on", "shadow"):
        with StreamPool(network, fitted, mode=mode) as pool:
            for batch in batches:
                pool.predict("camera", batch)
            found = pool.status("camera").health
        assert found.expected_error is not None
        assert wanted.expected_error is not None
        assert found.expected_error.share == pytest.approx(wanted.expected_error.share, rel=1e-4)
        other = found.expected_error_untouched
        assert (other is None) == (mode == "on")
        if other is not None and wanted.expected_error_untouched is not None:
            expected = wanted.expected_error_untouched.share
            assert other.share == pytest.approx(expected, rel=1e-4)


def test_only_what_an_adapted_network_has_predicted_counts() -> None:
    """Neither samples that no shift explains, nor those of a stream that is off."""
    network, fitted, images, _ = world()
    good = to_tensor(images.numpy()[:20])
    poisoned = torch.cat([good, 255 * good[:4]])
    found = []
    for batch in (good, poisoned):
        options = {"filter": fitted, "forgetting": "online", "compare": True}
        with ttapca.adapt(network, "wiener", **options) as adapted, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted(batch)
            found.append(adapted.health)
    assert (found[0].implausible, found[1].implausible) == (0, 4)
    for mode in ("off", "shadow"):
        with StreamPool(network, fitted, mode=mode) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool.predict("camera", poisoned)
            found.append(pool.status("camera").health)
    assert found[2].expected_error is None
    for each in (found[1], found[3]):
        for name in ("expected_error", "expected_error_untouched"):
            wanted = getattr(found[0], name).share
            assert getattr(each, name).share == pytest.approx(wanted, rel=1e-3)


def test_a_saved_filter_keeps_its_temperature(tmp_path: Path) -> None:
    _, fitted, _, _ = world()
    fitted.save(tmp_path / "filter")
    assert ttapca.load(tmp_path / "filter").temperature_ == fitted.temperature_


def test_what_cannot_be_estimated_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64) % 3
    with pytest.raises(NotEnoughDataError, match=r"needs 100 labelled samples.*found 64"):
        ttapca.fit(model, "0", data, labelled=[(data, labels)])
    twice = [(data, labels), (data, labels + 1)]
    with pytest.raises(OptionError, match="from 0 to 2, as the model has classes; batch 1 has 1"):
        ttapca.fit(model, "0", data, labelled=twice)
    with pytest.raises(OptionError, match="pairs of samples and labels; batch 0 is a Tensor"):
        ttapca.fit(model, "0", data, labelled=[data])
    with pytest.raises(OptionError, match="one label for each sample"):
        ttapca.fit(model, "0", data, labelled=[(data, labels[:3])])
    with pytest.raises(OptionError, match="one label for each sample; found logits of shape None"):
        ttapca.fit(model, "0", data, outputs="regression", labelled=[(data, labels)])
    without = ttapca.fit(model, "0", data)
    with pytest.raises(OptionError, match=r"`compare=True` estimates.*fitted with `labelled="):
        ttapca.adapt(model, "wiener", filter=without, compare=True)
    assert ttapca.adapt(model, "wiener", filter=without).health.expected_error is None
