"""`StreamState`: what is known of a stream as one value, and its tables with a row by condition."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttapca.spectral.chain import ClassChain
from ttapca.spectral.conditions import KnownConditions
from ttapca.spectral.stream_state import (
    AlarmState,
    LayerMoments,
    Spectrum,
    StreamState,
    is_finite,
    leaves,
)

COMPONENTS, OUTSIDE, BANDS = 5, 4, 2


def random_spectrum(
    rows: int, seed: int = 0, *, center: bool = True, rest: bool = True
) -> Spectrum:
    """A table of so many rows, each of which has other numbers."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(rows, *shape, generator=generator, dtype=torch.float64)

    samples = 10 * drawn()
    found = Spectrum(
        samples,
        samples * drawn(),
        drawn(COMPONENTS).float(),
        drawn(),
        drawn(),
        drawn(2, BANDS),
        drawn(COMPONENTS).float() if center else None,
    )
    if not rest:
        return found
    return dataclasses.replace(found, rest_energy=drawn(), rest_mean=drawn(OUTSIDE).float())


def random_layers(rows: int, seed: int = 0) -> LayerMoments:
    generator = torch.Generator().manual_seed(seed)
    moments = torch.randn(rows, 2, 6, generator=generator)
    counts = torch.rand(2, rows, 3, generator=generator, dtype=torch.float64)
    return LayerMoments(moments, *counts)


def whole_state(rows: int = 2) -> StreamState:
    """A state that has all parts."""
    rng = np.random.default_rng(0)
    appearances = [rng.random((length, 3)) for length in (rows, 20, 4)]
    conditions = KnownConditions(appearances[0], np.ones(rows), *appearances[1:])
    return StreamState(
        (random_spectrum(rows), random_spectrum(rows, 1, center=False, rest=False)),
        layers=random_layers(rows),
        chain=ClassChain(np.ones(3)).start(features=2),
        conditions=conditions,
        latest=rows - 1,
        outliers=torch.tensor([0.1, 30.0], dtype=torch.float64),
        alarm=AlarmState(
            run=1, images=20, energies=(torch.ones(BANDS),), counts=torch.ones(3), skew=0.5
        ),
    )


def assert_same_rows(found: Any, expected: Any) -> None:
    """Tables of one kind, bit for bit."""
    assert found.tensors().keys() == expected.tensors().keys()
    for name, each in found.tensors().items():
        wanted = getattr(expected, name)
        assert each.dtype == wanted.dtype, name
        assert torch.equal(each, wanted), name


# Tables with a row for each condition.

TABLES = [random_spectrum(3), random_spectrum(3, center=False, rest=False), random_layers(3)]
EACH_TABLE = pytest.mark.parametrize("table", TABLES, ids=["spectrum", "small spectrum", "layers"])


@EACH_TABLE
def test_rows_come_apart_and_together(table: Spectrum | LayerMoments) -> None:
    rows = [table.row(number) for number in range(3)]
    assert [len(row) for row in (table, *rows)] == [3, 1, 1, 1]
    for number, row in enumerate(rows):
        for name, each in row.tensors().items():
            assert torch.equal(each[0], getattr(table, name)[number]), name
    assert_same_rows(type(table).of_each(rows), table)
    assert_same_rows(type(table).of_each([rows[0], type(table).of_each(rows[1:])]), table)
    assert type(table).of_each([table]) is table


@EACH_TABLE
@pytest.mark.parametrize("number", range(3))
def test_a_row_is_replaced_in_a_copy(table: Spectrum | LayerMoments, number: int) -> None:
    before = {name: each.clone() for name, each in table.tensors().items()}
    other, unused = table.row((number + 1) % 3), table.row((number + 2) % 3)
    found = table.with_row(number, other, unused)
    expected = [other if place == number else table.row(place) for place in range(3)]
    assert_same_rows(found, type(table).of_each(expected))
    for name, each in table.tensors().items():
        assert torch.equal(each, before[name]), name
    # And what is made of it later shows in neither.
    for each in found.tensors().values():
        each.fill_(7.0)
    for name, each in table.tensors().items():
        assert torch.equal(each, before[name]), name


@EACH_TABLE
def test_a_row_far_behind_comes_after_as_many_empty_ones_as_it_takes(
    table: Spectrum | LayerMoments,
) -> None:
    first, empty, new = (table.row(number) for number in range(3))
    found = first.with_row(3, new, empty)
    assert_same_rows(found, type(table).of_each([first, empty, empty, new]))
    assert_same_rows(table.with_row(3, new, empty), type(table).of_each([table, new]))
    # The only row of a table is replaced as it is.
    assert first.with_row(0, new, empty) is new


# What was seen, together with what came since.


@given(st.lists(st.integers(0, 40), min_size=2, max_size=2), st.floats(1.0, 1e6))
def test_what_was_seen_is_a_mean_in_which_older_samples_count_less(
    new: list[int], memory: float
) -> None:
    before, newer = random_spectrum(2), random_spectrum(2, seed=1)
    counts = torch.tensor(new, dtype=torch.float64)
    newer = dataclasses.replace(newer, samples=counts, independent=counts / 2)
    found = before.joined(newer, memory)
    for row, count in enumerate(new):
        old = float(before.samples[row]) * math.exp(-count / memory)
        assert float(found.samples[row]) == pytest.approx(old + count)
        kept = float(before.independent[row]) * math.exp(-count / memory)
        assert float(found.independent[row]) == pytest.approx(kept + count / 2)
        for name in ("energies", "leeway", "mean", "rest_energy", "rest_mean"):
            one, two = getattr(before, name)[row].double(), getattr(newer, name)[row].double()
            expected = (old * one + count * two) / (old + count)
            torch.testing.assert_close(
                getattr(found, name)[row].double(), expected, rtol=1e-5, atol=1e-6
            )
    # How surely it has shifted is known only when it is looked at as a whole.
    assert found.shift is newer.shift
    assert found.unusual is newer.unusual


def test_a_row_without_new_samples_stays_as_it_was_and_one_without_old_ones_is_new() -> None:
    before, newer = random_spectrum(2), random_spectrum(2, seed=1)
    nothing = torch.tensor([0.0, 3.0], dtype=torch.float64)
    before = dataclasses.replace(before, samples=3 - nothing, independent=3 - nothing)
    newer = dataclasses.replace(newer, samples=nothing, independent=nothing)
    found = before.joined(newer, 100.0)
    for name in ("samples", "energies", "leeway", "mean", "rest_energy", "rest_mean"):
        values = getattr(found, name)
        assert torch.equal(values[0], getattr(before, name)[0]), name
        assert torch.equal(values[1], getattr(newer, name)[1]), name


def test_of_what_nobody_asks_for_nothing_is_kept() -> None:
    small = [random_spectrum(1, seed, center=False, rest=False) for seed in range(2)]
    found = small[0].joined(small[1], 9.0)
    assert found.mean is found.rest_energy is found.rest_mean is None


# The whole state.


def test_leaves_are_named_by_the_fields_that_lead_to_them() -> None:
    state = whole_state()
    found = leaves(state)
    assert found["spectra.1.energies"] is state.spectra[1].energies
    assert state.layers is not None
    assert found["layers.moments"] is state.layers.moments
    assert state.chain is not None
    assert found["chain.joint"] is state.chain.joint
    assert state.conditions is not None
    assert found["conditions.searched"] is state.conditions.searched
    assert found["alarm.energies.0"] is state.alarm.energies[0]
    assert (found["latest"], found["alarm.run"], found["alarm.shifted"]) == (1, 1, False)
    assert found["outliers"] is state.outliers
    # What there is not has no name.
    assert "spectra.1.mean" not in found
    nothing = leaves(StreamState(()))
    assert set(nothing) == {"latest", "implausible", "outliers", "errors"} | {
        f"alarm.{name}" for name in ("shifted", "run", "images", "runs", "few", "alike", "skew")
    }
    assert leaves(3.0, "three") == {"three": 3.0}
    assert leaves(None, "nothing") == {}


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    "name", ["spectra.0.energies", "spectra.1.energies", "layers.moments", "chain.joint"]
)
def test_a_state_with_a_number_that_is_not_finite_is_not(name: str, value: float) -> None:
    state = whole_state()
    assert is_finite(state)
    leaves(state)[name].reshape(-1)[-1] = value
    assert not is_finite(state)


def test_the_surest_of_its_conditions_speaks_for_a_stream() -> None:
    state = whole_state(rows=3)
    shift = torch.tensor([0.1, 0.75, 0.5], dtype=torch.float64)
    first = dataclasses.replace(state.spectra[0], shift=shift)
    state = dataclasses.replace(state, spectra=(first, *state.spectra[1:]))
    assert (state.shift, state.surest) == (0.75, 1)
    assert state.known_conditions == 3
    assert StreamState(()).known_conditions == 1
    nothing_known = KnownConditions.none(3)
    assert dataclasses.replace(state, conditions=nothing_known).known_conditions == 1


def test_it_takes_as_many_bytes_as_its_arrays() -> None:
    state = whole_state()
    expected = 0
    for value in leaves(state).values():
        if isinstance(value, Tensor):
            expected += value.numel() * value.element_size()
        elif isinstance(value, np.ndarray):
            expected += value.size * value.itemsize
    assert state.nbytes == expected > 0


def test_a_state_moves_with_the_model_and_counts_stay_precise() -> None:
    state = whole_state()
    found = state.moved(lambda tensor: tensor.double() + 1)
    moved = {
        "spectra.0.energies",
        "spectra.0.mean",
        "spectra.0.rest_mean",
        "spectra.1.energies",
        "layers.moments",
    }
    before = leaves(state)
    after = leaves(found)
    assert before.keys() == after.keys()
    for name, value in after.items():
        if name in moved:
            assert torch.equal(value, before[name].double() + 1), name
        else:
            assert value is before[name], name
    nothing = StreamState((random_spectrum(1),)).moved(torch.neg)
    assert nothing.layers is None


def test_what_is_about_the_stream_is_not_forgotten() -> None:
    state, start = whole_state(), StreamState((random_spectrum(1, seed=5),))
    found = state.forgotten(start)
    assert found.alarm is state.alarm
    assert found.errors is state.errors
    for each in dataclasses.fields(StreamState):
        if each.name not in ("alarm", "errors"):
            assert getattr(found, each.name) is getattr(start, each.name), each.name
