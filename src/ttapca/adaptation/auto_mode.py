"""Whether to answer with the adapted or with the untouched network, by both networks' predictions.

The adapted network answers while it is surely expected to be less often wrong, and shows no sign of
harm. The *expected gain* is the difference of the estimates of `expected_error`: the mean of
p_a - p_u, with p the probabilities of the adapted network, and a and u the classes that it and the
untouched one predict. It is never negative, so it cannot see harm. Two things can:

    the adapted network keeps to few classes    exp H(shares of u) > FEWER exp H(shares of a)
    the adapted network is less sure            mean H(p) > UNSURE mean H(q)

with H the entropy, exp H the number of classes if these have equal shares, and q the probabilities
of the untouched network. A stream with runs of one class shows the first sign until several classes
were seen. `scripts/auto_mode.py` measures; docs/health.md has what was found.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.stream_state import AutoState
from ttapca.support.outputs import log_softmax

MARGIN = 0.01  # gain that begins adapting if it is sure; half of it is enough to go on
FEWER = 2.0  # times as many classes; a shift narrows the untouched network, so usually under 1
UNSURE = 1.25  # times the entropy; usually under 1
BACK = 0.8  # exponent of both limits that end a sign of harm
WAIT = 200  # images before the first switch, and between two of them
LONG = 1000  # images after which a prediction counts 1 / e for the signs: several runs of a class


def judged(
    before: AutoState | None, adapted: Tensor, untouched: Tensor, temperature: float
) -> AutoState:
    """Return the choice after some images, by both networks' logits, shape (images, classes)."""
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
    after = replace(
        before,
        images=before.images + size,
        gain=before.gain * math.exp(-size / CONSTANTS.memory) + newer,
        sums=before.sums * math.exp(-size / LONG) + torch.cat([entropies, *counts]),
    )
    after = replace(after, harmful=shows_harm(after))
    expected, low = expected_gain(after)
    enough = expected > MARGIN / 2 if after.adapting else low > MARGIN
    adapting = enough and not after.harmful
    if after.images < WAIT or adapting == after.adapting:
        return after
    return replace(after, adapting=adapting, switches=after.switches + 1, images=0)


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
    part = BACK if state.harmful else 1.0
    few = spread[1] - spread[0] > part * math.log(FEWER)
    return bool(few or entropy[0] > entropy[1] * math.pow(UNSURE, part))
