"""What a method costs, counted and not timed: parameters, passes over the network, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.adaptation.adapter import Adapter


@dataclass(frozen=True)
class Cost:
    """Of one call of an adapter.

    Attributes:
        parameters: Numbers that gradient steps move.
        forwards: Forward passes, in units of the batch: views of single images add up.
        backwards: Backward passes.
        kept_bytes: Kept between batches beyond the model itself: filters, copies of weights, the
            optimiser's state.
        graph_bytes: Activations that are held for a backward pass, at the most.
    """

    parameters: int
    forwards: float
    backwards: int
    kept_bytes: int
    graph_bytes: int


def measure_cost(adapter: Adapter, batch: Tensor) -> Cost:
    """Count what one call costs; the adapter is reset before and after.

    Args:
        adapter: Attached, on any device.
        batch: What it is called with, shape (batch, ...).

    Example:
        >>> import ttapca
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> cost = measure_cost(ttapca.adapt(model, "tent"), torch.randn(5, 4))
        >>> cost.parameters, cost.forwards, cost.backwards
        (16, 1.0, 1)
    """
    adapter.reset()
    counter = _Passes()
    handle = adapter.model.register_forward_pre_hook(counter)
    before = adapter.mover.backwards
    graph = _Graph()
    # The model's own tensors are there anyway, whether or not a graph refers to them.
    graph.ignore(*adapter.model.parameters(), *adapter.model.buffers())
    try:
        with torch.autograd.graph.saved_tensors_hooks(graph.save, _unchanged):
            adapter(batch)
        kept_bytes = _bytes_of(adapter.kept_tensors())
    finally:
        handle.remove()
        adapter.reset()
    return Cost(
        parameters=adapter.n_parameters,
        forwards=counter.samples / len(batch),
        backwards=adapter.mover.backwards - before,
        kept_bytes=kept_bytes,
        graph_bytes=graph.bytes,
    )


class _Passes:
    """Hook: counts the samples that go through a model."""

    def __init__(self) -> None:
        self.samples = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        self.samples += len(args[0])


class _Graph:
    """Sums the storages that are saved for backward passes, each once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: set[int] = set()
        self._held: list[Tensor] = []  # an address counts for one tensor only while it is held

    def ignore(self, *tensors: Tensor) -> None:
        self._seen.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    def save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self._held.append(tensor)
            self.bytes += storage.nbytes()
        return tensor


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _bytes_of(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
