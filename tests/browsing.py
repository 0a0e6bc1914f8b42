"""What tests of pages in a real browser share. Without Chromium they skip."""

from __future__ import annotations

import shutil

import pytest

PATIENCE = 120_000  # milliseconds that a busy machine may take
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here; .ci/run installs it"
)


def luminance(colour: str) -> float:
    """As WCAG defines it, of `rgb(r, g, b)` or `color(srgb r g b)`."""
    inside = colour.split("(")[1].rstrip(")").replace(",", " ").removeprefix("srgb").split()
    largest = 1 if colour.startswith("color") else 255
    parts = [float(each) / largest for each in inside[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    dark, bright = sorted((luminance(one), luminance(two)))
    return (bright + 0.05) / (dark + 0.05)
