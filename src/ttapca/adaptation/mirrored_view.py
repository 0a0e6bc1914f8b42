"""`MirroredView`: a second look at the mirrored images, where the data have shifted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ttapca.adaptation.optimisation import Mover, Run
from ttapca.errors import LayerOutputError, ShapeError
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_state import StreamState
from ttapca.support.inputs import mirror_back, mirror_images


class MirroredView(Mover):
    """Gives another mover the mean of what the model says about images and mirrored images.

    Every pass of that mover becomes two. The second one, over the mirrored images, reads the stream
    and does not count: gains are those of the images themselves, statistics those of the mirrored
    batch and of the same past. Where no shift is sure there is only the first one, and the logits
    are those of the other mover, bit for bit.

    Args:
        inner: The other mover, without gradient steps.
    """

    def __init__(self, inner: Mover) -> None:
        super().__init__()
        self.inner = inner
        self.reads = inner.reads

    @property
    def kind(self) -> str:
        """That of the other mover: a second look leaves nothing in a stream."""
        return self.inner.kind

    def bind(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Pass on the model and its parameters."""
        self.inner.outputs = self.outputs
        self.inner.bind(model, parameters)

    def join(self, stream: Stream) -> None:
        """Pass on the stream, and remember where to see a shift."""
        self._stream = stream
        self.inner.join(stream)

    def predict(self, run: Run, *inputs: Any, **options: Any) -> Tensor:
        """Return the logits for one batch."""
        if mirror_images(inputs, options) is None:
            found = [
                tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                for value in (*inputs, *options.values())
            ]
            raise ShapeError(
                "A mirrored view needs images: a floating-point tensor of shape (batch, channels, "
                f"height, width); found {found}. Adapt with `views=1`."
            )

        def both(*inputs: Any, **options: Any) -> Tensor:
            return self._mean(run, inputs, options)

        return self.inner.predict(both, *inputs, **options)

    def _mean(self, run: Run, inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
        logits, batch = run(*inputs, **options), self._stream.batch
        mirrored = mirror_images(inputs, options)
        if mirrored is None or (batch is not None and (batch.left_out or not batch.shift.any())):
            return logits
        args, kwargs = mirrored
        if batch is not None:
            batch.looking = True
        seen = run(*args, **kwargs)
        if batch is not None:
            batch.looking = False
        back = mirror_back(seen) if isinstance(seen, Tensor) else None
        if back is None or back.shape != logits.shape:
            found = tuple(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__
            raise LayerOutputError(
                "A mirrored view needs logits of shape (batch, classes), or (batch, classes, "
                f"height, width); found {found}. Say where they are with `logits=`, or adapt with "
                "`views=1`."
            )
        # Means of probabilities did neither better nor worse, and not every output is one.
        return (logits + back) / 2

    def output(self, logits: Tensor) -> Tensor:
        """Return what the other mover makes of logits."""
        return self.inner.output(logits)

    def facts_in(self, state: StreamState) -> dict[str, Any]:
        """Return what the other mover knows of a stream."""
        return self.inner.facts_in(state)

    def tensors(self) -> list[Tensor]:
        """Return what the other mover keeps."""
        return self.inner.tensors()

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert what the other mover keeps."""
        self.inner.apply(fn)
