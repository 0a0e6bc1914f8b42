"""An adapter against a plain loop, its callers and containers, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import BATCHES, CASES, DATA, NETWORKS, X, adapted, fitted
from oracles import left_untouched, small_convnet
from ttapca import Adapter, BatchNormStatistics, SpectralGains
from ttapca.adaptation.optimisation import GradientSteps, mean_entropy
from ttapca.adaptation.surfaces import NormAffine, StreamStatistics, Surface
from ttapca.errors import AttachError, OptionError
from ttapca.methods.slr import InputTransform


def spectral(method: str = "ttapca-relu", **options: Any) -> Adapter:
    return adapted(method, **{"initial": 0.05} | options)


def gains_of(adapter: Adapter) -> Tensor:
    (surface,) = (s for s in adapter.surfaces if isinstance(s, SpectralGains))
    return surface.filter.gains().detach().clone()


@pytest.mark.parametrize(("method", "norm"), CASES)
def test_callers_without_gradients_and_resets(method: str, norm: str) -> None:
    """Bit for bit the same in every mode, and again after a reset."""
    adapter = adapted(method, norm)
    expected = [adapter(x) for x in BATCHES]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            adapter.reset()
            for x, reference in zip(BATCHES, expected, strict=True):
                inside = x.clone()
                output = adapter(inside)
                assert torch.equal(output, reference)
                assert torch.equal(inside, x)
                assert not output.requires_grad


@pytest.mark.parametrize("method", ttapca.METHODS)
def test_export_freezes_the_present_state(method: str) -> None:
    adapter = adapted(method)
    adapter(X)
    program = torch.export.export(adapter, (X,))
    with torch.no_grad():
        found, expected = program.module()(X), adapter.model(X)
    # For how many images those of a run count is known for sure only when the pass is over.
    tolerance = 1e-2 if method in ("wiener", "match", "two-sided") else 1e-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_frozen_parameters_are_no_obstacle() -> None:
    frozen = small_convnet().requires_grad_(False)
    assert torch.equal(spectral(model=frozen)(X), spectral()(X))


@pytest.mark.parametrize("method", ["bn", "memo"])
def test_further_arguments_reach_the_model(method: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_convnet()

        def forward(self, x: Tensor, scale: Tensor, *, shift: float = 0.0) -> Tensor:
            return self.net(x) * scale + shift

    options = {} if method == "bn" else {"views": 2, "logits": "before"}
    adapter = ttapca.adapt(Scaled(), method, **options)
    plain = adapter(X, torch.tensor(1.0))
    assert torch.allclose(adapter(X, torch.tensor(2.0), shift=1.0), plain * 2 + 1)


def test_repr_tells_what_it_does() -> None:
    text = repr(spectral(steps=2))
    assert "forgetting=online, steps=2, logits=after" in text
    assert "Folded(components=20, at the input)" in text
    assert "forgetting=episodic" in repr(Adapter(small_convnet()))


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    def cliff(logits: Tensor) -> Tensor:
        # Finite, with a gradient that is not: the square root's at zero.
        return torch.sqrt(logits.sum() * 0)

    gains = SpectralGains(fitted(), "relu")
    adapter = Adapter(small_convnet(), [gains], GradientSteps(cliff), forgetting="online")
    before = gains_of(adapter)
    assert torch.isfinite(adapter(X)).all()
    assert torch.equal(gains_of(adapter), before)
    assert (adapter.updates, adapter.skipped) == (0, 1)


@pytest.mark.parametrize("options", [{"logits": "after"}, {"steps": 2}])
def test_a_step_that_goes_too_far_is_taken_back_to_the_source(options: dict[str, Any]) -> None:
    model, x = small_convnet().float(), X.float()
    with torch.no_grad():
        model[-1].weight.mul_(100)
    with ttapca.adapt(model, "bn") as statistics:
        expected = statistics(x)
    adapter = ttapca.adapt(model, "tent", lr=1e37, forgetting="online", **options)
    for count in (1, 2):  # the second batch is as good as the first
        assert not torch.isfinite(adapter(x)).all()
        assert (adapter.skipped, adapter.updates) == (count, count)
        torch.testing.assert_close(adapter.model(x), expected)


@pytest.mark.parametrize("method", ["wiener", "tent over wiener"])
def test_a_batch_that_breaks_late_is_forgotten_early(method: str) -> None:
    """The filter and the first layers have seen nothing wrong; the logits overflow."""

    class Factor(nn.Module):
        value = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.value

    model = small_convnet()
    model.add_module("last", Factor())
    adapter, expected = adapted(method, model=model), adapted(method)
    adapter(3 * X)
    expected(3 * X)
    model.last.value = float("inf")
    adapter(X)
    model.last.value = 1.0
    assert adapter.skipped == 1
    assert torch.equal(adapter(X), expected(X))


@pytest.mark.parametrize("method", ["wiener", "ttapca-relu", "tent", "shot", "cotta", "rotta"])
def test_an_adapter_that_is_made_in_inference_mode(method: str) -> None:
    expected, model = adapted(method), small_convnet()
    with torch.inference_mode():
        adapter = adapted(method, model=model)
    for x in BATCHES:
        assert torch.equal(adapter(x), expected(x))


# Bad input: the model is as it was.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_models_whose_layers_are_out_of_reach() -> None:
    program = torch.jit.trace(small_convnet(), X)
    for model, message in ((None, "found a NoneType"), (program, "a program of `torch.jit`")):
        for put in (lambda m: ttapca.adapt(m, "bn"), lambda m: ttapca.fit(m, "conv1", DATA)):
            with pytest.raises(AttachError, match=message):
                put(model)


def test_surfaces_that_do_not_fit_take_the_others_away() -> None:
    model = small_convnet()
    stranger = SpectralGains(ttapca.fit(small_convnet(seed=5), "conv1", DATA, 20), "relu")
    for surfaces, error, message in (
        ([], OptionError, "a surface with parameters"),
        ([nn.ReLU()], OptionError, "`Surface`; found a ReLU"),
        ([stranger], AttachError, "belongs to the weights"),
    ):
        with left_untouched(model, X), pytest.raises(error, match=message):
            Adapter(model, [BatchNormStatistics(1.0), *surfaces], GradientSteps(mean_entropy))


SURFACES: dict[str, Callable[[], Surface]] = {
    "BatchNorm": BatchNormStatistics,
    "GroupNorm": lambda: StreamStatistics(source={"bn1": torch.ones(2, 8)}),
    "a stream's": StreamStatistics,
    "weights": NormAffine,
    "input": InputTransform,
    "gains": lambda: SpectralGains(fitted(), "relu"),
}


@pytest.mark.parametrize("kind", SURFACES)
def test_one_surface_of_a_kind_on_a_model_and_one_model_for_a_surface(kind: str) -> None:
    make = NETWORKS.get(kind, small_convnet)
    model, surface = make(), SURFACES[kind]()
    surface.attach(model)
    during = model(X)
    with pytest.raises(AttachError, match="already"):
        Adapter(model, [SURFACES[kind]()])
    with pytest.raises(AttachError, match="goes on one model; this one is attached already"):
        Adapter(make(), [surface])
    assert torch.equal(model(X), during)
    surface.detach()
    surface.detach()
    SURFACES[kind]().attach(model)


def test_a_model_that_blocks_gradients() -> None:
    class Blocked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = small_convnet().conv1

        def forward(self, x: Tensor) -> Tensor:
            return self.conv1(x).flatten(1).detach()

    with pytest.raises(AttachError, match="Gradients must reach"):
        spectral(model=Blocked())(X)
