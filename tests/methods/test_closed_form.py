"""The closed-form methods on networks: safety, forgetting, statistics, copies, explanations."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import options_for
from oracles import images, left_untouched, small_convnet
from small_networks import PatchTransformer
from ttapca.adaptation.surfaces import SpectralGains, StreamStatistics
from ttapca.errors import AttachError, OptionError
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_batch import StreamBatch

DATA = images(400)
CLOSED = ("wiener", "match", "two-sided")


@functools.cache
def source_filter() -> ttapca.FittedFilter:
    """A filter that is fitted when a test first needs it."""
    with torch.random.fork_rng(devices=[]):
        return ttapca.fit(small_convnet(), "conv1", DATA, 40)


def adapted(model: nn.Module, method: Any = "wiener", **given: Any) -> ttapca.Adapter:
    return ttapca.adapt(model, method, **({"filter": source_filter()} | given))


def gains_of(adapter: ttapca.Adapter) -> Tensor:
    (surface,) = (each for each in adapter.surfaces if isinstance(each, SpectralGains))
    assert surface.filter is not None
    return surface.filter.gains().detach().clone()


def statistics_in(adapter: ttapca.Adapter) -> StreamStatistics:
    (found,) = (each for each in adapter.surfaces if isinstance(each, StreamStatistics))
    return found


def weights_of(adapter: ttapca.Adapter, size: int) -> list[float]:
    """The weight that a batch of so many images would have, in each layer with feature maps."""
    statistics, stream = statistics_in(adapter), adapter.hub
    assert stream.state is not None
    batch = StreamBatch([stream.state], adapter.new_state(), memory=stream.memory, size=size)
    counts = torch.full((1, len(statistics.layers)), float(size), dtype=torch.float64)
    weights, *_ = statistics.weights_of(batch, batch.layers_before(), counts)
    return weights[0].tolist()


def noisy(n: int, seed: int = 3, noise: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    clean = images(n, seed=seed)
    return clean + noise * torch.randn(clean.shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def model() -> nn.Module:
    return small_convnet()


@pytest.mark.parametrize("method", CLOSED)
def test_the_filter_by_hand(method: str, model: nn.Module) -> None:
    """Project, scale, rebuild: in the layer's own output, where nothing is folded."""
    given: dict[str, Any] = {"statistics": "source", "threshold": 0.0, "order": "shuffled"}
    adapter = adapted(model, method, **given)
    batch = noisy(100) + 3.0
    found, gains = adapter(batch), gains_of(adapter)
    assert gains.min() < 0.9
    (surface,) = (each for each in adapter.surfaces if isinstance(each, SpectralGains))
    offset, outside = surface.closed_form.offset()
    rest_gain = surface.closed_form.rest_gain()
    adapter.detach()
    outputs = model.conv1(batch).detach()
    project = ttapca.fit(model, "conv1", DATA, 40, route="exact").basis.to_components
    away = outputs.flatten(1) - source_filter().mean_
    components = away @ project
    rest = away - components @ project.T
    if outside is not None:  # found in the layer's input
        zero = torch.zeros_like(batch[:1])
        rest = rest - (model.conv1(outside.view_as(zero)) - model.conv1(zero)).detach().flatten(1)
    filtered = (
        source_filter().mean_ + rest_gain * rest + ((components - offset) * gains) @ project.T
    )
    after = model.bn1(filtered.reshape(outputs.shape))
    logits = model.fc(model.bn2(model.conv2(torch.relu(after))).flatten(1))
    assert torch.allclose(found, logits, atol=1e-8)


@pytest.mark.parametrize("route", ["folded", "exact", "randomised"])
def test_every_route_keeps_energies(route: Any, model: nn.Module) -> None:
    fitted = ttapca.fit(model, "conv1", DATA, 40, route=route)
    found = fitted.energies_
    assert found is not None
    assert found.shape == (400, 6)
    if route == "randomised":
        # Over all samples of the fit, each by the variances of the others.
        components = fitted.basis.project(model.conv1(DATA).detach().flatten(1) - fitted.mean_)
        others = torch.stack(
            [components[torch.arange(400) != one].var(0) for one in range(0, 400, 50)]
        )
        away = (components[::50] * 400 / 399).square() / others
        assert torch.allclose(found[::50, 5], away[:, 31:].mean(1).float(), rtol=1e-3)
    else:
        squares, rests = [], []
        for fold in range(8):  # each eighth by a basis that was made without it
            held_out = torch.arange(400) % 8 == fold
            without = ttapca.fit(model, "conv1", DATA[~held_out], 40, route="exact")
            away = model.conv1(DATA[held_out]).detach().flatten(1) - without.mean_
            squares.append(without.basis.project(away).square())
            # What lies outside, in the input of the layer where the filter acts on that.
            basis = ttapca.fit(model, "conv1", DATA[~held_out], 40, route=route).basis
            inputs = DATA if basis.at_input else model.conv1(DATA).detach()
            away = inputs[held_out].flatten(1) - inputs[~held_out].flatten(1).mean(0)
            outside = away - basis.add_rebuilt(torch.zeros_like(away[0]), basis.project(away))
            rests.append(outside.square().sum(1))
        every = torch.cat(squares)
        torch.testing.assert_close(fitted.variances_, every.mean(0))
        energy = every / ((every.sum(0) - every) / 399)
        assert torch.allclose(found[:, 1], energy[:, 1:3].mean(1).float(), rtol=1e-4)
        assert torch.allclose(found[:, 5], energy[:, 31:].mean(1).float(), rtol=1e-4)
        assert torch.allclose(fitted.rest_, torch.cat(rests).float(), rtol=1e-3)
    assert fitted.rest_.shape == (len(found),)
    fewer = fitted.truncated(20)
    assert fewer.energies_ is not None
    assert (fewer.rest_ > fitted.rest_).all()
    assert fewer.energies_.shape == (len(found), 5)
    adapter = adapted(model, filter=fewer)
    assert torch.isfinite(adapter(noisy(10))).all()


@pytest.mark.parametrize("route", ["folded", "exact", "dct"])
def test_with_fewer_components_more_lies_outside(route: Any, model: nn.Module) -> None:
    """On average over its samples, as much as a filter that was fitted so."""
    whole = ttapca.fit(model, "conv1", DATA, route=route)
    # All variance is inside; in the output of a layer, next to nothing is watched.
    assert whole.rest_ is None or whole.rest_.mean() < 1e-3 * whole.total_variance_
    found, direct = whole.truncated(20), ttapca.fit(model, "conv1", DATA, 20, route=route)
    if route == "folded":
        assert torch.allclose(found.basis.from_components, direct.basis.from_components)
    assert found.rest_.mean().item() == pytest.approx(direct.rest_.mean().item(), rel=0.15)


def test_how_far_classes_lie(model: nn.Module) -> None:
    """By a loop over the classes that the network predicts."""
    shares = model(DATA).detach().softmax(1)
    components = source_filter().basis.project(DATA.flatten(1) - source_filter().center_)
    mean, variance = components.mean(0), source_filter().source_variance_
    farthest, between = torch.zeros(2, 40, dtype=torch.float64)
    for k in range(5):
        weight = shares[:, k].sum()
        # One more sample, which is the mean of all, so that a rare class is not far by chance.
        own = (shares[:, k] @ (components - mean)) / (weight + 1)
        farthest = torch.maximum(farthest, own.square())
        between += weight / 400 * own.square()
    expected = farthest / (variance - between)
    assert torch.allclose(source_filter().class_reach_.double(), expected, rtol=1e-3, atol=1e-5)
    assert torch.equal(source_filter().truncated(7).class_reach_, source_filter().class_reach_[:7])
    headless = nn.Sequential(model.conv1, nn.Flatten(1), nn.Linear(288, 1).double())
    assert ttapca.fit(headless, "0", DATA, 5).class_reach_ is None


def test_new_source_data_are_not_called_shifted_where_a_basis_fits_its_own_data_too_well() -> None:
    """With few samples for its components, a basis knows its own data better than new ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 120), nn.Linear(120, 5)).double().eval()
    pool = images(1000)
    fitted = ttapca.fit(model, "1", pool[:600], 100, route="exact")
    components = fitted.basis.project(model[1](pool[600:].flatten(1)).detach() - fitted.mean_)
    energy = components.square().mean(0) / fitted.explained_variance_
    assert energy[63:].mean() > 1.15  # it would be 1 for the data of the fit
    adapter = adapted(model, filter=fitted)
    shifts = []
    for batch in pool[600:].split(50):
        adapter(batch)
        shifts.append(adapter.stream("default").shift)
    assert sum(shifts) / len(shifts) < 0.2


def test_the_weight_of_a_batch_rises_with_size_depth_and_shift(model: nn.Module) -> None:
    # A memory of next to nothing: the shift is known, earlier samples do not count.
    adapter = adapted(model, memory=1e-3)
    assert weights_of(adapter, 200) == [0.0, 0.0]  # nothing was seen yet
    adapter(noisy(200, noise=8.0))
    assert adapter.stream("default").shift > 0.5
    sizes = [weights_of(adapter, n)[-1] for n in range(1, 201)]
    assert sizes == sorted(sizes)
    assert max(b - a for a, b in pairwise(sizes)) < 0.05
    assert sizes[0] < 0.21  # of which 0.15 for an unusual image, however few there are
    assert 0 < weights_of(adapter, 200)[0] < sizes[-1] < 0.9


def test_source_images_are_normalised_as_in_the_source(model: nn.Module) -> None:
    # New ones: a basis knows the data that made it better than any others.
    new = images(800)[400:]
    adapter = adapted(model, threshold=0.999, order="shuffled")
    found = adapter(new)
    adapter.detach()
    assert torch.equal(found, model(new))


@pytest.mark.parametrize("method", ["tent", "eata"])
def test_gradients_start_from_the_closed_form(method: Any, model: nn.Module) -> None:
    given = {"filter": source_filter(), "gain": "wiener", "statistics": "mixed", "logits": "before"}
    adapter = ttapca.adapt(model, method, **given)  # type: ignore[arg-type]
    found = adapter(noisy(50))
    affine = adapter.n_parameters
    adapter.detach()
    closed = adapted(model, order="shuffled")
    assert torch.allclose(found, closed(noisy(50)))
    assert affine == 2 * (8 + 6)  # scale and shift only


def test_learning_moves_away_from_the_closed_form_and_a_pull_holds_it_back(
    model: nn.Module,
) -> None:
    batch = noisy(60)
    closed = adapted(model)
    closed(batch)
    start = gains_of(closed)
    closed.detach()
    away = []
    for pull in (0.0, 1e3):
        adapter = adapted(model, "ttapca-closed", pull=pull, steps=20, lr=0.05, forgetting="online")
        assert adapter.n_parameters == 40
        adapter(batch)
        away.append((gains_of(adapter) - start).abs().max().item())
        adapter.detach()
    assert away[0] > 0.1
    assert away[1] < 0.5 * away[0]


def test_filters_at_two_layers(model: nn.Module) -> None:
    later = ttapca.fit(model, "conv2", DATA, 20)
    with left_untouched(model, DATA[:5]):
        adapter = adapted(model, filter=[source_filter(), later])
        logits = adapter(noisy(50))
        assert torch.isfinite(logits).all()
        assert [e.layer for e in ttapca.explain(adapter)] == ["conv1", "conv2"]
        adapter.detach()
        with pytest.raises(OptionError, match="needs a fitted filter; found a str"):
            adapted(model, filter=[source_filter(), "conv2"])  # type: ignore[list-item]
        with pytest.raises(AttachError, match="has one already"):
            adapted(model, filter=[source_filter(), source_filter()])


def test_a_brighter_batch_is_brought_back(model: nn.Module) -> None:
    """A constant added to what the filter sees, and large against what source batches vary by."""
    batch = images(400, seed=1)
    moved = batch + 12 * (
        source_filter().basis.from_components[:, 0] * source_filter().explained_variance_[0].sqrt()
    ).reshape(batch.shape[1:])
    plain = model(batch)
    distances = []
    for center in (0.0, 1.0):
        adapter = adapted(model, statistics="source", center=center, shrink=0.0, restore=0.0)
        distances.append((adapter(moved) - plain).abs().mean().item())
        adapter.detach()
    assert distances[1] < 0.1 * distances[0]


def test_patches_of_a_vision_transformer() -> None:
    """The embedding of patches is affine: it folds, and is filtered like any stem."""
    # 27 pixels to 48 numbers: the input is the smaller side.
    transformer = PatchTransformer(6, 3, 48).double()
    fitted = ttapca.fit(transformer, "embed", DATA)
    assert (fitted.route, fitted.shape) == ("folded", tuple(DATA.shape[1:]))
    adapter = adapted(transformer, filter=fitted)
    assert torch.isfinite(adapter(noisy(50))).all()
    assert ttapca.explain(adapter)[0].bands[-1].gain < 0.9


def exported(adapter: ttapca.Adapter, batch: Tensor) -> Tensor:
    """What a program predicts that was exported now."""
    with torch.no_grad():
        found: Tensor = torch.export.export(adapter, (batch,)).module()(batch)
    return found


@pytest.mark.parametrize("statistics", ["source", "mixed"])
def test_an_exported_program_goes_by_a_stream_that_was_loaded(
    statistics: str, model: nn.Module, tmp_path: Path
) -> None:
    batch, given = noisy(50), {"filter": source_filter(), "statistics": statistics, "states": 1}
    with ttapca.adapt(model, "wiener", forgetting="online", **given) as adapter:
        plain = model(batch)
        adapter(noisy(200, noise=8.0))
        adapter.stream("default").save(tmp_path / "stream")
        expected = exported(adapter, batch)
        assert not torch.allclose(expected, plain)
    with ttapca.adapt(model, "wiener", forgetting="online", **given) as adapter:
        adapter.stream("default").load(tmp_path / "stream")
        torch.testing.assert_close(exported(adapter, batch), expected)


@pytest.mark.parametrize("size", [30, 90])
def test_an_exported_program_goes_by_the_latest_condition(size: int, model: nn.Module) -> None:
    """Whatever conditions the images of the last batch had, and however many these were."""
    fitted = ttapca.fit(model, "conv1", images(1200), 40)
    options = {"statistics": "source", "order": "shuffled", "outliers": False}
    noise, pale = noisy(160, noise=8.0), 0.05 * (images(160) - 0.5) + 0.5
    with adapted(model, filter=fitted, forgetting="online", **options) as adapter:
        adapter(torch.stack([noise, pale], 1).flatten(0, 1)[:230])
        adapter(torch.cat([pale[115:], noise[115:]]))
        assert adapter.health.conditions == 2
        assert adapter.hub.state is not None
        found = exported(adapter, DATA[:size])
        latest = adapter.hub.state.latest
        with torch.no_grad():
            torch.testing.assert_close(found, model(DATA[:size]))
        adapter(torch.cat([noise[:45], pale[:45]]))
        found = exported(adapter, DATA[:size])
        assert adapter.hub.state.latest != latest
        with torch.no_grad():
            torch.testing.assert_close(found, model(DATA[:size]))


def test_an_explanation(model: nn.Module) -> None:
    adapter = adapted(model, "two-sided")
    with pytest.raises(OptionError, match="before the first batch"):
        ttapca.explain(adapter)
    adapter(noisy(200, noise=8.0))
    (found,) = ttapca.explain(adapter)
    assert [(b.first, b.last) for b in found.bands][:3] == [(1, 1), (2, 3), (4, 7)]
    assert found.bands[-1].last == 40
    assert found.images == 200
    assert found.p_value < 0.01
    assert found.shift > 0.5
    assert all(band.test_variance > band.source_variance for band in found.bands[2:])
    text = str(found)
    assert "noise was added; scaled down to" in text
    assert len(text.splitlines()) == 2 + len(found.bands)
    adapter(0.05 * (images(200) - DATA.mean(0)) + DATA.mean(0))
    assert "detail or contrast is lost; scaled up to" in str(ttapca.explain(adapter)[0])
    adapter.detach()
    with pytest.raises(OptionError, match="this adapter has none"):
        ttapca.explain(ttapca.adapt(small_convnet(), "bn"))


def given_back_after(samples: int, stream: Stream) -> float:
    """What share of a lost scale normalisation layers restore after so many samples."""
    assert stream.given_back is not None
    return float(stream.given_back.by(torch.tensor([float(samples)])))


@pytest.mark.parametrize(
    "method", ["tent", "shot", "slr+it", "eata", "roid", "sar", "cotta", "ttt"]
)
def test_every_method_over_a_closed_form_is_linked_to_it(method: str) -> None:
    """Statistics follow the filter's stream, and the filter knows what they give back."""
    given = {"filter": source_filter(), "gain": "wiener", "statistics": "mixed"}
    model = small_convnet()
    with ttapca.adapt(model, method, **options_for(method, model, **given)) as adapter:
        statistics, gains = (
            next(surface for surface in adapter.surfaces if isinstance(surface, kind))
            for kind in (StreamStatistics, SpectralGains)
        )
        stream = gains.closed_form.stream
        assert statistics.stream is stream is adapter.hub
        assert (stream.memory, given_back_after(16, stream)) == (200.0, 0.25)
        assert torch.isfinite(adapter(noisy(40))).all()
        assert 0 < weights_of(adapter, 1000)[-1] < 0.9


def test_memo_over_a_closed_form_says_what_its_statistics_give_back() -> None:
    given = {"filter": source_filter(), "gain": "wiener", "statistics": 1 / 17, "views": 3}
    with ttapca.adapt(small_convnet(), "memo", **given) as adapter:
        assert given_back_after(1, adapter.hub) == pytest.approx(1 / 17)
