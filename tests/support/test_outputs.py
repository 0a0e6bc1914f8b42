from __future__ import annotations

import copy
import math
import pickle
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import images
from ttapca.errors import LayerOutputError, OptionError
from ttapca.support.outputs import OutputKind, Outputs, Reads, softmax_entropy

DRAWS = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
READ: Reads = "probabilities"


def entropy_of_one(z: float) -> float:
    """Of the two answers yes and no, by definition."""
    p = 1 / (1 + math.exp(-z))
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


@pytest.mark.parametrize("shape", [(30,), (30, 1), (5, 1, 2, 3)])
@pytest.mark.parametrize("kind", [None, "binary"])
def test_one_logit_has_the_entropy_of_yes_and_no(
    shape: tuple[int, ...], kind: OutputKind | None
) -> None:
    z = DRAWS.reshape(shape)
    outputs = Outputs(kind, reads=READ)
    logits = outputs(z)
    assert logits.shape == (shape[0], 2, *shape[2:])
    expected = [entropy_of_one(float(each)) for each in DRAWS]
    found = softmax_entropy(logits).flatten()
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(outputs.as_returned(logits), z)
    torch.testing.assert_close(outputs.as_returned(logits.log_softmax(1)), z)
    assert outputs.of_pixels(logits) == (len(shape) > 2)


@pytest.mark.parametrize("shape", [(10, 3), (2, 3, 5, 1), (30, 1)])
def test_each_label_is_yes_or_no(shape: tuple[int, ...]) -> None:
    z = DRAWS.reshape(shape)
    outputs = Outputs("multilabel", reads=READ)
    logits = outputs(z)
    assert logits.shape == (shape[0], 2, *shape[1:])
    expected = torch.tensor([entropy_of_one(float(each)) for each in DRAWS], dtype=torch.float64)
    torch.testing.assert_close(softmax_entropy(logits).flatten(), expected)
    assert torch.equal(outputs.as_returned(logits), z)
    assert outputs.of_pixels(logits) == (len(shape) > 2)


@pytest.mark.parametrize("kind", [None, "multiclass"])
def test_classes_are_read_as_they_are(kind: OutputKind | None) -> None:
    outputs = Outputs(kind, itemgetter("scores"), reads="classes")
    z = DRAWS.reshape(15, 2)
    assert outputs({"scores": z}) is z
    assert outputs.as_returned(z) is z
    assert outputs.of_classes({"scores": z}) is z
    assert not outputs.of_pixels(z)


@pytest.mark.parametrize("kind", [None, "multiclass", "binary", "multilabel", "regression"])
@pytest.mark.parametrize("given", [DRAWS, DRAWS[:, None], torch.tensor(1.0), "text", {"a": 1}])
def test_who_reads_nothing_gets_everything_as_it_is(kind: OutputKind | None, given: Any) -> None:
    outputs = Outputs(kind)
    assert outputs(given) is given
    assert outputs.as_returned(given) is given


def test_who_can_do_without_classes_gets_other_outputs_as_they_are() -> None:
    reads: Reads = "classes, if any"
    for kind in ("multilabel", "regression"):
        outputs = Outputs(kind, reads=reads)
        assert outputs(DRAWS) is DRAWS
        assert outputs.as_returned(DRAWS) is DRAWS
        assert outputs.of_classes(DRAWS) is None
    assert Outputs(reads=reads)("text") == "text"
    assert Outputs(reads=reads)(DRAWS).shape == (30, 2)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("multiclass", (4, 1), r"needs two logits or more.*returns the shape \(4, 1\)"),
        ("multiclass", (4,), r"needs two logits or more.*the shape \(4,\)"),
        ("binary", (4, 2), r"needs one logit.*the shape \(4, 2\)\. Choose one of"),
        ("multilabel", (4,), r"one logit for each label.*the shape \(4,\)"),
        (None, (), "found a single number"),
    ],
)
def test_shapes_that_are_not_what_was_said(
    kind: OutputKind | None, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(LayerOutputError, match=message):
        Outputs(kind, reads=READ)(torch.zeros(shape))


def test_kinds_that_a_method_cannot_serve() -> None:
    for reads in ("probabilities", "classes"):
        with pytest.raises(OptionError, match=r"a regression have none\. Choose one"):
            Outputs("regression", reads=reads)
    with pytest.raises(OptionError, match=r"exclude each other; the labels.*do not"):
        Outputs("multilabel", reads="classes")
    with pytest.raises(OptionError, match=r"`outputs` must be one of multiclass.*Did you mean"):
        Outputs("multi-label")  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_read_the_same(change: Any) -> None:
    outputs = change(Outputs("multilabel", itemgetter(0), READ))
    z: Tensor = DRAWS.reshape(10, 3)
    assert torch.equal(outputs.as_returned(outputs([z])), z)


@pytest.mark.parametrize("output", [torch.zeros(3), {"logits": torch.zeros(3, 2)}], ids=repr)
def test_outputs_that_are_no_logits(output: Any) -> None:
    with pytest.raises(LayerOutputError, match="must return logits as one tensor"):
        softmax_entropy(output)


def test_entropy_of_dense_predictions_and_half_precision() -> None:
    logits = images(2, shape=(4, 3, 3))
    flat = logits.permute(0, 2, 3, 1).reshape(-1, 4)
    assert torch.allclose(softmax_entropy(logits).flatten(), softmax_entropy(flat))
    assert softmax_entropy(logits.to(torch.bfloat16)).dtype == torch.float32
    probabilities = torch.distributions.Categorical(logits=flat)
    assert torch.allclose(softmax_entropy(flat), probabilities.entropy())
