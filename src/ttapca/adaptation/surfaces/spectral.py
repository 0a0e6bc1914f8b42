"""The gains of a spectral filter as a surface."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ttapca.adaptation.surfaces.base import Surface
from ttapca.errors import AttachError, TruncationWarning
from ttapca.fitting.attachment import Attachment, attach
from ttapca.fitting.fitted_filter import AnyGain, FittedFilter
from ttapca.spectral.closed_gains import EXPONENTS, ClosedFormGain, PulledGain
from ttapca.spectral.filter import SpectralFilter


class SpectralGains(Surface):
    """A fitted filter whose gains may change.

    Args:
        fitted: The filter; its layer says where it goes.
        gain: Which gains, `relu`, `exponential`, `multiplicative`, or in closed form `wiener`,
            `match`, `two-sided`, `pulled`.
        **options: Of the gain, see `ttapca.spectral.gains` and `ttapca.spectral.closed_gains`.

    Attributes:
        filter: The filter on the model, once attached; its parameters are the gains' own.
        relief: For closed-form gains, see there; to be set before the surface is attached.
    """

    filter: SpectralFilter | None

    def __init__(self, fitted: FittedFilter, gain: AnyGain, **options: object) -> None:
        super().__init__()
        self._fitted = fitted
        self._gain: AnyGain = gain
        self._options = options
        self._attachment: Attachment | None = None
        self.relief: Callable[[float], float] | None = None
        self.filter = None
        # In a tuple: a part of the filter, not of this surface; layers ask for it all the time.
        self._closed: tuple[ClosedFormGain | None] = (None,)

    def attach(self, model: nn.Module) -> None:
        """Put the filter at its layer."""
        if self._attachment is not None:
            raise AttachError("A surface goes on one model; this one is attached already.")
        if not self.in_closed_form and self._fitted.drops_too_much:
            warnings.warn(
                f"The filter of {self._fitted.n_components_:,} components at `{self.layer}` "
                f"{self._fitted.loss_in_words()}, and learned gains cannot bring that back. Fit it "
                "with more components, or choose a method in closed form such as `wiener`, which "
                "keeps what lies outside of the components.",
                TruncationWarning,
                stacklevel=4,  # whoever called `adapt`
            )
        self._attachment = attach(model, self._fitted, self._gain, **self._options)
        self.filter = self._attachment.filter
        self._closed = (_closed_form(self.filter.gain),)
        if self.closed_form is not None:
            self.closed_form.relief = self.relief
            self.closed_form.listens_to("nothing")
        self.remember()

    def start_batch(self) -> None:
        """Let closed-form gains take in the next pass, and no other of the same batch."""
        if self.closed_form is not None:
            self.closed_form.listens_to("one batch")

    @property
    def left_out(self) -> bool:
        """Whether closed-form gains kept the batch out."""
        return self.closed_form is not None and self.closed_form.left_out

    def forget_batch(self) -> None:
        """Let closed-form gains be what they were before the batch."""
        if self.closed_form is not None:
            self.closed_form.forget_batch()

    def detach(self) -> None:
        """Take the filter away."""
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None

    @property
    def in_closed_form(self) -> bool:
        """Whether the gains follow from the spectrum of the data."""
        return self._gain in EXPONENTS

    @property
    def layer(self) -> str:
        """Where the filter goes."""
        return self._fitted.layer

    @property
    def memory(self) -> float | None:
        """How many images of a stream closed-form gains remember; None where nothing is."""
        closed = self.closed_form
        return None if closed is None else closed.memory

    @property
    def group_norm(self) -> dict[str, Tensor]:
        """Channels of GroupNorm layers in the source; see `ttapca.support.group_norm`."""
        return self._fitted.group_norm_

    @property
    def closed_form(self) -> ClosedFormGain | None:
        """The gains that follow from the data, or None."""
        return self._closed[0]

    @property
    def shift(self) -> float:
        """How surely the data have shifted, from 0 to 1; 1 where the gains cannot tell."""
        closed = self.closed_form
        return 1.0 if closed is None else closed.shift

    def snapshot(self) -> list[Tensor]:
        """Parameters of the gains, and what they keep of a stream."""
        return [*super().snapshot(), *(value.clone() for value in self._state())]

    @torch.no_grad()
    def restore(self, snapshot: list[Tensor]) -> None:
        """Return to the state of a snapshot, bit for bit."""
        state = self._state()
        learned = len(snapshot) - len(state)
        if learned:  # looking for parameters takes long for a single image
            super().restore(snapshot[:learned])
        for value, kept in zip(state, snapshot[learned:], strict=True):
            value.copy_(kept)
        if self.filter is not None and self.filter.gain is not None:
            self.filter.gain.restored()

    def _state(self) -> list[Tensor]:
        gain = None if self.filter is None else self.filter.gain
        return [] if gain is None else gain.state()

    @property
    def enabled(self) -> bool:
        """Whether the filter acts; set it to switch."""
        return self._attachment is not None and self._attachment.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if self._attachment is not None:
            self._attachment.enabled = value


def _closed_form(gain: nn.Module | None) -> ClosedFormGain | None:
    if isinstance(gain, PulledGain):
        return gain.closed
    return gain if isinstance(gain, ClosedFormGain) else None
