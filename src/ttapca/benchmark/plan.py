"""`Plan`: what is to be compared, from a TOML file, a preset, or Python; and its units of work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from ttapca._checks import ListOf, Maybe, OneOf, Plain, Record, Text, Whole, conform
from ttapca.adaptation.optimisation import Stepper
from ttapca.benchmark.cells import CLEAN, SETTINGS, Cell, Setting, canonical
from ttapca.benchmark.image_source import JOINT, Condition
from ttapca.benchmark.method_options import LEARNING_RATE, SHARED, STEPS, option_rules
from ttapca.benchmark.subject import Subject
from ttapca.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, STANDARD
from ttapca.corruptions.registry import find, unknown
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, did_you_mean
from ttapca.methods.recipe import Wishes
from ttapca.methods.registry import RECIPES, check_options
from ttapca.support.parsing import LARGEST_TOML, parse_toml, read_bounded

PAPERS_METHODS = ("source", "bn", "tent", "ttapca-exp", "ttapca-relu")
PAPERS_BATCH = 200
PAPERS_COMPONENTS = 2000
METHOD_TABLE = "method"
GROUPS = {"all": CORRUPTIONS, "standard": STANDARD, "extra": EXTRA}
SHARED_OPTIONS = tuple(SHARED)


@dataclass(frozen=True)
class Plan:
    """Methods x corruptions x severities x settings x batch sizes x seeds, on one network.

    Attributes:
        model: The network: a packaged one, a file of weights, or `package.module:factory`; None
            where the caller brings one.
        data: The data set, by name or path.
        methods: Of `ttapca.RECIPES`.
        corruptions: Of `ttapca.corruptions.CORRUPTIONS`; `standard`, `extra` and `all` stand for
            several, `clean` for images that are not corrupted.
        severities: 1 to 5.
        settings: `episodic`, `online`, `continual`, `mixed`, `correlated`.
        batch_sizes: How many images make a batch.
        seeds: Of the order of the images, and of a method's own random numbers.
        steps: Gradient steps on each batch, for methods that take any; empty for their own.
        lr: Learning rate of these methods; None for each method's own, 1e-3 for the paper's.
        components: How many the filter has; empty for 2,000, or as many as there are.
        layer: Where the filter sits; None for the one that `ttapca layers` recommends.
        images: How many test images, chosen as `ttapca.datasets.choose` does; None for all.
        corrupted: A folder of the CIFAR-C layout; None to make the corrupted images.
        corruption_seed: Of the images that are made.
        method: Options of single methods, by name: its own, or `steps`, `lr`, `logits`, `guard`;
            `filter = true` puts the filter below a method that can do without.

    Raises:
        OptionError: Something makes no sense; near names are offered.

    Example:
        >>> plan = Plan(methods=("bn",), corruptions=("fog", "clean"), settings=("online",))
        >>> plan.corruptions
        ('fog', 'clean')
        >>> Plan(settings=("onlin",))
        Traceback (most recent call last):
        ttapca.errors.OptionError: A plan: `settings[0]` must be one of episodic, ... Did you...
    """

    model: str | None = None
    data: str = "cifar10"
    methods: tuple[str, ...] = PAPERS_METHODS
    corruptions: tuple[str, ...] = ("standard",)
    severities: tuple[int, ...] = (SEVERITIES[-1],)
    settings: tuple[Setting, ...] = ("episodic", "online")
    batch_sizes: tuple[int, ...] = (PAPERS_BATCH,)
    seeds: tuple[int, ...] = (0,)
    steps: tuple[int, ...] = ()
    lr: float | None = None
    components: tuple[int, ...] = ()
    layer: str | None = None
    images: int | None = None
    corrupted: str | None = None
    corruption_seed: int = 0
    method: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make tuples of all lists, and refuse what makes no sense before any work is done."""
        values = {name: getattr(self, name) for name in NAMES}
        conform(values, SCHEMA, "A plan", OptionError)
        for name in LISTS:
            object.__setattr__(self, name, tuple(dict.fromkeys(values[name])))
        object.__setattr__(self, "corruptions", _corruption_names(self.corruptions))
        for method in self.methods:
            check_options(method, ())
        for method, options in self.method.items():
            _check_method(method, options)
        _check_size(self)

    def changed(self, **values: Any) -> Plan:
        """The same plan with other values; None leaves a value as it is.

        Options of single methods are added to those that are there.
        """
        given = {name: value for name, value in values.items() if value is not None}
        own: dict[str, Mapping[str, Any]] = dict(self.method)
        for method, options in given.pop(METHOD_TABLE, {}).items():
            own[method] = {**own.get(method, {}), **options}
        return dataclasses.replace(self, **given, method=own)


_NAME = Text(1000)
_SEED = Whole(0)
MOST_MEASUREMENTS = 100_000  # a day and a night, at a second each
SCHEMA = Record(
    optional={
        "model": Maybe(_NAME),
        "data": _NAME,
        "methods": ListOf(_NAME, 1),
        "corruptions": ListOf(_NAME, 1),
        "severities": ListOf(Whole(SEVERITIES[0], SEVERITIES[-1]), 1),
        "settings": ListOf(OneOf(SETTINGS), 1),
        "batch_sizes": ListOf(Whole(1, 10**6), 1),
        "seeds": ListOf(_SEED, 1),
        "steps": ListOf(STEPS),
        "lr": Maybe(LEARNING_RATE),
        "components": ListOf(Whole(1, 10**9)),
        "layer": Maybe(_NAME),
        "images": Maybe(Whole(1, 10**9)),
        "corrupted": Maybe(_NAME),
        "corruption_seed": _SEED,
        METHOD_TABLE: Record(others=Record(others=Plain())),
    }
)
NAMES = tuple(SCHEMA.optional)
LISTS = tuple(name for name, rule in SCHEMA.optional.items() if isinstance(rule, ListOf))


def presets() -> dict[str, Path]:
    """Names and files of the plans that ship with the package.

    Example:
        >>> sorted(presets())
        ['demo', 'paper-rank', 'paper-steps', 'paper-table1', 'paper-table2', 'paper-tables']
    """
    folder = Path(str(resources.files("ttapca.benchmark") / "presets"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_preset(name: str) -> Plan:
    """Read a plan that ships with the package.

    Raises:
        OptionError: There is none of that name.

    Example:
        >>> read_preset("paper-table2").methods
        ('tent', 'ttapca-exp', 'ttapca-relu')
    """
    known = presets()
    if name not in known:
        raise OptionError(
            f"A preset is one of {', '.join(known)}; found `{name}`.{did_you_mean(name, known)}"
        )
    return read_plan(known[name])


def read_plan(path: Path | str) -> Plan:
    """Read a plan from a TOML file.

    Args:
        path: The file: the attributes of `Plan` as keys, options of methods under `[method.NAME]`.

    Raises:
        DataNotFoundError: There is no such file.
        DataFormatError: It is no TOML, or too large or too deep to be a plan.
        OptionError: A key is unknown, or a value makes no sense.
    """
    path = Path(path)
    try:
        text = read_bounded(path, DataFormatError, largest=LARGEST_TOML)
    except OSError as error:
        raise DataNotFoundError(f"Cannot read the plan {path}: {error.strerror}.") from error
    values = parse_toml(text, str(path), DataFormatError)
    conform(values, SCHEMA, str(path), OptionError)
    try:
        return Plan(**values)
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from error


@dataclass(frozen=True)
class Unit:
    """What is run and saved in one go: one result, or several that share an adaptation.

    Attributes:
        cells: The keys of the results; they differ in corruption and severity only.
    """

    cells: tuple[Cell, ...]

    @property
    def conditions(self) -> list[Condition]:
        """Corruptions and severities, in the order of the stream."""
        return [(cell.corruption, cell.severity) for cell in self.cells]

    @property
    def images(self) -> int:
        """How many images go through the network."""
        return sum(cell.images for cell in self.cells)


def expand(plan: Plan, subject: Subject) -> list[Unit]:
    """The units of a plan, each once: all methods for one corruption, then the next corruption.

    Raises:
        OptionError: An option of a method makes no sense.
        NotEnoughDataError: The filter has fewer components than the plan asks for.
    """
    single = [setting for setting in plan.settings if setting not in JOINT]
    joint = [setting for setting in plan.settings if setting in JOINT]
    most = subject.fitted.n_components_ if subject.fitted else PAPERS_COMPONENTS
    ranks = plan.components or (min(PAPERS_COMPONENTS, most),)
    units: list[Unit] = []
    for severity in plan.severities:
        conditions = [(name, 0 if name == CLEAN else severity) for name in plan.corruptions]
        for settings, stream in (*((single, [one]) for one in conditions), (joint, conditions)):
            for seed, size, setting, rank, steps, method in product(
                plan.seeds, plan.batch_sizes, settings, ranks, plan.steps or (None,), plan.methods
            ):
                key = {
                    "model": subject.name,
                    "weights": subject.weights,
                    "data": subject.data,
                    "corrupted": _origin(plan, subject, setting),
                    "setting": setting,
                    "method": method,
                    "batch_size": size,
                    "images": len(subject.source.clean),
                    "seed": seed,
                    **_method_facts(plan, subject, method, rank, steps),
                }
                units.append(Unit(tuple(Cell(corruption=n, severity=s, **key) for n, s in stream)))
    return list(dict.fromkeys(units))  # a method without a filter is the same at every rank


def _origin(plan: Plan, subject: Subject, setting: Setting) -> str:
    """Where the images come from; where corruptions share an adaptation, all of them count."""
    name = subject.source.name
    if setting in JOINT and plan.corruptions != STANDARD:
        return f"{name}, among {' '.join(plan.corruptions)}"
    return name


def _method_facts(
    plan: Plan, subject: Subject, method: str, components: int, steps: int | None
) -> dict[str, Any]:
    """The part of a key that a method decides: it is asked what it would do."""
    given = dict(plan.method.get(method, {}))
    filtered = RECIPES[method].needs_filter or given.pop("filter", False)
    fitted = subject.filter(components) if filtered else None
    wishes = Wishes(fitted, given.pop("steps", steps), given.pop("lr", plan.lr))
    provided = subject.provided.get(method, {})
    own = {name: value for name, value in given.items() if name not in SHARED_OPTIONS}
    mover = RECIPES[method].plan(wishes, **{**provided, **own}).mover
    moves = mover is not None and mover.descent is not None
    return {
        "options": canonical({**subject.stated.get(method, {}), **given}),
        "layer": subject.place_of(fitted) if fitted else "",
        "components": components if fitted else 0,
        "steps": mover.steps if isinstance(mover, Stepper) else int(moves),
        "lr": mover.descent.lr if mover is not None and mover.descent is not None else 0.0,
    }


def _check_size(plan: Plan) -> None:
    kinds = (plan.methods, plan.corruptions, plan.severities, plan.settings, plan.batch_sizes)
    others = (plan.seeds, plan.steps or (None,), plan.components or (None,))
    count = math.prod(len(values) for values in (*kinds, *others))
    if count > MOST_MEASUREMENTS:
        raise OptionError(
            f"A plan asks for at most {MOST_MEASUREMENTS:,} measurements, the product of its "
            f"lists; found {count:,}. Make several plans of it; they can share one file of results."
        )


def _corruption_names(words: tuple[str, ...]) -> tuple[str, ...]:
    names: list[str] = []
    for word in words:
        try:
            names.extend([CLEAN] if word == CLEAN else GROUPS.get(word) or [find(word).name])
        except OptionError:
            raise unknown(word, (*CORRUPTIONS, *GROUPS, CLEAN)) from None
    return tuple(dict.fromkeys(names))


def _check_method(method: str, options: Mapping[str, Any]) -> None:
    check_options(method, [name for name in options if name not in SHARED_OPTIONS])
    if "seed" in options:
        raise OptionError(f"The seed of `{method}` is that of the plan: give `seeds` instead.")
    rules = option_rules(method)
    for name, value in options.items():
        if name in rules:
            conform(value, rules[name], "A plan", OptionError, at=f"method.{method}.{name}")
