"""The nineteen corruptions by name: what computes each, and how much randomness it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ttapca.corruptions import blur, digital, noise, spatter, weather
from ttapca.corruptions.pixels import Pixels
from ttapca.corruptions.table import Parameters
from ttapca.errors import OptionError, did_you_mean

Family = Literal["noise", "blur", "weather", "digital"]
Draws = Callable[[int, int, Parameters], int]

CHANNELS = 3
TEXTURES = "textures"  # the one argument that comes from files rather than from the table


@dataclass(frozen=True)
class Corruption:
    """One way to spoil an image.

    Attributes:
        name: As in the file names of CIFAR-C.
        family: The paper's group.
        apply: Takes images, numbers from (0, 1) and parameters by name; returns images.
        draws: Takes height, width and parameters; returns how many numbers an image needs.
    """

    name: str
    family: Family
    apply: Callable[..., Pixels]
    draws: Draws

    @property
    def arguments(self) -> frozenset[str]:
        """The parameters that a table must give."""
        keywords = inspect.signature(self.apply).parameters.values()
        named = {each.name for each in keywords if each.kind is each.KEYWORD_ONLY}
        return frozenset(named - {TEXTURES})

    @property
    def needs_textures(self) -> bool:
        """Whether photographs are needed."""
        return TEXTURES in inspect.signature(self.apply).parameters

    def check(self, parameters: Parameters, table: str) -> None:
        """Compare what a table gives with what is needed.

        Args:
            parameters: Of one severity.
            table: The table's name, for the message.

        Raises:
            OptionError: A parameter is missing, or one is unknown.
        """
        missing = sorted(self.arguments - set(parameters))
        unknown = sorted(set(parameters) - self.arguments)
        if missing or unknown:
            raise OptionError(
                f"`{self.name}` takes the parameters {', '.join(sorted(self.arguments))}; "
                f"table `{table}` lacks {missing or 'none'} and has unknown {unknown or 'none'}."
            )


def _fixed(count: int) -> Draws:
    return lambda _height, _width, _parameters: count


def _glass(height: int, width: int, parameters: Parameters) -> int:
    return blur.glass_draws(
        height,
        width,
        max_delta=int(parameters["max_delta"]),
        iterations=int(parameters["iterations"]),
    )


def _by_size(count: Callable[[int, int], int]) -> Draws:
    return lambda height, width, _parameters: count(height, width)


_no_number = _fixed(0)
_number_a_pixel = _by_size(lambda height, width: height * width)
_number_a_value = _by_size(lambda height, width: height * width * CHANNELS)

_STANDARD = (
    Corruption("gaussian_noise", "noise", noise.gaussian_noise, _number_a_value),
    Corruption("shot_noise", "noise", noise.shot_noise, _number_a_value),
    Corruption("impulse_noise", "noise", noise.impulse_noise, _number_a_value),
    Corruption("defocus_blur", "blur", blur.defocus_blur, _no_number),
    Corruption("glass_blur", "blur", blur.glass_blur, _glass),
    Corruption("motion_blur", "blur", blur.motion_blur, _fixed(1)),
    Corruption("zoom_blur", "blur", blur.zoom_blur, _no_number),
    Corruption("snow", "weather", weather.snow, _by_size(weather.snow_draws)),
    Corruption("frost", "weather", weather.frost, _fixed(weather.FROST_DRAWS)),
    Corruption("fog", "weather", weather.fog, _by_size(weather.fog_draws)),
    Corruption("brightness", "digital", digital.brightness, _no_number),
    Corruption("contrast", "digital", digital.contrast, _no_number),
    Corruption(
        "elastic_transform", "digital", digital.elastic_transform, _by_size(digital.elastic_draws)
    ),
    Corruption("pixelate", "digital", digital.pixelate, _no_number),
    Corruption("jpeg_compression", "digital", digital.jpeg_compression, _no_number),
)
_EXTRA = (
    Corruption("speckle_noise", "noise", noise.speckle_noise, _number_a_value),
    Corruption("gaussian_blur", "blur", blur.gaussian_blur, _no_number),
    Corruption("spatter", "weather", spatter.spatter, _number_a_pixel),
    Corruption("saturate", "digital", digital.saturate, _no_number),
)
_BY_NAME = {each.name: each for each in (*_STANDARD, *_EXTRA)}

STANDARD: tuple[str, ...] = tuple(each.name for each in _STANDARD)
"""The fifteen of the benchmark, in the paper's order."""

EXTRA: tuple[str, ...] = tuple(each.name for each in _EXTRA)
"""The four that the paper keeps for choosing hyperparameters."""

CORRUPTIONS: tuple[str, ...] = STANDARD + EXTRA
"""All nineteen."""


def find(name: str) -> Corruption:
    """Look up a corruption.

    Args:
        name: As in the file names of CIFAR-C; spaces and hyphens count as underscores.

    Returns:
        The corruption.

    Raises:
        OptionError: There is none of that name.

    Example:
        >>> find("Motion Blur").family
        'blur'
    """
    key = name.strip().lower().replace(" ", "_").replace("-", "_")
    if key not in _BY_NAME:
        raise unknown(name, CORRUPTIONS)
    return _BY_NAME[key]


def unknown(name: str, known: Iterable[str]) -> OptionError:
    """The error for a corruption that does not exist."""
    listed = tuple(known)
    near = did_you_mean(name, listed)
    return OptionError(f"A corruption is one of {', '.join(listed)}; found `{name}`.{near}")
