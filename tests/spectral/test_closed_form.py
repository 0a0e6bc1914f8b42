"""Closed-form gains, against what can be derived by hand."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttapca.errors import NotEnoughDataError, OptionError, ShapeError
from ttapca.spectral import closed_form, closed_form_rule
from ttapca.spectral.calibration import SourceSpectrum, band_edges, band_means, spreading_matrix
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.closed_form_rule import ClosedFormRule, independent_images, two_sided_gain
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.cosine import Cosine
from ttapca.spectral.gains import SourceComponents, make_gain
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.stream import ScaleGivenBack, shift_of
from ttapca.spectral.stream_state import Spectrum, leaves

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


def seen_by(gain: ClosedFormGain) -> Spectrum:
    """What the stream of a gain has shown by now, in one row."""
    state = gain.stream.state
    assert state is not None
    found = state.spectra[gain.number]
    assert len(found) == 1
    return found


def bands_seen_by(gain: ClosedFormGain) -> Tensor:
    """The band energies of the same."""
    return gain.by_band(seen_by(gain).energies[0])


@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["as the source", "shifted"])
@pytest.mark.parametrize("size", [1, 40])
def test_many_components_have_the_gains_that_few_would_have(
    size: int, shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (calibrated(FALLING) for _ in range(2))
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


def test_what_has_grown_as_a_whole_is_not_taken_for_noise() -> None:
    """Shapes of three times the contrast stay, and noise on top of them goes."""
    deviations = torch.arange(1, 512, dtype=torch.float64) ** -1.0
    grown = 3 * gaussian(3000, deviations)
    kept = calibrated(deviations, restore=0.0)(grown)
    assert kept.min() > 0.9
    assert calibrated(deviations, shrink=0.5, restore=0.0)(grown).max() < 0.4  # asked to undo it
    noise = 0.2 * gaussian(3000, torch.ones_like(deviations), seed=3)
    found = calibrated(deviations, restore=0.0)(grown + noise)
    true = (3 * deviations).square() / ((3 * deviations).square() + 0.2**2)
    assert (found.log() - true.log()).abs().mean() < 0.15


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
    excess = torch.stack([source.batches_of(n).normal_range(0.6).excess(energy) for n in sizes])
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
        usual = normal.normal_range(0.8)
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
    usual = gain.normal.batches_of(size).normal_range(0.6)
    excess = usual.excess(band_means(batches, gain.edges).log())
    alone = (excess == 0).all(1).double().mean()
    assert alone.item() == pytest.approx(0.6, abs=0.12)


def test_a_shifted_mean_is_taken_away_and_a_source_mean_is_not() -> None:
    deviations = FALLING
    source = gaussian(1000, deviations)
    shifted = source + 5 * deviations
    gain = calibrated(deviations, shrink=0.5)
    gains = gain(shifted)
    offset, outside = gain.offset()
    assert outside is None
    unknown = CONSTANTS.chance  # reach where no class is known, for the source's variance
    assert offset.div(deviations).mean().item() == pytest.approx(5 * (1 - unknown / 25), rel=0.03)
    # Around the new mean nothing but what was left of the shift is to be scaled.
    plain = calibrated(deviations, shrink=0.5, center=0.0)
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
    source = SourceComponents(
        deviations, deviations, energies, lambda: deviations, rest=rest, sample_size=20
    )
    gain = make_gain("two-sided", source, threshold=0.0, restore=0.0)
    assert isinstance(gain, ClosedFormGain)
    assert gain.watches_rest
    assert gain.rest_gain() == 1.0
    gains = gain(gaussian(400, deviations), 3 * gaussian(400, torch.ones(20).double(), 3))
    assert float(gain.rest_gain()) == pytest.approx(1 / 9, rel=0.1)
    assert (gains > 0.8).all()
    seen = seen_by(gain)
    log_energy = gain.log_energies(seen.energies, seen.rest_energy)
    assert log_energy[0, -1].item() == pytest.approx(2 * math.log(3), abs=0.1)
    assert log_energy.shape == (1, len(gain.edges))
    assert bands_seen_by(gain).shape == (len(gain.edges) - 1,)
    moved = make_gain("two-sided", source)
    shift = torch.linspace(-9, 9, 20).double()
    moved(gaussian(400, deviations), 0.1 * gaussian(400, torch.ones(20).double(), 3) + shift)
    offset, away = moved.offset()
    assert offset.abs().max() < 0.1
    assert torch.allclose(away, shift, rtol=0.1, atol=0.1)


# What a gain keeps between batches.


def test_old_batches_count_less() -> None:
    gain = calibrated(ONES, memory=50.0)
    first, second = (gaussian(50, ONES, seed).square() for seed in (1, 2))
    for batch in (first, second):
        gain(batch.sqrt())
    old = math.exp(-1.0)
    expected = (old * first.mean(0) + second.mean(0)) / (1 + old)
    assert torch.allclose(bands_seen_by(gain), band_means(expected, gain.edges))
    assert float(seen_by(gain).samples) == pytest.approx(50 * (1 + old))
    # Nothing is forgotten: a stream of batches is one large batch.
    data = 2 * gaussian(300, ONES)
    whole, parts = calibrated(ONES, memory=1e12), calibrated(ONES, memory=1e12)
    assert torch.allclose([parts(batch) for batch in data.split(100)][-1], whole(data))


def test_a_broken_or_empty_batch_changes_nothing() -> None:
    gain = calibrated(ONES)
    before, state = gain(3 * gaussian(20, ONES)), gain.stream.state
    broken = gaussian(20, ONES)
    broken[3, 4] = math.nan
    for batch in (broken, broken[:0], None):
        assert torch.equal(gain(batch), before)
        assert gain.stream.state is state
    assert float(seen_by(gain).samples) == 20


def test_a_second_pass_over_a_batch_has_the_gains_of_the_first_and_leaves_no_mark() -> None:
    gain, once = calibrated(ONES), calibrated(ONES)
    data = 2 * gaussian(50, ONES)
    for each, passes in ((gain, 3), (once, 1)):
        each.stream.start_batch(50)
        found = [each(data + number) for number in range(passes)]
        assert all(torch.equal(gains, found[0]) for gains in found)
        each.stream.end_batch()
    for name, value in leaves(seen_by(gain)).items():
        assert torch.equal(value, leaves(seen_by(once))[name])
    assert float(seen_by(gain).samples) == 50


def test_between_batches_gains_are_those_of_the_last_one() -> None:
    gain = calibrated(FALLING)
    assert torch.equal(gain(), torch.ones_like(FALLING))
    gain.stream.start_batch(60)
    during = gain(0.3 * gaussian(60, FALLING) + 3 * FALLING)
    gain.stream.end_batch()
    state = gain.stream.state
    torch.testing.assert_close(gain(), during)
    offset, _ = gain.offset()
    torch.testing.assert_close(gain(gaussian(20, FALLING, seed=1)), during)
    torch.testing.assert_close(gain.offset()[0], offset)
    assert gain.stream.state is state
    gain.stream.reset()
    assert torch.equal(gain(), torch.ones_like(FALLING))


def test_what_layers_give_back_is_not_restored_twice() -> None:
    """Of an exponent of 0.6 a quarter is left, where they restore three quarters of a scale."""
    data = 0.2 * gaussian(200, FALLING)
    full, rest, quarter = (
        calibrated(FALLING, "wiener", center=0.0, **options)
        for options in ({}, {}, {"restore": 0.15})
    )
    rest.stream.given_back = ScaleGivenBack(0.75)
    gains = rest(data)
    assert torch.equal(gains, quarter(data))
    torch.testing.assert_close(gains, full(data) ** 0.25)
    noisy = 3 * gaussian(200, FALLING, seed=1)  # no scale is lost there
    for gain in (full, rest):
        gain.stream.reset()
    assert torch.equal(rest(noisy), full(noisy))


def test_what_a_stream_says_is_what_its_energies_say() -> None:
    gain = calibrated(FALLING)
    assert gain.stream.start is not None
    assert gain.evidence_in(gain.stream.start) is None
    data = 1.5 * gaussian(80, FALLING)
    gain(data)
    assert gain.stream.state is not None
    found = gain.evidence_in(gain.stream.state)
    assert found is not None
    torch.testing.assert_close(found.energies, bands_seen_by(gain))
    assert found.samples == 80
    assert found.p_value == gain.evidence(found.energies, 80.0).p_value < 0.01
    assert bool((found.band_p_values[3:] < 0.05).all())
    # Images of few classes say less.
    skewed = gain.evidence_in(gain.stream.state, skew=1.0)
    assert skewed is not None
    independent = independent_images(80.0, 1.0)
    assert skewed.p_value == gain.evidence(found.energies, 80.0, independent).p_value
    assert gain.band_gains(gain.stream.state).shape == (len(gain.edges) - 1,)
    torch.testing.assert_close(
        gain.band_gains(gain.stream.state), gain.band_means(gain().log()).exp()
    )


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
        ({"states": 0}, "`states` must be a whole number from 1 on; found 0"),
        ({"name": "wiener", "window": 5}, "`wiener` has no option `window`"),
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
    with pytest.raises(NotEnoughDataError, match="at least two"):
        SourceSpectrum(torch.ones(1, 3))


# What exporters need: the same, without looking at numbers.

IMAGES = 150


def few_images(components: int = 7, bands: int = 3) -> SourceComponents:
    """What is known of so many source images, in float32."""
    generator = torch.Generator().manual_seed(0)
    ones, energies = torch.ones(components), torch.rand(IMAGES, bands, generator=generator) + 0.1
    return SourceComponents(ones, ones, energies, lambda: ones)


def traceable(source: SourceComponents) -> ClosedFormRule:
    found = ClosedFormRule(source)
    found.make_traceable()
    return found


TRACEABLE, RULE = traceable(few_images()), ClosedFormRule(few_images())


@given(st.lists(st.floats(1, 4 * IMAGES, width=32), min_size=1, max_size=5))
def test_what_is_usual_is_looked_up(sizes: list[float]) -> None:
    leeway = torch.zeros(len(sizes), 2, 3)
    found = TRACEABLE.normal_ranges(torch.tensor(sizes), leeway)
    expected = RULE.normal_ranges(torch.tensor(sizes), leeway.double())
    for each in dataclasses.fields(found):
        value: Tensor = getattr(found, each.name)
        wanted = getattr(expected, each.name)
        if len(sizes) == 1:  # what is usual for one stream has no rows
            wanted = wanted[None]
        assert value.dtype == torch.float32
        assert torch.equal(value, wanted.float())


def test_bands_of_many_components_are_averaged_without_the_matrix() -> None:
    rule = traceable(few_images(closed_form_rule.LARGE, closed_form_rule.LARGE.bit_length()))
    energies = torch.rand(2, closed_form_rule.LARGE, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rule.by_band(energies), energies @ rule.averages)


def test_gains_are_nearly_the_same_in_float32() -> None:
    source = few_images(components=31, bands=5)
    plain, narrow = make_gain("wiener", source), make_gain("wiener", source)
    assert isinstance(plain, ClosedFormGain)
    assert isinstance(narrow, ClosedFormGain)
    narrow.make_traceable()
    assert narrow.by_band(torch.ones(31)).dtype == torch.float32
    for seed, scale in enumerate((1.0, 3.0, 0.1)):
        for gain in (plain, narrow):
            gain.stream.reset()
        data = (scale * gaussian(40, ONES, seed) + 9 * seed).float()
        torch.testing.assert_close(narrow(data), plain(data), rtol=1e-3, atol=1e-4)
        found, expected = narrow.offset(), plain.offset()
        assert (found is None) == (expected is None) == (seed == 0)
        if found is not None and expected is not None:
            torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-4)
    assert shift_of(narrow.stream.state) == pytest.approx(shift_of(plain.stream.state), abs=1e-3)


def test_exporters_are_given_images_of_the_fitted_size(monkeypatch: pytest.MonkeyPatch) -> None:
    basis = Cosine(torch.eye(1), torch.arange(16), (1, 4, 4))
    other = OtherSize(basis, (1, 6, 6), torch.zeros(16))
    gain = ClosedFormGain(few_images(16, bands=5))
    gain.make_traceable()
    gain.stream.start_batch(2)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with pytest.raises(ShapeError, match=r"fitted on; found samples of shape \(1, 6, 6\)"):
        gain(torch.ones(2, 16), None, other)
