"""Networks to adapt: architectures, checkpoints, training, evaluation.

`build` makes an untrained network, `load` one with weights, `train` trains one in a folder that
survives a crash, `describe_layers` lists the layers for a filter and its costs. All networks take
images in [0, 1]: normalisation is their first layer.
"""

from __future__ import annotations

from ttapca.networks.architectures import ARCHITECTURES, build
from ttapca.networks.checkpoints import (
    load,
    load_rotation,
    load_weights,
    packaged,
    packaged_filters,
)
from ttapca.networks.evaluation import Evaluation, evaluate, expected_calibration_error, mean_iou
from ttapca.networks.layer_costs import LayerFacts, LayerTable, describe_layers
from ttapca.networks.network import NORMALISATIONS, ImageNetwork, Normalisation, normalisation_of
from ttapca.networks.rotation import RotationHead, RotationNetwork, add_rotation_head, turn
from ttapca.networks.runs import train
from ttapca.networks.training import EpochRecord, Training, TrainingOptions

__all__ = [
    "ARCHITECTURES",
    "NORMALISATIONS",
    "EpochRecord",
    "Evaluation",
    "ImageNetwork",
    "LayerFacts",
    "LayerTable",
    "Normalisation",
    "RotationHead",
    "RotationNetwork",
    "Training",
    "TrainingOptions",
    "add_rotation_head",
    "build",
    "describe_layers",
    "evaluate",
    "expected_calibration_error",
    "load",
    "load_rotation",
    "load_weights",
    "mean_iou",
    "normalisation_of",
    "packaged",
    "packaged_filters",
    "train",
    "turn",
]
