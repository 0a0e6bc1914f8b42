"""Severities as data: what each corruption's numbers are at each of the five severities.

A table is a TOML file. `cifar_c.toml` in this folder is the one of CIFAR-10-C and CIFAR-100-C;
another file with the same sections and names is another benchmark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttapca._checks import Either, ListOf, Number, OneOf, Record, Rule, Text, Whole, conform
from ttapca.errors import OptionError, did_you_mean
from ttapca.support.parsing import LARGEST_TOML, parse_toml, read_bounded

Parameter = float | int | str
Parameters = Mapping[str, Parameter]

SEVERITIES = (1, 2, 3, 4, 5)
CIFAR_C = "cifar-c"


# What each parameter may be. The limits are far beyond any benchmark's; within them an image is
# spoilt in a moment. A name that no corruption has is refused where the table is used.
_WIDTH = Number(0, 100)
_SHARE = Number(-10, 10)
LIMITS: dict[str, Rule] = {
    **dict.fromkeys(("deviation", "softness", "smoothing", "blur_deviation", "radius"), _WIDTH),
    **dict.fromkeys(("amount", "mean", "threshold", "strength", "factor", "offset"), _SHARE),
    **dict.fromkeys(("image_weight", "frost_weight"), _SHARE),
    **dict.fromkeys(("amplitude_fraction", "deviation_fraction", "affine_fraction"), Number(0, 1)),
    **dict.fromkeys(("zoom", "stop"), Number(1, 10)),
    **dict.fromkeys(("scale", "texture_scale"), Number(0.05, 1)),
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


def _parameter(rule: Rule) -> Rule:
    count = len(SEVERITIES)
    said = f"one value or a list of {count}, one a severity, within its limits"
    return Either((rule, ListOf(rule, count, count)), said)


def _section(limits: Mapping[str, Rule]) -> Record:
    parameters = {name: _parameter(rule) for name, rule in limits.items()}
    return Record(optional=parameters, others=_parameter(Either((Number(), Text(100)), "a value")))


WHOLE_RADIUS = ("motion_blur", "snow")  # pixels along a line
SECTIONS = Record(
    optional=dict.fromkeys(WHOLE_RADIUS, _section({**LIMITS, "radius": Whole(1, 100)})),
    others=_section(LIMITS),
)

_FILES = {CIFAR_C: Path(__file__).with_name("cifar_c.toml")}


@dataclass(frozen=True)
class Table:
    """The parameters of every corruption at every severity.

    Attributes:
        name: What the file calls itself.
        digest: SHA-256 of the file, to tell whether two runs used the same numbers.
        sections: By corruption, then by parameter: five values, or one for all severities.

    Example:
        >>> load_table().parameters("fog", 3)["amount"]
        0.75
    """

    name: str
    digest: str
    sections: Mapping[str, Mapping[str, Parameter | list[Parameter]]]

    def parameters(self, corruption: str, severity: int) -> Parameters:
        """The numbers of one corruption at one severity.

        Args:
            corruption: A section of the table.
            severity: From 1 to 5.

        Returns:
            Values by name.

        Raises:
            OptionError: The table has no such corruption.
        """
        if corruption not in self.sections:
            raise OptionError(
                f"A table needs a section for each corruption that is asked for; `{self.name}` has "
                f"none for `{corruption}`.{did_you_mean(corruption, self.sections)}"
            )
        values = self.sections[corruption]
        return {
            name: value[severity - 1] if isinstance(value, list) else value
            for name, value in values.items()
        }


def load_table(source: str | Path = CIFAR_C) -> Table:
    """Read a table of severities.

    Args:
        source: The name of a table that comes with the library, or the path of a TOML file.

    Returns:
        The table.

    Raises:
        OptionError: There is no such table, or it is not in the form of a table.

    Example:
        >>> load_table("cifar-c").name
        'cifar-c'
    """
    known = _FILES.get(str(source))
    path = known or Path(source)
    if not path.is_file():
        raise OptionError(
            f"A table is one of {', '.join(sorted(_FILES))}, or the path of a TOML file; "
            f"found neither for `{source}`.{did_you_mean(str(source), _FILES)}"
        )
    return _read(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Table:
    del changed  # part of the cache's key only: an edited file is read again
    content = read_bounded(path, OptionError, largest=LARGEST_TOML)
    document = parse_toml(content, f"A table must be a TOML file; {path}", OptionError)
    name = document.pop("name", path.stem)
    conform(name, Text(100), str(path), OptionError, at="name")
    conform(document, SECTIONS, str(path), OptionError)
    sections = {corruption: _typed(corruption, values) for corruption, values in document.items()}
    return Table(name, hashlib.sha256(content).hexdigest(), MappingProxyType(sections))


def _typed(corruption: str, values: dict[str, Any]) -> dict[str, Any]:
    """Give whole numbers the type of their parameter: 2 times a uint8 is another uint8."""
    whole = ("radius",) if corruption in WHOLE_RADIUS else ()
    kept = {name: value for name, value in values.items() if not _is_real(name) or name in whole}
    real = {name: value for name, value in values.items() if name not in kept}
    return kept | {
        name: [float(each) for each in value] if isinstance(value, list) else float(value)
        for name, value in real.items()
    }


def _is_real(name: str) -> bool:
    return isinstance(LIMITS.get(name), Number)
