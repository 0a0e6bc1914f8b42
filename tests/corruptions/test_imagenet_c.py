"""ImageNet-C's table, and every corruption whose code is another one for larger images.

The oracles are plain readings of the published generator, which takes square images: scipy's
filters and loops over pixels, with the numbers from (0, 1) that the fast functions get.
"""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from scipy import ndimage, stats

from corruptions.sampling import sampled
from ttapca.corruptions import (
    CORRUPTIONS,
    IMAGENET_C,
    SEVERITIES,
    blur,
    corrupt,
    default_table,
    digital,
    find,
    load_table,
    weather,
)
from ttapca.corruptions.blur import blur_along
from ttapca.corruptions.pixels import (
    gaussian_kernel,
    smooth_reflected,
    stream_key,
    sum_of_zooms,
    uniforms,
)
from ttapca.errors import OptionError

SIDE = 97


@pytest.fixture(scope="module")
def photo(make_images) -> np.ndarray:
    return make_images(1, SIDE, SIDE)[0]


def parameters_of(name: str, severity: int) -> dict:
    return dict(load_table(IMAGENET_C).parameters(name, severity))


def numbers_of(name: str, severity: int, side: int = SIDE) -> np.ndarray:
    draws = find(name).draws(side, side, parameters_of(name, severity))
    return uniforms(stream_key(0, name, severity), np.arange(1), draws)


def made(name: str, severity: int, photo: np.ndarray) -> np.ndarray:
    return corrupt(photo[None], name, severity, table=IMAGENET_C)[0]


def cut_off(values: np.ndarray) -> np.ndarray:
    return (np.clip(values, 0, 1) * 255).astype(np.uint8)


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    """All values within one grey level, and nearly all the same."""
    difference = np.abs(found.astype(int) - expected.astype(int))
    assert difference.max() <= 1
    assert (difference == 0).mean() > 0.97


# The table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_table_has_what_every_corruption_takes(name):
    table = load_table(IMAGENET_C)
    assert table.name == "imagenet-c"
    assert set(table.sections) == set(CORRUPTIONS)
    for severity in SEVERITIES:
        assert set(table.parameters(name, severity)) == find(name).arguments


def test_lengths_that_are_published_in_pixels_are_those_of_224():
    published = {
        "amplitude_fraction": (488, 488, 12.2, 17.08, 29.28),
        "deviation_fraction": (170.8, 19.52, 2.44, 2.44, 2.44),
        "affine_fraction": (24.4, 48.8, 4.88, 4.88, 4.88),
    }
    for severity in SEVERITIES:
        for name, value in parameters_of("elastic_transform", severity).items():
            assert 224 * value == pytest.approx(published[name][severity - 1], rel=1e-12)


def test_the_published_numbers_of_enlargements():
    steps = [parameters_of("zoom_blur", severity) for severity in SEVERITIES]
    counts = [len(np.arange(1.0, each["stop"], each["step"])) for each in steps]
    assert counts == [12, 16, 11, 13, 11]  # rounding lets the first one reach its end


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *(((32, 32), "cifar-c"), ((64, 300), "cifar-c"), ((95, 224), "cifar-c")),
        *(((96, 96), "imagenet-c"), ((224, 224), "imagenet-c"), ((480, 640), "imagenet-c")),
    ],
)
def test_the_size_decides_where_no_table_is_asked_for(size, name, make_images):
    assert default_table(*size) == name
    images = make_images(1, *size)
    by_default = corrupt(images, "contrast", 3)
    assert (by_default == corrupt(images, "contrast", 3, table=name)).all()
    other = {"cifar-c": "imagenet-c", "imagenet-c": "cifar-c"}[name]
    assert (by_default != corrupt(images, "contrast", 3, table=other)).any()


def test_a_name_that_is_nearly_right():
    message = r"one of cifar-c, imagenet-c, or the path.*`imagenet`\. Did you mean `imagenet-c`"
    with pytest.raises(OptionError, match=message):
        load_table("imagenet")


# Oracles ------------------------------------------------------------------------------------------


def published_disk(radius: int, softness: float) -> np.ndarray:
    """The disk in its published array; a Gaussian of 3 or 5 pixels softens it, mirrored outside."""
    reach, side = (8, 3) if radius <= 8 else (radius, 5)
    line = np.arange(-reach, reach + 1)
    disk = (line[:, None] ** 2 + line[None, :] ** 2 <= radius**2).astype(float)
    steps = np.arange(side) - side // 2
    weights = np.exp(-0.5 * (steps / softness) ** 2)
    weights /= weights.sum()
    return ndimage.correlate(disk / disk.sum(), np.outer(weights, weights), mode="mirror")


@pytest.mark.parametrize("severity", SEVERITIES)
def test_defocus_blur(severity, photo):
    kernel = published_disk(**parameters_of("defocus_blur", severity))
    fast = blur.disk_kernel(**parameters_of("defocus_blur", severity))
    missing = (len(kernel) - len(fast)) // 2
    assert np.abs(np.pad(fast, missing) - kernel).max() < 1e-7
    expected = ndimage.correlate(photo / 255, kernel[:, :, None], mode="mirror")
    assert_near(made("defocus_blur", severity, photo), cut_off(expected))


def enlarged(image: np.ndarray, factor: float) -> np.ndarray:
    height, width = image.shape[:2]
    kept = [math.ceil(side / factor) for side in (height, width)]
    top, left = (height - kept[0]) // 2, (width - kept[1]) // 2
    middle = image[top : top + kept[0], left : left + kept[1]]
    large = ndimage.zoom(middle, (factor, factor, 1), order=1)
    down, right = (large.shape[0] - height) // 2, (large.shape[1] - width) // 2
    return large[down : down + height, right : right + width]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(97, 97), (70, 131), (224, 224)])
def test_images_are_enlarged_as_scipy_does(size, channels):
    images = np.random.default_rng(0).random((2, *size, channels))
    factors = (1.0, 1.01, 1.13, 1.5, 2.0, 2.25, 4.5, 9.9)
    for factor in factors:
        found = sum_of_zooms(images, (factor,))
        for image, got in zip(images, found, strict=True):
            np.testing.assert_allclose(got, enlarged(image, factor), atol=1e-9)
    total = sum(sum_of_zooms(images, (factor,)) for factor in factors)
    np.testing.assert_allclose(sum_of_zooms(images, factors), total, atol=1e-9)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_zoom_blur(severity, photo):
    p = parameters_of("zoom_blur", severity)
    factors = np.arange(1, p["stop"], p["step"])
    total = photo / 255 + sum(enlarged(photo / 255, factor) for factor in factors)
    assert_near(made("zoom_blur", severity, photo), cut_off(total / (len(factors) + 1)))


def _smooth(image: np.ndarray, deviation: float) -> np.ndarray:
    return ndimage.gaussian_filter(image, (deviation, deviation, 0), mode="nearest")


@pytest.mark.parametrize(
    ("size", "deviation", "max_delta", "iterations"),
    [((48, 37), 0.7, 1, 2), ((33, 64), 1.5, 4, 2), ((40, 40), 1.0, 2, 3), ((32, 40), 0.5, 20, 1)],
)
def test_glass_blur_visits_pixels_one_by_one(make_images, size, deviation, max_delta, iterations):
    (height, width), side = size, 2 * max_delta
    images = make_images(2, height, width)
    draws = blur.glass_draws(height, width, max_delta=max_delta, iterations=iterations)
    numbers = uniforms(stream_key(0, "glass_blur", 1), np.arange(2), draws)
    found = blur.glass_blur(
        images, numbers, deviation=deviation, max_delta=max_delta, iterations=iterations
    )
    for image, drawn, got in zip(images, numbers, found, strict=True):
        pixels = cut_off(_smooth(image / 255, deviation))
        drawn = drawn.reshape(iterations, max(height - side, 0), max(width - side, 0))
        for turn in range(iterations):
            for row in range(height - max_delta, max_delta, -1):
                for column in range(width - max_delta, max_delta, -1):
                    place = drawn[turn, row - max_delta - 1, column - max_delta - 1]
                    down, right = divmod(int(place * side * side), side)
                    source = pixels[row + down - max_delta, column + right - max_delta]
                    pixels[row, column] = source
        assert_near(got, cut_off(_smooth(pixels / 255, deviation)))


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow(severity, photo):
    p = parameters_of("snow", severity)
    drawn = numbers_of("snow", severity)[0]
    field = stats.norm.ppf(drawn[:-1], p["mean"], p["deviation"]).reshape(SIDE, SIDE, 1)
    flakes = enlarged(field, p["zoom"])
    flakes[flakes < p["threshold"]] = 0
    layer = blur_along(
        cut_off(flakes)[None],
        -135.0 + 90.0 * drawn[-1:],
        radius=p["radius"],
        deviation=p["blur_deviation"],
    )[0]
    clean = photo.astype(np.float32) / np.float32(255)
    grey = cv2.cvtColor(clean, cv2.COLOR_RGB2GRAY)[..., None]
    weight = p["image_weight"]
    base = weight * clean + (1 - weight) * np.maximum(clean, grey * 1.5 + 0.5)
    expected = cut_off(base + layer / 255 + np.rot90(layer, 2) / 255)
    assert_near(weather.snow(photo[None], drawn[None], **p)[0], expected)


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("angle", [-45.0, -7.0, 30.0])
def test_motion_blur(severity, angle, photo):
    p = parameters_of("motion_blur", severity)
    steps = range(2 * p["radius"] + 1)
    weights = [math.exp(-0.5 * (step / p["deviation"]) ** 2) for step in steps]
    rows, columns = np.mgrid[:SIDE, :SIDE]
    total = np.zeros(photo.shape)
    for step, weight in zip(steps, weights, strict=True):
        down = math.ceil(step * math.sin(math.radians(angle)) - 0.5)
        right = math.ceil(step * math.cos(math.radians(angle)) - 0.5)
        y, x = np.clip(rows + down, 0, SIDE - 1), np.clip(columns + right, 0, SIDE - 1)
        total += weight * photo[y, x]
    numbers = np.array([[(angle + 45.0) / 90.0]])
    found = blur.motion_blur(photo[None], numbers, **p)[0]
    assert_near(found, (total / sum(weights)).astype(np.uint8))


def test_frost_is_not_shrunk(photo, textures):
    p = parameters_of("frost", 5)
    which, down, right = numbers_of("frost", 5)[0]
    found = weather.frost(photo[None], np.array([[which, down, right]]), textures=textures, **p)[0]
    texture = textures[int(5 * which)]
    top, left = int(down * (len(texture) - SIDE)), int(right * (texture.shape[1] - SIDE))
    piece = texture[top : top + SIDE, left : left + SIDE]
    assert (found == np.clip(0.6 * photo + 0.75 * piece, 0, 255).astype(np.uint8)).all()


@pytest.mark.parametrize("size", [(300, 261), (180, 400)])
def test_frost_is_enlarged_where_it_is_smaller_than_the_image(size, make_images, textures):
    images = make_images(3, *size)
    spoilt = corrupt(images, "frost", 3, textures=textures)
    assert (spoilt[2] == corrupt(images[2:], "frost", 3, start=2, textures=textures)[0]).all()
    assert (spoilt.astype(float).mean(axis=(1, 2, 3)) > 0.7 * images.mean(axis=(1, 2, 3))).all()


@pytest.mark.parametrize("severity", [1, 5])
def test_fog_is_cut_from_the_next_power_of_two(severity, photo):
    p = parameters_of("fog", severity)
    drawn = numbers_of("fog", severity)[0]
    assert drawn.size == 128 * 128 - 1
    cloud = slow_plasma(drawn, 128, p["decay"])[:SIDE, :SIDE, None]
    clean = photo / 255
    hazy = (clean + p["amount"] * cloud) * clean.max() / (clean.max() + p["amount"])
    assert_near(weather.fog(photo[None], drawn[None], **p)[0], cut_off(hazy))


def slow_plasma(numbers: np.ndarray, side: int, decay: float) -> np.ndarray:
    """Diamond-square on a torus, point by point."""
    heights = np.zeros((side, side))
    drawn = iter(numbers)
    step, rough = side, 100.0
    while step >= 2:
        half = step // 2
        places = [(y, x) for y in range(0, side, step) for x in range(0, side, step)]
        # The middle of each square; then of its upper edge; then of its left edge.
        for middle, around in (
            ((half, half), ((0, 0), (step, 0), (0, step), (step, step))),
            ((0, half), ((0, 0), (0, step), (half, half), (-half, half))),
            ((half, 0), ((0, 0), (step, 0), (half, half), (half, -half))),
        ):
            for y, x in places:
                mean = sum(heights[(y + dy) % side, (x + dx) % side] for dy, dx in around) / 4
                heights[y + middle[0], x + middle[1]] = mean + rough**2 * (2 * next(drawn) - 1)
        step, rough = half, rough / decay
    heights -= heights.min()
    return heights / heights.max()


@pytest.mark.parametrize("deviation", [3.0, 12.0, 40.0, 170.8])
def test_a_kernel_wider_than_the_field_is_reflected_again_and_again(deviation):
    fields = np.random.default_rng(0).random((2, 61, 224))
    found = smooth_reflected(fields, gaussian_kernel(deviation, 3.0))
    for field, got in zip(fields, found, strict=True):
        expected = ndimage.gaussian_filter(field, deviation, mode="reflect", truncate=3.0)
        np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_elastic_transform(severity, photo):
    p = parameters_of("elastic_transform", severity)
    drawn = numbers_of("elastic_transform", severity)[0]
    reach, middle = SIDE // 3, SIDE // 2
    corners = np.array([[reach, reach], [reach, -reach], [-reach, -reach]], np.float32) + middle
    moved = corners + (2 * drawn[:6].reshape(3, 2) - 1) * SIDE * p["affine_fraction"]
    matrix = cv2.getAffineTransform(corners, moved.astype(np.float32))
    back = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    x, y, _ = np.einsum("ij,jhw->ihw", back, np.stack([columns, rows, np.ones_like(rows)]))
    sheared = sampled(photo / 255, y, x, "mirror")
    across, down = (
        SIDE
        * p["amplitude_fraction"]
        * ndimage.gaussian_filter(field, SIDE * p["deviation_fraction"], mode="reflect", truncate=3)
        for field in (2 * drawn[6:] - 1).reshape(2, SIDE, SIDE)
    )
    expected = cut_off(sampled(sheared, rows + down, columns + across, "reflect"))
    found = digital.elastic_transform(photo[None], drawn[None], **p)[0]
    # OpenCV may round a place to 1/32 of a pixel: a steep edge then differs by a few levels.
    difference = np.abs(found.astype(int) - expected)
    assert difference.mean() < 0.7
    assert (difference <= 3).mean() > 0.99


# What the bytes of an image depend on -------------------------------------------------------------


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_order_slices_and_batches_do_not_matter(name, make_images, textures, monkeypatch):
    images = make_images(5, 99, 131)
    whole = corrupt(images, name, 5, seed=3, textures=textures)
    order = np.array([3, 1, 2, 4])
    part = corrupt(images[order], name, 5, seed=3, textures=textures, indices=order)
    assert (part == whole[order]).all()
    monkeypatch.setattr("ttapca.corruptions.apply._VALUES_PER_PIECE", 2 * 99 * 131 * 3)
    assert (corrupt(images, name, 5, seed=3, textures=textures) == whole).all()
