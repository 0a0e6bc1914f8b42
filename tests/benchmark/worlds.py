"""Something small to compare on, the same in every process."""

from __future__ import annotations

import dataclasses

import torch

import ttapca
from ttapca.benchmark import ImageSource, Observation, Results, Row, Subject
from ttapca.datasets import read_digits, to_tensor
from ttapca.networks import build
from ttapca.networks.architectures import DIGITS_SHAPE

IMAGES = 50
# What a second run cannot repeat.
PASSING = {"seconds": 0.0, "peak_memory": 0.0, "finished": ""}


def small_subject(images: int = IMAGES) -> Subject:
    """An untrained network whose BatchNorm layers are off, some digits, a filter of rank ten."""
    generator = torch.Generator().manual_seed(0)
    network = build("small-cnn", input_shape=DIGITS_SHAPE, generator=generator).eval()
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) / 5)
    training = to_tensor(read_digits("train").images[:100])
    fitted = ttapca.fit(network, "conv1", training, 10)
    return Subject("small", network, "digits", ImageSource(read_digits()[:images]), fitted)


def lasting(results: Results) -> tuple[list[Row], list[Observation]]:
    """All that a second run must repeat, in order."""
    rows = [
        dataclasses.replace(row, outcome=dataclasses.replace(row.outcome, **PASSING))
        for row in results.rows()
    ]
    return rows, results.observations()
