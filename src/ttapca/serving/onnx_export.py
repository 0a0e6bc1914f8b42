"""Write an adapted network as an ONNX file, with the state of its streams as inputs and outputs."""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ttapca import __version__
from ttapca._checks import Maybe, Whole, check_option
from ttapca.adaptation.adapter import Adapter
from ttapca.adaptation.chain_passes import ChainPasses
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.errors import ExportError, LayerOutputError, OptionError, TtapcaError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods.wiener import Wiener
from ttapca.serving.pool import image_shape
from ttapca.spectral.chain import ChainState
from ttapca.spectral.stream_batch import StreamBatch
from ttapca.spectral.stream_state import LayerMoments, Spectrum, StreamState, leaves
from ttapca.support.disk import replace_file
from ttapca.support.modules import evaluation_mode
from ttapca.support.outputs import FindLogits

PACKAGES = ("onnx", "onnxscript")  # of the extra `onnx`; the rest of the library needs neither
OPSET = 18  # the oldest that torch writes without converting afterwards
# Streams to trace with if any number will do: not 0 or 1, which torch takes for special cases.
EXAMPLE = 2
# Parts of a state that a runtime has no use for.
UNUSED = ("outliers", "latest", "implausible", "alarm", "errors", "conditions", "spectra.0.leeway")
# Before the names of the state's parts: of inputs, as in a file of a stream, and of outputs.
BEFORE, AFTER = "state.", "next."


def export_onnx(
    model: nn.Module,
    fitted: FittedFilter,
    path: str | os.PathLike[str],
    *,
    input_shape: tuple[int, ...] | None = None,
    streams: int | None = None,
    images: int = 1,
    logits: FindLogits | None = None,
) -> dict[str, tuple[int, ...]]:
    """Write a network that adapts to an ONNX file.

    It takes `images`, shape (streams, images, *input_shape), and the state of each stream. It
    returns `logits`, shape (streams, images, classes), `shift`, how surely each stream has shifted,
    shape (streams, 1), and the next state of each stream. All are float32. A new stream has a state
    of zeros; a stream with an image that is not finite keeps its state.

    It answers as `ttapca.adapt(model, "wiener", filter=fitted, states=1)` answers single images.
    Inputs have the names that parts of the state have in the file of a stream, so that streams go
    on in either (`ttapca.serving.with_tensors`); outputs begin with `next.` instead of `state.`. A
    single number has the shape (streams, 1). The metadata `ttapca_state` pair outputs with inputs.

    Args:
        model: On the CPU, in float32; it is left as it was.
        fitted: A filter that was fitted on it.
        path: The file; one that is there is replaced.
        input_shape: Shape of one image, for a filter that does not act on the images themselves.
        streams: Streams of a batch, to fix their number.
        images: Images of each stream. With more than one, a call makes one pass; the library may
            repeat it.
        logits: Finds the logits in the output of the model, if that is more than one tensor.

    Returns:
        The shape of each part of a stream's state, by the name of the input.

    Example:
        >>> import tempfile, ttapca
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
        >>> fitted = ttapca.fit(model, "0", torch.rand(100, 1, 8, 8), 20)
        >>> path = Path(tempfile.mkdtemp()) / "adapted.onnx"
        >>> export_onnx(model, fitted, path, streams=1)["state.spectra.0.energies"]
        (20,)
    """
    for package in PACKAGES:
        importlib.import_module(package)  # to miss it now rather than after the work
    check_option("streams", streams, Maybe(Whole(1)))
    check_option("images", images, Whole(1))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.device.type != "cpu" or (tensor.is_floating_point() and kind != "float32"):
            raise OptionError(
                f"Networks are exported from the CPU in float32; found `{name}` on "
                f"{tensor.device.type} in {kind}. Convert the network: model.cpu().float()"
            )
    shape = input_shape or image_shape(fitted)
    with evaluation_mode(model):
        network = StatefulNetwork(model, fitted, logits=logits)
        try:
            content = _written(network.eval(), shape, (streams, images), fitted.layer)
        finally:
            network.adapter.detach()
    replace_file(Path(path), content)
    return {BEFORE + name: shape for name, shape in network.state.items()}


def _written(
    network: StatefulNetwork, shape: tuple[int, ...], sizes: tuple[int | None, int], layer: str
) -> bytes:
    import onnx

    traced = _traced(network, shape, sizes)
    with _quiet(), _explained():
        found = torch.onnx.export(  # it returns None only if it writes the file itself
            traced,
            input_names=["images", *(BEFORE + name for name in network.state)],
            output_names=["logits", "shift", *(AFTER + name for name in network.state)],
            opset_version=OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        program = cast("torch.onnx.ONNXProgram", found)
        _simplify(program.model)
        written = program.model_proto
        _name_sizes(written.graph)
        _remove_traces(written.graph)
        written.producer_name, written.producer_version = "ttapca", __version__
        state = {
            BEFORE + name: {
                "next": AFTER + name,
                "shape": [sizes[0] or "streams", *part],
                "initial": 0.0,
            }
            for name, part in network.state.items()
        }
        facts = {"ttapca_layer": layer, "ttapca_state": json.dumps(state)}
        onnx.helper.set_model_props(written, facts)
        content: bytes = written.SerializeToString()
        onnx.checker.check_model(content, full_check=True)
    return content


def _simplify(model: Any) -> None:
    """Do as torch with `optimize=True`, without its slow search for patterns."""
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model)
    for step in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),  # two outputs may be the same value by now
        common.NameFixPass(),
    ):
        step(model)


def _traced(
    network: StatefulNetwork, shape: tuple[int, ...], sizes: tuple[int | None, int]
) -> torch.export.ExportedProgram:
    streams, images = sizes
    state = [torch.zeros(streams or EXAMPLE, *part) for part in network.state.values()]
    example = (torch.zeros(streams or EXAMPLE, images, *shape), *state)
    free = {} if streams else {0: torch.export.Dim("streams")}
    with torch.no_grad(), _quiet():
        try:
            network(*example)  # errors of model or shape are clearer before it is traced
        except TtapcaError:
            raise
        except RuntimeError as error:
            raise OptionError(
                f"The model must take images of shape {shape}; it does not: {error} Say what "
                "shape an image has with `input_shape=`."
            ) from error
        with _explained():
            return torch.export.export(
                network, example, dynamic_shapes=(free, (free,) * len(state))
            )


@contextmanager
def _explained() -> Iterator[None]:
    """Turn any error of torch's exporter into `ExportError`."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch wraps it in advice for its own developers
            cause = cause.__cause__
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__).rstrip(".")
        raise ExportError(
            "To be written as ONNX, a network must do the same operations for any images; torch "
            f"cannot write this one: {reason}. Fix their number with `streams=` and `images=`, or "
            "serve it with `ttapca.serving.StreamPool`, which runs any network."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of torch about its own insides and missing packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _name_sizes(graph: Any) -> None:
    """Name the number of streams as we do, if it is free: torch calls it s28 and the like."""
    free = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output):
        for size in value.type.tensor_type.shape.dim:
            if free and size.dim_param == free:
                size.dim_param = "streams"
    graph.ClearField("value_info")  # sizes in between, in torch's names; runtimes infer them


def _remove_traces(graph: Any) -> None:
    """Remove torch's notes on the origin of each part: they name files of this machine."""
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                _remove_traces(inner)


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

    `state` has the shapes by name; of a number (1,), since some runtimes can begin no other.
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
        """Return logits, shifts and the next state of images, (streams, images, *shape)."""
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
                f"A model must call the layer of its filter, `{self._layer}`, in every pass."
            )
        if not isinstance(found, Tensor) or found.dim() != 2:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise LayerOutputError(
                f"Models return logits of shape (images, classes); found {shape}. See `logits=`."
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
