"""`ttapca demo`."""

from __future__ import annotations


def demo() -> None:
    """Show the library at work."""
