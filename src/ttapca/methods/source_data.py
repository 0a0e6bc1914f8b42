"""Unlabelled source data, as methods take them: one tensor or array, or batches of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ttapca.errors import OptionError
from ttapca.support.batches import array_batches, as_tensor, samples_in
from ttapca.support.modules import device_and_dtype

SourceData = Iterable[Any] | Tensor

SOURCE_BATCH = 64  # into which one tensor is split


def batches_of(source: SourceData, model: nn.Module) -> Iterator[Tensor]:
    """Yield the batches of samples, on the device of a model and in its precision.

    Raises:
        OptionError: The source yields something that holds no batch.

    Example:
        >>> [len(batch) for batch in batches_of(torch.zeros(100, 3), nn.Linear(3, 2))]
        [64, 36]
    """
    device, dtype = device_and_dtype(model, model)
    batches: Iterable[Any] = source
    if isinstance(source, np.ndarray):
        batches = array_batches(source, SOURCE_BATCH)
    elif isinstance(source, Tensor):
        batches = torch.split(source, SOURCE_BATCH)
    for number, batch in enumerate(batches):
        samples = as_tensor(samples_in(batch))
        if not isinstance(samples, Tensor):
            raise OptionError(
                "`source` yields tensors, pairs that start with one, or dicts with an `image`; "
                f"batch {number} (counting from 0) is a {type(batch).__name__}."
            )
        yield samples.to(device, dtype) if samples.is_floating_point() else samples.to(device)
