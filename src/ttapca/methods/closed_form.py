"""Spectral gains without learning: `wiener`, `match`, `two-sided`; and learned from there.

One forward pass, nothing that a gradient moves: the gains follow from the spectrum of the batch (or
of the stream, online), and BatchNorm mixes the statistics of the batch with those of the source.
"""

from __future__ import annotations

import functools
from typing import Any, Unpack

from torch import Tensor

from ttapca.adaptation.objectives import mean_entropy
from ttapca.adaptation.optimisation import GradientSteps, Run, adam
from ttapca.adaptation.surfaces import SpectralGains, Surface
from ttapca.errors import OptionError
from ttapca.methods.recipe import Plan, Recipe, Statistics, Wishes, statistics_surface
from ttapca.spectral.closed_gains import ClosedFormName, ClosedFormOptions

PULL = 1.0
LEARNING_RATE = 0.01


def _closed(
    gain: ClosedFormName,
    wishes: Wishes,
    *,
    statistics: Statistics = "mixed",
    **own: Unpack[ClosedFormOptions],
) -> Plan:
    return Plan(_surfaces(gain, wishes, statistics, own))


def _learned(
    wishes: Wishes,
    *,
    statistics: Statistics = "mixed",
    pull: float = PULL,
    **own: Unpack[ClosedFormOptions],
) -> Plan:
    stepping = wishes.steps_by(adam, lr=LEARNING_RATE, logits="after")
    mover = PulledSteps(pull, **stepping)
    return Plan(_surfaces("pulled", wishes, statistics, own), mover)


def _surfaces(
    gain: ClosedFormName, wishes: Wishes, statistics: Statistics, own: ClosedFormOptions
) -> list[Surface]:
    gains: list[Surface] = [SpectralGains(one, gain, **own) for one in wishes.all_fitted()]
    return [*statistics_surface(statistics, gains), *gains]


class PulledSteps(GradientSteps):
    """Lower the entropy, and stay near the closed form.

    The loss is the mean entropy plus `pull` times the mean square of what is learned: the logarithm
    of a factor on each gain, zero at the closed form.

    Args:
        pull: How strongly.
        **stepping: How to step.
    """

    def __init__(self, pull: float, **stepping: Any) -> None:
        super().__init__(mean_entropy, **stepping)
        if not 0.0 <= pull < float("inf"):
            raise OptionError(f"`pull` is finite and not below 0; found {pull}.")
        self.pull = pull

    def loss(self, logits: Tensor, run: Run, *inputs: Any, **options: Any) -> Tensor | None:
        """Entropy and distance."""
        entropy = super().loss(logits, run, *inputs, **options)
        if entropy is None:
            return None
        away = sum(parameter.square().mean() for parameter in self.descent.parameters)
        return entropy + self.pull * away


def _recipe(gain: ClosedFormName, summary: str) -> Recipe:
    plan = functools.partial(_closed, gain)
    return Recipe(summary, plan, needs_filter=True, source="data")


WIENER = _recipe("wiener", "spectral filter in closed form, the safe choice; no gradient")
MATCH = _recipe("match", "spectral filter in closed form, to the source variances; no gradient")
TWO_SIDED = _recipe("two-sided", "spectral filter in closed form, exponents by choice; no gradient")
LEARNED = Recipe(
    "spectral filter from the closed form on, learned by entropy and pulled back",
    _learned,
    needs_filter=True,
    source="data",
)
