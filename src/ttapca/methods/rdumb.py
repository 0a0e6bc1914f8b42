"""`rdumb`: entropy of reliable samples, and a fresh start after a number of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ttapca._checks import Count
from ttapca.adaptation.optimisation import Run
from ttapca.adaptation.surfaces import NormAffine
from ttapca.methods.eata import EATA, ReliableSteps
from ttapca.methods.method import Assembly, register
from ttapca.methods.weights import put_back


@register(
    "rdumb",
    paper="Press et al. (NeurIPS 2023)",
    fixed={"source": None, "fisher_weight": None},
)
@dataclass(frozen=True, kw_only=True)
class RDumb(EATA):
    """Scale and shift, learned by the entropy of reliable samples and reset now and then.

    With theta_0 the source's weights and t the number of the batch, the weights follow

        theta_{t+1} = theta_0 if t is a multiple of R, else one step of `eata` without its penalty

    On streams of millions of images this outlived all methods that never start anew. The paper:
    https://arxiv.org/abs/2306.05401.

    Attributes:
        reset_every: Batches until weights, optimiser and running mean start anew (R).
    """

    reset_every: Count = 1000

    def assemble(self) -> Assembly:
        """Return scale and shift, moved by reliable samples, with fresh starts."""
        return self.assembly(NormAffine(), predictor=FreshStarts(self))


class FreshStarts(ReliableSteps):
    """Takes the steps of `eata`, and starts anew after a number of batches."""

    keeps: ClassVar[tuple[str, ...]] = (*ReliableSteps.keeps, "taken")

    def __init__(self, options: RDumb) -> None:
        super().__init__(options)
        self.remembers_start = True
        self.reset_every = options.reset_every
        self.taken = 0  # batches since the last fresh start

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Predict and step; start anew after the last batch of a period."""
        output = super().predict(run, *inputs, **options)
        self.taken += 1
        if self.taken == self.reset_every:
            put_back(self.descent.parameters, self.start)
            self.descent.reset()
            self.mean, self.taken = None, 0
        return output
