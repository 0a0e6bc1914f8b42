"""A stream in the mode `auto`: who answers, what is told of it, and what a restart leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn

import ttapca
from serving.clients import described
from serving.conftest import Serving
from ttapca.adaptation.auto_mode import WAIT
from ttapca.datasets import TensorBatches, read_digits, to_tensor
from ttapca.errors import OptionError, SavedStreamError
from ttapca.serving import Answer, StreamPool, StreamStore
from ttapca.serving.stream_record import StreamStatus

SIZE = 44  # images of a request
REFUSED = r"The mode `auto` estimates .* Fit it with `ttapca fit ... --held-out 1000`"


@pytest.fixture(scope="module")
def labelled() -> tuple[Tensor, Tensor]:
    found = read_digits("test")
    return to_tensor(found.images), torch.as_tensor(found.labels)


@pytest.fixture(scope="module")
def knowing(digits_network: nn.Module, labelled: tuple[Tensor, Tensor]) -> ttapca.FittedFilter:
    """A filter that knows a temperature, of 200 digits that no stream has."""
    held_out = [(labelled[0][:200], labelled[1][:200])]
    source = TensorBatches(read_digits("train"), 250)
    return ttapca.fit(digits_network, "conv1", source, labelled=held_out)


Open = Callable[..., StreamPool]


@pytest.fixture
def open_pool(digits_network: nn.Module, knowing: ttapca.FittedFilter) -> Open:
    def make(**options) -> StreamPool:
        return StreamPool(digits_network, knowing, **{"mode": "auto", **options})

    return make


def requests(images: Tensor, noise: float, rounds: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for batch in images[200:].split(SIZE) * rounds:
        found.append((batch + noise * torch.randn(batch.shape, generator=generator)).clamp(0, 1))
    return found


def test_clean_images_are_answered_by_the_untouched_network_bit_for_bit(
    open_pool: Open, digits_network: nn.Module, labelled: tuple[Tensor, Tensor]
) -> None:
    with open_pool() as pool:
        for batch in requests(labelled[0], 0):
            with torch.no_grad():  # as many as a pass in auto has
                plain = digits_network(torch.cat([batch, batch]))[: len(batch)]
            answer = pool.predict("a", batch)
            assert torch.equal(answer.logits, plain)
            assert not answer.adapted
        status = pool.status("a")
    assert (status.mode, status.adapting, status.switches) == ("auto", False, 0)
    assert status.adapted_share == 0
    assert status.health.expected_error_untouched is not None


def test_images_that_have_shifted_are_adapted_to_after_a_while(
    open_pool: Open, digits_network: nn.Module, labelled: tuple[Tensor, Tensor]
) -> None:
    batches, images = requests(labelled[0], 0.4), 0
    truth = list(labelled[1][200:].split(SIZE)) * 2
    wrong = torch.zeros(3)  # of the untouched network, in `on` and in `auto`
    with open_pool() as pool:
        pool.set_mode("on", "on")
        for batch, classes in zip(batches, truth, strict=True):
            images += len(batch)
            with torch.no_grad():
                plain = digits_network(torch.cat([batch, batch]))[: len(batch)]
            on, auto = pool.predict("on", batch), pool.predict("a", batch)
            assert auto.glance.adapting == (images >= WAIT)
            assert auto.adapted == auto.glance.adapting
            if auto.glance.adapting:
                assert torch.allclose(auto.logits, on.logits, atol=1e-4)
            else:
                assert torch.equal(auto.logits, plain)
            assert auto.differ == int((on.logits.argmax(1) != plain.argmax(1)).sum())
            every = (plain, on.logits, auto.logits)
            wrong += torch.tensor([float((each.argmax(1) != classes).sum()) for each in every])
        status = pool.status("a")
        assert pool.status("on").adapting
    assert wrong[1] < wrong[2] < wrong[0]
    assert (status.adapting, status.switches, status.harmful) == (True, 1, False)
    assert 0 < status.adapted_share < 1
    assert status.disagreement is not None
    estimates = (status.health.expected_error, status.health.expected_error_untouched)
    assert estimates[0].share < estimates[1].share  # type: ignore[union-attr]


def test_a_restart_changes_no_answer(
    open_pool: Open, labelled: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    batches = requests(labelled[0], 0.4)

    def told(answer: Answer) -> tuple[object, ...]:
        return answer.glance.adapting, answer.glance.switches, answer.adapted, answer.differ

    with open_pool() as pool:
        expected = [pool.predict("a", batch) for batch in batches]
    found, path = [], tmp_path / "streams.sqlite"
    for first in range(0, len(batches), 3):  # before and after the switch
        with StreamStore(path) as store, open_pool(mode="off", store=store) as pool:
            if first == 0:
                pool.set_mode("a", "auto")
            found += [pool.predict("a", batch) for batch in batches[first : first + 3]]
            saved = pool.dump("a")
    assert {each.glance.switches for each in found} == {0, 1}
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.logits, other.logits)
        assert told(one) == told(other)
    with open_pool() as pool:
        assert pool.restore("b", saved).adapting
        assert pool.dump("b") == saved
        pool.set_mode("b", "auto")  # the mode that it has: nothing changes
        assert pool.dump("b") == saved
        # After images in another mode the choice begins anew. So it does with `reset`.
        assert pool.set_mode("b", "on").adapting
        pool.predict("b", batches[0])
        status = pool.set_mode("b", "auto")
        assert (status.adapting, status.switches) == (False, 0)
        assert pool.restore("b", saved).adapting
        assert not pool.reset("b").adapting


def test_a_saved_choice_that_is_damaged_is_refused(
    open_pool: Open, labelled: tuple[Tensor, Tensor]
) -> None:
    with open_pool() as pool:
        pool.predict("a", labelled[0][:5])
        saved = pool.dump("a")
        tensors, header = load(saved), saved[8 : 8 + int.from_bytes(saved[:8], "little")]
        about = json.loads(header)["__metadata__"]
        name = "state.auto.gain"
        for change in (None, -tensors[name], tensors[name] * float("nan"), torch.zeros(2)):
            others = {each: value for each, value in tensors.items() if each != name}
            changed = others if change is None else {**others, name: change}
            with pytest.raises(SavedStreamError, match="auto"):
                pool.restore("b", save(changed, about))
        # Of other classes: the choice begins anew, and the stream goes on.
        longer = {**tensors, "state.auto.sums": torch.ones(40, dtype=torch.float64)}
        pool.restore("b", save(longer, about))
        assert len(pool.predict("b", labelled[0][:5]).logits) == 5


def test_streams_without_a_choice_load_as_before(
    open_pool: Open, labelled: tuple[Tensor, Tensor]
) -> None:
    with open_pool() as pool:
        pool.set_mode("a", "shadow")
        pool.predict("a", labelled[0][:5])
        saved = pool.dump("a")
        assert b"auto" not in saved  # so it is what an older ttapca has written
        assert pool.restore("b", saved).mode == "shadow"
        pool.set_mode("b", "auto")
        pool.predict("b", labelled[0][:5])
        assert b"state.auto.gain" in pool.dump("b")


def test_numbers_that_are_not_finite_are_answered_by_the_untouched_network(
    open_pool: Open, labelled: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = requests(labelled[0], 0.4)
    with open_pool() as pool:
        for batch in batches:
            pool.predict("a", batch)
        assert pool.status("a").adapting
        predict = pool._network._adapter.predict_streams

        def broken(*asked):
            logits, outcomes = predict(*asked)
            logits[SIZE:] = torch.nan  # of the adapted copies
            return logits, outcomes

        monkeypatch.setattr(pool._network._adapter, "predict_streams", broken)
        answer = pool.predict("a", batches[0])
        assert torch.isfinite(answer.logits).all()
        assert (answer.adapted, answer.differ) == (False, None)
        assert pool.status("a").health.skipped == 1


def test_it_needs_a_temperature_and_classes_that_exclude_each_other(
    digits_network: nn.Module, digits_filter: ttapca.FittedFilter, knowing: ttapca.FittedFilter
) -> None:
    with pytest.raises(OptionError, match=REFUSED):
        StreamPool(digits_network, digits_filter, mode="auto")
    with pytest.raises(OptionError, match=REFUSED):
        StreamPool(digits_network, knowing, mode="auto", outputs="multilabel")
    with StreamPool(digits_network, digits_filter) as pool:  # the network was let go of
        with pytest.raises(OptionError, match=REFUSED):
            pool.set_mode("a", "auto")
        assert pool.names() == []


def test_the_service_tells_of_it_or_refuses_it(
    serving: Serving, knowing: ttapca.FittedFilter, images: NDArray[np.uint8]
) -> None:
    refusing = serving()
    answer = refusing.ask("PUT", "/v1/streams/a", json={"mode": "auto"})
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "bad_body"
    assert "--held-out" in answer.json()["error"]["message"]
    client = serving(fitted=knowing)
    answer = client.ask("PUT", "/v1/streams/a", json={"mode": "auto"})
    assert described(answer, StreamStatus)["adapting"] is False
    noise = np.random.default_rng(0).normal(0, 100, images[:250].shape)
    noisy = (images[:250] + noise).clip(0, 255).astype(np.uint8)
    answer = client.predict("a", noisy).json()
    assert (answer["mode"], answer["adapted"]) == ("auto", True)
    assert (answer["health"]["adapting"], answer["health"]["switches"]) == (True, 1)
    assert answer["differ"] > 0
    text = client.ask("GET", "/metrics").text
    for name, value in (("adapting", 1.0), ("switches", 1.0), ("harmful", 0.0)):
        assert f'ttapca_stream_{name}{{stream="a"}} {value}' in text
