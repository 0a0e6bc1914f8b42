"""Streams of classes with known runs, and a classifier of known accuracy that predicts them.

Arrays have a leading dimension of streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ttapca.spectral.chain import ChainReading, ChainState, ClassChain

Numbers = NDArray[np.float64]
Labels = NDArray[np.int64]

CLASSES = 10
DISTANCE = 2.5  # of two classes, in deviations: a fifth of the predictions is wrong


def runs(streams: int, images: int, length: float, rng: np.random.Generator) -> Labels:
    """Classes of streams, each drawn anew with probability 1 / length."""
    drawn = rng.integers(CLASSES, size=(streams, images))
    anew = rng.random((streams, images)) < 1 / length
    anew[:, 0] = True
    last = np.maximum.accumulate(np.where(anew, np.arange(images), 0), 1)
    return np.take_along_axis(drawn, last, 1)


def predictions(labels: Labels, rng: np.random.Generator, surer: float = 1.0) -> Numbers:
    """Probabilities by one normal observation for each class; they are right if `surer` is 1."""
    seen = rng.standard_normal((*labels.shape, CLASSES)) + DISTANCE * np.eye(CLASSES)[labels]
    logits = surer * DISTANCE * seen
    found: Numbers = np.exp(logits - logits.max(-1, keepdims=True))
    return found / found.sum(-1, keepdims=True)


def pairs(labels: Labels, rng: np.random.Generator) -> Numbers:
    """Log likelihood ratios of neighbours, normal and right; their means are a deviation apart."""
    same = labels[:, 1:] == labels[:, :-1]
    said = rng.standard_normal(same.shape) + np.where(same, 0.5, -0.5)
    return np.concatenate([np.zeros((len(labels), 1)), said], 1)


@dataclass(frozen=True)
class Read:
    """What a chain made of streams, batch by batch."""

    state: ChainState
    readings: list[ChainReading]

    @property
    def outputs(self) -> Numbers:
        """Probabilities, shape (streams, images, classes)."""
        return np.concatenate([each.outputs for each in self.readings], 1)

    @property
    def last(self) -> ChainReading:
        """What was made of the last batch."""
        return self.readings[-1]


def read(
    chain: ClassChain, predicted: Numbers, size: int, log_pairs: Numbers | None = None
) -> Read:
    """Let a chain read streams in batches."""
    state, found = chain.start(len(predicted)), []
    for first in range(0, predicted.shape[1], size):
        some = slice(first, first + size)
        looks = None if log_pairs is None else log_pairs[:, some]
        state, reading = chain.read(state, predicted[:, some], looks)
        found.append(reading)
    return Read(state, found)


def error(probabilities: Numbers, labels: Labels) -> float:
    """Share of wrong predictions in percent."""
    return float(100 * (probabilities.argmax(-1) != labels).mean())
