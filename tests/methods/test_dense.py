"""Predictions of every pixel: what a method does with a sample, it does with each pixel."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.per_place import (
    information,
    mean_entropy,
    pixels,
    plain_cotta,
    plain_sar,
    plain_steps,
    scale_and_shift,
)
from methods.plain_loops import assert_follows
from oracles import (
    DensePCA,
    differentiable_filter,
    filter_for,
    images,
    left_untouched,
    required_options,
    with_batch_statistics,
)
from small_networks import pixelwise, with_last
from ttapca.errors import LayerOutputError
from ttapca.methods.views import STRONG_COLOURS

DATA = images(150)
BATCHES = [2 * images(4, seed=8), 0.3 * images(4, seed=9), images(4, seed=10)]
X = BATCHES[0]

# By method, what it needs to serve pixels here, and to move something.
SERVED: dict[str, dict[str, Any]] = {
    **{method: {} for method in ("source", "bn", "tent", "slr+it", "ttt", "ttapca-closed")},
    **{method: {} for method in ("ttapca", "ttapca-relu", "ttapca-exp", "ttapca-multiplicative")},
    **{method: {"order": "shuffled"} for method in ("wiener", "match", "two-sided")},
    "shot": {"classifier": "fc"},
    "neo": {"classifier": "fc"},
    "sar": {"entropy_margin": 0.95, "recover_below": 0.0},
    "pea": {"augment": "none", "entropy_jump": 0.05},
    # On rows of pixels, only the source's confidence decides whether there are views.
    "cotta": {"views": 2, "confidence_below": 0.0},
}
REFUSED = {
    "eata": "one prediction per sample",
    "roid": "one prediction per sample",
    "rotta": "one prediction per sample",
    "lame": "one prediction per sample",
    "t3a": "one prediction per sample",
    "memo": "one prediction for each image.*Choose `tent`, `sar` or `cotta`",
    "pea": r"one prediction for each image.*Leave the views out: `augment=\"none\"`",
}


class PixelRows(nn.Module):
    """One row for each pixel of each image."""

    def forward(self, z: Tensor) -> Tensor:
        return z.movedim(1, -1).flatten(0, 2)


class Linewise(nn.Linear):
    """A linear layer that takes the channels of every pixel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def options_for(method: str) -> dict[str, Any]:
    model = pixelwise(5)
    given = filter_for(method, ttapca.fit(model, "conv1", DATA, 40))
    given |= required_options(method, model, (3, 6, 6)) | SERVED.get(method, {})
    return given | ({"lr": 0.05} if ttapca.METHODS[method].method.learns else {})


@pytest.mark.parametrize("method", SERVED)
def test_each_pixel_is_a_sample(method: str) -> None:
    given = options_for(method) | {"forgetting": "online"}
    model, of_rows = pixelwise(5), pixelwise(5, PixelRows())
    with left_untouched(model, X):
        adapted, as_samples = (ttapca.adapt(each, method, **given) for each in (model, of_rows))
        for x in BATCHES:
            z = adapted(x)
            assert z.shape == (4, 5, 6, 6)
            torch.testing.assert_close(PixelRows()(z), as_samples(x), rtol=0, atol=1e-7)
        assert (adapted.updates > 0) == ttapca.METHODS[method].method.learns
        adapted.detach()


def test_a_new_stream_may_have_images_of_several_sizes() -> None:
    model = pixelwise(5)
    fitted = ttapca.fit(model, "conv1", DATA, route="dct")
    with ttapca.adapt(model, "wiener", filter=fitted, forgetting="online") as adapted:
        for side in (6, 9, 5):
            x = images(4, seed=side, shape=(3, side, side))
            assert adapted(x).shape == (4, 5, side, side)


@pytest.mark.parametrize("method", REFUSED)
def test_others_are_refused_with_the_way_out(method: str) -> None:
    # `t3a` needs a linear layer.
    model = with_last(Linewise(4, 5)) if method == "t3a" else pixelwise(5)
    given = required_options(method, model, (3, 6, 6))
    given |= {"classifier": "fc"} if method == "lame" else {}
    with left_untouched(model, X), ttapca.adapt(model, method, **given) as adapted:
        with pytest.raises(LayerOutputError, match=REFUSED[method]):
            adapted(X)
        assert adapted.updates == 0


def test_all_methods_are_above() -> None:
    assert SERVED.keys() | REFUSED.keys() == ttapca.METHODS.keys()


def test_tent_equals_a_plain_loop() -> None:
    adam = functools.partial(torch.optim.Adam, lr=0.05)
    lowered = scale_and_shift(pixelwise(5))
    expected = plain_steps(lowered, BATCHES, adam, mean_entropy, pixels, after=False)
    adapted = ttapca.adapt(pixelwise(5), "tent", lr=0.05, forgetting="online")
    assert_follows(adapted, expected, BATCHES)


def test_shot_equals_a_plain_loop() -> None:
    network = with_batch_statistics(pixelwise(5))
    body = [p for name, p in network.named_parameters() if not name.startswith("fc")]
    sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    expected = plain_steps((body, network), BATCHES, sgd, information, pixels, after=True)
    given = {"classifier": "fc", "lr": 0.05, "forgetting": "online"}
    assert_follows(ttapca.adapt(pixelwise(5), "shot", **given), expected, BATCHES)
    with pytest.raises(LayerOutputError, match="Pseudo-labels need a classifier"):
        ttapca.adapt(pixelwise(5), "shot", pseudo_labels=0.3, **given)(X)


def test_slr_equals_a_plain_loop() -> None:
    adapted = ttapca.adapt(pixelwise(5), "slr+it", lr=0.01, forgetting="online")
    residual = copy.deepcopy(adapted.surfaces[-2].residual)
    affine, network = scale_and_shift(pixelwise(5))
    tau = torch.ones((), dtype=torch.float64, requires_grad=True)
    gamma = torch.ones(1, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    beta = torch.zeros(1, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    running: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        return network(gamma * (tau * x + (1 - tau) * residual(x)) + beta)

    def loss(p: Tensor) -> Tensor:
        mean = p.mean(0)
        past = running[-1] if running else mean.detach()
        now = 0.9 * past + 0.1 * mean
        running.append(now.detach())
        ratio = (p * torch.log((1 - p) / p)).sum(1).mean()
        return (now * torch.log(now)).sum() + 0.025 * ratio

    moved = [tau, gamma, beta, *residual.parameters(), *affine]
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    expected = plain_steps((moved, forward), BATCHES, adam, loss, pixels, after=True)
    assert_follows(adapted, expected, BATCHES)


def test_the_spectral_filter_equals_a_plain_loop() -> None:
    model = pixelwise(5)
    with torch.no_grad():
        dense = DensePCA(model.conv1(DATA))
    spectrum = torch.from_numpy(dense.singular_values[:30] / dense.singular_values[0])
    network = with_batch_statistics(model)
    gamma = torch.full((30,), 0.2, dtype=torch.float64, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        gains = spectrum / (spectrum + torch.relu(gamma))
        filtered = differentiable_filter(dense, network.conv1(x), gains)
        return network.fc(torch.relu(network.bn1(filtered)))

    adam = functools.partial(torch.optim.Adam, lr=0.05)
    expected = plain_steps(([gamma], forward), BATCHES, adam, mean_entropy, pixels, after=True)
    fitted = ttapca.fit(model, "conv1", DATA, 30)
    given = {"filter": fitted, "initial": 0.2, "lr": 0.05, "forgetting": "online"}
    assert_follows(ttapca.adapt(model, "ttapca-relu", **given), expected, BATCHES, atol=1e-6)


def test_sar_equals_a_plain_loop() -> None:
    expected = plain_sar(pixelwise(5), BATCHES, pixels, 0.95)
    options = {"lr": 0.05, "entropy_margin": 0.95, "recover_below": 0.0, "forgetting": "online"}
    assert_follows(ttapca.adapt(pixelwise(5), "sar", **options), expected, BATCHES)


def test_cotta_equals_a_plain_loop() -> None:
    expected = plain_cotta(pixelwise(5), BATCHES, pixels, STRONG_COLOURS)
    options = {"views": 2, "confidence_below": 1.0, "lr": 0.01, "forgetting": "online"}
    options |= {"teacher_momentum": 0.9, "restored_share": 0.0}
    assert_follows(ttapca.adapt(pixelwise(5), "cotta", **options), expected, BATCHES, atol=1e-7)


def test_the_views_of_pixels_do_not_move() -> None:
    ramp = torch.linspace(0, 1, 36, dtype=torch.float64).view(1, 1, 6, 6).expand(4, 3, -1, -1)
    view = STRONG_COLOURS(ramp, torch.Generator().manual_seed(0))
    for image, other in zip(ramp, view, strict=True):
        together = torch.stack([image.flatten(), other.flatten()])
        assert torch.corrcoef(together)[0, 1] > 0.99
    assert not torch.allclose(view, ramp)
