"""Streams whose shift is said beforehand, to test what follows from it without any filter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.adaptation.surfaces import StreamStatistics
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_state import Spectrum


def spectrum(shift: Sequence[float], unusual: Sequence[float]) -> Spectrum:
    """What a filter of one component knows of as many conditions; no filter ever adds to it."""
    ones = torch.ones(len(shift), dtype=torch.float64)
    certain, strange = (torch.tensor(each, dtype=torch.float64) for each in (shift, unusual))
    return Spectrum(ones, ones, ones[:, None], certain, strange, torch.zeros(len(ones), 2, 1))


def followed(
    model: nn.Module,
    *,
    shift: float = 1.0,
    unusual: float = 0.0,
    memory: float = math.inf,
    **given: Any,
) -> tuple[StreamStatistics, Stream]:
    """Let the statistics of a model follow a stream that has shifted this surely."""
    stream, surface = Stream(memory), StreamStatistics(**given)
    surface.attach(model, stream)
    stream.add_filter(spectrum([shift], [unusual]))
    return surface, stream


@torch.no_grad()
def passed(model: nn.Module, stream: Stream, batch: Tensor) -> Tensor:
    """Return what a model makes of the next batch of a stream."""
    stream.start_batch(len(batch))
    output: Tensor = model(batch)
    stream.end_batch()
    return output
