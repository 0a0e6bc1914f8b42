"""Surfaces: the parts of a model that a test-time method may change.

A surface is put on a model, switched on and off, reset to the state it started from, and taken away
again; none of it touches the model's weights or buffers. What moves a surface is not its business:
either it computes its own state in the forward pass, or an `Adapter` takes gradient steps on its
parameters.
"""

from ttapca.adaptation.surfaces.base import Surface
from ttapca.adaptation.surfaces.filter_gains import SpectralGains
from ttapca.adaptation.surfaces.inputs import InputTransform
from ttapca.adaptation.surfaces.statistics import BatchNormStatistics, GroupNormStatistics
from ttapca.adaptation.surfaces.weights import NormAffine, Weights

__all__ = [
    "BatchNormStatistics",
    "GroupNormStatistics",
    "InputTransform",
    "NormAffine",
    "SpectralGains",
    "Surface",
    "Weights",
]
