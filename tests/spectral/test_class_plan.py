"""`ClassPlan`: which classes are taken out of statistics, and for how many images they count."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ttapca.adaptation.surfaces import StreamStatistics
from ttapca.spectral.chain import ChainReading
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.source_classes import (
    ClassPlan,
    LayerClasses,
    SourceClasses,
    by_stream,
    corrections,
    in_batch,
)
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_batch import ImageRows, StreamBatch
from ttapca.spectral.stream_state import Spectrum, StreamState

SHARES = torch.tensor([0.5, 0.3, 0.2])
LIKENESS = {"early": 0.05, "late": 0.6}
# In the order of the network; of one of them nothing is known.
LAYERS = {"early": 4, "another": 2, "late": 5}
EARLY, ANOTHER, LATE, SPECTRUM = range(4)  # columns of counts
CHANNELS = dict(
    zip(LAYERS, torch.arange(sum(LAYERS.values())).split(list(LAYERS.values())), strict=True)
)


def classes() -> SourceClasses:
    generator = torch.Generator().manual_seed(0)
    sums = {}
    for path in LIKENESS:
        mean = torch.randn(3, LAYERS[path], generator=generator)
        sums[path] = torch.stack([mean, mean.square() + 1], 1) * SHARES[:, None, None]
    found = SourceClasses.from_sums(SHARES, sums)
    found.likeness.update(LIKENESS)
    return found


SOURCE = classes()
KNOWN = LayerClasses(SOURCE, LAYERS)


def reading(
    places: Sequence[Sequence[float]],
    known: Sequence[Tensor] | None = None,
    held: Sequence[float] | None = None,
) -> ChainReading:
    """Of streams in which runs are all that is known; of some, perhaps that they hold few classes.

    What a stream has fewer images than others is filled up with what means nothing.
    """
    streams, images = len(places), max(map(len, places))
    place = np.full((streams, images), 9.0)
    shares = np.full((streams, images, 3), 0.3)
    for number, own in enumerate(places):
        place[number, : len(own)] = own
        shares[number, : len(own)] = 0.0 if known is None else known[number].double()
    crowded = np.zeros(streams) if held is None else np.array(held)
    return ChainReading(
        outputs=np.full((streams, images, 3), 1 / 3),
        plain=np.zeros((streams, images)),
        known=shares,
        place=place,
        held=np.zeros((streams, images)) + crowded[:, None],
        crowd=0.5 * np.ones(streams),
        ordered=np.ones(streams),
        run_length=np.ones(streams),
    )


def plan_of_one(
    places: Sequence[float], known: Tensor | None = None, memory: float = math.inf
) -> ClassPlan:
    """The plan of a batch of one stream, all images of which were read."""
    size = len(places)
    made = reading([places], None if known is None else [known])
    return ClassPlan.of_reading(KNOWN, made, np.zeros(1), memory, [torch.arange(size)], size)


def plan_of_labels(labels: list[int], streams: int = 1) -> ClassPlan:
    """Of images in no order whose classes are known."""
    shares = torch.eye(3)[torch.tensor(labels)]
    return ClassPlan.of_shares(KNOWN, shares, [torch.arange(len(labels))] * streams)


def worth(length: float, alike: float) -> float:
    """How many independent images so many of one class are worth."""
    return length / (1 + (length - 1) * alike)


def test_what_is_not_known_is_drawn_from_the_source() -> None:
    known = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.4, 0.0, 0.1]])
    plan = plan_of_one([1, 2, 3], known)
    expected = [[0.5, 0.3, 0.2], [0.0, 1.0, 0.0], [0.4 + 0.25, 0.15, 0.1 + 0.1]]
    torch.testing.assert_close(plan.shares, torch.tensor(expected))
    # There begins a run.
    assert plan.runs.tolist() == pytest.approx([1 + 0 + 0.5])


def test_how_alike_images_are_is_told_by_layer() -> None:
    assert KNOWN.likeness[[EARLY, LATE, SPECTRUM]].tolist() == [0.05, 0.6, CONSTANTS.likeness]
    assert np.isnan(KNOWN.likeness[ANOTHER])


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [6], [4, 2], [1, 3, 2]], ids=str)
def test_runs_count_by_their_design_effect(lengths: list[int]) -> None:
    places = [float(place) for length in lengths for place in range(1, length + 1)]
    plan = plan_of_one(places)
    assert plan.counts.dtype == torch.float64
    assert plan.counts.shape == (len(places), len(LAYERS) + 1)
    for column, alike in ((EARLY, 0.05), (LATE, 0.6), (SPECTRUM, CONSTANTS.likeness)):
        found = float(plan.counts[:, column].sum())
        assert found == pytest.approx(sum(worth(length, alike) for length in lengths))


@pytest.mark.parametrize("memory", [5.0, 50.0, math.inf])
def test_new_images_take_the_place_of_those_that_are_forgotten(memory: float) -> None:
    """A run stays worth what it is, whatever was forgotten of it, however it comes."""
    kept = 0.0
    for place in range(1, 60):
        [count] = plan_of_one([place], memory=memory).counts[:, LATE].tolist()
        kept = kept * math.exp(-1 / memory) + count
        assert kept == pytest.approx(worth(place, 0.6))
    for first in range(60, 100, 4):
        counts = plan_of_one(range(first, first + 4), memory=memory).counts[:, LATE]
        kept = kept * math.exp(-4 / memory) + float(counts.sum())
        assert kept == pytest.approx(worth(first + 3, 0.6), rel=1e-3)


def test_images_in_no_order_count_for_one_each() -> None:
    places = [torch.tensor([0, 2, 3]), torch.tensor([1]), torch.arange(4, 8)]
    plan = ClassPlan.of_shares(KNOWN, SHARES.expand(8, 3), places)
    assert torch.equal(plan.counts, torch.ones(8, len(LAYERS) + 1, dtype=torch.float64))
    assert plan.runs.tolist() == [3.0, 1.0, 4.0]
    assert plan.few.tolist() == plan.alike.tolist() == [0.0, 0.0, 0.0]


def test_some_of_the_images_count_as_they_do_among_all() -> None:
    plan = plan_of_one([1, 2, 3, 1])
    found = [plan.some(torch.tensor(rows), [0]) for rows in ([0, 3], [1, 2])]
    late = [float(each.counts[:, LATE].sum()) for each in found]
    assert late[0] == pytest.approx(2 * worth(1, 0.6))
    assert late[1] == pytest.approx(worth(3, 0.6) - worth(1, 0.6))
    assert sum(late) == pytest.approx(float(plan.counts[:, LATE].sum()))


def test_what_is_not_known_of_counts_for_one() -> None:
    """Images in layers without a likeness."""
    plan = plan_of_one([1, 2, 3], memory=20.0)
    assert torch.equal(plan.counts[:, ANOTHER], torch.ones(3, dtype=torch.float64))
    assert bool((plan.counts[1:, LATE] < 0.7).all())


def test_images_that_were_not_read_have_no_class() -> None:
    read, others = torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4, 6])
    made = reading([[1, 2, 3]], held=[0.3])
    plan = ClassPlan.of_reading(KNOWN, made, np.full(1, 7.0), 20.0, [read], 7)
    assert not plan.shares[others].any()
    torch.testing.assert_close(plan.shares[read], SHARES.expand(3, 3))
    alone = ClassPlan.of_reading(KNOWN, made, np.full(1, 7.0), 20.0, [torch.arange(3)], 3)
    assert torch.equal(plan.counts[read], alone.counts)


# Several streams.


def test_the_plan_of_streams_is_that_of_each_alone() -> None:
    """They have two, one, no and three images, which come in turn, and two are of nobody."""
    generator = torch.Generator().manual_seed(3)
    lengths, before = [2, 1, 0, 3], np.array([0.0, 12.0, 4.0, 80.0])
    places: list[list[float]] = [[3.0, 4.0], [1.0], [], [7.5, 1.2, 2.0]]
    known = [0.9 * torch.rand(length, 3, generator=generator) / 3 for length in lengths]
    held = [0.1, 0.0, 0.7, 0.4]
    rows = [torch.tensor(each, dtype=torch.long) for each in ([1, 4], [6], [], [0, 3, 7])]
    whole = ClassPlan.of_reading(KNOWN, reading(places, known, held), before, 30.0, rows, 8)
    for number, own in enumerate(rows):
        some = whole.some(own, [number])
        if not len(own):
            assert (some.runs, some.few, some.alike) == (0.0, 0.0, 0.0)
            continue
        made, size = reading([places[number]], [known[number]], [held[number]]), len(own)
        alone = ClassPlan.of_reading(
            KNOWN, made, before[[number]], 30.0, [torch.arange(size)], size
        )
        for name, wanted in vars(alone).items():
            np.testing.assert_allclose(getattr(some, name), wanted, rtol=1e-12, err_msg=name)
        assert alone.few == pytest.approx(held[number] * len(own))
        assert alone.alike == pytest.approx(0.5 * held[number] * len(own))
    assert not whole.shares[[2, 5]].any()


def test_rows_of_streams_come_apart_and_together() -> None:
    values = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    places = [torch.tensor([4, 5]), torch.tensor([], dtype=torch.long), torch.tensor([0, 1, 3])]
    apart = by_stream(values, places)
    assert apart[..., 0].tolist() == [[8.0, 10.0, 0.0], [0.0, 0.0, 0.0], [0.0, 2.0, 6.0]]
    expected = values.clone()
    expected[2] = 0.0  # of no stream
    assert torch.equal(in_batch(apart, places, 6), expected)
    for whole in ([torch.arange(6)], 3):
        assert torch.equal(in_batch(by_stream(values, whole), whole, 6), values)


def test_a_plan_that_is_traced_is_that_of_the_same_streams() -> None:
    """Streams of as many images each, one after the other, in arrays of torch."""
    known = [torch.tensor([[0.0, 0.2, 0.1], [0.5, 0.1, 0.0]]), torch.tensor([[0.0] * 3] * 2)]
    made = reading([[3.0, 4.0], [1.0, 1.5]], known, held=[0.2, 0.0])
    before = np.array([12.0, 0.0])
    expected = ClassPlan.of_reading(KNOWN, made, before, 30.0, list(torch.arange(4).split(2)), 4)
    traced = ChainReading(*(torch.from_numpy(value).float() for value in vars(made).values()))
    found = ClassPlan.of_reading(KNOWN, traced, torch.from_numpy(before).float(), 30.0, 2, 4)
    for name, value in vars(found).items():
        assert isinstance(value, Tensor), name
        assert value.dtype == torch.float32, name
        wanted = getattr(expected, name)
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


# What classes explain.


def test_corrections_go_by_group() -> None:
    """Those of the classes that its images have; a layer that nothing is known of stays."""
    shares = torch.stack([torch.eye(3)[0], torch.tensor([0.0, 0.5, 0.5])])
    shift, scale = KNOWN.corrections(shares)
    assert shift.shape == scale.shape == (2, sum(LAYERS.values()))
    place = (shares - SHARES) @ SOURCE.loadings
    for path in LIKENESS:
        expected = corrections(SOURCE.layers[path], place)
        torch.testing.assert_close(shift[:, CHANNELS[path]], expected[0])
        torch.testing.assert_close(scale[:, CHANNELS[path]], expected[1])
        assert float((shift[0] - shift[1])[CHANNELS[path]].abs().max()) > 0.1
    assert not shift[:, CHANNELS["another"]].any()
    assert bool((scale[:, CHANNELS["another"]] == 1).all())


def test_images_like_the_source_need_no_correction() -> None:
    shift, scale = KNOWN.corrections(SHARES.expand(2, 3))
    torch.testing.assert_close(shift, torch.zeros(2, 11), rtol=0, atol=1e-6)
    torch.testing.assert_close(scale, torch.ones(2, 11), rtol=1e-5, atol=0)


def test_a_network_without_layers_has_a_spectrum_only() -> None:
    known = LayerClasses(SOURCE, {})
    plan = ClassPlan.of_reading(known, reading([[1, 2]]), np.zeros(1), 9.0, [torch.arange(2)], 2)
    assert plan.counts.shape == (2, 1)
    assert [tuple(each.shape) for each in known.corrections(SHARES[None])] == [(1, 0), (1, 0)]


# How much two plans differ, for the statistics of layers.


def surely_shifted(stream: Stream) -> StreamState:
    """A state of a stream that has surely shifted, and has shown nothing to its layers."""
    sure, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    spectrum = Spectrum(none, none, torch.ones(1, 1), sure, sure, torch.zeros(1, 2, 1))
    assert stream.start is not None
    return dataclasses.replace(stream.start, spectra=(spectrum,))


def changes(one: ClassPlan, other: ClassPlan, streams: list[int]) -> list[float]:
    """By how much statistics of layers that use the images alone change with the plan."""
    norms = {path: nn.BatchNorm2d(channels) for path, channels in LAYERS.items()}
    surface, stream = StreamStatistics(classes=SOURCE), Stream()
    surface.attach(nn.Sequential(OrderedDict(norms)).eval(), stream)
    state = surely_shifted(stream)
    of, every = torch.tensor(streams), torch.ones(len(streams), dtype=torch.bool)
    batch = StreamBatch(
        [state] * (max(streams) + 1),
        state,
        size=len(streams),
        rows=ImageRows(of, every, every) if max(streams) else None,
        plan=one,
    )
    found = surface.change(batch, other)
    surface.detach()
    return found


def test_plans_differ_by_the_share_of_images_whose_class_is_another_one() -> None:
    one, other = plan_of_labels([0, 0, 1, 1]), plan_of_labels([1, 0, 1, 2])
    assert changes(one, one, [0, 0, 0, 0]) == [0.0]
    assert changes(one, other, [0, 0, 0, 0]) == pytest.approx([0.25])
    assert changes(other, one, [0, 0, 0, 0]) == pytest.approx([0.25])
    # Of the first two, one is of another class; of the third, none is.
    assert changes(one, other, [0, 0, 1, 2]) == pytest.approx([0.5, 0.0, 1.0])
    # Only shares count: classes that trade places have the same statistics.
    moved = plan_of_labels([1, 1, 0, 0])
    assert changes(one, moved, [0, 0, 0, 0]) == pytest.approx([0.0])
    assert changes(one, moved, [0, 1, 1, 0]) == pytest.approx([0.0, 0.0])
