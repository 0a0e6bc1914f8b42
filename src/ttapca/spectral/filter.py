"""The spectral filter itself: project on principal components, scale each, rebuild."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ttapca.errors import ShapeError
from ttapca.spectral.cosine import dct_coefficients, dct_images, dct_matrix
from ttapca.spectral.gains import Gain
from ttapca.spectral.half_precision import NarrowBasis
from ttapca.spectral.last_batch import LastBatch


class SpectralFilter(nn.Module):
    """Filter a tensor along the principal components of the source data.

    With V the basis, m the source mean and F the gains: x -> m + F * ((x - m) V) V^T. What lies
    outside the basis is dropped, as in the paper, unless the gain `keeps_rest`. For a folded filter
    the tensor is the *input* of an affine layer, and `project` and `rebuild` are two different
    matrices (see `ttapca.spectral.affine`).

    It computes in its own precision, whatever the precision of what comes in, and gives back what
    it was given: a bfloat16 network keeps a float32 filter.

    Args:
        mean: Source mean, shape (d,).
        project: From centred samples to components, shape (d, components).
        rebuild: From components to centred samples, shape (d, components); `project` when None.
        shape: Of one sample, without the batch dimension; its product is d.
        gain: Gives the gains; without one, all are 1 and the filter only drops what lies outside
            its basis.
        narrow: The same matrices in half precision, for single samples.

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
        narrow: NarrowBasis | None = None,
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.register_buffer("mean", mean)
        self.register_buffer("project", project)
        self.register_buffer("rebuild", rebuild)
        self.gain = gain
        self.narrow = narrow
        self._last = LastBatch()

    @property
    def n_components(self) -> int:
        """Number of components kept."""
        return self.project.shape[1]

    def gains(self) -> Tensor:
        """The gains as they are now, shape (components,)."""
        if self.gain is None:
            return self.mean.new_ones(self.n_components)
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
        components = self._components_once(flat, centred)
        if self.gain is None:
            filtered = self._add_rebuilt(self.mean, components)  # (batch, d)
        elif not self.gain.keeps_rest:
            filtered = self._add_rebuilt(self.mean, components * self.gain(components))
        else:
            offset = self.gain.offset(components)
            gains = self.gain(components if offset is None else components - offset)
            rest = gains[-1]
            # Written as a correction: gains of 1 leave every bit as it was.
            if offset is None:
                changed = _differ_from_last(gains)
                if not changed and rest == 1:
                    return samples
                change = components[:, :changed] * (gains[:changed] - rest)
            else:
                change = components * (gains - rest) - gains * offset
            filtered = self._add_rebuilt(flat, change)
            filtered = torch.addcmul(filtered, centred, rest - 1)
        return filtered.reshape(samples.shape).to(samples.dtype)

    def _components_once(self, flat: Tensor, centred: Tensor) -> Tensor:
        """Components, projected once for several passes over a batch while gains are learned."""
        if self.gain is None or not any(True for _ in self.gain.parameters()):
            return self.project_centred(centred)
        found = self._last.find(flat, self.mean, self.project)
        if found is None:
            found = self.project_centred(centred)
            self._last.keep(flat, found, self.mean, self.project)
        return found

    def project_centred(self, centred: Tensor) -> Tensor:
        """Components of samples without their mean, (batch, d) to (batch, components)."""
        quick = None if self.narrow is None else self.narrow.projected(centred)
        return centred @ self.project if quick is None else quick

    def _add_rebuilt(self, base: Tensor, components: Tensor) -> Tensor:
        """Add what the first components stand for to `base`, shape (batch, d)."""
        quick = None if self.narrow is None else self.narrow.rebuilt(components)
        if quick is not None:
            return base + quick
        rebuild = self.project if self.rebuild is None else self.rebuild
        return torch.addmm(base, components, rebuild[:, : components.shape[1]].T)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        kind = "unfolded" if self.rebuild is None else "folded"
        return f"shape={self.shape}, components={self.n_components}, {kind}"


def _differ_from_last(gains: Tensor) -> int:
    """How many leading components have to be rebuilt: those past them are scaled as the rest is.

    Of closed-form gains, which are constant past the middle of the last band, that is a quarter.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return len(gains)
    other = (gains != gains[-1]).nonzero()
    return int(other[-1]) + 1 if len(other) else 0


class DCTFilter(SpectralFilter):
    """The same along the coefficients of a discrete cosine transform, for large images.

    Args:
        mean: Source mean, shape (C H W,).
        rotation: Of the channels, shape (C, C); it takes the place of `project`.
        order: Which coefficient each component is, shape (components,).
        shape: Of an image, (C, H, W).
        gain: As for `SpectralFilter`.

    Example:
        >>> smooth = DCTFilter(torch.zeros(4), torch.eye(1), torch.tensor([0]), shape=(1, 2, 2))
        >>> smooth(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])).round(decimals=3).tolist()
        [[[[2.5, 2.5], [2.5, 2.5]]]]
    """

    order: Tensor
    height: Tensor
    width: Tensor

    def __init__(
        self,
        mean: Tensor,
        rotation: Tensor,
        order: Tensor,
        *,
        shape: tuple[int, ...],
        gain: Gain | None = None,
    ) -> None:
        super().__init__(mean, rotation, shape=shape, gain=gain)
        self.register_buffer("order", order)
        # Not in the state dict: they follow from the shape.
        for name, size in zip(("height", "width"), shape[1:], strict=True):
            self.register_buffer(name, dct_matrix(size).to(mean), persistent=False)

    @property
    def n_components(self) -> int:
        """Number of components kept."""
        return len(self.order)

    def project_centred(self, centred: Tensor) -> Tensor:
        """Components of samples without their mean, (batch, d) to (batch, components)."""
        images = centred.reshape(-1, *self.shape)
        coefficients = dct_coefficients(images, self.height, self.width).flatten(2)
        return (self.project.T @ coefficients).flatten(1).index_select(1, self.order)

    def _add_rebuilt(self, base: Tensor, components: Tensor) -> Tensor:
        every = components.new_zeros(len(components), self.mean.numel())
        every = every.index_copy(1, self.order[: components.shape[1]], components)
        coefficients = self.project @ every.reshape(len(every), self.shape[0], -1)
        images = dct_images(coefficients.reshape(-1, *self.shape), self.height, self.width)
        return base + images.flatten(1)
