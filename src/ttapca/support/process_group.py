"""Messages between the ranks of a job: facts as JSON, and tensors. Nothing is unpickled."""

from __future__ import annotations

import json
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
    """All ranks of the job, in a group of their own, apart from the messages of other groups.

    It uses gloo, whatever the job's own backend is: its messages lie in the memory of the CPU.
    """

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)

    def told(self, facts: Any) -> list[Any]:
        """Return the facts of each rank, given those of this one: anything that JSON can hold."""
        own = _bytes_of(facts)
        lengths = self._all(torch.tensor([len(own)]))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(own)] = own
        rows = zip(self._all(padded), lengths, strict=True)
        return [_facts_in(row[: int(length)]) for row, length in rows]

    def _all(self, own: Tensor) -> list[Tensor]:
        """Return the tensor of each rank, all of one shape."""
        found = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(found, own, group=self._group)
        return found

    def send(self, tensors: Mapping[str, Tensor], *, to: int) -> None:
        """Send tensors by name to another rank, which must receive them."""
        _give(tensors, {}, lambda each: dist.send(each, to, group=self._group))

    def receive(self, sender: int) -> dict[str, Tensor]:
        """Return the tensors that another rank sends to this one."""
        return _take(lambda each: dist.recv(each, sender, group=self._group))[0]

    def broadcast(
        self, tensors: Mapping[str, Tensor] | None = None, facts: Any = None
    ) -> tuple[dict[str, Tensor], Any]:
        """Return tensors and facts that rank 0 gives, in all ranks; the others give none."""

        def move(each: Tensor) -> None:
            dist.broadcast(each, 0, group=self._group)

        if tensors is None:
            return _take(move)
        _give(tensors, facts, move)
        return dict(tensors), facts


def _give(tensors: Mapping[str, Tensor], facts: Any, move: Callable[[Tensor], object]) -> None:
    """Send a header, which says what follows, and then the tensors."""
    forms = [
        (name, str(each.dtype).removeprefix("torch."), list(each.shape))
        for name, each in tensors.items()
    ]
    header = _bytes_of({"tensors": forms, "facts": facts})
    move(torch.tensor([len(header)]))
    for each in (header, *tensors.values()):
        _move_parts(each.detach().cpu().contiguous(), move)


def _take(move: Callable[[Tensor], object]) -> tuple[dict[str, Tensor], Any]:
    """Receive what `_give` sends."""
    length = torch.tensor([0])
    move(length)
    header = torch.empty(int(length), dtype=torch.uint8)
    _move_parts(header, move)
    told = _facts_in(header)
    found = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, dtype, shape in told["tensors"]
    }
    for each in found.values():
        _move_parts(each, move)
    return found, told["facts"]


def _move_parts(tensor: Tensor, move: Callable[[Tensor], object]) -> None:
    """Move the bytes of a contiguous tensor, as views, in messages that are not too long."""
    if tensor.numel():
        for part in torch.split(tensor.view(-1).view(torch.uint8), AT_ONCE):
            move(part)


def _bytes_of(facts: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)


def _facts_in(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
