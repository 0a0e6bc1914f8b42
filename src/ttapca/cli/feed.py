"""`ttapca feed`: play a data set against a server, as cameras whose images get worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from typer import Argument, Option

from ttapca.cli import arguments
from ttapca.cli.console import plain_table, print_json
from ttapca.datasets import FROST
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from ttapca.datasets import Order
    from ttapca.serving.feeding import FedStream, StreamPlan, Tally

LOOK = 0.25  # seconds between two looks at the streams
DEFAULT_SCHEDULE = "clean 20s, gaussian_noise:5 20s, clean 20s"


@dataclass(kw_only=True)
class StreamOptions:
    """Options for the streams and for the images that each of them sends."""

    stream: Annotated[str, Option(metavar="NAME")] = "camera-1"
    streams: Annotated[int, Option(min=1)] = 1
    schedule: Annotated[list[str] | None, Option(metavar="TEXT")] = None
    stagger: Annotated[str, Option(metavar="TIME")] = "0s"
    rate: float = 10.0
    batch: Annotated[int, Option(min=1)] = 1
    loop: Annotated[bool, Option("--loop")] = False

    def plans(self, seed: int) -> list[StreamPlan]:
        """Return a plan for each stream."""
        from ttapca.serving.feeding import StreamPlan, parse_schedule, parse_seconds

        texts = self.schedule or [DEFAULT_SCHEDULE]
        if len(texts) > self.streams:
            raise OptionError(
                f"There is at most one --schedule for each stream; found {len(texts)} for "
                f"{self.streams}. Feed more with --streams."
            )
        schedules = [parse_schedule(text) for text in texts]
        stagger = parse_seconds(self.stagger, "--stagger")
        if stagger and self.streams == 1:
            raise OptionError("--stagger has no effect on one stream; feed more with --streams.")
        base = self.stream.removesuffix("-1")
        names = [f"{base}-{n + 1}" for n in range(self.streams)]
        return [
            StreamPlan(name, schedules[n % len(schedules)], seed + 1000 * n, n * stagger)
            for n, name in enumerate(names if self.streams > 1 else [self.stream])
        ]


def feed(
    images: arguments.ImageOptions,
    streams: StreamOptions,
    url: Annotated[str, Argument(metavar="URL")] = "http://127.0.0.1:8000",
    token: Annotated[str | None, Option(metavar="TOKEN", envvar="TTAPCA_TOKEN")] = None,
    wait: Annotated[str, Option(metavar="TIME")] = "10s",
    as_json: arguments.AsJson = False,
) -> None:
    """Play a data set against a server, as cameras whose images get worse and better again."""
    from ttapca.serving.feeding import Feeder, ServerClient, check_fits, parse_seconds

    plans = streams.plans(images.seed)
    client = ServerClient(url, token or None, parse_seconds(wait, "--wait"))
    test, chosen = images.read("test")
    test = chosen.of(test)
    feeder = Feeder(
        test,
        plans,
        client,
        rate=streams.rate,
        batch=streams.batch,
        order=cast("Order", images.order),
        loop=streams.loop,
        textures=arguments.cache_root() / FROST,
    )
    info = client.info()
    check_fits(info, test)
    typer.echo(f"{chosen.selection} of `{images.data}` to {url} ({info.get('model')})", err=True)
    told: dict[str, Tally] = {}  # the last of each stream
    try:
        with feeder:
            going = True
            while going:
                going = feeder.running(LOOK)
                for stream in feeder.streams:
                    _tell_change(stream, told)
    finally:
        _summarise(feeder.streams, as_json)


def _tell_change(stream: FedStream, told: dict[str, Tally]) -> None:
    name, now = stream.plan.name, stream.current
    before = told.get(name)
    if now is None or before is now:
        return
    told[name] = now
    result = ""
    if before is not None:
        right = _percent(before.accuracy)
        result = f", after {before.images:,} images of {before.step.title}, {right} right"
    typer.echo(f"{name}: {now.step.title}{result}", err=True)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1f} %"


def _summarise(streams: list[FedStream], as_json: bool) -> None:
    found = [(stream, tally) for stream in streams for tally in list(stream.totals.values())]
    if as_json:
        counts = ("mode", "images", "right", "adapted")
        facts = [
            {"stream": stream.plan.name, "condition": tally.step.title}
            | {name: getattr(tally, name) for name in counts}
            | {"late_seconds": round(stream.late, 3), "retries": stream.retries}
            for stream, tally in found
        ]
        print_json(facts)
        return
    table = plain_table("stream", "condition", "mode", ">images", ">right", ">adapted")
    for stream, tally in found:
        adapted = _percent(100 * tally.adapted / tally.images)
        names = stream.plan.name, tally.step.title, tally.mode
        table.add_row(*names, f"{tally.images:,}", _percent(tally.accuracy), adapted)
    Console(highlight=False).print(table)
