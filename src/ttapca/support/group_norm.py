"""GroupNorm: statistics of its channels on source data, and a workaround for a bug in torch.

BatchNorm layers remember the mean and variance of every channel. GroupNorm layers normalise each
image by itself and remember nothing, so at test time nothing says whether a channel has shifted.
Fitting a filter therefore measures them on some of the source images, running the whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.support.wrapping import Wrapper, WrapperHandle, wrap_forward

# The first images are all measured, and then one in 32: fitting reads many more images than a mean
# and a variance need, and runs only a part of the network on them.
MEASURED_FIRST = 512
ONE_IN = 32


def normalised_groups(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    """Return what a GroupNorm layer makes of its input before its own scale and shift."""
    return F.group_norm(x, layer.num_groups, eps=layer.eps)


class GroupNormWatch:
    """Measures the channels of every GroupNorm layer of a model.

    Args:
        model: In evaluation mode.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4))
        >>> watch = GroupNormWatch(model)
        >>> watch.see(torch.rand(5, 1, 8, 8))
        >>> {name: tuple(found.shape) for name, found in watch.statistics().items()}
        {'1': (2, 4)}
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, nn.GroupNorm)
        }
        self._seen = 0
        self._measured = 0
        self._sums: dict[str, Tensor] = {}
        self._values: dict[str, int] = {}

    @torch.no_grad()
    def see(self, *inputs: Any, **options: Any) -> None:
        """Measure a batch of source images, or skip it, given the arguments of the model.

        The first tensor among them has a row for each image.
        """
        values = (*inputs, *options.values())
        images = next(value for value in values if isinstance(value, Tensor))
        self._seen += len(images)
        if not self._layers or self._measured >= max(MEASURED_FIRST, self._seen / ONE_IN):
            return
        self._measured += len(images)
        handles = [
            layer.register_forward_pre_hook(
                lambda layer, args, path=path: self._add(path, normalised_groups(layer, args[0]))
            )
            for path, layer in self._layers.items()
        ]
        try:
            self._model(*inputs, **options)
        finally:
            for handle in handles:
                handle.remove()

    def _add(self, path: str, values: Tensor) -> None:
        """Add the normalised input of a layer, shape (batch, channels, ...)."""
        flat = values.transpose(0, 1).flatten(1)
        var, mean = torch.var_mean(flat.float(), dim=1, correction=0)
        moments = torch.stack([mean.double(), var.double() + mean.double().square()])
        count = flat.shape[1]
        self._sums[path] = self._sums.get(path, 0.0) + moments.cpu() * count
        self._values[path] = self._values.get(path, 0) + count

    def statistics(self) -> dict[str, Tensor]:
        """Return mean and variance of every channel, by path of the layer, shape (2, channels)."""
        found = {}
        for path, sums in self._sums.items():
            mean, square = sums / self._values[path]
            statistics = torch.stack([mean, square - mean.square()]).float()
            if torch.isfinite(statistics).all():
                found[path] = statistics
        return found


class _Contiguous(Wrapper):
    """Gives a GroupNorm layer contiguous images where gradients are taken."""

    def __call__(self, forward: Callable[..., Any], /, input: Tensor) -> Any:
        return forward(input.contiguous() if torch.is_grad_enabled() else input)


def make_gradients_safe(model: nn.Module) -> list[WrapperHandle]:
    """Make gradients through GroupNorm safe, and return handles to undo that.

    On a CPU, torch's backward pass of GroupNorm crashes the process if images are laid out with
    channels last (seen in torch 2.13). So the layers get a contiguous copy.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
        >>> handles = make_gradients_safe(model)
        >>> x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> model(x).sum().backward()
        >>> for handle in handles:
        ...     handle.remove()
    """
    layers = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    return [wrap_forward(layer, _Contiguous()) for layer in layers]


@contextmanager
def safe_gradients(model: nn.Module) -> Iterator[None]:
    """Apply `make_gradients_safe` inside a block."""
    handles = make_gradients_safe(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
