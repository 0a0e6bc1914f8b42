"""Train a network on a data set: one epoch at a time, with a state that can be saved and resumed.

Every random number comes from one generator and every learning rate from the number of the step,
so a run that was killed and resumed ends with the same weights, bit for bit, as one that was not
(with the same number of threads on the same machine).
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn

from ttapca.datasets import Images
from ttapca.errors import NotEnoughDataError, TrainingError
from ttapca.networks.averaging import AveragedWeights
from ttapca.networks.evaluation import Progress, evaluate
from ttapca.networks.rotation import RotationNetwork, frozen_statistics, published_name, turn
from ttapca.networks.schedules import learning_rate
from ttapca.networks.training_options import EpochRecord, TrainingOptions
from ttapca.support.group_norm import safe_gradients

EVALUATION_BATCH = 500


class Training:
    """A training run in memory.

    Args:
        network: What is trained, in place; a `RotationNetwork` learns both tasks.
        train: Training images.
        test: Images for the accuracy after each epoch; nothing is chosen by it.
        options: How.

    Attributes:
        history: One record an epoch.

    Raises:
        NotEnoughDataError: There are fewer images than a batch holds.

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
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.network = network.to(memory_format=layout)  # type: ignore[call-overload]
        self.options = options
        self.history: list[EpochRecord] = []
        self._pixels = torch.from_numpy(train.images.transpose(0, 3, 1, 2).copy())
        self._labels = torch.from_numpy(train.labels.copy())
        self._test = test
        self._layout = layout
        self._augment = options.augmentation()
        self._generator = torch.Generator().manual_seed(options.seed)
        self._optimizer = _optimizer(network, options)
        self._averaged = AveragedWeights(network, options.average) if options.average else None
        # Dropout in a user's network draws from torch's own generator: it gets a state of its own.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            self._torch_state = torch.get_rng_state()

    @property
    def steps_an_epoch(self) -> int:
        """Batches; what does not fill one is left out, and is another part in every epoch."""
        return len(self._labels) // self.options.batch_size

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return len(self.history) >= self.options.epochs

    def run_epoch(self, progress: Progress | None = None) -> EpochRecord:
        """Train for one epoch, then measure.

        Args:
            progress: Wraps the batches; silent by default.

        Returns:
            The record, which is also added to the history.

        Raises:
            TrainingError: The loss or a weight is not finite any more.
        """
        start = time.perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._torch_state)
            with safe_gradients(self.network):
                totals = self._train_epoch(progress or (lambda batches: batches))
            self._torch_state = torch.get_rng_state()
        images = self.steps_an_epoch * self.options.batch_size
        turned = isinstance(self.network, RotationNetwork)
        record = EpochRecord(
            epoch=len(self.history) + 1,
            learning_rate=self._optimizer.param_groups[0]["lr"],
            loss=totals["loss"] / self.steps_an_epoch,
            train_accuracy=100 * totals["right"] / images,
            rotation_accuracy=100 * totals["turned_right"] / images if turned else None,
            test_accuracy=self._test_accuracy(),
            seconds=time.perf_counter() - start,
        )
        self.history.append(record)
        return record

    def delivered(self) -> dict[str, Tensor]:
        """The weights that the run delivers: the moving average where there is one.

        The names are those of the network alone; a rotation head's start with `rotation_head.`.
        """
        tensors = self._averaged.tensors if self._averaged else dict(self.network.state_dict())
        if not isinstance(self.network, RotationNetwork):
            return tensors
        return {published_name(name): tensor for name, tensor in tensors.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, besides the history."""
        state = {f"network/{name}": value for name, value in self.network.state_dict().items()}
        if self._averaged:
            state |= {f"average/{name}": value for name, value in self._averaged.tensors.items()}
        for name, parameter in self.network.named_parameters():
            momentum = self._optimizer.state[parameter].get("momentum_buffer")
            if momentum is not None:
                state[f"momentum/{name}"] = momentum
        state["generator"] = self._generator.get_state()
        state["torch_generator"] = self._torch_state
        return state

    def restore(self, tensors: dict[str, Tensor], history: list[EpochRecord]) -> None:
        """Go on from what `tensors()` gave: all of it or, where it does not fit, nothing.

        Raises:
            TrainingError: The state is of another network, or not finite.
        """
        self._check_state(tensors, history)
        parts: dict[str, dict[str, Tensor]] = {"network": {}, "average": {}, "momentum": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            if part in parts:
                parts[part][rest] = tensor
        self.network.load_state_dict(parts["network"])
        if self._averaged:
            self._averaged.restore(parts["average"])
        for name, parameter in self.network.named_parameters():
            if name in parts["momentum"]:
                buffer = torch.empty_like(parameter, requires_grad=False)
                self._optimizer.state[parameter]["momentum_buffer"] = buffer.copy_(
                    parts["momentum"][name]
                )
        self._generator.set_state(tensors["generator"])
        self._torch_state = tensors["torch_generator"]
        self.history = list(history)

    def _check_state(self, tensors: dict[str, Tensor], history: list[EpochRecord]) -> None:
        required = self.tensors()
        optional = {
            f"momentum/{name}": parameter for name, parameter in self.network.named_parameters()
        }
        forms = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        expected = {
            name: (tensor.shape, tensor.dtype)
            for name, tensor in {**optional, **required}.items()
            if name in required or name in tensors
        }
        differing = [
            name for name in {**expected, **forms} if expected.get(name) != forms.get(name)
        ]
        fault = (
            f"`{differing[0][:200]}` is missing, unknown or of another form" if differing else ""
        )
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                fault = fault or f"`{name[:200]}` holds numbers that are not finite"
        for name in ("generator", "torch_generator"):
            if not fault and not _is_random_state(tensors[name]):
                fault = f"`{name}` is no state of a random generator"
        if len(history) > self.options.epochs:
            fault = fault or f"it has done {len(history)} epochs of {self.options.epochs}"
        if fault:
            raise TrainingError(
                f"The saved state is not of this network and these options: {fault}. Start again "
                "in a new folder."
            )

    def _train_epoch(self, progress: Progress) -> dict[str, float]:
        self.network.train()
        order = torch.randperm(len(self._labels), generator=self._generator)
        size = self.options.batch_size
        batches = torch.split(order[: self.steps_an_epoch * size], size)
        totals = {"loss": 0.0, "right": 0.0, "turned_right": 0.0}
        for number, rows in enumerate(progress(batches)):
            step = len(self.history) * self.steps_an_epoch + number
            self._set_learning_rate(step)
            outcome = self._step(rows)
            if self._averaged:
                self._averaged.update(step)
            for name, value in outcome.items():
                totals[name] += value
        # The statistics of a BatchNorm layer may overflow under a loss that stays finite.
        if not all(bool(torch.isfinite(value).all()) for value in self.tensors().values()):
            raise self._diverged("A weight or a statistic")
        return totals

    def _step(self, rows: Tensor) -> dict[str, float]:
        pixels, labels = self._augment(self._pixels[rows], self._generator), self._labels[rows]
        logits = self.network(self._images(pixels))
        loss = F.cross_entropy(logits, labels, label_smoothing=self.options.label_smoothing)
        outcome = {"right": float((logits.argmax(1) == labels).sum())}
        if isinstance(self.network, RotationNetwork):
            turned, quarters = turn(pixels, self._generator)
            with frozen_statistics(self.network):
                guesses = self.network.rotation_logits(self._images(turned))
            loss = loss + self.options.rotation * F.cross_entropy(guesses, quarters)
            outcome["turned_right"] = float((guesses.argmax(1) == quarters).sum())
        outcome["loss"] = float(loss.detach())
        if not abs(outcome["loss"]) < float("inf"):
            raise self._diverged("The loss")
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return outcome

    @staticmethod
    def _diverged(what: str) -> TrainingError:
        return TrainingError(
            f"{what} is not finite any more: the training diverged. Start again in a new folder "
            "with a lower peak learning rate."
        )

    def _images(self, pixels: Tensor) -> Tensor:
        return pixels.to(torch.float32, memory_format=self._layout).div_(255)

    def _set_learning_rate(self, step: int) -> None:
        options = self.options
        rate = learning_rate(
            options.schedule,
            step,
            options.epochs * self.steps_an_epoch,
            peak=options.peak,
            warmup_steps=round(options.warmup * self.steps_an_epoch),
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _test_accuracy(self) -> float:
        self.network.eval()
        if self._averaged is None:
            return evaluate(self.network, self._test, batch_size=EVALUATION_BATCH).accuracy
        with self._averaged.applied():
            return evaluate(self.network, self._test, batch_size=EVALUATION_BATCH).accuracy


def _optimizer(network: nn.Module, options: TrainingOptions) -> torch.optim.SGD:
    decayed = [parameter for parameter in network.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in network.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=options.peak,
        momentum=options.momentum,
        nesterov=True,
    )


def _is_random_state(state: Tensor) -> bool:
    generator = torch.Generator()
    try:
        generator.set_state(state)
    except (RuntimeError, TypeError):
        return False
    # A normal number that was drawn in advance is part of the state.
    return bool(torch.isfinite(torch.randn(2, generator=generator, dtype=torch.float64)).all())
