"""Test-time adaptation with principal component analysis."""

from ttapca._version import __version__

__all__ = ["__version__"]
