"""Plain loops over predictions at places: the pixels of an image, or labels that do not exclude.

Each place of each sample is one row of class probabilities, by definition of the head; what a
method does with a sample is done with each row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from methods.plain_loops import affine_with_batch_statistics, copied, set_to
from oracles import with_batch_statistics

Rows = Callable[[Tensor], Tensor]  # from outputs to probabilities, shape (places, classes)
Loss = Callable[[Tensor], Tensor]  # from rows
Lowered = tuple[list[nn.Parameter], Callable[[Tensor], Tensor]]  # what moves, and the forward pass


def pixels(z: Tensor) -> Tensor:
    """Outputs of shape (batch, classes, height, width), one pixel after the other."""
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


def information(p: Tensor) -> Tensor:
    """SHOT's: certain rows, of diverse classes."""
    mean = p.mean(0)
    return mean_entropy(p) + (mean * torch.log(mean)).sum()


def scale_and_shift(model: nn.Module) -> Lowered:
    network, parameters = affine_with_batch_statistics(model)
    return parameters, network


def plain_steps(
    lowered: Lowered,
    batches: list[Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Loss,
    rows: Rows,
    *,
    after: bool,
) -> list[Tensor]:
    """One step of torch's own optimiser on each batch, online."""
    parameters, forward = lowered
    stepper = optimizer(parameters)
    found = []
    for x in batches:
        z = forward(x)
        stepper.zero_grad()
        loss(rows(z)).backward()
        stepper.step()
        found.append((forward(x) if after else z).detach())
    return found


def plain_sar(model: nn.Module, batches: list[Tensor], rows: Rows, margin: float) -> list[Tensor]:
    """SAR with reliable places in place of reliable samples; no recovery; lr 0.05."""
    theta, network = scale_and_shift(model)
    speed, found = None, []
    for x in batches:
        z = network(x)
        found.append(z.detach())
        first = entropies(rows(z))
        limit = margin * math.log(rows(z).shape[1])
        chosen = [i for i in range(len(first)) if float(first[i].detach()) < limit]
        g = torch.autograd.grad(sum(first[i] for i in chosen) / len(chosen), theta)
        length = math.sqrt(sum(float((v**2).sum()) for v in g))
        here = copied(theta)
        set_to(theta, [p + 0.05 * v / length for p, v in zip(here, g, strict=True)])
        second = entropies(rows(network(x)))
        kept = [i for i in chosen if float(second[i].detach()) < limit]
        g = torch.autograd.grad(sum(second[i] for i in kept) / len(kept), theta)
        speed = g if speed is None else [0.9 * s + v for s, v in zip(speed, g, strict=True)]
        set_to(theta, [p - 0.05 * s for p, s in zip(here, speed, strict=True)])
        assert 0 < len(kept) < len(first)
    return found


def plain_cotta(
    model: nn.Module, batches: list[Tensor], rows: Rows, view: Callable[[Tensor, Generator], Tensor]
) -> list[Tensor]:
    """CoTTA with two views that are always used, lr 0.01, momentum 0.9, and no restoring."""
    student, teacher = (with_batch_statistics(model) for _ in "st")
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    generator, found = Generator().manual_seed(0), []
    for x in batches:
        with torch.no_grad():
            target = (teacher(view(x, generator)) + teacher(view(x, generator))) / 2
        loss = -(rows(target) * torch.log(rows(student(x)))).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(0.9 * t + 0.1 * s)
        found.append(target)
    return found


def plain_memo(
    model: nn.Module, x: Tensor, rows: Rows, view: Callable[[Tensor, Generator], Tensor]
) -> Tensor:
    """MEMO on each image: the entropy of the mean prediction of its views, at each place."""
    generator, found = Generator().manual_seed(0), []
    for image in x.split(1):
        network = copy.deepcopy(model).eval()
        views = view(image, generator)
        mean = sum(rows(network(one)) for one in views.split(1)) / len(views)
        gradients = torch.autograd.grad(mean_entropy(mean), list(network.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(network.parameters(), gradients, strict=True):
                weight -= 0.02 * gradient
            found.append(network(image))
    return torch.cat(found)
