"""Train a network on a data set, epoch by epoch, with a state that can be saved and resumed.

Every random number comes from a generator in the state, and every learning rate from the number of
the step. So a run that was resumed ends with the same weights, bit for bit, as one that was not.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ttapca._checks import BelowOne, NotNegative, Number, Positive, Whole, check_fields
from ttapca.datasets import Images
from ttapca.errors import NotEnoughDataError, TrainingError
from ttapca.networks.evaluation import Progress, evaluate
from ttapca.networks.rotation import RotationNetwork, frozen_statistics, published_name, turn
from ttapca.support.norm_layers import make_gradients_safe
from ttapca.support.wrapping import temporary_patches

ScheduleName = Literal["cosine", "one-cycle"]
OptimizerName = Literal["sgd", "adamw"]
Million = Annotated[int, Whole(1, 10**6)]
Percent = Annotated[float, Number(0, 100)]

EVALUATION_BATCH = 500
ONE_CYCLE_RISE = 0.3  # of the steps
START_FRACTION = 0.04  # of the peak, at the first step

# The tensors that an optimiser keeps for each weight: the name in a saved state, and torch's own.
_MEMORIES: dict[str, dict[str, str]] = {
    "sgd": {"momentum": "momentum_buffer"},
    "adamw": {"mean": "exp_avg", "square": "exp_avg_sq", "steps": "step"},
}


@dataclass(frozen=True)
class TrainingOptions:
    """How a network is trained; the checkpoint records all of it.

    Attributes:
        epochs: Passes over the training images.
        batch_size: Images in a step; a shorter last batch is left out.
        peak: The highest learning rate.
        optimizer: `sgd`, or `adamw`, which transformers need, with a peak of some 0.001.
        momentum: Nesterov's, or the decay of the mean gradient of `adamw`.
        weight_decay: On weights of convolutions and linear layers; norms and biases have none.
        schedule: `one-cycle` rises over the first three tenths of the training, which suits short
            runs; `cosine` rises over a warm-up. Both then fall to zero along half a cosine.
        warmup: Epochs of rising learning rate, for `cosine`.
        label_smoothing: Probability that is spread over all classes.
        padding: Largest shift of a random crop, in pixels.
        flip: Whether to mirror half of the images.
        cutout: Side of a square that is replaced by the mean of the image; 0 for none.
        average: Decay of a moving average of the weights, which is delivered instead; 0 for none.
        rotation: Weight of the rotation loss, for a network with a rotation head.
        channels_last: Memory layout; a third faster on the CPU that was measured.
        bfloat16: Whether to multiply in bfloat16 (`torch.autocast`); slow on most processors.
        seed: Of the order of images and their augmentation.

    Example:
        >>> TrainingOptions(epochs=5, peak=0.05).momentum
        0.9
    """

    epochs: Million = 25
    batch_size: Million = 128
    peak: Positive = 0.2
    optimizer: OptimizerName = "sgd"
    momentum: Annotated[float, Number(above=0, below=1)] = 0.9
    weight_decay: NotNegative = 5e-4
    schedule: ScheduleName = "one-cycle"
    warmup: NotNegative = 1.0
    label_smoothing: BelowOne = 0.0
    padding: int = 4
    flip: bool = True
    cutout: int = 0
    average: BelowOne = 0.0
    rotation: NotNegative = 1.0
    channels_last: bool = True
    bfloat16: bool = False
    seed: Annotated[int, Whole(-(2**63))] = 0

    def __post_init__(self) -> None:
        """Check every option."""
        check_fields(self)

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Return the learning rate of a step, which depends on nothing but its number."""
        steps = self.epochs * steps_per_epoch
        rise = round(ONE_CYCLE_RISE * steps)
        if self.schedule == "cosine":
            rise = min(round(self.warmup * steps_per_epoch), steps)
        if step < rise:
            return self.peak * (START_FRACTION + (1 - START_FRACTION) * step / rise)
        return self.peak * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2


def augment(images: Tensor, options: TrainingOptions, generator: torch.Generator) -> Tensor:
    """Crop, mirror and blank parts of images, uint8 (batch, channels, height, width), at random."""
    batch, _, height, width = images.shape
    rows, columns = torch.arange(height), torch.arange(width)
    if options.padding or options.flip:
        shifts = torch.randint(0, 2 * options.padding + 1, (2, batch, 1), generator=generator)
        places = columns.expand(batch, width)
        if options.flip:
            mirrored = torch.randint(0, 2, (batch, 1), generator=generator).bool()
            places = torch.where(mirrored, places.flip(1), places)
        padded = F.pad(images, (options.padding,) * 4)
        down, right = shifts[0] + rows, shifts[1] + places  # (batch, height), (batch, width)
        # Indices on both sides of a slice put the channels last.
        numbers = torch.arange(batch)[:, None, None]
        images = padded[numbers, :, down[:, :, None], right[:, None, :]]
        images = images.permute(0, 3, 1, 2).contiguous()
    if options.cutout:  # the centre of the square lies inside the image, its edges perhaps not
        top = torch.randint(0, height, (batch, 1), generator=generator) - options.cutout // 2
        left = torch.randint(0, width, (batch, 1), generator=generator) - options.cutout // 2
        in_rows = (rows >= top) & (rows < top + options.cutout)  # (batch, height)
        in_columns = (columns >= left) & (columns < left + options.cutout)  # (batch, width)
        square = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
        mean = images.float().mean((2, 3), keepdim=True).round().to(images.dtype)
        images = torch.where(square, mean, images)
    return images


@dataclass(frozen=True)
class EpochRecord:
    """One line of the log; accuracies are in percent."""

    epoch: Million  # from 1 on
    learning_rate: Annotated[float, Number(0, 1e6)]  # of the last step
    loss: float  # mean over the steps
    train_accuracy: Percent  # on the augmented images, while training
    rotation_accuracy: Percent | None  # of the rotation head on them; None without one
    test_accuracy: Percent  # of the weights that would be delivered now
    seconds: NotNegative


class Training:
    """A training run in memory, with a record of each epoch in `history`.

    `train` keeps one in a folder, and explains the arguments.

    Example:
        >>> from ttapca.datasets import read_digits
        >>> from ttapca.networks import build
        >>> network = build("small-cnn", input_shape=(1, 8, 8))
        >>> options = TrainingOptions(epochs=1, padding=1, flip=False)
        >>> training = Training(network, read_digits("train"), read_digits("test"), options)
        >>> training.run_epoch().epoch
        1
    """

    def __init__(
        self, network: nn.Module, train: Images, test: Images, options: TrainingOptions
    ) -> None:
        if len(train) < options.batch_size:
            raise NotEnoughDataError(
                f"Training needs at least one batch of {options.batch_size} images; found "
                f"{len(train)}. Choose a smaller batch."
            )
        self._layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.network = network.to(memory_format=self._layout)  # type: ignore[call-overload]
        self.options = options
        self.history: list[EpochRecord] = []
        self.steps_per_epoch = len(train) // options.batch_size
        self._pixels = torch.from_numpy(train.images.transpose(0, 3, 1, 2).copy())
        self._labels = torch.from_numpy(train.labels.copy())
        self._test = test
        self._generator = torch.Generator().manual_seed(options.seed)
        self._optimizer = _optimizer(network, options)
        self._averaged = _averaged(network, options.average) if options.average else None
        # Dropout in a user's network draws from torch's global generator, so its state is kept.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            self._torch_state = torch.get_rng_state()

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return len(self.history) >= self.options.epochs

    @property
    def _delivered_network(self) -> nn.Module:
        return self._averaged.module if self._averaged else self.network

    def run_epoch(self, progress: Progress | None = None) -> EpochRecord:
        """Train for one epoch, measure the result and add the record to the history."""
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._torch_state)
            with temporary_patches() as patches:
                make_gradients_safe(self.network, patches)
                totals = self._train_epoch(progress or (lambda batches: batches))
            self._torch_state = torch.get_rng_state()
        images = self.steps_per_epoch * self.options.batch_size
        turned = isinstance(self.network, RotationNetwork)
        measured = self._delivered_network.eval()
        record = EpochRecord(
            epoch=len(self.history) + 1,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            loss=totals["loss"] / self.steps_per_epoch,
            train_accuracy=100 * totals["right"] / images,
            rotation_accuracy=100 * totals["turned_right"] / images if turned else None,
            test_accuracy=evaluate(measured, self._test, batch_size=EVALUATION_BATCH).accuracy,
            seconds=time.perf_counter() - start,
        )
        self.history.append(record)
        return record

    def delivered(self) -> dict[str, Tensor]:
        """Return the weights that the run delivers: their moving average if there is one."""
        tensors = self._delivered_network.state_dict()
        if not isinstance(self.network, RotationNetwork):
            return dict(tensors)
        return {published_name(name): tensor for name, tensor in tensors.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a resumed run needs besides the history."""
        state = {f"network/{name}": value for name, value in self.network.state_dict().items()}
        if self._averaged:
            average = self._averaged.module.state_dict()
            state |= {f"average/{name}": value for name, value in average.items()}
        for name, (parameter, key) in self._memories().items():
            if key in self._optimizer.state[parameter]:
                state[name] = self._optimizer.state[parameter][key]
        state["generator"] = self._generator.get_state()
        state["torch_generator"] = self._torch_state
        return state

    def restore(self, tensors: dict[str, Tensor], history: list[EpochRecord]) -> None:
        """Go on from the tensors of another run; nothing changes if they do not fit."""
        fault = self._fault(tensors, history)
        if fault:
            raise TrainingError(
                f"The saved state is not of this network and these options: {fault}. Start again "
                "in a new folder."
            )
        for name, (parameter, key) in self._memories().items():
            if name in tensors:
                # In the memory layout of the weight, so that sums are rounded as before.
                layout = parameter if tensors[name].dim() else tensors[name]
                self._optimizer.state[parameter][key] = torch.empty_like(
                    layout, requires_grad=False
                )
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
        if self._averaged:
            self._averaged.n_averaged.fill_(len(history) * self.steps_per_epoch)
        self._generator.set_state(tensors["generator"])
        self._torch_state = tensors["torch_generator"]
        self.history = list(history)

    def _memories(self) -> dict[str, tuple[nn.Parameter, str]]:
        """Return the weight and torch's key of each tensor that the optimiser may keep, by name."""
        return {
            f"{memory}/{name}": (parameter, key)
            for name, parameter in self.network.named_parameters()
            for memory, key in _MEMORIES[self.options.optimizer].items()
        }

    def _fault(self, tensors: dict[str, Tensor], history: list[EpochRecord]) -> str:
        """Return the reason why a saved state does not fit; nothing if it fits."""
        required = self.tensors()
        possible: dict[str, Tensor] = {
            name: torch.zeros(()) if key == "step" else parameter
            for name, (parameter, key) in self._memories().items()
        }
        for name in {**required, **tensors}:
            wanted, found = {**possible, **required}.get(name), tensors.get(name)
            if wanted is None or found is None:
                return f"`{name[:200]}` is missing or unknown"
            if wanted.shape != found.shape or wanted.dtype != found.dtype:
                return f"`{name}` has another shape or type"
            if not bool(torch.isfinite(found).all()):
                return f"`{name}` holds numbers that are not finite"
            if name in ("generator", "torch_generator") and not _is_random_state(found):
                return f"`{name}` is no state of a random generator"
        if len(history) > self.options.epochs:
            return f"it has done {len(history)} epochs of {self.options.epochs}"
        return ""

    def _train_epoch(self, progress: Progress) -> dict[str, float]:
        self.network.train()
        order = torch.randperm(len(self._labels), generator=self._generator)
        size = self.options.batch_size
        batches = torch.split(order[: self.steps_per_epoch * size], size)
        totals = {"loss": 0.0, "right": 0.0, "turned_right": 0.0}
        for number, rows in enumerate(progress(batches)):
            step = len(self.history) * self.steps_per_epoch + number
            for group in self._optimizer.param_groups:
                group["lr"] = self.options.learning_rate(step, self.steps_per_epoch)
            for name, value in self._step(rows).items():
                totals[name] += value
            if self._averaged:
                self._averaged.update_parameters(self.network)
        # The statistics of a BatchNorm layer may overflow under a loss that stays finite.
        if not all(bool(torch.isfinite(value).all()) for value in self.tensors().values()):
            raise _diverged("A weight or a statistic")
        return totals

    def _step(self, rows: Tensor) -> dict[str, float]:
        labels = self._labels[rows]
        pixels = augment(self._pixels[rows], self.options, self._generator)
        with self._precision():
            logits = self.network(self._images(pixels))
        logits = logits.float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.options.label_smoothing)
        outcome = {"right": float((logits.argmax(1) == labels).sum())}
        if isinstance(self.network, RotationNetwork):
            turned, quarters = turn(pixels, self._generator)
            with frozen_statistics(self.network), self._precision():
                guesses = self.network.rotation_logits(self._images(turned))
            loss = loss + self.options.rotation * F.cross_entropy(guesses.float(), quarters)
            outcome["turned_right"] = float((guesses.argmax(1) == quarters).sum())
        outcome["loss"] = float(loss.detach())
        if not math.isfinite(outcome["loss"]):
            raise _diverged("The loss")
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return outcome

    def _precision(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.options.bfloat16)

    def _images(self, pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32, memory_format=self._layout).div_(255)


def _optimizer(network: nn.Module, options: TrainingOptions) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = []
    for decay, of_weights in ((options.weight_decay, True), (0.0, False)):
        chosen = [each for each in network.parameters() if (each.dim() > 1) == of_weights]
        groups += [{"params": chosen, "weight_decay": decay}] if chosen else []
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=options.peak, betas=(options.momentum, 0.999))
    return torch.optim.SGD(groups, lr=options.peak, momentum=options.momentum, nesterov=True)


def _averaged(network: nn.Module, decay: float) -> AveragedModel:
    def average(averaged: Any, present: Any, updates: Any) -> None:
        weight = 1 - min(decay, (1 + int(updates)) / (10 + int(updates)))
        for old, new in zip(averaged, present, strict=True):
            if old.is_floating_point():
                old.lerp_(new, weight)
            else:
                old.copy_(new)  # counters are not averaged

    return AveragedModel(network, multi_avg_fn=average, use_buffers=True)


def _diverged(value: str) -> TrainingError:
    return TrainingError(
        f"{value} is not finite any more: the training diverged. Start again in a new folder "
        "with a lower peak learning rate."
    )


def _is_random_state(state: Tensor) -> bool:
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError):
        return False
    return True
