"""Which numbers a network is given: measured on source data by `fit`, compared with others later.

Measured is the first argument of the network itself: where it stands in a wrapper that normalises
(`ttapca.support.modules.core_of`), what this makes of the images. Images of shape (C, H, W) have
numbers for each channel, samples of other shapes one of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ttapca.support.tensors import at_least_float32

# More channels than this are no image: their samples have one number of each.
MOST_CHANNELS = 64


@dataclass(frozen=True, eq=False)
class InputRange:
    """Range, mean and standard deviation of the inputs of a network, shape (channels,) each.

    Attributes:
        low: The lowest value.
        high: The highest one.
        mean: Over samples and places.
        deviation: Likewise.

    Example:
        >>> images = torch.linspace(0, 1, 2 * 3 * 8 * 8).view(8, 8, 3, 2).permute(3, 2, 0, 1)
        >>> found = InputRange.of(images)
        >>> found.beyond(torch.stack([images[0], 255 * images[0]])) > 200
        tensor([False,  True])
    """

    low: Tensor
    high: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> InputRange | None:
        """Return those of some samples, (batch, ...); None if they are no floating-point numbers.

        Example:
            >>> InputRange.of(torch.zeros(4, 3, dtype=torch.int64)) is None
            True
        """
        sums = InputSums()
        sums.add(samples)
        return sums.found()

    @property
    def tensor(self) -> Tensor:
        """All of it, a row each, shape (4, channels); `of_tensor` is the way back."""
        return torch.stack([self.low, self.high, self.mean, self.deviation])

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> InputRange:
        """Return what was written as `tensor`."""
        return cls(*tensor)

    def in_words(self) -> str:
        """Say which numbers these are.

        Example:
            >>> InputRange.of(torch.tensor([[0.0, 1.0], [0.0, 3.0]])).in_words()
            'mean 1 and range 0 to 3'
        """
        mean, low, high = self.mean.mean(), self.low.min(), self.high.max()
        return f"mean {float(mean):.3g} and range {float(low):.3g} to {float(high):.3g}"

    def beyond(self, samples: Tensor) -> Tensor:
        """Return by how many widths of the range the values of each sample leave it at most.

        Returns:
            Shape (batch,): 0 for a sample within the range, NaN or infinity for one that holds NaN
            or infinity. Of samples with other channels than those of the source, the lowest and the
            highest value of all channels count.
        """
        values = at_least_float32(samples)
        values = values.flatten(2) if values.dim() == 4 else values.flatten(1)[:, None]
        low, high = (each.to(values) for each in (self.low, self.high))
        if values.shape[1] != len(low):
            values, low, high = values.flatten(1)[:, None], low.amin()[None], high.amax()[None]
        # That of the widest channel: another one may have been constant.
        width = (high - low).amax().clamp(min=torch.finfo(values.dtype).tiny)
        over = torch.maximum(values.amax(2) - high, low - values.amin(2)) / width
        return over.amax(1).clamp(min=0)


@dataclass(eq=False)
class InputSums:
    """Sums of which an `InputRange` is made; those of parts of the data add up.

    Attributes:
        sums: How many values, their sum and that of their squares, shape (3, channels).
        ends: The lowest and the highest value, shape (2, channels).
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(3, 0, dtype=torch.float64))
    ends: Tensor = field(default_factory=lambda: torch.zeros(2, 0, dtype=torch.float64))

    @torch.no_grad()
    def add(self, samples: Any) -> None:
        """Add the samples of a batch, (batch, ...); what is no tensor of such is left out."""
        if not isinstance(samples, Tensor) or not samples.is_floating_point():
            return
        if samples.dim() < 2 or not samples.numel():
            return
        values = at_least_float32(samples.detach())
        channels = values.shape[1] if values.dim() == 4 else 1
        each = values.reshape(len(values), channels if channels <= MOST_CHANNELS else 1, -1)
        var, mean = (found.double() for found in torch.var_mean(each, 2, correction=0))
        # Sums over single samples do not depend on how these are divided into batches.
        moments = each.shape[2] * torch.stack([torch.ones_like(mean), mean, var + mean.square()])
        ends = torch.stack([each.amin((0, 2)), each.amax((0, 2))]).double()
        self.merge(InputSums(moments.sum(1).cpu(), ends.cpu()))

    def merge(self, other: InputSums) -> None:
        """Add what was measured of other data."""
        if not other.sums.numel():
            return
        if not self.sums.numel():
            self.sums, self.ends = other.sums, other.ends
            return
        one, two = self, other
        if one.sums.shape != two.sums.shape:  # other channels: only all together compare
            one, two = one._together(), two._together()
        self.sums = one.sums + two.sums
        self.ends = torch.stack(
            [
                torch.minimum(one.ends[0], two.ends[0]),
                torch.maximum(one.ends[1], two.ends[1]),
            ]
        )

    def _together(self) -> InputSums:
        low, high = self.ends[0].amin(), self.ends[1].amax()
        return InputSums(self.sums.sum(1, keepdim=True), torch.stack([low, high])[:, None])

    def found(self) -> InputRange | None:
        """Return what was measured; None if that is nothing, or not finite."""
        if not self.sums.numel() or not torch.isfinite(self.sums).all():
            return None
        count, total, squares = self.sums
        mean = total / count
        deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
        found = torch.stack([*self.ends, mean.clamp(*self.ends), deviation])
        return InputRange.of_tensor(found.float())

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same sums of."""
        return {"sums": self.sums, "ends": self.ends}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> InputSums:
        """Make sums of what `tensors` returned."""
        return cls(tensors["sums"], tensors["ends"])
