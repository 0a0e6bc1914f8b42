"""A saved filter of cosines is small, and is the filter that was saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ttapca
from oracles import images, small_convnet
from ttapca.errors import SavedFilterError
from ttapca.fitting import store
from ttapca.fitting.saved_format import (
    LARGEST_VALUE,
    LEVELS,
    MEAN_SCALE,
    MEAN_STEPS,
    STEPS,
    packed,
    unpacked,
)


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
    fitted = ttapca.fit(small_convnet(), "conv1", images(150), 50, route="dct")
    assert dataclasses.replace(fitted).route == "dct"
    fitted.save(tmp_path / "filter")
    config, tensors = store.read_folder(tmp_path / "filter")
    for key in ("format", "format_version", "tensors_sha256", "checksum"):
        del config[key]
    tensors[name] = change(tensors[name])
    store.write_folder(tmp_path / "filter", config, tensors, "")
    with pytest.raises(SavedFilterError, match=message):
        ttapca.load(tmp_path / "filter")
