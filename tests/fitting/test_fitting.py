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
    InputTypeError,
    LayerNotFoundError,
    LayerOutputError,
    NonFiniteError,
    NotEnoughDataError,
    OptionError,
    ShapeError,
)
from ttapca.fitting.source_statistics import KEPT_PARTS, KEPT_SAMPLES, MEASURED

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
    model.fc.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    many = DATA.repeat(20, 1, 1, 1)  # 3,000 samples
    ttapca.fit(model, "conv1", many.split(100), 1.0)  # all: nothing is dropped, nothing compared
    # The probe, which has to see whether a layer is called twice, what is measured by class, and at
    # most eight parts of batches as they are and mirrored.
    assert sum(calls) <= 2 + (MEASURED + 3) + 2 * KEPT_PARTS * KEPT_SAMPLES


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


class Odd(nn.Module):
    """Layers that cannot be filtered."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sometimes, self.large = nn.Linear(4, 4), nn.Linear(4, 4)
        self.pair, self.total = Returns(lambda x: (x, x)), Returns(torch.sum)
        with torch.no_grad():
            self.large.weight.mul_(1e38)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sometimes(x) if len(x) != 7 else x
        return self.twice(self.twice(x)) + self.pair(x)[0] + self.total(x) + self.large(x)


class Returns(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.forward = function


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        ("twice", LayerOutputError, "`twice` is called 2 times"),
        ("unused", LayerOutputError, "`unused` is never called"),
        ("pair", LayerOutputError, "`pair` returned a tuple"),
        ("total", LayerOutputError, r"`total` returned a tensor of shape \(\)"),
        ("sometimes", LayerOutputError, "`sometimes` was not called"),
        ("large", NonFiniteError, "in the output of `large` at batch 1"),
        ("unusd", LayerNotFoundError, r"no layer `unusd`\. Did you mean `unused"),
        ("zzz", LayerNotFoundError, r"There are: `twice`, `unused`"),
        ("", LayerNotFoundError, "no layer ``"),
    ],
)
def test_layers_that_cannot_be_filtered(layer: str, error, message: str) -> None:
    model = Odd()
    x = images(47, shape=(4,)).float()
    x[:20] *= 1e-3
    x[20:] *= 100
    with left_untouched(model, x[:5]), pytest.raises(error, match=message):
        ttapca.fit(model, layer, x.split(20))


@pytest.mark.parametrize(
    ("layer", "data", "n_components", "error", "message"),
    [
        ("conv1", DATA[:40], 40, NotEnoughDataError, "at least 41 samples; found 40"),
        ("conv1", DATA, 109, NotEnoughDataError, "here 108; found n_components=109"),
        ("conv1", torch.ones(40, 3, 6, 6).double(), 2, NotEnoughDataError, "same output"),
        ("conv1", [], 2, NotEnoughDataError, "needs data; found none"),
        ("conv1", DATA, -3, OptionError, "`n_components` must be a whole number"),
        ("conv1", [DATA, {"image": 1}], 2, OptionError, r"batch 1 \(counting from 0\) is a dict"),
        ("conv1", [DATA, DATA[..., :5]], 2, ShapeError, r"batch 1 gave \(3, 6, 5\)"),
        ("conv1", np.array(["a"] * 40), 2, InputTypeError, "takes numbers; found an array of <U1"),
        ("conv1", [DATA, DATA / 0], 2, NonFiniteError, "in the data at batch 1"),
        ("act", [DATA, DATA * torch.nan], 2, NonFiniteError, "in the data at batch 1"),
        ("act", [DATA, DATA[:, :2]], 2, RuntimeError, "channels"),
    ],
)
def test_data_that_cannot_serve(layer, data, n_components, error, message) -> None:
    model = small_convnet()
    with left_untouched(model, PROBE), pytest.raises(error, match=message):
        ttapca.fit(model, layer, data, n_components)


def test_fitting_where_a_filter_is_attached() -> None:
    model = small_convnet()
    attachment = ttapca.attach(model, ttapca.fit(model, "conv1", DATA, 5))
    with pytest.raises(AttachError, match="`conv1` already carries a filter"):
        ttapca.fit(model, "conv1", DATA, 5)
    attachment.detach()
    assert ttapca.fit(model, "conv1", DATA, 5).basis.at_input
