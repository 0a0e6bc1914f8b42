"""Statistics over a stream of batches: what counts, how much, and what is forgotten."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from ttapca.adaptation.surfaces.channel_streams import ChannelMoments, ChannelStreams

import ttapca
from ttapca.adaptation.surfaces import BatchNormStatistics

LONG = 1e12


def moments(values: Tensor) -> ChannelMoments:
    var, mean = torch.var_mean(values, dim=0, correction=0)
    return ChannelMoments(mean, var, float(len(values)))


def data(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator, dtype=torch.float64) * 2 + 1


def test_batches_of_any_size_make_one_large_batch() -> None:
    streams, values = ChannelStreams(), data(57)
    for batch in values.split([1, 30, 6, 20]):
        streams.start_batch()
        found = streams.take(0, moments(batch), LONG)
    np.testing.assert_allclose(found.mean, values.numpy().mean(0), rtol=1e-9)
    np.testing.assert_allclose(found.var, values.numpy().var(0), rtol=1e-9)
    assert found.samples == pytest.approx(57)
    assert streams.size_with(0, 10, LONG) == pytest.approx(57 - 20 + 10)  # before the last batch


def test_old_batches_count_less() -> None:
    streams, old, new = ChannelStreams(), data(10), data(10, seed=1)
    for batch in (old, new):
        streams.start_batch()
        found = streams.take(0, moments(batch), 5.0)
    kept = 10 * math.exp(-2)
    expected = (kept * old.mean(0) + 10 * new.mean(0)) / (kept + 10)
    torch.testing.assert_close(found.mean, expected)
    assert found.samples == pytest.approx(kept + 10)


def test_a_batch_counts_once_however_many_passes_it_takes() -> None:
    streams = ChannelStreams()
    streams.start_batch()
    first = streams.take(0, moments(data(10)), LONG)
    again = streams.take(0, moments(data(10, seed=1)), LONG)
    assert torch.equal(again.mean, moments(data(10, seed=1)).mean)  # alone: nothing was before
    streams.start_batch()
    both = streams.take(0, moments(data(10, seed=2)), LONG)
    torch.testing.assert_close(both.mean, (first.mean + data(10, seed=2).mean(0)) / 2)


def test_a_broken_batch_is_forgotten() -> None:
    streams = ChannelStreams()
    for batch in (data(10), data(10) * math.nan, data(10, seed=1)):
        streams.start_batch()
        found = streams.take(0, moments(batch), LONG)
    torch.testing.assert_close(found.mean, torch.cat([data(10), data(10, seed=1)]).mean(0))


def test_a_snapshot_brings_it_back_bit_for_bit() -> None:
    streams = ChannelStreams()
    for layer in (3, 1):
        streams.start_batch()
        streams.take(layer, moments(data(10, seed=layer)), 50.0)
    kept = streams.snapshot()
    expected = streams.size_with(1, 5, 50.0), streams.size_with(3, 5, 50.0)
    streams.restore([])
    assert streams.size_with(1, 5, 50.0) == 5
    streams.restore(kept)
    # What had not been the past when the snapshot was taken is now.
    assert streams.size_with(3, 5, 50.0) == expected[1]
    assert streams.size_with(1, 5, 50.0) == 10 * math.exp(-0.1) + 5


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5)
    ).eval()


def images(n: int, seed: int = 0) -> Tensor:
    rough = torch.rand(n, 2, 6, 6, generator=torch.Generator().manual_seed(seed))
    return rough + rough.mean((2, 3), keepdim=True)


def shifted(n: int, seed: int = 1) -> Tensor:
    return images(n, seed) + torch.randn(n, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def statistics_of(adapter: ttapca.Adapter) -> BatchNormStatistics:
    return next(s for s in adapter.surfaces if isinstance(s, BatchNormStatistics))


def test_online_single_images_come_to_count_as_much_as_a_batch(model: nn.Module) -> None:
    fitted = ttapca.fit(model, "0", images(400), 40)
    online = ttapca.adapt(model, "wiener", filter=fitted, forgetting="online")
    weights = []
    for image in shifted(150).split(1):
        online(image)
        weights.append(statistics_of(online).weight_in(0, 1))
    assert weights[0] < 0.01
    assert weights[-1] > 0.7 * statistics_of(online).weight_of(150, 0.0)
    online.reset()
    assert statistics_of(online).weight_in(0, 1) == 0.0  # forgotten, and no shift is seen any more


def test_a_single_image_alone_is_normalised_as_the_source(model: nn.Module) -> None:
    fitted = ttapca.fit(model, "0", images(400), 40)
    image = shifted(1)
    by_source = ttapca.adapt(model, "wiener", filter=fitted, statistics="source")
    expected = by_source(image)
    by_source.detach()
    episodic = ttapca.adapt(model, "wiener", filter=fitted)
    assert statistics_of(episodic).prior == 16.0
    for _ in range(3):
        assert torch.equal(episodic(image), expected)
    assert statistics_of(episodic).weight_in(0, 1) == 0.0


def test_episodic_batches_know_nothing_of_each_other(model: nn.Module) -> None:
    fitted = ttapca.fit(model, "0", images(400), 40)
    adapter = ttapca.adapt(model, "wiener", filter=fitted)
    expected = adapter(shifted(30))
    adapter(3 * shifted(30, seed=2))
    assert torch.equal(adapter(shifted(30)), expected)


def test_calls_past_the_adapter_leave_the_stream_alone(model: nn.Module) -> None:
    fitted = ttapca.fit(model, "0", images(400), 40)
    results = []
    for meddle in (False, True):
        adapter = ttapca.adapt(model, "wiener", filter=fitted, forgetting="continual")
        adapter(shifted(30))
        if meddle:
            with torch.no_grad():
                model(5 * shifted(30, seed=3))
        results.append(adapter(shifted(30, seed=2)))
        adapter.detach()
    assert torch.equal(*results)
