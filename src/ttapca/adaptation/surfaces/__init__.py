"""Surfaces: the parts of a model that a test-time method may change.

A surface is put on a model, switched on and off, reset and taken away again, without touching the
model's weights or buffers. It does not decide how it changes: either its state follows from the
data in the forward pass, or a predictor takes gradient steps on its parameters.
"""

from ttapca.adaptation.surfaces.base import Surface
from ttapca.adaptation.surfaces.filter_gains import SpectralGains
from ttapca.adaptation.surfaces.input_check import OutlierRepair
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
