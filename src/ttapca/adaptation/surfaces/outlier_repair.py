"""Outliers in the images, replaced before a filter sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.image_statistics import SourceOutliers
from ttapca.spectral.stream import Stream
from ttapca.support.modules import find_layer


class OutlierRepair(Surface):
    """Replaces single pixels that have gone wrong by the median around them.

    It acts on the input of a filter's layer, before the filter does. Batches like those of the
    source pass through unchanged; see `ttapca.spectral.image_statistics`.

    Args:
        fitted: A filter that acts on images, and knows how many of their values stray.
        constants: See `ttapca.spectral.constants`.

    Raises:
        AttachError: The filter does not know that.
    """

    def __init__(self, fitted: FittedFilter, constants: Constants = CONSTANTS) -> None:
        super().__init__()
        if fitted.outliers_ is None:
            raise AttachError(
                "Outliers are replaced where a filter acts on the model's input images and was "
                f"fitted by this version of ttapca or a later one; the filter at `{fitted.layer}` "
                "knows nothing of outliers. Fit it again, or do without."
            )
        self._fitted = fitted
        self._source = SourceOutliers(fitted.outliers_, constants)
        self._stream = Stream()

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Act on what the layer is given, before all that acts on it already."""
        super().attach(model, stream)
        layer = find_layer(model, self._fitted.layer)
        self._stream = stream or Stream()
        hook = InputRepair(self.unless_disabled)
        # A wrapper around `forward` would come after the filter, which is a hook of the layer.
        self.patches.hook_input(layer, hook, first=True)

    def unless_disabled(self, images: Tensor) -> Tensor:
        """Do what `forward` does, or return the images as they are where this is switched off."""
        return self(images) if self.enabled else images

    def forward(self, images: Tensor) -> Tensor:
        """Return the images with outliers replaced, stream by stream, and count these."""
        self._fitted.check_shape(tuple(images.shape[1:]))
        if not images.shape[0]:
            return images
        running = self._stream.batch
        if running is not None and running.traced:
            each = running.counted_images()
            return self._source.repaired_alike(images, each) if isinstance(each, int) else images
        if torch.compiler.is_exporting():  # a frozen program repairs nothing
            return images
        batch = self._stream.opened(len(images)) if self._stream.state is not None else None
        if batch is None or batch.rows is None:
            mended, share = self._source.repaired(images)
            if batch is not None and batch.records:
                batch.outliers.setdefault(0, (share, len(images)))
            return mended
        rows = batch.rows.filtered.nonzero()[:, 0]
        if not len(rows):
            return images
        # Those of a stream come one after the other.
        streams, sizes = torch.unique_consecutive(batch.rows.stream[rows], return_counts=True)
        chosen = images[rows]
        mended, shares = self._source.repaired_each(chosen, sizes.tolist())
        if batch.records:
            for number, share, size in zip(streams.tolist(), shares, sizes.tolist(), strict=True):
                batch.outliers[number] = share, size
        return images if mended is chosen else images.index_copy(0, rows, mended)

    def extra_repr(self) -> str:
        """Return what `print(adapter)` shows."""
        return f"outliers at {self._fitted.layer}"


class InputRepair:
    """A hook that gives a layer repaired images; a class, so that copies carry it along.

    Args:
        repair: Returns images that are repaired.
    """

    def __init__(self, repair: Callable[[Tensor], Tensor]) -> None:
        self.repair = repair

    @property
    def surface(self) -> object:
        """Whose method repairs, so that `ttapca.detach` finds surfaces; None for a function."""
        return getattr(self.repair, "__self__", None)

    def __call__(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the layer, or None where they stay."""
        if args:
            return (self.repair(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self.repair(kwargs["input"])}
