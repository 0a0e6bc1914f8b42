"""The spectral filter itself: project on the components, scale each, rebuild."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from ttapca.spectral.basis import Basis
from ttapca.spectral.gains import Gain
from ttapca.spectral.other_sizes import OtherSize
from ttapca.support.tensors import TensorCache, identity, not_below_float32, own_precision

# Sizes of images that a filter is ready for: a stream may have a few of them in turn.
SIZES_KEPT = 4


class SpectralFilter(nn.Module):
    """Filter a tensor along the components of a basis.

    With V the basis, m the source mean and F the gains: x -> m + F * ((x - m) V) V^T. The rest, the
    part outside the basis, is dropped as in the paper, unless the gain `keeps_rest`. A bfloat16
    network keeps a float32 filter, and a basis of cosines takes images of other sizes as well.

    Args:
        mean: Source mean, shape (d,).
        basis: Leads from centred samples to components and back.
        shape: Shape of one sample of the fit, with d numbers.
        gain: Returns the gains. Without one, all are 1, and the filter only drops the rest.

    Example:
        >>> from ttapca.spectral.basis import Dense
        >>> first = Dense(torch.tensor([[1.0], [0.0]]))
        >>> SpectralFilter(torch.zeros(2), first, shape=(2,))(torch.tensor([[3.0, 4.0]])).tolist()
        [[3.0, 0.0]]
    """

    mean: Tensor
    basis: Basis
    gain: Gain | None

    def __init__(
        self, mean: Tensor, basis: Basis, *, shape: tuple[int, ...], gain: Gain | None = None
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.register_buffer("mean", mean)
        self.basis = basis
        self.gain = gain
        self._last = _LastBatch()
        self._sizes: dict[tuple[int, ...], TensorCache[OtherSize]] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move along when the model is moved or cast, and stay precise: variances may be tiny."""
        super()._apply(not_below_float32(fn), recurse)  # type: ignore[no-untyped-call]
        return self

    @property
    def n_components(self) -> int:
        """Number of components kept."""
        return self.basis.n_components

    def gains(self) -> Tensor:
        """Return the gains as they are now, shape (components,)."""
        if self.gain is None:
            return self.mean.new_ones(self.n_components)
        gains: Tensor = self.gain()
        return gains

    def components(self, samples: Tensor) -> Tensor:
        """Return components as of the fitted size: (batch, *shape) to (batch, components)."""
        flat = samples.flatten(1).to(self.mean.dtype)
        with own_precision(samples.device):
            if tuple(samples.shape[1:]) == self.shape:
                return self.basis.project(flat - self.mean)
            other = self._other_size(samples)
            return other.components(other.like_fitted(other.project(flat - other.mean)))

    def scaled_by(self, gains: Tensor, samples: Tensor) -> Tensor:
        """Return samples of any shape that the filter takes with these gains, without the rest."""
        flat = samples.flatten(1).to(self.mean.dtype)
        with own_precision(samples.device):
            if tuple(samples.shape[1:]) == self.shape:
                scaled = self.basis.project(flat - self.mean) * gains
                filtered = self.basis.add_rebuilt(self.mean, scaled)
            else:
                other = self._other_size(samples)
                scaled = other.project(flat - other.mean) * other.gains(gains, gains.new_zeros(()))
                filtered = other.add_rebuilt(other.mean, scaled)
        return filtered.reshape(samples.shape).to(samples.dtype)

    def forward(self, samples: Tensor) -> Tensor:
        """Filter a batch of shape (batch, *shape), or raise `ShapeError` for other shapes."""
        if self.gain is None:
            return self.scaled_by(self.gains(), samples)
        with own_precision(samples.device):
            if tuple(samples.shape[1:]) == self.shape:
                components = self._projected(self.gain, samples, self.mean, self.basis)
                self.gain.look_at(samples, components)
                found = self._scaled(self.gain, samples, components)
            else:
                found = self._filtered_other_size(self.gain, samples)
        return found if found is samples else found.reshape(samples.shape).to(samples.dtype)

    def _projected(
        self, gain: Gain, samples: Tensor, mean: Tensor, basis: Basis | OtherSize
    ) -> Tensor:
        """Return the coordinates of samples less their mean in a basis, (batch, any number)."""
        precise = samples.to(mean.dtype)
        # Learned gains have parameters, and see a batch more than once.
        if gain._parameters:
            return self._last.components(precise, mean, basis)
        return _few_at_a_time(
            lambda some: basis.project(some - mean), basis.at_once, precise.flatten(1)
        )

    def _scaled(self, gain: Gain, samples: Tensor, components: Tensor) -> Tensor:
        """Return flat samples after scaling their components; the samples if nothing changes.

        With c the components, F their gains, r the gain of the rest, and o and p the offsets of
        components and rest, a sample x becomes the first line, computed as the second:

            m + F (c - o) V^T + r (x - m - c V^T - p)
            = x + (r - 1) (x - m) + ((F - r) c - F o) V^T - r p
        """
        mean, basis = self.mean, self.basis
        if not gain.keeps_rest:
            return basis.add_rebuilt(mean, components * gain(components))
        flat = samples.flatten(1).to(mean.dtype)
        outside = None
        if gain.watches_rest:
            outside = flat - mean - basis.add_rebuilt(torch.zeros_like(mean), components)
        gains, offset = gain(components, outside), gain.offset()
        rest = _rest_gains(gains, gain.rest_gain())
        minus = away_outside = None
        if offset is not None:
            away, away_outside = offset
            minus = -gains * away.to(gains)
        else:
            changed = _leading_that_differ(gains, rest)
            if not changed and bool((rest == 1).all()):
                return samples
            components, gains = components[:, :changed], gains[..., :changed]

        def rescaled(
            flat: Tensor, components: Tensor, more: Tensor, rest: Tensor, minus: Tensor | None
        ) -> Tensor:
            change = components * more if minus is None else torch.addcmul(minus, components, more)
            # Written as a correction: gains of 1 leave every bit as it was.
            return basis.add_rebuilt(torch.addcmul(flat, flat - mean, rest - 1), change)

        filtered = _few_at_a_time(
            rescaled, basis.at_once, flat, components, gains - rest, rest, minus
        )
        return filtered if away_outside is None else filtered - rest * away_outside.to(filtered)

    def _other_size(self, samples: Tensor) -> OtherSize:
        shape = tuple(samples.shape[1:])
        self.basis.check_shape(shape, self.shape)
        if torch.compiler.is_compiling():
            return self.basis.for_shape(shape, self.mean)
        if shape not in self._sizes and len(self._sizes) >= SIZES_KEPT:
            self._sizes = {}  # replaced as a whole: threads may share a filter
        cache = self._sizes.setdefault(shape, TensorCache[OtherSize]())
        tensors = [self.mean, *self.basis.tensors().values()]
        return cache.get(tensors, lambda: self.basis.for_shape(shape, self.mean))

    def _filtered_other_size(self, gain: Gain, samples: Tensor) -> Tensor:
        """Project, look and scale as for the fitted size, but with all coefficients of samples."""
        other = self._other_size(samples)
        coefficients = self._projected(gain, samples, other.mean, other)
        # The gain sees components of images of the fitted size.
        components = other.components(other.like_fitted(coefficients))
        gain.look_at(samples, components)
        if not gain.keeps_rest:
            gains = gain(components)
            scaled = coefficients * other.gains(gains, gains.new_zeros(()))
            return other.add_rebuilt(other.mean, scaled)
        outside = None
        if gain.watches_rest:
            outside = other.outside(other.like_fitted(coefficients))
        gains, offset = gain(components, outside, other), gain.offset()
        own = other.gains(gains, _rest_gains(gains, gain.rest_gain()))
        if offset is None and not _leading_that_differ(own, own.new_ones(())):
            return samples
        change = coefficients * (own - 1)
        if offset is not None:
            away, away_outside = offset
            change = change - own * other.offset(away.to(own), away_outside)
        return other.add_rebuilt(samples.flatten(1).to(self.mean.dtype), change)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"shape={self.shape}"


def _rest_gains(gains: Tensor, scale: Tensor | float | None) -> Tensor:
    """Return the gain of the rest, or one for each sample; see `Gain`."""
    if scale is None:
        return gains[..., -1:]
    return scale if isinstance(scale, Tensor) else gains.new_tensor(scale)


def _leading_that_differ(gains: Tensor, rest: Tensor) -> int:
    """Return the number of leading components to rebuild: all others are scaled like the rest."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():  # numbers must not decide there
        return gains.shape[-1]
    different = (gains != rest).reshape(-1, gains.shape[-1]).any(0)
    last = gains.shape[-1] - 1 - int(different.flip(0).byte().argmax())  # the first from the end
    return last + 1 if bool(different[last]) else 0


def _few_at_a_time(
    run: Callable[..., Tensor], at_once: int | None, samples: Tensor, *others: Tensor | None
) -> Tensor:
    """Return the rows that `run` makes of samples, (batch, d), `at_once` of them at a time."""
    # First of all, since exporters would fix the number of samples once it is looked at.
    if at_once is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return run(samples, *others)
    batch = len(samples)
    if batch <= at_once:
        return run(samples, *others)

    def part(tensor: Tensor | None, first: int) -> Tensor | None:
        if tensor is None or tensor.dim() < 2 or len(tensor) != batch:
            return tensor
        return tensor[first : first + at_once]

    found: Tensor | None = None
    for first in range(0, batch, at_once):
        some = run(*(part(each, first) for each in (samples, *others)))
        if found is None:
            found = some.new_empty(batch, *some.shape[1:])
        found[first : first + at_once] = some
    return samples if found is None else found


class _LastBatch:
    """The components of the last batch, since gradient methods project the same samples twice."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": None}

    def components(self, samples: Tensor, mean: Tensor, basis: Basis | OtherSize) -> Tensor:
        """Return the projection of samples, in the precision of the mean, less the mean."""
        if torch.compiler.is_compiling():
            return basis.project(samples.flatten(1) - mean)
        state = [identity(each) for each in (mean, *basis.tensors().values())]
        wants_graph = torch.is_grad_enabled() and samples.requires_grad
        if self._kept is not None and not wants_graph:
            before, components, kept_state = self._kept
            alike = before.shape == samples.shape and before.device == samples.device
            if alike and kept_state == state and torch.equal(before, samples):
                return components
        components = basis.project(samples.flatten(1) - mean)
        if not torch.is_inference_mode_enabled():
            # A copy: the caller may fill the same memory with the next batch.
            self._kept = (samples.detach().clone(), components.detach(), state)
        return components
