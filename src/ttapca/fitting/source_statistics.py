"""The statistics that one pass over source data collects, for all of the data or a part of them.

Everything here is a sum, or a choice by position. So the statistics of parts merge, in any order,
into those of one pass over all parts, up to rounding in float64.

Those of the channels of normalisation layers are over all images, and by class: GroupNorm and
LayerNorm normalise each image by itself and remember nothing, and no layer knows what the classes
of a batch do to its statistics. A fit measures both on a subsample of the source images, which it
runs through the whole network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import LayerOutputError, NotEnoughDataError
from ttapca.fitting.input_range import InputSums
from ttapca.spectral.cosine import CoefficientMoments
from ttapca.spectral.pca import Moments
from ttapca.spectral.position_sample import PositionSample, position_hash
from ttapca.spectral.source_classes import (
    MOST_FEATURES,
    PairStatistic,
    SourceClasses,
    late_layers,
    pair_statistic,
)
from ttapca.support.norm_layers import channels_of, is_sample_norm, normalised_alone
from ttapca.support.tensors import at_least_float32
from ttapca.support.wrapping import temporary_patches

if TYPE_CHECKING:
    from ttapca.fitting.activations import ModelInputs


def _add_to(sums: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    for path, each in others.items():
        sums[path] = sums.get(path, 0.0) + each


@dataclass(eq=False)
class ChannelSums:
    """Sums over the measured images, by the paths of normalisation layers, in float64."""

    measured: int = 0  # images
    other_rows: set[str] = field(default_factory=set)  # layers whose rows are not images
    # Of channel means and of mean squares, and for how many images, shape (3, channels).
    moments: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None  # probabilities of classes, (classes,); None without classes
    by_class: dict[str, Tensor] = field(default_factory=dict)  # as moments, (classes, 2, channels)
    squares: dict[str, Tensor] = field(default_factory=dict)  # of channel means, (channels,)
    # Of each image: features of late layers, class probabilities, and for how many it counts.
    late_features: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def merge(self, other: ChannelSums) -> None:
        """Add the sums over other images."""
        self.measured += other.measured
        self.other_rows |= other.other_rows
        _add_to(self.moments, other.moments)
        if other.weights is not None:
            self.weights = other.weights + (0.0 if self.weights is None else self.weights)
        _add_to(self.by_class, other.by_class)
        _add_to(self.squares, other.squares)
        self.late_features += other.late_features


# With fewer images a class, the classes cannot be told from the chance that chose the images, and a
# thousand of them would take most of the time, memory and disk of a fit.
IMAGES_A_CLASS = 2

FindLogits = Callable[[Any], Tensor | None]


def found_logits(output: Any, find: FindLogits | None = None) -> Tensor | None:
    """Return the logits in what a model returns, shape (batch, classes, ...); None without any."""
    try:
        logits = output if find is None else find(output)
    except LayerOutputError:  # the outputs are not what they were said to be
        raise
    except Exception:  # whatever a user's function raises on what this model returns
        return None
    fits = isinstance(logits, Tensor) and logits.dim() >= 2 and logits.shape[1] >= 2
    return logits if fits else None


class SourceChannels:
    """Measures the channels of every normalisation layer of a model in evaluation mode."""

    def __init__(self, model: nn.Module, logits: FindLogits | None = None) -> None:
        self._model = model
        self._find_logits = logits
        self._layers = normalising_layers(model)

    @torch.no_grad()
    def measure(
        self, inputs: ModelInputs, sums: ChannelSums, weights: Tensor | None = None
    ) -> Tensor | None:
        """Add a batch of weighted images; return probabilities, (images, classes), if there are."""
        images = len(inputs.samples)
        weights = torch.ones(images, dtype=torch.float64) if weights is None else weights
        batch = ChannelSums(images)
        rows: dict[str, Tensor] = {}  # (images, 2, channels)

        def measure_layer(path: str, layer: nn.Module, args: tuple[Any, ...], _: Any) -> None:
            values: Tensor = args[0]  # (batch, channels, ...)
            if isinstance(layer, nn.LayerNorm) and len(values) != images:
                batch.other_rows.add(path)  # such as tokens, in a transformer that has them first
                return
            alone = False  # a BatchNorm remembers its own moments
            if is_sample_norm(layer):
                alone, values = True, normalised_alone(layer, values)
            values = at_least_float32(values)
            each = values.flatten(2) if values.dim() > 2 else values[..., None]
            moments = torch.stack([each.mean(2), each.square().mean(2)], 1)
            if len(moments) == images:
                rows[path] = moments
            if alone:
                # A layer that is called on parts of images has no row for each image.
                counts = weights if len(moments) == images else torch.ones(len(moments))
                total = torch.einsum("n,nsc->sc", counts.to(moments), moments).double().cpu()
                count = torch.full_like(total[:1], float(counts.sum()))
                _add_to(batch.moments, {path: torch.cat([total, count])})

        with temporary_patches() as patches:
            for path, layer in self._layers.items():
                patches.hook_input(layer, functools.partial(measure_layer, path))
            output = inputs.run(self._model)
        shares = self._shares(output, images, sums)
        if shares is not None:
            self._add_classes(shares, weights, batch, rows, sums.other_rows | batch.other_rows)
        sums.merge(batch)
        return shares

    def _shares(self, output: Any, images: int, sums: ChannelSums) -> Tensor | None:
        logits = found_logits(output, self._find_logits)
        if logits is None:
            return None
        shares = logits[:, :, None].double().softmax(1).flatten(2).mean(2)  # (images, classes)
        known = shares.shape[1] if sums.weights is None else len(sums.weights)
        return shares if shares.shape == (images, known) else None

    def _add_classes(
        self,
        shares: Tensor,
        weights: Tensor,
        batch: ChannelSums,
        rows: dict[str, Tensor],
        left_out: set[str],
    ) -> None:
        weighted = weights.to(shares)[:, None] * shares
        batch.weights = weighted.sum(0).cpu()
        for path, each in rows.items():
            by_class = torch.einsum("nk,nsc->ksc", weighted.to(each), each)
            squares = torch.einsum("n,nc->c", weights.to(each), each[:, 0].square())
            batch.by_class[path] = by_class.double().cpu()
            batch.squares[path] = squares.double().cpu()
        late, stride = self._late(left_out)
        if late and not late.keys() - rows.keys():
            features = torch.cat([rows[path][:, 0, ::stride] for path in late], 1)
            found = (features.float().cpu(), shares.float().cpu(), weights.float().cpu())
            batch.late_features.append(found)

    def _late(self, left_out: set[str]) -> tuple[dict[str, int], int]:
        """Return how many channels of each late layer are features, and every which one."""
        kept = [path for path in self._layers if path not in left_out]
        channels = {path: _channels_of(self._layers[path]) for path in late_layers(kept)}
        stride = max(1, -(-sum(channels.values()) // MOST_FEATURES))
        return {path: -(-count // stride) for path, count in channels.items()}, stride

    def of(self, kind: type[nn.Module], sums: ChannelSums) -> dict[str, Tensor]:
        """Return mean and variance of Group- or LayerNorm channels by path, shape (2, channels)."""
        found = {}
        for path, (total, squares, images) in sums.moments.items():
            mean = total / images
            statistics = torch.stack([mean, squares / images - mean.square()]).float()
            known = isinstance(self._layers[path], kind) and path not in sums.other_rows
            if known and torch.isfinite(statistics).all():
                found[path] = statistics
        return found

    def by_class(self, sums: ChannelSums) -> SourceClasses | None:
        """Return what classes do to all layers; None if the model predicts no classes."""
        weights = sums.weights
        if weights is None or not torch.isfinite(weights).all():
            return None
        by_class = {
            path: each
            for path, each in sums.by_class.items()
            if path not in sums.other_rows and each.isfinite().all()
        }
        if not by_class or sums.measured < IMAGES_A_CLASS * len(weights):
            return None
        return SourceClasses.from_sums(weights, by_class, sums.squares, self._pairs(sums))

    def _pairs(self, sums: ChannelSums) -> PairStatistic | None:
        late, stride = self._late(sums.other_rows)
        if {each.shape[1] for each, _, _ in sums.late_features} != {sum(late.values())}:
            return None
        features, shares, weights = map(torch.cat, zip(*sums.late_features, strict=True))
        if not all(each.isfinite().all() for each in (features, shares, weights)):
            return None
        return pair_statistic(features, shares, weights, late, stride)


def _channels_of(layer: nn.Module) -> int:
    return layer.num_features if isinstance(layer, _BatchNorm) else channels_of(layer)  # type: ignore[arg-type]


def normalising_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the BatchNorm, GroupNorm and LayerNorm layers of a model, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) or is_sample_norm(module)
    }


# This many images are measured, some for each class, or one in 32 if that is more: a fit reads many
# more images than moments need, and runs only a part of the network on them.
MEASURED = 1024
MEASURED_PER_CLASS = 16
MOST_MEASURED = 8192
ONE_IN = 32

# Running all of a large network takes longer than everything else, so that it sees no more images
# than this many multiply-adds allow, but at least this many images and numbers.
MOST_MULTIPLY_ADDS = 1e12
LEAST_IMAGES = 256
LEAST_NUMBERS = 2**23


@dataclass(frozen=True)
class Subsample:
    """The rule by which images are measured."""

    wanted: int  # images, at least
    images: int | None  # how many there are; None if that is unknown
    needed: bool = True  # whether anything is measured

    def rates(self, positions: Tensor) -> Tensor:
        """Return the share of images that is measured around each position, above 0 to 1."""
        images = positions + 1.0 if self.images is None else torch.full_like(positions, self.images)
        return (self.wanted / images.clamp(min=1)).clamp(1 / ONE_IN, 1).double()

    def of(self, positions: Tensor) -> Tensor:
        """Return whether the image at each of these positions is measured."""
        if not self.needed:
            return torch.zeros_like(positions, dtype=torch.bool)
        return position_hash(positions) < self.rates(positions)


def choose_subsample(
    model: nn.Module, images: int | None, classes: int, numbers: int = 1, multiply_adds: int = 0
) -> Subsample:
    """Choose the rule for `images` of `numbers` each, each of which costs `multiply_adds`."""
    least = max(LEAST_IMAGES, LEAST_NUMBERS // numbers)
    most = max(least, int(MOST_MULTIPLY_ADDS / max(1, multiply_adds)))
    wanted = min(most, max(MEASURED, min(MEASURED_PER_CLASS * classes, MOST_MEASURED)))
    expected = math.inf if images is None else min(images, max(wanted, images // ONE_IN))
    # Too few images do not tell classes apart.
    by_class = 0 < IMAGES_A_CLASS * classes <= expected
    needed = by_class or any(map(is_sample_norm, normalising_layers(model).values()))
    return Subsample(wanted, images, needed)


# One mean for each class and number of a sample: 1,000 classes of 224 x 224 pixels are too many.
MOST_NUMBERS = 2**25


@dataclass(eq=False)
class ClassSums:
    """Sums of samples, each weighted by its class probabilities, and of these weights."""

    sums: Tensor | None = None  # (classes, size)
    weights: Tensor | None = None  # (classes,)

    def add(self, samples: Tensor, shares: Tensor) -> None:
        """Add samples, shape (samples, ...), and their probabilities, (samples, classes)."""
        flat = at_least_float32(samples.detach().flatten(1))
        if len(shares) == len(flat) and shares.shape[1] * flat.shape[1] <= MOST_NUMBERS:
            sums = (shares.to(flat).T @ flat).cpu().double()
            self.merge(ClassSums(sums, shares.sum(0).cpu().double()))

    def merge(self, other: ClassSums) -> None:
        """Add the sums of other samples, if they have the same shape."""
        if other.sums is None or other.weights is None:
            return
        if self.sums is None or self.weights is None:
            self.sums, self.weights = other.sums, other.weights
        elif self.sums.shape == other.sums.shape:
            self.sums, self.weights = self.sums + other.sums, self.weights + other.weights

    def means(self) -> tuple[Tensor, Tensor] | None:
        """Return means, shape (classes, size), and shares, (classes,); None if there are none."""
        # Each class has one more sample, the mean of all: a rare class is not far by chance.
        if self.sums is None or self.weights is None:
            return None
        total = self.weights.sum()
        if not (self.sums.isfinite().all() and self.weights.isfinite().all() and total > 0):
            return None
        mean = self.sums.sum(0) / total
        return (self.sums + mean) / (self.weights[:, None] + 1), self.weights / total


class PredictedClasses:
    """Remembers which class the network predicts for samples, by their positions."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def add(self, positions: Tensor, shares: Tensor) -> None:
        """Add samples at these positions, given their class probabilities, (samples, classes)."""
        if len(positions) == len(shares):
            found = zip(positions.tolist(), shares.argmax(1).tolist(), strict=True)
            self._known.update(found)

    def merge(self, other: PredictedClasses) -> None:
        """Add the predictions of other samples."""
        self._known |= other._known

    def at(self, positions: Tensor) -> Tensor:
        """Return the classes of the samples at these positions, -1 for those not predicted."""
        known = [self._known.get(each, -1) for each in positions.tolist()]
        return torch.tensor(known, dtype=torch.int64)


# Some of the data are kept, evenly distributed, to predict them again after the fit.
KEPT_PARTS = 8  # batches of which some samples are kept
KEPT_SAMPLES = 16  # of each of them, at most
KEPT_NUMBERS = 2**23  # of all of them together, at most


class KeptInputs:
    """The first samples of some blocks (usual batches) of the data, chosen by positions alone."""

    def __init__(self, block: int, numbers: int) -> None:
        self._block = block
        self._head = max(1, min(KEPT_SAMPLES, KEPT_NUMBERS // KEPT_PARTS // max(1, numbers)))
        self._every = 1
        self._kept: dict[int, ModelInputs] = {}  # by the position of the first sample

    def take(self, inputs: ModelInputs, positions: Tensor) -> None:
        """Look at a batch whose samples are at these positions, and keep some or none of them."""
        blocks, place = positions // self._block, positions % self._block
        wanted = (blocks % self._every == 0) & (place < self._head)
        for block in set(blocks[wanted].tolist()):
            chosen = wanted & (blocks == block)
            some = inputs.chosen(chosen).mapped(lambda x: x.detach().to("cpu", copy=True))
            self._kept[int(positions[chosen][0])] = some
        self._drop()

    def merge(self, other: KeptInputs) -> None:
        """Look at the batches of another one."""
        self._every = max(self._every, other._every)
        self._kept |= other._kept
        self._drop()

    def _drop(self) -> None:
        """Keep one block in `_every`, fewer if these are still too many."""
        blocks = {at: at // self._block for at in self._kept}
        while len({block for block in blocks.values() if block % self._every == 0}) > KEPT_PARTS:
            self._every *= 2
        kept = self._kept.items()
        self._kept = {at: some for at, some in kept if blocks[at] % self._every == 0}

    def all(self) -> list[ModelInputs]:
        """Return what is kept, in order of the positions."""
        return [self._kept[position] for position in sorted(self._kept)]


# With n samples a variance is known up to a factor of about 1 + sqrt(2 / n): with 32 within a
# quarter, with 3 not within a factor of two, and gains that follow from it would be noise.
FEWEST_SAMPLES = 32

MomentsKind = Literal["scatter", "cosines"]
Side = Literal["input", "output"]


@dataclass(frozen=True)
class PassConfig:
    """How data are read in one pass: the same for all parts and processes."""

    at: Side  # of the layer
    shape: tuple[int, ...]  # of a sample there
    numbers: int  # in a sample of the data
    together: int  # samples that are run through the network at once, at most
    block: int  # samples that a batch of the data usually has
    subsample: Subsample  # of images that are run through the whole network
    moments: MomentsKind | None = None  # None if a route needs the activations themselves


class SourceStatistics:
    """What was collected from some of the data; each part of it can be merged."""

    def __init__(self, config: PassConfig, device: torch.device | str = "cpu") -> None:
        size = math.prod(config.shape)
        self.config = config
        self.moments: Moments | CoefficientMoments | None = None  # of the activations
        if config.moments == "scatter":
            self.moments = Moments(size, device=device)
        elif config.moments == "cosines":
            self.moments = CoefficientMoments(config.shape, device=device)
        self.sample = PositionSample(size)  # some activations, to calibrate by
        self.kept = KeptInputs(config.block, config.numbers)  # some data, to predict again
        self.channels = ChannelSums()  # of normalisation layers
        self.class_sums = ClassSums()  # of the activations
        self.predicted = PredictedClasses()
        self.inputs = InputSums()  # of what the network was given

    @property
    def samples(self) -> int:
        """How many samples were read."""
        return self.sample.seen

    def merge(self, other: SourceStatistics) -> None:
        """Add what was collected from other data."""
        for name, part in vars(self).items():
            if name != "config" and part is not None:
                part.merge(getattr(other, name))

    def check_samples(self) -> None:
        """Raise `NotEnoughDataError` if there are too few samples for a filter."""
        if self.samples < FEWEST_SAMPLES:
            raise NotEnoughDataError(
                f"A filter is fitted on at least {FEWEST_SAMPLES} samples: fewer do not tell how "
                "much a component varies, and gains would be random. "
                f"Found {self.samples}. Give more data."
            )


def merged(parts: Iterable[SourceStatistics]) -> SourceStatistics:
    """Merge statistics of one or more parts while they arrive, so that two are held at a time."""
    arriving = iter(parts)
    total = next(arriving)
    for part in arriving:
        total.merge(part)
        del part  # not to be held while the next one is waited for
    return total
