"""The handwritten digits that scikit-learn carries: real data on every machine, in no time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ttapca.datasets.images import Images
from ttapca.datasets.reading import Split, check_split

HIGHEST_INK = 16  # the digits are counts of 0 to 16
TEST_FRACTION = 3  # one image in three is for testing
SPLIT_SEED = 0


def read_digits(split: Split = "test") -> Images:
    """Read the 1,797 handwritten digits of scikit-learn, 8x8 in grey.

    The split is fixed: a third of each class, chosen once at random, is for testing.

    Args:
        split: `train` or `test`.

    Returns:
        1,201 training or 596 test images, of shape `(n, 8, 8, 1)`.

    Raises:
        OptionError: The split does not exist.

    Example:
        >>> read_digits("test").images.shape[1:]
        (8, 8, 1)
    """
    split = check_split(split)
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255 / HIGHEST_INK)).astype(np.uint8)[..., None]
    labels: NDArray[np.int64] = digits.target.astype(np.int64)
    everything = Images(pixels, labels, tuple(str(name) for name in digits.target_names))
    is_test = _test_mask(labels)
    return everything.subset(is_test if split == "test" else ~is_test)


def _test_mask(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    random = np.random.default_rng(SPLIT_SEED)
    is_test = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        is_test[rows[: len(rows) // TEST_FRACTION]] = True
    return is_test
