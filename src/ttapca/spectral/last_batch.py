"""The components of the last batch, kept for a second pass over the same one.

A gradient step runs the network on a batch, moves the gains, and runs it again: what the filter
projects is the same both times. Whether it is the same is looked up, not assumed: comparing two
batches takes a thousandth of projecting one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class _Kept:
    samples: Tensor
    components: Tensor
    basis: tuple[Any, ...]


class LastBatch:
    """What was projected last.

    Example:
        >>> last, basis = LastBatch(), torch.eye(2)
        >>> samples = torch.tensor([[1.0, 2.0]])
        >>> last.keep(samples, samples @ basis, basis)
        >>> last.find(samples.clone(), basis).tolist()
        [[1.0, 2.0]]
        >>> last.find(samples + 1, basis) is None
        True
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles start without a memory."""
        return {"_kept": None}

    def find(self, samples: Tensor, *basis: Tensor) -> Tensor | None:
        """The components of these samples, if these were the last ones.

        Args:
            samples: Shape (batch, d).
            *basis: The tensors that the components follow from.
        """
        kept = self._kept
        if kept is None or not _may_keep(samples) or kept.basis != _identity(basis):
            return None
        if kept.samples.shape != samples.shape or kept.samples.device != samples.device:
            return None
        return kept.components if torch.equal(kept.samples, samples) else None

    def keep(self, samples: Tensor, components: Tensor, *basis: Tensor) -> None:
        """Remember the components of some samples.

        Args:
            samples: Shape (batch, d).
            components: Shape (batch, components).
            *basis: As for `find`.
        """
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            # A copy: the caller may fill the same memory with the next batch.
            self._kept = _Kept(samples.detach().clone(), components.detach(), _identity(basis))


def _may_keep(samples: Tensor) -> bool:
    """Whether components without a graph will do."""
    wants_graph = torch.is_grad_enabled() and samples.requires_grad
    return not wants_graph and not torch.compiler.is_compiling()


def _identity(basis: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Changes whenever a tensor is written, cast or moved."""
    return tuple((each.data_ptr(), each._version, each.dtype, each.device) for each in basis)
