"""Looks at what a network is given: sets implausible samples aside, and warns of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.errors import InputRangeWarning, warn_caller
from ttapca.fitting.input_range import InputRange, InputSums, mistake_in
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.stream import Stream

# After so many images, nobody asks for their units any more: these do not change in a stream.
MOST_IMAGES = 256


class InputCheck:
    """A hook that compares what a network is given with what it was given at the fit.

    A sample is implausible if a value is farther from the middle of the source's range than eight
    times its width, the root of the largest ratio of variances that is believed. It passes the
    untouched network, and leaves no mark on its stream but a count. The first one leads to a
    warning, as do images that are in other units than those of the fit.

    Args:
        source: What the network was given at the fit: inside of wrappers that normalise.
        stream: Whose samples are set aside; None if all are adapted to.
        constants: See `ttapca.spectral.constants`.
    """

    def __init__(
        self, source: InputRange, stream: Stream | None, constants: Constants = CONSTANTS
    ) -> None:
        self._source, self._stream = source, stream
        # In widths of the range beyond its ends.
        self._most = math.sqrt(constants.largest_ratio) - 1 / 2
        self._seen, self._images = InputSums(), 0
        self._warned = False

    def __call__(self, _core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at some samples."""
        if torch.compiler.is_compiling():
            return
        given = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(given, Tensor) or given.dim() < 2 or not given.numel():
            return
        if not self._warned and self._images < MOST_IMAGES and given.dim() == 4:
            self._look_for_units(given[: MOST_IMAGES - self._images])
        batch = None if self._stream is None else self._stream.batch
        if batch is not None and not batch.traced and batch.size == len(given):
            implausible = self._implausible(given.detach())
            if implausible is not None:
                batch.leave_aside(implausible)
                self._warn_of(given[implausible])

    def _implausible(self, samples: Tensor) -> Tensor | None:
        """Return which samples are implausible; None if none is.

        NaN and infinity are found elsewhere, and cost the whole batch.
        """
        source = self._source
        width = float((source.high - source.low).max())
        low, high = (float(each) for each in samples.aminmax())
        inner = float(source.low.max()) - self._most * width <= low
        if inner and high <= float(source.high.min()) + self._most * width:
            return None
        beyond = source.beyond(samples)
        found = (beyond > self._most) & torch.isfinite(beyond)
        return found if bool(found.any()) else None

    def _warn_of(self, samples: Tensor) -> None:
        if self._warned:
            return
        self._warned = True
        low, high = (float(each) for each in samples.aminmax())
        warn_caller(
            f"Samples with values from {low:.3g} to {high:.3g} are far outside of those that the "
            f"filter was fitted on, with {self._source.in_words()}. They are predicted by the "
            "network as it is, and leave no mark on the stream. Look at what produced them.",
            InputRangeWarning,
        )

    def _look_for_units(self, images: Tensor) -> None:
        self._images += len(images)
        self._seen.add(images[torch.isfinite(images).flatten(1).all(1)])
        seen = self._seen.found()
        mistake = None if seen is None else mistake_in(seen, self._source, self._images)
        if mistake is not None and seen is not None:
            self._warned = True
            warn_caller(
                f"The network is given images with {seen.in_words()}, where the filter was fitted "
                f"on images with {self._source.in_words()}: {mistake} Prepare images as for the "
                "fit.",
                InputRangeWarning,
            )
