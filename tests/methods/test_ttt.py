from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Generator, Tensor, nn

import ttapca
from methods.plain_loops import BATCHES, X, assert_follows, both_ways
from oracles import group_norm_net, layer_norm_net, left_untouched, rotation_head, small_convnet
from ttapca.datasets import read_digits, to_tensor
from ttapca.errors import AttachError, LayerOutputError, ShapeError
from ttapca.methods.ttt import four_rotations
from ttapca.networks import load_rotation

CASES = [(small_convnet, "act", 288), (group_norm_net, "1", 128), (layer_norm_net, "2", 9)]


def turned(image: Tensor, quarters: int) -> Tensor:
    """Against the clock: the right column becomes the top row."""
    for _ in range(quarters):
        image = torch.stack([image[:, :, -1 - i] for i in range(image.shape[2])], 1)
    return image


def plain_ttt(
    model: nn.Module,
    split: str,
    head: nn.Module,
    *,
    forgetting: str,
    steps: int,
    lr: float,
    rotations: str,
) -> list[Tensor]:
    """A whole copy of the network, its first layers moved by plain gradient descent."""
    names = [name for name, _ in model.named_children()]
    end = names.index(split) + 1
    network, generator, outputs = copy.deepcopy(model).eval(), Generator().manual_seed(0), []
    for x in BATCHES:
        if forgetting == "episodic":
            network, generator = copy.deepcopy(model).eval(), Generator().manual_seed(0)
        for _ in range(steps):
            if rotations == "random":
                labels = torch.randint(4, (len(x),), generator=generator).tolist()
                pairs = [(turned(image, k), k) for image, k in zip(x, labels, strict=True)]
            else:
                pairs = [(turned(image, k), k) for image in x for k in range(4)]
            logits = head(network[:end](torch.stack([image for image, _ in pairs])))
            log_p = torch.log(logits.softmax(1))
            loss = -sum(row[k] for row, (_, k) in zip(log_p, pairs, strict=True)) / len(pairs)
            weights = list(network[:end].parameters())
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight -= lr * gradient
        outputs.append(network(x).detach())
    return outputs


@pytest.mark.parametrize(("make", "split", "features"), CASES)
@both_ways
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("rotations", ["all", "random"])
def test_equals_a_plain_loop(
    make, split: str, features: int, forgetting: str, steps: int, rotations: str
) -> None:
    options = {"forgetting": forgetting, "steps": steps, "lr": 0.02, "rotations": rotations}
    head = rotation_head(features)
    adapter = ttapca.adapt(make(), "ttt", head=head, split=split, **options)
    assert_follows(adapter, plain_ttt(make(), split, head, **options), atol=1e-9)
    assert adapter.updates == steps * len(BATCHES)


def adapted(**options: object) -> ttapca.Adapter:
    given = {"head": rotation_head(288), "split": "act", "lr": 0.05} | options
    with torch.random.fork_rng(devices=[]):
        model = small_convnet()
    return ttapca.adapt(model, "ttt", forgetting="online", **given)  # type: ignore[arg-type]


def test_the_head_is_left_as_it_was() -> None:
    head = rotation_head(288).train()
    with left_untouched(head, small_convnet().conv1(X)):
        adapted(head=head, rotations="random")(X)
    assert all(p.grad is None for p in head.parameters())


def test_only_what_leads_to_the_split_moves() -> None:
    assert adapted(split="act").n_parameters == 240
    assert adapted(split="bn2", head=rotation_head(24)).n_parameters == 690
    assert adapted(split="conv1").n_parameters == 224


def test_logits_before_and_statistics() -> None:
    assert torch.equal(adapted(logits="before")(X), small_convnet()(X).detach())
    bn = ttapca.adapt(small_convnet(), "bn")
    assert torch.equal(adapted(logits="before", statistics="batch")(X), bn(X))


def test_heads_and_inputs_that_do_not_fit() -> None:
    with pytest.raises(LayerOutputError, match=r"shape \(48, 4\); found \(48, 288\)"):
        adapted(head=nn.Flatten())(X)
    with pytest.raises(ShapeError, match=r"square images; found shape \(5, 3, 6, 4\)"):
        adapted()(X[:5, :, :, :4])


def test_models_that_do_not_run_in_order() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.unused = nn.Conv2d(3, 3, 1), nn.Identity()
            self.first, self.fc = nn.Conv2d(3, 3, 1), nn.Linear(108, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.second(self.first(x)).flatten(1))

    model = Odd().double()
    with pytest.raises(AttachError, match=r"`first\.weight`, `first\.bias` come later but lead to"):
        ttapca.adapt(model, "ttt", head=rotation_head(108), split="second")(X)
    model = Odd().double()
    with pytest.raises(LayerOutputError, match=r"`unused` returns one tensor.*never called"):
        ttapca.adapt(model, "ttt", head=rotation_head(108), split="unused")(X)
    model = Odd().double()
    adapter = ttapca.adapt(model, "ttt", head=rotation_head(108), split="first")
    assert adapter(X).shape == (12, 2)  # what takes no part stays where it is


def test_with_a_head_that_was_trained_jointly() -> None:
    """What `ttapca train --rotation-head` left, once: the packaged network of the digits."""
    twofold = load_rotation("digits-small-cnn-rotation")
    digits = to_tensor(read_digits("test").images)[:100]
    adapter = ttapca.adapt(
        twofold.network, "ttt", head=twofold.head, split=twofold.split, forgetting="online", steps=5
    )
    rotated, labels = four_rotations(digits)
    with torch.no_grad():
        guessed = twofold.rotation_logits(rotated).argmax(1)
        before = F.cross_entropy(twofold.rotation_logits(rotated), labels)
        adapter(digits)
        after = F.cross_entropy(twofold.rotation_logits(rotated), labels)
    # The method turns images as the training did: else the head would guess, one in four.
    assert (guessed == labels).double().mean() > 0.6
    assert adapter.updates == 5
    assert after < before
    adapter.detach()
