"""Predictions in order of arrival: passes, statistics by plan, and what a stream keeps."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import same
from known_shifts import followed
from oracles import images, small_convnet
from scripted_classes import (
    CLASSES,
    error,
    fitted,
    labels_in_runs,
    network,
    pictures,
    shuffled_labels,
)
from small_networks import pixelwise
from ttapca.adaptation.chain_passes import ChainPasses, Order, RunCounts
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.errors import LayerOutputError, OptionError
from ttapca.spectral.chain import ChainState, ClassChain
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.source_classes import (
    ClassPlan,
    PairStatistic,
    SourceClasses,
    corrections,
)
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_batch import ImageRows
from ttapca.spectral.stream_state import LayerMoments, leaves

DATA = images(400)
SHUFFLED = shuffled_labels(240, 7)
IN_RUNS = labels_in_runs(240, 20)


def degraded(pixels: Tensor) -> Tensor:
    """Brighter, with more contrast and noise."""
    noise = torch.randn(
        pixels.shape, generator=torch.Generator().manual_seed(3), dtype=pixels.dtype
    )
    return 1.6 * pixels + 0.7 + noise


def wiener(order: Order | None = "auto", **options: Any) -> ttapca.Adapter:
    options = {"filter": fitted(), "forgetting": "online", **options}
    return ttapca.adapt(network(), "wiener", order=order, **options)


def predicted(adapter: ttapca.Adapter, pixels: Tensor, size: int) -> Tensor:
    return torch.cat([adapter(batch) for batch in pixels.split(size)])


def stream_of(adapter: ttapca.Adapter) -> Stream:
    """The stream that the filter of an adapter goes by."""
    (surface,) = (each for each in adapter.surfaces if isinstance(each, SpectralGains))
    return surface.closed_form.stream


def chain_of(stream: Stream) -> ChainState:
    return stream.state.chain


# How many passes.

FEW = torch.tensor([[4.0, 0.0, 0.0, 0.0, 0.0]]).expand(80, 5)  # all of one class, and quite sure
MANY = 4.0 * torch.eye(5)[torch.tensor([0, 3, 1, 4, 2] * 16)]  # all classes
OTHER = FEW.roll(2, 1)
EVEN = ttapca.fit(small_convnet(), "conv1", DATA, 40).classes_
assert EVEN is not None
EVEN = dataclasses.replace(EVEN, shares=torch.full((5,), 0.2))


def sizes_of_passes(
    batches: list[list[Tensor]], *, shift: float = 1.0, statistics: bool = True
) -> tuple[list[int], Stream]:
    """How many passes each batch takes, if passes find these logits; the last ones stay."""
    model = small_convnet()
    known = EVEN if statistics else None
    surface, stream = followed(model, shift=shift, prior=16.0, classes=known)
    predictor = ChainPasses(EVEN, surface if statistics else None)
    predictor.join(stream)
    found = []
    for looks in batches:
        left, passes = [*looks], 0

        def run(pixels: Tensor, mask: Tensor, left: list[Tensor] = left) -> Tensor:
            nonlocal passes
            assert len(pixels) == len(mask)
            assert stream.batch is not None
            assert stream.batch.plan is not None
            model(pixels)
            passes += 1
            return left.pop(0) if len(left) > 1 else left[0]

        stream.start_batch(80)
        predictor.predict(run, DATA[:80], mask=torch.ones(80))
        stream.end_batch()
        assert stream.batch is None
        found.append(passes)
    return found, stream


@pytest.mark.parametrize(
    ("batches", "passes"),
    [
        pytest.param([[MANY]], [1], id="shuffled"),
        pytest.param([[FEW]], [2], id="one class, which is a surprise"),
        pytest.param([[FEW], [FEW], [FEW]], [2, 1, 1], id="one class, which is no surprise later"),
        pytest.param([[FEW], [OTHER]], [2, 2], id="another class"),
        pytest.param([[FEW, OTHER, FEW, OTHER]], [3], id="never the same"),
        pytest.param([[MANY], [MANY], [FEW]], [1, 1, 2], id="an order that begins"),
    ],
)
def test_a_pass_is_repeated_if_classes_are_a_surprise(
    batches: list[list[Tensor]], passes: list[int]
) -> None:
    assert sizes_of_passes(batches)[0] == passes
    assert max(passes) <= CONSTANTS.passes == 3


@pytest.mark.parametrize("options", [{"shift": 0.0}, {"statistics": False}], ids=str)
def test_one_pass_is_enough_if_the_next_would_be_the_same(options: dict[str, Any]) -> None:
    """Statistics that have no weight, or none at all."""
    assert sizes_of_passes([[FEW], [OTHER], [MANY]], **options)[0] == [1, 1, 1]


def test_first_images_are_taken_for_one_class_until_a_second_pass_denies_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any two look alike, by 2 nats; that counts from the second pass on, or the next batch."""
    told: list[float] = []

    def read(*given: Any) -> Any:
        told.append(float(np.asarray(given[-1]).ravel()[0]))
        return plain(*given)

    plain = ClassChain.read
    with wiener() as adapter:
        monkeypatch.setattr(PairStatistic, "said_by_any", lambda *_: np.full(1, 2.0))
        monkeypatch.setattr(ClassChain, "read", read)
        pixels = pictures(IN_RUNS, 8)
        adapter(pixels[:40])
        assert len(told) > 1
        assert told[0] == 0
        assert set(told[1:]) == {2.0}
        told.clear()
        adapter(pixels[40:80])
        assert told[0] == pytest.approx(2 * (1 - np.exp(-40 / CONSTANTS.block)))
        told.clear()
        adapter(pixels[:1])  # is never passed again
        assert told == [2.0]


def test_the_class_of_the_last_pass_is_kept() -> None:
    _, stream = sizes_of_passes([[MANY, FEW]])
    _, expected = sizes_of_passes([[MANY]])
    found, wanted = (leaves(chain_of(each)) for each in (stream, expected))
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)  # one was enough
    _, changed = sizes_of_passes([[FEW, OTHER]])
    joint = chain_of(changed).joint[0].sum(0)
    assert int(joint.argmax()) == int(OTHER[0].argmax())
    assert float(joint.max()) > 0.8


def test_a_pass_that_fails_leaves_no_batch() -> None:
    adapter = wiener()
    adapter(pictures(SHUFFLED[:20], 1))
    before = adapter.state_dict()
    with pytest.raises(ttapca.errors.ShapeError):
        adapter(torch.ones(4, 8, 3, 3).double())
    assert stream_of(adapter).batch is None
    assert same(before["_extra_state"], adapter.state_dict()["_extra_state"])


# What comes out.


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("order", [None, "auto"])
def test_clean_shuffled_data_are_predicted_as_by_the_network(size: int, order: Any) -> None:
    pixels = pictures(SHUFFLED, 8)
    with torch.no_grad():
        expected = network()(pixels)
    adapter = wiener(order)
    found = predicted(adapter, pixels, size)
    assert (found.argmax(1) == expected.argmax(1)).double().mean() > 0.98
    assert error(found, SHUFFLED) <= error(expected, SHUFFLED) + 1  # two of 240 images
    away = (found.softmax(1) - expected.softmax(1)).abs().sum(1) / 2
    assert float(away.mean()) < 0.04
    health = adapter.health
    assert health.ordered < 0.05
    assert "classes in no order" in repr(health)


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("labels", [SHUFFLED, IN_RUNS], ids=["shuffled", "in runs"])
def test_logits_stay_bit_for_bit_where_a_stream_rather_has_no_order(
    size: int, labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of a first image alone, of which nobody knows what comes next."""
    given: dict[str, Any] = {"statistics": ttapca.Mixture(first=0.0, last=0.0, alone=0.0)}
    given |= {"shrink": 0.0, "restore": 0.0, "center": 0.0, "outliers": False}
    read, sure = ClassChain.read, []

    def remember(*args: Any, **options: Any) -> Any:
        state, reading = read(*args, **options)
        sure.extend((reading.plain[0] >= 0.5).tolist())
        return state, reading

    monkeypatch.setattr(ClassChain, "read", remember)
    kept, adapter, model = [], wiener(**given), network()
    for batch in pictures(labels, 8).split(size):
        with torch.no_grad():
            expected = model(batch)
        kept += (adapter(batch) == expected).all(1).tolist()
    assert len(sure) == len(kept)  # one pass is enough: no statistics have weight
    assert kept[0] or size > 1
    assert kept[1:] == sure[1:]
    assert sum(sure) > 0.9 * len(sure) if labels is SHUFFLED else sum(sure) < 0.1 * len(sure)


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("change", [torch.Tensor.clone, degraded], ids=["clean", "degraded"])
def test_an_order_is_used(size: int, change: Callable[[Tensor], Tensor]) -> None:
    """Sorted images are predicted better than by an adapter that does not know of it."""
    pixels = change(pictures(IN_RUNS, 8))
    adapter = wiener()
    found = error(predicted(adapter, pixels, size), IN_RUNS)
    left_aside = error(predicted(wiener("shuffled"), pixels, size), IN_RUNS)
    assert found < 0.7 * left_aside
    health = adapter.health
    assert health.ordered > 0.7
    assert 8 < health.run_length < 80
    assert sum(health.composition) == pytest.approx(1.0)
    assert health.skew is None
    assert "one class for about" in repr(health)


def test_images_of_one_class_count_for_fewer() -> None:
    """So that the statistics of a stream in runs have less weight."""

    def weight(labels: Tensor) -> float:
        adapter = wiener(outliers=False)
        predicted(adapter, degraded(pictures(labels, 8)), 1)
        return adapter.health.batch_weight

    assert 0 < weight(labels_in_runs(240, 20)) < 0.75 * weight(SHUFFLED)


def test_a_run_that_never_ends_does_not_come_to_count_for_nothing() -> None:
    """Of images that fade, as many as are remembered count as cluster sampling says."""
    adapter = wiener(outliers=False, memory=50.0)
    predicted(adapter, pictures(torch.zeros(600, dtype=torch.long), 8), 20)
    state = stream_of(adapter).state
    (spectrum,) = state.spectra
    samples = float(spectrum.samples)
    assert samples == pytest.approx(sum(20 * math.exp(-20 * age / 50) for age in range(30)))
    worth = samples / (1 + (samples - 1) * CONSTANTS.likeness)
    assert float(spectrum.independent) > 0.5 * worth


@pytest.mark.parametrize("looks", [False, True], ids=["without pairs", "with pairs"])
def test_outputs_are_those_of_the_chain(looks: bool) -> None:
    """Of the logits of the network, if nothing else changes them.

    Statistics of the source are no surface, so that late layers are not looked at, and pairs say
    nothing. Otherwise every image is compared with the one before it, also that of the last batch.
    """
    none = ttapca.Mixture(first=0.0, last=0.0, alone=0.0)
    given: dict[str, Any] = {"statistics": none if looks else "source", "outliers": False}
    adapter = wiener(**given, shrink=0.0, restore=0.0, center=0.0)
    classes, pixels = fitted().classes_, pictures(IN_RUNS, 8)[:60]
    (late,) = classes.pairs.layers
    model, seen = network(), []
    model.get_submodule(late).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].mean((2, 3)))
    )
    chain = ClassChain(classes.shares.double().numpy())
    state = chain.start(features=classes.pairs.features if looks else 0)
    for batch in pixels.split(20):
        with torch.no_grad():
            plain = model(batch).softmax(1).numpy()
        rows = log_pairs = None
        if looks:
            features = classes.pairs.described({late: seen[-1]})
            rows = features.numpy()[None]
            log_pairs = classes.pairs.log_ratio(state.features, rows)
            log_pairs[:, 0] *= float(state.place[0] > 0)
        state, reading = chain.read(state, plain[None], log_pairs, features=rows)
        # If the stream rather has no order, they stay.
        expected = np.where(reading.plain[0][:, None] < 0.5, reading.outputs[0], plain)
        np.testing.assert_allclose(adapter(batch).softmax(1).numpy(), expected, atol=1e-6)


def test_shuffled_is_as_a_filter_that_knows_no_classes() -> None:
    unknown = dataclasses.replace(fitted(), classes_=None)
    # A single image has more weight if there are few classes.
    statistics = ttapca.Mixture(alone=0.0)
    pixels = degraded(pictures(IN_RUNS, 8))
    one, two = (
        wiener("shuffled", statistics=statistics),
        wiener(None, filter=unknown, statistics=statistics),
    )
    for batch in pixels.split(30):
        assert torch.equal(one(batch), two(batch))
    assert (one.health.ordered, one.health.run_length, one.health.composition) == (None,) * 3
    assert type(one.predictor) is type(two.predictor) is ttapca.adaptation.optimisation.Predictor


def test_video_has_an_order_from_its_first_image_on() -> None:
    pixels = pictures(IN_RUNS, 8)
    video, auto = wiener("video"), wiener("auto")
    for adapter in (video, auto):
        predicted(adapter, pixels[:8], 1)
    assert video.health.ordered > 0.999 > auto.health.ordered
    found = error(predicted(video, pixels[8:], 1), IN_RUNS[8:])
    assert found < 0.6 * error(predicted(wiener("shuffled"), pixels[8:], 1), IN_RUNS[8:])


def test_predictions_of_pixels_have_an_order_of_their_own() -> None:
    """Their classes are taken out of statistics; outputs are those of the network."""
    model = pixelwise(5)
    dense = ttapca.fit(model, "conv1", DATA, 40)
    assert dense.classes_ is not None
    given: dict[str, Any] = {"filter": dense, "forgetting": "online"}
    with ttapca.adapt(model, "wiener", order="auto", **given) as adapter:
        found = [adapter(3 * batch) for batch in DATA[:90].split(30)]
        assert adapter.health.ordered is None
    assert all(each.shape == (30, 5, 6, 6) for each in found)
    assert all(bool(torch.isfinite(each).all()) for each in found)
    # What lies outside a basis is less in its own data than in new ones, which are expected.
    given |= {"filter": dataclasses.replace(dense, rest_=None), "threshold": 0.999}
    expected = model(DATA[:30])
    with ttapca.adapt(model, "wiener", order="auto", **given) as adapter:
        assert torch.equal(adapter(DATA[:30]), expected)


# What a stream keeps.


def broken(pixels: Tensor) -> Tensor:
    found = pixels.clone()
    found[3] = math.nan
    return found


def test_a_broken_batch_leaves_no_mark() -> None:
    batches = pictures(IN_RUNS, 8).split(20)
    one, two = wiener(), wiener()
    for batch in batches[:6]:
        assert torch.equal(one(batch), two(batch))
        one(broken(batch))
        # Nor does a look at it change anything.
        assert dataclasses.replace(one.health, skipped=0) == two.health
    assert one.skipped == 6


def test_a_restored_stream_goes_on_bit_for_bit(tmp_path: Path) -> None:
    batches = degraded(pictures(IN_RUNS, 8)).split(30)
    adapter = wiener()
    for batch in batches[:4]:
        adapter(batch)
    adapter.stream("default").save(tmp_path / "stream")
    state, twin, restored, loaded = adapter.state_dict(), copy.deepcopy(adapter), wiener(), wiener()
    restored.load_state_dict(state)
    loaded.stream("default").load(tmp_path / "stream")
    expected = [adapter(batch) for batch in batches[4:]]
    for other in (restored, loaded, twin):
        for batch, wanted in zip(batches[4:], expected, strict=True):
            assert torch.equal(other(batch), wanted)
        assert other.health == adapter.health
    cold = wiener()
    assert not torch.equal(cold(batches[4]), expected[0])


def test_streams_have_chains_of_their_own() -> None:
    adapter, alone = wiener(), wiener()
    shuffled, in_runs = (pictures(labels, 8) for labels in (SHUFFLED, IN_RUNS))
    left, right = adapter.stream("left"), adapter.stream("right")
    for one, other in zip(in_runs.split(40), shuffled.split(40), strict=True):
        assert torch.equal(left(one), alone(one))
        right(other)
    assert left.health.ordered > 0.8
    assert right.health.ordered < 0.05
    assert adapter.stream("new").health.ordered is None
    left.reset()
    assert (left.health.ordered, left.health.composition) == (None, None)


def sizes_seen(adapter: ttapca.Adapter) -> list[int]:
    """How many images come to the model of an adapter, with each pass from now on."""
    sizes: list[int] = []
    adapter.model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    return sizes


def test_streams_share_a_pass_and_only_those_that_are_surprised_are_passed_again() -> None:
    """Each as if it came alone, with the same number of passes."""
    together, alone = wiener(), wiener()
    shared, single = sizes_seen(together), sizes_seen(alone)
    counts = torch.tensor([30, 40, 80, 1])
    labels = [SHUFFLED, *(labels_in_runs(400, length) for length in (80, 240, 20))]
    pixels = [2 * pictures(each, 8) for each in labels]
    states = [together.new_state()] * len(labels)
    all_of_them = torch.ones(int(counts.sum()), dtype=torch.bool)
    rows = ImageRows(torch.arange(4).repeat_interleave(counts), all_of_them, all_of_them)
    all_sizes = []
    for number in range(5):
        batches = [
            each[number * size : (number + 1) * size]
            for each, size in zip(pixels, counts.tolist(), strict=True)
        ]
        logits, outcomes = together.predict_streams(states, torch.cat(batches), rows)
        states = [each.state for each in outcomes]
        passes = []
        for name, batch, found in zip("abcd", batches, logits.split(counts.tolist()), strict=True):
            torch.testing.assert_close(found, alone.stream(name)(batch), rtol=1e-3, atol=1e-4)
            passes.append([*single])
            single.clear()
        assert shared == [sum(sizes) for sizes in zip_longest(*passes, fillvalue=0)]
        all_sizes.append([*shared])
        shared.clear()
    # Images of one class are a surprise at first, and so is the class that follows it.
    assert all_sizes[0] == [151, 120, 120]
    assert any(len(each) > 1 for each in all_sizes[1:4])
    assert all_sizes[4] == [151]
    for name, state in zip("abcd", states, strict=True):
        found, wanted = together.facts_of(state), alone.stream(name).health
        for fact in ("ordered", "run_length", "shift", "p_value", "batch_weight"):
            assert found[fact] == pytest.approx(getattr(wanted, fact), rel=1e-4, abs=1e-6), fact


def test_episodic_adaptation_forgets_the_order() -> None:
    pixels = pictures(IN_RUNS, 8)
    adapter = wiener(forgetting="episodic")
    first = adapter(pixels[:40])
    adapter(pixels[40:80])
    assert torch.equal(adapter(pixels[:40]), first)


def settled(stream: Stream) -> LayerMoments:
    return stream.state.layers


def test_what_an_interrupted_batch_has_shown_is_not_settled() -> None:
    model = small_convnet()
    surface, stream = followed(model, classes=EVEN)
    plan = ClassPlan.of_shares(surface.classes, torch.full((20, 5), 0.2), [torch.arange(20)])
    before = settled(stream)
    stream.start_batch(20)
    stream.batch.plan = plan
    model(DATA[:20] + 1.0)
    stream.start_batch(20)  # nobody has ended the one before
    assert stream.batch.plan is None
    stream.end_batch()
    assert settled(stream) is before


def test_a_batch_is_settled_with_the_classes_that_were_found() -> None:
    """In the stream, whatever the pass went by, are its moments without these classes."""
    found, pixels = [], DATA[:20].repeat(1, 3, 1, 1)[:, :8]
    for first in (0, 3):
        model = small_convnet()
        surface, stream = followed(model, classes=EVEN)
        stream.start_batch(20)
        for known in (first, 2):
            shares = torch.eye(5)[known].expand(20, 5)
            plan = ClassPlan.of_shares(surface.classes, shares, [torch.arange(20)])
            stream.batch.plan = plan
            if known == first:
                model.bn1(pixels)
        stream.end_batch()
        found.append(settled(stream))
        assert surface.layers[0].channels == slice(0, 8)
    for name, value in found[0].tensors().items():
        assert torch.equal(getattr(found[1], name), value)
    place = (torch.eye(5)[2:3] - EVEN.shares) @ EVEN.loadings
    less, scale = (each[0].double() for each in corrections(EVEN.layers["bn1"], place))
    mean = pixels.mean((0, 2, 3)) - less - model.bn1.running_mean
    second = scale * pixels.var((0, 2, 3), correction=0) + mean.square()
    first_moment, second_moment = found[0].moments[0, :, :8]
    torch.testing.assert_close(first_moment, mean)
    torch.testing.assert_close(second_moment, second)
    assert found[0].samples.tolist() == found[0].independent.tolist() == [[20.0, 0.0]]


@pytest.mark.parametrize("labels", [SHUFFLED, IN_RUNS, torch.zeros(240, dtype=torch.long)])
def test_the_spectrum_counts_the_images_that_were_found(
    labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last plan, whatever the passes went by."""
    adapter, plans, make = wiener(memory=100.0), [], ClassPlan.of_reading

    def remember(*given: Any) -> ClassPlan:
        plans.append(make(*given))
        return plans[-1]

    monkeypatch.setattr(ClassPlan, "of_reading", remember)
    expected = 0.0
    for batch in pictures(labels, 8).split(40):
        adapter(batch)
        expected = expected * math.exp(-40 / 100) + float(plans[-1].counts[:, -1].sum())
        state = stream_of(adapter).state
        assert state.spectra[0].independent.tolist() == pytest.approx([expected])


# Whether it is looked at.


def test_by_default_an_order_is_looked_at_if_statistics_are_mixed_and_pairs_can_be_told() -> None:
    def looks(order: Order | None = None, **options: Any) -> bool:
        predictor = wiener(order, **options).predictor
        return isinstance(predictor, ChainPasses) and not isinstance(predictor, RunCounts)

    known = fitted().classes_
    no_pairs = dataclasses.replace(fitted(), classes_=dataclasses.replace(known, pairs=None))
    assert looks()
    assert looks(statistics="mixed")
    assert looks(statistics=ttapca.Mixture(alone=0.0))
    for statistics in ("source", "batch"):
        assert not looks(statistics=statistics)
        assert looks("auto", statistics=statistics)
    assert not looks(filter=no_pairs)
    assert isinstance(wiener(None, filter=no_pairs).predictor, ChainPasses)  # for counts only
    assert not isinstance(wiener("shuffled", filter=no_pairs).predictor, ChainPasses)
    assert looks("auto", filter=no_pairs)
    assert looks("video", filter=no_pairs)
    assert not looks(filter=dataclasses.replace(fitted(), classes_=None))


# Mistakes.


def test_mistakes() -> None:
    unknown = dataclasses.replace(fitted(), classes_=None)
    for order in ("auto", "video"):
        with pytest.raises(OptionError, match=f'`order="{order}"` needs a filter that knows'):
            wiener(order, filter=unknown)
        with pytest.raises(OptionError, match="`order` would have no effect: gradient"):
            ttapca.adapt(network(), "ttapca-closed", filter=fitted(), order=order)
    ttapca.adapt(network(), "ttapca-closed", filter=fitted(), order="shuffled")
    with pytest.raises(OptionError, match="`order` must be"):
        wiener("sorted")  # type: ignore[arg-type]


def fewer_classes() -> ttapca.FittedFilter:
    known = fitted().classes_
    shares = known.shares[:3] / known.shares[:3].sum()
    fewer = SourceClasses(shares, known.loadings[:3], known.layers, known.likeness, known.pairs)
    return dataclasses.replace(fitted(), classes_=fewer)


@pytest.mark.parametrize("order", ["auto", "video"])
def test_other_classes_are_an_error_if_an_order_was_asked_for(order: Order) -> None:
    pixels, other = pictures(SHUFFLED[:8], 8), fewer_classes()
    with (
        wiener(order, filter=other) as adapter,
        pytest.raises(LayerOutputError, match=r"predicts 3 classes.*found \(8, 5\)"),
    ):
        adapter(pixels)
    with wiener(None, filter=other) as adapter:  # nobody insists on it
        assert adapter(pixels).shape == (8, CLASSES)
        assert adapter.health.ordered is None


def test_other_outputs_than_logits_are_left_as_they_are() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).sum(1)

    model = Vector()
    by_path = ttapca.fit(Vector().inner, "conv1", pictures(SHUFFLED, 2), 40)
    moved = dataclasses.replace(by_path, layer="inner.conv1")
    with ttapca.adapt(model, "wiener", filter=moved, outputs="regression") as adapter:
        assert adapter(pictures(SHUFFLED[:6], 3)).shape == (6,)
        assert adapter.health.ordered is None
