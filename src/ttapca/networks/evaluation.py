"""Measure predictions against labels: the loop that every command and experiment uses."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ttapca._checks import Maybe, OneOf, check_option
from ttapca.datasets import Images, Order, TensorBatches, choose
from ttapca.errors import NotEnoughDataError, OptionError, ShapeError
from ttapca.networks.network import explained_shape
from ttapca.support.outputs import Outputs, softmax_entropy

CALIBRATION_BINS = 15
DEFAULT_BATCH = 200  # the batch of the paper

# Outputs that can be compared with one class for each image.
EvaluatedKind = Literal["multiclass", "binary", "multilabel"]

Predict = Callable[[Tensor], Tensor]
Watch = Callable[[int, int], None]
Progress = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True)
class Evaluation:
    """The errors, calibration and speed of some predictions.

    Attributes:
        images: How many there were.
        error: Share of wrong predictions, in percent.
        calibration_error: See `expected_calibration_error`; in percent.
        accuracy_of_class: In percent; None for a class without images.
        entropy: Mean entropy of the predictions, in nats.
        error_stream: The error of each batch, in percent.
        entropy_stream: The mean entropy of each batch.
        seconds: Time spent predicting and adapting, without reading images.

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
        """Speed of predicting and adapting."""
        return self.images / self.seconds if self.seconds else float("inf")


def evaluate(
    predict: Predict,
    data: Images,
    *,
    batch_size: int = DEFAULT_BATCH,
    order: Order = "auto",
    seed: int = 0,
    outputs: EvaluatedKind | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Predict all images and compare with their labels.

    Images that are stored class by class are shuffled; otherwise a method that learns from its
    batches would see one class at a time.

    Args:
        predict: A model in evaluation mode, an `Adapter`, or any function from images in [0, 1] to
            logits of shape (batch, classes); or one logit, for two classes.
        data: Labelled images.
        batch_size: Images that are predicted at once; the last batch may have fewer.
        order: The order of the images, see `ttapca.datasets.choose`.
        seed: Of the shuffle, if there is one.
        outputs: The meaning of the logits. By default one is `binary`, and more are `multiclass`.
            If they are `multilabel`, the label with the highest logit is predicted, its confidence
            is its sigmoid, and the entropy is the mean over labels.
        progress: Wraps the batches while they are read; silent by default.

    Example:
        >>> from ttapca.datasets import read_digits
        >>> always_zero = torch.eye(10)[:1]
        >>> outcome = evaluate(lambda images: always_zero.repeat(len(images), 1), read_digits())
        >>> round(outcome.error, 1)
        90.1
    """
    rows = choose(data.labels, order=order, seed=seed).rows
    batches = TensorBatches(data, batch_size, rows)
    return predict_all(predict, batches, outputs=outputs, progress=progress).evaluation()


@dataclass(frozen=True, eq=False)
class Predictions:
    """The prediction of each image; every measure follows from them."""

    labels: Tensor  # (n,), like all tensors here
    classes: Tensor  # the predicted ones
    confidences: Tensor  # their probabilities
    entropies: Tensor  # in nats
    batches: Tensor  # the number of each image's batch
    seconds: float
    n_classes: int

    @property
    def correct(self) -> Tensor:
        """Whether each prediction is right."""
        return self.classes == self.labels

    def evaluation(self, chosen: Tensor | None = None) -> Evaluation:
        """Measure all images, or those for which `chosen`, (n,), is true."""
        rows = slice(None) if chosen is None else chosen
        labels, batches, correct = self.labels[rows], self.batches[rows], self.correct[rows]
        entropies, images = self.entropies[rows], len(labels)
        if not images:
            raise NotEnoughDataError("Evaluation needs samples; found none.")
        errors, by_class = _means(~correct, batches), _means(correct, labels, self.n_classes)
        return Evaluation(
            images=images,
            error=100 * float((~correct).double().mean()),
            calibration_error=100 * expected_calibration_error(self.confidences[rows], correct),
            accuracy_of_class=tuple(None if mean is None else 100 * mean for mean in by_class),
            entropy=float(entropies.mean()),
            error_stream=tuple(100 * mean for mean in errors if mean is not None),
            entropy_stream=tuple(each for each in _means(entropies, batches) if each is not None),
            seconds=self.seconds * images / len(self.labels),
        )


def predict_all(
    predict: Predict,
    batches: TensorBatches,
    *,
    outputs: EvaluatedKind | None = None,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Predictions:
    """Predict all images; `watch` gets the numbers of images and of mistakes of each batch."""
    check_option("outputs", outputs, Maybe(OneOf(get_args(EvaluatedKind))))
    if not len(batches):
        raise NotEnoughDataError("Evaluation needs samples; found none.")
    read_as = Outputs(outputs, reads="probabilities")
    n_classes = len(batches.data.class_names)
    parts: list[tuple[Tensor, ...]] = []
    seconds = 0.0
    for number, (images, labels) in enumerate(progress(batches) if progress else batches):
        start = time.perf_counter()
        with torch.no_grad(), explained_shape(tuple(images.shape[1:])):
            logits = predict(images)
        logits = logits.double().cpu()
        seconds += time.perf_counter() - start
        predicted, confidence, entropy = _predicted(logits, read_as, n_classes)
        parts.append((labels, predicted, confidence, entropy, torch.full_like(labels, number)))
        if watch:
            watch(len(labels), int((predicted != labels).sum()))
    labels, *others = (torch.cat(column) for column in zip(*parts, strict=True))
    classes, confidences, entropies, numbers = others
    return Predictions(labels, classes, confidences, entropies, numbers, seconds, n_classes)


def expected_calibration_error(
    confidence: Tensor, correct: Tensor, bins: int = CALIBRATION_BINS
) -> float:
    """Return the average distance between confidence and accuracy over bins (Guo, 2017).

    `confidence` and `correct` have shape (n,). Bins have equal width, include their upper edges,
    and are weighted by their numbers of predictions.

    Example:
        >>> confidence = torch.tensor([0.75, 0.75])
        >>> expected_calibration_error(confidence, torch.tensor([True, False]))
        0.25
    """
    number = (confidence.double() * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64)
    gaps.index_add_(0, number, confidence.double() - correct.double())
    return float(gaps.abs().sum() / len(confidence))


def confusion_matrix(
    predicted: Tensor, labels: Tensor, classes: int, ignore: int | None = None
) -> Tensor:
    """Count pairs of label (rows) and predicted class, int64, (classes, classes)."""
    logits = predicted.dim() == labels.dim() + 1 and predicted.shape[1:2] == (classes,)
    found = (predicted.argmax(1) if logits else predicted).cpu()
    labels = labels.cpu()
    if found.shape != labels.shape:
        raise ShapeError(
            "Each label needs a predicted class, or logits of shape (batch, classes, ...); found "
            f"predictions of shape {tuple(predicted.shape)} for labels of shape "
            f"{tuple(labels.shape)}, {classes} classes. Resize one of them."
        )
    if ignore is not None:
        found, labels = found[labels != ignore], labels[labels != ignore]
    for name, values in (("Labels", labels), ("Predictions", found)):
        if bool(((values < 0) | (values >= classes)).any()):
            raise OptionError(
                f"{name} are classes from 0 to {classes - 1}; found some from {int(values.min())} "
                f"to {int(values.max())}. Name more `classes`, or the label to `ignore`."
            )
    pairs = labels.long().flatten() * classes + found.long().flatten()
    return torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def class_iou(confusion: Tensor) -> Tensor:
    """Return the intersection over union of each class in percent; NaN if no label has it."""
    right, labelled = confusion.diagonal().double(), confusion.sum(1).double()
    union = labelled + confusion.sum(0) - right
    return torch.where(labelled > 0, 100 * right / union.clamp(min=1), torch.nan)


def mean_iou(
    predicted: Tensor | Iterable[Tensor],
    labels: Tensor | Iterable[Tensor],
    classes: int,
    ignore: int | None = None,
) -> float:
    """Return the mean intersection over union, in percent, for predictions of every pixel.

    Pixels of all images are counted together, and the mean is over the classes that labels have.

    Args:
        predicted: A class for each label, or logits, (batch, classes, ...); or batches of them, of
            which one is kept at a time.
        labels: Classes from 0 on, of any shape: of images, (batch,), or of pixels; or batches.
        classes: How many there are.
        ignore: A label that is not counted, for pixels that have none.

    Example:
        >>> labels = torch.tensor([[[0, 0], [1, 255]]])
        >>> mean_iou(torch.tensor([[[0, 1], [1, 1]]]), labels, classes=2, ignore=255)
        50.0
    """
    one, two = ([each] if isinstance(each, Tensor) else each for each in (predicted, labels))
    total = torch.zeros(classes, classes, dtype=torch.int64)
    for found, wanted in itertools.zip_longest(one, two):
        if found is None or wanted is None:
            raise ShapeError(
                "Predictions and labels need as many batches; found different numbers."
            )
        total += confusion_matrix(found, wanted, classes, ignore)
    if not bool(total.any()):
        raise NotEnoughDataError("A mean IoU needs labels that are not ignored; found none.")
    return float(class_iou(total).nanmean())


def _predicted(logits: Tensor, read_as: Outputs, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the class of each image, its probability and its entropy, each of shape (batch,)."""
    if classes == 1 and logits.dim() == 2 and logits.shape[1] == 1 and read_as.kind is None:
        nothing = logits.new_zeros(len(logits))  # with a single class nothing is uncertain
        return nothing.long(), nothing + 1, nothing
    # (batch, classes), or for labels (batch, 2, labels)
    found: Tensor = read_as(logits)
    if found.shape[-1] != classes or read_as.of_pixels(found):
        raise OptionError(
            f"The network must give one logit for each of the {classes} classes of the labels, or "
            f"one for two of them; it gives {tuple(logits.shape[1:])} for each sample. Use others."
        )
    probabilities, entropies = found.softmax(1), softmax_entropy(found)
    if found.dim() == 3:
        probabilities, entropies = probabilities[:, 1], entropies.mean(1)
    confidence, predicted = probabilities.max(1)
    return predicted, confidence, entropies


def _means(values: Tensor, groups: Tensor, count: int = 0) -> list[float | None]:
    """Return the mean of the values of each group; None for an empty one."""
    sizes = torch.bincount(groups, minlength=count)
    sums = torch.bincount(groups, weights=values.double(), minlength=count)
    pairs = zip(sums.tolist(), sizes.tolist(), strict=True)
    return [total / size if size else None for total, size in pairs]
