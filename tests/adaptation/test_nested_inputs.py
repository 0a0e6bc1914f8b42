"""Models that take a list of images, as detectors do, or a dict: a filter of what they are given.

The oracle is the same network behind one tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ttapca
from oracles import assert_same_picture, natural, picture_of
from ttapca.errors import InputRangeWarning, NonFiniteError

IMAGES = natural(64, (16, 24)).float().clamp(0, 1)
NOISY = (
    IMAGES + 0.2 * torch.randn(IMAGES.shape, generator=torch.Generator().manual_seed(1))
).clamp(0, 1)
PIECES = [NOISY[0, :, :12], NOISY[1, :, :, :20], NOISY[2]]  # of several sizes


class OfTensors(nn.Module):
    """A network with a score of some classes at every place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Identity()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.scores = nn.Conv2d(8, 5, 1)
        self.eval()

    def forward(self, images: Tensor) -> Any:
        features: Tensor = self.scores(self.norm(self.conv(self.entry(images))).relu())
        return features


class Detector(OfTensors):
    """Takes images of any sizes, with targets or without, and returns a dict for each image."""

    def forward(self, images: Any, targets: Any = None) -> Any:
        assert targets is None or len(targets) == len(images)
        sides = [max(each.shape[side] for each in images) for side in (1, 2)]
        padded = [
            F.pad(each, (0, sides[1] - each.shape[2], 0, sides[0] - each.shape[1]))
            for each in images
        ]
        found = super().forward(torch.stack(padded)).flatten(2)
        return [{"scores": each.amax(1), "places": each.argmax(1)} for each in found]


class OfDicts(OfTensors):
    """Takes one dict."""

    def forward(self, batch: Any) -> Any:
        return super().forward(batch["pixel_values"]).mean((2, 3))


def parts(images: Tensor) -> list[Tensor]:
    return list(images.split(16))


def fitted_on_lists(layer: str) -> ttapca.FittedFilter:
    batches = [(tuple(part), [{"boxes": None}] * len(part)) for part in parts(IMAGES)]
    return ttapca.fit(Detector(), layer, batches)


@pytest.mark.parametrize("layer", ["entry", "conv"])
def test_a_filter_of_lists_of_images_is_that_of_their_tensor(layer: str) -> None:
    found, same = fitted_on_lists(layer), ttapca.fit(OfTensors(), layer, parts(IMAGES))
    assert found.route == same.route == "dct"
    assert found.n_samples_ == same.n_samples_ == 64
    assert torch.equal(found.mean_, same.mean_)
    assert torch.equal(found.explained_variance_, same.explained_variance_)
    assert found.inputs_ is not None
    assert same.inputs_ is not None
    assert all(map(torch.allclose, found.inputs_, same.inputs_))


@pytest.mark.parametrize("layer", ["entry", "conv"])
def test_a_detector_is_adapted_as_its_network_is(layer: str) -> None:
    model, fitted = Detector(), fitted_on_lists(layer)
    before, plain = picture_of(model), model(PIECES)
    same = ttapca.adapt(OfTensors(), "wiener", filter=fitted, order="shuffled", forgetting="online")
    adapted = ttapca.adapt(model, "wiener", filter=fitted, order="shuffled", forgetting="online")
    for part in parts(NOISY):
        found, expected = adapted(list(part)), same(part).flatten(2)
        assert [len(each) for each in found] == [2] * len(part)
        for one, two in zip(found, expected, strict=True):
            assert torch.equal(one["scores"], two.amax(1))
    assert adapted.health.images == 64
    assert adapted.health.shift == same.health.shift > 0.9
    assert len(adapted(PIECES)) == 3  # cosines take images of any size
    assert adapted.health.images == 67
    with adapted.disabled():
        unchanged = adapted(PIECES)
    for one, two in zip(unchanged, plain, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    adapted.detach()
    assert_same_picture(before, picture_of(model))


def test_targets_go_with_their_images() -> None:
    batches = [(list(part), [{}] * len(part)) for part in parts(IMAGES)]
    fitted = ttapca.fit(Detector(), "conv", batches, prepare=lambda batch: (batch[0], batch[1]))
    assert torch.equal(fitted.mean_, fitted_on_lists("conv").mean_)


def test_a_wild_image_in_a_list_leaves_no_mark() -> None:
    fitted = fitted_on_lists("conv")
    of_lists = ttapca.adapt(Detector(), "wiener", filter=fitted, forgetting="online")
    same = ttapca.adapt(OfTensors(), "wiener", filter=fitted, forgetting="online")
    wild = torch.cat([NOISY[:2], 255 * NOISY[2:3]])
    for adapted, given in ((of_lists, list(wild)), (same, wild)):
        with pytest.warns(InputRangeWarning, match="far outside"):
            adapted(given)
    assert of_lists.health.implausible == 1
    assert of_lists.health.to_dict() == same.health.to_dict()


def test_nan_in_a_list_is_named() -> None:
    broken = [*parts(IMAGES), torch.full_like(IMAGES[:4], torch.nan)]
    with pytest.raises(NonFiniteError, match="infinity in the data at batch 4"):
        ttapca.fit(Detector(), "conv", [(list(part), None) for part in broken])


@pytest.mark.parametrize("method", ["wiener", "tent"])
def test_a_model_of_dicts(method: Any) -> None:
    model = OfDicts()
    batches = [{"id": "a name", "pixel_values": part} for part in parts(IMAGES)]
    fitted = ttapca.fit(model, "conv", batches, prepare=lambda batch: (batch,))
    same = ttapca.fit(OfTensors(), "conv", parts(IMAGES))
    assert torch.equal(fitted.mean_, same.mean_)
    before, plain = picture_of(model), model({"pixel_values": NOISY})
    options = {"filter": fitted} if method == "wiener" else {}
    adapted = ttapca.adapt(model, method, forgetting="online", **options)
    logits = adapted({"pixel_values": NOISY, "id": "a name"})
    assert logits.shape == (64, 5)
    assert not torch.equal(logits, plain)
    if method == "wiener":
        assert adapted.health.images == 64
    with torch.inference_mode():
        inside = {"pixel_values": NOISY.clone()}
    adapted(inside)
    with adapted.disabled():
        assert torch.equal(adapted({"pixel_values": NOISY}), plain)
    adapted.detach()
    assert_same_picture(before, picture_of(model))


def test_an_empty_list_is_nothing_to_learn_from() -> None:
    adapted = ttapca.adapt(OfDicts(), "bn")
    assert adapted({"pixel_values": NOISY[:0]}).shape == (0, 5)
