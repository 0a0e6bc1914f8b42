"""A stream that is ordered by class: passes, statistics without the classes, and a prior."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import passes_of
from oracles import images, small_convnet
from ttapca import networks
from ttapca.adaptation.composition_passes import CompositionPasses
from ttapca.adaptation.surfaces import BatchNormStatistics
from ttapca.datasets import read_digits, to_tensor
from ttapca.errors import LayerOutputError, OptionError, SavedFilterError
from ttapca.fitting.store import read_folder, write_folder
from ttapca.spectral.composition import ClassMoments, Composition
from ttapca.spectral.stream import Stream

DATA = images(400)
FITTED = ttapca.fit(small_convnet(), "conv1", DATA, 40)
assert FITTED.class_moments_ is not None
LOOKING: dict[str, Any] = {"filter": FITTED, "composition": True}
# The network sees one class in nearly all images; this filter believes that all are as frequent.
EVEN = dataclasses.replace(
    FITTED, class_moments_=dataclasses.replace(FITTED.class_moments_, shares=torch.full((5,), 0.2))
)


def test_fit_weights_moments_by_the_networks_own_predictions() -> None:
    model, moments = small_convnet(), FITTED.class_moments_
    assert moments is not None
    with torch.no_grad():
        shares = model(DATA).softmax(1)  # (images, classes)
        inputs = model.conv1(DATA).flatten(2)  # what bn1 normalises
    torch.testing.assert_close(moments.shares.double(), shares.mean(0), rtol=1e-4, atol=1e-6)
    mean = moments.corrections(torch.eye(shares.shape[1])[3])["bn1"][0]
    of_class = (shares[:, 3, None] * inputs.mean(2)).sum(0) / shares[:, 3].sum()
    expected = of_class - inputs.mean((0, 2))
    torch.testing.assert_close(mean.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_saved_filter_knows_its_classes(tmp_path: Path) -> None:
    FITTED.save(tmp_path / "filter")
    known, loaded = FITTED.class_moments_, ttapca.load(tmp_path / "filter").class_moments_
    assert known is not None
    assert loaded is not None
    assert torch.equal(loaded.shares, known.shares)
    assert loaded.layers.keys() == known.layers.keys()


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("class_shares", lambda tensor: 2 * tensor, "with a sum of 1"),
        ("class_loadings", lambda tensor: tensor[:-1], "class_shares` .* must"),
        ("class_moments:bn1", lambda tensor: tensor[:-1], "class_moments:bn1` .* must"),
    ],
)
def test_damaged_classes_are_refused(tmp_path: Path, name: str, change: Any, fault: str) -> None:
    FITTED.save(tmp_path / "filter")
    config, tensors = read_folder(tmp_path / "filter")
    tensors[name] = change(tensors[name])
    write_folder(tmp_path / "filter", config, tensors, "")
    with pytest.raises(SavedFilterError, match=fault):
        ttapca.load(tmp_path / "filter")


def test_where_more_passes_would_change_nothing_there_is_one() -> None:
    model, batches = small_convnet(), list(DATA[:60].split(20))
    assert passes_of(model, batches, **LOOKING, forgetting="online", passes=1) == [1, 1, 1]
    # One image has no statistics of a batch, and without statistics nothing could change.
    assert passes_of(model, list(DATA[:3].split(1)), **LOOKING) == [1, 1, 1]
    assert passes_of(model, batches, **LOOKING, statistics="source") == [1, 1, 1]


def test_the_prior_is_all_that_changes_where_statistics_stay() -> None:
    model = small_convnet()
    given: dict[str, Any] = {"filter": EVEN, "statistics": "source", "threshold": 0.9}
    with ttapca.adapt(model, "wiener", composition=True, **given) as adapted:
        found = adapted(DATA[:100])
    with ttapca.adapt(model, "wiener", composition=False, **given) as adapted:
        plain = adapted(DATA[:100])
    assert EVEN.class_moments_ is not None
    composition = Composition(EVEN.class_moments_)
    composition.join(Stream())
    composition.start_batch(len(plain))
    estimate = composition.estimate(plain)
    assert 0.3 < estimate.certainty < 1
    # Five neighbours pull at every sample, as far as the skew is sure.
    own = (plain + estimate.prior).log_softmax(1)
    centred = own - own.mean(1, keepdim=True)
    unit = centred / centred.norm(dim=1, keepdim=True)
    near = [
        sorted(set(range(len(own))) - {i}, key=lambda j, i=i: float((unit[j] - unit[i]).norm()))[:5]
        for i in range(len(own))
    ]
    agreed = own
    for _ in range(100):
        pull = torch.stack([agreed[some].exp().sum(0) for some in near])
        agreed = (own + estimate.certainty * pull).log_softmax(1)
    torch.testing.assert_close(found.softmax(1), agreed.exp(), rtol=0, atol=1e-5)


def test_digits_in_order_are_not_harmed() -> None:
    """On the network that ships: clean digits, sorted by class, one stream."""
    network = networks.load("digits-small-cnn")
    train, test = read_digits("train"), read_digits("test")
    layer = next(name for name, each in network.named_modules() if isinstance(each, nn.Conv2d))
    fitted = ttapca.fit(network, layer, to_tensor(train.images))
    labels = torch.as_tensor(test.labels)
    order = labels.argsort(stable=True)
    pixels = to_tensor(test.images)[order]

    def wrong(method: str, **given: Any) -> int:
        with ttapca.adapt(network, method, forgetting="online", **given) as adapted:  # type: ignore[arg-type]
            logits = torch.cat([adapted(batch) for batch in pixels.split(50)])
        return int((logits.argmax(1) != labels[order]).sum())

    source = wrong("source")
    assert wrong("wiener", filter=fitted) <= source + 3
    assert wrong("wiener", filter=fitted, composition=False) > source + 10


FEW = torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0]]).expand(80, 5)  # all of one class, and quite sure
MANY = 5.0 * torch.eye(5).repeat(16, 1)  # all classes, and surer
OTHER = FEW.roll(2, 1)
HIDDEN = 2.0 * torch.eye(5).repeat(16, 1) + 0.1 * FEW  # unsure, and of no class surely too many
UNSURE = 0.1 * FEW


def looked_at(
    batches: list[list[Tensor]], passes: int = 4, *, shifted: bool = True
) -> tuple[list[int], Composition]:
    """Return how many samples each pass had, where passes find these logits, batch by batch."""
    surface, stream = BatchNormStatistics(follow=True), Stream()
    if not shifted:
        stream.declare_certainty("shift")
    surface.attach(small_convnet(), stream)
    assert EVEN.class_moments_ is not None
    mover = CompositionPasses(EVEN.class_moments_, [surface], passes)
    mover.join(stream)
    sizes: list[int] = []
    for looks in batches:
        left = iter(looks)

        def run(pixels: Tensor, mask: Tensor, left: Iterator[Tensor] = left) -> Tensor:
            assert len(pixels) == len(mask)
            sizes.append(len(pixels))
            return next(left)

        size = len(looks[0])
        stream.start_batch(size)
        mover.predict(run, DATA[:size], mask=torch.ones(size))
        assert next(left, None) is None  # all were looked at
        stream.end_batch()
    return sizes, mover.composition


HALF_FEW = torch.cat([FEW[:40], MANY[:40]])


@pytest.mark.parametrize(
    ("looks", "ordered"),
    [
        pytest.param([MANY], False, id="shuffled"),
        pytest.param([HALF_FEW, OTHER[:40]], False, id="a glance sees other classes"),
        pytest.param([FEW, FEW[:40], FEW], True, id="one class, seen at once"),
        pytest.param([HALF_FEW, FEW[:40], FEW, FEW], True, id="one class, half hidden"),
        pytest.param([HIDDEN, FEW[:40], FEW], True, id="one class, hidden"),
        pytest.param([HIDDEN, OTHER[:40]], False, id="hidden, but another class"),
        pytest.param([HIDDEN, UNSURE[:40]], False, id="less sure at a glance"),
        pytest.param([HIDDEN, MANY[:40]], False, id="surer at a glance, of all classes"),
        pytest.param([2.5 * HIDDEN], False, id="sure of itself"),
    ],
)
def test_a_collapse_is_told_from_one_class(looks: list[Tensor], ordered: bool) -> None:
    sizes, composition = looked_at([looks])
    assert sizes == [len(each) for each in looks]
    assert (composition.ordered > 0.5) is ordered


def test_so_few_samples_cannot_have_hidden_a_class() -> None:
    sizes, composition = looked_at([[HIDDEN[:5]]])
    assert sizes == [5]
    assert composition.most_certain(5) < 0.5 < composition.most_certain(80)


def test_what_is_not_normalised_by_itself_hides_nothing() -> None:
    sizes, _ = looked_at([[HIDDEN]], shifted=False)
    assert sizes == [80]


def test_a_wrong_judgement_is_taken_back() -> None:
    first = [FEW, FEW[:40], FEW]
    _, composition = looked_at([first])
    assert composition.ordered == 1.0
    # Alone, the next batch shows all classes, and at a glance nothing that was not there before:
    # the stream starts with it.
    for glance in (MANY[:40], FEW[:40]):
        sizes, composition = looked_at([first, [MANY, glance]])
        assert sizes == [80, 40, 80, 80, 40]
        assert composition.ordered == 0.0
    # Other classes at a glance were hidden: a collapse would have shown those of before.
    sizes, composition = looked_at([first, [MANY, OTHER[:40], OTHER]])
    assert sizes == [80, 40, 80] * 2
    assert composition.ordered > 0.8
    # And if it shows its own as well, it is normalised by what was seen before.
    sizes, composition = looked_at([first, first])
    assert sizes == [80, 40, 80] * 2
    assert composition.ordered > 0.8


def test_a_restored_stream_goes_on_bit_for_bit() -> None:
    given: dict[str, Any] = {"filter": FITTED, "composition": True, "forgetting": "online"}
    first, second = DATA[:30] + 1.0, DATA[30:60] + 1.0
    with ttapca.adapt(small_convnet(), "wiener", **given) as adapted:
        adapted(first)
        state = adapted.state_dict()
        expected = adapted(second)
        adapted.reset()
        cold = adapted(second)
    assert not torch.equal(cold, expected)
    with ttapca.adapt(small_convnet(), "wiener", **given) as restored:
        restored.load_state_dict(state)
        assert torch.equal(restored(second), expected)


def test_moments_of_an_earlier_batch_are_not_settled() -> None:
    surface = BatchNormStatistics(follow=True)
    stream, model = Stream(), small_convnet()
    surface.attach(model, stream)
    stream.composition = CompositionPasses(FITTED.class_moments_, [surface], 3).composition
    stream.composition.join(stream)
    stream.composition.start_batch(20)
    model(DATA[:20] + 1.0)
    seen = stream.values
    surface.start_batch()
    surface.settle()
    assert stream.values.keys() == seen.keys()
    assert all(stream.values[name] is value for name, value in seen.items())


def test_mistakes() -> None:
    old = dataclasses.replace(FITTED, class_moments_=None)
    with pytest.raises(OptionError, match="`composition` needs a filter that knows"):
        ttapca.adapt(small_convnet(), "wiener", filter=old, composition=True)
    with pytest.raises(OptionError, match="`passes` would have no effect: without"):
        ttapca.adapt(small_convnet(), "wiener", filter=FITTED, composition=False, passes=2)
    with pytest.raises(OptionError, match="`composition` would have no effect: gradient"):
        ttapca.adapt(small_convnet(), "ttapca-closed", filter=FITTED, composition=True)
    known = FITTED.class_moments_
    assert known is not None
    fewer = ClassMoments(known.shares[:3], known.loadings[:3], known.layers)
    other = dataclasses.replace(FITTED, class_moments_=fewer)
    with (
        ttapca.adapt(small_convnet(), "wiener", filter=other, composition=True) as adapted,
        pytest.raises(LayerOutputError, match=r"predicts 3 classes.*found \(8, 5\)"),
    ):
        adapted(DATA[:8])
    with ttapca.adapt(small_convnet(), "wiener", filter=other) as adapted:  # nobody insists on it
        assert adapted(DATA[:8]).shape == (8, 5)
