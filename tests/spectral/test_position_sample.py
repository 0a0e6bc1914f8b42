"""A sample that is spread evenly, whoever reads the stream and in whichever order."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttapca.errors import NotEnoughDataError
from ttapca.spectral import position_sample
from ttapca.spectral.conditions import FEWEST_SOURCE
from ttapca.spectral.position_sample import ENOUGH, HELD_OUT, SAMPLES, Positions, PositionSample


def sample_of(first: int, last: int, batch: int = 100) -> PositionSample:
    """Of a stream whose samples are their own positions."""
    sample, positions = PositionSample(1), Positions(first)
    for start in range(0, last - first, batch):
        places = positions.of(start, min(batch, last - first - start))
        sample.take(places[:, None].double(), places)
    return sample


def chosen(count: int, limit: int) -> list[int]:
    """The largest of all halves of halves that is not too much."""
    kept, share = list(range(count)), 1.0
    while len(kept) > limit:
        share /= 2
        kept = [each for each in kept if each * (5**0.5 - 1) / 2 % 1 < share]
    return kept


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 6000), st.integers(1, 400))
def test_a_sample_is_spread_over_the_stream(n: int, batch: int) -> None:
    sample = sample_of(0, n, batch)
    kept = sample.all().flatten()
    assert kept.tolist() == chosen(n, SAMPLES)
    assert sample.seen == n
    assert sample.positions().tolist() == kept.tolist()
    folds = sample.folds()
    together = torch.cat(folds).tolist()
    assert len(set(together)) == len(together) >= min(len(kept), ENOUGH)
    for fold in folds:
        assert len(fold) <= n / HELD_OUT + 1
        assert fold.diff().unique().numel() <= 1  # evenly spread


@settings(deadline=None, max_examples=25)
@given(st.data(), st.integers(1, 900))
def test_parts_in_any_order_merge_into_the_sample_of_the_whole(data: st.DataObject, n: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(position_sample, "SAMPLES", 60)
        cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=7)))
        parts = [sample_of(*ends, batch=37) for ends in pairwise([0, *cuts, n])]
        order = data.draw(st.permutations(parts))
        found = PositionSample(1)
        for part in order:
            found.merge(pickle.loads(pickle.dumps(part)))
        whole = sample_of(0, n)
        assert torch.equal(found.all(), whole.all())
        assert found.seen == n
        assert torch.equal(found.positions(), whole.positions())
        for one, two in zip(found.folds(), whole.folds(), strict=True):
            assert torch.equal(one, two)


def test_processes_take_turns() -> None:
    """Each of three has every third position: of each, as many are kept in the end."""
    found = PositionSample(1)
    for rank in range(3):
        places = Positions(rank, 3).of(0, 4000)
        part = PositionSample(1).take(places[:, None].double(), places)
        found.merge(part)
    assert found.all().flatten().tolist() == chosen(12_000, SAMPLES)
    counts = (found.positions() % 3).bincount()
    assert int(counts.max() - counts.min()) <= 3


@pytest.mark.parametrize("period", [2, 5, 10, 32, 100])
def test_a_period_in_the_data_leaves_no_trace(period: int) -> None:
    """Classes that take turns are all there, about as often as in the data."""
    kept = sample_of(0, 50_000).positions()
    counts = (kept % period).bincount(minlength=period)
    expected = len(kept) / period
    assert float((counts - expected).abs().max()) <= 3 + 0.1 * expected


def test_what_is_pickled_is_what_is_kept() -> None:
    sample = PositionSample(8192).take(torch.ones(3, 8192), torch.arange(3))
    assert len(pickle.dumps(sample)) < 4 * 8192 * 4  # not the memory for 2,048 of them


def test_nothing_was_seen() -> None:
    with pytest.raises(NotEnoughDataError, match="needs data; found none"):
        pickle.loads(pickle.dumps(PositionSample(3))).all()


def test_photographs_are_enough_to_know_how_images_vary() -> None:
    """Kept are at least half as many as may be; with fewer, no conditions were told apart."""
    photograph, numbers = 3 * 224 * 224, 18 + 15  # energies of bands and textures
    assert PositionSample(photograph)._limit // 2 >= FEWEST_SOURCE * numbers
