"""`rotta`: a slow teacher and its student learn from a memory that is balanced and recent."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ttapca._checks import Count, NotNegative, Seed, Share
from ttapca.adaptation.optimisation import Run, log_predictions
from ttapca.adaptation.surfaces import NormAffine
from ttapca.errors import OptionError, ShapeError
from ttapca.methods.method import CLASSES, Assembly, GradientMethod, register
from ttapca.methods.per_image_norms import OwnStatistics
from ttapca.methods.views import STRONG, Forward, images_and_forward
from ttapca.methods.weights import TaughtSteps, surprise_of, with_values
from ttapca.support.norm_layers import BatchNormKind, channel_moments
from ttapca.support.outputs import Reads

Who = Literal["student", "teacher"]


@register("rotta", paper="Yuan et al. (CVPR 2023)", fixed={"statistics": "batch"})
@dataclass(frozen=True, kw_only=True)
class RoTTA(GradientMethod):
    """Scale and shift, learned from a slow teacher on a balanced memory of recent samples.

    Samples arrive one by one. The memory takes each in by the class that the teacher predicts, and
    lets go of the sample that is oldest and least certain in the class it has most of. After every
    `update_every` samples, with A_i the age of sample i in the memory over its capacity:

        student      one step on  mean_i E(A_i) cross-entropy(f_S(strong view of x_i), f_T(x_i))
                     with E(A) = exp(-A) / (1 + exp(-A))
        teacher      theta_T <- (1 - nu) theta_T + nu theta_S
        BatchNorm    mu <- (1 - alpha) mu + alpha mu of the memory        sigma^2 likewise

    The teacher predicts. The paper: https://arxiv.org/abs/2303.13899.

    All defaults are those of the official code. Nothing is learned before `update_every` samples
    have come, so that it makes sense on streams only, not for episodic batches.

    Attributes:
        statistics: Fixed: BatchNorm has slow statistics of its own, see `statistics_momentum`.
        steps: Gradient steps at each update.
        logits: The teacher's, from `before` or `after` the updates that a batch leads to.
        capacity: How many samples the memory holds.
        update_every: After how many samples student and teacher learn.
        statistics_momentum: Weight of the memory's samples in BatchNorm's statistics, at each
            update (alpha).
        teacher_momentum: How much of the teacher stays at each update (1 - nu).
        timeliness_weight: How much age counts when the memory lets a sample go (lambda_t).
        uncertainty_weight: How much uncertainty counts (lambda_u).
        flip: Whether the student sees half of the samples mirrored; not for images, such as digits,
            that then mean something else.
        seed: Draws the student's views.
    """

    outputs = CLASSES

    capacity: Count = 64
    update_every: Count = 64
    statistics_momentum: Share = 0.05
    teacher_momentum: Share = 0.999
    timeliness_weight: NotNegative = 1.0
    uncertainty_weight: NotNegative = 1.0
    flip: bool = True
    seed: Seed = 0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.statistics != "batch":
            raise OptionError(
                "`statistics` would have no effect: BatchNorm has slow statistics of its own here. "
                "Leave it out, or choose `statistics_momentum=`."
            )

    def assemble(self) -> Assembly:
        """Return scale and shift, and slow statistics, moved by a memory."""
        slow = SlowStatistics(self.statistics_momentum)
        return self.assembly(NormAffine(), predictor=MemorySteps(self, slow), statistics=[slow])


class Sample(NamedTuple):
    """A sample of the memory."""

    image: Tensor  # (channels, height, width)
    label: int  # the class that was predicted when it came
    uncertainty: float  # the entropy of that prediction, as a share of the largest
    age: int = 0  # how many samples have come since, itself included


class Memory:
    """A bank of samples in the order of arrival, balanced over predicted classes."""

    def __init__(self, options: RoTTA, classes: int, samples: Sequence[Sample] = ()) -> None:
        self.options = options
        self.classes = classes
        self.samples = list(samples)

    def offer(self, sample: Sample) -> None:
        """Take a sample in, if there is room or a worse one to let go; all samples grow older."""
        if self._makes_room_for(sample):
            self.samples.append(sample)
        self.samples = [each._replace(age=each.age + 1) for each in self.samples]

    def _makes_room_for(self, sample: Sample) -> bool:
        """Return whether there is room for a sample, after letting go of a worse one if needed."""
        held = Counter(each.label for each in self.samples)
        crowded = {sample.label}
        if held[sample.label] < self.options.capacity / self.classes:
            if len(self.samples) < self.options.capacity:
                return True
            most = max(held.values())
            crowded = {label for label, count in held.items() if count == most}
        # Of several that are equally bad, the last one of the last class, as in the official code.
        score, _, worst = max(
            (self._badness(each), each.label, number)
            for number, each in enumerate(self.samples)
            if each.label in crowded
        )
        if score <= self._badness(sample):
            return False
        del self.samples[worst]
        return True

    def _badness(self, sample: Sample) -> float:
        """Return a number that grows with age and uncertainty."""
        given = self.options
        old = 1 / (1 + math.exp(-sample.age / given.capacity))
        return given.timeliness_weight * old + given.uncertainty_weight * sample.uncertainty


class SlowStatistics(OwnStatistics):
    """BatchNorm with running statistics for student and teacher, which passes that learn move."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.who: Who = "student"
        self.learns = False

    def declare(self, number: int, kind: BatchNormKind) -> None:
        """Declare both statistics of a layer, which begin with its own."""
        del kind
        for who in ("student", "teacher"):
            self.stream.declare(f"{who}'s statistics/{number}", None)

    def _run_layer(self, number: int, kind: BatchNormKind, forward: Run, /, input: Tensor) -> Any:
        """Normalise a batch with slow statistics."""
        if not self.enabled:
            return forward(input)
        x, name = kind.values(input), f"{self.who}'s statistics/{number}"
        known: Any = self.stream.now(name) or kind.source(x)
        mean, var = (moment.to(x) for moment in known)
        if self.learns:
            mean_here, var_here = channel_moments(x)
            mean = torch.lerp(mean, mean_here, self.momentum)
            var = torch.lerp(var, var_here, self.momentum)
            self.stream.write(name, (mean.detach(), var.detach()))
        return kind.normalised(x, (mean, var), input, forward)


class MemorySteps(TaughtSteps):
    """Keeps the memory, and lets student and teacher learn from it."""

    keeps = ("memory", "seen", "teacher")
    reads: Reads = "classes"

    def __init__(self, options: RoTTA, statistics: SlowStatistics) -> None:
        super().__init__(
            teacher_momentum=options.teacher_momentum, seed=options.seed, **options.stepping()
        )
        self.options = options
        self.statistics = statistics
        self.jitter = replace(STRONG, flip=options.flip)
        self.memory: tuple[tuple[Any, ...], ...] = ()  # `Sample` as plain tuples, which are saved
        self.seen = 0  # samples that have come

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Ask the teacher, remember the samples, and learn whenever enough of them have come."""
        images, forward = images_and_forward("rotta", run, inputs, options)
        if self.memory and self.memory[0][0].shape != images.shape[1:]:
            raise ShapeError(
                f"The memory of `rotta` holds samples of shape {tuple(self.memory[0][0].shape)}, "
                f"and learns from them together; found {tuple(images.shape[1:])}. Give images of "
                "another size a stream of their own, or call `reset()`."
            )
        logits = self._ask_teacher(images, forward)
        predictions = log_predictions(logits)
        if not (torch.isfinite(predictions).all() and torch.isfinite(images).all()):
            self.skipped += 1
            return logits
        updates = self.updates
        self._take_in(images, predictions, forward)
        if self.logits == "before" or self.updates == updates:
            return logits
        return self._ask_teacher(images, forward)

    def _take_in(self, images: Tensor, predictions: Tensor, forward: Forward) -> None:
        """Offer the samples to the memory, one by one, and learn from it in between."""
        classes = predictions.shape[1]
        entropies = -(predictions.exp() * predictions).sum(1) / (math.log(classes) or 1.0)
        found = zip(images, predictions.argmax(1).tolist(), entropies.tolist(), strict=True)
        memory = Memory(self.options, classes, [Sample(*each) for each in self.memory])
        for image, label, uncertainty in found:
            memory.offer(Sample(image.detach().clone(), label, uncertainty))
            self.seen += 1
            enough = self.seen % self.options.update_every == 0
            by_class = sorted(memory.samples, key=lambda each: each.label)
            if enough and not self._learn(by_class, forward):
                break  # not finite: this batch will leave no mark
        self.memory = tuple(tuple(sample) for sample in memory.samples)

    def _learn(self, samples: Sequence[Sample], forward: Forward) -> bool:
        """Take all steps on these samples; return False if a loss is not finite."""
        images = torch.stack([sample.image for sample in samples])
        ages = torch.tensor([sample.age for sample in samples], dtype=torch.float64)
        weights = torch.sigmoid(-ages / self.options.capacity)
        for _ in range(self.steps):
            target = self._ask_teacher(images, forward, learn=True)
            views = self.jitter(images, self.generator)
            student = self.statistics.run_with(functools.partial(forward, views), learns=True)
            surprise = surprise_of(student, target)  # (samples,)
            if not self.step((weights.to(surprise) * surprise).mean()):
                return False
            self.follow()
        return True

    @torch.no_grad()
    def _ask_teacher(self, images: Tensor, forward: Forward, *, learn: bool = False) -> Tensor:
        ask = functools.partial(forward, images)
        as_teacher = functools.partial(self.statistics.run_with, ask, who="teacher", learns=learn)
        return with_values(self.descent.parameters, self.teacher_weights, as_teacher)
