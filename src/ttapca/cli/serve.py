"""`ttapca serve` and `ttapca export-onnx`: a network that adapts to streams, in production."""

from __future__ import annotations

import math
import shlex
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from typer import Option

from ttapca import __version__
from ttapca.cli import arguments
from ttapca.cli.configuration import ConfigFile
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.datasets.pictures import PictureSize
from ttapca.errors import DataNotFoundError, OptionError

if TYPE_CHECKING:
    from torch import nn

    from ttapca.fitting.fitted_filter import FittedFilter
    from ttapca.networks.evaluation import EvaluatedKind
    from ttapca.networks.source import NetworkSource
    from ttapca.serving.tokens import Tokens

SAVED_EVERY = 10.0  # seconds
KEPT_FILTERS = "filters"  # a folder beside the data sets


@dataclass(kw_only=True)
class LimitOptions:
    """Limits of the service; None for the library's own, which the help names in brackets."""

    max_batch: Annotated[int | None, Option(min=1)] = None
    max_wait: Annotated[float | None, Option(min=0)] = None
    max_queue: Annotated[int | None, Option(min=1)] = None
    max_streams: Annotated[int | None, Option(min=1)] = None
    max_resident: Annotated[int | None, Option(min=1)] = None
    max_memory: Annotated[int | None, Option(min=1)] = None
    max_images: Annotated[int | None, Option(min=1)] = None
    max_body: Annotated[int | None, Option(min=1)] = None
    max_pixels: Annotated[int | None, Option(min=1)] = None
    timeout: float | None = None

    def of(self, limits: type[Any]) -> Any:
        """Return limits of one kind, `PoolLimits` or `RequestLimits`, with the given values."""
        given = {**vars(self), "answer_seconds": self.timeout}
        values = {field.name: given.get(field.name) for field in fields(limits)}
        return limits(**{name: value for name, value in values.items() if value is not None})


def serve(
    network: arguments.NetworkOptions,
    filter: arguments.FilterOption = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535)] = 8000,
    tokens: Annotated[Path | None, Option(metavar="FILE")] = None,
    state: Annotated[Path | None, Option(metavar="FILE")] = None,
    save_every: float = SAVED_EVERY,
    mode: str = "on",
    order: str | None = None,
    outputs: arguments.OutputsOption = None,
    input_shape: arguments.InputShape = None,
    shorter_side: arguments.ShorterSide = None,
    folder: arguments.DataFolder = None,
    log_json: Annotated[bool, Option("--log-json")] = False,
    config: ConfigFile = None,
    check: Annotated[bool, Option("--check")] = False,
    *,
    limits: LimitOptions,
) -> None:
    """Predict over HTTP, with a stream for each camera, a drift alarm and a live page."""
    del config  # its callback has read it
    import ttapca
    from ttapca._checks import Maybe, OneOf, check_option
    from ttapca.adaptation.chain_passes import Order
    from ttapca.networks.evaluation import EvaluatedKind
    from ttapca.serving.http_server import listen, logging_to, signals_put_back, url_of
    from ttapca.serving.http_server import serve as run
    from ttapca.serving.limits import PoolLimits, RequestLimits
    from ttapca.serving.metrics import Metrics
    from ttapca.serving.pool import StreamPool
    from ttapca.serving.service import Service, ServiceFacts
    from ttapca.serving.stream_record import Mode
    from ttapca.serving.stream_store import StreamStore
    from ttapca.spectral.calibration import band_edges
    from ttapca.support.parsing import check_plain

    # These would be refused anyway, but after a filter is fitted.
    known = _tokens(tokens, host)
    if state is not None:
        arguments.check_place(state, "--state")
        check_plain(state, OptionError)
    elif save_every != SAVED_EVERY:
        raise OptionError("--save-every needs a file to save streams in: give --state FILE.")
    request_limits, pool_limits = limits.of(RequestLimits), limits.of(PoolLimits)
    check_option("mode", mode, OneOf(get_args(Mode)))
    check_option("order", order, Maybe(OneOf(get_args(Order))))
    check_option("outputs", outputs, Maybe(OneOf(get_args(EvaluatedKind))))
    meaning = cast("EvaluatedKind | None", outputs)

    source = network.source()
    model = source.load()
    fitted = _fitted(source, model, folder) if filter is None else ttapca.load(filter)
    edges = band_edges(fitted.n_components_)
    facts = ServiceFacts(
        source.name,
        f"{fitted.layer}, {fitted.n_components_:,} components, {fitted.route}",
        _class_names(source, model, meaning),
        tuple((first + 1, last) for first, last in pairwise(edges)),
    )
    measured = Metrics(source.name, __version__)
    with ExitStack() as open_files:
        # These end last: no reader of the log may delay saving, or cut it short.
        open_files.enter_context(signals_put_back())
        open_files.enter_context(logging_to(sys.stderr, as_json=log_json))
        listening = None if check else open_files.enter_context(listen(host, port))
        kept = None if state is None or (check and not state.exists()) else StreamStore(state)
        store = None if kept is None else open_files.enter_context(kept)
        pool = StreamPool(
            model,
            fitted,
            store=store,
            mode=cast("Mode", mode),
            limits=pool_limits,
            observer=measured,
            outputs=meaning,
            order=cast("Order | None", order),
            input_shape=arguments.input_shape(input_shape, model),
            save_every=save_every,
        )
        open_files.enter_context(pool)
        size = picture_size(model, pool.input_shape, shorter_side)
        service = Service(
            pool, facts, tokens=known, limits=request_limits, metrics=measured, size=size
        )
        names = ", ".join(token.name for token in known.all)
        if listening is None:
            pool.try_out()
            service.close()
        place = "all is well" if listening is None else url_of(listening)
        typer.echo(
            f"{place}  serves {facts.model} with a filter at {facts.filter}\n"
            f"  streams  {len(pool.names()):,}, "
            f"{f'kept in {state}' if state else 'not kept: --state FILE keeps them'}\n"
            f"  access   {f'with the tokens of {names}' if names else 'from this machine'}"
        )
        ended_by = None if listening is None else run(service, listening)
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def _tokens(file: Path | None, host: str) -> Tokens:
    """Read the tokens; without any, refuse to be reached from other machines."""
    from ttapca.serving.http_app import is_loopback
    from ttapca.serving.tokens import Tokens, read_tokens

    if file is not None:
        return read_tokens(file)
    if not is_loopback(f"[{host}]" if ":" in host else host):
        raise OptionError(
            "Without tokens the service listens on this machine only, such as at 127.0.0.1; found "
            f"--host {host}. Give --tokens FILE; docs/production.md says how to write it."
        )
    return Tokens()


def picture_size(
    model: nn.Module, input_shape: tuple[int, ...], shorter_side: int | None
) -> PictureSize | None:
    """Return the sizes that pictures are brought to; None to bring them to the input's at once."""
    if shorter_side is None:
        stated = getattr(model, "pictures", None)  # of a network from a hub
        return stated if isinstance(stated, PictureSize) else None
    height, width = input_shape[1:] if len(input_shape) == 3 else (0, 1)
    if height != width:
        raise OptionError(
            "--shorter-side is for networks that take square pictures, of which the centre is "
            f"cut out; this one takes {' x '.join(map(str, input_shape))}. Leave it out."
        )
    return PictureSize(height, shorter_side)


def _fitted(source: NetworkSource, model: nn.Module, folder: Path | None) -> FittedFilter:
    import ttapca
    from ttapca import networks
    from ttapca.benchmark.filters import FIT_BATCH, kept_filter, recommended_layer, usual_fit
    from ttapca.datasets import TensorBatches
    from ttapca.networks.checkpoints import describe_weights
    from ttapca.networks.source import fingerprint, option_words

    if source.file not in networks.packaged():
        command = shlex.join(["ttapca", "fit", source.name, *option_words(source.words())])
        raise OptionError(
            f"A network is served with a filter of its own; none was given for `{source.name}`. "
            f"Fit one with `{command} --data DATA --to my-filter`, and name it: --filter my-filter"
        )
    if source.shipped_filter is not None:
        return ttapca.load(source.shipped_filter)
    kept = arguments.cache_root() / KEPT_FILTERS / f"{source.file}-{fingerprint(model)}"

    def fit() -> FittedFilter:
        data = str(describe_weights(source.file)["data"]["name"])
        try:
            train = arguments.read_images(data, "train", folder)
        except DataNotFoundError as error:
            raise OptionError(
                f"Without --filter, one is fitted on the images that `{source.name}` was trained "
                f"with; they are not there: {error} Or name a filter that you have: --filter DIR"
            ) from error
        layer = recommended_layer(model, train, reporter)
        return usual_fit(model, layer, TensorBatches(train, FIT_BATCH), reporter=reporter)

    with ConsoleReporter() as reporter:
        return kept_filter(kept, fit, reporter)


def _class_names(
    source: NetworkSource, model: nn.Module, outputs: EvaluatedKind | None
) -> tuple[str, ...]:
    names = stated_names(source, model)
    count: int | None = getattr(model, "classes", None)  # of outputs
    if count is not None and outputs != "multilabel":
        if outputs is not None and (outputs == "binary") != (count == 1):
            raise OptionError(
                "A network with one output is binary, and one with more is multiclass or "
                f"multilabel; found --outputs {outputs} for one with {count:,}."
            )
        count = max(2, count)
    return names if count in (None, len(names)) else ()


def stated_names(source: NetworkSource, model: nn.Module) -> tuple[str, ...]:
    """Return the names of the classes that come with a network."""
    from ttapca.networks.checkpoints import describe_weights
    from ttapca.networks.external import is_factory, is_hub_name

    if is_hub_name(source.name):
        return tuple(getattr(model, "class_names", ()))
    if is_factory(source.name):
        return ()
    return tuple(describe_weights(source.file).get("class_names", ()))


def export_onnx(
    network: arguments.NetworkOptions,
    filter: Annotated[Path, Option(metavar="DIR", exists=True, file_okay=False)],
    to: Annotated[Path, Option(metavar="FILE")] = Path("adapted.onnx"),
    input_shape: arguments.InputShape = None,
    streams: Annotated[int | None, Option(min=1)] = None,
    images: Annotated[int, Option(min=1)] = 1,
    as_json: arguments.AsJson = False,
) -> None:
    """Write a network that adapts as an ONNX file, with the state of streams as in- and outputs."""
    import ttapca
    from ttapca.serving.onnx_export import AFTER, BEFORE, OPSET
    from ttapca.serving.onnx_export import export_onnx as write

    arguments.check_place(to)
    source = network.source()
    model, fitted = source.load(), ttapca.load(filter)
    shape = arguments.input_shape(input_shape, model)
    with ConsoleReporter() as reporter:
        reporter.advance(f"writing {to}", 0, None)
        state = write(model, fitted, to, input_shape=shape, streams=streams, images=images)
    if as_json:
        print_json({"file": str(to), "layer": fitted.layer, "opset": OPSET, "state": state})
        return
    taken = (streams or "streams", images, *(shape or fitted.shape))
    numbers = sum(math.prod(part) for part in state.values())
    typer.echo(
        f"{to}  {source.name}, filter at `{fitted.layer}`; opset {OPSET}, float32, "
        f"{to.stat().st_size / 1e6:.1f} MB\n"
        f"  takes images ({' x '.join(map(str, taken))}) and the state of each stream, as "
        f"`{BEFORE}...`\n"
        f"  gives logits, shift, and the next state, as `{AFTER}...`\n"
        f"  a state has {numbers:,} numbers in {len(state)} parts, and begins with zeros"
    )
