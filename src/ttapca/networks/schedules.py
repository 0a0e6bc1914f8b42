"""Learning rates as pure functions of the step: nothing to save, and nothing to lose on resuming.

Both rise to the peak and fall to zero along half a cosine. `cosine` rises over a warm-up of a few
epochs; `one-cycle` over the first three tenths of the training, as fits a short one.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from ttapca.errors import OptionError, did_you_mean

ScheduleName = Literal["cosine", "one-cycle"]

ONE_CYCLE_RISE = 0.3
START_FRACTION = 0.04  # of the peak, at the first step


def learning_rate(
    schedule: ScheduleName, step: int, steps: int, *, peak: float, warmup_steps: int = 0
) -> float:
    """The learning rate of one step.

    Args:
        schedule: `cosine` or `one-cycle`.
        step: From 0 to `steps` - 1.
        steps: Of the whole training.
        peak: The highest.
        warmup_steps: How long `cosine` rises.

    Raises:
        OptionError: There is no such schedule.

    Example:
        >>> [round(learning_rate("one-cycle", step, 10, peak=1.0), 2) for step in range(10)]
        [0.04, 0.36, 0.68, 1.0, 0.95, 0.81, 0.61, 0.39, 0.19, 0.05]
    """
    if schedule not in get_args(ScheduleName):
        raise OptionError(
            f"A schedule is {' or '.join(get_args(ScheduleName))}; found `{schedule}`."
            f"{did_you_mean(schedule, get_args(ScheduleName))}"
        )
    rise = round(ONE_CYCLE_RISE * steps) if schedule == "one-cycle" else min(warmup_steps, steps)
    if step < rise:
        return peak * (START_FRACTION + (1 - START_FRACTION) * step / rise)
    return peak * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))) / 2
