"""`iabn` and `unmix-tns` against loops over images and channels."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ttapca
from methods.plain_loops import ANY_SIZE, X, assert_follows, both_ways
from oracles import group_norm_net, left_untouched, small_convnet
from ttapca.errors import AttachError

# From a layer and its input to the mean and the variance that each image is normalised by.
Rule = Callable[[nn.BatchNorm2d, Tensor], tuple[Tensor, Tensor]]


def with_rule(model: nn.Module, rule: Rule) -> nn.Module:
    """A copy whose BatchNorm layers normalise every image by the moments of a rule."""
    network = copy.deepcopy(model).eval()

    def replaced(layer: nn.BatchNorm2d) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            mean, var = rule(layer, x)
            out = torch.empty_like(x)
            for n in range(len(x)):
                for c in range(x.shape[1]):
                    unit = (x[n, c] - mean[n, c]) / torch.sqrt(var[n, c] + layer.eps)
                    out[n, c] = layer.weight[c] * unit + layer.bias[c]
            return out

        return forward

    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.forward = replaced(module)
    return network


def corrected(width: float) -> Rule:
    """Equations 3 to 6 of NOTE, number by number."""

    def shrunk(d: float, by: float) -> float:
        return math.copysign(max(abs(d) - by, 0.0), d)

    def rule(layer: nn.BatchNorm2d, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = torch.empty(x.shape[:2]).double(), torch.empty(x.shape[:2]).double()
        places = x[0, 0].numel()
        for n in range(len(x)):
            for c in range(x.shape[1]):
                m, v = float(layer.running_mean[c]), float(layer.running_var[c])
                own = x[n, c].flatten().tolist()
                mu = sum(own) / places
                unbiased = sum((each - mu) ** 2 for each in own) / (places - 1)
                s = (v + layer.eps) * math.sqrt(2 / (places - 1))
                mean[n, c] = m + shrunk(mu - m, width * math.sqrt((v + layer.eps) / places))
                var[n, c] = max(0.0, v + shrunk(unbiased - v, width * s))
        return mean, var

    return rule


@both_ways
@pytest.mark.parametrize("width", [0.0, 1.0, 4.0])
def test_iabn_equals_a_plain_loop(width: float, forgetting: str) -> None:
    expected = [with_rule(small_convnet(), corrected(width))(x).detach() for x in ANY_SIZE]
    adapter = ttapca.adapt(small_convnet(), "iabn", width=width, forgetting=forgetting)
    assert_follows(adapter, expected, ANY_SIZE, atol=1e-9)


def test_iabn_leaves_alone_what_sampling_explains() -> None:
    assert torch.equal(
        ttapca.adapt(small_convnet(), "iabn", width=1e6)(X).argmax(1), small_convnet()(X).argmax(1)
    )


class Components:
    """The components of every layer, as the paper's equations 3 to 10 have them."""

    def __init__(self, count: int, temperature: float) -> None:
        self.count, self.temperature = count, temperature
        self.known: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.layers = 0

    @torch.no_grad()
    def __call__(self, layer: nn.BatchNorm2d, x: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.known:
            means = layer.running_mean.repeat(self.count, 1)
            variances = layer.running_var.repeat(self.count, 1)
            if self.count > 1:
                draws = torch.Generator().manual_seed(self.layers)
                noise = torch.randn(means.shape, generator=draws).double()
                means = (
                    means + math.sqrt(self.count / (self.count - 1) / 2) * variances**0.5 * noise
                )
                variances = variances / 2
            self.known[layer] = means, variances
            self.layers += 1
        means, variances = self.known[layer]
        mean, var, steps = [], [], []
        for image in x:
            mu, v = image.flatten(1).mean(1), image.flatten(1).var(1, correction=0)
            likeness = [float(mu @ m / (mu.norm() * m.norm())) / self.temperature for m in means]
            total = sum(math.exp(each) for each in likeness)
            mixed = torch.zeros(2, self.count, len(mu)).double()
            step = torch.zeros_like(mixed)
            for k in range(self.count):
                p = math.exp(likeness[k]) / total
                mixed[0, k] = (1 - p) * means[k] + p * mu
                mixed[1, k] = (1 - p) * variances[k] + p * v
                step[0, k], step[1, k] = p * (mu - means[k]), p * (v - variances[k])
            mean.append(mixed[0].mean(0))
            var.append(mixed[1].mean(0) + (mixed[0] ** 2).mean(0) - mixed[0].mean(0) ** 2)
            steps.append(step)
        momentum = 1 - (1 - layer.momentum) ** (len(x) / 64)
        step = sum(steps) / len(steps)
        self.known[layer] = means + momentum * step[0], variances + momentum * step[1]
        return torch.stack(mean), torch.stack(var)


@pytest.mark.parametrize(("count", "temperature"), [(1, 0.07), (3, 0.5), (16, 0.07)])
def test_unmix_tns_equals_a_plain_loop(count: int, temperature: float) -> None:
    network = with_rule(small_convnet(), Components(count, temperature))
    expected = [network(x).detach() for x in ANY_SIZE]
    options = {"components": count, "temperature": temperature, "forgetting": "online"}
    assert_follows(ttapca.adapt(small_convnet(), "unmix-tns", **options), expected, ANY_SIZE)


def test_components_start_anew_with_every_episode() -> None:
    adapter = ttapca.adapt(small_convnet(), "unmix-tns", forgetting="episodic")
    assert torch.equal(adapter(X), adapter(X))


def test_a_poisoned_batch_leaves_no_mark_on_the_components() -> None:
    adapter = ttapca.adapt(small_convnet(), "unmix-tns", forgetting="online")
    other = ttapca.adapt(small_convnet(), "unmix-tns", forgetting="online")
    poisoned = X.clone()
    poisoned[3] = float("nan")
    adapter(poisoned)
    assert torch.equal(adapter(X), other(X))
    assert adapter.skipped == 1


@pytest.mark.parametrize("method", ["iabn", "unmix-tns"])
def test_networks_without_batchnorm_are_refused(method: str) -> None:
    model = group_norm_net()
    with left_untouched(model, X), pytest.raises(AttachError, match="need BatchNorm layers"):
        ttapca.adapt(model, method)
