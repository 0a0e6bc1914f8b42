"""What a method costs, counted and not timed: parameters, passes over the network, memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.adaptation.adapter import Adapter
from ttapca.support.wrapping import finally_do, temporary_patches


@dataclass(frozen=True)
class Cost:
    """The cost of one call of an adapter.

    Attributes:
        parameters: Number of parameters that gradient steps move.
        forwards: Number of forward passes of a whole batch: views of single images add up.
        backwards: Number of backward passes.
        kept_bytes: Memory kept between batches beyond the model itself: filters, copies of
            weights, the optimiser's state.
        graph_bytes: Activations that are held for backward passes.
    """

    parameters: int
    forwards: float
    backwards: int
    kept_bytes: int
    graph_bytes: int


def measure_cost(adapter: Adapter, batch: Tensor) -> Cost:
    """Count what one call costs; the adapter is reset before and after.

    Args:
        adapter: An attached adapter, on any device.
        batch: The batch to call it with, shape (batch, ...).

    Returns:
        The counts, and the bytes.

    Example:
        >>> import ttapca
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> cost = measure_cost(ttapca.adapt(model, "tent"), torch.randn(5, 4))
        >>> cost.parameters, cost.forwards, cost.backwards
        (16, 1.0, 1)
    """
    passes: list[int] = []
    saved: list[Tensor] = []  # all are held, so that no address is used a second time

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    adapter.reset()
    before = adapter.predictor.backwards
    with finally_do(adapter.reset), temporary_patches() as patches:
        patches.hook_input(adapter.model, lambda _, args, _kwargs: passes.append(len(args[0])))
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            adapter(batch)
        kept_bytes = sum(_bytes_by_address(adapter.kept_tensors()).values())
    graph = _bytes_by_address(saved)
    # The model's own tensors are there anyway, whether or not a graph refers to them.
    own = _bytes_by_address([*adapter.model.parameters(), *adapter.model.buffers()])
    return Cost(
        parameters=adapter.n_parameters,
        forwards=sum(passes) / len(batch),
        backwards=adapter.predictor.backwards - before,
        kept_bytes=kept_bytes,
        graph_bytes=sum(size for address, size in graph.items() if address not in own),
    )


def _bytes_by_address(tensors: list[Tensor]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
