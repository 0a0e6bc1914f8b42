"""`t3a`: classify by the nearest prototype, made of features of the stream itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca._checks import Count
from ttapca.adaptation.optimisation import Predictor, Run, log_predictions
from ttapca.errors import AttachError, LayerOutputError
from ttapca.methods.method import Assembly, Method, Statistics, register, statistics_surfaces
from ttapca.spectral.stream import Stream
from ttapca.support.modules import caught_inputs, classifier_features, find_classifier, path_of
from ttapca.support.outputs import Reads, softmax_entropy

# How far the classifier's output may be from the model's, relative to the largest logit: above the
# rounding of half precision, below the difference that another layer would make.
SAME = 0.02
TINY = 1e-6  # in place of the largest logit, if all are zero

SUPPORTS = "supports"  # the name under which a stream keeps them
Supports = tuple[Tensor, Tensor, Tensor]  # features, classes, entropies; see `Prototypes`


@register("t3a", paper="Iwasawa, Matsuo (NeurIPS 2021)")
@dataclass(frozen=True, kw_only=True)
class T3A(Method):
    """The classifier, replaced by prototypes of the classes that the stream holds; no gradient.

    Every class k has a support set S^k. It starts with the classifier's own weights of the class;
    each sample then joins the set of the class that the network predicts for it. With z the
    features that the classifier takes, the M supports of least entropy in each set remain, and

        c^k = sum of z / |z| over S^k, scaled to length 1        logits  z^T c^k

    The paper: https://openreview.net/forum?id=e_yvNqkJKAW.

    Attributes:
        supports: How many supports of each class are kept, those of least entropy (M); None for
            all, which grows without end.
        classifier: Dotted path of the `nn.Linear` that makes the logits; the last one by default.
        statistics: What BatchNorm layers normalise with.
    """

    outputs = ("multiclass",)

    supports: Count | None = 100
    classifier: str | None = None
    statistics: Statistics = "source"

    def assemble(self) -> Assembly:
        """Return another classifier; nothing else changes."""
        return Assembly(statistics_surfaces(self.statistics), Prototypes(self))


class Prototypes(Predictor):
    """Predicts by the prototypes of the stream, those of this batch included.

    The stream keeps features, (supports, d), by class, with these classes and entropies.
    """

    reads: Reads = "classes"
    _classifier: nn.Linear  # found by `bind`
    _stream: Stream  # set by `join`

    def __init__(self, options: T3A) -> None:
        super().__init__()
        self.options = options
        self._path = ""
        self._checked = False

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Find the classifier."""
        del parameters
        found = find_classifier(model, self.options.classifier)
        self._path = path_of(model, found)
        if not isinstance(found, nn.Linear):
            raise AttachError(
                "`t3a` starts from the weights of a linear classifier, one row for each class; "
                f"`{self._path}` is a {type(found).__name__}. Name an `nn.Linear` with "
                "`classifier=`."
            )
        self._classifier = found

    def join(self, stream: Stream) -> None:
        """Declare the supports."""
        super().join(stream)
        stream.declare(SUPPORTS, None, grows=True)
        self._stream = stream

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return scores of the prototypes, (batch, classes), or the network's if not finite."""
        with caught_inputs(self._classifier) as caught:
            logits = run(*inputs, **options)
        own = log_predictions(logits)
        features = classifier_features(caught, len(logits))
        if not (torch.isfinite(own).all() and torch.isfinite(features).all()):
            self.skipped += 1
            return logits
        self._check_output(features, logits)
        kept = supports, labels, _ = self._with_batch(features, own.to(features))
        self._stream.write(SUPPORTS, kept)
        sums = supports.new_zeros(
            logits.shape[1], supports.shape[1]
        )  # 0 for a class without supports
        sums = sums.index_add_(0, labels, F.normalize(supports, dim=1))
        return (features @ F.normalize(sums, dim=1).T).to(logits.dtype)

    def _check_output(self, features: Tensor, logits: Tensor) -> None:
        """Raise, at the first batch, if another layer makes the logits."""
        if self._checked or not len(features):
            return
        made, largest = self._scores(features), max(TINY, float(logits.abs().amax()))
        same = made.shape == logits.shape and float((made - logits).abs().amax()) <= SAME * largest
        if not same:
            raise LayerOutputError(
                "`t3a` replaces the classifier, whose output must be what the model returns; that "
                f"of `{self._path}`, with {made.shape[1]} for {logits.shape[1]} classes, is "
                "another. Name the layer that makes the logits with `classifier=`, or choose "
                "`neo`, which leaves the classifier in place."
            )
        self._checked = True

    def _scores(self, features: Tensor) -> Tensor:
        """Return the classifier's own logits for features."""
        weight, bias = self._classifier.weight, self._classifier.bias
        return F.linear(features, weight.to(features), None if bias is None else bias.to(features))

    def _with_batch(self, features: Tensor, own: Tensor) -> Supports:
        """Return the supports with the samples of a batch, without the least certain ones."""
        before: Supports | None = self._stream.past(SUPPORTS)
        if before is None:
            weight = self._classifier.weight.detach().to(features)
            before = (weight, *_classes_and_entropies(self._scores(weight).log_softmax(1)))
        batch = (features, *_classes_and_entropies(own))
        supports, labels, entropies = (
            torch.cat([old.to(new), new]) for old, new in zip(before, batch, strict=True)
        )
        kept = most_certain(labels, entropies, self.options.supports)
        return supports[kept], labels[kept], entropies[kept]


def most_certain(labels: Tensor, entropies: Tensor, most: int | None) -> Tensor:
    """Return the places of at most `most` supports of least entropy in each class, by class."""
    order = entropies.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]
    if most is None:
        return order
    counts = labels.bincount()
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    rank = torch.arange(len(order), device=order.device) - first
    return order[rank < most]


def _classes_and_entropies(log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    return log_probabilities.argmax(1), softmax_entropy(log_probabilities)
