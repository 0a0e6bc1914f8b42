"""What ranks of a job tell each other: facts as JSON, and tensors. Nothing is unpickled."""

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
    """Return whether this process is one of several in an initialised `torch.distributed` job.

    Example:
        >>> several_ranks()
        False
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class ProcessGroup:
    """All ranks of the job, in a group of their own, so that nobody else's messages get mixed up.

    It uses gloo, whatever the job's own backend is: what is sent lies in the memory of the CPU.
    """

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)

    def told(self, facts: Any) -> list[Any]:
        """Return what each rank tells, which is anything that JSON can hold."""
        own = _bytes_of(facts)
        lengths = self._gathered(torch.tensor([len(own)]))
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        rows = self._gathered(padded)
        return [_facts_in(row[: int(length)]) for row, length in zip(rows, lengths, strict=True)]

    def _gathered(self, own: Tensor) -> Tensor:
        found = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(found, own, group=self._group)
        return torch.stack(found)

    def send(self, tensors: Mapping[str, Tensor], *, to: int) -> None:
        """Send tensors by name to another rank, which must receive them."""
        self._give(tensors, {}, lambda each: dist.send(each, to, group=self._group))

    def receive(self, sender: int) -> dict[str, Tensor]:
        """Return what another rank sends to this one."""
        return self._take(lambda each: dist.recv(each, sender, group=self._group))[0]

    def broadcast(
        self, tensors: Mapping[str, Tensor] | None = None, facts: Any = None
    ) -> tuple[dict[str, Tensor], Any]:
        """Return tensors and facts that rank 0 gives, in all ranks; the others give none."""

        def move(each: Tensor) -> None:
            dist.broadcast(each, 0, group=self._group)

        if tensors is None:
            return self._take(move)
        self._give(tensors, facts, move)
        return dict(tensors), facts

    def _give(
        self, tensors: Mapping[str, Tensor], facts: Any, move: Callable[[Tensor], object]
    ) -> None:
        forms = [
            (name, str(each.dtype).removeprefix("torch."), list(each.shape))
            for name, each in tensors.items()
        ]
        header = _bytes_of({"tensors": forms, "facts": facts})
        move(torch.tensor([len(header)]))
        for each in (header, *tensors.values()):
            for part in _parts(each.detach().cpu().contiguous()):
                move(part)

    def _take(self, move: Callable[[Tensor], object]) -> tuple[dict[str, Tensor], Any]:
        length = torch.tensor([0])
        move(length)
        header = torch.empty(int(length), dtype=torch.uint8)
        for part in _parts(header):
            move(part)
        told = _facts_in(header)
        found = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in told["tensors"]
        }
        for each in found.values():
            for part in _parts(each):
                move(part)
        return found, told["facts"]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a contiguous tensor as views of its bytes, none of them too long; none if empty."""
    if not tensor.numel():
        return ()
    return torch.split(tensor.view(-1).view(torch.uint8), AT_ONCE)


def _bytes_of(facts: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)


def _facts_in(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())
