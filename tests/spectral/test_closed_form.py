"""Closed-form gains, against what can be derived by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttapca.errors import NotEnoughDataError, OptionError
from ttapca.spectral import closed_form, closed_form_rule
from ttapca.spectral.calibration import (
    SourceSpectrum,
    band_edges,
    band_means,
    spreading_matrix,
)
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.gains import SourceComponents, make_gain
from ttapca.spectral.variance_ratios import two_sided_gain

COMPONENTS = 63
ONES = torch.ones(31, dtype=torch.float64)
FALLING = torch.arange(1, COMPONENTS + 1, dtype=torch.float64) ** -0.5


def gaussian(n: int, deviations: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, len(deviations), generator=generator, dtype=torch.float64) * deviations


def calibrated(deviations: Tensor, name: Any = "two-sided", **options: Any) -> ClosedFormGain:
    """A gain that knows 500 Gaussian source samples."""
    edges = band_edges(len(deviations))
    energies = band_means((gaussian(500, deviations, seed=9) / deviations).square(), edges)
    noise = torch.ones_like(deviations)
    gain = make_gain(
        name, SourceComponents(deviations, deviations, energies, lambda: noise), **options
    )
    assert isinstance(gain, ClosedFormGain)
    return gain


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["as the source", "shifted"])
@pytest.mark.parametrize("size", [1, 40])
def test_many_components_have_the_gains_that_few_would_have(
    size: int, shift: float, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"window": window} if window else {}
    few, many = (calibrated(FALLING, **options) for _ in range(2))
    batches = [gaussian(size, FALLING, seed=seed) + shift * FALLING[:1] for seed in range(3)]
    expected = [few(batch) for batch in batches]
    for module in (closed_form, closed_form_rule):
        monkeypatch.setattr(module, "LARGE", 1)
    for batch, gains in zip(batches, expected, strict=True):
        torch.testing.assert_close(many(batch), gains)
    offsets = [None if gain.offset() is None else gain.offset()[0] for gain in (few, many)]
    torch.testing.assert_close(offsets[1], offsets[0])
    assert bool((expected[-1] == 1).all()) == (not shift)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3000))
def test_bands_cover_every_component_once(n: int) -> None:
    edges = band_edges(n)
    assert edges[0] == 0
    assert edges[-1] == n
    assert all(low < high for low, high in pairwise(edges))
    fewer = band_edges(max(1, n // 3))
    assert fewer[:-1] == edges[: len(fewer) - 1]  # the same bands, except for the last
    values = torch.rand(2, n, dtype=torch.float64)
    means = [values[:, low:high].mean(1) for low, high in pairwise(edges)]
    assert torch.allclose(band_means(values, edges), torch.stack(means, 1))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300))
def test_spreading_keeps_a_constant_and_the_order(n: int) -> None:
    spread = spreading_matrix(band_edges(n))
    assert torch.allclose(spread.sum(0), torch.ones(n))
    rising = torch.arange(len(spread), dtype=torch.float32) @ spread
    assert bool((rising.diff() >= -1e-5).all())


def test_gains_by_their_formula() -> None:
    ratio = torch.tensor([0.01, 0.5, 1.0, 3.0, 100.0])
    found = two_sided_gain(ratio.log(), shrink=0.8, restore=0.3, largest_ratio=64.0)
    expected = [min(r, 1) ** 0.8 * min(max(r, 1), 64) ** 0.3 for r in ratio.tolist()]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("deviations", "noise", "worst"),
    [
        (torch.full((COMPONENTS,), 1.7, dtype=torch.float64), 0.3, 0.06),
        (torch.full((COMPONENTS,), 1.7, dtype=torch.float64), 2.0, 0.06),
        # A band is an octave, in which this gain falls by up to a half: off at its ends.
        (torch.arange(1, 512, dtype=torch.float64) ** -0.6, 0.1, 0.35),
    ],
    ids=["little noise", "much noise", "falling spectrum"],
)
def test_white_noise_gives_the_wiener_gain(deviations: Tensor, noise: float, worst: float) -> None:
    """The best linear estimate of x from x + e is s / (s + e)."""
    gain = calibrated(deviations, shrink=1.0, restore=0.0, threshold=0.0)
    found = gain(
        gaussian(3000, deviations) + noise * gaussian(3000, torch.ones_like(deviations), seed=3)
    )
    true = deviations.square() / (deviations.square() + noise**2)
    error = (found.log() - true.log()).abs()
    assert error.max() < worst
    assert error.mean() < 0.08


@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_matching_inverts_a_scaling(scale: float) -> None:
    deviations = FALLING
    energies = band_means(torch.ones(40, COMPONENTS, dtype=torch.float64), band_edges(COMPONENTS))
    source = SourceComponents(deviations, deviations, energies, lambda: deviations)
    gain = make_gain("match", source, threshold=0.0, center=0.0)
    # Components of exactly the source's variance, so that the inverse is exact.
    signs = gaussian(8, deviations).sign()
    assert torch.allclose(gain(scale * signs * deviations), torch.full_like(deviations, 1 / scale))
    bounded = make_gain("match", source, threshold=0.0, largest_ratio=16.0, center=0.0)
    assert bounded(0 * signs).max().item() == pytest.approx(4.0)  # energies of zero: the limit


def test_calibration_knows_how_much_batches_of_a_size_vary() -> None:
    """Mean log of a chi-square over its degrees of freedom, and its spread, for a single sample."""
    deviations = torch.ones(1, dtype=torch.float64)
    source = SourceSpectrum(gaussian(20_000, deviations).square())
    single = source.batches_of(1)
    assert single.mean.item() == pytest.approx(-math.log(2) - 0.5772, abs=0.05)
    assert single.log_energies.var().item() == pytest.approx(math.pi**2 / 2, rel=0.05)
    many = source.batches_of(64)
    assert many.mean.item() == pytest.approx(-1 / 64, abs=0.02)
    assert many.log_energies.var().item() == pytest.approx(2 / 64, rel=0.25)
    assert source.batches_of(64) is many  # drawn once


def test_the_rule_is_smooth_in_the_size_of_the_batch() -> None:
    """The same energies count for more in a larger batch, and never jump."""
    edges = band_edges(31)
    source = SourceSpectrum(band_means(gaussian(500, ONES).square(), edges))
    energy = torch.full((len(edges) - 1,), math.log(3.0), dtype=torch.float64)
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 200]
    excess = torch.stack([source.batches_of(n).usual(0.6).excess(energy) for n in sizes])
    # Sizes grow by up to a half (doubling first), the spread of a mean falls by its root.
    assert bool((excess.diff(dim=0) > -0.05).all())
    assert excess.diff(dim=0)[3:].max() < 0.3
    assert excess[-1].mean() == pytest.approx(math.log(3.0), abs=0.25)


def test_a_batch_as_the_source_is_not_called_shifted() -> None:
    gain = calibrated(ONES)
    for size in (1, 10, 200):
        normal = gain.normal.batches_of(size)
        energies = [
            band_means(gaussian(size, ONES, seed).square().mean(0), gain.edges).log()
            for seed in range(40)
        ]
        usual = normal.usual(0.8)
        certain = usual.judged(torch.stack(energies))[0]
        assert (certain > 0).double().mean() < 0.3
        values = normal.p_value(torch.stack(energies))
        assert 0.2 < values.mean() < 0.8
        assert usual.judged(energies[0] + 5.0)[0].item() > 0.5
        assert normal.p_value(energies[0] + 5.0).item() < 0.01


@pytest.mark.parametrize("size", [1, 50])
def test_the_threshold_is_the_share_of_source_batches_left_alone(size: int) -> None:
    gain = calibrated(ONES)
    batches = gaussian(size * 300, ONES, seed=4).square().reshape(300, size, 31).mean(1)
    usual = gain.normal.batches_of(size).usual(0.6)
    excess = usual.excess(band_means(batches, gain.edges).log())
    alone = (excess == 0).all(1).double().mean()
    assert alone.item() == pytest.approx(0.6, abs=0.12)


def test_a_shifted_mean_is_taken_away_and_a_source_mean_is_not() -> None:
    deviations = FALLING
    source = gaussian(1000, deviations)
    shifted = source + 5 * deviations
    gain = calibrated(deviations)
    gains = gain(shifted)
    offset, outside = gain.offset()
    assert outside is None
    unknown = 4.0 * 1  # reach where no class is known, for a variance that is the source's
    assert offset.div(deviations).mean().item() == pytest.approx(5 * (1 - unknown / 25), rel=0.03)
    # Around the new mean nothing but what was left of the shift is to be scaled.
    plain = calibrated(deviations, center=0.0)
    assert (gains > 2 * plain(shifted)).all()
    assert plain.offset() is None
    for batch in (source, shifted[:1]):  # one image is no reason to believe in another mean
        fresh = calibrated(deviations)
        fresh(batch)
        assert fresh.offset() is None


def test_gains_follow_the_energies_around_the_moved_mean() -> None:
    """They are those of a batch from which the offset was taken before."""
    data = 0.3 * gaussian(200, FALLING) + 3 * FALLING
    centred = calibrated(FALLING)
    gains = centred(data)
    offset, _ = centred.offset()
    direct = calibrated(FALLING, center=0.0)
    assert torch.allclose(gains, direct(data - offset))
    half = calibrated(FALLING, center=0.5)
    half(data)
    assert torch.allclose(half.offset()[0], offset / 2)


def test_the_mean_is_that_of_the_stream() -> None:
    data = 0.2 * gaussian(400, FALLING) + 3 * FALLING
    parts, whole = calibrated(FALLING, memory=1e12), calibrated(FALLING, memory=1e12)
    for batch in data.split(100):
        parts(batch)
    whole(data)
    assert torch.allclose(parts.offset()[0], whole.offset()[0])
    # An old mean fades like old energies.
    for _ in range(30):
        parts.stream.memory = 100.0
        parts(gaussian(100, FALLING, seed=8))
    assert parts.offset() is None or parts.offset()[0].div(FALLING).abs().max() < 0.3


def test_classes_that_lie_far_apart_are_left_where_they_are() -> None:
    deviations = torch.ones(31, dtype=torch.float64)
    energies = band_means(gaussian(500, deviations, seed=9).square(), band_edges(31))
    reach = torch.zeros_like(deviations)
    reach[0] = 50.0
    source = SourceComponents(deviations, deviations, energies, lambda: deviations, reach)
    gain = make_gain("two-sided", source)
    gain(gaussian(300, deviations) + 4.0)
    offset, _ = gain.offset()
    assert offset[0] == 0
    assert (offset[1:] > 3).all()


def test_what_lies_outside_the_basis_is_one_more_band() -> None:
    """Its gain is Wiener's for its own energy, and its mean is moved back like any other."""
    deviations = torch.ones(31, dtype=torch.float64)
    inside, outside = gaussian(500, deviations, seed=9), gaussian(500, torch.ones(20).double(), 7)
    energies = band_means(inside.square(), band_edges(31))
    rest = outside.square().sum(1)
    source = SourceComponents(deviations, deviations, energies, lambda: deviations, None, rest)
    gain = make_gain("two-sided", source, threshold=0.0, restore=0.0)
    assert gain.watches_rest
    assert gain.rest_gain() == 1.0
    gains = gain(gaussian(400, deviations), 3 * gaussian(400, torch.ones(20).double(), 3))
    assert gain.rest_gain() == pytest.approx(1 / 9, rel=0.1)
    assert (gains > 0.8).all()
    assert gain.log_energy()[-1].item() == pytest.approx(2 * math.log(3), abs=0.1)
    assert gain.log_energy().shape == (len(gain.edges),)
    assert gain.band_energies().shape == (len(gain.edges) - 1,)
    moved = make_gain("two-sided", source)
    shift = torch.linspace(-9, 9, 20).double()
    moved(gaussian(400, deviations), 0.1 * gaussian(400, torch.ones(20).double(), 3) + shift)
    offset, away = moved.offset()
    assert offset.abs().max() < 0.1
    assert torch.allclose(away, shift, rtol=0.1, atol=0.1)


def test_a_window_follows_what_bands_are_too_wide_for() -> None:
    """Every other component of the last band is scaled by 3: the bands see their mean only."""
    deviations, scale = torch.ones(2, COMPONENTS, dtype=torch.float64)
    scale[40:50] = 3.0
    data = gaussian(2000, deviations) * scale
    fine = calibrated(deviations, window=1)(data)
    coarse = calibrated(deviations)(data)
    assert torch.allclose(fine[40:50], torch.full((10,), 1 / 9, dtype=torch.float64), rtol=0.35)
    assert (fine[51:] > 0.8).all()
    assert (coarse[51:] < 0.6).all()
    gain = calibrated(ONES, window=5)
    found = gain(gaussian(100, ONES, seed=3))  # a batch like the source
    assert gain.shift < 0.5
    assert ((found - 1).abs() < 0.2).all()


def test_what_is_nothing_but_noise_is_not_restored() -> None:
    """Signal of variance 1 is scaled by 1/4 and 1/100; rounding adds 0.01 to both."""
    deviations = torch.ones(7, dtype=torch.float64) * math.sqrt(1.01)
    scale = torch.tensor([0.25] * 3 + [0.01] * 4, dtype=torch.float64)
    noise = 0.1 * gaussian(5000, torch.ones(7, dtype=torch.float64), seed=4)
    data = gaussian(5000, torch.ones(7, dtype=torch.float64)) * scale + noise
    plain = calibrated(deviations, restore=0.5, threshold=0.0)(data)
    aware = calibrated(deviations, restore=0.5, threshold=0.0, floor=0.01)(data)
    assert (plain[5:] > 5).all()
    # sqrt(s / t) times the root of the share of signal, both relative to the source.
    t = 0.25**2 + 0.01
    expected = math.sqrt(1.01 / t) * math.sqrt((1 - 0.01 / t) / (1 - 0.01 / 1.01))
    assert aware[0] == pytest.approx(expected, rel=0.1)  # 500 source samples say no more
    assert (aware[5:] < 1.5).all()


# What a gain keeps between batches.


def test_old_batches_count_less() -> None:
    gain = calibrated(ONES, memory=50.0)
    first, second = (gaussian(50, ONES, seed).square() for seed in (1, 2))
    for batch in (first, second):
        gain(batch.sqrt())
    old = math.exp(-1.0)
    expected = (old * first.mean(0) + second.mean(0)) / (1 + old)
    assert torch.allclose(gain.band_energies(), band_means(expected, gain.edges))
    assert gain.samples == pytest.approx(50 * (1 + old))
    # Nothing is forgotten: a stream of batches is one large batch.
    data = 2 * gaussian(300, ONES)
    whole, parts = calibrated(ONES, memory=1e12), calibrated(ONES, memory=1e12)
    assert torch.allclose([parts(batch) for batch in data.split(100)][-1], whole(data))


def test_a_broken_or_empty_batch_changes_nothing() -> None:
    gain = calibrated(ONES)
    before = gain(3 * gaussian(20, ONES))
    broken = gaussian(20, ONES)
    broken[3, 4] = math.nan
    for batch in (broken, broken[:0], None):
        assert torch.equal(gain(batch), before)
    assert gain.samples == 20


def test_what_is_learned_multiplies_the_closed_form() -> None:
    data = 2 * gaussian(50, ONES)
    closed, pulled = calibrated(ONES, "wiener"), calibrated(ONES, "pulled")
    assert torch.equal(pulled(data).detach(), closed(data))
    with torch.no_grad():
        pulled.log_multiplier.fill_(0.1)
    assert torch.allclose(pulled(data), closed(data) * math.exp(0.1), rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shrink": -1.0}, "`shrink` must be a finite number from 0 on; found -1"),
        ({"restore": math.inf}, "`restore` must be a finite number"),
        ({"threshold": -0.1}, "`threshold` must be a finite number from 0 below 1"),
        ({"largest_ratio": 1.0}, "`largest_ratio` must be a finite number above 1"),
        ({"center": 1.5}, "`center` must be a finite number from 0 to 1"),
        ({"memory": 0.0}, "`memory` must be a finite number above 0"),
        ({"window": 4}, "`window` must be an odd number of components; found 4"),
        ({"floor": -1.0}, "`floor` must be a finite number from 0 on"),
        ({"name": "pulled", "limit": 0.5}, "`limit` must be a finite number above 1"),
        ({"name": "pulled", "lmit": 2.0}, "`pulled` has no option `lmit`.*Did you mean `limit`"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        calibrated(torch.ones(3, dtype=torch.float64), **options)


def test_what_is_missing_is_named() -> None:
    ones = torch.ones(3)
    with pytest.raises(OptionError, match="Fit it again"):
        make_gain("wiener", SourceComponents(ones, ones, None, lambda: ones))
    with pytest.raises(OptionError, match="at least one component"):
        band_edges(0)
    with pytest.raises(NotEnoughDataError, match="at least two"):
        SourceSpectrum(torch.ones(1, 3))
