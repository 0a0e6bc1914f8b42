"""`neo` against a plain loop: the mean of all features so far, sample by sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import ANY_SIZE, BATCHES, X, assert_follows, both_ways, every_norm
from oracles import left_untouched, small_convnet, with_batch_statistics
from small_networks import TokenNet, pixelwise
from ttapca.errors import LayerOutputError, NotEnoughDataError, OptionError


def plain_neo(
    model: nn.Module, batches: list[Tensor], *, forgetting: str, momentum: float | None = None
) -> list[Tensor]:
    """The features of every sample of the stream are kept, and their mean is taken anew."""
    *body, head = model
    seen: list[Tensor] = []
    centre: Tensor = torch.zeros(head.in_features, dtype=torch.float64)
    found = []
    for x in batches:
        if forgetting == "episodic":
            seen, centre = [], torch.zeros_like(centre)
        with torch.no_grad():
            features = nn.Sequential(*body)(x)
        seen += list(features)
        if momentum is None:
            centre = sum(seen) / len(seen)
        else:
            centre = (1 - momentum) * centre + momentum * sum(features) / len(features)
        logits = [head.weight @ (z - centre) + head.bias for z in features]
        found.append(torch.stack(logits).detach())
    return found


@every_norm
@both_ways
@pytest.mark.parametrize(
    ("momentum", "statistics"),
    [(None, "source"), (0.1, "source"), (1.0, "source"), (None, "batch")],
)
def test_equals_a_plain_loop(
    make: Any, forgetting: str, momentum: float | None, statistics: Any
) -> None:
    network = with_batch_statistics(make()) if statistics == "batch" else make()
    expected = plain_neo(network, ANY_SIZE, forgetting=forgetting, momentum=momentum)
    given: dict[str, Any] = {"momentum": momentum, "statistics": statistics}
    adapted = ttapca.adapt(make(), "neo", forgetting=forgetting, **given)
    assert_follows(adapted, expected, ANY_SIZE, atol=1e-10)
    assert (adapted.updates, adapted.n_parameters) == (0, 0)


def test_a_shift_of_all_features_makes_no_difference() -> None:
    model, shifted = small_convnet(), small_convnet()
    shifted.flat = nn.Sequential(nn.Flatten(), Added(5 * torch.ones(24, dtype=torch.float64)))
    one, other = (ttapca.adapt(each, "neo", forgetting="online") for each in (model, shifted))
    for x in BATCHES:
        torch.testing.assert_close(other(x), one(x), rtol=0, atol=1e-9)


class Added(nn.Module):
    def __init__(self, what: Tensor) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return x + self.what


def test_the_model_itself_predicts_with_what_is_known() -> None:
    model = small_convnet()
    adapted = ttapca.adapt(model, "neo", forgetting="online")
    expected = adapted(X)
    assert torch.equal(model(X), expected)
    model(9 * X)  # nobody announced it, so nothing is learned from it
    assert torch.equal(model(X), expected)
    assert torch.equal(adapted.detach()(X), small_convnet()(X))


def test_pixels_are_samples() -> None:
    model = pixelwise(5)
    adapted = ttapca.adapt(pixelwise(5), "neo", classifier="fc", forgetting="online")
    seen: list[Tensor] = []
    for x in BATCHES[:3]:
        with torch.no_grad():
            features = model[:3](x)
        seen += [features[n, :, i, j] for n in range(12) for i in range(6) for j in range(6)]
        centre = sum(seen) / len(seen)
        with torch.no_grad():
            expected = model.fc(features - centre.view(1, -1, 1, 1))
        torch.testing.assert_close(adapted(x), expected, rtol=0, atol=1e-10)


class TokensOut(TokenNet):
    """A prediction for each token, as (batch, classes, tokens)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv1(x).flatten(2).transpose(1, 2)
        return self.fc(input=torch.relu(self.mix(self.scaling(tokens)))).transpose(1, 2)


def test_tokens_are_samples() -> None:
    model = TokensOut().double()
    adapted = ttapca.adapt(model, "neo")
    with torch.no_grad():
        tokens = model.conv1(X).flatten(2).transpose(1, 2)
        features = torch.relu(model.mix(model.scaling(tokens)))
        expected = model.fc(features - features.mean((0, 1))).transpose(1, 2)
    torch.testing.assert_close(adapted(X), expected)


class Unused(nn.Module):
    """Registers a linear layer last that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.spare = nn.Linear(108, 5), nn.Linear(108, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


def test_classifiers_that_cannot_be_found() -> None:
    with pytest.raises(LayerOutputError, match="in every forward pass; `spare` was not"):
        ttapca.adapt(Unused().double(), "neo")(X)
    assert ttapca.adapt(Unused().double(), "neo", classifier="fc")(X).shape == (12, 5)
    longer = nn.Sequential(nn.Flatten(), nn.Linear(108, 7), nn.Conv1d(7, 5, 1)).double()
    longer[2] = nn.Sequential(nn.Unflatten(1, (7, 1)), nn.Conv1d(7, 5, 1), nn.Flatten()).double()
    said = r"`1`, has 7 outputs, and there are 5 logits.*insist: `classifier=\"1\"`"
    with left_untouched(longer, X), ttapca.adapt(longer, "neo") as adapted:
        with pytest.raises(LayerOutputError, match=said):
            adapted(X)
        adapted.detach()
    assert ttapca.adapt(longer, "neo", classifier="1")(X).shape == (12, 5)


def test_layers_whose_features_are_no_rows() -> None:
    model = small_convnet()
    adapted = ttapca.adapt(model, "neo", classifier="bn2")
    with pytest.raises(
        LayerOutputError, match=r"`bn2`, a BatchNorm2d, takes shape \(12, 6, 2, 2\)"
    ):
        adapted(X)


def test_half_precision_keeps_its_own() -> None:
    model = small_convnet(dtype=torch.bfloat16)
    adapted = ttapca.adapt(model, "neo", forgetting="online")
    for x in BATCHES:
        assert adapted(x.bfloat16()).dtype == torch.bfloat16
    mean, count = adapted.hub.now("centre")
    assert (mean.dtype, count) == (torch.float32, 120)


SOURCE = 3 * BATCHES[3] + 1


def plain_shift(
    model: nn.Module, batches: list[Tensor], *, forgetting: str, momentum: float, strength: float
) -> list[Tensor]:
    """FOA's equations 7 to 9: the shift is by the batches before."""
    *body, head = model
    with torch.no_grad():
        wanted = nn.Sequential(*body)(SOURCE).mean(0)
        average, found = None, []
        for x in batches:
            if forgetting == "episodic":
                average = None
            features = nn.Sequential(*body)(x)
            shift = 0 if average is None else strength * (wanted - average)
            found.append(torch.stack([head.weight @ (z + shift) + head.bias for z in features]))
            mean = features.mean(0)
            average = mean if average is None else (1 - momentum) * average + momentum * mean
    return found


@every_norm
@both_ways
@pytest.mark.parametrize(("momentum", "strength"), [(0.1, 1.0), (0.6, 0.5)])
def test_foa_shift_equals_a_plain_loop(
    make: Any, forgetting: str, momentum: float, strength: float
) -> None:
    options: dict[str, Any] = {"momentum": momentum, "strength": strength}
    expected = plain_shift(make(), ANY_SIZE, forgetting=forgetting, **options)
    for source in (SOURCE, list(SOURCE.split(5))):
        adapted = ttapca.adapt(make(), "foa-shift", source=source, forgetting=forgetting, **options)
        assert_follows(adapted, expected, ANY_SIZE, atol=1e-10)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (None, OptionError, "needs source data.*found none"),
        ([], NotEnoughDataError, "found 0 samples"),
        (SOURCE * float("nan"), NotEnoughDataError, "NaN or infinity among them"),
    ],
)
def test_source_data_of_foa_shift(source: Any, error: Any, message: str) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(error, match=message):
        ttapca.adapt(model, "foa-shift", source=source)
