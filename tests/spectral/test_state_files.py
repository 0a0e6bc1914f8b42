"""Files of streams: what was written is read again, and nothing else, whoever wrote it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

import ttapca
from fuzz.mutations import mutate_bytes, mutate_json
from scripted_classes import fitted, labels_in_runs, network, pictures
from ttapca.errors import SavedStreamError
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.state_files import FORMAT, OLDER, SavedStream, read_saved
from ttapca.spectral.stream_batch import ImageRows
from ttapca.spectral.stream_state import StreamState, is_finite, leaves

KIND, NAME = "this kind", "camera.stream"
FACTS = {"mode": "on", "images": 120}
OTHER = {"values": {"mean": torch.ones(3), "pair": (None, 2.5, [True, 7])}, "parts": {}}
# One that goes by the order of images, and one whose alarm counts classes instead.
ORDERS = ("auto", "shuffled")


@functools.cache
def adapted(order: str) -> ttapca.Adapter:
    """An adapter whose streams have states with all parts that there are."""
    return ttapca.adapt(
        network(), "wiener", filter=fitted(), forgetting="online", order=order, on_shift=print
    )


def gone_on(adapter: ttapca.Adapter, state: StreamState, images: Tensor) -> tuple[Any, StreamState]:
    """The logits of some more images of a stream, and its state after these."""
    every = torch.ones(len(images), dtype=torch.bool)
    rows = ImageRows(torch.zeros(len(images), dtype=torch.long), every, every)
    logits, [outcome] = adapter.predict_streams([state], images, rows)
    return logits, outcome.state


@functools.cache
def known(order: str) -> StreamState:
    """The state of a stream that has shown two conditions, in the middle of a block."""
    adapter = adapted(order)
    state, images = adapter.new_state(), pictures(labels_in_runs(100, 20), 3)
    generator = torch.Generator().manual_seed(3)
    noisy = images + 3 * torch.randn(images.shape, generator=generator, dtype=images.dtype)
    for some in (*images.split(50), *noisy.split(45)):
        _, state = gone_on(adapter, state, some)
    return state


@functools.cache
def written(order: str) -> bytes:
    """A file of this state, and of things that a method and a service may keep beside it."""
    return SavedStream(KIND, known(order), OTHER, FACTS).to_bytes()


def again(data: bytes, order: str) -> SavedStream:
    return read_saved(data, KIND, adapted(order).new_state(), NAME)


class File:
    """A file taken apart, to be changed and put together again."""

    def __init__(self, order: str) -> None:
        data = written(order)
        self.order, self.tensors = order, load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        self.about: dict[str, Any] = json.loads(header["__metadata__"]["ttapca"])

    @property
    def numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = self.about["numbers"]
        return found

    def data(self) -> bytes:
        tensors = {name: each.contiguous() for name, each in self.tensors.items()}
        return save(tensors, {"ttapca": json.dumps(self.about)})

    def read(self) -> SavedStream:
        return again(self.data(), self.order)

    def refused(self, said: str) -> None:
        with pytest.raises(SavedStreamError) as found:
            self.read()
        assert NAME in str(found.value)
        assert said in str(found.value)


def read_or_refused(data: bytes, order: str) -> StreamState | None:
    """Return the state if a file is read; any error but that for saved streams is a failure."""
    try:
        return again(data, order).state
    except SavedStreamError as error:
        assert NAME in str(error)  # noqa: PT017 - both outcomes are good ones
        return None


def packed(header: dict[str, Any], body: bytes) -> bytes:
    """A safetensors file of numbers that the library does not write."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def with_one_more(data: bytes, name: str, dtype: str, shape: list[int], content: bytes) -> bytes:
    """The same file with a tensor of any type in it, in place of one of that name."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    parts, found = bytearray(), {"__metadata__": header.pop("__metadata__")}
    for each, facts in header.items():
        if each != name:
            first, last = facts["data_offsets"]
            place = [len(parts), len(parts) + last - first]
            parts += body[first:last]
            found[each] = {**facts, "data_offsets": place}
    place = [len(parts), len(parts) + len(content)]
    found[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
    return packed(found, bytes(parts) + content)


def same_leaves(one: StreamState, other: StreamState) -> bool:
    here, there = leaves(one), leaves(other)
    if here.keys() != there.keys():
        return False
    pairs = [(here[name], there[name]) for name in here]
    return all(
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else bool((a == b).all())
        for a, b in pairs
        if hasattr(a, "shape")
    ) and all(a == b and type(a) is type(b) for a, b in pairs if not hasattr(a, "shape"))


@functools.cache
def names_of(order: str) -> list[str]:
    """The tensors of the state, by the names that they have in its fields."""
    tensors = File(order).tensors
    return [name for name in leaves(known(order)) if f"state.{name}" in tensors]


every_order = pytest.mark.parametrize("order", ORDERS)


# What was written.


def test_the_states_have_all_parts_that_there_are() -> None:
    """Else the tests below would not look at them."""
    names = {name for order in ORDERS for name in names_of(order)}
    for part in ("spectra.0.rest_mean", "layers.moments", "chain.joint", "conditions.searched"):
        assert part in names
    assert {"outliers", "alarm.counts", "alarm.energies.0"} <= names
    for order in ORDERS:
        assert known(order).known_conditions == len(known(order).spectra[0]) == 2
        assert known(order).latest == 1
        assert 0 < known(order).alarm.images < 64


@every_order
def test_what_was_written_is_read_bit_for_bit(order: str) -> None:
    found = again(written(order), order)
    assert found.state is not None
    assert same_leaves(found.state, known(order))
    assert found.facts == FACTS
    assert torch.equal(found.other["values"].pop("mean"), OTHER["values"]["mean"])
    assert found.other == {"values": {"pair": (None, 2.5, [True, 7])}, "parts": {}}
    assert SavedStream(KIND, found.state, OTHER, FACTS).to_bytes() == written(order)


@every_order
def test_a_stream_that_has_shown_nothing_is_read_as_well(order: str) -> None:
    start = adapted(order).new_state()
    found = again(SavedStream(KIND, start).to_bytes(), order).state
    assert found is not None
    assert same_leaves(found, start)


def test_a_state_within_what_a_method_keeps() -> None:
    """A guard keeps states that it can go back to."""
    data = SavedStream(KIND, known("auto"), {"good": [known("auto"), (3,)]}).to_bytes()
    found, rest = again(data, "auto").other["good"]
    assert same_leaves(found, known("auto"))
    assert rest == (3,)


def test_a_method_without_a_state() -> None:
    data = SavedStream(KIND, None, OTHER).to_bytes()
    assert read_saved(data, KIND, None, NAME).state is None
    with pytest.raises(SavedStreamError, match=r"`spectra\.0\.samples` has another shape"):
        again(data, "auto")
    with pytest.raises(SavedStreamError, match="no saved stream of this method: it holds a state"):
        read_saved(written("auto"), KIND, None, NAME)


def test_a_state_of_another_precision_is_that_of_the_reader() -> None:
    file = File("auto")
    for name in ("energies", "mean", "rest_mean"):
        file.tensors[f"state.spectra.0.{name}"] = file.tensors[f"state.spectra.0.{name}"].float()
    found, expected = file.read().state, known("auto")
    assert found is not None
    assert found.spectra[0].energies.dtype == expected.spectra[0].energies.dtype == torch.float64
    torch.testing.assert_close(found.spectra[0].energies, expected.spectra[0].energies)


# Tensors that cannot be.


@every_order
def test_a_tensor_that_is_missing(order: str) -> None:
    for name in names_of(order):
        file = File(order)
        del file.tensors[f"state.{name}"]
        if name.startswith("alarm."):  # an alarm may know nothing, and begins anew
            found = file.read().state
            assert found is not None
            assert name not in leaves(found)
        else:
            file.refused(f"`{name}`")


@every_order
def test_a_tensor_of_another_shape(order: str) -> None:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda each: each[None],
        lambda each: each.sum(),
        lambda each: torch.cat([each, each[..., :1]], -1),
    ]
    for name in names_of(order):
        rows = name.startswith(("spectra", "layers", "conditions")) or name == "alarm.counts"
        for number, change in enumerate(changes):
            file = File(order)
            each = file.tensors[f"state.{name}"]
            if number == 2 and rows and each.dim() == 1:
                continue  # one more row
            file.tensors[f"state.{name}"] = change(each)
            file.refused(f"`{name}` has another shape than in this network")


@every_order
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e13, -1e13, -0.5])
def test_a_number_that_cannot_be(order: str, number: float) -> None:
    signed = ("mean", "rest_mean", "leeway", "centres", "searched", "unsearched", "features")
    for name in names_of(order):
        file = File(order)
        file.tensors[f"state.{name}"].view(-1)[-1] = number
        if number == -0.5 and name.rpartition(".")[2] in signed:
            assert file.read().state is not None
        else:
            file.refused(f"`{name}` ")


@every_order
@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, torch.uint8], ids=str)
def test_a_tensor_of_other_numbers(order: str, kind: torch.dtype) -> None:
    for name in names_of(order):
        file = File(order)
        file.tensors[f"state.{name}"] = file.tensors[f"state.{name}"].to(kind)
        if name.startswith("alarm."):  # counts may be whole
            found = read_or_refused(file.data(), order)
            assert found is None or is_finite(found)
        else:
            file.refused(f"`{name}`")


@pytest.mark.parametrize("name", ["spectra.0.mean", "spectra.0.rest_mean", "layers.moments"])
def test_a_number_whose_square_is_infinite_in_float32(name: str) -> None:
    model = network().float()
    narrow = ttapca.fit(model, "conv1", pictures(labels_in_runs(300, 1), 2).float(), 40)
    adapter = ttapca.adapt(model, "wiener", filter=narrow, forgetting="online")
    _, state = gone_on(adapter, adapter.new_state(), pictures(labels_in_runs(20, 1), 4).float())
    data = SavedStream(KIND, state).to_bytes()
    assert read_saved(data, KIND, adapter.new_state(), NAME).state is not None
    content = torch.full_like(load(data)[f"state.{name}"], 1e30)
    shape, raw = list(content.shape), content.numpy().tobytes()
    wide = with_one_more(data, f"state.{name}", "F32", shape, raw)
    with pytest.raises(SavedStreamError, match=rf"`{name}` cannot be like that"):
        read_saved(wide, KIND, adapter.new_state(), NAME)


# Of safetensors, of which torch knows some and can compare fewer.
STRANGE = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E8M0", "C64", "U64", "U32", "U16", "F4")
BITS = {"C64": 64, "U64": 64, "U32": 32, "U16": 16, "F4": 4}


@pytest.mark.parametrize("dtype", STRANGE)
@pytest.mark.parametrize(
    ("order", "name", "shape"),
    [
        ("auto", "state.spectra.0.shift", [2]),
        ("auto", "state.conditions.weights", [2]),
        ("shuffled", "state.alarm.counts", [4]),
        ("shuffled", "state.alarm.energies.0", [6]),
    ],
)
def test_numbers_that_are_seldom_met(order: str, name: str, shape: list[int], dtype: str) -> None:
    content = bytes(shape[0] * BITS.get(dtype, 8) // 8)
    with pytest.raises(SavedStreamError, match=NAME):
        again(with_one_more(written(order), name, dtype, shape, content), order)


@pytest.mark.parametrize("shape", [[0, 2**62, 4], [0, 2**63], [2**31, 2**31, 0]], ids=str)
def test_a_shape_that_is_too_large_for_nothing(shape: list[int]) -> None:
    with pytest.raises(SavedStreamError, match=NAME):
        again(with_one_more(written("auto"), "state.large", "F32", shape, b""), "auto")


# Numbers that are possible by themselves.


def rows_of(number: int) -> Callable[[Tensor], Tensor]:
    return lambda each: each[:1].expand(number, *each.shape[1:]).clone()


def with_moments(mean: float, square: float) -> Callable[[Tensor], Tensor]:
    """Moments of a layer; a negative variance has no root, and the stream no numbers later."""
    return lambda each: torch.tensor([[mean], [square]]).to(each).expand_as(each).clone()


NO_MATCH, LONG = "`conditions` do not match", 2 * int(CONSTANTS.memory) + 1
TOO_MANY = CONSTANTS.states + 1
CANNOT_BE: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    *(
        ("auto", name, lambda each: each + 1.001, f"`{name}` cannot be like that")
        for name in ("spectra.0.shift", "spectra.0.unusual", "outliers")
    ),
    ("auto", "layers.moments", with_moments(0.0, -5.0), "`layers.moments`"),
    ("auto", "layers.moments", with_moments(1000.0, 1.0), "`layers.moments`"),
    ("auto", "chain.recent", lambda each: 0 * each, "`chain.recent`"),  # images without a class
    *(
        ("auto", "chain.joint", lambda each, by=by: by * each, "`chain.joint` is no probability")
        for by in (0.0, 0.5, 2.0)
    ),
    ("auto", "chain.joint", lambda each: each[:, :, :4] * 5 / 4, "has another shape than in this"),
    ("auto", "chain.joint", lambda each: torch.cat([each, each]), "has another shape than in this"),
    ("auto", "spectra.0.samples", rows_of(1), "`spectra.0` has parts of several lengths"),
    ("auto", "layers.samples", rows_of(1), "`layers` has parts of several lengths"),
    ("auto", "conditions.centres", rows_of(1), NO_MATCH),
    ("auto", "conditions.weights", rows_of(1), NO_MATCH),
    ("auto", "conditions.centres", rows_of(TOO_MANY), NO_MATCH),
    ("auto", "conditions.searched", rows_of(LONG), "`conditions.searched` has too many rows"),
    ("auto", "conditions.unsearched", rows_of(LONG), "`conditions.unsearched` has too many rows"),
    *(
        ("shuffled", "alarm.counts", lambda _, to=to: to, "`alarm.counts` has another shape")
        for to in (torch.zeros(0), torch.ones(2, 2), torch.ones(1_000_001))
    ),
]


@pytest.mark.parametrize(("order", "name", "change", "said"), CANNOT_BE)
def test_a_tensor_that_cannot_be(
    order: str, name: str, change: Callable[[Tensor], Tensor], said: str
) -> None:
    file = File(order)
    file.tensors[f"state.{name}"] = change(file.tensors[f"state.{name}"]).double()
    file.refused(said)


@pytest.mark.parametrize(
    ("part", "rows", "said"),
    [
        *((part, rows, f"`{part}`") for part in ("spectra.0", "layers") for rows in (0, TOO_MANY)),
        *(("conditions", rows, NO_MATCH) for rows in (0, 1, TOO_MANY)),
    ],
)
def test_a_table_of_too_many_rows_or_too_few(part: str, rows: int, said: str) -> None:
    file = File("auto")
    names = {f"state.{part}.{name}" for name in ("centres", "weights")}
    for name, each in file.tensors.items():
        if name in names or (part != "conditions" and name.startswith(f"state.{part}.")):
            file.tensors[name] = rows_of(rows)(each)
    file.refused(said)


def test_energies_of_some_filters_only() -> None:
    model = network()
    both = [fitted(), ttapca.fit(model, "conv2", pictures(labels_in_runs(300, 1), 2), 20)]
    adapter = ttapca.adapt(model, "wiener", filter=both, forgetting="online", on_shift=print)
    _, state = gone_on(adapter, adapter.new_state(), pictures(labels_in_runs(20, 1), 4))
    data = SavedStream(KIND, state).to_bytes()
    found = read_saved(data, KIND, adapter.new_state(), NAME).state
    assert found is not None
    assert len(found.alarm.energies) == len(found.spectra) == 2
    tensors = load(data)
    del tensors["state.alarm.energies.0"]
    length = int.from_bytes(data[:8], "little")
    about = json.loads(data[8 : 8 + length])["__metadata__"]
    with pytest.raises(SavedStreamError, match=r"`alarm\.energies` are of some filters only"):
        read_saved(save(tensors, about), KIND, adapter.new_state(), NAME)


WHOLE = [-1, 1.0, True, "1", None, [], math.nan, 2**53 + 2**60]
REAL = [-0.1, 1e13, False, "0", None, {}, math.nan, math.inf]
NUMBERS = {
    "latest": [*WHOLE, 2, CONSTANTS.states],
    "implausible": WHOLE,
    "alarm.run": WHOLE,
    "alarm.images": WHOLE,
    "alarm.runs": REAL,
    "alarm.few": REAL,
    "alarm.alike": REAL,
    "alarm.skew": [*REAL, 1.001],
    "alarm.shifted": [0, 1, 0.0, "true", None, math.nan],
}


def test_every_number_is_among_those_that_are_changed() -> None:
    assert File("auto").numbers.keys() == NUMBERS.keys()


@every_order
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in NUMBERS.items() for value in values]
)
def test_a_number_of_another_kind_or_size(order: str, name: str, value: Any) -> None:
    file = File(order)
    file.numbers[name] = value
    file.refused(f"`{name}` is ")


# What does not belong there.


def test_a_tensor_or_a_number_more() -> None:
    for name in ("state.more", "more", "state.spectra.1.shift", "state.alarm.energies.1"):
        file = File("auto")
        file.tensors[name] = torch.ones(2)
        file.refused(f"it holds `{name.removeprefix('state.')}`")
    file = File("auto")
    file.numbers["more"] = 3
    file.refused("it holds `more`")


@pytest.mark.parametrize("part", ["numbers", "facts"])
@pytest.mark.parametrize("value", [None, [], 3, "numbers"])
def test_numbers_that_are_none(part: str, value: Any) -> None:
    file = File("auto")
    file.about[part] = value
    file.refused("its numbers are missing")


TREES: list[Any] = [None, 3, True, "x", [], {}, {"list": []}, {"tuple": []}, {"tensor": 0}]
TREES += [{"dict": {"a": each}} for each in ("x", [], {"tensor": 99}, {"tensor": [0]}, {"a": 1})]
TREES += [{"dict": [1]}, {"dict": {"a": {"list": {}}}}, {"list": [1], "tuple": [1]}, {"state": 0}]


@pytest.mark.parametrize("tree", TREES, ids=json.dumps)
def test_what_is_no_tree_of_a_method(tree: Any) -> None:
    file = File("auto")
    file.about["other"] = tree
    with pytest.raises(SavedStreamError, match=f"{NAME} is no saved stream: "):
        file.read()


@pytest.mark.parametrize("kind", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
def test_a_state_within_that_is_none(kind: torch.dtype) -> None:
    file = File("auto")
    file.about["other"] = {"dict": {"a": {"state": 0}}}
    file.tensors["other.0"] = torch.ones(8).to(kind)
    file.refused("is no saved stream")


def test_states_within_states_without_end() -> None:
    data = SavedStream(KIND, adapted("shuffled").new_state()).to_bytes()
    tensors, numbers = load(data), File("shuffled").numbers | {"latest": 0}
    about = {"format": FORMAT, "kind": KIND, "numbers": numbers, "facts": {}}
    about["other"] = {"dict": {"a": {"state": 0}}}
    for _ in range(400):
        tensors["other.0"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        data = save(tensors, {"ttapca": json.dumps(about)})
    with pytest.raises(SavedStreamError, match=NAME):
        again(data, "shuffled")


# Files of others.


def test_a_stream_of_another_kind() -> None:
    with pytest.raises(SavedStreamError, match=f"{NAME} is a stream of another network, filter or"):
        read_saved(written("auto"), "another", adapted("auto").new_state(), NAME)


@pytest.mark.parametrize("older", OLDER)
def test_older_formats_are_named(older: str) -> None:
    said = rf"{NAME} was saved by an older ttapca \('{older}'\).*Let the stream begin anew"
    file = File("auto")
    file.about["format"] = older
    for metadata in ({"ttapca": json.dumps(file.about)}, {"format": older, "kind": KIND}):
        with pytest.raises(SavedStreamError, match=said):
            again(save(file.tensors, metadata), "auto")


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"format": "pt"},
        {"ttapca": "3"},
        {"ttapca": "[]"},
        {"ttapca": '{"format": 2}'},
        {"ttapca": '{"format": ["ttapca stream 3"]}'},
        {"ttapca": '{"format": "ttapca stream 4"}'},
    ],
)
def test_a_file_of_something_else(metadata: dict[str, str] | None) -> None:
    with pytest.raises(SavedStreamError, match=f"{NAME} must be of the format `{FORMAT}`; found"):
        again(save({"a": torch.ones(3)}, metadata), "auto")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 50, 500, 2_000, -1, -9])
def test_a_file_that_ends_too_early(size: int) -> None:
    with pytest.raises(SavedStreamError, match=f"{NAME} "):
        again(written("auto")[:size], "auto")


# Anything at all.


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(SavedStreamError, match=NAME):
        again(data, "auto")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(JSON, st.binary(max_size=20))
def test_any_header(header: Any, body: bytes) -> None:
    with pytest.raises(SavedStreamError, match=NAME):
        again(packed(header, body), "auto")


@every_order
@given(seed=st.integers(0, 10**6))
def test_damaged_bytes(order: str, seed: int) -> None:
    random = Random(seed)
    found = read_or_refused(mutate_bytes(written(order), random), order)
    assert found is None or is_finite(found)


@every_order
@given(seed=st.integers(0, 10**6))
def test_damaged_descriptions(order: str, seed: int) -> None:
    """Of the tensors, and what is said beside them."""
    random, data = Random(seed), written(order)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if random.random() < 0.5:
        about = mutate_json(header["__metadata__"]["ttapca"].encode(), random)
        header["__metadata__"]["ttapca"] = about.decode("utf-8", "surrogatepass")
        text = json.dumps(header).encode()
    else:
        text = mutate_json(json.dumps(header).encode(), random)
    damaged = len(text).to_bytes(8, "little") + text + data[8 + length :]
    found = read_or_refused(damaged, order)
    assert found is None or is_finite(found)


ANY_NUMBER = st.floats(0, 2) | st.sampled_from([-1.0, 1e-300, 1e6, 1e12, -1e12])


@every_order
@given(data=st.data())
def test_who_is_not_refused_can_go_on(order: str, data: st.DataObject) -> None:
    """Whatever was accepted has finite facts, and good answers come of it."""
    file = File(order)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(names_of(order)))
        values = file.tensors[f"state.{name}"].view(-1)
        if not len(values):
            continue
        place, number = data.draw(st.integers(0, len(values) - 1)), data.draw(ANY_NUMBER)
        values[place : place + data.draw(st.sampled_from([1, len(values)]))] = number
    state, adapter = read_or_refused(file.data(), order), adapted(order)
    if state is None:
        return
    for images in pictures(labels_in_runs(24, 4), 9).split(8):
        health = ttapca.Health("camera", 1, 0, **adapter.facts_of(state))
        json.dumps(health.to_dict(), allow_nan=False)
        logits, state = gone_on(adapter, state, images)
        assert bool(torch.isfinite(logits).all())
