from __future__ import annotations

import pytest
import torch
from torch import Generator, nn

from oracles import images
from ttapca.methods.views import CROP, GENTLE, Jitter, mixed_views
from ttapca.methods.weights import with_values

X = images(40, shape=(3, 16, 12))


def draw(jitter: Jitter, seed: int = 0) -> torch.Tensor:
    return jitter(X, Generator().manual_seed(seed))


def test_no_change_is_the_identity() -> None:
    torch.testing.assert_close(draw(Jitter()), X)


def test_half_are_mirrored() -> None:
    flipped = draw(Jitter(flip=True))
    mirrored = [torch.allclose(a, b.flip(-1)) for a, b in zip(flipped, X, strict=True)]
    same = [torch.allclose(a, b) for a, b in zip(flipped, X, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 10 < sum(mirrored) < 30


def test_shifts_are_of_whole_pixels() -> None:
    shifted = draw(Jitter(shift=1 / 8))
    moves = [(down, across) for down in range(-2, 3) for across in range(-2, 3)]
    for image, original in zip(shifted, X, strict=True):
        inside = image[:, 2:-2, 2:-2]
        assert any(
            torch.allclose(inside, original.roll(move, (1, 2))[:, 2:-2, 2:-2]) for move in moves
        )


def test_a_quarter_turn_of_a_square() -> None:
    class Quarter(Jitter):
        def _maps(self, images, draws):
            return super()._maps(images, torch.ones_like(draws))

    square = images(3, shape=(2, 6, 6))
    turned = Quarter(degrees=90)(square, Generator())
    assert torch.allclose(turned, torch.rot90(square, 1, (2, 3)), atol=1e-6) or torch.allclose(
        turned, torch.rot90(square, -1, (2, 3)), atol=1e-6
    )


def test_light_follows_each_images_own_spread() -> None:
    jitter = Jitter(brightness=0.5, contrast=0.3)
    first = draw(jitter)
    scaled = jitter(X * 7 + 3, Generator().manual_seed(0))
    torch.testing.assert_close(scaled, first * 7 + 3)
    assert not torch.allclose(first, X)


def test_noise_has_the_size_that_was_asked_for() -> None:
    noise = draw(Jitter(noise=0.1)) - X
    ratio = noise.std((1, 2, 3)) / X.std((1, 2, 3))
    assert float((ratio - 0.1).abs().max()) < 0.02


@pytest.mark.parametrize("jitter", [CROP, GENTLE])
def test_a_seed_gives_the_same_views_and_touches_nothing_else(jitter: Jitter) -> None:
    state, before = torch.random.get_rng_state(), X.clone()
    assert torch.equal(draw(jitter), draw(jitter))
    assert not torch.equal(draw(jitter), draw(jitter, seed=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(X, before)


def test_mixtures_stay_near_and_differ() -> None:
    views = mixed_views(X[:1], 30, Generator().manual_seed(0))
    assert views.shape == (30, 3, 16, 12)
    assert len({tuple(view.flatten().tolist()) for view in views}) == 30
    constant = mixed_views(torch.full((1, 3, 8, 8), 2.5), 9, Generator().manual_seed(0))
    torch.testing.assert_close(constant, torch.full_like(constant, 2.5))


def test_exchanged_values_come_back_however_it_ends() -> None:
    weight, value = nn.Parameter(torch.ones(2)), torch.zeros(2)

    def gradient_inside() -> torch.Tensor:
        assert torch.equal(weight, torch.zeros(2))
        return torch.autograd.grad((weight**2 + weight).sum(), weight)[0]

    assert torch.equal(with_values([weight], [value], gradient_inside), torch.ones(2))
    with pytest.raises(RuntimeError, match="size"):
        with_values([weight], [value], lambda: weight @ torch.ones(3))
    assert torch.equal(weight, torch.ones(2))
    assert torch.equal(value, torch.zeros(2))
