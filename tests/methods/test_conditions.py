"""Batches in which images have several conditions: each has gains and statistics of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import same
from oracles import images, small_convnet
from small_networks import group_norm_convnet
from ttapca.spectral.stream_batch import ImageRows

ALL = images(2000)
SOURCE, NEW = ALL[:1200], ALL[1200:]
SHAPE = (3, 6, 6)


def group_norm_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return group_norm_convnet().double().eval()


NETWORKS = {"BatchNorm": small_convnet, "GroupNorm": group_norm_net}


def conditions(first: int, number: int) -> tuple[Tensor, Tensor]:
    """Return new images, each clean, noisy or pale, in random order, and which it is."""
    generator = torch.Generator().manual_seed(first)
    of = torch.randint(3, (number,), generator=generator)
    noise = torch.randn(number, *SHAPE, generator=generator, dtype=torch.float64)
    clean, which = NEW[first : first + number], of.view(-1, 1, 1, 1)
    pale = 0.5 + 0.05 * (clean - 0.5)
    return torch.where(which == 1, clean + 9 * noise, torch.where(which == 2, pale, clean)), of


BATCHES = [conditions(*each) for each in ((0, 120), (120, 90), (210, 1), (211, 40))]


def adapted_to(kind: str, forgetting: str = "online", **given: object) -> ttapca.Adapter:
    model = NETWORKS[kind]()
    fitted = ttapca.fit(model, "conv1", SOURCE, 40)
    given = {"order": "shuffled", **given}
    return ttapca.adapt(model, "wiener", filter=fitted, forgetting=forgetting, **given)


@pytest.mark.parametrize("kind", NETWORKS)
def test_each_condition_is_served_as_if_it_came_alone(kind: str) -> None:
    adapted = adapted_to(kind, outliers=False)
    alone = adapted_to(kind, states=1, outliers=False)
    for batch, of in BATCHES:
        expected = torch.empty(len(batch), 5, dtype=torch.float64)
        for condition in range(3):
            chosen = of == condition
            if chosen.any():
                expected[chosen] = alone.stream(f"condition {condition}")(batch[chosen])
        torch.testing.assert_close(adapted(batch), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", NETWORKS)
def test_streams_of_several_conditions_share_a_pass_as_if_each_came_alone(kind: str) -> None:
    """One of them has a single condition, and another one is not adapted to."""
    together, alone = adapted_to(kind, outliers=False), adapted_to(kind, outliers=False)
    states = [together.new_state()] * 4
    for first in (0, 120, 240):
        batches = [
            conditions(first + 120 * number, size)[0] for number, size in enumerate((90, 40))
        ]
        one_condition = 0.5 + 3 * (NEW[first : first + 70] - 0.5)
        batches += [one_condition, batches[1]]
        sizes = torch.tensor([len(batch) for batch in batches])
        stream = torch.arange(4).repeat_interleave(sizes)
        rows = ImageRows(stream, torch.ones_like(stream, dtype=torch.bool), stream < 3)
        logits, outcomes = together.predict_streams(states, torch.cat(batches), rows)
        states = [each.state for each in outcomes]
        found = logits.split(sizes.tolist())
        for number, batch in enumerate(batches[:3]):
            expected = alone.stream(f"stream {number}")(batch)
            torch.testing.assert_close(found[number], expected, rtol=1e-9, atol=1e-9)
        with alone.disabled():
            assert torch.equal(found[3], alone(batches[3]))
    assert [state.known_conditions for state in states] == [3, 3, 1, 3]
    for number, state in enumerate(states[:3]):
        wanted = alone.stream(f"stream {number}").health
        assert state.shift == pytest.approx(wanted.shift)
        assert state.known_conditions == wanted.conditions
    assert states[3].shift > 0.9  # it is watched all the same


def test_the_surest_condition_is_explained_as_if_it_came_alone() -> None:
    batch, of = BATCHES[0]
    adapted = adapted_to("BatchNorm", outliers=False)
    adapted(batch)
    (found,) = ttapca.explain(adapted)
    alone = adapted_to("BatchNorm", states=1, outliers=False)
    by_condition = []
    for condition in range(3):
        alone.reset()
        alone(batch[of == condition])
        by_condition += ttapca.explain(alone)
    expected = max(by_condition, key=lambda each: each.shift)
    assert found.shift == pytest.approx(expected.shift) == adapted.health.shift
    for band, other in zip(found.bands, expected.bands, strict=True):
        assert band.test_variance == pytest.approx(other.test_variance)
        assert band.gain == pytest.approx(other.gain)


@pytest.mark.parametrize("kind", NETWORKS)
def test_one_condition_changes_no_bit(kind: str) -> None:
    adapted, one = adapted_to(kind), adapted_to(kind, states=1)
    for batch in NEW[:300].split(100):
        strong = 0.5 + 3 * (batch - 0.5)
        assert torch.equal(adapted(strong), one(strong))


def test_episodic_adaptation_starts_from_one_condition() -> None:
    adapted = adapted_to("BatchNorm", "episodic")
    first = adapted(BATCHES[0][0])
    adapted(BATCHES[1][0])
    assert torch.equal(adapted(BATCHES[0][0]), first)


def test_a_stream_of_several_conditions_is_saved_whole(tmp_path: Path) -> None:
    adapted, other = adapted_to("BatchNorm"), adapted_to("BatchNorm")
    adapted(BATCHES[0][0])
    adapted.stream("default").save(tmp_path / "stream")
    other.stream("default").load(tmp_path / "stream")
    assert torch.equal(other(BATCHES[1][0]), adapted(BATCHES[1][0]))
    other.load_state_dict(adapted.state_dict())
    assert torch.equal(other(BATCHES[3][0]), adapted(BATCHES[3][0]))
    # A stream of one condition can take the place of one with several.
    adapted.reset()
    adapted.stream("default").save(tmp_path / "new")
    other.stream("default").load(tmp_path / "new")
    assert same(other.get_extra_state()["streams"], adapted.get_extra_state()["streams"])


def test_classes_and_conditions_go_together() -> None:
    adapted = adapted_to("BatchNorm", order="auto")
    for batch, _ in BATCHES:
        assert bool(torch.isfinite(adapted(batch)).all())
    assert adapted.skipped == 0


def test_a_learned_factor_moves_under_several_conditions() -> None:
    model = small_convnet()
    fitted = ttapca.fit(model, "conv1", SOURCE, 40)
    adapted = ttapca.adapt(model, "ttapca-closed", filter=fitted, forgetting="online", lr=0.1)
    assert bool(torch.isfinite(torch.cat([adapted(batch) for batch, _ in BATCHES])).all())
    assert (adapted.updates, adapted.skipped) == (len(BATCHES), 0)
