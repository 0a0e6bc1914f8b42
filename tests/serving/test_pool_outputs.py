"""A pool serves single logits and labels as `adapt` does, and says classes that make sense."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import left_untouched
from serving.clients import Client, described, npy
from serving.conftest import smooth_images
from ttapca.errors import LayerOutputError, OptionError
from ttapca.serving import StreamPool, api_models
from ttapca.serving.api_models import predicted
from ttapca.serving.service import Service, ServiceFacts


def pictures(count: int, seed: int, noise: float = 0.0) -> Tensor:
    return smooth_images(count, seed, (1, 8, 8), noise).clamp(0, 1)


def network(outputs: int, *after: nn.Module) -> nn.Module:
    torch.manual_seed(0)  # the same first layer for any number of outputs
    layers = (nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, outputs))
    return nn.Sequential(*layers, *after).eval()


class BothLogits(nn.Module):
    """The logits 0 and z of a single one, z."""

    def forward(self, logit: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(logit), logit], 1)


@pytest.mark.parametrize("flat", [False, True])
def test_a_single_logit_is_served_as_two(flat: bool) -> None:
    single = network(1, nn.Flatten(0)) if flat else network(1)
    double = network(1, BothLogits())
    fitted = ttapca.fit(single, "0", pictures(400, seed=1))
    with (
        left_untouched(single, pictures(2, seed=0)),
        StreamPool(single, fitted, mode="shadow") as one,
        StreamPool(double, ttapca.fit(double, "0", pictures(400, seed=1)), mode="shadow") as two,
    ):
        for turn in range(8):
            images = pictures(20, turn, noise=0.3 * (turn > 3))
            found, expected = one.predict("a", images), two.predict("a", images)
            assert found.outputs == "binary"
            assert torch.equal(found.logits.reshape(-1), expected.logits[:, 1])
            assert found.logits.shape == ((20,) if flat else (20, 1))
            assert (found.differ, found.shift) == (expected.differ, expected.shift)
            composition = found.status.health.composition  # by one logit, or by two
            assert composition == pytest.approx(expected.status.health.composition, rel=1e-3)
            assert found.status.health.skew == expected.status.health.skew
            both = predicted(expected.logits, ("no", "yes"))
            assert predicted(found.logits, ("no", "yes"), found.outputs) == both


def test_labels_are_served_each_by_itself() -> None:
    model = network(4)
    fitted = ttapca.fit(model, "0", pictures(400, seed=1), outputs="multilabel")
    with (
        left_untouched(model, pictures(2, seed=0)),
        StreamPool(model, fitted, outputs="multilabel", mode="shadow") as pool,
    ):
        images = pictures(60, seed=3, noise=0.3)
        found = pool.predict("a", images)
        pool.set_mode("b", "on")
        adapted = pool.predict("b", images)
        assert found.outputs == "multilabel"
        assert found.status.health.composition is None
        assert found.status.health.skew == 1  # nobody knows
    with torch.no_grad():
        twice = model(torch.cat([images, images]))[:60]  # as many as a pass in shadow has
    assert torch.equal(found.logits, twice)
    labels = (found.logits > 0) != (adapted.logits > 0)
    assert found.differ == int(labels.any(1).sum()) > 0


def test_what_is_said_of_labels() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [-3.0, -1.0, -2.0]])
    first, second = predicted(logits, ("cat", "dog"), "multilabel")

    def chance(logit: float) -> Any:
        return pytest.approx(1 / (1 + math.exp(-logit)))

    cat = {"class": 0, "name": "cat", "probability": chance(2.0)}
    third = {"class": 2, "name": None, "probability": chance(0.5)}
    assert first == {**cat, "labels": [cat, third]}
    dog = {"class": 1, "name": "dog", "probability": chance(-1.0)}
    assert second == {**dog, "labels": []}


def test_labels_over_http() -> None:
    model = network(4)
    fitted = ttapca.fit(model, "0", pictures(400, seed=1))
    with StreamPool(model, fitted, outputs="multilabel") as pool:
        client = Client(Service(pool, ServiceFacts("own", "0", tuple("abcd"))))
        pixels = (pictures(5, seed=2) * 255).byte().permute(0, 2, 3, 1).numpy()
        response = client.ask("POST", "/v1/predict?stream=a", **npy(pixels))
        described(response, api_models.PredictAnswer)
        client.close()
    logits = model(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255)
    for said, row in zip(response.json()["predictions"], logits, strict=True):
        assert said["class"] == int(row.argmax())
        assert [each["class"] for each in said["labels"]] == (row > 0).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("outputs", "model", "message"),
    [
        ("binary", network(4), r'outputs="binary"` needs one logit'),
        ("multiclass", network(1), r'outputs="multiclass"` needs two logits or more'),
        (None, network(4, nn.Unflatten(1, (2, 2, 1))), r"or \(images,\); found \(3, 2, 2, 1\)"),
        (None, network(4, nn.Flatten(0), nn.Unflatten(0, (-1, 2))), r"found \(6, 2\) for 3"),
    ],
)
def test_outputs_that_are_something_else(outputs: Any, model: nn.Module, message: str) -> None:
    source = network(4)
    fitted = ttapca.fit(source, "0", pictures(400, seed=1))
    with (
        StreamPool(model, fitted, outputs=outputs) as pool,
        pytest.raises(LayerOutputError, match=message),
    ):
        pool.predict("a", pictures(3, seed=0))
    assert pool.names() == []


def test_numbers_are_no_classes() -> None:
    model = network(4)
    fitted = ttapca.fit(model, "0", pictures(400, seed=1))
    with pytest.raises(OptionError, match="`outputs` must be one of multiclass, binary"):
        StreamPool(model, fitted, outputs="regression")  # type: ignore[arg-type]
