"""Statistics of GroupNorm's channels: measured, mixed, and taken away again."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import LEARNING
from known_shifts import followed, passed
from ttapca.adaptation.surfaces import StreamStatistics
from ttapca.errors import AttachError, LayerNotFoundError
from ttapca.fitting.channel_statistics import MEASURED, ONE_IN
from ttapca.fitting.model_inputs import KEPT_PARTS, KEPT_SAMPLES


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.GroupNorm(1, 6, affine=False),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).eval()


def images(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(n, 2, 6, 6, generator=generator)
    return rough + 2 * rough.mean((2, 3), keepdim=True) + torch.tensor([[[0.5]], [[-1.0]]])


def grouped(x: Tensor, groups: int, eps: float = 1e-5) -> np.ndarray:
    """GroupNorm without scale and shift, by numpy."""
    shape = x.shape
    split = x.double().numpy().reshape(shape[0], groups, -1)
    mean, var = split.mean(2, keepdims=True), split.var(2, keepdims=True)
    return ((split - mean) / np.sqrt(var + eps)).reshape(shape)


def test_fitting_measures_the_channels(model: nn.Module) -> None:
    data = images(300)
    fitted = ttapca.fit(model, "0", data, 20)
    assert set(fitted.group_norm_) == {"1", "4"}
    with torch.no_grad():
        first, second = model[0](data), model[:4](data)
    for path, values in (("1", grouped(first, 2)), ("4", grouped(second, 1))):
        mean, var = fitted.group_norm_[path].double()
        np.testing.assert_allclose(mean, values.mean((0, 2, 3)), atol=1e-5)
        np.testing.assert_allclose(var, values.var((0, 2, 3)), rtol=1e-4)


def calls_of(model: nn.Module) -> list[int]:
    """How many samples come to its end, with each pass."""
    calls: list[int] = []
    model[6].register_forward_hook(lambda module, args, output: calls.append(len(output)))
    return calls


def test_long_streams_are_measured_in_part_and_evenly(model: nn.Module) -> None:
    calls = calls_of(model)
    ttapca.fit(model, "0", (images(64, seed) for seed in range(700)), 20, route="folded")
    images_read = 700 * 64
    kept = 2 * KEPT_PARTS * KEPT_SAMPLES  # predicted again, with the filter and without
    # Nobody knows how many will come: at first all are measured, and ever fewer later.
    expected = MEASURED * (1 + math.log(ONE_IN)) + (images_read - MEASURED * ONE_IN) / ONE_IN
    assert sum(calls) == pytest.approx(expected + kept + 2, rel=0.05)


def test_several_passes_measure_once(model: nn.Module) -> None:
    calls = calls_of(model)
    ttapca.fit(model, "0", [images(100)], 20, route="randomised")
    # Two samples to see shapes, a hundred measured, some predicted with the filter and without, and
    # as they are and mirrored.
    assert calls == [2, 100, 16, 16, 16, 16]


def test_a_batch_that_counts_wholly_gets_the_channels_of_the_source(model: nn.Module) -> None:
    source = {"4": torch.tensor([[0.5, -1, 0, 2, 0, 0], [1.0, 2, 3, 1, 1, 4]])}
    _, stream = followed(model, source=source)
    out = passed(model[:5], stream, 3 * images(50) + 1)
    var, mean = torch.var_mean(out, dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(mean, source["4"][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(var, source["4"][1], rtol=1e-3, atol=1e-4)


def test_a_mixture_by_hand(model: nn.Module) -> None:
    x = images(40, seed=5)
    with torch.no_grad():
        values = grouped(model[0](x), 2)
    source_mean, source_var = np.linspace(-1, 1, 8), np.linspace(0.5, 2, 8)
    known = torch.tensor(np.stack([source_mean, source_var])).float()
    _, stream = followed(model, ends=(0.3, 0.3), source={"1": known})
    with torch.no_grad():
        model[1].weight.copy_(torch.linspace(0, 2, 8))
        model[1].bias.copy_(torch.linspace(-1, 0, 8))
    found = passed(model[:2], stream, x).numpy()
    batch_mean, batch_var = values.mean((0, 2, 3)), values.var((0, 2, 3))
    mean = 0.3 * batch_mean + 0.7 * source_mean
    var = 0.3 * batch_var + 0.7 * source_var + 0.21 * (batch_mean - source_mean) ** 2
    expected = (values - mean[:, None, None]) * np.sqrt(source_var / var)[:, None, None]
    expected = (expected + source_mean[:, None, None]) * np.linspace(0, 2, 8)[:, None, None]
    expected += np.linspace(-1, 0, 8)[:, None, None]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_source_data_pass_bit_for_bit_and_nothing_is_left(model: nn.Module) -> None:
    fitted = ttapca.fit(model, "0", images(400), 40)
    batch, shifted = images(60, seed=1), images(60, seed=1) + torch.randn(60, 2, 6, 6)
    with torch.no_grad():
        plain, plain_shifted = model(batch), model(shifted)
    given = {"filter": fitted, "order": "shuffled"}  # each image counts for one
    adapted = ttapca.adapt(model, "wiener", **given)
    twin = copy.deepcopy(model)
    alone = ttapca.adapt(ttapca.detach(twin), "wiener", **given, statistics="source")
    assert torch.equal(adapted(batch), alone(batch))
    assert adapted.stream("default").shift == 0.0
    assert not torch.equal(adapted(shifted), alone(shifted))
    with adapted.disabled():
        assert torch.equal(adapted(shifted), plain_shifted)
    adapted.detach()
    with torch.no_grad():
        assert torch.equal(model(batch), plain)
    assert not any("forward" in vars(module) for module in model.modules())


def test_they_are_saved(model: nn.Module, tmp_path: Path) -> None:
    fitted = ttapca.fit(model, "0", images(300), 20)
    fitted.save(tmp_path / "filter", dtype="bfloat16")
    again = ttapca.load(tmp_path / "filter")
    assert set(again.group_norm_) == {"1", "4"}
    assert all(torch.equal(again.group_norm_[k], v) for k, v in fitted.group_norm_.items())
    assert again.truncated(5).group_norm_.keys() == fitted.group_norm_.keys()


def test_a_layer_that_does_more_than_normalise_is_left_alone(model: nn.Module) -> None:
    class WithActivation(nn.GroupNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    model[1].__class__ = WithActivation
    fitted = ttapca.fit(model, "0", images(200), 20)
    assert set(fitted.group_norm_) == {"4"}
    with ttapca.adapt(model, "wiener", filter=fitted):
        assert "forward" not in vars(model[1])
        assert "forward" in vars(model[4])


def test_a_filter_of_another_network_is_refused(model: nn.Module) -> None:
    surface = StreamStatistics(source={"1": torch.ones(2, 4)})
    with pytest.raises(
        AttachError, match=r"GroupNorm or LayerNorm of 4 channels at `1`; found GroupNorm\(2, 8"
    ):
        surface.attach(model)
    with pytest.raises(LayerNotFoundError, match="norm1"):
        StreamStatistics(source={"norm1": torch.ones(2, 4)}).attach(model)


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
        given |= {"head": adapted("ttt", "GroupNorm").mover.head.float()}
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
