"""`StreamBatch`: streams and conditions that share a batch are served as each would be alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from ttapca.errors import LayerOutputError
from ttapca.spectral.chain import ChainState, ClassChain
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.conditions import ConditionStates, KnownConditions, Numbers
from ttapca.spectral.filter import SpectralFilter
from ttapca.spectral.source_classes import ClassPlan
from ttapca.spectral.stream_batch import ImageRows, StreamBatch, sums_by_group
from ttapca.spectral.stream_state import AlarmState, LayerMoments, Spectrum, StreamState, leaves

SIZE = (3, 8, 8)
STREAMS = 3


def pictures(count: int, seed: int) -> Tensor:
    """Smooth random pictures: neighbouring pixels resemble each other."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.randn(count, *SIZE, generator=generator, dtype=torch.float64)
    return nn.functional.avg_pool2d(rough, 3, stride=1, padding=1)


def noise(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *SIZE, generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def fitted() -> ttapca.FittedFilter:
    """A filter that knows enough images to tell conditions apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(216, 5)).double()
    return ttapca.fit(network.eval(), "0", pictures(900, seed=1))


def gain_of(layer: SpectralFilter) -> ClosedFormGain:
    assert isinstance(layer.gain, ClosedFormGain)
    return layer.gain


def filter_of(fitted: ttapca.FittedFilter, **options: object) -> SpectralFilter:
    return fitted.spectral_filter("wiener", dtype=torch.float64, **options)


def start_of(layer: SpectralFilter) -> StreamState:
    """The state of a stream that has shown nothing."""
    start = gain_of(layer).stream.start
    assert start is not None
    return start


class Alone:
    """A filter that serves one stream, batch by batch."""

    def __init__(self, fitted: ttapca.FittedFilter, **options: object) -> None:
        self.layer = filter_of(fitted, **options)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        stream = gain_of(self.layer).stream
        stream.start_batch(len(images))
        found = self.layer(images)
        stream.end_batch()
        return found

    @property
    def state(self) -> StreamState:
        state = gain_of(self.layer).stream.state
        assert state is not None
        return state


class Together:
    """A filter that serves several streams, which share its batches."""

    def __init__(self, fitted: ttapca.FittedFilter, streams: int, **options: object) -> None:
        self.layer = filter_of(fitted, **options)
        self.states = [start_of(self.layer)] * streams

    @torch.no_grad()
    def __call__(self, images: Tensor, rows: ImageRows) -> Tensor:
        stream = gain_of(self.layer).stream
        batch = StreamBatch(
            self.states, start_of(self.layer), memory=stream.memory, size=len(images), rows=rows
        )
        stream.batch = batch
        try:
            found = self.layer(images)
        finally:
            stream.batch = None
        self.states = batch.finish()
        return found


def rows_of(
    streams: Tensor, counted: Tensor | None = None, filtered: Tensor | None = None
) -> ImageRows:
    every = torch.ones(len(streams), dtype=torch.bool)
    return ImageRows(
        streams, every if counted is None else counted, every if filtered is None else filtered
    )


def assert_same_state(found: StreamState, expected: StreamState, tolerance: float = 0.0) -> None:
    """Every tensor, array and number is the same, or nearly."""
    one, other = leaves(found), leaves(expected)
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=tolerance, atol=tolerance, err_msg=name)


def copied(state: StreamState) -> dict[str, object]:
    return {
        name: value.clone() if isinstance(value, Tensor) else np.copy(value)
        for name, value in leaves(state).items()
    }


# Streams that share a batch, beside each alone.


def images_of(stream: int, number: int) -> Tensor:
    """One, two or three images of a stream: with noise, blurred and brighter, or as the source."""
    images = pictures(1 + (number + stream) % 3, seed=100 * number + stream)
    if stream == 0:
        images = images + 0.5 * pictures(len(images), seed=7 * number + 3)
    if stream == 1:
        images = 0.4 * images + 0.3
    return images


@pytest.mark.parametrize("components", [None, 120], ids=["all", "truncated"])
@pytest.mark.parametrize("center", [1.0, 0.0])
def test_each_stream_is_served_as_if_it_were_alone(
    fitted: ttapca.FittedFilter, components: int | None, center: float
) -> None:
    chosen = fitted if components is None else fitted.truncated(components)
    assert chosen.rest_ is not None
    nothing = bool(chosen.rest_.min() == chosen.rest_.median())  # that would count
    assert nothing == (components is None)
    alone = [Alone(chosen, center=center) for _ in range(STREAMS)]
    together, changed = Together(chosen, STREAMS, center=center), [False] * STREAMS
    for number in range(12):
        parts = [images_of(stream, number) for stream in range(STREAMS)]
        streams = torch.arange(STREAMS).repeat_interleave(torch.tensor([*map(len, parts)]))
        # Those of one stream need not come one after the other.
        order = torch.randperm(len(streams), generator=torch.Generator().manual_seed(number))
        images, streams = torch.cat(parts)[order], streams[order]
        found = together(images, rows_of(streams))
        for stream in range(STREAMS):
            own = streams == stream
            expected = alone[stream](images[own])
            torch.testing.assert_close(found[own], expected, rtol=0, atol=1e-9)
            assert_same_state(together.states[stream], alone[stream].state, 1e-9)
            changed[stream] |= not torch.equal(expected, images[own])
    assert changed[:2] == [True, True]


def with_conditions(stream: int, number: int) -> Tensor:
    """Images of which some have noise, or are pale, in an order of their own; at first, none."""
    count = (70, 40, 7, 1, 25)[number % 5]
    clean, seed = pictures(count, seed=1000 + 50 * number + stream), 90 * number + stream
    generator = torch.Generator().manual_seed(seed)
    column = torch.randint(1 + stream * (number > 0), (count, 1, 1, 1), generator=generator)
    noisy = clean + 3 * noise(count, seed)
    return torch.where(column == 1, noisy, torch.where(column == 2, 0.05 * clean, clean))


def test_each_condition_of_each_stream_is_served_as_if_it_were_alone(
    fitted: ttapca.FittedFilter,
) -> None:
    alone = [Alone(fitted, states=3) for _ in range(STREAMS)]
    together = Together(fitted, STREAMS, states=3)
    for number in range(8):
        parts = [with_conditions(stream, number) for stream in range(STREAMS)]
        streams = torch.arange(STREAMS).repeat_interleave(torch.tensor([*map(len, parts)]))
        found = together(torch.cat(parts), rows_of(streams))
        for stream, part in enumerate(parts):
            expected = alone[stream](part)
            torch.testing.assert_close(found[streams == stream], expected, rtol=0, atol=1e-9)
            assert_same_state(together.states[stream], alone[stream].state, 1e-9)
    found_apart = [state.known_conditions for state in together.states]
    assert [number > 1 for number in found_apart] == [False, True, True]
    assert [len(state.spectra[0]) for state in together.states] == found_apart


def test_each_condition_is_served_as_a_stream_of_its_own_would_be(
    fitted: ttapca.FittedFilter,
) -> None:
    """One stream with two conditions, beside two streams with one each."""
    mixed, apart = Alone(fitted, states=4), [Alone(fitted), Alone(fitted)]
    conditions = []
    for number, count in enumerate((80, 64, 5, 40)):
        clean, which = pictures(count, seed=300 + number), torch.arange(count) % 2
        images = torch.where(
            which.view(-1, 1, 1, 1) == 0, 0.05 * clean, clean + 3 * noise(count, number)
        )
        found = mixed(images)
        for condition in range(2):
            own = which == condition
            expected = apart[condition](images[own])
            torch.testing.assert_close(found[own], expected, rtol=0, atol=1e-9)
        conditions.append(mixed.state.known_conditions)
    assert conditions == [2, 2, 2, 2]
    [spectrum] = mixed.state.spectra
    for each in apart:
        [expected] = each.state.spectra
        rows = [spectrum.row(number) for number in range(2)]
        # Which of both came first is of no account.
        [own] = [
            row
            for row in rows
            if torch.equal(row.samples, expected.samples)
            and torch.allclose(row.energies, expected.energies)
        ]
        for name, value in own.tensors().items():
            torch.testing.assert_close(value, getattr(expected, name))


def test_later_filters_go_by_the_conditions_that_the_first_one_found(
    fitted: ttapca.FittedFilter,
) -> None:
    """Two filters, one after the other, beside the same for images of one condition only."""

    def two_filters(states: int) -> tuple[SpectralFilter, SpectralFilter]:
        first, second = filter_of(fitted, states=states), filter_of(fitted.truncated(100))
        gain_of(second).join(gain_of(first).stream)
        assert [gain_of(each).number for each in (first, second)] == [0, 1]
        return first, second

    def passed(layers: tuple[SpectralFilter, SpectralFilter], images: Tensor) -> Tensor:
        stream = gain_of(layers[0]).stream
        stream.start_batch(len(images))
        with torch.no_grad():
            found = layers[1](layers[0](images) - 0.2)
        stream.end_batch()
        return found

    mixed, apart = two_filters(states=4), [two_filters(states=1) for _ in range(2)]
    for number, count in enumerate((80, 64, 5)):
        clean, which = pictures(count, seed=400 + number), torch.arange(count) % 2
        noisy = clean + 3 * noise(count, number)
        images = torch.where(which.view(-1, 1, 1, 1) == 0, 0.05 * clean, noisy)
        found = passed(mixed, images)
        for condition in range(2):
            own = which == condition
            torch.testing.assert_close(
                found[own], passed(apart[condition], images[own]), rtol=0, atol=1e-9
            )
    state = gain_of(mixed[0]).stream.state
    assert state is not None
    assert [len(table) for table in state.spectra] == [2, 2]


@pytest.mark.parametrize("states", [1, 4])
def test_who_is_not_filtered_passes_bit_for_bit_and_who_is_not_counted_leaves_no_mark(
    fitted: ttapca.FittedFilter, states: int
) -> None:
    images, streams = 3 * pictures(40, seed=5), torch.arange(40) % 2
    filtered, together = torch.arange(40) < 20, Together(fitted, 2, states=states)
    start = together.states
    before = [copied(state) for state in start]
    found = together(images, rows_of(streams, filtered=filtered))
    assert torch.equal(found[20:], images[20:])
    assert not bool((found[:20] == images[:20]).flatten(1).all(1).any())
    seen = [state.spectra[0] for state in together.states]
    assert [float(each.samples) for each in seen] == [20.0, 20.0]
    # What was given stays.
    for state, was in zip(start, before, strict=True):
        for name, value in leaves(state).items():
            np.testing.assert_array_equal(value, was[name], err_msg=name)
    together.states = list(start)
    again = together(images, rows_of(streams, streams == 1, filtered))
    assert_same_state(together.states[0], start[0])
    assert torch.equal(again[streams == 0], images[streams == 0])  # nothing is known of it
    assert torch.equal(again[streams == 1], found[streams == 1])
    assert float(together.states[1].spectra[0].samples) == 20.0


def test_a_copy_that_is_not_counted_shows_what_the_images_are_without_a_filter(
    fitted: ttapca.FittedFilter,
) -> None:
    """As in shadow: each image goes through twice, and the stream is as if it went once."""
    together, alone = Together(fitted, 2, states=4), [Alone(fitted, states=4) for _ in range(2)]
    for number in range(4):
        parts = [with_conditions(stream + 1, number) for stream in range(2)]
        copies = [parts[0], parts[0], parts[1]]
        sizes = torch.tensor([*map(len, copies)])
        streams, counted = torch.tensor([0, 0, 1]), torch.tensor([False, True, True])
        rows = ImageRows(*(each.repeat_interleave(sizes) for each in (streams, counted, counted)))
        plain, first, second = together(torch.cat(copies), rows).split(sizes.tolist())
        assert torch.equal(plain, parts[0])
        for found, one, part, state in zip(
            (first, second), alone, parts, together.states, strict=True
        ):
            torch.testing.assert_close(found, one(part), rtol=0, atol=1e-9)
            assert_same_state(state, one.state, 1e-9)


def test_a_stream_without_images_stays_as_it_was(fitted: ttapca.FittedFilter) -> None:
    together, alone = Together(fitted, 3, states=4), Alone(fitted, states=4)
    first = [with_conditions(2, number) for number in range(3)]
    streams = torch.arange(3).repeat_interleave(torch.tensor([*map(len, first)]))
    together(torch.cat(first), rows_of(streams))
    alone(first[1])
    before = together.states
    images = with_conditions(2, 4)
    found = together(images, rows_of(torch.ones(len(images), dtype=torch.long)))
    torch.testing.assert_close(found, alone(images), rtol=0, atol=1e-9)
    assert_same_state(together.states[1], alone.state, 1e-9)
    for number in (0, 2):
        assert_same_state(together.states[number], before[number])


def test_a_broken_stream_keeps_its_state_and_others_do_not_notice(
    fitted: ttapca.FittedFilter,
) -> None:
    together, alone = Together(fitted, 2, states=4), Alone(fitted, states=4)
    parts = [with_conditions(2, number) for number in range(4)]
    for number, part in enumerate(parts):
        first = 3 * pictures(30, seed=number)
        if number:
            first[3, 1, 2, 2] = (math.nan, math.inf, -math.inf)[number - 1]
        streams = torch.arange(2).repeat_interleave(torch.tensor([30, len(part)]))
        before = together.states[0]
        found = together(torch.cat([first, part]), rows_of(streams))
        assert (together.states[0] is before) == (number > 0)
        torch.testing.assert_close(found[30:], alone(part), rtol=0, atol=1e-9)
        assert_same_state(together.states[1], alone.state, 1e-9)


def test_a_batch_that_is_not_counted_leaves_no_mark(fitted: ttapca.FittedFilter) -> None:
    layer, start = filter_of(fitted, states=4), start_of(filter_of(fitted, states=4))
    images, stream = 3 * pictures(30, seed=1), gain_of(layer).stream
    batch = StreamBatch([start], start, memory=stream.memory, size=30, counts=False)
    stream.batch = batch
    with torch.no_grad():
        assert torch.equal(layer(images), images)  # nothing is known
    assert batch.finish() == [start]


# Groups, and layers that have several samples of each image.


class AsTheyAre:
    """Stands for `Appearances` where rows are given."""

    size = 2
    reach = 20.0

    def by_band(self, rows: Numbers, away: Numbers) -> Numbers:
        del rows
        return away


CONDITIONS = ConditionStates(AsTheyAre(), most=4)  # type: ignore[arg-type]


def spectrum(rows: int = 1) -> Spectrum:
    none = torch.zeros(rows, dtype=torch.float64)
    return Spectrum(none, none, torch.ones(rows, 3), none, none, torch.zeros(rows, 2, 1))


def state_like(
    latest: int = 0, known: Sequence[tuple[float, float]] = (), **parts: object
) -> StreamState:
    """A stream that has these conditions, and has shown nothing else."""
    centres = np.array(known, dtype=np.float64).reshape(-1, 2)
    conditions = KnownConditions(
        centres, np.full(len(centres), 50.0), np.zeros((0, 2)), np.zeros((0, 2))
    )
    tables = (spectrum(max(1, len(known))),)
    return StreamState(tables, conditions=conditions, latest=latest, **parts)  # type: ignore[arg-type]


EMPTY = state_like()
TWO = ((0.0, 0.0), (20.0, 0.0))


def looks(*places: float) -> Tensor:
    return torch.tensor([[place, 0.0] for place in places], dtype=torch.float64)


def test_images_of_one_stream_and_condition_have_one_group() -> None:
    batch = StreamBatch([EMPTY], EMPTY, size=3)
    assert batch.wants_conditions
    batch.tell_apart(CONDITIONS, looks(0.1, -0.1, 0.0))
    assert not batch.wants_conditions
    assert batch.groups == [(0, 0)]
    assert batch.group_of is batch.group_of_each(7) is batch.chosen("counted", 7) is None
    assert batch.version == 0  # who has looked already has seen it right
    assert batch.all_filtered


def test_each_image_goes_with_the_condition_that_it_looks_like() -> None:
    state = state_like(latest=1, known=TWO)
    batch = StreamBatch([state], EMPTY, size=4)
    assert batch.groups == [(0, 1)]  # that of the last image, as long as nobody has looked
    batch.tell_apart(CONDITIONS, looks(20.1, 0.1, 19.9, 0.0))
    assert batch.groups == [(0, 0), (0, 1)]
    assert batch.group_of is not None
    assert batch.group_of.tolist() == [1, 0, 1, 0]
    assert batch.version == 1
    assert batch.finish()[0].latest == 0
    # They are told apart once.
    batch.tell_apart(CONDITIONS, looks(0.0, 20.0, 0.0, 20.0))
    assert batch.group_of.tolist() == [1, 0, 1, 0]


def test_an_image_that_does_not_count_or_looks_like_nothing_goes_with_the_last_one() -> None:
    states = [state_like(latest=latest, known=TWO) for latest in (0, 1, 0, 1)]
    streams = torch.tensor([0, 1, 0, 0, 1, 2])
    counted = torch.tensor([True, False, False, True, False, True])
    batch = StreamBatch(states, EMPTY, size=6, rows=rows_of(streams, counted))
    seen = looks(0.0, 0.0, 20.0, 20.0, 0.0, math.nan)
    batch.tell_apart(CONDITIONS, seen)
    # The third image goes with the fourth, which counts; those of the second stream do not. A
    # stream without images has a group as well.
    assert batch.groups == [(0, 0), (0, 1), (1, 1), (2, 0), (3, 1)]
    assert batch.group_of is not None
    assert batch.group_of.tolist() == [0, 2, 1, 1, 2, 3]
    after = batch.finish()
    assert [state.latest for state in after] == [1, 1, 0, 1]
    for number in (1, 2, 3):
        assert after[number].conditions is states[number].conditions


def test_nobody_tells_apart_what_is_only_looked_at() -> None:
    state = state_like(known=TWO)
    batch = StreamBatch([state], EMPTY, size=2)
    batch.looking = True
    batch.tell_apart(CONDITIONS, looks(0.0, 20.0))
    assert not batch.records
    batch.looking = False
    batch.tell_apart(CONDITIONS, looks(0.0, 20.0, 0.0))  # no image has three places
    not_counted = StreamBatch([state], EMPTY, size=2, counts=False)
    not_counted.tell_apart(CONDITIONS, looks(0.0, 20.0))
    assert batch.groups == not_counted.groups == [(0, 0)]
    assert batch.wants_conditions
    assert not not_counted.wants_conditions


def test_a_layer_may_have_several_samples_of_each_image() -> None:
    rows = rows_of(torch.tensor([1, 0]), torch.tensor([True, False]), torch.tensor([False, True]))
    batch = StreamBatch([EMPTY, EMPTY], EMPTY, size=2, rows=rows)
    for length, each in ((2, 1), (6, 3)):
        found = [
            batch.group_of_each(length),
            batch.chosen("counted", length),
            batch.chosen("filtered", length),
        ]
        expected = ([1, 0], [True, False], [False, True])
        for values, wanted in zip(found, expected, strict=True):
            assert values is not None
            assert values.tolist() == [value for value in wanted for _ in range(each)]
    for length in (3, 0):
        if length:
            with pytest.raises(LayerOutputError, match="a layer with 3 rows for 2 samples"):
                batch.group_of_each(length)
        else:
            assert batch.chosen("counted", 0).tolist() == []  # type: ignore[union-attr]


def test_sums_are_those_of_the_images_that_count() -> None:
    streams = torch.tensor([0, 1, 0, 1, 1])
    counted = torch.tensor([True, True, False, True, True])
    filtered = torch.tensor([True, False, True, True, True])
    rows = rows_of(streams, counted, filtered)
    batch = StreamBatch([EMPTY] * 3, EMPTY, size=5, rows=rows)
    values = torch.tensor([[1.0, 0.1], [10.0, 0.2], [100.0, 0.4], [1000.0, 0.8], [2000.0, 1.6]])
    torch.testing.assert_close(
        batch.summed(values), torch.tensor([[1.0, 0.1], [3010.0, 2.6], [0.0, 0.0]])
    )
    torch.testing.assert_close(
        batch.summed(values, adapted=True), torch.tensor([[1.0, 0.1], [3000.0, 2.4], [0.0, 0.0]])
    )
    assert batch.sizes().tolist() == [1.0, 3.0, 0.0]
    assert batch.sizes(adapted=True).tolist() == [1.0, 2.0, 0.0]
    places = batch.counted_images()
    assert not isinstance(places, int)
    assert [own.tolist() for own in places] == [[0], [1, 3, 4], []]
    whole = StreamBatch([EMPTY], EMPTY, size=5)
    torch.testing.assert_close(whole.summed(values), values.sum(0, keepdim=True))
    assert whole.sizes().tolist() == [5.0]
    assert [own.tolist() for own in whole.counted_images()] == [[0, 1, 2, 3, 4]]


def test_sums_by_group_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(9, 2, generator=generator)
    of = torch.randint(4, (9,), generator=generator)
    expected = torch.stack([values[of == group].sum(0) for group in range(4)])
    torch.testing.assert_close(sums_by_group(values, of, 4), expected)
    torch.testing.assert_close(sums_by_group(values, None, 1), values.sum(0, keepdim=True))


# What was known before, and what is kept.


def test_a_condition_that_is_new_has_shown_nothing() -> None:
    seen = dataclasses.replace(spectrum(), samples=torch.full((1,), 9.0, dtype=torch.float64))
    moments = LayerMoments(torch.ones(1, 2, 4), *torch.full((2, 1, 3), 5.0, dtype=torch.float64))
    nothing = LayerMoments(torch.zeros(1, 2, 4), *torch.zeros(2, 1, 3, dtype=torch.float64))
    empty = dataclasses.replace(EMPTY, layers=nothing)
    state = dataclasses.replace(empty, spectra=(seen,), layers=moments)
    batch = StreamBatch([state], empty, size=64)
    batch.tell_apart(CONDITIONS, looks(*[0.0] * 32, *[30.0] * 32))
    assert batch.groups == [(0, 0), (0, 1)]
    assert batch.spectrum_before(0).samples.tolist() == [9.0, 0.0]
    assert batch.layers_before().samples.tolist() == [[5.0] * 3, [0.0] * 3]
    assert batch.layers_before().moments[:, 0, 0].tolist() == [1.0, 0.0]


def plan_of(counts: Sequence[float], streams: int) -> ClassPlan:
    """A plan by which images count as given in the spectrum, and for one in the only layer."""
    columns = torch.stack([torch.ones(len(counts)), torch.tensor(counts)], 1).double()
    none = np.zeros(streams)
    return ClassPlan(torch.eye(2)[torch.arange(len(counts)) % 2], columns, none, none, none)


def test_images_count_as_the_plan_says() -> None:
    """Also where a filter has several samples of each."""
    rows = rows_of(torch.tensor([0, 1, 1, 0]), torch.tensor([True, True, True, False]))
    plan = plan_of([0.5, 0.25, 1.0, 0.125], streams=2)
    batch = StreamBatch([EMPTY, EMPTY], EMPTY, size=4, rows=rows, plan=plan)
    for each in (1.0, 9.0):
        found = batch.independent_samples(each * batch.sizes())
        assert found.tolist() == pytest.approx([0.5 * each, 1.25 * each])
    batch.plan = None
    assert batch.independent_samples(batch.sizes()).tolist() == [1.0, 2.0]


def test_independent_images_are_counted_by_the_last_plan(fitted: ttapca.FittedFilter) -> None:
    """More is known of the classes when the pass is over."""
    layer = filter_of(fitted)
    start, stream = start_of(layer), gain_of(layer).stream
    states, images, rows = [start, start], pictures(4, seed=3), rows_of(torch.tensor([0, 1, 1, 0]))
    for passes in range(1, 3):
        batch = StreamBatch(states, start, memory=10.0, size=4, rows=rows)
        batch.plan = plan_of([1.0] * 4, streams=2)
        stream.batch = batch
        with torch.no_grad():
            layer(images)
        batch.plan = plan_of([1.0, 0.5, 0.25, 0.125], streams=2)
        states = batch.finish()
        found = [float(state.spectra[0].independent) for state in states]
        fading = sum(math.exp(-2 * number / 10.0) for number in range(passes))
        assert found == pytest.approx([1.125 * fading, 0.75 * fading])
        seen = [float(state.spectra[0].samples) for state in states]
        assert seen == pytest.approx([2 * fading, 2 * fading])


def test_what_else_was_seen_of_a_stream_becomes_part_of_its_state() -> None:
    chain = ClassChain(np.ones(3))
    states = [dataclasses.replace(EMPTY, chain=chain.start()) for _ in range(3)]
    batch = StreamBatch(
        states, EMPTY, memory=20.0, size=4, rows=rows_of(torch.tensor([0, 1, 1, 2]))
    )
    predicted = np.full((3, 2, 3), 1 / 3)
    after, _ = chain.read(batch.chains_before(), predicted, sizes=[1, 2, 1])
    batch.chains_after(after)
    batch.alarms[1] = AlarmState(shifted=True)
    batch.outliers[0] = (0.5, 10)
    batch.outliers[2] = (0.25, 1)
    found = batch.finish()
    for number, state in enumerate(found):
        assert state.chain is not None
        for each in dataclasses.fields(ChainState):
            np.testing.assert_array_equal(
                getattr(state.chain, each.name), getattr(after.of_stream(number), each.name)
            )
    assert [state.alarm.shifted for state in found] == [False, True, False]
    assert [state.outliers.tolist() for state in found] == [[0.5, 10.0], [0.0, 0.0], [0.25, 1.0]]
    later = StreamBatch(found, EMPTY, memory=20.0, size=1, rows=rows_of(torch.tensor([0])))
    later.outliers[0] = (0.0, 10)
    kept = 10 * math.exp(-0.5)
    [share, samples] = later.finish()[0].outliers.tolist()
    assert (share, samples) == pytest.approx((0.5 * kept / (kept + 10), kept + 10))
    assert later.finish()[1].alarm.shifted


def test_a_state_that_is_not_finite_does_not_replace_the_one_before() -> None:
    chain = ClassChain(np.ones(3))
    states = [dataclasses.replace(EMPTY, chain=chain.start()) for _ in range(2)]
    batch = StreamBatch(states, EMPTY, size=2, rows=rows_of(torch.arange(2)))
    after = chain.start(2)
    after.joint[0, 1, 2] = math.nan
    batch.chains_after(after)
    batch.outliers = {0: (0.5, 1), 1: (0.5, 1)}
    found = batch.finish()
    assert found[0] is states[0]
    assert found[1].outliers.tolist() == [0.5, 1.0]
    batch.left_out = True
    assert batch.finish() == states


def test_some_streams_may_pass_again_by_the_plan_that_was_found() -> None:
    states = [dataclasses.replace(EMPTY, latest=0) for _ in range(3)]
    streams = torch.tensor([0, 2, 1, 2, 0, 2])
    counted = torch.tensor([True, True, True, False, True, True])
    plan = plan_of([1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125], streams=3)
    rows = rows_of(streams, counted, ~counted)
    batch = StreamBatch(states, EMPTY, memory=7.0, size=6, rows=rows, plan=plan)
    again, images = batch.only([2, 0])
    assert images.tolist() == [0, 1, 3, 4, 5]
    assert again.states == [states[2], states[0]]
    assert (again.size, again.memory, again.empty) == (5, 7.0, EMPTY)
    assert again.rows is not None
    assert again.rows.stream.tolist() == [1, 0, 0, 1, 0]
    assert again.rows.counted.tolist() == counted[images].tolist()
    assert again.rows.filtered.tolist() == (~counted)[images].tolist()
    assert again.plan is not None
    assert torch.equal(again.plan.counts, plan.counts[images])
    whole, every = StreamBatch([EMPTY], EMPTY, size=3, plan=plan_of([1.0] * 3, 1)).only([0])
    assert (whole.rows, every.tolist(), whole.size) == (None, [0, 1, 2], 3)
