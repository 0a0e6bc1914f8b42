"""`torch.autocast` around an adapted model: what it must not cast, and what it must cast anew."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from ttapca.support.wrapping import finally_do


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
