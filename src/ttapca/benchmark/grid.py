"""From a plan to an ordered list of units of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ttapca.benchmark.cells import CLEAN, Cell, Setting, canonical
from ttapca.benchmark.image_source import Condition
from ttapca.benchmark.orders import JOINT
from ttapca.benchmark.plan import PAPERS_COMPONENTS, Plan
from ttapca.benchmark.subject import Subject
from ttapca.corruptions import STANDARD
from ttapca.methods.method import registration

WISHES = ("steps", "lr")  # they have columns of their own in a cell


@dataclass(frozen=True)
class Unit:
    """What is run, and committed, in one go: one cell, or those that share an adaptation.

    Attributes:
        cells: They differ in corruption and severity only.
    """

    cells: tuple[Cell, ...]

    @property
    def conditions(self) -> list[Condition]:
        """Corruptions and severities, in the order of the stream."""
        return [(cell.corruption, cell.severity) for cell in self.cells]

    @property
    def images(self) -> int:
        """Images that go through the network."""
        return sum(cell.images for cell in self.cells)


def expand(plan: Plan, subject: Subject) -> list[Unit]:
    """The units of a plan: each once, all methods of a condition before the next condition.

    Args:
        plan: What to compare.
        subject: What it is compared on.

    Raises:
        OptionError: An option of a method makes no sense.
        NotEnoughDataError: The filter has fewer components than the plan asks for.
    """
    single = [setting for setting in plan.settings if setting not in JOINT]
    joint = [setting for setting in plan.settings if setting in JOINT]
    cells = _Cells(plan, subject)
    units: list[Unit] = []
    for severity in plan.severities:
        conditions = [(name, 0 if name == CLEAN else severity) for name in plan.corruptions]
        for condition in conditions:
            units += [Unit(found) for found in cells.of(single, [condition])]
        units += [Unit(found) for found in cells.of(joint, conditions)]
    return list(dict.fromkeys(units))  # a method without a filter is the same at every rank


def components_of(plan: Plan, subject: Subject) -> tuple[int, ...]:
    """The ranks of the plan, or its default: the paper's, or all that the filter has."""
    if plan.components or subject.fitted is None:
        return plan.components or (PAPERS_COMPONENTS,)
    return (min(PAPERS_COMPONENTS, subject.fitted.n_components_),)


class _Cells:
    """Makes the cells of one plan on one subject."""

    def __init__(self, plan: Plan, subject: Subject) -> None:
        self.plan = plan
        self.subject = subject
        self.components = components_of(plan, subject)

    def of(
        self, settings: Sequence[Setting], conditions: Sequence[Condition]
    ) -> Iterator[tuple[Cell, ...]]:
        plan = self.plan
        steps = plan.steps or (None,)
        for seed, size, setting, rank, step, method in product(
            plan.seeds, plan.batch_sizes, settings, self.components, steps, plan.methods
        ):
            facts = self._method(method, rank, step)
            yield tuple(
                Cell(
                    model=self.subject.name,
                    weights=self.subject.weights,
                    data=self.subject.data,
                    corrupted=self._origin(setting),
                    corruption=corruption,
                    severity=severity,
                    setting=setting,
                    method=method,
                    batch_size=size,
                    images=len(self.subject.source.clean),
                    seed=seed,
                    **facts,
                )
                for corruption, severity in conditions
            )

    def _origin(self, setting: Setting) -> str:
        """Where the images come from; where corruptions share an adaptation, all of them count."""
        name = self.subject.source.name
        if setting in JOINT and self.plan.corruptions != STANDARD:
            return f"{name}, among {' '.join(self.plan.corruptions)}"
        return name

    def _method(self, method: str, components: int, steps: int | None) -> dict[str, Any]:
        """The part of a cell that a method decides: it is asked what it would do."""
        found = registration(method)
        given = dict(self.plan.method.get(method, {}))
        filtered = found.method.needs_filter or given.pop("filter", False)
        fitted = self.subject.filter(components) if filtered else None
        options = {**self.subject.provided.get(method, {}), **given}
        options.pop("guard", None)
        for name, value in (("filter", fitted), ("steps", steps), ("lr", self.plan.lr)):
            if value is not None and name in found.options:
                options.setdefault(name, value)
        made = found.make(**options)
        own = {name: value for name, value in given.items() if name not in ("steps", "lr")}
        return {
            "options": canonical({**self.subject.stated.get(method, {}), **own}),
            "layer": self.subject.place_of(fitted) if fitted else "",
            "components": components if fitted else 0,
            "steps": getattr(made, "steps", 0),
            "lr": getattr(made, "lr", 0.0),
        }
