"""`Health`: the state of a stream in numbers that a person or a program can look at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ttapca.adaptation.expected_error import ExpectedError, estimate_of
from ttapca.adaptation.surfaces import (
    BatchNormStatistics,
    OutlierRepair,
    SpectralGains,
    StreamStatistics,
)
from ttapca.spectral.closed_form_rule import TINY
from ttapca.spectral.stream import STATE
from ttapca.spectral.stream_state import StreamState

if TYPE_CHECKING:
    from ttapca.adaptation.adapter import Adapter

SURE_OF_ORDER = 0.8  # probability from which a line for a person says what the order is


@dataclass(frozen=True)
class BandHealth:
    """One band of neighbouring components of a filter."""

    layer: str  # of the filter
    first: int  # number of the first component, counting from 1
    last: int
    ratio: float  # size of the shift: variance in the stream over that in the source
    p_value: float  # twice the share of source batches that are at least as far out in this band


@dataclass(frozen=True, repr=False)
class Health:
    """The state of one stream. Unknown facts are None: most of them without a closed-form filter.

    Attributes:
        stream: Its name.
        images: Number of images since it started, also if it forgets after every batch.
        skipped: Number of batches that led to NaN or infinity, and so changed nothing.
        shifted: Whether the last call of `on_shift` told that a shift began; None without it.
        p_value: Share of source batches that are at least as far from the mean source batch as the
            stream, after Bonferroni for several filters; its last images count most.
        shift: How surely the data have shifted, from 0 to 1.
        size: Distance of the variances of bands from those of the source, in doublings, as the root
            of the mean square.
        bands: The same for every band of every closed-form filter, from large shapes to detail.
        composition: Share of each class in the latest predictions, with `order` or `on_shift`.
        ordered: Probability that classes stay for a while; None without `order`.
        run_length: Expected number of images for which a class stays, if classes do.
        skew: How surely the classes are not those of the source, from 0 to 1; `p_value` allows for
            it. Without `order`, 1 until classes were seen before a shift.
        conditions: Number of conditions that were told apart.
        outliers: Share of values that strayed from their neighbours; source images have some.
        expected_error: Estimated share of its last predictions that are wrong, with an interval, if
            `fit` was given labelled samples.
        expected_error_untouched: The same for the untouched network, if it was asked, too: with
            `compare=True`, or in the service's modes `shadow` and `auto`.
        implausible: Number of samples that no shift explains, such as pixels up to 255 if those of
            the source are at most 1. The untouched network predicts them, no stream learns of them.
        batch_weight: Weight of the test data in normalisation layers' statistics, on average.

    Example:
        >>> Health("camera-7", 1200, 2, p_value=0.002, shift=0.9, size=1.5, outliers=0.004)
        Health(camera-7: 1,200 samples, p = 0.002, shift 0.90 of size 1.5, 1 condition, \
outliers 0.4 %, 2 batches skipped)
    """

    stream: str
    images: int
    skipped: int
    shifted: bool | None = None
    p_value: float | None = None
    shift: float | None = None
    size: float | None = None
    bands: tuple[BandHealth, ...] = ()
    composition: tuple[float, ...] | None = None
    ordered: float | None = None
    run_length: float | None = None
    skew: float | None = None
    conditions: int = 1
    outliers: float | None = None
    batch_weight: float | None = None
    implausible: int = 0
    expected_error: ExpectedError | None = None
    expected_error_untouched: ExpectedError | None = None

    def __repr__(self) -> str:
        """Return one line for a person."""
        said = [f"{self.images:,} samples"]
        if self.shifted is not None:
            said.append("shifted" if self.shifted else "not shifted")
        if self.p_value is not None:
            said.append(f"p = {self.p_value:.3f}")
        if self.shift is not None:
            said.append(f"shift {self.shift:.2f} of size {self.size or 0.0:.1f}")
        if self.ordered is not None and self.run_length is not None:
            if self.ordered >= SURE_OF_ORDER:
                said.append(f"one class for about {self.run_length:,.0f} samples")
            else:
                said.append(
                    "classes in no order" if self.ordered <= 1 - SURE_OF_ORDER else "order unclear"
                )
        if self.skew is not None:
            said.append(f"skew {self.skew:.2f}")
        said.append(f"{self.conditions} condition{'s' * (self.conditions != 1)}")
        if self.outliers is not None:
            said.append(f"outliers {100 * self.outliers:.1f} %")
        if self.batch_weight is not None:
            said.append(f"batch statistics {100 * self.batch_weight:.0f} %")
        said += self._errors_in_words()
        if self.implausible:
            said.append(f"{self.implausible:,} implausible")
        said.append(f"{self.skipped} batch{'es' * (self.skipped != 1)} skipped")
        return f"Health({self.stream}: {', '.join(said)})"

    def _errors_in_words(self) -> list[str]:
        both = (("", self.expected_error), ("untouched ", self.expected_error_untouched))
        return [f"{which}about {100 * each.share:.0f} % wrong" for which, each in both if each]

    def to_dict(self) -> dict[str, Any]:
        """Return numbers, text, lists and dicts, as JSON and logs want them."""
        composition = None if self.composition is None else list(self.composition)
        bands = [asdict(each) for each in self.bands]
        return asdict(self) | {"bands": bands, "composition": composition}


def health_of(adapter: Adapter, name: str) -> Health:
    """Return the health of one stream of an adapter, computed now; the stream stays as it is."""
    with adapter._streams.lock:
        values = adapter._streams.values_of(name)
        facts = facts_of(adapter, values.get(STATE))
        return Health(name, int(values["images"]), int(values["skipped"]), **facts)


def facts_of(adapter: Adapter, state: StreamState | None) -> dict[str, Any]:
    """Return the facts about a stream, under names of `Health`; a method may keep no state."""
    surfaces = list(adapter.surfaces)
    fixed = [each.mean_weight for each in surfaces if isinstance(each, BatchNormStatistics)]
    weight = next((each for each in fixed if each is not None), None)
    if state is None:
        return {"batch_weight": weight}
    for each in surfaces:
        if isinstance(each, StreamStatistics):
            weight = each.mean_weight(state)
    looked = adapter.watch.facts_in(state)
    repairs = any(isinstance(each, OutlierRepair) for each in surfaces)
    return {
        **looked,
        **_shift(surfaces, state, looked.get("skew", 0.0)),
        **adapter.predictor.facts_in(state),
        "conditions": state.known_conditions,
        "outliers": float(state.outliers[0]) if repairs else None,
        "batch_weight": weight,
        "implausible": state.implausible,
        "expected_error": estimate_of(state.errors[0]),
        "expected_error_untouched": estimate_of(state.errors[1]),
    }


def _shift(surfaces: Sequence[Any], state: StreamState, skew: float) -> dict[str, Any]:
    """Return the facts of closed-form filters about a shift, under names of `Health`."""
    bands: list[BandHealth] = []
    p_values = []
    for surface in surfaces:
        gain = surface.closed_form if isinstance(surface, SpectralGains) else None
        evidence = None if gain is None else gain.evidence_in(state, skew)
        if gain is not None and evidence is not None:
            p_values.append(evidence.p_value)
            numbers = evidence.energies.tolist(), evidence.band_p_values.tolist()
            for first, last, *own in zip(gain.edges, gain.edges[1:], *numbers, strict=False):
                bands.append(BandHealth(surface.layer, first + 1, last, *own))
    if not bands:
        return {}
    squares = [math.log2(max(band.ratio, TINY)) ** 2 for band in bands]
    return {
        "p_value": joint_p_value(p_values),
        "shift": max(float(each.shift[state.surest]) for each in state.spectra),
        "size": math.sqrt(sum(squares) / len(squares)),
        "bands": tuple(bands),
    }


def joint_p_value(p_values: list[float]) -> float:
    """Return the p-value of several tests together, after Bonferroni."""
    return min(1.0, len(p_values) * min(p_values))
