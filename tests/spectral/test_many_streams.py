"""Many streams in one batch must be served as each would be alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ttapca
from ttapca.fitting.fitted_filter import attach
from ttapca.spectral.closed_form_rule import Shown
from ttapca.spectral.many_streams import ManyStreamsGain, Rows

FEW, SIZE = 3, (3, 8, 8)


def pictures(count: int, seed: int) -> Tensor:
    """Smooth random pictures: neighbouring pixels resemble each other."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.randn(count, *SIZE, generator=generator, dtype=torch.float64)
    return nn.functional.avg_pool2d(rough, 3, stride=1, padding=1)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(216, 5)).double().eval()


@pytest.mark.parametrize("components", [None, 120], ids=["all", "truncated"])
@pytest.mark.parametrize("center", [1.0, 0.0])
def test_each_stream_is_served_as_if_it_were_alone(
    network: nn.Module, components: int | None, center: float
) -> None:
    fitted = ttapca.fit(network, "0", pictures(600, seed=1), n_components=components)
    assert (fitted.rest_ is None) == (components is None)
    streams = {name: [] for name in range(FEW)}
    for number in range(12):  # of one, two and three images; noise, blur and nothing
        for name in range(FEW):
            images = pictures(1 + (number + name) % 3, seed=100 * number + name)
            if name == 0:
                images = images + 0.5 * pictures(len(images), seed=7 * number + 3)
            if name == 1:
                images = 0.4 * images + 0.3
            streams[name].append(images)
    options = {"statistics": "source", "order": "shuffled", "states": 1, "outliers": False}
    alone = {}
    with ttapca.adapt(
        network, "wiener", filter=fitted, forgetting="online", center=center, **options
    ) as adapted:
        for name, batches in streams.items():
            alone[name] = [adapted.stream(str(name))(images) for images in batches]
    attachment = attach(network, fitted, ManyStreamsGain, center=center, restore=0.6)
    gain = attachment.filter.gain
    seen = [gain.nothing_seen(fitted.center_.numel())] * FEW
    changed = False
    with torch.no_grad():
        for number in range(12):
            parts = [streams[name][number] for name in range(FEW)]
            whose = torch.tensor([name for name in range(FEW) for _ in parts[name]])
            true = torch.ones(len(whose), dtype=torch.bool)
            gain.begin(seen, Rows(whose, true, true))
            logits = network(torch.cat(parts))
            seen = [each.seen for each in gain.outcomes()]
            with attachment.disabled():
                changed |= not torch.equal(logits, network(torch.cat(parts)))
            for name in range(FEW):
                expected = alone[name][number]
                assert torch.allclose(logits[whose == name], expected, rtol=0, atol=1e-6)
    attachment.detach()
    assert changed


def test_who_is_not_filtered_passes_bit_for_bit_and_who_is_not_counted_leaves_no_mark(
    network: nn.Module,
) -> None:
    fitted = ttapca.fit(network, "0", pictures(600, seed=1))
    images = 3 * pictures(40, seed=5)
    plain = network(images)
    attachment = attach(network, fitted, ManyStreamsGain)
    gain = attachment.filter.gain
    whose = torch.arange(40) % 2
    filtered = torch.arange(40) < 20
    start = [gain.nothing_seen(), gain.nothing_seen()]
    gain.begin(start, Rows(whose, torch.ones_like(filtered), filtered))
    logits = network(images)
    assert torch.equal(logits[20:], plain[20:])
    assert not torch.equal(logits[:20], plain[:20])
    assert [float(each.shown[0].samples) for each in start] == [0, 0]  # what was given stays
    assert [float(each.seen.shown[0].samples) for each in gain.outcomes()] == [20, 20]
    gain.begin(start, Rows(whose, whose == 1, filtered))
    network(images)
    shown = [each.seen.shown[0] for each in gain.outcomes()]
    assert [float(each.samples) for each in shown] == [0, 20]
    assert torch.equal(shown[0].energies, start[0].shown[0].energies)
    attachment.detach()
    assert torch.equal(network(images), plain)


def test_rows_of_streams_are_copies() -> None:
    shown = Shown(torch.tensor([1.0, 2.0]), torch.rand(2, 3), torch.rand(2, 3))
    one, two = shown.of_stream(0), shown.of_stream(1)
    again = Shown.of_each([one, two])
    for name, value in shown.tensors().items():
        assert torch.equal(getattr(again, name), value)
    one.energies.zero_()
    assert bool((shown.energies[0] != 0).any())
