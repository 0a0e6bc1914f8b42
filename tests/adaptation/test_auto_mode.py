"""Which network answers: a loop as oracle, simulated streams, and the bound on switches."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttapca.adaptation.auto_mode import LONG, WAIT, expected_gain, judged, shows_harm
from ttapca.spectral.stream_state import AutoState

CLASSES, TEMPERATURE = 5, 1.5
Both = tuple[Tensor, Tensor]  # logits of the adapted and of the untouched network


def logits(classes: Tensor, sure: float) -> Tensor:
    """Logits that say these classes with this probability, at the temperature."""
    odds = math.log(sure / (1 - sure) * (CLASSES - 1))
    return TEMPERATURE * odds * torch.nn.functional.one_hot(classes, CLASSES).float()


def drawn(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CLASSES, (count,), generator=generator)


def clean(count: int, seed: int) -> Both:
    both = logits(drawn(count, seed), 0.95)
    return both, both


def helped(count: int, seed: int) -> Both:
    """A shift makes the untouched network say the same class of most images."""
    truth = drawn(count, seed)
    return logits(truth, 0.9), logits(torch.where(drawn(count, seed + 1) > 1, 0, truth), 0.7)


def collapsed(count: int, seed: int) -> Both:
    """The adapted network is sure that all images have one class."""
    return logits(torch.zeros(count, dtype=torch.long), 0.99), logits(drawn(count, seed), 0.6)


def confused(count: int, seed: int) -> Both:
    """The adapted network says other classes, and is unsure."""
    return logits(drawn(count, seed), 0.4), logits(drawn(count, seed + 1), 0.8)


def in_runs(count: int, seed: int) -> Both:
    """One class of some hundred images, which the untouched network often mistakes."""
    truth = torch.full((count,), seed // 10 % CLASSES)
    mistaken = drawn(count, seed) > 2
    return logits(truth, 0.98), logits(torch.where(mistaken, drawn(count, seed + 1), truth), 0.6)


KINDS: tuple[Callable[[int, int], Both], ...] = (clean, helped, collapsed, confused, in_runs)


def after(*parts: Both, state: AutoState | None = None) -> AutoState:
    for adapted, untouched in parts:
        state = judged(state, adapted, untouched, TEMPERATURE)
    assert state is not None
    return state


def stream(kind: Callable[[int, int], Both], batches: int, size: int = 50) -> list[Both]:
    return [kind(size, number) for number in range(batches)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 1000))
def test_sums_are_those_of_a_loop(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    state, gains, sums = None, np.zeros(3), np.zeros(2 + 2 * CLASSES)
    for size in sizes:
        adapted, untouched = 3 * torch.randn(2, size, CLASSES, generator=generator)
        state = judged(state, adapted, untouched, TEMPERATURE)
        gains *= math.exp(-size / 200)
        sums *= math.exp(-size / LONG)
        for one, other in zip(adapted.double(), untouched.double(), strict=True):
            p, q = (np.exp(each / TEMPERATURE) for each in (one.numpy(), other.numpy()))
            p, q = p / p.sum(), q / q.sum()
            gain = p[p.argmax()] - p[q.argmax()]
            # A draw: the adapted network alone is right, the untouched one alone, or neither is.
            spread = p[p.argmax()] * (1 - gain) ** 2 + p[q.argmax()] * (-1 - gain) ** 2
            spread += (1 - p[p.argmax()] - p[q.argmax()]) * gain**2
            gains += [1, gain, spread if p.argmax() != q.argmax() else 0]
            sums[:2] += [-(p * np.log(p)).sum(), -(q * np.log(q)).sum()]
            sums[2 + p.argmax()] += 1
            sums[2 + CLASSES + q.argmax()] += 1
    assert state is not None
    np.testing.assert_allclose(state.gain.numpy(), gains, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(state.sums.numpy(), sums, rtol=1e-6)
    assert state.images == sum(sizes)
    assert not state.adapting


def test_a_clean_stream_is_left_to_the_untouched_network() -> None:
    state = after(*stream(clean, 60))
    assert (state.adapting, state.harmful, state.switches) == (False, False, 0)
    assert expected_gain(state) == (0, 0)


@pytest.mark.parametrize("size", [1, 50, 64])
def test_a_stream_that_gains_is_adapted_to_after_two_hundred_images(size: int) -> None:
    state, images = None, 0
    while state is None or not state.adapting:
        assert images < WAIT + size
        images += size
        state = after(helped(size, images), state=state)
    assert images >= WAIT
    assert (state.switches, state.images, state.harmful) == (1, 0, False)
    # It stays so, and ends some hundred images after the shift.
    state = after(*stream(helped, 40), state=state)
    assert (state.adapting, state.switches) == (True, 1)
    state = after(*stream(clean, 40), state=state)
    assert (state.adapting, state.switches) == (False, 2)


@pytest.mark.parametrize("kind", [collapsed, confused])
def test_a_sign_of_harm_ends_adapting_although_a_gain_is_expected(kind) -> None:
    state = after(*stream(kind, 20))
    assert expected_gain(state)[1] > 0.1
    assert (state.adapting, state.harmful, state.switches) == (False, True, 0)
    state = after(*stream(helped, 20))
    assert state.adapting
    state = after(*stream(kind, 40), state=state)
    assert (state.adapting, state.harmful, state.switches) == (False, True, 2)
    state = after(*stream(helped, 120), state=state)  # and it comes back
    assert (state.adapting, state.harmful, state.switches) == (True, False, 3)


def test_a_stream_with_runs_is_adapted_to_once_it_has_shown_several_classes() -> None:
    state = after(*stream(in_runs, 4))
    assert state.harmful  # for all that is known, the adapted network has collapsed
    state = after(*[in_runs(50, number) for number in range(60)])
    assert (state.adapting, state.harmful, state.switches) == (True, False, 1)


def test_what_suffices_to_go_on_does_not_suffice_to_begin() -> None:
    def little(count: int, seed: int) -> Both:
        """The two differ about one image of 111."""
        truth, first = drawn(count, seed), torch.arange(count) + count * seed
        return logits(truth, 0.9), logits((truth + (first % 111 == 0)) % CLASSES, 0.9)

    fresh = after(*stream(little, 60))
    assert 0.005 < expected_gain(fresh)[0] < 0.01
    assert not fresh.adapting
    begun = after(*stream(helped, 10), *stream(little, 60))
    assert 0.005 < expected_gain(begun)[0] < 0.01
    assert (begun.adapting, begun.switches) == (True, 1)


def test_a_sign_of_harm_begins_later_than_it_ends() -> None:
    sums = torch.zeros(2 + 2 * CLASSES, dtype=torch.float64)
    nothing = AutoState(False, False, 0, 0, torch.zeros(3, dtype=torch.float64), sums)
    assert not shows_harm(nothing)
    for entropy, expected in ((1.0, (False, False)), (1.22, (False, True)), (1.3, (True, True))):
        sums = torch.tensor([entropy, 1.0, *[1.0] * 2 * CLASSES], dtype=torch.float64)
        found = [AutoState(True, each, 0, 0, nothing.gain, sums) for each in (False, True)]
        assert tuple(map(shows_harm, found)) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(1, 12), st.integers(1, 90)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 1000),
)
def test_there_is_no_more_than_one_switch_in_two_hundred_images(parts, seed: int) -> None:
    state, images, last, switches = None, 0, 0, 0
    for kind, batches, size in parts:
        for number in range(batches):
            before = state is not None and state.adapting
            state = after(kind(size, seed + number), state=state)
            images += size
            if state.adapting != before:
                assert images - last >= WAIT
                last, switches = images, switches + 1
    assert state is not None
    assert state.switches == switches <= images / WAIT


def test_a_choice_among_other_classes_begins_anew() -> None:
    state = after(*stream(helped, 10))
    found = judged(state, torch.zeros(3, 4), torch.zeros(3, 4), 1.0)
    assert (found.adapting, found.images, len(found.sums)) == (False, 3, 10)
