"""Which curves there are to draw: pure data, so that a test can read them. `drawing` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log", "symlog"]

INK = -1
"""The style of a plain line in the colour of the text."""


@dataclass(frozen=True)
class Line:
    """One curve, or one point.

    Attributes:
        name: What the legend says.
        style: Number of its colour, marker and dash; the same for a method in all figures.
        x: Where it was measured; nothing for a level, which goes all the way across.
        y: What was measured; one value for a level.
        spread: Standard deviation at each point, where there are several seeds.
    """

    name: str
    style: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()


@dataclass(frozen=True)
class Panel:
    """Curves over one another, with one scale.

    Attributes:
        label: Of the y-axis.
        lines: What is drawn.
        scale: Of the y-axis.
        cut: Where the y-axis is broken: what lies above stands nearer than it would, so that the
            rest can be told apart.
    """

    label: str
    lines: tuple[Line, ...]
    scale: Scale = "linear"
    cut: float | None = None


@dataclass(frozen=True)
class Plot:
    """One figure: panels above one another, with one x-axis.

    Attributes:
        name: A word for it; unique on a page.
        title: What is shown.
        caption: What it is made of.
        label: Of the x-axis.
        panels: From top to bottom.
        scale: Of the x-axis.
        ticks: Where the x-axis is labelled, when not by its scale.
        named: Whether each line is a point that has its name and value beside it, in place of a
            legend; such a plot has one panel.
    """

    name: str
    title: str
    caption: str
    label: str
    panels: tuple[Panel, ...]
    scale: Scale = "linear"
    ticks: tuple[float, ...] = ()
    named: bool = False
