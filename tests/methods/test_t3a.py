"""`t3a` against a plain loop, with a list of supports for each class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import ANY_SIZE, BATCHES, X, assert_follows, both_ways, every_norm, sharp
from oracles import left_untouched, small_convnet, with_batch_statistics
from small_networks import with_outputs
from ttapca.errors import AttachError, LayerOutputError
from ttapca.methods.t3a import most_certain


def entropy(logits: Tensor) -> float:
    p = torch.softmax(logits, 0)
    return float(-(p * torch.log(p)).sum())


def plain_t3a(
    model: nn.Module, batches: list[Tensor], *, forgetting: str, supports: int | None
) -> tuple[list[Tensor], int]:
    """Algorithm 1 of the paper, one sample after the other; also how many supports were let go."""
    *body, head = model
    weight, bias = head.weight.detach(), head.bias.detach()
    dropped = 0

    def fresh() -> list[list[tuple[float, Tensor]]]:
        sets: list[list[tuple[float, Tensor]]] = [[] for _ in weight]
        for row in weight:
            sets[int((weight @ row + bias).argmax())].append((entropy(weight @ row + bias), row))
        return sets

    sets, found = fresh(), []
    for x in batches:
        if forgetting == "episodic":
            sets = fresh()
        with torch.no_grad():
            features = nn.Sequential(*body)(x)
        for z in features:
            logits = weight @ z + bias
            sets[int(logits.argmax())].append((entropy(logits), z))
        if supports is not None:
            dropped += sum(max(0, len(each) - supports) for each in sets)
            sets = [sorted(each, key=lambda pair: pair[0])[:supports] for each in sets]
        prototypes = []
        for each in sets:
            total = sum((z / z.norm() for _, z in each), torch.zeros_like(weight[0]))
            length = total.norm()
            prototypes.append(total / length if float(length) else total)
        found.append(torch.stack([torch.stack([z @ c for c in prototypes]) for z in features]))
    return found, dropped


@every_norm
@both_ways
@pytest.mark.parametrize(
    ("supports", "statistics"), [(1, "source"), (5, "source"), (None, "source"), (3, "batch")]
)
def test_equals_a_plain_loop(
    make: Any, forgetting: str, supports: int | None, statistics: Any
) -> None:
    network = with_batch_statistics(sharp(make())) if statistics == "batch" else sharp(make())
    expected, dropped = plain_t3a(network, ANY_SIZE, forgetting=forgetting, supports=supports)
    given: dict[str, Any] = {"supports": supports, "statistics": statistics}
    adapted = ttapca.adapt(sharp(make()), "t3a", forgetting=forgetting, **given)
    assert_follows(adapted, expected, ANY_SIZE, atol=1e-9)
    assert (dropped > 0) == (supports is not None)
    assert (adapted.updates, adapted.n_parameters) == (0, 0)


@pytest.mark.parametrize("most", [1, 2, 7, None])
def test_the_most_certain_remain(most: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (40,), generator=generator)
    entropies = torch.randint(9, (40,), generator=generator).double()  # some are equal
    expected = []
    for label in range(6):
        places = [i for i in range(40) if int(labels[i]) == label]
        expected += sorted(places, key=lambda i: (float(entropies[i]), i))[:most]
    assert most_certain(labels, entropies, most).tolist() == expected


def test_only_so_many_are_kept() -> None:
    adapted = ttapca.adapt(small_convnet(), "t3a", supports=4, forgetting="online")
    for x in BATCHES:
        adapted(x)
    features, labels, entropies = adapted.hub.now("supports")
    assert labels.bincount().max() <= 4
    assert len(features) == len(labels) == len(entropies) <= 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_other_layer(dtype: torch.dtype) -> None:
    adapted = ttapca.adapt(small_convnet(dtype=dtype), "t3a", forgetting="online")
    assert all(adapted(x.to(dtype)).dtype == dtype for x in BATCHES)


def test_models_it_cannot_serve() -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(AttachError, match="`conv2` is a Conv2d"):
        ttapca.adapt(model, "t3a", classifier="conv2")
    for wrong, message in (
        (with_outputs(1), "that of `fc.1`, with 1 for 2 classes, is another.*choose `neo`"),
        (
            nn.Sequential(small_convnet(), nn.Softmax(1)),
            "that of `0.fc`, with 5 for 5 classes, is another",
        ),
        (nn.Sequential(small_convnet(), nn.Linear(5, 3).double()), None),
    ):
        with left_untouched(wrong, X), ttapca.adapt(wrong, "t3a") as adapted:
            if message is None:
                assert adapted(X).shape == (12, 3)
                continue
            with pytest.raises(LayerOutputError, match=message):
                adapted(X)
