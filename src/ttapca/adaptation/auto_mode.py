"""Whether to answer with the adapted or with the untouched network, by both networks' predictions.

The adapted network answers while its predictions are surely expected to be less often wrong, and
show no sign of harm. The *expected gain* is the difference of the estimates of
`ttapca.adaptation.expected_error`: with p the probabilities of the adapted network, the mean of
p_a - p_u, where a and u are the classes that the adapted and the untouched network predict. It is
never negative, so it cannot see harm. Two things can:

    the adapted network keeps to fewer classes     H(shares of a) < H(shares of u) - FEWER
    the adapted network is less sure               mean H(p) > UNSURE mean H(q)

with H the entropy and q the probabilities of the untouched network. `scripts/auto_mode.py` chose
the numbers below on one network; docs/health.md has what was found on others.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.stream_state import AutoState
from ttapca.support.outputs import log_softmax

MARGIN = 0.01  # gain that is worth a switch, surely to begin with; half of it is enough to go on
FEWER = 0.5  # nats; a shift makes the untouched network keep to few classes, so usually it is less
UNSURE = 1.25  # ratio of mean entropies
BACK = 0.8  # share of the way to both limits that is taken back before a sign of harm ends
WAIT = 200  # images before the first switch, and between two of them: there are no more than that
LONG = 1000  # images after which a prediction counts 1 / e for the signs: several runs of a class


def judged(
    before: AutoState | None, adapted: Tensor, untouched: Tensor, temperature: float
) -> AutoState:
    """Return the choice for a stream after some images, by both networks' logits for them.

    Logits have the shape (images, classes), and temperature is that of `fit`. The first choice,
    before any images, is the untouched network.
    """
    size, classes = adapted.shape
    if before is None or len(before.sums) != 2 + 2 * classes:
        nothing = torch.zeros(3 + 2 + 2 * classes, dtype=torch.float64)
        before = AutoState(False, False, 0, 0, nothing[:3], nothing[3:])
    logs = [log_softmax(each.double().cpu() / temperature) for each in (adapted, untouched)]
    chosen = [each.argmax(1, keepdim=True) for each in logs]
    sure, other = (logs[0].exp().gather(1, each).flatten() for each in chosen)
    gain = sure - other
    variance = torch.where(gain > 0, sure + other - gain.square(), 0.0)
    newer = torch.stack([torch.ones_like(gain), gain, variance]).sum(1)
    entropies = torch.stack([-(each.exp() * each).sum() for each in logs])
    counts = [torch.bincount(each.flatten(), minlength=classes).double() for each in chosen]
    after = dataclasses.replace(
        before,
        images=before.images + size,
        gain=before.gain * math.exp(-size / CONSTANTS.memory) + newer,
        sums=before.sums * math.exp(-size / LONG) + torch.cat([entropies, *counts]),
    )
    harmful = shows_harm(after)
    expected, low = expected_gain(after)
    enough = expected > MARGIN / 2 if after.adapting else low > MARGIN
    adapting = enough and not harmful
    if after.images < WAIT or adapting == after.adapting:
        return dataclasses.replace(after, harmful=harmful)
    return dataclasses.replace(
        after, harmful=harmful, adapting=adapting, switches=after.switches + 1, images=0
    )


def expected_gain(state: AutoState) -> tuple[float, float]:
    """Return by how much the adapted network is expected to be less often wrong, and surely is."""
    number, gain, variance = state.gain.tolist()
    number = max(number, 1.0)
    return gain / number, (gain - 1.96 * math.sqrt(variance)) / number


def shows_harm(state: AutoState) -> bool:
    """Return whether the adapted network keeps to fewer classes, or is less sure."""
    entropy, counts = state.sums[:2], state.sums[2:].reshape(2, -1)
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    spread = torch.special.entr(shares).sum(1)
    part = BACK if state.harmful else 1.0  # of both limits
    fewer = float(spread[1] - spread[0]) > part * FEWER
    return fewer or float(entropy[0]) > float(entropy[1]) * (1 + part * (UNSURE - 1))
