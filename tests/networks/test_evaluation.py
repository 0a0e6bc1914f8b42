"""Measuring, against loops over single images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ttapca.datasets import Images, TensorBatches, to_tensor
from ttapca.errors import LayerOutputError, NotEnoughDataError, OptionError, ShapeError
from ttapca.networks import Evaluation, build, evaluate, expected_calibration_error, mean_iou
from ttapca.networks.evaluation import Predict, class_iou, confusion_matrix, predict_all


def random_images(n: int, classes: int = 3) -> Images:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (n, 4, 4, 3), dtype=np.uint8)
    names = tuple(str(number) for number in range(classes))
    return Images(pixels, random.integers(0, classes - 1, n), names)


def network(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, classes)).eval()


def slow_calibration(confidence: list[float], correct: list[bool], bins: int) -> float:
    total = 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        inside = [
            (c, r)
            for c, r in zip(confidence, correct, strict=True)
            if low < c <= high or (number == 0 and c == 0)
        ]
        if inside:
            accuracy = sum(r for _, r in inside) / len(inside)
            total += len(inside) * abs(accuracy - sum(c for c, _ in inside) / len(inside))
    return total / len(confidence)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 20),
)
def test_calibration_error(pairs: list[tuple[int, bool]], bins: int) -> None:
    # Off the edges of the bins, where rounding would decide.
    confidence = [(value + 0.123) / 1001 for value, _ in pairs]
    correct = [right for _, right in pairs]
    found = expected_calibration_error(
        torch.tensor(confidence, dtype=torch.float64), torch.tensor(correct), bins
    )
    assert found == pytest.approx(slow_calibration(confidence, correct, bins), abs=1e-12)


@pytest.mark.parametrize("batch_size", [7, 200])
def test_measured_as_one_by_one(batch_size: int) -> None:
    images, model = random_images(50), network()
    seen: list[int] = []

    def watch(batches: Iterable[Any]) -> Iterable[Any]:
        for batch in batches:
            seen.append(len(batch[1]))
            yield batch

    outcome = evaluate(model, images, batch_size=batch_size, progress=watch)
    assert seen == ([7] * 7 + [1] if batch_size == 7 else [50])
    wrong, entropies, confidence = [], [], []
    for pixels, label in zip(images.images, images.labels, strict=True):
        with torch.no_grad():
            chances = model(to_tensor(pixels[None])).double().softmax(1)[0]
        wrong.append(100.0 * (int(chances.argmax()) != label))
        entropies.append(-float((chances * chances.log()).sum()))
        confidence.append(float(chances.max()))
    parts = [slice(first, first + batch_size) for first in range(0, 50, batch_size)]
    assert outcome.images == 50
    assert outcome.error == 100 - outcome.accuracy == pytest.approx(np.mean(wrong))
    assert outcome.entropy == pytest.approx(np.mean(entropies))
    assert outcome.error_stream == pytest.approx([np.mean(wrong[part]) for part in parts])
    assert outcome.entropy_stream == pytest.approx([np.mean(entropies[part]) for part in parts])
    by_class = [100 - np.array(wrong)[images.labels == label].mean() for label in (0, 1)]
    assert outcome.accuracy_of_class[:2] == pytest.approx(by_class)
    assert outcome.accuracy_of_class[2] is None  # no image has this class
    slow = slow_calibration(confidence, [not each for each in wrong], 15)
    assert outcome.calibration_error == pytest.approx(100 * slow, abs=1e-4)
    assert outcome.images_per_second == pytest.approx(50 / outcome.seconds)
    assert Evaluation(100, 0.0, 0.0, (), 0.0, (), (), 0.0).images_per_second == float("inf")


@pytest.mark.parametrize("flat", [False, True])
def test_one_logit_is_measured_as_two(flat: bool) -> None:
    """A logit z and the two logits 0 and z have the same probabilities."""
    images, model = random_images(50, classes=2), network(1)

    def one(x: Tensor) -> Tensor:
        return model(x).flatten() if flat else model(x)

    def two(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(len(x), 1), model(x)], 1)

    expected = evaluate(two, images)
    for outputs in (None, "binary"):
        found = evaluate(one, images, outputs=outputs)
        for name in ("error", "calibration_error", "entropy", "error_stream", "entropy_stream"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_labels_are_measured_one_by_one() -> None:
    images, model = random_images(40), network()
    found = evaluate(model, images, outputs="multilabel")
    wrong, entropies, confidence = [], [], []
    for pixels, label in zip(images.images, images.labels, strict=True):
        with torch.no_grad():
            chances = model(to_tensor(pixels[None])).double().sigmoid()[0]
        wrong.append(int(chances.argmax()) != label)
        confidence.append(float(chances.max()))
        both = [-(p * np.log(p) + (1 - p) * np.log(1 - p)) for p in chances.tolist()]
        entropies.append(np.mean(both))
    assert found.error == pytest.approx(100 * np.mean(wrong))
    assert found.entropy == pytest.approx(np.mean(entropies))
    slow = slow_calibration(confidence, [not each for each in wrong], 15)
    assert found.calibration_error == pytest.approx(100 * slow, abs=1e-4)


def test_a_single_class_is_certain() -> None:
    images = Images(np.zeros((4, 4, 4, 3), np.uint8), np.zeros(4, np.int64), ("all",))
    found = evaluate(network(1), images)
    assert (found.error, found.entropy, found.calibration_error) == (0, 0, 0)


def mine(images: Tensor) -> Tensor:
    raise OptionError("my own")


WRN = build("wrn-10-1", classes=3).eval()


@pytest.mark.parametrize(
    ("predict", "images", "outputs", "error", "message"),
    [
        (network(1), 5, None, OptionError, r"the 3 classes .*, or one for two .* gives \(1,\)"),
        (network(10), 5, None, OptionError, r"each of the 3 classes .* gives \(10,\)"),
        (network(2), 5, "multilabel", OptionError, r"each of the 3 classes .* gives \(2,\)"),
        (network(), 5, "binary", LayerOutputError, '`outputs="binary"` needs one logit'),
        (network(), 5, "regression", OptionError, "one of multiclass, binary, multilabel; found"),
        (lambda x: x[..., :3], 5, None, OptionError, r"gives \(3, 4, 3\) for each sample"),
        (network(), 0, None, NotEnoughDataError, "found none"),
        (mine, 2, None, OptionError, "my own"),
        (nn.Linear(5, 3), 5, None, ShapeError, r"samples of shape \(3, 4, 4\): .*mat1"),
        (WRN, 5, None, ShapeError, "takes batches of images of shape 3x32x32; found 3x4x4"),
    ],
)
def test_what_cannot_be_measured(
    predict: Predict, images: int, outputs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        evaluate(predict, random_images(images), outputs=outputs)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("forward() missing 1 required positional argument: 'shape'"),
        RuntimeError("my own bug"),
        ValueError("my own bug"),
        IndexError("list index out of range"),
    ],
)
def test_a_bug_of_a_network_is_raised_as_it_is(error: Exception) -> None:
    def fails(_: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)) as raised:
        evaluate(fails, random_images(2))
    assert raised.value is error


@pytest.mark.parametrize(
    "predict",
    [
        nn.Conv2d(1, 2, 3),
        nn.Conv2d(3, 2, 9),
        nn.Sequential(nn.Flatten(), nn.Unflatten(1, (7, 7))),
        nn.BatchNorm2d(5).eval(),
        nn.Sequential(nn.Flatten(0), nn.Conv2d(3, 2, 1)),
        lambda x: x + torch.zeros(3, 5, 5),
        lambda x: x.reshape(2, 7),
        lambda x: x.flatten(1).unflatten(1, (5, 5)),
        lambda x: x.sum(7),
        lambda x: torch.cat([x, x[..., :1]], 1),
        lambda x: torch.einsum("abc->ab", x),
        lambda x: [width for _, _, width in [x.shape]],
    ],
)
def test_images_of_a_shape_that_does_not_fit(predict: Predict) -> None:
    with pytest.raises(ShapeError, match=r"cannot take samples of shape \(3, 4, 4\)"):
        evaluate(predict, random_images(2))


def test_some_images_of_a_stream() -> None:
    images, model = random_images(10), network()
    order = np.array([9, 0, 4, 4, 1, 2])
    told: list[tuple[int, int]] = []
    batches = TensorBatches(images, 4, order)
    found = predict_all(model, batches, watch=lambda *batch: told.append(batch))
    assert [count for count, _ in told] == [4, 2]
    assert found.labels.tolist() == images.labels[order].tolist()
    assert sum(wrong for _, wrong in told) == int((found.classes != found.labels).sum())
    chosen = torch.tensor([False, False, False, False, True, True])
    part = found.evaluation(chosen)
    expected = evaluate(model, images.subset([1, 2]))
    assert (part.images, part.error, part.calibration_error) == pytest.approx(
        (2, expected.error, expected.calibration_error)
    )
    assert len(part.error_stream) == 1  # the first batch has none of them
    assert part.seconds == pytest.approx(found.seconds / 3)
    with pytest.raises(NotEnoughDataError, match="found none"):
        found.evaluation(torch.zeros(6, dtype=torch.bool))


def slow_iou(predicted: list[int], labels: list[int], ignore: int | None) -> dict[int, float]:
    """Intersection over union of each class that labels have, one pixel after the other."""
    found = {}
    for each in set(labels) - {ignore}:
        both = either = 0
        for one, two in zip(predicted, labels, strict=True):
            if two != ignore:
                both += one == each and two == each
                either += one == each or two == each
        found[each] = 100 * both / either
    return found


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=60),
    st.sampled_from([4, 2]),
    st.integers(1, 7),
)
def test_mean_iou(pairs: list[tuple[int, int]], ignore: int, size: int) -> None:
    pairs = [*pairs, (0, 1), (3, 3)]
    predicted, labels = map(list, zip(*pairs, strict=True))
    labels = [ignore if each == 4 else each for each in labels]
    slow = slow_iou(predicted, labels, ignore)
    one, two = torch.tensor(predicted), torch.tensor(labels)
    expected = pytest.approx(sum(slow.values()) / len(slow))
    assert mean_iou(one, two, 4, ignore) == expected
    assert mean_iou(iter(one.split(size)), two.split(size), 4, ignore) == expected
    logits = torch.nn.functional.one_hot(one, 4).double()
    assert mean_iou(logits, two.byte(), 4, ignore) == expected
    each = class_iou(confusion_matrix(one, two, 4, ignore))
    assert {k: float(v) for k, v in enumerate(each) if not v.isnan()} == pytest.approx(slow)


def test_mean_iou_of_pixels() -> None:
    logits = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(40).reshape(2, 5, 4) % 3
    classes = logits.argmax(1)
    assert mean_iou(logits, labels, 3) == mean_iou(classes, labels, 3)
    assert mean_iou(labels, labels, 3) == 100.0
    with pytest.raises(ShapeError, match="as many batches"):
        mean_iou(labels.split(1), [labels[:1]], 3)


@pytest.mark.parametrize(
    ("predicted", "labels", "error", "message"),
    [
        (
            torch.zeros(2, 3),
            torch.zeros(2, 4),
            ShapeError,
            r"\(2, 3\) for labels of shape \(2, 4\)",
        ),
        (
            torch.zeros(2),
            torch.tensor([0, 255]),
            OptionError,
            "from 0 to 1; found some from 0 to 255",
        ),
        (torch.tensor([0, 2]), torch.zeros(2), OptionError, "Predictions are classes"),
        (torch.zeros(2), torch.full((2,), 9), NotEnoughDataError, "not ignored; found none"),
    ],
)
def test_what_has_no_mean_iou(
    predicted: Tensor, labels: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mean_iou(predicted, labels, 2, ignore=9)
