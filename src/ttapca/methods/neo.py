"""`neo`: move the mean of the features before the classifier to the origin."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ttapca.adaptation.optimisation import Predictor, Run
from ttapca.adaptation.surfaces import Surface
from ttapca.adaptation.surfaces.trainable import AroundForward
from ttapca.errors import LayerOutputError
from ttapca.methods.method import (
    CLASSES,
    Assembly,
    Method,
    Share,
    Statistics,
    register,
    statistics_surfaces,
)
from ttapca.spectral.stream import Stream
from ttapca.support.modules import find_classifier, path_of
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
    """Takes the mean of the stream from the classifier's input.

    A pass outside of an adapter's call uses the mean as it is, and adds nothing to it.
    """

    def __init__(self, options: NEO) -> None:
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
        mean, _ = self.stream.now(CENTRE)
        if mean is None:
            return features
        return (rows - mean.to(rows)).movedim(-1, where).to(features.dtype)

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
        share = count / (past + count) if self.momentum is None else self.momentum
        self.stream.write(CENTRE, (torch.lerp(before, mean, share), past + count))


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
