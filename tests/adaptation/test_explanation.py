from __future__ import annotations

import pytest
import torch
from torch import nn

import ttapca
from oracles import assert_same_picture, images, picture_of, small_convnet
from ttapca import measure_cost
from ttapca.adaptation.explanation import BandReport

X = images(12, seed=8)
FITTED = ttapca.fit(small_convnet(), "conv1", images(150), 20)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("source", {}, (0, 1, 0)),
        ("bn", {}, (0, 1, 0)),
        ("tent", {}, (28, 1, 1)),
        ("tent", {"logits": "after"}, (28, 2, 1)),
        ("tent", {"steps": 3}, (28, 3, 3)),
        ("shot", {}, (690, 2, 1)),
        ("shot", {"logits": "before"}, (690, 1, 1)),
        ("slr+it", {}, (890 + 28, 2, 1)),
        ("eata", {"entropy_margin": 6.0}, (28, 1, 1)),
        ("eata", {"entropy_margin": 1e-9}, (28, 1, 0)),
        ("roid", {}, (28, 2, 1)),
        ("roid", {"consistency": False}, (28, 1, 1)),
        ("rotta", {}, (28, 1, 0)),
        ("rotta", {"update_every": len(X), "capacity": 1000}, (28, 3, 1)),
        ("pea", {"source": images(20)}, (0, 6, 0)),
        ("pea", {"source": images(20), "augment": "none"}, (0, 2, 0)),
        ("wiener", {"filter": FITTED, "order": "shuffled"}, (0, 1, 0)),
        ("ttapca-relu", {"filter": FITTED}, (20, 2, 1)),
        ("ttapca-exp", {"filter": FITTED, "steps": 4}, (20, 5, 4)),
        ("ttapca-multiplicative", {"filter": FITTED, "logits": "before"}, (40, 1, 1)),
    ],
)
def test_passes_and_parameters(method: str, options: dict[str, object], expected: tuple) -> None:
    cost = measure_cost(ttapca.adapt(small_convnet(), method, **options), X)
    assert (cost.parameters, cost.forwards, cost.backwards) == expected


def test_memory_that_is_kept() -> None:
    def kept(method: str, **options: object) -> int:
        return measure_cost(ttapca.adapt(small_convnet(), method, **options), X).kept_bytes

    assert kept("source") == kept("bn") == 0
    # Copies of 28 numbers, Adam's two moments of each, and a step count for each of 4 tensors.
    assert kept("tent") == 3 * 28 * 8 + 4 * 4
    # Where the weights started, Adam's, and the mean prediction of five classes.
    assert kept("roid") == kept("tent") + (28 + 5) * 8
    # Fisher information and start; the copies and one momentum of each; the mean.
    eata = kept("eata", source=images(20), entropy_margin=6.0)
    assert eata == (4 * 28 + 5) * 8
    # Two matrices of 108 x 20, the mean, the spectrum, gamma and its moments.
    assert kept("ttapca-relu", filter=FITTED) == (2 * 108 * 20 + 108 + 4 * 20) * 8 + 4


def test_memory_of_the_graph() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)).double()
    x = images(10, shape=(6,))
    plain = measure_cost(ttapca.adapt(model, "source"), x)
    assert plain.graph_bytes == 0
    small, large = (
        measure_cost(ttapca.adapt(small_convnet(), "tent"), images(n)).graph_bytes for n in (6, 12)
    )
    # Activations grow with the batch; what does not grow is small.
    assert 1.9 * small < large <= 2 * small


def test_a_measurement_leaves_no_trace() -> None:
    model = small_convnet()
    adapter = ttapca.adapt(model, "tent", forgetting="online", lr=0.1)
    before = picture_of(model)
    first = adapter(X)
    adapter.reset()
    measure_cost(adapter, X)
    assert_same_picture(before, picture_of(model))
    assert torch.equal(adapter(X), first)


@pytest.mark.parametrize(
    ("variance", "gain", "bar", "meaning"),
    [
        (4.0, 0.25, "    ████|        ", "4.0 times: noise was added; scaled down to 25 %"),
        (
            0.5,
            1.4,
            "        |█       ",
            "0.5 times: detail or contrast is lost; scaled up to 140 %",
        ),
        (1.1, 1.0, "        |        ", "1.1 times: as some source batches have; left alone"),
    ],
)
def test_a_band_in_words(variance: float, gain: float, bar: str, meaning: str) -> None:
    band = BandReport(8, 15, 1.0, variance, gain)
    assert (band.bar, band.meaning.replace(" the variance", "")) == (bar, meaning)


def test_variance_that_is_not_scaled_down_is_that_of_a_mean() -> None:
    moved = "4.0 times the variance: a mean has moved; moved back if that is sure"
    assert BandReport(8, 15, 1.0, 4.0, 1.04, p_value=0.002).meaning == moved
    assert BandReport(8, 15, 1.0, 4.0, 1.0, p_value=0.03).meaning.endswith(
        "no sure shift; left alone"
    )


def test_the_offset_of_a_sensor_in_words() -> None:
    """A network on series, whose samples are moved: nothing says images."""
    random = torch.Generator().manual_seed(0)
    series = torch.randn(200, 2, 20, generator=random)
    network = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
    fitted = ttapca.fit(network.eval(), "0", series, outputs="multilabel")
    with ttapca.adapt(network, "wiener", filter=fitted, outputs="multilabel") as adapted:
        adapted(series[:100] + 2)
        said = f"{ttapca.explain(adapted)[0]} {adapted.health}"
    assert "by 100 samples" in said
    assert "100 samples, p = " in said
    assert "image" not in said
