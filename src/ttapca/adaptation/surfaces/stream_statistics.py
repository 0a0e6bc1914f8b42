"""Statistics of normalisation layers that follow streams: as long as nothing shifts, the source's.

A channel is normalised by a mixture of the stream so far, with weight alpha, and the source:

    mean = (1 - alpha) m_source + alpha m_stream
    var  = (1 - alpha) v_source + alpha v_stream + alpha (1 - alpha) (m_stream - m_source)^2

alpha rises with how surely the stream has shifted, with the depth of the layer, and with N, the
number of its independent images:

    alpha = full shift N / (N + prior)        full from `first` to `last`

If classes are looked at, the part of the moments that the classes of a batch explain is taken out
first (`ttapca.spectral.source_classes`). All moments are kept around the mean of the source, where
mixtures are sums, and those of all layers side by side: a batch is added to a stream in one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.adaptation.surfaces.base import Surface, refuse_replaced
from ttapca.errors import AttachError
from ttapca.spectral.constants import CONSTANTS, Constants
from ttapca.spectral.source_classes import ClassPlan, LayerClasses, SourceClasses
from ttapca.spectral.stream import ScaleGivenBack, Stream
from ttapca.spectral.stream_batch import StreamBatch, sums_by_group
from ttapca.spectral.stream_state import TINY, LayerMoments, StreamState
from ttapca.support.modules import LayerPaths, device_and_dtype
from ttapca.support.norm_layers import (
    BatchNormKind,
    Forward,
    Moments,
    NormKind,
    SampleNormKind,
    call_every_layer,
    channel_moments,
    channels_of,
    is_sample_norm,
    moments_of_each,
    some_places,
    with_running_statistics,
)
from ttapca.support.tensors import as_on
from ttapca.support.wrapping import Wrapper


class StreamStatistics(Surface):
    """Normalises with statistics that follow streams: BatchNorm, GroupNorm and LayerNorm.

    GroupNorm and LayerNorm normalise every sample by itself, but single channels still move when
    data shift. A channel is normalised by the mixture, and then given the mean and variance of the
    source again. With the weight 0 any layer is as it was.

    `ends` are the weights of many images that have surely shifted, in the first and the last layer;
    `prior` images weigh half as much. `alone` is the weight of a single image that is very unusual,
    in BatchNorm layers with feature maps; it fades until `prior` images came. `source` has mean and
    variance of every channel of GroupNorm and LayerNorm layers before the layer's own scale and
    shift, by path, shape (2, channels).
    """

    def __init__(
        self,
        ends: tuple[float, float] = (1.0, 1.0),
        *,
        prior: float = 0.0,
        alone: float = 0.0,
        source: Mapping[str, Tensor] | None = None,
        classes: SourceClasses | None = None,
        constants: Constants = CONSTANTS,
    ) -> None:
        super().__init__()
        self.ends, self.prior, self.alone = ends, prior, alone
        self.constants = constants
        self.layers: list[LayerStatistics] = []
        self.classes: LayerClasses | None = None
        self._source, self._source_classes = dict(source or {}), classes
        self._pass: LayerPass | None = None

    def attach(self, model: nn.Module, stream: Stream | None = None) -> None:
        """Take over all BatchNorm layers with running statistics, and the layers of `source`."""
        super().attach(model, stream)
        self.layers = []
        batch_norms = with_running_statistics(model)
        paths = LayerPaths(model)
        sample_norms = self._known_sample_norms(model, paths)
        refuse_replaced([*batch_norms.values(), *(layer for layer, _ in sample_norms.values())])
        kinds: list[list[tuple[str, NormKind]]] = [
            [(path, BatchNormKind(layer)) for path, layer in batch_norms.items()],
            [(path, SampleNormKind(*known)) for path, known in sample_norms.items()],
        ]
        (first, last), channels = self.ends, 0
        weights, alone = [], []
        for some, of_one in zip(kinds, (self.alone, 0.0), strict=True):
            for number, (path, kind) in enumerate(some):
                weights.append(first + (last - first) * number / max(1, len(some) - 1))
                alone.append(of_one)
                own = slice(channels, channels + kind.channels)
                self.layers.append(LayerStatistics(self, path, kind, len(self.layers), own))
                # A hook could only compute the output a second time.
                self.patches.wrap(kind.layer, self.layers[-1])
                channels += kind.channels
        taken = [layer for layer, _ in sample_norms.values()]
        call_every_layer(model, taken, self, self.patches)
        self.weights = torch.tensor(weights, dtype=torch.float64)
        self.weights_alone = torch.tensor(alone, dtype=torch.float64)
        widths = torch.tensor([each.kind.channels for each in self.layers], dtype=torch.long)
        self.layer_of = torch.arange(len(widths)).repeat_interleave(widths)  # of each channel
        if self._source_classes is not None:
            by_path = {each.path: each.kind.channels for each in self.layers}
            known = self._source_classes.renamed(paths.find_any)
            self.classes = LayerClasses(known, by_path, self.constants)
        if self.layers:
            device, dtype = device_and_dtype(model, model)
            precise = torch.promote_types(dtype, torch.float32)
            none = torch.zeros(1, len(self.layers), dtype=torch.float64)
            moments = torch.zeros(1, 2, channels, device=device, dtype=precise)
            self.stream.declare_state(layers=LayerMoments(moments, none, none))
        if batch_norms:
            self.stream.given_back = ScaleGivenBack(sum(self.ends) / 2, self.prior, needs_two=True)

    def _known_sample_norms(
        self, model: nn.Module, paths: LayerPaths
    ) -> dict[str, tuple[nn.Module, Tensor]]:
        source = {paths.find(path): known for path, known in self._source.items()}
        for path, known in source.items():
            layer = paths.layers[path]
            if not is_sample_norm(layer) or channels_of(layer) != known.shape[1]:
                raise AttachError(
                    "The filter was fitted on a network with a GroupNorm or LayerNorm of "
                    f"{known.shape[1]} channels at `{path}`; found {layer}. Fit it on this network."
                )
        # A saved filter has them in another order than the model.
        return {
            path: (layer, source[path].to(device_and_dtype(layer, model)[0]))
            for path, layer in paths.layers.items()
            if path in source
        }

    def pass_of(self, batch: StreamBatch) -> LayerPass:
        """Return the statistics of a pass of a batch, made once for all layers."""
        found = self._pass
        if found is None or not found.is_of(batch):
            found = self._pass = LayerPass(self, batch)
            if batch.counts:
                batch.settle_layers = self._settle
        return found

    def weights_of(
        self, batch: StreamBatch, past: LayerMoments, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights with maps and without, independent images, images, (groups, layers)."""
        sizes = batch.sizes(adapted=True)[:, None].to(counts)
        fading = torch.exp(-sizes / batch.memory)
        total = past.independent.to(counts) * fading + counts
        seen = past.samples.to(counts) * fading + sizes
        shift, unusual = (each[:, None].to(counts) for each in (batch.shift, batch.unusual))
        plain = self.weights.to(counts) * shift * total / (total + self.prior).clamp(min=TINY)
        left = torch.where(seen > 0, 1 - (seen - 1) / max(self.prior, TINY), 0.0).clamp(0, 1)
        alone = self.weights_alone.to(counts) * unusual * left
        # One number says nothing about a channel, so the first image of these changes nothing.
        first = seen <= 1
        with_maps = torch.where(first & (alone == 0), 0.0, (plain + alone).clamp(max=1))
        return with_maps, torch.where(first, 0.0, plain), total, seen

    def change(self, batch: StreamBatch, other: ClassPlan) -> list[float]:
        """Return how much statistics of each stream change with another plan, from 0 to 1.

        That is the largest of any layer: of its weight, or of the share of other classes times it.
        """
        found = [0.0] * len(batch.states)
        if batch.plan is None or not self.layers:
            return found
        past, sizes = batch.layers_before(), batch.sizes(adapted=True).clamp(min=1)[:, None]
        here, there = (
            batch.summed(plan.shares.double(), adapted=True) / sizes for plan in (batch.plan, other)
        )
        differ = (here - there).abs().sum(1, keepdim=True) / 2
        weights = []
        for plan in (batch.plan, other):
            counts = batch.summed(plan.counts[:, :-1], adapted=True)
            fading = torch.exp(-batch.sizes(adapted=True) / batch.memory)[:, None]
            total = past.independent * fading + counts
            weight = self.weights * batch.shift[:, None] * total / (total + self.prior)
            weights.append((weight, counts / total.clamp(min=1)))
        (before, _), (later, new) = weights
        most = torch.maximum((before - later).abs(), later * new * differ).amax(1).tolist()
        for (stream, _), each in zip(batch.groups, most, strict=True):
            found[stream] = max(found[stream], each)
        return found

    def _settle(self, batch: StreamBatch) -> tuple[LayerMoments, Sequence[bool]] | None:
        """Return moments with this batch, less the part of classes, and which groups have any."""
        known = self.pass_of(batch)
        self._pass = None  # it holds the batch
        # The first image of all says nothing in some layers, but the next one is the second.
        begun = (known.seen <= 1) & (batch.sizes(adapted=True) > 0)[:, None]
        if not batch.layers and not batch.traced and not bool(begun.any()):
            return None
        shift, var, seen = known.together()
        if known.corrections is not None:
            less, scale = known.corrections
            shift, var = shift - less.to(shift), var * scale.to(var)
        past = known.past
        new = (known.new * seen)[:, self.layer_of].to(shift)
        newer = torch.stack([shift, var + shift.square()], 1)
        moments = past.moments.to(newer).lerp(newer, new[:, None])
        independent = torch.where(seen, known.total, past.independent.to(known.total))
        samples = torch.where(seen | begun, known.seen, past.samples.to(known.total))
        some = [] if batch.traced else (seen | begun).any(1).tolist()
        return LayerMoments(moments, independent, samples), some

    def mean_weight(self, state: StreamState) -> float | None:
        """Return the weight of the test data after the last batch, averaged over the layers."""
        if state.layers is None or state.latest >= len(state.layers):
            return None if state.layers is None else 0.0
        samples = state.layers.independent[state.latest]
        shift = state.spectra[0].shift[state.latest] if state.spectra else torch.tensor(1.0)
        weights = self.weights * shift * samples / (samples + self.prior).clamp(min=1)
        return float(weights.mean())


class LayerPass:
    """The statistics of one pass, for all layers and all groups of its batch.

    `tables` are the weights of the test data, in layers with feature maps and in others; `total`
    and `seen` the numbers of independent and of all images by now, and `new` the share of this
    batch in `total`; shape (groups, layers) each. `corrections` are the part of mean and variance
    that the classes of the batch explain, shape (groups, channels) each.
    """

    def __init__(self, surface: StreamStatistics, batch: StreamBatch) -> None:
        self._batch, self._version, self._plan = batch, batch.version, batch.plan
        self._layers = surface.layers
        self.past = batch.layers_before()
        plan, groups = batch.plan, batch.group_count
        self.corrections: Moments | None = None
        sizes = batch.sizes(adapted=True)
        counts = sizes[:, None].expand(-1, len(self._layers))
        fits = plan is not None and (batch.traced or len(plan.shares) == batch.size)
        if plan is not None and surface.classes is not None and fits:
            counts = batch.summed(plan.counts[:, :-1], adapted=True)
            shares = batch.summed(plan.shares, adapted=True)
            shares = shares / sizes.clamp(min=1)[:, None].to(shares)
            self.corrections = surface.classes.corrections(shares)
        with_maps, without, self.total, self.seen = surface.weights_of(batch, self.past, counts)
        self.new = counts / self.total.clamp(min=TINY)
        self.tables = with_maps, without
        self.single = not batch.traced and groups == 1 and batch.rows is None
        # A frozen program cannot ask for numbers either.
        self.single = self.single and not torch.compiler.is_exporting()
        self._surface, self._mixtures = surface, dict[int, tuple[Any, Sequence[Tensor]]]()
        if self.single:  # numbers are quicker to handle than tensors
            self.numbers = with_maps[0].tolist(), without[0].tolist()

    def is_of(self, batch: StreamBatch) -> bool:
        """Return whether it was made for this batch as it is now."""
        same = self._batch is batch and self._plan is batch.plan
        return same and self._version == batch.version

    def mixed(self, layer: LayerStatistics, maps: bool, own: Moments) -> Moments:
        """Return the mixture of this batch, of those before it, and of the source.

        With s and v the mean and variance of the batch, c and r the part that its classes explain,
        n its share in the stream, and p and e the moments of before, all around the source's mean,

            mean = alpha ((1 - n) p + n (s - c))
            var  = (1 - alpha) v_source + alpha ((1 - n) e + n (r v + (s - c)^2)) - mean^2

        of which all that does not depend on the layer's input is computed for all layers at once.
        `maps` says whether samples have feature maps; `own` is s and v, shape (groups, channels).
        """
        (shift, var), number = own, layer.number
        shares, tables = self._mixture(0 if maps else 1, shift)
        first, second, *explained = tables[number].unbind()
        away = shift
        if explained:
            less, scale = explained
            away, var = shift - less, var * scale
        square = torch.addcmul(var, away, away)
        if self.single:
            share = shares[number]
            mean = torch.add(first, shift, alpha=share)
            return mean, torch.add(second, square, alpha=share).addcmul_(mean, mean, value=-1)
        share = shares[:, number, None]
        mean = first + share * shift
        return mean, second + share * square - mean.square()

    def _mixture(self, which: int, like: Tensor) -> tuple[Any, Sequence[Tensor]]:
        """Return alpha n of each layer, and the other terms of `mixed` for its channels."""
        found = self._mixtures.get(which)
        if found is None:
            alpha, of = self.tables[which], self._surface.layer_of
            past = self.past.moments
            source = torch.cat([layer.kind.source(like)[1] for layer in self._layers])
            kept = (alpha * (1 - self.new))[:, of].to(like)
            parts = [kept * past[:, 0], kept * past[:, 1] + (1 - alpha)[:, of].to(like) * source]
            shares = alpha * self.new
            if self.corrections is not None:
                less, scale = (each.to(like) for each in self.corrections)
                parts[0] = parts[0] - shares[:, of].to(like) * less
                parts += [less, scale]
            numbers = shares[0].tolist() if self.single else shares.to(like)
            widths = [layer.kind.channels for layer in self._layers]
            found = self._mixtures[which] = numbers, torch.split(torch.stack(parts), widths, -1)
        return found

    def together(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and variance of this batch in all layers, and which layers have any."""
        batch = self._batch
        shifts, variances, seen = [], [], []
        for number, layer in enumerate(self._layers):
            if number in batch.layers:
                shift, var, maps = batch.layers[number]
                if not batch.traced and len(shift) != len(batch.groups):
                    streams = [stream for stream, _ in batch.groups]
                    shift, var = shift[streams], var[streams]  # before conditions were told apart
                seen.append(self.tables[0 if maps else 1][:, number] > 0)
            else:
                shift = var = self.past.moments[:, 0, layer.channels] * 0
                seen.append(shift[:, 0] > 0)
            shifts.append(shift)
            variances.append(var)
        return torch.cat(shifts, 1), torch.cat(variances, 1), torch.stack(seen, 1)


class LayerStatistics(Wrapper):
    """Runs one layer, whose `channels` are among those of all, while a surface is switched on."""

    replaces = True

    def __init__(
        self, surface: StreamStatistics, path: str, kind: NormKind, number: int, channels: slice
    ) -> None:
        self.surface, self.path, self.kind = surface, path, kind
        self.number, self.channels = number, channels

    def __call__(self, forward: Forward, /, input: Tensor) -> Any:
        """Normalise a batch; the argument has the name that torch's own layers give it."""
        surface = self.surface
        if not surface.enabled:
            return forward(input)
        batch = surface.stream.opened(input.shape[0])
        if self.path in batch.watched and self.path not in batch.means:
            # The channel means of each sample, as `fit` measures them.
            values = self.kind.values(input).detach()
            means = values.flatten(2).mean(2) if values.dim() > 2 else values
            batch.means[self.path] = means.float()
        known = surface.pass_of(batch)
        run = self._of_one_group if known.single else self._of_groups
        return run(known, batch, input, forward)

    def _of_one_group(
        self, known: LayerPass, batch: StreamBatch, x: Tensor, forward: Forward
    ) -> Any:
        maps = self.kind.has_maps(x)
        if known.numbers[0 if maps else 1][self.number] == 0.0:
            return self.kind.plain(x, forward)
        values = self.kind.values(x)
        source = self.kind.source(values)
        mean, var = channel_moments(some_places(values))
        shift, var = (mean - source[0])[None], var[None]
        self._record(batch, shift, var, maps)
        mean, var = known.mixed(self, maps, (shift, var))
        return self.kind.normalised(values, (source[0] + mean[0], var[0]), x, forward)

    def _of_groups(self, known: LayerPass, batch: StreamBatch, x: Tensor, forward: Forward) -> Any:
        maps = self.kind.has_maps(x)
        group_of = batch.group_of_each(x.shape[0])
        if batch.traced or torch.compiler.is_exporting():
            return self._of_rows(known, batch, maps, x, group_of, None, forward)
        moved = known.tables[0 if maps else 1][:, self.number] > 0
        rows = moved if group_of is None else moved[group_of.cpu()]
        filtered = batch.chosen("filtered", len(x))
        rows = rows.expand(len(x)) if filtered is None else rows & filtered.cpu()
        if not bool(rows.any()):
            return self.kind.plain(x, forward)
        counted = batch.chosen("counted", len(x))
        if bool(rows.all()):
            return self._of_rows(known, batch, maps, x, group_of, counted, forward)
        chosen, others = (each.nonzero()[:, 0].to(x.device) for each in (rows, ~rows))
        group_of, counted = (None if each is None else each[chosen] for each in (group_of, counted))
        own = self._of_rows(known, batch, maps, x[chosen], group_of, counted, forward)
        # Others pass bit for bit.
        found = own.new_empty(len(x), *own.shape[1:])
        found[chosen], found[others] = own, as_on(self.kind.plain(x[others], forward), own)
        return found

    def _of_rows(
        self,
        known: LayerPass,
        batch: StreamBatch,
        maps: bool,
        x: Tensor,
        group_of: Tensor | None,
        counted: Tensor | None,
        forward: Forward,
    ) -> Any:
        """Normalise samples, each by the statistics of its group."""
        values = self.kind.values(x)
        source = self.kind.source(values)
        if group_of is None:
            group_of = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        mean, square = moments_of_each(values, source[0])  # (samples, channels) each
        weights = mean.new_ones(mean.shape[0], 1) if counted is None else counted.to(mean)[:, None]
        rows = torch.cat([mean, square, torch.ones_like(weights)], 1) * weights
        sums = sums_by_group(rows, group_of, batch.group_count)
        # Mean and variance of each group around the mean of the source, (groups, channels) each.
        parts, size = sums / sums[:, -1:].clamp(min=1), mean.shape[1]
        shift = parts[:, :size]
        var = (parts[:, size : 2 * size] - shift.square()).clamp(min=0)
        shift, var = as_on(shift, values), as_on(var, values)
        self._record(batch, shift, var, maps)
        mean, var = known.mixed(self, maps, (shift, var))
        return self.kind.normalised_each(values, (source[0] + mean, var), group_of, x, forward)

    def _record(self, batch: StreamBatch, shift: Tensor, var: Tensor, maps: bool) -> None:
        # Of several passes of a batch, the first one counts.
        if batch.records and self.number not in batch.layers:
            batch.layers[self.number] = shift.detach(), var.detach(), maps
