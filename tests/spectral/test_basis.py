"""Every basis keeps one contract; what only some of them do comes after that."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import Tensor, nn

import ttapca
from oracles import images, small_convnet
from ttapca.spectral.basis import Basis
from ttapca.spectral.basis_choice import BASES, ROUTE_NAMES, basis_kind, usual_basis

DATA = images(90)
CASES = {
    "dense": ("bn1", "exact"),
    "folded": ("conv1", "folded"),
    "cosines at the input": ("conv1", "dct"),
    "cosines at the output": ("act", "dct"),
}


@functools.cache
def fitted_as(name: str) -> ttapca.FittedFilter:
    layer, route = CASES[name]
    return ttapca.fit(small_convnet(), layer, DATA, 30, route=route)  # type: ignore[arg-type]


@pytest.fixture(params=CASES)
def fitted(request: pytest.FixtureRequest) -> ttapca.FittedFilter:
    return fitted_as(request.param)


@pytest.fixture
def basis(fitted: ttapca.FittedFilter) -> Basis:
    return fitted.basis


@pytest.fixture
def samples(fitted: ttapca.FittedFilter) -> Tensor:
    return images(7, shape=fitted.shape).flatten(1)


def ways(basis: Basis, size: int) -> tuple[Tensor, Tensor]:
    """What leads to components and back, as dense matrices of shape (size, components)."""
    unit = torch.eye(size, dtype=torch.float64)
    nothing = torch.zeros(size, dtype=torch.float64)
    return basis.project(unit), basis.add_rebuilt(nothing, unit[:, : basis.n_components][:30]).T


def test_there_and_back(basis: Basis, samples: Tensor) -> None:
    components = images(7, seed=1, shape=(30,))
    before = samples.clone()
    rebuilt = basis.add_rebuilt(samples, components)
    assert torch.equal(samples, before)
    torch.testing.assert_close(basis.project(rebuilt - samples), components)
    there, back = ways(basis, samples.shape[1])
    torch.testing.assert_close(basis.project(samples), samples @ there)
    torch.testing.assert_close(rebuilt, samples + components @ back.T)
    torch.testing.assert_close(basis.noise(), there.square().sum(0))


def test_the_first_components_alone(basis: Basis, samples: Tensor) -> None:
    first, components = basis.truncated(4), images(7, seed=1, shape=(4,))
    assert (basis.n_components, first.n_components) == (30, 4)
    assert (type(first), first.at_input) == (type(basis), basis.at_input)
    torch.testing.assert_close(first.project(samples), basis.project(samples)[:, :4])
    torch.testing.assert_close(
        first.add_rebuilt(samples, components), basis.add_rebuilt(samples, components)
    )


def test_its_tensors_make_it_again_and_tell_its_cost(
    fitted: ttapca.FittedFilter, samples: Tensor
) -> None:
    basis = fitted.basis
    tensors = basis.tensors()
    forms = basis.forms(fitted.shape, 30)
    assert tensors.keys() == forms.keys()
    for name, form in forms.items():
        assert tuple(tensors[name].shape) == form.shape
        assert form.dtype in (None, tensors[name].dtype)
        assert form.holds(tensors[name])
    again = basis_kind(fitted.route, at_input=basis.at_input).from_tensors(
        tensors, fitted.shape, at_input=basis.at_input
    )
    assert torch.equal(again.project(samples), basis.project(samples))
    assert again.at_input == basis.at_input in basis.sides
    numbers, multiply_adds = basis.cost(fitted.shape, 30)
    assert numbers == sum(buffer.numel() for buffer in basis.buffers())
    assert multiply_adds > 2 * math.prod(fitted.shape)


def test_a_copy_to_compute_with(basis: Basis, samples: Tensor) -> None:
    ready = basis.prepared(torch.float32)
    found = ready.project(samples.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, basis.project(samples).float(), rtol=1e-4, atol=1e-4)
    own = {tensor.data_ptr() for tensor in basis.buffers()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in ready.buffers())
    assert torch.equal(copy.deepcopy(ready).project(samples.float()), found)
    assert ready.to("meta").project(samples.float().to("meta")).shape == (7, 30)


def test_every_route_leads_to_a_basis() -> None:
    assert {route for route, _ in BASES} == set(ROUTE_NAMES)
    for name, (layer, _) in CASES.items():
        fitted = fitted_as(name)
        assert fitted.basis.at_input == (layer == "conv1")
        assert fitted.shape == ((3, 6, 6) if fitted.basis.at_input else (8, 6, 6))
        place = "input" if fitted.basis.at_input else "output"
        assert f"components=30, at the {place}" in repr(fitted.spectral_filter())
    assert usual_basis(nn.Linear(4, 9), (4,), (9,)) == (BASES["folded", True], (4,))
    assert usual_basis(nn.Linear(9, 4), (9,), (4,)) == (BASES["exact", False], (4,))
    assert usual_basis(nn.ReLU(), None, (4,)) == (BASES["exact", False], (4,))


# Stored in float16, a basis of matrices reads half as much for a single sample.


@pytest.fixture(params=["dense", "folded"])
def pair(
    request: pytest.FixtureRequest, tmp_path
) -> tuple[ttapca.FittedFilter, ttapca.FittedFilter]:
    """One filter, stored as float16: what `load` gives, and the same numbers in float32."""
    fitted_as(request.param).save(tmp_path / "filter", dtype="float16")
    half = ttapca.load(tmp_path / "filter")
    half.save(tmp_path / "filter", dtype="float32", overwrite=True)
    return half, ttapca.load(tmp_path / "filter")


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() < 3e-3 * expected.abs().max())


def test_single_samples_differ_by_rounding_and_batches_not_at_all(pair) -> None:
    half, full = (fitted.spectral_filter("relu", initial=0.3) for fitted in pair)
    x = 3 * images(5, shape=half.shape).float()
    assert torch.equal(half(x), full(x))
    assert torch.equal(half(x[:1]), full(x[:1]))  # gradients are enabled here
    with torch.no_grad():
        assert torch.equal(half(x), full(x))
        for sample in x[1:].split(1):
            assert close(half(sample), full(sample))
            assert not torch.equal(half(sample), full(sample))
    assert half.state_dict().keys() == full.state_dict().keys()
    for method, size in (("wiener", 1), ("ttapca-relu", 2)):
        one, two = (
            ttapca.adapt(small_convnet(dtype=torch.float32), method, filter=fitted)(
                3 * images(size).float()
            )
            for fitted in pair
        )
        assert torch.equal(one, two) == (size > 1)
        assert close(one, two)


@torch.no_grad()
def test_what_float16_cannot_hold_is_computed_in_float32(pair) -> None:
    half, full = (fitted.basis.prepared(torch.float32) for fitted in pair)
    huge = torch.full((1, math.prod(pair[0].shape)), 1e5)
    assert torch.equal(half.project(huge), full.project(huge))
    wide = copy.deepcopy(half).double()
    assert wide.project(huge.double()).dtype == torch.float64
    components = torch.zeros(1, 2)
    assert torch.equal(half.add_rebuilt(huge, components), huge)
