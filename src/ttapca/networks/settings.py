"""What a network computes with that no file of weights holds."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ttapca._checks import Number, check_option
from ttapca.errors import OptionError
from ttapca.networks.blocks import Bottleneck

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)
USUAL_EPS = 1e-5


def set_eps(network: nn.Module, eps: float) -> None:
    """Set what all norms of a network add to a variance before they divide by its root.

    Raises:
        OptionError: It is not above 0, or the network has no norms.

    Example:
        >>> norm = nn.BatchNorm1d(3)
        >>> set_eps(norm, 1e-3)
        >>> norm.eps
        0.001
    """
    check_option("eps", eps, Number(above=0, below=1))
    norms = [each for each in network.modules() if isinstance(each, NORMS)]
    if not norms:
        raise OptionError("`eps=` is for networks with norms; this one has none. Leave it out.")
    for norm in norms:
        norm.eps = eps


def settings_beside_weights(network: nn.Module) -> list[str]:
    """Return what changes predictions and is in no tensor of a network, if it is unusual.

    Two networks may have the same weights and differ in this: `eps` of norms, and a stride in the
    first 1x1 convolution of a bottleneck.

    Example:
        >>> settings_beside_weights(nn.Sequential(nn.BatchNorm1d(3, eps=1e-3), nn.BatchNorm1d(3)))
        ['0 eps 0.001']
    """
    settings = []
    for name, module in network.named_modules():
        if isinstance(module, NORMS) and module.eps != USUAL_EPS:
            settings.append(f"{name} eps {module.eps}")
        if isinstance(module, Bottleneck) and module.early_stride:
            settings.append(f"{name} early stride")
    return settings
