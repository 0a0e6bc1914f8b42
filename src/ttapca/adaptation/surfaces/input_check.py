"""Looks at the first images that a network is given, and warns if they are in other units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ttapca.errors import InputRangeWarning, warn_caller
from ttapca.fitting.input_range import InputRange, InputSums
from ttapca.fitting.input_units import mistake_in
from ttapca.support.modules import core_of

# After so many images, nothing more is looked at: units do not change in a stream.
MOST_IMAGES = 256


class InputCheck:
    """A hook that compares the first images of a network with those of the fit, and warns once.

    It stays when it has seen enough: the model has the same hooks while an adapter is on it.

    Args:
        model: The model; wrappers that normalise are looked through, as by `fit`.
        source: What the network was given at the fit.
    """

    def __init__(self, model: nn.Module, source: InputRange) -> None:
        self._source, self._seen, self._images = source, InputSums(), 0
        self._handle = core_of(model)[1].register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at some images."""
        if self._images >= MOST_IMAGES or torch.compiler.is_compiling():
            return
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(given, Tensor) and given.dim() == 4:
            self._look_at(given[: MOST_IMAGES - self._images])

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()

    def _look_at(self, images: Tensor) -> None:
        self._images += len(images)
        self._seen.add(images[torch.isfinite(images).flatten(1).all(1)])
        seen = self._seen.found()
        mistake = None if seen is None else mistake_in(seen, self._source, self._images)
        if mistake is not None and seen is not None:
            self._images = MOST_IMAGES
            warn_caller(
                f"The network is given images with {seen.in_words()}, where the filter was fitted "
                f"on images with {self._source.in_words()}: {mistake} Prepare images as for the "
                "fit.",
                InputRangeWarning,
            )
