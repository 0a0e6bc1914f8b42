from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ttapca
from ttapca.errors import SavedFilterError
from ttapca.fitting import store

SAVED = Path(__file__).parent / "saved_filters"


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
