from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ttapca
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
    for name in ("rest_", "class_reach_"):
        before, after = getattr(fitted, name), getattr(loaded, name)
        assert (before is None and after is None) or torch.equal(before, after)
    if fitted.outliers_ is None:
        assert loaded.outliers_ is None
    else:
        assert torch.equal(loaded.outliers_, fitted.outliers_)
    assert (fitted.outliers_ is None) == (fitted.layer == "act")
    if fitted.textures_ is None:
        assert loaded.textures_ is None
    else:
        assert torch.equal(loaded.textures_, fitted.textures_)
        assert len(fitted.textures_) == len(fitted.energies_)
    numbers = sum(matrix.numel() for matrix in loaded.basis.tensors().values())
    rest = (tmp_path / "filter" / store.TENSORS).stat().st_size - numbers * getattr(
        torch, storage
    ).itemsize
    assert 0 < rest < 24_000  # the matrices as asked for, and means, energies, textures
    expected, output = filtered(fitted, dtype), filtered(loaded, dtype)
    assert float((output - expected).abs().max() / expected.abs().max()) <= tolerance


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
    assert "| components | 20 of 288 outputs |" in card


def test_saving_over_something_else(fitted: ttapca.FittedFilter, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    fitted.save(tmp_path / "folder")  # empty: fine
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("mine", "file"):
        with pytest.raises(SavedFilterError, match="holds something else"):
            fitted.save(tmp_path / name)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"
    assert (tmp_path / "file").read_text() == "precious"


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


def refused(kind: str, place: Path, change, message: str) -> None:
    """Change a saved filter as a stranger would, with checksums that fit, and load it."""
    path = shutil.copytree(SAVED / kind, place / "filter")
    assert ttapca.load(path).layer
    config, tensors = store.read_folder(path)
    for key in ("format", "format_version", "tensors_sha256", "checksum"):
        del config[key]
    change(config, tensors)
    store.write_folder(path, config, tensors, "")
    with pytest.raises(SavedFilterError, match=f"(?s)(?=.*{re.escape(str(path))}).*{message}"):
        ttapca.load(path)


@pytest.mark.parametrize("backwards", [False, True])
def test_one_file_has_one_error_in_whatever_order_its_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    load = safetensors.torch.load

    def ordered(payload: bytes) -> dict[str, torch.Tensor]:
        return dict(sorted(load(payload).items(), reverse=backwards))

    monkeypatch.setattr(safetensors.torch, "load", ordered)

    def change(config: dict, tensors: dict) -> None:
        config["n_components"] = 5  # so that three tensors have another shape

    refused("folded", tmp_path, change, "`project` of the filter in")


MEASURED = torch.tensor([[0.5, 0.01, 0.0], [0.6, 0.0, 0.02]])


@pytest.mark.parametrize(
    ("kind", "measured", "message"),
    [
        ("folded", -MEASURED, "`outliers` .* distances and, up to 1, shares"),
        ("folded", 60 * MEASURED, "`outliers` .* distances and, up to 1, shares"),
        ("folded", 0 * MEASURED, "`outliers` .* distances and, up to 1, shares"),
        ("folded", torch.nan * MEASURED, "`outliers` .* finite"),
        ("folded", MEASURED[:1], r"`outliers` .* shape \(2, 3\)"),
        ("folded", MEASURED[:, :2], r"`outliers` .* shape \(2, 3\)"),
        ("folded", MEASURED.double(), "`outliers` .* type torch.float32"),
        ("exact", MEASURED, "has `outliers` as well"),  # it acts on no image
    ],
)
def test_outliers_that_were_not_measured(
    tmp_path: Path, kind: str, measured: torch.Tensor, message: str
) -> None:
    refused(kind, tmp_path, lambda _, tensors: tensors.update(outliers=measured), message)


def test_textures_of_other_samples_than_the_energies(tmp_path: Path) -> None:
    found = torch.zeros(2, 15)
    message = r"`textures` .* shape \(\d+, 15\)"
    refused("folded", tmp_path, lambda _, tensors: tensors.update(textures=found), message)


def test_filters_of_version_0_1_know_nothing_of_outliers_or_textures() -> None:
    for folder in SAVED.iterdir():
        assert ttapca.load(folder).outliers_ is None
        assert ttapca.load(folder).textures_ is None


def set_to(value: float, *place: int):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rest", -torch.ones(40), "`rest` .* not below 0"),
        ("rest", torch.ones(5), r"`rest` .* shape \(40,\)"),
        ("class_reach", -torch.ones(6), "`class_reach` .* not below 0"),
        ("class_reach", torch.ones(5), r"`class_reach` .* shape \(6,\)"),
    ],
)
def test_a_tensor_that_does_not_fit_the_others(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    refused("folded", tmp_path, lambda _, tensors: tensors.update({name: tensor}), message)


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        ("folded", "project", None, "tensor `project` is missing"),
        ("folded", "input_mean", None, "tensor `input_mean` is missing"),
        ("dct", "order", None, "tensor `order` is missing"),
        ("exact", "output_mean", None, "tensor `output_mean` is missing"),
        ("folded", "project", set_to(torch.nan, 3, 2), "`project` .* must hold finite numbers"),
        ("folded", "output_mean", set_to(1e39, 0), "`output_mean` .* at most 1e.15"),
        ("exact", "project", set_to(9.0, 0, 0), "`project` .* columns of length 1"),
        ("dct", "project", lambda t: t * 2, "`project` .* columns of length 1"),
        ("folded", "rebuild", set_to(torch.inf, 0, 0), "`rebuild` .* must hold finite numbers"),
        ("folded", "input_mean", set_to(torch.nan, 7), "`input_mean` .* finite numbers"),
        ("folded", "output_mean", lambda t: t[:-1], r"`output_mean` .* shape \(288,\)"),
        ("folded", "rebuild", lambda t: t[:, :-1], r"`rebuild` .* shape \(108, 6\)"),
        ("folded", "project", lambda t: t.double(), "`project` .* type torch.float16"),
        ("folded", "singular_values", lambda t: t.flip(0), "above 0 and falling"),
        ("folded", "singular_values", set_to(0.0, -1), "above 0 and falling"),
        ("folded", "singular_values", lambda t: t * 2, "`source.largest_singular_value`"),
        ("folded", "singular_values", lambda t: t.long(), "type torch.float64"),
        ("folded", "energies", set_to(-1.0, 0, 0), "`energies` .* not below 0"),
        ("folded", "energies", set_to(torch.inf, 0, 0), "`energies` .* finite"),
        ("folded", "energies", lambda t: t[:, :1], r"`energies` .* shape \(40, 3\)"),
        ("folded", "energies", lambda t: t[:0], "`energies` .* shape"),
        ("randomised", "error_bound", set_to(-1.0, 0), "`error_bound` .* not below 0"),
        ("randomised", "error_bound", lambda t: t[:2], r"`error_bound` .* shape \(5,\)"),
        ("dct", "order", set_to(108, 1), "`order` .* different places from 0 to 107"),
        ("dct", "order", set_to(-1, 1), "`order` .* different places"),
        ("dct", "order", set_to(19, 6), "`order` .* different places"),
        ("dct", "order", lambda t: t.int(), "`order` .* type torch.int64"),
        ("dct", "project", lambda t: t[:, :2], r"`project` .* shape \(3, 3\)"),
        ("dct", "group_norm:1", set_to(-5.0, 1, 0), "a mean and a variance"),
        ("dct", "group_norm:1", lambda t: t[0], "`group_norm:1` .* shape"),
        ("dct", "group_norm:1", set_to(torch.nan, 0, 0), "`group_norm:1` .* finite"),
    ],
)
def test_a_changed_tensor_with_checksums_made_anew(
    tmp_path: Path, kind: str, name: str, change, message: str
) -> None:
    def apply(config: dict, tensors: dict) -> None:
        if change is None:
            config["output_shape"] = config["shape"]
            del tensors[name]
        else:
            tensors[name] = change(tensors[name])

    refused(kind, tmp_path, apply, message)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("folded", {"layer": 3}, "`layer` must be text; found 3"),
        ("folded", {"layer": "x" * 5000}, "`layer` must be text of at most 1,000"),
        ("folded", {"route": "magic"}, "`route` must be one of folded, exact"),
        ("folded", {"route": "exact", "output_shape": [3, 6, 6]}, "has the tensors .* as well"),
        ("folded", {"shape": []}, "`shape` must be a list of 1 to 8"),
        ("folded", {"shape": [3, 6, 7]}, r"must have shape \(126.*found \(108"),
        ("folded", {"shape": [2**31, 2**31]}, "`shape` must be of at most"),
        ("folded", {"shape": [3, 6, -6]}, r"`shape\[2\]` must be a whole number from 1"),
        ("folded", {"n_components": 109}, "`n_components` must be .* 1 to 108"),
        ("folded", {"n_components": True}, "`n_components` must be a whole number"),
        ("folded", {"source": None}, "`source` must be an object"),
        ("exact", {"n_samples": 1}, "`source.n_samples` must be a whole number from 2"),
        ("exact", {"n_samples": "x"}, "`source.n_samples` must be a whole number"),
        ("exact", {"total_variance": float("inf")}, "a number that is not finite"),
        ("exact", {"total_variance": 0}, "`source.total_variance` must be at least"),
        ("exact", {"total_variance": -1}, "`source.total_variance` must be a finite number"),
        ("exact", {"total_variance": None}, "`source.total_variance` must be a finite number"),
        ("folded", {"versions": {"ttapca": "1"}}, "`versions` must be an object with `torch`"),
        ("folded", {"unknown": 1}, "no names but format, .* found 'unknown'"),
        ("exact", {"output_shape": [5, 1]}, r"`output_shape` must be \[5\], as `shape`"),
        ("dct", {"shape": [1, 1, 10**6]}, r"`shape\[2\]` must be .* 1 to 4,096"),
        ("dct", {"shape": [3, 36]}, "`shape` must be a list of 3 entries"),
    ],
)
def test_a_changed_config_with_checksums_made_anew(
    tmp_path: Path, kind: str, change: dict, message: str
) -> None:
    def apply(config: dict, _tensors: dict) -> None:
        inner = config["source"] if change.keys() & config["source"].keys() else config
        inner.update(change)

    refused(kind, tmp_path, apply, message)


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
