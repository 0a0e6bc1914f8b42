"""`ttapca tune`: choose the options of a method, on conditions that are not reported."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from ttapca.benchmark import paper
from ttapca.cli import arguments, completion
from ttapca.cli.bench import AFTER_THE_LAST, RETRY, refuse_without_effect
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.errors import OptionError
from ttapca.support.disk import replace_file
from ttapca.support.progress import counted

if TYPE_CHECKING:
    from ttapca.benchmark.search import Choices, PrunerName, Range, SamplerName
    from ttapca.benchmark.session import Benchmark
    from ttapca.benchmark.tuning import Trial, Tuned, Tuning
    from ttapca.datasets import Split
    from ttapca.engines import Engine

IMAGES = 500
TITLE = "Error [%] on held-out conditions"
SHOWN = 20  # trials in the table
RANGE = re.compile(r"(?P<low>.+?)\.\.(?P<high>.+?)(?P<log>:log)?(?::(?P<points>\d+))?")
OPTION = "NAME=V,V | NAME=LOW..HIGH[:log][:POINTS]"


@dataclass(kw_only=True)
class SearchOptions:
    """Options that say what is tried, how it is chosen, and on which conditions."""

    option: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUES", help="1,2,4 or 1e-4..1e-1:log, with :5 for five points."),
    ] = None
    sampler: Annotated[
        str | None, Option(help="grid, random or tpe (default: grid if all values are given).")
    ] = None
    trials: Annotated[
        int | None, Option(min=1, help="How many random and tpe try (default: 30).")
    ] = None
    prune: Annotated[
        str | None, Option(metavar="RULE", help="Leave bad trials early: median or halving.")
    ] = None
    clean_weight: Annotated[
        float, Option(min=0.0, help="What each point lost on clean images adds to the score.")
    ] = 0.0
    conditions: Annotated[
        str | None, Option(metavar="NAME:SEVERITY,...", help="Default: sixteen held-out ones.")
    ] = None

    def tuning(self, method: str, benchmark: Benchmark, seed: int) -> Tuning:
        """Return the search for the best options of a method."""
        from ttapca.benchmark.search import Search, SearchSpace
        from ttapca.benchmark.tuning import CONDITIONS, Tuning, read_conditions

        sampler, prune = cast("SamplerName", self.sampler), cast("PrunerName", self.prune)
        words = arguments.separated(self.conditions)
        return Tuning(
            benchmark,
            SearchSpace(method, arguments.given_once(map(_option, self.option or []))),
            Search(sampler, self.trials, prune, seed),
            CONDITIONS if words is None else read_conditions(words),
            self.clean_weight,
        )


def tune(
    network: arguments.NetworkOptions,
    searching: SearchOptions,
    method: Annotated[
        str | None,
        Argument(
            metavar="METHOD",
            help="As `ttapca methods` lists it.",
            autocompletion=completion.method,
        ),
    ] = None,
    data: arguments.DataOption = None,
    settings: arguments.Settings = "online",
    batch_sizes: arguments.BatchSizes = str(paper.BATCH_SIZE),
    images: Annotated[int, Option(min=1, help="Training images, the last ones.")] = IMAGES,
    seed: Annotated[int, Option(min=0, help="Of the sampler, and of the images' order.")] = 0,
    components: arguments.Components = None,
    layer: arguments.LayerOption = None,
    route: Annotated[str | None, Option(metavar="NAME", help=arguments.ROUTE)] = None,
    outputs: arguments.OutputsOption = None,
    filter: arguments.FilterOption = None,
    split: Annotated[
        str, Option(help="train; or test, for data without images for training.")
    ] = "train",
    to: Annotated[
        Path, Option(metavar="FILE", help="The results file; an unfinished one is continued.")
    ] = Path("tuning.sqlite"),
    plot: Annotated[
        Path | None,
        Option(metavar="FILE", help="Draw error against each option: .svg, .png, .pdf."),
    ] = None,
    retry_failed: Annotated[bool, Option("--retry-failed", help="Repeat what failed.")] = False,
    jobs: arguments.Jobs = None,
    engine: arguments.EngineOption = None,
    folder: arguments.DataFolder = None,
    size: arguments.ImageSize = None,
    shorter_side: arguments.ShorterSide = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Choose options of a method on held-out conditions; an interrupted search is continued.

    Options are chosen on training images, under the four extra corruptions at severity 5 and the
    standard ones at 4. What is reported, severity 5 of the fifteen on test images, is refused.
    """
    from ttapca.benchmark.plan import Plan
    from ttapca.benchmark.session import Benchmark

    if method is None and network.model_option is not None:  # then the first word is the method
        method, network.model = network.model, None
    if method is None:
        raise OptionError("Name a network and a method, as MODEL METHOD; found no method.")
    source = network.source()
    chosen = Plan().changed(
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
    benchmark = Benchmark(chosen, source, filter, *places, split=cast("Split", split))
    tuning = searching.tuning(method, benchmark, seed)
    refuse_without_effect(benchmark.plan, {"components": components})
    if plot is not None:
        _check_plot(plot)
    tuned = _run(tuning, to, retry_failed, arguments.engine(jobs, engine))
    if plot is not None:
        _draw(tuned, tuning, plot)
    if as_json:
        print_json(_facts(tuned))
    else:
        _print(tuned, tuning, to, plot)
    failed = sum(trial.status == "failed" for trial in tuned.trials)
    if failed and not retry_failed:
        typer.echo(f"tune: {counted(failed, 'trial')} failed; {RETRY}", err=True)
    if failed:
        raise typer.Exit(1)


def _check_plot(to: Path) -> None:
    from ttapca.benchmark.svg import check_format

    arguments.check_place(to, "--plot")
    check_format(to.suffix)


def _draw(tuned: Tuned, tuning: Tuning, to: Path) -> None:
    from ttapca.benchmark.figures import tuning_figure
    from ttapca.benchmark.svg import figure_file

    replace_file(to, figure_file(tuning_figure(tuned, tuning.space), to.suffix))


def _run(tuning: Tuning, to: Path, retry_failed: bool, engine: Engine) -> Tuned:
    arguments.check_place(to)
    with ConsoleReporter("tune", lines=True, goes_on=AFTER_THE_LAST) as reporter:
        tuning.benchmark.reporter = reporter
        return tuning.run(to, engine=engine, retry_failed=retry_failed)


def _option(word: str) -> tuple[str, Choices | Range]:
    """Return the name and the values of an option that may be tried.

    Example:
        >>> _option("steps=1,2")
        ('steps', Choices(values=(1, 2)))
        >>> _option("lr=1e-4..0.1:log:4")
        ('lr', Range(low=0.0001, high=0.1, log=True, points=4, whole=False))
    """
    from ttapca.benchmark.search import Choices, Range

    name, equals, text = (part.strip() for part in word.partition("="))
    if not (name and equals):
        raise OptionError(f"--option takes {OPTION}, such as lr=1e-4..1e-1:log; found `{word}`.")
    if "." in name:
        raise OptionError(
            f"--option takes {OPTION}, options of the one METHOD; found `{word}`. Leave out "
            f"`{name.rpartition('.')[0]}.`."
        )
    if (found := RANGE.fullmatch(text)) is None:
        return name, Choices(_values(text))
    low, high = arguments.value_of(found["low"]), arguments.value_of(found["high"])
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high)):
        raise OptionError(f"A range is LOW..HIGH[:log][:POINTS], in numbers; found `{text}`.")
    points = None if found["points"] is None else int(found["points"])
    return name, Range(low, high, found["log"] is not None, points)


def _values(text: str) -> tuple[Any, ...]:
    """Return the values of a list with commas: read as TOML if it is TOML, else the words.

    Example:
        >>> _values("0.5, batch"), _values('["a", "b"], ["c"]')
        ((0.5, 'batch'), (['a', 'b'], ['c']))
    """
    try:
        return tuple(tomllib.loads(f"values = [{text}]")["values"])
    except (ValueError, RecursionError):
        return tuple(map(arguments.value_of, arguments.separated(text) or ()))


def _print(tuned: Tuned, tuning: Tuning, to: Path, plot: Path | None) -> None:
    """Print trials, the best first, and how to use the best options."""
    from ttapca.benchmark.tuning import words_of

    Console().print(_table(tuned, weighted=tuning.clean_weight > 0))
    more = len(tuned.trials) - SHOWN
    if more > 0:
        typer.echo(f"{more:,} more trials: --json has all of them")
    plan = tuning.benchmark.plan
    typer.echo(
        f"{to}: {_count(tuned):,} measurements of {len(tuned.trials):,} trials and the source; "
        f"{len(tuned.conditions)} conditions x {tuned.images:,} {_kind(tuning)} images of "
        f"{Path(plan.data).name}, {', '.join(plan.settings)}, batches of "
        f"{', '.join(map(str, plan.batch_sizes))}, seed {tuned.seed}"
    )
    if plot is not None:
        typer.echo(str(plot))
    if tuned.source.clean == 0:
        typer.echo(
            "The network makes no mistake on these clean images: it was trained on them, and what "
            "options cost on clean images shows less than on new ones."
        )
    if tuned.best is None:
        return
    options = tuned.best.options
    words = shlex.join(
        word for each in words_of(options, f"{tuned.method}.") for word in ("--option", each)
    )
    typer.echo(f"bench:  {words}")
    typer.echo(f"Python: {_python(tuned.method, options)}")


def _python(method: str, options: Mapping[str, Any]) -> str:
    """Return the call that adapts a model with these options.

    Example:
        >>> _python("tent", {"lr": 0.01, "filter": True})
        'ttapca.adapt(model, "tent", filter=fitted, lr=0.01)'
    """
    from ttapca.methods.method import registration

    filtered = registration(method).method.needs_filter or options.get("filter")
    words = ["model", f'"{method}"', *(["filter=fitted"] if filtered else [])]
    words += [f"{name}={value!r}" for name, value in options.items() if name != "filter"]
    return f"ttapca.adapt({', '.join(words)})"


def _table(tuned: Tuned, *, weighted: bool) -> Table:
    names = list(tuned.trials[0].options)
    notes = any(trial.status != "done" for trial in tuned.trials)
    table = Table(title=TITLE, title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    for heading in ("mean", "spread", "clean", *(["score"] if weighted else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    if notes:
        table.add_column("")
    for trial in tuned.trials[:SHOWN]:
        numbers = [trial.mean, trial.spread, trial.clean, *([trial.score] if weighted else [])]
        if trial.status != "done":  # a mean over other conditions, not to be compared
            numbers = [None] * len(numbers)
        note = [_note(trial, len(tuned.conditions))] if notes else []
        values = (_shown(trial.options[name]) for name in names)
        best = "bold" if trial is tuned.best else ""
        table.add_row(*values, *map(_number, numbers), *note, style=best)
    table.add_section()
    source = tuned.source
    blank = [""] * (len(names) - 1)
    table.add_row("source", *blank, *map(_number, (source.mean, source.spread, source.clean)))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _note(trial: Trial, conditions: int) -> str:
    if trial.status == "pruned":
        return f"left after {len(trial.errors)} of {conditions}: {trial.mean:.2f}"
    return "failed" if trial.status == "failed" else ""


def _count(tuned: Tuned) -> int:
    return sum(row.outcome.status != "pruned" for row in tuned.rows)


def _kind(tuning: Tuning) -> str:
    return "training" if tuning.benchmark.split == "train" else "test"


def _facts(tuned: Tuned) -> dict[str, Any]:
    return {
        "method": tuned.method,
        "images": tuned.images,
        "seed": tuned.seed,
        "conditions": [f"{name}:{severity}" for name, severity in tuned.conditions],
        "best": tuned.best and tuned.best.options,
        "source": _trial_facts(tuned.source),
        "trials": [_trial_facts(trial) for trial in tuned.trials],
    }


def _trial_facts(trial: Trial) -> dict[str, Any]:
    errors = {f"{name}:{severity}": error for (name, severity), error in trial.errors.items()}
    found = dataclasses.asdict(dataclasses.replace(trial, errors={}))
    return found | {"errors": errors, "mean": trial.mean, "spread": trial.spread}
