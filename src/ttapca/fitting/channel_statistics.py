"""Statistics of the channels of normalisation layers on source data, over all images and by class.

GroupNorm and LayerNorm normalise each image by itself and remember nothing, unlike BatchNorm, and
no layer knows what the classes of a batch do to its statistics. A fit measures both on a subsample
of the source images, which it runs through the whole network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import LayerOutputError
from ttapca.spectral.position_sample import position_hash
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
