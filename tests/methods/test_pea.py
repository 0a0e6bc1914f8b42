"""`pea` against a plain loop, and the law that it rests on: means and covariances become equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ttapca
from adapters import NETWORKS
from methods.plain_loops import BATCHES, X, assert_follows, both_ways
from oracles import images, small_convnet
from ttapca.errors import LayerOutputError
from ttapca.methods.pea import blocks_of
from ttapca.networks import build

SOURCE = images(150)
# Less and less contrast, so that predictions become less certain.
SHIFTED = [(0.1 + 0.4 * number) * x + 0.1 * number for number, x in enumerate(BATCHES)][::-1]


def root(matrix: np.ndarray) -> np.ndarray:
    """A symmetric square root, by singular values."""
    u, s, _ = np.linalg.svd(matrix)
    return u @ np.diag(np.sqrt(s)) @ u.T


def plain_features(model: nn.Module, x: Tensor, change: Any) -> Tensor:
    """`small_convnet`, with something done to the features after each BatchNorm layer."""
    y = model.bn1(model.conv1(x))
    y = change(0, y)
    y = model.bn2(model.conv2(torch.relu(y)))
    y = change(1, y)
    return model.fc(y.flatten(1))


def table(y: Tensor) -> np.ndarray:
    """One row for each place of each sample."""
    return np.concatenate([sample.flatten(1).T.numpy() for sample in y.detach()])


class PlainPEA:
    def __init__(self, model: nn.Module, source: Tensor, **options: Any) -> None:
        self.model = model
        given = {"group_size": 32, "momentum": 0.02, "smoothing": 0.2}
        self.given = given | {"drift_factor": 2.5, "entropy_jump": 0.5} | options
        self.source: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        plain_features(model, source, self.see_source)
        self.reset()

    def reset(self) -> None:
        self.averages: dict[int, list[Any]] = {}
        self.usual: float | None = None
        self.replaced = self.forgotten = 0

    def see_source(self, number: int, y: Tensor) -> Tensor:
        self.source[number] = table(y).mean(0), np.cov(table(y).T)
        return y

    def measure(self, number: int, y: Tensor) -> Tensor:
        mean, covariance = self.source[number]
        away = np.linalg.norm(table(y).mean(0) - mean)
        away += np.linalg.norm(table(y).var(0, ddof=1) - np.diag(covariance))
        self.distances.append(away)
        return y

    def align(self, number: int, y: Tensor) -> Tensor:
        weight = (self.distances[number] - min(self.distances)) / np.ptp(self.distances)
        if weight < 1e-3:
            return y
        rows = table(y)
        mean, covariance = rows.mean(0), np.cov(rows.T) + 1e-5 * np.eye(rows.shape[1])
        if number not in self.averages:
            self.averages[number] = [mean, covariance, 0.0]
        else:
            old_mean, old_covariance, drift = self.averages[number]
            away = np.abs(mean - old_mean).mean()
            drift = 0.0 + self.given["smoothing"] * away + (1 - self.given["smoothing"]) * drift
            self.replaced += away > self.given["drift_factor"] * drift
            if away <= self.given["drift_factor"] * drift:
                m = self.given["momentum"]
                mean = m * mean + (1 - m) * old_mean
                covariance = m * covariance + (1 - m) * old_covariance
            self.averages[number] = [mean, covariance, drift]
        mean, covariance, _ = self.averages[number]
        source_mean, source_covariance = self.source[number]
        aligned, size = rows.copy(), self.given["group_size"]
        for start in range(0, rows.shape[1], size):
            group = slice(start, start + size)
            eye = np.eye(rows[:, group].shape[1])
            white = (rows[:, group] - mean[group]) @ np.linalg.inv(root(covariance[group, group]))
            coloured = white @ root(source_covariance[group, group] + 1e-5 * eye)
            aligned[:, group] = coloured + source_mean[group]
        mixed = (1 - weight) * rows + weight * aligned
        samples = mixed.reshape(len(y), -1, y.shape[1]).transpose(0, 2, 1)
        return torch.from_numpy(samples.copy()).reshape(y.shape)

    def __call__(self, x: Tensor, augment: str) -> Tensor:
        # The middle five of six rows and columns, as the official code rounds them.
        crop = F.interpolate(x[:, :, :5, :5], size=(6, 6), mode="bilinear", align_corners=False)
        views = {"none": [x], "crop": [x, crop], "crop and flip": [x, crop, x.flip(-1)]}[augment]
        self.distances: list[float] = []
        plain_features(self.model, torch.cat(views), self.measure)
        logits = plain_features(self.model, torch.cat(views), self.align).detach()
        logits = sum(logits.split(len(x))) / len(views)
        p = logits.softmax(1)
        entropy = float(-(p * torch.log(p)).sum(1).mean())
        if self.usual is not None and entropy > self.usual + self.given["entropy_jump"]:
            self.forgotten += 1
            self.averages, self.usual = {}, None
        a = self.given["smoothing"]
        self.usual = entropy if self.usual is None else a * entropy + (1 - a) * self.usual
        return logits


@both_ways
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"augment": "none", "momentum": 0.3, "drift_factor": 2.0, "smoothing": 0.3},
        {"augment": "crop", "group_size": 3, "entropy_jump": 0.01, "drift_factor": 9.0},
    ],
)
def test_equals_a_plain_loop(forgetting: str, options: dict[str, Any]) -> None:
    model = small_convnet()
    plain = PlainPEA(model, SOURCE, **options)
    expected = []
    for x in SHIFTED:
        if forgetting == "episodic":
            plain.reset()
        expected.append(plain(x, options.get("augment", "crop and flip")))
    if forgetting == "online":  # all ways are taken
        assert (plain.replaced > 0) == (options.get("drift_factor", 1) < 9)
        assert (plain.forgotten > 0) == ("entropy_jump" in options)
    adapter = ttapca.adapt(model, "pea", source=SOURCE, forgetting=forgetting, **options)
    assert_follows(adapter, expected, SHIFTED)


@pytest.mark.parametrize(("kind", "layer"), [("BatchNorm", "bn1"), ("LayerNorm", "scaling")])
def test_one_layer_gets_mean_and_covariance_of_the_source(kind: str, layer: str) -> None:
    model = NETWORKS[kind]()
    seen: list[Tensor] = []

    def rows() -> Tensor:
        return seen[-1] if kind == "LayerNorm" else seen[-1].movedim(1, -1)

    def moments() -> tuple[Tensor, Tensor]:
        found = rows().detach().reshape(-1, rows().shape[-1])
        return found.mean(0), torch.cov(found.T)

    module = model.get_submodule(layer)
    handle = module.register_forward_hook(lambda *call: seen.append(call[2]))
    model(SOURCE)
    mean, covariance = moments()
    options = {"source": SOURCE, "layers": [layer], "augment": "none"}
    adapter = ttapca.adapt(model, "pea", **options)
    adapter(images(80, seed=3) * 2 + 1)
    found = moments()
    torch.testing.assert_close(found[0], mean)
    torch.testing.assert_close(found[1], covariance, rtol=0, atol=1e-3)
    handle.remove()


def test_the_model_itself_is_aligned_with_what_is_known() -> None:
    options = {"source": SOURCE, "augment": "none", "forgetting": "online"}
    adapter = ttapca.adapt(small_convnet(), "pea", **options)
    assert torch.equal(adapter.model(3 * X), small_convnet()(3 * X))
    first = adapter(3 * X)
    torch.testing.assert_close(adapter.model(3 * X), first)
    assert not torch.allclose(first, small_convnet()(3 * X))
    state = adapter.state_dict()
    adapter.model(X)
    assert adapter.stream("default").batches == 1
    adapter.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "count", "last"),
    [
        ("resnet20", 9, "layer3.2"),
        ("wrn-16-2", 6, "block3.layer.1"),
        ("resnet26-gn", 12, "layer3.3"),
    ],
)
def test_blocks_of_networks(name: str, count: int, last: str) -> None:
    found = blocks_of(build(name))
    assert (len(found), found[-1]) == (count, last)


def test_blocks_of_others() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3)
    assert blocks_of(encoder) == ["layers.0", "layers.1", "layers.2"]
    assert blocks_of(small_convnet()) == ["bn1", "bn2"]
    assert blocks_of(nn.Sequential(nn.Sequential(nn.Sequential(nn.GELU(), nn.LayerNorm(2))))) == [
        "0.0"
    ]
    assert blocks_of(nn.BatchNorm2d(3)) == []


def test_layers_without_features() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    model = nn.Sequential(nn.BatchNorm2d(3), Pair()).double()
    with pytest.raises(LayerOutputError, match=r"`1` returns <class 'tuple'>.*`layers=`"):
        ttapca.adapt(model, "pea", source=SOURCE, layers=["1"])
