"""Networks to adapt: architectures, the checkpoints people have, training, evaluation.

    from ttapca import models

    network = models.load("Standard.pt", normalisation="none")     # finds out it is a WRN-28-10
    network = models.load("cifar10-resnet20")                      # ships with the package
    outcome = models.evaluate(network, test_images)                # error, calibration, speed

`build` makes an untrained network from `ARCHITECTURES`, `load` one with weights, `train` teaches it
in a folder that survives a crash, `describe_layers` says where a filter can go and what it costs.
Images in [0, 1] go in everywhere: normalisation is a layer of the network.
"""

from __future__ import annotations

from ttapca.models.architectures import ARCHITECTURES, Architecture, build
from ttapca.models.augmentation import Augmentation
from ttapca.models.evaluation import Evaluation, evaluate, expected_calibration_error
from ttapca.models.layers import LayerFacts, LayerTable, describe_layers
from ttapca.models.loading import load, load_rotation, load_weights, packaged
from ttapca.models.network import NORMALISATIONS, ImageNetwork, Normalisation, normalisation_of
from ttapca.models.rotation import RotationHead, RotationNetwork, add_rotation_head, turn
from ttapca.models.runs import train
from ttapca.models.training import Training
from ttapca.models.training_options import EpochRecord, TrainingOptions

__all__ = [
    "ARCHITECTURES",
    "NORMALISATIONS",
    "Architecture",
    "Augmentation",
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
    "normalisation_of",
    "packaged",
    "train",
    "turn",
]
