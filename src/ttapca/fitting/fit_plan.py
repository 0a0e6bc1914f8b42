"""The plan of a fit: which route it takes, and how much memory and disk that needs.

The route follows from sizes alone, so the same call takes the same route on every machine that has
the memory for it:

- `dct` for the images that the model is given, if they have more than `SMALL` numbers and all
  components are kept;
- `dct` for other images and maps of that size if there are fewer than `SAMPLES_A_COMPONENT` of them
  for each component;
- otherwise, up to `MATRIX_LIMIT` numbers on the side that is filtered, a matrix of them is
  decomposed: `folded` where a filter acts on the input of an affine layer (`acts_on_input`), else
  `exact`; unless there are few samples of more than `FEW_FROM` numbers, whose own matrix is
  smaller: `gram`;
- past that `gram` for few samples; for many `dct` if they are images, whose cosines serve as well
  and take seconds, else `randomised`;
- `dct` for maps, too, where a basis of vectors would be larger than `LARGEST_DENSE` or not fit
  into memory.

Whoever asks for `pca` gets one of the other routes, chosen in the same way.

Where several processes read the data, `gram` and `randomised`, which need the samples themselves in
one process, are passed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ttapca.errors import OptionError, OutOfMemoryError
from ttapca.fitting.route_costs import FLOAT32, FLOAT64, Problem, route_cost
from ttapca.fitting.spread import Spread
from ttapca.spectral import pca
from ttapca.spectral.basis import LARGEST_DENSE, MATRIX_LIMIT, SMALL, Cosine, cosines_serve
from ttapca.spectral.outliers import is_image
from ttapca.support.machine_memory import available_memory, resident_memory

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
    """What a fit will do.

    Attributes:
        route: `folded`, `exact`, `gram`, `randomised` or `dct`.
        samples: How many samples there are; None where the data do not tell.
        memory_bytes: Memory of the whole process at its peak, at most.
        worker_bytes: The same for each of the processes that read the data for it; 0 without.
        filter_bytes: Size of the filter on disk, about, as float32.
        reason: Why not another route, in a few words; empty where there is nothing to say.
        spread: How the reading is spread over processes; None where this one reads.
        tasks: In how many tasks parts are given out to these processes.
        cosines_serve: Whether the filter acts on images for which cosines are the default.

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
    spread: Spread | None = None
    tasks: int = 1
    worker_bytes: int = 0
    cosines_serve: bool = False

    def __str__(self) -> str:
        """Return one line for a person."""
        count = "samples" if self.samples is None else f"{self.samples:,} samples"
        why = f" ({self.reason})" if self.reason else ""
        memory = f"up to {self.memory_bytes / 1e9:.1f} GB of memory"
        if self.spread is not None:
            count += f" {self.spread.words}"
            memory += f" here and {self.worker_bytes / 1e9:.1f} GB in each process that reads"
        return (
            f"{NAMES[self.route]}, {count}: {memory}, "
            f"{self.filter_bytes / 1e6:,.1f} MB on disk{why}"
        )


def plan_of(
    problem: Problem,
    route: RouteChoice = "auto",
    *,
    network_bytes: int = 0,
    norm_bytes: int = 0,
    memory: int | None = None,
    spread: Spread | None = None,
) -> FitPlan:
    """Choose a route, unless one is named, and say what it costs.

    Args:
        problem: What is known beforehand.
        route: The route, or `pca` for any but `dct`, for whoever wants to say it.
        network_bytes: Memory that running the network takes.
        norm_bytes: Size of what is stored about normalisation layers.
        memory: Bytes at hand; by default what the system says.
        spread: How the reading is spread over processes; None where this one reads.

    Raises:
        OutOfMemoryError: What was asked for needs more memory than is at hand, or every way does.
        OptionError: The route needs all samples in one process, or every way does.
    """
    at_hand = available_memory() if memory is None else memory
    most = None if at_hand is None else int(at_hand * (1 - SPARE))

    def needs(name: RouteName) -> int:
        return _own_bytes(name, problem, network_bytes, spread)

    def needs_here(name: RouteName) -> int:
        others = 0
        if spread is not None and spread.here:
            others = spread.workers * spread.worker_bytes(route_cost(name, problem), network_bytes)
        return needs(name) + others

    candidates: list[tuple[RouteName, str]]
    match route:
        case "auto" | "pca":
            candidates = list(_candidates(problem, principal=route == "pca"))
        case _:
            candidates = [(route, "")]
    if spread is not None:
        candidates = _summed(candidates, problem)
    for name, reason in candidates:
        if most is None or needs_here(name) <= most:
            plan = _plan(name, reason, problem, needs(name), spread)
            if spread is not None:
                worker = spread.worker_bytes(route_cost(name, problem), network_bytes)
                tasks = spread.tasks(route_cost(name, problem))
                plan = dataclasses.replace(plan, tasks=tasks, worker_bytes=worker)
            return dataclasses.replace(plan, filter_bytes=plan.filter_bytes + norm_bytes)
    name = min((each for each, _ in candidates), key=needs)
    fewer = " Let fewer processes read." if needs_here(name) > needs(name) else ""
    raise OutOfMemoryError(
        f"A fit must not take more memory than there is: the {name} route takes up to "
        f"{needs_here(name) / 1e9:,.1f} GB here, and {(most or 0) / 1e9:,.1f} GB are at hand."
        f"{fewer} {_way_out(problem, route)}"
    )


def _own_bytes(name: RouteName, problem: Problem, network: int, spread: Spread | None) -> int:
    """Return the bytes that a route takes in this process."""
    cost = route_cost(name, problem)
    most = cost.memory if spread is None else max(cost.memory, spread.held(cost))
    return int(most) + network


def _summed(
    candidates: list[tuple[RouteName, str]], problem: Problem
) -> list[tuple[RouteName, str]]:
    """Return those candidates that need sums over the samples only."""
    names: list[RouteName] = [name for name, _ in candidates]
    found = [each for each in candidates if route_cost(each[0], problem).summed]
    if not found:
        size = problem.filtered
        raise OptionError(
            f"The {' and '.join(names)} route needs all samples in one process; here several read "
            f"them, and sums over {size:,} x {size:,} products, "
            f"{FLOAT64 * size**2 / 1e9:,.1f} GB, are all that they send. Read the data in one "
            'process, fit at a layer with fewer inputs or outputs, or take `route="exact"` if '
            "that many fit into memory six times."
        )
    if found[0] != candidates[0]:
        found[0] = found[0][0], "from sums, since several processes read"
    return found


def _way_out(problem: Problem, route: RouteChoice) -> str:
    less = (
        "Ask for fewer components, read smaller batches, or fit at a layer with fewer inputs or "
        "outputs."
    )
    if not _is_image(problem):
        return (
            f"{less} Images take cosines, which need little memory: fit at the layer that takes "
            "them; if there is none, pass them through an `nn.Identity` first, and fit at that."
        )
    if route not in ("auto", "dct"):
        return f"Take `route='dct'`, or leave `route` at auto. {less}"
    return less


def _is_image(problem: Problem) -> bool:
    return Cosine.takes(problem.filtered_shape)


def _cosines_serve(problem: Problem) -> bool:
    return cosines_serve(problem.filtered_shape, problem.data_shape)


def _candidates(problem: Problem, *, principal: bool) -> Iterator[tuple[RouteName, str]]:
    """Yield routes that serve, the best first, and why each is taken.

    Args:
        problem: What is known beforehand.
        principal: Whether only principal components will do.
    """
    size = problem.filtered
    few = problem.samples is not None and _can_be_held(problem)
    within = size <= MATRIX_LIMIT
    image = _is_image(problem) and not principal
    better = _better_as_cosines(problem) if image else ""
    if better:
        yield "dct", better
    if within:
        if few and size > FEW_FROM and (problem.samples or 0) < size:
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
    """Say why cosines are better, or as good and cheaper, where both are possible; else nothing."""
    size, asked, samples = problem.filtered, problem.components, problem.samples
    needed = SAMPLES_A_COMPONENT * (min(size, asked) if isinstance(asked, int) else size)
    if size > SMALL and samples is not None and samples < needed:
        return f"{samples:,} images are too few for components of their own"
    if asked is None and _cosines_serve(problem):
        return "for images as good as principal components, and cheaper"
    return ""


def _can_be_held(problem: Problem) -> bool:
    """Return whether all samples fit into memory at once, as float32, for the `gram` route."""
    samples = problem.samples or 0
    # `pca` is asked when it is needed: its limits may change.
    return samples <= pca.MOST_SAMPLES and FLOAT32 * samples * problem.filtered <= pca.MOST_BYTES


def _plan(
    route: RouteName,
    reason: str,
    problem: Problem,
    needs: int,
    spread: Spread | None,
) -> FitPlan:
    return FitPlan(
        route=route,
        samples=problem.samples,
        memory_bytes=resident_memory() + needs,
        filter_bytes=int(route_cost(route, problem).stored),
        reason=reason,
        spread=spread,
        cosines_serve=_cosines_serve(problem),
    )
