"""What `fit` measures of classes, and that a saved filter still knows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import ttapca
from fitting.parted import assert_same, rewrite
from oracles import images, small_convnet
from scripted_classes import CLASSES, fitted, network, pictures, source
from ttapca.errors import SavedFilterError
from ttapca.spectral.source_classes import SourceClasses, corrections


def classes_of(one: ttapca.FittedFilter) -> SourceClasses:
    assert one.classes_ is not None
    return one.classes_


def test_moments_are_weighted_by_the_networks_own_predictions() -> None:
    data, model = images(400), small_convnet()
    moments = classes_of(ttapca.fit(model, "conv1", data, 40))
    with torch.no_grad():
        shares = model(data).softmax(1)  # (images, classes)
        inputs = model.conv1(data).flatten(2)  # what bn1 normalises
    torch.testing.assert_close(moments.shares.double(), shares.mean(0), rtol=1e-4, atol=1e-6)
    place = (torch.eye(shares.shape[1])[3] - moments.shares) @ moments.loadings
    [mean] = corrections(moments.layers["bn1"], place[None])[0]
    of_class = (shares[:, 3, None] * inputs.mean(2)).sum(0) / shares[:, 3].sum()
    expected = of_class - inputs.mean((0, 2))
    torch.testing.assert_close(mean.double(), expected, rtol=1e-3, atol=1e-4)


def test_likeness_is_the_share_of_the_variance_between_classes() -> None:
    model, data = network(), source()
    with torch.no_grad():
        shares = model(data).softmax(1).numpy()
    for path, found in classes_of(fitted()).likeness.items():
        inputs: list[Tensor] = []
        layer = model.get_submodule(path)
        handle = layer.register_forward_pre_hook(lambda _, x, seen=inputs: seen.append(x[0]))
        with torch.no_grad():
            model(data)
        handle.remove()
        means = inputs[0].mean((2, 3)).numpy()  # (images, channels)
        of_class = shares.T @ means / shares.sum(0)[:, None]
        between = shares.mean(0) @ (of_class - means.mean(0)) ** 2
        assert found == pytest.approx(np.mean(between / means.var(0)), rel=1e-3), path
        assert 0 < found < 1


def test_late_layers_tell_whether_two_images_have_one_class() -> None:
    """New ones, one way or the other; also if both are shifted and scaled."""
    pairs = classes_of(fitted()).pairs
    assert pairs is not None
    assert list(pairs.layers) == ["bn4"]
    assert pairs.directions == CLASSES - 1
    model, seen = network(), []
    model.get_submodule("bn4").register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].mean((2, 3)))
    )
    labels = torch.arange(400) // 2 % CLASSES  # each class twice
    with torch.no_grad():
        for change in (lambda x: x, lambda x: 3 * x + 1):
            model(change(pictures(labels, 77)))
    for means in seen:
        features = pairs.described({"bn4": means})
        assert features is not None
        rows = features.numpy()[None]
        said = pairs.log_ratio(rows[:, 0], rows)[0, 1:]
        same = (labels[1:] == labels[:-1]).numpy()
        assert said[same].mean() > 0.1
        assert said[~same].mean() < -0.1
        # In deviations, about what was measured on the source.
        spread = np.sqrt((said[same].var() + said[~same].var()) / 2)
        expected = (pairs.other - pairs.same) / pairs.deviation
        assert (said[same].mean() - said[~same].mean()) / spread == pytest.approx(expected, rel=0.3)


def test_the_order_of_the_data_does_not_matter() -> None:
    """Nor do the batches that they come in."""
    expected = classes_of(fitted())
    other = source()[torch.randperm(1000, generator=torch.Generator().manual_seed(6))]
    for data in (other, list(other.split(170))):
        found = classes_of(ttapca.fit(network(), "conv1", data, 40))
        torch.testing.assert_close(found.shares, expected.shares)
        assert found.likeness == pytest.approx(expected.likeness, rel=1e-4)
        assert found.pairs is not None
        assert expected.pairs is not None
        torch.testing.assert_close(found.pairs.numbers, expected.pairs.numbers, rtol=1e-3, atol=0)


def test_few_layers_and_few_images_say_nothing_of_pairs() -> None:
    assert classes_of(ttapca.fit(small_convnet(), "conv1", images(400), 40)).pairs is None
    few = classes_of(ttapca.fit(network(), "conv1", source()[: 10 * CLASSES], 20))
    assert few.likeness.keys() == classes_of(fitted()).likeness.keys()


# In a file.


def test_a_saved_filter_knows_its_classes(tmp_path: Path) -> None:
    fitted().save(tmp_path / "filter", dtype="float64")
    loaded = ttapca.load(tmp_path / "filter")
    assert classes_of(loaded).pairs is not None
    assert_same(loaded, fitted(), 0.0)


def test_a_loaded_filter_predicts_as_the_one_that_was_saved(tmp_path: Path) -> None:
    fitted().save(tmp_path / "filter")
    pixels = 1.5 * pictures(torch.arange(120) // 30, 8)
    found = []
    for one in (fitted(), ttapca.load(tmp_path / "filter")):
        adapter = ttapca.adapt(network(), "wiener", filter=one, order="auto", forgetting="online")
        found.append(torch.cat([adapter(batch) for batch in pixels.split(30)]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    fitted().save(folder)
    return rewrite(folder, lambda _, tensors: change(tensors))


def test_a_filter_of_an_older_version_knows_no_classes(tmp_path: Path) -> None:
    """It has moments, and neither likeness nor pairs."""

    def forget(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if each.startswith(("class_likeness", "pair"))]:
            del tensors[name]

    older = ttapca.load(rewritten(tmp_path / "filter", forget))
    assert older.classes_ is None
    adapter = ttapca.adapt(network(), "wiener", filter=older)
    assert adapter(pictures(torch.zeros(4, dtype=torch.long), 1)).shape == (4, CLASSES)
    assert adapter.health.ordered is None


def test_a_filter_without_pairs_is_one(tmp_path: Path) -> None:
    def forget(tensors: dict[str, Tensor]) -> None:
        for name in [each for each in tensors if each.startswith("pair")]:
            del tensors[name]

    loaded = classes_of(ttapca.load(rewritten(tmp_path / "filter", forget)))
    assert loaded.pairs is None
    assert loaded.likeness == pytest.approx(classes_of(fitted()).likeness, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("class_shares", lambda tensor: 2 * tensor, "with a sum of 1"),
        ("class_loadings", lambda tensor: tensor[:-1], "class_shares` .* must"),
        ("class_moments:bn1", lambda tensor: tensor[:-1], "class_moments:bn1` .* must"),
        ("class_likeness", lambda tensor: tensor[:-1], "class_likeness` .* must"),
        ("class_likeness", lambda tensor: tensor - 1, "correlations from 0 to 1"),
        ("class_likeness", lambda tensor: tensor * torch.nan, "class_likeness"),
        ("pair_numbers", lambda tensor: tensor[:-1], "pair_numbers` .* must"),
        ("pair_numbers", lambda tensor: tensor + 0.5, "a stride, a number of directions"),
        ("pair_numbers", lambda tensor: tensor * 0, "a stride, a number of directions"),
        ("pairs:bn4", lambda tensor: tensor[:, :2], "a stride, a number of directions"),
        ("pairs:bn4", lambda tensor: tensor[0], "pair"),
    ],
)
def test_damaged_classes_are_refused(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], fault: str
) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name])

    with pytest.raises(SavedFilterError, match=fault):
        ttapca.load(rewritten(tmp_path / "filter", damage))


@pytest.mark.parametrize("name", ["pair_numbers", "pairs:bn4"])
def test_half_of_what_pairs_need_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SavedFilterError):
        ttapca.load(rewritten(tmp_path / "filter", lambda tensors: tensors.pop(name)))


def test_pairs_of_a_layer_without_moments_are_refused(tmp_path: Path) -> None:
    def move(tensors: dict[str, Tensor]) -> None:
        tensors["pairs:bn9"] = tensors["pairs:bn4"][:-1].clone()

    folder = rewritten(tmp_path / "filter", move)
    try:
        loaded = ttapca.load(folder)
    except SavedFilterError:
        return
    # If it is read, its pairs say nothing, because no such layer is ever called.
    adapter = ttapca.adapt(network(), "wiener", filter=loaded, order="auto")
    assert adapter(pictures(torch.zeros(4, dtype=torch.long), 1)).shape == (4, CLASSES)


def test_scenes_reach_as_far_as_those_of_a_place() -> None:
    """A scene has some of every class, so stretches or groups take the place of classes."""
    generator = torch.Generator().manual_seed(0)
    places = 0.7 * torch.randn(4, 3, 6, 6, generator=generator)  # of 64 scenes each, in order
    data = places.repeat_interleave(64, 0) + torch.randn(256, 3, 6, 6, generator=generator)
    body = [torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU()]
    model = torch.nn.Sequential(*body, torch.nn.Conv2d(4, 3, 1)).eval()
    found = ttapca.fit(model, "0", data)

    def slow(fitted: ttapca.FittedFilter, length: int) -> Tensor:
        rows = fitted.basis.project(data.flatten(1) - fitted.center_).double()
        squares = []
        for own in rows.split(length):  # each has one more, the mean of all
            squares.append(((own.sum(0) + rows.mean(0)) / (length + 1)).square())
        variances = fitted.source_variance_
        within = (variances - torch.stack(squares).mean(0)).clamp(min=variances / 64)
        return torch.stack(squares).amax(0) / within

    assert found.class_reach_ is not None
    torch.testing.assert_close(found.class_reach_.double(), slow(found, 32), rtol=1e-3, atol=1e-4)
    named = ttapca.fit(model, "0", data, groups=[number // 64 for number in range(256)])
    assert named.class_reach_ is not None
    torch.testing.assert_close(named.class_reach_.double(), slow(named, 64), rtol=1e-3, atol=1e-4)
    order = torch.randperm(256, generator=generator)
    shuffled = ttapca.fit(model, "0", data[order]).class_reach_
    assert shuffled is not None
    # The first components are those in which places differ.
    assert float(found.class_reach_[:3].min()) > 2 * float(shuffled[:3].max())
