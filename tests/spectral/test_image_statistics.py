"""Outliers: what strays, what is usual, and what is replaced, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oracles import salted, scenes
from ttapca.spectral import image_statistics
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.image_statistics import (
    SourceOutliers,
    is_image,
    local_median,
    measure,
    shares_of,
)

MEASURED = measure(scenes(600))
SOURCE = SourceOutliers(MEASURED)


def slow_medians(image: np.ndarray) -> np.ndarray:
    """Of one image, value by value; outside it, the nearest value counts."""
    channels, height, width = image.shape
    found = np.empty_like(image)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                around = [
                    image[c, min(max(i + di, 0), height - 1), min(max(j + dj, 0), width - 1)]
                    for di in (-1, 0, 1)
                    for dj in (-1, 0, 1)
                ]
                found[c, i, j] = sorted(around)[4]
    return found


def slow_strays(image: np.ndarray, floor: float) -> np.ndarray:
    distance = np.abs(image - slow_medians(image))
    noise = sorted(distance.flatten())[(distance.size - 1) // 2]
    return distance > max(floor, CONSTANTS.stray_deviations * 1.4826 * noise)


def slow_shares(stray: np.ndarray) -> tuple[float, float]:
    """Of values with at most one neighbour that strays, and of pixels with just one of these."""
    channels, height, width = stray.shape
    values = pixels = 0
    for i in range(height):
        for j in range(width):
            around = stray[:, max(0, i - 1) : i + 2, max(0, j - 1) : j + 2]
            alone = [c for c in range(channels) if stray[c, i, j] and around[c].sum() <= 2]
            values += len(alone)
            pixels += len(alone) == 1 == stray[:, i, j].sum()
    return values / stray.size, pixels / (height * width)


@pytest.mark.parametrize("shape", [(2, 3, 6, 5), (1, 1, 5, 9), (2, 4, 7, 7)])
def test_the_local_median(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(shape, generator=generator, dtype=torch.float64)
    assert np.array_equal(local_median(found), np.stack([slow_medians(x) for x in found.numpy()]))


@pytest.mark.parametrize("channels", [1, 3])
def test_what_strays_and_how_much(channels: int) -> None:
    some = salted(scenes(4, channels=channels, side=9), 0.05)
    found, median = image_statistics.strays(some, 0.2)
    expected = np.stack([slow_strays(x, 0.2) for x in some.numpy()])
    assert expected.any()
    assert not expected.all()
    assert np.array_equal(found, expected)
    assert torch.equal(median, local_median(some))
    shares = [slow_shares(x) for x in expected]
    np.testing.assert_allclose(shares_of(found), shares, rtol=1e-6)
    assert np.sum(shares) > 0


def drawings(count: int, channels: int = 3, side: int = 24) -> Tensor:
    """Frames of one pixel, dark on white."""
    generator = torch.Generator().manual_seed(5)
    found = torch.ones(count, channels, side, side, dtype=torch.float64)
    for image in found:
        top, left = torch.randint(2, 6, (2,), generator=generator).tolist()
        low, right = torch.randint(15, 22, (2,), generator=generator).tolist()
        image[:, [top, low], left : right + 1] = 0.0
        image[:, top : low + 1, [left, right]] = 0.0
    return found


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [1, 20])
def test_lines_are_no_outliers(size: int, channels: int) -> None:
    """A median would erase them: on edge drawings, an ImageNet network lost 47 points by that."""
    source = SourceOutliers(measure(scenes(600, channels=channels)))
    batch = drawings(size, channels)
    stray, median = image_statistics.strays(batch, source.floor)
    assert stray.double().mean() > 0.05
    assert (median[stray] == 1.0).double().mean() > 0.5
    assert source.repaired(batch)[0] is batch
    hit = salted(batch, 0.08)
    assert source.repaired(hit)[0] is not hit


def test_what_is_measured_on_source_images() -> None:
    some = scenes(9, side=20)  # 1,200 values an image: the second largest distance counts
    found = measure(some)
    assert found is not None
    assert (found.shape, found.dtype) == ((9, 3), torch.float32)
    distances = [sorted(np.abs(x - slow_medians(x)).flatten())[-2] for x in some.numpy()]
    np.testing.assert_allclose(found[:, 0], distances, rtol=1e-6)
    floor = SourceOutliers(found).floor
    assert floor == pytest.approx(np.quantile(distances, CONSTANTS.stray_images))
    shares = [slow_shares(slow_strays(x, floor)) for x in some.numpy()]
    np.testing.assert_allclose(found[:, 1:], shares, rtol=1e-6)


def test_what_is_replaced() -> None:
    batch = salted(scenes(5, seed=3), 0.04)
    batch[1] = scenes(1, seed=4)[0]  # one image among them has none
    found, share = SOURCE.repaired(batch)
    ordinary = np.quantile(SOURCE.shares, 1 - CONSTANTS.rare, axis=0)
    shares = []
    for image, repaired in zip(batch.numpy(), found.numpy(), strict=True):
        stray = slow_strays(image, SOURCE.floor)
        shares.append(slow_shares(stray))
        if (np.array(shares[-1]) <= ordinary).all():
            stray[:] = False
        assert np.array_equal(repaired, np.where(stray, slow_medians(image), image))
    assert share == pytest.approx(np.mean(shares, axis=0)[0])
    assert torch.equal(found[1], batch[1])
    assert not torch.equal(found[0], batch[0])


def test_the_limit_is_what_drawn_batches_have() -> None:
    """With as many source images as this, the drawn batches are those of any other seed."""
    for size in (1, 5, 40):
        generator = np.random.default_rng(5)
        shares = SOURCE.shares.numpy()
        if size > 1:
            shares = np.minimum(
                shares, CONSTANTS.beyond * np.quantile(shares, 1 - CONSTANTS.rare, axis=0)
            )
        means = shares[generator.integers(len(shares), size=(4000, size))].mean(1)
        rare = np.quantile(means, 1 - CONSTANTS.rare, axis=0)
        wider = means.mean(0) + (rare - means.mean(0)) * np.sqrt(1 + size / len(shares))
        expected = CONSTANTS.beyond * np.maximum(
            rare if size == 1 else wider, CONSTANTS.stray_share
        )
        np.testing.assert_allclose(SOURCE.limit(size), expected, rtol=0.2)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 7, 40, 200])
def test_source_batches_are_left_exactly_alone(size: int, channels: int) -> None:
    source = SourceOutliers(measure(scenes(600, channels=channels)))
    batches = scenes(4000, seed=9, channels=channels).split(size)[:400]
    alone = [source.repaired(batch)[0] is batch for batch in batches]
    assert sum(alone) >= 0.99 * len(alone)


def test_one_odd_image_does_not_make_a_batch() -> None:
    batch = scenes(20, seed=13)
    batch[3] = salted(batch[3:4], 0.4)[0]
    assert SOURCE.repaired(batch)[0] is batch
    assert not torch.equal(SOURCE.repaired(batch[3:4])[0], batch[3:4])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 150])
def test_impulses_are_found_and_removed(size: int, channels: int) -> None:
    source = SourceOutliers(measure(scenes(600, channels=channels)))
    clean = scenes(size, seed=11, channels=channels)
    hit = salted(clean, 0.08)
    found, share = source.repaired(hit)
    assert 0.04 < share < 0.12
    away = (found - clean).square().mean() / (hit - clean).square().mean()
    assert away < 0.1


def test_normal_noise_is_left_to_the_filter() -> None:
    generator = torch.Generator().manual_seed(4)
    for size in (1, 50):
        batch = scenes(size, seed=12)
        batch += 0.3 * torch.randn(batch.shape, generator=generator, dtype=torch.float64)
        assert SOURCE.repaired(batch)[0] is batch


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 5),
    scale=st.sampled_from([0.25, 1.0, 8.0, -2.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=40, deadline=None)
def test_images_without_strays_stay_bit_for_bit(
    seed: int, size: int, scale: float, dtype: torch.dtype
) -> None:
    """Whatever their content: no value is farther from its local median than the floor."""
    images = scenes(size, seed=seed)
    distance = (images - local_median(images)).abs().amax()
    calm = (images * (0.9 * SOURCE.floor / distance.clamp(min=1.0)) * scale / 8).to(dtype)
    before = calm.clone()
    found, share = SOURCE.repaired(calm)
    assert found is calm
    assert torch.equal(calm, before)
    assert share == 0


@pytest.mark.parametrize("scale", [0.25, 64.0])
def test_units_do_not_matter(scale: float) -> None:
    """A power of two changes no digit."""
    source = SourceOutliers(measure(scenes(600) * scale))
    batch = salted(scenes(3, seed=3), 0.04)
    assert torch.equal(source.repaired(batch * scale)[0], SOURCE.repaired(batch)[0] * scale)


def test_what_is_not_finite_is_left_to_others() -> None:
    batch = salted(scenes(3, seed=3), 0.04)
    batch[0, 0, 4, 4] = torch.nan
    found, share = SOURCE.repaired(batch)
    assert torch.equal(found[0], batch[0]) is False  # NaN is not equal to itself
    assert torch.equal(found[0].isnan(), batch[0].isnan())
    assert torch.equal(found[1:], SOURCE.repaired(batch[1:])[0])
    assert 0 < share < 1


def test_gradients_reach_what_is_kept() -> None:
    batch = salted(scenes(2, seed=3), 0.04).requires_grad_()
    found, _ = SOURCE.repaired(batch)
    (slope,) = torch.autograd.grad(found.sum(), batch)
    assert torch.equal(slope, (found == batch).double())


def test_images_that_do_not_vary_tell_nothing() -> None:
    assert measure(torch.zeros(4, 3, 8, 8)) is None


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        *[((1, 5, 5), True), ((4, 32, 40), True), ((5, 32, 32), False), ((3, 4, 9), False)],
        *[((3072,), False), ((3, 8, 8, 8), False), (None, False)],
    ],
)
def test_what_an_image_is(shape: tuple[int, ...] | None, expected: bool) -> None:
    assert is_image(shape) is expected


def slow_share(images: Tensor) -> float:
    return float(np.mean([slow_shares(slow_strays(x, SOURCE.floor))[0] for x in images.numpy()]))


def test_some_images_of_a_large_batch_tell() -> None:
    batch = salted(scenes(130, seed=6), 0.02)
    found, share = SOURCE.repaired(batch)
    assert share == pytest.approx(slow_share(batch[::3]))
    assert not torch.equal(found[1], batch[1])  # which was not looked at


def test_a_glance_sees_some_rows_as_the_whole_look_does() -> None:
    image = salted(scenes(1, seed=3, side=97), 0.05)
    found = image_statistics.strays_at_a_glance(image, 0.2)
    rows = [first + row for first in (0, 40, 80) for row in range(1, image_statistics.STRIP - 1)]
    whole = image[0].numpy()
    distance = np.abs(whole - slow_medians(whole))[:, rows]
    noise = sorted(distance.flatten()[:: distance.size // image_statistics.NOISE_VALUES | 1])
    limit = max(0.2, CONSTANTS.stray_deviations * 1.4826 * noise[(len(noise) - 1) // 2])
    assert np.array_equal(found[0], distance > limit)
    assert 0.02 < shares_of(found)[0, 0] < 0.09


def test_large_images_are_looked_at_in_whole_only_if_a_glance_finds_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = SourceOutliers(measure(scenes(60, side=128)))
    clean, hit = scenes(3, seed=3, side=128), salted(scenes(3, seed=3, side=128), 0.04)
    found, share = source.repaired(hit)
    with monkeypatch.context() as patch:
        patch.setattr(image_statistics, "LARGE", 10**9)
        expected, expected_share = source.repaired(hit)
        assert source.repaired(clean)[0] is clean
    assert torch.equal(found, expected)
    assert not torch.equal(found, hit)
    assert share == expected_share

    def never(*_: object) -> None:
        raise AssertionError("looked at the whole")

    monkeypatch.setattr(image_statistics, "strays", never)
    found, share = source.repaired(clean)
    assert found is clean
    assert share < 0.01
    with pytest.raises(AssertionError, match="looked at the whole"):
        source.repaired(hit)


def test_the_noise_of_a_large_image_is_that_of_some_of_its_values() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, 128, 128, generator=generator, dtype=torch.float64)
    distance = (image - local_median(image)).abs()
    limit = CONSTANTS.stray_deviations * 1.4826 * float(distance.median())
    hit = image.clone()
    hit[0, 0, 20, 20], hit[0, 1, 30, 30] = 1.3 * limit, 0.7 * limit
    assert image_statistics.strays(hit, 0.1)[0].nonzero().tolist() == [[0, 0, 20, 20]]
