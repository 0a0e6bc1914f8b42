"""Each corruption against a slow one, written plainly: pixel by pixel, image by image.

An oracle gets the same numbers from (0, 1) as the fast function, so that chance plays no part.
"""

from __future__ import annotations

import colorsys
import math

import cv2
import numpy as np
import pytest
from scipy import ndimage, stats

from corruptions.sampling import sampled
from ttapca.corruptions import blur, corrupt, digital, find, load_table, noise, weather
from ttapca.corruptions.blur import blur_along
from ttapca.corruptions.pixels import stream_key, uniforms


def numbers_of(name: str, severity: int, count: int, side: int = 32) -> np.ndarray:
    parameters = load_table().parameters(name, severity)
    draws = find(name).draws(side, side, parameters)
    return uniforms(stream_key(0, name, severity), np.arange(count), draws)


def parameters_of(name: str, severity: int) -> dict:
    return dict(load_table().parameters(name, severity))


def cut_off(values: np.ndarray) -> np.ndarray:
    return (np.clip(values, 0, 1) * 255).astype(np.uint8)


def assert_near(found: np.ndarray, expected: np.ndarray, part: float = 1.0) -> None:
    """All values within one grey level, and nearly all the same."""
    difference = np.abs(found.astype(int) - expected.astype(int))
    assert (difference <= 1).mean() >= part
    assert (difference == 0).mean() > 0.9


@pytest.mark.parametrize("severity", [1, 5])
def test_gaussian_and_speckle_noise(images, severity):
    for name, function in (
        ("gaussian_noise", noise.gaussian_noise),
        ("speckle_noise", noise.speckle_noise),
    ):
        numbers = numbers_of(name, severity, len(images))
        parameters = parameters_of(name, severity)
        drawn = stats.norm.ppf(numbers).reshape(images.shape) * parameters["deviation"]
        clean = images / 255
        added = drawn * clean if name == "speckle_noise" else drawn
        assert_near(function(images, numbers, **parameters), cut_off(clean + added))


@pytest.mark.parametrize("severity", [1, 5])
def test_shot_noise_is_the_poisson_quantile(images, severity):
    numbers = numbers_of("shot_noise", severity, len(images))
    photons = parameters_of("shot_noise", severity)["photons"]
    counts = stats.poisson.ppf(numbers.reshape(images.shape), images / 255 * photons)
    assert_near(noise.shot_noise(images, numbers, photons=photons), cut_off(counts / photons))


def test_impulse_noise_strikes_the_asked_part_half_white_half_black():
    grey = np.full((40, 32, 32, 3), 100, np.uint8)
    spoilt = corrupt(grey, "impulse_noise", 5)
    total = spoilt.size
    assert (spoilt == 0).sum() / total == pytest.approx(0.035, abs=0.003)
    assert (spoilt == 255).sum() / total == pytest.approx(0.035, abs=0.003)
    assert np.isin(spoilt, [0, 100, 255]).all()


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_gaussian_blur_is_scipys(images, severity):
    deviation = parameters_of("gaussian_blur", severity)["deviation"]
    expected = ndimage.gaussian_filter(
        images / 255, (0, deviation, deviation, 0), mode="nearest", truncate=4.0
    )
    assert_near(corrupt(images, "gaussian_blur", severity), cut_off(expected))


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_defocus_blur_is_a_direct_convolution(images, severity):
    kernel = blur.disk_kernel(**parameters_of("defocus_blur", severity))
    assert kernel.sum() == pytest.approx(1.0, abs=1e-6)
    assert (kernel == kernel.T).all()
    expected = ndimage.correlate(images / 255, kernel[None, :, :, None], mode="mirror")
    assert_near(corrupt(images, "defocus_blur", severity), cut_off(expected))


def enlarged(image: np.ndarray, factor: float) -> np.ndarray:
    side = len(image)
    kept = math.ceil(side / factor)
    start = (side - kept) // 2
    middle = image[start : start + kept, start : start + kept]
    large = ndimage.zoom(middle, (factor, factor, 1), order=1)
    trim = (len(large) - side) // 2
    return large[trim : trim + side, trim : trim + side]


@pytest.mark.parametrize("severity", [1, 5])
def test_zoom_blur_is_a_mean_of_enlargements(images, severity):
    parameters = parameters_of("zoom_blur", severity)
    factors = np.arange(1, parameters["stop"], parameters["step"])
    for image, found in zip(images[:3], corrupt(images, "zoom_blur", severity), strict=False):
        clean = image / 255
        total = clean + sum(enlarged(clean, factor) for factor in factors)
        assert_near(found, cut_off(total / (len(factors) + 1)))


@pytest.mark.parametrize("angle", [-45.0, -20.0, 0.0, 13.0, 45.0, -90.0, -135.0])
def test_motion_blur_is_a_direct_correlation_along_a_line(images, angle):
    radius, deviation = 9, 2.5
    weights = np.exp(-0.5 * (np.arange(2 * radius + 1) / deviation) ** 2)
    weights /= weights.sum()
    reach = 2 * radius
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for step, weight in enumerate(weights):
        down = math.ceil(step * math.sin(math.radians(angle)) - 0.5)
        right = math.ceil(step * math.cos(math.radians(angle)) - 0.5)
        kernel[reach + down, reach + right] += weight
    expected = ndimage.correlate(images[:4].astype(float), kernel[None, :, :, None], mode="nearest")
    found = blur_along(images[:4], np.full(4, angle), radius=radius, deviation=deviation)
    assert_near(found, expected.astype(np.uint8))


@pytest.mark.parametrize(
    ("deviation", "max_delta", "iterations"), [(0.4, 1, 2), (0.05, 1, 1), (0.7, 3, 2)]
)
def test_glass_blur_visits_pixels_one_by_one(images, deviation, max_delta, iterations):
    draws = blur.glass_draws(32, 32, max_delta=max_delta, iterations=iterations)
    numbers = uniforms(stream_key(0, "glass_blur", 1), np.arange(3), draws)
    found = blur.glass_blur(
        images[:3], numbers, deviation=deviation, max_delta=max_delta, iterations=iterations
    )
    for image, drawn, got in zip(images, numbers, found, strict=False):
        pixels = cut_off(_smooth(image / 255, deviation))
        side = 2 * max_delta
        drawn = drawn.reshape(iterations, 32 - side, 32 - side)
        for turn in range(iterations):
            for row in range(32 - max_delta, max_delta, -1):
                for column in range(32 - max_delta, max_delta, -1):
                    place = drawn[turn, row - max_delta - 1, column - max_delta - 1]
                    down, right = divmod(int(place * side * side), side)
                    source = pixels[row + down - max_delta, column + right - max_delta]
                    pixels[row, column] = source
        assert_near(got, cut_off(_smooth(pixels / 255, deviation)))


def _smooth(image: np.ndarray, deviation: float) -> np.ndarray:
    return ndimage.gaussian_filter(image, (deviation, deviation, 0), mode="nearest")


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_snow(images, severity):
    p = parameters_of("snow", severity)
    numbers = numbers_of("snow", severity, 4)
    found = weather.snow(images[:4], numbers, **p)
    for image, drawn, got in zip(images, numbers, found, strict=False):
        field = stats.norm.ppf(drawn[:-1], p["mean"], p["deviation"]).reshape(32, 32, 1)
        flakes = enlarged(field, p["zoom"])
        flakes[flakes < p["threshold"]] = 0
        angle = -135.0 + 90.0 * drawn[-1:]
        layer = blur_along(
            cut_off(flakes)[None], angle, radius=p["radius"], deviation=p["blur_deviation"]
        )[0]
        clean = image.astype(np.float32) / np.float32(255)
        grey = cv2.cvtColor(clean, cv2.COLOR_RGB2GRAY)[..., None]
        weight = p["image_weight"]
        base = weight * clean + (1 - weight) * np.maximum(clean, grey * 1.5 + 0.5)
        assert_near(got, cut_off(base + layer / 255 + np.rot90(layer, 2) / 255), 0.999)


def test_frost_is_a_piece_of_a_photograph(images, textures):
    p = parameters_of("frost", 5)
    numbers = numbers_of("frost", 5, len(images))
    found = weather.frost(images, numbers, textures=textures, **p)
    for image, (which, down, right), got in zip(images, numbers, found, strict=True):
        texture = textures[int(which * p["texture_count"])]
        small = cv2.resize(texture, (0, 0), fx=p["texture_scale"], fy=p["texture_scale"])
        top = int(down * (small.shape[0] - 32))
        left = int(right * (small.shape[1] - 32))
        piece = small[top : top + 32, left : left + 32]
        mixed = p["image_weight"] * image + p["frost_weight"] * piece
        assert (got == np.clip(mixed, 0, 255).astype(np.uint8)).all()


def slow_plasma(numbers: np.ndarray, side: int, decay: float) -> np.ndarray:
    """Diamond-square on a torus, point by point."""
    heights = np.zeros((side, side))
    drawn = iter(numbers)
    step, rough = side, 100.0
    while step >= 2:
        half = step // 2
        places = [(y, x) for y in range(0, side, step) for x in range(0, side, step)]

        def at(y: int, x: int) -> float:
            return heights[y % side, x % side]

        def raise_to(y: int, x: int, around: list[float], rough: float = rough) -> None:
            heights[y, x] = sum(around) / 4 + rough * rough * (2 * next(drawn) - 1)

        for y, x in places:
            corners = [at(y, x), at(y + step, x), at(y, x + step), at(y + step, x + step)]
            raise_to(y + half, x + half, corners)
        for y, x in places:
            beside = [at(y, x), at(y, x + step), at(y + half, x + half), at(y - half, x + half)]
            raise_to(y, x + half, beside)
        for y, x in places:
            beside = [at(y, x), at(y + step, x), at(y + half, x + half), at(y + half, x - half)]
            raise_to(y + half, x, beside)
        step, rough = half, rough / decay
    heights -= heights.min()
    return heights / heights.max()


@pytest.mark.parametrize("severity", [1, 5])
def test_fog(images, severity):
    p = parameters_of("fog", severity)
    numbers = numbers_of("fog", severity, 3)
    found = weather.fog(images[:3], numbers, **p)
    for image, drawn, got in zip(images, numbers, found, strict=False):
        cloud = slow_plasma(drawn, 32, p["decay"])[..., None]
        clean = image / 255
        brightest = clean.max()
        hazy = (clean + p["amount"] * cloud) * brightest / (brightest + p["amount"])
        assert_near(got, cut_off(hazy))


@pytest.mark.parametrize("severity", [4, 5])
def test_mud_covers_what_exceeds_a_threshold(images, severity):
    p = parameters_of("spatter", severity)
    numbers = numbers_of("spatter", severity, 4)
    found = weather.spatter(images[:4], numbers, **p)
    for image, drawn, got in zip(images, numbers, found, strict=False):
        field = stats.norm.ppf(drawn, p["mean"], p["deviation"]).reshape(32, 32)
        liquid = ndimage.gaussian_filter(field, p["smoothing"], mode="nearest") > p["threshold"]
        cover = ndimage.gaussian_filter(liquid.astype(float), p["strength"], mode="nearest")
        cover[cover < 0.8] = 0
        mud = np.array([63, 42, 20]) / 255
        assert_near(got, cut_off(image / 255 * (1 - cover[..., None]) + mud * cover[..., None]))


@pytest.mark.parametrize("severity", [1, 2, 3])
def test_water_only_brightens_and_most_where_it_is_blue(severity):
    black = np.zeros((20, 32, 32, 3), np.uint8)
    spoilt = corrupt(black, "spatter", severity)
    wet = spoilt[spoilt[..., 1] > 0]
    assert 0 < len(wet) < 0.4 * black[..., 0].size
    assert (wet[:, 0] <= wet[:, 1]).all()
    assert (wet[:, 1] == wet[:, 2]).all()
    assert spoilt.max() <= int(0.5 * 238)


def test_a_lens_without_drops_stays_clean(images):
    nearly_zero = np.full((1, 1024), 1e-9)
    spoilt = weather.spatter(images[:1], nearly_zero, **parameters_of("spatter", 1))
    assert np.abs(spoilt.astype(int) - images[:1]).max() <= 1


@pytest.mark.parametrize("severity", [1, 4, 5])
@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_hsv_is_the_textbooks(name, severity, images):
    p = parameters_of(name, severity)
    some = images[:1, ::2, ::2].copy()
    some[0, 0] = some[0, 0, :, :1]  # a row of greys
    some[0, 1, :4] = [[0, 0, 0], [255, 255, 255], [1, 0, 0], [0, 254, 255]]
    padded = np.tile(some, (1, 2, 2, 1))
    found = corrupt(padded, name, severity)[:, :16, :16]
    for pixel, got in zip(some.reshape(-1, 3), found.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
        if name == "brightness":
            value = min(value + p["amount"], 1)
        else:
            saturation = min(max(saturation * p["factor"] + p["offset"], 0), 1)
        expected = cut_off(np.array(colorsys.hsv_to_rgb(hue, saturation, value)))
        assert np.abs(got.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("severity", [1, 5])
def test_contrast_pulls_towards_the_mean(images, severity):
    factor = parameters_of("contrast", severity)["factor"]
    clean = images / 255
    means = clean.mean(axis=(1, 2), keepdims=True)
    expected = cut_off((clean - means) * factor + means)
    assert_near(corrupt(images, "contrast", severity), expected)


@pytest.mark.parametrize("severity", [1, 2, 5])
def test_elastic_transform_is_an_affine_map_and_a_field_of_shifts(images, severity):
    p = parameters_of("elastic_transform", severity)
    numbers = numbers_of("elastic_transform", severity, 3)
    found = digital.elastic_transform(images[:3], numbers, **p)
    start = np.array([[26, 26], [26, 6], [6, 6]], np.float32)
    for image, drawn, got in zip(images, numbers, found, strict=False):
        moved = start + (2 * drawn[:6].reshape(3, 2) - 1) * 32 * p["affine_fraction"]
        matrix = cv2.getAffineTransform(start, moved.astype(np.float32))
        back = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
        rows, columns = np.mgrid[:32, :32]
        source = back @ np.stack([columns.ravel(), rows.ravel(), np.ones(1024)])
        sheared = sampled(
            image / 255, source[1].reshape(32, 32), source[0].reshape(32, 32), "mirror"
        )
        fields = (2 * drawn[6:] - 1).reshape(2, 32, 32)
        deviation = 32 * p["deviation_fraction"]
        shifts = [
            32
            * p["amplitude_fraction"]
            * ndimage.gaussian_filter(field, deviation, mode="reflect", truncate=3)
            for field in fields
        ]
        expected = sampled(sheared, rows + shifts[1], columns + shifts[0], "reflect")
        # OpenCV may round a place to 1/32 of a pixel: a steep edge then differs by a few levels.
        difference = np.abs(got.astype(int) - cut_off(expected))
        assert difference.mean() < 0.7
        assert (difference <= 3).mean() > 0.99


def test_pixelate_keeps_even_areas_and_loses_detail(images):
    flat = np.full((1, 32, 32, 3), 77, np.uint8)
    assert (corrupt(flat, "pixelate", 5) == 77).all()
    pixelated = corrupt(images, "pixelate", 5)
    assert max(len(np.unique(image.reshape(-1, 3), axis=0)) for image in pixelated) <= 20 * 20


def test_jpeg_gets_worse_with_severity(images):
    errors = [
        np.square(corrupt(images, "jpeg_compression", severity) - images.astype(float)).mean()
        for severity in (1, 3, 5)
    ]
    assert errors == sorted(errors)
