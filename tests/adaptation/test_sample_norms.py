"""GroupNorm and LayerNorm with statistics that follow a stream: which layers, in which networks."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import LEARNING
from fitting.test_channel_statistics import (
    PATHS,
    Transformer,
    group_norm_network,
    images,
)
from known_shifts import followed, passed
from oracles import left_untouched
from ttapca.adaptation.surfaces import StreamStatistics
from ttapca.errors import AttachError, LayerNotFoundError, OptionError
from ttapca.spectral.source_classes import PairStatistic

WITH = ttapca.Mixture(layer_norm=True)


@pytest.fixture
def model() -> nn.Module:
    return Transformer().eval()


@pytest.fixture
def grouped_network() -> nn.Module:
    return group_norm_network()


def shifted(n: int) -> Tensor:
    return images(n, seed=1) + torch.randn(n, 2, 9, 9, generator=torch.Generator().manual_seed(2))


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


def test_layers_of_a_saved_filter_count_in_the_order_of_the_network(tmp_path: Path) -> None:
    layers = [("stem", nn.Conv2d(2, 4, 3)), ("z", nn.GroupNorm(2, 4)), ("a", nn.GroupNorm(2, 4))]
    tail = [("flat", nn.Flatten()), ("fc", nn.Linear(196, 3))]
    model = nn.Sequential(OrderedDict([*layers, *tail])).eval()
    ttapca.fit(model, "stem", images(64), 20).save(tmp_path / "filter")
    weights = mixed_layers(model, ttapca.load(tmp_path / "filter"))
    assert weights == pytest.approx({"z": 0.1, "a": 0.9})


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("1", AttachError, r"GroupNorm or LayerNorm of 4 channels at `1`; found GroupNorm\(2, 8"),
        ("norm1", LayerNotFoundError, "norm1"),
    ],
)
def test_a_filter_of_another_network_is_refused(
    grouped_network: nn.Module, path: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        StreamStatistics(source={path: torch.ones(2, 4)}).attach(grouped_network)


def test_source_data_pass_bit_for_bit_and_nothing_is_left(grouped_network: nn.Module) -> None:
    fitted = ttapca.fit(grouped_network, "0", images(400, side=6), 40)
    batch, shifted = (
        images(60, seed=1, side=6),
        images(60, seed=1, side=6) + torch.randn(60, 2, 6, 6),
    )
    with torch.no_grad():
        plain, plain_shifted = grouped_network(batch), grouped_network(shifted)
    given = {"filter": fitted, "order": "shuffled"}  # each image counts for one
    adapted = ttapca.adapt(grouped_network, "wiener", **given)
    twin = copy.deepcopy(grouped_network)
    alone = ttapca.adapt(ttapca.detach(twin), "wiener", **given, statistics="source")
    assert torch.equal(adapted(batch), alone(batch))
    assert adapted.stream("default").shift == 0.0
    assert not torch.equal(adapted(shifted), alone(shifted))
    with adapted.disabled():
        assert torch.equal(adapted(shifted), plain_shifted)
    adapted.detach()
    with torch.no_grad():
        assert torch.equal(grouped_network(batch), plain)
    assert not any("forward" in vars(module) for module in grouped_network.modules())


def test_a_layer_that_does_more_than_normalise_is_left_alone(grouped_network: nn.Module) -> None:
    class WithActivation(nn.GroupNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    grouped_network[1].__class__ = WithActivation
    fitted = ttapca.fit(grouped_network, "0", images(200, side=6), 20)
    assert set(fitted.group_norm_) == {"4"}
    with ttapca.adapt(grouped_network, "wiener", filter=fitted):
        assert "forward" not in vars(grouped_network[1])
        assert "forward" in vars(grouped_network[4])


CHANNELS_LAST = """
import sys
import torch
import ttapca
from adapters import DATA, NETWORKS, X, adapted
from ttapca.datasets import Images, read_digits
from ttapca.networks import Training, TrainingOptions
torch.set_num_threads(1)
group_norm = NETWORKS["GroupNorm"]
last = {"memory_format": torch.channels_last}
fitted = ttapca.fit(group_norm().float(), "conv1", DATA.float(), 20)
for method in sys.argv[1:]:
    given = {"filter": fitted} if ttapca.METHODS[method].method.needs_filter else {}
    if method == "eata":
        given["source"] = DATA.float().to(**last)
    if method == "ttt":
        given |= {"head": adapted("ttt", "GroupNorm").predictor.head.float()}
    for network, batch in (("plain", "last"), ("last", "plain"), ("last", "last")):
        found = []
        for layouts in (("plain", "plain"), (network, batch)):
            model, x = (
                each.to(**last) if layout == "last" else each
                for each, layout in zip((group_norm().float(), X.float()), layouts, strict=True)
            )
            adapter = adapted(method, "GroupNorm", model=model, lr=1e-3, **given)
            found.append(adapter(x))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
digits = read_digits("train")
pixels, labels = digits.images[:64, :6, :6].repeat(3, 3), digits.labels[:64] % 5
colour = Images(pixels, labels, digits.class_names[:5])
model = group_norm().float().requires_grad_()
Training(model, colour, colour, TrainingOptions(epochs=1, padding=1, batch_size=32)).run_epoch()
sys.stdout.write("survived")
"""


def test_gradients_with_channels_last() -> None:
    """Torch's backward pass ends the process there, so a process of its own is at stake."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHANNELS_LAST, *LEARNING],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=1200,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "survived"), run.stderr
