"""`pea`: whiten the features of every block, and colour them as in the source."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.adaptation.optimisation import Predictor, Run
from ttapca.adaptation.surfaces import Surface
from ttapca.adaptation.surfaces.trainable import AroundForward
from ttapca.errors import AttachError, LayerOutputError, NotEnoughDataError, OptionError
from ttapca.methods.method import PROBABILITIES, Assembly, Count, Method, Positive, Share, register
from ttapca.methods.views import images_and_forward, refuse_pixels
from ttapca.spectral.pca import Moments
from ttapca.spectral.stream import Stream
from ttapca.support.inputs import SourceData, source_batches
from ttapca.support.modules import device_and_dtype, evaluation_mode, find_layer
from ttapca.support.norm_layers import channel_moments
from ttapca.support.outputs import Reads, softmax_entropy
from ttapca.support.tensors import at_least_float32
from ttapca.support.wrapping import Result, temporary_patches

Augment = Literal["none", "crop", "crop and flip"]
Phase = Literal["idle", "measure", "align"]

# As in the official code.
SMALLEST_VARIANCE = 1e-5  # added to covariances, and the least eigenvalue that is inverted
SMALLEST_WEIGHT = 1e-3  # blocks of less weight are left as they are
CROPPED = 0.9  # side of the middle of an image that is a view of it

# Of a layer's features: mean, covariances within groups, and how far means of batches usually are.
NOTHING_SEEN = (None, None, 0.0)
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


@register("pea", needs="data", paper="Xiao et al. (ICLR 2026)")
@dataclass(frozen=True, kw_only=True)
class PEA(Method):
    """Features of every block, aligned to mean and covariance of the source; no gradient.

    Two forward passes for each batch. The first finds the distance of block l from the source, with
    mean mu and variance sigma^2 of its channels (s: source, t: batch), and from that a weight:

        d_l = |mu_s - mu_t| + |sigma_s^2 - sigma_t^2|        w_l = (d_l - min d) / (max d - min d)

    The second replaces, from block to block, features z by

        (1 - w_l) z + w_l ((z - mu) Sigma^-1/2 Sigma_s^1/2 + mu_s)

    with running averages mu and Sigma of mean and covariance of the features that reach the block
    in second passes. Covariances are those within groups of channels. The paper's code:
    https://github.com/TheMaXiao/PEA_TTA.

    All defaults are those of the official code for a ResNet on CIFAR.

    Attributes:
        source: Unlabelled source data: batches, pairs whose first element is a batch, or one tensor
            of samples. Read once, when the adapter is made.
        layers: Dotted paths of the layers after which features are aligned; by default all residual
            or transformer blocks, and in a network without blocks all normalisation layers.
        group_size: Channels within a group; the official code has all 768 of a ViT in one.
        momentum: Weight of a batch in the running averages.
        smoothing: Weight of a batch in the usual drift and entropy (alpha).
        drift_factor: A batch whose mean is this many times farther away than usual replaces the
            running averages (gamma).
        entropy_jump: Everything is forgotten after a batch whose mean entropy, in nats, is above
            the usual by more than this.
        augment: Which views are predicted together with each image and averaged: the middle 90 % of
            it, enlarged, and its mirror image.
    """

    outputs = PROBABILITIES

    source: SourceData | None = None
    layers: Sequence[str] | None = None
    group_size: Count = 32
    momentum: Share = 0.02
    smoothing: Share = 0.2
    drift_factor: Positive = 2.5
    entropy_jump: Positive = 0.5
    augment: Augment = "crop and flip"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.source is None:
            raise OptionError(
                "`pea` needs source data to measure mean and covariance of features on; found "
                "none. Pass unlabelled training data as `source=`."
            )

    def assemble(self) -> Assembly:
        """Return the alignment, and a predictor that passes each batch through twice."""
        alignment = Alignment(self)
        return Assembly([alignment], TwoPasses(alignment, self.augment))


class Alignment(Surface):
    """Aligns the features after some layers; the predictor announces each pass.

    A pass outside of an adapter's call aligns by the averages so far, and adds nothing to them.
    """

    def __init__(self, options: PEA) -> None:
        super().__init__()
        # An adapter is copied and pickled without the data, which are read once.
        self.options = replace(options, source=())
        self._source: SourceData = () if options.source is None else options.source
        self.paths: list[str] = list(options.layers or ())
        self._phase: Phase = "idle"
        self._distances: list[float] = []

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Measure the source, and take over the layers."""
        super().attach(model, stream)
        self.paths = self.paths or blocks_of(model)
        if not self.paths:
            raise AttachError(
                "Features are aligned after blocks or normalisation layers; the model has none. "
                "Name the layers by `layers=`."
            )
        layers = [find_layer(model, path) for path in self.paths]
        for number, groups in enumerate(self._measure_source(model, layers)):
            _, dtype = device_and_dtype(layers[number], model)
            roots = [_power(_regularised(each.covariance), 0.5, least=0.0) for each in groups]
            here = {
                "mean": torch.cat([each.mean for each in groups]),
                "variance": torch.cat([each.covariance.diagonal() for each in groups]),
                "root": torch.block_diag(*roots),  # type: ignore[no-untyped-call]
            }
            for name, tensor in here.items():
                self.register_buffer(f"{name}_{number}", tensor.to(dtype).contiguous())
        self._source = ()
        self.stream.declare("weights", None)
        self.stream.declare("usual entropy", None)
        for number, layer in enumerate(layers):
            self.stream.declare(f"features/{number}", NOTHING_SEEN)
            self.patches.wrap(
                layer, AroundForward(self, functools.partial(self._run_layer, layer, number))
            )

    @torch.no_grad()
    def _measure_source(self, model: nn.Module, layers: list[nn.Module]) -> list[list[Moments]]:
        """Return the moments of each group of channels after each layer, over all source data."""
        found: dict[int, list[Moments]] = {}

        def see(number: int, layer: nn.Module, _args: Any, output: Any) -> None:
            rows = rows_of(features_of(layer, output, self.paths[number]))
            groups = list(self._groups(rows.shape[1]))
            if number not in found:
                sizes = [rows[:, group].shape[1] for group in groups]
                found[number] = [Moments(size, device=rows.device) for size in sizes]
            for group, moments in zip(groups, found[number], strict=True):
                moments.update(rows[:, group])

        # A loader that shuffles draws from the caller's random state, which is then restored.
        with torch.random.fork_rng(devices=[]), evaluation_mode(model), temporary_patches() as seen:
            for number, layer in enumerate(layers):
                seen.hook_output(layer, functools.partial(see, number))
            for samples in source_batches(self._source, model):
                model(samples)
        if len(found) < len(layers) or any(groups[0].count < 2 for groups in found.values()):
            raise NotEnoughDataError(
                "Mean and covariance need at least two samples of source data at every layer; "
                "found fewer. Pass more as `source=`, and look whether the model calls all of "
                f"{', '.join(f'`{path}`' for path in self.paths)}."
            )
        return [found[number] for number in range(len(layers))]

    def measure(self, run: Callable[[], object]) -> None:
        """Find the weight of each layer from a pass of the model as it is."""
        self._distances = [0.0] * len(self.paths)
        self.run_with(run, _phase="measure")
        finite = all(map(math.isfinite, self._distances))
        self.stream.write(
            "weights", _weights(self._distances) if finite else (0.0,) * len(self.paths)
        )
        self.stream.left_out |= not finite

    def align(self, run: Callable[[], Result]) -> Result:
        """Run a pass whose features are taken into the running averages, and aligned."""
        return self.run_with(run, _phase="align")

    def watch(self, logits: Tensor) -> None:
        """Follow the entropy of predictions, and forget everything if it jumps."""
        entropy = float(softmax_entropy(logits).mean())
        usual = self.stream.past("usual entropy")
        if usual is None:
            usual = entropy
        elif entropy > usual + self.options.entropy_jump:
            for number in range(len(self.paths)):
                self.stream.write(f"features/{number}", NOTHING_SEEN)
            usual = entropy
        share = self.options.smoothing
        self.stream.write("usual entropy", share * entropy + (1 - share) * usual)

    def _run_layer(
        self, layer: nn.Module, number: int, forward: Run, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return a layer's output, aligned or as it was."""
        output = forward(*args, **kwargs)
        if not self.enabled:
            return output
        features = at_least_float32(features_of(layer, output, self.paths[number]))
        if self._phase == "measure":
            self._distances[number] = self._distance(number, features)
            return output
        weights = self.stream.now("weights")
        weight = 0.0 if weights is None else weights[number]
        if weight < SMALLEST_WEIGHT:
            return output
        rows = rows_of(features)
        if self._phase == "align" and not self._take_in(number, rows):
            return output
        mean, _, _ = self.stream.now(f"features/{number}")
        if mean is None:
            return output
        where = _channels(layer, output)
        shape = output.movedim(where, -1).shape
        aligned = self._aligned(number, rows, weight).reshape(shape)
        return aligned.movedim(-1, where).to(output.dtype)

    def _distance(self, number: int, features: Tensor) -> float:
        """Return how far the features after a layer are from the source (d_l)."""
        mean, variance = channel_moments(features)
        count = features.numel() // len(mean)
        variance = variance * (count / max(1, count - 1))
        source_mean = self.get_buffer(f"mean_{number}").to(features)
        source_variance = self.get_buffer(f"variance_{number}").to(features)
        return float((source_mean - mean).norm() + (source_variance - variance).norm())

    def _aligned(self, number: int, rows: Tensor, weight: float) -> Tensor:
        """Return rows of channels after a layer, aligned to the source by its weight (w_l)."""
        mean, covariances, _ = self.stream.now(f"features/{number}")
        source_mean = self.get_buffer(f"mean_{number}").to(rows)
        root = self.get_buffer(f"root_{number}").to(rows)
        aligned = torch.empty_like(rows)
        for group, covariance in zip(self._groups(rows.shape[1]), covariances, strict=True):
            whitened = _power(covariance.to(rows), -0.5, least=SMALLEST_VARIANCE)
            recoloured = whitened @ root[group, group]
            # All of the formula is one product: features are read and written once.
            shift = weight * (source_mean[group] - mean[group].to(rows) @ recoloured)
            kept = torch.eye(len(recoloured)).to(rows)
            aligned[:, group] = torch.addmm(
                shift, rows[:, group], torch.lerp(kept, recoloured, weight)
            )
        return aligned

    def _take_in(self, number: int, rows: Tensor) -> bool:
        """Update the running averages; return False for a batch that is not finite."""
        mean = rows.mean(0)
        centred = rows - mean
        covariances = tuple(
            _regularised(centred[:, group].T @ centred[:, group] / max(1, len(rows) - 1))
            for group in self._groups(len(mean))
        )
        if not all(bool(torch.isfinite(each).all()) for each in (mean, *covariances)):
            self.stream.left_out = True
            return False
        name = f"features/{number}"
        old_mean, old_covariances, drift = self.stream.now(name)
        if old_mean is not None:
            away = float((mean - old_mean.to(mean)).abs().mean())
            drift = self.options.smoothing * away + (1 - self.options.smoothing) * drift
            if away <= self.options.drift_factor * drift:
                mean = torch.lerp(old_mean.to(mean), mean, self.options.momentum)
                covariances = tuple(
                    torch.lerp(old.to(new), new, self.options.momentum)
                    for old, new in zip(old_covariances, covariances, strict=True)
                )
        self.stream.write(name, (mean, covariances, drift))
        return True

    def _groups(self, channels: int) -> Iterator[slice]:
        size = self.options.group_size
        return (slice(start, start + size) for start in range(0, channels, size))


class TwoPasses(Predictor):
    """Passes each batch through twice, with its views, and averages their logits."""

    reads: Reads = "probabilities"

    def __init__(self, alignment: Alignment, augment: Augment) -> None:
        super().__init__()
        self.alignment = alignment
        self.augment: Augment = augment

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Find the weights, then predict aligned."""
        count, forward = 1, functools.partial(run, *inputs, **options)
        if self.augment != "none":
            images, on_images = images_and_forward("pea", run, inputs, options)
            views = [images, _middle(images)]
            if self.augment == "crop and flip":
                views.append(images.flip(3))
            count, forward = len(views), functools.partial(on_images, torch.cat(views))
        self.alignment.measure(forward)
        logits = self.alignment.align(forward)
        if count > 1:
            refuse_pixels("pea", self.outputs, logits, 'Leave the views out: `augment="none"`.')
            logits = torch.stack(logits.chunk(count)).mean(0)
        self.alignment.watch(logits)
        return logits


def blocks_of(model: nn.Module) -> list[str]:
    """Return the paths of a network's blocks, or else of its normalisation layers.

    A block is an entry of an `nn.Sequential` or `nn.ModuleList` that has a normalisation layer
    inside, and no other block.

    Example:
        >>> block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> blocks_of(nn.Sequential(nn.Linear(2, 2), block))
        ['1']
        >>> blocks_of(block)
        ['1']
    """
    entries = [
        f"{path}.{name}".lstrip(".")
        for path, container in model.named_modules()
        if isinstance(container, nn.Sequential | nn.ModuleList)
        for name, child in container.named_children()
        if any(isinstance(inner, NORMS) for inner in child.modules() if inner is not child)
    ]
    blocks = [
        path for path in entries if not any(other.startswith(f"{path}.") for other in entries)
    ]
    norms = [path for path, module in model.named_modules() if isinstance(module, NORMS)]
    return blocks or [path for path in norms if path]


def features_of(layer: nn.Module, output: Any, path: str) -> Tensor:
    """Return the features after a layer in shape (samples, channels, ...)."""
    if not isinstance(output, Tensor) or output.dim() < 2 or not output.is_floating_point():
        found = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output)
        raise LayerOutputError(
            f"Features are one tensor of shape (batch, channels, ...) or (batch, tokens, channels);"
            f" `{path}` returns {found}. Name other layers by `layers=`."
        )
    return output.movedim(_channels(layer, output), 1)


def rows_of(features: Tensor) -> Tensor:
    """Return one row of channels for each place or token of each sample."""
    return features.movedim(1, -1).reshape(-1, features.shape[1])


def _channels(layer: nn.Module, output: Tensor) -> int:
    """Return which dimension holds the channels: the last one of tokens, else the second."""
    if isinstance(layer, nn.LayerNorm):
        return -1
    of_tokens = any(isinstance(inner, nn.LayerNorm) for inner in layer.modules())
    return -1 if output.dim() == 3 and of_tokens else 1


def _middle(images: Tensor) -> Tensor:
    """Return the middle of each image, enlarged to the size of the whole."""
    height, width = images.shape[-2:]
    kept_height, kept_width = max(1, round(CROPPED * height)), max(1, round(CROPPED * width))
    top, left = round((height - kept_height) / 2), round((width - kept_width) / 2)
    middle = images[..., top : top + kept_height, left : left + kept_width]
    return F.interpolate(middle, size=(height, width), mode="bilinear", align_corners=False)


def _weights(distances: list[float]) -> tuple[float, ...]:
    """Return weights from 0 for the least distance to 1 for the largest; a lone one weighs 1."""
    least, most = min(distances), max(distances)
    if len(distances) == 1:
        return (1.0,)
    return tuple((each - least) / (most - least) if most > least else 0.0 for each in distances)


def _regularised(covariance: Tensor) -> Tensor:
    return covariance + SMALLEST_VARIANCE * torch.eye(len(covariance)).to(covariance)


def _power(symmetric: Tensor, exponent: float, *, least: float) -> Tensor:
    """Return a power of a symmetric matrix, whose eigenvalues are first raised to the least."""
    values, vectors = torch.linalg.eigh((symmetric + symmetric.T) / 2)
    power: Tensor = (vectors * values.clamp(min=least).pow(exponent)) @ vectors.T
    return power
