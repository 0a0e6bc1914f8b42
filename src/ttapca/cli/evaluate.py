"""`ttapca eval`: measure a network, as it is or with a test-time method."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Option

from ttapca.benchmark import paper
from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.datasets import TensorBatches
from ttapca.errors import OptionError
from ttapca.support.progress import Steps

if TYPE_CHECKING:
    from ttapca.networks.evaluation import EvaluatedKind


# Arguments of `ttapca.adapt` for which the command has options of its own.
OWN_OPTIONS = ("model", "method", "filter", "forgetting", "outputs")
TOO_LONG = ("error_stream", "entropy_stream")  # to be printed


def evaluate(
    images: arguments.ImageOptions,
    network: arguments.NetworkOptions,
    method: Annotated[str, Option(autocompletion=arguments.method_names)] = "source",
    filter: arguments.FilterOption = None,
    forgetting: str = "episodic",
    batch_size: Annotated[int, Option(min=1)] = paper.BATCH_SIZE,
    corruption: Annotated[str | None, Option(autocompletion=arguments.corruption_names)] = None,
    severity: Annotated[int | None, Option(min=1, max=5)] = None,
    option: Annotated[list[str] | None, Option(metavar="NAME=VALUE")] = None,
    outputs: arguments.OutputsOption = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Measure error, calibration and speed on the test images of a data set."""
    import ttapca
    from ttapca.methods.method import registration
    from ttapca.networks.evaluation import predict_all

    source = network.source()
    shipped = source.shipped_filter if registration(method).method.needs_filter else None
    folder = filter or shipped
    test, chosen = images.read("test", corruption=corruption, severity=severity)
    wishes = {"forgetting": forgetting, "outputs": outputs, **_options(option)}
    fitted = None if folder is None else ttapca.load(folder)
    adapted = ttapca.adapt(source.load(), method, filter=fitted, **wishes)  # type: ignore[arg-type]
    batches = TensorBatches(test, batch_size, chosen.rows)
    with ConsoleReporter() as reporter:
        progress = Steps(reporter, "evaluating")
        meaning = cast("EvaluatedKind | None", outputs)
        found = predict_all(adapted, batches, outputs=meaning, progress=progress).evaluation()
    values = dataclasses.asdict(found)
    by_class = dict(zip(test.class_names, values.pop("accuracy_of_class"), strict=True))
    facts: dict[str, Any] = {"model": source.name, "data": images.data, "corruption": corruption}
    facts |= {"severity": severity, "method": method, "setting": forgetting}
    facts |= {"batch_size": batch_size, "outputs": outputs, "chosen": str(chosen)}
    facts |= {name: value for name, value in values.items() if name not in TOO_LONG}
    facts |= {"accuracy": found.accuracy, "images_per_second": found.images_per_second}
    facts |= {"accuracy_of_class": by_class, "parameters_adapted": adapted.n_parameters}
    if as_json:
        print_json(facts)
    else:
        typer.echo(_sentence(facts))


def _options(words: list[str] | None) -> dict[str, Any]:
    form = "NAME=VALUE, such as statistics=source"
    options: dict[str, Any] = {}
    for name, text in arguments.method_options(words, form).items():
        if not name.isidentifier():
            raise OptionError(f"--option takes {form}; found `{name}={text}`.")
        if name in OWN_OPTIONS:
            raise OptionError(
                f"--option is for the method; found `{name}={text}`: give --{name} instead."
            )
        options[name] = arguments.value_of(text)
    return options


def _sentence(facts: dict[str, Any]) -> str:
    data, method = facts["data"], facts["method"]
    if facts["corruption"]:
        data += f", {facts['corruption']} {facts['severity']}"
    if method != "source":
        method += f", {facts['setting']}, batches of {facts['batch_size']}"
    return (
        f"{facts['model']} on {facts['images']:,} samples of {data} ({method})\n"
        f"  error              {facts['error']:6.2f} %   (accuracy {facts['accuracy']:.2f} %)\n"
        f"  calibration error  {facts['calibration_error']:6.2f} %\n"
        f"  speed              {facts['images_per_second']:6.0f} samples/s\n"
        f"  parameters adapted {facts['parameters_adapted']:6,}\n"
        f"  samples            {facts['chosen']}"
    )
