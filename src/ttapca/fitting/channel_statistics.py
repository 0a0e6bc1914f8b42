"""Statistics of the channels of normalisation layers on source data, over all images and by class.

BatchNorm layers remember the mean and variance of every channel. GroupNorm and LayerNorm normalise
each image by itself and remember nothing, and no layer knows what the classes of a batch do to its
statistics (see `ttapca.spectral.source_classes`). A fit measures both on a subsample of the source
images, which it runs through the whole network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import LayerOutputError
from ttapca.fitting.model_inputs import ModelInputs
from ttapca.spectral.position_sample import position_hash
from ttapca.spectral.source_classes import (
    LARGEST_RANK,
    MOST_FEATURES,
    PairStatistic,
    SourceClasses,
    late_layers,
    pair_statistic,
)
from ttapca.support.norm_layers import channels_of, is_sample_norm, normalised_alone
from ttapca.support.tensors import at_least_float32
from ttapca.support.wrapping import temporary_patches

VALUES = "values:"  # before the path of a layer
BY_CLASS = "by_class:"
SQUARES = "squares:"
OTHER_ROWS = "other_rows:"
LOOKS = ("looks", "looks_shares", "looks_weights")


@dataclass(eq=False)
class ChannelSums:
    """What `ttapca.fitting.channel_statistics` has measured so far.

    Attributes:
        measured: How many images.
        other_rows: Paths of layers whose rows are not images, which are left out.
        weights: Sum of the probabilities of each class, shape (classes,); None without classes.
        looks: Late layers of each image, its class probabilities, and for how many images it
            counts, one row each.
    """

    measured: int = 0
    other_rows: set[str] = field(default_factory=set)
    weights: Tensor | None = None
    looks: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    # By path: sums of means and of mean squares, and for how many images, shape (3, channels).
    _values: dict[str, Tensor] = field(default_factory=dict)
    _by_class: dict[str, Tensor] = field(default_factory=dict)  # (classes, 2, channels)
    _squares: dict[str, Tensor] = field(default_factory=dict)  # of channel means, (channels,)

    def add_values(self, path: str, moments: Tensor, images: float) -> None:
        """Add sums over images of channel means and of mean squares, shape (2, channels)."""
        sums = torch.cat([moments, torch.full_like(moments[:1], images)])
        self._values[path] = self._values.get(path, 0.0) + sums

    def knows(self, classes: int) -> bool:
        """Return whether sums by so many classes can be added."""
        return self.weights is None or len(self.weights) == classes

    def add_classes(
        self, weights: Tensor, by_class: Mapping[str, Tensor], squares: Mapping[str, Tensor]
    ) -> None:
        """Add weights of classes, and the weighted sums of layers, in float64."""
        self.weights = weights if self.weights is None else self.weights + weights
        for path, sums in by_class.items():
            self._by_class[path] = self._by_class.get(path, 0.0) + sums
        for path, sums in squares.items():
            self._squares[path] = self._squares.get(path, 0.0) + sums

    def merge(self, other: ChannelSums) -> None:
        """Add what others have measured."""
        self.measured += other.measured
        self.other_rows |= other.other_rows
        for path, sums in other._values.items():
            self._values[path] = self._values.get(path, 0.0) + sums
        if other.weights is not None and self.knows(len(other.weights)):
            self.add_classes(other.weights, other._by_class, other._squares)
            self.looks += other.looks

    def means(self) -> dict[str, Tensor]:
        """Return the means and mean squares of channels by path, shape (2, channels)."""
        return {
            path: sums[:2] / sums[2]
            for path, sums in self._values.items()
            if path not in self.other_rows
        }

    def classes(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return the weights of classes and the sums of layers that are finite."""
        weights = self.weights
        if weights is None or not torch.isfinite(weights).all():
            return None, {}
        return weights, {
            path: sums
            for path, sums in self._by_class.items()
            if path not in self.other_rows and sums.isfinite().all()
        }

    @property
    def squares(self) -> dict[str, Tensor]:
        """The sums of squared channel means by path, shape (channels,)."""
        return dict(self._squares)

    def looked(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the rows of `looks` as one table each; None if there are none of one kind."""
        widths = {(each.shape[1], shares.shape[1]) for each, shares, _ in self.looks}
        if len(widths) != 1:
            return None
        features, shares, weights = (torch.cat(each) for each in zip(*self.looks, strict=True))
        return features, shares, weights

    def tensors(self) -> dict[str, Tensor]:
        """Return what `from_tensors` makes the same sums of."""
        found = {"measured": torch.tensor(self.measured)}
        if self.weights is not None:
            found["weights"] = self.weights
        found |= {VALUES + path: sums for path, sums in self._values.items()}
        found |= {BY_CLASS + path: sums for path, sums in self._by_class.items()}
        found |= {SQUARES + path: sums for path, sums in self._squares.items()}
        looked = self.looked()
        if looked is not None:
            found |= dict(zip(LOOKS, looked, strict=True))
        return found | {OTHER_ROWS + path: torch.empty(0) for path in self.other_rows}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> ChannelSums:
        """Make sums of what `tensors` returned."""

        def named(prefix: str) -> dict[str, Tensor]:
            cut = len(prefix)
            return {name[cut:]: each for name, each in tensors.items() if name.startswith(prefix)}

        return cls(
            measured=int(tensors["measured"]),
            other_rows=set(named(OTHER_ROWS)),
            weights=tensors.get("weights"),
            looks=[tuple(tensors[name] for name in LOOKS)] if LOOKS[0] in tensors else [],  # type: ignore[list-item]
            _values=named(VALUES),
            _by_class=named(BY_CLASS),
            _squares=named(SQUARES),
        )


# With fewer images a class, the classes cannot be told from the chance that chose the images, and a
# thousand of them would take most of the time, memory and disk of a fit.
IMAGES_A_CLASS = 2

FindLogits = Callable[[Any], Tensor | None]


def found_logits(output: Any, find: FindLogits | None = None) -> Tensor | None:
    """Return the logits in what a model returns, shape (batch, classes, ...); None without any.

    Example:
        >>> found_logits({"scores": torch.zeros(4, 3)}, lambda output: output["scores"]).shape
        torch.Size([4, 3])
        >>> found_logits(torch.zeros(4)) is None
        True
    """
    try:
        logits = output if find is None else find(output)
    except LayerOutputError:  # the outputs are not what they were said to be
        raise
    except Exception:  # whatever a user's function raises on what this model returns
        return None
    fits = isinstance(logits, Tensor) and logits.dim() >= 2 and logits.shape[1] >= 2
    return logits if fits else None


class SourceChannels:
    """Measures the channels of every BatchNorm, GroupNorm and LayerNorm layer of a model.

    A LayerNorm whose first dimension is not that of the images, as in a transformer that has tokens
    first, is left out: nobody could tell how many images its statistics are of.

    Args:
        model: In evaluation mode.
        logits: Finds the logits in what the model returns; None where it returns them.
        sums: What was measured before; nothing by default.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten())
        >>> channels = SourceChannels(model)
        >>> _ = channels.see(ModelInputs((torch.rand(5, 1, 8, 8),), {}))
        >>> {name: tuple(found.shape) for name, found in channels.of(nn.GroupNorm).items()}
        {'1': (2, 4)}
    """

    def __init__(
        self,
        model: nn.Module,
        logits: FindLogits | None = None,
        sums: ChannelSums | None = None,
    ) -> None:
        self._model = model
        self._find_logits = logits
        self._layers = normalising_layers(model)
        self._weights = torch.empty(0)  # of the images in this batch
        self._rows: dict[str, Tensor] = {}  # of this batch: (images, 2, channels)
        self.sums = ChannelSums() if sums is None else sums

    @torch.no_grad()
    def see(self, inputs: ModelInputs, weights: Tensor | None = None) -> Tensor | None:
        """Measure a batch of source images.

        Args:
            inputs: The arguments of the model.
            weights: For how many images each of them counts, shape (images,); by default for one.

        Returns:
            The class probabilities of the images, shape (images, classes); None where the model
            predicts no classes.
        """
        images = len(inputs.first)
        self._weights = torch.ones(images, dtype=torch.float64) if weights is None else weights
        self.sums.measured += images
        self._rows = {}
        with temporary_patches() as patches:
            for path, layer in self._layers.items():
                patches.hook_input(layer, functools.partial(self._add, path))
            output = inputs.run(self._model)
        return self._add_classes(output)

    def _add(self, path: str, layer: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        """Add what a layer normalises, shape (batch, channels, ...)."""
        values: Tensor = args[0]
        images = len(self._weights)
        if isinstance(layer, nn.LayerNorm) and len(values) != images:
            self.sums.other_rows.add(path)
            return
        alone = is_sample_norm(layer)
        if is_sample_norm(layer):
            values = normalised_alone(layer, values)
        values = at_least_float32(values)
        each = values.flatten(2) if values.dim() > 2 else values[..., None]
        rows = torch.stack([each.mean(2), each.square().mean(2)], 1)
        weights = self._weights
        if len(rows) == images:
            self._rows[path] = rows
        else:  # a layer that is called on parts of images has no row for each image
            weights = torch.ones(len(rows))
        if alone:
            sums = torch.einsum("n,nsc->sc", weights.to(rows), rows)
            self.sums.add_values(path, sums.double().cpu(), float(weights.sum()))

    def _add_classes(self, output: Any) -> Tensor | None:
        """Add what was seen of each layer to the classes that the images have by their logits."""
        logits = found_logits(output, self._find_logits)
        if logits is None:
            return None
        shares = logits[:, :, None].double().softmax(1).flatten(2).mean(2)  # (images, classes)
        if len(shares) != len(self._weights) or not self.sums.knows(shares.shape[1]):
            return None
        weighted = self._weights.to(shares)[:, None] * shares
        by_class = {
            path: torch.einsum("nk,nsc->ksc", weighted.to(rows), rows).double().cpu()
            for path, rows in self._rows.items()
        }
        squares = {
            path: torch.einsum("n,nc->c", self._weights.to(rows), rows[:, 0].square()).double()
            for path, rows in self._rows.items()
        }
        self.sums.add_classes(
            weighted.sum(0).cpu(), by_class, {path: each.cpu() for path, each in squares.items()}
        )
        self._add_looks(shares)
        return shares

    def _add_looks(self, shares: Tensor) -> None:
        """Add what late layers show of each image, and the classes it has by its logits."""
        late, stride = self._late()
        if late and not late.keys() - self._rows.keys():
            features = torch.cat([self._rows[path][:, 0, ::stride] for path in late], 1)
            found = (features.float(), shares.float(), self._weights.float())
            self.sums.looks.append(tuple(each.cpu() for each in found))  # type: ignore[arg-type]

    def _late(self) -> tuple[dict[str, int], int]:
        """Return how many channels of each late layer are looked at, and every which one."""
        kept = [path for path in self._layers if path not in self.sums.other_rows]
        channels = {path: _channels_of(self._layers[path]) for path in late_layers(kept)}
        stride = max(1, -(-sum(channels.values()) // MOST_FEATURES))
        return {path: -(-count // stride) for path, count in channels.items()}, stride

    def of(self, kind: type[nn.Module]) -> dict[str, Tensor]:
        """Return mean and variance of the channels of such layers by path, shape (2, channels).

        Args:
            kind: GroupNorm or LayerNorm; BatchNorm remembers its own.
        """
        found = {}
        for path, (mean, square) in self.sums.means().items():
            statistics = torch.stack([mean, square - mean.square()]).float()
            if isinstance(self._layers[path], kind) and torch.isfinite(statistics).all():
                found[path] = statistics
        return found

    def by_class(self) -> SourceClasses | None:
        """Return what classes do to all layers; None where the model predicts no classes."""
        weights, sums = self.sums.classes()
        if weights is None or not sums or self.sums.measured < IMAGES_A_CLASS * len(weights):
            return None
        return SourceClasses.from_sums(weights, sums, self.sums.squares, self._pairs())

    def _pairs(self) -> PairStatistic | None:
        looked, (late, stride) = self.sums.looked(), self._late()
        if looked is None or looked[0].shape[1] != sum(late.values()):
            return None
        if not all(bool(torch.isfinite(each).all()) for each in looked):
            return None
        return pair_statistic(*looked, late, stride)


def _channels_of(layer: nn.Module) -> int:
    return layer.num_features if isinstance(layer, _BatchNorm) else channels_of(layer)  # type: ignore[arg-type]


def normalising_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the BatchNorm, GroupNorm and LayerNorm layers of a model, by their paths."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) or is_sample_norm(module)
    }


# So many images are measured, some for each class, or one in 32 if that is more: fitting reads many
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

NUMBER_BYTES = 4  # float32


@dataclass(frozen=True)
class Subsample:
    """Says which images are measured.

    Attributes:
        wanted: How many images are measured, at least.
        images: How many there are; None if nobody knows.
        classes: How many classes there are whose moments will be stored; 0 if none.
        needed: Whether anything is measured.

    Example:
        >>> rule = Subsample(wanted=100, images=2000, classes=10)
        >>> measured = rule.of(torch.arange(2000))
        >>> int(measured.sum()), [int(each.sum()) for each in measured.split(500)]
        (101, [26, 24, 26, 25])
    """

    wanted: int
    images: int | None
    classes: int
    needed: bool = True

    def rates(self, positions: Tensor) -> Tensor:
        """Return the share of images that is measured around each position, above 0 to 1."""
        images = positions + 1.0 if self.images is None else torch.full_like(positions, self.images)
        return (self.wanted / images.clamp(min=1)).clamp(1 / ONE_IN, 1).double()

    def of(self, positions: Tensor) -> Tensor:
        """Return whether the image at each of these positions is measured."""
        if not self.needed:
            return torch.zeros_like(positions, dtype=torch.bool)
        return position_hash(positions) < self.rates(positions)

    @property
    def expected(self) -> int | None:
        """How many images will be measured, about; None if nobody knows."""
        if not self.needed:
            return 0
        if self.images is None:
            return None
        return min(self.images, max(self.wanted, self.images // ONE_IN))

    def stored_bytes(self, model: nn.Module) -> int:
        """Return the size of what is measured in a saved filter, about."""
        if not self.needed:
            return 0
        layers = normalising_layers(model).values()
        alone = sum(channels_of(layer) for layer in layers if is_sample_norm(layer))
        batch = sum(layer.num_features for layer in layers if isinstance(layer, _BatchNorm))
        directions = 1 + min(self.classes, LARGEST_RANK) if self.classes else 0
        return NUMBER_BYTES * 2 * (alone + directions * (alone + batch))


def choose_subsample(
    model: nn.Module,
    images: int | None,
    classes: int,
    *,
    numbers: int = 1,
    multiply_adds: int = 0,
) -> Subsample:
    """Choose the rule for a network and its data.

    Args:
        model: The network.
        images: How many there are; None if nobody knows.
        classes: How many the model predicts; 0 if none.
        numbers: In one image.
        multiply_adds: Of the model for one image.
    """
    least = max(LEAST_IMAGES, LEAST_NUMBERS // numbers)
    most = max(least, int(MOST_MULTIPLY_ADDS / max(1, multiply_adds)))
    wanted = min(most, max(MEASURED, min(MEASURED_PER_CLASS * classes, MOST_MEASURED)))
    rule = Subsample(wanted, images, classes)
    if rule.expected is not None and rule.expected < IMAGES_A_CLASS * classes:
        classes = 0  # too few images to tell them apart
    needed = classes > 0 or any(map(is_sample_norm, normalising_layers(model).values()))
    return Subsample(wanted, images, classes, needed)
