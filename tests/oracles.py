"""Slow, plain references in float64, written from the definitions and not from the library."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.fft
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def convnet(first: nn.Module, second: nn.Module) -> nn.Sequential:
    """A network for (n, 3, 6, 6) images and five classes, with these normalisation layers."""
    layers = {"conv1": nn.Conv2d(3, 8, 3, padding=1), "bn1": first, "act": nn.ReLU()}
    layers |= {"conv2": nn.Conv2d(8, 6, 3, stride=2), "bn2": second}
    return nn.Sequential(OrderedDict(layers, flat=nn.Flatten(), fc=nn.Linear(24, 5)))


def small_convnet(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A BatchNorm network whose weights and statistics look like those of a trained one."""
    generator = torch.Generator().manual_seed(seed)
    model = convnet(nn.BatchNorm2d(8), nn.BatchNorm2d(6))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.add_(0.5)
    return model.to(dtype).eval()


def group_norm_net() -> nn.Module:
    """A GroupNorm network for the same images and four classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    ).double()


def layer_norm_net() -> nn.Module:
    """A LayerNorm network for the same images and four classes."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 9), nn.LayerNorm(9), nn.Linear(9, 4)).double()


def with_batch_statistics(model: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorm layers use only the batch, as the official codes do."""
    network = copy.deepcopy(model).train()
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return network


def images(n: int, seed: int = 1, shape: tuple[int, ...] = (3, 6, 6)) -> Tensor:
    """Correlated samples with a slowly falling spectrum and a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    size = int(np.prod(shape))
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64)
    mixing *= torch.arange(1, size + 1, dtype=torch.float64) ** -0.7
    samples = torch.randn(n, size, generator=generator, dtype=torch.float64) @ mixing.T
    return (samples + 0.5).reshape(n, *shape)


def rotation_head(features: int) -> nn.Module:
    """Four logits from as many features."""
    with torch.random.fork_rng(devices=[]):
        head = nn.Sequential(nn.Flatten(), nn.Linear(features, 4)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in head.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return head


class DensePCA:
    """PCA by the singular value decomposition of the whole centred data matrix."""

    def __init__(self, activations: Tensor) -> None:
        self.matrix = activations.detach().flatten(1).double().numpy()
        self.mean = self.matrix.mean(0)
        _, self.singular_values, self.vt = np.linalg.svd(
            self.matrix - self.mean, full_matrices=False
        )

    def filter(self, activations: Tensor, gains: np.ndarray) -> Tensor:
        """Project, scale, rebuild, add the mean back."""
        flat = activations.detach().flatten(1).double().numpy()
        basis = self.vt[: len(gains)].T
        rebuilt = ((flat - self.mean) @ basis * gains) @ basis.T + self.mean
        return torch.from_numpy(rebuilt).reshape(activations.shape)


def differentiable_filter(dense: DensePCA, x: Tensor, gains: Tensor) -> Tensor:
    """The same filter in torch, for loops that need gradients."""
    basis = torch.from_numpy(dense.vt[: len(gains)].T.copy())
    mean = torch.from_numpy(dense.mean)
    return (((x.flatten(1) - mean) @ basis * gains) @ basis.T + mean).reshape(x.shape)


def plain_entropy(logits: Tensor) -> Tensor:
    """Mean entropy, by its definition."""
    p = torch.softmax(logits, 1)
    return (-(p * torch.log(p)).sum(1)).mean()


def plain_ttapca_loop(
    model: nn.Module,
    dense: DensePCA,
    gains_of: Callable[[Tensor], Tensor],
    start: float,
    n_components: int,
    batches: list[Tensor],
    *,
    episodic: bool,
    steps: int,
    lr: float,
    after: bool,
) -> list[Tensor]:
    """The paper's method on `small_convnet`, with Adam written out by hand."""
    network = copy.deepcopy(model)

    def forward(x: Tensor, gamma: Tensor) -> Tensor:
        y = differentiable_filter(dense, network.conv1(x), gains_of(gamma))
        for conv, bn in ((None, network.bn1), (network.conv2, network.bn2)):
            y = y if conv is None else conv(y)
            m = y.mean((0, 2, 3), keepdim=True)
            v = ((y - m) ** 2).mean((0, 2, 3), keepdim=True)
            y = (y - m) / torch.sqrt(v + bn.eps)
            y = y * bn.weight.view(1, -1, 1, 1) + bn.bias.view(1, -1, 1, 1)
            y = torch.relu(y) if conv is None else y
        return network.fc(y.flatten(1))

    def fresh() -> tuple[Tensor, Tensor, Tensor, int]:
        zeros = torch.zeros(n_components, dtype=torch.float64)
        return zeros + start, zeros.clone(), zeros.clone(), 0

    gamma, first, second, count = fresh()
    outputs = []
    for x in batches:
        if episodic:
            gamma, first, second, count = fresh()
        for _ in range(steps):
            gamma = gamma.detach().requires_grad_()
            logits = forward(x, gamma)
            (grad,) = torch.autograd.grad(plain_entropy(logits), gamma)
            count += 1
            first = 0.9 * first + 0.1 * grad
            second = 0.999 * second + 0.001 * grad**2
            corrected = first / (1 - 0.9**count)
            scale = torch.sqrt(second / (1 - 0.999**count)) + 1e-8
            gamma = gamma.detach() - lr * corrected / scale
        outputs.append((forward(x, gamma) if after else logits).detach())
    return outputs


def picture_of(model: nn.Module) -> dict[str, Any]:
    """Everything that makes up a model: tensors, keys, flags, hooks, instance attributes."""
    return {
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            (len(module._forward_hooks), len(module._forward_pre_hooks))
            for module in model.modules()
        ],
    }


def assert_same_picture(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Assert that every part is equal, tensors bit for bit."""
    for part in before:
        if part != "state":
            assert before[part] == after[part], part
    assert before["state"].keys() == after["state"].keys()
    for name, tensor in before["state"].items():
        assert torch.equal(tensor, after["state"][name]), name


@contextmanager
def left_untouched(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Check that a block leaves the model, its outputs and the random state as they were."""
    before, output, random = picture_of(model), model(x), torch.random.get_rng_state()
    yield
    assert_same_picture(before, picture_of(model))
    assert torch.equal(model(x), output)
    assert torch.equal(torch.random.get_rng_state(), random)


def natural(n: int, size: tuple[int, int], seed: int = 0) -> Tensor:
    """Images whose spectrum falls like 1 / frequency^2, as that of photographs does."""
    height, width = size
    generator = torch.Generator().manual_seed(seed)
    down, across = torch.arange(height).double() / height, torch.arange(width).double() / width
    frequency = torch.hypot(down[:, None], across)
    frequency[0, 0] = 0.5 / (height * width) ** 0.5
    colours = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64).reshape(3, 1, 1)
    noise = torch.randn(n, 3, *size, generator=generator, dtype=torch.float64)
    coefficients = (0.01 * colours / frequency * noise).numpy()
    return 0.5 + torch.from_numpy(scipy.fft.idctn(coefficients, axes=(2, 3), norm="ortho"))


def scenes(n: int, seed: int = 1, channels: int = 3, side: int = 12) -> Tensor:
    """Images with smooth colours and grey texture, of which some have much and most little."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(n, channels, 3, 3, generator=generator, dtype=torch.float64)
    smooth = F.interpolate(rough, size=(side, side), mode="bilinear")
    amount = 0.03 * torch.rand(n, 1, 1, 1, generator=generator, dtype=torch.float64).square()
    texture = torch.randn(n, 1, side, side, generator=generator, dtype=torch.float64)
    own = torch.randn(n, channels, side, side, generator=generator, dtype=torch.float64)
    return smooth + amount * (texture + 0.3 * own)


def salted(images: Tensor, share: float, seed: int = 2) -> Tensor:
    """The same images with this share of all values far too high or far too low."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(images.shape, generator=generator, dtype=torch.float64)
    salt = torch.where(draw < share / 2, -1.0, 2.0).to(images)
    return torch.where(draw < share, salt, images)
