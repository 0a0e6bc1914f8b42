"""A gain that scales as it is told, for tests of filters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ttapca.spectral.gains import Gain


class FixedGain(Gain):
    """Returns the gains that it was given, and notes the components that it was called with.

    What lies outside the basis is kept if there is a gain for it, unless `keeps_rest` says so.
    """

    def __init__(
        self,
        gains: Tensor,
        rest: float | None = None,
        away: tuple[Tensor, Tensor | None] | None = None,
        *,
        keeps_rest: bool | None = None,
        watches_rest: bool = False,
    ) -> None:
        super().__init__()
        self.gains, self.rest, self.away = gains, rest, away
        self.keeps_rest = rest is not None if keeps_rest is None else keeps_rest
        self.watches_rest = watches_rest

    def forward(self, components: Any = None, rest: Any = None, size: Any = None) -> Tensor:
        self.seen, self.seen_rest = components, rest
        return self.gains

    def rest_gain(self) -> float | None:
        return self.rest

    def offset(self) -> tuple[Tensor, Tensor | None] | None:
        return self.away
