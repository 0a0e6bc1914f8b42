"""Seven ways in which the signal of a sensor degrades, at five severities, with a seed.

What belongs to a device is drawn from the seed alone: which channels drop out, and in which
direction gain and offset of a channel are wrong. What belongs to a moment is drawn for each sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ttapca._checks import Number, OneOf, Whole, check_option
from ttapca.datasets.images import check_series
from ttapca.errors import OptionError, ShapeError

Numbers = NDArray[np.floating[Any]]
SHARE_OF_CHANNELS = 3  # one channel in three drops out, at least one
THIRD_HARMONIC = 0.3  # of a hum: saturated transformers add odd ones


class Scale(NamedTuple):
    """Mean and standard deviation of each channel, (channels,): the units of all strengths.

    Example:
        >>> Scale.of(np.array([[[0.0, 2.0]], [[4.0, 6.0]]])).mean.tolist()  # of one channel
        [3.0]
    """

    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @classmethod
    def of(cls, series: Numbers) -> Scale:
        """Measure the channels of some series, best those of training."""
        check_series(series)
        exact = series.astype(np.float64)
        return cls(exact.mean((0, 2)), exact.std((0, 2)))


# Logarithms of gains; deviations; shares of the length; time steps; deviations.
STRENGTHS: dict[str, tuple[float, ...]] = {
    "gain_drift": (0.1, 0.25, 0.5, 0.75, 1.0),
    "offset": (0.25, 0.5, 1.0, 1.5, 2.0),
    "dropout": (0.1, 0.2, 0.35, 0.5, 0.7),
    "jitter": (0.3, 0.6, 1.0, 2.0, 3.0),
    "noise": (0.1, 0.2, 0.4, 0.7, 1.0),
    "clipping": (2.0, 1.5, 1.0, 0.7, 0.5),
    "hum": (0.1, 0.2, 0.4, 0.7, 1.0),
}
DEGRADATIONS: tuple[str, ...] = tuple(STRENGTHS)


def _degraded(
    x: Any, name: str, strength: float, device: Generator, sample: Generator, hum: float
) -> Any:
    """Degrade a sample whose channels have mean 0 and deviation 1, (channels, length)."""
    channels, length = x.shape
    times, wrong = np.arange(length), [-1.0, 1.0]
    match name:
        case "gain_drift":
            signs = device.choice(wrong, (channels, 1))
            first, last = sample.uniform(0.5, 1.5, (2, channels, 1))
            drift = first + (last - first) * np.linspace(0.0, 1.0, length)
            return x * np.exp(strength * signs * drift)
        case "offset":
            return x + strength * device.choice(wrong, (channels, 1))
        case "dropout":
            lost = device.permutation(channels)[: max(1, channels // SHARE_OF_CHANNELS)]
            stretch = max(1, round(strength * length))
            begin = sample.integers(length - stretch + 1)
            x[lost, begin : begin + stretch] = 0.0
            return x
        case "jitter":
            moved = times + strength * sample.standard_normal(length)  # one clock for all channels
            return np.stack([np.interp(moved, times, channel) for channel in x])
        case "noise":
            return x + strength * sample.standard_normal(x.shape)
        case "clipping":
            return x.clip(-strength, strength)
    angle = 2 * np.pi * (hum * times + sample.random())
    return x + strength * (np.sin(angle) + THIRD_HARMONIC * np.sin(3 * angle))


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
        series: Finite floats, (samples, channels, length).
        name: One of `DEGRADATIONS`.
        severity: From 1 to 5.
        seed: From 0 on; another seed is another device.
        scale: Mean and deviation of each channel, the units of all strengths; measured on these
            series by default.
        indices: The index of each sample in its data set; by default they are counted from 0.
        hum: Cycles of a hum in a time step: 50 Hz at 400 samples a second are 0.125.

    Example:
        >>> series = np.sin(np.arange(40.0)).reshape(1, 2, 20)
        >>> moved = degrade(series, "offset", severity=3) - series
        >>> (moved / Scale.of(series).deviation[:, None]).round(6)[0, :, 0]
        array([ 1., -1.])
    """
    check_option("name", name, OneOf(DEGRADATIONS))
    check_option("severity", severity, Whole(1, 5))
    check_option("seed", seed, Whole(0))
    check_option("hum", hum, Number(above=0, high=0.5))
    scale = scale or Scale.of(series)
    check_series(series, len(scale.mean))
    numbers = np.arange(len(series)) if indices is None else np.asarray(indices)
    if numbers.shape != (len(series),):
        raise ShapeError(f"`indices` must be one for each of {len(series)}; found {numbers.shape}.")
    if numbers.size and (numbers.dtype.kind not in "iu" or numbers.min() < 0):
        raise OptionError("`indices` must be whole numbers from 0 on; found others.")
    mean, deviation = (each[:, None] for each in scale)
    varies = deviation > 0  # else a channel has no unit, and is left alone
    unit, entropy = np.where(varies, deviation, 1.0), [seed, *name.encode()]
    changed = np.empty_like(series)
    for place, number in enumerate(numbers.tolist()):
        own = np.random.SeedSequence(entropy, spawn_key=(number,))
        chance = np.random.default_rng(entropy), np.random.default_rng(own)
        standard = (series[place].astype(np.float64) - mean) / unit
        made = _degraded(standard, name, STRENGTHS[name][severity - 1], *chance, hum)
        changed[place] = np.where(varies, made * unit + mean, series[place])
    return changed
