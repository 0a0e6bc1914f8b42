"""`source`, `bn` and `tent`: what the paper compares with."""

from __future__ import annotations

from ttapca.adaptation.objectives import mean_entropy
from ttapca.adaptation.surfaces import BatchNormStatistics, NormAffine
from ttapca.errors import OptionError
from ttapca.fitting.fitted_filter import AnyGain
from ttapca.methods.recipe import Plan, Recipe, Statistics, Wishes, statistics_surface


def _source(wishes: Wishes) -> Plan:
    del wishes
    return Plan([])


def _bn(wishes: Wishes, *, alpha: float | None = None, prior: float | None = None) -> Plan:
    del wishes
    if alpha is not None and prior is not None:
        raise OptionError(
            "`bn` takes `alpha`, the weight of any batch, or `prior`, by which the weight follows "
            "from the size of the batch; found both."
        )
    return Plan([BatchNormStatistics(1.0 if alpha is None else alpha, prior=prior)])


def _tent(wishes: Wishes, *, statistics: Statistics = "batch", gain: AnyGain = "relu") -> Plan:
    below = wishes.filter_below(gain)
    surfaces = [*statistics_surface(statistics, below), NormAffine(), *below]
    # The official code returns the logits from before the update.
    return Plan(surfaces, wishes.descent(mean_entropy, logits="before"))


SOURCE = Recipe("the model as it is", _source)
BN = Recipe("BatchNorm with the statistics of the test batch", _bn)
TENT = Recipe("scale and shift of the normalisation layers, learned by entropy", _tent)
