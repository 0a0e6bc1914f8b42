"""`views=2`: what is measured when fitting, what is averaged, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import passes_of, same
from oracles import DensePCA, images, small_convnet
from ttapca import networks
from ttapca.adaptation.chain_passes import ChainPasses
from ttapca.adaptation.optimisation import Predictor
from ttapca.datasets import read_digits, to_tensor
from ttapca.errors import LayerOutputError, OptionError, ShapeError
from ttapca.methods.wiener import MirroredView
from ttapca.spectral.stream import Stream

SOURCE = images(1500)
DATA = SOURCE[60:]
CLEAN = list(SOURCE[:60].split(20))
SHIFTED = [batch + 2.0 * images(20, seed=5) for batch in CLEAN]
OLD_FILTER = Path(__file__).parents[1] / "fitting" / "saved_filters" / "folded"


@functools.cache
def source_filter() -> ttapca.FittedFilter:
    """A filter that is fitted when a test first needs it."""
    with torch.random.fork_rng(devices=[]):
        return ttapca.fit(small_convnet(), "conv1", DATA)


def one_view(**given: Any) -> dict[str, Any]:
    return {"filter": source_filter(), "order": "shuffled"} | given


def two_views(**given: Any) -> dict[str, Any]:
    return one_view(views=2, mirror=True, **given)


def once(**given: Any) -> ttapca.Adapter:
    return ttapca.adapt(small_convnet(), "wiener", **one_view(**given))


def twice(**given: Any) -> ttapca.Adapter:
    return ttapca.adapt(small_convnet(), "wiener", **two_views(**given))


def plain_prediction(x: Tensor, gains: np.ndarray, shift: float) -> Tensor:
    """One pass of `wiener` over one batch, from the definitions, given the gains and the shift."""
    network = small_convnet()
    with torch.no_grad():
        y = DensePCA(network.conv1(DATA)).filter(network.conv1(x), gains)
        for first, bn, alpha in ((True, network.bn1, 0.1), (False, network.bn2, 0.9)):
            y = y if first else network.conv2(y)
            alpha *= shift * len(x) / (len(x) + 16)
            mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3), correction=0)
            away = mean - bn.running_mean
            mean = alpha * mean + (1 - alpha) * bn.running_mean
            var = alpha * var + (1 - alpha) * bn.running_var + alpha * (1 - alpha) * away**2
            y = (y - mean[:, None, None]) / (var[:, None, None] + bn.eps).sqrt()
            y = y * bn.weight[:, None, None] + bn.bias[:, None, None]
            y = y.relu() if first else y
        return network.fc(y.flatten(1))


def test_the_logits_are_those_of_a_plain_loop() -> None:
    adapted = twice(center=0.0)
    for x in SHIFTED:
        found = adapted(x)
        gains = adapted.surfaces[-2].filter.gains().detach().double().numpy()
        shift = adapted.stream("default").shift
        assert shift > 0
        views = [plain_prediction(view, gains, shift) for view in (x, x.flip(-1))]
        assert not torch.allclose(*views, atol=1e-2)
        torch.testing.assert_close(found, (views[0] + views[1]) / 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forgetting", ["episodic", "online"])
@pytest.mark.parametrize("size", [1, 20])
def test_the_second_view_leaves_nothing_in_the_stream(forgetting: Any, size: int) -> None:
    adapters = once(forgetting=forgetting), twice(forgetting=forgetting)
    for x in torch.cat(SHIFTED).split(size):
        assert not torch.equal(*(each.stream("camera")(x) for each in adapters))
        assert same(*(each.state_dict()["_extra_state"] for each in adapters))


def test_source_data_take_one_pass_and_stay_bit_for_bit() -> None:
    assert passes_of(small_convnet(), CLEAN, **two_views()) == [1, 1, 1]
    assert passes_of(small_convnet(), SHIFTED, **two_views()) == [2, 2, 2]
    assert torch.equal(once()(CLEAN[0]), twice()(CLEAN[0]))


def test_each_condition_of_a_stream_is_mirrored_where_it_has_shifted() -> None:
    noisy = [batch + 2.0 * images(20, seed=6 + number) for number, batch in enumerate(CLEAN)]
    for batches, passes in (([*CLEAN, *noisy], [1, 1, 1, 2, 2, 2]), ([*noisy, *CLEAN], [2] * 3)):
        found = passes_of(small_convnet(), batches, **two_views(forgetting="online"))
        assert found[: len(passes)] == passes
    assert found[-1] == 1  # clean again, after noise


def test_the_chain_looks_at_both_views() -> None:
    given = {"order": "auto", "forgetting": "online"}
    one = passes_of(small_convnet(), SHIFTED, **one_view(**given))
    two = passes_of(small_convnet(), SHIFTED, **two_views(**given))
    assert two[-1] == 2
    assert two[0] >= 2 * min(2, one[0])
    predictor = twice(order="auto").predictor
    assert isinstance(predictor, MirroredView)
    assert isinstance(predictor.inner, ChainPasses)


class Model(nn.Module):
    """Returns logits and something else, of images given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_convnet()

    def forward(self, index: Tensor, *, pixels: Tensor) -> dict[str, Tensor]:
        return {"index": index, "scores": self.inner(pixels)}


def test_images_by_name_and_logits_by_a_function() -> None:
    scores = lambda output: output["scores"]  # noqa: E731
    batches = [{"index": torch.arange(len(part)), "pixels": part} for part in DATA.split(256)]
    fitted = ttapca.fit(Model(), "inner.conv1", batches, prepare=lambda batch: batch, logits=scores)
    assert fitted.mirror_agreement_ == source_filter().mirror_agreement_
    # The number of images in such batches is unknown, so that others of them are measured.
    fitted = dataclasses.replace(fitted, class_reach_=source_filter().class_reach_)
    named = ttapca.adapt(Model(), "wiener", **two_views(filter=fitted, logits=scores))
    found = named(torch.arange(20), pixels=SHIFTED[0])
    torch.testing.assert_close(found, twice()(SHIFTED[0]))


def test_predictions_of_pixels_are_mirrored_back() -> None:
    predictor = MirroredView(Predictor())
    predictor.join(Stream())  # without a measured shift: it may be one
    weights = torch.tensor([[1.0, -2.0, 0.5, 3.0, 0.0, 7.0]])

    def run(x: Tensor) -> Tensor:
        return torch.cat([x * weights, -x], 1)

    x = images(4, shape=(1, 6, 6)).float()
    found = predictor.predict(run, x).numpy()
    for image in range(4):
        for row in range(6):
            for column in range(6):
                here = float(x[image, 0, row, column])
                mean = here * float(weights[0, column] + weights[0, 5 - column]) / 2
                assert found[image, :, row, column] == pytest.approx([mean, -here], abs=1e-5)


def test_what_cannot_be_mirrored_is_refused() -> None:
    predictor = MirroredView(Predictor())
    predictor.join(Stream())
    with pytest.raises(ShapeError, match=r"needs images: .* found \[\(5, 7\)\]"):
        predictor.predict(lambda x: x, torch.rand(5, 7))
    with pytest.raises(LayerOutputError, match=r"\(batch, classes\), .* found \(5, 6, 7\)"):
        predictor.predict(lambda x: x[:, 0], torch.rand(5, 1, 6, 7))


def test_a_broken_batch_is_skipped() -> None:
    adapted = twice(forgetting="online")
    expected = adapted(SHIFTED[0])
    adapted.reset()
    adapted(SHIFTED[1] * torch.nan)
    assert adapted.skipped == 1
    assert torch.equal(adapted(SHIFTED[0]), expected)


def test_a_stream_goes_on_with_another_number_of_views() -> None:
    one, two = once(forgetting="online"), twice(forgetting="online")
    one(SHIFTED[0])
    expected = [two(x) for x in SHIFTED[:2]]
    two.reset()
    two.load_state_dict(one.state_dict())
    assert torch.equal(two(SHIFTED[1]), expected[1])


def test_fit_measures_how_far_predictions_stay(tmp_path: Path) -> None:
    model = small_convnet()
    weights = agreeing = 0.0
    for part in DATA.split(256):  # the batches of `fit`, which keeps the first 16 of each
        for image in part[:16]:
            plain, mirrored = (
                model(view[None]).softmax(1)[0].tolist() for view in (image, image.flip(-1))
            )
            weights += max(plain)
            agreeing += max(plain) * (plain.index(max(plain)) == mirrored.index(max(mirrored)))
    assert pytest.approx(agreeing / weights) == source_filter().mirror_agreement_
    source_filter().save(tmp_path / "filter")
    assert ttapca.load(tmp_path / "filter").mirror_agreement_ == source_filter().mirror_agreement_
    tokens = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).double()
    assert ttapca.fit(tokens, "0", torch.rand(64, 6).double()).mirror_agreement_ is None


def test_digits_are_not_mirrored_unless_asked() -> None:
    network = networks.load("digits-small-cnn")
    layer = next(name for name, each in network.named_modules() if isinstance(each, nn.Conv2d))
    fitted = ttapca.fit(network, layer, to_tensor(read_digits("train").images[:300]))
    with pytest.raises(
        OptionError, match=r"mean the same when mirrored; found that \d\d % .*Digit"
    ):
        ttapca.adapt(network, "wiener", filter=fitted, views=2)
    ttapca.adapt(network, "wiener", filter=fitted, views=2, mirror=True).detach()
    symmetric = dataclasses.replace(fitted, mirror_agreement_=0.95)
    ttapca.adapt(network, "wiener", filter=symmetric, views=2).detach()


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(OptionError, match=r"was not measured: .* older ttapca.*`mirror=True`"):
        once(filter=ttapca.load(OLD_FILTER), views=2)
    with pytest.raises(OptionError, match="`mirror` would have no effect: with `views=1`"):
        once(mirror=True)
    with pytest.raises(OptionError, match="found `mirror=False`"):
        once(mirror=False, views=2)
    with pytest.raises(OptionError, match=r"`views` must be .* from 1 to 2"):
        once(views=3)
    with pytest.raises(OptionError, match="`views` would have no effect: gradient steps"):
        ttapca.adapt(small_convnet(), "ttapca-closed", **two_views())
