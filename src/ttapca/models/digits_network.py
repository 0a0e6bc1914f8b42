"""The small network of the digits: trained in seconds where it is wanted, then kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from ttapca.data import read_digits
from ttapca.models.architectures import build
from ttapca.models.evaluation import Progress
from ttapca.models.loading import load
from ttapca.models.network import ImageNetwork
from ttapca.models.runs import WEIGHTS, train
from ttapca.models.small_cnn import DIGITS_SHAPE
from ttapca.models.training import Training
from ttapca.models.training_options import TrainingOptions

DIGITS_NETWORK = "digits-small-cnn"
ARCHITECTURE = "small-cnn"
OPTIONS = TrainingOptions(epochs=30, batch_size=64, peak=0.1, padding=1, flip=False)


def digits_network(
    folder: Path | None = None,
    *,
    epochs: int = OPTIONS.epochs,
    seed: int = OPTIONS.seed,
    progress: Progress | None = None,
) -> ImageNetwork:
    """Give a network for scikit-learn's digits; train it where the folder has none yet.

    Args:
        folder: Where it is kept, such as a cache; None to train in memory and keep nothing.
        epochs: Passes over the training digits.
        seed: Of weights, order and augmentation.
        progress: Wraps the batches of each epoch; silent by default.

    Returns:
        The network, in evaluation mode: about 98 % accuracy on the test digits.

    Raises:
        OptionError: The folder holds a network of other options.
        StorageError: The folder cannot be written.

    Example:
        >>> digits_network(epochs=1).input_shape
        (1, 8, 8)
    """
    digits, test = read_digits("train"), read_digits("test")
    generator = torch.Generator().manual_seed(seed)
    network = build(ARCHITECTURE, input_shape=DIGITS_SHAPE, generator=generator)
    options = dataclasses.replace(OPTIONS, epochs=epochs, seed=seed)
    if folder is None:
        training = Training(network, digits, test, options)
        while not training.finished:
            training.run_epoch(progress)
        return network
    description = {
        "architecture": ARCHITECTURE,
        "classes": network.classes,
        "input_shape": DIGITS_SHAPE,
        "normalisation": {"mean": (0.0,), "std": (1.0,)},
        "class_names": digits.class_names,
        "data": {"name": "digits", "training_images": digits.fingerprint()},
    }
    train(network, digits, test, options, folder, description=description, progress=progress)
    return load(folder / WEIGHTS)


def training_steps(epochs: int = OPTIONS.epochs) -> int:
    """How many batches that takes, for a progress bar.

    Example:
        >>> training_steps(2)
        36
    """
    return epochs * (len(read_digits("train")) // OPTIONS.batch_size)
