"""For a person: the effect of closed-form filters on the data, and the cost of a call, counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ttapca.adaptation.adapter import Adapter
from ttapca.adaptation.surfaces import SpectralGains
from ttapca.errors import OptionError
from ttapca.spectral.calibration import band_means
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.support.wrapping import finally_do, temporary_patches

# The number of blocks of a bar on either side, and how many of them stand for a factor of two.
BAR = 8
BLOCKS_TO_A_DOUBLING = 2

# Gains nearer to 1 than this are called unchanged, and a band with a larger p-value usual.
UNCHANGED = 0.02
USUAL = 0.05
RARE = 0.01  # of a rise of variance that has a gain below 1, unless it is that of a mean


@dataclass(frozen=True)
class BandReport:
    """One band of neighbouring components."""

    first: int  # number of the first component, counting from 1
    last: int
    source_variance: float  # mean of a component in the source data
    test_variance: float
    gain: float  # the factor by which the filter scales the middle of the band
    p_value: float = 1.0  # twice the share of source batches of that size at least as far out

    @property
    def bar(self) -> str:
        """The gain as a bar: to the left of the middle below 1, to the right above it."""
        blocks = max(-BAR, min(BAR, round(BLOCKS_TO_A_DOUBLING * math.log2(self.gain))))
        return f"{'█' * -blocks:>{BAR}}|{'█' * blocks:<{BAR}}"

    @property
    def meaning(self) -> str:
        """The meaning of the gain, in words."""
        ratio = self.test_variance / self.source_variance
        times = f"{ratio:.2g}" if ratio < 1 else f"{ratio:.1f}"
        if ratio > 1 and self.gain > 1 - UNCHANGED and self.p_value < RARE:
            return f"{times} times the variance: a mean has moved; moved back if that is sure"
        if abs(self.gain - 1) < UNCHANGED:
            usual = "as some source batches have" if self.p_value > USUAL else "no sure shift"
            return f"{times} times the variance: {usual}; left alone"
        lost = "detail or contrast is lost; scaled up"
        cause = lost if self.gain > 1 else "noise was added; scaled down"
        return f"{times} times the variance: {cause} to {100 * self.gain:.0f} %"


@dataclass(frozen=True)
class Explanation:
    """The effect of one filter on the latest data; of several conditions, on the surest shift."""

    layer: str  # of the filter
    images: float  # on which the estimate rests; older ones count less
    p_value: float  # share of source batches of that size as far from the mean source batch
    shift: float  # how surely the data have shifted, from 0 to 1
    bands: tuple[BandReport, ...]  # from large shapes, the first components, to fine detail

    def __str__(self) -> str:
        """Return the table."""
        lines = [
            f"Filter at `{self.layer}`, by {self.images:.0f} samples: p = {self.p_value:.3f}, "
            f"shift {self.shift:.2f}",
            f"{'components':>12} {'source':>10} {'now':>10} {'gain':>6} {'':17}  meaning",
        ]
        for band in self.bands:
            lines.append(
                f"{f'{band.first}-{band.last}':>12} {band.source_variance:>10.3g} "
                f"{band.test_variance:>10.3g} {band.gain:>6.2f} {band.bar}  {band.meaning}"
            )
        return "\n".join(lines)


def explain(adapted: Adapter) -> list[Explanation]:
    """Explain the effect of each closed-form filter of an adapter, which was called before.

    `print` shows an explanation as a table.

    Example:
        >>> import ttapca
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        >>> data = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
        >>> adapted = ttapca.adapt(model, "wiener", filter=ttapca.fit(model, "0", data[:300]))
        >>> _ = adapted(data[:100] + 10 * data[300:])
        >>> explain(adapted)[0].bands[0].gain < 0.9
        True
    """
    found = [
        _explanation(each.layer, each.closed_form, adapted)
        for each in adapted.surfaces
        if isinstance(each, SpectralGains) and each.closed_form is not None
    ]
    if not found:
        raise OptionError(
            "Only closed-form gains can be explained; this adapter has none. Adapt with `wiener`, "
            "`match` or `two-sided`."
        )
    return found


def _explanation(layer: str, gain: ClosedFormGain, adapted: Adapter) -> Explanation:
    state = gain.stream.state
    skew = 0.0 if state is None else adapted.watch.facts_in(state).get("skew", 0.0)
    evidence = None if state is None else gain.evidence_in(state, skew)
    if evidence is None or state is None:
        raise OptionError("There is nothing to explain before the first batch; call the adapter.")
    source = band_means(gain.variances.double().cpu(), gain.edges)
    test = source * evidence.energies
    gains = gain.band_gains(state).tolist()
    columns = (source.tolist(), test.tolist(), gains, evidence.band_p_values.tolist())
    rows = zip(gain.edges, gain.edges[1:], *columns, strict=False)
    bands = tuple(BandReport(first + 1, *rest) for first, *rest in rows)
    shift = float(state.spectra[gain.number].shift[state.surest])
    return Explanation(layer, evidence.samples, evidence.p_value, shift, bands)


@dataclass(frozen=True)
class Cost:
    """The cost of one call of an adapter, counted."""

    parameters: int  # that gradient steps move
    forwards: float  # passes of a whole batch: views of single images add up
    backwards: int
    kept_bytes: int  # between batches, beyond the model: filters, copies, the optimiser's state
    graph_bytes: int  # activations that are held for backward passes


def measure_cost(adapter: Adapter, batch: Tensor) -> Cost:
    """Count the cost of one call with a batch, shape (batch, ...), between two resets.

    Example:
        >>> import ttapca
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        >>> cost = measure_cost(ttapca.adapt(model, "tent"), torch.randn(5, 4))
        >>> cost.parameters, cost.forwards, cost.backwards
        (16, 1.0, 1)
    """
    passes: list[int] = []
    saved: list[Tensor] = []  # all are held, so that no address is used a second time

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    adapter.reset()
    before = adapter.predictor.backwards
    with finally_do(adapter.reset), temporary_patches() as patches:
        patches.hook_input(adapter.model, lambda _, args, _kwargs: passes.append(len(args[0])))
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            adapter(batch)
        kept_bytes = sum(_bytes_by_address(adapter.kept_tensors()).values())
    graph = _bytes_by_address(saved)
    # The model's own tensors are there anyway, whether or not a graph refers to them.
    own = _bytes_by_address([*adapter.model.parameters(), *adapter.model.buffers()])
    return Cost(
        parameters=adapter.n_parameters,
        forwards=sum(passes) / len(batch),
        backwards=adapter.predictor.backwards - before,
        kept_bytes=kept_bytes,
        graph_bytes=sum(size for address, size in graph.items() if address not in own),
    )


def _bytes_by_address(tensors: list[Tensor]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
