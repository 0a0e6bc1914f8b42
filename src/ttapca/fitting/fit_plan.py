"""The plan of a fit: which route it takes, how long that will take, and how much memory.

The route follows from sizes alone, so the same call takes the same route on every machine that has
the memory for it:

- `dct` for images of more than `SMALL` numbers if there are fewer than `SAMPLES_A_COMPONENT` of
  them for each component;
- otherwise, up to `MATRIX_LIMIT` numbers on the side that is filtered, a matrix of them is
  decomposed: `folded` for an affine layer with a smaller input, else `exact`; unless there are few
  samples of more than `FEW_FROM` numbers, whose own matrix is smaller: `gram`;
- past that `gram` for few samples and `randomised` for many;
- `dct` for images where a basis of vectors would be larger than `LARGEST_DENSE` or not fit into
  memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ttapca.errors import OutOfMemoryError
from ttapca.fitting.route_costs import Problem, route_cost
from ttapca.spectral import pca
from ttapca.spectral.basis import LARGEST_DENSE, MATRIX_LIMIT, Cosine
from ttapca.support.machine_memory import available_memory, resident_memory
from ttapca.support.speed import machine_speed

RouteName = Literal["folded", "exact", "gram", "randomised", "dct"]

# Below this, a matrix is decomposed within seconds, and few samples are no reason to do otherwise.
FEW_FROM = 4096

# Fewer images than that fit components to themselves, and what other images hold is left out: with
# all components of 300 images a CIFAR-10 ResNet-20 had a clean error of 24.0, and of 3,000 images
# 10.4; untouched and with cosines, which do not depend on the images, 7.8. Small ones have enough.
SAMPLES_A_COMPONENT = 3
SMALL = 1024

# What is left free of the memory at hand: Python, torch and others need some, too.
SPARE = 0.1

NAMES = {
    "folded": "exact, in the space of the layer's input (folded)",
    "exact": "exact",
    "gram": "exact, by the Gram matrix of few samples (gram)",
    "randomised": "several passes up to an error bound (randomised)",
    "dct": "colour x cosines (dct)",
}


@dataclass(frozen=True)
class Stage:
    """A part of the work.

    Attributes:
        name: What `progress.stage` is told; `reading` is the batches.
        seconds: How long it will take.
    """

    name: str
    seconds: float


@dataclass(frozen=True)
class NetworkTimes:
    """Seconds that a network takes for one sample, and how many samples are run through all of it.

    Attributes:
        fetching: To read a sample.
        up_to_layer: To compute the layer's input or output.
        whole: To compute the network's output.
        measuring: To compute it, and measure the normalisation layers on the way.
        measured: Samples whose normalisation layers are measured during the first pass.
        compared: Samples that are predicted again after the fit, twice in each of two stages.
    """

    fetching: float
    up_to_layer: float
    whole: float
    measuring: float
    measured: int
    compared: int


@dataclass(frozen=True)
class FitPlan:
    """What a fit will do.

    Attributes:
        route: `folded`, `exact`, `gram`, `randomised` or `dct`.
        samples: How many samples there are; None where the data do not tell.
        memory_bytes: Memory of the whole process at its peak, at most.
        filter_bytes: Size of the filter on disk, about, as float32.
        reason: Why not another route, in a few words; empty where there is nothing to say.
        passes: How often the data are read, about.
        stages: The parts of the work and their seconds; empty where nobody asked for the time.

    Example:
        >>> problem = Problem((3, 224, 224), (64, 112, 112), True, samples=700)
        >>> plan_of(problem).route
        'dct'
    """

    route: RouteName
    samples: int | None
    memory_bytes: int
    filter_bytes: int
    reason: str = ""
    passes: int = 1
    stages: tuple[Stage, ...] = ()

    @property
    def seconds(self) -> float | None:
        """How long it will take; None where nobody asked, or nobody knows how many samples."""
        return sum(stage.seconds for stage in self.stages) if self.stages else None

    def __str__(self) -> str:
        """Return one line for a person."""
        count = "samples" if self.samples is None else f"{self.samples:,} samples"
        time = "" if self.seconds is None else f"about {seconds_in_words(self.seconds)}, "
        why = f" ({self.reason})" if self.reason else ""
        return (
            f"{NAMES[self.route]}, {count}: {time}up to {self.memory_bytes / 1e9:.1f} GB of "
            f"memory, {self.filter_bytes / 1e6:,.1f} MB on disk{why}"
        )


def seconds_in_words(seconds: float) -> str:
    """Return a duration that is not known exactly.

    Example:
        >>> seconds_in_words(0.4), seconds_in_words(12.3), seconds_in_words(400)
        ('1 s', '12 s', '7 min')
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60):,} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def plan_of(
    problem: Problem,
    route: RouteName | None = None,
    *,
    network_bytes: int = 0,
    norm_bytes: int = 0,
    times: NetworkTimes | None = None,
    memory: int | None = None,
) -> FitPlan:
    """Choose a route, unless one is named, and say what it costs.

    Args:
        problem: What is known beforehand.
        route: The route, for whoever wants to say it.
        network_bytes: Memory that running the network takes.
        norm_bytes: Size of what is stored about normalisation layers.
        times: How long the network takes; without, the plan does not tell the time.
        memory: Bytes at hand; by default what the system says.

    Raises:
        OutOfMemoryError: What was asked for needs more memory than is at hand, or every way does.
    """
    at_hand = available_memory() if memory is None else memory
    most = None if at_hand is None else int(at_hand * (1 - SPARE))

    def needs(name: str) -> int:
        return int(route_cost(name, problem).memory) + network_bytes

    candidates = [(route, "")] if route else list(_candidates(problem))
    for name, reason in candidates:
        if most is None or needs(name) <= most:
            plan = _plan(name, reason, problem, needs(name), times)
            return dataclasses.replace(plan, filter_bytes=plan.filter_bytes + norm_bytes)
    name = candidates[-1][0] if route else min((each for each, _ in candidates), key=needs)
    raise OutOfMemoryError(
        f"A fit must not take more memory than there is: the {name} route takes up to "
        f"{needs(name) / 1e9:,.1f} GB here, and {(most or 0) / 1e9:,.1f} GB are at hand. "
        f"{_way_out(problem, route)}"
    )


def _way_out(problem: Problem, route: str | None) -> str:
    less = (
        "Ask for fewer components, read smaller batches, or fit at a layer with fewer inputs or "
        "outputs."
    )
    if not _is_image(problem):
        return (
            f"{less} Images take cosines, which need little memory: fit at the layer that takes "
            "them; if there is none, pass them through an `nn.Identity` first, and fit at that."
        )
    if route not in (None, "dct"):
        return f"Take `route='dct'`, or leave `route` at auto. {less}"
    return less


def _is_image(problem: Problem) -> bool:
    return Cosine.takes(problem.filtered_shape)


def _candidates(problem: Problem) -> Iterator[tuple[RouteName, str]]:
    """Yield routes that serve, the best first, and why each is taken."""
    size = problem.filtered
    few = problem.samples is not None and _can_be_held(problem)
    within = size <= MATRIX_LIMIT
    image = _is_image(problem)
    asked = problem.components
    needed = SAMPLES_A_COMPONENT * (min(size, asked) if isinstance(asked, int) else size)
    if image and size > SMALL and problem.samples is not None and problem.samples < needed:
        yield "dct", f"{problem.samples:,} images are too few for components of their own"
    if within:
        if few and size > FEW_FROM and (problem.samples or 0) < size:
            yield "gram", ""
        yield ("folded" if problem.folds else "exact"), ""
    if image:
        dense = route_cost("gram" if few else "randomised", problem).stored
        if dense > LARGEST_DENSE and not within:
            yield "dct", f"a basis of vectors would take {dense / 1e6:,.0f} MB"
            return
    if few or (problem.samples is None and not within):
        yield "gram", ""
    if not few:
        yield "randomised", ""
    if image:
        yield "dct", "other ways need more memory than there is"


def _can_be_held(problem: Problem) -> bool:
    samples = problem.samples or 0
    # `pca` is asked when it is needed: its limits may change.
    return samples <= pca.MOST_SAMPLES and 4 * samples * problem.filtered <= pca.MOST_BYTES


def _plan(
    route: RouteName, reason: str, problem: Problem, needs: int, times: NetworkTimes | None
) -> FitPlan:
    cost = route_cost(route, problem)
    stages: tuple[Stage, ...] = ()
    if times is not None and problem.samples is not None:
        speed = machine_speed()

        def seconds(work: tuple[float, float]) -> float:
            return work[0] / speed.products + work[1] / speed.decompositions

        each = times.fetching + times.up_to_layer + cost.reading / speed.products
        reading = cost.passes * problem.samples * each + times.measured * times.measuring
        twice = 2 * times.compared * times.whole
        stages = (
            Stage("reading", reading),
            Stage("decomposing", seconds(cost.decomposing)),
            Stage("calibrating", seconds(cost.calibrating)),
            # With all components, nothing is dropped and predictions stay.
            Stage("comparing predictions", 0.0 if problem.components is None else twice),
            Stage("mirroring images", twice),
        )
    return FitPlan(
        route=route,
        samples=problem.samples,
        memory_bytes=resident_memory() + needs,
        filter_bytes=int(cost.stored),
        reason=reason,
        passes=cost.passes,
        stages=stages,
    )
