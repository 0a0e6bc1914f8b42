"""Messages between the ranks of a job: facts, which torch pickles, and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# One rank may decompose a large matrix while the others wait.
PATIENCE = timedelta(days=1)
AT_ONCE = 2**28  # bytes that are sent in one message


def several_ranks() -> bool:
    """Return whether this process is one of several in an initialised `torch.distributed` job."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class ProcessGroup:
    """All ranks of the job, in a group of their own, with messages in the memory of the CPU."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)

    def told(self, facts: Any) -> list[Any]:
        """Return the facts of each rank, given those of this one."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, facts, group=self._group)
        return found

    def send(self, tensors: Mapping[str, Tensor], *, to: int) -> None:
        """Send tensors by name to another rank, which must receive them."""
        dist.send_object_list([_forms(tensors)], to, group=self._group)
        _move(tensors, lambda part: dist.send(part, to, group=self._group))

    def receive(self, sender: int) -> dict[str, Tensor]:
        """Return the tensors that another rank sends to this one."""
        header: list[Any] = [None]
        dist.recv_object_list(header, sender, group=self._group)
        found = _empty(header[0])
        _move(found, lambda part: dist.recv(part, sender, group=self._group))
        return found

    def broadcast(
        self, tensors: Mapping[str, Tensor] | None = None, facts: Any = None
    ) -> tuple[dict[str, Tensor], Any]:
        """Return tensors and facts that rank 0 gives, in all ranks; the others give none."""
        header = [None if tensors is None else _forms(tensors), facts]
        dist.broadcast_object_list(header, 0, group=self._group)
        found = _empty(header[0]) if tensors is None else dict(tensors)
        _move(found, lambda part: dist.broadcast(part, 0, group=self._group))
        return found, header[1]


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (each.dtype, each.shape) for name, each in tensors.items()}


def _empty(forms: Mapping[str, tuple[torch.dtype, torch.Size]]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in forms.items()}


def _move(tensors: Mapping[str, Tensor], move: Callable[[Tensor], object]) -> None:
    """Move the bytes of tensors, as views of them, in messages that are not too long."""
    for each in tensors.values():
        numbers = each.detach().cpu().contiguous().view(-1)
        for part in torch.split(numbers.view(torch.uint8), AT_ONCE) if len(numbers) else ():
            move(part)
