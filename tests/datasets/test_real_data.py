"""The same readers on real images, where this machine has them beside the checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ttapca.cli.arguments import cache_root
from ttapca.datasets import load, read_npz
from ttapca.datasets.catalog import CIFAR10
from ttapca.datasets.classes import CIFAR100_CLASSES
from ttapca.datasets.inventory import inventory

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not on this machine")


@pytest.fixture(scope="module")
def cifar100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cifar100")
    script = SHARED / "unpack_cifar100.py"
    subprocess.run([sys.executable, str(script), str(root)], check=True, capture_output=True)
    return root


@needs_shared
def test_cifar100_in_part_is_read(cifar100: Path) -> None:
    train, test = load("cifar100", "train", root=cifar100), load("cifar100", root=cifar100)
    assert (len(train), len(test)) == (20_000, 10_000)
    assert isinstance(test.images, np.memmap)
    assert test.class_names == CIFAR100_CLASSES
    assert set(np.bincount(test.labels)) == {100}
    assert test.channel_means() == pytest.approx((0.5088, 0.4874, 0.4419), abs=1e-4)


@needs_shared
def test_cifar100_in_part_is_called_so(cifar100: Path) -> None:
    (holding,) = inventory(cifar100)
    assert holding.state == "partial"
    assert holding.detail.startswith("20,000 of 50,000 training images")


@needs_shared
def test_the_reference_of_cifar10_c_is_read() -> None:
    clean = read_npz(SHARED / "cifar10c_reference" / "first200.npz", images="clean")
    assert clean.images.shape == (200, 32, 32, 3)


@pytest.mark.skipif(
    not (cache_root() / CIFAR10.layouts[0].folder).is_dir(),
    reason="CIFAR-10 is not in the cache; get it with: ttapca data get cifar10",
)
def test_cifar10_is_the_published_one() -> None:
    for split, facts in CIFAR10.splits.items():
        images = load("cifar10", split, root=cache_root())
        assert len(images) == facts.count
        assert images.fingerprint() == facts.fingerprint
        assert facts.has_means(images.channel_means())
    train = load("cifar10", "train", root=cache_root()).images
    deviations = [train[..., channel].std(dtype=np.float64) / 255 for channel in range(3)]
    assert deviations == pytest.approx((0.2470, 0.2435, 0.2616), abs=1e-4)
