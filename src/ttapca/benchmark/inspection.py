"""What a filter did to one stream: spectra, gains, and images before and after."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ttapca.adaptation.adapter import Adapter
from ttapca.benchmark.cells import Cell, Observation
from ttapca.benchmark.subject import Subject
from ttapca.datasets import Images, to_tensor
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.networks.network import ImageNetwork
from ttapca.spectral.filter import SpectralFilter
from ttapca.support.modules import device_and_dtype, find_layer, stopped_at

SPECTRUM_IMAGES = 500  # so that the deviations are known to 3 %
PICTURES = 6
SIGNIFICANT = 6  # digits of the numbers that are kept


@torch.no_grad()
def observe(
    cell: Cell, adapter: Adapter, subject: Subject, images: Images, order: NDArray[np.int64]
) -> Observation | None:
    """Look at the filter of an adapter after its last batch.

    Args:
        cell: What was run.
        adapter: What it was run with.
        subject: What it was run on.
        images: Those of the stream.
        order: Their numbers, in the order in which they arrived.

    Returns:
        What was seen; None where the method has no filter.
    """
    filters = [part for part in adapter.surfaces.modules() if isinstance(part, SpectralFilter)]
    if not filters or subject.fitted is None:
        return None
    fitted, acting = subject.fitted, filters[0]
    first = images.subset(order[:PICTURES])
    with adapter.disabled():
        samples = _at_the_filter(subject.network, fitted, to_tensor(first.images))
        numbers = np.sort(order[:SPECTRUM_IMAGES])
        key = (cell.corruption, cell.severity, numbers.tobytes())
        if subject.spectrum is None or subject.spectrum[0] != key:
            chosen = to_tensor(images.subset(numbers).images)
            caught = _at_the_filter(subject.network, fitted, chosen)
            subject.spectrum = (key, _deviations(fitted, caught))
    gains = acting.gains()
    gains = gains if gains.dim() == 1 else gains.mean(0)  # every image has its own
    return Observation(
        cell,
        _numbers(fitted.explained_variance_.sqrt()[: cell.components]),
        _numbers(subject.spectrum[1][: cell.components]),
        _numbers(gains),
        tuple(_png(image) for image in first.images),
        _after(subject, acting, gains, to_tensor(first.images), samples),
    )


def _at_the_filter(network: nn.Module, fitted: FittedFilter, images: Tensor) -> Tensor:
    """What the filter would act on, at the layer's input or its output."""
    layer = find_layer(network, fitted.layer)
    device, _ = device_and_dtype(layer, network)
    with stopped_at(layer, before=fitted.basis.at_input) as seen:
        network(images.to(device))
    caught: Tensor = seen[0]
    return caught.cpu()


def _deviations(fitted: FittedFilter, samples: Tensor) -> Tensor:
    """Standard deviation of every component of the fitted filter."""
    whole = fitted.spectral_filter()
    components = whole.basis.project(samples.flatten(1).float() - whole.mean)
    return components.std(0) if len(components) > 1 else components[0].abs()


def _after(
    subject: Subject, acting: SpectralFilter, gains: Tensor, images: Tensor, samples: Tensor
) -> tuple[bytes, ...]:
    """The images as the filter leaves them, where it acts on what can be shown."""
    basis, mean = acting.basis, acting.mean
    shown = samples.shape == images.shape and samples.shape[1] in (1, 3)
    if not basis.at_input or not shown:
        return ()
    back = _to_pixels(subject, images, samples)
    if back is None:
        return ()
    components = basis.project(samples.flatten(1).to(mean) - mean)
    filtered = basis.add_rebuilt(mean, components * gains).reshape(samples.shape).cpu()
    pixels = (255 * back(filtered).clamp(0, 1)).round().to(torch.uint8)
    return tuple(_png(image) for image in pixels.permute(0, 2, 3, 1).numpy())


def _to_pixels(
    subject: Subject, images: Tensor, samples: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """The way back from what the layer takes to images in [0, 1], where there is one."""
    if torch.equal(images, samples):
        return lambda values: values
    if not isinstance(subject.network, ImageNetwork):
        return None
    normalise = subject.network.normalise
    mean, std = normalise.mean.cpu(), normalise.std.cpu()
    same = torch.allclose(samples, (images - mean) / std, atol=1e-5)
    return (lambda values: values * std + mean) if same else None


def _numbers(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.{SIGNIFICANT}g}") for value in values.tolist())


def _png(image: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, format="PNG")
    return buffer.getvalue()
