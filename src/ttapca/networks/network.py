"""The base of all networks here: they take images in [0, 1], normalise them and return logits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ttapca import errors
from ttapca._checks import ListOf, Number, Such, Whole, check_option, conform
from ttapca.datasets import Images
from ttapca.support.norm_layers import running_statistics, with_running_statistics

CIFAR_SHAPE = (3, 32, 32)
MOST_CLASSES = 100_000
MOST_CHANNELS = 1024
LARGEST_IMAGE = 2**24  # values: 64 MB in float32, 3 x 2,364 x 2,364
LONGEST_SIDE = 16_384
DECIMALS = 4  # of a measured normalisation
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)
DEFAULT_EPS = 1e-5  # of all these norms in PyTorch

# Makes the layers of a network by name, from the channels of an image and the number of classes.
Recipe = Callable[[int, int], dict[str, nn.Module]]

INPUT_SHAPE = Such(
    ListOf(Whole(1, LONGEST_SIDE), 3, 3),
    lambda shape: shape[0] <= MOST_CHANNELS and math.prod(shape) <= LARGEST_IMAGE,
    f"channels (at most {MOST_CHANNELS:,}), height and width of at most {LARGEST_IMAGE:,} numbers",
)


@dataclass(frozen=True)
class Normalisation:
    """The mean that is subtracted from pixels, and the deviation by which they are then divided.

    Each has one number for each channel, or one for all, on pixels in [0, 1].

    Example:
        >>> Normalisation((0.5,), (0.5,)).for_channels(3)
        Normalisation(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_option("mean", [*map(float, self.mean)], ListOf(Number(), 1, MOST_CHANNELS))
        check_option("std", [*map(float, self.std)], ListOf(Number(above=0), 1, MOST_CHANNELS))

    def for_channels(self, channels: int) -> Normalisation:
        """Return the same normalisation with one number for each channel."""
        both = []
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise errors.OptionError(
                    f"The {name} needs one number, or one for each of the {channels} channels; "
                    f"found {len(values)}."
                )
            both.append(values * (channels // len(values)))
        return Normalisation(*both)

    def keep_in(self, module: nn.Module) -> None:
        """Keep the numbers as buffers of a module, outside of its state dict."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            numbers = torch.tensor(values).reshape(-1, 1, 1)
            module.register_buffer(name, numbers, persistent=False)


# Of published checkpoints. The deviations of `cifar10` are not those of its pixels
# (.2470, .2435, .2616): they are averages over images, and many networks were trained with them.
NORMALISATIONS = {
    "none": Normalisation((0.0,), (1.0,)),
    "half": Normalisation((0.5,), (0.5,)),
    "cifar10": Normalisation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": Normalisation((0.5070, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761)),
    "imagenet": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    # Pixels from 0 to 255 minus their mean, as networks that come from Caffe and Keras take them.
    "imagenet-255": Normalisation((123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,)),
}


def find_normalisation(chosen: str | Normalisation) -> Normalisation:
    """Return the normalisation of a name, or the one that is given as numbers."""
    if isinstance(chosen, Normalisation):
        return chosen
    if chosen not in NORMALISATIONS:
        raise errors.OptionError(
            f"There is no normalisation `{chosen}`.{errors.did_you_mean(chosen, NORMALISATIONS)} "
            f"There are: {', '.join(NORMALISATIONS)}; or give a mean and a std."
        )
    return NORMALISATIONS[chosen]


def normalisation_of(images: Images) -> Normalisation:
    """Return the normalisation that gives the pixels of a data set mean 0 and deviation 1.

    The numbers have four decimals. A constant channel is not scaled.

    Example:
        >>> from ttapca.datasets import read_digits
        >>> normalisation_of(read_digits("train"))
        Normalisation(mean=(0.3055,), std=(0.376,))
    """
    means = images.channel_means()
    channels = (images.images[..., number] for number in range(len(means)))
    deviations = [float(channel.std(dtype="float64")) / 255 for channel in channels]
    return Normalisation(
        tuple(round(mean, DECIMALS) for mean in means),
        tuple(round(value, DECIMALS) or 1.0 for value in deviations),
    )


class Normalise(nn.Module):
    """The first layer of a network: it checks the shape of the images and normalises them."""

    mean: Tensor
    std: Tensor
    # Whether images may have another height and width; None if the network cannot take others.
    any_size: bool | None = None

    def __init__(self, normalisation: str | Normalisation, input_shape: Sequence[int]) -> None:
        super().__init__()
        conform(tuple(input_shape), INPUT_SHAPE, "A network", errors.OptionError, at="input_shape")
        channels, height, width = input_shape
        self.input_shape = (channels, height, width)
        self.values = find_normalisation(normalisation).for_channels(channels)
        self.values.keep_in(self)

    def forward(self, images: Tensor) -> Tensor:
        """Normalise images in [0, 1] of shape (batch, channels, height, width)."""
        if not images.is_floating_point():
            kind = str(images.dtype).removeprefix("torch.")
            raise errors.InputTypeError(
                f"This network takes floating-point images in [0, 1]; found {kind}. Convert pixels "
                "from 0 to 255 with images.float() / 255."
            )
        kept = 1 if self.any_size and images.dim() == 4 else 3
        if tuple(images.shape[1:])[:kept] != self.input_shape[:kept]:
            others = "" if self.any_size is None else " call `network.take_any_size()`,"
            raise errors.ShapeError(
                f"This network takes batches of images of shape {_times(self.input_shape)}; found "
                f"{_times(images.shape[1:])}. Resize the images (pictures: `size=`),{others} or "
                "choose a network for them."
            )
        return (images - self.mean) / self.std

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"{_times(self.input_shape)}, mean={self.values.mean}, std={self.values.std}"


class ImageNetwork(nn.Module):
    """A classifier of images in [0, 1].

    It returns `classes` logits for an image; its first layer is `normalise`.

    Example:
        >>> ImageNetwork(10, "none", (3, 32, 32)).normalise
        Normalise(3x32x32, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    """

    def __init__(
        self, classes: int, normalisation: str | Normalisation, input_shape: Sequence[int]
    ) -> None:
        super().__init__()
        if classes < 1:
            raise errors.OptionError(f"A network has at least 1 class; found {classes}.")
        self.classes = classes
        self.normalise = Normalise(normalisation, input_shape)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of one image: channels, height, width."""
        return self.normalise.input_shape

    def take_any_size(self) -> None:
        """Take images of any height and width from now on, instead of those of `input_shape`."""
        if self.normalise.any_size is None:
            raise errors.OptionError(
                f"{type(self).__name__} takes images of {_times(self.input_shape)} only: it does "
                "not average over pixels. Resize the images, or choose another network."
            )
        self.normalise.any_size = True


class NormalisedNetwork(nn.Module):
    """Takes images in [0, 1] for a network of your own, `model`, that needs normalised ones."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, normalisation: str | Normalisation) -> None:
        super().__init__()
        self._values = find_normalisation(normalisation)
        self._values.keep_in(self)
        self.model = model

    def forward(self, images: Tensor) -> Any:
        """Return the output of the network for images in [0, 1], (batch, channels, h, w)."""
        self._values.for_channels(images.shape[1])  # one number, or one for each of them
        return self.model((images - self.mean) / self.std)


@contextmanager
def explained_shape(shape: tuple[int, ...]) -> Iterator[None]:
    """Say, if a network fails on shapes in the block, that it takes no images of this shape."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        ours = isinstance(error, errors.TtapcaError) or errors.refused_memory(error) is not None
        if ours or not _ABOUT_SHAPES.search(str(error)):
            raise
        raise errors.ShapeError(
            f"The network cannot take samples of shape {shape}: {error}. Give those that it takes, "
            "channels first, such as 3x224x224."
        ) from error


# In what torch, numpy and Python say about tensors that do not fit each other.
_ABOUT_SHAPES = re.compile(r"shape|size|dimension|channel|elements|unpack|\dD\b", re.IGNORECASE)


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Make a padded 3x3 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Draw new weights in place: He's normal by fan-out for convolutions, zeros for biases."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(
                module.weight, mode="fan_out", nonlinearity="relu", generator=generator
            )
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            nn.init.zeros_(module.bias)


def looks_untrained(network: nn.Module) -> bool:
    """Tell whether there are BatchNorm layers, all with the statistics from before training."""
    pairs = [running_statistics(norm) for norm in with_running_statistics(network).values()]
    fresh = [not mean.any() and bool((var == 1).all()) for mean, var in pairs]
    return bool(fresh) and all(fresh)


def settings_beside_weights(network: nn.Module) -> list[str]:
    """Return unusual settings that are in no tensor: `eps` of norms, strides of bottlenecks."""
    settings = []
    for name, module in network.named_modules():
        if isinstance(module, NORMS) and module.eps != DEFAULT_EPS:
            settings.append(f"{name} eps {module.eps}")
        if getattr(module, "early_stride", False):
            settings.append(f"{name} early stride")
    return settings


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
