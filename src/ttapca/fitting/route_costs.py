"""The memory that each route of a fit needs, and the size of the filter that it finds.

docs/scaling.md derives these formulas and compares them with measurements. Memory is an upper
bound: a fit that has said how much it needs must not need more.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ttapca.fitting.class_means import MOST_NUMBERS as MOST_CLASS_MEANS
from ttapca.spectral.affine import CHUNK_NUMBERS as AFFINE_CHUNK
from ttapca.spectral.calibration import TOGETHER
from ttapca.spectral.cosine import CHUNK_NUMBERS as COSINE_CHUNK
from ttapca.spectral.even_sample import SAMPLED_NUMBERS, SAMPLES
from ttapca.spectral.pca import MOST_BYTES, MOST_SAMPLES
from ttapca.spectral.randomised import MAX_PASSES, OVERSAMPLING

FLOAT32, FLOAT64 = 4, 8
PACKED = 2  # a number of a saved filter of cosines; see `ttapca.fitting.packing`

# Numbers that are stored of a sample of the calibration: energies of bands, textures, outliers.
CALIBRATED = 36

# Medians and textures of images are measured a few at a time, which takes this many bytes.
MEASURING = 1e8


@dataclass(frozen=True)
class Problem:
    """What a fit knows before it begins.

    Attributes:
        input_shape: Shape of a sample of the layer's input; None if that is not a single tensor.
        output_shape: Shape of a sample of its output.
        folds: Whether a filter acts on the layer's input; see `acts_on_input`.
        components: How many to keep: a number, a share of the variance, or None for all.
        samples: How many there are; None where the data do not tell.
        batch: Samples in the first batch.
        classes: How many classes the network predicts; 0 if none.
        data_shape: Shape of a sample of what the model is given, where that is known.
    """

    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...]
    folds: bool
    components: int | float | None = None
    samples: int | None = None
    batch: int = 1
    classes: int = 0
    data_shape: tuple[int, ...] | None = None

    @property
    def outputs(self) -> int:
        """Numbers in a sample of the output, p."""
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
    """Bytes that a route takes.

    Attributes:
        memory: Bytes that the route needs beyond what the process has, at most.
        stored: Bytes of the filter on disk, as float32.
        summed: Bytes of the sums over the samples, which processes that read parts send; 0 where
            the route needs the samples themselves.
        beside: Bytes that a pass takes beside these sums.
    """

    memory: float
    stored: float
    summed: float = 0.0
    beside: float = 0.0


def route_cost(route: str, problem: Problem) -> RouteCost:
    """Return what a route costs; where the number of samples is unknown, with those of one pass."""
    common = MEASURING + FLOAT64 * 3 * problem.outputs  # means
    # The kept samples, the batch that is read and its copy in float64.
    common += problem.sampled * problem.filtered * FLOAT32
    common += min(problem.batch, 4096) * problem.filtered * (FLOAT32 + 2 * FLOAT64)
    knows_classes = 0 < problem.classes * problem.filtered <= MOST_CLASS_MEANS
    if knows_classes:
        common += 4 * problem.classes * problem.filtered * FLOAT64
    found = _COSTS[route](problem)
    beside = FLOAT64 * (problem.outputs + problem.filtered * problem.folds)  # means
    if route == "dct" and problem.folds:
        beside = PACKED * problem.filtered
    if knows_classes:  # their reach, for each component
        beside += PACKED * problem.filtered if route == "dct" else FLOAT32 * problem.kept()
    beside += FLOAT32 * problem.sampled * CALIBRATED
    by_class = FLOAT64 * problem.classes * problem.filtered if knows_classes else 0
    return dataclasses.replace(
        found,
        memory=found.memory + common,
        stored=found.stored + beside,
        summed=found.summed + by_class if found.summed else 0.0,
        beside=common,
    )


def _folded(problem: Problem) -> RouteCost:
    size, kept = problem.filtered, problem.kept()
    there_and_back = AFFINE_CHUNK * FLOAT64 * 3
    return RouteCost(
        memory=FLOAT64 * (6 * size**2 + 2 * size * kept) + there_and_back,
        stored=2 * FLOAT32 * size * kept,
        summed=FLOAT64 * size**2,
    )


def _exact(problem: Problem) -> RouteCost:
    size, kept = problem.outputs, min(problem.kept(), problem.outputs)
    return RouteCost(
        memory=FLOAT64 * (6 * size**2 + 2 * size * kept),
        stored=FLOAT32 * size * kept,
        summed=FLOAT64 * size**2,
    )


def _gram(problem: Problem) -> RouteCost:
    size, kept = problem.filtered, problem.kept()
    # Where nobody knows how many there are, the route gives up beyond these.
    samples = problem.samples or min(MOST_SAMPLES, MOST_BYTES // (FLOAT32 * size))
    matrices = 2 if problem.folds else 1
    return RouteCost(
        memory=FLOAT32 * (3 if problem.folds else 1) * samples * size
        + FLOAT64 * (5 * samples**2 + (5 + matrices) * size * kept)
        + FLOAT64 * (samples * size + 3 * AFFINE_CHUNK) * problem.folds,
        stored=matrices * FLOAT32 * size * kept,
    )


def _randomised(problem: Problem) -> RouteCost:
    size, kept = problem.outputs, problem.kept()
    columns = min(size, kept + OVERSAMPLING)
    return RouteCost(
        memory=FLOAT64 * (MAX_PASSES + 4) * size * columns,
        stored=FLOAT32 * size * kept,
    )


def _dct(problem: Problem) -> RouteCost:
    size, channels = problem.filtered, problem.filtered_shape[0]
    return RouteCost(
        memory=FLOAT64 * (4 * channels * size + 6 * COSINE_CHUNK) + FLOAT32 * 8 * TOGETHER * size,
        stored=float(PACKED * size),
        summed=FLOAT64 * (channels + 1) * size,
    )


_COSTS = {
    "folded": _folded,
    "exact": _exact,
    "gram": _gram,
    "randomised": _randomised,
    "dct": _dct,
}
