"""How often a network is wrong, estimated without labels, by the adapted network's confidence.

With p the probabilities of the adapted network, class k is wrong with probability 1 - p_k. So

    error of the adapted network      mean of 1 - p at the class that it predicts
    error of the untouched network    mean of 1 - p at the class that the untouched network predicts

once probabilities are true: labelled source samples give the temperature T of softmax(z / T) (Guo
et al., ICML 2017, https://arxiv.org/abs/1706.04599). The untouched network is not asked itself:
under a shift it is too sure. docs/health.md has what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.spectral.constants import CONSTANTS
from ttapca.support.outputs import log_softmax

# Deviation of the log odds of an estimate from those of the truth, beside chance: twice as much
# held all of 36 true errors on four held-out corruptions and three networks (docs/health.md).
DOUBT = 0.2


@dataclass(frozen=True)
class ExpectedError:
    """An estimated share of wrong predictions, from 0 to 1, with its 95 % interval.

    Example:
        >>> ExpectedError(0.14, 0.1, 0.19)
        ExpectedError(about 14 %, 10 to 19)
    """

    share: float
    low: float
    high: float

    def __float__(self) -> float:
        """Return the estimate itself, for metrics."""
        return self.share

    def __repr__(self) -> str:
        """Return the estimate in percent."""
        low, high = (f"{100 * each:.0f}" for each in (self.low, self.high))
        return f"ExpectedError(about {100 * self.share:.0f} %, {low} to {high})"


def sums_after(
    sums: Tensor, adapted: Tensor, untouched: Tensor | None, temperature: float
) -> Tensor:
    """Return sums over the samples of a stream, older ones fading, shape (2, 3).

    Logits have the shape (samples, classes, ...). A row has the number of samples, the sum of their
    probabilities q of being wrong, and that of q (1 - q); the first is of the adapted network, the
    second of the untouched one, and stays if its logits are None.
    """
    found = sums.clone()
    probabilities = log_softmax(adapted.detach() / temperature).exp().double()
    for row, logits in enumerate((adapted, untouched)):
        if logits is not None and len(adapted):
            chosen = probabilities.gather(1, logits.detach().argmax(1, keepdim=True))
            wrong = (1 - chosen.flatten(1).mean(1)).clamp(0, 1).cpu()
            added = torch.stack([torch.ones_like(wrong), wrong, wrong * (1 - wrong)]).sum(1)
            found[row] = sums[row] * math.exp(-len(wrong) / CONSTANTS.memory) + added
    return found


def estimate_of(row: Tensor) -> ExpectedError | None:
    """Return the estimate of one row of `sums_after`; None without samples."""
    number, wrong, variance = row.tolist()
    if not number:
        return None
    share = min(max(wrong / number, 1e-6), 1 - 1e-6)
    chance = math.sqrt(variance) / number / (share * (1 - share))  # of log odds
    odds = math.log(share / (1 - share))
    away = min(1.96 * math.hypot(chance, DOUBT), 100.0)  # of few samples; e to it is finite
    low, high = (1 / (1 + math.exp(-each)) for each in (odds - away, odds + away))
    return ExpectedError(share, low, high)
