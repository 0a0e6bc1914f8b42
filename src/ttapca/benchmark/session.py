"""`Benchmark`: load a network and images by name, fit or find the filter, and run a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ttapca
from ttapca import networks
from ttapca.benchmark.filters import FIT_BATCH, kept_filter, recommended_layer, usual_fit
from ttapca.benchmark.measurement import check_shape
from ttapca.benchmark.plan import Plan, Unit, expand
from ttapca.benchmark.results import Results
from ttapca.benchmark.rows import CLEAN, Cell, Fingerprint, Row
from ttapca.benchmark.running import run
from ttapca.benchmark.subject import (
    ImageSource,
    Subject,
    choose_measured,
    corrupted_fingerprints,
    filter_fingerprint,
    images_fingerprint,
)
from ttapca.corruptions.catalogue import table_in_words
from ttapca.datasets import CIFAR10_500, FROST, Choice, Images, Split, TensorBatches, choose, load
from ttapca.engines import Engine, engine_of
from ttapca.errors import NotEnoughDataError, OptionError
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.networks.evaluation import predict_all
from ttapca.networks.external import is_factory, is_hub_name
from ttapca.networks.network import ImageNetwork
from ttapca.networks.source import NetworkSource, option_words
from ttapca.spectral.basis import Dense
from ttapca.support.progress import Reporter

TRAINING = ", training images"  # in `Cell.data`, after the name of a data set
SOURCE_IMAGES = 2000  # that `eata` learns from, as in its paper, and `pea` measures


@dataclass(eq=False)
class Benchmark:
    """A plan, its network and its data: `ttapca bench` in Python.

    Attributes:
        plan: The methods, and the conditions to compare them in.
        network: A network of your own, or a source of one; by default the plan's `model`.
        filter: The folder of a saved filter; by default the one that ships with the network, or a
            new one, which is kept beside the results.
        root: The folder that `ttapca data get` fills: data sets, and the photographs of frost.
        folder: Where the data sets are, if not in `root`.
        size: Side of the centre that is cut out of pictures.
        shorter_side: Pictures are first brought to this shorter side; `size` by default.
        reporter: Told how it goes.
        split: The images that are measured: for testing, or the last of those for training.

    Example:
        >>> import tempfile
        >>> plan = Plan("digits", "digits", ("source", "bn"), ("fog",), settings=("online",))
        >>> rows = Benchmark(plan).run(Path(tempfile.mkdtemp()) / "results.sqlite")
        >>> [(row.cell.method, row.outcome.status) for row in rows]
        [('source', 'done'), ('bn', 'done')]
    """

    plan: Plan
    network: nn.Module | NetworkSource | None = None
    filter: Path | str | None = None
    root: Path | str | None = None
    folder: Path | str | None = None
    size: int | None = None
    shorter_side: int | None = None
    reporter: Reporter = field(default_factory=Reporter)
    split: Split = "test"
    _read: dict[Split, Images] = field(default_factory=dict, init=False, repr=False)

    def run(
        self,
        to: Path | str,
        *,
        retry_failed: bool = False,
        engine: Engine | str | None = None,
    ) -> list[Row]:
        """Make the measurements that are not in a file of results yet; return all rows of the plan.

        Args:
            to: The file; it is made if there is none.
            retry_failed: Whether to repeat measurements that failed before.
            engine: `joblib:4` for four processes, `dask://HOST:PORT` for a cluster; see
                `ttapca.engines`.
        """
        to = Path(to)
        engine = engine_of(engine) if engine is None or isinstance(engine, str) else engine
        subject = self.prepare(to)
        units = expand(self.plan, subject)
        with Results(to) as results:  # not before: a plan that is refused leaves no file
            run(
                units,
                subject,
                results,
                reporter=self.reporter,
                retry_failed=retry_failed,
                command=lambda unit: self._command(unit, to),
                engine=engine,
            )
            wanted = {cell for unit in units for cell in unit.cells}
            return [row for row in results.rows() if row.cell in wanted]

    def prepare(self, to: Path | str) -> Subject:
        """Return network, filter and images; a filter that is fitted now is kept beside `to`."""
        to = Path(to)
        _check_file(to, ())  # a file of something else is refused before any work
        subject = self._subject()
        corruptions = [name for name in self.plan.corruptions if name != CLEAN]
        conditions = product(corruptions, self.plan.severities)
        own = corrupted_fingerprints(subject, conditions)
        subject.fingerprints = (images_fingerprint(subject), *own)
        _check_file(to, subject.fingerprints)
        if self.plan.needs_filter:
            subject.fitted = self._fitted(subject, to)
            named = self.plan.made_for_pca
            if named and not subject.fitted.basis.principal:
                self.reporter.note(
                    f"{' and '.join(named)} are made for principal components; this filter has "
                    f"{subject.fitted.basis.kind.lower()}, so their results are not the paper's"
                )
            check_shape(subject)
            if self._saved_filter is not None:
                subject.fingerprints += (filter_fingerprint(subject, self._saved_filter),)
        if corruptions and not self.plan.corrupted:
            size = subject.source.clean.images.shape[1:3]
            self.reporter.note(table_in_words(self.plan.table, *size))
        if self.plan.images is not None:
            self.reporter.note(f"{self._chosen.selection} of `{self._data_name}`")
        return subject

    def units(self) -> list[Unit]:
        """Return the units without a fit; `Cell.components` is 0 if only the fit says it."""
        subject = self._subject()
        if self._saved_filter is not None:
            subject.fitted = ttapca.load(self._saved_filter)
        elif self.plan.needs_filter:  # a placeholder with the right layer and rank, if it is known
            count = max(self.plan.components, default=0)
            none, layer = torch.zeros(1), self._layer(subject.network)
            basis = Dense(none.expand(1, count))
            subject.fitted = FittedFilter(
                layer, basis, (1,), (1,), none, none, torch.ones(count), 2, 1.0, route="exact"
            )
        return expand(self.plan, subject)

    @property
    def _origin(self) -> nn.Module | NetworkSource:
        if self.network is not None:
            return self.network
        if self.plan.model is None:
            raise OptionError("A benchmark needs a network: name one, or pass it as `network=`.")
        return NetworkSource(self.plan.model)

    @property
    def _saved_filter(self) -> Path | None:
        """The folder of the filter; None if one is to be fitted, or none is needed."""
        if self.filter is not None:
            return Path(self.filter)
        origin, plan = self._origin, self.plan
        usual = (plan.layer, plan.route, plan.outputs) == (None, "auto", None)
        shipped = usual and plan.needs_filter and plan.data == CIFAR10_500
        return origin.shipped_filter if shipped and isinstance(origin, NetworkSource) else None

    def images(self, split: Split) -> Images:
        """Return all images of a split, which are read once."""
        if split not in self._read:
            task = f"reading {self.plan.data}"
            self.reporter.advance(task, 0, None)
            self._read[split] = load(self.plan.data, split, **self._reading)
            self.reporter.advance(task, 1, 1)
        return self._read[split]

    @property
    def _reading(self) -> dict[str, Any]:
        """How images are read."""
        folder = self.folder or self.root
        root = Path(folder).expanduser().absolute() if folder else None
        return {"root": root, "size": self.size, "shorter_side": self.shorter_side}

    @cached_property
    def _chosen(self) -> Choice:
        """Which images are measured; the setting decides about their order."""
        return choose_measured(self.images(self.split).labels, self.plan.images, self.split)

    @property
    def _data_name(self) -> str:
        """The data set as a `Cell` names it, if all its images are measured as they are."""
        return Path(self.plan.data).name + (TRAINING if self.split == "train" else "")

    def _check(self) -> None:
        """Refuse options about a filter if there is none, or about the fit of a given one."""
        plan = self.plan
        about_fit = {"layer": plan.layer is not None, "route": plan.route != "auto"}
        for name, is_given in {**about_fit, "filter": self.filter is not None}.items():
            if is_given and not plan.needs_filter:
                raise OptionError(
                    f"`{name}=` would have no effect: none of the methods has a filter. Leave it "
                    "out, or name a method that has one, such as wiener."
                )
            if is_given and name in about_fit and self.filter is not None:
                raise OptionError(
                    f"`{name}=` would have no effect: it is about fitting a filter, and one is "
                    "given with `filter=`. Leave one of the two out."
                )

    def _subject(self) -> Subject:
        self._check()
        named_network = self.named_network  # first: a mistyped name must not ask for images
        plan, chosen = self.plan, self._chosen
        if plan.images is not None and chosen.total < plan.images:
            raise NotEnoughDataError(
                f"`{plan.data}` has {chosen.total:,} {self.split} samples; asked for are "
                f"{plan.images:,}."
            )
        source = ImageSource(
            chosen.of(self.images(self.split)),
            Path(plan.corrupted).expanduser() if plan.corrupted else None,
            plan.corruption_seed,
            Path(self.root).expanduser() / FROST if self.root else None,
            None if chosen.first else chosen.rows,
            table=plan.table,
        )
        source.check_names(plan.corruptions)  # before a filter is fitted
        data = self._data_name  # other sizes, and a choice of the images, are other data
        data += "".join(f" {side}" for side in (self.size, self.shorter_side) if side is not None)
        data = f"{data}, {chosen.per_class}" if chosen.drawn else data
        filter_name: str = "" if plan.route == "auto" else plan.route
        if self._saved_filter is not None:
            filter_name = self._saved_filter.absolute().name
        subject = Subject(*named_network, data, source, filter_name=filter_name)
        if plan.outputs is not None:  # else every measurement would fail in turn
            two = TensorBatches(subject.source.clean[:2], 2)
            predict_all(subject.network, two, outputs=plan.outputs)
        self._provide(subject)
        return subject

    @cached_property
    def named_network(self) -> tuple[str, nn.Module]:
        """The network and its name; it is loaded once."""
        origin = self._origin
        if isinstance(origin, nn.Module):
            return self.plan.model or type(origin).__name__, origin
        whole = is_factory(origin.name) or is_hub_name(origin.name)
        name = origin.name if whole else Path(origin.name).name
        network = origin.load()
        # Channels last gives the same numbers but for rounding, in a third less time. Networks of
        # others may rely on the usual layout, and torch 2.13 crashes in GroupNorm's gradients.
        grouped = any(isinstance(part, nn.GroupNorm) for part in network.modules())
        if isinstance(network, ImageNetwork) and not grouped:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return name, network

    def _provide(self, subject: Subject) -> None:
        """Give methods the objects from the source domain that a plan cannot name."""
        for method in {"eata", "pea", "foa-shift"}.intersection(self.plan.methods):
            chosen = choose(self.images("train").labels, SOURCE_IMAGES)
            # Only these, which other processes may have to be sent.
            batches = TensorBatches(self.images("train").subset(chosen.rows), FIT_BATCH)
            subject.provided[method] = {"source": batches}
            if chosen.drawn:  # unless they are simply the first ones
                subject.stated[method] = {"source": str(chosen)}
        if "ttt" in self.plan.methods:
            origin = self._origin
            if isinstance(origin, nn.Module):
                raise OptionError(
                    "`ttt` needs the rotation head that its network was trained with: name a file "
                    "that `ttapca train --rotation-head LAYER` wrote, instead of a network."
                )
            rotation = networks.load_rotation(origin.file, normalisation=origin.normalisation)
            subject.provided["ttt"] = {"head": rotation.head, "split": rotation.split}

    def _layer(self, network: nn.Module) -> str:
        return self.plan.layer or recommended_layer(network, self.images("train"), self.reporter)

    def _fitted(self, subject: Subject, to: Path) -> FittedFilter:
        """Load the filter that was named or kept, or fit one now and keep it."""
        if self._saved_filter is not None:
            return ttapca.load(self._saved_filter)
        layer = self._layer(subject.network)
        plan, training = self.plan, self.images("train")
        wanted = max(plan.components, default=None)
        usual = "most" if plan.made_for_pca else "usual"
        images = training.fingerprint()[:16]  # of several data sets of one name
        parts = [subject.data, images, subject.weights, layer, str(wanted or usual)]
        parts += [word for word in (subject.filter_name, plan.outputs) if word]
        kept = to.with_name(f"{to.name}-filters") / "-".join(parts)

        batches = TensorBatches(training, FIT_BATCH)
        options: dict[str, Any] = {"route": plan.route, "outputs": plan.outputs}
        options |= {"principal": bool(plan.made_for_pca), "reporter": self.reporter}
        fit = partial(usual_fit, subject.network, layer, batches, wanted, **options)
        return kept_filter(kept, fit, self.reporter)

    def _command(self, unit: Unit, to: Path) -> list[str]:
        """Return the words that run one unit again; none if the network has no name."""
        plan, cell = self.plan, unit.cells[0]
        own = {
            "--methods": cell.method,
            "--corruptions": ",".join(dict.fromkeys(name for name, _ in unit.conditions)),
            "--severities": max(cell.severity for cell in unit.cells) or None,
            "--seeds": cell.seed,
            "--steps": cell.steps or None,
            "--lr": cell.lr or None,
            "--corrupted": plan.corrupted,
            # A folder has its images already: the command refuses a seed beside it.
            "--table": None if plan.corrupted else plan.table,
            "--corruption-seed": None if plan.corrupted else plan.corruption_seed or None,
        }
        given = plan.method.get(cell.method, {}).items()
        options = {f"{cell.method}.{n}": value for n, value in given if n not in ("steps", "lr")}
        return self.command_again("bench", (), own, options, cell, to)

    def command_again(
        self,
        command: str,
        arguments: Sequence[str],
        own: Mapping[str, object],
        options: Mapping[str, object],
        cell: Cell,
        to: Path,
    ) -> list[str]:
        """Return the words of a command that measures a cell; none if the network has no name.

        `own` are the options that only this command has, `options` the values of `--option`.
        """
        origin, plan = self._origin, self.plan
        if isinstance(origin, nn.Module):
            return []
        # A name after the path tells the filter from others at the same layer.
        layer = None if self._saved_filter else cell.layer.partition(", ")[0] or None
        # Without a rank in the plan, cosines may have been taken, and a rank would ask for PCA.
        ranked = plan.components or plan.made_for_pca or self._saved_filter
        every = {
            "--data": plan.data,
            **own,
            "--settings": cell.setting,
            "--batch-sizes": cell.batch_size,
            "--components": cell.components or None if ranked else None,
            "--layer": layer,
            "--route": plan.route if layer and plan.route != "auto" else None,
            "--outputs": plan.outputs,
            "--images": cell.images,
            "--filter": self.filter,
            **origin.words(),
            "--in": self.folder,
            "--size": self.size,
            "--shorter-side": self.shorter_side,
        }
        words = option_words(every)
        for name, value in options.items():
            words += ["--option", f"{name}={toml_value(value)}"]
        return ["ttapca", command, origin.name, *arguments, *words, "--to", str(to)]


def _check_file(to: Path, fingerprints: Sequence[Fingerprint]) -> None:
    """Refuse a file that has no results, or results on something else of the same name."""
    if to.exists():
        with Results(to) as results:
            results.check_fingerprints(fingerprints)


def toml_value(value: object) -> str:
    """Write a plain value as `--option` reads it: the JSON of a plain value is TOML as well."""
    return json.dumps(value, ensure_ascii=False)
