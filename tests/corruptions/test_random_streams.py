"""Numbers that belong to an image."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ttapca.corruptions.random_streams import between, integers, normals, stream_key, uniforms

KEY = stream_key(0, "fog", 1)
# Some with runs of neighbours, which are drawn together.
INDICES = st.lists(st.integers(0, 12) | st.integers(0, 2**40), min_size=1, max_size=8)


@given(indices=INDICES, count=st.integers(1, 9))
def test_an_images_numbers_depend_on_its_index_only(indices, count):
    together = uniforms(KEY, np.array(indices), count)
    for row, index in zip(together, indices, strict=True):
        assert (uniforms(KEY, np.array([index]), count)[0] == row).all()


def test_numbers_are_uniform_and_do_not_repeat():
    numbers = uniforms(KEY, np.arange(500), 401)
    assert 0.0 < numbers.min() < numbers.max() < 1.0
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-4
    assert np.unique(numbers).size == numbers.size
    neighbours = np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]
    assert abs(neighbours) < 0.01


@pytest.mark.parametrize("other", [(1, "fog", 1), (0, "snow", 1), (0, "fog", 2), (2**80, "fog", 1)])
def test_keys_differ(other):
    assert (stream_key(*other) != KEY).all()


def test_numbers_become_what_is_needed():
    assert uniforms(KEY, np.arange(3), 0).shape == (3, 0)
    assert uniforms(KEY, np.arange(0), 4).shape == (0, 4)
    ends = np.array([2.0**-54, 1.0 - 2.0**-53])
    for stop in (1, 2, 3, 5, 7, 63, 64):
        assert integers(ends, stop).tolist() == [0, stop - 1]
    values = normals(uniforms(KEY, np.arange(100), 500), 2.0, 3.0).ravel()
    assert stats.kstest(values, "norm", args=(2.0, 3.0)).pvalue > 1e-4
    assert np.isfinite(normals(ends, 0.0, 1.0)).all()
    assert between(np.array([0.0, 0.5, 1.0]), -2.0, 4.0).tolist() == [-2.0, 1.0, 4.0]
