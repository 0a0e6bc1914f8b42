"""Unlabelled source data, as methods take them: one tensor, batches, or pairs with a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ttapca.errors import OptionError

SourceData = Iterable[Any] | Tensor

SOURCE_BATCH = 64  # into which one tensor is split


def batches_of(source: SourceData) -> Iterator[Tensor]:
    """Yield the batches of samples.

    Raises:
        OptionError: The source does not yield batches, or pairs that start with one.

    Example:
        >>> [len(batch) for batch in batches_of(torch.zeros(100, 3))]
        [64, 36]
    """
    batches = torch.split(source, SOURCE_BATCH) if isinstance(source, Tensor) else source
    for number, batch in enumerate(batches):
        samples = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
        if not isinstance(samples, Tensor):
            raise OptionError(
                "`source` yields tensors, or pairs whose first element is a tensor; batch "
                f"{number} (counting from 0) is a {type(batch).__name__}."
            )
        yield samples
