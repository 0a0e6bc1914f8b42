"""Spectral gains, the factors of components: their contract, their registry, and the paper's gains.

In the paper's symbols, lambda_i is the i-th singular value of the source data, divided by the
largest one, gamma_i the parameter learned for it, and F_i the gain:

    ReLU             F_i = lambda_i / (lambda_i + relu(gamma_i))
    exponential      F_i = 1 / (1 + exp(gamma_i^2 - lambda_i))
    multiplicative   a_i * F_i, with a_i learned in log space and bounded

At gamma = 0 the gradient of both filters is zero, so nothing would ever be learned. The paper gives
no starting value: here it is the option `initial`, by default a small positive number.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from ttapca._checks import Number, OneOf, check_option
from ttapca.errors import OptionError, did_you_mean
from ttapca.spectral.other_sizes import OtherSize
from ttapca.spectral.resemblance import Resemblance

if TYPE_CHECKING:
    from ttapca.spectral.stream import Stream

GainName = Literal[
    "relu", "exponential", "multiplicative", "wiener", "match", "two-sided", "pulled"
]
PenaltyName = Literal["relu", "exponential"]

MULTIPLIER_LIMIT = 4.0
ABOVE_ONE = Number(above=1)


def bounded_multiplier(log_multiplier: Tensor, limit: float) -> Tensor:
    """Return a factor between 1 / limit and limit, close to exp(log_multiplier) near zero."""
    # The paper found a free multiplicative parameter unstable. In log space a step multiplies, and
    # the bound keeps a component from exploding or changing its sign.
    bound = math.log(limit)
    return torch.exp(bound * torch.tanh(log_multiplier / bound))


@dataclass(frozen=True, eq=False)
class SourceComponents:
    """The components in the source data, from which gains are made; see `FittedFilter`."""

    singular_values: Tensor  # positive, falling, shape (components,)
    deviations: Tensor  # standard deviations, shape (components,)
    energies: Tensor | None  # band energies of source samples, shape (samples, bands)
    noise: Callable[[], Tensor]  # returns the variances for white noise of variance 1
    class_reach: Tensor | None = None  # squared distance of the farthest class, (components,)
    rest: Tensor | None = None  # squared length outside the basis, for the samples of `energies`
    textures: Tensor | None = None  # of the same samples, shape (samples, numbers)
    sample_size: int = 0  # numbers in a sample
    resemblance: Resemblance | None = None  # between the samples of `energies`


class Gain(nn.Module):
    """Returns the gains of a filter when it is called; the *rest* is the part outside the basis."""

    keeps_rest = False  # the paper drops it
    watches_rest = False  # whether it has a gain of its own, or that of the last component

    def forward(
        self,
        components: Tensor | None = None,
        rest: Tensor | None = None,
        size: OtherSize | None = None,
    ) -> Tensor:
        """Return the gains, shape (components,), or (batch, components) if each sample has its own.

        They are for components, (batch, components), or without any as they are now, and must not
        be written into. `rest` has the shape (batch, d), for gains that `watches_rest`; `size` is
        that of images of another size than at the fit.
        """
        raise NotImplementedError

    def join(self, stream: Stream) -> None:
        """Keep statistics in this stream."""

    def offset(self) -> tuple[Tensor, Tensor | None] | None:
        """Return offsets of components, (components,), and rest, (d,), if any; or rows of them."""
        return None

    def rest_gain(self) -> Tensor | float | None:
        """Return the gain of the rest, a number or (batch, 1); None: as the last component."""
        return None

    def look_at(self, samples: Tensor, components: Tensor) -> None:
        """Look at samples, (batch, *shape), and their components before any of them is scaled."""

    @property
    def closed_form(self) -> Any:
        """The part that follows from the data, or None if everything is learned."""
        return None


AnyGainClass = TypeVar("AnyGainClass", bound=type[Gain])
_REGISTERED: dict[str, tuple[type[Gain], dict[str, Any]]] = {}


def register_gain(name: str, **preset: Any) -> Callable[[AnyGainClass], AnyGainClass]:
    """Register a class for `make_gain`, with the defaults that this name stands for."""

    def registered(gain: AnyGainClass) -> AnyGainClass:
        _REGISTERED[name] = (gain, preset)
        return gain

    return registered


def make_gain(name: GainName, source: SourceComponents, **options: object) -> Gain:
    """Make a gain by its name, or raise `OptionError`."""
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
    """Return the names of the options of a class, and of its bases, to which it passes them on."""
    found: dict[str, None] = {}
    for cls in gain.__mro__:
        parameters = inspect.signature(cls).parameters.values()
        found |= dict.fromkeys(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    return list(found)


def is_closed_form(name: GainName) -> bool:
    """Return whether a gain follows from the test data."""
    check_option("gain", name, OneOf(tuple(_REGISTERED)))
    # Learned gains are the paper's, which drop the rest; all others keep it.
    return _REGISTERED[name][0].keeps_rest


class LearnedGain(Gain):
    """Base of the paper's gains: each component has a learned gamma, at first `initial`."""

    start: ClassVar[float]  # of gamma
    spectrum: Tensor

    def __init__(
        self, source: SourceComponents, *, normalise: bool = True, initial: float | None = None
    ) -> None:
        super().__init__()
        values = source.singular_values
        if not bool((values > 0).all()):
            raise OptionError("Gains need positive singular values; found a zero or a NaN.")
        self.register_buffer("spectrum", values.detach() / (values.max() if normalise else 1.0))
        start = self.start if initial is None else initial
        check_option("initial", start, Number())
        self.gamma = nn.Parameter(torch.full_like(self.spectrum, start))


@register_gain("relu")
class ReLUGain(LearnedGain):
    """The paper's ReLU filter, a ridge-like shrinkage; gradients need a positive gamma."""

    start = 1e-4

    def forward(self, *_: object, **__: object) -> Tensor:
        """Return lambda / (lambda + relu(gamma)), shape (components,), whatever the batch."""
        return self.spectrum / (self.spectrum + torch.relu(self.gamma))


@register_gain("exponential")
class ExponentialGain(LearnedGain):
    """The paper's exponential filter: a mild low-pass from the start, without gradient at zero."""

    start = 0.1

    def forward(self, *_: object, **__: object) -> Tensor:
        """Return 1 / (1 + exp(gamma^2 - lambda)), shape (components,), whatever the batch."""
        return torch.sigmoid(self.spectrum - self.gamma.square())


@register_gain("multiplicative")
class MultiplicativeGain(Gain):
    """Either filter of the paper times learned multipliers between 1 / `limit` and `limit`."""

    def __init__(
        self,
        source: SourceComponents,
        *,
        normalise: bool = True,
        penalty: PenaltyName = "relu",
        initial: float | None = None,
        limit: float = MULTIPLIER_LIMIT,
    ) -> None:
        super().__init__()
        check_option("penalty", penalty, OneOf(get_args(PenaltyName)))
        check_option("limit", limit, ABOVE_ONE)
        self.penalty = make_gain(penalty, source, normalise=normalise, initial=initial)
        self.log_multiplier = nn.Parameter(torch.zeros_like(source.singular_values))
        self.limit = limit

    def forward(self, *_: object, **__: object) -> Tensor:
        """Return the gains, shape (components,), whatever the batch."""
        gains: Tensor = self.penalty()
        return gains * bounded_multiplier(self.log_multiplier, self.limit)
