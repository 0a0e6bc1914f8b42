"""`ttapca bench`: compare methods on corrupted images; no measurement is made twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer import Option

from ttapca.benchmark.rows import Row
from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter, print_json, print_tables
from ttapca.engines import Engine
from ttapca.errors import OptionError
from ttapca.support.progress import counted

if TYPE_CHECKING:
    from ttapca.benchmark import Benchmark, Plan

LISTS = ("methods", "corruptions", "settings")
NUMBERS = ("severities", "batch_sizes", "seeds", "steps", "components")
AFTER_THE_LAST = "after the last finished measurement"


@dataclass(kw_only=True)
class PlanOptions:
    """Options that change single values of a plan; lists are written with commas."""

    data: arguments.DataOption = None
    methods: arguments.MethodList = None
    corruptions: Annotated[str | None, Option(autocompletion=arguments.COMPLETE_CORRUPTIONS)] = None
    severities: str | None = None
    settings: arguments.Settings = None
    batch_sizes: arguments.BatchSizes = None
    seeds: str | None = None
    steps: str | None = None
    lr: float | None = None
    components: arguments.Components = None
    layer: arguments.LayerOption = None
    route: arguments.RouteOption = None
    outputs: arguments.OutputsOption = None
    images: int | None = None
    corrupted: Annotated[str | None, Option(metavar="DIR")] = None
    table: arguments.TableOption = None
    corruption_seed: int | None = None
    option: Annotated[list[str] | None, Option(metavar="METHOD.NAME=VALUE")] = None

    def changes(self) -> dict[str, Any]:
        """Return the values of a plan by name; None for values that are not given."""
        values = dict(vars(self))
        values["method"] = _method_options(values.pop("option"))
        for name in LISTS:
            values[name] = arguments.separated(values[name])
        for name in NUMBERS:
            values[name] = arguments.whole_numbers(f"--{name.replace('_', '-')}", values[name])
        return values


def bench(
    wishes: PlanOptions,
    network: arguments.NetworkOptions,
    to: arguments.ResultsFile = Path("results.sqlite"),
    plan: Annotated[Path | None, Option(metavar="FILE")] = None,
    preset: str | None = None,
    filter: arguments.FilterOption = None,
    retry_failed: arguments.RetryFailed = False,
    jobs: arguments.Jobs = None,
    engine: arguments.EngineOption = None,
    dry_run: Annotated[bool, Option("--dry-run")] = False,
    folder: arguments.DataFolder = None,
    size: arguments.ImageSize = None,
    shorter_side: arguments.ShorterSide = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Compare methods x corruptions x settings on one network; an interrupted run is continued."""
    from ttapca.benchmark.comparisons import comparisons
    from ttapca.benchmark.plan import plan_of, preset_file, read_values
    from ttapca.benchmark.session import Benchmark
    from ttapca.benchmark.tables import setting_tables

    idle = "would have no effect: a dry run measures nothing. Leave out --json or --dry-run."
    arguments.refuse({"--json": dry_run and as_json}, idle)
    changes = wishes.changes()
    if plan is not None and preset is not None:
        raise OptionError("Give --plan FILE or --preset NAME; found both.")
    file = plan if preset is None else preset_file(preset)
    values = {} if file is None else read_values(file)
    source = network.source(default=values.get("model"))
    if source.only_data is not None:
        values.setdefault("data", source.only_data)
    chosen = plan_of(values, file or "A plan").changed(**changes)
    refuse_without_effect(chosen, changes)
    for method in changes["method"]:
        if method not in chosen.methods:
            raise OptionError(
                f"--option {method}.NAME=VALUE would have no effect: the methods to compare are "
                f"{', '.join(chosen.methods)}. Leave it out, or name `{method}` in --methods."
            )
    root = arguments.cache_root()
    benchmark = Benchmark(chosen, source, filter, root, folder, size, shorter_side)
    if dry_run:
        units = benchmark.units()
        typer.echo("\n".join(unit.title for unit in units))
        count = counted(sum(len(unit.cells) for unit in units), "measurement")
        typer.echo(f"{count}, {counted(sum(unit.images for unit in units), 'sample')}", err=True)
        return
    found = arguments.engine(jobs, engine)
    rows = run_benchmark(benchmark, to, retry_failed=retry_failed, engine=found)
    failed = failures(rows)
    if as_json:
        print_json([row.record() for row in rows])
    else:
        print_tables(Console(), setting_tables(comparisons(rows), least=1))
        lost = f", {failed:,} of them failed" if failed else ""
        typer.echo(f"{to}: {counted(len(rows), 'measurement')}{lost}")
    said = f"bench: {counted(failed, 'measurement')} failed"
    exit_if_failed(failed, "" if retry_failed else said)


def refuse_without_effect(plan: Plan, given: Mapping[str, object]) -> None:
    """Refuse values of the command line that change nothing in a comparison.

    Values in the file of a plan are not refused: --methods may name fewer methods than it was
    written for.
    """
    from ttapca.methods.method import registration

    arguments.refuse(
        {"--components": given.get("components") is not None and not plan.needs_filter},
        "would have no effect: none of the methods has a filter, as wiener has. Leave it out.",
    )
    arguments.refuse(
        {
            f"--{name.replace('_', '-')}": None not in (given.get(name), plan.corrupted)
            for name in ("corruption_seed", "table")
        },
        "would have no effect: it is for images that are made in memory, and these are read from "
        f"{plan.corrupted}. Leave it out.",
    )
    for name in ("steps", "lr"):
        takers = [each for each in plan.methods if name in registration(each).options]
        if given.get(name) is None or any(name not in plan.method.get(m, {}) for m in takers):
            continue
        own = ", ".join(f"{method}.{name}" for method in takers)
        reason = f"each method that learns has its own, {own}" if own else "no method learns"
        raise OptionError(f"--{name} would have no effect: {reason}. Leave it out.")


def failures(rows: Sequence[Row]) -> int:
    """Return how many measurements failed."""
    return sum(row.outcome.status == "failed" for row in rows)


def exit_if_failed(count: int, said: str = "") -> None:
    """End the command with exit code 1 if anything failed; say so, and how to repeat it."""
    if count and said:
        typer.echo(f"{said}; --retry-failed repeats what failed", err=True)
    if count:
        raise typer.Exit(1)


def run_benchmark(
    benchmark: Benchmark,
    to: Path,
    *,
    lines: bool = True,
    retry_failed: bool = False,
    engine: Engine | None = None,
) -> list[Row]:
    """Run a benchmark and show its progress; `lines`: whether each finished run leaves a line."""
    arguments.check_place(to)
    with ConsoleReporter("bench", lines=lines, goes_on=AFTER_THE_LAST) as reporter:
        benchmark.reporter = reporter
        return benchmark.run(to, retry_failed=retry_failed, engine=engine)


def _method_options(words: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    form = "METHOD.NAME=VALUE, such as tent.lr=0.01"
    table: dict[str, dict[str, Any]] = {}
    for name, text in arguments.method_options(words, form).items():
        method, _, option = name.rpartition(".")
        if not (method and option):
            raise OptionError(f"--option takes {form}; found `{name}={text}`.")
        table.setdefault(method, {})[option] = arguments.value_of(text)
    return table
