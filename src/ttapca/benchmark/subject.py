"""`Subject`: the network, the images and the filter that methods are compared on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.benchmark.image_source import ImageSource
from ttapca.errors import OptionError
from ttapca.fitting.fitted_filter import FittedFilter

FINGERPRINT_LENGTH = 16  # hexadecimal digits


@dataclass(eq=False)
class Subject:
    """What stays the same in a comparison.

    Attributes:
        name: The network's name as the user gave it.
        network: The network itself; after every run it is as it was.
        data: The data set's name.
        source: The test images, clean and corrupted.
        fitted: The filter, with at least as many components as the plan asks for.
        filter_name: Tells the filter from others of its layer and rank, where the user brought it;
            empty for the one that follows from network, layer and training images.
        provided: Options of methods that no text can say, by method: `{"ttt": {"head": head}}`.
        stated: What the key of a result says about these, by method.
    """

    name: str
    network: nn.Module
    data: str
    source: ImageSource
    fitted: FittedFilter | None = None
    filter_name: str = ""
    provided: dict[str, dict[str, Any]] = field(default_factory=dict)
    stated: dict[str, dict[str, str]] = field(default_factory=dict)
    # The spectrum that was taken last, and of what: methods in a row share it.
    spectrum: tuple[object, Tensor] | None = field(default=None, init=False, repr=False)

    @cached_property
    def weights(self) -> str:
        """What tells this network from others of its name."""
        return fingerprint(self.network)

    def filter(self, components: int) -> FittedFilter:
        """The filter with its first components.

        Raises:
            OptionError: There is no filter.
            NotEnoughDataError: It has fewer components.
        """
        if self.fitted is None:
            raise OptionError("This comparison needs a fitted filter; found none.")
        if components == self.fitted.n_components_:
            return self.fitted
        return self.fitted.truncated(components)

    def place_of(self, fitted: FittedFilter) -> str:
        """What a key says about where the filter sits, and which one it is."""
        return f"{fitted.layer}, {self.filter_name}" if self.filter_name else fitted.layer


def fingerprint(network: nn.Module) -> str:
    """The first 16 digits of a SHA-256 over all parameters and buffers.

    Buffers that are not in the state dict count as well: the normalisation of images is one of
    them, and changes every number.

    Example:
        >>> fingerprint(nn.Identity())
        'e3b0c44298fc1c14'
    """
    digest = hashlib.sha256()
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:FINGERPRINT_LENGTH]
