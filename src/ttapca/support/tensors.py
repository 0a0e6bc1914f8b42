"""Tensors: casts, also under `torch.autocast`, and a cache of what was computed from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ttapca.support.wrapping import finally_do

Made = TypeVar("Made")


def as_on(value: Tensor, other: Tensor) -> Tensor:
    """Return a tensor on the device and in the precision of another; itself where it is so already.

    The same as `value.to(other)`, in a third of the time: streams are exchanged at every call.
    """
    same = value.dtype == other.dtype and value.device == other.device
    return value if same else value.to(other)


def at_least_float32(value: Tensor) -> Tensor:
    """Return a tensor in float32 or better; itself where it is so already.

    Example:
        >>> at_least_float32(torch.ones(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if value.dtype in (torch.float32, torch.float64):
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def not_below_float32(convert: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what moves and casts tensors as another function does, but none down from float32.

    What is narrower already, such as copies that are quick to read, goes with it.

    Example:
        >>> not_below_float32(torch.Tensor.half)(torch.ones(1)).dtype
        torch.float32
        >>> not_below_float32(torch.Tensor.double)(torch.ones(1)).dtype
        torch.float64
    """

    def converted(tensor: Tensor) -> Tensor:
        found, wide = convert(tensor), (torch.float32, torch.float64)
        lowered = tensor.dtype in wide and found.dtype not in wide
        return tensor.to(found.device) if lowered else found

    return converted


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return something that changes whenever a tensor is written, cast or moved."""
    # Tensors that were made in inference mode do not count how often they are written.
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.device


def own_precision(device: torch.device) -> AbstractContextManager[object]:
    """Compute in the precision of the tensors themselves, also where autocast is on.

    Example:
        >>> one = torch.ones(1, 1)
        >>> with torch.autocast("cpu", torch.bfloat16), own_precision(one.device):
        ...     (one @ one).dtype
        torch.float32
    """
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


@contextmanager
def new_casts() -> Iterator[None]:
    """Let autocast cast weights anew in every pass.

    It would keep its casts until its block ends, and so run the model with weights as they were
    before they were moved, or exchanged.

    Example:
        >>> with new_casts():
        ...     torch.is_autocast_cache_enabled()
        False
    """
    before = torch.is_autocast_cache_enabled()
    with finally_do(functools.partial(torch.set_autocast_cache_enabled, before)):
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)
        yield


class TensorCache(Generic[Made]):
    """Keeps what was computed from some tensors, as long as these stay as they are.

    Copies and pickles start empty.

    Example:
        >>> lengths, weight = TensorCache[float](), torch.tensor([3.0, 4.0])
        >>> lengths.get([weight], lambda: float(weight.norm()))
        5.0
        >>> weight *= 2
        >>> lengths.get([weight], lambda: float(weight.norm()))
        10.0
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Any], Made] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is kept."""
        return {"_kept": None}

    def get(self, tensors: Sequence[Tensor], make: Callable[[], Made]) -> Made:
        """Return what is kept for these tensors, or make it outside of inference mode."""
        state = [identity(each) for each in tensors]
        kept = self._kept  # read once: threads may share it
        if kept is None or kept[0] != state:
            with torch.inference_mode(False), torch.no_grad():
                kept = (state, make())
            self._kept = kept
        return kept[1]
