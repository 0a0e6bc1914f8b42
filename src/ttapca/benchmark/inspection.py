"""What is kept beside the errors: what the filter did, with which versions, on which machine."""

from __future__ import annotations

import contextlib
import io
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca import __version__
from ttapca.adaptation.adapter import Adapter
from ttapca.benchmark.cells import Cell, Observation
from ttapca.benchmark.subject import Subject
from ttapca.datasets import Images, to_tensor
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.networks.network import ImageNetwork, Normalise, NormalisedNetwork, explained_shape
from ttapca.spectral.filter import SpectralFilter
from ttapca.support.modules import device_and_dtype, find_layer, stopped_at

SPECTRUM_IMAGES = 500  # so that the deviations are known to 3 %
PICTURES = 6
PROCESSORS = Path("/proc/cpuinfo")


@torch.no_grad()
def observe(
    cell: Cell, adapter: Adapter, subject: Subject, images: Images, order: NDArray[np.int64]
) -> Observation | None:
    """Return what the filter of an adapter did to the images, which arrived in this order.

    None for a method without a filter.
    """
    filters = [part for part in adapter.surfaces.modules() if isinstance(part, SpectralFilter)]
    if not filters or subject.fitted is None:
        return None
    fitted, acting = subject.fitted, filters[0]
    first = images.subset(order[:PICTURES])
    with adapter.disabled():
        samples = _filter_input(subject, fitted, first)
        numbers = np.sort(order[:SPECTRUM_IMAGES])
        key = (cell.corruption, cell.severity, numbers.tobytes())
        if subject.spectrum is None or subject.spectrum[0] != key:
            caught = _filter_input(subject, fitted, images.subset(numbers))
            subject.spectrum = (key, _deviations(fitted, caught))
    gains = acting.gains()
    gains = gains if gains.dim() == 1 else gains.mean(0)  # every image has its own
    return Observation(
        cell,
        _rounded(fitted.explained_variance_.sqrt()[: cell.components]),
        _rounded(subject.spectrum[1][: cell.components]),
        _rounded(gains),
        tuple(map(as_png, first.images)),
        _filtered_pictures(subject, acting, gains, to_tensor(first.images), samples),
    )


@torch.no_grad()
def check_shape(subject: Subject) -> None:
    """Refuse a filter that does not take what the network makes of the images, before any work.

    Raises:
        ShapeError: It does not, or the network does not take the images.
    """
    if subject.fitted is not None:
        one = subject.source.clean.subset(np.arange(1))
        with explained_shape(tuple(to_tensor(one.images).shape[1:])):
            samples = _filter_input(subject, subject.fitted, one)
        subject.fitted.check_shape(tuple(samples.shape[1:]))


def _filter_input(subject: Subject, fitted: FittedFilter, images: Images) -> Tensor:
    layer = find_layer(subject.network, fitted.layer)
    device, _ = device_and_dtype(layer, subject.network)
    with stopped_at(layer, before=fitted.basis.at_input) as seen:
        subject.network(to_tensor(images.images).to(device))
    caught: Tensor = seen[0]
    return caught.cpu()


def _deviations(fitted: FittedFilter, samples: Tensor) -> Tensor:
    """Return the standard deviation of every component."""
    components = fitted.spectral_filter().components(samples)
    return components.std(0) if len(components) > 1 else components[0].abs()


def _filtered_pictures(
    subject: Subject, acting: SpectralFilter, gains: Tensor, images: Tensor, samples: Tensor
) -> tuple[bytes, ...]:
    """Return the images after the filter, if it acts on images, normalised or not."""
    undone = undo_normalisation(subject, images, samples) if acting.basis.at_input else None
    if undone is None:
        return ()
    return tuple(map(as_png, undone(acting.scaled_by(gains, samples.to(acting.mean)).cpu())))


def undo_normalisation(
    subject: Subject, images: Tensor, samples: Tensor
) -> Callable[[Tensor], NDArray[np.uint8]] | None:
    """Return what makes pixels of samples; None if these are no images, normalised or not.

    Args:
        subject: Its network made the samples.
        images: In [0, 1], shape (batch, channels, height, width).
        samples: What a layer was given for these images.
    """
    if samples.shape != images.shape or samples.shape[1] not in (1, 3):
        return None
    shift, scale = torch.zeros(1), torch.ones(1)
    if not torch.equal(images, samples):
        network = subject.network
        layer = network.normalise if isinstance(network, ImageNetwork) else network
        if not isinstance(layer, Normalise | NormalisedNetwork):
            return None
        shift, scale = layer.mean.cpu(), layer.std.cpu()
        if not torch.allclose(samples, (images - shift) / scale, atol=1e-5):
            return None

    def undone(changed: Tensor) -> NDArray[np.uint8]:
        pixels = (255 * (changed * scale + shift).clamp(0, 1)).round().to(torch.uint8)
        found: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).numpy()
        return found

    return undone


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values.tolist())


def as_png(image: NDArray[np.uint8]) -> bytes:
    """Return an image, (height, width, channels), as the bytes of a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, format="PNG")
    return buffer.getvalue()


def versions() -> dict[str, str]:
    """Return the versions of ttapca, torch, numpy and Python."""
    return {
        "ttapca": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine() -> dict[str, str]:
    """Return processor, cores, threads and operating system."""
    try:
        lines = PROCESSORS.read_text().splitlines()
    except OSError:
        lines = [f"model name:{platform.processor()}"]
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": next(filter(None, names), platform.machine()),
        "cores": str(os.cpu_count() or 1),
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(),
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: faster for small tensors, and sums round alike on any machine.

    Example:
        >>> with one_thread():
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
