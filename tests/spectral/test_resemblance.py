"""Samples that resemble each other count once: by simulated groups whose correlations are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ttapca.spectral.calibration import SourceSpectrum
from ttapca.spectral.position_sample import Positions, PositionSample
from ttapca.spectral.resemblance import (
    Resemblance,
    intraclass_correlation,
    measured_resemblance,
    resemblance_of_stream,
)

BANDS = 5


def energies(generator: np.random.Generator, groups: int, size: int, share: float) -> Tensor:
    """Energies of samples of groups that share so much of the variance of their logarithms."""
    mixing = np.linalg.cholesky(0.4 * np.eye(BANDS) + 0.6) * 0.5
    between = np.sqrt(share) * generator.normal(size=(groups, 1, BANDS))
    within = np.sqrt(1 - share) * generator.normal(size=(groups, size, BANDS))
    return torch.from_numpy(np.exp((between + within).reshape(-1, BANDS) @ mixing.T))


def by_analysis_of_variance(values: list[float], names: list[str]) -> float:
    """The same as `intraclass_correlation`, of one direction, by sums over samples."""
    groups = {name: [v for v, n in zip(values, names, strict=True) if n == name] for name in names}
    count, number = len(values), len(groups)
    mean = sum(values) / count
    means = {name: sum(own) / len(own) for name, own in groups.items()}
    within = sum((v - means[name]) ** 2 for name, own in groups.items() for v in own)
    between = sum(len(own) * (means[name] - mean) ** 2 for name, own in groups.items())
    within, between = within / (count - number), between / (number - 1)
    size = (count - sum(len(own) ** 2 for own in groups.values()) / count) / (number - 1)
    return min(1.0, max(0.0, (between - within) / (between + (size - 1) * within)))


def test_the_correlation_is_that_of_an_analysis_of_variance() -> None:
    generator = np.random.default_rng(0)
    number = np.repeat(np.arange(6), [2, 9, 4, 1, 7, 5])
    rows = generator.normal(size=(28, 3)) + 1.5 * generator.normal(size=(6, 3))[number]
    expected = [by_analysis_of_variance(list(column), list(map(str, number))) for column in rows.T]
    np.testing.assert_allclose(intraclass_correlation(rows, number), expected, rtol=1e-12)


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
@pytest.mark.parametrize("named", [True, False])
def test_groups_are_found_by_name_or_by_their_order(share: float, named: bool) -> None:
    samples = energies(np.random.default_rng(1), 64, 16, share)
    groups = [row // 16 for row in range(len(samples))]
    found = measured_resemblance(samples, None, groups if named else None)
    # What 64 groups tell of a correlation: a tenth of it, about.
    assert found.correlation == pytest.approx(share, abs=0.1)
    assert found.independent == pytest.approx(1024 / (1 + 15 * share), rel=0.35)


def test_samples_in_no_order_count_as_independent() -> None:
    found = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        samples = energies(generator, 20, 20, 0.5)[generator.permutation(400)]
        found += measured_resemblance(samples, None, None).correlation > 0
    assert found <= 2  # one in a hundred, by chance


def test_data_sorted_by_class_are_no_video() -> None:
    samples = energies(np.random.default_rng(2), 10, 50, 0.5)
    classes = torch.arange(10).repeat_interleave(50)
    known = measured_resemblance(samples, classes, None)
    assert known.correlation == 0
    assert known.classmates == pytest.approx(0.5, abs=0.2)
    assert measured_resemblance(samples, None, None).correlation > 0.25


def test_a_video_sorted_by_class_is_one_all_the_same() -> None:
    samples = energies(np.random.default_rng(3), 80, 10, 0.8)
    classes = torch.arange(4).repeat_interleave(200)
    assert measured_resemblance(samples, classes, None).correlation > 0.6


@pytest.mark.parametrize("groups", [8, 60])
def test_new_groups_look_as_usual(groups: int) -> None:
    """P-values of the mean of a whole group that the source has not seen are not too small."""
    generator = np.random.default_rng(4)
    p_values: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(12):
        source = energies(generator, groups, 25, 0.7)
        names = [row // 25 for row in range(len(source))]
        known = measured_resemblance(source, None, names)
        for told in (True, False):
            normal = SourceSpectrum(source, resemblance=known if told else None).batches_of(25)
            new = energies(generator, 20, 25, 0.7).view(20, 25, BANDS).mean(1)
            p_values[told] += normal.p_value(new.log()).tolist()
    assert np.mean(np.array(p_values[True]) < 0.01) <= 0.05
    assert np.mean(np.array(p_values[False]) < 0.01) > 0.5  # what it would be without


def test_a_single_sample_is_judged_as_before() -> None:
    source = energies(np.random.default_rng(5), 100, 5, 0.5)
    known = measured_resemblance(source, None, [row // 5 for row in range(500)])
    excess = known.excess(1)
    assert excess is not None
    assert known.error is not None
    torch.testing.assert_close(excess, known.error)


def test_a_still_scene_is_worth_few_images_and_a_shift_is_no_resemblance() -> None:
    rows = np.random.default_rng(6).normal(size=(60, 9))
    assert resemblance_of_stream(rows, 59) == 0
    shifted = rows * np.r_[1.0, 1.0, 0.9, 1.0, 0.3, 0.1, 0.05, 0.02, 0.01]  # as noise does
    assert resemblance_of_stream(shifted, 59) == 0
    still = rows * np.r_[3.0, 1.0, np.full(7, 0.2)]  # the first bands vary by chance
    assert resemblance_of_stream(still, 59) > 0.9
    assert resemblance_of_stream(still[:2], 1) == 0  # two images may be alike by accident
    assert resemblance_of_stream(rows[:, :3] / 10, 59) == 0  # too few bands to tell


def test_a_file_keeps_all_of_it() -> None:
    source = energies(np.random.default_rng(7), 10, 10, 0.5)
    known = measured_resemblance(source, None, [row // 10 for row in range(100)])
    tensors = known.tensors()
    again = Resemblance.of_tensors(tensors["resemblance"], tensors.get("resemblance_covariances"))
    assert (again.independent, again.correlation) == (known.independent, known.correlation)
    assert again.classmates is None
    torch.testing.assert_close(again.excess(9), known.excess(9))
    fewer = known.truncated(3, rest=True).excess(9)
    assert fewer is not None
    assert fewer.shape == (4, 4)
    torch.testing.assert_close(fewer[:3, :3], known.excess(9)[:3, :3])  # type: ignore[index]
    assert not fewer[3].any()


def test_samples_of_a_group_are_held_out_together() -> None:
    generator = np.random.default_rng(8)
    names = list(generator.integers(0, 23, 200))
    sample = PositionSample(1).take(torch.ones(200, 1), Positions().of(0, 200))
    folds = sample.folds(names)
    assert sorted(torch.cat(folds).tolist()) == list(range(200))
    homes = [{names[row] for row in fold.tolist()} for fold in folds]
    assert sum(map(len, homes)) == 23
    assert len(folds) == 8
