"""List the corruptions, and read how strong each is at each of the five severities.

The strengths are in TOML files: `cifar_c.toml` and `imagenet_c.toml` in this folder, or a user's
own file with the same sections and names.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ttapca._checks import Either, ListOf, Number, OneOf, Record, Rule, Text, Whole, conform
from ttapca.corruptions import blur, digital, noise, weather
from ttapca.corruptions.pixels import CHANNELS, Pixels
from ttapca.errors import OptionError, did_you_mean
from ttapca.support.parsing import LARGEST_TOML, parse_toml, read_bounded

Parameter = float | int | str
Parameters = Mapping[str, Parameter]
Family = Literal["noise", "blur", "weather", "digital"]
Draws = Callable[[int, int, Parameters], int]

TEXTURES = "textures"  # the one argument that comes from files rather than from the table
TEXTURE_SCALE = "texture_scale"
SEVERITIES = (1, 2, 3, 4, 5)
CIFAR_C = "cifar-c"
IMAGENET_C = "imagenet-c"

_FILES = {
    CIFAR_C: Path(__file__).with_name("cifar_c.toml"),
    IMAGENET_C: Path(__file__).with_name("imagenet_c.toml"),
}


@dataclass(frozen=True)
class Corruption:
    """One corruption: how it changes images, and how many random numbers it needs for each."""

    name: str  # as in the file names of CIFAR-C and the folders of ImageNet-C
    family: Family  # the paper's group
    apply: Callable[..., Pixels]  # of images, numbers from (0, 1) and parameters by name
    draws: Draws  # of height, width and parameters: how many numbers an image needs

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


def _always(count: int) -> Draws:
    return lambda _height, _width, _parameters: count


def _by_size(count: Callable[[int, int], int]) -> Draws:
    return lambda height, width, _parameters: count(height, width)


_none = _always(0)
_each_pixel = _by_size(lambda height, width: height * width)
_each_value = _by_size(lambda height, width: height * width * CHANNELS)
_elastic = _by_size(digital.elastic_draws)

_STANDARD = (
    Corruption("gaussian_noise", "noise", noise.gaussian_noise, _each_value),
    Corruption("shot_noise", "noise", noise.shot_noise, _each_value),
    Corruption("impulse_noise", "noise", noise.impulse_noise, _each_value),
    Corruption("defocus_blur", "blur", blur.defocus_blur, _none),
    Corruption("glass_blur", "blur", blur.glass_blur, blur.glass_draws),
    Corruption("motion_blur", "blur", blur.motion_blur, _always(1)),
    Corruption("zoom_blur", "blur", blur.zoom_blur, _none),
    Corruption("snow", "weather", weather.snow, _by_size(weather.snow_draws)),
    Corruption("frost", "weather", weather.frost, _always(weather.FROST_DRAWS)),
    Corruption("fog", "weather", weather.fog, _by_size(weather.fog_draws)),
    Corruption("brightness", "digital", digital.brightness, _none),
    Corruption("contrast", "digital", digital.contrast, _none),
    Corruption("elastic_transform", "digital", digital.elastic_transform, _elastic),
    Corruption("pixelate", "digital", digital.pixelate, _none),
    Corruption("jpeg_compression", "digital", digital.jpeg_compression, _none),
)
_EXTRA = (
    Corruption("speckle_noise", "noise", noise.speckle_noise, _each_value),
    Corruption("gaussian_blur", "blur", blur.gaussian_blur, _none),
    Corruption("spatter", "weather", weather.spatter, _each_pixel),
    Corruption("saturate", "digital", digital.saturate, _none),
)
_BY_NAME = {each.name: each for each in (*_STANDARD, *_EXTRA)}

STANDARD: tuple[str, ...] = tuple(each.name for each in _STANDARD)
"""The fifteen of the benchmark, in the paper's order."""

EXTRA: tuple[str, ...] = tuple(each.name for each in _EXTRA)
"""The four that the paper reserves for choosing hyperparameters."""

CORRUPTIONS: tuple[str, ...] = STANDARD + EXTRA
"""All nineteen."""

GROUPS = {"all": CORRUPTIONS, "standard": STANDARD, "extra": EXTRA}


def find(name: str) -> Corruption:
    """Return the corruption of a name; spaces and hyphens count as underscores.

    Example:
        >>> find("Motion Blur").family
        'blur'
    """
    key = name.strip().lower().replace(" ", "_").replace("-", "_")
    if key not in _BY_NAME:
        raise _unknown(name, CORRUPTIONS)
    return _BY_NAME[key]


def find_all(
    words: Iterable[str], others: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> tuple[str, ...]:
    """Return the names of corruptions, of `GROUPS` and of other groups, each once."""
    groups = GROUPS | dict(others)
    names: list[str] = []
    for word in words:
        try:
            names.extend(groups.get(word) or [find(word).name])
        except OptionError:
            raise _unknown(word, (*CORRUPTIONS, *groups)) from None
    return tuple(dict.fromkeys(names))


def _unknown(name: str, known: Sequence[str]) -> OptionError:
    near = did_you_mean(name, known)
    return OptionError(f"A corruption is one of {', '.join(known)}; found `{name}`.{near}")


@dataclass(frozen=True)
class SeverityTable:
    """The parameters of every corruption at every severity.

    Example:
        >>> load_table().parameters("fog", 3)["amount"]
        0.75
    """

    name: str  # the `name` in the file
    digest: str  # SHA-256 of the file, to tell whether two runs used the same numbers
    # By corruption, then by parameter: five values, or one for all severities.
    sections: Mapping[str, Mapping[str, Parameter | list[Parameter]]]

    def parameters(self, corruption: str, severity: int) -> Parameters:
        """Return the parameters of one corruption at one severity, by name."""
        if corruption not in self.sections:
            raise OptionError(
                f"A table needs a section for each corruption that is asked for; `{self.name}` has "
                f"none for `{corruption}`.{did_you_mean(corruption, self.sections)}"
            )
        section, wanted = self.sections[corruption], find(corruption).arguments
        missing, unknown = sorted(wanted - set(section)), sorted(set(section) - wanted)
        if missing or unknown:
            raise OptionError(
                f"`{corruption}` takes the parameters {', '.join(sorted(wanted))}; table "
                f"`{self.name}` lacks {missing or 'none'} and has unknown {unknown or 'none'}."
            )
        return {
            name: value[severity - 1] if isinstance(value, list) else value
            for name, value in section.items()
        }


def default_table(height: int, width: int) -> str:
    """Return the name of the table that images of a size get when none is asked for.

    Lengths in the tables are mostly pixels: a blur over ten of them is mild in a photograph of 224
    by 224 and destroys an image of 32 by 32. By ratio, 96 is nearer to 224 than to 32.

    Example:
        >>> default_table(32, 32), default_table(224, 224)
        ('cifar-c', 'imagenet-c')
    """
    return CIFAR_C if min(height, width) < 96 else IMAGENET_C


def table_in_words(table: str | Path | None, height: int, width: int) -> str:
    """Say which table images of a size get, and why."""
    reason = "as asked" if table else f"the default for {height} x {width}"
    return f"severities of {load_table(table or default_table(height, width)).name}, {reason}"


def load_table(source: str | Path = CIFAR_C) -> SeverityTable:
    """Read a table of severities, by the name of one that ships or by the path of a TOML file.

    Example:
        >>> load_table("cifar-c").name
        'cifar-c'
    """
    path = _FILES.get(str(source)) or Path(source)
    if not path.is_file():
        raise OptionError(
            f"A table is one of {', '.join(sorted(_FILES))}, or the path of a TOML file; "
            f"found neither for `{source}`.{did_you_mean(str(source), _FILES)}"
        )
    return _read_table(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read_table(path: Path, changed: int) -> SeverityTable:
    del changed  # part of the cache's key only: an edited file is read again
    content = read_bounded(path, OptionError, largest=LARGEST_TOML)
    document = parse_toml(content, f"A table must be a TOML file; {path}", OptionError)
    name = document.pop("name", path.stem)
    conform(name, Text(100), str(path), OptionError, at="name")
    conform(document, _SECTIONS, str(path), OptionError)
    sections = {corruption: _typed(corruption, values) for corruption, values in document.items()}
    return SeverityTable(name, hashlib.sha256(content).hexdigest(), MappingProxyType(sections))


# The limits of each parameter. Within these limits, far beyond any benchmark's, corrupting an image
# takes no time to speak of. An unknown name is refused when the table is used.
_WIDTH = Number(0, 100)
_SHARE = Number(-100, 100)
_FRACTION = Number(0, 10)  # of the image's side
_LIMITS: dict[str, Rule] = {
    **dict.fromkeys(("deviation", "softness", "smoothing", "blur_deviation", "radius"), _WIDTH),
    **dict.fromkeys(("amount", "mean", "threshold", "strength", "factor", "offset"), _SHARE),
    **dict.fromkeys(("image_weight", "frost_weight"), _SHARE),
    **dict.fromkeys(("amplitude_fraction", "deviation_fraction", "affine_fraction"), _FRACTION),
    **dict.fromkeys(("zoom", "stop"), Number(1, 10)),
    **dict.fromkeys(("scale", TEXTURE_SCALE), Number(0.05, 1)),
    "step": Number(0.001, 1),
    "decay": Number(1, 10),
    "photons": Number(0.01, 1e6),
    "max_angle": Number(0, 180),
    "max_delta": Whole(1, 20),
    "iterations": Whole(0, 20),
    "texture_count": Whole(1, 6),
    "quality": Whole(1, 100),
    "liquid": OneOf(("water", "mud")),
}
_ALONG_A_LINE = {**_LIMITS, "radius": Whole(1, 100)}  # a radius in whole pixels
_LIMITS_OF = {"motion_blur": _ALONG_A_LINE, "snow": _ALONG_A_LINE}


def _parameter(rule: Rule) -> Rule:
    words = "one value or a list of 5, one for each severity, within its limits"
    return Either((rule, ListOf(rule, 5, 5)), words)


def _section(limits: Mapping[str, Rule]) -> Record:
    parameters = {name: _parameter(rule) for name, rule in limits.items()}
    return Record(optional=parameters, others=_parameter(Either((Number(), Text(100)), "a value")))


_SECTIONS = Record(
    optional={name: _section(limits) for name, limits in _LIMITS_OF.items()},
    others=_section(_LIMITS),
)


def _typed(corruption: str, values: dict[str, Any]) -> dict[str, Any]:
    """Turn whole numbers into floats if a parameter is real: 2 times a uint8 may overflow."""
    typed = dict(values)
    for name, value in values.items():
        if isinstance(_LIMITS_OF.get(corruption, _LIMITS).get(name), Number):
            typed[name] = [*map(float, value)] if isinstance(value, list) else float(value)
    return typed
