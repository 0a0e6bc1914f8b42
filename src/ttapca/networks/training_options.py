"""How a network is trained: the options, and the learning rate that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ttapca._checks import Flag, Number, OneOf, Rule, Whole, check_option

ScheduleName = Literal["cosine", "one-cycle"]
OptimizerName = Literal["sgd", "adamw"]

ONE_CYCLE_RISE = 0.3  # of the steps
START_FRACTION = 0.04  # of the peak, at the first step

_RULES: dict[str, Rule] = {
    "epochs": Whole(1, 10**6),
    "batch_size": Whole(1, 10**6),
    "peak": Number(above=0),
    "optimizer": OneOf(get_args(OptimizerName)),
    "momentum": Number(above=0, below=1),
    "weight_decay": Number(0),
    "schedule": OneOf(get_args(ScheduleName)),
    "warmup": Number(0),
    "label_smoothing": Number(0, below=1),
    "padding": Whole(0),
    "flip": Flag(),
    "cutout": Whole(0),
    "average": Number(0, below=1),
    "rotation": Number(0),
    "channels_last": Flag(),
    "bfloat16": Flag(),
    "seed": Whole(-(2**63)),
}


@dataclass(frozen=True)
class TrainingOptions:
    """How a network is trained; the checkpoint records all of it.

    Attributes:
        epochs: Passes over the training images.
        batch_size: Images in a step; a shorter last batch is left out.
        peak: The highest learning rate.
        optimizer: `sgd` with Nesterov's momentum, or `adamw`, which transformers need; its peak is
            some 0.001 and its weight decay some 0.05.
        momentum: Nesterov's, or the decay of the mean gradient of `adamw`.
        weight_decay: On weights of convolutions and linear layers; norms and biases have none.
        schedule: `one-cycle` rises over the first three tenths of the training, which suits short
            runs; `cosine` rises over a warm-up. Both then fall to zero along half a cosine.
        warmup: Epochs of rising learning rate, for `cosine`.
        label_smoothing: Probability that is spread over all classes.
        padding: Largest shift of a random crop, in pixels.
        flip: Whether to mirror half of the images.
        cutout: Side of a square that is replaced by the mean of the image; 0 for none.
        average: Decay of a moving average of the weights, which is then measured and delivered
            instead of them; 0 for none. It starts lower, to forget the random start soon.
        rotation: Weight of the rotation loss, for a network with a rotation head.
        channels_last: Memory layout; a third faster on the CPU that was measured.
        bfloat16: Whether convolutions and matrices are multiplied in bfloat16 (`torch.autocast`);
            weights stay float32. Twice as fast where the processor has such instructions
            (`avx512_bf16`, `amx_bf16`), slower elsewhere.
        seed: Of the order of images and their augmentation.

    Raises:
        OptionError: A value is out of range.

    Example:
        >>> TrainingOptions(epochs=5, peak=0.05).momentum
        0.9
    """

    epochs: int = 25
    batch_size: int = 128
    peak: float = 0.2
    optimizer: OptimizerName = "sgd"
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
    bfloat16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every option."""
        for name, rule in _RULES.items():
            check_option(name, getattr(self, name), rule)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, which depends on nothing but its number.

        Example:
            >>> options = TrainingOptions(epochs=10, peak=1.0)
            >>> [round(options.learning_rate(step, 1), 2) for step in range(10)]
            [0.04, 0.36, 0.68, 1.0, 0.95, 0.81, 0.61, 0.39, 0.19, 0.05]
        """
        steps = self.epochs * steps_per_epoch
        rise = round(ONE_CYCLE_RISE * steps)
        if self.schedule == "cosine":
            rise = min(round(self.warmup * steps_per_epoch), steps)
        if step < rise:
            return self.peak * (START_FRACTION + (1 - START_FRACTION) * step / rise)
        return self.peak * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2
