"""White noise that the end of the spectrum shows, counted in all bands."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.white_noise import with_white_noise

NOISE = torch.tensor([0.01, 0.1, 1.0, 30.0, 1000.0], dtype=torch.float64)
HIGH = torch.tensor([4.0, 3.0, 2.0, 2.0, 2.0], dtype=torch.float64)  # where the usual range ends
LOW = 1 / HIGH
LARGEST_SHARE = 1 - 1 / CONSTANTS.largest_ratio  # of the energy of a band


def excess_of(energy: torch.Tensor) -> torch.Tensor:
    """By how much log energies are outside the range from LOW to HIGH."""
    above, below = (energy / HIGH).log().clamp(min=0), (LOW / energy).log().clamp(min=0)
    return above - below


def found(energy: torch.Tensor) -> torch.Tensor:
    return with_white_noise(excess_of(energy), energy.log(), NOISE)


@pytest.mark.parametrize("level", [0.05, 0.5, 5.0])
def test_the_share_of_noise_in_every_band_follows_from_the_last_one(level: float) -> None:
    signal = torch.tensor([2.0, 0.7, 1.2, 0.9, 1.0], dtype=torch.float64)
    energy = signal + level * NOISE
    # What the last band has beyond the range of source images, and the same noise elsewhere.
    sure = (float(energy[-1]) - 2.0) / 1000.0
    # At most what the band with the least energy, for its noise, has room for.
    room = min(float(each) / float(unit) for each, unit in zip(energy, NOISE, strict=True))
    sure = min(sure, LARGEST_SHARE * room)
    for band, value in enumerate(found(energy).tolist()):
        within = -math.log(1 - sure * float(NOISE[band]) / float(energy[band]))
        assert value == pytest.approx(max(within, float(excess_of(energy)[band])))
    # In the middle, the energy is in the usual range and noise counts all the same.
    assert level > 0.5 or (excess_of(energy)[2] == 0.0 and found(energy)[2] > 0.03)


def test_without_sure_noise_in_the_last_band_nothing_changes() -> None:
    for energy in ([9.0, 9.0, 9.0, 9.0, 1.0], [0.01, 1.0, 0.01, 1.0, 0.01]):
        given_energy = torch.tensor(energy, dtype=torch.float64)
        assert torch.equal(found(given_energy), excess_of(given_energy))


def test_noise_that_is_not_white_counts_only_as_far_as_it_could_be() -> None:
    energy = torch.tensor([1.0, 1.0, 1.0, 0.3, 5000.0], dtype=torch.float64)
    # White noise of level 5 would have an energy of 150 in a band that has 0.3.
    level = LARGEST_SHARE * 0.3 / 30
    expected = -math.log(1 - level * 1.0 / 1.0)
    assert found(energy)[2].item() == pytest.approx(expected)
    assert found(energy)[3].item() == pytest.approx(-math.log(1 - LARGEST_SHARE))
    assert found(energy)[4] == excess_of(energy)[4]


def test_it_fades_as_images_come() -> None:
    energy = 1 + 0.5 * NOISE
    excess, all_of_it = excess_of(energy), found(energy)
    for samples, share in ((1, 1.0), (5, 0.75), (16, 1 / 16), (17, 0.0), (200.0, 0.0)):
        some = with_white_noise(excess, energy.log(), NOISE, samples)
        torch.testing.assert_close(some, excess + share * (all_of_it - excess))
    assert with_white_noise(excess, energy.log(), NOISE, 17) is excess


energies = st.lists(st.floats(1e-12, 1e9), min_size=5, max_size=5)


@given(energies)
def test_it_is_finite_and_never_less_than_what_a_band_shows_by_itself(values: list[float]) -> None:
    energy = torch.tensor(values, dtype=torch.float64)
    assert torch.isfinite(found(energy)).all()
    assert (found(energy) >= excess_of(energy)).all()
