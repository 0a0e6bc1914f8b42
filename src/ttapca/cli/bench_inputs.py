"""What `ttapca bench` compares on: network, images and filter, gathered from its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ttapca
from ttapca import networks
from ttapca.benchmark.grid import Unit
from ttapca.benchmark.image_source import ImageSource
from ttapca.benchmark.plan import PAPERS_COMPONENTS, Plan
from ttapca.benchmark.subject import Subject
from ttapca.cli.fit import recommended
from ttapca.cli.home import cache_root
from ttapca.cli.inputs import ModelChoice, read_images
from ttapca.cli.reporting import StepReporter
from ttapca.datasets import FROST, Choice, Images, TensorBatches, choose
from ttapca.errors import NotEnoughDataError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods import METHODS
from ttapca.networks.factories import is_factory
from ttapca.networks.network import ImageNetwork
from ttapca.spectral.basis import Dense

FIT_BATCH = 250
SOURCE_IMAGES = 2000  # that `eata` learns from, as in its paper


@dataclass(frozen=True)
class Inputs:
    """What the user has named, and how it becomes a subject.

    Attributes:
        choice: The network.
        plan: What to compare.
        to: The file of results; filters that are fitted are kept beside it.
        filter: A fitted filter, where one was named.
        folder: Where data sets lie, if not in the cache.
        size: Side to resize pictures to.
    """

    choice: ModelChoice
    plan: Plan
    to: Path
    filter: Path | None = None
    folder: Path | None = None
    size: int | None = None

    def subject(self, *, fit: bool) -> Subject:
        """Load everything, and fit the filter where one is needed and none is kept."""
        plan, name = self.plan, self.choice.name
        chosen = self.chosen
        if plan.images is not None and chosen.total < plan.images:
            raise NotEnoughDataError(
                f"`{plan.data}` has {chosen.total:,} test images; asked for are {plan.images:,}."
            )
        corrupted = Path(plan.corrupted).expanduser() if plan.corrupted else None
        subject = Subject(
            name if is_factory(name) else Path(name).name,
            _in_fast_layout(self.choice.load()),
            self._data_name,
            ImageSource(
                chosen.of(self._test),
                corrupted,
                plan.corruption_seed,
                cache_root() / FROST,
                None if chosen.first else chosen.rows,
            ),
            filter_name="" if self.filter is None else self.filter.absolute().name,
            provided=self._provided(),
            stated=self._stated(),
        )
        if self._filtered:
            subject.fitted = self._filter(subject) if fit else self._stand_in(subject)
        return subject

    def command(self, unit: Unit) -> list[str]:
        """The words that run one unit again."""
        cell, plan = unit.cells[0], self.plan
        corruptions = ",".join(dict.fromkeys(name for name, _ in unit.conditions))
        words: dict[str, Any] = {
            "--data": plan.data,
            "--methods": cell.method,
            "--corruptions": corruptions,
            "--severities": max(cell.severity for cell in unit.cells) or None,
            "--settings": cell.setting,
            "--batch-sizes": cell.batch_size,
            "--seeds": cell.seed,
            "--steps": cell.steps or None,
            "--lr": cell.lr or None,
            "--components": cell.components or None,
            "--layer": cell.layer or None if self.filter is None else None,
            "--images": cell.images,
            "--corrupted": plan.corrupted,
            "--corruption-seed": plan.corruption_seed or None,
            "--filter": self.filter,
            "--weights": self.choice.weights,
            "--architecture": self.choice.architecture,
            "--normalise": self.choice.normalise,
            "--mean": self.choice.mean,
            "--std": self.choice.std,
            "--in": self.folder,
            "--size": self.size,
        }
        given = [str(part) for pair in words.items() if pair[1] is not None for part in pair]
        for name, value in plan.method.get(cell.method, {}).items():
            if name not in ("steps", "lr"):
                given += ["--option", f"{cell.method}.{name}={_toml(value)}"]
        return ["ttapca", "bench", self.choice.name, *given, "--to", str(self.to)]

    @property
    def _filtered(self) -> bool:
        """Whether any method of the plan has a filter."""
        return any(
            METHODS[method].method.needs_filter or self.plan.method.get(method, {}).get("filter")
            for method in self.plan.methods
        )

    @cached_property
    def _test(self) -> Images:
        return read_images(self.plan.data, "test", self.folder, size=self.size)

    @cached_property
    def chosen(self) -> Choice:
        """Which test images are used; settings decide about their order."""
        return choose(self._test.labels, self.plan.images, order="stored")

    @property
    def _data_name(self) -> str:
        """What cells call the images: other images of the same data set have another name."""
        name, chosen = Path(self.plan.data).name, self.chosen
        return f"{name}, {chosen.per_class}" if chosen.drawn else name

    @cached_property
    def _training(self) -> Images:
        return read_images(self.plan.data, "train", self.folder, size=self.size)

    def _provided(self) -> Mapping[str, Mapping[str, Any]]:
        """What some methods need of the source domain, which no text can say."""
        provided: dict[str, dict[str, Any]] = {}
        if "eata" in self.plan.methods:
            rows = self._source_images.rows
            provided["eata"] = {"source": TensorBatches(self._training, FIT_BATCH, rows)}
        if "ttt" in self.plan.methods:
            stated = self.choice.normalisation()
            rotation = networks.load_rotation(self.choice.name, normalisation=stated)
            provided["ttt"] = {"head": rotation.head, "split": rotation.split}
        return provided

    @cached_property
    def _source_images(self) -> Choice:
        return choose(self._training.labels, SOURCE_IMAGES)

    def _stated(self) -> Mapping[str, Mapping[str, str]]:
        """What cells say about source images that are not simply the first ones."""
        if "eata" in self.plan.methods and self._source_images.drawn:
            return {"eata": {"source": str(self._source_images)}}
        return {}

    def _layer(self, network: nn.Module) -> str:
        return self.plan.layer or recommended(network, self._training)

    def _filter(self, subject: Subject) -> FittedFilter:
        """The filter that was named; else the one that is kept; else one that is fitted now."""
        if self.filter is not None:
            return ttapca.load(self.filter)
        layer = self._layer(subject.network)
        wanted = max(self.plan.components, default=None)
        name = f"{subject.data}-{subject.weights}-{layer}-{wanted or 'most'}"
        kept = self.to.with_name(f"{self.to.name}-filters") / name
        if not kept.exists():
            self._fit(subject.network, layer, wanted).save(kept)
        return ttapca.load(kept)  # also when it is new, so that a resumed run rounds alike

    def _fit(self, network: nn.Module, layer: str, wanted: int | None) -> FittedFilter:
        batches = TensorBatches(self._training, FIT_BATCH)
        with StepReporter(f"fitting {layer}") as progress:
            try:
                return ttapca.fit(
                    network, layer, batches, wanted or PAPERS_COMPONENTS, progress=progress
                )
            except NotEnoughDataError:
                if wanted is not None:
                    raise
                return ttapca.fit(network, layer, batches, progress=progress)  # all there are

    def _stand_in(self, subject: Subject) -> FittedFilter:
        """A filter in name only, to list cells without fitting one."""
        if self.filter is not None:
            return ttapca.load(self.filter)
        count = max(self.plan.components, default=PAPERS_COMPONENTS)
        none = torch.zeros(1)
        layer = self._layer(subject.network)
        basis = Dense(none.expand(1, count))
        return FittedFilter(
            layer, basis, (1,), (1,), none, none, torch.ones(count), 2, 1.0, route="exact"
        )


def _in_fast_layout(network: nn.Module) -> nn.Module:
    """Lay weights out with channels last: the same numbers but for rounding, in a third less time.

    Networks of others may rely on the usual layout, and torch 2.13 crashes in the gradients of
    GroupNorm with this one.
    """
    grouped = any(isinstance(part, nn.GroupNorm) for part in network.modules())
    if isinstance(network, ImageNetwork) and not grouped:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def _toml(value: object) -> str:
    """A value as `--option` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
