"""Methods of the literature, each a short recipe: which surfaces, moved by what.

| name | surfaces | moved by |
|---|---|---|
| `source` | none | nothing: the model as it is |
| `bn` | BatchNorm statistics | closed form: those of the batch, or mixed with the source's |
| `tent` | BatchNorm statistics, scale and shift of the normalisation layers | entropy |
| `shot` | BatchNorm statistics, all weights but the classifier's | information maximisation |
| `slr+it` | BatchNorm statistics, input transformation, scale and shift | likelihood ratios |
| `eata` | BatchNorm statistics, scale and shift | entropy of reliable samples |
| `roid` | BatchNorm statistics, scale and shift | weighted likelihood ratios, consistency |
| `lame` | none | closed form: near samples of a batch agree |
| `sar` | as `tent` | entropy of reliable samples at the worst point nearby; a way back |
| `memo` | all weights | entropy of the mean prediction over views, image by image |
| `cotta` | BatchNorm statistics, all weights | a slow teacher; some return to the source |
| `ttt` | weights up to a split | telling rotations apart, with a head trained for it |
| `ttapca-relu` | BatchNorm statistics, ReLU spectral gains | entropy |
| `ttapca-exp` | BatchNorm statistics, exponential spectral gains | entropy |
| `ttapca-multiplicative` | BatchNorm statistics, bounded multiplicative spectral gains | entropy |
| `ttapca-closed` | mixed BatchNorm statistics, gains from the closed form on | entropy, a pull |
| `wiener`, `match`, `two-sided` | mixed BatchNorm statistics, spectral gains | closed form |

`adapt` builds any of them by name and takes the same options for all, so that a comparison is one
loop; a method without gradients has no use for `filter`, `steps`, `lr` and `logits`. A method with
gradients that needs no filter, such as `tent`, moves the gains of one as well when it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import nn

from ttapca.adaptation.adapter import Adapter, Forgetting
from ttapca.adaptation.guards import CollapseGuard, GuardAction, make_guard
from ttapca.adaptation.optimisation import Logits
from ttapca.errors import OptionError, did_you_mean
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods import (
    baselines,
    closed_form,
    cotta,
    eata,
    lame,
    memo,
    roid,
    sar,
    shot,
    slr,
    ttapca,
    ttt,
)
from ttapca.methods.recipe import Recipe, Wishes
from ttapca.spectral.closed_gains import ClosedFormOptions

MethodName = Literal[
    "source",
    "bn",
    "tent",
    "shot",
    "slr+it",
    "eata",
    "roid",
    "lame",
    "sar",
    "memo",
    "cotta",
    "ttt",
    "ttapca-relu",
    "ttapca-exp",
    "ttapca-multiplicative",
    "ttapca-closed",
    "wiener",
    "match",
    "two-sided",
]

RECIPES: dict[str, Recipe] = {
    "source": baselines.SOURCE,
    "bn": baselines.BN,
    "tent": baselines.TENT,
    "shot": shot.SHOT,
    "slr+it": slr.SLR_IT,
    "eata": eata.EATA,
    "roid": roid.ROID,
    "lame": lame.LAME,
    "sar": sar.SAR,
    "memo": memo.MEMO,
    "cotta": cotta.COTTA,
    "ttt": ttt.TTT,
    "ttapca-relu": ttapca.RELU,
    "ttapca-exp": ttapca.EXPONENTIAL,
    "ttapca-multiplicative": ttapca.MULTIPLICATIVE,
    "ttapca-closed": closed_form.LEARNED,
    "wiener": closed_form.WIENER,
    "match": closed_form.MATCH,
    "two-sided": closed_form.TWO_SIDED,
}


def adapt(
    model: nn.Module,
    method: MethodName,
    *,
    filter: FittedFilter | Sequence[FittedFilter] | None = None,
    episodic: bool | None = None,
    forgetting: Forgetting | None = None,
    steps: int | None = None,
    lr: float | None = None,
    logits: Logits | None = None,
    guard: CollapseGuard | GuardAction | None = None,
    **options: object,
) -> Adapter:
    """Put a test-time method on a model.

    Args:
        model: Any trained module that returns logits.
        method: One of `RECIPES`.
        filter: The fitted filter: needed by the spectral methods; any other method with gradients
            moves its gains as well. Closed-form methods take several, each for another layer.
        episodic: True to forget after each batch (the default), False to adapt online.
        forgetting: `episodic`, `online` or `continual`; says the same with one more choice.
        steps: Gradient steps on each batch; as in the method's paper by default.
        lr: Learning rate; likewise.
        logits: From `before` or `after` the update; likewise.
        guard: `rollback` or `reset` when adaptation collapses, or a `CollapseGuard` of your own;
            what it did is in `events` of the adapter.
        **options: Of the method; `ttapca methods` lists them, docs/methods.md explains them.

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
    check_options(method, options)
    plan = RECIPES[method].plan(Wishes(filter, steps, lr, logits), **options)
    when = _forgetting(episodic, forgetting)
    return Adapter(model, plan.surfaces, plan.mover, forgetting=when, guard=make_guard(guard))


# What `adapt` takes for any method.
SHARED_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(adapt).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


def check_options(method: str, options: Iterable[str]) -> None:
    """Refuse a method that does not exist, and options that it does not have.

    Args:
        method: One of `RECIPES`.
        options: Names of its own options.

    Raises:
        OptionError: There is no such method or option; near names are offered.

    Example:
        >>> check_options("bn", ["alpha"])
    """
    if method not in RECIPES:
        raise OptionError(
            f"There is no method `{method}`.{did_you_mean(method, RECIPES)} There are: "
            f"{', '.join(RECIPES)}."
        )
    known = own_options(method)
    for name in options:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none of its own"
            near = did_you_mean(name, [*known, *SHARED_OPTIONS])
            raise OptionError(f"`{method}` has no option `{name}`; {has}.{near}")


def own_options(method: str) -> list[str]:
    """The options that a method has beside those of all methods.

    Example:
        >>> own_options("bn")
        ['alpha', 'prior']
    """
    found: list[str] = []
    for parameter in list(inspect.signature(RECIPES[method].plan).parameters.values())[1:]:
        # The first are the wishes; options that several methods share come as one `**own`.
        shared = parameter.kind is inspect.Parameter.VAR_KEYWORD
        found += ClosedFormOptions.__annotations__ if shared else [parameter.name]
    return found


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
