"""The plan of a fit: which route it takes, and how much memory that needs.

The route follows from sizes alone, so the same call takes the same route on every machine that has
the memory for it. docs/large-images.md has the table, docs/scaling.md derives the bounds on memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ttapca.errors import OptionError, OutOfMemoryError
from ttapca.fitting.source_statistics import MOST_NUMBERS as MOST_CLASS_SUMS
from ttapca.spectral import pca
from ttapca.spectral.basis_choice import LARGEST_DENSE, MATRIX_LIMIT, SMALL, cosines_serve
from ttapca.spectral.cosine import CHUNK_NUMBERS as COSINE_CHUNK
from ttapca.spectral.cosine_transform import has_cosines
from ttapca.spectral.cross_validation import TOGETHER
from ttapca.spectral.folded import CHUNK_NUMBERS as AFFINE_CHUNK
from ttapca.spectral.image_statistics import is_image
from ttapca.spectral.pca import MOST_BYTES, MOST_SAMPLES
from ttapca.spectral.position_sample import SAMPLED_NUMBERS, SAMPLES
from ttapca.spectral.randomised import MAX_PASSES, OVERSAMPLING
from ttapca.support.process import available_memory, resident_memory

RouteName = Literal["folded", "exact", "gram", "randomised", "dct"]
# What one can ask for: `auto` leaves it to `fit`, `pca` is the best route to principal components.
RouteChoice = Literal["auto", "pca", RouteName]

# Below this, a matrix is decomposed within seconds, and few samples are no reason to do otherwise.
FEW_FROM = 4096

# Fewer images than that fit components to themselves, and what other images hold is left out: with
# all components of 300 images a CIFAR-10 ResNet-20 had a clean error of 24.0, and of 3,000 images
# 10.4; untouched and with cosines, which do not depend on the images, 7.8. Small ones have enough.
SAMPLES_A_COMPONENT = 3

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
class FitPlan:
    """What a fit will do."""

    route: RouteName
    samples: int | None  # None if the data do not tell
    memory_bytes: int  # at most
    reason: str = ""  # why not another route, in a few words
    parallelism: Parallelism | None = None  # None if this process reads
    tasks: int = 1  # in which the parts are given out
    cosines_serve: bool = False

    def __str__(self) -> str:
        """Return one line for a person."""
        count = "samples" if self.samples is None else f"{self.samples:,} samples"
        why = f" ({self.reason})" if self.reason else ""
        if self.parallelism is not None:
            count += f" {self.parallelism.words}"
        memory = f"up to {self.memory_bytes / 1e9:.1f} GB of memory"
        return f"{NAMES[self.route]}, {count}: {memory}{why}"


def plan_of(
    problem: Problem,
    route: RouteChoice = "auto",
    *,
    network_bytes: int = 0,
    memory: int | None = None,
    parallelism: Parallelism | None = None,
) -> FitPlan:
    """Choose a route, unless one is named, and say what it costs beside running the network."""
    at_hand = available_memory() if memory is None else memory
    most = None if at_hand is None else int(at_hand * (1 - SPARE))
    candidates: list[tuple[RouteName, str]]
    match route:
        case "auto" | "pca":
            candidates = list(_candidates(problem, principal=route == "pca"))
        case _:
            candidates = [(route, "")]
    if parallelism is not None:
        candidates = _summed(candidates, problem)
    costs = {name: route_cost(name, problem) for name, _ in candidates}
    needed = {
        name: network_bytes + int(cost.memory if parallelism is None else cost.merging)
        for name, cost in costs.items()
    }
    for name, reason in candidates:
        if most is None or needed[name] <= most:
            return FitPlan(
                name,
                problem.samples,
                resident_memory() + needed[name],
                reason,
                parallelism,
                1 if parallelism is None else parallelism.tasks(costs[name]),
                cosines_serve(problem.filtered_shape, problem.data_shape),
            )
    name = min(needed, key=needed.__getitem__)
    raise OutOfMemoryError(
        f"A fit must not take more memory than there is: the {name} route takes up to "
        f"{needed[name] / 1e9:,.1f} GB here, and {(most or 0) / 1e9:,.1f} GB are at hand. "
        f"{_way_out(problem, route)}"
    )


def _summed(
    candidates: list[tuple[RouteName, str]], problem: Problem
) -> list[tuple[RouteName, str]]:
    names: list[RouteName] = [name for name, _ in candidates]
    found = [each for each in candidates if route_cost(each[0], problem).summed]
    if not found:
        size = problem.filtered
        raise OptionError(
            f"The {' and '.join(names)} route needs all samples in one process; here several read "
            "them. Read the data in one process, fit at a layer with fewer inputs or outputs, or "
            f'take `route="exact"` if {size:,} x {size:,} numbers fit into memory six times.'
        )
    if found[0] != candidates[0]:
        found[0] = found[0][0], "from sums, since several processes read"
    return found


def _way_out(problem: Problem, route: RouteChoice) -> str:
    less = "Ask for fewer components, read smaller batches, or fit at a smaller layer."
    folded = route_cost("folded", problem).memory
    if route == "exact" and problem.folds and folded < route_cost(route, problem).memory:
        less = (
            "Take `route='folded'`, which finds the same components by the input of this affine "
            f"layer, in {folded / 1e9:,.1f} GB. {less}"
        )
    if not has_cosines(problem.filtered_shape):
        return (
            f"{less} Cosines of images need little memory: fit at the layer that takes the images, "
            "or pass them through an `nn.Identity` first."
        )
    if route not in ("auto", "dct"):
        return f"Take `route='dct'`, or leave `route` at auto. {less}"
    return less


def _candidates(problem: Problem, *, principal: bool) -> Iterator[tuple[RouteName, str]]:
    """Yield routes that serve, the best first, and why each is taken."""
    size = problem.filtered
    # Whether all samples fit into memory at once, as float32. The limits of `pca` may change.
    samples = problem.samples or 0
    few = 0 < samples <= pca.MOST_SAMPLES and FLOAT32 * samples * size <= pca.MOST_BYTES
    within = size <= MATRIX_LIMIT
    image = has_cosines(problem.filtered_shape) and not principal
    better = _better_as_cosines(problem) if image else ""
    if better:
        yield "dct", better
    if within:
        if few and size > FEW_FROM and samples < size:
            yield "gram", ""
        yield ("folded" if problem.folds else "exact"), ""
    if image and not within:
        if not few and is_image(problem.filtered_shape):  # pixels, not the maps of a later layer
            yield "dct", f"components of their own would take many passes with {size:,} inputs"
            return
        dense = route_cost("gram" if few else "randomised", problem).stored
        if dense > LARGEST_DENSE:
            yield "dct", f"a basis of vectors would take {dense / 1e6:,.0f} MB"
            return
    if few or (problem.samples is None and not within):
        yield "gram", ""
    if not few:
        yield "randomised", ""
    if image:
        yield "dct", "other ways need more memory than there is"


def _better_as_cosines(problem: Problem) -> str:
    """Say why cosines are better, or as good and cheaper, if both are possible; else nothing."""
    size, asked, samples = problem.filtered, problem.components, problem.samples
    needed = SAMPLES_A_COMPONENT * (min(size, asked) if isinstance(asked, int) else size)
    if size > SMALL and samples is not None and samples < needed:
        return f"{samples:,} images are too few for components of their own"
    if asked is None and cosines_serve(problem.filtered_shape, problem.data_shape):
        return "for images as good as principal components, and cheaper"
    return ""


FLOAT32, FLOAT64 = 4, 8
PACKED = 2  # a number of a saved filter of cosines; see `ttapca.fitting.saved_format`

# Medians and textures of images are measured a few at a time, which takes this many bytes.
MEASURING = 1e8


@dataclass(frozen=True)
class Problem:
    """What a fit knows before it begins; shapes are those of one sample."""

    input_shape: tuple[int, ...] | None  # of the layer; None if that is not a single tensor
    output_shape: tuple[int, ...]
    folds: bool  # whether a filter acts on the layer's input; see `acts_on_input`
    components: int | float | None = None  # to keep: a number, a share of the variance, or all
    samples: int | None = None  # None if the data do not tell
    batch: int = 1  # samples in the first batch
    classes: int = 0  # that the network predicts
    data_shape: tuple[int, ...] | None = None  # of what the model is given, if that is known

    @property
    def outputs(self) -> int:
        """Numbers in a sample of the output."""
        return math.prod(self.output_shape)

    @property
    def filtered_shape(self) -> tuple[int, ...]:
        """Shape of the samples that a filter acts on."""
        return self.input_shape if self.folds and self.input_shape else self.output_shape

    @property
    def filtered(self) -> int:
        """Numbers in such a sample."""
        return math.prod(self.filtered_shape)

    def kept(self) -> int:
        """How many principal components there will be, at most; cosines are not counted so."""
        most = min(self.filtered, self.outputs)
        if self.samples is not None:
            most = min(most, self.samples - 1)
        return max(1, min(most, self.components) if isinstance(self.components, int) else most)

    @property
    def sampled(self) -> int:
        """How many samples are kept to know how images vary."""
        fitting = max(2, SAMPLED_NUMBERS // self.filtered)
        return min(SAMPLES, fitting, self.samples or SAMPLES)


@dataclass(frozen=True)
class RouteCost:
    """Bytes that a route takes."""

    memory: float  # beyond what the process has, at most
    stored: float  # of the basis on disk, as float32
    summed: float = 0.0  # of sums over the samples; 0 if it needs the samples themselves
    beside: float = 0.0  # of a pass beside these sums

    @property
    def merging(self) -> float:
        """Memory beyond what the process has, if others read: a result comes and is unpacked."""
        return max(self.memory, 3 * self.summed + self.beside)


def route_cost(route: RouteName, problem: Problem) -> RouteCost:
    """Return what a route costs; with the samples of one pass if their number is unknown."""
    memory, stored, summed = _cost_of_basis(route, problem)
    beside = MEASURING + FLOAT64 * 3 * problem.outputs  # means
    # The kept samples, the batch that is read and its copy in float64.
    beside += problem.sampled * problem.filtered * FLOAT32
    beside += min(problem.batch, 4096) * problem.filtered * (FLOAT32 + 2 * FLOAT64)
    if 0 < problem.classes * problem.filtered <= MOST_CLASS_SUMS:
        by_class = FLOAT64 * problem.classes * problem.filtered
        beside += 4 * by_class
        summed += by_class if summed else 0.0
    return RouteCost(memory + beside, stored, summed, beside)


def _cost_of_basis(route: RouteName, problem: Problem) -> tuple[float, float, float]:
    """Return the bytes to find a basis, to store it, and of the sums that it is found by."""
    inputs, outputs, kept = problem.filtered, problem.outputs, problem.kept()
    match route:
        case "folded":
            memory = FLOAT64 * (6 * inputs**2 + 2 * inputs * kept + 3 * AFFINE_CHUNK)
            return memory, 2 * FLOAT32 * inputs * kept, FLOAT64 * inputs**2
        case "exact":
            memory = FLOAT64 * (6 * outputs**2 + 2 * outputs * kept)
            return memory, FLOAT32 * outputs * kept, FLOAT64 * outputs**2
        case "gram":
            # If their number is unknown, the route gives up beyond these.
            samples = problem.samples or min(MOST_SAMPLES, MOST_BYTES // (FLOAT32 * inputs))
            matrices, copies = (2, 3) if problem.folds else (1, 1)
            memory = FLOAT32 * copies * samples * inputs
            memory += FLOAT64 * (5 * samples**2 + (5 + matrices) * inputs * kept)
            memory += FLOAT64 * (samples * inputs + 3 * AFFINE_CHUNK) * problem.folds
            return memory, matrices * FLOAT32 * inputs * kept, 0.0
        case "randomised":
            columns = min(outputs, kept + OVERSAMPLING)
            memory = FLOAT64 * (MAX_PASSES + 4) * outputs * columns
            return memory, FLOAT32 * outputs * kept, 0.0
        case "dct":
            channels = problem.filtered_shape[0]
            memory = FLOAT64 * (4 * channels * inputs + 6 * COSINE_CHUNK)
            memory += FLOAT32 * 8 * TOGETHER * inputs
            return memory, PACKED * inputs, FLOAT64 * (channels + 1) * inputs


# A worker gets its parts in a few tasks, so that a quick one can do more of them; in one task if
# each result is larger than this, since all of them travel.
TASKS_A_WORKER = 4
LARGE_RESULT = 2**26  # bytes


@dataclass(frozen=True)
class Parallelism:
    """How the reading of data is divided over processes."""

    parts: int
    workers: int  # processes that read at the same time
    words: str  # who they are, for people

    def tasks(self, cost: RouteCost) -> int:
        """Return in how many tasks the parts are read."""
        each = 1 if cost.summed > LARGE_RESULT else TASKS_A_WORKER
        return min(self.parts, each * self.workers)
