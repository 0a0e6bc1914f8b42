"""What `ttapca serve` serves: a network, its filter, its classes, the size of its pictures."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter
from ttapca.datasets.pictures import PictureSize
from ttapca.errors import DataNotFoundError, OptionError
from ttapca.support.parsing import read_bounded

if TYPE_CHECKING:
    from torch import nn

    from ttapca.benchmark.network_source import NetworkSource
    from ttapca.fitting.fitted_filter import FittedFilter
    from ttapca.networks.evaluation import EvaluatedKind

KEPT_FILTERS = "filters"  # a folder beside the data sets


@dataclass(frozen=True)
class ServedNetwork:
    """A network with all that a service needs to know about it.

    Attributes:
        name: As the user named it.
        model: In evaluation mode.
        fitted: Its filter.
        class_names: Empty where nobody knows them.
    """

    name: str
    model: nn.Module
    fitted: FittedFilter
    class_names: tuple[str, ...]

    def picture_size(
        self, input_shape: tuple[int, ...], shorter_side: int | None
    ) -> PictureSize | None:
        """Return how pictures are brought to the network's size; None for the usual way."""
        if shorter_side is None:
            stated = getattr(self.model, "pictures", None)  # of a network from a hub
            return stated if isinstance(stated, PictureSize) else None
        height, width = input_shape[1:] if len(input_shape) == 3 else (0, 1)
        if height != width:
            raise OptionError(
                "--shorter-side is for networks that take square pictures, of which the centre is "
                f"cut out; this one takes {' x '.join(map(str, input_shape))}. Leave it out."
            )
        return PictureSize(height, shorter_side)


def served_network(
    source: NetworkSource,
    filter: Path | None,
    classes: Path | None,
    folder: Path | None,
    outputs: EvaluatedKind | None = None,
) -> ServedNetwork:
    """Load a network, and load or fit its filter.

    Args:
        source: The network.
        filter: Folder of the filter; None for that of a packaged network, which may be fitted.
        classes: A file with the names of the classes, one a line.
        folder: Where the data sets are, if not in the cache.
        outputs: What the outputs of the network mean; by default one logit is `binary`.

    Raises:
        OptionError: There is no filter and none can be fitted, or the names do not fit.
    """
    import ttapca

    model = source.load()
    fitted = _fitted(source, model, folder) if filter is None else ttapca.load(filter)
    names = _described_names(source, model) if classes is None else _read_names(classes)
    count = _classes(model, outputs) or len(names)
    if names and len(names) != count:
        raise OptionError(
            f"There must be a name for each of the {count:,} classes; {classes or source.name} "
            f"has {len(names):,}."
        )
    return ServedNetwork(source.name, model, fitted, names)


def _classes(model: nn.Module, outputs: EvaluatedKind | None) -> int | None:
    """Return how many classes a network tells apart; None where it does not say."""
    count: int | None = getattr(model, "classes", None)
    if count is None or outputs == "multilabel":
        return count
    if outputs is not None and (outputs == "binary") != (count == 1):
        raise OptionError(
            "A network with one output is binary, and one with more is multiclass or multilabel; "
            f"found --outputs {outputs} for one with {count:,}."
        )
    return 2 if count == 1 else count


def _fitted(source: NetworkSource, model: nn.Module, folder: Path | None) -> FittedFilter:
    """Return the filter of a packaged network: one that ships, one that was kept, or a new one."""
    import ttapca
    from ttapca import networks
    from ttapca.benchmark.filters import kept_filter
    from ttapca.benchmark.network_source import fingerprint, option_words

    if source.file not in networks.packaged():
        fit = shlex.join(["ttapca", "fit", source.name, *option_words(source.words())])
        raise OptionError(
            f"A network is served with a filter of its own; none was given for `{source.name}`. "
            f"Fit one with `{fit} --data DATA --to my-filter`, and name it: --filter my-filter"
        )
    if source.shipped_filter is not None:
        return ttapca.load(source.shipped_filter)
    kept = arguments.cache_root() / KEPT_FILTERS / f"{source.file}-{fingerprint(model)}"
    with ConsoleReporter() as reporter:
        return kept_filter(kept, lambda: _fitted_now(source, model, folder, reporter), reporter)


def _fitted_now(
    source: NetworkSource, model: nn.Module, folder: Path | None, reporter: ConsoleReporter
) -> FittedFilter:
    """Fit a filter on the images that a packaged network was trained with."""
    from ttapca.benchmark.filters import FIT_BATCH, recommended_layer, usual_fit
    from ttapca.datasets import TensorBatches, load
    from ttapca.networks.checkpoints import describe_weights

    data = str(describe_weights(source.file)["data"]["name"])
    task = f"reading {data}"
    reporter.advance(task, 0, None)
    try:
        train = load(data, "train", root=folder or arguments.cache_root())
    except DataNotFoundError as error:
        raise OptionError(
            f"Without --filter, one is fitted on the images that `{source.name}` was trained with; "
            f"they are not there: {error} Or name a filter that you have: --filter DIR"
        ) from error
    reporter.advance(task, 1, 1)
    layer = recommended_layer(model, train, reporter)
    return usual_fit(model, layer, TensorBatches(train, FIT_BATCH), reporter=reporter)


def _described_names(source: NetworkSource, model: nn.Module) -> tuple[str, ...]:
    from ttapca.networks.checkpoints import describe_weights
    from ttapca.networks.external import is_factory, is_hub_name

    if is_hub_name(source.name):
        return tuple(getattr(model, "class_names", ()))
    if is_factory(source.name):
        return ()
    return tuple(describe_weights(source.file).get("class_names", ()))


def _read_names(path: Path) -> tuple[str, ...]:
    try:
        text = read_bounded(path, OptionError).decode()
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise OptionError(f"Names of classes must be text, one a line; {path} is not.") from None
    return tuple(line.strip() for line in text.splitlines() if line.strip())
