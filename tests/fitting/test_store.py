from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ttapca
from fitting.parted import NETWORKS, assert_same
from oracles import group_norm_net, images, small_convnet
from ttapca.errors import OptionError, SavedFilterError
from ttapca.fitting import store

SAVED = Path(__file__).parent / "saved_filters"
DATA = images(150)
X = images(12, seed=8)


@pytest.fixture(scope="module", params=["conv1", "act"], ids=["folded", "exact"])
def fitted(request: pytest.FixtureRequest) -> ttapca.FittedFilter:
    return ttapca.fit(small_convnet(), request.param, DATA, 20)


def filtered(fitted: ttapca.FittedFilter, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    model = small_convnet(dtype=dtype)
    ttapca.attach(model, fitted, "relu", initial=0.3)
    with torch.no_grad():
        return model(X.to(dtype))


@pytest.mark.parametrize(
    ("storage", "dtype", "tolerance"),
    [
        ("float64", torch.float64, 0.0),
        ("float32", torch.float32, 0.0),  # a float32 network gets the same bits
        ("float16", torch.float64, 3e-3),
        ("bfloat16", torch.float64, 3e-2),
    ],
)
def test_save_then_load(
    fitted: ttapca.FittedFilter, tmp_path: Path, storage, dtype: torch.dtype, tolerance: float
) -> None:
    fitted.save(str(tmp_path / "filter"), dtype=storage)
    loaded = ttapca.load(str(tmp_path / "filter"))
    for name in ("layer", "route", "shape", "output_shape", "n_samples_", "total_variance_"):
        assert getattr(loaded, name) == getattr(fitted, name)
    for name in ("mean_", "singular_values_", "center_", "energies_"):
        assert torch.equal(getattr(loaded, name), getattr(fitted, name))
    assert (fitted.outliers_ is None) == (fitted.textures_ is None) == (fitted.layer == "act")
    numbers = sum(matrix.numel() for matrix in loaded.basis.tensors().values())
    rest = (tmp_path / "filter" / store.TENSORS).stat().st_size - numbers * getattr(
        torch, storage
    ).itemsize
    assert 0 < rest < 24_000  # the matrices as asked for, and means, energies, textures
    expected, output = filtered(fitted, dtype), filtered(loaded, dtype)
    assert float((output - expected).abs().max() / expected.abs().max()) <= tolerance


@pytest.mark.parametrize("norm", NETWORKS)
def test_everything_that_was_measured_is_saved(norm: str, tmp_path: Path) -> None:
    fitted = ttapca.fit(NETWORKS[norm](), "conv1", DATA, 20).truncated(15)
    fitted.save(tmp_path / "filter", dtype="float64")
    loaded = ttapca.load(tmp_path / "filter")
    assert_same(loaded, fitted, 0.0)
    for name in ("inputs_", "classes_", "fingerprint_", "resemblance_"):
        assert getattr(loaded, name), name
    assert bool(loaded.group_norm_) == (norm == "GroupNorm")
    assert bool(loaded.layer_norm_) == (norm == "LayerNorm")


def test_the_folder(fitted: ttapca.FittedFilter, tmp_path: Path) -> None:
    path = tmp_path / "new" / "filter"
    fitted.save(path)
    assert {file.name for file in path.iterdir()} == {store.CARD, store.CONFIG, store.TENSORS}
    assert [file.name for file in path.parent.iterdir()] == ["filter"]
    config = json.loads((path / "config.json").read_text())
    assert config["layer"] == fitted.layer
    assert config["source"]["n_samples"] == 150
    assert config["versions"]["ttapca"] == ttapca.__version__
    assert config["output_shape"] == [8, 6, 6]
    card = (path / "README.md").read_text()
    assert f"# Spectral filter for `{fitted.layer}`" in card
    assert "- 20 components of 288 outputs keep" in card


def test_saving_over_something_else(fitted: ttapca.FittedFilter, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    fitted.save(tmp_path / "folder")  # empty: fine
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    network = tmp_path / "network"  # as Hugging Face saves it
    network.mkdir()
    (network / "config.json").write_text('{"model_type": "vit"}')
    (network / "model.safetensors").write_text("precious")
    for name in ("mine", "file", "network"):
        for overwrite in (False, True):
            with pytest.raises(SavedFilterError, match="holds something else"):
                fitted.save(tmp_path / name, overwrite=overwrite)
    assert (network / "model.safetensors").read_text() == "precious"
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"
    assert (tmp_path / "file").read_text() == "precious"


def test_a_layer_that_returns_its_input(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    fitted = ttapca.fit(model, "0", torch.rand(100, 3, 8, 8))
    fitted.save(tmp_path / "filter")
    assert torch.equal(ttapca.load(tmp_path / "filter").mean_.double(), fitted.mean_.double())


def test_a_failed_save_leaves_the_old_filter(
    fitted: ttapca.FittedFilter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted.save(tmp_path / "filter")

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        fitted.truncated(5).save(tmp_path / "filter", overwrite=True)
    monkeypatch.undo()
    assert ttapca.load(tmp_path / "filter").n_components_ == 20
    assert [file.name for file in tmp_path.iterdir()] == ["filter"]
    fitted.truncated(5).save(tmp_path / "filter", overwrite=True)
    assert ttapca.load(tmp_path / "filter").n_components_ == 5


def test_storage_that_makes_no_sense(tmp_path: Path) -> None:
    fitted = ttapca.fit(small_convnet(), "conv1", DATA, 20)
    with pytest.raises(OptionError, match="one of float64, float32, bfloat16, float16"):
        fitted.save(tmp_path / "filter", dtype="int8")  # type: ignore[arg-type]
    huge = ttapca.fit(small_convnet(), "conv1", DATA * 1e-9, 20)
    huge.basis.from_components.mul_(1e9)
    with pytest.raises(OptionError, match=r"float16 cannot hold .* Store it as bfloat16"):
        huge.save(tmp_path / "filter", dtype="float16")
    assert not (tmp_path / "filter").exists()
    huge.save(tmp_path / "filter", dtype="bfloat16")


# What is read back is what was written, or an error.


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "filter"
    ttapca.fit(small_convnet(), "conv1", DATA, 20).save(path)
    return path


@pytest.mark.parametrize("name", [store.CONFIG, store.TENSORS])
def test_a_missing_file(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(SavedFilterError, match=rf"{name}.*No such file"):
        ttapca.load(saved)
    with pytest.raises(SavedFilterError, match="A saved filter is a folder"):
        ttapca.load(saved / "nothing")


def says_the_same(changed: bytes, original: bytes) -> bool:
    """Whether only white space of the JSON differs."""
    try:
        return bool(json.loads(changed) == json.loads(original))
    except ValueError:
        return False


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_changed_byte_is_refused(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    path = tmp_path_factory.getbasetemp() / "tampered"
    if not path.exists():
        ttapca.fit(small_convnet(), "conv1", DATA, 20).save(path)
    name = data.draw(st.sampled_from([store.CONFIG, store.TENSORS]))
    original = (path / name).read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut"]))
    changed = bytearray(original)
    if kind == "flip":
        changed[place] ^= data.draw(st.integers(1, 255))
    else:
        del changed[place:]
    (path / name).write_bytes(changed)
    try:
        if name == store.CONFIG and says_the_same(changed, original):
            assert ttapca.load(path).n_components_ == 20
        else:
            with pytest.raises(SavedFilterError, match="tampered"):
                ttapca.load(path)
    finally:
        (path / name).write_bytes(original)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ('{"format": "ttapca.filter", "format": 1}', "`format` occurs twice"),
        ("[" * 10_000, "nested too deep"),
        ("1" * 5000, "has 5,000 digits"),
        ("[NaN]", "not finite"),
        (" " * 2_000_000, "at most 1,000,000 bytes"),
        ("[]", "does not describe a saved filter"),
        ('{"format": "peft"}', "does not describe a saved filter"),
        ('{"format": "ttapca.filter", "format_version": 99}', "has version 99"),
    ],
)
def test_a_foreign_config(saved: Path, config: str, message: str) -> None:
    (saved / store.CONFIG).write_text(config)
    with pytest.raises(SavedFilterError, match=message):
        ttapca.load(saved)


def test_filters_of_version_0_1_know_nothing_of_what_they_did_not_measure() -> None:
    for loaded in map(ttapca.load, SAVED.iterdir()):
        assert loaded.outliers_ is loaded.textures_ is loaded.inputs_ is None


@pytest.mark.parametrize(
    ("kind", "logits"),
    [
        ("folded", [14.15216, 10.411354, 8.439666, 10.604596, 6.061004]),
        ("exact", [19.395173, 14.556654, 11.508814, 13.879785, 7.148535]),
        ("randomised", [18.400618, 13.89674, 10.756468, 13.157998, 6.809045]),
        ("dct", [-0.589828, 0.167805, 0.060946, -0.274226]),
    ],
)
def test_a_filter_that_version_0_1_saved(kind: str, logits: list[float]) -> None:
    """With the logits that version 0.1 computed."""
    model = {"dct": group_norm_net}.get(kind, small_convnet)()
    ttapca.attach(model, ttapca.load(SAVED / kind), "relu", initial=0.3)
    with torch.no_grad():
        assert model(X)[0].tolist() == pytest.approx(logits, abs=2e-6)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
@pytest.mark.parametrize("name", ["config.json", "filter.safetensors"])
def test_pipes_and_devices_are_not_waited_for(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(SavedFilterError, match="must be a plain file; it is a folder, a pipe"):
        ttapca.load(saved)
    (saved / name).unlink()
    (saved / name).symlink_to("/dev/zero")
    with pytest.raises(SavedFilterError, match=f"{name} must be a plain file"):
        ttapca.load(saved)


def test_a_file_of_any_size_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (saved / "filter.safetensors").open("r+b") as file:
        file.truncate(store.LARGEST_FILE + 1)  # most of it is a hole, which takes no room
    with pytest.raises(SavedFilterError, match="at most 8,589,934,592 bytes; it has 8,589,934,593"):
        ttapca.load(saved)


def test_a_pickle_is_not_even_opened(saved: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    payload = pickle.dumps(Bomb())
    (saved / store.TENSORS).write_bytes(payload)
    with pytest.raises(SavedFilterError, match="cut short or altered"):
        ttapca.load(saved)
    config = json.loads((saved / store.CONFIG).read_text())
    config["tensors_sha256"] = hashlib.sha256(payload).hexdigest()
    config["checksum"] = store._checksum(config)
    (saved / store.CONFIG).write_text(json.dumps(config))
    with pytest.raises(SavedFilterError, match="not a safetensors file"):
        ttapca.load(saved)
    assert not (tmp_path / "exploded").exists()


# Two processes save, each a filter of its own, and one reads. Prints how often each failed, how
# many components were read, and what is there in the end.
SAVES_AND_READS = """
import json, os, sys
from pathlib import Path
import torch
import ttapca
from ttapca.support import disk

torch.set_num_threads(1)
path = Path(sys.argv[1])
if sys.argv[2] != "True":
    disk._exchange = lambda *_: False
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
filters = [ttapca.fit(model, "0", torch.randn(50, 4), count) for count in (2, 3)]
filters[0].save(path)

def child(work):
    out, into = os.pipe()
    if not os.fork():
        try:
            os.write(into, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(into)
    return out

def save(fitted):
    failed = []
    for _ in range(30):
        try:
            fitted.save(path, overwrite=True)
        except Exception as error:
            failed.append(repr(error))
    return failed

def read():
    found, failed = [], []
    while not (path.parent / "saved").exists() or not found:
        try:
            found.append(ttapca.load(path).n_components_)
        except Exception as error:
            failed.append(repr(error))
    return [failed, sorted(set(found))]

def result(out):
    with open(out) as file:
        return json.load(file)

writers, reader = [child(lambda each=each: save(each)) for each in filters], child(read)
failed = [each for out in writers for each in result(out)]
(path.parent / "saved").touch()
failed_reads, found = result(reader)
last = ttapca.load(path).n_components_
filters[1].save(path, overwrite=True)
print(json.dumps([failed, failed_reads, found, last, ttapca.load(path).n_components_]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize("exchange", [True, False])
def test_processes_that_save_and_read_one_filter(exchange: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a filter[1]"
    done = subprocess.run(
        [sys.executable, "-c", SAVES_AND_READS, str(folder), str(exchange)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    failed_saves, failed_reads, found, last, own = json.loads(done.stdout)
    assert (failed_saves, failed_reads) == ([], [])
    assert set(found) <= {2, 3}
    assert last in (2, 3)
    assert own == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a filter[1]", "saved"]


def test_a_filter_that_is_replaced_while_it_is_read_is_read_again(
    fitted: ttapca.FittedFilter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, later = tmp_path / "filter", [fitted.truncated(count) for count in (7, 5)]
    fitted.save(folder)
    read_config = store._read_config

    def replaced(path: Path) -> Any:
        config = read_config(path)
        if later:
            later.pop().save(folder, overwrite=True)
        return config

    monkeypatch.setattr(store, "_read_config", replaced)
    assert ttapca.load(folder).n_components_ == 7
    assert not later
    (folder / store.TENSORS).write_bytes(b"damaged")
    with pytest.raises(SavedFilterError, match="is not the file that was saved"):
        ttapca.load(folder)
