"""The spectral filter itself: project on the components, scale each, rebuild."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.errors import ShapeError
from ttapca.spectral.basis import Basis
from ttapca.spectral.gains import Gain


class SpectralFilter(nn.Module):
    """Filter a tensor along the components of a basis.

    With V the basis, m the source mean and F the gains: x -> m + F * ((x - m) V) V^T. What lies
    outside the basis is dropped, as in the paper, unless the gain `keeps_rest`.

    The filter computes in its own precision and returns that of its input: a bfloat16 network keeps
    a float32 filter.

    Args:
        mean: Source mean, shape (d,).
        basis: Leads from centred samples to components and back.
        shape: Shape of one sample, with d numbers.
        gain: Returns the gains. Without one, all are 1, and the filter only drops what lies outside
            its basis.

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

    def forward(self, samples: Tensor) -> Tensor:
        """Filter a batch of shape (batch, *shape), without writing into it.

        Raises:
            ShapeError: The samples have another shape than those of the fit.
        """
        if samples.shape[1:] != self.shape:
            raise ShapeError(
                f"The filter was fitted on samples of shape {self.shape}; found "
                f"{tuple(samples.shape[1:])} (batch {tuple(samples.shape)}). Resize the input, or "
                "fit a filter for this shape."
            )
        mean, basis, gain = self.mean, self.basis, self.gain
        flat = samples.flatten(1).to(mean.dtype)  # (batch, d)
        centred = flat - mean
        if gain is None:
            filtered = basis.add_rebuilt(mean, basis.project(centred))  # (batch, d)
            return filtered.reshape(samples.shape).to(samples.dtype)
        # Learned gains have parameters, and see a batch more than once.
        if gain._parameters:
            components = self._last.components(flat, centred, mean, basis)
        else:
            components = basis.project(centred)
        return gain.by_condition(functools.partial(self._scaled, gain), samples, components)

    def _scaled(self, gain: Gain, samples: Tensor, components: Tensor) -> Tensor:
        """Return samples, given with their components, as they are after scaling these."""
        mean, basis = self.mean, self.basis
        if not gain.keeps_rest:
            filtered = basis.add_rebuilt(mean, components * gain(components))
            return filtered.reshape(samples.shape).to(samples.dtype)
        flat = samples.flatten(1).to(mean.dtype)
        centred = flat - mean
        outside = None
        if gain.watches_rest:
            outside = centred - basis.add_rebuilt(torch.zeros_like(mean), components)
        gains, offset, scale = gain(components, outside), gain.offset(), gain.rest_gain()
        rest = gains[..., -1:]
        if scale is not None:
            rest = scale if isinstance(scale, Tensor) else gains.new_tensor(scale)
        # Written as a correction: gains of 1 leave every bit as it was.
        if offset is None:
            changed = _differ_from(gains, rest)
            if not changed and bool((rest == 1).all()):
                return samples
            change = components[:, :changed] * (gains[..., :changed] - rest)
            filtered = basis.add_rebuilt(flat, change).addcmul_(centred, rest - 1)
        else:
            away, away_outside = offset
            change = components * (gains - rest) - gains * away.to(gains)
            filtered = basis.add_rebuilt(flat, change).addcmul_(centred, rest - 1)
            if away_outside is not None:
                filtered = filtered - rest * away_outside.to(filtered)
        return filtered.reshape(samples.shape).to(samples.dtype)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"shape={self.shape}"


def _differ_from(gains: Tensor, rest: Tensor) -> int:
    """Return how many leading components to rebuild: all others are scaled like the rest.

    Closed-form gains are constant from the middle of the last band on: only a quarter is rebuilt.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gains.shape[-1]
    different = (gains != rest).reshape(-1, gains.shape[-1]).any(0).nonzero()
    return int(different[-1]) + 1 if len(different) else 0


class _LastBatch:
    """The components of the last batch, kept for a second pass over the same batch.

    A gradient step runs the network on a batch, moves the gains, and runs it again: the filter
    projects the same samples both times. That they are the same is checked, not assumed: comparing
    two batches takes a thousandth of the time of projecting one.
    """

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Let copies and pickles start without a kept batch."""
        return {"_kept": None}

    def components(self, flat: Tensor, centred: Tensor, mean: Tensor, basis: Basis) -> Tensor:
        """Return the components of samples, given with and without their mean."""
        if torch.compiler.is_compiling():
            return basis.project(centred)
        state = [_identity(each) for each in (mean, *basis.tensors().values())]
        wants_graph = torch.is_grad_enabled() and flat.requires_grad
        if self._kept is not None and not wants_graph:
            samples, components, kept_state = self._kept
            alike = samples.shape == flat.shape and samples.device == flat.device
            if alike and kept_state == state and torch.equal(samples, flat):
                return components
        components = basis.project(centred)
        if not torch.is_inference_mode_enabled():
            # A copy: the caller may fill the same memory with the next batch.
            self._kept = (flat.detach().clone(), components.detach(), state)
        return components


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return something that changes whenever a tensor is written, cast or moved."""
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.device
