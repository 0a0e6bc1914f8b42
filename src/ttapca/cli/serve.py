"""`ttapca serve`: answer requests over HTTP with a network that adapts to each stream."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from typer import Option

from ttapca import __version__
from ttapca.cli import arguments
from ttapca.cli.served_network import served_network
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.cli.served_network import ServedNetwork
    from ttapca.serving.service import Service, ServiceFacts
    from ttapca.serving.tokens import Tokens

ORDERS = "auto (learnt from the predictions), shuffled (none) or video (surely one)."
MODES = "on, shadow (answers unchanged, counts what would change) or off."


@dataclass(kw_only=True)
class LimitOptions:
    """Limits of the service; None for those of the library, which the help names in brackets."""

    max_batch: Annotated[int | None, Option(min=1, help="Images of a pass (64).")] = None
    max_wait: Annotated[
        float | None, Option(min=0, help="Seconds a pass waits for other streams (0.002).")
    ] = None
    max_queue: Annotated[int | None, Option(min=1, help="Images that wait (1,024).")] = None
    max_streams: Annotated[int | None, Option(min=1, help="Streams in all (100,000).")] = None
    max_resident: Annotated[int | None, Option(min=1, help="Streams in memory (2,000).")] = None
    max_memory: Annotated[
        int | None, Option(min=1, help="Bytes of the streams in memory (1 GiB).")
    ] = None
    max_images: Annotated[int | None, Option(min=1, help="Images of a request (256).")] = None
    max_body: Annotated[int | None, Option(min=1, help="Bytes of a request (16 MiB).")] = None
    max_pixels: Annotated[
        int | None, Option(min=1, help="Pixels of a request's pictures (50 million).")
    ] = None
    timeout: Annotated[float | None, Option(help="Seconds until an answer (30).")] = None

    def of_pool(self) -> dict[str, Any]:
        """Return what is said about the pool, by names of `PoolLimits`."""
        streams = ("max_streams", "max_resident", "max_memory")
        names = ("max_batch", "max_wait", "max_queue", *streams, "max_images")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def of_requests(self) -> dict[str, Any]:
        """Return what is said about requests, by names of `RequestLimits`."""
        values = {
            "max_images": self.max_images,
            "max_body": self.max_body,
            "max_pixels": self.max_pixels,
            "answer_seconds": self.timeout,
        }
        return {name: value for name, value in values.items() if value is not None}


def serve(
    network: arguments.NetworkOptions,
    filter: arguments.FilterOption = None,
    host: Annotated[
        str, Option(help="Address to listen at; other than this machine's needs --tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    tokens: Annotated[
        Path | None, Option(metavar="FILE", help="Who may do what, in TOML: docs/production.md.")
    ] = None,
    state: Annotated[
        Path | None, Option(metavar="FILE", help="Where streams are kept (default: nowhere).")
    ] = None,
    save_every: Annotated[float | None, Option(help="Seconds between savings (10).")] = None,
    mode: Annotated[str, Option(help=f"Of new streams: {MODES}")] = "on",
    order: Annotated[str | None, Option(help=f"How images of a stream come: {ORDERS}")] = None,
    classes: Annotated[
        Path | None, Option(metavar="FILE", help="Names of the classes, one a line.")
    ] = None,
    outputs: arguments.OutputsOption = None,
    input_shape: arguments.InputShape = None,
    shorter_side: Annotated[
        int | None,
        Option(min=1, help="Side that pictures get before their centre is cut out; ImageNet: 256."),
    ] = None,
    folder: arguments.DataFolder = None,
    log_json: Annotated[bool, Option("--log-json", help="Log in JSON.")] = False,
    *,
    limits: LimitOptions,
) -> None:
    """Predict over HTTP, with a stream for each camera, a drift alarm and a live page.

    Without --filter, packaged networks get the one that ships, or one that is fitted and kept.
    Ctrl-C or SIGTERM: what runs is answered, streams are saved, and the service ends.
    """
    from ttapca._checks import Maybe, OneOf, check_option
    from ttapca.adaptation.chain_passes import Order
    from ttapca.networks.evaluation import EvaluatedKind
    from ttapca.serving.answers import Mode
    from ttapca.serving.http_server import listen, signals_put_back, url_of
    from ttapca.serving.http_server import serve as run
    from ttapca.serving.metrics import Metrics
    from ttapca.serving.pool import StreamPool
    from ttapca.serving.pool_limits import PoolLimits
    from ttapca.serving.request_limits import RequestLimits
    from ttapca.serving.request_log import logging_to
    from ttapca.serving.service import Service
    from ttapca.serving.stream_store import StreamStore

    known = _tokens(tokens, host)
    saving = _saving(state, save_every)
    request_limits = RequestLimits(**limits.of_requests())
    pool_limits = PoolLimits(**limits.of_pool())
    check_option("mode", mode, OneOf(get_args(Mode)))  # before a filter is fitted
    check_option("order", order, Maybe(OneOf(get_args(Order))))
    check_option("outputs", outputs, Maybe(OneOf(get_args(EvaluatedKind))))
    meaning = cast("EvaluatedKind | None", outputs)
    served = served_network(network.source(), filter, classes, folder, meaning)
    measured = Metrics(served.name, __version__)
    with ExitStack() as open_files:
        # These end last: saving must wait for nobody who reads the log, nor be cut short.
        open_files.enter_context(signals_put_back())
        open_files.enter_context(logging_to(sys.stderr, as_json=log_json))
        listening = open_files.enter_context(listen(host, port))
        store = None if state is None else open_files.enter_context(StreamStore(state))
        pool = StreamPool(
            served.model,
            served.fitted,
            store=store,
            mode=cast("Mode", mode),
            limits=pool_limits,
            observer=measured,
            outputs=meaning,
            order=cast("Order | None", order),
            input_shape=arguments.input_shape(input_shape, served.model),
            **saving,
        )
        open_files.enter_context(pool)
        service = Service(
            pool,
            _facts(served, saves=state is not None),
            tokens=known,
            limits=request_limits,
            metrics=measured,
            size=served.picture_size(pool.input_shape, shorter_side),
        )
        typer.echo(_greeting(url_of(listening), service, state))
        ended_by = run(service, listening)
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt


def _tokens(file: Path | None, host: str) -> Tokens:
    """Read the tokens, and refuse to be reached from elsewhere without."""
    from ttapca.serving.http_server import is_loopback
    from ttapca.serving.tokens import Tokens, read_tokens

    if file is not None:
        return read_tokens(file, os.environ)
    if not is_loopback(host):
        raise OptionError(
            "Without tokens the service listens on this machine only, such as at 127.0.0.1; found "
            f"--host {host}. Give --tokens FILE; docs/production.md says how to write it."
        )
    return Tokens()


def _saving(state: Path | None, save_every: float | None) -> dict[str, Any]:
    """Return what is said about saving, by names of `StreamPool`."""
    if state is not None:
        arguments.check_place(state, "--state")
    elif save_every is not None:
        raise OptionError("--save-every needs a file to save streams in: give --state FILE.")
    return {} if save_every is None else {"save_every": save_every}


def _facts(served: ServedNetwork, *, saves: bool) -> ServiceFacts:
    from ttapca.serving.service import ServiceFacts
    from ttapca.spectral.calibration import band_edges

    fitted = served.fitted
    edges = band_edges(fitted.n_components_)
    return ServiceFacts(
        served.name,
        f"{fitted.layer}, {fitted.n_components_:,} components, {fitted.route}",
        served.class_names,
        tuple((first + 1, last) for first, last in pairwise(edges)),
        saves,
    )


def _greeting(url: str, service: Service, state: Path | None) -> str:
    names = ", ".join(token.name for token in service.tokens.all)
    return (
        f"{url}  serves {service.facts.model} with a filter at {service.facts.filter}\n"
        f"  streams  {len(service.pool.names()):,}, "
        + (f"kept in {state}" if state else "not kept: --state FILE keeps them")
        + f"\n  access   {f'with the tokens of {names}' if names else 'from this machine'}"
    )
