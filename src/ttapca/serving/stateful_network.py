"""A network and its filter as one function: images and states in, logits and states out.

What `ttapca.serving.gathered_network` does for a pool, for runtimes that keep the state of a stream
themselves and hand it back with the next images.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ttapca.errors import LayerOutputError
from ttapca.fitting.fitted_filter import FittedFilter, attach
from ttapca.spectral.closed_form import WIENER
from ttapca.spectral.closed_form_rule import Shown
from ttapca.spectral.traceable_gain import TraceableGain
from ttapca.support.outputs import FindLogits


class StatefulNetwork(nn.Module):
    """Predicts images of some streams, given what each stream has shown before.

    The filter has closed-form gains. Normalisation layers keep the statistics of the source, as in
    a `StreamPool`. A stream with an image that is not finite keeps its state, and its shift.

    Args:
        model: Returns logits for a batch of images; in evaluation mode.
        fitted: A filter of it, which is on the model until `detach` is called.
        logits: Finds the logits in what the model returns, where that is more than one tensor.

    Attributes:
        state: How many numbers each part of a stream's state has, by name. A new stream has zeros.

    Raises:
        OptionError: The filter has no energies.
        AttachError: The filter does not fit the model.

    Example:
        >>> import ttapca
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)).eval()
        >>> source = torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> network = StatefulNetwork(model, ttapca.fit(model, "0", source))
        >>> state = [torch.zeros(2, size) for size in network.state.values()]
        >>> images = torch.stack([source[:5], 3 * source[:5]])  # five of each of two streams
        >>> logits, shift, *state = network(images, *state)
        >>> logits.shape, (shift > 0.5).tolist(), state[0].tolist()
        (torch.Size([2, 5, 3]), [[False], [True]], [[5.0], [5.0]])
        >>> model = network.detach()
    """

    def __init__(
        self,
        model: nn.Module,
        fitted: FittedFilter,
        *,
        logits: FindLogits | None = None,
    ) -> None:
        super().__init__()
        self._layer, self._logits = fitted.layer, logits
        self._attachment = attach(model, fitted, TraceableGain, **WIENER)
        self.model, self.filter = model, self._attachment.filter
        sizes = {"samples": 1, "energies": fitted.n_components_, "mean": fitted.n_components_}
        if fitted.rest_ is not None:
            sizes |= {"rest_energy": 1, "rest_mean": math.prod(fitted.shape)}
        self.state = sizes

    def forward(self, images: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return logits, shifts and states.

        Args:
            images: As many of each stream, shape (streams, images, *shape).
            state: What `state` names, each of shape (streams, numbers).

        Returns:
            Logits, shape (streams, images, classes); how surely each stream has shifted, from 0 to
            1, shape (streams, 1); and the state to give with the next images.

        Raises:
            LayerOutputError: The model returns no logits, or does not call the filter's layer.
        """
        gain: TraceableGain = self.filter.gain  # type: ignore[assignment]
        before = dict(zip(self.state, state, strict=True))
        columns = {name: before[name][:, 0] for name in _NUMBERS if name in before}
        shown_before = Shown(**(before | columns))
        gain.begin(shown_before, images.shape[1])
        try:
            output = self.model(images.flatten(0, 1))
            logits = output if self._logits is None else self._logits(output)
            verdict, shown = gain.verdict_, gain.shown
        finally:
            gain.begin(None)
        if verdict is None or shown is None:
            raise LayerOutputError(
                f"A model must call the layer of its filter, `{self._layer}`, in every pass; this "
                "one has not."
            )
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise LayerOutputError(
                f"A model must return logits of shape (images, classes); found {found}. Say where "
                "they are with `logits=`."
            )
        logits = logits.reshape(*images.shape[:2], logits.shape[1])
        after = {name: each.reshape(before[name].shape) for name, each in shown.tensors().items()}
        sound = torch.isfinite(logits).flatten(1).all(1, keepdim=True)  # (streams, 1)
        for each in after.values():
            sound = sound & torch.isfinite(each).all(1, keepdim=True)
        kept = [torch.where(sound, after[name], before[name]) for name in self.state]
        # A stream that keeps its state has shifted as surely as before.
        shift = torch.where(sound, verdict.certainty[:, None], _shift(gain, shown_before)[:, None])
        return logits, shift, *kept

    def detach(self) -> nn.Module:
        """Take the filter off the model, and return the model."""
        self._attachment.detach()
        return self.model


def _shift(gain: TraceableGain, shown: Shown) -> Tensor:
    """Return how surely streams have shifted by what they have shown; 0 for new ones."""
    found = gain.verdict(shown, shown.samples.clamp(min=1)).certainty
    return torch.where(shown.samples > 0, found, torch.zeros_like(found))


_NUMBERS = ("samples", "rest_energy")  # of which `Shown` has one for each stream, without columns
