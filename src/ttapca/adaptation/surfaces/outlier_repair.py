"""Outliers in the images, replaced before a filter sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.outliers import SourceOutliers
from ttapca.spectral.stream import Stream
from ttapca.support.modules import find_layer


class OutlierRepair(Surface):
    """Replaces single pixels that have gone wrong by the median around them.

    It acts on the input of a filter's layer, before the filter does. Batches like those of the
    source pass through unchanged; see `ttapca.spectral.outliers`.

    Args:
        fitted: A filter that acts on images, and knows how many of their values stray.

    Raises:
        AttachError: The filter does not know that.
    """

    def __init__(self, fitted: FittedFilter) -> None:
        super().__init__()
        if fitted.outliers_ is None:
            raise AttachError(
                "Outliers are replaced where a filter acts on the model's input images and was "
                f"fitted by this version of ttapca or a later one; the filter at `{fitted.layer}` "
                "knows nothing of outliers. Fit it again, or do without."
            )
        self._fitted = fitted
        self._source = SourceOutliers(fitted.outliers_)
        self._name = f"outliers at {fitted.layer}"
        self._stream = Stream()

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Act on what the layer is given, before all that acts on it already."""
        super().attach(model, stream)
        layer = find_layer(model, self._fitted.layer)
        self._stream = stream or Stream()
        self._stream.declare(self._name, (0.0, 0.0))
        hook = InputRepair(self.unless_disabled)
        # A wrapper around `forward` would come after the filter, which is a hook of the layer.
        handle = layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        self._handles = [handle]

    @property
    def share(self) -> float:
        """The share of values that strayed in the stream so far, with older images counting less.

        Source images have some, too.
        """
        return float(self._stream.now(self._name)[0])

    def share_in(self, values: Mapping[str, Any]) -> float:
        """Return `share` for the values of another stream of this kind."""
        return float(values[self._name][0])

    def unless_disabled(self, images: Tensor) -> Tensor:
        """Do what `forward` does, or return the images as they are where this is switched off."""
        return self(images) if self.enabled else images

    def forward(self, images: Tensor) -> Tensor:
        """Return the images with outliers replaced, and count these if this pass counts."""
        self._fitted.check_shape(tuple(images.shape[1:]))
        if not len(images):
            return images
        mended, share = self._source.repaired(images)
        stream, count = self._stream, len(images)
        if stream.counts(self._name):
            before, samples = stream.past(self._name)
            samples = stream.aged(samples, count) + count
            stream.write(self._name, (before + (share - before) * count / samples, samples))
        return mended

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
        # What is done depends on the data, which an exported program cannot.
        if torch.compiler.is_exporting():
            return None
        if args:
            return (self.repair(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "input": self.repair(kwargs["input"])}
