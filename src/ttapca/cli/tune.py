"""`ttapca tune`: choose the options of a method, on conditions that are not reported."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from ttapca import benchmark
from ttapca.benchmark import paper
from ttapca.cli import arguments
from ttapca.cli.bench import AFTER_THE_LAST, exit_if_failed, refuse_without_effect
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.datasets import Split
from ttapca.errors import OptionError
from ttapca.support.progress import counted

if TYPE_CHECKING:
    from ttapca.benchmark.search import SamplerName

SHOWN = 20  # trials in the table
RANGE = re.compile(r"(?P<low>.+?)\.\.(?P<high>.+?)(?P<log>:log)?(?::(?P<points>\d+))?")
OPTION = "NAME=V,V | NAME=LOW..HIGH[:log][:POINTS]"


@dataclass(kw_only=True)
class SearchOptions:
    """Options for the values that are tried, for the sampler and for the conditions."""

    option: Annotated[list[str] | None, Option(metavar="NAME=VALUES")] = None
    sampler: str | None = None
    trials: Annotated[int | None, Option(min=1)] = None
    clean_weight: Annotated[float, Option(min=0.0)] = 0.0
    conditions: Annotated[str | None, Option(metavar="NAME:SEVERITY,...")] = None

    def tuning(self, method: str, session: benchmark.Benchmark, seed: int) -> benchmark.Tuning:
        """Return the search for the best options of a method."""
        from ttapca.benchmark.tuning import CONDITIONS, read_conditions

        sampler = cast("SamplerName", self.sampler)
        words = arguments.separated(self.conditions)
        texts = arguments.method_options(self.option, f"{OPTION}, such as lr=1e-4..1e-1:log")
        return benchmark.Tuning(
            session,
            benchmark.SearchSpace(method, {name: _values(text) for name, text in texts.items()}),
            benchmark.Search(sampler, self.trials, seed),
            CONDITIONS if words is None else read_conditions(words),
            self.clean_weight,
        )


def tune(
    network: arguments.NetworkOptions,
    searching: SearchOptions,
    method: Annotated[
        str | None, Argument(metavar="METHOD", autocompletion=arguments.method_names)
    ] = None,
    data: arguments.DataOption = None,
    settings: arguments.Settings = "online",
    batch_sizes: arguments.BatchSizes = str(paper.BATCH_SIZE),
    images: Annotated[int, Option(min=1)] = 500,
    seed: Annotated[int, Option(min=0)] = 0,
    components: arguments.Components = None,
    layer: arguments.LayerOption = None,
    route: arguments.RouteOption = None,
    outputs: arguments.OutputsOption = None,
    filter: arguments.FilterOption = None,
    split: str = "train",
    to: arguments.ResultsFile = Path("tuning.sqlite"),
    retry_failed: arguments.RetryFailed = False,
    jobs: arguments.Jobs = None,
    engine: arguments.EngineOption = None,
    folder: arguments.DataFolder = None,
    size: arguments.ImageSize = None,
    shorter_side: arguments.ShorterSide = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Choose options of a method on held-out conditions; an interrupted search is continued."""
    if method is None and network.model_option is not None:  # then the first word is the method
        method, network.model = network.model, None
    if method is None:
        raise OptionError("Name a network and a method, as MODEL METHOD; found no method.")
    source = network.source()
    plan = benchmark.Plan().changed(
        data=data or source.only_data,
        settings=arguments.separated(settings),
        batch_sizes=arguments.whole_numbers("--batch-sizes", batch_sizes),
        components=arguments.whole_numbers("--components", components),
        layer=layer,
        route=route,
        outputs=outputs,
        images=images,
    )
    places = (arguments.cache_root(), folder, size, shorter_side)
    session = benchmark.Benchmark(plan, source, filter, *places, split=cast(Split, split))
    tuning = searching.tuning(method, session, seed)
    refuse_without_effect(session.plan, {"components": components})
    found = arguments.engine(jobs, engine)
    arguments.check_place(to)
    with ConsoleReporter("tune", lines=True, goes_on=AFTER_THE_LAST) as reporter:
        session.reporter = reporter
        tuned = tuning.run(to, engine=found, retry_failed=retry_failed)
    if as_json:
        facts: dict[str, Any] = {
            name: getattr(tuned, name) for name in ("method", "images", "seed")
        }
        facts["conditions"] = [f"{name}:{severity}" for name, severity in tuned.conditions]
        facts["best"] = tuned.best and tuned.best.options
        trials = [_trial_facts(trial) for trial in tuned.trials]
        print_json(facts | {"source": _trial_facts(tuned.source), "trials": trials})
    else:
        _print(tuned, tuning, to)
    failed = sum(trial.status == "failed" for trial in tuned.trials)
    exit_if_failed(failed, "" if retry_failed else f"tune: {counted(failed, 'trial')} failed")


def _values(text: str) -> benchmark.Choices | benchmark.Range:
    if (found := RANGE.fullmatch(text)) is None:
        try:
            values = tomllib.loads(f"values = [{text}]")["values"]
        except (ValueError, RecursionError):  # no TOML: words
            values = map(arguments.value_of, arguments.separated(text) or ())
        return benchmark.Choices(tuple(values))
    low, high = arguments.value_of(found["low"]), arguments.value_of(found["high"])
    if not all(type(end) in (int, float) for end in (low, high)):
        raise OptionError(f"A range is LOW..HIGH[:log][:POINTS], in numbers; found `{text}`.")
    points = None if found["points"] is None else int(found["points"])
    return benchmark.Range(low, high, found["log"] is not None, points)


def _print(tuned: benchmark.Tuned, tuning: benchmark.Tuning, to: Path) -> None:
    """Print trials, the best first, and how to use the best options."""
    from ttapca.benchmark.tuning import words_of
    from ttapca.methods.method import registration

    Console().print(_table(tuned))
    more = len(tuned.trials) - SHOWN
    if more > 0:
        typer.echo(f"{more:,} more trials: --json has all of them")
    plan = tuning.benchmark.plan
    kind = "training" if tuning.benchmark.split == "train" else "test"
    typer.echo(
        f"{to}: {len(tuned.rows):,} measurements of {len(tuned.trials):,} trials and the source; "
        f"{len(tuned.conditions)} conditions x {tuned.images:,} {kind} images of "
        f"{Path(plan.data).name}, {', '.join(plan.settings)}, batches of "
        f"{', '.join(map(str, plan.batch_sizes))}, seed {tuned.seed}"
    )
    if tuned.best is not None:
        options = tuned.best.options
        values = words_of(options, f"{tuned.method}.")
        words = shlex.join(word for value in values for word in ("--option", value))
        typer.echo(f"bench:  {words}")
        filtered = registration(tuned.method).method.needs_filter or options.get("filter")
        call = ["model", f'"{tuned.method}"', *(["filter=fitted"] if filtered else [])]
        call += [f"{name}={value!r}" for name, value in options.items() if name != "filter"]
        typer.echo(f"Python: ttapca.adapt({', '.join(call)})")


def _table(tuned: benchmark.Tuned) -> Table:
    names = list(tuned.trials[0].options)
    notes = any(trial.status == "failed" for trial in tuned.trials)
    table = Table(title="Error [%] on held-out conditions", title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    for heading in ("mean", "spread", "clean", "score"):
        table.add_column(heading, justify="right", no_wrap=True)
    if notes:
        table.add_column("")
    for trial in tuned.trials[:SHOWN]:
        values = (trial.options[name] for name in names)
        words = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        note = "failed" if trial.status == "failed" else ""
        # The mean of a trial that was not done is over other conditions, not to be compared.
        numbers = [""] * 4 if note else _numbers(trial)
        row = [*words, *numbers, *([note] if notes else [])]
        table.add_row(*row, style="bold" if trial is tuned.best else "")
    table.add_section()
    table.add_row("source", *[""] * (len(names) - 1), *_numbers(tuned.source)[:3])
    return table


def _numbers(trial: benchmark.Trial) -> list[str]:
    numbers = (trial.mean, trial.spread, trial.clean, trial.score)
    return ["" if number is None else f"{number:.2f}" for number in numbers]


def _trial_facts(trial: benchmark.Trial) -> dict[str, Any]:
    errors = {f"{name}:{severity}": error for (name, severity), error in trial.errors.items()}
    found = dataclasses.asdict(dataclasses.replace(trial, errors={}))
    return found | {"errors": errors, "mean": trial.mean, "spread": trial.spread}
