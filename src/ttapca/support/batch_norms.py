"""BatchNorm layers that have running statistics, also those that do more than normalise."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import AttachError
from ttapca.support.channel_moments import normalised
from ttapca.support.wrapping import Result, surely


def with_running_statistics(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return all BatchNorm layers that have running statistics, by path.

    A layer without them always uses those of the batch: there is no choice.

    Example:
        >>> with_running_statistics(nn.BatchNorm1d(3, track_running_stats=False))
        {}
    """
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def running_statistics(layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the source, or raise `AttachError` if there are none."""
    if layer.running_mean is None or layer.running_var is None:
        raise AttachError("Mixed statistics need running statistics; the layer lost its own.")
    return layer.running_mean, layer.running_var


def is_plain(layer: _BatchNorm) -> bool:
    """Return whether a layer normalises, and does nothing else.

    A subclass with a `forward` of its own may do more: layers of timm have an activation.

    Example:
        >>> class WithReLU(nn.BatchNorm2d):
        ...     def forward(self, x):
        ...         return super().forward(x).relu()
        >>> is_plain(nn.BatchNorm2d(3)), is_plain(WithReLU(3))
        (True, False)
    """
    return type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def moved_to_source(x: Tensor, moments: tuple[Tensor, Tensor], layer: _BatchNorm) -> Tensor:
    """Return what a layer normalises by its running statistics as it would x by other moments."""
    mean, var = (each.to(x) for each in running_statistics(layer))
    return normalised(x, moments, (var + layer.eps).sqrt(), mean, layer.eps)


def by_running_statistics(layer: _BatchNorm, run: Callable[[], Result]) -> Result:
    """Run a layer's own `forward` with its running statistics, in training mode as well."""
    training = layer.training

    def run_evaluating() -> Result:
        layer.training = False
        return run()

    def restore() -> None:
        layer.training = training

    return surely(run_evaluating, then=restore)
