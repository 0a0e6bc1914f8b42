"""The small network of the digits: trained in seconds where it is wanted, then kept."""

from __future__ import annotations

from pathlib import Path

from ttapca.data import read_digits
from ttapca.models.architectures import build
from ttapca.models.evaluation import Progress
from ttapca.models.loading import load
from ttapca.models.network import ImageNetwork
from ttapca.models.runs import WEIGHTS, train
from ttapca.models.small_cnn import DIGITS_SHAPE
from ttapca.models.training import TrainingOptions

DIGITS_NETWORK = "digits-small-cnn"
ARCHITECTURE = "small-cnn"
OPTIONS = TrainingOptions(epochs=30, batch_size=64, peak=0.1, padding=1, flip=False)


def digits_network(folder: Path, progress: Progress | None = None) -> ImageNetwork:
    """Load the network for scikit-learn's digits; train it first where the folder has none.

    Args:
        folder: Where it is kept, such as a cache.
        progress: Wraps the batches of each epoch; silent by default.

    Returns:
        The network, in evaluation mode: about 98 % accuracy on the test digits.

    Raises:
        StorageError: The folder cannot be written.

    Example:
        >>> import tempfile
        >>> digits_network(Path(tempfile.mkdtemp())).input_shape
        (1, 8, 8)
    """
    train_digits = read_digits("train")
    network = build(ARCHITECTURE, input_shape=DIGITS_SHAPE)
    description = {
        "architecture": ARCHITECTURE,
        "classes": network.classes,
        "input_shape": DIGITS_SHAPE,
        "normalisation": {"mean": (0.0,), "std": (1.0,)},
        "class_names": train_digits.class_names,
        "data": {"name": "digits", "training_images": train_digits.fingerprint()},
    }
    train(
        network,
        train_digits,
        read_digits("test"),
        OPTIONS,
        folder,
        description=description,
        progress=progress,
    )
    return load(folder / WEIGHTS)
