"""What a camera sees over time: conditions, and how long each of them lasts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ttapca.corruptions.catalogue import SEVERITIES, find
from ttapca.errors import OptionError

CLEAN = "clean"
SECONDS = {"s": 1, "m": 60, "h": 3600}
LONGEST = 1_000_000_000  # images or seconds of one condition

STEP = re.compile(
    r"(?P<corruption>\w+)(?::(?P<severity>\w+))?\s+(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)"
)


@dataclass(frozen=True)
class Step:
    """One condition of a schedule.

    Attributes:
        corruption: Its name, or `clean`.
        severity: From 1 to 5; 0 for clean images.
        amount: How long it lasts.
        unit: What the amount counts.

    Example:
        >>> Step("fog", 5, 20, "seconds").images(rate=10)
        200
        >>> Step("clean", 0, 30, "images").title
        'clean'
    """

    corruption: str
    severity: int
    amount: float
    unit: Literal["seconds", "images"]

    @property
    def title(self) -> str:
        """The condition as the schedule writes it, such as `fog:5`."""
        return f"{self.corruption}:{self.severity}" if self.severity else self.corruption

    def images(self, rate: float) -> int:
        """Return how many images it has, at so many images a second; at least one."""
        count = self.amount if self.unit == "images" else self.amount * rate
        return max(1, round(count))


def parse_schedule(text: str) -> tuple[Step, ...]:
    """Return the steps of a schedule: `CONDITION DURATION`, separated by commas.

    A condition is `clean`, or a corruption with its severity (5 if none is given). A duration is a
    number with `s`, `m` or `h`, or a number of `images`.

    Raises:
        OptionError: It is no schedule, or there is no such corruption.

    Example:
        >>> steps = parse_schedule("clean 20s, snow:3 1.5m, fog 50 images")
        >>> [step.title for step in steps]
        ['clean', 'snow:3', 'fog:5']
    """
    words = [word.strip() for word in text.split(",")]
    return tuple(_step(word, text) for word in words)


def parse_seconds(text: str, option: str) -> float:
    """Return the seconds of a duration such as `5s`, `1.5m` or `2h`; a bare number is of seconds.

    Raises:
        OptionError: It is no duration.

    Example:
        >>> parse_seconds("1.5m", "--stagger")
        90.0
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text, re.ASCII)
    if not found:
        raise OptionError(f"{option} takes a duration such as 5s, 1.5m or 1h; found `{text}`.")
    return float(found[1]) * SECONDS[found[2] or "s"]


def _step(word: str, text: str) -> Step:
    found = re.fullmatch(STEP, word)
    if not found or found["unit"] not in (*SECONDS, "image", "images"):
        raise OptionError(
            "A schedule has conditions and how long they last, such as `clean 20s, fog:5 20s` or "
            f"`clean 300 images`; found `{word or text}`."
        )
    corruption, severity = CLEAN, 0
    if found["corruption"] != CLEAN:
        corruption = find(found["corruption"]).name
        severity = _severity(found["severity"] or str(SEVERITIES[-1]), word)
    elif found["severity"]:
        raise OptionError(f"Clean images have no severity; found `{word}`.")
    amount = float(found["amount"])
    in_seconds = found["unit"] in SECONDS
    if in_seconds:
        amount *= SECONDS[found["unit"]]
    if not 0 < amount <= LONGEST:
        raise OptionError(f"A condition lasts longer than nothing, not for ever; found `{word}`.")
    return Step(corruption, severity, amount, "seconds" if in_seconds else "images")


def _severity(digits: str, word: str) -> int:
    if digits not in map(str, SEVERITIES):
        raise OptionError(
            f"A severity is from {SEVERITIES[0]} to {SEVERITIES[-1]}, as in `fog:3 20s`; found "
            f"`{word}`."
        )
    return int(digits)
