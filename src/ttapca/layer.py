"""The spectral filter itself: project on principal components, scale each, rebuild."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ttapca.errors import ShapeError
from ttapca.gains import Gain


class SpectralFilter(nn.Module):
    """Filter a tensor along the principal components of the source data.

    With V the basis, m the source mean and F the gains: x -> m + F * ((x - m) V) V^T. What lies
    outside the basis is dropped, as in the paper, unless the gain `keeps_rest`. For a folded filter
    the tensor is the *input* of an affine layer, and `project` and `rebuild` are two different
    matrices (see `ttapca.folding`).

    It computes in its own precision, whatever the precision of what comes in, and gives back what
    it was given: a bfloat16 network keeps a float32 filter.

    Args:
        mean: Source mean, shape (d,).
        project: From centred samples to components, shape (d, components).
        rebuild: From components to centred samples, shape (d, components); `project` when None.
        shape: Of one sample, without the batch dimension; its product is d.
        gain: Gives the gains; without one, all are 1 and the filter only drops what lies outside
            its basis.

    Attributes:
        gain: The module that gives the gains, or None.

    Example:
        >>> keep_first = SpectralFilter(
        ...     torch.zeros(2), project=torch.tensor([[1.0], [0.0]]), shape=(2,)
        ... )
        >>> keep_first(torch.tensor([[3.0, 4.0]])).tolist()
        [[3.0, 0.0]]
    """

    mean: Tensor
    project: Tensor
    rebuild: Tensor | None

    def __init__(
        self,
        mean: Tensor,
        project: Tensor,
        rebuild: Tensor | None = None,
        *,
        shape: tuple[int, ...],
        gain: Gain | None = None,
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.register_buffer("mean", mean)
        self.register_buffer("project", project)
        self.register_buffer("rebuild", rebuild)
        self.gain = gain

    @property
    def n_components(self) -> int:
        """Number of components kept."""
        return self.project.shape[1]

    def gains(self) -> Tensor:
        """The gains as they are now, shape (components,)."""
        if self.gain is None:
            return torch.ones_like(self.project[0])
        gains: Tensor = self.gain()
        return gains

    def forward(self, samples: Tensor) -> Tensor:
        """Filter a batch.

        Args:
            samples: Shape (batch, *shape); left as it was.

        Raises:
            ShapeError: When the samples have another shape than those of the fit.
        """
        if tuple(samples.shape[1:]) != self.shape:
            raise ShapeError(
                f"The filter was fitted on samples of shape {self.shape}; found "
                f"{tuple(samples.shape[1:])} (batch {tuple(samples.shape)}). Resize the input, or "
                "fit a filter for this shape."
            )
        flat = samples.flatten(1).to(self.mean.dtype)  # (batch, d)
        centred = flat - self.mean
        components = centred @ self.project  # (batch, components)
        rebuild = self.project if self.rebuild is None else self.rebuild
        if self.gain is None:
            filtered = torch.addmm(self.mean, components, rebuild.T)  # (batch, d)
        elif not self.gain.keeps_rest:
            filtered = torch.addmm(self.mean, components * self.gain(components), rebuild.T)
        else:
            offset = self.gain.offset(components)
            gains = self.gain(components if offset is None else components - offset)
            rest = gains[-1]
            # Written as a correction: gains of 1 leave every bit as it was.
            change = components * (gains - rest)
            if offset is not None:
                change = change - gains * offset
            filtered = torch.addmm(flat, change, rebuild.T)
            filtered = torch.addcmul(filtered, centred, rest - 1)
        return filtered.reshape(samples.shape).to(samples.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        kind = "unfolded" if self.rebuild is None else "folded"
        return f"shape={self.shape}, components={self.n_components}, {kind}"
