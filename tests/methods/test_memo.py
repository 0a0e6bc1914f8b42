from __future__ import annotations

import copy

import pytest
import torch
from torch import Generator, Tensor, nn

import ttapca
from oracles import group_norm_net, images, layer_norm_net, left_untouched, small_convnet
from ttapca.errors import AttachError, OptionError, ShapeError
from ttapca.methods.views import mixed_views

BATCHES = list(images(30, seed=8).split(3))
X = BATCHES[0]


def plain_memo(
    model: nn.Module, batches: list[Tensor], *, episodic: bool, steps: int, lr: float, views: int
) -> list[Tensor]:
    """Each image by itself: a fresh copy of the network, plain gradient descent, and away."""
    generator = Generator().manual_seed(0)
    outputs = []
    for batch in batches:
        if episodic:
            generator.manual_seed(0)
        logits = []
        for image in batch:
            network = copy.deepcopy(model).eval()
            for _ in range(steps):
                probabilities = network(mixed_views(image[None], views, generator)).softmax(1)
                marginal = probabilities.mean(0)
                loss = -(marginal * torch.log(marginal)).sum()
                weights = list(network.parameters())
                gradients = torch.autograd.grad(loss, weights)
                with torch.no_grad():
                    for weight, gradient in zip(weights, gradients, strict=True):
                        weight -= lr * gradient
            logits.append(network(image[None])[0].detach())
        outputs.append(torch.stack(logits))
    return outputs


@pytest.mark.parametrize("make", [small_convnet, group_norm_net, layer_norm_net])
@pytest.mark.parametrize("episodic", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_equals_a_plain_loop(make, episodic: bool, steps: int) -> None:
    options = {"episodic": episodic, "steps": steps, "lr": 0.02, "views": 5}
    expected = plain_memo(make(), BATCHES, **options)
    adapter = ttapca.adapt(make(), "memo", **options)
    for x, reference in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(adapter(x), reference, rtol=0, atol=1e-9)
    assert adapter.updates == 30 * steps


def test_a_batch_is_its_images_one_by_one() -> None:
    adapter = ttapca.adapt(small_convnet(), "memo", forgetting="online", views=4)
    together = torch.cat([adapter(x) for x in BATCHES])
    adapter.reset()
    alone = torch.cat([adapter(x) for x in torch.cat(BATCHES).split(1)])
    assert torch.equal(together, alone)
    assert adapter(X[:0]).shape == (0, 5)


def test_nothing_of_the_caller_changes() -> None:
    model = small_convnet()
    before = X.clone()
    with left_untouched(model, X):
        adapter = ttapca.adapt(model, "memo", views=4)
        adapter(X)
        adapter.detach()
    assert torch.equal(X, before)


def test_seeds_and_views_matter() -> None:
    def output(**options: object) -> Tensor:
        return ttapca.adapt(small_convnet(), "memo", lr=0.1, **options)(X)  # type: ignore[arg-type]

    assert torch.equal(output(), output(views=32, seed=0))
    assert not torch.equal(output(), output(seed=1))
    assert not torch.equal(output(), output(views=8))
    assert not torch.equal(output(), output(flip=False))
    torch.testing.assert_close(output(logits="before"), small_convnet()(X).detach())


def test_a_prior_mixes_in_each_images_statistics() -> None:
    adapter = ttapca.adapt(small_convnet(), "memo", prior=16, logits="before", views=2)
    mixed = ttapca.adapt(small_convnet(), "bn", alpha=1 / 17)
    expected = torch.cat([mixed(image) for image in X.split(1)])
    torch.testing.assert_close(adapter(X), expected)


def test_a_poisoned_image_harms_no_other() -> None:
    adapter = ttapca.adapt(small_convnet(), "memo", views=4)
    clean = adapter(X)
    poisoned = X.clone()
    poisoned[1, 0, 0, 0] = float("nan")
    output = adapter(poisoned)
    assert torch.equal(output[::2], clean[::2])
    assert adapter.skipped == 1


def test_casting() -> None:
    adapter = ttapca.adapt(small_convnet(), "memo", views=4, lr=0.02)
    expected = adapter(X)
    torch.testing.assert_close(adapter.float()(X.float()).double(), expected, rtol=0, atol=1e-3)


def test_further_arguments_reach_the_model() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_convnet()

        def forward(self, x: Tensor, scale: float, *, shift: float = 0.0) -> Tensor:
            return self.net(x) * scale + shift

    adapter = ttapca.adapt(Scaled(), "memo", views=4, logits="before")
    torch.testing.assert_close(adapter(X, 2.0, shift=1.0), small_convnet()(X).detach() * 2 + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": 0}, "`views` must be a whole number from 1 on; found 0"),
        ({"prior": -1.0}, "`prior`, a number of samples, is finite"),
        ({"lr": -1.0}, "`lr` must be a finite number above 0"),
        ({"steps": 0}, "`steps` is a whole number"),
        ({"logits": "both"}, "`logits` must be one of before, after"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    model = small_convnet()
    with left_untouched(model, X), pytest.raises(OptionError, match=message):
        ttapca.adapt(model, "memo", **options)  # type: ignore[arg-type]


def test_what_it_cannot_serve() -> None:
    with pytest.raises(AttachError, match="moves the weights; the model has none"):
        ttapca.adapt(nn.Flatten(), "memo")
    adapter = ttapca.adapt(nn.Linear(3, 2), "memo")
    with pytest.raises(ShapeError, match=r"`memo` changes images.*found \[\(5, 3\)\]"):
        adapter(torch.zeros(5, 3))
