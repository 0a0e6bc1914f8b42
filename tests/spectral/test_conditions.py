"""Images are told apart by what happened to them, not by what they show."""

from __future__ import annotations

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from ttapca.spectral.conditions import Appearances, ConditionStates, KnownConditions, _two_means
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.image_statistics import TEXTURES, textures

SIZE = 6


class AsTheyAre:
    """Stands for `Appearances` where rows are given."""

    size = SIZE
    reach = 30.0  # as of 10,000 rows


class OneStream:
    """The conditions of one stream, told apart batch by batch."""

    def __init__(self, most: int = 8, constants: Constants = CONSTANTS) -> None:
        self.conditions = ConditionStates(AsTheyAre(), most, constants)  # type: ignore[arg-type]
        self.known = KnownConditions.none(SIZE)
        self.begun: set[int] = set()

    def told(self, batch: Tensor) -> NDArray[np.int64]:
        self.known, found, self.begun = self.conditions.told_apart(self.known, batch.numpy())
        assert len(found) == len(batch)
        assert len(self.known.centres) == len(self.known.weights)
        return found

    @property
    def states(self) -> int:
        return len(self.known.centres)


def rows(number: int, seed: int, *centre: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(number, SIZE, generator=generator, dtype=torch.float64)
    found[:, : len(centre)] += torch.tensor(centre, dtype=torch.float64)
    return found


def shuffled(*groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in random order, and the number of the group of each."""
    together = torch.cat(groups)
    of = torch.cat([torch.full((len(group),), i) for i, group in enumerate(groups)])
    order = torch.randperm(len(together), generator=torch.Generator().manual_seed(3))
    return together[order], of[order]


def plain_textures(image: Tensor) -> list[float]:
    channels, height, width = image.shape
    grey = [
        [sum(float(image[c, i, j]) for c in range(channels)) / channels for j in range(width)]
        for i in range(height)
    ]
    kinds: list[list[float]] = []
    for d in (1, 2):
        kinds.append([grey[i][j + d] - grey[i][j] for i in range(height) for j in range(width - d)])
        kinds.append([grey[i + d][j] - grey[i][j] for i in range(height - d) for j in range(width)])
    kinds.append(
        [
            4 * grey[i][j] - grey[i - 1][j] - grey[i + 1][j] - grey[i][j - 1] - grey[i][j + 1]
            for i in range(1, height - 1)
            for j in range(1, width - 1)
        ]
    )
    found = []
    for kind in kinds:
        sizes = [abs(each) for each in kind]
        found.append((sum(map(math.sqrt, sizes)) / len(sizes)) ** 2)
        found.append(sum(sizes) / len(sizes))
        found.append(math.sqrt(sum(each * each for each in sizes) / len(sizes)))
    return found


@pytest.mark.parametrize("shape", [(3, 7, 5), (1, 5, 9)])
def test_textures_are_averages_of_differences(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttapca.spectral.image_statistics.TOGETHER", 200)  # in several parts
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = textures(images)
    assert found.shape == (4, TEXTURES)
    expected = torch.tensor([plain_textures(image) for image in images], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


def test_source_images_vary_by_one_in_every_direction() -> None:
    mixing = torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.9, 0.2], [0.0, 0.0, 2.0]], dtype=torch.float64)
    energies = (rows(3000, 0)[:, :3] @ mixing).exp()
    described = Appearances(energies[:, :2], energies[:, 2:])(energies[:, :2], energies[:, 2:])
    torch.testing.assert_close(described.mean(0), torch.zeros(3).double(), atol=1e-9, rtol=0)
    covariance = torch.cov(described.T)
    torch.testing.assert_close(covariance, torch.eye(3).double(), atol=0.05, rtol=0)


def test_an_image_without_detail_is_described() -> None:
    describe = Appearances(rows(100, 0).exp())
    assert bool(torch.isfinite(describe(torch.zeros(1, SIZE))).all())


def test_few_source_images_do_not_tell_how_images_vary() -> None:
    assert Appearances(rows(4 * SIZE, 0).exp()).known
    assert not Appearances(rows(4 * SIZE - 1, 0).exp()).known


def resemblance_of(stream: Tensor, source: Tensor) -> float:
    conditions = ConditionStates.of_source(source, None, 4)
    assert conditions is not None
    known, _, _ = conditions.told_apart(
        KnownConditions.none(SIZE), conditions.describe(stream).numpy()
    )
    return conditions.resemblance(known)


@pytest.mark.parametrize("noise", [0.0, 3.0, 30.0])
def test_samples_with_noise_resemble_each_other_no_more_than_without(noise: float) -> None:
    """Standing and running differ a thousandfold in energy, and with noise hardly at all."""
    source, stream = ((2 * rows(count, 5 + count)).exp() for count in (400, 50))
    assert resemblance_of(stream + noise, source) == 0


@pytest.mark.parametrize("energy", [0.1, 1.0, 20.0])
def test_a_still_scene_resembles_itself(energy: float) -> None:
    source, noise = (2 * rows(400, 405)).exp(), rows(50, 3)
    still = energy * source.mean(0) * (0.01 * noise).exp()
    assert resemblance_of(still, source) > 0.9


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=12).filter(lambda x: len(set(x)) > 1))
def test_numbers_are_cut_where_least_variance_is_left(numbers: list[int]) -> None:
    def spread(some: list[int]) -> float:
        return sum((each - sum(some) / len(some)) ** 2 for each in some)

    rising = sorted(numbers)
    least = min(spread(rising[:k]) + spread(rising[k:]) for k in range(1, len(rising)))
    left, cut, distance = _two_means(np.array(numbers, dtype=np.float64))
    low, high = [x for x in rising if x <= cut], [x for x in rising if x > cut]
    assert left == pytest.approx(least / spread(rising), abs=1e-9)
    assert spread(low) + spread(high) == pytest.approx(least, abs=1e-6)
    assert distance == pytest.approx(sum(high) / len(high) - sum(low) / len(low))


@pytest.mark.parametrize("size", [200, 16, 1])
def test_one_condition_has_one_state_however_much_its_images_vary(size: int) -> None:
    stream = OneStream()
    varied = rows(400, 0, 4.0) * torch.tensor([4.0, 2.0, 1.0, 1.0, 1.0, 0.3])
    found = np.concatenate([stream.told(batch) for batch in varied.split(size)])
    assert (found == 0).mean() > 0.99  # but for a stranger, while few have shown how they vary


@pytest.mark.parametrize("size", [150, 32, 8])
def test_conditions_that_are_mixed_are_told_apart(size: int) -> None:
    stream = OneStream()
    mixed, of = shuffled(rows(200, 0), rows(200, 1, 9.0), rows(200, 2, 0.0, 9.0))
    found = np.concatenate([stream.told(batch) for batch in mixed.split(size)])[-300:]
    last = of[-300:].numpy()
    assert stream.states == 3
    for group in range(3):
        own = found[last == group]
        state = np.bincount(own).argmax()
        assert (own == state).mean() > 0.98
        assert (found[last != group] == state).mean() < 0.02


def test_a_condition_that_comes_back_finds_its_state() -> None:
    stream = OneStream()
    seen = [
        stream.told(batch).tolist()
        for condition in ((0.0,), (6.0,), (0.0,), (0.0, 6.0), (6.0,))
        for batch in rows(200, 5, *condition).split(100)
    ]
    assert seen == [[state] * 100 for state in (0, 0, 1, 1, 0, 0, 2, 2, 1, 1)]


def test_when_a_condition_ends_images_like_the_source_soon_have_a_state_of_their_own() -> None:
    stream = OneStream()
    ended = torch.cat([rows(60, 5, 7.0), rows(20, 6), rows(20, 7, 7.0)])
    seen = [int(stream.told(row)[0]) for row in ended.split(1)]
    # One or two odd images among many do not make a condition.
    assert seen[:60] == [0] * 60
    assert seen[63:80] == [1] * 17
    assert seen[83:] == [0] * 17
    like_source = OneStream()  # where there is such a state already, there is no other one
    assert {int(like_source.told(row)[0]) for row in rows(60, 8, 2.0).split(1)} == {0}


def test_new_conditions_are_searched_when_enough_images_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = OneStream()
    searched: list[int] = []
    search = ConditionStates._searched

    def counted(self: ConditionStates, known: KnownConditions, begun: set[int]) -> KnownConditions:
        searched.append(len(known.unsearched))
        return search(self, known, begun)

    monkeypatch.setattr(ConditionStates, "_searched", counted)
    for batch in rows(200, 0).split(8):
        stream.told(batch)
    # Not before there are enough images, then with each quarter of them that is new.
    assert searched == [64] + 8 * [16]
    monkeypatch.setattr(stream.conditions, "_reach", math.inf)  # nothing is a stranger
    for batch in rows(16, 2, 0.0, 14.0).split(8):
        stream.told(batch)
    assert len(searched) == 10
    assert stream.states == 2


@pytest.mark.parametrize("size", [100, 20, 1])
@pytest.mark.parametrize("count", [1, 7, 50])
def test_strangers_have_a_state_of_their_own(size: int, count: int) -> None:
    """Whether they come alone or among others, and when they are over, all is as before."""
    stream = OneStream()
    strangers = rows(count, 1, 0.0, 0.0, 40.0)
    usual = rows(200, 0)
    arriving = torch.cat([usual[:100], strangers, usual[100:]])
    strange = torch.zeros(len(arriving), dtype=torch.bool)
    strange[100 : 100 + count] = True
    found = np.concatenate([stream.told(batch) for batch in arriving.split(size)])
    assert not set(found[strange.numpy()]) & set(found[~strange.numpy()])
    assert len(set(found[~strange.numpy()])) == 1


def test_the_first_images_of_a_stream_may_be_followed_by_strangers() -> None:
    stream = OneStream()
    for batch in (rows(2, 0), rows(1, 1, 40.0), rows(30, 2)):
        for row in batch.split(1):
            stream.told(row)
    assert stream.known.weights.round().tolist() == [30, 1]


def test_a_place_is_given_up_by_a_state_that_was_not_seen_for_long() -> None:
    stream = OneStream(most=4)
    for number in range(3):
        stream.told(rows(40, number, 0.0, 60.0 * (number + 1)))
    for batch in rows(20, 5).split(10):
        stream.told(batch)
    assert stream.states == 4
    stream.told(rows(10, 6, 90.0))
    assert not stream.begun  # all have been seen of late
    for batch in rows(400, 7).split(50):
        stream.told(batch)
    assert set(stream.told(rows(10, 6, 90.0)).tolist()) == {0}  # where the first one was
    assert stream.states == 4


def test_conditions_are_present_if_some_of_the_last_images_have_them() -> None:
    stream = OneStream()
    assert stream.known.present().tolist() == [0]
    for centre, count, present in ((0.0, 100, [0]), (40.0, 60, [0, 1]), (0.0, 58, [0, 1])):
        for batch in rows(count, 3, centre).split(10):
            stream.told(batch)
        assert stream.known.present().tolist() == present
    stream.told(rows(6, 4))
    assert stream.known.present().tolist() == [0]


def test_there_are_no_more_states_than_asked_for() -> None:
    stream = OneStream(most=2)
    mixed, _ = shuffled(*(rows(80, i, 9.0 * i) for i in range(4)))
    assert set(stream.told(mixed).tolist()) == {0, 1}
    assert set(stream.told(rows(100, 9, 0.0, 50.0)).tolist()) <= {0, 1}
    assert stream.states == 2


def test_the_last_images_are_looked_at() -> None:
    stream = OneStream(constants=dataclasses.replace(CONSTANTS, memory=50))
    for batch in rows(230, 0).split(70):
        stream.told(batch)
    np.testing.assert_array_equal(stream.known.last(100), rows(230, 0)[-100:])
    np.testing.assert_array_equal(stream.known.last(7), rows(230, 0)[-7:])
    assert len(stream.known.searched) <= 100


def test_what_was_known_is_not_written_into() -> None:
    """A batch that turns out broken has left nothing behind."""
    stream = OneStream()
    seen = shuffled(rows(90, 0), rows(90, 1, 9.0))[0]
    for batch in seen.split(45):
        stream.told(batch)
    assert stream.states == 2
    before = copy.deepcopy(stream.known)
    known = stream.known
    following = torch.cat([rows(40, 2, 0.0, 12.0), rows(3, 3, 9.0)]).numpy()
    after, found, _ = stream.conditions.told_apart(known, following)
    assert len(after.centres) == 3
    again, same, _ = stream.conditions.told_apart(known, following)
    np.testing.assert_array_equal(same, found)
    for each in dataclasses.fields(KnownConditions):
        kept, wanted = getattr(known, each.name), getattr(before, each.name)
        np.testing.assert_array_equal(kept, wanted, err_msg=each.name)
        one, other = getattr(again, each.name), getattr(after, each.name)
        np.testing.assert_array_equal(one, other, err_msg=each.name)


def test_nothing_is_known_of_a_new_stream() -> None:
    nothing = KnownConditions.none(SIZE)
    assert nothing.centres.shape == nothing.searched.shape == nothing.last(1).shape == (0, SIZE)
    states = ConditionStates.of_source(rows(100, 0).exp(), None, 4)
    assert states is not None
    assert states.describe.size == SIZE
    assert ConditionStates.of_source(rows(100, 0).exp(), None, 1) is None  # nobody asks
    assert ConditionStates.of_source(rows(4 * SIZE - 1, 0).exp(), None, 4) is None
    assert ConditionStates.of_source(None, None, 4) is None
