"""How good predictions are: the one loop that every command and experiment measures with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttapca.data import Images, TensorBatches
from ttapca.errors import NotEnoughDataError, OptionError, ShapeError, TtapcaError

CALIBRATION_BINS = 15
DEFAULT_BATCH = 200  # the batch of the paper

Predict = Callable[[Tensor], Tensor]
Progress = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        images: How many there were.
        error: Share of wrong predictions, in percent.
        calibration_error: Expected distance between confidence and accuracy, in percent: images in
            15 bins of equal width by the probability of the predicted class.
        accuracy_of_class: In percent, by class; None for a class without images.
        seconds: Spent predicting, and adapting where the predictor adapts; reading is not counted.

    Example:
        >>> Evaluation(200, 25.0, 3.0, (75.0,), seconds=2.0).images_per_second
        100.0
    """

    images: int
    error: float
    calibration_error: float
    accuracy_of_class: tuple[float | None, ...]
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
    progress: Progress | None = None,
) -> Evaluation:
    """Predict all images, in order, and compare with their labels.

    Args:
        predict: A model in evaluation mode, an `Adapter`, or any function from images in [0, 1] to
            logits of shape (batch, classes).
        data: Labelled images.
        batch_size: Images a batch; the last one may have fewer.
        progress: Wraps the batches while they are read; silent by default.

    Returns:
        Error, calibration, accuracy of each class, and speed.

    Raises:
        OptionError: The logits are not as many as the classes of the labels.
        ShapeError: The network does not take images of this shape.
        NotEnoughDataError: There are no images.

    Example:
        >>> from ttapca.data import read_digits
        >>> always_zero = torch.eye(10)[:1]
        >>> outcome = evaluate(lambda images: always_zero.repeat(len(images), 1), read_digits())
        >>> round(outcome.error, 1)
        90.1
    """
    if not len(data):
        raise NotEnoughDataError("Evaluation needs images; found none.")
    classes = len(data.class_names)
    confidences, predictions, labels = [], [], []
    seconds = 0.0
    batches: Iterable[Any] = TensorBatches(data, batch_size)
    for images, truth in progress(batches) if progress else batches:
        start = time.perf_counter()
        logits = _logits(predict, images, classes)
        confidence, prediction = logits.double().softmax(1).max(1)
        confidences.append(confidence.cpu())
        predictions.append(prediction.cpu())
        seconds += time.perf_counter() - start
        labels.append(truth)
    truths = torch.cat(labels)
    correct = torch.cat(predictions) == truths
    return Evaluation(
        images=len(data),
        error=100 * float((~correct).double().mean()),
        calibration_error=100 * expected_calibration_error(torch.cat(confidences), correct),
        accuracy_of_class=_by_class(correct, truths, classes),
        seconds=seconds,
    )


def expected_calibration_error(
    confidence: Tensor, correct: Tensor, bins: int = CALIBRATION_BINS
) -> float:
    """Average distance between confidence and accuracy over bins of equal width (Guo, 2017).

    Args:
        confidence: Probability of each predicted class, shape (n,).
        correct: Whether each prediction was right, shape (n,).
        bins: How many bins there are between 0 and 1; a bin holds its upper edge.

    Returns:
        A number between 0 and 1; bins weigh by how many predictions they hold.

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
    except RuntimeError as error:  # what torch raises where shapes do not fit
        raise ShapeError(
            f"The network cannot take images of shape {tuple(images.shape[1:])}: {error}"
        ) from error
    if logits.dim() != 2 or logits.shape[1] != classes:
        raise OptionError(
            f"The network must give one logit for each of the {classes} classes of the labels; "
            f"it gives {tuple(logits.shape[1:])} an image. Choose the data set or the network that "
            "fits the other."
        )
    return logits


def _by_class(correct: Tensor, labels: Tensor, classes: int) -> tuple[float | None, ...]:
    counts = torch.bincount(labels, minlength=classes)
    right = torch.bincount(labels, weights=correct.double(), minlength=classes)
    return tuple(
        100 * hits / count if count else None
        for hits, count in zip(right.tolist(), counts.tolist(), strict=True)
    )
