"""What the tests of single methods share: batches, networks, and the plain loops that they follow.

A row is one prediction: of an image, of each of its pixels, or of each of its labels. What a method
does with an image, it does with each row, so one loop is the reference for all three.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import ttapca
from oracles import group_norm_net, images, layer_norm_net, small_convnet, with_batch_statistics
from ttapca.methods.slr import InputTransform
from ttapca.methods.views import STRONG, mixed_views

BATCHES = list(images(120, seed=8).split(12))
X = BATCHES[0]
ANY_SIZE = [X, BATCHES[1][:1], BATCHES[2][:5], 3 * BATCHES[3], *BATCHES[4:]]

every_norm = pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
both_ways = pytest.mark.parametrize("forgetting", ["episodic", "online"])

Rows = Callable[[Tensor], Tensor]  # from outputs to probabilities, shape (rows, classes)
Draw = Callable[[Tensor, Generator], Tensor]  # another view of images


def sharp(model: nn.Module) -> nn.Module:
    """The same with surer predictions: the weights of its classifier five times as large."""
    with torch.no_grad():
        model[-1].weight *= 5
    return model


def affine_with_batch_statistics(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
    """A copy that normalises as in training, and its scale and shift."""
    network = with_batch_statistics(model)
    kinds = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
    norms = [module for module in network.modules() if isinstance(module, kinds)]
    return network, [parameter for m in norms for parameter in (m.weight, m.bias)]


def set_to(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give parameters other values, in place."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def copied(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Values of their own."""
    return [parameter.detach().clone() for parameter in parameters]


def assert_follows(
    adapter: ttapca.Adapter,
    expected: Sequence[Tensor],
    batches: Sequence[Tensor] = BATCHES,
    *,
    atol: float = 1e-8,
) -> None:
    """Batch by batch, the adapter says what the plain loop said."""
    for x, reference in zip(batches, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=atol)


def samples(z: Tensor) -> Tensor:
    """Logits of images."""
    return torch.softmax(z, 1)


def pixels(z: Tensor) -> Tensor:
    """Logits of shape (batch, classes, height, width), one pixel after the other."""
    batch, _, height, width = z.shape
    places = [(n, i, j) for n in range(batch) for i in range(height) for j in range(width)]
    exponents = torch.stack([torch.exp(z[n, :, i, j]) for n, i, j in places])
    return exponents / exponents.sum(1, keepdim=True)


def labels(z: Tensor) -> Tensor:
    """Outputs of shape (batch, labels, ...): no and yes for each."""
    yes = 1 / (1 + torch.exp(-z.reshape(-1)))
    return torch.stack([1 - yes, yes], 1)


def entropies(p: Tensor) -> Tensor:
    return -(p * torch.log(p)).sum(1)


def mean_entropy(p: Tensor) -> Tensor:
    return entropies(p).mean()


def plain_steps(
    lowered: tuple[nn.Module | Callable[[Tensor], Tensor], list[nn.Parameter]],
    batches: list[Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[Tensor], Tensor],
    rows: Rows,
    *,
    after: bool,
) -> list[Tensor]:
    """One step of torch's own optimiser on each batch, online."""
    forward, parameters = lowered
    stepper = optimizer(parameters)
    found = []
    for x in batches:
        z = forward(x)
        stepper.zero_grad()
        loss(rows(z)).backward()
        stepper.step()
        found.append((forward(x) if after else z).detach())
    return found


class FoundBySAR(NamedTuple):
    """Outputs, the number of recoveries since the last reset, and the kept share by batch."""

    outputs: list[Tensor]
    recoveries: int
    kept: list[float]


def plain_sar(
    model: nn.Module,
    batches: list[Tensor],
    rows: Rows = samples,
    *,
    forgetting: str = "online",
    entropy_margin: float,
    recover_below: float = 0.0,
    lr: float = 0.05,
) -> FoundBySAR:
    """The paper's algorithm 1, with momentum written out; logits from before the update."""
    network, theta = affine_with_batch_statistics(model)
    start = copied(theta)
    speed, average, found = None, None, FoundBySAR([], 0, [])
    for x in batches:
        if forgetting == "episodic":
            set_to(theta, start)
            speed, average, found = None, None, found._replace(recoveries=0)
        logits = network(x)
        found.outputs.append(logits.detach())
        first = entropies(rows(logits))
        limit = entropy_margin * math.log(rows(logits).shape[1])
        chosen = [i for i in range(len(first)) if float(first[i].detach()) < limit]
        if not chosen:
            continue
        g = torch.autograd.grad(sum(first[i] for i in chosen) / len(chosen), theta)
        length = math.sqrt(sum(float((v**2).sum()) for v in g))
        here = copied(theta)
        set_to(theta, [p + 0.05 * v / length for p, v in zip(here, g, strict=True)])
        second = entropies(rows(network(x)))
        kept = [i for i in chosen if float(second[i].detach()) < limit]
        found.kept.append(len(kept) / len(first))
        if kept:
            loss = sum(second[i] for i in kept) / len(kept)
            g = torch.autograd.grad(loss, theta)
        set_to(theta, here)
        if not kept:
            continue
        speed = g if speed is None else [0.9 * s + v for s, v in zip(speed, g, strict=True)]
        set_to(theta, [p - lr * s for p, s in zip(here, speed, strict=True)])
        value = float(loss.detach())
        average = value if average is None else 0.9 * average + 0.1 * value
        if average < recover_below:
            set_to(theta, start)  # the weights only: the momentum goes on
            average, found = None, found._replace(recoveries=found.recoveries + 1)
    return found


def plain_cotta(
    model: nn.Module,
    batches: list[Tensor],
    rows: Rows = samples,
    view: Draw = STRONG,
    *,
    forgetting: str = "online",
    lr: float = 1e-3,
    views: int = 32,
    confidence_below: float = 0.92,
    teacher_momentum: float = 0.999,
    restored_share: float = 0.01,
) -> tuple[list[Tensor], int]:
    """Three whole networks and torch's own Adam; also how often the views were used."""
    averaged, outputs = 0, []

    def fresh() -> tuple[nn.Module, nn.Module, nn.Module, torch.optim.Optimizer, Generator]:
        student, teacher, source = (with_batch_statistics(model) for _ in range(3))
        optimizer = torch.optim.Adam(student.parameters(), lr=lr, betas=(0.9, 0.999))
        return student, teacher, source, optimizer, Generator().manual_seed(0)

    student, teacher, source, optimizer, generator = fresh()
    for x in batches:
        if forgetting == "episodic":
            student, teacher, source, optimizer, generator = fresh()
        with torch.no_grad():
            target = teacher(x)
            if rows(source(x)).max(1).values.mean() < confidence_below:
                averaged += 1
                target = torch.stack([teacher(view(x, generator)) for _ in range(views)]).mean(0)
        loss = -(rows(target) * torch.log(rows(student(x)))).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for t, s, o in zip(
                teacher.parameters(), student.parameters(), source.parameters(), strict=True
            ):
                t.copy_(teacher_momentum * t + (1 - teacher_momentum) * s)
                if restored_share:
                    mask = (torch.rand(s.shape, generator=generator) < restored_share).double()
                    s.copy_(o * mask + s * (1 - mask))
        outputs.append(target)
    return outputs, averaged


def plain_memo(
    model: nn.Module,
    batches: list[Tensor],
    rows: Rows = samples,
    *,
    forgetting: str = "online",
    steps: int = 1,
    lr: float,
    views: int,
) -> list[Tensor]:
    """Each image by itself: a fresh copy of the network, plain gradient descent, and away."""
    generator, outputs = Generator().manual_seed(0), []
    for batch in batches:
        if forgetting == "episodic":
            generator.manual_seed(0)
        logits = []
        for image in batch.split(1):
            network = copy.deepcopy(model).eval()
            weights = list(network.parameters())
            for _ in range(steps):
                drawn = mixed_views(image, views, generator)
                mean = sum(rows(network(one)) for one in drawn.split(1)) / views
                gradients = torch.autograd.grad(mean_entropy(mean), weights)
                set_to(weights, [w - lr * g for w, g in zip(weights, gradients, strict=True)])
            logits.append(network(image).detach())
        outputs.append(torch.cat(logits))
    return outputs


def plain_ratio(p: Tensor, likelihood: str) -> Tensor:
    """The two ratios of SLR, one class at a time."""
    total = torch.zeros((), dtype=p.dtype)
    for row in p:
        for c in range(len(row)):
            others = sum(row[i] for i in range(len(row)) if i != c)
            weight = row[c] if likelihood == "soft" else float(c == int(row.argmax()))
            total = total - weight * torch.log(row[c] / others)
    return total / len(p)


def plain_slr(
    model: nn.Module,
    transform: InputTransform,
    batches: list[Tensor],
    rows: Rows = samples,
    *,
    forgetting: str = "online",
    likelihood: str = "soft",
    steps: int = 1,
    lr: float = 6e-4,
) -> list[Tensor]:
    """A network in training mode behind a transformation; torch's own Adam."""
    network, affine = affine_with_batch_statistics(model)
    first, second = copy.deepcopy(transform.residual[0]), copy.deepcopy(transform.residual[2])
    tau = torch.ones((), dtype=torch.float64, requires_grad=True)
    gamma = torch.ones(1, first.in_channels, 1, 1, dtype=torch.float64, requires_grad=True)
    beta = torch.zeros(1, first.in_channels, 1, 1, dtype=torch.float64, requires_grad=True)
    parameters = [tau, gamma, beta, *first.parameters(), *second.parameters(), *affine]
    start = copied(parameters)

    def forward(x: Tensor) -> Tensor:
        r = second(torch.relu(first(x)))
        return network(gamma * (tau * x + (1 - tau) * r) + beta)

    outputs = []
    for number, x in enumerate(batches):
        if forgetting == "episodic" or number == 0:
            optimizer, running = torch.optim.Adam(parameters, lr=lr), None
            set_to(parameters, start)
        for _ in range(steps):
            p = rows(forward(x))
            mean = p.mean(0)
            running = 0.9 * (mean if running is None else running).detach() + 0.1 * mean
            divergence = (running * torch.log(running * p.shape[1])).sum()
            optimizer.zero_grad()
            (divergence + 0.025 * plain_ratio(p, likelihood)).backward()
            optimizer.step()
        outputs.append(forward(x).detach())
    return outputs
