"""The classes of a stream as a hidden Markov chain, in order of arrival, inferred without labels.

**Regimes.** With s the network's probabilities of an image, u the shares of classes in the source,
v those in recent predictions, and w those in the stream, unless the network itself favours them
(expectation maximisation with w as prior, after Saerens et al., 2002):

- *runs* (h, e): a class stays with probability 1 - h, and is drawn from u otherwise. With
  probability e the prediction says nothing: p(x | k) / p(x) = (1 - e) s_k / u_k + e.
- *no order* (b): each class is drawn from u, and the network favours v, though the stream does not:
  p(x | k) / p(x) = (1 - b) s_k / u_k + b v.(s / u). Outputs stay as they are.
- *few classes* (a): each class is drawn from q = (1 - a) u + a w, and an image says s_k / u_k.

The chain keeps the probability of every regime of a fixed grid, and of every class. Pairs of images
tell a network that collapses from one that sees one class (`ttapca.spectral.source_classes`).

**One step.** With L the likelihood ratio of the pair, z the probabilities before it, and pi the
prior times q,

    T z = (1 - 1 / memory) [((1 - h) L + h q (L - 1)) z + h q sum_k z] + pi sum z / memory

T is reversible: messages from later images obey the same recursion, started from pi. Arrays have a
leading dimension of streams, and are numpy's, whose calls take a microsecond.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ttapca.spectral.constants import CONSTANTS, Constants

if TYPE_CHECKING:
    from torch import Tensor

Numbers = NDArray[np.float64]
AnyNumber = TypeVar("AnyNumber", float, Numbers, "Tensor")

TINY = 1e-300
# A prediction is never surer than this: one image must not overrule all others.
LEAST_PROBABILITY = 1e-6
MOST_NATS = -math.log(LEAST_PROBABILITY)  # nor one pair
# Numbers that are worked on at a time; more images are read one part after the other.
LARGEST = 2**22
# Iterations of expectation maximisation, of which more change nothing.
STEPS = 5


@dataclass(frozen=True, eq=False)
class ChainState:
    """The belief about the classes of some streams; all arrays are float64."""

    # Probability of each regime and class of the last image, shape (streams, regimes, classes).
    joint: Numbers
    # Recent counts of each class, as predicted, and as present if the stream holds few classes,
    # shape (streams, 2, classes).
    recent: Numbers
    place: Numbers  # expected, of the last image in its run; 0 without images, shape (streams,)
    features: Numbers  # of the last image, for the next pair, shape (streams, numbers)
    past_features: Numbers  # of all images, see `PairStatistic.past_after`

    def of_stream(self, number: int) -> ChainState:
        """Return the state of one of the streams."""
        return ChainState(*(getattr(self, each.name)[number, None] for each in fields(self)))

    @property
    def images(self) -> Numbers:
        """Recent images of each stream, shape (streams,)."""
        return cast(Numbers, self.recent[:, 0].sum(1))

    @classmethod
    def of_each(cls, several: Sequence[ChainState]) -> ChainState:
        """Return the states of several streams as one."""
        names = [each.name for each in fields(cls)]
        return cls(*(np.concatenate([getattr(one, name) for one in several]) for name in names))


@dataclass(frozen=True, eq=False)
class ChainReading:
    """The conclusions of the chain for some images of each stream; padded if a stream has fewer."""

    outputs: Numbers  # probability of each class, shape (streams, images, classes)
    plain: Numbers  # probability that the stream has no order, shape (streams, images)
    # Probability of each class, as far as the order of the stream tells it: the run goes on, or the
    # stream holds few classes. The share missing to 1 is drawn from the source. Shape as `outputs`.
    known: Numbers
    place: Numbers  # expected, of each image in its run, shape (streams, images)
    held: Numbers  # probability that the stream holds few classes, in no order, (streams, images)
    crowd: Numbers  # likeness of these, from 0 as in the source to 1 for one class, (streams,)
    ordered: Numbers  # probability that the stream has runs, after its last image, (streams,)
    run_length: Numbers  # expected length of a run if it has, (streams,)

    def counts(self, likeness: Numbers, before: Numbers, renewed: Numbers) -> Numbers:
        """Return for how many independent images each counts, (streams, images, layers).

        The image at place l of its run adds g(l) - g(l - 1), with g the `design_effect` for ICC the
        likeness of each layer, (layers,). It also takes the place of the share r of older images
        that is `renewed`, (streams,): r g(l - 1). A stream of few classes in no order is one
        cluster of images that are less alike, after the recent images `before`, (streams,).
        """

        def added(place: Numbers, alike: Numbers) -> Numbers:
            stays = 1 - renewed[:, None, None]
            return design_effect(place, alike) - stays * design_effect(place - 1, alike)

        runs = added(self.place[..., None], likeness)
        if isinstance(self.held, np.ndarray) and not self.held.any():
            return runs
        number = before[:, None, None] + (self.place * 0 + 1).cumsum(1)[..., None]
        crowd = added(number, self.crowd[:, None, None] * likeness)
        held = self.held[..., None]
        return (1 - held) * runs + held * crowd


def design_effect(images: AnyNumber, likeness: AnyNumber) -> AnyNumber:
    """Return how many independent images a run of `images` is worth: l / (1 + (l - 1) ICC)."""
    others = images - 1
    found: AnyNumber = images / (1 + others * (others > 0) * likeness)
    return found


class ClassChain:
    """The chain for the streams of one network; if streams are surely `ordered`, all have runs."""

    xp: Any = np  # the library whose arrays it reads; see `computing_with`

    def __init__(
        self, shares: Numbers, constants: Constants = CONSTANTS, *, ordered: bool = False
    ) -> None:
        self.constants = constants
        self.shares = np.asarray(shares, dtype=np.float64)
        self.shares = self.shares / self.shares.sum()
        self._errors = np.asarray(constants.shares)
        self._biases = self._errors[: 0 if ordered else None]  # and shares of few classes
        redraw = 0.5 ** np.arange(1, constants.run_doublings + 1)
        rates, biases = len(self._errors), len(self._biases)
        runs = len(redraw) * rates
        # Regimes in order: runs by length and error rate, then no order, then few classes.
        self._redraw = np.concatenate([redraw.repeat(rates), np.ones(2 * biases)])
        of_runs, biased = np.tile(np.arange(rates), len(redraw)), rates + np.arange(biases)
        self._rate = np.concatenate([of_runs, biased, np.full(biases, rates + biases)])
        self._runs, self._plain = slice(0, runs), slice(runs, runs + biases)
        self._few = slice(runs + biases, runs + 2 * biases)
        # Runs, no order and few classes are as likely as each other, if there are such regimes.
        sizes = [size for size in (runs, biases, biases) if size]
        self._prior = np.repeat([1 / size / len(sizes) for size in sizes], sizes)
        self._keeps = 1 - 1 / constants.regime_memory
        self._stay = 1 - self._redraw
        # The share of the images of a regime that is drawn from few classes.
        self._held = np.concatenate([np.zeros(runs + biases), self._biases])
        self._tiny = TINY

    def computing_with(self, xp: Any, convert: Callable[[Numbers], Any], tiny: float) -> ClassChain:
        """Return the same chain for arrays that `convert` makes, of a library such as torch."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray) and value.dtype == np.float64:
                setattr(other, name, convert(value))
        other.xp, other._tiny = xp, tiny
        return other

    def start(self, streams: int = 1, features: int = 0) -> ChainState:
        """Return the state of new streams, whose images have this number of features."""
        joint = (self._prior[:, None] * self.shares)[None].repeat(streams, 0)
        nothing = np.zeros((streams, 2, len(self.shares)))
        looks, past = np.zeros((streams, features)), np.zeros((streams, 1 + 2 * features))
        return ChainState(joint, nothing, np.zeros(streams), looks, past)

    def alike_after(
        self, state: ChainState, predicted: Numbers, sizes: Sequence[int] | None = None
    ) -> Numbers:
        """Return how alike recent predictions are after some, from 0 as in the source to 1."""
        images = np.asarray(predicted.shape[1] if sizes is None else sizes, dtype=np.float64)
        fading: Any = np.exp(-images / self.constants.recent)
        faded = state.recent[:, 0] * (float(fading) if sizes is None else fading[:, None])
        return self._alike(self._shares_of(faded + predicted.sum(1))).clip(0, 1)

    def expected(self, state: ChainState, images: int) -> ChainReading:
        """Return the reading that is expected of the next images, before they arrive."""
        xp, weights = self.xp, state.joint.sum(2)  # (streams, regimes)
        q = self._drawn(self._shares_of(state.recent[:, 1]))
        stays = [(self._stay * self._keeps) ** number for number in range(1, images + 1)]
        known = xp.einsum("tr,srk->stk", xp.stack(stays), state.joint)
        few = xp.einsum("sr,srk->sk", weights[:, self._few], q[:, self._few])
        known = known + few[:, None]
        goes_on = self._keeps * (weights @ self._stay)
        places = [1 + goes_on * state.place]
        while len(places) < images:
            places.append(1 + goes_on * places[-1])
        place = xp.stack(places, 1)
        plain = weights[:, self._plain].sum(1)[:, None] + 0 * place
        held = weights[:, self._few].sum(1)[:, None] + 0 * place
        return ChainReading(known, plain, known, place, held, *self._summary(weights, q))

    def read(
        self,
        state: ChainState,
        predicted: Numbers,
        log_pairs: Numbers | None = None,
        sizes: Sequence[int] | None = None,
        features: Numbers | None = None,
        confused: Numbers | float = 0.0,
    ) -> tuple[ChainState, ChainReading]:
        """Return the state of streams after some images, and the conclusions for these.

        `predicted` are probabilities, (streams, images, classes), and `sizes` the images of each
        stream. `log_pairs`, (streams, images), says how much likelier each distance to the image
        before is if both have one class. `features`, (streams, images, numbers), describe images
        for the next pair. Few classes are charged as many nats more as the network is `confused`,
        (streams,): then it favours some classes, whatever the stream shows.
        """
        streams, images, classes = predicted.shape
        most = max(1, LARGEST // (streams * len(self._redraw) * classes))
        if images > most:  # only streams of a thousand classes, whose states are large
            parts: list[ChainReading] = []
            for first in range(0, images, most):
                some = slice(first, first + most)
                left = None if sizes is None else [max(0, int(size) - first) for size in sizes]
                pairs = None if log_pairs is None else log_pairs[:, some]
                looks = None if features is None else features[:, some]
                state, reading = self.read(state, predicted[:, some], pairs, left, looks, confused)
                parts.append(reading)
            by_image: dict[str, Any] = {
                name: np.concatenate([getattr(part, name) for part in parts], 1)
                for name in ("outputs", "plain", "known", "place", "held")
            }
            return state, replace(parts[-1], **by_image)
        xp, there = self.xp, None
        if sizes is not None and min(sizes) < images:
            there = np.arange(images) < np.asarray(sizes)[:, None]  # (streams, images)
            predicted = np.where(there[..., None], predicted, 0.0)
        recent = self._counted(state.recent, predicted, there)
        q = self._drawn(self._shares_of(recent[:, 1]))
        charge = xp.exp(-self._charge(recent[:, 1]) - confused)
        says = self._emissions(predicted, self._shares_of(recent[:, 0]), charge)
        pairs = predicted[:, :, 0] * 0 + 1
        if log_pairs is not None:
            pairs = xp.exp(log_pairs.clip(-MOST_NATS, MOST_NATS))
        if there is not None:  # a missing image says nothing
            says[~there] = pairs[~there] = 1.0
        rates = says[:, :, self._rate]  # (streams, images, regimes, classes)
        ahead, behind, filtered = self._messages(state.joint, rates, pairs, q)
        later = rates * behind  # evidence of this image and later ones, shape as ahead
        both = ahead * later
        total = both.sum((2, 3))[..., None, None].clip(min=self._tiny)
        both /= total
        weights = both.sum(3)  # (streams, images, regimes)
        # The run goes on from the image before, which had the same class.
        before = xp.concatenate([state.joint[:, None], filtered[:, :-1]], 1)
        stayed = before[:, :, self._runs] * later[:, :, self._runs] / total
        stayed *= self._keeps * self._stay[self._runs, None] * pairs[..., None, None]
        goes_on = stayed.sum(2)  # (streams, images, classes)
        known = goes_on + both[:, :, self._few].sum(2)
        stays, places, at = goes_on.sum(2), [], state.place
        for step in range(images):
            now = 1 + stays[:, step] * at
            at = now if there is None else np.where(there[:, step], now, at)
            places.append(at)
        place = xp.stack(places, 1)
        plain = weights[:, :, self._plain].sum(2)
        outputs = both[:, :, self._runs].sum(2) + both[:, :, self._few].sum(2)
        outputs += plain[..., None] * predicted
        looks = state.features if features is None else features[:, -1]
        joint = filtered[:, -1]
        if there is not None:
            lengths = there.sum(1)
            last = (np.arange(streams), np.maximum(lengths, 1) - 1)
            some = (lengths > 0)[:, None]  # a stream without images stays as it was
            joint = np.where(some[..., None], filtered[last], state.joint)
            looks = state.features if features is None else features[last]
            looks = np.where(some, looks, state.features)
        after = ChainState(joint, recent, at, looks, state.past_features)
        held = weights[:, :, self._few].sum(2)
        summary = self._summary(joint.sum(2), q)
        return after, ChainReading(outputs, plain, known, place, held, *summary)

    def _messages(
        self, joint: Numbers, says: Numbers, pairs: Numbers, q: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return probabilities before images, likelihoods of later ones, and probabilities after.

        All have the shape of `says`, p(x | k) / p(x): (streams, images, regimes, classes). `joint`
        and q have the shape (streams, regimes, classes), the likelihood ratios of pairs (streams,
        images).
        """
        xp, (streams, images, _, _) = self.xp, says.shape
        keeps, start = self._keeps, self._prior[:, None] * q
        drawn = self._redraw[:, None] * q * keeps
        same, anew = (self._stay * keeps)[:, None] + drawn, start * (1 - keeps)

        def step(z: Numbers, pair: Numbers) -> Numbers:
            """Return T z, for z with a sum of 1: ((1 - h) L + h q (L - 1)) z + h q sum z + ..."""
            moved = z * same
            moved *= pair
            others = z.sum(-1)[..., None] - z
            others *= drawn
            moved += others
            moved += anew
            return moved

        # Both directions at once: forward and, from the last image on, backward.
        by_image = xp.moveaxis(says, 1, 0)
        emitted = xp.stack([by_image, xp.flip(by_image, (0,))])  # (2, images, streams, ...)
        columns = pairs.T[:, :, None, None]
        # The pair that follows each step.
        after = xp.stack([columns[1:], xp.flip(columns[1:], (0,))])
        messages, filtered = [], []
        z = xp.stack([step(joint, columns[0]), start])
        for number in range(images):
            messages.append(z)
            x = z * emitted[:, number]
            totals = x.reshape(2, streams, -1).sum(-1)[..., None, None]
            x = x / totals.clip(min=self._tiny)
            filtered.append(x[0])
            if number < images - 1:
                z = step(x, after[:, number])
        ahead = xp.stack([each[0] for each in messages], 1)
        behind = xp.stack([each[1] for each in messages[::-1]], 1) / start[:, None]
        return ahead, behind, xp.stack(filtered, 1)

    def _emissions(self, predicted: Numbers, shares: Numbers, charge: Numbers) -> Numbers:
        """Return p(x | k) / p(x), shape (streams, images, rates + biases + 1, classes)."""
        ratio = predicted.clip(min=LEAST_PROBABILITY)[:, :, None] / self.shares
        favoured = self.xp.einsum("stik,sk->st", ratio, shares)[..., None, None]
        errors, biases = self._errors[:, None], self._biases[:, None]
        unsure = (1 - errors) * ratio + errors
        biased = (1 - biases) * ratio + biases * favoured
        few = ratio * charge[:, None, None, None]
        return cast(Numbers, self.xp.concatenate([unsure, biased, few], 2))

    def _charge(self, counts: Numbers) -> Numbers:
        """Return the charge of few classes for each image, in nats, shape (streams,)."""
        # Shares that were fitted to some images fit these better than others (Akaike, 1974). And a
        # network under a shift favours some classes a little, which looks like few classes; but a
        # stream of few classes is far from even.
        fitted = (len(self.shares) - 1) / counts.sum(1).clip(min=1)
        uneven = self._alike(self._shares_of(counts)) / self.constants.uneven
        return cast(Numbers, fitted + self.constants.charge * (1 - uneven).clip(0, 1))

    def _alike(self, shares: Numbers) -> Numbers:
        """Return how much more often two images have one class than in the source, up to 1."""
        by_chance = (self.shares**2).sum()
        return cast(
            Numbers, ((shares**2).sum(-1) - by_chance) / (1 - by_chance).clip(min=self._tiny)
        )

    def _counted(
        self, recent: Numbers, predicted: Numbers, there: NDArray[np.bool_] | None
    ) -> Numbers:
        """Return `ChainState.recent` after some images; predictions of others are 0."""
        images = predicted.shape[1]
        fading: Any = math.exp(-images / self.constants.recent)
        if there is not None:
            fading = np.exp(-there.sum(1) / self.constants.recent)[:, None, None]
        before = recent * fading
        held = before[:, 1] + predicted.sum(1)
        for _ in range(STEPS):
            likely = predicted * (self._shares_of(held) / self.shares)[:, None]
            likely /= likely.sum(2)[..., None].clip(min=self._tiny)
            held = before[:, 1] + likely.sum(1)
        return cast(Numbers, self.xp.stack([before[:, 0] + predicted.sum(1), held], 1))

    def _shares_of(self, counts: Numbers) -> Numbers:
        """Return the shares of classes by their counts, after Laplace."""
        counts = counts + self.constants.laplace * len(self.shares) * self.shares
        return cast(Numbers, counts / counts.sum(-1)[..., None])

    def _drawn(self, shares: Numbers) -> Numbers:
        """Return the distributions q that classes are drawn from, (streams, regimes, classes)."""
        held = self._held[:, None]
        return (1 - held) * self.shares + held * shares[:, None]

    def _summary(self, weights: Numbers, q: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return `crowd`, `ordered` and `run_length`, given the weights of regimes by now."""
        runs, few = weights[:, self._runs], weights[:, self._few]
        ordered = runs.sum(1)
        length = runs @ (1 / self._redraw[self._runs]) / ordered.clip(min=self._tiny)
        crowd = (few * self._alike(q[:, self._few])).sum(1) / few.sum(1).clip(min=self._tiny)
        return crowd.clip(0, 1), ordered, length
