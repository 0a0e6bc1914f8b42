"""The numbers that steer the closed form, each with its unit, its meaning and who chose it.

What can be measured on the source is not among them: `fit` measures it. Guards against division by
zero, sizes of parts and seeds stay where they are needed. In brackets are the unit and the script
that chose the number, on conditions that no table uses. `scripts/audit_constants.py` halves and
doubles each: docs/closed-form-evidence.md has the table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """All constants of the closed form.

    Attributes:
        restore (exponent; tune_closed_form): Of a loss of variance, in `wiener`.
        largest_ratio (ratio; tune_closed_form): Larger ratios of variances count as this one.
        threshold (share of source batches; tune_closed_form): Whose gains are exactly 1.
        memory (images; tune_memory): After so many, what was seen of a stream counts 1 / e. The
            last ones of twice as many are looked at for new conditions.
        states (states; audit_constants): Conditions of images that are told apart at most.
    """

    restore: float = 0.6
    largest_ratio: float = 64.0
    threshold: float = 0.8
    memory: float = 200.0
    states: int = 16
    first: float = 0.1
    last: float = 0.9
    prior: float = 16.0
    alone: float = 0.15
    usual_alone: float = 1 / 3
    few_classes: int = 10
    rare: float = 0.01
    ridge: float = 3e-3
    chance: float = 4.0
    farthest_class: float = 0.5
    smallest_reach: float = 0.25
    block: int = 64
    far: float = 3.5
    apart: float = 0.32
    stray_share: float = 1e-3
    stray_deviations: float = 8.0
    beyond: float = 1.5
    run_doublings: int = 8
    shares: tuple[float, ...] = (0.05, 0.35, 0.65, 0.95)
    charge: float = 0.1
    uneven: float = 0.05
    regime_memory: float = 500.0
    recent: float = 40.0
    laplace: float = 0.3
    steps: int = 5
    pair_middle: float = 0.2
    pair_weight: float = 0.5
    pair_limit: float = 3.0
    pair_ridge: float = 0.05
    pair_separation: float = 0.2
    change: float = 0.1
    passes: int = 3
    plain: float = 0.9
    likeness: float = 0.1
    ends: float = 0.05
    blocks: int = 2
    skew_deviations: float = 6.0


CONSTANTS = Constants()
