"""Adaptation in production: many streams over one network, with or without HTTP around it."""

from ttapca.support.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
