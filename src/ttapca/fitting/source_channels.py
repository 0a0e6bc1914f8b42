"""What the channels of normalisation layers are on source data, in all and by class.

BatchNorm layers remember the mean and variance of every channel. GroupNorm and LayerNorm normalise
each image by itself and remember nothing, so at test time nothing says whether a channel has
shifted. And none of them knows what the classes of a batch do to its statistics (see
`ttapca.spectral.source_classes`). Fitting a filter measures both on some of the source images,
running the whole network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ttapca.errors import LayerOutputError
from ttapca.fitting.channel_sums import ChannelSums
from ttapca.fitting.model_inputs import ModelInputs
from ttapca.spectral.source_classes import (
    MOST_FEATURES,
    PairStatistic,
    SourceClasses,
    late_layers,
    pair_statistic,
)
from ttapca.support.sample_norms import channels_of, is_sample_norm, normalised_alone
from ttapca.support.tensors import at_least_float32
from ttapca.support.wrapping import temporary_patches

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
