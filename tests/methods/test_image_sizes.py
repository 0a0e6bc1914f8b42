"""One adapter, images of several sizes: fully convolutional networks with a filter of cosines."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import left_untouched, natural, salted
from ttapca.errors import ShapeError
from ttapca.methods import MethodName
from ttapca.spectral.filter import SpectralFilter

SIZES = ((20, 20), (16, 16), (28, 24))


def fully_convolutional() -> nn.Module:
    """A random network with BatchNorm that averages over pixels."""
    generator = torch.Generator().manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    ]
    network = nn.Sequential(*layers).double().eval()
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4)
    return network


def noisy(x: Tensor, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def acting(adapted: ttapca.Adapter) -> SpectralFilter:
    return next(part for part in adapted.surfaces.modules() if isinstance(part, SpectralFilter))


SOURCE = natural(200, SIZES[0])


@functools.cache
def source_filter(layer: str = "0") -> ttapca.FittedFilter:
    with torch.random.fork_rng(devices=[]):
        return ttapca.fit(fully_convolutional(), layer, SOURCE, route="dct")


@pytest.mark.parametrize(
    ("method", "layer"),
    [("wiener", "0"), ("wiener", "2"), ("ttapca-relu", "0"), ("ttapca-closed", "2")],
)
def test_one_stream_has_images_of_several_sizes(method: MethodName, layer: str) -> None:
    model = fully_convolutional()
    with left_untouched(model, SOURCE[:2]):
        adapted = ttapca.adapt(model, method, filter=source_filter(layer), forgetting="online")
        for size in SIZES * 2:
            x = noisy(natural(12, size, seed=5))
            found = adapted(x)
            with adapted.disabled():
                assert not torch.allclose(found, model(x))
            assert acting(adapted).gains().shape == (source_filter(layer).n_components_,)
        assert adapted.skipped == 0
        state = copy.deepcopy(adapted.state_dict())
        wide = noisy(natural(12, (18, 40), seed=9))
        expected = adapted(wide)
        adapted.detach()
    # The state goes on at any size, bit for bit.
    twin = ttapca.adapt(model, method, filter=source_filter(layer), forgetting="online")
    twin.load_state_dict(state)
    assert torch.equal(twin(wide), expected)


@pytest.mark.parametrize("size", SIZES, ids=str)
@torch.no_grad()
def test_noise_is_reduced_and_clean_images_are_left_alone(size: tuple[int, int]) -> None:
    clean = natural(40, size, seed=7)
    adapted = ttapca.adapt(fully_convolutional(), "wiener", filter=source_filter(), outliers=False)
    adapted(clean)
    assert adapted.health.shift == 0
    torch.testing.assert_close(acting(adapted)(clean), clean, rtol=0, atol=0.05)
    adapted(noisy(clean))
    assert adapted.health.shift > 0.5
    left = acting(adapted)(noisy(clean)) - clean
    assert float(left.square().mean()) < 0.3 * float((noisy(clean) - clean).square().mean())
    assert adapted.health.p_value < 0.01


def test_outliers_are_replaced_and_principal_components_take_one_size() -> None:
    model = fully_convolutional()
    with ttapca.adapt(model, "wiener", filter=source_filter()) as adapted:
        for size in SIZES:
            clean = natural(40, size, seed=7)
            adapted(clean)
            usual = adapted.health.outliers
            adapted(salted(clean, 0.06))
            assert adapted.health.outliers > usual + 0.02
    folded = ttapca.fit(model, "0", SOURCE, 20, route="folded")
    with ttapca.adapt(model, "wiener", filter=folded) as adapted:
        assert adapted.health.outliers is not None  # it looks for them, too
        with pytest.raises(ShapeError, match=r"\(3, 20, 20\); found \(3, 16, 16\).*route=\"dct\""):
            adapted(natural(4, (16, 16)))
        assert adapted(SOURCE[:4]).shape == (4, 4)


def test_everything_may_be_made_in_inference_mode() -> None:
    x = noisy(natural(12, (28, 24), seed=4))
    expected = ttapca.adapt(fully_convolutional(), "wiener", filter=source_filter())(x)
    with torch.inference_mode():
        model = fully_convolutional()
        with ttapca.adapt(model, "wiener", filter=source_filter()) as adapted:
            assert torch.equal(adapted(x), expected)
        attachment = ttapca.attach(model, source_filter(), "relu")
        for batch in (x, SOURCE[:4]):
            assert model(batch).shape == (len(batch), 4)
        attachment.detach()


@torch.no_grad()
def test_exported_and_compiled_models_take_the_size_they_were_made_for() -> None:
    model, x = fully_convolutional(), noisy(natural(12, (16, 16), seed=4))
    adapted = ttapca.adapt(model, "wiener", filter=source_filter(), forgetting="online")
    adapted(x)
    program = torch.export.export(adapted, (x,)).module()
    with adapted.disabled():
        plain = model(x)
    assert not torch.allclose(program(x), plain)
    adapted.detach()
    attachment = ttapca.attach(model, source_filter(), "relu", initial=0.3)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    attachment.detach()
