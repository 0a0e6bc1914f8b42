"""`ttapca`, the paper's own method: a spectral filter whose gains are learned by entropy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from ttapca._checks import Number
from ttapca.adaptation.optimisation import GradientSteps, Logits, mean_entropy
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.errors import BasisWarning, warn_caller
from ttapca.methods.method import (
    Assembly,
    GradientMethod,
    needed_filter,
    register,
    statistics_surfaces,
)
from ttapca.spectral.gains import PenaltyName

LearnedGainName = Literal["relu", "exponential", "multiplicative"]
PAPER: Mapping[str, Any] = {"paper": "the paper of this library", "needs": "data"}
# Options that only multiplicative gains have.
NO_FACTOR: Mapping[str, Any] = {"penalty": None, "limit": None}


@register(
    "ttapca-multiplicative",
    summary="Spectral filter with a bounded multiplier, learned by entropy",
    fixed={"gain": "multiplicative"},
    **PAPER,
)
@register(
    "ttapca-exp",
    summary="Exponential spectral filter, learned by entropy",
    fixed={"gain": "exponential", **NO_FACTOR},
    **PAPER,
)
@register(
    "ttapca-relu",
    summary="ReLU spectral filter, learned by entropy",
    fixed={"gain": "relu", **NO_FACTOR},
    **PAPER,
)
@register("ttapca", **PAPER)
@dataclass(frozen=True, kw_only=True)
class TTAPCA(GradientMethod):
    """Spectral filter whose gains are learned by entropy.

    A layer's output A_t for batch t is projected on the first L right singular vectors V_L of its
    output for the source, scaled by the diagonal filter F, and rebuilt. Each gain has the singular
    value lambda_i of the source and a parameter gamma_i, which takes steps on the entropy of the
    predictions y. The paper's equations:

        (2)  O_t = A_t V_L F V_L^T
        (3)  F_ii = lambda_i / (lambda_i + ReLU(gamma_i))             gain="relu"
        (4)  F_ii = 1 / (1 + exp(gamma_i^2 - lambda_i))               gain="exponential"
        (5)  L(x_t) = - sum_c p(y_t,c) log p(y_t,c)

    `ttapca.fit` takes cosines of images unless told otherwise; with these it runs, and warns.
    The paper: https://arxiv.org/abs/2209.05779.

    Attributes:
        gain: `relu` or `exponential`, the filters of the paper, or `multiplicative`: one of them
            times a bounded factor.
        initial: Where the learned parameter of each gain starts; see `ttapca.spectral.gains`.
        normalise: Whether singular values are divided by the largest one.
        penalty: For `multiplicative`: the filter that is multiplied, `relu` by default.
        limit: For `multiplicative`: the largest factor, 4 by default.
    """

    needs_filter: ClassVar[bool] = True
    made_for_pca: ClassVar[bool] = True

    gain: LearnedGainName = "relu"
    logits: Logits = "after"
    initial: float | None = None
    normalise: bool = True
    penalty: PenaltyName | None = None
    limit: Annotated[float, Number(above=1)] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        needed_filter(self.filter)
        super().__post_init__()
        if self.gain != "multiplicative":
            for option in ("penalty", "limit"):
                self.refuse(option, f"only multiplicative gains have it, and these are {self.gain}")

    def assemble(self) -> Assembly:
        """Return the gains, moved by entropy."""
        names = ("initial", "normalise", "penalty", "limit")
        given = {name: getattr(self, name) for name in names}
        options = {name: value for name, value in given.items() if value is not None}
        fitted = needed_filter(self.filter)
        if not fitted.basis.principal:
            warn_caller(
                f"The paper's filters, here `ttapca` with {self.gain} gains, are for principal "
                f"components; found a filter of {fitted.basis.kind.lower()} at `{fitted.layer}`, "
                'so results are not those of the paper. Fit it with `route="pca"`, or choose a '
                "method in closed form such as `wiener`, which takes both.",
                BasisWarning,
            )
        gains = SpectralGains(fitted, self.gain, **options)
        predictor = GradientSteps(mean_entropy, **self.stepping())
        return Assembly([*statistics_surfaces(self.statistics), gains], predictor)
