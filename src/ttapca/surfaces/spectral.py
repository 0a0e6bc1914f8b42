"""The gains of a spectral filter as a surface."""

from __future__ import annotations

from torch import nn

from ttapca.attachment import Attachment, attach
from ttapca.errors import AttachError
from ttapca.fitted import FittedFilter
from ttapca.gains import GainName
from ttapca.layer import SpectralFilter
from ttapca.surfaces.base import Surface


class SpectralGains(Surface):
    """A fitted filter whose gains may change.

    Args:
        fitted: The filter; its layer says where it goes.
        gain: Which gains, `relu`, `exponential` or `multiplicative`.
        **options: Of the gain, see `ttapca.gains`.

    Attributes:
        filter: The filter on the model, once attached; its parameters are the gains' own.
    """

    filter: SpectralFilter | None

    def __init__(self, fitted: FittedFilter, gain: GainName, **options: object) -> None:
        super().__init__()
        self._fitted = fitted
        self._gain: GainName = gain
        self._options = options
        self._attachment: Attachment | None = None
        self.filter = None

    def attach(self, model: nn.Module) -> None:
        """Put the filter at its layer."""
        if self._attachment is not None:
            raise AttachError("A surface goes on one model; this one is attached already.")
        self._attachment = attach(model, self._fitted, self._gain, **self._options)
        self.filter = self._attachment.filter
        self.remember()

    def detach(self) -> None:
        """Take the filter away."""
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None

    @property
    def enabled(self) -> bool:
        """Whether the filter acts; set it to switch."""
        return self._attachment is not None and self._attachment.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if self._attachment is not None:
            self._attachment.enabled = value
