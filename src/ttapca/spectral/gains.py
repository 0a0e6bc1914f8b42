"""Spectral gains: by how much each principal component is scaled.

The paper's symbols, used here and nowhere else: lambda_i is the i-th singular value of the source
data, gamma_i the parameter learned for it, and F_i the gain.

    ReLU             F_i = lambda_i / (lambda_i + relu(gamma_i))
    exponential      F_i = 1 / (1 + exp(gamma_i^2 - lambda_i))
    multiplicative   a_i * F_i, with a_i learned in log space and bounded

The singular values are divided by the largest one, as in the paper; `normalise=False` turns that
off. Gains that nothing learns, but that follow from the test data, are in
`ttapca.spectral.closed_form`. All are made by name with `make_gain`.

**The start matters.** At gamma = 0 the gradient of both filters is zero (the derivative of ReLU is
zero there, and the exponential's carries a factor 2 gamma), so nothing would ever be learned. The
paper gives no starting value. Here it is the option `initial`, by default a small positive number
at which the gradient is alive and the filter still close to its gamma = 0 form.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from ttapca._checks import Number, OneOf, check_option
from ttapca.errors import OptionError, did_you_mean
from ttapca.spectral.stream import Stream

GainName = Literal[
    "relu", "exponential", "multiplicative", "wiener", "match", "two-sided", "pulled"
]
PenaltyName = Literal["relu", "exponential"]

RELU_START = 1e-4
EXPONENTIAL_START = 0.1
MULTIPLIER_LIMIT = 4.0
ABOVE_ONE = Number(above=1)


def relu_gain(gamma: Tensor, spectrum: Tensor) -> Tensor:
    """Ridge-like shrinkage, lambda / (lambda + relu(gamma)), in (0, 1].

    Args:
        gamma: Learned, shape (components,).
        spectrum: Singular values, positive, shape (components,).

    Example:
        >>> relu_gain(torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 1.0])).tolist()
        [1.0, 0.5]
    """
    return spectrum / (spectrum + torch.relu(gamma))


def exponential_gain(gamma: Tensor, spectrum: Tensor) -> Tensor:
    """A soft step, 1 / (1 + exp(gamma^2 - lambda)), in (0, 1).

    Args:
        gamma: Learned, shape (components,).
        spectrum: Singular values, positive, shape (components,).

    Example:
        >>> exponential_gain(torch.tensor([1.0]), torch.tensor([1.0])).tolist()
        [0.5]
    """
    return torch.sigmoid(spectrum - gamma.square())


def bounded_multiplier(log_multiplier: Tensor, limit: float) -> Tensor:
    """A factor between 1 / limit and limit, equal to exp(log_multiplier) near zero.

    The paper found a free multiplicative parameter unstable. In log space a step multiplies instead
    of adding, and the bound keeps a component from exploding or changing its sign.

    Args:
        log_multiplier: Learned, shape (components,).
        limit: Above 1.

    Example:
        >>> bounded_multiplier(torch.tensor([0.0, 1e9]), limit=4.0).tolist()
        [1.0, 4.0]
    """
    bound = math.log(limit)
    return torch.exp(bound * torch.tanh(log_multiplier / bound))


@dataclass(frozen=True, eq=False)
class SourceComponents:
    """What is known of the components in the source data: all that a gain can be made from.

    Attributes:
        singular_values: Positive, falling, shape (components,).
        deviations: Standard deviation of each component, shape (components,).
        energies: Band energies of source samples, shape (samples, bands); None where they were not
            kept. See `ttapca.spectral.calibration`.
        noise: Gives the variance that noise has in each component when it has the variance 1 in all
            numbers that are filtered, shape (components,).
    """

    singular_values: Tensor
    deviations: Tensor
    energies: Tensor | None
    noise: Callable[[], Tensor]


class Gain(nn.Module):
    """Gives the gains of a filter when it is called.

    Learned gains have parameters. Closed-form ones follow from the components that they are called
    with, and keep what they have seen in a `Stream`.

    Attributes:
        keeps_rest: Whether what lies outside the basis is kept, scaled by the last gain; the paper
            drops it.
        closed_form: The part that follows from the data; None where all is learned.
    """

    keeps_rest = False

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains.

        Args:
            components: Of the batch to be scaled, shape (batch, components); without one, the gains
                are given as they are now.

        Returns:
            Shape (components,); not to be written into.
        """
        raise NotImplementedError

    def join(self, stream: Stream, name: str) -> None:
        """Keep what is seen in this stream, under names that begin with `name`."""
        del stream, name

    def offset(self, components: Tensor) -> Tensor | None:
        """What is to be subtracted from the components before they are scaled, if anything."""
        del components
        return None

    @property
    def closed_form(self) -> Any:
        """See above."""
        return None


AnyGainClass = TypeVar("AnyGainClass", bound=type[Gain])
_REGISTERED: dict[str, tuple[type[Gain], dict[str, Any]]] = {}


def register_gain(name: str, **preset: Any) -> Callable[[AnyGainClass], AnyGainClass]:
    """Let `make_gain` know a class by a name.

    Args:
        name: One of `GainName`.
        **preset: Options that this name stands for; the caller may still give others.
    """

    def registered(gain: AnyGainClass) -> AnyGainClass:
        _REGISTERED[name] = (gain, preset)
        return gain

    return registered


def make_gain(name: GainName, source: SourceComponents, **options: object) -> Gain:
    """Make a gain by its name.

    Args:
        name: A registered one.
        source: Of the fitted filter.
        **options: Of that gain.

    Raises:
        OptionError: There is no such gain or option, or its value makes no sense.

    Example:
        >>> two = torch.tensor([2.0, 1.0])
        >>> source = SourceComponents(two, two, None, lambda: torch.ones(2))
        >>> make_gain("relu", source, initial=0.5)().tolist()
        [0.6666666865348816, 0.5]
    """
    check_option("gain", name, OneOf(tuple(_REGISTERED)))
    gain, preset = _REGISTERED[name]
    known = _options_of(gain)
    for option in options:
        if option not in known:
            raise OptionError(
                f"The gain `{name}` has no option `{option}`; it has {', '.join(known)}."
                f"{did_you_mean(option, known)}"
            )
    return gain(source, **{**preset, **options})


def _options_of(gain: type[Gain]) -> list[str]:
    """What a class can be made with beside the source; its base's as well, if it passes them on."""
    found: list[str] = []
    for cls in gain.__mro__:
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        found += [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
    return found


def is_closed_form(name: GainName) -> bool:
    """Whether a gain follows from the test data.

    Example:
        >>> is_closed_form("wiener"), is_closed_form("relu")
        (True, False)
    """
    check_option("gain", name, OneOf(tuple(_REGISTERED)))
    return _REGISTERED[name][0].keeps_rest


class LearnedGain(Gain):
    """What the gains of the paper share.

    Args:
        source: Its singular values are used.
        normalise: Divide them by the largest one.
    """

    spectrum: Tensor

    def __init__(self, source: SourceComponents, *, normalise: bool = True) -> None:
        super().__init__()
        values = source.singular_values
        if not bool((values > 0).all()):
            raise OptionError("Gains need positive singular values; found a zero or a NaN.")
        self.register_buffer("spectrum", values.detach() / (values.max() if normalise else 1.0))

    def _start_at(self, value: float) -> nn.Parameter:
        check_option("initial", value, Number())
        return nn.Parameter(torch.full_like(self.spectrum, value))


@register_gain("relu")
class ReLUGain(LearnedGain):
    """The paper's ReLU filter.

    Args:
        source: As for `LearnedGain`, and so is `normalise`.
        normalise: See there.
        initial: Start of gamma. At zero or below the filter is dead: it is the identity on its
            subspace and stays so.
    """

    def __init__(
        self, source: SourceComponents, *, normalise: bool = True, initial: float = RELU_START
    ) -> None:
        super().__init__(source, normalise=normalise)
        self.gamma = self._start_at(initial)

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains, shape (components,), whatever the batch."""
        del components
        return relu_gain(self.gamma, self.spectrum)


@register_gain("exponential")
class ExponentialGain(LearnedGain):
    """The paper's exponential filter: a mild low-pass from the start.

    Args:
        source: As for `LearnedGain`, and so is `normalise`.
        normalise: See there.
        initial: Start of gamma. At zero the filter is dead: its gains stay as they are.
    """

    def __init__(
        self,
        source: SourceComponents,
        *,
        normalise: bool = True,
        initial: float = EXPONENTIAL_START,
    ) -> None:
        super().__init__(source, normalise=normalise)
        self.gamma = self._start_at(initial)

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains, shape (components,), whatever the batch."""
        del components
        return exponential_gain(self.gamma, self.spectrum)


@register_gain("multiplicative")
class MultiplicativeGain(LearnedGain):
    """Either filter of the paper times a learned, bounded multiplier that may exceed one.

    Args:
        source: As for `LearnedGain`, and so is `normalise`.
        normalise: See there.
        penalty: The filter that is multiplied.
        initial: Start of its gamma; the penalty's own default when None.
        limit: Multipliers stay between 1 / limit and limit; they start at 1.
    """

    def __init__(
        self,
        source: SourceComponents,
        *,
        normalise: bool = True,
        penalty: PenaltyName = "relu",
        initial: float | None = None,
        limit: float = MULTIPLIER_LIMIT,
    ) -> None:
        super().__init__(source, normalise=normalise)
        check_option("penalty", penalty, OneOf(get_args(PenaltyName)))
        check_option("limit", limit, ABOVE_ONE)
        start = {} if initial is None else {"initial": initial}
        self.penalty = make_gain(penalty, source, normalise=normalise, **start)
        self.log_multiplier = self._start_at(0.0)
        self.limit = limit

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains, shape (components,), whatever the batch."""
        del components
        gains: Tensor = self.penalty()
        return gains * bounded_multiplier(self.log_multiplier, self.limit)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"limit={self.limit}"
