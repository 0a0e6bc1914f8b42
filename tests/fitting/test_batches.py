"""Batches as loaders of others yield them: dicts, arrays, float64, whole numbers."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import images, small_convnet
from ttapca.errors import InputTypeError, OptionError
from ttapca.support.inputs import arguments_in, as_tensor, source_batches

DATA = images(150).float()
LABELS = torch.zeros(50)


def convnet() -> nn.Module:
    return small_convnet().float()


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "data",
    [
        DATA.numpy(),
        read_only(DATA.numpy().copy()),
        DATA.numpy().astype(">f4"),
        DATA.double(),
        DATA.double().numpy(),
        [DATA.numpy()],
        [(part.double().numpy(), LABELS) for part in DATA.split(50)],
        [{"image": part, "label": LABELS} for part in DATA.split(50)],
        [UserDict(labels=LABELS, pixel_values=part.numpy()) for part in DATA.split(50)],
        [({"x": part}, LABELS) for part in DATA.split(50)],
    ],
    ids=[
        "array",
        "read-only array",
        "big-endian array",
        "float64",
        "array of float64",
        "batches that are arrays",
        "pairs with an array",
        "image",
        "pixel_values",
        "pairs with a dict",
    ],
)
def test_fit_takes_what_loaders_yield(data: Any) -> None:
    expected = ttapca.fit(convnet(), "conv1", DATA.split(50), 5)
    found = ttapca.fit(convnet(), "conv1", data, 5)
    torch.testing.assert_close(found.singular_values_, expected.singular_values_)
    torch.testing.assert_close(found.mean_, expected.mean_)
    assert found.n_samples_ == 150


def test_a_model_of_float64_takes_float32() -> None:
    exact = ttapca.fit(small_convnet(), "conv1", DATA.double(), 5)
    assert torch.equal(ttapca.fit(small_convnet(), "conv1", DATA, 5).mean_, exact.mean_)


class Named(nn.Module):
    """Takes arguments as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = convnet()

    def forward(
        self, pixel_values: Tensor, light: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        assert labels is None
        scale = 1 if light is None else light[:, None, None, None]
        return self.model(pixel_values * scale)


def test_arguments_by_name_and_never_the_labels() -> None:
    light = torch.linspace(0.5, 1.5, 150)
    parts = zip(DATA.split(50), light.split(50), strict=True)
    batches = [{"pixel_values": x, "light": y, "labels": LABELS, "id": 3} for x, y in parts]
    found = ttapca.fit(Named(), "model.conv1", batches, 5)
    expected = ttapca.fit(convnet(), "conv1", DATA * light[:, None, None, None], 5)
    torch.testing.assert_close(found.mean_, expected.mean_)


def test_what_is_taken_of_a_dict() -> None:
    class Needs(nn.Module):
        def forward(self, first: Any, second: Any) -> None: ...

    assert arguments_in({"second": 2, "first": 1, "y": 3}, Needs()) == {"first": 1, "second": 2}
    assert arguments_in({"first": 1, "img": 4}, Needs()) == (4,)  # one argument is missing
    assert arguments_in({"first": 1}, Needs()) is None
    assert arguments_in([], Needs()) == ()


def test_a_dict_that_nobody_understands() -> None:
    batches = [{"photo": DATA, "label": LABELS}]
    with pytest.raises(OptionError, match=r"`pixel_values`, `image`; batch 0 .*'photo', 'label'"):
        ttapca.fit(convnet(), "conv1", batches, 5)


@pytest.mark.parametrize("data", [(DATA * 255).byte().numpy(), [{"x": (DATA * 255).byte()}]])
def test_whole_numbers_are_refused_with_the_way_out(data: Any) -> None:
    with pytest.raises(InputTypeError, match=r"a tensor of uint8.*batch.float\(\) / 255"):
        ttapca.fit(convnet(), "conv1", data, 5)


def test_arrays_of_something_else() -> None:
    with pytest.raises(InputTypeError, match="takes numbers; found an array of object"):
        as_tensor(np.array([None, 1]))


@pytest.mark.parametrize("method", ["source", "bn", "tent"])
def test_an_adapter_says_what_its_model_does_not_take(method: str) -> None:
    adapted = ttapca.adapt(convnet(), method)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match=r"a tensor of float64.*batch.to\("):
        adapted(DATA[:8].double())
    with pytest.raises(InputTypeError, match=r"found a dict with the keys 'image'.*\*\*batch"):
        adapted({"image": DATA[:8]})


def test_sources_of_methods() -> None:
    given: list[Any] = [
        DATA.numpy(),
        [{"image": part, "label": LABELS} for part in DATA.numpy()[None]],
        [(DATA.numpy(), LABELS)],
    ]
    for source in given:
        assert torch.equal(torch.cat(list(source_batches(source, convnet()))), DATA)
    with pytest.raises(OptionError, match=r"dicts with an `image`; batch 0 .* is a dict"):
        list(source_batches([{"photo": DATA}], convnet()))
