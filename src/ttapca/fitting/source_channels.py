"""What the channels of normalisation layers are on source data, in all and by class.

BatchNorm layers remember the mean and variance of every channel. GroupNorm and LayerNorm normalise
each image by itself and remember nothing, so at test time nothing says whether a channel has
shifted. And none of them knows what the classes of a batch do to its statistics (see
`ttapca.spectral.composition`). Fitting a filter measures both on some of the source images, running
the whole network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import LayerOutputError
from ttapca.spectral.composition import LARGEST_RANK, ClassMoments
from ttapca.support.sample_norms import channels_of, is_sample_norm, normalised_alone

# The first images are all measured, some for each class, and then one in 32: fitting reads many
# more images than moments need, and runs only a part of the network on them.
MEASURED_FIRST = 1024
MEASURED_PER_CLASS = 16
MOST_MEASURED_FIRST = 8192
ONE_IN = 32

# Running all of a large network takes longer than everything else, so that it sees no more images
# than this many multiply-adds allow, but at least this many images and numbers.
MOST_MULTIPLY_ADDS = 1e12
LEAST_IMAGES = 256
LEAST_NUMBERS = 2**23

# With fewer images a class, the classes cannot be told from the chance that chose the images, and a
# thousand of them would take most of the time, memory and disk of a fit.
IMAGES_A_CLASS = 2

NUMBER_BYTES = 4  # float32


def found_logits(output: Any, find: Callable[[Any], Tensor | None] | None = None) -> Tensor | None:
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

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten())
        >>> channels = SourceChannels(model)
        >>> _ = channels.see(torch.rand(5, 1, 8, 8))
        >>> {name: tuple(found.shape) for name, found in channels.of(nn.GroupNorm).items()}
        {'1': (2, 4)}
    """

    def __init__(
        self, model: nn.Module, logits: Callable[[Any], Tensor | None] | None = None
    ) -> None:
        self._model = model
        self._find_logits = logits
        self._layers = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, _BatchNorm) or is_sample_norm(module)
        }
        self._seen = 0
        self._measured = 0
        self._images = 0  # in this batch
        self._rows: dict[str, Tensor] = {}  # of this batch: (images, 2, channels)
        self._sums: dict[str, Tensor] = {}
        self._values: dict[str, int] = {}
        self._other_rows: set[str] = set()  # layers whose rows are not images
        self._weights: Tensor | None = None
        self._by_class: dict[str, Tensor] = {}
        self._most = MOST_MEASURED_FIRST
        self._needed = True
        self._classes = 0  # whose moments will be stored, as far as is known

    def expect(
        self, images: int | None, classes: int, *, numbers: int = 1, multiply_adds: int = 0
    ) -> int | None:
        """Say what is to come, and return how many images will be measured; None if unknown.

        Args:
            images: How many there are; None if nobody knows.
            classes: How many the model predicts; 0 if none.
            numbers: In one image.
            multiply_adds: Of the model for one image.
        """
        least = max(LEAST_IMAGES, LEAST_NUMBERS // numbers)
        self._most = max(least, int(MOST_MULTIPLY_ADDS / max(1, multiply_adds)))
        first = min(self._most, _measured_first(classes))
        self._classes = classes
        if images is None:
            return None
        measured = min(images, max(first, images // ONE_IN))
        self._classes = classes if measured >= IMAGES_A_CLASS * classes else 0
        self._needed = self._classes == classes or any(
            isinstance(layer, nn.GroupNorm | nn.LayerNorm) for layer in self._layers.values()
        )
        return measured if self._needed else 0

    def stored_bytes(self) -> int:
        """Return the size of what is measured in a saved filter, about; `expect` comes first."""
        if not self._needed:
            return 0
        layers = self._layers.values()
        alone = sum(channels_of(layer) for layer in layers if is_sample_norm(layer))
        batch = sum(layer.num_features for layer in layers if isinstance(layer, _BatchNorm))
        directions = 1 + min(self._classes, LARGEST_RANK) if self._classes else 0
        return NUMBER_BYTES * 2 * (alone + directions * (alone + batch))

    @property
    def _first(self) -> int:
        classes = 0 if self._weights is None else len(self._weights)
        return min(self._most, _measured_first(classes))

    @torch.no_grad()
    def see(self, *inputs: Any, **options: Any) -> Tensor | None:
        """Measure a batch of source images, or skip it, given the arguments of the model.

        The first tensor among them has a row for each image.

        Returns:
            The class probabilities of the images, shape (images, classes); None where the batch was
            skipped or the model predicts no classes.
        """
        values = (*inputs, *options.values())
        images = next(value for value in values if isinstance(value, Tensor))
        self._seen += len(images)
        if not self._needed or self._measured >= max(self._first, self._seen / ONE_IN):
            return None
        self._measured += len(images)
        self._images = len(images)
        self._rows = {}
        handles = [
            layer.register_forward_pre_hook(
                lambda layer, args, path=path: self._add(path, layer, args[0])
            )
            for path, layer in self._layers.items()
        ]
        try:
            output = self._model(*inputs, **options)
        finally:
            for handle in handles:
                handle.remove()
        return self._add_classes(output, len(images))

    def _add(self, path: str, layer: nn.Module, values: Tensor) -> None:
        """Add what a layer normalises, shape (batch, channels, ...)."""
        if isinstance(layer, nn.LayerNorm) and len(values) != self._images:
            self._other_rows.add(path)
            return
        if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
            values = normalised_alone(layer, values)
            flat = values.transpose(0, 1).flatten(1)
            var, mean = torch.var_mean(flat.float(), dim=1, correction=0)
            moments = torch.stack([mean.double(), var.double() + mean.double().square()])
            count = flat.shape[1]
            self._sums[path] = self._sums.get(path, 0.0) + moments.cpu() * count
            self._values[path] = self._values.get(path, 0) + count
        each = values.flatten(2) if values.dim() > 2 else values[..., None]
        self._rows[path] = torch.stack([each.mean(2), each.square().mean(2)], 1)

    def _add_classes(self, output: Any, images: int) -> Tensor | None:
        """Add what was seen of each layer to the classes that the images have by their logits."""
        logits = found_logits(output, self._find_logits)
        if logits is None:
            return None
        classes = logits.shape[1]
        shares = logits[:, :, None].double().softmax(1).flatten(2).mean(2)  # (images, classes)
        if len(shares) != images or (self._weights is not None and len(self._weights) != classes):
            return None
        self._weights = shares.sum(0).cpu() + (0.0 if self._weights is None else self._weights)
        for path, rows in self._rows.items():
            if len(rows) == images:  # a layer that is called on parts has no row for each image
                sums = torch.einsum("nk,nsc->ksc", shares.to(rows), rows).cpu()
                self._by_class[path] = self._by_class.get(path, 0.0) + sums
        return shares

    def of(self, kind: type[nn.Module]) -> dict[str, Tensor]:
        """Return mean and variance of the channels of such layers by path, shape (2, channels).

        Args:
            kind: GroupNorm or LayerNorm; BatchNorm remembers its own.
        """
        found = {}
        for path, sums in self._sums.items():
            if not isinstance(self._layers[path], kind) or path in self._other_rows:
                continue
            mean, square = sums / self._values[path]
            statistics = torch.stack([mean, square - mean.square()]).float()
            if torch.isfinite(statistics).all():
                found[path] = statistics
        return found

    def by_class(self) -> ClassMoments | None:
        """Return the moments of all layers by class; None where the model predicts no classes."""
        known = self._by_class.items()
        sums = {
            path: each
            for path, each in known
            if each.isfinite().all() and path not in self._other_rows
        }
        if self._weights is None or not sums or not torch.isfinite(self._weights).all():
            return None
        if self._measured < IMAGES_A_CLASS * len(self._weights):
            return None
        return ClassMoments.from_sums(self._weights, sums)


def _measured_first(classes: int) -> int:
    return max(MEASURED_FIRST, min(MEASURED_PER_CLASS * classes, MOST_MEASURED_FIRST))
