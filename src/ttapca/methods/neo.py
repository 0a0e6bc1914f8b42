"""`neo` and `foa-shift`: move the mean of the features before the classifier."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ttapca._checks import NotNegative, Share
from ttapca.adaptation.optimisation import Predictor, Run
from ttapca.adaptation.surfaces import Surface
from ttapca.adaptation.surfaces.trainable import AroundForward
from ttapca.errors import LayerOutputError, NotEnoughDataError
from ttapca.methods.method import (
    CLASSES,
    Assembly,
    Method,
    Statistics,
    register,
    statistics_surfaces,
)
from ttapca.spectral.stream import Stream
from ttapca.support.inputs import SourceData, source_batches
from ttapca.support.modules import caught_inputs, evaluation_mode, find_classifier, path_of
from ttapca.support.outputs import Reads
from ttapca.support.tensors import at_least_float32

CENTRE = "centre"  # the name under which a stream keeps the mean and its number of rows


@register("neo", paper="Murphy et al. (ICLR 2026)")
@dataclass(frozen=True, kw_only=True)
class NEO(Method):
    """The features before the classifier, re-centred at the origin; no gradient.

    With h the features that the classifier takes, and mu the mean of all features of the stream so
    far, those of the batch included, the logits are

        W (h - mu) + b

    Nothing is learned, and nothing is known of the source: a network whose classes are well
    separated has features with mean 0 in all, and a shift of the images moves all features by about
    the same vector. The paper: https://arxiv.org/abs/2510.05635.

    Attributes:
        momentum: Weight of a batch in the mean, for streams whose condition changes (the paper's
            NEO-Continual, where it is 0.1). By default all samples weigh the same.
        classifier: Dotted path of the layer whose input is re-centred; the last `nn.Linear` by
            default.
        statistics: What BatchNorm layers normalise with.
    """

    outputs = CLASSES

    momentum: Share | None = None
    classifier: str | None = None
    statistics: Statistics = "source"

    def assemble(self) -> Assembly:
        """Return features whose mean is moved; nothing learns."""
        centred = CentredFeatures(self)
        return Assembly([*statistics_surfaces(self.statistics), centred], CentredPass(centred))


class CentredFeatures(Surface):
    """Takes the mean of the stream from the classifier's input; only an adapter's calls move it."""

    def __init__(self, options: NEO | FOAShift) -> None:
        super().__init__()
        self.momentum = options.momentum
        self.given = options.classifier
        self.path = ""
        self.n_logits: int | None = None  # of a classifier that was found, not named
        self.called = False  # since this was last set to False

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Take over the classifier."""
        super().attach(model, stream)
        layer = find_classifier(model, self.given)
        self.path = path_of(model, layer)
        if self.given is None and isinstance(layer, nn.Linear):
            self.n_logits = layer.out_features
        self.stream.declare(CENTRE, (None, 0))
        self.patches.wrap(layer, AroundForward(self, functools.partial(self._run_layer, layer)))

    def _run_layer(self, layer: nn.Module, forward: Run, /, *args: Any, **kwargs: Any) -> Any:
        """Run the classifier, with its first argument re-centred."""
        if args:
            return forward(self._centred(layer, args[0]), *args[1:], **kwargs)
        name = next(iter(kwargs))
        return forward(**{**kwargs, name: self._centred(layer, kwargs[name])})

    def _centred(self, layer: nn.Module, features: Any) -> Any:
        """Return features without the mean of the stream."""
        if not self.enabled:
            return features
        self.called = True
        where = self._channels(layer, features)
        rows = at_least_float32(features.movedim(where, -1))
        if self.stream.counts(CENTRE):
            self._take_in(rows.reshape(-1, rows.shape[-1]))
        moved = self._moved(rows)
        return features if moved is None else moved.movedim(-1, where).to(features.dtype)

    def _moved(self, rows: Tensor) -> Tensor | None:
        """Return features without the mean of the stream; None if none is known."""
        mean, _ = self.stream.now(CENTRE)
        return None if mean is None else rows - mean.to(rows)

    def _channels(self, layer: nn.Module, features: Any) -> int:
        """Return which dimension of the features holds their channels."""
        if isinstance(features, Tensor) and features.is_floating_point():
            if features.dim() == 2 or (isinstance(layer, nn.Linear) and features.dim() > 2):
                return -1
            if isinstance(layer, _ConvNd) and features.dim() > 2:
                return 1
        is_tensor = isinstance(features, Tensor)
        found = f"shape {tuple(features.shape)}" if is_tensor else f"a {type(features).__name__}"
        raise LayerOutputError(
            "Features are re-centred before a classifier that takes rows of them, shape (batch, "
            f"features), or that is an `nn.Linear` or a convolution; `{self.path}`, a "
            f"{type(layer).__name__}, takes {found}. Name another layer with `classifier=`."
        )

    def _take_in(self, rows: Tensor) -> None:
        """Add the rows of a batch to the mean, unless they are not finite."""
        mean, count = rows.mean(0), len(rows)
        if not count or not bool(torch.isfinite(mean).all()):
            self.stream.left_out |= count > 0
            return
        before, past = self.stream.past(CENTRE)
        before = torch.zeros_like(mean) if before is None else before.to(mean)
        share = self._share(count, past)
        self.stream.write(CENTRE, (torch.lerp(before, mean, share), past + count))

    def _share(self, count: int, past: int) -> float:
        """Return the weight of a batch in the mean."""
        return count / (past + count) if self.momentum is None else self.momentum


@register("foa-shift", paper="Niu et al. (ICML 2024)", needs="data")
@dataclass(frozen=True, kw_only=True)
class FOAShift(Method):
    """The features before the classifier, moved towards their mean on the source; no gradient.

    With mu_S the mean of the features h on the source, and mu_t a moving average over the batches
    before, mu_t = (1 - alpha) mu_{t-1} + alpha mean(h), the logits are

        W (h + gamma (mu_S - mu_{t-1})) + b

    This is the activation shifting of FOA, without the prompts that it searches for transformers.
    The paper: https://arxiv.org/abs/2404.01650.

    Attributes:
        source: Unlabelled source data: batches, pairs whose first element is a batch, or one tensor
            of samples. Read once, when the adapter is made.
        momentum: Weight of a batch in the moving average (alpha).
        strength: How far features are moved (gamma).
        classifier: As in `neo`.
        statistics: What BatchNorm layers normalise with.
    """

    outputs = CLASSES

    source: SourceData | None = None
    momentum: Share = 0.1
    strength: NotNegative = 1.0
    classifier: str | None = None
    statistics: Statistics = "source"

    def assemble(self) -> Assembly:
        """Return features that are moved; nothing learns."""
        self.require("source", "source data to measure the mean of its features")
        moved = ShiftedFeatures(self)
        return Assembly([*statistics_surfaces(self.statistics), moved], CentredPass(moved))


class ShiftedFeatures(CentredFeatures):
    """Moves the classifier's input towards its mean on the source; see `FOAShift`."""

    def __init__(self, options: FOAShift) -> None:
        super().__init__(options)
        self.strength, self._source = options.strength, options.source
        self.register_buffer("source_mean", None)

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Measure the source, and take over the classifier."""
        if self._source is not None:
            self.source_mean = self._measured(model, self._source)
            self._source = None  # an adapter is copied and pickled without the data
        super().attach(model, stream)

    def _measured(self, model: nn.Module, source: SourceData) -> Tensor:
        """Return the mean of the features on the source."""
        layer, total, count = find_classifier(model, self.given), torch.zeros(()), 0
        # A loader that shuffles draws from the caller's random state, which is then restored.
        with torch.random.fork_rng(devices=[]), evaluation_mode(model), torch.no_grad():
            for samples in source_batches(source, model):
                with caught_inputs(layer) as caught:
                    model(samples)
                for features in caught:
                    channels_last = features.movedim(self._channels(layer, features), -1)
                    rows = channels_last.flatten(0, -2).double()
                    total, count = total.to(rows) + rows.sum(0), count + len(rows)
        if not count or not bool(torch.isfinite(total).all()):
            raise NotEnoughDataError(
                "`foa-shift` needs source data whose features are finite; found "
                f"{count:,} samples{' with NaN or infinity among them' if count else ''}."
            )
        return total / count

    def _moved(self, rows: Tensor) -> Tensor | None:
        mean: Tensor | None = self.stream.past(CENTRE)[0]
        if mean is None:
            return None
        shift: Tensor = self.source_mean.to(rows) - mean.to(rows)
        return rows + self.strength * shift

    def _share(self, count: int, past: int) -> float:
        return super()._share(count, past) if past else 1.0


class CentredPass(Predictor):
    """One pass, which must have gone through the classifier."""

    reads: Reads = "classes"

    def __init__(self, features: CentredFeatures) -> None:
        super().__init__()
        self.features = features

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return the logits for one batch."""
        self.features.called = False
        logits = run(*inputs, **options)
        path, made = self.features.path, self.features.n_logits
        if not self.features.called:
            raise LayerOutputError(
                f"The classifier is called in every forward pass; `{path}` was not. Name the layer "
                "that makes the logits with `classifier=`."
            )
        if made not in (None, self.outputs.count(logits)):
            raise LayerOutputError(
                f"The classifier makes the logits; the last `nn.Linear` of the model, `{path}`, "
                f"has {made} outputs, and there are {self.outputs.count(logits)} logits. Name the "
                f'right layer with `classifier=`, or insist: `classifier="{path}"`.'
            )
        return logits
