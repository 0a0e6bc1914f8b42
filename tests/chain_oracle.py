"""The chain of classes once more: one stream, loops, and a matrix of all transitions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ttapca.spectral.chain import MOST_NATS, STEPS
from ttapca.spectral.constants import CONSTANTS, Constants

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Regime:
    """A row of the grid: how often a class is drawn anew, from which classes, and what errors."""

    kind: str  # runs, plain or few
    redraw: float
    error: float  # of runs: how many predictions are drawn as in the source, whatever is there
    bias: float  # in no order: how many are drawn from the classes that the network favours
    few: float
    prior: float


def regimes_of(constants: Constants, ordered: bool) -> list[Regime]:
    """All regimes, in the order of the chain."""
    runs = [
        ("runs", 0.5**number, error, 0.0, 0.0)
        for number in range(1, constants.run_doublings + 1)
        for error in constants.shares
    ]
    plain = [("plain", 1.0, 0.0, bias, 0.0) for bias in constants.shares]
    few = [("few", 1.0, 0.0, 0.0, share) for share in constants.shares]
    kinds = [runs] if ordered else [runs, plain, few]
    return [Regime(*each, 1 / len(own) / len(kinds)) for own in kinds for each in own]


@dataclass
class SlowChain:
    """What `ClassChain` knows of one stream, and what it makes of images."""

    shares: Numbers
    constants: Constants = CONSTANTS
    ordered: bool = False
    regimes: list[Regime] = field(init=False)
    joint: Numbers = field(init=False)  # of the last image, (regimes, classes)
    predicted: Numbers = field(init=False)  # how often each class was predicted of late
    held: Numbers = field(init=False)  # and was there, if the stream holds few classes
    place: float = 0.0

    def __post_init__(self) -> None:
        self.regimes = regimes_of(self.constants, self.ordered)
        self.joint = np.array([each.prior * self.shares for each in self.regimes])
        self.predicted = np.zeros(len(self.shares))
        self.held = np.zeros(len(self.shares))

    def smoothed(self, counts: Numbers) -> Numbers:
        """Shares of classes, with `laplace` images more for each class, of the source."""
        counts = counts + self.constants.laplace * len(self.shares) * self.shares
        return counts / counts.sum()

    def count(self, probabilities: Numbers) -> None:
        """Count classes: as predicted, and by expectation maximisation."""
        images = len(probabilities)
        fading = np.exp(-images / self.constants.recent)
        before, self.predicted = fading * self.held, fading * self.predicted
        shares = self.smoothed(before + probabilities.sum(0))
        for _ in range(STEPS):
            counts = before.copy()
            for row in probabilities:
                posterior = row * shares / self.shares
                counts += posterior / posterior.sum()
            shares = self.smoothed(counts)
        self.held = counts
        self.predicted += probabilities.sum(0)

    def drawn_from(self, regime: Regime) -> Numbers:
        """Shares of the classes that a regime draws from."""
        return (1 - regime.few) * self.shares + regime.few * self.smoothed(self.held)

    def says(self, row: Numbers, regime: Regime) -> Numbers:
        """p(x | k) / p(x) of an image, by its class."""
        row, favoured = np.maximum(row, 1e-6), self.smoothed(self.predicted)
        found = []
        for k, share in enumerate(self.shares):
            ratio = row[k] / share
            if regime.kind == "runs":  # an error is as likely as the image is in the source
                found.append((1 - regime.error) * ratio + regime.error)
            elif regime.kind == "plain":  # p(x) of a source that has the favoured classes
                instead = sum(v * p / u for v, p, u in zip(favoured, row, self.shares, strict=True))
                found.append((1 - regime.bias) * ratio + regime.bias * instead)
            else:
                found.append(ratio * np.exp(-self.charge()))
        return np.array(found)

    def charge(self) -> float:
        """What few classes cost for each image, in nats: their parameters, and being even."""
        constants, late = self.constants, self.smoothed(self.held)
        by_chance = float((self.shares**2).sum())
        alike = (float((late**2).sum()) - by_chance) / (1 - by_chance)
        even = min(1.0, max(0.0, 1 - alike / constants.uneven))
        return (len(self.shares) - 1) / max(1.0, self.held.sum()) + constants.charge * even

    def stays(self, log_pair: float) -> Numbers:
        """Probability that a run goes on to the next image, times what the pair says."""
        size, classes = len(self.regimes), len(self.shares)
        found = np.zeros((size, classes, size, classes))
        keeps = 1 - 1 / self.constants.regime_memory
        limit = MOST_NATS
        pair = np.exp(min(max(log_pair, -limit), limit))
        for number, regime in enumerate(self.regimes):
            for k in range(classes):
                found[number, k, number, k] = keeps * (1 - regime.redraw) * pair
        return found.reshape(size * classes, -1)

    def transitions(self, log_pair: float) -> Numbers:
        """Probability of each regime and class after each other one, times what the pair says."""
        size, classes = len(self.regimes), len(self.shares)
        found = self.stays(log_pair).reshape(size, classes, size, classes)
        keeps = 1 - 1 / self.constants.regime_memory
        limit = MOST_NATS
        pair = np.exp(min(max(log_pair, -limit), limit))
        for number, regime in enumerate(self.regimes):
            q = self.drawn_from(regime)
            for k in range(classes):
                for other in range(classes):
                    same = pair if k == other else 1.0
                    found[number, k, number, other] += keeps * regime.redraw * q[other] * same
                    # Another regime starts: the pair says nothing.
                    found[:, k, number, other] += (1 - keeps) * regime.prior * q[other]
        return found.reshape(size * classes, -1)

    def read(
        self, probabilities: Numbers, log_pairs: Numbers | None = None
    ) -> dict[str, Numbers | float]:
        """Read a batch forward and backward; return all that `ChainReading` has."""
        images, classes = probabilities.shape
        log_pairs = np.zeros(images) if log_pairs is None else log_pairs
        self.count(probabilities)
        says = [
            np.array([self.says(row, each) for each in self.regimes]).ravel()
            for row in probabilities
        ]
        moves = [self.transitions(pair) for pair in log_pairs]
        forward, at = [self.joint.ravel()], self.joint.ravel()
        for said, move in zip(says, moves, strict=True):
            at = (at @ move) * said
            at = at / at.sum()
            forward.append(at)
        backward = [np.ones(len(at))]
        for said, move in zip(says[:0:-1], moves[:0:-1], strict=True):
            step = move @ (said * backward[0])
            backward.insert(0, step / step.sum())
        kinds = np.array([regime.kind for regime in self.regimes])
        outputs, known, place, held, in_no_order = [], [], [], [], []
        for number, row in enumerate(probabilities):
            later = says[number] * backward[number]
            both = (forward[number] @ moves[number]) * later
            total = both.sum()
            posterior = (both / total).reshape(-1, classes)
            goes_on = (forward[number] @ self.stays(log_pairs[number])) * later / total
            goes_on = goes_on.reshape(-1, classes).sum(0)
            plain = posterior[kinds == "plain"].sum()
            few = posterior[kinds == "few"]
            outputs.append(posterior[kinds != "plain"].sum(0) + plain * row)
            known.append(goes_on + few.sum(0))
            self.place = 1 + goes_on.sum() * self.place
            place.append(self.place)
            held.append(few.sum())
            in_no_order.append(plain)
        self.joint = forward[-1].reshape(-1, classes)
        return {
            "outputs": np.array(outputs),
            "known": np.array(known),
            "place": np.array(place),
            "held": np.array(held),
            "plain": np.array(in_no_order),
            **self.summary(),
        }

    def summary(self) -> dict[str, float]:
        """What `ChainReading` says of a stream as a whole."""
        weights = self.joint.sum(1)
        runs = [(w, 1 / r.redraw) for w, r in zip(weights, self.regimes, strict=True)]
        runs = [each for each, r in zip(runs, self.regimes, strict=True) if r.kind == "runs"]
        ordered = sum(weight for weight, _ in runs)
        by_chance = (self.shares**2).sum()
        crowd = few = 0.0
        for weight, regime in zip(weights, self.regimes, strict=True):
            if regime.kind == "few":
                alike = ((self.drawn_from(regime) ** 2).sum() - by_chance) / (1 - by_chance)
                crowd, few = crowd + weight * alike, few + weight
        return {
            "ordered": ordered,
            "run_length": sum(weight * length for weight, length in runs) / ordered,
            "crowd": max(0.0, crowd / few) if few else 0.0,
        }
