"""Surfaces: the parts of a model that a test-time method may change.

Either the state of a surface follows from the data in the forward pass, or a predictor takes
gradient steps on its parameters; the model's own weights and buffers stay untouched.
"""

from ttapca.adaptation.surfaces.base import Surface
from ttapca.adaptation.surfaces.filter_gains import OutlierRepair, SpectralGains
from ttapca.adaptation.surfaces.statistics import BatchNormStatistics
from ttapca.adaptation.surfaces.stream_statistics import StreamStatistics
from ttapca.adaptation.surfaces.trainable import NormAffine, Weights

__all__ = [
    "BatchNormStatistics",
    "NormAffine",
    "OutlierRepair",
    "SpectralGains",
    "StreamStatistics",
    "Surface",
    "Weights",
]
