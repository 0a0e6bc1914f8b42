"""Each corruption against a slow one, written plainly: pixel by pixel, image by image.

An oracle is a plain reading of the published generator, by scipy's filters and loops over pixels.
It gets the same numbers from (0, 1) as the fast function, so that chance plays no part. Most run
with both tables, CIFAR-C's on images of 32 by 32 pixels and ImageNet-C's on a larger one: some
code is another one for larger images.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator

import cv2
import numpy as np
import pytest
from scipy import ndimage, stats

from ttapca.corruptions import (
    CIFAR_C,
    IMAGENET_C,
    SEVERITIES,
    blur,
    corrupt,
    find,
    load_table,
    noise,
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

LARGE = 97
TABLES = (CIFAR_C, IMAGENET_C)


@pytest.fixture(scope="module")
def images_of(images, make_images) -> dict[str, np.ndarray]:
    """The images that are corrupted with each table."""
    return {CIFAR_C: images[:3], IMAGENET_C: make_images(1, LARGE, LARGE)}


def parameters_of(name: str, table: str, severity: int) -> dict:
    return dict(load_table(table).parameters(name, severity))


def numbers_of(name: str, table: str, severity: int, images: np.ndarray) -> np.ndarray:
    draws = find(name).draws(*images.shape[1:3], parameters_of(name, table, severity))
    return uniforms(stream_key(0, name, severity), np.arange(len(images)), draws)


def triples(
    name: str, table: str, severity: int, images: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield each image, the numbers that it gets, and what becomes of it."""
    numbers = numbers_of(name, table, severity, images)
    found = find(name).apply(images, numbers, **parameters_of(name, table, severity))
    assert (found == corrupt(images, name, severity, table=table)).all()
    yield from zip(images, numbers, found, strict=True)


def cut_off(values: np.ndarray) -> np.ndarray:
    return (np.clip(values, 0, 1) * 255).astype(np.uint8)


def assert_near(found: np.ndarray, expected: np.ndarray, part: float = 1.0) -> None:
    """All values, or a part of them, within one grey level, and nearly all the same."""
    difference = np.abs(found.astype(int) - expected.astype(int))
    assert (difference <= 1).mean() >= part
    assert (difference == 0).mean() > 0.9


both_tables = pytest.mark.parametrize("table", TABLES)


# Noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("name", ["gaussian_noise", "speckle_noise"])
def test_gaussian_and_speckle_noise(name, severity, images):
    parameters = parameters_of(name, CIFAR_C, severity)
    numbers = numbers_of(name, CIFAR_C, severity, images)
    drawn = stats.norm.ppf(numbers).reshape(images.shape) * parameters["deviation"]
    clean = images / 255
    added = drawn * clean if name == "speckle_noise" else drawn
    assert_near(find(name).apply(images, numbers, **parameters), cut_off(clean + added))


@pytest.mark.parametrize("severity", [1, 5])
def test_shot_noise_is_the_poisson_quantile(images, severity):
    numbers = numbers_of("shot_noise", CIFAR_C, severity, images)
    photons = parameters_of("shot_noise", CIFAR_C, severity)["photons"]
    counts = stats.poisson.ppf(numbers.reshape(images.shape), images / 255 * photons)
    assert_near(noise.shot_noise(images, numbers, photons=photons), cut_off(counts / photons))


def test_impulse_noise_strikes_the_asked_part_half_white_half_black():
    grey = np.full((40, 32, 32, 3), 100, np.uint8)
    spoilt = corrupt(grey, "impulse_noise", 5)
    assert (spoilt == 0).mean() == pytest.approx(0.035, abs=0.003)
    assert (spoilt == 255).mean() == pytest.approx(0.035, abs=0.003)
    assert np.isin(spoilt, [0, 100, 255]).all()


# Blur ---------------------------------------------------------------------------------------------


def smooth(image: np.ndarray, deviation: float) -> np.ndarray:
    return ndimage.gaussian_filter(image, (deviation, deviation, 0), mode="nearest")


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_gaussian_blur_is_scipys(severity, images):
    deviation = parameters_of("gaussian_blur", CIFAR_C, severity)["deviation"]
    expected = np.stack([smooth(image / 255, deviation) for image in images])
    assert_near(corrupt(images, "gaussian_blur", severity), cut_off(expected))


def published_disk(radius: float, softness: float) -> np.ndarray:
    """The disk in its published array; a Gaussian of 3 or 5 pixels softens it, mirrored outside."""
    reach, side = (8, 3) if radius <= 8 else (int(radius), 5)
    line = np.arange(-reach, reach + 1)
    disk = (line[:, None] ** 2 + line[None, :] ** 2 <= radius**2).astype(float)
    steps = np.arange(side) - side // 2
    weights = np.exp(-0.5 * (steps / softness) ** 2)
    weights /= weights.sum()
    return ndimage.correlate(disk / disk.sum(), np.outer(weights, weights), mode="mirror")


@pytest.mark.parametrize("severity", SEVERITIES)
@both_tables
def test_defocus_blur_is_a_direct_convolution(table, severity, images_of):
    parameters = parameters_of("defocus_blur", table, severity)
    kernel, fast = published_disk(**parameters), blur.disk_kernel(**parameters)
    assert np.abs(np.pad(fast, (len(kernel) - len(fast)) // 2) - kernel).max() < 1e-7
    images = images_of[table]
    expected = ndimage.correlate(images / 255, kernel[None, :, :, None], mode="mirror")
    assert_near(corrupt(images, "defocus_blur", severity, table=table), cut_off(expected))


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
@both_tables
def test_zoom_blur_is_a_mean_of_enlargements(table, severity, images_of):
    p = parameters_of("zoom_blur", table, severity)
    factors = np.arange(1, p["stop"], p["step"])
    for image, _, found in triples("zoom_blur", table, severity, images_of[table]):
        total = image / 255 + sum(enlarged(image / 255, factor) for factor in factors)
        assert_near(found, cut_off(total / (len(factors) + 1)))


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize("angle", [-45.0, -20.0, -7.0, 0.0, 13.0, 30.0, 45.0, -90.0, -135.0])
@both_tables
def test_motion_blur_follows_a_line(table, severity, angle, images_of):
    p = parameters_of("motion_blur", table, severity)
    del p["max_angle"]
    image = images_of[table][0]
    height, width = image.shape[:2]
    rows, columns = np.mgrid[:height, :width]
    steps = range(2 * p["radius"] + 1)
    weights = [math.exp(-0.5 * (step / p["deviation"]) ** 2) for step in steps]
    total = np.zeros(image.shape)
    for step, weight in zip(steps, weights, strict=True):
        down = math.ceil(step * math.sin(math.radians(angle)) - 0.5)
        right = math.ceil(step * math.cos(math.radians(angle)) - 0.5)
        y, x = np.clip(rows + down, 0, height - 1), np.clip(columns + right, 0, width - 1)
        total += weight * image[y, x]
    found = blur_along(image[None], np.array([angle]), **p)[0]
    assert_near(found, (total / sum(weights)).astype(np.uint8))
    if abs(angle) <= 45:
        drawn = np.array([[(angle + 45) / 90]])
        assert (blur.motion_blur(image[None], drawn, max_angle=45, **p)[0] == found).all()


@pytest.mark.parametrize(
    ("size", "deviation", "max_delta", "iterations"),
    [
        *(((32, 32), 0.4, 1, 2), ((32, 32), 0.05, 1, 1), ((32, 32), 0.7, 3, 2)),
        *(((48, 37), 0.7, 1, 2), ((33, 64), 1.5, 4, 2), ((40, 40), 1.0, 2, 3)),
        ((32, 40), 0.5, 20, 1),
    ],
)
def test_glass_blur_visits_pixels_one_by_one(make_images, size, deviation, max_delta, iterations):
    (height, width), side = size, 2 * max_delta
    images = make_images(2, height, width)
    moves = {"max_delta": max_delta, "iterations": iterations}
    draws = blur.glass_draws(height, width, moves)
    numbers = uniforms(stream_key(0, "glass_blur", 1), np.arange(2), draws)
    found = blur.glass_blur(images, numbers, deviation=deviation, **moves)
    for image, drawn, got in zip(images, numbers, found, strict=True):
        pixels = cut_off(smooth(image / 255, deviation))
        drawn = drawn.reshape(iterations, max(height - side, 0), max(width - side, 0))
        for turn in range(iterations):
            for row in range(height - max_delta, max_delta, -1):
                for column in range(width - max_delta, max_delta, -1):
                    place = drawn[turn, row - max_delta - 1, column - max_delta - 1]
                    down, right = divmod(int(place * side * side), side)
                    source = pixels[row + down - max_delta, column + right - max_delta]
                    pixels[row, column] = source
        assert_near(got, cut_off(smooth(pixels / 255, deviation)))


# Weather ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", SEVERITIES)
@both_tables
def test_snow(table, severity, images_of):
    p = parameters_of("snow", table, severity)
    for image, drawn, got in triples("snow", table, severity, images_of[table]):
        field = stats.norm.ppf(drawn[:-1], p["mean"], p["deviation"])
        flakes = enlarged(field.reshape(*image.shape[:2], 1), p["zoom"])
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


@both_tables
def test_frost_is_a_piece_of_a_photograph(table, images_of, textures):
    p, images = parameters_of("frost", table, 5), images_of[table]
    numbers = numbers_of("frost", table, 5, images)
    found = weather.frost(images, numbers, textures=textures, **p)
    for image, (which, down, right), got in zip(images, numbers, found, strict=True):
        texture = textures[int(which * p["texture_count"])]
        if table == CIFAR_C:  # ImageNet-C does not shrink it
            texture = cv2.resize(texture, (0, 0), fx=p["texture_scale"], fy=p["texture_scale"])
        height, width = image.shape[:2]
        top, left = int(down * (len(texture) - height)), int(right * (texture.shape[1] - width))
        piece = texture[top : top + height, left : left + width]
        mixed = p["image_weight"] * image + p["frost_weight"] * piece
        assert (got == np.clip(mixed, 0, 255).astype(np.uint8)).all()


@pytest.mark.parametrize("size", [(300, 261), (180, 400)])
def test_frost_is_enlarged_where_it_is_smaller_than_the_image(size, make_images, textures):
    images = make_images(3, *size)
    spoilt = corrupt(images, "frost", 3, textures=textures)
    assert (spoilt[2] == corrupt(images[2:], "frost", 3, start=2, textures=textures)[0]).all()
    assert (spoilt.astype(float).mean(axis=(1, 2, 3)) > 0.7 * images.mean(axis=(1, 2, 3))).all()


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


@pytest.mark.parametrize("severity", [1, 5])
@pytest.mark.parametrize(("table", "side"), [(CIFAR_C, 32), (IMAGENET_C, 128)])
def test_fog_is_cut_from_the_next_power_of_two(table, side, severity, images_of):
    p = parameters_of("fog", table, severity)
    for image, drawn, got in triples("fog", table, severity, images_of[table]):
        assert drawn.size == side * side - 1
        cloud = slow_plasma(drawn, side, p["decay"])[: len(image), : len(image), None]
        clean = image / 255
        hazy = (clean + p["amount"] * cloud) * clean.max() / (clean.max() + p["amount"])
        assert_near(got, cut_off(hazy))


@pytest.mark.parametrize("severity", [4, 5])
def test_mud_covers_what_exceeds_a_threshold(severity, images_of):
    p = parameters_of("spatter", CIFAR_C, severity)
    for image, drawn, got in triples("spatter", CIFAR_C, severity, images_of[CIFAR_C]):
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
    spoilt = weather.spatter(images[:1], nearly_zero, **parameters_of("spatter", CIFAR_C, 1))
    assert np.abs(spoilt.astype(int) - images[:1]).max() <= 1


# Digital ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", [1, 4, 5])
@pytest.mark.parametrize("name", ["brightness", "saturate"])
def test_hsv_is_the_textbooks(name, severity, images):
    p = parameters_of(name, CIFAR_C, severity)
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
    factor = parameters_of("contrast", CIFAR_C, severity)["factor"]
    clean = images / 255
    means = clean.mean(axis=(1, 2), keepdims=True)
    expected = cut_off((clean - means) * factor + means)
    assert_near(corrupt(images, "contrast", severity), expected)


@pytest.mark.parametrize("deviation", [3.0, 12.0, 40.0, 170.8])
def test_a_kernel_wider_than_the_field_is_reflected_again_and_again(deviation):
    fields = np.random.default_rng(0).random((2, 61, 224))
    found = smooth_reflected(fields, gaussian_kernel(deviation, 3.0))
    for field, got in zip(fields, found, strict=True):
        expected = ndimage.gaussian_filter(field, deviation, mode="reflect", truncate=3.0)
        np.testing.assert_allclose(got, expected, atol=1e-12)


def sampled(image: np.ndarray, rows: np.ndarray, columns: np.ndarray, mode: str) -> np.ndarray:
    """The image at these rows and columns, linear between pixels; `mode` is what lies outside."""
    channels = [
        ndimage.map_coordinates(image[..., each], [rows, columns], order=1, mode=mode)
        for each in range(3)
    ]
    return np.stack(channels, axis=-1)


@pytest.mark.parametrize("severity", SEVERITIES)
@both_tables
def test_elastic_transform_is_an_affine_map_and_a_field_of_shifts(table, severity, images_of):
    p = parameters_of("elastic_transform", table, severity)
    for image, drawn, got in triples("elastic_transform", table, severity, images_of[table]):
        side = len(image)
        corners = np.array([[1, 1], [1, -1], [-1, -1]]) * (side // 3) + side // 2
        moved = corners + (2 * drawn[:6].reshape(3, 2) - 1) * side * p["affine_fraction"]
        matrix = cv2.getAffineTransform(corners.astype(np.float32), moved.astype(np.float32))
        back = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
        rows, columns = np.mgrid[:side, :side]
        x, y, _ = np.einsum("ij,jhw->ihw", back, np.stack([columns, rows, np.ones_like(rows)]))
        sheared = sampled(image / 255, y, x, "mirror")
        deviation, reach = side * p["deviation_fraction"], side * p["amplitude_fraction"]
        across, down = (
            reach * ndimage.gaussian_filter(field, deviation, mode="reflect", truncate=3)
            for field in (2 * drawn[6:] - 1).reshape(2, side, side)
        )
        expected = cut_off(sampled(sheared, rows + down, columns + across, "reflect"))
        # OpenCV may round a place to 1/32 of a pixel: a steep edge then differs by a few levels.
        difference = np.abs(got.astype(int) - expected)
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
