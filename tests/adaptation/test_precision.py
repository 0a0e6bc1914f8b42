"""Models in float16 and under autocast: the filter stays precise, and steps stay finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from adapters import DATA, LEARNING, adapted
from oracles import images, small_convnet
from ttapca.errors import InputTypeError

BATCHES = [batch.float() for batch in images(48, seed=8).split(12)]


def convnet() -> nn.Module:
    return small_convnet(dtype=torch.float32)


@pytest.mark.parametrize("method", [name for name in LEARNING if name != "ttt"])  # of two networks
def test_steps_in_float16_stay_finite(method: str) -> None:
    adapter = adapted(method, model=convnet().half(), lr=1e-3)
    for batch in BATCHES:
        some = batch[:2] if method == "memo" else batch  # image by image: slow
        assert torch.isfinite(adapter(some.half())).all()
    assert adapter.updates > 0
    assert adapter.skipped == 0


@pytest.mark.parametrize("logits", ["before", "after"])
def test_a_step_that_went_too_far_is_not_the_end_of_a_stream(logits: Any) -> None:
    adapter = adapted("tent", model=convnet(), logits=logits, forgetting="continual")
    expected = adapter(BATCHES[0])
    adapter.reset()
    adapter(BATCHES[0])
    next(adapter.surfaces.parameters()).data.fill_(torch.inf)  # as a step may leave it
    assert not torch.isfinite(adapter(BATCHES[1])).all()
    assert adapter.skipped == 1
    torch.testing.assert_close(adapter(BATCHES[0]), expected)


@pytest.fixture(scope="module")
def precise() -> tuple[ttapca.FittedFilter, Tensor]:
    """A filter of images whose last components hardly vary, and some of them."""
    smooth = torch.nn.functional.interpolate(torch.rand(2000, 3, 3, 3), (6, 6), mode="bilinear")
    noise = 5e-4 * torch.randn(smooth.shape)
    data = smooth + noise
    return ttapca.fit(convnet(), "conv1", data[64:]), data[:64]


def test_autocast_leaves_the_filter_its_precision(
    precise: tuple[ttapca.FittedFilter, Tensor],
) -> None:
    fitted, x = precise
    adapter = ttapca.adapt(convnet(), "wiener", filter=fitted, order="shuffled")
    adapter(x)
    expected = adapter.health.bands
    with torch.autocast("cpu", torch.bfloat16):
        adapter(x)
    found = adapter.health.bands
    assert [each.ratio for each in found] == pytest.approx([each.ratio for each in expected])


@pytest.mark.parametrize("method", ["wiener", "ttapca-relu", "ttapca-exp"])
def test_a_filter_stays_precise_when_its_adapter_is_cast(
    method: str, precise: tuple[ttapca.FittedFilter, Tensor]
) -> None:
    fitted, x = precise
    noisy = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    cast_first = ttapca.adapt(convnet().half(), method, filter=fitted)
    cast_later = ttapca.adapt(convnet(), method, filter=fitted).half()
    found = [adapter(noisy.half()) for adapter in (cast_first, cast_later)]
    assert found[1].dtype == torch.float16
    assert cast_later.skipped == 0
    torch.testing.assert_close(found[1], found[0])


def test_autocast_casts_weights_anew_after_every_step() -> None:
    found = []
    for enabled in (False, True):
        adapter = adapted("memo", model=convnet(), lr=1.0, views=3)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            stepped = adapter(BATCHES[0][:4])
            with adapter.disabled(), torch.no_grad():
                plain = adapter(BATCHES[0][:4])
        found.append(float((stepped - plain).float().abs().max()))
    assert found[1] == pytest.approx(found[0], rel=0.2)


def test_source_data_may_be_an_array_or_of_another_precision() -> None:
    for model, source in (
        (convnet(), DATA[:64].double().numpy()),
        (convnet().bfloat16(), DATA[:64].float()),
    ):
        x = BATCHES[0].to(next(model.parameters()))
        for method, options in (("pea", {}), ("eata", {"fisher_weight": 1.0})):
            with ttapca.adapt(model, method, source=source, **options) as adapter:
                assert torch.isfinite(adapter(x)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_images_of_another_precision_are_named(dtype: torch.dtype) -> None:
    model = convnet().to(dtype)
    found = "own precision; found a tensor of float32.*The model said"
    with pytest.raises(InputTypeError, match=found):
        ttapca.adapt(model, "bn")(BATCHES[0])
    with pytest.raises(InputTypeError, match=found):
        ttapca.fit(model, "conv1", DATA.float(), 20)
