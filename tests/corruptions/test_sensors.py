"""Degradations of sensors, against their measured statistics; and what a sample depends on."""

from __future__ import annotations

import numpy as np
import pytest

from ttapca.corruptions import sensors
from ttapca.corruptions.sensors import DEGRADATIONS, Scale, degrade
from ttapca.errors import DataFormatError, OptionError, ShapeError, TtapcaError

LENGTH = 256
UNITS = np.array([1.0, 10.0, 0.1, 3.0])[:, None]
LEVELS = np.array([0.0, 50.0, -2.0, 9.81])[:, None]


@pytest.fixture(scope="module")
def series() -> np.ndarray:
    random = np.random.default_rng(0)
    phases = 2 * np.pi * random.random((200, 4, 1))
    waves = np.sqrt(2) * np.sin(2 * np.pi * np.arange(LENGTH) * 4 / LENGTH + phases)
    return LEVELS + UNITS * waves  # mean LEVELS and deviation UNITS in each channel, exactly


def standard(values: np.ndarray) -> np.ndarray:
    return (values - LEVELS) / UNITS


def test_a_scale_is_that_of_each_channel(series: np.ndarray) -> None:
    found = Scale.of(series)
    np.testing.assert_allclose(found.mean, LEVELS[:, 0], atol=1e-9)
    np.testing.assert_allclose(found.deviation, UNITS[:, 0], rtol=1e-9)


@pytest.mark.parametrize("name", DEGRADATIONS)
def test_a_sample_is_degraded_alike_in_any_batch(name: str, series: np.ndarray) -> None:
    scale = Scale.of(series)
    whole = degrade(series, name, 4, 7, scale=scale)
    order = np.array([5, 199, 0, 42])
    some = degrade(series[order], name, 4, 7, scale=scale, indices=order)
    np.testing.assert_array_equal(some, whole[order])
    np.testing.assert_array_equal(degrade(series[:1], name, 4, 7, scale=scale), whole[:1])


@pytest.mark.parametrize("name", DEGRADATIONS)
def test_units_do_not_matter_but_the_seed_does(name: str, series: np.ndarray) -> None:
    """Volts or millivolts, with any zero: the same signal is degraded."""
    one = degrade(series, name, 3, 1)
    other = degrade(1000 * series + 5, name, 3, 1)
    np.testing.assert_allclose(other, 1000 * one + 5, rtol=1e-6, atol=1e-6)
    if name != "clipping":  # which draws nothing
        assert not np.array_equal(one, degrade(series, name, 3, 2))
    assert degrade(series.astype(np.float32), name, 3).dtype == np.float32


@pytest.mark.parametrize("name", DEGRADATIONS)
def test_severities_get_worse(name: str, series: np.ndarray) -> None:
    away = [np.square(standard(degrade(series, name, at)) - standard(series)) for at in range(1, 6)]
    means = [float(each.mean()) for each in away]
    assert means == sorted(means)
    assert means[2] > 0  # these waves have no peaks that milder clipping would cut


def test_noise_has_its_deviation_and_is_white(series: np.ndarray) -> None:
    noise = standard(degrade(series, "noise", 5)) - standard(series)
    np.testing.assert_allclose(noise.std((0, 2)), 1.0, rtol=0.02)
    together = np.corrcoef(noise.transpose(1, 0, 2).reshape(4, -1))
    assert np.abs(together - np.eye(4)).max() < 0.02
    power = np.square(np.abs(np.fft.rfft(noise))).mean((0, 1))[1:-1]
    assert power.max() / power.min() < 1.5  # of means of 800, each uncertain by 3.5 %


def test_an_offset_belongs_to_the_device(series: np.ndarray) -> None:
    offset = standard(degrade(series, "offset", 3, 4)) - standard(series)
    np.testing.assert_allclose(np.abs(offset), 1.0)
    assert np.ptp(offset, (0, 2)).max() < 1e-9  # of all samples and times
    signs = {
        tuple(np.sign(degrade(series, "offset", 3, seed) - series)[0, :, 0]) for seed in range(40)
    }
    assert len(signs) > 8  # of sixteen


def test_gain_drifts_evenly_in_the_logarithm(series: np.ndarray) -> None:
    near_zero = np.abs(standard(series)) < 0.1
    gains = standard(degrade(series, "gain_drift", 5)) / np.where(near_zero, 1, standard(series))
    logs = np.where(near_zero, np.nan, np.log(np.abs(gains)))
    steps = np.nanmean(np.diff(logs), 2, keepdims=True)
    np.testing.assert_allclose(
        np.diff(logs) - steps, np.where(np.isnan(np.diff(logs)), np.nan, 0), atol=1e-9
    )
    strength = np.nanmean(logs, (0, 2))
    np.testing.assert_allclose(np.abs(strength), 1.0, atol=0.1)


@pytest.mark.parametrize(("channels", "lost"), [(1, 1), (4, 1), (6, 2)])
def test_the_same_channels_drop_out_for_a_stretch(channels: int, lost: int) -> None:
    series = np.random.default_rng(3).standard_normal((50, channels, 100)) + 7
    scale = Scale.of(series)
    gone = degrade(series, "dropout", 3, scale=scale)
    mean = scale.mean[:, None]
    silent = np.isclose(gone, mean) & ~np.isclose(series, mean)
    by_channel = silent.sum(2)
    assert sorted(by_channel[0]) == [0] * (channels - lost) + [35] * lost
    assert (by_channel == by_channel[0]).all()
    firsts = silent[:, by_channel[0].argmax()].argmax(1)
    assert len(set(firsts)) > 10  # but not at the same time
    np.testing.assert_array_equal(
        gone[~silent & ~np.isclose(gone, mean)], series[~silent & ~np.isclose(gone, mean)]
    )


def test_jitter_moves_times_and_not_values() -> None:
    """A straight line shows the times: all channels have one clock."""
    line = np.broadcast_to(np.arange(200.0), (40, 2, 200)).copy()
    moved = degrade(line, "jitter", 3) - line
    np.testing.assert_allclose(moved[:, 0], moved[:, 1], atol=1e-9)
    inner = moved[:, 0, 10:-10]
    np.testing.assert_allclose(inner.std(), 1.0, rtol=0.03)
    assert abs(inner.mean()) < 0.05


def test_clipping_leaves_what_is_within(series: np.ndarray) -> None:
    clipped, before = standard(degrade(series, "clipping", 4)), standard(series)
    assert np.abs(clipped).max() <= 0.7 + 1e-9
    inside = np.abs(before) < 0.7
    np.testing.assert_allclose(clipped[inside], before[inside], atol=1e-9)
    twice = degrade(degrade(series, "clipping", 4), "clipping", 4, scale=Scale.of(series))
    np.testing.assert_allclose(standard(twice), clipped, atol=1e-9)


def test_hum_has_its_frequency_and_a_third_harmonic(series: np.ndarray) -> None:
    hum = standard(degrade(series, "hum", 5, hum=0.0625)) - standard(series)
    spectrum = np.abs(np.fft.rfft(hum)) / (LENGTH / 2)  # amplitudes
    at, third = LENGTH // 16, 3 * LENGTH // 16
    np.testing.assert_allclose(spectrum[..., at], 1.0, rtol=1e-6)
    np.testing.assert_allclose(spectrum[..., third], 0.3, rtol=1e-6)
    spectrum[..., [at, third]] = 0
    assert spectrum.max() < 1e-6
    np.testing.assert_allclose(hum[:, 0], hum[:, 3], atol=1e-9)  # all channels hang on one mains


def test_a_channel_that_never_changes_is_left_alone() -> None:
    series = np.zeros((5, 2, 30))
    series[:, 1] = np.sin(np.arange(30))
    for name in DEGRADATIONS:
        assert (degrade(series, name, 5)[:, 0] == 0).all()


SERIES = np.ones((2, 3, 20)).cumsum(2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "fog"}, OptionError, "`name` must be .*gain_drift.*found 'fog'"),
        ({"severity": 6}, OptionError, "`severity` must be a whole number from 1 to 5"),
        ({"seed": -1}, OptionError, "`seed` must be a whole number"),
        ({"hum": 0.7}, OptionError, "`hum` must be a finite number above 0"),
        ({"series": SERIES[0]}, ShapeError, "Add an axis"),
        ({"series": SERIES[..., None]}, ShapeError, "cut or pad"),
        ({"series": SERIES.astype(int)}, DataFormatError, "floats; found int64"),
        ({"series": [1.0]}, DataFormatError, "found list"),
        ({"series": SERIES * np.nan}, DataFormatError, "must be finite"),
        ({"scale": Scale.of(SERIES[:, :2])}, ShapeError, r"\(samples, 2, length\)"),
        ({"indices": [1]}, ShapeError, r"one for each of 2; found \(1,\)"),
        ({"indices": [0, -1]}, OptionError, "whole numbers from 0 on"),
        ({"indices": [0.0, 1.0]}, OptionError, "whole numbers from 0 on"),
    ],
)
def test_mistakes_are_explained(
    arguments: dict[str, object], error: type[TtapcaError], message: str
) -> None:
    given: dict[str, object] = {"series": SERIES, "name": "noise", "severity": 1, **arguments}
    with pytest.raises(error, match=message):
        sensors.degrade(**given)  # type: ignore[arg-type]
