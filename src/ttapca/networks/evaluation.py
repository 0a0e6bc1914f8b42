"""How good predictions are: the one loop that every command and experiment measures with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttapca.datasets import Images, Order, TensorBatches, choose
from ttapca.errors import (
    NotEnoughDataError,
    OptionError,
    ShapeError,
    TtapcaError,
    refused_memory,
)
from ttapca.support.logits import softmax_entropy

CALIBRATION_BINS = 15
DEFAULT_BATCH = 200  # the batch of the paper

Predict = Callable[[Tensor], Tensor]
Watch = Callable[[int, int], None]
Progress = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        images: How many there were.
        error: Share of wrong predictions, in percent.
        calibration_error: Expected distance between confidence and accuracy, in percent, over 15
            bins of equal width by the probability of the predicted class.
        accuracy_of_class: In percent; None for a class without images.
        entropy: Mean of the predictions' entropy, in nats.
        error_stream: The error of each batch, in percent.
        entropy_stream: The mean entropy of each batch.
        seconds: Spent predicting, and adapting where the predictor adapts; reading is not counted.

    Example:
        >>> Evaluation(200, 25.0, 3.0, (75.0,), 0.1, (25.0,), (0.1,), 2.0).images_per_second
        100.0
    """

    images: int
    error: float
    calibration_error: float
    accuracy_of_class: tuple[float | None, ...]
    entropy: float
    error_stream: tuple[float, ...]
    entropy_stream: tuple[float, ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of right predictions, in percent."""
        return 100 - self.error

    @property
    def images_per_second(self) -> float:
        """How fast it went."""
        return self.images / self.seconds if self.seconds else float("inf")


def evaluate(
    predict: Predict,
    data: Images,
    *,
    batch_size: int = DEFAULT_BATCH,
    order: Order = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Predict all images, and compare with their labels.

    Images that lie class by class are shuffled: a method that learns from its batches would see one
    class at a time.

    Args:
        predict: A model in evaluation mode, an `Adapter`, or any function from images in [0, 1] to
            logits of shape (batch, classes).
        data: Labelled images.
        batch_size: How many images go in at once; the last batch may have fewer.
        order: In which order they come, see `ttapca.datasets.choose`.
        seed: Of the shuffle, where there is one.
        progress: Wraps the batches while they are read; silent by default.

    Raises:
        OptionError: The logits are not as many as the classes of the labels.
        ShapeError: The network does not take images of this shape.
        NotEnoughDataError: There are no images.

    Example:
        >>> from ttapca.datasets import read_digits
        >>> always_zero = torch.eye(10)[:1]
        >>> outcome = evaluate(lambda images: always_zero.repeat(len(images), 1), read_digits())
        >>> round(outcome.error, 1)
        90.1
    """
    rows = choose(data.labels, order=order, seed=seed).rows
    batches = TensorBatches(data, batch_size, rows)
    return predict_all(predict, batches, progress=progress).evaluation()


@dataclass(frozen=True, eq=False)
class Predictions:
    """What was predicted, image by image; every measure follows from it."""

    labels: Tensor  # (n,), as all others
    classes: Tensor  # the predicted ones
    confidences: Tensor  # their probabilities
    entropies: Tensor  # in nats
    batches: Tensor  # the number of each image's batch
    seconds: float  # spent predicting
    n_classes: int

    def evaluation(self, chosen: Tensor | None = None) -> Evaluation:
        """Measure all images, or those chosen by truth values of shape (n,).

        Seconds are shared in proportion, and batches without a chosen image left out of the
        streams.
        """
        if chosen is None:
            chosen = torch.ones_like(self.labels, dtype=torch.bool)
        images = int(chosen.sum())
        if not images:
            raise NotEnoughDataError("Evaluation needs images; found none.")
        labels, batches = self.labels[chosen], self.batches[chosen]
        correct = self.classes[chosen] == labels
        wrong, entropies = (~correct).double(), self.entropies[chosen]
        return Evaluation(
            images=images,
            error=100 * float(wrong.mean()),
            calibration_error=100 * expected_calibration_error(self.confidences[chosen], correct),
            accuracy_of_class=_by_class(correct, labels, self.n_classes),
            entropy=float(entropies.mean()),
            error_stream=tuple(100 * error for error in _by_batch(wrong, batches)),
            entropy_stream=_by_batch(entropies, batches),
            seconds=self.seconds * images / len(self.labels),
        )


def predict_all(
    predict: Predict,
    batches: TensorBatches,
    *,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Predictions:
    """Predict all images, batch after batch: the one loop that everything is measured with.

    Arguments and errors are those of `evaluate`. `watch` is told after each batch how many images
    it had and how many predictions were wrong.
    """
    if not len(batches):
        raise NotEnoughDataError("Evaluation needs images; found none.")
    n_classes = len(batches.data.class_names)
    parts: list[tuple[Tensor, ...]] = []
    seconds = 0.0
    read: Iterable[Any] = progress(batches) if progress else batches
    for number, (images, labels) in enumerate(read):
        start = time.perf_counter()
        logits = _logits(predict, images, n_classes).double().cpu()
        seconds += time.perf_counter() - start
        confidence, predicted = logits.softmax(1).max(1)
        # A single class leaves nothing to be uncertain of.
        entropy = softmax_entropy(logits) if n_classes > 1 else logits.new_zeros(len(labels))
        parts.append((labels, predicted, confidence, entropy, torch.full_like(labels, number)))
        if watch:
            watch(len(labels), int((predicted != labels).sum()))
    labels, *others = (torch.cat(column) for column in zip(*parts, strict=True))
    classes, confidences, entropies, numbers = others
    return Predictions(labels, classes, confidences, entropies, numbers, seconds, n_classes)


def expected_calibration_error(
    confidence: Tensor, correct: Tensor, bins: int = CALIBRATION_BINS
) -> float:
    """Average distance between confidence and accuracy over bins of equal width (Guo, 2017).

    Args:
        confidence: Probability of each predicted class, shape (n,).
        correct: Whether each prediction was right, shape (n,).
        bins: How many bins there are between 0 and 1; a bin holds its upper edge, and counts by
            how many predictions it holds.

    Example:
        >>> confidence = torch.tensor([0.75, 0.75])
        >>> expected_calibration_error(confidence, torch.tensor([True, False]))
        0.25
    """
    number = (confidence.double() * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64)
    gaps.index_add_(0, number, confidence.double() - correct.double())
    return float(gaps.abs().sum() / len(confidence))


@torch.no_grad()
def _logits(predict: Predict, images: Tensor, classes: int) -> Tensor:
    try:
        logits = predict(images)
    except TtapcaError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:  # where shapes do not fit
        if refused_memory(error) is not None:
            raise
        raise ShapeError(
            f"The network cannot take images of shape {tuple(images.shape[1:])}: {error}"
        ) from error
    if logits.dim() != 2 or logits.shape[1] != classes:
        raise OptionError(
            f"The network must give one logit for each of the {classes} classes of the labels; "
            f"it gives {tuple(logits.shape[1:])} for each image. Choose the data set or the "
            "network that fits the other."
        )
    return logits


def _by_batch(values: Tensor, batches: Tensor) -> tuple[float, ...]:
    """Means over the images of each batch that has any."""
    counts = torch.bincount(batches)
    sums = torch.bincount(batches, weights=values)
    return tuple((sums / counts)[counts > 0].tolist())


def _by_class(correct: Tensor, labels: Tensor, classes: int) -> tuple[float | None, ...]:
    counts = torch.bincount(labels, minlength=classes)
    right = torch.bincount(labels, weights=correct.double(), minlength=classes)
    return tuple(
        100 * hits / count if count else None
        for hits, count in zip(right.tolist(), counts.tolist(), strict=True)
    )
