"""Seven ways in which the signal of a sensor degrades, at five severities, with a seed.

What belongs to a device is drawn once, from the seed: which channels drop out, and in which
direction gain and offset of a channel are wrong. What belongs to a moment is drawn for each sample,
from the seed and its index: noise, jitter, the phase of a hum, when a channel drops out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Number, OneOf, Whole, check_option
from ttapca.errors import DataFormatError, OptionError, ShapeError

Numbers = NDArray[np.floating[Any]]
Float64 = NDArray[np.float64]
SHARE_OF_CHANNELS = 3  # one channel in three drops out, at least one
THIRD_HARMONIC = 0.3  # of a hum, whose rectified or saturated parts are odd harmonics


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of each channel, the units of all strengths.

    Example:
        >>> series = np.array([[[0.0, 2.0]], [[4.0, 6.0]]])  # two samples of one channel
        >>> Scale.of(series).mean.tolist()
        [3.0]
    """

    mean: Float64  # (channels,)
    deviation: Float64  # (channels,)

    @classmethod
    def of(cls, series: Numbers) -> Scale:
        """Measure the channels of some series, best those of training."""
        check_series(series)
        exact = series.astype(np.float64)
        return cls(exact.mean((0, 2)), exact.std((0, 2)))


@dataclass(frozen=True)
class _Moment:
    """What a degradation knows beside a sample, (channels, length), with mean 0 and deviation 1."""

    device: np.random.Generator
    sample: np.random.Generator
    hum: float


def _gain_drift(sample: Float64, strength: float, moment: _Moment) -> Float64:
    wrong = moment.device.choice([-1.0, 1.0], (len(sample), 1))
    ends = moment.sample.uniform(0.5, 1.5, (2, len(sample), 1))
    along = np.linspace(0.0, 1.0, sample.shape[1])
    drifted: Float64 = sample * np.exp(strength * wrong * (ends[0] + (ends[1] - ends[0]) * along))
    return drifted


def _offset(sample: Float64, strength: float, moment: _Moment) -> Float64:
    return sample + strength * moment.device.choice([-1.0, 1.0], (len(sample), 1))


def _dropout(sample: Float64, strength: float, moment: _Moment) -> Float64:
    count = max(1, len(sample) // SHARE_OF_CHANNELS)
    lost = moment.device.permutation(len(sample))[:count]
    stretch = max(1, round(strength * sample.shape[1]))
    begin = int(moment.sample.integers(sample.shape[1] - stretch + 1))
    kept = sample.copy()
    kept[lost, begin : begin + stretch] = 0.0
    return kept


def _jitter(sample: Float64, strength: float, moment: _Moment) -> Float64:
    times = np.arange(sample.shape[1])
    moved = times + strength * moment.sample.standard_normal(len(times))  # one clock for channels
    return np.stack([np.interp(moved, times, channel) for channel in sample])


def _noise(sample: Float64, strength: float, moment: _Moment) -> Float64:
    return sample + strength * moment.sample.standard_normal(sample.shape)


def _clipping(sample: Float64, strength: float, _moment: _Moment) -> Float64:
    return sample.clip(-strength, strength)


def _hum(sample: Float64, strength: float, moment: _Moment) -> Float64:
    angle = 2 * np.pi * (moment.hum * np.arange(sample.shape[1]) + moment.sample.random())
    wave: Float64 = np.sin(angle) + THIRD_HARMONIC * np.sin(3 * angle)
    return sample + strength * wave


_Degradation = Callable[[Float64, float, _Moment], Float64]
# Strengths: logarithms of gains; deviations; shares of the length; time steps; deviations.
_ALL: dict[str, tuple[_Degradation, tuple[float, ...]]] = {
    "gain_drift": (_gain_drift, (0.1, 0.25, 0.5, 0.75, 1.0)),
    "offset": (_offset, (0.25, 0.5, 1.0, 1.5, 2.0)),
    "dropout": (_dropout, (0.1, 0.2, 0.35, 0.5, 0.7)),
    "jitter": (_jitter, (0.3, 0.6, 1.0, 2.0, 3.0)),
    "noise": (_noise, (0.1, 0.2, 0.4, 0.7, 1.0)),
    "clipping": (_clipping, (2.0, 1.5, 1.0, 0.7, 0.5)),
    "hum": (_hum, (0.1, 0.2, 0.4, 0.7, 1.0)),
}
DEGRADATIONS: tuple[str, ...] = tuple(_ALL)


def degrade(
    series: Numbers,
    name: str,
    severity: int,
    seed: int = 0,
    *,
    scale: Scale | None = None,
    indices: Sequence[int] | NDArray[np.int64] | None = None,
    hum: float = 0.125,
) -> Numbers:
    """Return degraded series of the same shape and type.

    Random numbers depend on `seed`, `name` and the index of a sample only: with the same `scale`, a
    sample is degraded alike in any batch and order. Other severities have the same random numbers.

    Args:
        series: Floats, (samples, channels, length).
        name: One of `DEGRADATIONS`.
        severity: From 1 to 5.
        seed: From 0 on; another seed is another device.
        scale: Mean and deviation of each channel, the units of all strengths; measured on these
            series by default.
        indices: The index of each sample in its data set; by default they are counted from 0.
        hum: Cycles of a hum in a time step: 50 Hz at 400 samples a second are 0.125.

    Raises:
        OptionError: An unknown name, or a number out of its range.
        ShapeError: Series, scale or indices of another shape.
        DataFormatError: Series that are no finite floats.

    Example:
        >>> series = np.sin(np.arange(40.0)).reshape(1, 2, 20)
        >>> moved = degrade(series, "offset", severity=3) - series
        >>> (moved / Scale.of(series).deviation[:, None]).round(6)[0, :, 0]
        array([1., 1.])
    """
    check_option("name", name, OneOf(DEGRADATIONS))
    check_option("severity", severity, Whole(1, 5))
    check_option("seed", seed, Whole(0))
    check_option("hum", hum, Number(above=0, high=0.5))
    scale = scale or Scale.of(series)
    check_series(series, len(scale.mean))
    numbers = np.arange(len(series)) if indices is None else np.asarray(indices)
    if numbers.shape != (len(series),):
        raise ShapeError(
            f"`indices` must hold one index for each sample, ({len(series)},); found "
            f"{numbers.shape}."
        )
    if numbers.size and (numbers.dtype.kind not in "iu" or numbers.min() < 0):
        raise OptionError("`indices` must be whole numbers from 0 on; found others.")
    apply, strengths = _ALL[name]
    mean = scale.mean[:, None]
    deviation = np.where(scale.deviation > 0, scale.deviation, 1.0)[:, None]
    entropy = [seed, *name.encode()]
    changed = np.empty_like(series)
    for place, number in enumerate(numbers.tolist()):
        own = np.random.SeedSequence(entropy, spawn_key=(number,))
        moment = _Moment(np.random.default_rng(entropy), np.random.default_rng(own), hum)
        standard = (series[place].astype(np.float64) - mean) / deviation
        made = apply(standard, strengths[severity - 1], moment)
        # A channel that never changes has no unit, and is left alone.
        changed[place] = np.where(
            scale.deviation[:, None] > 0, made * deviation + mean, series[place]
        )
    return changed


def check_series(series: object, channels: int | None = None) -> None:
    """Raise an error unless these are finite floats of shape (samples, channels, length)."""
    if not isinstance(series, np.ndarray) or series.dtype.kind != "f":
        found = getattr(series, "dtype", type(series).__name__)
        raise DataFormatError(
            f"Series must be a numpy array of floats; found {found}. Convert them with "
            "np.asarray(series, np.float32)."
        )
    if series.ndim != 3 or channels not in (None, series.shape[1]):
        wanted = "channels" if channels is None else str(channels)
        remedy = "Add an axis of one channel with series[:, None]." if series.ndim == 2 else ""
        raise ShapeError(
            f"Series must have shape (samples, {wanted}, length); found {series.shape}. "
            f"{remedy or 'Series of several lengths are cut or padded to one.'}"
        )
    if not np.isfinite(series).all():
        raise DataFormatError(
            "Series must be finite; found NaN or infinity. Fill in missing values first."
        )
