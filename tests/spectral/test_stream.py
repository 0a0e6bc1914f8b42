"""A stream: values and parts, what counts, what is forgotten, and one stream for another."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from adapters import same
from known_shifts import spectrum
from ttapca.adaptation.optimisation import Descent, Draws
from ttapca.spectral.closed_form_rule import Scaling
from ttapca.spectral.stream import (
    LARGE,
    STATE,
    Attributes,
    ParameterValues,
    ScaleGivenBack,
    Stream,
    shift_of,
    tensors_in,
)
from ttapca.spectral.stream_batch import StreamBatch
from ttapca.spectral.stream_state import AlarmState, Spectrum, StreamState

SEED = 4


def nothing_seen() -> Spectrum:
    """What a filter of one component knows of a new stream."""
    none, ones = torch.zeros(1, dtype=torch.float64), torch.ones(1, 1)
    return Spectrum(none, none, ones, none, none, torch.zeros(1, 2, 1, dtype=torch.float64))


def show(batch: StreamBatch, samples: float, energy: float = 1.0, shift: float = 0.5) -> None:
    """Do what a filter does with so many samples of this energy."""
    count = torch.tensor([samples], dtype=torch.float64)
    sure, energies = torch.full_like(count, shift), torch.full((1, 1), energy)
    newer = Spectrum(count, count, energies, sure, sure, torch.zeros(1, 2, 1, dtype=torch.float64))
    joined = batch.spectrum_before(0).joined(newer, batch.memory)
    batch.show(0, newer, joined, Scaling(torch.ones(1, 1), sure, sure, None, None, None))


def state_of(stream: Stream) -> StreamState:
    assert stream.state is not None
    return stream.state


class World:
    """A stream with a state, two values and one part of each kind, and what they belong to."""

    def __init__(self, memory: float = math.inf) -> None:
        self.stream = Stream(memory)
        assert self.stream.add_filter(nothing_seen()) == 0
        self.stream.declare("mean", torch.zeros(2))
        self.stream.declare("pair", (None, 0.0))
        self.weight = nn.Parameter(torch.ones(3))
        self.owner = SimpleNamespace(teacher=None, steps=0)
        self.descent = Descent()
        self.descent.bind([self.weight])
        self.generator = torch.Generator().manual_seed(SEED)
        self.stream.keep("weights", ParameterValues([self.weight]))
        self.stream.keep("mover", Attributes(self.owner, ["teacher", "steps"]))
        self.stream.keep("optimiser", self.descent)
        self.stream.keep("draws", Draws(self.generator, SEED))

    def live(self, number: float, samples: int = 2) -> None:
        """Change all of it, within one batch."""
        self.stream.start_batch(samples)
        self.change(number)
        self.stream.end_batch()

    def change(self, number: float) -> None:
        assert self.stream.batch is not None
        show(self.stream.batch, 2.0, number)
        self.stream.write("mean", torch.full((2,), number))
        self.stream.write("pair", (torch.tensor(number), number))
        self.descent.move((torch.full_like(self.weight.data, number),))
        self.owner.teacher, self.owner.steps = [torch.tensor(number)], self.owner.steps + 1
        torch.rand(1, generator=self.generator)

    def picture(self) -> Any:
        return copy.deepcopy(self.stream.contents())


def test_the_first_pass_of_each_batch_counts_for_each_value_by_itself() -> None:
    stream = World().stream
    assert all(stream.counts("mean") for _ in range(3))  # nobody says where a batch begins
    for _ in range(2):
        stream.start_batch()
        found = [stream.counts(name) for name in ("mean", "mean", "pair", "mean")]
        assert found == [True, False, True, False]
        stream.end_batch()
        assert not stream.counts("mean")


def test_a_batch_is_set_apart_until_it_is_over() -> None:
    stream = World().stream
    stream.write("mean", 1.0)
    assert stream.past("mean") == stream.now("mean") == 1.0
    stream.start_batch(5)
    stream.write("mean", 2.0)
    assert (stream.past("mean"), stream.now("mean")) == (1.0, 2.0)
    assert (stream.samples, stream.batches) == (5, 1)
    stream.end_batch()
    assert stream.past("mean") == 2.0
    stream.start_batch(3)
    assert (stream.samples, stream.batches) == (8, 2)


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    memory=st.floats(1.0, 1e4) | st.just(math.inf),
)
def test_each_sample_fades_with_all_that_came_after_it(sizes: list[int], memory: float) -> None:
    stream = World(memory).stream
    for size in sizes:
        stream.start_batch(size)
        assert stream.batch is not None
        show(stream.batch, float(size))
        stream.end_batch()
    expected = sum(
        size * math.exp(-sum(sizes[number + 1 :]) / memory) for number, size in enumerate(sizes)
    )
    assert float(state_of(stream).spectra[0].samples) == pytest.approx(expected)


def test_the_state_is_that_of_before_until_the_batch_is_over() -> None:
    stream = World().stream
    before = state_of(stream)
    stream.start_batch(2)
    batch = stream.opened(2)
    assert batch is stream.batch
    assert batch.size == 2
    show(batch, 2.0, 3.0)
    assert stream.state is stream.values[STATE] is before
    stream.end_batch()
    assert stream.batch is None
    assert float(state_of(stream).spectra[0].energies) == 3.0
    assert not before.spectra[0].samples.any()  # which nobody has written into


def test_a_batch_of_unknown_size_takes_that_of_its_first_samples() -> None:
    stream = World().stream
    stream.start_batch()
    assert stream.batch is not None
    assert stream.batch.size is None
    assert stream.opened(5) is stream.opened(7) is stream.batch
    assert stream.batch.size == 5


def test_a_pass_between_batches_leaves_no_mark() -> None:
    stream = World().stream
    assert stream.opened(3).counts  # nobody says where a batch begins, so that every pass counts
    stream.start_batch(3)
    stream.end_batch()
    before, batch = state_of(stream), stream.opened(3)
    assert not batch.counts
    show(batch, 3.0, 9.0)
    assert batch.finish() == [before]


def test_a_batch_that_is_left_out_changes_no_state() -> None:
    stream = World().stream
    before = state_of(stream)
    stream.start_batch(2)
    batch = stream.opened(2)
    show(batch, 2.0, 3.0)
    batch.left_out = True
    stream.end_batch()
    assert stream.state is before
    stream.start_batch(2)
    show(stream.opened(2), 2.0, math.nan)  # nobody has noticed
    stream.end_batch()
    assert stream.state is before
    assert stream.samples == 4


def test_who_keeps_no_state_has_none() -> None:
    stream = Stream()
    with pytest.raises(LookupError, match="must declare a state first"):
        stream.opened(3)
    stream.start_batch(3)
    assert stream.batch is None
    stream.end_batch()
    assert stream.state is None
    assert STATE not in stream.values
    assert stream.samples == 3


def test_what_is_declared_of_a_state_adds_up() -> None:
    stream = Stream()
    stream.declare_state(outliers=torch.ones(2, dtype=torch.float64))
    assert [stream.add_filter(nothing_seen()) for _ in range(2)] == [0, 1]
    assert len(state_of(stream).spectra) == 2
    assert state_of(stream).outliers.tolist() == [1.0, 1.0]
    assert stream.state is stream.start


def test_what_is_about_the_stream_outlasts_forgetting_and_no_reset() -> None:
    world = World()
    stream, alarm = world.stream, AlarmState(shifted=True, run=1)
    world.live(3.0)
    stream.start_batch(2)
    stream.opened(2).alarms[0] = alarm
    stream.end_batch()
    stream.start_batch(2)
    stream.end_batch(skipped=True)  # which leaves no other mark
    stream.forget()
    found = state_of(stream)
    assert found.alarm is alarm
    assert not found.spectra[0].samples.any()
    assert (stream.now("images"), stream.now("skipped"), stream.samples) == (4, 1, 0)
    stream.reset()
    assert stream.state is stream.start
    assert (stream.now("images"), stream.now("skipped")) == (0, 0)


def test_a_broken_batch_leaves_no_mark() -> None:
    world = World()
    world.live(1.0)
    before = world.picture()
    world.stream.start_batch(7)
    show(world.stream.opened(7), 7.0, 9.0)
    world.change(9.0)
    world.stream.undo_batch()
    assert same(world.stream.contents(), before)


def test_what_is_kept_is_finite_and_serves_outside_inference_mode() -> None:
    stream = World().stream
    stream.start_batch(1)
    stream.write("mean", torch.tensor([1.0, math.nan]))
    stream.write("pair", (torch.tensor(1e300, dtype=torch.float64), 2.0))
    stream.end_batch()
    assert stream.now("mean").tolist() == [0.0, 0.0]
    assert stream.now("pair")[0].item() == 1e300
    assert stream.samples == 1
    with torch.inference_mode():
        stream.write("mean", torch.ones(2))
        stream.write("pair", (torch.ones(2), 1.0))
    assert not any(tensor.is_inference() for tensor in tensors_in(stream.contents()))


@pytest.mark.parametrize("size", [3, LARGE])
def test_only_what_is_not_finite_is_left_out(size: int) -> None:
    stream = Stream()
    large = torch.full((size,), torch.finfo(torch.float32).max)  # finite, though their sum is not
    broken = torch.zeros(size)
    broken[1] = torch.inf
    written = {"large": large, "inf": broken, "nan": broken - broken, "small": torch.ones(2)}
    for name in written:
        stream.declare(name, None)
    for left_out in ({"inf", "nan"}, set()):
        stream.start_batch(1)
        for name, value in written.items():
            stream.write(name, value if left_out else value.nan_to_num(0.0))
        stream.end_batch()
        assert {name for name in written if stream.now(name) is None} == left_out


def test_a_reset_begins_as_new_every_time() -> None:
    world, new = World(), World()
    for _ in range(2):
        world.live(1.0)
        world.stream.reset()
        assert same(world.stream.contents(), new.stream.contents())
    world.live(3.0)
    new.live(3.0)
    assert same(world.stream.contents(), new.stream.contents())


def test_two_streams_take_turns_as_if_each_were_alone() -> None:
    alone, shared = [World(), World()], World()
    parked = [shared.picture(), shared.picture()]
    for number in (1.0, 2.0, 3.0):
        for which in (0, 1):
            shared.stream.put(parked[which])
            shared.live(number + which)
            alone[which].live(number + which)
            parked[which] = shared.stream.contents()
    for world, contents in zip(alone, parked, strict=True):
        assert same(world.stream.contents(), contents)
    assert world.stream.samples == 6
    assert float(state_of(world.stream).spectra[0].samples) == 6


@pytest.mark.parametrize("again", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_and_pickles_go_on_by_themselves(again: Any) -> None:
    world = World(memory=5.0)
    world.live(1.0)
    twin, before = again(world), world.picture()
    twin.live(2.0)
    assert same(world.stream.contents(), before)
    world.live(2.0)
    assert same(twin.stream.contents(), world.stream.contents())
    assert twin.stream.memory == 5.0


def test_casting_takes_all_of_it_along() -> None:
    world = World()
    world.live(1.5)
    with torch.no_grad():
        world.weight.data = world.weight.data.double()  # as `nn.Module.double` does
    world.stream.apply(lambda t: t.double() if t.is_floating_point() else t)
    contents = world.stream.contents()
    starts = [world.stream.starts, world.stream.start]
    kinds = {tensor.dtype for tensor in tensors_in([contents["values"], *starts])}
    assert kinds == {torch.float64}
    assert world.owner.teacher[0].dtype == world.weight.dtype == torch.float64
    moments = contents["parts"]["optimiser"]["0"]
    assert (moments["exp_avg"].dtype, moments["step"].dtype) == (torch.float64, torch.float32)
    world.live(2.0)
    world.stream.reset()
    assert world.weight.tolist() == [1.0] * 3
    assert world.weight.dtype == torch.float64
    world.stream.apply(lambda t: t.float() if t.is_floating_point() else t)
    table = state_of(world.stream).spectra[0]
    assert (table.energies.dtype, table.samples.dtype) == (torch.float32, torch.float64)


def test_the_shift_is_that_of_the_first_who_can_tell() -> None:
    stream = Stream()
    assert shift_of(stream.state) == 1.0  # nobody can
    stream.declare_state()
    assert shift_of(stream.state) == 1.0
    stream.add_filter(spectrum([0.0, 0.3, 0.2], [0.0, 0.0, 0.9]))  # in its surest condition
    stream.add_filter(spectrum([0.9], [0.9]))
    assert shift_of(stream.state) == 0.3
    assert state_of(stream).surest == 1


def test_what_normalisation_layers_give_back_of_a_lost_scale() -> None:
    samples = torch.tensor([1.0, 3.0, 16.0, 1e9])
    assert ScaleGivenBack(0.5).by(samples).tolist() == [0.5] * 4
    found = ScaleGivenBack(0.5, prior=16.0).by(samples)
    assert found.tolist() == pytest.approx([0.5 / 17, 1.5 / 19, 0.25, 0.5])
    alone = ScaleGivenBack(0.5, prior=16.0, needs_two=True).by(samples)
    assert alone.tolist() == [0.0, *found[1:].tolist()]
