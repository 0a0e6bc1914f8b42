"""Networks of your own: what a function named as `package.module:factory` makes."""

from __future__ import annotations

import importlib
import inspect
import traceback
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.errors import FactoryError, OptionError, TtapcaError, did_you_mean
from ttapca.networks.hubs import is_hub_name
from ttapca.networks.network import Normalisation, find_normalisation


class NormalisedNetwork(nn.Module):
    """A network of your own that takes normalised images, behind their normalisation.

    So it takes images in [0, 1], as all networks do here. Its layers get `model.` in front of their
    names.

    Attributes:
        model: The network as the factory made it.

    Example:
        >>> network = NormalisedNetwork(nn.Identity(), Normalisation((0.5,), (0.25,)))
        >>> network(torch.ones(1, 1, 1, 2))
        tensor([[[[2., 2.]]]])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, normalisation: str | Normalisation) -> None:
        super().__init__()
        self._values = find_normalisation(normalisation)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(self._values, name)).reshape(-1, 1, 1)
            self.register_buffer(name, values, persistent=False)
        self.model = model

    def forward(self, images: Tensor) -> Any:
        """Return what the network makes of images in [0, 1], (batch, channels, height, width)."""
        self._values.for_channels(images.shape[1])  # one number, or one for each of them
        return self.model((images - self.mean) / self.std)


def is_factory(name: str) -> bool:
    """Tell whether a word has the form `package.module:factory`, which `timm:NAME` has not."""
    if is_hub_name(name):
        return False
    module, colon, factory = name.partition(":")
    dotted = all(part.isidentifier() for part in module.split("."))
    return bool(colon) and factory.isidentifier() and dotted


def call_factory(name: str) -> nn.Module:
    """Import `package.module` and return the network that `factory()` makes. Runs users' code.

    Raises:
        OptionError: There is no such factory, it needs arguments, or it returns no `nn.Module`.
        FactoryError: The module or the factory fails.
    """
    if not is_factory(name):
        raise OptionError(f"Name your own network as `package.module:factory`; found `{name}`.")
    path, _, attribute = name.partition(":")
    module = _import(path)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise OptionError(
            f"`{path}` has no function or class `{attribute}`."
            f"{did_you_mean(attribute, _callables(module))}"
        )
    try:
        signature = inspect.signature(factory)
        signature.bind()
    except ValueError:  # functions written in C may have no signature
        pass
    except TypeError as error:
        raise OptionError(
            f"A factory is called without arguments; `{name}` takes {signature}: {error}. Write "
            "one that gives them, such as: def network(): return Network(classes=10)"
        ) from None
    try:
        network = factory()
    except TtapcaError:
        raise
    except Exception as error:  # users' code may raise anything
        raise FactoryError(
            f"The factory `{name}` has failed: {_reason(error)}. Mend it; it must work without "
            "arguments."
        ) from error
    if not isinstance(network, nn.Module):
        raise OptionError(
            f"A factory returns an `nn.Module`; `{name}` returned a {type(network).__name__}."
        )
    return network


def _callables(module: ModuleType) -> list[str]:
    return [name for name in dir(module) if callable(getattr(module, name, None))]


def _import(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:  # users' code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{path}.".startswith(f"{missing}."):
            raise OptionError(
                f"There is no module `{path}` to import. Run the command in the folder that holds "
                "it, or install it."
            ) from error
        raise FactoryError(
            f"The module `{path}` cannot be imported: {_reason(error)}. Mend it, or install what "
            "it needs."
        ) from error


def _reason(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (in {where.filename}, line {where.lineno})"
