"""The gains of a spectral filter as a surface."""

from __future__ import annotations

import hashlib

from torch import Tensor, nn

from ttapca.adaptation.surfaces.base import Surface
from ttapca.adaptation.surfaces.input_check import InputCheck
from ttapca.errors import TruncationWarning, warn_caller
from ttapca.fitting.attachment import Attachment, prepare
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.filter import SpectralFilter
from ttapca.spectral.gains import GainName, is_closed_form
from ttapca.spectral.source_classes import SourceClasses
from ttapca.spectral.stream import ParameterValues, Stream
from ttapca.support.modules import core_of


class SpectralGains(Surface):
    """A fitted filter whose gains may change.

    Args:
        fitted: The filter, which knows its layer.
        gain: Which gains; see `ttapca.spectral.gains`.
        strict: See `ttapca.attach`.
        **options: Options of the gain.

    Attributes:
        strict: See above; it may be set until the filter is attached.
        filter: The filter on the model, once attached; its parameters are those of its gains.
    """

    filter: SpectralFilter | None

    def __init__(
        self, fitted: FittedFilter, gain: GainName, *, strict: bool = False, **options: object
    ) -> None:
        super().__init__()
        self._fitted = fitted
        self._gain: GainName = gain
        self._options = options
        self.strict = strict
        self._attachment: Attachment | None = None
        self.filter = None
        self.in_closed_form = is_closed_form(gain)

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Put the filter at its layer."""
        super().attach(model, stream)
        if not self.in_closed_form and self._fitted.drops_too_much:
            warn_caller(
                f"The filter of {self._fitted.n_components_:,} components at `{self.layer}` "
                f"{self._fitted.loss_in_words()}, and learned gains cannot bring that back. Fit it "
                "with more components, or choose a method in closed form such as `wiener`, which "
                "keeps what lies outside of the components.",
                TruncationWarning,
            )
        layer, self._attachment = prepare(
            model, self._fitted, self._gain, strict=self.strict, **self._options
        )
        self._attachment.put_on(layer, switch=self)
        self.filter = self._attachment.filter
        if self._fitted.inputs_ is not None:
            # Gradient steps look at the batch as it is.
            follows = self.in_closed_form and not list(self.parameters())
            check = InputCheck(self._fitted.inputs_, stream if follows else None)
            self.patches.hook_input(core_of(model)[1], check)
        if stream is not None:
            name = f"gains at {self.layer}"
            if self.filter.gain is not None:
                self.filter.gain.join(stream)
            learned = list(self.parameters())
            if learned:
                stream.keep(name, ParameterValues(learned))

    @property
    def attached(self) -> bool:
        """Whether the filter is on a model."""
        return self._attachment is not None

    def detach(self) -> None:
        """Take the filter away."""
        if self._attachment is not None:
            self._attachment.detach()
            self._attachment = None
        super().detach()

    @property
    def layer(self) -> str:
        """The dotted path of the filter's layer."""
        return self._fitted.layer

    @property
    def fingerprint(self) -> str:
        """A digest that only the same filter has."""
        parts = [self.layer, str(self._fitted.shape)]
        for tensor in (self._fitted.center_, self._fitted.singular_values_):
            parts.append(hashlib.sha256(tensor.double().numpy().tobytes()).hexdigest())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def group_norm(self) -> dict[str, Tensor]:
        """Channel statistics of GroupNorm layers; see `ttapca.fitting.channel_statistics`."""
        return self._fitted.group_norm_

    @property
    def layer_norm(self) -> dict[str, Tensor]:
        """Channel statistics of LayerNorm layers."""
        return self._fitted.layer_norm_

    @property
    def classes(self) -> SourceClasses | None:
        """What classes do to the network; None if unknown."""
        return self._fitted.classes_

    @property
    def closed_form(self) -> ClosedFormGain | None:
        """The gains that follow from the data, once attached; None where all are learned."""
        gain = None if self.filter is None else self.filter.gain
        return None if gain is None else gain.closed_form
