"""The numbers that steer the closed form, each with its unit, its meaning and a script.

What can be measured on the source is not among them: `fit` measures it. Nor are guards against a
division by zero, sizes of parts, seeds, and iterations of which more change nothing. In brackets
are the unit and the script that chose or confirmed a number, on conditions that no table uses.
`scripts/audit_constants.py` halves and doubles each; docs/closed-form-evidence.md has its table.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Constants:
    """All constants of the closed form; some are the defaults of options.

    Attributes:
        restore (exponent; tune_closed_form): Which power of a loss of variance `wiener` undoes.
        largest_ratio (ratio of variances; tune_closed_form): Larger ones count as this one. A value
            that is far from the source by more than its root makes a sample implausible.
        threshold (share; tune_closed_form): So many source batches are usual: their gains are
            exactly 1, and a single image like them has no weight.
        rare (share; measure_clean): Only so few source batches look surely shifted, have too many
            outliers, or are against an alarm that is quiet. Chance is granted as much.
        ridge (share of variance; audit_constants): Added to covariances, so that what hardly varies
            does not dominate: bands, textures, and features of late layers within classes.
        memory (images; tune_memory): After so many, what was seen of a stream counts 1 / e. New
            conditions are looked for among twice as many.
        prior (images; tune_closed_form): The source counts for so many, beside what was seen.
        first (weight; tune_closed_form): Of a large batch that has surely shifted, in the first
            layer.
        last (weight; tune_closed_form): The same in the last layer.
        alone (weight; tune_closed_form): Of a single image that is very unusual, in every layer.
        few_classes (classes; measure_clean): With more of them, `alone` is less in proportion.
        farthest_class (share; tune_closed_form): Of the squared distance of the farthest class, by
            which the mean of a stream may be away without a shift.
        smallest_reach (squared deviations within a class; tune_closed_form): By which it may be
            away in any case.
        states (conditions; audit_constants): Told apart at most.
        block (images; tune_alarm): An alarm judges so many together. Conditions are looked for in
            as many, by every quarter of them; half of them tell whether they have one condition,
            and an eighth is the smallest group that has one.
        far (deviations of source images; audit_constants): Means of two conditions are so far apart
            at least.
        apart (share of variance; audit_constants): So much is left at most where images of two
            conditions are cut in two. The halves of a normal distribution keep 0.36; once there are
            several conditions, half way to that is enough.
        stray_share (share of values; audit_constants): As many of an image are farthest from their
            local median, and fewer outliers do no harm.
        stray_images (share of source images; audit_constants): In so many, these values are no
            farther than any outlier is at least.
        stray_deviations (deviations of an image's noise; audit_constants): An outlier is farther
            from its local median.
        beyond (ratio; audit_constants): So many times what the source has is too much: outliers of
            rare batches, and the squared distance of the farthest image.
        run_doublings (doublings; tune_chain): The longest run that is expected has 2 to this power
            images.
        shares (shares of images; tune_chain): Tried for each share that is not known: of
            predictions that say nothing, of those drawn from classes that the network favours, and
            of images that are of few classes.
        charge (nats; tune_chain): That few classes are charged for each image if their shares are
            those of the source.
        uneven (likeness of images; tune_chain): From which few classes are charged nothing.
        regime_memory (images; tune_chain): After so many, on average, a stream changes its regime.
        recent (images; tune_chain): After so many, a prediction counts 1 / e in the shares of
            recent ones.
        laplace (images of each class; tune_chain): Counted on average before any was seen.
        pair_middle (share; tune_chain): Of the way from the mean of log F for one class to that for
            two, where both are equally likely. If the means are no more deviations apart, pairs say
            nothing.
        pair_weight (weight; tune_chain): Of what a pair says; each image is part of two.
        change (share of statistics; tune_chain): If a pass finds more of them wrong, it is
            repeated.
        passes (forward passes; tune_chain): That a batch may take.
        likeness (correlation; tune_chain): Of the band energies of two images of one class.
        ends (probability; tune_alarm): By chance, from which a block speaks for the end of a shift.
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
