from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import (
    BATCHES,
    affine_with_batch_statistics,
    assert_follows,
    both_ways,
    copied,
    every_norm,
    set_to,
)
from oracles import images
from ttapca.methods.deyo import shuffled_patches

# Wide margins, so that samples pass both filters with as few classes and such small images.
MARGINS = {"entropy_margin": 0.99, "weight_margin": 0.6, "shape_margin": 0.001}


def plain_deyo(
    model: nn.Module,
    *,
    forgetting: str,
    entropy_margin: float,
    weight_margin: float,
    shape_margin: float,
) -> tuple[list[Tensor], int]:
    """The paper's algorithm 1, image by image, with torch's own Adam; also how many took part."""
    network, parameters = affine_with_batch_statistics(model)
    start, outputs, took_part = copied(parameters), [], 0
    for number, x in enumerate(BATCHES):
        if forgetting == "episodic" or number == 0:
            draws = torch.Generator().manual_seed(0)
            optimizer = torch.optim.Adam(parameters, lr=0.01)
            set_to(parameters, start)
        logits = network(x)
        outputs.append(logits.detach())
        p = torch.softmax(logits, 1)
        entropy = [-(row * row.log()).sum() for row in p]
        largest = math.log(p.shape[1])
        sure = [i for i in range(len(x)) if float(entropy[i].detach()) < entropy_margin * largest]
        if not sure:
            continue
        with torch.no_grad():
            destroyed = torch.softmax(network(shuffled_patches(x[sure], 4, draws)), 1)
        terms = []
        for place, i in enumerate(sure):
            label = int(p[i].argmax())
            difference = float((p[i, label] - destroyed[place, label]).detach())
            if difference > shape_margin:
                value = float(entropy[i].detach())
                weight = math.exp(weight_margin * largest - value) + math.exp(difference)
                terms.append(weight * entropy[i])
        if not terms:
            continue
        took_part += len(terms)
        optimizer.zero_grad()
        (sum(terms) / len(terms)).backward()
        optimizer.step()
    return outputs, took_part


@every_norm
@both_ways
def test_equals_a_plain_loop(make, forgetting: str) -> None:
    expected, took_part = plain_deyo(make(), forgetting=forgetting, **MARGINS)
    adapter = ttapca.adapt(make(), "deyo", lr=0.01, forgetting=forgetting, **MARGINS)
    assert_follows(adapter, expected, atol=1e-6)
    assert 0 < took_part < sum(map(len, BATCHES))
    assert adapter.skipped == 0


@pytest.mark.parametrize(("side", "patches"), [(8, 4), (6, 3), (6, 2), (5, 9)])
def test_shuffling_moves_patches_and_nothing_else(side: int, patches: int) -> None:
    x = images(5, shape=(3, side, side))
    found = shuffled_patches(x, patches, torch.Generator().manual_seed(3))
    patches = min(patches, side)

    def tiles(batch: Tensor) -> list[list[tuple[float, ...]]]:
        """All patches of each image, as numbers, in some fixed order."""
        size = side // patches
        cut = batch.unfold(2, size, size).unfold(3, size, size)  # (n, c, rows, columns, h, w)
        flat = cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return [sorted(map(tuple, image.tolist())) for image in flat]

    assert tiles(found) == tiles(x)
    assert not torch.equal(found, x)


def test_sides_that_cannot_be_divided_stay_as_they_are() -> None:
    x = images(2, shape=(3, 6, 7))
    assert shuffled_patches(x, 4, torch.Generator().manual_seed(0)).shape == x.shape
