"""A network that adapts as one function: images and states in, logits and states out.

It is the code of adapters and pools; only `TracedBatch` knows that its numbers are traced.
Everything is float32, because many accelerators know nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ttapca.adaptation.adapter import Adapter
from ttapca.adaptation.chain_passes import ChainPasses
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.errors import LayerOutputError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods.wiener import Wiener
from ttapca.spectral.chain import ChainState
from ttapca.spectral.stream_batch import StreamBatch
from ttapca.spectral.stream_state import LayerMoments, Spectrum, StreamState, leaves
from ttapca.support.outputs import FindLogits

# Parts of a state that a runtime has no use for.
UNUSED = ("outliers", "latest", "implausible", "alarm", "conditions", "spectra.0.leeway")


class TracedBatch(StreamBatch):
    """A batch with `each` images of all streams, whose states are tables with a row for each."""

    traced = True

    def __init__(
        self, empty: StreamState, tables: dict[str, Tensor], streams: int, each: int, memory: float
    ) -> None:
        super().__init__([empty], empty, memory=memory, size=streams * each)
        self._tables, self._streams, self._each = tables, streams, each
        self.group_of = torch.arange(streams)[:, None].expand(-1, each).flatten()
        self.chain: ChainState | None = None

    @property
    def group_count(self) -> int:
        """See `StreamBatch`: here it is the number of streams."""
        return self._streams

    def group_of_each(self, length: int) -> Tensor | None:
        """See `StreamBatch`."""
        del length
        return self.group_of

    def summed(self, values: Tensor, *, adapted: bool = False) -> Tensor:
        """See `StreamBatch`: all images count."""
        del adapted
        return values.reshape(self._streams, -1, values.shape[1]).sum(1)

    def sizes(self, *, adapted: bool = False) -> Tensor:
        """See `StreamBatch`."""
        del adapted
        return torch.ones_like(self._tables["spectra.0.samples"]) * self._each

    def as_numbers(self, values: Tensor) -> Tensor:
        """Return values as they are, in float32."""
        return values

    def counted_images(self) -> int:
        """Return how many images each stream has."""
        return self._each

    def spectrum_before(self, number: int) -> Spectrum:
        """See `StreamBatch`; images have the size of the fit."""
        empty = self.empty.spectra[number]
        own = self._under(f"spectra.{number}.")
        own["leeway"] = empty.leeway.float().expand(self._streams, -1, -1)
        return Spectrum(**own)

    def layers_before(self) -> LayerMoments:
        """See `StreamBatch`."""
        return LayerMoments(**self._under("layers."))

    def chains_before(self) -> ChainState:
        """See `StreamBatch`."""
        own: dict[str, Any] = self._under("chain.")
        start = self.empty.chain
        new = (own["place"] == 0)[:, None, None]
        if start is not None:  # a new stream has zeros
            own["joint"] = torch.where(new, torch.from_numpy(start.joint).float(), own["joint"])
        return ChainState(**own)

    def chains_after(self, after: ChainState) -> None:
        """See `StreamBatch`."""
        self.chain = after

    def _under(self, prefix: str) -> dict[str, Tensor]:
        own = {name: each for name, each in self._tables.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): each for name, each in own.items()}

    def after(self) -> dict[str, Tensor]:
        """Return the states of the streams after the batch, by the same names as before."""
        found: dict[str, Any] = {}
        for number in self.spectra:
            found |= leaves(self._settled(number), f"spectra.{number}")
        settled = None if self.settle_layers is None else self.settle_layers(self)
        if settled is not None:
            found |= leaves(settled[0], "layers")
        if self.chain is not None:
            found |= leaves(self.chain, "chain")
        return {name: found.get(name, before) for name, before in self._tables.items()}


class StatefulNetwork(nn.Module):
    """Predicts images of some streams, given the state of each; `wiener` with one condition.

    `state` has the shape of each part of a stream's state, by the names that files of streams have.
    A new stream has zeros. A single number has the shape (1,), since some runtimes, such as Triton,
    can begin no state without dimensions.

    Example:
        >>> import ttapca
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)).eval()
        >>> source = torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> network = StatefulNetwork(model, ttapca.fit(model, "0", source))
        >>> state = [torch.zeros(2, *shape) for shape in network.state.values()]
        >>> logits, shift, *state = network(source[:2, None], *state)
        >>> logits.shape, shift.shape, state[0].tolist()
        (torch.Size([2, 1, 3]), torch.Size([2, 1]), [[1.0], [1.0]])
    """

    def __init__(
        self, model: nn.Module, fitted: FittedFilter, *, logits: FindLogits | None = None
    ) -> None:
        super().__init__()
        made = Wiener(fitted, states=1).assemble()
        self.adapter = Adapter(
            model,
            made.surfaces,
            made.predictor,
            forgetting="online",
            logits=logits,
            memory=made.memory,
        )
        self._layer, self._start = fitted.layer, self.adapter.new_state()
        self._stream = self.adapter.hub
        for surface in made.surfaces:
            if isinstance(surface, SpectralGains) and surface.closed_form is not None:
                surface.closed_form.make_traceable()
        predictor = self.adapter.predictor
        self._predictor = predictor.traceable() if isinstance(predictor, ChainPasses) else predictor
        shapes = {
            name: tuple(each.shape[1:])
            for name, each in leaves(self._start).items()
            if not name.startswith(UNUSED)
        }
        self.state = {name: shape or (1,) for name, shape in shapes.items()}
        self._numbers = [name for name, shape in shapes.items() if not shape]

    def forward(self, images: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Return logits, (streams, images, classes), shifts, (streams, 1), and the next state.

        Images have the shape (streams, images, *shape); parts of the state (streams, *shape).
        """
        before = dict(zip(self.state, state, strict=True))
        tables = before | {name: before[name].squeeze(1) for name in self._numbers}
        streams, each = images.shape[:2]
        batch = TracedBatch(self._start, tables, streams, int(each), self._stream.memory)

        def run(_images: Tensor | None) -> Tensor:
            found: Tensor = self.adapter.predictor.outputs(self.adapter.model(images.flatten(0, 1)))
            return found

        self._stream.batch = batch
        try:
            found, _ = self._predictor.predict_streams(run, batch)
        finally:
            self._stream.batch = None
        if 0 not in batch.spectra:
            raise LayerOutputError(
                f"A model must call the layer of its filter, `{self._layer}`, in every pass; this "
                "one has not."
            )
        if not isinstance(found, Tensor) or found.dim() != 2:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise LayerOutputError(
                f"A model must return logits of shape (images, classes); found {shape}. Say where "
                "they are with `logits=`."
            )
        logits = self.adapter.predictor.outputs.as_returned(found)
        logits = logits.reshape(*images.shape[:2], -1)
        after = batch.after()
        after |= {name: after[name][:, None] for name in self._numbers}
        sound = torch.isfinite(logits).flatten(1).all(1)  # (streams,)
        for each_part in after.values():
            sound = sound & torch.isfinite(each_part).flatten(1).all(1)
        kept = {
            name: torch.where(sound.view(-1, *[1] * len(shape)), after[name], before[name])
            for name, shape in self.state.items()
        }
        # Exporters name outputs, and one value cannot have two names.
        return logits, kept["spectra.0.shift"].clone(), *kept.values()

    def detach(self) -> nn.Module:
        """Take the filter off the model, and return the model."""
        return self.adapter.detach()
