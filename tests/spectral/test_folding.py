from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import DensePCA, images
from ttapca.spectral.affine import LinearPart, is_affine

AFFINE = {
    "conv2d": (nn.Conv2d(3, 8, 3, padding=1), (3, 5, 5)),
    "conv2d no bias": (nn.Conv2d(3, 8, 3, padding=1, bias=False), (3, 5, 5)),
    "conv2d groups": (nn.Conv2d(4, 12, 3, padding=1, groups=2), (4, 4, 4)),
    "conv2d stride": (nn.Conv2d(2, 16, 3, stride=2, padding=1), (2, 6, 6)),
    "conv2d dilation": (nn.Conv2d(2, 9, 3, padding=2, dilation=2), (2, 5, 5)),
    "conv2d same": (nn.Conv2d(2, 6, (3, 1), padding="same"), (2, 5, 4)),
    "conv2d reflect": (nn.Conv2d(2, 6, 3, padding=1, padding_mode="reflect"), (2, 5, 5)),
    "conv2d circular": (nn.Conv2d(2, 6, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
    "conv1d": (nn.Conv1d(3, 7, 5, padding=2), (3, 9)),
    "conv3d": (nn.Conv3d(2, 5, 3, padding=1), (2, 3, 3, 3)),
    "linear": (nn.Linear(11, 30), (11,)),
    "linear on tokens": (nn.Linear(4, 9), (6, 4)),
    # Rows of the input that the kernel steps over are null directions of W.
    "conv2d skips pixels": (nn.Conv2d(3, 40, 1, stride=2), (3, 5, 5)),
}


def network(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return nn.Sequential(layer, nn.Flatten()).to(dtype)


def filtered(model: nn.Module, data: Tensor, test: Tensor, route: str, kept: int | None) -> Tensor:
    fitted = ttapca.fit(model, "0", data, kept, route=route)  # type: ignore[arg-type]
    attachment = ttapca.attach(model, fitted, "relu", initial=0.3)
    with torch.no_grad():
        output: Tensor = model(test)
    attachment.detach()
    return output


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize("kept", [None, 7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_folded_equals_unfolded(
    name: str, kept: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    layer, shape = AFFINE[name]
    model = network(layer, dtype)
    data, test = (images(n, seed=n, shape=shape).to(dtype) for n in (200, 20))
    folded, exact = (filtered(model, data, test, route, kept) for route in ("folded", "exact"))
    assert float((folded - exact).abs().max() / exact.abs().max()) < tolerance


@pytest.mark.parametrize("name", AFFINE)
def test_folded_equals_a_dense_svd(name: str) -> None:
    layer, shape = AFFINE[name]
    model = network(layer, torch.float64)
    data = images(200, shape=shape)
    with torch.no_grad():
        dense = DensePCA(layer(data))
        test = images(20, seed=9, shape=shape)
        plain = layer(test)
    fitted = ttapca.fit(model, "0", data, 6)
    assert fitted.basis.at_input
    assert fitted.output_shape == tuple(plain.shape[1:])
    np.testing.assert_allclose(fitted.singular_values_, dense.singular_values[:6], rtol=1e-9)
    np.testing.assert_allclose(fitted.mean_, dense.mean, atol=1e-10)
    variance = float(dense.singular_values[:6] @ dense.singular_values[:6])
    total = float(dense.singular_values @ dense.singular_values)
    assert float(fitted.explained_variance_ratio_.sum()) == pytest.approx(variance / total)
    attachment = ttapca.attach(model, fitted, "relu", initial=0.3)
    relative = dense.singular_values[:6] / dense.singular_values[0]
    expected = dense.filter(plain, relative / (relative + 0.3))
    with torch.no_grad():
        torch.testing.assert_close(layer(test), expected, rtol=0, atol=1e-10)
    attachment.detach()


def test_folded_basis_has_the_signs_of_the_output_space() -> None:
    layer, shape = AFFINE["conv2d"]
    model = network(layer, torch.float64)
    data = images(200, shape=shape)
    folded, exact = (ttapca.fit(model, "0", data, 10, route=route) for route in ("folded", "exact"))
    columns = LinearPart(layer, shape).apply(folded.basis.from_components.T).T
    torch.testing.assert_close(columns, exact.basis.to_components, rtol=0, atol=1e-8)


def test_rank_deficient_weights_drop_their_null_directions() -> None:
    layer = nn.Conv2d(3, 8, 1)
    model = network(layer, torch.float64)
    with torch.no_grad():
        layer.weight[:, 2] = layer.weight[:, 0] * 2  # the third colour says nothing new
    data = images(400, shape=(3, 4, 4))
    fitted = ttapca.fit(model, "0", data)
    assert fitted.n_components_ == 2 * 16
    attachment = ttapca.attach(model, fitted)
    with torch.no_grad(), attachment.disabled():
        plain = model(data)
    with torch.no_grad():
        # All components with unit gains: what the layer can see is untouched.
        torch.testing.assert_close(model(data), plain, rtol=0, atol=1e-9)
    attachment.detach()


def test_badly_conditioned_weights_stay_exact() -> None:
    layer = nn.Linear(6, 40)
    model = network(layer, torch.float64)
    with torch.no_grad():
        layer.weight[:, 5] = layer.weight[:, 4] * (1 + 1e-5)
    data = images(300, shape=(6,))
    test = images(30, seed=4, shape=(6,))
    folded, exact = (filtered(model, data, test, route, 5) for route in ("folded", "exact"))
    torch.testing.assert_close(folded, exact, rtol=0, atol=1e-9)


def test_a_layer_of_zeros_is_constant() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(ttapca.errors.NotEnoughDataError, match="same output for all 40 samples"):
        ttapca.fit(model, "0", images(40, shape=(3,)).float())


def test_what_counts_as_affine() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) ** 2

    assert not is_affine(Scaled(2, 3))
    assert not is_affine(nn.BatchNorm2d(3))
    hooked = nn.Linear(2, 3)
    handle = hooked.register_forward_hook(lambda module, args, output: output.relu())
    assert not is_affine(hooked)
    handle.remove()
    assert is_affine(hooked)
