"""`Plan`: the methods and conditions to compare, from TOML or Python; and its units of work."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args

from ttapca import _checks as rules
from ttapca._checks import ListOf, OneOf, Record, Text, Whole, conform
from ttapca.adaptation.guards import GuardAction
from ttapca.benchmark import paper
from ttapca.benchmark.rows import AMONG, CLEAN, JOINT, SETTINGS, Cell, Setting
from ttapca.benchmark.subject import Condition, Subject
from ttapca.corruptions import SEVERITIES, STANDARD
from ttapca.corruptions.catalogue import find_all, load_table
from ttapca.corruptions.sensors import DEGRADATIONS
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, did_you_mean
from ttapca.fitting.plan import RouteChoice
from ttapca.methods.method import registration
from ttapca.networks.evaluation import EvaluatedKind
from ttapca.support.parsing import LARGEST_TOML, parse_toml, read_bounded

RECOMMENDED = "wiener"  # compared by default, beside the methods of the paper
MOST_MEASUREMENTS = 100_000  # a day and a night, at a second each
# Names of conditions beside the corruptions of images.
OTHERS = {"sensors": DEGRADATIONS} | {each: (each,) for each in (CLEAN, *DEGRADATIONS)}
# Options that a plan has for a method beside its own.
BESIDE: dict[str, rules.Rule] = {"filter": rules.FLAG, "guard": OneOf(get_args(GuardAction))}

Names = Annotated[tuple[str, ...], ListOf(Text(), 1)]
Severities = Annotated[tuple[int, ...], ListOf(Whole(SEVERITIES[0], SEVERITIES[-1]), 1)]
Options = Mapping[str, Mapping[str, Any]]  # of methods


@dataclass(frozen=True)
class Plan:
    """Methods x corruptions x severities x settings x batch sizes x seeds, on one network.

    Attributes:
        model: A packaged network, a file of weights, or `package.module:factory`.
        data: The data set, by name or path.
        methods: Of `ttapca.METHODS`.
        corruptions: Of `ttapca.corruptions.CORRUPTIONS`, `standard`, `extra`, `all` or `clean`. Of
            series: of `ttapca.corruptions.sensors.DEGRADATIONS`, `sensors` for all, or `clean`.
        severities: 1 to 5.
        settings: How images arrive and when adaptation forgets, as `docs/bench.md` lists them.
        batch_sizes: Images per batch.
        seeds: For the order of the images, and for a method's own random numbers.
        steps: Gradient steps on each batch; empty for each method's own number.
        lr: Learning rate of methods with gradients; None for each method's own.
        components: Ranks of the filter; empty for 2,000, or all if fewer, or if cosines.
        layer: Where the filter sits; None for the layer that `ttapca layers` recommends.
        route: How the filter is fitted; see `ttapca.fit`.
        outputs: `multiclass`, `binary` or `multilabel`; None to tell by the shape of the outputs.
        images: How many test images, chosen as `ttapca.datasets.choose` does; None for all.
        corrupted: A folder in the CIFAR-C layout; None to make the corrupted images.
        table: How strong the severities of images made in memory are; see `ttapca.corruptions`.
        corruption_seed: For making corrupted images.
        method: Options of single methods, by name; `filter = true` puts a filter below one.

    Raises:
        OptionError: A value makes no sense; similar names are suggested.

    Example:
        >>> plan = Plan(methods=("bn",), corruptions=("fog", "clean"), settings=("online",))
        >>> plan.corruptions
        ('fog', 'clean')
    """

    model: str | None = None
    data: str = "cifar10"
    methods: Names = (*paper.METHODS, RECOMMENDED)
    corruptions: Names = ("standard",)
    severities: Severities = (paper.SEVERITY,)
    settings: Annotated[tuple[Setting, ...], ListOf(OneOf(SETTINGS), 1)] = ("episodic", "online")
    batch_sizes: Annotated[tuple[int, ...], ListOf(Whole(1, 10**6), 1)] = (paper.BATCH_SIZE,)
    seeds: Annotated[tuple[int, ...], ListOf(Whole(0), 1)] = (0,)
    steps: Annotated[tuple[int, ...], ListOf(Whole(1, 10**6))] = ()
    lr: Annotated[float, rules.Number(above=0, high=1e9)] | None = None
    components: Annotated[tuple[int, ...], ListOf(Whole(1, 10**9))] = ()
    layer: str | None = None
    route: RouteChoice = "auto"
    outputs: EvaluatedKind | None = None
    images: Annotated[int, Whole(1, 10**9)] | None = None
    corrupted: str | None = None
    table: str | None = None
    corruption_seed: int = 0
    method: Annotated[Options, Record(others=Record(others=rules.Plain()))] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """Turn lists into tuples, and refuse wrong values before any work is done."""
        values = {name: getattr(self, name) for name in NAMES}
        conform(values, SCHEMA, "A plan", OptionError)
        for name, rule in SCHEMA.optional.items():
            if isinstance(rule, ListOf):
                object.__setattr__(self, name, tuple(dict.fromkeys(values[name])))
        object.__setattr__(self, "corruptions", find_all(self.corruptions, OTHERS))
        if "gradual" in self.settings and set(self.corruptions) == {CLEAN}:
            raise OptionError(
                "`gradual` raises and lowers the severity of corruptions; found clean images only. "
                "Name a corruption, or take another setting."
            )
        if self.table is not None:
            load_table(self.table)
        for method in self.methods:
            registration(method)
        for method, options in self.method.items():
            check_method_options(method, options)
        lists = (self.methods, self.corruptions, self.severities, self.settings, self.seeds)
        beside = (self.batch_sizes, self.steps or (1,), self.components or (1,))
        count = math.prod(map(len, (*lists, *beside)))
        if count > MOST_MEASUREMENTS:
            raise OptionError(
                f"A plan asks for at most {MOST_MEASUREMENTS:,} measurements, the product of its "
                f"lists; found {count:,}. Make several plans, which can share a file of results."
            )

    def changed(self, **values: Any) -> Plan:
        """Return the same plan with other values; None changes nothing, `method` adds options."""
        given = {name: value for name, value in values.items() if value is not None}
        own: dict[str, Mapping[str, Any]] = dict(self.method)
        for method, options in given.pop("method", {}).items():
            own[method] = {**own.get(method, {}), **options}
        return dataclasses.replace(self, **given, method=own)

    @property
    def made_for_pca(self) -> tuple[str, ...]:
        """The methods that are about principal components."""
        return tuple(each for each in self.methods if registration(each).method.made_for_pca)

    @property
    def needs_filter(self) -> bool:
        """Whether any method of the plan has a filter."""
        return any(
            registration(method).method.needs_filter or self.method.get(method, {}).get("filter")
            for method in self.methods
        )


SCHEMA = Record(optional=rules.rules_of(Plan))
NAMES = tuple(SCHEMA.optional)


def presets() -> dict[str, Path]:
    """Return names and files of the plans that ship with the package.

    Example:
        >>> "paper-table1" in presets()
        True
    """
    folder = Path(__file__).with_name("presets")
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_preset(name: str) -> Plan:
    """Read a plan that ships with the package.

    Example:
        >>> read_preset("paper-table2").methods
        ('tent', 'ttapca-exp', 'ttapca-relu')
    """
    return read_plan(preset_file(name))


def preset_file(name: str) -> Path:
    """Return the file of a preset; raise `OptionError` if there is none of that name."""
    known = presets()
    if name not in known:
        raise OptionError(
            f"A preset is one of {', '.join(known)}; found `{name}`.{did_you_mean(name, known)}"
        )
    return known[name]


def read_plan(path: Path | str) -> Plan:
    """Read a plan from a TOML file: attributes as keys, options under `[method.NAME]`.

    Raises:
        TtapcaError: The file is missing, is no TOML, or has unknown keys or values.
    """
    return plan_of(read_values(path), path)


def read_values(path: Path | str) -> dict[str, Any]:
    """Read the values of a plan that are in a TOML file, each checked by its own rule."""
    path = Path(path)
    try:
        text = read_bounded(path, DataFormatError, largest=LARGEST_TOML)
    except OSError as error:
        raise DataNotFoundError(f"Cannot read the plan {path}: {error.strerror}.") from error
    values = parse_toml(text, str(path), DataFormatError)
    conform(values, SCHEMA, str(path), OptionError)
    return values


def plan_of(values: Mapping[str, Any], path: Path | str) -> Plan:
    """Make a plan of the values of a file; an `OptionError` names the file."""
    try:
        return Plan(**values)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Unit:
    """One measurement, or several that share an adaptation and are saved together."""

    cells: tuple[Cell, ...]  # they differ in corruption and severity only
    note: str = ""  # follows the title, such as the options of a trial

    @property
    def conditions(self) -> list[Condition]:
        """Corruptions and severities, in the order of the stream."""
        return [(cell.corruption, cell.severity) for cell in self.cells]

    @property
    def images(self) -> int:
        """How many images go through the network."""
        return sum(cell.images for cell in self.cells)

    @property
    def title(self) -> str:
        """The unit in a few words, with the values that differ from the usual ones."""
        cell = self.cells[0]
        condition = f"{cell.corruption} {cell.severity}"
        if len(self.cells) > 1:
            condition = f"{len(self.cells)} corruptions {max(c.severity for c in self.cells)}"
        words = [condition, cell.setting, cell.method]
        for name, value, usual in (
            ("rank", cell.components, 0),
            ("steps", max(cell.steps, 1), 1),
            ("batch", cell.batch_size, paper.BATCH_SIZE),
            ("seed", cell.seed, 0),
        ):
            words += [f"{name} {value}"] if value != usual else []
        return "  ".join([*words, self.note]).rstrip()


def expand(plan: Plan, subject: Subject) -> list[Unit]:
    """Return the units of a plan, each once: all methods for one corruption, then the next."""
    single = [setting for setting in plan.settings if setting not in JOINT]
    joint = [setting for setting in plan.settings if setting in JOINT and setting != "gradual"]
    units: list[Unit] = []
    for severity in plan.severities:
        conditions = [(name, 0 if name == CLEAN else severity) for name in plan.corruptions]
        for one in conditions:
            units += units_of(plan, subject, single, [one])
        units += units_of(plan, subject, joint, conditions)
    if "gradual" in plan.settings:  # all severities in one stream, whatever the plan's
        names = [name for name in plan.corruptions if name != CLEAN]
        units += units_of(plan, subject, ["gradual"], list(product(names, SEVERITIES)))
    return list(dict.fromkeys(units))  # a method without a filter is the same at every rank


def units_of(
    plan: Plan, subject: Subject, settings: Sequence[Setting], stream: Sequence[Condition]
) -> list[Unit]:
    """Return the units of a plan for conditions that share an adaptation, in some settings."""
    rank, fitted = paper.COMPONENTS, subject.fitted
    if fitted is not None:  # all cosines: they cost nothing, and noise shows in the last of them
        every = fitted.n_components_
        rank = every if fitted.route == "dct" else min(rank, every)
    units: list[Unit] = []
    for seed, size, setting, components, steps, method in product(
        plan.seeds,
        plan.batch_sizes,
        settings,
        plan.components or (rank,),
        plan.steps or (None,),
        plan.methods,
    ):
        corrupted = subject.source.name
        if setting in JOINT:  # each depends on all the others
            corrupted += _among(stream)
        shared = {
            "model": subject.name,
            "weights": subject.weights,
            "data": subject.data,
            "corrupted": corrupted,
            "setting": setting,
            "method": method,
            "batch_size": size,
            "images": len(subject.source.clean),
            "seed": seed,
            **_method_facts(plan, subject, method, components, steps),
        }
        cells = (Cell(corruption=name, severity=at, **shared) for name, at in stream)
        units.append(Unit(tuple(cells)))
    return units


def _among(stream: Sequence[Condition]) -> str:
    """Return how `Cell.corrupted` names conditions that share an adaptation."""
    # With clean images, which have no severity, that of the others is named; not the usual one,
    # which old files never name.
    names = tuple(dict.fromkeys(name for name, _ in stream))
    if names == STANDARD:
        return ""
    severities = sorted({severity for name, severity in stream if name != CLEAN})
    named = CLEAN in names and severities not in ([], [paper.SEVERITY])
    at = f" at {' '.join(map(str, severities))}" if named else ""
    return AMONG + " ".join(names) + at


def _method_facts(
    plan: Plan, subject: Subject, method: str, components: int, steps: int | None
) -> dict[str, Any]:
    """Return the part of a cell that depends on the method, which is made to know its defaults."""
    found = registration(method)
    given = dict(plan.method.get(method, {}))
    filtered = found.method.needs_filter or given.pop("filter", False)
    fitted = subject.filter(components) if filtered else None
    options = {**subject.provided.get(method, {}), **given}
    options.pop("guard", None)
    for name, value in (("filter", fitted), ("steps", steps), ("lr", plan.lr)):
        if value is not None and name in found.options:
            options.setdefault(name, value)
    made = found.make(**options)
    own = {name: value for name, value in given.items() if name not in ("steps", "lr")}
    if plan.outputs is not None:
        own["outputs"] = plan.outputs
    place = [fitted.layer, subject.filter_name] if fitted else []
    return {
        "options": json.dumps({**subject.stated.get(method, {}), **own}, sort_keys=True),
        "layer": ", ".join(filter(None, place)),
        "components": components if fitted else 0,
        "steps": getattr(made, "steps", 0),
        "lr": getattr(made, "lr", 0.0),
    }


def check_method_options(method: str, options: Mapping[str, Any], where: str = "A plan") -> None:
    """Raise `OptionError` unless a method has these options, and each value follows its rule."""
    found = registration(method)
    found.check_names([name for name in options if name != "guard"])
    if "guard" in options and not found.method.learns:
        raise OptionError(f"`guard` would have no effect: `{method}` learns nothing.")
    if "seed" in options:
        raise OptionError(f"The seed of `{method}` is that of the plan: give `seeds` instead.")
    known = {**found.rules, **BESIDE}
    for name, value in options.items():
        conform(value, known[name], where, OptionError, at=f"method.{method}.{name}")
