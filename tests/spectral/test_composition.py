"""Classes of a stream: what they explain, how they are estimated, and when they are believed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ttapca.spectral.composition import (
    CLASS_MEMORY,
    LARGEST_RANK,
    SOURCE_PER_CLASS,
    STEPS,
    ClassMoments,
    Composition,
)
from ttapca.spectral.stream import Stream


def random_sums(classes: int, channels: int, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Return class weights and sums of moments that belong to real samples."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1 + torch.rand(classes, generator=generator, dtype=torch.float64)
    sums = {}
    for path in ("early", "late"):
        mean = torch.randn(classes, channels, generator=generator, dtype=torch.float64)
        square = mean.square() + 0.5 + torch.rand_like(mean)
        sums[path] = torch.stack([mean, square], 1) * weights[:, None, None]
    return weights, sums


def composition_of(classes: int, seed: int = 0) -> Composition:
    composition = Composition(ClassMoments.from_sums(*random_sums(classes, 4, seed)))
    composition.join(Stream())
    return composition


@pytest.mark.parametrize("classes", [2, 5, LARGEST_RANK])
def test_corrections_are_those_of_the_formula(classes: int) -> None:
    weights, sums = random_sums(classes, 7)
    moments = ClassMoments.from_sums(weights, sums)
    shares = np.random.default_rng(1).dirichlet(np.ones(classes))
    found = moments.corrections(torch.tensor(shares))
    source = (weights / weights.sum()).numpy()
    for path, each in sums.items():
        mean_k, square_k = (each / weights[:, None, None]).numpy().transpose(1, 0, 2)
        mean, source_mean = shares @ mean_k, source @ mean_k
        var = shares @ square_k - mean**2
        source_var = source @ square_k - source_mean**2
        shift, scale = found[path]
        np.testing.assert_allclose(shift, mean - source_mean, atol=1e-5)
        np.testing.assert_allclose(scale, source_var / var, rtol=1e-4)


def test_many_classes_are_kept_in_few_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    place = torch.randn(200, 3, generator=generator)  # three directions hold all there is
    mean = place @ torch.randn(3, 50, generator=generator)
    sums = {"late": torch.stack([mean, torch.full_like(mean, 40.0)], 1)}
    moments = ClassMoments.from_sums(torch.ones(200), sums)
    assert moments.loadings.shape[1] <= LARGEST_RANK
    one = torch.zeros(200)
    one[17] = 1.0
    shift, _ = moments.corrections(one)["late"]
    torch.testing.assert_close(shift, mean[17] - mean.mean(0), rtol=1e-3, atol=1e-3)


def test_source_shares_change_nothing() -> None:
    moments = ClassMoments.from_sums(*random_sums(6, 5))
    for shift, scale in moments.corrections(moments.shares).values():
        torch.testing.assert_close(shift, torch.zeros(5), rtol=0, atol=1e-6)
        torch.testing.assert_close(scale, torch.ones(5), rtol=1e-5, atol=0)


def test_the_estimate_is_expectation_maximisation() -> None:
    composition = composition_of(4)
    logits = 2 * torch.randn(60, 4, generator=torch.Generator().manual_seed(3)).double()
    composition.start_batch(60)
    found = composition.estimate(logits)
    source = composition.moments.shares.double().numpy()
    likelihood = torch.softmax(logits, 1).numpy() / source
    before = SOURCE_PER_CLASS * 4 * source
    shares = source
    for _ in range(STEPS):
        posterior = likelihood * shares
        posterior /= posterior.sum(1, keepdims=True)
        counts = posterior.sum(0)
        shares = (counts + before) / (counts + before).sum()
    np.testing.assert_allclose(found.counts, counts, rtol=1e-6)


@pytest.mark.parametrize("shape", [(40, 4), (10, 4, 2, 2)])
def test_one_class_is_noticed_and_a_mixture_is_not(shape: tuple[int, ...]) -> None:
    composition = composition_of(4)
    composition.start_batch(shape[0])
    one = torch.zeros(shape)
    one[:, 2] = 8.0
    found = composition.estimate(one)
    assert found.certainty > 0.3
    assert int(found.prior.argmax()) == 2
    composition = Composition(ClassMoments.from_sums(torch.ones(4), random_sums(4, 4)[1]))
    composition.join(Stream())
    composition.start_batch(40)
    every = 8.0 * torch.eye(4).repeat(10, 1)
    found = composition.estimate(every)
    assert found.certainty == 0.0
    assert torch.equal(found.prior, torch.zeros(4))
    assert torch.equal(found.shares, composition.moments.shares)


def test_what_was_seen_fades() -> None:
    composition = composition_of(3)
    stream = composition.stream
    for size in (30, 5):
        stream.start_batch(size)
        composition.start_batch(size)
        found = composition.estimate(torch.eye(3)[:1].mul(9.0).expand(size, 3))
        composition.settle(found)
        stream.end_batch()
    assert composition.known
    assert composition.ordered > 0.5
    expected = 30 * np.exp(-5 / CLASS_MEMORY) + 5
    assert float(stream.now("composition/counts").sum()) == pytest.approx(expected, rel=1e-4)
