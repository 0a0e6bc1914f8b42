"""`adapt`: put a test-time method on a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from ttapca._checks import FLAG, check_option
from ttapca.adaptation.adapter import Adapter, Forgetting
from ttapca.adaptation.guards import CollapseGuard, GuardAction
from ttapca.adaptation.health import Health
from ttapca.adaptation.optimisation import Logits
from ttapca.adaptation.shift_alarm import ShiftAlarm
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.errors import OptionError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods.method import Method, registration
from ttapca.support.outputs import FindLogits, OutputKind

if TYPE_CHECKING:
    from ttapca.methods import MethodName

# What every method takes, beside its own options.
BESIDE = ("forgetting", "guard", "outputs", "on_shift", "compare", "strict")


def adapt(
    model: nn.Module,
    method: Method | MethodName,
    *,
    forgetting: Forgetting = "episodic",
    guard: CollapseGuard | GuardAction | None = None,
    logits: FindLogits | Logits | None = None,
    outputs: OutputKind | None = None,
    on_shift: ShiftAlarm | Callable[[Health], object] | None = None,
    compare: bool = False,
    strict: bool = False,
    filter: FittedFilter | Sequence[FittedFilter] | None = None,
    steps: int | None = None,
    lr: float | None = None,
    **options: object,
) -> Adapter:
    """Put a test-time method on a model.

    Args:
        model: Any trained module; most methods want one that returns logits.
        method: A method with its options, such as `ttapca.methods.Wiener(fitted, memory=100)`; or
            the name of one, whose options then follow here.
        forgetting: `episodic` starts afresh at each batch, `online` when `start_condition()` is
            called, `continual` never.
        guard: `rollback` or `reset` when adaptation collapses, or a `CollapseGuard`; the adapter's
            `events` list what it did.
        logits: A function that finds the logits in what the model returns, for a model that returns
            more than one tensor: `lambda output: output.logits`. For a method with gradient steps
            given by its name, also `before` or `after` the update.
        outputs: What the outputs of the model mean: `multiclass` (classes that exclude each other),
            `binary` (one logit), `multilabel` (one for each label) or `regression`. By default one
            logit is binary, and more are multiclass.
        on_shift: A function that is given the `Health` of a stream when its data begin to shift,
            and when that is over, such as `print`; or a `ShiftAlarm`. For filters with closed-form
            gains.
        compare: Let the untouched network predict every batch as well, for twice the time, so that
            `health` says how often both are wrong.
        strict: Refuse a filter that was fitted on other weights than the model has, instead of a
            warning.
        filter: The fitted filter, which spectral methods need. Any other method with gradient
            steps then moves its gains as well. Closed-form methods take several, one per layer.
        steps: Gradient steps on each batch; as in the method's paper by default.
        lr: Learning rate; as in the method's paper by default.
        **options: Options of the method; `ttapca methods` lists them, docs/methods.md explains
            them. An option without effect is an error.

    Returns:
        The adapter: call it to predict and adapt; `reset()`, `disabled()`, `detach()`.

    Warns:
        OtherWeightsWarning: The filter was fitted on other weights than the model has.

    Raises:
        OptionError: A name or a value makes no sense, or an option would have no effect.
        AttachError: The method does not fit the model; the model is then as it was.

    Example:
        >>> import torch
        >>> from ttapca.methods import Tent
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> with adapt(model, Tent(lr=0.01), forgetting="online") as adapted:
        ...     logits = adapted(torch.randn(5, 4))
        >>> adapt(model, "tent", lr=0.01, forgetting="online").detach() is model
        True
    """
    given = {"filter": filter, "steps": steps, "lr": lr}
    options |= {name: value for name, value in given.items() if value is not None}
    if isinstance(logits, str):
        options["logits"], logits = logits, None
    if isinstance(method, Method):
        if options:
            raise OptionError(
                f"The options of a method go into the method itself, as in {type(method).__name__}"
                f"({next(iter(options))}=...); found them as arguments of `adapt`."
            )
        chosen = method
    else:
        registration(method).check_names(list(options), beside=BESIDE)
        chosen = registration(method).make(**options)
    made = (chosen if outputs is None else chosen.for_outputs(outputs)).assemble()
    check_option("strict", strict, FLAG)
    check_option("compare", compare, FLAG)
    gains = [each for each in made.surfaces if isinstance(each, SpectralGains)]
    if strict and not gains:
        raise OptionError("`strict` would have no effect: there is no filter. Leave it out.")
    for each in gains:
        each.strict = strict
    return Adapter(
        model,
        made.surfaces,
        made.predictor,
        forgetting=forgetting,
        guard=guard,
        logits=logits,
        outputs=outputs,
        memory=made.memory,
        on_shift=on_shift,
        compare=compare,
    )
