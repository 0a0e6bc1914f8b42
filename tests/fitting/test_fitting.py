from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import DensePCA, images, left_untouched, small_convnet
from ttapca.errors import (
    AttachError,
    LayerNotFoundError,
    LayerOutputError,
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
)

DATA = images(150)
PROBE = images(4, seed=8)


def pairs() -> Iterator[tuple[Tensor, int]]:
    for batch in DATA.split(40):
        yield batch, len(batch)


class Reiterable:
    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([[batch, batch] for batch in DATA.split(40)])


@pytest.mark.parametrize(
    "data",
    [DATA, list(DATA.split(40)), pairs(), Reiterable(), iter(DATA.split(7))],
    ids=["tensor", "list", "generator of pairs", "loader", "iterator"],
)
def test_any_source_of_data(data: object) -> None:
    model = small_convnet()
    with left_untouched(model, PROBE):
        fitted = ttapca.fit(model, layer="conv1", data=data, n_components=10)
    with torch.no_grad():
        dense = DensePCA(model.conv1(DATA))
    assert fitted.n_samples_ == 150
    np.testing.assert_allclose(fitted.singular_values_, dense.singular_values[:10], rtol=1e-9)


def test_training_flags_are_put_back_and_buffers_not_moved() -> None:
    model = small_convnet().train()
    model.bn2.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ttapca.fit(model, "fc", DATA, 2)
    assert model.training
    assert model.bn1.training
    assert not model.bn2.training
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_callers_without_gradients(mode) -> None:
    model = small_convnet()
    expected = ttapca.fit(model, "conv1", DATA, 5)
    with mode():
        fitted = ttapca.fit(model, "conv1", DATA.clone(), 5)
    assert torch.equal(fitted.basis.to_components, expected.basis.to_components)
    assert not fitted.basis.to_components.is_inference()


def test_only_the_part_up_to_the_layer_runs() -> None:
    model = small_convnet()
    calls = []
    model.fc.register_forward_hook(lambda *_: calls.append(1))
    ttapca.fit(model, "conv1", DATA.split(10), 1.0)  # all: nothing is dropped, nothing compared
    assert len(calls) == 1  # the probe, which has to see whether a layer is called twice


def test_progress_wraps_the_batches() -> None:
    seen = []

    def progress(batches):
        for batch in batches:
            seen.append(len(batch))
            yield batch

    ttapca.fit(small_convnet(), "conv1", DATA.split(50), 5, progress=progress)
    assert seen == [50, 50, 50]
    with pytest.raises(OptionError, match=r"`progress` is a function.*found True"):
        ttapca.fit(small_convnet(), "conv1", DATA, progress=True)  # type: ignore[arg-type]


def test_truncated_equals_a_smaller_fit() -> None:
    model = small_convnet()
    large, small = ttapca.fit(model, "conv1", DATA, 20), ttapca.fit(model, "conv1", DATA, 6)
    cut = large.truncated(6)
    torch.testing.assert_close(
        cut.basis.to_components, small.basis.to_components, rtol=0, atol=1e-12
    )
    assert torch.equal(cut.singular_values_, small.singular_values_)
    assert cut.n_components_ == 6
    for number in (0, 21):
        with pytest.raises(NotEnoughDataError, match=f"20 components.*found {number}"):
            large.truncated(number)


# Bad input: each case leaves the model as it was.


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.pair = Pair()
        self.total = Total()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) + self.pair(x)[0] + self.total(x)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("layer", "`layer` is called 2 times"),
        ("unused", "`unused` is never called"),
        ("pair", "`pair` returned a tuple"),
        ("total", r"`total` returned a tensor of shape \(\)"),
    ],
)
def test_layers_that_cannot_be_filtered(layer: str, message: str) -> None:
    model = Twice()
    x = images(20, shape=(4,)).float()
    with left_untouched(model, x), pytest.raises(LayerOutputError, match=message):
        ttapca.fit(model, layer, x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("conv3", r"no layer `conv3`\. Did you mean `conv"),
        ("zzz", r"There are: `conv1`, `bn1`"),
        ("", "no layer ``"),
    ],
)
def test_unknown_layers(layer: str, message: str) -> None:
    model = small_convnet()
    with left_untouched(model, PROBE), pytest.raises(LayerNotFoundError, match=message):
        ttapca.fit(model, layer, DATA)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", ["conv1", "act"])
def test_data_that_are_not_finite(layer: str, bad: float) -> None:
    model = small_convnet()
    data = DATA.clone()
    data[73] = bad
    with (
        left_untouched(model, PROBE),
        pytest.raises(NonFiniteError, match="in the data at batch 7"),
    ):
        ttapca.fit(model, layer, data.split(10))


def test_activations_that_are_not_finite() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    with torch.no_grad():
        model[0].weight.mul_(1e38)
    data = images(40, shape=(4,)).float()
    data[:30] *= 1e-3
    data[30:] *= 100
    with (
        left_untouched(model, data[:5]),
        pytest.raises(NonFiniteError, match="in the output of `1` at batch 3"),
    ):
        ttapca.fit(model, "1", data.split(10))


@pytest.mark.parametrize(
    ("data", "n_components", "error", "message"),
    [
        (DATA[:40], 40, NotEnoughDataError, "at least 41 samples; found 40"),
        (DATA, 109, NotEnoughDataError, "here 108; found n_components=109"),
        (torch.full((40, 3, 6, 6), 0.25).double(), 2, NotEnoughDataError, "same output"),
        ([], 2, NotEnoughDataError, "needs data; found none"),
        (DATA, -3, OptionError, "`n_components` must be a whole number"),
        ([DATA, {"image": DATA}], 2, OptionError, r"batch 1 \(counting from 0\) is a dict"),
        ([DATA, images(9, shape=(3, 8, 8))], 2, ShapeError, r"batch 1 gave \(3, 8, 8\)"),
        (DATA.numpy(), 2, OptionError, "found a numpy array. Give torch.from_numpy"),
    ],
    ids=["few", "rank", "constant", "none", "option", "dict", "shape", "numpy"],
)
def test_data_that_cannot_serve(data, n_components, error, message) -> None:
    model = small_convnet()
    with left_untouched(model, PROBE), pytest.raises(error, match=message):
        ttapca.fit(model, "conv1", data, n_components)


def test_a_model_that_fails_half_way_is_left_untouched() -> None:
    model = small_convnet()
    with left_untouched(model, PROBE), pytest.raises(RuntimeError, match="channels"):
        ttapca.fit(model, "act", [DATA, torch.zeros(2, 5, 6, 6).double()])


def test_fitting_where_a_filter_is_attached() -> None:
    model = small_convnet()
    fitted = ttapca.fit(model, "conv1", DATA, 5)
    attachment = ttapca.attach(model, fitted)
    with pytest.raises(AttachError, match="`conv1` already carries a filter"):
        ttapca.fit(model, "conv1", DATA, 5)
    attachment.detach()
    assert ttapca.fit(model, "conv1", DATA, 5).basis.at_input


def test_a_layer_that_is_skipped_for_some_batches() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if len(x) != 7 else x

    x = images(27, shape=(4,)).float()
    with pytest.raises(LayerOutputError, match="`layer` was not called"):
        ttapca.fit(Sometimes(), "layer", x.split(20))
