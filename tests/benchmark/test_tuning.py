"""`Tuning`: what is chosen, on what, and that a search goes on where it was stopped."""

from __future__ import annotations

import doctest
from pathlib import Path
from unittest.mock import DEFAULT, MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ttapca
from ttapca import networks
from ttapca.benchmark import Benchmark, Plan, Results, measurement
from ttapca.benchmark.search import STARTUP, Choices, Range, Sampler, Search, SearchSpace
from ttapca.benchmark.tuning import (
    CONDITIONS,
    Tuned,
    Tuning,
    check_held_out,
    check_split,
    read_conditions,
)
from ttapca.corruptions import EXTRA, STANDARD
from ttapca.corruptions.apply import corrupt_any_size
from ttapca.datasets import Split, read_digits, to_tensor
from ttapca.errors import OptionError

PLAN = Plan("digits", "digits", settings=("online",), batch_sizes=(20,), images=40)
FOG = (("fog", 4), ("speckle_noise", 5), ("contrast", 3))
RATES = SearchSpace("tent", {"lr": Range(1e-3, 0.5, log=True, points=3), "steps": Choices((1, 2))})


def search(to: Path, space: SearchSpace = RATES, how: Search | None = None, **run: object) -> Tuned:
    bench = Benchmark(PLAN, split="train")
    return Tuning(bench, space, how or Search(), FOG).run(to, **run)  # type: ignore[arg-type]


def summary(tuned: Tuned) -> list[tuple[object, ...]]:
    return [(one.options, one.status, one.errors, one.clean) for one in tuned.trials]


def test_a_grid_is_a_loop_over_training_images(tmp_path: Path) -> None:
    tuned = search(tmp_path / "t.sqlite")
    network = networks.load("digits-small-cnn").eval()
    training = read_digits("train")[-40:]
    order = np.random.default_rng(0).permutation(40)
    labels = torch.from_numpy(training.labels[order])

    def error(method: str, condition: tuple[str, int] | None, **options: object) -> float:
        pixels = training.images
        if condition is not None:
            pixels = corrupt_any_size(training.images, *condition, 1)
        images = to_tensor(np.asarray(pixels)[order])
        with ttapca.adapt(network, method, forgetting="online", **options) as adapted:  # type: ignore[arg-type]
            found = torch.cat([adapted(part).argmax(1) for part in images.split(20)])
        return 100 * float((found != labels).double().mean())

    expected = {}
    for lr in (0.001, 0.02236, 0.5):
        for steps in (1, 2):
            errors = [error("tent", each, lr=lr, steps=steps) for each in FOG]
            expected[lr, steps] = (sum(errors) / 3, error("tent", None, lr=lr, steps=steps))
    found = {(one.options["lr"], one.options["steps"]): one for one in tuned.trials}
    assert found.keys() == expected.keys()
    for place, (mean, clean) in expected.items():
        assert found[place].mean == pytest.approx(mean)
        assert found[place].clean == pytest.approx(clean)
    assert tuned.best is not None
    assert tuned.best.mean == pytest.approx(min(mean for mean, _ in expected.values()))
    scores = [one.score for one in tuned.trials]
    assert scores == sorted(scores)  # type: ignore[type-var]
    assert tuned.source.mean == pytest.approx(sum(error("source", each) for each in FOG) / 3)


def test_what_is_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "t.sqlite"
    small = SearchSpace("bn", {"prior": Choices((0, 16))})
    measure = MagicMock(wraps=measurement.measure, side_effect=[*[DEFAULT] * 5, KeyboardInterrupt])
    with monkeypatch.context() as patch:
        patch.setattr(measurement, "measure", measure)
        with pytest.raises(KeyboardInterrupt):
            search(to, small)
    with Results(to, readonly=True) as results:
        assert len(results.rows()) == 5
    before = search(to, small)
    with Results(to, readonly=True) as results:
        rows = results.rows()
    assert len(rows) == 3 * 4
    assert {row.cell.data for row in rows} == {"digits, training images"}
    assert {row.cell.options for row in rows} == {"{}", '{"prior": 0}', '{"prior": 16}'}
    monkeypatch.setattr(measurement, "measure", MagicMock(side_effect=AssertionError))
    assert search(to, small) == before
    with Results(to, readonly=True) as results:
        assert results.rows() == rows


def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    small = SearchSpace("bn", {"prior": Choices((0, 16))})
    one = search(tmp_path / "one.sqlite", small)
    two = search(tmp_path / "two.sqlite", small, engine="joblib:2")
    assert summary(one) == summary(two)


def test_tpe_proposes_the_same_again(tmp_path: Path) -> None:
    space = SearchSpace("bn", {"alpha": Range(0, 1)})
    how = Search("tpe", STARTUP + 2, seed=3)
    first = search(tmp_path / "a.sqlite", space, how)
    assert len(first.trials) == STARTUP + 2
    assert summary(first) == summary(search(tmp_path / "b.sqlite", space, how))
    assert first == search(tmp_path / "a.sqlite", space, how)  # replayed from the file


def test_random_needs_its_seed_only() -> None:
    def proposed(seed: int, score: float) -> list[dict[str, object]]:
        sampler = Sampler(RATES, Search("random", 7, seed))
        options = []
        while some := sampler.ask():
            options += [one.options for one in some]
            for one in some:
                sampler.tell(one, score)
        return options

    drawn = proposed(2, 1.0)
    assert len(drawn) == 7
    assert all(0.001 <= one["lr"] <= 0.5 and one["steps"] in (1, 2) for one in drawn)  # type: ignore[operator]
    assert drawn == proposed(2, 3.0) != proposed(3, 1.0)


def test_clean_images_count_if_asked(tmp_path: Path) -> None:
    to, space = tmp_path / "t.sqlite", SearchSpace("tent", {"lr": Choices((0.001, 0.5))})
    tuning = Tuning(Benchmark(PLAN, split="train"), space, Search(), FOG, clean_weight=2.0)
    for trial in tuning.run(to).trials:
        assert trial.mean is not None
        assert trial.clean is not None  # the source makes no mistakes on these
        assert trial.score == pytest.approx(trial.mean + 2 * trial.clean)


def test_a_trial_that_fails_is_last(tmp_path: Path) -> None:
    space = SearchSpace("shot", {"classifier": Choices(("nowhere", "fc"))})
    tuned = search(tmp_path / "t.sqlite", space)
    assert [one.status for one in tuned.trials] == ["done", "failed"]
    assert tuned.trials[1].options == {"classifier": "nowhere"}
    assert "nowhere" in tuned.trials[1].reason


@given(
    low=st.floats(1e-6, 1.0), factor=st.floats(1.01, 1e6), log=st.booleans(), share=st.floats(0, 1)
)
def test_numbers_stay_in_their_range(low: float, factor: float, log: bool, share: float) -> None:
    one = Range(low, low * factor, log, points=5)
    assert one.low <= one.at(share) <= one.high
    grid = one.grid("lr")
    assert list(grid) == sorted(set(grid))
    assert grid[0] == pytest.approx(low, rel=1e-3)
    assert grid[-1] == pytest.approx(low * factor, rel=1e-3)


def test_conditions_that_are_reported_are_refused() -> None:
    for name in STANDARD:
        with pytest.raises(OptionError, match=f"not reported, .*found {name}:5. Take a severity"):
            check_held_out([("spatter", 5), (name, 5)])
    assert read_conditions(["extra:5", "fog:1"]) == (*((name, 5) for name in EXTRA), ("fog", 1))
    check_held_out(CONDITIONS)
    with pytest.raises(OptionError, match="found gaussian_noise:5, shot_noise:5"):
        read_conditions(["standard:5"])
    with pytest.raises(OptionError, match="NAME:SEVERITY, such as fog:4; found `fog`"):
        read_conditions(["fog"])
    with pytest.raises(OptionError, match="found `clean`"):
        read_conditions(["clean:0"])
    for wrong in (("clean", 0), ("fgo", 4), ("fog", 6)):
        with pytest.raises(OptionError, match=f"from 1 to 5; found {wrong[0]}:{wrong[1]}."):
            check_held_out([("fog", 4), wrong])
    with pytest.raises(OptionError, match="at least one condition"):
        read_conditions([])
    with pytest.raises(OptionError, match="from 1 to 5; found fog:6"):
        read_conditions(["fog:6"])


def test_test_images_only_where_there_are_no_others(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="`digits` has 1,201, and the test images were asked"):
        check_split("digits", "test", read_digits)
    single, digits = tmp_path / "all.npz", read_digits()[:20]
    single.touch()

    def only(split: Split) -> object:
        return digits

    with pytest.raises(OptionError, match="holds one set of images, which `bench` takes"):
        check_split(str(single), "train", only)  # type: ignore[arg-type]
    check_split(str(single), "test", only)  # type: ignore[arg-type]

    def tests_only(split: Split) -> object:
        if split == "train":
            raise OptionError("no such split")
        return digits

    check_split(str(single), "test", tests_only)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no such split"):
        check_split(str(single), "train", tests_only)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("source", {"lr": Choices((1,))}, "`source` has none that are plain"),
        ("tent", {}, "at least one option to choose; found none. `tent` has gain,"),
        ("tent", {"lr": Choices(())}, "`lr` needs at least one value"),
        ("tent", {"rate": Choices((1,))}, "`tent` has no option `rate`"),
        ("tent", {"lr": Choices((0.1, -1.0))}, "lr` must be a finite number above 0; found -1.0"),
        ("tent", {"lr": Range(0.0, 1.0)}, "lr` must be a finite number above 0; found 0.0"),
        ("tent", {"steps": Range(1.0, 8.5)}, "steps` must be a whole number from 1 on"),
        ("tent", {"lr": Range(0.1, 0.1)}, "goes from 0.1 to 0.1"),
        ("tent", {"lr": Range(0.1, 1.0, points=0)}, "`points` must be a whole number from 1 on"),
        ("tent", {"logits": Choices(("befor",))}, "one of before, after"),
        ("tent", {"filter": Choices(("a",))}, "filter` must be true or false"),
        ("memo", {"seed": Choices((1,))}, "seed of `memo` is that of the plan"),
    ],
)
def test_what_no_method_takes_is_refused(method: str, options: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(OptionError, match=said):
        SearchSpace(method, options)


def test_searches_that_make_no_sense() -> None:
    ranges = SearchSpace("tent", {"lr": Range(0.1, 1.0), "steps": Range(1, 4)})
    assert ranges.options["steps"].grid("steps") == (1, 2, 3, 4)
    assert Sampler(ranges, Search()).total == 30  # of TPE: there is no grid
    with pytest.raises(OptionError, match="A grid needs the values of `lr`; found a range"):
        Sampler(ranges, Search("grid"))
    with pytest.raises(OptionError, match="`trials=` would have no effect"):
        Sampler(RATES, Search(trials=3))
    with pytest.raises(OptionError, match="at most 10,000 combinations; found 10,001"):
        SearchSpace("tent", {"steps": Range(1, 10_001)}).grid()
    with pytest.raises(OptionError, match="`sampler` must be one of grid, random, tpe"):
        Search("bayes")  # type: ignore[arg-type]
    bench = Benchmark(PLAN.changed(settings=("mixed",)))
    with pytest.raises(OptionError, match="found the setting mixed, which joins them"):
        Tuning(bench, RATES)
    bench = Benchmark(PLAN.changed(corrupted="CIFAR-10-C"))
    with pytest.raises(OptionError, match="a folder of corrupted test images"):
        Tuning(bench, RATES)


def test_the_page_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "tuning.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 5
    assert outcome.failed == 0
