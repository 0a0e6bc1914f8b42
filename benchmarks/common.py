"""What the benchmarks share: images to work on, the paper's stem, and how to measure."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

SIDE = 32


def natural_images(n: int, seed: int = 0, side: int = SIDE) -> Tensor:
    """Random uint8 colour images whose spectrum falls as that of photographs does."""
    generator = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    amplitude = 1 / np.maximum(frequency, 1 / side)
    out = np.empty((n, 3, side, side), np.uint8)
    colours = np.array([[1, 1, 1], [0.3, 0, -0.3], [0.1, -0.2, 0.1]])
    for start in range(0, n, 1000):
        stop = min(start + 1000, n)
        noise = generator.standard_normal((stop - start, 3, side, side))
        smooth = np.fft.irfft2(np.fft.rfft2(noise) * amplitude, s=(side, side))
        mixed = np.einsum("nchw,cd->ndhw", smooth, colours)
        out[start:stop] = np.clip(128 + 20 * mixed, 0, 255)
    return torch.from_numpy(out)


def stem(outputs: int = 16) -> nn.Module:
    """The first layer of the CIFAR networks: 3x3, stride 1, padded, without bias."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(3, outputs, 3, padding=1, bias=False))
    with torch.no_grad():
        model.conv1.weight.copy_(torch.randn(outputs, 3, 3, 3, generator=generator) / 5)
    return model


@dataclass(frozen=True)
class Loader:
    """Float batches of uint8 images, made as they are read."""

    images: Tensor
    batch: int = 250

    def __iter__(self) -> Iterator[Tensor]:
        return (part.float() / 255 for part in self.images.split(self.batch))


@dataclass(frozen=True)
class Measured:
    """Seconds that a function took, the peak memory of its process, and what it returned."""

    seconds: float
    peak_gb: float
    result: object


def in_own_process(function: Callable[..., object], *arguments: object) -> Measured:
    """Run a function in a fresh process, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (function, arguments))


def _measured(function: Callable[..., object], arguments: tuple[object, ...]) -> Measured:
    seconds, result = function(*arguments)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # kilobytes on Linux
    return Measured(seconds, peak, result)


def timed(function: Callable[[], object]) -> tuple[float, object]:
    """Seconds and result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each function, measured in turns so that all see the same machine."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            seconds[name].append(timed(function)[0])
    return {name: statistics.median(values) for name, values in seconds.items()}


def verdict(reached: bool) -> str:
    """How a line ends."""
    return "reached" if reached else "NOT REACHED"
