"""`Plan`: what is to be compared, from a TOML file, a preset, or Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from ttapca._checks import (
    Flag,
    ListOf,
    Maybe,
    Number,
    OneOf,
    Plain,
    Record,
    Rule,
    Text,
    Whole,
    conform,
)
from ttapca.adaptation.guards import GuardAction
from ttapca.benchmark.cells import CLEAN, SETTINGS, Setting
from ttapca.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, STANDARD
from ttapca.corruptions.catalogue import find, unknown
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError, did_you_mean
from ttapca.methods.method import registration
from ttapca.support.parsing import LARGEST_TOML, parse_toml, read_bounded

PAPERS_METHODS = ("source", "bn", "tent", "ttapca-exp", "ttapca-relu")
PAPERS_BATCH = 200
PAPERS_COMPONENTS = 2000
METHOD_TABLE = "method"
GROUPS = {"all": CORRUPTIONS, "standard": STANDARD, "extra": EXTRA}
LEARNING_RATE = Number(above=0, high=1e9)
STEPS = Whole(1, 10**6)
# What a plan may say of a method beside its own options: whether it has a filter, and a guard.
BESIDE: dict[str, Rule] = {"filter": Flag(), "guard": OneOf(get_args(GuardAction))}


@dataclass(frozen=True)
class Plan:
    """Methods x corruptions x severities x settings x batch sizes x seeds, on one network.

    Attributes:
        model: The network, by name or file; None where the caller brings one.
        data: The data set, by name or path.
        methods: Of `ttapca.METHODS`.
        corruptions: Of `ttapca.corruptions.CORRUPTIONS`; `standard`, `extra` and `all` stand for
            several, `clean` for the images as they are.
        severities: 1 to 5.
        settings: `episodic`, `online`, `continual`, `mixed`, `correlated`.
        batch_sizes: Images a batch.
        seeds: Of the order of the stream and of a method's own chance.
        steps: Gradient steps on each batch; empty for each method's own.
        lr: Learning rate; None for each method's own, which is 1e-3 for those of the paper.
        components: Of the filter; empty for 2,000, or as many as there are.
        layer: Where the filter sits; None for the one that `ttapca layers` recommends.
        images: So many test images, as `ttapca.datasets.choose` takes them; None for all.
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
        """Give lists their one form, and refuse what makes no sense before any work is done."""
        values = {name: getattr(self, name) for name in NAMES}
        conform(values, SCHEMA, "A plan", OptionError)
        for name in LISTS:
            object.__setattr__(self, name, tuple(dict.fromkeys(values[name])))
        object.__setattr__(self, "corruptions", _corruption_names(self.corruptions))
        for method in self.methods:
            registration(method)
        for method, options in self.method.items():
            _check_method(method, options)
        _check_size(self)

    def changed(self, **values: Any) -> Plan:
        """The same plan with some values of one's own; None leaves a value as it is.

        Options of single methods are added to those that are there.
        """
        given = {name: value for name, value in values.items() if value is not None}
        own: dict[str, Mapping[str, Any]] = dict(self.method)
        for method, options in given.pop(METHOD_TABLE, {}).items():
            own[method] = {**own.get(method, {}), **options}
        return dataclasses.replace(self, **given, method=own)


_NAME = Text(1000)
_SEED = Whole(0)
MOST_CELLS = 100_000  # a day and a night, at a second each
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
    """The plans that ship with the package: names and files.

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


def _check_size(plan: Plan) -> None:
    kinds = (plan.methods, plan.corruptions, plan.severities, plan.settings, plan.batch_sizes)
    others = (plan.seeds, plan.steps or (None,), plan.components or (None,))
    cells = math.prod(len(values) for values in (*kinds, *others))
    if cells > MOST_CELLS:
        raise OptionError(
            f"A plan has at most {MOST_CELLS:,} cells, the product of its lists; found {cells:,}. "
            "Make several plans of it; they can share one file of results."
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
    found = registration(method)
    found.check_names([name for name in options if name != "guard"])
    if "guard" in options and not found.method.learns:
        raise OptionError(f"`guard` would have no effect: `{method}` learns nothing.")
    if "seed" in options:
        raise OptionError(f"The seed of `{method}` is that of the plan: give `seeds` instead.")
    rules = {**found.rules, **BESIDE}
    for name, value in options.items():
        conform(value, rules[name], "A plan", OptionError, at=f"method.{method}.{name}")
