"""The numbers that steer the closed form, each with its unit, its meaning and a script.

What can be measured on the source is not among them: `fit` measures it. Nor are guards against a
division by zero, sizes of parts, seeds, and iterations of which more change nothing. In brackets
are the unit and the script that chose or confirmed a number, on conditions that no table uses.
`scripts/audit_constants.py` halves and doubles each; docs/results/constants.csv has its table.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Constants:
    """All constants of the closed form; some are the defaults of options.

    Attributes:
        restore (exponent; tune_closed_form): Power of a loss of variance that `wiener` undoes.
        largest_ratio (ratio of variances; tune_closed_form): Larger ones count as this one. Values
            farther from the source than its root make a sample implausible.
        threshold (share; tune_closed_form): Of source batches whose gains are exactly 1.
        rare (share; measure_clean): Of source batches that look surely shifted, have too many
            outliers, or are against a quiet alarm. Chance is granted as much.
        ridge (share of variance; audit_constants): Added to covariances, so that what hardly varies
            does not dominate: bands, textures, and features within classes.
        memory (images; tune_memory): After so many, a stream's image counts 1 / e. New conditions
            are looked for among twice as many.
        prior (images; tune_closed_form): The source counts for so many, beside those of a stream.
        first (weight; tune_closed_form): Of a large, surely shifted batch, in the first layer.
        last (weight; tune_closed_form): The same in the last layer.
        alone (weight; tune_closed_form): Of a single very unusual image, in every layer.
        few_classes (classes; measure_clean): With more of them, `alone` is less in proportion.
        farthest_class (share; tune_closed_form): Of the squared distance of the farthest class, by
            which the mean of a stream may be away without a shift.
        smallest_reach (squared deviations within a class; tune_closed_form): By which it may be
            away in any case.
        states (conditions; audit_constants): Told apart at most.
        block (images; tune_alarm): An alarm judges so many together. Conditions are looked for in
            as many; half of them tell if they have one, and an eighth is the smallest group.
        far (deviations of source images; audit_constants): Least distance of two conditions.
        apart (share of variance; audit_constants): Left at most where two conditions are cut in
            two. Halves of a normal distribution keep 0.36; with several conditions, half way to it.
        stray_share (share of values; audit_constants): As many of an image are farthest from their
            local median, and fewer outliers do no harm.
        stray_images (share of source images; audit_constants): In so many, these values are no
            farther than any outlier is at least.
        stray_deviations (deviations of an image's noise; audit_constants): Least distance of an
            outlier from its local median.
        beyond (ratio; audit_constants): So many times what the source has is too much: outliers of
            rare batches, and the squared distance of the farthest image.
        run_doublings (doublings; tune_chain): The longest expected run has 2 to this power images.
        shares (shares of images; tune_chain): Tried for each unknown share: of predictions that say
            nothing, of those drawn from favoured classes, and of images of few classes.
        charge (nats; tune_chain): Charge for each image on few classes with the source's shares.
        uneven (likeness of images; tune_chain): From which few classes are charged nothing.
        regime_memory (images; tune_chain): After so many, on average, a stream changes its regime.
        recent (images; tune_chain): After so many, a prediction counts 1 / e in recent shares.
        laplace (images of each class; tune_chain): Counted on average before any was seen.
        pair_middle (share; tune_chain): Of the way from the mean of log F for one class to that for
            two, where both are equally likely; and least distance of both, in deviations.
        pair_weight (weight; tune_chain): Of what a pair says; each image is part of two.
        change (share of statistics; tune_chain): A pass that finds more of them wrong is repeated.
        passes (forward passes; tune_chain): That a batch may take.
        likeness (correlation; tune_chain): Of the band energies of two images of one class.
        ends (probability; tune_alarm): By chance, from which a block speaks for a shift's end.
        blocks (blocks; tune_alarm): In a row begin or end an alarm.
    """

    restore: float = 0.6
    largest_ratio: float = 64.0
    threshold: float = 0.8
    rare: float = 0.01
    ridge: float = 3e-3
    memory: float = 200.0
    prior: float = 16.0
    first: float = 0.1
    last: float = 0.9
    alone: float = 0.15
    few_classes: int = 10
    farthest_class: float = 0.5
    smallest_reach: float = 0.25
    states: int = 16
    block: int = 64
    far: float = 3.5
    apart: float = 0.28
    stray_share: float = 1e-3
    stray_images: float = 0.75
    stray_deviations: float = 8.0
    beyond: float = 1.5
    run_doublings: int = 8
    shares: tuple[float, ...] = (0.05, 0.15, 0.35, 0.6, 0.95)
    charge: float = 0.1
    uneven: float = 0.05
    regime_memory: float = 500.0
    recent: float = 40.0
    laplace: float = 0.3
    pair_middle: float = 0.2
    pair_weight: float = 0.5
    change: float = 0.1
    passes: int = 3
    likeness: float = 0.1
    ends: float = 0.05
    blocks: int = 2

    @property
    def chance(self) -> float:
        """Squared deviations that a normal number exceeds as rarely as `rare`."""
        return NormalDist().inv_cdf(1 - self.rare / 2) ** 2


CONSTANTS = Constants()
