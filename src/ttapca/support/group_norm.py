"""GroupNorm: its channels over source data, and a way round a fault of torch's.

BatchNorm layers remember the mean and variance of every channel. GroupNorm layers normalise each
image by itself and remember nothing, so that nothing at test time says whether a channel has moved.
Fitting a filter therefore measures them on some of the source images, with the network run to its
end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.support.wrapping import Wrapper, WrapperHandle, wrap_forward

# So many images are measured in any case, and one in so many after them: fitting reads many more
# images than a mean and a variance need, and runs only a part of the network on them.
MEASURED_FIRST = 512
ONE_IN = 32


def normalised_groups(layer: nn.GroupNorm, x: Tensor) -> Tensor:
    """What a GroupNorm layer makes of its input before its own scale and shift."""
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
        """Take a batch of source images in, or let it pass.

        Args:
            *inputs: What the model takes; the first tensor has a row for each image.
            **options: Likewise, by name.
        """
        values = (*inputs, *options.values())
        images = next(value for value in values if isinstance(value, Tensor))
        self._seen += len(images)
        if not self._layers or self._measured >= max(MEASURED_FIRST, self._seen / ONE_IN):
            return
        self._measured += len(images)
        handles = [
            layer.register_forward_pre_hook(_Measurement(self, path))
            for path, layer in self._layers.items()
        ]
        try:
            self._model(*inputs, **options)
        finally:
            for handle in handles:
                handle.remove()

    def add(self, path: str, values: Tensor) -> None:
        """Add what a layer made of a batch, shape (batch, channels, ...)."""
        flat = values.transpose(0, 1).flatten(1)
        var, mean = torch.var_mean(flat.float(), dim=1, correction=0)
        moments = torch.stack([mean.double(), var.double() + mean.double().square()])
        count = flat.shape[1]
        self._sums[path] = self._sums.get(path, 0.0) + moments.cpu() * count
        self._values[path] = self._values.get(path, 0) + count

    def statistics(self) -> dict[str, Tensor]:
        """Mean and variance of every channel, by path of the layer, shape (2, channels)."""
        found = {}
        for path, sums in self._sums.items():
            mean, square = sums / self._values[path]
            statistics = torch.stack([mean, square - mean.square()]).float()
            if torch.isfinite(statistics).all():
                found[path] = statistics
        return found


class _Measurement:
    """A hook before a layer."""

    def __init__(self, watch: GroupNormWatch, path: str) -> None:
        self._watch = watch
        self._path = path

    def __call__(self, layer: nn.GroupNorm, args: tuple[Tensor, ...]) -> None:
        self._watch.add(self._path, normalised_groups(layer, args[0]))


class _Contiguous(Wrapper):
    """Gives a GroupNorm layer images whose channels lie in one piece, where gradients are taken."""

    def __call__(self, forward: Callable[..., Any], /, input: Tensor) -> Any:
        """Run the layer; the name of the argument is that of torch's own."""
        return forward(input.contiguous() if torch.is_grad_enabled() else input)


def make_gradients_safe(model: nn.Module) -> list[WrapperHandle]:
    """Keep a process alive that takes gradients through GroupNorm.

    Torch's backward pass of GroupNorm on a CPU ends the process where images are laid out with
    their channels last (seen in torch 2.13); so the layers get a copy laid out as usual.

    Args:
        model: Any module; one without GroupNorm is left as it is.

    Returns:
        Handles to take this away again.

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
    """The same for a while."""
    handles = make_gradients_safe(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
