from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import DensePCA, images
from ttapca.spectral.folded import LinearPart, is_affine

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


AFFINE |= {
    "rank-deficient": (nn.Conv2d(3, 8, 1), (3, 4, 4)),
    "badly conditioned": (nn.Linear(6, 40), (6,)),
}


def network(name: str) -> nn.Module:
    layer = AFFINE[name][0].double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        if name == "rank-deficient":
            layer.weight[:, 2] = layer.weight[:, 0] * 2  # the third colour says nothing new
        if name == "badly conditioned":
            layer.weight[:, 5] = layer.weight[:, 4] * (1 + 1e-5)
    return nn.Sequential(layer, nn.Flatten())


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize("kept", [None, 5])
def test_folded_equals_a_dense_svd(name: str, kept: int | None) -> None:
    model, shape = network(name), AFFINE[name][1]
    data, test = images(200, shape=shape), images(20, seed=9, shape=shape)
    with torch.no_grad():
        dense, plain = DensePCA(model[0](data)), model[0](test)
    fitted = ttapca.fit(model, "0", data, kept)
    count = fitted.n_components_
    assert fitted.basis.at_input
    assert count == (kept or np.linalg.matrix_rank(dense.matrix - dense.mean, rtol=1e-7))
    assert fitted.output_shape == tuple(plain.shape[1:])
    values = dense.singular_values[:count]
    np.testing.assert_allclose(fitted.singular_values_, values, rtol=1e-5 if kept is None else 1e-9)
    np.testing.assert_allclose(fitted.mean_, dense.mean, atol=1e-10)
    share = values @ values / (dense.singular_values @ dense.singular_values)
    assert float(fitted.explained_variance_ratio_.sum()) == pytest.approx(share)
    expected = dense.filter(plain, values / (values + 0.3 * values[0]))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
        attachment = ttapca.attach(model.to(dtype), fitted, "relu", initial=0.3)
        with torch.no_grad():
            error = (model[0](test.to(dtype)) - expected).abs().max() / expected.abs().max()
        attachment.detach()
        assert float(error) < tolerance


def test_folded_basis_has_the_signs_of_the_output_space() -> None:
    model, (layer, shape) = network("conv2d"), AFFINE["conv2d"]
    data = images(200, shape=shape)
    folded, exact = (ttapca.fit(model, "0", data, 10, route=route) for route in ("folded", "exact"))
    columns = LinearPart(layer, shape).apply(folded.basis.from_components.T).T
    torch.testing.assert_close(columns, exact.basis.to_components, rtol=0, atol=1e-8)


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
