"""Statistics of LayerNorm's channels: measured, mixed, and taken away again."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from known_shifts import followed, passed
from oracles import left_untouched
from ttapca.adaptation.surfaces import StreamStatistics
from ttapca.errors import AttachError, OptionError, SavedFilterError
from ttapca.fitting.channel_statistics import SourceChannels
from ttapca.fitting.model_inputs import ModelInputs
from ttapca.fitting.store import read_folder, write_folder
from ttapca.spectral.class_plan import LayerClasses
from ttapca.spectral.source_classes import PairStatistic


class Transformer(nn.Module):
    """Patches, one block with LayerNorm before attention, the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.patches = nn.Conv2d(2, 8, 3, stride=3)
            self.block = nn.TransformerEncoderLayer(
                8, 2, 12, dropout=0.0, batch_first=True, norm_first=True
            )
            self.norm = nn.LayerNorm(8)
            self.fc = nn.Linear(8, 5)
            for norm in (self.block.norm1, self.block.norm2, self.norm):
                nn.init.uniform_(norm.weight, 0.5, 2.0)
                nn.init.uniform_(norm.bias, -1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.fc(self.norm(self.block(tokens)).mean(1))


@pytest.fixture
def model() -> nn.Module:
    return Transformer().eval()


def images(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(n, 2, 9, 9, generator=generator)
    return rough + 2 * rough.mean((2, 3), keepdim=True) + torch.tensor([[[0.5]], [[-1.0]]])


def shifted(n: int) -> Tensor:
    return images(n, seed=1) + torch.randn(n, 2, 9, 9, generator=torch.Generator().manual_seed(2))


def rows(x: Tensor, eps: float = 1e-5) -> np.ndarray:
    """LayerNorm without scale and shift, token by token."""
    found = x.detach().double().numpy().copy()
    for image in found:
        for token in image.reshape(-1, found.shape[-1]):
            token[:] = (token - token.mean()) / np.sqrt(((token - token.mean()) ** 2).mean() + eps)
    return found


def inputs_of(model: nn.Module, path: str, x: Tensor) -> Tensor:
    """What a layer of the untouched model is given; a hook keeps torch off its fast path."""
    seen: list[Tensor] = []
    layer = model.get_submodule(path)
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model(x)
    handle.remove()
    return seen[0]


PATHS = ["block.norm1", "block.norm2", "norm"]
WITH = ttapca.Mixture(layer_norm=True)


def mixed_layers(model: nn.Module, fitted: ttapca.FittedFilter, **options: Any) -> dict[str, float]:
    """The weight of every layer whose statistics `wiener` mixes, by path."""
    with ttapca.adapt(model, "wiener", filter=fitted, **options) as adapted:
        surfaces = [each for each in adapted.surfaces if isinstance(each, StreamStatistics)]
    return {
        layer.path: weight
        for surface in surfaces
        for layer, weight in zip(surface.layers, surface.weights.tolist(), strict=True)
    }


def mixes_tokens(model: nn.Module, fitted: ttapca.FittedFilter, **options: Any) -> bool:
    """Whether `wiener` mixes the statistics of LayerNorm: of all such layers, or of none."""
    found = list(mixed_layers(model, fitted, **options))
    assert found in ([], PATHS)
    return bool(found)


def test_by_default_they_are_mixed_where_classes_are_looked_at(model: nn.Module) -> None:
    unsure = ttapca.fit(model, "patches", images(300), 20)
    classes = unsure.classes_
    assert classes is not None
    assert classes.pairs is None  # its classes cannot be told apart, so nobody looks
    assert not mixes_tokens(model, unsure)
    pairs = PairStatistic({"norm": torch.eye(8)}, 1, 4, -1.0, 1.0, 0.5)
    fitted = dataclasses.replace(unsure, classes_=dataclasses.replace(classes, pairs=pairs))
    assert mixes_tokens(model, fitted)
    assert not mixes_tokens(model, fitted, statistics="source")
    assert not mixes_tokens(model, fitted, order="shuffled")
    assert mixes_tokens(model, fitted, order="auto")
    assert mixes_tokens(model, fitted, order="shuffled", statistics=WITH)
    without = ttapca.Mixture(layer_norm=False)
    assert not mixes_tokens(model, fitted, order="auto", statistics=without)
    older = dataclasses.replace(fitted, layer_norm_={})
    assert not mixes_tokens(model, older, order="auto")
    with pytest.raises(OptionError, match="`layer_norm` would have no effect: it needs a filter"):
        mixes_tokens(model, older, statistics=WITH)


def test_fitting_measures_the_channels(model: nn.Module) -> None:
    data = images(300)
    fitted = ttapca.fit(model, "patches", data, 20)
    assert list(fitted.layer_norm_) == PATHS
    assert fitted.group_norm_ == {}
    for path in PATHS:
        values = rows(inputs_of(model, path, data)).reshape(-1, 8)
        mean, var = fitted.layer_norm_[path].double()
        np.testing.assert_allclose(mean, values.mean(0), atol=1e-5)
        np.testing.assert_allclose(var, values.var(0), rtol=1e-4)


def test_fitting_measures_what_classes_do_to_them(model: nn.Module) -> None:
    data = images(300)
    classes = ttapca.fit(model, "patches", data, 20).classes_
    assert classes is not None
    with torch.no_grad():
        shares = model(data).double().softmax(1).numpy()
    values = rows(inputs_of(model, "norm", data))
    of_class = sum(share * image.mean(0) for share, image in zip(shares[:, 3], values, strict=True))
    expected = of_class / shares[:, 3].sum() - values.mean((0, 1))
    found, _ = LayerClasses(classes, {"norm": 8}).corrections(torch.eye(5)[3:4])
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(40, 8), (40, 6, 8), (40, 3, 2, 8)])
def test_a_mixture_by_hand(shape: tuple[int, ...]) -> None:
    layer = nn.LayerNorm(8)
    x = torch.rand(shape, generator=torch.Generator().manual_seed(3)) ** torch.arange(1, 9)
    source_mean, source_var = np.linspace(-1, 1, 8), np.linspace(0.5, 2, 8)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0, 2, 8))
        layer.bias.copy_(torch.linspace(-1, 0, 8))
    known = torch.tensor(np.stack([source_mean, source_var])).float()
    _, stream = followed(nn.Sequential(layer), ends=(0.3, 0.3), source={"0": known})
    values = rows(x)
    flat = values.reshape(-1, 8)
    mean = 0.3 * flat.mean(0) + 0.7 * source_mean
    var = 0.3 * flat.var(0) + 0.7 * source_var + 0.21 * (flat.mean(0) - source_mean) ** 2
    expected = (values - mean) * np.sqrt(source_var / var) + source_mean
    expected = expected * np.linspace(0, 2, 8) + np.linspace(-1, 0, 8)
    stream.start_batch(len(x))
    np.testing.assert_allclose(layer(x).detach(), expected, atol=1e-4)  # with gradients
    with torch.no_grad():
        np.testing.assert_allclose(layer(x), expected, atol=1e-4)
    stream.end_batch()


@pytest.mark.parametrize("options", [{"elementwise_affine": False}, {"bias": False}])
def test_a_layer_without_scale_or_shift(options: dict[str, bool]) -> None:
    model = nn.Sequential(nn.LayerNorm(4, **options)).eval()
    source = torch.tensor([[0.5, -1.0, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    _, stream = followed(model, source={"0": source})
    x = 3 * torch.rand(50, 7, 4, generator=torch.Generator().manual_seed(0)) + 1
    out = passed(model, stream, x)
    var, mean = torch.var_mean(out.flatten(0, 1), dim=0, correction=0)
    torch.testing.assert_close(mean, source[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(var, source[1], rtol=1e-3, atol=1e-4)


def test_torch_does_not_pass_them_by(model: nn.Module) -> None:
    """In evaluation mode a block of torch computes LayerNorm without calling it."""
    with left_untouched(model, shifted(4)):
        fitted = ttapca.fit(model, "patches", images(400))
        batch = shifted(60)
        with torch.no_grad():
            plain = model(batch)
        with ttapca.adapt(model, "wiener", filter=fitted, statistics="source") as adapted:
            alone = adapted(batch)
        # One after the other is left out: all three do something.
        even, found = ttapca.Mixture(first=0.5, last=0.5, layer_norm=True), [alone]
        for left_out in (None, *PATHS):
            known = {path: each for path, each in fitted.layer_norm_.items() if path != left_out}
            some = dataclasses.replace(fitted, layer_norm_=known)
            with ttapca.adapt(model, "wiener", filter=some, statistics=even) as adapted:
                found.append(adapted(batch))
                with adapted.disabled(), torch.no_grad():
                    assert torch.equal(adapted(batch), plain)
        assert len({float(logits.sum()) for logits in found}) == 5


def test_copies_have_statistics_of_their_own(model: nn.Module) -> None:
    fitted = ttapca.fit(model, "patches", images(400))
    adapted = ttapca.adapt(model, "wiener", filter=fitted, forgetting="online", statistics=WITH)
    expected = adapted(shifted(30))
    twin = copy.deepcopy(adapted)
    twin.reset()
    assert torch.equal(twin(shifted(30)), expected)
    adapted.detach()
    assert not any("forward" in vars(module) for module in model.modules())
    assert not torch.equal(twin(shifted(30)), expected)  # which knows of the first batch by now


def test_they_are_saved(model: nn.Module, tmp_path: Path) -> None:
    fitted = ttapca.fit(model, "patches", images(300), 20)
    fitted.save(tmp_path / "filter", dtype="bfloat16")
    again = ttapca.load(tmp_path / "filter")
    assert set(again.layer_norm_) == set(PATHS)
    assert all(torch.equal(again.layer_norm_[k], v) for k, v in fitted.layer_norm_.items())
    assert list(mixed_layers(model, again, statistics=WITH)) == PATHS


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda tensor: tensor[0], "shape"),
        (lambda tensor: -1 - tensor, "a mean and a variance"),
        (lambda tensor: tensor / 0, "finite"),
    ],
)
def test_damaged_ones_are_refused(
    model: nn.Module, tmp_path: Path, change: Any, fault: str
) -> None:
    ttapca.fit(model, "patches", images(64), 20).save(tmp_path / "filter")
    config, tensors = read_folder(tmp_path / "filter")
    tensors["layer_norm:norm"] = change(tensors["layer_norm:norm"])
    write_folder(tmp_path / "filter", config, tensors, "")
    with pytest.raises(SavedFilterError, match=f"`layer_norm:norm` .* {fault}"):
        ttapca.load(tmp_path / "filter")


def test_layers_of_a_saved_filter_count_in_the_order_of_the_network(tmp_path: Path) -> None:
    layers = [("stem", nn.Conv2d(2, 4, 3)), ("z", nn.GroupNorm(2, 4)), ("a", nn.GroupNorm(2, 4))]
    tail = [("flat", nn.Flatten()), ("fc", nn.Linear(196, 3))]
    model = nn.Sequential(OrderedDict([*layers, *tail])).eval()
    ttapca.fit(model, "stem", images(64), 20).save(tmp_path / "filter")
    weights = mixed_layers(model, ttapca.load(tmp_path / "filter"))
    assert weights == pytest.approx({"z": 0.1, "a": 0.9})


class LayerNorm2d(nn.LayerNorm):
    """As many networks have it: the channels come second."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class TokensFirst(nn.Module):
    """A network whose LayerNorm sees (tokens, batch, channels)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1, 2).transpose(0, 1)).mean(0)


@pytest.mark.parametrize(
    "make", [lambda: LayerNorm2d(2), lambda: nn.LayerNorm([2, 9, 9]), TokensFirst]
)
def test_layers_whose_channels_or_images_are_elsewhere_are_left_alone(make: Any) -> None:
    channels = SourceChannels(nn.Sequential(make()))
    channels.see(ModelInputs((images(30),), {}))
    assert channels.of(nn.LayerNorm) == {}
    assert channels.by_class() is None


def test_a_filter_of_another_network_is_refused(model: nn.Module) -> None:
    surface = StreamStatistics(source={"norm": torch.ones(2, 4)})
    with pytest.raises(AttachError, match=r"LayerNorm of 4 channels at `norm`; found LayerNorm"):
        surface.attach(model)
