"""Randomness that belongs to an image, not to a batch.

Philox is a counter-based generator: its output is a function of a key and a counter, and any place
of its stream can be reached at once. Seed, corruption and severity make the key; the image's index
says which stretch of the stream is its own. So image 7,000 gets the same numbers whether it comes
alone, in a batch, in another order or in another process, and a run of neighbours is drawn in one
call.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

_WORDS_PER_COUNT = 4  # Philox4x64 turns each value of its counter into four 64-bit words
_USELESS_BITS = np.uint64(11)  # a double holds 53 of a word's 64 bits
_STEP = 2.0**-53


def stream_key(seed: int, corruption: str, severity: int) -> NDArray[np.uint64]:
    """Mix what all images of a block share into a Philox key: two 64-bit words.

    Inputs that are close give keys that are far apart.
    """
    sequence = np.random.SeedSequence([seed, severity, *corruption.encode()])
    return sequence.generate_state(2, np.uint64).astype(np.uint64)


def uniforms(
    key: NDArray[np.uint64], indices: NDArray[np.int64], count: int
) -> NDArray[np.float64]:
    """Draw the numbers that belong to some images, strictly between 0 and 1.

    Args:
        key: From `stream_key`.
        indices: One index for each image, in any order.
        count: How many numbers an image needs; indices are spaced by it along the stream.

    Returns:
        Shape (images, count).
    """
    counts_each = -(-count // _WORDS_PER_COUNT)
    words_each = counts_each * _WORDS_PER_COUNT
    drawn = np.empty((len(indices), count))
    # Neighbours lie next to each other on the stream: one call for each run of them.
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    for run in np.split(np.arange(len(indices)), breaks):
        if not run.size or not count:
            continue
        generator = np.random.Philox(key=key, counter=int(indices[run[0]]) * counts_each)
        words = generator.random_raw(run.size * words_each).reshape(run.size, words_each)
        drawn[run[0] : run[-1] + 1] = words[:, :count] >> _USELESS_BITS
    # The centre of each of the 2^53 steps: never 0 and never 1, so that every quantile is finite.
    drawn += 0.5
    drawn *= _STEP
    return np.minimum(drawn, 1.0 - _STEP, out=drawn)


def between(numbers: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Stretch numbers from (0, 1) to (low, high)."""
    return low + (high - low) * numbers


def integers(numbers: NDArray[np.float64], stop: int) -> NDArray[np.intp]:
    """Turn numbers from (0, 1) into integers from 0 to `stop` - 1, all equally likely."""
    return np.floor(numbers * stop).astype(np.intp)


def normals(numbers: NDArray[np.float64], mean: float, deviation: float) -> NDArray[np.float64]:
    """Turn numbers from (0, 1) into normal ones by the inverse of the distribution function.

    A rejection method would be faster by a little but takes an unforeseeable number of draws, and
    then no image would know where its stretch of the stream begins.
    """
    values: NDArray[np.float64] = special.ndtri(numbers)
    values *= deviation
    values += mean
    return values
