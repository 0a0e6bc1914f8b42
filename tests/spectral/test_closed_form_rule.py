"""Shifts of means and variances that are sure, against loops and numbers derived by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttapca.spectral.closed_form_rule import (
    allowed_reach,
    class_reach,
    growth_of_large,
    sure_share,
    with_white_noise,
)
from ttapca.spectral.constants import CONSTANTS

NOISE = torch.tensor([0.01, 0.1, 1.0, 30.0, 1000.0], dtype=torch.float64)
HIGH = torch.tensor([4.0, 3.0, 2.0, 2.0, 2.0], dtype=torch.float64)  # where the usual range ends
LOW = 1 / HIGH
LARGEST_SHARE = 1 - 1 / CONSTANTS.largest_ratio  # of the energy of a band


# Means.


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_the_share_by_its_formula() -> None:
    data = drawn(30, 5) * torch.tensor([0.1, 1.0, 3.0, 1.0, 0.5]) + torch.tensor([2, 2, 2, 0.1, 1])
    reach = torch.tensor([0.25, 0.25, 1.0, 0.5, 4.0], dtype=torch.float64)
    found = sure_share(data.mean(0).square(), data.square().mean(0), reach, 30, 12.0)
    for component, share in enumerate(found.tolist()):
        values = data[:, component].tolist()
        mean = sum(values) / 30
        spread = sum((value - mean) ** 2 for value in values) / 30
        own = (30 * spread + CONSTANTS.prior) / (30 + CONSTANTS.prior)
        bound = reach[component].item() * own + CONSTANTS.chance * max(own, 1.0) / 12
        expected = max(0.0, 1 - bound / mean**2) * 11 / 12
        assert share == pytest.approx(expected, rel=1e-9)
    assert found[0] > 0.4  # far, and with little variance of its own
    assert found[3] == 0  # near


def test_reach_by_a_loop_over_classes() -> None:
    labels = torch.arange(300) % 3
    data = drawn(300, 4) + torch.tensor([[0.0] * 4, [3, 0, 0, 0], [0, 0, 1, 0]])[labels]
    mean, variances = data.mean(0), data.var(0, correction=0)
    means = torch.stack([data[labels == k].mean(0) for k in range(3)])
    found = class_reach(means - mean, torch.full((3,), 1 / 3, dtype=torch.float64), variances)
    for component in range(4):
        own = [data[labels == k, component] for k in range(3)]
        within = sum(float(each.var(correction=0)) for each in own) / 3
        farthest = max(float(each.mean() - mean[component]) ** 2 for each in own)
        assert found[component].item() == pytest.approx(farthest / within)
    assert found[0] > 1 > 0.3 > found[1]


def test_no_class_is_so_far_that_nothing_is_left_within() -> None:
    found = class_reach(torch.tensor([[2.0], [-2.0]]), torch.tensor([0.5, 0.5]), torch.ones(1))
    assert found.item() == pytest.approx(4 * 64)


def test_a_batch_of_the_farthest_class_is_left_alone_where_the_rule_is_whole() -> None:
    """At the whole reach, the mean of a class counts for nothing, however many images it has."""
    square, within = torch.tensor(9.0), torch.tensor(1.0)
    for count in (10, 1000):
        assert sure_share(square, square + within, square / within, count, count) == 0
    # The same mean with a tenth of the variance is no class: contrast was lost.
    assert sure_share(square, square + 0.1, torch.tensor(4.5), 1000, 1000) > 0.8


def test_what_is_allowed() -> None:
    ones = torch.ones(2, dtype=torch.float64)
    assert allowed_reach(None, ones).tolist() == [CONSTANTS.chance] * 2
    found = allowed_reach(torch.tensor([10.0, 0.0]), ones)
    assert found.tolist() == [10 * CONSTANTS.farthest_class, CONSTANTS.smallest_reach]
    assert found.dtype == torch.float64


def test_more_images_are_surer_and_one_says_nothing() -> None:
    square, energy = torch.tensor(4.0), torch.tensor(5.0)
    shares = [
        sure_share(square, energy, torch.tensor(0.25), n, n).item() for n in (1, 2, 8, 32, 200)
    ]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] > 0.85


# White noise.


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


LARGE = torch.tensor([0.7, 0.3, 0.0, 0.0, 0.0], dtype=torch.float64)


@given(st.floats(1.0, 50.0), st.floats(0.0, 1.0))
def test_growth_is_that_of_the_large_components_without_white_noise(
    growth: float, level: float
) -> None:
    energy = torch.full((5,), growth, dtype=torch.float64) + level * NOISE
    # A loop over bands, where the range of the source ends at the energies of the source.
    noise = min(level + (growth - 1) / 1000, LARGEST_SHARE * float((energy / NOISE).min()))
    surplus = 0.0
    for band, share in enumerate(LARGE.tolist()):
        more = float(energy[band]) - 1 - noise * float(NOISE[band])
        surplus += share * max(more, 0.0)
    excess = energy.log().clamp(min=0)
    found = growth_of_large(excess, energy.log(), NOISE, LARGE, CONSTANTS)
    assert found.item() == pytest.approx(math.log1p(surplus), rel=1e-6, abs=1e-9)


def test_bands_of_small_components_do_not_make_a_whole_grow() -> None:
    energy = torch.tensor([1.0, 0.5, 9.0, 90.0, 900.0], dtype=torch.float64)
    assert (
        growth_of_large(energy.log().clamp(min=0), energy.log(), NOISE, LARGE, CONSTANTS).item()
        == 0.0
    )
