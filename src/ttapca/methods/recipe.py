"""What a recipe is given, and what it makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

from ttapca.adaptation.objectives import Objective
from ttapca.adaptation.optimisation import (
    DEFAULT_LEARNING_RATE,
    GradientSteps,
    Logits,
    Mover,
    OptimizerFactory,
    adam,
)
from ttapca.adaptation.surfaces import (
    BatchNormStatistics,
    GroupNormStatistics,
    SpectralGains,
    Surface,
)
from ttapca.errors import OptionError
from ttapca.fitting.fitted_filter import AnyGain, FittedFilter

SourceNeed = Literal["model", "data", "training"]
NAMED_STATISTICS = {"source": 0.0, "batch": 1.0}


class Mixture(NamedTuple):
    """Statistics of batch and source, mixed by size, depth and shift.

    The defaults were chosen by scripts/tune_closed_form.py.

    Attributes:
        first: Weight of a large batch that has surely shifted, in the first layer.
        last: The same in the last layer; it changes evenly in between.
        prior: Size of a batch that weighs half as much as a large one.
    """

    first: float = 0.1
    last: float = 0.9
    prior: float = 16.0


Statistics = Literal["source", "batch", "mixed"] | float | Mixture


class Stepping(TypedDict):
    """How `GradientSteps` steps, whatever it lowers."""

    optimizer: OptimizerFactory
    steps: int
    logits: Logits


@dataclass(frozen=True)
class Wishes:
    """What the caller of `adapt` wishes of any method; None is for the method to decide.

    Attributes:
        filter: A fitted filter; closed-form methods take several.
        steps: Gradient steps on each batch.
        lr: Learning rate.
        logits: From `before` or `after` the update.
    """

    filter: FittedFilter | Sequence[FittedFilter] | None = None
    steps: int | None = None
    lr: float | None = None
    logits: Logits | None = None

    def descent(
        self, objective: Objective, *, lr: float = DEFAULT_LEARNING_RATE, logits: Logits = "after"
    ) -> GradientSteps:
        """Adam on an objective: the wishes, and for what is not wished the method's own values."""
        return GradientSteps(objective, **self.steps_by(adam, lr=lr, logits=logits))

    def steps_by(
        self, optimizer: Callable[[float], OptimizerFactory], *, lr: float, logits: Logits
    ) -> Stepping:
        """The wishes as the options of `GradientSteps`; what is not wished is the method's own.

        Args:
            optimizer: Makes the optimiser from a learning rate.
            lr: The method's own.
            logits: Likewise.
        """
        return {
            "optimizer": optimizer(lr if self.lr is None else self.lr),
            "steps": 1 if self.steps is None else self.steps,
            "logits": self.logits or logits,
        }

    def fitted(self) -> FittedFilter:
        """The filter of a method that is nothing without one."""
        if not isinstance(self.filter, FittedFilter):
            found = "none" if self.filter is None else f"a {type(self.filter).__name__}"
            raise OptionError(
                f"This method needs a fitted filter; found {found}. Fit one with "
                "`ttapca.fit(model, layer, data)` and pass it as `filter=`."
            )
        return self.filter

    def all_fitted(self) -> list[FittedFilter]:
        """One or more filters, each for another layer."""
        if isinstance(self.filter, (list, tuple)) and self.filter:
            return [dataclasses.replace(self, filter=one).fitted() for one in self.filter]
        return [self.fitted()]

    def filter_below(self, gain: AnyGain) -> list[Surface]:
        """The surface that a filter adds to a method which does without one."""
        return [] if self.filter is None else [SpectralGains(self.fitted(), gain)]


@dataclass(frozen=True)
class Plan:
    """Surfaces, and what moves them."""

    surfaces: list[Surface]
    mover: Mover | None = None


@dataclass(frozen=True)
class Recipe:
    """One method.

    Attributes:
        summary: One line for a person.
        plan: Makes the plan from the wishes and the method's own options.
        needs_filter: Whether it is nothing without a fitted filter.
        source: What it needs of the source domain before the test: nothing but the `model`, its
            unlabelled `data`, or a `training` of its own.
    """

    summary: str
    plan: Callable[..., Plan]
    needs_filter: bool = False
    source: SourceNeed = "model"


def statistics_surface(statistics: Statistics, below: Sequence[Surface] = ()) -> list[Surface]:
    """What normalisation layers normalise with, by name or by the weight of the batch.

    A network without BatchNorm has no statistics to choose, and is no error here; but where a
    closed-form filter knows the channels of GroupNorm layers, `mixed` mixes these.

    Args:
        statistics: `source`, `batch`, the weight of the batch, or `mixed`: a weight that rises with
            the size of the batch, with the depth of the layer, and with how surely a closed-form
            filter sees a shift; a `Mixture` says how.
        below: Surfaces among which that filter may be.
    """
    closed = [s for s in below if isinstance(s, SpectralGains) and s.in_closed_form]
    if statistics == "mixed":
        statistics = Mixture()
    if not isinstance(statistics, Mixture):
        return [_relieved(BatchNormStatistics(_weight(statistics), required=False), closed)]
    ends, prior = (statistics.first, statistics.last), statistics.prior
    follow = closed[0] if closed else None
    batch_norm = BatchNormStatistics(ends, prior=prior, follow=follow, required=False)
    surfaces: list[Surface] = [_relieved(batch_norm, closed)]
    known = next((s.group_norm for s in closed if s.group_norm), None)
    if known is not None:
        surfaces.append(GroupNormStatistics(known, ends, prior=prior, follow=follow))
    return surfaces


def _relieved(
    statistics: BatchNormStatistics, closed: Sequence[SpectralGains]
) -> BatchNormStatistics:
    """Tell closed-form gains how much of a lost scale the statistics give back.

    GroupNorm is not asked: it gives every image its scale back, in source and test data alike.
    """
    for gains in closed:
        gains.relief = statistics.mean_weight
    return statistics


def _weight(statistics: Literal["source", "batch", "mixed"] | float) -> float:
    alpha = NAMED_STATISTICS.get(statistics) if isinstance(statistics, str) else statistics
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise OptionError(
            "`statistics` is 'source', 'batch', 'mixed' or the weight of the batch between 0 and "
            f"1; found {statistics!r}."
        )
    return alpha
