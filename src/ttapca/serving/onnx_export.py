"""Write an adapted network as an ONNX file, with the state of its streams as inputs and outputs.

A runtime that knows nothing of this library then adapts: it keeps what comes out as `next_...` and
gives it back as `stream_...` with the next images of the same stream.
"""

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
from torch import nn

from ttapca import __version__
from ttapca._checks import Maybe, Whole, check_option
from ttapca.errors import ExportError, OptionError, TtapcaError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.serving.pool import image_shape
from ttapca.serving.stateful_network import StatefulNetwork
from ttapca.support.disk import replace_file
from ttapca.support.modules import evaluation_mode
from ttapca.support.outputs import FindLogits

PACKAGES = ("onnx", "onnxscript")  # of the extra `onnx`; the rest of the library needs neither
OPSET = 18  # the oldest that torch writes without converting afterwards
# Sizes to trace with where any will do: not 0 or 1, which torch takes for special cases.
EXAMPLE = {"streams": 2, "images": 3}


def export_onnx(
    model: nn.Module,
    fitted: FittedFilter,
    path: str | os.PathLike[str],
    *,
    input_shape: tuple[int, ...] | None = None,
    streams: int | None = None,
    images: int | None = None,
    logits: FindLogits | None = None,
) -> dict[str, int]:
    """Write a network that adapts to an ONNX file.

    It takes `images`, shape (streams, images, *input_shape), and the state of each stream. It
    returns `logits`, shape (streams, images, classes), `shift`, how surely each stream has shifted,
    shape (streams, 1), and the next state of each stream. All are float32. A new stream has a state
    of zeros; a stream with an image that is not finite keeps its state.

    Gains and means follow the streams as in a `StreamPool`; normalisation layers keep the
    statistics of the source. The metadata of the file say under `ttapca_state` which output
    belongs to which input.

    Args:
        model: On the CPU, in float32; it is left as it was.
        fitted: A filter that was fitted on it.
        path: The file; one that is there is replaced.
        input_shape: Shape of one image, for a filter that does not act on the images themselves.
        streams: Streams of a batch, where that is to be fixed.
        images: Images of each stream, where that is to be fixed.
        logits: Finds the logits in what the model returns, where that is more than one tensor.

    Returns:
        How many numbers each part of a stream's state has, by the name of the input.

    Raises:
        OptionError: An option makes no sense, or the model is not float32 on the CPU.
        AttachError: The filter does not fit the model.
        LayerOutputError: The model returns no logits, or does not call the filter's layer.
        ExportError: The network cannot be written as ONNX.
        ModuleNotFoundError: A package of the extra `onnx` is not installed.

    Example:
        >>> import tempfile, ttapca
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
        >>> fitted = ttapca.fit(model, "0", torch.rand(100, 1, 8, 8), 20)
        >>> path = Path(tempfile.mkdtemp()) / "adapted.onnx"
        >>> export_onnx(model, fitted, path, streams=1, images=1)
        {'stream_samples': 1, 'stream_energies': 20, 'stream_mean': 20, ...
    """
    for package in PACKAGES:
        importlib.import_module(package)  # to miss it now rather than after the work
    sizes = {"streams": streams, "images": images}
    for name, size in sizes.items():
        check_option(name, size, Maybe(Whole(1)))
    _check_tensors(model)
    shape = input_shape or image_shape(fitted)
    with evaluation_mode(model):
        network = StatefulNetwork(model, fitted, logits=logits)
        try:
            content = _written(network.eval(), shape, sizes, fitted.layer)
        finally:
            network.detach()
    replace_file(Path(path), content)
    return {f"stream_{name}": size for name, size in network.state.items()}


def _check_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.device.type != "cpu" or (tensor.is_floating_point() and kind != "float32"):
            raise OptionError(
                f"Networks are exported from the CPU in float32; found `{name}` on "
                f"{tensor.device.type} in {kind}. Convert the network: model.cpu().float()"
            )


def _written(
    network: StatefulNetwork, shape: tuple[int, ...], sizes: dict[str, int | None], layer: str
) -> bytes:
    """Return the content of the file."""
    import onnx

    program = _traced(network, shape, sizes)
    with _quiet(), _explained():
        found = torch.onnx.export(  # it returns None only where it writes the file itself
            program,
            # Plain names, such as `mean`, would collide with those of torch's operations.
            input_names=["images", *(f"stream_{name}" for name in network.state)],
            output_names=["logits", "shift", *(f"next_{name}" for name in network.state)],
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
        written = cast("torch.onnx.ONNXProgram", found).model_proto
        _name_sizes(written.graph)
        _remove_traces(written.graph)
        written.producer_name, written.producer_version = "ttapca", __version__
        facts = {"ttapca_layer": layer, "ttapca_state": json.dumps(_described(network, sizes))}
        onnx.helper.set_model_props(written, facts)
        content: bytes = written.SerializeToString()
        onnx.checker.check_model(content, full_check=True)
    return content


def _traced(
    network: StatefulNetwork, shape: tuple[int, ...], sizes: dict[str, int | None]
) -> torch.export.ExportedProgram:
    """Return the network as torch has traced it."""
    streams, images = (size or EXAMPLE[name] for name, size in sizes.items())
    state = [torch.zeros(streams, numbers) for numbers in network.state.values()]
    example = (torch.zeros(streams, images, *shape), *state)
    free = {name: torch.export.Dim(name) for name, size in sizes.items() if size is None}
    by_stream = {0: free["streams"]} if "streams" in free else {}
    of_images = by_stream | ({1: free["images"]} if "images" in free else {})
    with torch.no_grad(), _quiet():
        try:
            network(*example)  # what is wrong with model or shape is clearer before it is traced
        except TtapcaError:
            raise
        except RuntimeError as error:
            raise OptionError(
                f"The model must take images of shape {shape}; it does not: {error} Say what "
                "shape an image has with `input_shape=`."
            ) from error
        with _explained():
            return torch.export.export(
                network, example, dynamic_shapes=(of_images, (by_stream,) * len(state))
            )


@contextmanager
def _explained() -> Iterator[None]:
    """Turn whatever torch's exporter raises into `ExportError`."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch wraps it in advice for its own developers
            cause = cause.__cause__
        reason = next(iter(str(cause).strip().splitlines()), type(cause).__name__).rstrip(".")
        raise ExportError(
            "To be written as ONNX, a network must do the same operations whatever the images and "
            f"however many they are; torch cannot write this one: {reason}. If it takes only some "
            "numbers of images, fix them with `streams=` and `images=`. If not, serve it with "
            "`ttapca.serving.StreamPool`, which runs any network."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to ourselves what torch says about its own insides and missing packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _name_sizes(graph: Any) -> None:
    """Name the sizes that are free as we do: torch calls them s28 and the like."""
    places = zip(graph.input[0].type.tensor_type.shape.dim, EXAMPLE, strict=False)
    names = {place.dim_param: name for place, name in places if place.dim_param}
    for value in (*graph.input, *graph.output):
        for place in value.type.tensor_type.shape.dim:
            if place.dim_param in names:
                place.dim_param = names[place.dim_param]
    graph.ClearField("value_info")  # sizes in between, in torch's names; runtimes infer them


def _remove_traces(graph: Any) -> None:
    """Remove what torch says about the origin of each part: it names files of this machine."""
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                _remove_traces(inner)


def _described(network: StatefulNetwork, sizes: dict[str, int | None]) -> dict[str, object]:
    """Return what a runtime must know about the state of a stream, by the name of the input."""
    return {
        f"stream_{name}": {
            "next": f"next_{name}",
            "shape": [sizes["streams"] or "streams", numbers],
            "initial": 0.0,
        }
        for name, numbers in network.state.items()
    }
