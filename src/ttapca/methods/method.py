"""What a method is: typed options, from which surfaces and a predictor are assembled.

A method is a frozen dataclass, registered where it is defined:

    @register("tent", paper="Wang et al. (ICLR 2021)")
    @dataclass(frozen=True, kw_only=True)
    class Tent(GradientMethod):
        'Scale and shift of the normalisation layers, learned by entropy.'

Its docstring begins with its summary and has the formula and the address of its paper, its fields
are its options, and the type of a field says which values are allowed. Checks, `ttapca methods`
and the tables of the docs are made from that.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, get_args

from ttapca._checks import Count as Count
from ttapca._checks import Maybe, OneOf, Rule, check_fields, check_option, rules_of
from ttapca._checks import NotNegative as NotNegative
from ttapca._checks import Positive as Positive
from ttapca._checks import Share as Share
from ttapca.adaptation.optimisation import DEFAULT_LEARNING_RATE, Logits, Predictor, adam
from ttapca.adaptation.surfaces import BatchNormStatistics, SpectralGains, StreamStatistics, Surface
from ttapca.adaptation.surfaces.filter_gains import known_classes
from ttapca.errors import OptionError, did_you_mean
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.gains import GainName, is_closed_form
from ttapca.spectral.source_classes import SourceClasses
from ttapca.support.outputs import OutputKind

SourceNeed = Literal["model", "data", "training"]
# For `Method.outputs`: kinds that have probabilities, and those of classes that exclude each other.
PROBABILITIES: tuple[OutputKind, ...] = ("multiclass", "binary", "multilabel")
CLASSES: tuple[OutputKind, ...] = ("multiclass", "binary")
NAMED_STATISTICS = {"source": 0.0, "batch": 1.0}


@dataclass(frozen=True)
class Mixture:
    """Statistics of batch and source, mixed by the size of the batch, the layer and the shift.

    The defaults are those of `ttapca.spectral.constants`.

    Attributes:
        first: Weight of a large batch that has surely shifted, in the first layer.
        last: The same in the last layer; in between it changes evenly.
        prior: Size of a batch that weighs half as much as a large one.
        layer_norm: Whether channels of LayerNorm are mixed as well, if a closed-form filter
            knows them. By default only if a method looks at the classes of a stream: shuffled
            streams gain from it, but without that look, streams ordered by class lose.
        alone: Weight of a single image that is very unusual, in every BatchNorm layer; a usual one
            has none. It fades as more images come, and more than `prior` have none. With
            k classes, more than ten, it is 10 / k of that.

    Example:
        >>> Mixture(first=0.5)
        Mixture(first=0.5, last=0.9, prior=16.0, layer_norm=None, alone=0.15)
    """

    first: Share = CONSTANTS.first
    last: Share = CONSTANTS.last
    prior: NotNegative = CONSTANTS.prior
    layer_norm: bool | None = None
    alone: Share = CONSTANTS.alone

    def __post_init__(self) -> None:
        """Check the values."""
        check_fields(self)


Statistics = Literal["source", "batch", "mixed"] | Share | Mixture


@dataclass(frozen=True)
class Assembly:
    """What a method is made of."""

    surfaces: list[Surface]
    predictor: Predictor | None = None  # None if surfaces compute their state in the forward pass
    memory: float = math.inf  # after this many samples, an image of a stream counts 1 / e


@dataclass(frozen=True, kw_only=True)
class Method:
    """A test-time method with its options.

    Attributes:
        needs_filter: Whether it cannot do without a fitted filter.
        learns: Whether it takes gradient steps.
        made_for_pca: Whether it is about principal components. It runs with other ones, and warns.
        outputs: The kinds of outputs that it serves.
    """

    needs_filter: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    made_for_pca: ClassVar[bool] = False
    outputs: ClassVar[tuple[OutputKind, ...]] = get_args(OutputKind)

    def __post_init__(self) -> None:
        """Check the values of all options."""
        check_fields(self)

    def assemble(self) -> Assembly:
        """Return surfaces and predictor, to be put on one model."""
        raise NotImplementedError

    def for_outputs(self, kind: OutputKind | None) -> Method:
        """Return the method for outputs of this kind; raise `OptionError` if it serves none."""
        check_option("outputs", kind, Maybe(OneOf(get_args(OutputKind))))
        if kind is None or kind in self.outputs:
            return self
        others = [name for name, each in METHODS.items() if kind in each.method.outputs]
        raise OptionError(
            f"`{type(self).__name__}` serves outputs of the kind {' or '.join(self.outputs)}; "
            f'found `outputs="{kind}"`. Choose a method that serves these: '
            f"{', '.join(f'`{name}`' for name in others)}."
        )

    def require(self, option: str, what: str) -> None:
        """Raise `OptionError` if an option was not given that the method cannot do without."""
        if getattr(self, option) is None:
            raise OptionError(f"This method needs {what}; found none. Pass some as `{option}=`.")

    def refuse(self, option: str, because: str) -> None:
        """Raise `OptionError` if an option was given that would have no effect."""
        if getattr(self, option) is not None:
            raise OptionError(f"`{option}` would have no effect: {because}. Leave it out.")


@dataclass(frozen=True, kw_only=True)
class GradientMethod(Method):
    """A method that takes gradient steps on each batch; it may have a spectral filter as well.

    Attributes:
        filter: A fitted filter, whose gains are then moved as well.
        gain: Which gains the filter has; `relu` by default. Closed-form ones are not moved: they
            follow from the data, as `statistics="mixed"` then does.
        statistics: What normalisation layers normalise with: `source`, `batch`, the weight of the
            batch between 0 and 1, or `mixed` (see `Mixture`).
        steps: Gradient steps on each batch.
        lr: Learning rate.
        logits: From `before` or `after` the update.
    """

    learns: ClassVar[bool] = True
    outputs = PROBABILITIES
    descent: ClassVar[Any] = staticmethod(adam)  # makes one from a learning rate

    filter: FittedFilter | None = field(default=None, kw_only=False)
    gain: GainName | None = None
    statistics: Statistics = "batch"
    steps: Count = 1
    lr: Positive = DEFAULT_LEARNING_RATE
    logits: Logits = "before"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.filter is None:
            self.refuse("gain", "only a filter has gains, and there is no `filter=`")

    def stepping(self) -> dict[str, Any]:
        """Return the options of a `Stepper`."""
        return {"optimizer": self.descent(self.lr), "steps": self.steps, "logits": self.logits}

    def assembly(
        self, *moved: Surface, predictor: Predictor, statistics: Sequence[Surface] | None = None
    ) -> Assembly:
        """Return statistics, the surfaces that steps move, and the gains of a filter if given."""
        # Statistics of the method's own take the place of those that the option chooses.
        gain = self.gain or "relu"
        below = [] if self.filter is None else [SpectralGains(self.filter, gain)]
        if statistics is None:
            statistics = statistics_surfaces(self.statistics, below)
        surfaces = [*statistics, *moved, *below]
        memory = CONSTANTS.memory if below and is_closed_form(gain) else math.inf
        return Assembly(surfaces, predictor, memory)


def statistics_surfaces(
    statistics: Statistics,
    below: Sequence[SpectralGains] = (),
    *,
    classes: SourceClasses | None = None,
    constants: Constants = CONSTANTS,
) -> list[Surface]:
    """Return the surfaces for a choice of statistics; a network without BatchNorm is no error."""
    # `mixed` also mixes the GroupNorm or LayerNorm layers that the filters `below` know. The part
    # that `classes` explain is taken out of the statistics of a batch.
    closed = [surface.fitted for surface in below if surface.in_closed_form]
    if statistics == "mixed":
        statistics = Mixture()
    if not isinstance(statistics, Mixture):
        weight = NAMED_STATISTICS[statistics] if isinstance(statistics, str) else statistics
        return [BatchNormStatistics(weight, required=False)]
    ends, prior = (statistics.first, statistics.last), statistics.prior
    tokens = next((each.layer_norm_ for each in closed if each.layer_norm_), {})
    if statistics.layer_norm and not tokens:
        raise OptionError(
            "`layer_norm` would have no effect: it needs a filter with closed-form gains, fitted "
            "by this version of ttapca on a model with LayerNorm. Leave it out."
        )
    if not closed:
        return [BatchNormStatistics(ends, prior=prior, required=False)]
    known = next((each.group_norm_ for each in closed if each.group_norm_), {})
    mixes_tokens = classes is not None if statistics.layer_norm is None else statistics.layer_norm
    # The more classes there are, the less it takes to mistake one for another: with a hundred of
    # them, the full weight of a single image cost clean images three points. If their number is
    # unknown, a single image has no weight.
    counted = known_classes(closed)
    share = 0.0 if counted is None else min(1.0, constants.few_classes / len(counted.shares))
    return [
        StreamStatistics(
            ends,
            prior=prior,
            alone=statistics.alone * share,
            source=known | tokens if mixes_tokens else known,
            classes=classes,
            constants=constants,
        )
    ]


def needed_filter(given: object) -> FittedFilter:
    """Return the filter of a method that needs one; raise `OptionError` if there is none."""
    if not isinstance(given, FittedFilter):
        found = "none" if given is None else f"a {type(given).__name__}"
        raise OptionError(
            f"This method needs a fitted filter; found {found}. Fit one with "
            "`ttapca.fit(model, layer, data)`, or read a saved one with `ttapca.load(path)`, and "
            "pass it as `filter=`."
        )
    return given


@dataclass(frozen=True)
class Registration:
    """A method by its name, such as `tent`."""

    name: str
    method: type[Method]
    summary: str  # one line for a person
    paper: str  # where it was published
    needs: SourceNeed  # only the model, unlabelled data, or a special training
    preset: Mapping[str, Any]  # options that the name sets
    fixed: tuple[str, ...]  # the ones among them that cannot be changed under this name

    @property
    def year(self) -> float:
        """When its paper was published: 0 if it has none, infinity for those of this library."""
        found = re.search(r"\b(?:19|20)\d\d\b", self.paper)
        return float(found[0]) if found else math.inf if self.paper else 0.0

    @property
    def url(self) -> str:
        """The address of the paper, which is the first one in the docstring."""
        found = re.search(r"https://[^\s>]+", inspect.getdoc(self.method) or "")
        return found[0].rstrip(".,;") if found else ""

    @property
    def options(self) -> dict[str, Any]:
        """All options with their defaults."""
        return {
            each.name: self.preset.get(each.name, each.default)
            for each in dataclasses.fields(self.method)
            if each.name not in self.fixed
        }

    @property
    def rules(self) -> dict[str, Rule]:
        """The rule for the value of each option."""
        rules = rules_of(self.method)
        return {name: rules[name] for name in self.options}

    def check_names(self, names: Sequence[str], beside: Sequence[str] = ()) -> None:
        """Raise `OptionError` for an option that is neither the method's nor one of `beside`."""
        known = list(self.options)
        for name in names:
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                every = f" Every method takes {', '.join(beside)}." if beside else ""
                raise OptionError(
                    f"`{self.name}` has no option `{name}`; {has}.{every}"
                    f"{did_you_mean(name, [*known, *beside])}"
                )

    def make(self, **options: Any) -> Method:
        """Return the method with these options; raise `OptionError` if one makes no sense."""
        self.check_names(list(options))
        return self.method(**{**self.preset, **options})


METHODS: dict[str, Registration] = {}
"""All methods by name: those of the literature by year, and those of this library after them."""

AnyMethod = TypeVar("AnyMethod", bound=type[Method])


def register(
    name: str,
    *,
    summary: str | None = None,
    paper: str = "",
    needs: SourceNeed = "model",
    fixed: Mapping[str, Any] | None = None,
    **preset: Any,
) -> Callable[[AnyMethod], AnyMethod]:
    """Give a method a name; see `Registration`."""
    # `fixed` holds options that the name sets and that cannot be changed, `preset` other defaults.

    def registered(method: AnyMethod) -> AnyMethod:
        said = summary or (inspect.getdoc(method) or "").partition("\n\n")[0].replace("\n", " ")
        options = {**(fixed or {}), **preset}
        METHODS[name] = Registration(
            name, method, said.rstrip("."), paper, needs, options, tuple(fixed or ())
        )
        return method

    return registered


def registration(name: object) -> Registration:
    """Return the method of this name; raise `OptionError`, with similar names, for no method."""
    if not isinstance(name, str):
        found = f"the class `{name.__name__}`" if isinstance(name, type) else type(name).__name__
        raise OptionError(
            "A method is given by its name, such as `tent`, or with its options, such as "
            f"`Tent(lr=0.01)`; found {found}."
        )
    if name not in METHODS:
        raise OptionError(
            f"There is no method `{name}`.{did_you_mean(name, METHODS)} There are: "
            f"{', '.join(METHODS)}."
        )
    return METHODS[name]
