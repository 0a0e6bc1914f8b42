"""Outliers of the source images: measured by `fit` where a filter acts on images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import scenes, small_convnet
from ttapca.spectral.image_statistics import measure

DATA = scenes(200, side=6)


@pytest.mark.parametrize("route", ["folded", "dct"])
def test_fit_measures_the_images_that_the_filter_acts_on(route: Any) -> None:
    found = ttapca.fit(small_convnet(), "conv1", DATA.split(30), route=route).outliers_
    assert found is not None
    assert torch.equal(found, measure(DATA))


class Doubled(nn.Module):
    """A network with a step before its first layer, as many have for normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.network = small_convnet()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(2 * x)


def test_fit_measures_at_the_layer_in_the_units_there() -> None:
    found = ttapca.fit(Doubled(), "network.conv1", DATA).outliers_
    assert found is not None
    assert torch.equal(found, measure(2 * DATA))


def test_fit_measures_nothing_where_no_image_is_filtered() -> None:
    model = small_convnet()
    for layer, options in (("act", {}), ("conv2", {}), ("conv1", {"route": "exact"})):
        assert ttapca.fit(model, layer, DATA, 10, **options).outliers_ is None  # type: ignore[arg-type]
    wide = scenes(100, side=7)[..., :6, :]  # the layer is given another shape than the model
    cut = nn.Sequential(nn.AvgPool2d((1, 2), stride=1), *small_convnet().children()).eval()
    assert ttapca.fit(cut, "1", wide, 10).outliers_ is None
