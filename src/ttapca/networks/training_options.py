"""How a network is trained, and what is noted about each epoch: plain values, saved with a run."""

from __future__ import annotations

from dataclasses import dataclass

from ttapca.errors import OptionError
from ttapca.networks.augmentation import Augmentation
from ttapca.networks.schedules import ScheduleName, learning_rate


@dataclass(frozen=True)
class TrainingOptions:
    """How a network is trained; all of it is written into the checkpoint.

    Attributes:
        epochs: Passes over the training images.
        batch_size: Images a step; a shorter last batch is left out.
        peak: The highest learning rate.
        momentum: Of Nesterov's kind.
        weight_decay: On weights of convolutions and linear layers; norms and biases have none.
        schedule: `one-cycle`, or `cosine` with a warm-up.
        warmup: Epochs of rising learning rate, for `cosine`.
        label_smoothing: Probability that is spread over all classes.
        padding: Largest shift of a random crop, in pixels.
        flip: Whether to mirror half of the images.
        cutout: Side of the blanked square; 0 for none.
        average: Decay of the moving average of weights, whose accuracy is measured and which is
            what the run delivers; 0 to deliver the weights themselves.
        rotation: Weight of the rotation loss, for a network with a rotation head.
        channels_last: Memory layout; a third faster on the CPU that was measured.
        seed: Of order and augmentation.

    Raises:
        OptionError: A number makes no sense.

    Example:
        >>> TrainingOptions(epochs=5, peak=0.05).momentum
        0.9
    """

    epochs: int = 25
    batch_size: int = 128
    peak: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    schedule: ScheduleName = "one-cycle"
    warmup: float = 1.0
    label_smoothing: float = 0.0
    padding: int = 4
    flip: bool = True
    cutout: int = 0
    average: float = 0.0
    rotation: float = 1.0
    channels_last: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no training could use."""
        rules = {
            "epochs": (self.epochs >= 1, "at least 1"),
            "batch_size": (self.batch_size >= 1, "at least 1"),
            "peak": (self.peak > 0, "above 0"),
            "momentum": (0 < self.momentum < 1, "between 0 and 1"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "warmup": (self.warmup >= 0, "at least 0"),
            "label_smoothing": (0 <= self.label_smoothing < 1, "from 0 to below 1"),
            "average": (0 <= self.average < 1, "from 0 to below 1"),
            "rotation": (self.rotation >= 0, "at least 0"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise OptionError(
                    f"`{name}` is out of range: found {getattr(self, name)}; it is {rule}."
                )
        learning_rate(self.schedule, 0, 1, peak=self.peak)  # refuses an unknown schedule
        self.augmentation()

    def augmentation(self) -> Augmentation:
        """What happens to the images."""
        return Augmentation(self.padding, self.flip, self.cutout)


@dataclass(frozen=True)
class EpochRecord:
    """One line of the log.

    Attributes:
        epoch: Counted from 1.
        learning_rate: Of the last step.
        loss: Mean over the steps.
        train_accuracy: On the augmented images, while training, in percent.
        rotation_accuracy: Of the rotation head on those images; None without one.
        test_accuracy: Of the weights that would be delivered now, in percent.
        seconds: That the epoch took.
    """

    epoch: int
    learning_rate: float
    loss: float
    train_accuracy: float
    rotation_accuracy: float | None
    test_accuracy: float
    seconds: float
