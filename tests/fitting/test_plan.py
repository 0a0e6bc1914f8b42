"""Which route is planned for which sizes, and what a plan says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ttapca
from oracles import DensePCA, images
from ttapca.errors import OutOfMemoryError, ShapeError
from ttapca.fitting import activations
from ttapca.fitting.plan import (
    LARGEST_DENSE,
    FitPlan,
    Problem,
    plan_of,
    route_cost,
)
from ttapca.spectral.folded import InputGram, LinearPart
from ttapca.spectral.source_classes import corrections

GB = 2**30
STEM_32, STEM_64 = ((3, 32, 32), (16, 32, 32)), ((3, 64, 64), (64, 32, 32))
STEM_224 = ((3, 224, 224), (64, 112, 112))


@pytest.mark.parametrize(
    ("shapes", "folds", "components", "samples", "route"),
    [
        (STEM_32, True, None, 50_000, "folded"),
        (STEM_32, True, 2000, 50_000, "folded"),
        (STEM_32, True, 20, 100, "folded"),  # within seconds, as it always was
        (STEM_32, True, None, None, "folded"),
        (((1, 8, 8), (4, 8, 8)), False, None, 1797, "exact"),
        (((16, 32, 32), (32, 16, 16)), False, 500, 50_000, "exact"),
        (STEM_32, True, None, 3000, "dct"),  # too few for components of their own
        (STEM_32, True, 0.99, 3000, "dct"),
        (STEM_64, True, 299, 300, "dct"),
        (STEM_64, True, 30, 96, "gram"),
        (((3, 48, 48), (16, 48, 48)), True, 500, 600, "dct"),
        (((3, 48, 48), (16, 48, 48)), True, 200, 600, "gram"),
        (((3, 48, 48), (16, 48, 48)), True, 500, 50_000, "folded"),
        (STEM_64, True, None, 50_000, "dct"),
        (STEM_64, True, 2000, None, "dct"),
        (STEM_64, True, 1000, 50_000, "dct"),  # randomised, it would take an hour
        (STEM_224, True, 500, 700, "dct"),
        (STEM_224, True, None, None, "dct"),
        (STEM_224, True, 10, 700, "gram"),  # a small basis, and exact
        (((16, 32, 32), (16, 32, 32)), False, 300, 2000, "gram"),
        (((16, 32, 32), (16, 32, 32)), False, 300, 50_000, "randomised"),
        (((16, 32, 32), (16, 32, 32)), False, 300, None, "gram"),  # until there are too many
        (((9000,), (20_000,)), True, None, 100_000, "randomised"),  # no image
    ],
)
def test_the_route_follows_from_the_sizes(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    folds: bool,
    components: int | float | None,
    samples: int | None,
    route: str,
) -> None:
    problem = Problem(*shapes, folds, components, samples, 200)
    plan = plan_of(problem, memory=10**13)
    assert plan.route == route
    if route == "dct":
        few = samples is not None and samples < 5000
        assert ("images are too few" if few else "would take many passes") in plan.reason


def test_with_less_memory_another_route_is_taken() -> None:
    problem = Problem(*STEM_32, True, 500, 50_000, 200)
    needed = route_cost("folded", problem).memory
    assert plan_of(problem, memory=int(needed * 1.2)).route == "folded"
    less = plan_of(problem, memory=int(needed * 0.9))
    assert (less.route, less.reason) == ("dct", "other ways need more memory than there is")
    with pytest.raises(
        OutOfMemoryError, match=r"the folded route takes up to 0\.\d GB here, and 0"
    ):
        plan_of(problem, "folded", memory=GB // 4)
    with pytest.raises(OutOfMemoryError, match=r"Take `route='dct'`, or leave `route` at auto"):
        plan_of(problem, "folded", memory=GB // 4)
    with pytest.raises(OutOfMemoryError, match=r"the dct route takes .* Ask for fewer components"):
        plan_of(problem, memory=2**20)


def test_the_exact_route_without_memory_names_the_folded_one() -> None:
    problem = Problem(*STEM_32, True, 500, 50_000, 200)
    with pytest.raises(OutOfMemoryError, match=r"the exact route .*`route='folded'`.* in 0\.\d GB"):
        plan_of(problem, "exact", memory=GB // 4)
    # Of a layer that is not affine it would be of no use.
    with pytest.raises(OutOfMemoryError, match="the exact route") as found:
        plan_of(Problem(*STEM_32, False, 500, 50_000, 200), "exact", memory=GB // 4)
    assert "folded" not in str(found.value)


def test_fit_refuses_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttapca.fitting.plan.available_memory", lambda: 1000)
    calls = []
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(OutOfMemoryError, match=r"and 0\.0 GB are at hand"):
        ttapca.fit(model, "1", images(100, shape=(4,)).float(), 2)
    assert len(calls) == 1  # to see the shapes


class Listener:
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[FitPlan] = []
        self.stages: list[str] = []

    def __call__(self, batches):
        return batches

    def plan(self, plan: FitPlan) -> None:
        self.told.append(plan)

    def stage(self, name: str) -> None:
        self.stages.append(name)


def test_the_plan_is_told_before_the_work() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 2)).double()
    found = images(90, shape=(1, 8, 8))
    for data, samples in ((found, 90), (iter(found.split(30)), None)):
        listener = Listener()
        fitted = ttapca.fit(model, "0", data, 20, progress=listener)
        (plan,) = listener.told
        assert (plan.route, plan.samples) == (fitted.route, samples)
        assert listener.stages[:2] == ["decomposing", "calibrating"]
        assert "GB of memory" in str(plan)


def test_a_plan_in_one_line() -> None:
    assert str(FitPlan("gram", 96, 10**9)) == (
        "exact, by the Gram matrix of few samples (gram), 96 samples: up to 1.0 GB of memory"
    )


@pytest.mark.parametrize("route", ["folded", "exact", "gram", "randomised", "dct"])
def test_costs_grow_with_the_problem(route: str) -> None:
    small = Problem((3, 16, 16), (8, 16, 16), True, 50, 400, 50)
    large = Problem((3, 32, 32), (8, 32, 32), True, 100, 800, 50)
    one, two = route_cost(route, small), route_cost(route, large)
    assert two.memory > one.memory > 0
    assert two.stored > one.stored > 0
    assert math.prod(shape := small.filtered_shape) == small.filtered
    assert shape == (3, 16, 16)
    assert LARGEST_DENSE > 2000 * 16_384 * 4  # a CIFAR layer with the paper's components


# Few samples of an affine layer: no matrix of inputs x inputs.


@pytest.mark.parametrize("samples", [12, 40])
def test_few_inputs_give_the_pca_of_the_outputs(samples: int) -> None:
    layer = nn.Conv2d(2, 5, 3, stride=1, padding=1).double()
    data = images(samples, shape=(2, 6, 6)) + 3
    linear = LinearPart(layer, (2, 6, 6))
    gram = InputGram(data.split(7), linear)
    with torch.no_grad():
        outputs = layer(data)
    for left_out in ((), range(0, samples, 4)):
        kept = torch.ones(samples, dtype=torch.bool)
        kept[list(left_out)] = False
        dense, found = DensePCA(outputs[kept]), gram.pca(8, leave_out=left_out)
        np.testing.assert_allclose(found.singular_values, dense.singular_values[:8], rtol=1e-9)
        np.testing.assert_allclose(found.mean, data[kept].flatten(1).mean(0), atol=1e-12)
        vectors = linear.apply(found.rebuild.T)  # rows of V^T
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(8, dtype=torch.float64))
        centred = data.flatten(1) - found.mean
        own = (outputs.flatten(1) - outputs[kept].flatten(1).mean(0)) @ vectors.T
        torch.testing.assert_close(centred @ found.project, own)
        np.testing.assert_allclose(
            found.total_variance, outputs[kept].flatten(1).var(0).sum().item(), rtol=1e-9
        )


def test_gram_at_the_input_is_the_folded_filter(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Flatten(), nn.Linear(384, 3)).double()
    data = images(300, shape=(1, 8, 8))
    one, two = (ttapca.fit(model, "0", data, 12, route=route) for route in ("folded", "gram"))
    assert two.basis.at_input
    assert type(two.basis) is type(one.basis)
    torch.testing.assert_close(two.singular_values_, one.singular_values_)
    torch.testing.assert_close(two.basis.to_components, one.basis.to_components)
    torch.testing.assert_close(two.basis.from_components, one.basis.from_components)
    torch.testing.assert_close(two.energies_, one.energies_, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(two.mean_, one.mean_)
    two.save(tmp_path / "filter")
    again = ttapca.load(tmp_path / "filter")
    assert (again.route, again.basis.at_input) == ("gram", True)


# The network is run on parts of a large batch.


def test_a_large_batch_is_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten())
    model = model.append(nn.Linear(256, 2)).double().eval()
    data = images(90, shape=(1, 8, 8))
    whole = ttapca.fit(model, "1", data, 20)
    monkeypatch.setattr(activations, "RUN_NUMBERS", 256 * 7)
    sizes: list[int] = []
    handle = model[3].register_forward_hook(lambda _m, args, _o: sizes.append(len(args[0])))
    parts = ttapca.fit(model, "1", data, 20)
    handle.remove()
    assert max(sizes[:13]) == 7
    torch.testing.assert_close(parts.singular_values_, whole.singular_values_)
    for path, moments in whole.classes_.layers.items():
        torch.testing.assert_close(parts.classes_.layers[path], moments, rtol=1e-3, atol=1e-5)


class Classes(nn.Module):
    """A network of many classes that counts the samples it predicts."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten())
        self.head = nn.Linear(256, classes)
        self.predicted = 0

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(self.body(x))
        self.predicted += len(x)
        return found


@pytest.mark.parametrize(("classes", "known"), [(20, True), (60, False)])
def test_classes_with_too_few_images_are_not_measured(classes: int, known: bool) -> None:
    model = Classes(classes).double().eval()
    fitted = ttapca.fit(model, "body.0", images(100, shape=(1, 8, 8)))
    assert (fitted.classes_ is not None) == known
    assert (model.predicted > 100) == known  # else only what is kept to compare predictions


def test_a_loader_of_whole_batches_has_as_many_images_as_they_hold() -> None:
    data = images(100, shape=(1, 8, 8))
    batches = DataLoader(list(data.split(20)), batch_size=None)
    fitted = ttapca.fit(Classes(20).double().eval(), "body.0", batches)
    assert fitted.n_samples_ == 100
    assert fitted.classes_ is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_classes_of_a_narrow_model_are_summed_precisely(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, data = Classes(4).eval(), images(128, shape=(1, 8, 8)).to(dtype).float() / 20
    with torch.no_grad():
        model.body[0].bias += 5.0
    found = []
    for precision in (torch.float32, dtype):
        moments = ttapca.fit(model.to(precision), "body.0", data.to(precision), 20).classes_
        assert moments is not None
        at_source = torch.zeros(1, moments.loadings.shape[1])
        found.append(corrections(moments.layers["body.1"], at_source)[1])
        # The variance is a small difference of large sums.
        mean, square = moments.layers["body.1"][0].double()
        with torch.no_grad():
            inputs = model.body[0](data.to(precision)).double()
        torch.testing.assert_close(square - mean**2, inputs.var((0, 2, 3)), rtol=0.01, atol=0)
    torch.testing.assert_close(found[1], torch.ones_like(found[1]), rtol=0.2, atol=0)
    torch.testing.assert_close(found[0], torch.ones_like(found[0]), rtol=0.01, atol=0)


def test_images_of_another_size_are_refused_clearly_or_taken() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    data = images(60, shape=(1, 8, 8))
    attachment = ttapca.attach(model, ttapca.fit(model.double(), "0", data, route="folded"))
    said = r"fitted on samples of shape \(1, 8, 8\); found \(1, 9, 8\)\. Resize the input, or"
    with pytest.raises(ShapeError, match=said):
        model(images(2, shape=(1, 9, 8)))
    attachment.detach()
    attachment = ttapca.attach(model, ttapca.fit(model, "0", data, route="dct"))
    assert model(images(2, shape=(1, 9, 8))).shape == (2, 4)
    attachment.detach()
