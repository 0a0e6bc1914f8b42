"""Keep what was made of tensors for as long as these stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ttapca.support.tensors import identity

Made = TypeVar("Made")


class LastMade(Generic[Made]):
    """The last thing that was made of some tensors; copies and pickles start without it.

    Example:
        >>> lengths, weight = LastMade[float](), torch.tensor([3.0, 4.0])
        >>> lengths.of([weight], lambda: float(weight.norm()))
        5.0
        >>> weight *= 2
        >>> lengths.of([weight], lambda: float(weight.norm()))
        10.0
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Any], Made] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is kept."""
        return {"_kept": None}

    def of(self, tensors: Sequence[Tensor], make: Callable[[], Made]) -> Made:
        """Return what was made of these tensors, or make it, with tensors that allow gradients."""
        state = [identity(each) for each in tensors]
        kept = self._kept  # read once: threads may share it
        if kept is None or kept[0] != state:
            with torch.inference_mode(False), torch.no_grad():
                kept = (state, make())
            self._kept = kept
        return kept[1]
