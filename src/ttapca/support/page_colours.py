"""The colours of all pages, light and dark: the report and the live page look like one family."""

from __future__ import annotations

from pathlib import Path


def page_colours() -> str:
    """Return a style sheet that defines the colours as variables.

    Example:
        >>> "--accent:" in page_colours()
        True
    """
    return Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
