"""`on_shift`: when it is called, and that nothing it does harms a stream."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ttapca
from adapters import same
from oracles import images, small_convnet
from scripted_classes import fitted, network, pictures, shuffled_labels
from ttapca import Health, ShiftAlarm
from ttapca.errors import CallbackWarning, OptionError
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.stream_batch import StreamBatch

DATA = images(400)
# These images do not resemble others of their class; the tests suppose what older filters suppose.
FITTED = dataclasses.replace(ttapca.fit(small_convnet(), "conv1", DATA, 40), resemblance_=None)
CLEAN = images(640)[400:]  # a basis knows its own data better than any others
SHIFTED = 3 * CLEAN


def watched(alarm: object, **options: object) -> ttapca.Adapter:
    options = {"filter": FITTED, "forgetting": "online", **options}
    return ttapca.adapt(small_convnet(), "wiener", on_shift=alarm, **options)


def run(one: object, samples: Tensor, size: int = 40) -> None:
    for batch in samples.split(size):
        one(batch)  # type: ignore[operator]


def states(p_values: list[float], alarm: ShiftAlarm) -> list[bool]:
    """Look at the whole past of every block: the last run of `blocks` that said something counts.

    A run counts only from where the one before it ended, and only against the state that it left.
    """
    found = []
    for last in range(len(p_values)):
        shifted, since = False, 0
        for end in range(1, last + 2):
            window = p_values[max(since, end - alarm.blocks) : end]
            if len(window) < alarm.blocks:
                continue
            against = [p > alarm.ends if shifted else p <= alarm.begins for p in window]
            if all(against):
                shifted, since = not shifted, end
        found.append(shifted)
    return found


@given(
    st.lists(st.sampled_from([0.001, 0.01, 0.03, 0.05, 0.0501, 0.9]), max_size=25),
    st.integers(1, 4),
)
def test_hysteresis_with_scripted_p_values(p_values: list[float], blocks: int) -> None:
    alarm = ShiftAlarm(print, blocks=blocks)
    state, found = (False, 0), []
    for p_value in p_values:
        state = alarm.next(*state, p_value)
        found.append(state[0])
    assert found == states(p_values, alarm)


@pytest.mark.parametrize("forgetting", ["episodic", "online", "continual"])
@pytest.mark.parametrize("size", [1, 40, 120])
def test_it_is_called_when_a_shift_begins_and_when_it_ends(
    size: int, forgetting: ttapca.adaptation.adapter.Forgetting
) -> None:
    """After two blocks of 40 images, or of one batch; and small batches make the same blocks."""
    said: list[Health] = []
    alarm = ShiftAlarm(said.append, images=40, ends=0.01)  # which hardly any clean block is below
    adapter = watched(alarm, forgetting=forgetting)
    run(adapter, torch.cat([CLEAN, SHIFTED, CLEAN]), size)
    block = max(size, 40)
    assert [health.shifted for health in said] == [True, False]
    assert [health.images for health in said] == [240 + 2 * block, 480 + 2 * block]
    assert all(health.stream == "default" for health in said)
    assert adapter.health.shifted is False
    assert "not shifted" in repr(adapter.health)


def test_every_stream_has_its_own_state_which_files_keep(tmp_path: Path) -> None:
    said: list[Health] = []
    adapter = watched(ShiftAlarm(said.append, images=40))
    left, right = adapter.stream("left"), adapter.stream("right")
    for good, bad in zip(CLEAN.split(40), SHIFTED.split(40), strict=True):
        left(good)
        right(bad)
    assert [(health.stream, health.shifted) for health in said] == [("right", True)]
    assert (left.health.shifted, right.health.shifted) == (False, True)
    # In the middle of a block, and after one of the two clean blocks that end a shift.
    run(right, CLEAN[:60], 20)
    right.save(tmp_path / "right")
    again: list[Health] = []
    loaded, restored = (watched(ShiftAlarm(again.append, images=40)) for _ in range(2))
    loaded.stream("other").load(tmp_path / "right")
    restored.load_state_dict(adapter.state_dict())
    twin = copy.deepcopy(adapter)
    for camera in (loaded.stream("other"), restored.stream("right")):
        assert camera.health.shifted is True
        camera(CLEAN[60:80])
        assert camera.health.shifted is False
    assert [health.stream for health in again] == ["other", "right"]
    twin.stream("right")(CLEAN[60:80])
    assert len(said) == 2
    assert said[1].shifted is False
    right.reset()
    assert right.health.shifted is False
    assert len(said) == 2


def test_streams_of_adapters_with_and_without_an_alarm_are_of_one_kind(tmp_path: Path) -> None:
    plain, alarmed = watched(None), watched(print)
    plain(X := SHIFTED[:40])
    plain.stream("default").save(tmp_path / "stream")
    alarmed.stream("default").load(tmp_path / "stream")
    assert torch.equal(alarmed(X), plain(X))
    assert (plain.health.shifted, alarmed.health.shifted) == (None, False)
    alarmed.stream("default").save(tmp_path / "stream")
    plain.stream("default").load(tmp_path / "stream")


def test_a_function_that_raises_harms_neither_stream_nor_prediction() -> None:
    def fail(health: Health) -> None:
        raise RuntimeError(f"no pager for {health.stream}")

    quiet = watched(ShiftAlarm(lambda health: None, images=40))
    broken = watched(ShiftAlarm(fail, images=40))
    for number, batch in enumerate(SHIFTED.split(40)):
        expected = quiet(batch)
        if number == 1:
            with pytest.warns(CallbackWarning, match=r"must not raise.*no pager for default"):
                assert torch.equal(broken(batch), expected)
        else:
            assert torch.equal(broken(batch), expected)
    assert same(broken.hub.contents(), quiet.hub.contents())


def test_what_cannot_be_caught_comes_after_the_batch_was_kept() -> None:
    def stop(health: Health) -> None:
        raise KeyboardInterrupt

    quiet = watched(ShiftAlarm(lambda health: None, images=40))
    stopped = watched(ShiftAlarm(stop, images=40))
    run(quiet, SHIFTED[:80])
    with pytest.raises(KeyboardInterrupt):
        run(stopped, SHIFTED[:80])
    assert same(stopped.hub.contents(), quiet.hub.contents())
    assert torch.equal(stopped(SHIFTED[80:120]), quiet(SHIFTED[80:120]))


def test_the_function_may_use_the_adapter() -> None:
    def begin_anew(health: Health) -> None:
        adapter.reset()
        adapter.stream("copy")(CLEAN[:40])

    adapter = watched(ShiftAlarm(begin_anew, images=40))
    run(adapter, SHIFTED[:80])
    assert adapter.health.images == 0
    assert adapter.stream("copy").health.images == 40


def test_broken_batches_are_not_looked_at() -> None:
    said: list[Health] = []
    adapter = watched(ShiftAlarm(said.append, images=40))
    bad = SHIFTED[:40].clone()
    bad[3, 0, 0, 0] = math.nan
    for _ in range(5):
        adapter(bad)
    assert not said
    run(adapter, SHIFTED[:80])
    assert [(health.images, health.skipped) for health in said] == [(80, 5)]


def test_without_an_alarm_and_in_inference_mode_nothing_changes() -> None:
    plain, alarmed = watched(None), watched(lambda health: None)
    for batch in torch.cat([CLEAN[:80], SHIFTED[:80]]).split(20):
        with torch.inference_mode():
            found = alarmed(batch)
        assert torch.equal(found, plain(batch))


@pytest.mark.parametrize("memory", [100.0, 1000.0])
def test_a_shift_in_the_middle_of_a_long_run_is_told(memory: float) -> None:
    """What fades is made up for by what comes, so that a run never counts for nothing."""
    said: list[Health] = []
    adapter = ttapca.adapt(
        network(),
        "wiener",
        filter=fitted(),
        forgetting="online",
        order="auto",
        memory=memory,
        on_shift=said.append,
    )
    generator = torch.Generator().manual_seed(3)
    clean = pictures(torch.full((1000,), 2), 8)
    noise = torch.randn(clean[800:].shape, generator=generator, dtype=clean.dtype)
    run(adapter, clean[:800], 20)
    before = adapter.health
    assert not said
    assert before.shift == 0.0
    assert before.ordered > 0.9
    run(adapter, clean[800:] + 0.5 * noise, 20)
    # Blocks have four batches, and two of them in a row tell.
    assert [(health.images, health.shifted) for health in said] == [(960, True)]
    assert adapter.health.shift > 0.3


@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_block_counts_by_itself(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that went on for long begins with each block; images in no order count for one."""
    known = dataclasses.replace(fitted(), resemblance_=None)
    for labels, least, most in (
        (torch.full((640,), 2), worth_of_a_run(64), worth_of_a_run(64) + 12),
        (shuffled_labels(640, 3), 50, 64),
    ):
        adapter = ttapca.adapt(
            network(), "wiener", filter=known, forgetting="online", order="auto", on_shift=print
        )
        found, evidence = [], ClosedFormGain.evidence

        def seen(self: ClosedFormGain, energies: Tensor, *counts: float, **given: object) -> object:
            if len(counts) == 2:  # of a block; the health of a stream gives more
                found.append(counts)  # noqa: B023 - called in this round only
            return evidence(self, energies, *counts, **given)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(ClosedFormGain, "evidence", seen)
            run(adapter, pictures(labels, 8), size)
        assert [samples for samples, _ in found] == [64.0] * 10
        for _, independent in found[4:]:  # by now it knows the order
            assert least <= independent <= most


def worth_of_a_run(images: int) -> float:
    return images / (1 + (images - 1) * CONSTANTS.likeness)


Look = Callable[[StreamBatch, int, Tensor | None], bool]


def _look_instead(
    look: Look, logits: Tensor, batch: StreamBatch, number: int, _: Tensor | None
) -> bool:
    return look(batch, number, logits)


@pytest.mark.parametrize(
    ("clean", "shifted", "known", "told"),
    [
        (5, 5, True, True),
        (1, 1, True, False),
        (1, 5, True, False),  # adaptation may have hidden that there is one class
        (5, 1, True, False),
        (0, 5, True, False),  # who starts shifted was never seen to have many classes
        (5, 5, False, False),  # the source's classes are not known
    ],
)
def test_a_weak_shift_is_told_where_classes_surely_are_many(
    clean: int, shifted: int, known: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers say how many classes are predicted; a strong shift is told whatever they are."""
    for factor in (1.12, 4.0):
        said: list[Health] = []
        adapter = watched(
            ShiftAlarm(said.append, images=200),
            filter=dataclasses.replace(FITTED, rest_=None),  # which weak is depends on the bands
            order="shuffled",
        )
        adapter.watch._shares = torch.full((5,), 0.2) if known else None
        look = adapter.watch.look
        for batch, classes in ((DATA[:200], clean), *[(factor * DATA[:200], shifted)] * 2):
            if classes:
                logits = 20 * torch.eye(5, dtype=torch.float64)[torch.arange(200) % classes]
                seen = functools.partial(_look_instead, look, logits)
                monkeypatch.setattr(adapter.watch, "look", seen)
                adapter(batch)
        assert [health.shifted for health in said] == [True] * (told or factor == 4.0)
        skew = adapter.health.skew
        assert skew == 0.0 if told else skew > 0.9


def test_classes_are_counted_as_a_loop_would() -> None:
    adapter = watched(lambda health: None, order="shuffled")
    expected = torch.zeros(5, dtype=torch.float64)
    for batch in DATA[:60].split(20):
        probabilities = adapter(batch).softmax(1)
        expected = expected * math.exp(-20 / CONSTANTS.recent)
        for row in probabilities:
            expected = expected + row
    assert adapter.health.composition == pytest.approx((expected / expected.sum()).tolist())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"callback": 3}, "must be a function of a `Health`"),
        ({"begins": 0.0}, "`begins` must be"),
        ({"begins": 0.2, "ends": 0.1}, "`ends` must be"),
        ({"blocks": 0}, "`blocks` must be"),
        ({"images": 1.5}, "`images` must be"),
    ],
)
def test_wrong_options(options: dict[str, object], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        ShiftAlarm(**{"callback": print, **options})  # type: ignore[arg-type]


def test_who_cannot_notice_a_shift_refuses_it() -> None:
    model = small_convnet()
    for method, options in (("bn", {}), ("tent", {"filter": FITTED})):
        with pytest.raises(OptionError, match="`on_shift` needs a filter with closed-form gains"):
            ttapca.adapt(model, method, on_shift=print, **options)
    with pytest.raises(OptionError, match="must be a function"):
        watched("loud")
    ttapca.adapt(model, "tent", filter=FITTED, gain="wiener", on_shift=print).detach()
