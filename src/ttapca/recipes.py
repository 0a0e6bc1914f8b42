"""Methods of the literature, each a short recipe: which surfaces, moved by what.

| name | surfaces | moved by |
|---|---|---|
| `source` | none | nothing: the model as it is |
| `bn` | BatchNorm statistics | closed form: those of the batch, or mixed with the source's |
| `tent` | BatchNorm statistics, scale and shift of the normalisation layers | entropy |
| `ttapca-relu` | BatchNorm statistics, ReLU spectral gains | entropy |
| `ttapca-exp` | BatchNorm statistics, exponential spectral gains | entropy |
| `ttapca-multiplicative` | BatchNorm statistics, bounded multiplicative spectral gains | entropy |

`adapt` builds any of them by name and takes the same options for all, so that a comparison is one
loop; a method without gradients has no use for `filter`, `steps`, `lr` and `logits`. A method with
gradients that needs no filter, such as `tent`, moves the gains of one as well when it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ttapca.adapter import Adapter, Forgetting
from ttapca.errors import OptionError, did_you_mean
from ttapca.fitted import FittedFilter
from ttapca.gains import GainName, PenaltyName
from ttapca.movers import DEFAULT_LEARNING_RATE, GradientSteps, Logits, Mover, adam
from ttapca.objectives import Objective, mean_entropy
from ttapca.surfaces import BatchNormStatistics, NormAffine, SpectralGains, Surface

MethodName = Literal["source", "bn", "tent", "ttapca-relu", "ttapca-exp", "ttapca-multiplicative"]
Statistics = Literal["source", "batch"] | float
NAMED_STATISTICS = {"source": 0.0, "batch": 1.0}


@dataclass(frozen=True)
class Recipe:
    """One method.

    Attributes:
        summary: One line for a person.
        surfaces: Makes the surfaces from the filter and the method's own options.
        objective: What gradient steps lower; None for a method without gradients.
        logits: Whether the method's paper evaluates before or after the update.
        needs_filter: Whether it is nothing without a fitted filter.
    """

    summary: str
    surfaces: Callable[..., list[Surface]]
    objective: Objective | None = None
    logits: Logits = "after"
    needs_filter: bool = False


def _source(filter: FittedFilter | None) -> list[Surface]:
    del filter
    return []


def _bn(
    filter: FittedFilter | None, *, alpha: float | None = None, prior: float | None = None
) -> list[Surface]:
    del filter
    if alpha is not None and prior is not None:
        raise OptionError(
            "`bn` takes `alpha`, the weight of any batch, or `prior`, by which the weight follows "
            "from the size of the batch; found both."
        )
    return [BatchNormStatistics(1.0 if alpha is None else alpha, prior=prior)]


def _tent(
    filter: FittedFilter | None, *, statistics: Statistics = "batch", gain: GainName = "relu"
) -> list[Surface]:
    return [*_statistics(statistics), NormAffine(), *_filter_below(filter, gain)]


def _filter_below(filter: FittedFilter | None, gain: GainName) -> list[Surface]:
    """The surface that a filter adds to a method which does without one."""
    return [] if filter is None else [SpectralGains(_fitted(filter), gain)]


def _ttapca_relu(
    filter: FittedFilter | None,
    *,
    statistics: Statistics = "batch",
    initial: float | None = None,
    normalise: bool = True,
) -> list[Surface]:
    return _spectral(filter, "relu", statistics, initial=initial, normalise=normalise)


def _ttapca_exp(
    filter: FittedFilter | None,
    *,
    statistics: Statistics = "batch",
    initial: float | None = None,
    normalise: bool = True,
) -> list[Surface]:
    return _spectral(filter, "exponential", statistics, initial=initial, normalise=normalise)


def _ttapca_multiplicative(
    filter: FittedFilter | None,
    *,
    statistics: Statistics = "batch",
    initial: float | None = None,
    normalise: bool = True,
    penalty: PenaltyName = "relu",
    limit: float | None = None,
) -> list[Surface]:
    return _spectral(
        filter,
        "multiplicative",
        statistics,
        initial=initial,
        normalise=normalise,
        penalty=penalty,
        limit=limit,
    )


def _spectral(
    filter: FittedFilter | None, gain: GainName, statistics: Statistics, **options: object
) -> list[Surface]:
    given = {name: value for name, value in options.items() if value is not None}
    return [*_statistics(statistics), SpectralGains(_fitted(filter), gain, **given)]


def _fitted(filter: object) -> FittedFilter:
    if not isinstance(filter, FittedFilter):
        raise OptionError(
            "This method needs a fitted filter; found "
            f"{'none' if filter is None else f'a {type(filter).__name__}'}. Fit one with "
            "`ttapca.fit(model, layer, data)` and pass it as `filter=`."
        )
    return filter


def _statistics(statistics: Statistics) -> list[Surface]:
    alpha = NAMED_STATISTICS.get(statistics) if isinstance(statistics, str) else statistics
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise OptionError(
            "`statistics` is 'source', 'batch' or the weight of the batch between 0 and 1; found "
            f"{statistics!r}."
        )
    # A network without BatchNorm has no statistics to choose, and the filter serves it as well.
    return [BatchNormStatistics(alpha, required=False)]


RECIPES: dict[str, Recipe] = {
    "source": Recipe("the model as it is", _source),
    "bn": Recipe("BatchNorm with the statistics of the test batch", _bn),
    "tent": Recipe(
        "scale and shift of the normalisation layers, learned by entropy",
        _tent,
        mean_entropy,
        logits="before",
    ),
    "ttapca-relu": Recipe(
        "ReLU spectral filter, learned by entropy", _ttapca_relu, mean_entropy, needs_filter=True
    ),
    "ttapca-exp": Recipe(
        "exponential spectral filter, learned by entropy",
        _ttapca_exp,
        mean_entropy,
        needs_filter=True,
    ),
    "ttapca-multiplicative": Recipe(
        "spectral filter with a bounded multiplier, learned by entropy",
        _ttapca_multiplicative,
        mean_entropy,
        needs_filter=True,
    ),
}


def adapt(
    model: nn.Module,
    method: MethodName,
    *,
    filter: FittedFilter | None = None,
    episodic: bool | None = None,
    forgetting: Forgetting | None = None,
    steps: int = 1,
    lr: float = DEFAULT_LEARNING_RATE,
    logits: Logits | None = None,
    **options: object,
) -> Adapter:
    """Put a test-time method on a model.

    Args:
        model: Any trained module that returns logits.
        method: One of `RECIPES`.
        filter: The fitted filter: needed by the spectral methods; moved along by `tent`.
        episodic: True to forget after each batch (the default), False to adapt online.
        forgetting: `episodic`, `online` or `continual`; says the same with one more choice.
        steps: Gradient steps on each batch.
        lr: Learning rate of Adam.
        logits: From `before` or `after` the update; as in the method's paper by default.
        **options: Of the method. `bn`: `alpha`, or `prior`. `tent`: `statistics`, and with a filter
            `gain`. Spectral filters: `statistics`, `initial`, `normalise`; the multiplicative one
            also `penalty` and `limit`.

    Returns:
        The adapter: call it to predict and adapt; `reset()`, `disabled()`, `detach()`.

    Raises:
        OptionError: When a name or a value makes no sense.
        AttachError: When the method does not fit the model; the model is then as it was.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> adapted = adapt(model, "bn")
        >>> adapted(torch.randn(5, 4)).shape
        torch.Size([5, 3])
    """
    if method not in RECIPES:
        raise OptionError(
            f"There is no method `{method}`.{did_you_mean(method, RECIPES)} There are: "
            f"{', '.join(RECIPES)}."
        )
    recipe = RECIPES[method]
    _check_options(method, recipe, options)
    optimizer = adam(lr)
    mover: Mover | None = None
    if recipe.objective is not None:
        mover = GradientSteps(
            recipe.objective, optimizer=optimizer, steps=steps, logits=logits or recipe.logits
        )
    surfaces = recipe.surfaces(filter, **options)
    return Adapter(model, surfaces, mover, forgetting=_forgetting(episodic, forgetting))


def _check_options(method: str, recipe: Recipe, options: dict[str, object]) -> None:
    known = [name for name in inspect.signature(recipe.surfaces).parameters if name != "filter"]
    for name in options:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none of its own"
            raise OptionError(
                f"`{method}` has no option `{name}`; {has}.{did_you_mean(name, known)}"
            )


def _forgetting(episodic: bool | None, forgetting: Forgetting | None) -> Forgetting:
    if episodic is None:
        return forgetting or "episodic"
    said: Forgetting = "episodic" if episodic else "online"
    if forgetting is not None and (forgetting == "episodic") != episodic:
        raise OptionError(
            f"`episodic={episodic}` and `forgetting={forgetting!r}` contradict each other; give "
            "one of them."
        )
    return forgetting or said
