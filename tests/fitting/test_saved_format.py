from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ttapca
from fitting.parted import rewrite
from oracles import images, small_convnet
from ttapca.errors import SavedFilterError
from ttapca.fitting.saved_format import (
    LARGEST_VALUE,
    LEVELS,
    MEAN_SCALE,
    MEAN_STEPS,
    STEPS,
    packed,
    unpacked,
)

SAVED = Path(__file__).parent / "saved_filters"


def refused(kind: str, place: Path, change, message: str) -> None:
    path = shutil.copytree(SAVED / kind, place / "filter")
    assert ttapca.load(path).layer
    rewrite(path, change)
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
    ("kind", "name", "tensor", "message"),
    [
        ("folded", "outliers", -MEASURED, "`outliers` .* distances and, up to 1, shares"),
        ("folded", "outliers", 60 * MEASURED, "`outliers` .* distances and, up to 1, shares"),
        ("folded", "outliers", 0 * MEASURED, "`outliers` .* distances and, up to 1, shares"),
        ("folded", "outliers", torch.nan * MEASURED, "`outliers` .* finite"),
        ("folded", "outliers", MEASURED[:1], r"`outliers` .* shape \(2, 3\)"),
        ("folded", "outliers", MEASURED[:, :2], r"`outliers` .* shape \(2, 3\)"),
        ("folded", "outliers", MEASURED.double(), "`outliers` .* type torch.float32"),
        ("exact", "outliers", MEASURED, "has `outliers` as well"),  # it acts on no image
        ("folded", "textures", torch.zeros(2, 15), r"`textures` .* shape \(\d+, 15\)"),
        ("folded", "rest", -torch.ones(40), "`rest` .* not below 0"),
        ("folded", "rest", torch.ones(5), r"`rest` .* shape \(40,\)"),
        ("folded", "class_reach", -torch.ones(6), "`class_reach` .* not below 0"),
        ("folded", "class_reach", torch.ones(5), r"`class_reach` .* shape \(6,\)"),
    ],
)
def test_a_tensor_that_does_not_fit_the_others(
    tmp_path: Path, kind: str, name: str, tensor: torch.Tensor, message: str
) -> None:
    refused(kind, tmp_path, lambda _, tensors: tensors.update({name: tensor}), message)


def set_to(value: float, *place: int):
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


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
        ("folded", "singular_values", lambda t: t * 2, "`source.total_variance`"),
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


# A saved filter of cosines is small, and is the filter that was saved.


@pytest.mark.parametrize("layer", ["conv1", "act"])
@pytest.mark.parametrize("components", [None, 50])
def test_a_saved_filter_is_the_same_filter(
    tmp_path: Path, layer: str, components: int | None
) -> None:
    model, x = small_convnet(), images(6, seed=8)
    fitted = ttapca.fit(model, layer, images(150), components, route="dct")
    fitted.save(tmp_path / "one")
    loaded = ttapca.load(tmp_path / "one")
    assert set(fitted.basis.order.tolist()) == set(loaded.basis.order.tolist())
    below = fitted.singular_values_ / loaded.singular_values_
    assert (below >= 1 - 1e-9).all()
    assert (below <= 2 ** (1.5 / STEPS)).all()
    # By place, so that ties do not matter: what is known of a coefficient stays with it.
    for name in ("singular_values_", "class_reach_"):
        tables = []
        for each in (fitted, loaded):
            table = torch.zeros(each.center_.numel(), dtype=torch.float64)
            table[each.basis.order] = getattr(each, name).double()
            tables.append(table)
        torch.testing.assert_close(tables[1], tables[0], rtol=1e-3, atol=1e-7)
    plain = ttapca.attach(model, fitted)
    with torch.no_grad():
        first = model(x)
        plain.detach()
        ttapca.attach(model, loaded)
        torch.testing.assert_close(model(x), first, rtol=1e-4, atol=1e-5)
    # Saved again, nothing is lost any more.
    loaded.save(tmp_path / "two")
    again = ttapca.load(tmp_path / "two")
    assert torch.equal(again.singular_values_, loaded.singular_values_)
    assert torch.equal(again.basis.order, loaded.basis.order)
    assert torch.equal(again.center_, loaded.center_)
    assert torch.equal(again.class_reach_, loaded.class_reach_)


@given(
    mean=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30),
    scale=st.sampled_from([1e-9, 1.0, 1e9]),
)
@settings(max_examples=200, deadline=None)
def test_a_mean_keeps_its_digits(mean: list[float], scale: float) -> None:
    size = len(mean)
    values = scale * torch.tensor(mean, dtype=torch.float64)
    full = {
        "order": torch.arange(size),
        "singular_values": torch.linspace(9, 1, size, dtype=torch.float64),
        "input_mean": values,
    }
    found = unpacked(packed(full, size), (1, 1, size), size, Path("x"))
    step = max((values.max() - values.min()).item() / 32_767, 1e-11 * values.abs().max().item())
    torch.testing.assert_close(found["input_mean"], values, rtol=0, atol=step + 1e-37)
    again = unpacked(packed(found, size), (1, 1, size), size, Path("x"))
    assert torch.equal(again["input_mean"], found["input_mean"])


def test_what_was_saved_in_full_is_read() -> None:
    """As before means and the reach of classes had 16 bits."""
    values = torch.tensor([4.0, 2.0], dtype=torch.float64)
    full = {"order": torch.tensor([1, 0]), "singular_values": values}
    reach, mean = torch.tensor([0.3, 7.0]), torch.tensor([0.1, 0.2])
    older = packed(full, 2) | {"input_mean": mean, "class_reach": reach}
    found = unpacked(older, (1, 1, 2), 2, Path("x"))
    assert torch.equal(found["input_mean"], mean.double())
    assert torch.equal(found["class_reach"], reach)


def test_what_it_takes_at_224_pixels() -> None:
    size = 3 * 224 * 224
    values = torch.linspace(10, 0.01, size, dtype=torch.float64)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    mean = torch.zeros(size, dtype=torch.float64)
    full = {"order": order, "singular_values": values, "input_mean": mean, "output_mean": mean}
    small = packed(full, size)
    assert sum(each.numel() * each.element_size() for each in small.values()) < 0.61e6
    assert unpacked(full, (3, 224, 224), size, Path("x")).keys() == full.keys()  # as saved before


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (LEVELS, lambda t: t[:-1], "must .* by its config"),
        (LEVELS, lambda t: t.float(), "must .* by its config"),
        (LEVELS, lambda t: torch.full_like(t, -1), "but for its 50 components"),
        (LEVELS, lambda t: t - 5, "but for its 50 components"),
        (MEAN_STEPS, lambda t: t[:-1], "`mean_steps` .* by its config"),
        (MEAN_STEPS, lambda t: t.int(), "`mean_steps` .* by its config"),
        (MEAN_SCALE, lambda t: t[:1], "`mean_scale` .* by its config"),
        (MEAN_SCALE, lambda t: t.float(), "`mean_scale` .* by its config"),
        (MEAN_SCALE, lambda t: t * torch.inf, "finite numbers"),
        (LARGEST_VALUE, lambda t: t.float(), "type torch.float64"),
        (LARGEST_VALUE, lambda t: t * 0, "above 0 and falling"),
        (LARGEST_VALUE, lambda t: t * torch.nan, "finite numbers"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str, change, message: str) -> None:
    ttapca.fit(small_convnet(), "conv1", images(150), 50, route="dct").save(tmp_path / "filter")
    rewrite(tmp_path / "filter", lambda _, tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(SavedFilterError, match=message):
        ttapca.load(tmp_path / "filter")
