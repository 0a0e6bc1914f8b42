"""Images of other sizes than that of the fit: what cosines do with them, and who refuses them."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ttapca
from fixed_gains import FixedGain
from oracles import images, natural, small_convnet
from ttapca import SpectralFilter
from ttapca.errors import ShapeError
from ttapca.spectral.calibration import SourceSpectrum
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.cosine import CoefficientMoments, Cosine, fit_channel_dct
from ttapca.spectral.cross_validation import energies_of, rest_of
from ttapca.spectral.gains import Gain, SourceComponents, make_gain
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.stream import Stream, shift_of
from ttapca.spectral.stream_batch import ImageRows, StreamBatch
from ttapca.spectral.stream_state import Spectrum, StreamState, leaves

FITTED = (3, 12, 16)
NUMBERS = math.prod(FITTED)
SIZES = [(7, 9), (12, 10), (24, 32), (31, 13), (12, 17), (3, 40), (1, 1)]
ROTATION = torch.linalg.qr(images(3, shape=(3,)))[0]
MEAN = images(1, seed=4, shape=(NUMBERS,))[0]


def places(count: int = NUMBERS) -> Tensor:
    return torch.randperm(NUMBERS, generator=torch.Generator().manual_seed(0))[:count]


def basis_of(count: int = NUMBERS) -> Cosine:
    return Cosine(ROTATION, places(count), FITTED)


def at(size: tuple[int, int], count: int = NUMBERS) -> OtherSize:
    return basis_of(count).for_shape((3, *size), MEAN)


def filter_of(gain: Gain | None = None, count: int = NUMBERS) -> SpectralFilter:
    return SpectralFilter(MEAN, basis_of(count), shape=FITTED, gain=gain)


def some_gains(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(count, generator=generator, dtype=torch.float64)


# An oracle that goes through the cosines one by one.


def layout(size: int, other: int) -> int:
    return max(1, min(8, size // 8, other // 8))


def partner(index: int, size: int, other: int) -> int:
    if index < layout(size, other) or other == 1:
        return min(index, other - 1)
    distances = {each: abs(index / size - each / other) for each in range(1, other)}
    near = [each for each in distances if distances[each] < min(distances.values()) + 1e-12]
    # Half-way between two, the even one is taken.
    return near[0] if len(near) == 1 else next(each for each in near if each % 2 == 0)


def frequencies(height: int, width: int) -> Tensor:
    down, across = torch.arange(height).double() / height, torch.arange(width).double() / width
    found = torch.hypot(down[:, None], across)
    found[0, 0] = 0.5 / math.sqrt(height * width)
    return found


def slow_filter(x: Tensor, mean: Tensor, gains: Tensor, order: Tensor, rest: float) -> Tensor:
    _, height, width = FITTED
    rows, columns = x.shape[2:]
    table = torch.full((NUMBERS,), rest, dtype=torch.float64)
    table[order] = gains
    table = table.reshape(FITTED)
    turned = np.einsum("nchw,ck->nkhw", (x - mean).numpy(), ROTATION.numpy())
    found = scipy.fft.dctn(turned, axes=(2, 3), norm="ortho")
    for u in range(rows):
        for v in range(columns):
            fitted = partner(u, rows, height), partner(v, columns, width)
            found[:, :, u, v] *= table[:, fitted[0], fitted[1]].numpy()
    back = scipy.fft.idctn(found, axes=(2, 3), norm="ortho")
    return torch.from_numpy(np.einsum("nkhw,ck->nchw", back, ROTATION.numpy())) + mean


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("count", [NUMBERS, 100])
def test_every_cosine_has_the_gain_of_its_partner(size: tuple[int, int], count: int) -> None:
    gains, x = some_gains(1, count), images(3, shape=(3, *size))
    mean = at(size).mean.reshape(3, *size)
    for rest in (None, 0.7):
        found = filter_of(FixedGain(gains, rest), count)(x)
        expected = slow_filter(x, mean, gains, places(count), rest or 0.0)
        torch.testing.assert_close(found, expected)
    learned = make_gain("relu", SourceComponents(gains + 0.1, gains, None, lambda: gains))
    with torch.no_grad():
        learned.gamma.fill_(0.3)
        found = filter_of(learned, count)(x)
    expected = slow_filter(x, mean, learned().detach(), places(count), 0.0)
    torch.testing.assert_close(found.detach(), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_components_are_those_of_an_image_of_the_fitted_size(size: tuple[int, int]) -> None:
    rows, columns = size
    x = images(2, shape=(3, *size))
    other, gain = at(size, 100), FixedGain(torch.ones(100, dtype=torch.float64))
    turned = np.einsum("nchw,ck->nkhw", (x - other.mean.reshape(3, *size)), ROTATION)
    table = scipy.fft.dctn(turned, axes=(2, 3), norm="ortho")
    expected = []
    for place in places(100).tolist():
        k, u, v = np.unravel_index(place, FITTED)
        here = partner(u, FITTED[1], rows), partner(v, FITTED[2], columns)
        ratio = float(frequencies(*size)[here] / frequencies(*FITTED[1:])[u, v])
        expected.append(torch.from_numpy(table[:, k, here[0], here[1]] * ratio))
    layer = filter_of(gain, 100)
    layer(x)
    torch.testing.assert_close(gain.seen, torch.stack(expected, 1))
    assert torch.equal(layer.components(x), gain.seen)


def test_a_spectrum_that_falls_with_the_square_of_frequency_is_the_same_at_every_size() -> None:
    fitted = 1 / frequencies(*FITTED[1:])
    for size in SIZES:
        here = (1 / frequencies(*size)).expand(1, 3, *size).reshape(1, -1)
        found = at(size).like_fitted(here)
        torch.testing.assert_close(found.reshape(FITTED), fitted.expand(FITTED))


# Laws.


@given(height=st.integers(1, 40), width=st.integers(1, 40), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=25)
@torch.no_grad()
def test_unit_gains_are_the_identity_and_others_are_linear(
    height: int, width: int, seed: int
) -> None:
    size, generator = (height, width), torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 2, 3, *size, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(filter_of()(x), x)
    ones = torch.ones(50, dtype=torch.float64)
    assert filter_of(FixedGain(ones, 1.0), 50)(x) is x
    layer = filter_of(FixedGain(some_gains(seed, 50), 0.6), 50)
    mean = at(size).mean.reshape(1, 3, *size)
    torch.testing.assert_close(layer(mean), mean)
    expected = 2 * layer(x) - 3 * layer(y) + 2 * mean
    torch.testing.assert_close(layer(2 * x - 3 * y + 2 * mean), expected)


@given(u=st.integers(2, 11), v=st.integers(2, 15), times=st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_a_wave_is_scaled_by_the_gain_of_its_frequency(u: int, v: int, times: int) -> None:
    rows, columns = 12 * times, 16 * times
    down = torch.arange(rows, dtype=torch.float64) + 0.5
    across = torch.arange(columns, dtype=torch.float64) + 0.5
    # As many waves a pixel as the fitted cosine of index u and v.
    wave = torch.cos(math.pi * u / 12 * down)[:, None] * torch.cos(math.pi * v / 16 * across)
    colour = ROTATION[:, 1].reshape(3, 1, 1)
    mean = at((rows, columns)).mean.reshape(1, 3, rows, columns)
    gains = some_gains(5, NUMBERS)
    number = int((places() == 192 + 16 * u + v).nonzero())
    found = filter_of(FixedGain(gains))(mean + colour * wave)
    torch.testing.assert_close(found, mean + gains[number] * colour * wave)


def test_the_fitted_size_goes_the_way_it_always_went(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(3, shape=FITTED)
    for gain in (None, FixedGain(some_gains(1, 50)), FixedGain(some_gains(1, 50), 0.4)):
        layer = filter_of(gain, 50)
        with monkeypatch.context() as patched:
            patched.setattr(Cosine, "for_shape", None)
            found = layer(x)
        flat = x.flatten(1) - MEAN
        inside = layer.basis.project(flat)
        gains = torch.ones(50) if gain is None else gain.gains
        rest = 0.0 if gain is None or gain.rest is None else gain.rest
        expected = (
            MEAN
            + rest * flat
            + layer.basis.add_rebuilt(torch.zeros_like(MEAN), inside * (gains - rest))
        )
        torch.testing.assert_close(found.flatten(1), expected)
    other = at(FITTED[1:])
    torch.testing.assert_close(other.mean, MEAN)
    torch.testing.assert_close(other.like_fitted(x.flatten(1)), x.flatten(1))


def picture(height: int, width: int) -> Tensor:
    """The same smooth picture at any size."""
    down = (torch.arange(height, dtype=torch.float64) + 0.5) / height
    across = (torch.arange(width, dtype=torch.float64) + 0.5) / width
    grey = 0.4 + 0.2 * torch.cos(math.pi * down)[:, None] * torch.cos(2 * math.pi * across)
    return torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64).reshape(3, 1, 1) * grey


@pytest.mark.parametrize("size", SIZES[:-2], ids=str)
def test_a_mean_keeps_its_layout_and_its_brightness(size: tuple[int, int]) -> None:
    other = basis_of().for_shape((3, *size), picture(12, 16).flatten())
    torch.testing.assert_close(other.mean.reshape(3, *size), picture(*size))


@pytest.mark.parametrize("size", [(36, 48), (20, 24)], ids=str)
def test_a_mean_that_was_learned_keeps_its_layout(size: tuple[int, int]) -> None:
    fitted = picture(24, 32)
    basis = Cosine(ROTATION, torch.arange(fitted.numel()), (3, 24, 32))
    other = basis.for_shape((3, *size), torch.zeros_like(fitted).flatten())
    offset = other.offset(basis.project(fitted.reshape(1, -1))[0], None)
    rebuilt = other.add_rebuilt(torch.zeros_like(other.mean), offset[None]).reshape(3, *size)
    # With other proportions, cosines have other frequencies, and other variances by the law.
    tolerance = 1e-12 if size == (36, 48) else 0.05
    torch.testing.assert_close(rebuilt, picture(*size), rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", [(24, 32), (9, 30)], ids=str)
def test_means_are_moved_before_scaling(size: tuple[int, int]) -> None:
    gains, away = some_gains(1, 60), images(1, seed=9, shape=(60,))[0]
    outside = basis_of().rebuilt(images(1, seed=3, shape=(NUMBERS,)).index_fill(1, places(60), 0.0))
    x = images(2, shape=(3, *size))
    layer, plain = (
        filter_of(FixedGain(gains, 0.5, moved), 60) for moved in ((away, outside[0]), None)
    )
    other = at(size, 60)
    offset = other.offset(away, outside[0])
    # The same as to subtract an image first, which has no texture.
    table = offset.reshape(3, *size)
    rows, columns = layout(12, size[0]), layout(16, size[1])
    assert float(table[:, rows:].abs().sum() + table[:, :, columns:].abs().sum()) == 0
    image = other.add_rebuilt(torch.zeros_like(other.mean), offset[None]).reshape(1, 3, *size)
    torch.testing.assert_close(layer(x), plain(x - image))
    # At its own size, what comes out of the components goes back into the image.
    learned = other.components(other.like_fitted(offset[None]))[0]
    again = other.offset(learned, other.outside(other.like_fitted(offset[None]))[0])
    torch.testing.assert_close(again, offset)


# Streams.


SOURCE = natural(300, (16, 16))


def closed_form(n_components: int | None = None) -> SpectralFilter:
    dct = fit_channel_dct(CoefficientMoments((3, 16, 16)).update(SOURCE), n_components)
    basis, variances = Cosine(dct.rotation, dct.order, (3, 16, 16)), dct.explained_variance
    energies = energies_of(SOURCE.flatten(1), dct.mean, variances, basis.project, dct.n_samples)
    rest = None if n_components is None else rest_of(SOURCE.flatten(1), dct.mean, basis)
    deviations = variances.sqrt()
    source = SourceComponents(
        dct.singular_values, deviations, energies, basis.noise, rest=rest, sample_size=3 * 16 * 16
    )
    return SpectralFilter(dct.mean, basis, shape=(3, 16, 16), gain=make_gain("wiener", source))


def state_of(gain: ClosedFormGain) -> StreamState:
    """What the stream of a gain has shown by now."""
    assert gain.stream.state is not None
    return gain.stream.state


def seen_by(gain: ClosedFormGain) -> Spectrum:
    """The same, of the components of its filter."""
    return state_of(gain).spectra[gain.number]


def bands_seen_by(gain: ClosedFormGain) -> Tensor:
    """The band energies of the same."""
    return gain.by_band(seen_by(gain).energies[0])


@pytest.mark.parametrize("components", [None, 200])
@torch.no_grad()
def test_one_stream_holds_images_of_several_sizes(components: int | None) -> None:
    layer = closed_form(components)
    gain = layer.gain
    assert isinstance(gain, ClosedFormGain)
    sizes = [(16, 16), (24, 24), (12, 12), (16, 28)]
    clean, noisy = {}, {}
    for found, level in ((clean, 0.0), (noisy, 0.1)):
        for size in sizes:
            gain.join(Stream())
            x = natural(60, size, seed=5)
            generator = torch.Generator().manual_seed(7)
            x = x + level * torch.randn(x.shape, generator=generator, dtype=torch.float64)
            layer(x)
            found[size] = bands_seen_by(gain), shift_of(gain.stream.state), layer.gains()
    for size in sizes:
        energies, shift, gains = clean[size]
        assert shift == 0
        torch.testing.assert_close(gains, torch.ones_like(gains), rtol=0, atol=0.1)
        # The last bands have hundreds of components: energies are known to a few per cent.
        torch.testing.assert_close(energies[4:], torch.ones_like(energies[4:]), rtol=0.1, atol=0)
        energies, shift, gains = noisy[size]
        assert shift > 0.5
        torch.testing.assert_close(energies[4:], noisy[16, 16][0][4:], rtol=0.2, atol=0)
        # What resizing may have done is no shift: noise has to stand out from more.
        ratio = (gains / noisy[16, 16][2])[63:]
        assert 0.7 < float(ratio.min()) <= float(ratio.max()) < 4
    gain.join(Stream())
    before = shapes_in(state_of(gain))
    for size in sizes * 2:
        generator = torch.Generator().manual_seed(1)
        x = natural(20, size, seed=6)
        layer(x + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64))
    assert shapes_in(state_of(gain)) == before
    torch.testing.assert_close(bands_seen_by(gain)[4:], noisy[16, 16][0][4:], rtol=0.1, atol=0)
    assert float(seen_by(gain).samples) == pytest.approx(160)


def shapes_in(state: StreamState) -> dict[str, Any]:
    """The shape of every tensor of a state, and the type of every number."""
    return {
        name: tuple(value.shape) if isinstance(value, Tensor) else type(value)
        for name, value in leaves(state).items()
    }


@pytest.mark.parametrize("components", [None, 200])
@torch.no_grad()
def test_streams_in_one_batch_are_served_as_each_is_alone(components: int | None) -> None:
    generator = torch.Generator().manual_seed(7)
    x = natural(60, (12, 20), seed=5)
    x[:20] += 0.1 * torch.randn(20, 3, 12, 20, generator=generator, dtype=torch.float64)
    x[20:40] += 1.0
    together = closed_form(components)
    gain = together.gain
    assert isinstance(gain, ClosedFormGain)
    streams, all_ = torch.arange(3).repeat_interleave(20), torch.ones(60, dtype=torch.bool)
    filtered, start = torch.arange(60) != 45, state_of(gain)
    rows = ImageRows(streams, all_, filtered)
    batch = StreamBatch([start] * 3, start, memory=gain.stream.memory, size=60, rows=rows)
    gain.stream.batch = batch
    found = together(x)
    gain.stream.batch = None
    assert torch.equal(found[45], x[45])
    for number, after in enumerate(batch.finish()):
        own = slice(20 * number, 20 * number + 20)
        one = closed_form(components)
        alone, kept = one(x[own]), filtered[own]
        torch.testing.assert_close(found[own][kept], alone[kept], rtol=0, atol=1e-6)
        assert torch.allclose(alone, x[own], atol=0.02) == (number == 2)
        assert isinstance(one.gain, ClosedFormGain)
        for name, value in leaves(seen_by(one.gain)).items():
            torch.testing.assert_close(leaves(after.spectra[gain.number])[name], value)


@torch.no_grad()
def test_a_shift_of_the_mean_is_known_at_every_size() -> None:
    layer = closed_form()
    bright = natural(60, (16, 16), seed=5) + 1.0
    layer(bright)
    layer.gain.stream.start_batch()  # learn nothing more
    layer.gain.stream.end_batch()
    for size in ((16, 16), (24, 24), (12, 20)):
        x = natural(10, size, seed=6)
        moved = layer(x + 1.0)
        assert abs(float((moved - x).mean())) < 0.1


def soft(n: int, seed: int) -> Tensor:
    """Images of 32 x 32 pixels whose spectrum has an end."""
    return F.avg_pool2d(natural(n, (34, 34), seed), 3, stride=1)


def made_smaller(n: int, seed: int) -> Tensor:
    """Such images of 23 x 23 pixels, which are sharper."""
    return F.interpolate(soft(n, seed), (23, 23), mode="bilinear", antialias=True)


@torch.no_grad()
def test_what_resizing_does_is_no_shift() -> None:
    fitted = ttapca.fit(_pointwise(), "0", soft(300, 1), route="dct")
    smaller = made_smaller(60, 2)
    layer = fitted.spectral_filter("wiener", dtype=torch.float64)
    layer(smaller)
    gain = layer.gain
    assert isinstance(gain, ClosedFormGain)
    assert shift_of(gain.stream.state) < 0.05
    evidence = gain.evidence_in(state_of(gain))
    assert evidence is not None
    [leeway] = seen_by(gain).leeway
    assert gain.evidence(evidence.energies, 60.0, leeway=leeway).p_value == evidence.p_value > 0.05
    # By what is usual for images of the fitted size, it would be one.
    assert gain.evidence(evidence.energies, 60.0).p_value < 0.01
    strict = gain.normal.batches_of(60).normal_range(0.8)
    assert float(strict.judged(evidence.energies.log())[0]) > 0.5


def test_what_resizing_does_is_no_reason_for_an_alarm() -> None:
    fitted = ttapca.fit(_pointwise(), "0", soft(300, 1), route="dct")
    given = {"filter": fitted, "order": "shuffled", "outliers": False, "states": 1}
    told: list[ttapca.Health] = []
    with ttapca.adapt(
        _pointwise(), "wiener", forgetting="online", on_shift=told.append, **given
    ) as adapted:
        for seed in range(2, 6):
            adapted(made_smaller(64, seed))
            assert adapted.health.p_value > 0.05
            assert adapted.health.shifted is False
        assert told == []
        for seed in range(6, 9):
            generator = torch.Generator().manual_seed(seed)
            x = made_smaller(64, seed)
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            adapted(x + 0.05 * noise)
        assert [each.shifted for each in told] == [True]


def _pointwise() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        layers = (torch.nn.Conv2d(3, 4, 1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        return torch.nn.Sequential(*layers).double()


# What resizing may do.


def test_leeway_is_what_resizing_does_to_a_spectrum() -> None:
    variances = some_gains(2, NUMBERS) + 0.1
    table = torch.zeros(NUMBERS, dtype=torch.float64)
    table[places()] = variances
    for size in ((7, 9), (24, 32), (12, 20)):
        other, (rows, columns) = at(size), size
        # A resized image has the same cosines as before, and as much brighter coefficients as it
        # has more pixels.
        shared = table.reshape(FITTED)[:, :rows, :columns]
        here = torch.zeros(3, *size, dtype=torch.float64)
        here[:, : shared.shape[1], : shared.shape[2]] = shared * rows * columns / (12 * 16)
        seen = other.like_fitted(here.sqrt().reshape(1, -1)).square()[0, places()]
        expected = (seen / variances).clamp(min=math.exp(-3)).log()
        torch.testing.assert_close(other.leeway(variances)[0], expected)
    # Components whose partner is not in the basis have none.
    assert bool(torch.isfinite(at((7, 9), 20).leeway(variances[:20])).all())


def test_leeway_has_the_softness_of_linear_interpolation() -> None:
    # The kernel is a triangle, two pixels wide: how much of a wave does it leave?
    place = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    for size in ((12, 16), (24, 32)):
        found = at(size).leeway(torch.ones(NUMBERS, dtype=torch.float64))[1]
        for number in range(0, NUMBERS, 17):
            _, u, v = np.unravel_index(int(places()[number]), FITTED)
            energy = 1.0
            for index, side, fitted in ((u, size[0], 12), (v, size[1], 16)):
                waves = partner(index, fitted, side) / (2 * side) * max(1, side / fitted)
                wave = (1 - place.abs()) * torch.cos(2 * math.pi * waves * place)
                energy *= float(torch.trapezoid(wave, place)) ** 2
            assert math.exp(found[number]) == pytest.approx(max(energy, math.exp(-3)), abs=1e-6)


def test_leeway_widens_what_is_normal() -> None:
    generator = torch.Generator().manual_seed(0)
    source = SourceSpectrum(torch.randn(400, 4, 30, generator=generator).square().mean(2))
    nothing = torch.zeros(2, 4)
    leeway = torch.tensor([[0.0, 0.0, 0.5, 2.0], [0.0, 0.0, 0.0, -1.0]])
    for size in (1, 50):
        plain, wide = source.batches_of(size), source.batches_of(size, leeway)
        usual = wide.normal_range(0.8)
        assert source.batches_of(size, nothing) is plain
        assert source.batches_of(size, leeway + 0.01) is wide  # about the same
        for first, second in ((0, 0), (1, 0), (0, 1), (1, 1), (0.5, 0.2)):
            moved = plain.mean + first * leeway[0] + second * leeway[1]
            assert float(usual.judged(moved)[0]) == 0
            assert float(usual.excess(moved).abs().max()) < 0.2
        far = plain.mean + 3 * leeway[0]
        assert float(usual.judged(far)[0]) > 0
        # Bands that it does not touch are as strict as before.
        ends = (plain.log_energies[:, :2].amin(0), plain.log_energies[:, :2].amax(0))
        other = (wide.log_energies[:, :2].amin(0), wide.log_energies[:, :2].amax(0))
        torch.testing.assert_close(other, ends)


# Refusals, copies and precisions.


@pytest.mark.parametrize(("layer", "route"), [("conv1", "folded"), ("bn1", "exact")])
def test_principal_components_take_one_shape(layer: str, route: Any) -> None:
    fitted = ttapca.fit(small_convnet(), layer, images(60), 5, route=route)
    channels = fitted.shape[0]
    for gain in (None, "relu", "wiener"):
        with pytest.raises(
            ShapeError,
            match=rf"take samples of one shape\. .* on samples of shape \({channels}, 6, 6\); "
            rf'found \({channels}, 8, 6\)\. Resize .* fit it with `route="dct"`, whose cosines',
        ):
            fitted.spectral_filter(gain)(torch.zeros(2, channels, 8, 6))
    for shape in ((channels + 1, 6, 6), (channels, 36)):
        with pytest.raises(ShapeError, match=r"or fit a filter for this shape\.$"):
            fitted.check_shape(shape)
    fitted.check_shape(fitted.shape)


def test_cosines_take_images_with_their_channels() -> None:
    fitted = ttapca.fit(small_convnet(), "conv1", images(60), 5, route="dct")
    for shape in ((3, 1, 1), (3, 6, 6), (3, 4096, 2)):
        fitted.check_shape(shape)
    for shape in ((4, 6, 6), (3, 36), (3, 4097, 6), (3, 0, 6)):
        found = str(shape).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(
            ShapeError,
            match=rf"images of any size with the channels .* up to 4,096 pixels a side\. .* shape "
            rf"\(3, 6, 6\); found {found}\. Give it such images",
        ):
            fitted.check_shape(shape)
    with pytest.raises(ShapeError, match=r"found \(4, 6, 6\)"):
        fitted.spectral_filter()(torch.zeros(2, 4, 6, 6))


def test_copies_moves_and_new_values_are_followed() -> None:
    x = images(4, shape=(3, 20, 9))
    layer = filter_of(None, 50)
    empty = len(pickle.dumps(layer))
    expected = layer(x)
    for size in range(5, 12):  # more than are kept
        layer(images(2, shape=(3, size, size)))
    torch.testing.assert_close(layer(x), expected)
    assert len(pickle.dumps(layer)) < empty + 500  # sizes, but no maps
    torch.testing.assert_close(copy.deepcopy(layer)(x), expected)
    single = copy.deepcopy(layer).float()
    torch.testing.assert_close(single(x.float()).double(), expected, rtol=0, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["mean"] += 1.0
    layer.load_state_dict(state)
    assert not torch.allclose(layer(x), expected)


def test_a_batch_is_projected_once_for_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counted(self: OtherSize, centred: Tensor, project: Any = OtherSize.project) -> Tensor:
        calls.append(self.shape)
        return project(self, centred)

    monkeypatch.setattr(OtherSize, "project", counted)
    ones = torch.ones(NUMBERS, dtype=torch.float64)
    layer = filter_of(make_gain("relu", SourceComponents(ones, ones, None, lambda: ones)))
    x = torch.zeros(2, 3, 10, 8, dtype=torch.float64)
    turned = torch.zeros(2, 3, 8, 10, dtype=torch.float64)  # as many numbers, and all the same
    for batch in (x, x, turned, x):
        layer(batch)
    assert calls == [(3, 10, 8), (3, 8, 10), (3, 10, 8)]
    loss = layer(x + 1.0).square().sum()
    (gradient,) = torch.autograd.grad(loss, layer.gain.gamma)
    assert float(gradient.abs().max()) > 0
