"""The numbers that steer the closed form's model of classes, each with its unit and its meaning.

What can be measured on the source is not among them: `fit` measures it. The rest was chosen with
scripts/tune_chain.py on chenyaofo's CIFAR-10 network and memo's with GroupNorm, under conditions
that no table uses; the biases also on digits. docs/closed-form-evidence.md says what was tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ChainConstants:
    """Constants of `ttapca.spectral.chain`.

    Attributes:
        run_doublings: Doublings; the longest run that is expected has 2 to this power images.
        error_rates: Shares of images whose prediction says nothing about their class.
        biases: Shares of images whose prediction is drawn from the classes that a network favours,
            in a stream without order; up to nearly all of them, for a network that collapses.
        few_shares: What share of the images of a stream of few classes has these.
        charge: Nats that few classes are charged for each image if their shares are those of the
            source.
        uneven: How alike images of few classes are, from 0 to 1, so that they are charged nothing.
        prior: Probabilities that a new stream has runs, no order, or few classes.
        memory: Images; after so many, on average, a stream changes its regime.
        recent: Images; after so many, a prediction counts 1 / e in the shares of recent ones.
        laplace: Images of each class, on average, that are counted before any was seen.
        steps: Iterations of expectation maximisation, for the shares of classes in a stream.
        pair_middle: Where two classes become as likely as one: 0 at the mean of log F for one
            class, 1 at that for two.
        pair_weight: What a pair says is multiplied by this; each image is part of two.
        pair_limit: Nats; one pair of neighbours says so much about their classes, at most.
        change: Share of the statistics; if a pass finds more of them wrong, it is repeated.
        passes: Forward passes that a batch may take.
        plain: Probability that a stream has no order, from which its predictions stay as they are.
        likeness: Correlation of the band energies of two images of one class.
    """

    run_doublings: int = 8
    error_rates: tuple[float, ...] = (0.05, 0.15, 0.35, 0.6)
    biases: tuple[float, ...] = (0.1, 0.4, 0.7, 0.95)
    few_shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.95)
    charge: float = 0.1
    uneven: float = 0.05
    prior: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)
    memory: float = 500.0
    recent: float = 40.0
    laplace: float = 0.3
    steps: int = 5
    pair_middle: float = 0.2
    pair_weight: float = 0.5
    pair_limit: float = 3.0
    change: float = 0.1
    passes: int = 3
    plain: float = 0.9
    likeness: float = 0.1

    def ordered(self) -> ChainConstants:
        """Return the same for streams that surely have runs: they know no other regimes."""
        return replace(self, biases=(), few_shares=(), prior=(1.0, 0.0, 0.0))


CONSTANTS = ChainConstants()
