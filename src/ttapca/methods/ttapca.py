"""The paper's own: a spectral filter whose gains are learned by entropy."""

from __future__ import annotations

from ttapca.adaptation.objectives import mean_entropy
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.methods.recipe import Plan, Recipe, Statistics, Wishes, statistics_surface
from ttapca.spectral.gains import GainName, PenaltyName


def _relu(
    wishes: Wishes,
    *,
    statistics: Statistics = "batch",
    initial: float | None = None,
    normalise: bool = True,
) -> Plan:
    return _spectral(wishes, "relu", statistics, initial=initial, normalise=normalise)


def _exponential(
    wishes: Wishes,
    *,
    statistics: Statistics = "batch",
    initial: float | None = None,
    normalise: bool = True,
) -> Plan:
    return _spectral(wishes, "exponential", statistics, initial=initial, normalise=normalise)


def _multiplicative(
    wishes: Wishes,
    *,
    statistics: Statistics = "batch",
    initial: float | None = None,
    normalise: bool = True,
    penalty: PenaltyName = "relu",
    limit: float | None = None,
) -> Plan:
    own = {"initial": initial, "normalise": normalise, "penalty": penalty, "limit": limit}
    return _spectral(wishes, "multiplicative", statistics, **own)


def _spectral(wishes: Wishes, gain: GainName, statistics: Statistics, **options: object) -> Plan:
    given = {name: value for name, value in options.items() if value is not None}
    gains = SpectralGains(wishes.fitted(), gain, **given)
    return Plan([*statistics_surface(statistics), gains], wishes.descent(mean_entropy))


RELU = Recipe("ReLU spectral filter, learned by entropy", _relu, needs_filter=True, source="data")
EXPONENTIAL = Recipe(
    "exponential spectral filter, learned by entropy",
    _exponential,
    needs_filter=True,
    source="data",
)
MULTIPLICATIVE = Recipe(
    "spectral filter with a bounded multiplier, learned by entropy",
    _multiplicative,
    needs_filter=True,
    source="data",
)
