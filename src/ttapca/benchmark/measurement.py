"""One unit of work: put its method on the network, send the images through it, and measure."""

from __future__ import annotations

import io
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ttapca import __version__
from ttapca.adaptation.adapter import Adapter
from ttapca.benchmark.plan import Unit
from ttapca.benchmark.rows import Cell, Observation, Outcome, Row
from ttapca.benchmark.streams import FORGETTING, segments
from ttapca.benchmark.subject import Subject
from ttapca.datasets import Images, Series, TensorBatches, to_tensor
from ttapca.errors import BasisWarning
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods import MethodName
from ttapca.methods.adapt import adapt
from ttapca.methods.method import registration
from ttapca.networks.evaluation import Watch, predict_all
from ttapca.networks.network import ImageNetwork, Normalise, NormalisedNetwork, explained_shape
from ttapca.spectral.filter import SpectralFilter
from ttapca.support.modules import device_and_dtype, find_layer, stopped_at
from ttapca.support.process import forget_peak_memory, peak_memory

Measured = tuple[dict[str, Any], Observation | None]
Written = tuple[list[Row], list[Observation]]
LONGEST_REASON = 1000  # letters
SPECTRUM_IMAGES = 500  # so that the deviations are known to 3 %
PICTURES = 6
PROCESSORS = Path("/proc/cpuinfo")

# The results of an evaluation, and their values after a failure.
EVALUATED: dict[str, Any] = {
    "error": None, "calibration_error": None, "entropy": None,
    "error_stream": (), "entropy_stream": (), "seconds": 0.0,
}  # fmt: skip
NOTHING = EVALUATED | {"updates": 0, "skipped": 0, "parameters": 0}


def run_unit(
    unit: Unit, subject: Subject, images: Images, command: str, watch: Watch | None = None
) -> Written:
    """Run a unit, and return its rows; a method that fails is a finding, and no reason to stop."""
    forget_peak_memory()
    try:
        found = measure(unit, subject, images, watch)
    except Exception as error:  # whatever a method or a network may raise
        return not_measured(unit, f"{type(error).__name__}: {error}", command), []
    rows = _rows(unit, [values for values, _ in found], "", command)
    return rows, [observation for _, observation in found if observation is not None]


def not_measured(unit: Unit, reason: str, command: str) -> list[Row]:
    """Return the rows of a unit that failed."""
    return _rows(unit, [NOTHING] * len(unit.cells), reason[:LONGEST_REASON], command)


def _rows(unit: Unit, found: Sequence[dict[str, Any]], reason: str, command: str) -> list[Row]:
    facts: dict[str, Any] = {
        "status": "failed" if reason else "done",
        "reason": reason,
        "peak_memory": peak_memory(),
        "versions": versions(),
        "machine": machine(),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }
    return [
        Row(cell, Outcome(**facts | values)) for cell, values in zip(unit.cells, found, strict=True)
    ]


def measure(
    unit: Unit, subject: Subject, images: Images, watch: Watch | None = None
) -> list[Measured]:
    """Measure each cell of a unit: numbers, named as in `Outcome`, and an observation."""
    # If corruptions take turns, updates are those of the whole stream. In `changing`, only the last
    # one is observed: the gains are for it.
    cell = unit.cells[0]
    labels = subject.source.clean.labels
    outputs = json.loads(cell.options).get("outputs")
    found: list[Measured] = []
    with adapted(cell, subject) as adapter:
        for segment in segments(cell.setting, labels, len(unit.cells), cell.seed):
            adapter.start_condition()
            updates, skipped = adapter.updates, adapter.skipped
            batches = TensorBatches(images, cell.batch_size, segment)
            predict = RealTime(adapter) if cell.setting == "real-time" else adapter
            predictions = predict_all(predict, batches, outputs=outputs, watch=watch)
            corruption = segment // len(labels)  # of every image, by its number
            for number in sorted(set(corruption.tolist())):
                own = corruption == number
                evaluation = predictions.evaluation(torch.from_numpy(own))
                values = {name: getattr(evaluation, name) for name in EVALUATED}
                correct = np.zeros(len(labels), dtype=bool)  # in the order of the images
                correct[segment[own] % len(labels)] = predictions.correct.numpy()[own]
                values |= {
                    "correct": np.packbits(correct).tobytes(),
                    "updates": adapter.updates - updates,
                    "skipped": adapter.skipped - skipped,
                    "parameters": adapter.n_parameters,
                }
                if isinstance(predict, RealTime):
                    values["reason"] = f"{predict.share:.0f} % of the batches were adapted to"
                observation = None
                if cell.setting != "changing" or number == corruption[-1]:
                    own_cell = unit.cells[number]
                    observation = observe(own_cell, adapter, subject, images, segment[own])
                found.append((values, observation))
    return found


class RealTime:
    """Predicts batches that arrive as fast as the untouched network can predict them.

    A batch waits for the adapter until the next one arrives; if the adapter is still busy then, the
    untouched network predicts the batch, and the adapter never sees it. A method that takes k times
    as long as the network so adapts to one batch in k. After Alfarra et al. (ICML 2024,
    https://arxiv.org/abs/2304.04795), where a late batch is not kept waiting.
    """

    def __init__(self, adapter: Adapter, clock: Callable[[], float] = time.process_time) -> None:
        self.adapter, self.clock = adapter, clock
        self.arrived = self.busy_until = 0.0  # seconds of the stream
        self.batches = self.adapted = 0

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits for the batch that arrives now."""
        start = self.clock()
        with self.adapter.disabled():
            logits: Tensor = self.adapter(images)
        period = self.clock() - start
        self.batches += 1
        if self.busy_until <= self.arrived + period:
            start = self.clock()
            logits = self.adapter(images)
            took = self.clock() - start
            self.busy_until = max(self.busy_until, self.arrived) + took
            self.adapted += 1
        self.arrived += period
        return logits

    @property
    def share(self) -> float:
        """The share of batches that the adapter saw, in percent."""
        return 100 * self.adapted / self.batches


@contextmanager
def adapted(cell: Cell, subject: Subject) -> Iterator[Adapter]:
    """Put a cell's method on the network, and take it off afterwards."""
    own = {**json.loads(cell.options), **subject.provided.get(cell.method, {})}
    # These two refuse a seed if they draw nothing.
    draws = {"ttt": own.get("rotations") == "random", "roid": own.get("consistency", True)}
    if draws.get(cell.method, True) and "seed" in registration(cell.method).options:
        own["seed"] = cell.seed
    forgetting = FORGETTING[cell.setting]
    if forgetting == "episodic":
        own.pop("guard", None)  # one plan has several settings, and a guard watches streams
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BasisWarning)  # said once, before the run
        adapter = adapt(
            subject.network,
            cast(MethodName, cell.method),  # which `adapt` checks
            filter=subject.filter(cell.components) if cell.components else None,
            forgetting=forgetting,
            steps=cell.steps or None,
            lr=cell.lr or None,
            **own,
        )
    try:
        yield adapter
    finally:
        adapter.detach()


# The filter ---------------------------------------------------------------------------------------


@torch.no_grad()
def observe(
    cell: Cell, adapter: Adapter, subject: Subject, images: Images, order: NDArray[np.int64]
) -> Observation | None:
    """Return spectrum, gains and pictures; None for a method without a filter."""
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
            components = fitted.spectral_filter().components(caught)
            several = len(components) > 1
            subject.spectrum = (key, components.std(0) if several else components[0].abs())
    gains = acting.gains()
    gains = gains if gains.dim() == 1 else gains.mean(0)  # every image has its own
    filtered: tuple[bytes, ...] = ()
    if acting.basis.at_input:
        pixels_of = undo_normalisation(subject, to_tensor(first.images), samples)
        if pixels_of is not None:
            changed = acting.scaled_by(gains, samples.to(acting.mean)).cpu()
            filtered = tuple(map(as_png, pixels_of(changed)))
    return Observation(
        cell,
        _rounded(fitted.explained_variance_.sqrt()[: cell.components]),
        _rounded(subject.spectrum[1][: cell.components]),
        _rounded(gains),
        () if isinstance(first, Series) else tuple(map(as_png, first.images)),
        filtered,
    )


@torch.no_grad()
def check_shape(subject: Subject) -> None:
    """Raise `ShapeError` before any work if the filter does not fit, or the network the images."""
    if subject.fitted is not None:
        one = subject.source.clean.subset(np.arange(1))
        with explained_shape(tuple(to_tensor(one.images).shape[1:])):
            samples = _filter_input(subject, subject.fitted, one)
        subject.fitted.check_shape(tuple(samples.shape[1:]))


def _filter_input(subject: Subject, fitted: FittedFilter, images: Images) -> Tensor:
    layer = find_layer(subject.network, fitted.layer)
    device, _ = device_and_dtype(layer, subject.network)
    with stopped_at(layer, before=fitted.basis.at_input) as caught:
        subject.network(to_tensor(images.images).to(device))
    samples: Tensor = caught[0]
    return samples.cpu()


def undo_normalisation(
    subject: Subject, images: Tensor, samples: Tensor
) -> Callable[[Tensor], NDArray[np.uint8]] | None:
    """Return a function to pixels from samples, a layer's input for images; None if unknown."""
    if samples.shape != images.shape or samples.dim() != 4 or samples.shape[1] not in (1, 3):
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

    def pixels_of(changed: Tensor) -> NDArray[np.uint8]:
        pixels = (255 * (changed * scale + shift).clamp(0, 1)).round().to(torch.uint8)
        found: NDArray[np.uint8] = pixels.permute(0, 2, 3, 1).numpy()
        return found

    return pixels_of


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values.tolist())


def as_png(image: NDArray[Any]) -> bytes:
    """Return an image, (height, width, channels), as the bytes of a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, format="PNG")
    return buffer.getvalue()


# The machine --------------------------------------------------------------------------------------


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


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one core: faster for small tensors, and sums round alike on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
