"""One way in for every layout; the examples of docstrings and docs; and real images, if any."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ttapca.datasets
from ttapca.cli.arguments import cache_root
from ttapca.datasets import inventory, load, read_npz, write_cifar_binary
from ttapca.datasets.catalog import CIFAR10
from ttapca.datasets.cifar import CIFAR10_BINARY, CIFAR100_BINARY, CIFAR100_CLASSES
from ttapca.errors import DataFormatError, DataNotFoundError, OptionError

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not on this machine")


def test_a_name_is_looked_for_in_the_root(make_images, tmp_path):
    with pytest.raises(OptionError, match="`cifar10` is looked for in a folder: give `root=`"):
        load("cifar10")
    for name, version in (("cifar10", CIFAR10_BINARY), ("cifar100", CIFAR100_BINARY)):
        with pytest.raises(DataNotFoundError, match=f"Get it with: ttapca data get {name}"):
            load(name, root=tmp_path)
        images = make_images(4, seed=len(name))
        (tmp_path / version.folder).mkdir()
        write_cifar_binary(tmp_path / version.folder, version, {"test": images})
        assert load(name, root=tmp_path).fingerprint() == images.fingerprint()
    with pytest.raises(OptionError, match="several data sets: cifar-10-batches-bin, cifar-100-b"):
        load(tmp_path)


def test_what_is_neither_a_name_nor_a_layout(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"`cifar-10` is neither .* Did you mean `cifar10`"):
        load("cifar-10")
    with pytest.raises(DataFormatError, match="is of no known layout: neither CIFAR"):
        load(tmp_path)
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(DataFormatError, match=r"must be an `.npz`, or an `.npy` beside"):
        load(tmp_path / "a.csv")


def test_options_of_cifar_c(make_images, tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    np.save(folder / "labels.npy", np.zeros(5, np.uint8))
    np.save(folder / "fog.npy", np.zeros((5, 4, 4, 3), np.uint8))
    found = load("cifar10-c", root=tmp_path, corruption="fog", severity=1)
    assert (len(found), len(found.class_names)) == (1, 10)
    with pytest.raises(OptionError, match=r"give `corruption=` and `severity=`. Corruptions: fog"):
        load("cifar10-c", root=tmp_path)
    with pytest.raises(OptionError, match="CIFAR-C has a test split only"):
        load(folder, "train", corruption="fog", severity=1)
    write_cifar_binary(tmp_path, CIFAR10_BINARY, {"test": make_images(2)})
    with pytest.raises(OptionError, match="are for the CIFAR-C layout only"):
        load(tmp_path, corruption="fog", severity=1)


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.iter_modules(ttapca.datasets.__path__)]
)
def test_examples_run(name):
    module = importlib.import_module(f"ttapca.datasets.{name}")
    assert doctest.testmod(module).failed == 0


def test_every_public_name_has_an_example():
    constants = {"DATA_SETS", "DIGITS", "FROST", "Order", "Split"}
    for name in set(ttapca.datasets.__all__) - constants:
        assert ">>>" in (getattr(ttapca.datasets, name).__doc__ or ""), name


def test_the_documentation():
    page = Path(__file__).parents[2] / "docs" / "data.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 10
    assert outcome.failed == 0


def test_data_need_no_torch():
    code = "import sys, ttapca.datasets; sys.exit('torch' in sys.modules or 'pooch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_shared
def test_cifar100_in_part_is_read_and_called_so(tmp_path):
    script = SHARED / "unpack_cifar100.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    train, test = load("cifar100", "train", root=tmp_path), load("cifar100", root=tmp_path)
    assert (len(train), len(test)) == (20_000, 10_000)
    assert test.class_names == CIFAR100_CLASSES
    assert set(np.bincount(test.labels)) == {100}
    assert test.channel_means() == pytest.approx((0.5088, 0.4874, 0.4419), abs=1e-4)
    (holding,) = inventory(tmp_path)
    assert holding.state == "partial"
    assert holding.detail.startswith("20,000 of 50,000 training images")


@needs_shared
def test_the_reference_of_cifar10_c_is_read():
    clean = read_npz(SHARED / "cifar10c_reference" / "first200.npz", images="clean")
    assert clean.images.shape == (200, 32, 32, 3)


@pytest.mark.skipif(
    not (cache_root() / CIFAR10.layouts[0].folder).is_dir(),
    reason="CIFAR-10 is not in the cache; get it with: ttapca data get cifar10",
)
def test_cifar10_is_the_published_one():
    for split, facts in CIFAR10.splits.items():
        images = load("cifar10", split, root=cache_root())
        assert len(images) == facts.count
        assert images.fingerprint() == facts.fingerprint
        assert facts.has_means(images.channel_means())
    train = load("cifar10", "train", root=cache_root()).images
    deviations = [train[..., channel].std(dtype=np.float64) / 255 for channel in range(3)]
    assert deviations == pytest.approx((0.2470, 0.2435, 0.2616), abs=1e-4)
