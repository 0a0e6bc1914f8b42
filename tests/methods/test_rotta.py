"""`rotta` against a plain loop: two networks with slow statistics, and a memory of lists."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import ttapca
from adapters import NETWORKS, adapted
from methods.plain_loops import BATCHES, X, assert_follows, both_ways, every_norm
from oracles import images, small_convnet
from ttapca.errors import AttachError, OptionError, ShapeError
from ttapca.methods import RoTTA
from ttapca.methods.rotta import Memory, Sample
from ttapca.methods.views import STRONG


class PlainSlowNorm(nn.Module):
    """BatchNorm whose statistics move in training mode by a small share, and then normalise."""

    def __init__(self, layer: nn.BatchNorm2d, share: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight), nn.Parameter(layer.bias)
        self.mean, self.var = layer.running_mean.clone(), layer.running_var.clone()
        self.share, self.eps = share, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            here = x.mean((0, 2, 3))
            spread = ((x - here.view(-1, 1, 1)) ** 2).mean((0, 2, 3))
            mean = (1 - self.share) * mean + self.share * here
            var = (1 - self.share) * var + self.share * spread
            self.mean, self.var = mean.detach(), var.detach()
        standard = (x - mean.view(-1, 1, 1)) / torch.sqrt(var.view(-1, 1, 1) + self.eps)
        return standard * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


class PlainMemory:
    """One list of [sample, uncertainty, age] for each class."""

    def __init__(self, capacity: int, classes: int, old: float, unsure: float) -> None:
        self.capacity, self.old, self.unsure = capacity, old, unsure
        self.lists: list[list[list[Any]]] = [[] for _ in range(classes)]

    def badness(self, uncertainty: float, age: int) -> float:
        return self.old / (1 + math.exp(-age / self.capacity)) + self.unsure * uncertainty

    def add(self, sample: Any, label: int, uncertainty: float) -> None:
        sizes = [len(each) for each in self.lists]
        chosen: list[int] = []
        if sizes[label] >= self.capacity / len(self.lists):
            chosen = [label]
        elif sum(sizes) >= self.capacity:
            chosen = [k for k, size in enumerate(sizes) if size == max(sizes)]
        entries = [(k, each) for k in chosen for each in self.lists[k]]
        accepted = True
        if entries:
            worst = max(self.badness(u, age) for _, (_, u, age) in entries)
            accepted = worst > self.badness(uncertainty, 0)
            if accepted:
                k, entry = [e for e in entries if self.badness(*e[1][1:]) == worst][-1]
                self.lists[k] = [each for each in self.lists[k] if each is not entry]
        if accepted:
            self.lists[label].append([sample, uncertainty, 0])
        for each in self.lists:
            for entry in each:
                entry[2] += 1

    def entries(self) -> list[list[Any]]:
        return [entry for each in self.lists for entry in each]


def plain_rotta(
    model: nn.Module,
    batches: list[Tensor],
    *,
    forgetting: str,
    lr: float = 1e-3,
    capacity: int = 64,
    update_every: int = 64,
    statistics_momentum: float = 0.05,
    teacher_momentum: float = 0.999,
    timeliness_weight: float = 1.0,
    uncertainty_weight: float = 1.0,
) -> list[Tensor]:
    def fresh() -> tuple[Any, ...]:
        network = copy.deepcopy(model)
        for name, module in list(network.named_children()):
            if isinstance(module, nn.BatchNorm2d):
                setattr(network, name, PlainSlowNorm(module, statistics_momentum))
        student, teacher = network.eval(), copy.deepcopy(network).eval()
        kinds = (PlainSlowNorm, nn.GroupNorm, nn.LayerNorm)
        norms = [m for m in student.modules() if isinstance(m, kinds)]
        moved = [parameter for m in norms for parameter in (m.weight, m.bias)]
        memory = PlainMemory(
            capacity, model[-1].out_features, timeliness_weight, uncertainty_weight
        )
        return student, teacher, torch.optim.Adam(moved, lr=lr), memory, Generator().manual_seed(0)

    outputs, seen, wide = [], 0, torch.float64
    student, teacher, optimizer, memory, generator = fresh()
    for batch in batches:
        if forgetting == "episodic":
            student, teacher, optimizer, memory, generator = fresh()
            seen = 0
        logits = teacher(batch).detach()
        outputs.append(logits)
        for x, p in zip(batch, logits.softmax(1), strict=True):
            entropy = -(p * torch.log(p)).sum().item() / math.log(len(p))
            memory.add(x, int(p.argmax()), entropy)
            seen += 1
            if seen % update_every:
                continue
            held = torch.stack([entry[0] for entry in memory.entries()])
            age = torch.tensor([entry[2] / capacity for entry in memory.entries()], dtype=wide)
            student.train()
            teacher.train()
            wanted = teacher(held).detach().softmax(1)
            found = torch.log(student(STRONG(held, generator)).softmax(1))
            weight = torch.exp(-age) / (1 + torch.exp(-age))
            optimizer.zero_grad()
            (-(wanted * found).sum(1) * weight).mean().backward()
            optimizer.step()
            student.eval()
            teacher.eval()
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                    t.copy_(teacher_momentum * t + (1 - teacher_momentum) * s)
    return outputs


@every_norm
@both_ways
def test_equals_a_plain_loop(make, forgetting: str) -> None:
    options = {"lr": 0.01, "capacity": 10, "update_every": 7, "forgetting": forgetting}
    options |= {"statistics_momentum": 0.2, "teacher_momentum": 0.8}
    options |= {"timeliness_weight": 2.0, "uncertainty_weight": 3.0}
    adapter = ttapca.adapt(make(), "rotta", **options)
    assert_follows(adapter, plain_rotta(make(), BATCHES, **options))
    assert adapter.updates == (len(BATCHES) if forgetting == "episodic" else 120 // 7)
    assert len(adapter.predictor.memory) <= 10


def test_the_official_values() -> None:
    expected = plain_rotta(small_convnet(), BATCHES, forgetting="online")
    adapter = ttapca.adapt(small_convnet(), "rotta", forgetting="online")
    assert_follows(adapter, expected)
    assert adapter.updates == 1


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (5.0, 0.2)])
@pytest.mark.parametrize(("capacity", "classes"), [(1, 3), (7, 4), (20, 3)])
def test_the_memory_equals_plain_lists(
    weights: tuple[float, float], capacity: int, classes: int
) -> None:
    old, unsure = weights
    options = RoTTA(capacity=capacity, timeliness_weight=old, uncertainty_weight=unsure)
    memory, plain = Memory(options, classes), PlainMemory(capacity, classes, old, unsure)
    draws = torch.rand(400, 2, generator=Generator().manual_seed(0)).double()
    for number, (draw, uncertainty) in enumerate(draws.tolist()):
        # Correlated, as in a stream: for a while most samples are of one class. Some are equal.
        label = number // 60 % classes if draw < 0.8 else int(draw * 1000) % classes
        uncertainty = round(uncertainty, 1)
        memory.offer(Sample(torch.tensor(number), label, uncertainty))
        plain.add(torch.tensor(number), label, uncertainty)
        by_class = sorted(memory.samples, key=lambda each: each.label)
        held = [(int(each.image), each.age) for each in by_class]
        assert held == [(int(sample), age) for sample, _, age in plain.entries()]
        assert len(held) <= capacity


def test_nothing_is_learned_before_enough_samples_have_come() -> None:
    model = small_convnet()
    expected = [model(x).detach() for x in BATCHES[:5]]
    adapter = ttapca.adapt(model, "rotta", forgetting="online")
    assert_follows(adapter, expected, BATCHES[:5], atol=1e-12)
    assert (adapter.updates, adapter.predictor.seen) == (0, 60)
    before = adapter(BATCHES[5])  # is predicted first; then its fourth sample is number 64
    torch.testing.assert_close(before, small_convnet()(BATCHES[5]))
    assert adapter.updates == 1
    assert not torch.allclose(adapter(BATCHES[5]), before)


def test_logits_after_are_the_moved_teachers() -> None:
    options = {"update_every": 12, "lr": 0.1, "forgetting": "online"}
    before = ttapca.adapt(small_convnet(), "rotta", **options)
    after = ttapca.adapt(small_convnet(), "rotta", logits="after", **options)
    assert not torch.equal(before(X), after(X))
    moved = before(BATCHES[1][:1])  # too few to learn from
    assert before.updates == after.updates == 1
    torch.testing.assert_close(moved, after(BATCHES[1][:1]))


def test_the_memory_is_a_copy_of_what_was_given() -> None:
    adapter = ttapca.adapt(small_convnet(), "rotta", forgetting="online")
    batch = X.clone()
    adapter(batch)
    batch.zero_()
    assert all(
        torch.equal(sample[0], x) for sample, x in zip(adapter.predictor.memory, X, strict=True)
    )


def test_a_stream_is_loaded_into_one_with_another_memory(tmp_path) -> None:
    one, other = (adapted("rotta", update_every=16) for _ in "ab")
    for x in BATCHES[:3]:
        one(x)
    other(BATCHES[4][:5])
    one.stream("default").save(tmp_path / "stream")
    other.stream("default").load(tmp_path / "stream")
    for x in BATCHES[5:8]:
        assert torch.equal(one(x), other(x))


def test_images_of_one_size() -> None:
    pooled = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()
    adapter = ttapca.adapt(pooled, "rotta", forgetting="online")
    adapter(X)
    with pytest.raises(ShapeError, match=r"shape \(3, 6, 6\).*found \(3, 8, 8\)"):
        adapter(images(2, shape=(3, 8, 8)))
    adapter.reset()
    assert adapter(images(2, shape=(3, 8, 8))).shape == (2, 4)


def test_it_has_statistics_of_its_own() -> None:
    with pytest.raises(OptionError, match="`statistics` would have no effect"):
        RoTTA(statistics="source")
    model = NETWORKS["BatchNorm"]()
    surface = ttapca.BatchNormStatistics()
    surface.attach(model)
    with pytest.raises(AttachError, match="something has taken over a BatchNorm2d"):
        ttapca.adapt(model, "rotta")
