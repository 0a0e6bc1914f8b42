"""Spectral gains: by how much each principal component is scaled.

The paper's symbols, used here and nowhere else: lambda_i is the i-th singular value of the source
data, gamma_i the parameter learned for it, and F_i the gain.

    ReLU             F_i = lambda_i / (lambda_i + relu(gamma_i))
    exponential      F_i = 1 / (1 + exp(gamma_i^2 - lambda_i))
    multiplicative   a_i * F_i, with a_i learned in log space and bounded

The singular values are divided by the largest one, as in the paper; `normalise=False` turns that
off.

**The start matters.** At gamma = 0 the gradient of both filters is zero (the derivative of ReLU is
zero there, and the exponential's carries a factor 2 gamma), so nothing would ever be learned. The
paper gives no starting value. Here it is the option `initial`, by default a small positive number
at which the gradient is alive and the filter still close to its gamma = 0 form.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ttapca.errors import OptionError, did_you_mean

GainName = Literal["relu", "exponential", "multiplicative"]
PenaltyName = Literal["relu", "exponential"]

RELU_START = 1e-4
EXPONENTIAL_START = 0.1
MULTIPLIER_LIMIT = 4.0


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


class Gain(nn.Module):
    """Gives the gains of a filter when it is called; most learn them.

    Args:
        singular_values: Of the source data, positive, falling, shape (components,).
        normalise: Divide them by the largest one.

    Attributes:
        keeps_rest: Whether what lies outside the basis is kept, scaled by the last gain; the paper
            drops it.
    """

    spectrum: Tensor
    keeps_rest = False

    def __init__(self, singular_values: Tensor, *, normalise: bool = True) -> None:
        super().__init__()
        if not bool((singular_values > 0).all()):
            raise OptionError("Gains need positive singular values; found a zero or a NaN.")
        largest = singular_values.max() if normalise else 1.0
        self.register_buffer("spectrum", singular_values.detach() / largest)

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains.

        Args:
            components: Of the batch to be scaled, shape (batch, components); without one, the gains
                are given as they are now.

        Returns:
            Shape (components,).
        """
        raise NotImplementedError

    def state(self) -> list[Tensor]:
        """Buffers that change at test time; what learns has parameters instead."""
        return []

    def offset(self, components: Tensor) -> Tensor | None:
        """What is to be subtracted from the components before they are scaled, if anything."""
        del components
        return None

    def restored(self) -> None:
        """Follow a change of the state from outside."""

    def _start_at(self, value: float, name: str) -> nn.Parameter:
        if not math.isfinite(value):
            raise OptionError(f"`{name}` is a finite number; found {value}.")
        return nn.Parameter(torch.full_like(self.spectrum, value))


class ReLUGain(Gain):
    """The paper's ReLU filter.

    Args:
        singular_values: As for `Gain`.
        normalise: As for `Gain`.
        initial: Start of gamma. At zero or below the filter is dead: it is the identity on its
            subspace and stays so.

    Example:
        >>> ReLUGain(torch.tensor([2.0, 1.0]), initial=0.5)().tolist()
        [0.6666666865348816, 0.5]
    """

    def __init__(
        self, singular_values: Tensor, *, normalise: bool = True, initial: float = RELU_START
    ) -> None:
        super().__init__(singular_values, normalise=normalise)
        self.gamma = self._start_at(initial, "initial")

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains, shape (components,), whatever the batch."""
        del components
        return relu_gain(self.gamma, self.spectrum)


class ExponentialGain(Gain):
    """The paper's exponential filter: a mild low-pass from the start.

    Args:
        singular_values: As for `Gain`.
        normalise: As for `Gain`.
        initial: Start of gamma. At zero the filter is dead: its gains stay as they are.

    Example:
        >>> ExponentialGain(torch.tensor([1.0]), initial=1.0)().tolist()
        [0.5]
    """

    def __init__(
        self, singular_values: Tensor, *, normalise: bool = True, initial: float = EXPONENTIAL_START
    ) -> None:
        super().__init__(singular_values, normalise=normalise)
        self.gamma = self._start_at(initial, "initial")

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains, shape (components,), whatever the batch."""
        del components
        return exponential_gain(self.gamma, self.spectrum)


class MultiplicativeGain(Gain):
    """Either filter of the paper times a learned, bounded multiplier that may exceed one.

    Args:
        singular_values: As for `Gain`.
        normalise: As for `Gain`.
        penalty: The filter that is multiplied.
        initial: Start of its gamma; the penalty's own default when None.
        limit: Multipliers stay between 1 / limit and limit; they start at 1.

    Example:
        >>> MultiplicativeGain(torch.tensor([1.0]), initial=1.0)().tolist()
        [0.5]
    """

    def __init__(
        self,
        singular_values: Tensor,
        *,
        normalise: bool = True,
        penalty: PenaltyName = "relu",
        initial: float | None = None,
        limit: float = MULTIPLIER_LIMIT,
    ) -> None:
        super().__init__(singular_values, normalise=normalise)
        if penalty not in get_args(PenaltyName):
            raise OptionError(f"`penalty` is 'relu' or 'exponential'; found {penalty!r}.")
        if not (math.isfinite(limit) and limit > 1):
            raise OptionError(f"`limit` is a finite number above 1; found {limit}.")
        start = {} if initial is None else {"initial": initial}
        # Normalised already, or not to be.
        self.penalty = _GAINS[penalty](self.spectrum, normalise=False, **start)
        self.log_multiplier = self._start_at(0.0, "log_multiplier")
        self.limit = limit

    def forward(self, components: Tensor | None = None) -> Tensor:
        """The gains, shape (components,), whatever the batch."""
        del components
        gains: Tensor = self.penalty()
        return gains * bounded_multiplier(self.log_multiplier, self.limit)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"limit={self.limit}"


_GAINS: dict[str, type[Gain]] = {
    "relu": ReLUGain,
    "exponential": ExponentialGain,
    "multiplicative": MultiplicativeGain,
}


def make_gain(name: GainName, singular_values: Tensor, **options: object) -> Gain:
    """Build a gain by its name.

    Args:
        name: `relu`, `exponential` or `multiplicative`.
        singular_values: Of the source data, shape (components,).
        **options: Of that gain: `normalise`, `initial`, `penalty`, `limit`.

    Raises:
        OptionError: When there is no such gain, or an option's value makes no sense.

    Example:
        >>> make_gain("relu", torch.tensor([1.0]), initial=1.0)().tolist()
        [0.5]
    """
    if name not in _GAINS:
        raise OptionError(
            f"There is no gain `{name}`.{did_you_mean(name, _GAINS)} There are: "
            f"{', '.join(_GAINS)}."
        )
    return _GAINS[name](singular_values, **options)  # type: ignore[arg-type]
