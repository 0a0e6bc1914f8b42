"""Tensors: casts, also under `torch.autocast`, and a cache of values computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")
WIDE = (torch.float32, torch.float64)


def as_on(value: Tensor, other: Tensor) -> Tensor:
    """Return `value.to(other)`, in a third of the time if nothing is to do."""
    same = value.dtype == other.dtype and value.device == other.device
    return value if same else value.to(other)


def at_least_float32(value: Tensor) -> Tensor:
    """Return a tensor in float32 or better; itself if it is so already."""
    wide = value.dtype in WIDE
    return value if wide else value.to(torch.promote_types(value.dtype, torch.float32))


def not_below_float32(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that casts as another does, but casts none down from float32."""

    def converted(tensor: Tensor) -> Tensor:
        found = convert(tensor)
        lowered = tensor.dtype in WIDE and found.dtype not in WIDE
        return tensor.to(found.device) if lowered else found

    return converted


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a value that changes whenever a tensor is written, cast or moved."""
    # Tensors that were made in inference mode do not count how often they are written.
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.device


def own_precision(device: torch.device) -> AbstractContextManager[object]:
    """Compute in the precision of the tensors themselves, even inside `torch.autocast`."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


class TensorCache(Generic[Made]):
    """Keeps a value computed from some tensors as long as these stay; copies start empty."""

    def __init__(self) -> None:
        self._kept: tuple[list[Any], Made] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is kept."""
        return {"_kept": None}

    def get(self, tensors: Sequence[Tensor], make: Callable[[], Made]) -> Made:
        """Return the value that is kept for these tensors, or make it outside of inference mode."""
        state = [identity(each) for each in tensors]
        kept = self._kept  # read once: threads may share it
        if kept is None or kept[0] != state:
            with torch.inference_mode(False), torch.no_grad():
                kept = (state, make())
            self._kept = kept
        return kept[1]
