"""Products in half precision, for a sample on its own.

A filter has two large matrices. A batch waits for arithmetic, of which a processor does as much in
float32 as in float16, or more; a single sample waits for the matrices to be read, and in float16
that is half as much.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class NarrowBasis(nn.Module):
    """The matrices of a filter in float16, each laid out so that its rows are read one by one.

    Both products give None where float32 has to do: for batches, under gradients, while a model is
    compiled, on other devices than the processor, and where float16 cannot hold the numbers.

    Args:
        project: From centred samples to components, float16, shape (d, components).
        rebuild: From components to centred samples, likewise.

    Example:
        >>> basis = torch.eye(3).half()
        >>> narrow = NarrowBasis(basis, basis)
        >>> with torch.no_grad():
        ...     narrow.projected(torch.tensor([[1.0, 2.0, 3.0]])).tolist()
        [[1.0, 2.0, 3.0]]
    """

    project: Tensor
    rebuild: Tensor

    def __init__(self, project: Tensor, rebuild: Tensor) -> None:
        super().__init__()
        # Not in the state dict: they are copies.
        self.register_buffer("project", project.T.contiguous(), persistent=False)
        self.register_buffer("rebuild", rebuild.contiguous(), persistent=False)

    def projected(self, centred: Tensor) -> Tensor | None:
        """Components of one sample without its mean, (1, d) to (1, components)."""
        return _product(centred, self.project)

    def rebuilt(self, components: Tensor) -> Tensor | None:
        """What the first components of one sample stand for, (1, up to components) to (1, d)."""
        return _product(components, self.rebuild[:, : components.shape[1]])


def _product(row: Tensor, matrix: Tensor) -> Tensor | None:
    if len(row) != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    # `.to(...)` may have moved or widened what was float16 on the processor.
    if matrix.dtype != torch.float16 or matrix.device.type != "cpu":
        return None
    product = (row.half() @ matrix.T).to(row.dtype)
    return product if math.isfinite(float(product.sum())) else None
