"""Mistakes that users make in Python, and what they are told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import images, left_untouched, small_convnet
from ttapca.errors import InputTypeError, NotEnoughDataError, OptionError, ShapeError

DATA = images(150)
PROBE = DATA[:8]


def test_too_few_samples_are_refused() -> None:
    model, said = small_convnet(), r"at least 32 samples.*Found 31\."
    with left_untouched(model, PROBE), pytest.raises(NotEnoughDataError, match=said):
        ttapca.fit(model, "conv1", DATA[:31])
    assert ttapca.fit(model, "conv1", DATA[:32]).n_samples_ == 32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((DATA[:8] * 255).byte(), r"found a tensor of uint8. .*batch.float\(\) / 255"),
        (list(DATA[:8]), r"found a list. Make one of it with torch.stack\(list\)"),
        (DATA[:8].numpy(), r"found a numpy array. Make one with torch.from_numpy"),
    ],
    ids=["uint8", "list", "numpy"],
)
@pytest.mark.parametrize("method", ["source", "bn", "tent", "lame"])
def test_an_adapter_says_what_it_was_given(method: str, given: object, message: str) -> None:
    model = small_convnet()
    with (
        left_untouched(model, PROBE),
        ttapca.adapt(model, method) as adapted,  # type: ignore[arg-type]
        pytest.raises(InputTypeError, match=message),
    ):
        adapted(given)


@pytest.mark.parametrize("method", ["memo", "cotta"])
def test_methods_that_change_images_say_so_too(method: str) -> None:
    adapted = ttapca.adapt(small_convnet(), method, views=2)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="floating point; found a tensor of uint8"):
        adapted((PROBE * 255).byte())
    with pytest.raises(ShapeError, match="first tensor is a batch of shape"):
        adapted(list(PROBE))


def test_a_model_may_take_anything() -> None:
    """Only the model itself refuses whole numbers and lists."""

    class OfBytes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small_convnet()

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x.double() / 255)

    pixels = (DATA.clamp(0, 1) * 255).byte()
    assert ttapca.adapt(OfBytes(), "bn")(pixels[:8]).shape[0] == 8
    assert ttapca.fit(OfBytes(), "model.conv1", pixels, 5).n_samples_ == 150


def test_a_models_own_error_is_its_own() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("of mine")

    with pytest.raises(RuntimeError, match=r"^of mine$"):
        ttapca.adapt(Failing(), "source")(PROBE)


def test_fit_on_batches_that_are_dicts() -> None:
    model = small_convnet()
    batches = [{"photo": part, "label": torch.zeros(len(part))} for part in DATA.split(50)]
    with (
        left_untouched(model, PROBE),
        pytest.raises(OptionError, match=r"keys 'photo', 'label'.*prepare=lambda batch: batch\['i"),
    ):
        ttapca.fit(model, "conv1", batches, 5)
    fitted = ttapca.fit(model, "conv1", batches, 5, prepare=lambda batch: batch["photo"])
    plain = ttapca.fit(model, "conv1", DATA.split(50), 5)
    assert torch.equal(fitted.basis.to_components, plain.basis.to_components)
    assert fitted.agreement_ == plain.agreement_


class Two(nn.Module):
    """Takes images and one number for each, and has GroupNorm, which runs to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1).double()
        self.norm = nn.GroupNorm(2, 4).double()
        self.last = nn.Linear(4, 3).double()

    def forward(self, image: Tensor, light: Tensor, *, scale: float = 1.0) -> Tensor:
        x = self.norm(self.first(image * light[:, None, None, None] * scale))
        return self.last(x.mean((2, 3)))


@pytest.mark.parametrize(
    "prepare",
    [
        lambda batch: (batch[0], batch[1]),
        lambda batch: {"image": batch[0], "light": batch[1]},
    ],
    ids=["arguments", "by name"],
)
def test_fit_on_several_inputs(prepare) -> None:
    model, light = Two(), torch.linspace(0.5, 1.5, len(DATA)).double()
    batches = list(zip(DATA.split(50), light.split(50), [None] * 3, strict=True))
    with pytest.raises(InputTypeError, match=r"missing 1 required .*'light'.*\(batch\[0\], batch"):
        ttapca.fit(model, "first", batches, 5)
    fitted = ttapca.fit(model, "first", batches, 5, prepare=prepare)
    bright = ttapca.fit(
        nn.Sequential(model.first), "0", DATA * light[:, None, None, None], 5, route="folded"
    )
    assert torch.allclose(fitted.basis.to_components, bright.basis.to_components)
    assert set(fitted.group_norm_) == {"norm"}


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (DATA, {"prepare": 3}, OptionError, "`prepare` is a function from a batch"),
        (DATA, {"prepare": lambda batch: 3}, OptionError, "`prepare` must give tensors"),
        ((DATA * 255).byte(), {}, InputTypeError, "found a tensor of uint8"),
        (DATA[:, :1], {}, ShapeError, r"samples of shape \(1, 6, 6\); it does not"),
        ([[1.0, 2.0]], {}, OptionError, "is a list"),
    ],
    ids=["prepare", "nothing", "uint8", "channels", "list"],
)
def test_data_that_the_model_does_not_take(data, options, error, message) -> None:
    model = small_convnet()
    with left_untouched(model, PROBE), pytest.raises(error, match=message):
        ttapca.fit(model, "conv1", data, 5, **options)


def test_an_option_of_all_methods_is_offered() -> None:
    with pytest.raises(OptionError, match="Did you mean `forgetting`"):
        ttapca.adapt(small_convnet(), "tent", forgeting="online")
