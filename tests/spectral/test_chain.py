"""The chain of classes: beside a slow one, on streams whose runs are known, and on extreme ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from chain_oracle import SlowChain
from simulated_streams import CLASSES, Read, error, pairs, predictions, read, runs
from ttapca.spectral import chain as module
from ttapca.spectral.chain import ChainReading, ChainState, ClassChain, design_effect
from ttapca.spectral.constants import CONSTANTS, Constants

Numbers = NDArray[np.float64]

CHAIN = ClassChain(np.ones(CLASSES))
STREAMS, IMAGES = 12, 400
# Two regimes of each kind, so that matrices of all transitions are small.
SMALL = dataclasses.replace(CONSTANTS, run_doublings=2, shares=(0.2, 0.9), regime_memory=30.0)
EACH = ("outputs", "plain", "known", "place", "held", "crowd", "ordered", "run_length")


def random_predictions(rng: np.random.Generator, *shape: int) -> Numbers:
    """Probabilities of which some are sure."""
    return rng.dirichlet(0.3 * np.ones(shape[-1]), shape[:-1])


def assert_near(
    found: ChainReading | ChainState, expected: ChainReading | ChainState, tolerance: float = 1e-12
) -> None:
    """All arrays of a state or a reading are the same, but for rounding."""
    for name in vars(expected):
        one, other = getattr(found, name), getattr(expected, name)
        limit = tolerance * max(1.0, np.abs(other).max(initial=0.0))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=name)


def lengths(state: ChainState) -> tuple[Numbers, Numbers]:
    """Lengths of runs on the grid, and the probability of each, if there are runs."""
    weights = state.joint.sum(2)[:, CHAIN._runs]
    return 1 / CHAIN._redraw[CHAIN._runs], weights / weights.sum(1, keepdims=True)


# Beside a slow one.


@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "runs"])
@pytest.mark.parametrize("sizes", [[1], [4], [3, 1, 1, 5], [1, 6, 2]], ids=str)
@pytest.mark.parametrize("with_pairs", [False, True])
def test_it_is_what_matrices_of_all_transitions_say(
    ordered: bool, sizes: list[int], with_pairs: bool
) -> None:
    rng = np.random.default_rng(sum(sizes))
    shares = rng.dirichlet(5 * np.ones(4))
    chain = ClassChain(shares, SMALL, ordered=ordered)
    slow = [SlowChain(shares, SMALL, ordered) for _ in range(3)]
    state = chain.start(3)
    for size in sizes:
        predicted = random_predictions(rng, 3, size, 4)
        said = 2.5 * rng.standard_normal((3, size)) if with_pairs else None  # some are rather sure
        state, reading = chain.read(state, predicted, said)
        for number, one in enumerate(slow):
            expected = one.read(predicted[number], None if said is None else said[number])
            for name in EACH:
                found = getattr(reading, name)[number]
                np.testing.assert_allclose(found, expected[name], atol=1e-10, err_msg=name)
            np.testing.assert_allclose(state.joint[number], one.joint, atol=1e-10)
            np.testing.assert_allclose(state.recent[number], [one.predicted, one.held], atol=1e-10)


@pytest.mark.parametrize("before", [0, 5])
def test_what_is_expected_is_what_images_say_who_say_nothing(before: int) -> None:
    """Of the prior and the stays; every image has the same probability whatever its class is."""
    rng = np.random.default_rng(1)
    chain, slow = ClassChain(np.ones(3), SMALL), SlowChain(np.full(3, 1 / 3), SMALL)
    state = chain.start()
    if before:
        predicted = random_predictions(rng, 1, before, 3)
        state, _ = chain.read(state, predicted)
        slow.read(predicted[0])
    expected = chain.expected(state, 4)
    # Whether images belong to the run of the last one that was seen, or to few classes.
    stays, moves = slow.stays(0.0), slow.transitions(0.0)
    kinds = np.array([regime.kind for regime in slow.regimes])
    few = slow.joint[kinds == "few"].sum(1) @ [
        slow.drawn_from(each) for each in slow.regimes if each.kind == "few"
    ]
    at, joint, place = slow.joint.ravel(), slow.joint.ravel(), slow.place
    for number in range(4):
        place = 1 + (joint @ stays).sum() * place
        at, joint = at @ stays, joint @ moves
        known = at.reshape(-1, 3).sum(0) + few
        np.testing.assert_allclose(expected.known[0, number], known, atol=1e-12)
        # The regimes stay those after the last image: how soon they change is not looked at.
        assert expected.place[0, number] == pytest.approx(place, rel=0.02)
        assert expected.plain[0, number] == pytest.approx(slow.joint[kinds == "plain"].sum())
    for name, value in slow.summary().items():
        np.testing.assert_allclose(getattr(expected, name)[0], value, atol=1e-12)


def test_streams_that_surely_have_runs_know_no_other_regimes() -> None:
    chain, rng = ClassChain(np.ones(CLASSES), ordered=True), np.random.default_rng(9)
    assert chain.start().joint.shape[1] == CONSTANTS.run_doublings * len(CONSTANTS.shares)
    state, reading = chain.read(chain.start(), random_predictions(rng, 1, 30, CLASSES))
    for found in (reading, chain.expected(state, 5)):
        np.testing.assert_allclose(found.ordered, 1.0)
        for name in ("plain", "held", "crowd"):
            assert not getattr(found, name).any(), name


def test_the_names_of_classes_make_no_difference() -> None:
    rng = np.random.default_rng(2)
    shares, other = rng.dirichlet(3 * np.ones(6)), rng.permutation(6)
    predicted = random_predictions(rng, 2, 9, 6)
    one, two = ClassChain(shares), ClassChain(shares[other])
    _, expected = one.read(one.start(2), predicted)
    _, found = two.read(two.start(2), predicted[..., other])
    back = other.argsort()
    moved = {name: getattr(found, name)[..., back] for name in ("outputs", "known")}
    assert_near(dataclasses.replace(found, **moved), expected)


# Several streams, and large ones.


def alone(
    chain: ClassChain, predicted: list[list[Numbers]], said: list[list[Numbers]]
) -> list[tuple[ChainState, list[ChainReading]]]:
    found = []
    for batches, looks in zip(predicted, said, strict=True):
        state, readings = chain.start(features=2), []
        for batch, look in zip(batches, looks, strict=True):
            features = np.stack([look, 2 * look], 1)[None]
            state, reading = chain.read(state, batch[None], look[None], features=features)
            readings.append(reading)
        found.append((state, readings))
    return found


@pytest.mark.parametrize(
    "sizes",
    [[[2, 7, 3], [5, 2, 9]], [[7], [7], [7]], [[1, 1], [1, 1]], [[1, 6], [4, 1], [2, 1]]],
    ids=str,
)
def test_each_stream_is_read_as_if_it_were_alone(sizes: list[list[int]]) -> None:
    """Sizes of one batch after the other; streams that have fewer images are filled up."""
    rng, chain, streams = np.random.default_rng(3), ClassChain(np.arange(1.0, 6)), len(sizes[0])
    predicted = [[random_predictions(rng, batch[n], 5) for batch in sizes] for n in range(streams)]
    said = [[rng.standard_normal(batch[n]) for batch in sizes] for n in range(streams)]
    expected = alone(chain, predicted, said)
    state = chain.start(streams, features=2)
    for step, batch in enumerate(sizes):
        filled, looks = np.full((streams, max(batch), 5), 0.2), np.full((streams, max(batch)), 7.0)
        for number, size in enumerate(batch):
            filled[number, :size] = predicted[number][step]
            looks[number, :size] = said[number][step]
        features = np.stack([looks, 2 * looks], 2)
        state, reading = chain.read(state, filled, looks, sizes=batch, features=features)
        for number, size in enumerate(batch):
            there = {name: value[number, None] for name, value in vars(reading).items()}
            for name in ("outputs", "plain", "known", "place", "held"):
                there[name] = there[name][:, :size]
            assert_near(ChainReading(**there), expected[number][1][step])
    for number, (last, _) in enumerate(expected):
        assert_near(state.of_stream(number), last)


def test_states_of_streams_come_apart_and_together() -> None:
    rng = np.random.default_rng(4)
    predicted = random_predictions(rng, 3, 8, 4)
    chain = ClassChain(np.ones(4))
    state, _ = chain.read(chain.start(3), predicted)
    again = ChainState.of_each([state.of_stream(number) for number in range(3)])
    assert_near(again, state, tolerance=0.0)


@pytest.mark.parametrize("sizes", [None, [40, 33]], ids=["as many", "fewer"])
def test_a_batch_that_is_read_in_parts_says_nearly_the_same(
    sizes: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later parts do not speak for earlier images; so these are a bit less sure."""
    rng = np.random.default_rng(5)
    labels = runs(2, 40, 8.0, rng)
    predicted, said = predictions(labels, rng), pairs(labels, rng)
    start = CHAIN.start(2)
    whole_state, whole = CHAIN.read(start, predicted, said, sizes)
    monkeypatch.setattr(module, "LARGEST", 2 * CHAIN.start().joint.shape[1] * CLASSES * 10)
    state, parts = CHAIN.read(start, predicted, said, sizes)
    assert parts.outputs.shape == whole.outputs.shape
    assert np.abs(parts.outputs - whole.outputs)[:, :33].mean() < 0.02
    np.testing.assert_allclose(parts.ordered, whole.ordered, atol=0.1)
    np.testing.assert_allclose(state.place, whole_state.place, rtol=0.25)
    np.testing.assert_allclose(state.joint.sum(1), whole_state.joint.sum(1), atol=0.05)


def test_parts_of_a_batch_may_leave_a_stream_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that has fewer images ends with them."""
    rng = np.random.default_rng(6)
    predicted = random_predictions(rng, 2, 9, CLASSES)
    features = rng.standard_normal((2, 9, 3))
    start = CHAIN.start(2, features=3)
    monkeypatch.setattr(module, "LARGEST", 2 * CHAIN.start().joint.shape[1] * CLASSES * 3)
    state, reading = CHAIN.read(start, predicted, None, [9, 3], features)
    after, other = CHAIN.read(start.of_stream(1), predicted[1:, :3], None, None, features[1:, :3])
    assert_near(state.of_stream(1), after)
    for name in ("ordered", "run_length", "crowd"):
        np.testing.assert_allclose(getattr(reading, name)[1:], getattr(other, name), atol=1e-12)


# Arrays of another library.

IN_TORCH = {"xp": torch, "convert": torch.from_numpy, "tiny": module.TINY}


def in_torch(state: ChainState) -> ChainState:
    return ChainState(*map(torch.from_numpy, vars(state).values()))


def assert_same_arrays(found: object, expected: object) -> None:
    """Every field is a tensor in float64, and has the numbers of the array of numpy."""
    assert type(found) is type(expected)
    for name, value in vars(found).items():
        assert isinstance(value, Tensor), name
        assert value.dtype == torch.float64, name
        assert tuple(value.shape) == getattr(expected, name).shape, name
    assert_near(found, expected, tolerance=1e-10)


@pytest.mark.parametrize(
    ("constants", "ordered"),
    [(CONSTANTS, False), (SMALL, False), (SMALL, True)],
    ids=["as it is", "small", "runs"],
)
@pytest.mark.parametrize("with_pairs", [False, True])
@pytest.mark.parametrize("sizes", [[1], [5, 1, 8], [60, 60]], ids=str)
def test_torch_says_what_numpy_says(
    constants: Constants, ordered: bool, with_pairs: bool, sizes: list[int]
) -> None:
    """Of several streams, some of which have runs; and their states go on in torch."""
    rng = np.random.default_rng(11)
    chain = ClassChain(rng.dirichlet(5 * np.ones(CLASSES)), constants, ordered=ordered)
    other = chain.computing_with(**IN_TORCH)
    lengths_of_runs = (1.0, 6.0, 40.0)
    labels = np.concatenate([runs(1, sum(sizes), length, rng) for length in lengths_of_runs])
    predicted, said = predictions(labels, rng), 1.5 * pairs(labels, rng)
    features = rng.standard_normal((*labels.shape, 3))
    expected = chain.start(3, features=3)
    state, first = in_torch(expected), 0
    for size in sizes:
        some = slice(first, first + size)
        first += size
        assert_same_arrays(other.expected(state, 4), chain.expected(expected, 4))
        given = [predicted[:, some], said[:, some] if with_pairs else None, features[:, some]]
        expected, reading = chain.read(expected, *given[:2], features=given[2])
        mine = [None if each is None else torch.from_numpy(each) for each in given]
        state, found = other.read(state, *mine[:2], features=mine[2])
        assert_same_arrays(state, expected)
        assert_same_arrays(found, reading)
        alike, before, renewed = np.array([0.0, 0.05, 0.6]), expected.images, np.full(3, 0.004)
        counts = found.counts(*map(torch.from_numpy, (alike, before, renewed)))
        wanted = reading.counts(alike, before, renewed)
        np.testing.assert_allclose(counts, wanted, rtol=0, atol=1e-10)


def test_a_chain_in_torch_leaves_that_in_numpy_as_it_was() -> None:
    chain, rng = ClassChain(np.ones(4), SMALL), np.random.default_rng(12)
    predicted = random_predictions(rng, 2, 6, 4)
    before = chain.read(chain.start(2), predicted)
    assert chain.computing_with(**IN_TORCH).shares.dtype == torch.float64
    for found, expected in zip(chain.read(chain.start(2), predicted), before, strict=True):
        assert {type(value) for value in vars(found).values()} == {np.ndarray}
        assert_near(found, expected, tolerance=0.0)


# Simulated streams.


def simulated(
    length: float, size: int, seed: int = 3, surer: float = 1.0, *, with_pairs: bool = False
) -> tuple[Read, float, float]:
    """What is made of streams with runs, and the errors of the classifier and of the chain."""
    rng = np.random.default_rng(seed)
    labels = runs(STREAMS, IMAGES, length, rng)
    predicted, said = predictions(labels, rng, surer), pairs(labels, rng)
    found = read(CHAIN, predicted, size, said if with_pairs else None)
    return found, error(predicted, labels), error(found.outputs, labels)


SIZES = pytest.mark.parametrize("size", [1, 50])
PAIRS = pytest.mark.parametrize("with_pairs", [False, True], ids=["alone", "with pairs"])


@SIZES
@PAIRS
@pytest.mark.parametrize(
    ("length", "left"),  # and which share of errors is left, one at a time and in batches
    [(2, (0.9, 0.7)), (5, (0.55, 0.3)), (20, (0.3, 0.1)), (100, (0.12, 0.05))],
)
def test_runs_are_found_and_used(
    length: int, left: tuple[float, float], size: int, with_pairs: bool
) -> None:
    found, network, errors = simulated(length, size, with_pairs=with_pairs)
    # Runs of two are next to no order: of twelve streams, one may look like that for a while.
    assert (found.last.ordered > 0.8).mean() > (0.9 if length == 2 else 0.999)
    assert found.last.ordered.mean() > (0.9 if length == 2 else 0.95)
    assert errors < left[size > 1] * network
    # Of the run length: an interval of 95 % holds it nearly always, and is rather narrow.
    grid, weights = lengths(found.state)
    inside = (grid > length / 3) & (grid < length * 3)
    covered = [
        grid[weight.cumsum() > 0.025][0] / 2 <= length <= grid[weight.cumsum() > 0.975][0] * 2
        for weight in weights
    ]
    assert np.mean(covered) > 0.9
    assert np.median(weights[:, inside].sum(1)) > 0.7
    assert length / 1.5 < np.median(found.last.run_length) < length * 1.5


@SIZES
@PAIRS
@pytest.mark.parametrize("surer", [1.0, 3.0])
def test_shuffled_streams_are_left_as_they_are(size: int, with_pairs: bool, surer: float) -> None:
    found, network, errors = simulated(1, size, surer=surer, with_pairs=with_pairs)
    assert (found.last.ordered < 0.1).all()
    assert (found.last.plain[:, -1] > 0.5).mean() > 0.9
    assert errors < network + 0.2
    assert (found.last.held[:, -1] < 0.5).mean() > 0.9


@SIZES
def test_runs_of_a_classifier_that_is_too_sure_are_found(size: int) -> None:
    found, network, errors = simulated(20, size, surer=4.0)
    assert found.last.ordered.mean() > 0.9
    assert errors < (0.2 if size > 1 else 0.5) * network


@SIZES
def test_few_classes_in_no_order_are_held(size: int) -> None:
    """Three of ten classes; the outputs know that, if many images come at a time.

    Of single ones, the chain cannot yet tell them from a network that favours these classes, whose
    outputs stay as they are.
    """
    rng = np.random.default_rng(4)
    few = rng.permuted(np.tile(np.arange(CLASSES), (STREAMS, 1)), axis=1)[:, :3]
    labels = np.take_along_axis(few, rng.integers(3, size=(STREAMS, IMAGES)), 1)
    predicted, said = predictions(labels, rng), pairs(labels, rng)
    found = read(CHAIN, predicted, size, said)
    assert (found.last.ordered < 0.1).all()
    assert (found.last.crowd > 0.1).all()
    if size == 1:
        assert (found.last.held[:, -1] + found.last.plain[:, -1] > 0.9).all()
        assert error(found.outputs, labels) < error(predicted, labels)
    else:
        assert (found.last.held[:, -1] > 0.9).all()
        assert error(found.outputs, labels) < 0.7 * error(predicted, labels)


def test_of_a_confused_network_few_classes_are_not_believed() -> None:
    """It favours some classes, whatever the stream shows."""
    rng = np.random.default_rng(4)
    labels = rng.integers(3, size=(STREAMS, 100))
    predicted, said = predictions(labels, rng), pairs(labels, rng)
    held = [
        CHAIN.read(CHAIN.start(STREAMS), predicted, said, confused=np.full(STREAMS, nats))[1].held
        for nats in (0.0, 0.1, 2.0)
    ]
    assert (held[0][:, -1] > 0.9).all()
    assert (held[2][:, -1] < 0.1).all()
    assert (held[0] >= held[1]).all()
    assert (held[1] >= held[2]).all()


@SIZES
def test_an_order_that_comes_and_goes_is_followed(size: int) -> None:
    rng = np.random.default_rng(6)
    parts = [runs(STREAMS, 300, length, rng) for length in (1, 50, 1)]
    labels = np.concatenate(parts, 1)
    predicted, said = predictions(labels, rng), pairs(labels, rng)
    found = read(CHAIN, predicted, size, said)
    ordered = np.stack([each.ordered for each in found.readings]).repeat(size, 0)  # by image
    shuffled, in_runs, again = (ordered[end - 50 : end].mean() for end in (300, 600, 900))
    assert shuffled < 0.1
    assert in_runs > 0.9
    assert again < 0.1
    errors = [
        (error(found.outputs[:, some], labels[:, some]), error(predicted[:, some], labels[:, some]))
        for some in (slice(0, 300), slice(300, 600), slice(600, 900))
    ]
    assert errors[0][0] < errors[0][1] + 0.3
    assert errors[1][0] < 0.3 * errors[1][1]
    assert errors[2][0] < errors[2][1] + 2.0  # the first images that come in no order


@SIZES
@pytest.mark.parametrize("length", [1, 20])
def test_a_network_that_favours_a_class_is_no_order(size: int, length: int) -> None:
    """It predicts class 0 three times as often; pairs are not quite as telling as they say."""
    rng = np.random.default_rng(7)
    labels = runs(STREAMS, IMAGES, length, rng)
    logits, said = np.log(predictions(labels, rng) + 1e-300), pairs(labels, rng)
    logits[..., 0] += 3.0
    favoured = np.exp(logits)
    favoured /= favoured.sum(-1, keepdims=True)
    found = read(CHAIN, favoured, size, 0.5 * said)
    network, errors = error(favoured, labels), error(found.outputs, labels)
    if length == 1:
        assert found.last.ordered.mean() < 0.1
        assert errors < network + 1.0
    else:
        assert found.last.ordered.mean() > 0.9
        assert errors < 0.4 * network


def collapsed(rng: np.random.Generator, labels: NDArray[np.int64]) -> Numbers:
    """A network that predicts class 0, more or less surely, whatever it sees."""
    sure = rng.uniform(0.5, 0.95, labels.shape)[..., None]
    return (1 - sure) * predictions(labels, rng) + sure * np.eye(CLASSES)[0]


@SIZES
def test_a_network_that_collapsed_is_told_from_one_class_by_pairs(size: int) -> None:
    rng = np.random.default_rng(7)
    labels = runs(STREAMS, 200, 1.0, rng)
    predicted = collapsed(rng, labels)
    others = np.where(pairs(labels, rng) > 1.5, 1.0, -2.0)  # they are of two classes, nearly all
    found = read(CHAIN, predicted, size, others)
    assert (found.last.ordered < 0.1).all()
    assert np.abs(found.outputs - predicted)[:, 50:].max() < 0.1
    same = np.full(labels.shape, 2.0)
    seen = read(CHAIN, predicted, size, same)
    assert (seen.last.ordered > 0.9).all()
    assert (seen.outputs.argmax(-1) == 0).all()
    assert (seen.outputs[:, 50:, 0] > 0.98).all()


# How many images a run counts for.


def placed(places: list[int], held: float = 0.0) -> ChainReading:
    """A reading of images with these places in their runs; few classes would be alike by 0.3."""
    place, nothing = np.array([places], float), np.zeros((1, len(places)))
    given = {"outputs": nothing, "plain": nothing, "known": nothing, "place": place}
    given |= {"held": np.full_like(place, held), "crowd": np.array([0.3])}
    return ChainReading(**given, ordered=np.zeros(1), run_length=np.ones(1))


@pytest.mark.parametrize("likeness", [0.0, 0.1, 1.0])
def test_a_run_is_worth_what_cluster_sampling_says(likeness: float) -> None:
    """l images of one class are worth l / (1 + (l - 1) ICC)."""
    images = 7
    counts = placed([1, 2, 3, 4, 1, 2, 3]).counts(np.array([likeness]), np.zeros(1), np.zeros(1))
    assert counts.shape == (1, images, 1)
    expected = sum(length / (1 + (length - 1) * likeness) for length in (4, 3))
    assert counts.sum() == pytest.approx(expected)
    assert counts.sum() == pytest.approx(
        design_effect(4.0, likeness) + design_effect(3.0, likeness)
    )
    assert (counts > -1e-12).all()


@pytest.mark.parametrize("likeness", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("renewed", [0.0, 0.002, 0.1])
def test_a_run_is_worth_as_much_however_much_is_forgotten(likeness: float, renewed: float) -> None:
    """Its images take the place of those that fade, so that it stays worth what it is."""
    counts = placed([*range(1, 401)]).counts(np.array([likeness]), np.zeros(1), np.array([renewed]))
    kept = 0.0
    for place, count in enumerate(counts[0, :, 0], 1):
        kept = (1 - renewed) * kept + count
        assert kept == pytest.approx(place / (1 + (place - 1) * likeness))


@pytest.mark.parametrize("before", [0.0, 5.0])
def test_few_classes_are_one_crowd(before: float) -> None:
    reading = placed([1] * 6, held=1.0)

    def worth(images: float) -> float:
        return images / (1 + max(0.0, images - 1) * 0.3 * 0.2)

    counts = reading.counts(np.array([0.2]), np.array([before]), np.zeros(1))
    assert counts.sum() == pytest.approx(worth(before + 6) - worth(before))
    # Of what is forgotten, new images take the place.
    renewed = reading.counts(np.array([0.2]), np.array([before]), np.array([0.1]))
    more = 0.1 * sum(worth(before + images) for images in range(6))
    assert renewed.sum() == pytest.approx(counts.sum() + more)


def test_of_images_that_may_be_of_a_run_or_of_a_crowd_both_count() -> None:
    alike, before = np.array([0.05, 0.4]), np.array([3.0])
    run, crowd, both = (
        placed([1, 2, 3, 4], held=held).counts(alike, before, np.array([0.01]))
        for held in (0.0, 1.0, 0.25)
    )
    np.testing.assert_allclose(both, 0.75 * run + 0.25 * crowd)


def test_each_stream_counts_by_what_it_forgets_and_had_before() -> None:
    """What each stream makes of its images is what it would make of them alone."""
    parts = [placed([1, 2, 3], held=0.5), placed([4, 5, 1], held=0.2), placed([1, 1, 2])]
    together = ChainReading(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in EACH}
    )
    alike = np.array([0.0, 0.05, 0.4])
    before, renewed = np.array([0.0, 7.0, 30.0]), np.array([0.0, 0.1, 0.005])
    found = together.counts(alike, before, renewed)
    assert found.shape == (3, 3, 3)
    for number, part in enumerate(parts):
        own = slice(number, number + 1)
        alone = part.counts(alike, before[own], renewed[own])
        np.testing.assert_allclose(found[own], alone, rtol=0, atol=1e-12)


def test_places_are_those_in_the_run() -> None:
    """Of a stream whose predictions are nearly sure."""
    labels = np.repeat([3, 5, 3, 0], [20, 7, 12, 3])[None]
    predicted = 0.98 * np.eye(CLASSES)[labels] + 0.002
    found = read(CHAIN, predicted, labels.size)
    expected = np.concatenate([np.arange(1, each + 1) for each in (20, 7, 12, 3)])
    # Where a class ends, its run may also go on, and the images behind it be errors.
    np.testing.assert_allclose(found.last.place[0], expected, rtol=0.25, atol=1.0)


# Extremes.


def one_hot(rng: np.random.Generator, classes: int) -> Numbers:
    return np.eye(classes)[rng.integers(classes, size=(2, 60))]


def contradicting(rng: np.random.Generator, classes: int) -> Numbers:
    """One class for long, and then surely another one in each image."""
    labels = np.concatenate([np.zeros(40, int), np.arange(20) % classes])
    return np.eye(classes)[np.stack([labels, labels[::-1]])]


def unsure(rng: np.random.Generator, classes: int) -> Numbers:
    return np.full((2, 60, classes), 1 / classes)


def with_zeros(rng: np.random.Generator, classes: int) -> Numbers:
    found = np.zeros((2, 60, classes))
    found[..., -2:] = 0.5
    return found


@pytest.mark.parametrize("make", [one_hot, contradicting, unsure, with_zeros])
@pytest.mark.parametrize("classes", [2, 10, 200])
@pytest.mark.parametrize("pair", [None, -1e9, 1e9, np.inf])
def test_probabilities_stay_probabilities(
    make: Callable[[np.random.Generator, int], Numbers], classes: int, pair: float | None
) -> None:
    rng = np.random.default_rng(8)
    shares = rng.dirichlet(0.2 * np.ones(classes)) + 1e-9  # some classes are next to never there
    chain, predicted = ClassChain(shares), make(rng, classes)
    state = chain.start(2)
    for first in (0, 30, 31):
        some = predicted[:, first : first + 30 if first != 30 else 31]
        said = None if pair is None else np.full(some.shape[:2], pair)
        before = state
        state, reading = chain.read(state, some, said)
        for name in EACH:
            assert np.isfinite(getattr(reading, name)).all(), name
        for name, value in vars(state).items():
            assert np.isfinite(value).all(), name
        np.testing.assert_allclose(reading.outputs.sum(2), 1, atol=1e-9)
        np.testing.assert_allclose(state.joint.sum((1, 2)), 1, atol=1e-9)
        assert (reading.outputs >= 0).all()
        assert (reading.known >= 0).all()
        assert (reading.known.sum(2) < 1 + 1e-9).all()
        assert ((reading.place >= 1) & (reading.place <= first + 31)).all()
        for name in ("plain", "held", "crowd", "ordered"):
            value = getattr(reading, name)
            assert ((value >= -1e-12) & (value <= 1 + 1e-9)).all(), name
        # The state moves on, and is a new one.
        assert state.joint is not before.joint
        assert np.abs(state.joint - before.joint).max() > 1e-9
        assert (state.images > before.images * np.exp(-30 / CONSTANTS.recent)).all()


def test_a_single_wrong_image_does_not_end_an_order() -> None:
    predicted = np.tile(0.97 * np.eye(CLASSES)[2] + 0.003, (1, 101, 1))
    predicted[0, 60] = 0.999 * np.eye(CLASSES)[7] + 0.0001
    told = np.full((1, 101), 0.3)
    told[0, 60:62] = -0.3
    # Without pairs, a batch of one class may also be a network that collapsed.
    for size, said in ((1, None), (1, told), (101, told)):
        found = read(CHAIN, predicted, size, said)
        assert float(found.last.ordered[0]) > 0.95
        assert (found.outputs[0, 61:].argmax(1) == 2).all()
