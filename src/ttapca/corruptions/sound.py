"""Nine degradations of recordings, at five severities, with a seed.

Each is measured against the recording itself: one that is twice as loud gets noise that is twice as
loud.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ttapca._checks import Number, OneOf, Whole, check_option
from ttapca.corruptions.pixels import stream_key
from ttapca.errors import InputTypeError, NonFiniteError, OptionError, ShapeError

Recording = NDArray[np.float64]
Recordings = TypeVar("Recordings", NDArray[np.floating], Sequence[NDArray[np.floating]])

_FRAME = 0.02  # seconds over which the level is measured
_SILENT = 1e-3  # share of the power of the loudest frame below which a frame counts as silence
_LOWEST = 20.0  # Hz; pink noise falls from here on, and has nothing below
_MAINS = 50.0  # Hz
_OVERTONES = 10  # of the mains, each as loud as its number says: 1, 1/2, 1/3, ...
_VOICES = 5  # that speak at once
_FIRST_ECHO = 0.005  # seconds until reverberation begins

# For noise the ratio of signal to noise in dB; for the others what their functions take.
_STRENGTHS: Mapping[str, tuple[tuple[float, ...], ...]] = {
    **dict.fromkeys(("white", "pink", "babble", "hum"), ((20,), (15,), (10,), (5,), (0,))),
    "telephone": ((200, 3600), (300, 3400), (400, 3000), (500, 2500), (600, 2000)),
    "reverberation": ((0.2, 10), (0.35, 6), (0.5, 3), (0.75, 0), (1.0, -3)),
    "clipping": ((0.02,), (0.05,), (0.1,), (0.2,), (0.4,)),
    "gain": ((-6,), (-12,), (-18,), (-24,), (-30,)),
    "quantisation": ((8,), (7,), (6,), (5,), (4,)),
}
KINDS = tuple(_STRENGTHS)
SEVERITIES = (1, 2, 3, 4, 5)


def degrade(
    recordings: Recordings,
    kind: str,
    severity: int,
    *,
    sample_rate: float,
    seed: int = 0,
    start: int = 0,
    others: Sequence[NDArray[np.floating]] | NDArray[np.floating] | None = None,
) -> Recordings:
    """Return degraded recordings of the same lengths.

    The random numbers of a recording depend on `seed`, `kind`, `severity` and its index only, and
    on `others` for babble. Nothing is clipped: noise can lead beyond -1 and 1.

    | kind | what it does | severities 1 to 5 |
    |---|---|---|
    | `white`, `pink` | adds noise, of equal power in each Hz or in each octave | 20 to 0 dB |
    | `babble` | adds five of the other recordings at a time | 20 to 0 dB |
    | `hum` | adds the mains, 50 Hz, with overtones | 20 to 0 dB |
    | `telephone` | leaves a band | 200-3600 to 600-2000 Hz |
    | `reverberation` | adds the echoes of a room of its own | 0.2 s, 10 dB below, to 1 s, 3 above |
    | `clipping` | cuts off the loudest samples that are not 0 | 2 to 40 % of them |
    | `gain` | makes quieter | 6 to 30 dB |
    | `quantisation` | rounds to few bits, scaled by the loudest sample | 8 to 4 bits |

    The ratio of a recording to noise is in mean power, where the recording is not silent: silence
    around a word changes nothing.

    Args:
        recordings: Samples, float, from -1 to 1: one recording (samples,), several of one length
            (n, samples), or a list of recordings of any lengths.
        kind: One of `KINDS`.
        severity: From 1 to 5.
        sample_rate: Samples a second, from 2,000 on.
        seed: From 0 on.
        start: Index of the first recording; the others follow. For a part of a data set.
        others: For babble: the recordings to add. A recording never is its own babble.

    Raises:
        InputTypeError: If samples are no floating-point numbers.
        ShapeError: If a recording is not a line of samples.
        NonFiniteError: If a sample is NaN or infinite.
        OptionError: If an option breaks its rule, or there is nothing to babble.

    Example:
        >>> import numpy as np
        >>> tone = np.sin(2 * np.pi * 440 * np.arange(4000) / 8000)
        >>> noisy = degrade(tone, "pink", severity=5, sample_rate=8000)
        >>> bool(np.isclose(np.mean((noisy - tone) ** 2), np.mean(tone**2)))
        True
    """
    check_option("kind", kind, OneOf(KINDS))
    for name, value, rule in (
        ("severity", severity, Whole(SEVERITIES[0], SEVERITIES[-1])),
        ("seed", seed, Whole(0)),
        ("start", start, Whole(0)),
    ):
        check_option(name, int(value) if isinstance(value, np.integer) else value, rule)
    check_option("sample_rate", sample_rate, Number(2_000, 1e6))
    if (kind == "babble") != (others is not None):
        found = "none" if others is None else f"some for {kind}"
        raise OptionError(f"`others` must be given for babble, and only for it; found {found}.")
    single = isinstance(recordings, np.ndarray) and recordings.ndim == 1
    given = [recordings] if single else list(recordings)
    voices = [] if others is None else [_checked(other, "`others`") for other in others]
    key = stream_key(int(seed), f"sound {kind}", int(severity))
    strengths = _STRENGTHS[kind][int(severity) - 1]

    degraded = []
    for index, recording in enumerate(given, int(start)):
        samples = _checked(recording, f"Recording {index}")
        # The index is the last word of the counter: no recording reaches the numbers of another.
        random = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, index]))
        if kind in ("white", "pink", "hum", "babble"):
            noise = _noise(kind, samples, random, sample_rate)
            if kind == "babble":
                noise = _babble(samples, voices, random, index)
            wanted = _level(samples, sample_rate) / 10 ** (strengths[0] / 10)
            changed = samples + noise * np.sqrt(wanted / max(float(np.mean(noise**2)), 1e-300))
        elif kind == "reverberation":
            changed = _in_a_room(samples, random, sample_rate, *strengths)
        elif kind == "telephone":
            changed = _in_a_band(samples, sample_rate, *strengths)
        elif kind == "gain":
            changed = samples * 10 ** (strengths[0] / 20)
        else:
            change = _clipping if kind == "clipping" else _quantisation
            changed = change(samples, *strengths)
        degraded.append(changed.astype(np.asarray(recording).dtype))
    result: Any = degraded[0] if single else degraded
    if isinstance(recordings, np.ndarray) and not single and degraded:
        result = np.stack(degraded)
    return cast(Recordings, result if degraded else recordings)


def _level(samples: Recording, rate: float) -> float:
    """Return the mean power of frames that have more than a thousandth of the loudest one's."""
    power = np.square(samples)
    size = max(1, min(round(_FRAME * rate), power.size))
    starts = np.arange(0, power.size, size)
    sums = np.add.reduceat(power, starts)
    sizes = np.diff(np.append(starts, power.size))
    loud = sums / sizes > _SILENT * (sums / sizes).max()
    return float(sums[loud].sum() / sizes[loud].sum()) if loud.any() else 0.0


def _checked(recording: object, name: str) -> Recording:
    if not isinstance(recording, np.ndarray) or recording.dtype.kind != "f":
        found = getattr(recording, "dtype", type(recording).__name__)
        raise InputTypeError(
            f"{name}: samples must be a numpy array of floats, from -1 to 1; found {found}. "
            "16-bit integers become floats by samples / 32768."
        )
    if recording.ndim != 1 or not recording.size:
        raise ShapeError(
            f"{name} must be a line of at least one sample, (samples,); found {recording.shape}. "
            "Of several channels take the mean, or one."
        )
    if not np.isfinite(recording).all():
        raise NonFiniteError(f"{name}: samples must be finite; found NaN or infinity.")
    return recording.astype(np.float64)


def _noise(kind: str, samples: Recording, random: np.random.Generator, rate: float) -> Recording:
    """Return noise of any power; none for babble."""
    noise = np.zeros(samples.size)
    if kind == "hum":
        seconds = np.arange(samples.size) / rate
        for number in range(1, _OVERTONES + 1):
            phase = random.uniform(0, 2 * np.pi)
            if number * _MAINS < rate / 2:
                noise += np.sin(2 * np.pi * _MAINS * number * seconds + phase) / number
    elif kind != "babble":
        noise = random.standard_normal(samples.size)
    if kind == "pink":
        frequency = np.fft.rfftfreq(samples.size, 1 / rate)
        spectrum = np.fft.rfft(noise) / np.sqrt(np.maximum(frequency, _LOWEST))
        noise = np.fft.irfft(spectrum * (frequency >= _LOWEST), samples.size)
    return noise


def _babble(
    samples: Recording, voices: list[Recording], random: np.random.Generator, index: int
) -> Recording:
    foreign = [voice for voice in voices if voice.any() and not np.array_equal(voice, samples)]
    if not foreign:
        raise OptionError(
            f"`others` must hold a recording that is not silent and not recording {index} itself; "
            f"found none among {len(voices)}. Give more recordings."
        )
    noise = np.zeros(samples.size)
    for choice in random.choice(len(foreign), _VOICES, replace=len(foreign) < _VOICES):
        voice = foreign[choice] / np.sqrt(np.mean(np.square(foreign[choice])))
        noise += np.resize(np.roll(voice, random.integers(voice.size)), samples.size)
    return noise


def _in_a_band(samples: Recording, rate: float, low: float, high: float) -> Recording:
    frequency = np.fft.rfftfreq(samples.size, 1 / rate)
    inside = (frequency >= low) & (frequency <= high)
    return np.fft.irfft(np.fft.rfft(samples) * inside, samples.size)


def _in_a_room(
    samples: Recording, random: np.random.Generator, rate: float, seconds: float, db: float
) -> Recording:
    """Add echoes that fall by 60 dB in `seconds`, together `db` below the direct sound."""
    time = np.arange(round(seconds * rate)) / rate
    room = random.standard_normal(time.size) * 10 ** (-3 * time / seconds)
    room[time < _FIRST_ECHO] = 0.0
    room /= np.sqrt(np.sum(np.square(room)) * 10 ** (db / 10))
    room[0] = 1.0
    size = samples.size + room.size - 1
    both = np.fft.rfft(samples, size) * np.fft.rfft(room, size)
    return np.fft.irfft(both, size)[: samples.size]


def _clipping(samples: Recording, share: float) -> Recording:
    loudness = np.abs(samples[samples != 0]) if samples.any() else np.zeros(1)
    limit = np.quantile(loudness, 1 - share, method="lower")
    return np.clip(samples, -limit, limit)


def _quantisation(samples: Recording, bits: float) -> Recording:
    step = np.abs(samples).max() / (2 ** (bits - 1) - 1)
    return np.rint(samples / step) * step if step else samples.copy()
