"""A network by name, and the fingerprint that tells it from others of that name."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttapca import networks
from ttapca.datasets import DIGITS
from ttapca.errors import OptionError, UntrainedWarning
from ttapca.networks.external import call_factory, is_factory
from ttapca.networks.network import (
    Normalisation,
    NormalisedNetwork,
    looks_untrained,
    settings_beside_weights,
)

DIGITS_NETWORK = "digits-small-cnn"
FINGERPRINT_LENGTH = 16  # hexadecimal digits


@dataclass(frozen=True)
class NetworkSource:
    """A network by name, and the options to load it.

    Attributes:
        name: A packaged network, a file of weights, `hf:NAME` or `timm:NAME`, or
            `package.module:factory`.
        weights: A file of weights for the network of a factory.
        architecture: Of a file of weights; found out from it by default.
        normalisation: Of images in [0, 1], if the file or factory does not say it.
        eps: Added to variances by the norms of a file's network; the architecture's by default.
        any_size: Whether it is to take images of another size than it is known for.

    Example:
        >>> NetworkSource("digits").load().classes
        10
    """

    name: str
    weights: Path | None = None
    architecture: str | None = None
    normalisation: str | Normalisation | None = None
    eps: float | None = None
    any_size: bool = False

    def load(self, *, assumed: str | None = None, doubt: bool = True) -> nn.Module:
        """Load the network, in evaluation mode.

        Args:
            assumed: The normalisation if neither the user nor the file says one.
            doubt: Whether to warn if the weights may be untrained.
        """
        made = is_factory(self.name)
        self.refuse(*(("architecture", "eps", "any_size") if made else ("weights",)))
        if made:
            network = call_factory(self.name)
            network = networks.load_weights(network, self.weights) if self.weights else network
            if self.normalisation is not None:
                network = NormalisedNetwork(network, self.normalisation)
        else:
            options: Any = {"normalisation": self.normalisation or assumed, "eps": self.eps}
            network = networks.load(self.file, self.architecture, **options)
            if self.any_size:
                network.take_any_size()
        if doubt and (reason := self._doubt(network)):
            other = "trained" if self.weights is None else "other"
            advice = f"Give {other} ones with `weights=`." if made else "Name a file of others."
            warnings.warn(f"{reason} {advice}", UntrainedWarning, stacklevel=2)
        return network.eval()

    def refuse(self, *names: str) -> None:
        """Raise `OptionError` if one of these attributes is given: it would have no effect."""
        for name in names:
            if getattr(self, name) not in (None, False):
                raise OptionError(f"`{name}=` has no meaning for `{self.name}`. Leave it out.")

    @property
    def shipped_filter(self) -> Path | None:
        """The folder of the filter that ships with it; None if there is none for these options."""
        as_shipped = self == NetworkSource(self.name)
        return networks.packaged_filters().get(self.file) if as_shipped else None

    @property
    def file(self) -> str:
        """The name as `networks.load` knows it; `digits` is the network of the demo."""
        return DIGITS_NETWORK if self.name == DIGITS else self.name

    @property
    def only_data(self) -> str | None:
        """The data set, if no other fits the network."""
        return DIGITS if self.file == DIGITS_NETWORK else None

    def words(self) -> dict[str, object]:
        """Return its options as those of the command line, for `option_words`."""
        stated = self.normalisation
        words: dict[str, object] = {
            "--weights": self.weights,
            "--architecture": self.architecture,
            "--eps": self.eps,
            "--any-size": self.any_size or None,
        }
        if isinstance(stated, Normalisation):
            numbers = {"--mean": stated.mean, "--std": stated.std}
            return words | {name: ",".join(map(str, each)) for name, each in numbers.items()}
        return words | {"--normalise": stated}

    def _doubt(self, network: nn.Module) -> str:
        if looks_untrained(network):
            return (
                f"the weights of `{self.name}` look UNTRAINED: the statistics of its BatchNorm "
                "layers are those of a new network. All numbers will be those of random weights."
            )
        if is_factory(self.name) and self.weights is None:
            return (
                f"no weights were given, so `{self.name}` has those that the factory gives it. If "
                "it does not load any, they are UNTRAINED, and all numbers those of random weights."
            )
        return ""


def option_words(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line; None is left out, and True is a switch."""
    given = {name: value for name, value in options.items() if value is not None}
    pairs = ([name] if value is True else [name, str(value)] for name, value in given.items())
    return [word for pair in pairs for word in pair]


def fingerprint(network: nn.Module) -> str:
    """Return the first 16 digits of a SHA-256 over parameters, all buffers and `eps` of norms."""
    digest = hashlib.sha256()
    # Buffers outside the state dict count too: one of them normalises the images.
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    for setting in settings_beside_weights(network):
        digest.update(f"{setting}\n".encode())
    return digest.hexdigest()[:FINGERPRINT_LENGTH]
