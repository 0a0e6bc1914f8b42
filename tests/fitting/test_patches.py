"""Filters of transformers: at the patch embedding, which does not fold, and at layers of tokens."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import DensePCA, images, left_untouched
from small_networks import PatchTransformer, smooth_images
from ttapca.errors import OutOfMemoryError
from ttapca.fitting.fit import plan_fit
from ttapca.spectral.basis_choice import acts_on_input
from ttapca.spectral.folded import LinearPart, is_affine
from ttapca.support.process import resident_memory

IMAGE = (3, 32, 32)


@pytest.mark.parametrize(
    ("layer", "given", "returned", "data", "folds"),
    [
        (nn.Conv2d(3, 48, 4, stride=4), IMAGE, (48, 8, 8), IMAGE, True),  # as many numbers
        (nn.Conv2d(3, 9, 4, stride=4), IMAGE, (9, 8, 8), IMAGE, True),  # fewer
        (nn.Conv2d(3, 64, 4, stride=4), IMAGE, (64, 8, 8), None, True),  # more
        (nn.Conv2d(3, 48, 4, stride=4), IMAGE, (48, 8, 8), None, False),
        (nn.Conv2d(3, 48, 4, stride=4), IMAGE, (48, 8, 8), (3, 64, 64), False),  # was pooled
        (nn.Conv2d(12, 9, 4, stride=4), (12, 32, 32), (9, 8, 8), (12, 32, 32), False),
        (nn.Linear(48, 48), (64, 48), (64, 48), IMAGE, False),
        (nn.Linear(48, 48), (64, 48), (64, 48), (64, 48), False),  # patches, but no image
        (nn.Linear(48, 144), (64, 48), (64, 144), IMAGE, True),
        (nn.Identity(), IMAGE, IMAGE, IMAGE, True),
        (nn.Identity(), (8, 4, 4), (8, 4, 4), IMAGE, False),
        (nn.Unfold(4, stride=4), IMAGE, (48, 64), IMAGE, True),
        (nn.PixelUnshuffle(4), IMAGE, (48, 8, 8), IMAGE, True),
        (nn.BatchNorm2d(3), IMAGE, IMAGE, IMAGE, False),
        (nn.Conv2d(3, 48, 4, stride=4), None, (48, 8, 8), IMAGE, False),
    ],
)
def test_which_side_of_a_layer_is_filtered(layer, given, returned, data, folds: bool) -> None:
    assert acts_on_input(layer, given, returned, data) == folds


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Unfold(2, stride=2), nn.PixelUnshuffle(2)])
def test_layers_that_move_numbers_are_affine(layer: nn.Module) -> None:
    assert is_affine(layer)
    linear, x = LinearPart(layer, (3, 4, 4)), images(5, shape=(3, 4, 4))
    torch.testing.assert_close(linear.apply(x), layer(x).flatten(1))
    torch.testing.assert_close(linear.gram_rows(x.flatten(1)), x.flatten(1))  # W^T W is I


@pytest.mark.parametrize("width", [4, 12])  # fewer outputs than inputs, and as many
def test_small_images_have_the_pca_of_the_embedding(width: int) -> None:
    model = PatchTransformer(6, 2, width).double()
    data, x = images(200), images(7, seed=4)
    fitted = ttapca.fit(model, "embed", data)
    with torch.no_grad():
        dense = DensePCA(model.embed(data))
    count = 9 * width
    assert (fitted.route, fitted.basis.at_input, fitted.n_components_) == ("folded", True, count)
    np.testing.assert_allclose(fitted.singular_values_, dense.singular_values[:count], rtol=1e-8)
    # Learned gains do to the images what they would do to the embedding.
    outcomes = []
    for each in (fitted, ttapca.fit(model, "embed", data, route="exact")):
        attachment = ttapca.attach(model, each, "relu", initial=0.3)
        outcomes.append(model(x).detach())
        attachment.detach()
    torch.testing.assert_close(outcomes[0], outcomes[1])
    gains = np.random.default_rng(0).uniform(0, 2, count)
    spectral = fitted.spectral_filter(dtype=torch.float64)
    parts = spectral.basis.project(x.flatten(1) - fitted.center_) * torch.from_numpy(gains)
    changed = spectral.basis.add_rebuilt(fitted.center_, parts).view_as(x)
    with torch.no_grad():
        torch.testing.assert_close(model.embed(changed), dense.filter(model.embed(x), gains))


@pytest.mark.parametrize("width", [16, 48])
def test_an_embedding_that_does_not_fold_takes_cosines_of_the_images(
    width: int, tmp_path: Path
) -> None:
    model, data = PatchTransformer(32, 4, width), smooth_images(200, 32)
    plan = plan_fit(model, "embed", data)
    with left_untouched(model, data[:3]):
        fitted = ttapca.fit(model, "embed", data)
    assert (plan.route, fitted.route) == ("dct", "dct")
    assert (fitted.shape, fitted.basis.of_input) == (IMAGE, True)
    assert fitted.outliers_ is not None
    assert fitted.textures_ is not None
    assert fitted.layer_norm_.keys() == {"block.norm1", "block.norm2", "norm"}
    assert fitted.classes_.layers.keys() == fitted.layer_norm_.keys()
    fitted.save(tmp_path / "f")
    size = sum(file.stat().st_size for file in (tmp_path / "f").iterdir())
    assert size < 3e5
    card = (tmp_path / "f" / "README.md").read_text()
    assert "Cosines of the input of layer `embed`" in card
    assert "of 3,072 inputs keep" in card
    # A filtered network is the network of filtered images.
    loaded, x = ttapca.load(tmp_path / "f"), smooth_images(6, 32, seed=4)
    attachment = ttapca.attach(model, loaded, "exponential", initial=0.1)
    with torch.no_grad():
        found, filtered = model(x), attachment.filter(x)
        attachment.detach()
        torch.testing.assert_close(found, model(filtered))


def test_the_closed_form_repairs_what_a_transformer_is_given() -> None:
    model = PatchTransformer(32, 4, 48)
    fitted = ttapca.fit(model, "embed", smooth_images(300, 32))
    clean, generator = smooth_images(40, 32, seed=4), torch.Generator().manual_seed(5)
    salted = torch.where(torch.rand(clean.shape, generator=generator) < 0.05, 1.0, clean)
    noisy = clean + 0.2 * torch.randn(clean.shape, generator=generator)
    with left_untouched(model, clean):
        for name, spoilt in (("salt", salted), ("noise", noisy), ("clean", clean)):
            seen: list[Tensor] = []
            with ttapca.adapt(model, "wiener", filter=fitted) as adapted:
                handle = model.embed.register_forward_hook(
                    lambda *call, to=seen: to.append(call[2])
                )
                adapted(spoilt)
                handle.remove()
                assert (adapted.health.shift > 0.9) == (name != "clean")
                assert (adapted.health.outliers > 0.04) == (name == "salt")
            with torch.no_grad():
                truth, plain = model.embed(clean), model.embed(spoilt)
            away = (seen[0] - truth).norm()
            if name == "clean":
                assert away < 1e-5 * truth.norm()
            else:
                assert away < 0.5 * (plain - truth).norm()


# 224 pixels: what is planned, without the work.


def photographs(count: int) -> Tensor:
    return torch.zeros(1, 3, 224, 224).expand(count, -1, -1, -1)  # takes no memory


@pytest.mark.parametrize("components", [None, 2000])
def test_the_plan_at_224_pixels(components: int | None) -> None:
    model = PatchTransformer(224, 16, 768, classes=1000)
    for count in (300, 20_000):
        plan = plan_fit(model, "embed", photographs(count), components)
        assert plan.route == "dct"
        own = plan.memory_bytes - resident_memory()  # of which earlier tests take some
        assert own < 2e9


def test_tokens_take_principal_components(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PatchTransformer(224, 16, 768, linear=True)
    for layer in ("embed", "block"):
        plan = plan_fit(model, layer, photographs(300))
        assert plan.route == "gram"
        monkeypatch.setattr("ttapca.fitting.plan.available_memory", lambda: 16 * 10**9)
        for route in ("auto", "randomised"):
            with pytest.raises(OutOfMemoryError, match=r"through an `nn\.Identity` first"):
                plan_fit(model, layer, photographs(50_000), 2000, route=route)
        monkeypatch.undo()


def test_images_may_be_filtered_in_front_of_any_network() -> None:
    inner, data = PatchTransformer(32, 4, 48, linear=True), smooth_images(120, 32)
    model = nn.Sequential(OrderedDict(images=nn.Identity(), vit=inner))
    fitted = ttapca.fit(model, "images", data)
    assert (fitted.route, fitted.shape, fitted.basis.of_input) == ("dct", IMAGE, True)
    assert fitted.outliers_ is not None
    # What the layer behind does with the images makes no difference to cosines.
    other = ttapca.fit(PatchTransformer(32, 4, 48), "embed", data)
    torch.testing.assert_close(fitted.singular_values_, other.singular_values_)
    torch.testing.assert_close(fitted.center_, other.center_)
    x = smooth_images(4, 32, seed=4)
    before = copy.deepcopy(model)(x)
    with ttapca.adapt(model, "wiener", filter=fitted, order="shuffled") as adapted:
        torch.testing.assert_close(adapted(x), before)
