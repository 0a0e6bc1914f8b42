"""What running a network costs, seen in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ttapca.support.modules import multiply_adds
from ttapca.support.wrapping import temporary_patches

# A network is run on at most so many samples at once that no layer gives more numbers than this
# (64 MB), however many a batch of the user's has.
RUN_NUMBERS = 2**24

# Bytes at once for each of these numbers: inputs, outputs and work space of a layer, and shortcuts.
BYTES_A_NUMBER = 4 * 5


@dataclass
class NetworkCost:
    """What one sample costs in a forward pass.

    Attributes:
        largest: Numbers in the largest output of a layer.
        multiply_adds: In convolutions and linear layers.
    """

    largest: int = 1
    multiply_adds: int = 0

    @property
    def together(self) -> int:
        """How many samples to run at once, at most."""
        return max(1, RUN_NUMBERS // self.largest)

    def bytes_for(self, samples: int) -> int:
        """Return the memory that running so many samples takes, about."""
        return BYTES_A_NUMBER * self.largest * min(samples, self.together)


@contextmanager
def watched(model: nn.Module, samples: int) -> Iterator[NetworkCost]:
    """Add up the cost of what the model runs in this block, on so many samples at once.

    Example:
        >>> import torch
        >>> model = nn.Linear(10, 20)
        >>> with watched(model, samples=2) as cost:
        ...     _ = model(torch.zeros(2, 10))
        >>> cost
        NetworkCost(largest=20, multiply_adds=200)
    """
    cost = NetworkCost()

    def see(module: nn.Module, _args: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.numel():
            return
        numbers = math.ceil(output.numel() / samples)
        cost.largest = max(cost.largest, numbers)
        cost.multiply_adds += multiply_adds(module, numbers)

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    with temporary_patches() as patches:
        for module in leaves:
            patches.hook_output(module, see)
        yield cost
