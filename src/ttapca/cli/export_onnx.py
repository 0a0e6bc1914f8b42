"""`ttapca export-onnx`: write a network that adapts as an ONNX file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter, print_json


def export_onnx(
    network: arguments.NetworkOptions,
    filter: Annotated[
        Path,
        Option(metavar="DIR", exists=True, file_okay=False, help="A filter from `ttapca fit`."),
    ],
    to: Annotated[Path, Option(metavar="FILE", help="The file to write.")] = Path("adapted.onnx"),
    input_shape: arguments.InputShape = None,
    streams: Annotated[
        int | None, Option(min=1, help="Streams of a batch, to fix them (default: any).")
    ] = None,
    images: Annotated[int, Option(min=1, help="Images of each stream in a call.")] = 1,
    as_json: arguments.AsJson = False,
) -> None:
    """Write a network that adapts as an ONNX file, with the state of streams as in- and outputs.

    ONNX Runtime and Triton then carry the state from batch to batch: docs/production.md.
    """
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
        facts = {"file": str(to), "layer": fitted.layer, "opset": OPSET, "state": state}
        print_json(facts)
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
