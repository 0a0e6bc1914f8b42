"""Statistics that follow streams, against sums over all that a stream has shown, in float64."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import ttapca
from adapters import adapted, same
from known_shifts import followed, passed, spectrum
from oracles import images
from ttapca.errors import LayerOutputError
from ttapca.methods.method import Mixture
from ttapca.spectral.conditions import KnownConditions
from ttapca.spectral.stream import Stream
from ttapca.spectral.stream_batch import ImageRows, StreamBatch
from ttapca.spectral.stream_state import StreamState, leaves

Numbers = NDArray[np.float64]

CHANNELS, EPS = 4, 1e-5
SOURCE_MEAN, SOURCE_VAR = np.linspace(-1, 1, CHANNELS), np.linspace(0.5, 2, CHANNELS)
SCALE, SHIFT = np.linspace(0.5, 2, CHANNELS), np.linspace(-1, 1, CHANNELS)


# Layers, and what they are by definition. Values are always (images, channels, places).

SHAPES = {
    "BatchNorm": (CHANNELS, 3, 5),
    "BatchNorm of vectors": (CHANNELS,),
    "GroupNorm": (CHANNELS, 3, 5),
    "LayerNorm": (6, CHANNELS),
    "LayerNorm of vectors": (CHANNELS,),
    "LayerNorm of maps": (3, 2, CHANNELS),
}


def layer_of(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a layer with all of the numbers above, and what a filter knows of its channels."""
    layer = {
        "BatchNorm": lambda: nn.BatchNorm2d(CHANNELS),
        "BatchNorm of vectors": lambda: nn.BatchNorm1d(CHANNELS),
        "GroupNorm": lambda: nn.GroupNorm(2, CHANNELS),
        "LayerNorm": lambda: nn.LayerNorm(CHANNELS),
    }[kind if kind.startswith("Batch") else kind.split()[0]]()
    layer = layer.double().eval()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(SCALE))
        layer.bias.copy_(torch.from_numpy(SHIFT))
    if kind.startswith("BatchNorm"):
        layer.running_mean.copy_(torch.from_numpy(SOURCE_MEAN))
        layer.running_var.copy_(torch.from_numpy(SOURCE_VAR))
        return nn.Sequential(layer), {}
    return nn.Sequential(layer), {"0": torch.from_numpy(np.stack([SOURCE_MEAN, SOURCE_VAR]))}


def arranged(kind: str, x: Tensor) -> Numbers:
    """Return what a layer is given, or what it returns, with channels second."""
    values = x.detach().double().numpy()
    if kind.startswith("LayerNorm"):
        values = np.moveaxis(values, -1, 1)
    return values.reshape(len(values), CHANNELS, -1)


def values_of(kind: str, x: Tensor) -> Numbers:
    """Return what statistics are of: GroupNorm and LayerNorm normalise every image by itself."""
    values = arranged(kind, x)
    if kind.startswith("BatchNorm"):
        return values
    over = values[:, None] if kind.startswith("LayerNorm") else values.reshape(len(values), 2, -1)
    mean, var = over.mean(2, keepdims=True), over.var(2, keepdims=True)
    found: Numbers = ((over - mean) / np.sqrt(var + EPS)).reshape(values.shape)
    return found


@dataclass
class PlainStream:
    """Images of one condition of one stream, each with the weight that time has left of it."""

    kind: str
    shift: float = 1.0
    unusual: float = 0.0
    full: float = 1.0
    prior: float = 0.0
    alone: float = 0.0
    memory: float = math.inf

    def __post_init__(self) -> None:
        places = math.prod(SHAPES[self.kind]) // CHANNELS
        self.past: Numbers = np.zeros((0, CHANNELS, places))
        self.weights: Numbers = np.zeros(0)
        self.seen = 0.0

    def weight(self, images: float, seen: float) -> float:
        """Return the weight of the stream, given how many images count and how many came."""
        plain = self.full * self.shift * images / (images + self.prior)
        alone = 0.0
        if self.kind == "BatchNorm":  # a third of it for a usual image, all for an unusual one
            left = 1 - (seen - 1) / self.prior if self.prior else float(seen <= 1)
            alone = self.alone * self.unusual * min(1.0, max(0.0, left))
        return 0.0 if seen <= 1 and not alone else min(1.0, plain + alone)

    def normalised(self, x: Tensor, counted: NDArray[np.bool_] | None = None) -> Numbers:
        """Add a batch to the stream, and return what the layer makes of it."""
        values = values_of(self.kind, x)
        own = values if counted is None else values[counted]
        fading = math.exp(-len(own) / self.memory)
        weights = np.concatenate([fading * self.weights, np.ones(len(own))])
        seen = fading * self.seen + len(own)
        alpha = self.weight(weights.sum(), seen)
        mean, var = SOURCE_MEAN, SOURCE_VAR
        if alpha or seen <= 1:
            self.seen = seen
        if alpha:  # what has no weight is not looked at
            self.past, self.weights = np.concatenate([self.past, own]), weights
            share = weights / weights.sum()
            means = share @ self.past.mean(2)
            away = self.past - means[:, None]
            variances = share @ np.square(away).mean(2)
            between = np.square(means - SOURCE_MEAN)
            var = (1 - alpha) * var + alpha * variances + alpha * (1 - alpha) * between
            mean = (1 - alpha) * mean + alpha * means
        found: Numbers = (values - mean[:, None]) / np.sqrt(var + EPS)[:, None]
        if not self.kind.startswith("BatchNorm"):  # as in the source, and from there as it does
            found = found * np.sqrt(SOURCE_VAR + EPS)[:, None] + SOURCE_MEAN[:, None]
        return found * SCALE[:, None] + SHIFT[:, None]


# Streams of known shifts.


def shifted(number: int, kind: str, seed: int = 1) -> Tensor:
    """Images for a layer, not as in the source."""
    return images(number, seed, SHAPES[kind]) * 2 + 1


OPTIONS: dict[str, dict[str, Any]] = {
    "all weight": {},
    "a mixture": {"shift": 0.7, "unusual": 0.4, "full": 0.8, "prior": 6.0, "alone": 0.3},
    "none for one alone": {"shift": 0.7, "unusual": 0.4, "full": 0.8, "prior": 6.0},
    "no shift": {"shift": 0.0, "unusual": 0.4, "full": 0.8, "prior": 16.0, "alone": 0.3},
}


def surface_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the same options as the surface takes them."""
    given = dict(options)
    full = given.pop("full", 1.0)
    return {"ends": (full, full), **given}


# Single images count from the second one on; the first one does, too, if it alone has a weight.
SIZES = [[30], [5, 30, 6, 20], [9, 1, 1, 1], [1, 20], [2, 30], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("memory", [math.inf, 100.0, 7.0])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", SHAPES)
def test_a_stream_is_one_large_batch_whose_past_fades(
    kind: str, options: str, sizes: list[int], memory: float
) -> None:
    given = {**OPTIONS[options], "memory": memory}
    model, source = layer_of(kind)
    _, stream = followed(model, source=source, **surface_options(given))
    plain = PlainStream(kind, **given)
    for batch in shifted(sum(sizes), kind).split(sizes):
        found = arranged(kind, passed(model, stream, batch))
        np.testing.assert_allclose(found, plain.normalised(batch), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", SHAPES)
def test_only_the_first_pass_of_a_batch_counts(kind: str) -> None:
    """Methods may run a batch again, over other views of its images."""
    model, source = layer_of(kind)
    _, stream = followed(model, source=source)
    plain = PlainStream(kind)
    for batch in shifted(60, kind).split(20):
        stream.start_batch(20)
        with torch.no_grad():
            found = arranged(kind, model(batch))
            model(batch.flip(1) ** 3)
        stream.end_batch()
        np.testing.assert_allclose(found, plain.normalised(batch), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", SHAPES)
def test_passes_between_batches_use_the_stream_and_leave_no_mark(kind: str) -> None:
    model, source = layer_of(kind)
    _, stream = followed(model, source=source, prior=6.0)
    plain = PlainStream(kind, prior=6.0)
    first, between, second = shifted(60, kind).split(20)
    passed(model, stream, first)
    plain.normalised(first)
    before = stream.state
    with torch.no_grad():
        found = arranged(kind, model(between))
    np.testing.assert_allclose(found, copy.deepcopy(plain).normalised(between), rtol=1e-9)
    assert stream.state is before
    found = arranged(kind, passed(model, stream, second))
    np.testing.assert_allclose(found, plain.normalised(second), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_first_single_image_is_normalised_as_the_source_and_counts_for_nothing(
    kind: str,
) -> None:
    data = shifted(21, kind)
    model, source = layer_of(kind)
    expected = model(data[:1])
    _, stream = followed(model, source=source)
    assert torch.equal(passed(model, stream, data[:1]), expected)
    later = passed(model, stream, data[1:])
    model, source = layer_of(kind)
    _, stream = followed(model, source=source)
    torch.testing.assert_close(later, passed(model, stream, data[1:]), rtol=0, atol=1e-12)


def test_single_images_of_a_stream_come_to_count_as_much_as_a_batch() -> None:
    far_off = 3 * images(150, seed=9)
    batch, online = (adapted("wiener", order="shuffled") for _ in range(2))
    wanted, start = batch(far_off), adapted("source")(far_off[-1:])
    for image in far_off.split(1):
        found = online(image)
    far, near = ((each - wanted[-1:]).norm() for each in (start, found))
    assert near < 0.1 * far


@pytest.mark.parametrize(
    ("norm", "statistics"),
    [
        ("BatchNorm", Mixture(alone=0.0)),
        ("BatchNorm1d", Mixture()),
        ("GroupNorm", Mixture()),
        ("LayerNorm", Mixture(layer_norm=True)),
    ],
    ids=str,
)
def test_single_images_come_to_count_in_layers_where_one_alone_has_no_weight(
    norm: str, statistics: Mixture
) -> None:
    far_off = 3 * images(150, seed=9)
    given: dict[str, Any] = {"order": "shuffled", "statistics": statistics, "outliers": False}
    batch, online = (adapted("wiener", norm, **given) for _ in range(2))
    for image in far_off.split(1):
        online(image)
    batch(far_off)
    assert batch.health.batch_weight > 0
    assert online.health.batch_weight == pytest.approx(batch.health.batch_weight, rel=0.2)


def test_the_weight_of_a_single_image_is_a_choice() -> None:
    far_off = 3 * images(1, seed=9)
    source = adapted("wiener", statistics="source")(far_off)
    assert torch.equal(adapted("wiener", statistics=Mixture(alone=0.0))(far_off), source)
    assert not torch.equal(adapted("wiener")(far_off), source)


@pytest.mark.parametrize("unusual", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [3, 2], [16], [17], [200]], ids=str)
def test_few_images_count_without_a_sure_shift(sizes: list[int], unusual: float) -> None:
    kind, data = "BatchNorm", shifted(sum(sizes), "BatchNorm")
    model, _ = layer_of(kind)
    given: dict[str, Any] = {"ends": (0.1, 0.9), "prior": 16.0, "alone": 0.3}
    _, stream = followed(model, shift=0.0, unusual=unusual, **given)
    for batch in data.split(sizes):
        output = passed(model, stream, batch)
    # A third of the weight for a usual image, all of it for an unusual one; none from 17 on.
    weight = 0.3 * unusual * max(0.0, 1 - (len(data) - 1) / 16)
    values = arranged(kind, data).transpose(1, 0, 2).reshape(CHANNELS, -1)
    mean, var = values.mean(1), values.var(1)
    var = (1 - weight) * SOURCE_VAR + weight * var
    var += weight * (1 - weight) * (mean - SOURCE_MEAN) ** 2
    mean = (1 - weight) * SOURCE_MEAN + weight * mean
    found = (arranged(kind, output) - SHIFT[:, None]) / SCALE[:, None]
    expected = arranged(kind, data[-sizes[-1] :]) - mean[:, None]
    np.testing.assert_allclose(found, expected / np.sqrt(var + EPS)[:, None], atol=1e-10)


@pytest.mark.parametrize("shape", [(CHANNELS,), (CHANNELS, 1, 1)])
def test_an_image_of_one_number_for_each_channel_says_nothing(shape: tuple[int, ...]) -> None:
    model, _ = layer_of("BatchNorm" if len(shape) > 1 else "BatchNorm of vectors")
    data = images(1, shape=shape) * 2 + 1
    expected = model(data)
    _, stream = followed(model, shift=0.0, unusual=1.0, prior=16.0, alone=0.3)
    assert torch.equal(passed(model, stream, data), expected)


@pytest.mark.parametrize("kind", SHAPES)
def test_gradients_pass_through_the_statistics(kind: str) -> None:
    model, source = layer_of(kind)
    _, stream = followed(model, source=source, shift=0.8, prior=6.0, memory=9.0)
    before, batch = shifted(7, kind).split([4, 3])
    passed(model, stream, before)
    stream.start_batch(3)
    assert torch.autograd.gradcheck(model, (batch.requires_grad_(),))
    stream.end_batch()
    kept = [each for each in leaves(stream.state).values() if isinstance(each, Tensor)]
    assert not any(each.requires_grad for each in kept)


# All layers of a network.


def network_of_all_kinds() -> tuple[nn.Sequential, dict[str, Tensor]]:
    """Three layers of BatchNorm and two of GroupNorm, in turn."""
    norms = ["BatchNorm", "GroupNorm", "BatchNorm", "GroupNorm", "BatchNorm"]
    layers, source = [], {}
    for number, kind in enumerate(norms):
        norm, known = layer_of(kind)
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 1).double(), norm[0]]
        source |= {str(2 * number + 1): each for each in known.values()}
    generator = torch.Generator().manual_seed(4)
    model = nn.Sequential(*layers).eval().requires_grad_(False)
    for layer in model[::2]:
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
        layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator))
    return model, source


def test_weights_change_evenly_from_the_first_to_the_last_layer_of_each_kind() -> None:
    model, source = network_of_all_kinds()
    # A saved filter has its layers in another order.
    backwards = dict(reversed(source.items()))
    surface, _ = followed(model, ends=(0.1, 0.9), source=backwards, alone=0.3, prior=4.0)
    assert [layer.path for layer in surface.layers] == ["1", "5", "9", "3", "7"]
    assert surface.weights.tolist() == [0.1, 0.5, 0.9, 0.1, 0.9]
    assert surface.weights_alone.tolist() == [0.3, 0.3, 0.3, 0.0, 0.0]


def test_moments_of_all_layers_are_kept_side_by_side_around_the_mean_of_the_source() -> None:
    model, source = network_of_all_kinds()
    surface, stream = followed(model, ends=(0.2, 0.6), source=source, prior=4.0)
    seen: dict[str, Tensor] = {}
    for layer in surface.layers:
        model[int(layer.path)].register_forward_pre_hook(
            lambda _, given, path=layer.path: seen.update({path: given[0]})
        )
    passed(model, stream, shifted(9, "BatchNorm"))
    known = stream.state.layers
    assert known.moments.shape == (1, 2, 5 * CHANNELS)
    assert known.samples.tolist() == known.independent.tolist() == [[9.0] * 5]
    for layer in surface.layers:
        kind = "GroupNorm" if layer.path in source else "BatchNorm"
        away = values_of(kind, seen[layer.path]) - SOURCE_MEAN[:, None]
        found = known.moments[0, :, layer.channels]
        np.testing.assert_allclose(found[0], away.mean((0, 2)), atol=1e-12)
        np.testing.assert_allclose(found[1], np.square(away).mean((0, 2)), rtol=1e-12)


def test_the_mean_weight_is_that_of_all_layers_after_the_last_batch() -> None:
    model, source = network_of_all_kinds()
    given: dict[str, Any] = {"ends": (0.2, 0.6), "source": source, "prior": 4.0}
    surface, stream = followed(model, shift=0.5, memory=20.0, **given)
    assert surface.mean_weight(stream.state) == 0.0
    for batch in shifted(30, "BatchNorm").split(10):
        passed(model, stream, batch)
    number = 10 * (1 + math.exp(-10 / 20) + math.exp(-20 / 20))
    expected = 0.5 * 0.4 * number / (number + 4)
    assert surface.mean_weight(stream.state) == pytest.approx(expected)
    surface, stream = followed(nn.Sequential(nn.Linear(2, 2)))
    assert surface.mean_weight(stream.state) is None


# Several groups in one pass.


class Scripted:
    """Tells conditions apart by what they are said to be."""

    def told_apart(
        self, known: KnownConditions, appearances: Numbers
    ) -> tuple[KnownConditions, NDArray[np.int64], set[int]]:
        return known, appearances[:, 0].astype(np.int64), set()

    def resemblance(self, known: KnownConditions) -> float:
        del known
        return 0.0


# Shift and unusualness of each condition of each stream.
SHIFTS = [[1.0, 0.6], [0.0, 0.8], [0.3, 1.0]]
STRANGE = [[0.0, 1.0], [0.5, 0.2], [0.7, 0.0]]
GROUPS = [(stream, condition) for stream in range(3) for condition in range(2)]


@dataclass
class Mixed:
    """A batch of images of all streams and conditions, in random order."""

    images: Tensor
    stream: Tensor
    condition: Tensor
    counted: Tensor
    filtered: Tensor

    @property
    def rows(self) -> ImageRows:
        return ImageRows(self.stream, self.counted, self.filtered)

    def of(self, group: tuple[int, int]) -> Tensor:
        return (self.stream == group[0]) & (self.condition == group[1])


def mixed_batches(kind: str) -> list[Mixed]:
    """Batches with some images that are not to be remembered, or not to be adapted to."""
    generator = torch.Generator().manual_seed(2)

    def whole(most: int, size: int) -> Tensor:
        return torch.randint(most, (size,), generator=generator)

    found = []
    for number, size in enumerate((60, 41, 80)):
        stream, condition = whole(3, size), whole(2, size)
        # Every group is there, and has some image of its own.
        stream[:6] = torch.tensor([each for each, _ in GROUPS])
        condition[:6] = torch.tensor([each for _, each in GROUPS])
        counted, filtered = whole(4, size) > 0, whole(4, size) > 0
        counted[:6] = filtered[:6] = True
        place = torch.randperm(size, generator=generator)
        data = shifted(size, kind, 20 + number) * (1 + condition.view(-1, *[1] * len(SHAPES[kind])))
        parts = (each[place] for each in (data, stream, condition, counted, filtered))
        mixed = Mixed(*parts)
        for each in range(3):  # what does not count goes with the last image of its stream
            own = mixed.stream == each
            last = (own & mixed.counted).nonzero()[-1]
            mixed.condition[own & ~mixed.counted] = mixed.condition[last]
        found.append(mixed)
    return found


def states_of(stream: Stream) -> list[StreamState]:
    return [
        replace(
            stream.start,
            spectra=(spectrum(shift, unusual),),
            conditions=KnownConditions.none(1),
        )
        for shift, unusual in zip(SHIFTS, STRANGE, strict=True)
    ]


@torch.no_grad()
def passed_together(
    model: nn.Module, stream: Stream, states: list[StreamState], mixed: Mixed
) -> tuple[Tensor, list[StreamState]]:
    """Return what a model makes of images of several streams, and the states after these."""
    batch = StreamBatch(
        states, stream.start, memory=stream.memory, size=len(mixed.images), rows=mixed.rows
    )
    batch.tell_apart(Scripted(), mixed.condition[:, None].double())  # type: ignore[arg-type]
    stream.batch = batch
    output = model(mixed.images)
    stream.batch = None
    return output, batch.finish()


def same_layers(one: StreamState, other: StreamState) -> bool:
    """Whether two streams have shown the same to layers, bit for bit."""
    return same(one.layers.tensors(), other.layers.tensors())


GIVEN: dict[str, Any] = {"full": 0.8, "prior": 6.0, "alone": 0.3, "memory": 30.0}


@pytest.mark.parametrize("kind", SHAPES)
def test_groups_in_one_pass_are_normalised_as_by_definition(kind: str) -> None:
    model, source = layer_of(kind)
    _, stream = followed(model, source=source, **surface_options(GIVEN))
    plain = {
        (one, two): PlainStream(kind, shift=SHIFTS[one][two], unusual=STRANGE[one][two], **GIVEN)
        for one, two in GROUPS
    }
    states = states_of(stream)
    for mixed in mixed_batches(kind):
        output, states = passed_together(model, stream, states, mixed)
        found = arranged(kind, output)
        for group in GROUPS:
            own = (mixed.of(group) & mixed.filtered).numpy()
            assert own.any()
            counted = mixed.counted.numpy()[own]
            expected = plain[group].normalised(mixed.images[own], counted)
            np.testing.assert_allclose(found[own], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", SHAPES)
def test_groups_in_one_pass_are_normalised_as_each_alone(kind: str) -> None:
    """Each as if it were the only condition of a stream that nobody else shares a pass with."""
    model, source = layer_of(kind)
    twins = {group: copy.deepcopy(model) for group in GROUPS}
    _, stream = followed(model, source=source, **surface_options(GIVEN))
    alone = {
        (one, two): followed(
            twins[one, two],
            source=source,
            shift=SHIFTS[one][two],
            unusual=STRANGE[one][two],
            **surface_options(GIVEN),
        )[1]
        for one, two in GROUPS
    }
    states = states_of(stream)
    for mixed in mixed_batches(kind):
        output, states = passed_together(model, stream, states, mixed)
        for group in GROUPS:
            own = mixed.of(group) & mixed.filtered & mixed.counted
            expected = passed(twins[group], alone[group], mixed.images[own])
            torch.testing.assert_close(output[own], expected, rtol=1e-9, atol=1e-10)
    for (number, condition), other in alone.items():
        if condition < len(states[number].layers):
            row = states[number].layers.row(condition)
            for name, value in other.state.layers.tensors().items():
                torch.testing.assert_close(getattr(row, name), value, rtol=1e-9, atol=1e-9)
        else:  # what has never shifted is nowhere written down
            assert not other.state.layers.samples.any()


@pytest.mark.parametrize("kind", SHAPES)
def test_images_that_are_not_filtered_pass_bit_for_bit_and_say_nothing(kind: str) -> None:
    model, source = layer_of(kind)
    plain = copy.deepcopy(model)
    _, stream = followed(model, source=source, **surface_options(GIVEN))
    states = with_others = states_of(stream)
    for mixed in mixed_batches(kind):
        output, with_others = passed_together(model, stream, with_others, mixed)
        passing = ~mixed.filtered
        assert passing.any()
        assert torch.equal(output[passing], plain(mixed.images)[passing])
        assert not torch.equal(output, plain(mixed.images))
        some = Mixed(*(each[mixed.filtered] for each in vars(mixed).values()))
        alone, states = passed_together(model, stream, states, some)
        assert torch.equal(output[mixed.filtered], alone)
    assert all(same_layers(one, other) for one, other in zip(states, with_others, strict=True))
    mixed.filtered[:] = False
    output, after = passed_together(model, stream, states, mixed)
    assert torch.equal(output, plain(mixed.images))
    assert all(same_layers(one, other) for one, other in zip(states, after, strict=True))


@pytest.mark.parametrize("kind", SHAPES)
def test_images_that_are_not_remembered_go_by_what_their_stream_has_shown(kind: str) -> None:
    """By nothing but the source, if that is nothing."""
    model, source = layer_of(kind)
    plain = copy.deepcopy(model)
    _, stream = followed(model, source=source, **surface_options(GIVEN))
    new, first = states_of(stream), mixed_batches(kind)[0]
    first.condition[:] = 0
    _, later = passed_together(model, stream, new, first)
    mixed = mixed_batches(kind)[1]
    mixed.condition[:] = 0
    mixed.counted[:], mixed.filtered[:] = False, True
    output, after = passed_together(model, stream, later, mixed)
    assert not torch.allclose(output[mixed.stream == 0], plain(mixed.images)[mixed.stream == 0])
    assert all(same_layers(one, other) for one, other in zip(later, after, strict=True))
    output, after = passed_together(model, stream, new, mixed)
    torch.testing.assert_close(output, plain(mixed.images), rtol=0, atol=1e-10)
    assert all(same_layers(one, other) for one, other in zip(new, after, strict=True))


def test_a_broken_stream_leaves_no_mark_on_others_in_its_pass() -> None:
    model, _ = layer_of("BatchNorm")
    _, stream = followed(model, **surface_options(GIVEN))
    mixed = mixed_batches("BatchNorm")[0]
    states = states_of(stream)
    whole, expected = passed_together(model, stream, states, mixed)
    broken = mixed.stream == 1
    mixed.images[mixed.of((1, 1)) & mixed.counted & mixed.filtered] = math.nan
    output, after = passed_together(model, stream, states, mixed)
    assert after[1] is states[1]
    torch.testing.assert_close(output[~broken], whole[~broken], rtol=1e-9, atol=1e-10)
    for number in (0, 2):
        found, wanted = after[number].layers, expected[number].layers
        torch.testing.assert_close(found.moments, wanted.moments, rtol=1e-9, atol=1e-10)


def test_a_layer_may_have_several_samples_of_each_image() -> None:
    """Windows of an image, say, one image after the other."""

    class Windows(nn.Module):
        def __init__(self, number: int, norm: nn.Module) -> None:
            super().__init__()
            self.number, self.norm = number, norm

        def forward(self, x: Tensor) -> Tensor:
            cut = x.flatten(2).unflatten(2, (self.number, -1)).movedim(2, 1).flatten(0, 1)
            return self.norm(cut).unflatten(0, (len(x), self.number)).movedim(1, 2).reshape(x.shape)

    kind, mixed = "BatchNorm", mixed_batches("BatchNorm")[0]
    # All windows have the same moments as the whole image.
    mixed.images = mixed.images[..., :1].expand(-1, -1, -1, 5).transpose(2, 3).contiguous()
    layer = nn.BatchNorm1d(CHANNELS).double().eval()
    layer.load_state_dict(layer_of(kind)[0][0].state_dict())
    outputs, states = [], []
    for number in (1, 5):
        model = Windows(number, copy.deepcopy(layer))
        _, stream = followed(model, **surface_options(GIVEN))
        output, after = passed_together(model, stream, states_of(stream), mixed)
        outputs.append(output)
        states.append(after)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-9, atol=1e-10)
    for one, other in zip(*states, strict=True):
        for name, value in one.layers.tensors().items():
            torch.testing.assert_close(getattr(other.layers, name), value, rtol=1e-9, atol=1e-10)


def test_samples_that_are_of_no_image_cannot_be_told_apart() -> None:
    model = nn.Sequential(nn.Flatten(0, 1), nn.Unflatten(0, (-1, 7)), nn.BatchNorm2d(7)).double()
    _, stream = followed(model.eval())
    mixed = mixed_batches("BatchNorm")[0]
    mixed = Mixed(*(each[:14] for each in vars(mixed).values()))  # 14 images of 4 channels make 8
    with pytest.raises(LayerOutputError, match="a layer with 8 rows for 14 samples"):
        passed_together(model, stream, states_of(stream), mixed)


# What it leaves behind.


def test_nothing_is_written_into_the_layers_and_nothing_is_left() -> None:
    model, source = network_of_all_kinds()
    before = copy.deepcopy(model.state_dict())
    data = shifted(20, "BatchNorm")
    plain = model(data)
    surface, stream = followed(model, source=source)
    expected = passed(model, stream, data)
    assert not torch.equal(expected, plain)
    stream.reset()
    assert torch.equal(passed(model.train(), stream, data), expected)  # which is no switch
    surface.enabled = False
    assert torch.equal(model.eval()(data), plain)
    surface.detach()
    assert torch.equal(model(data), plain)
    assert not any("forward" in vars(module) for module in model.modules())
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": 1.5}, "`last` must be"),
        ({"prior": -1.0}, "`prior` must be"),
        ({"alone": 2.0}, "`alone` must be"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ttapca.errors.OptionError, match=message):
        ttapca.Mixture(**options)
