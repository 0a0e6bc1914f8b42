"""A network of the user's own, named as `package.module:factory`."""

from __future__ import annotations

import importlib

from torch import nn

from ttapca.errors import OptionError, did_you_mean


def is_factory(name: str) -> bool:
    """Whether a word has the form `package.module:factory`.

    Example:
        >>> is_factory("my.networks:small"), is_factory("weights.pth"), is_factory("C:/weights.pth")
        (True, False, False)
    """
    module, colon, factory = name.partition(":")
    return bool(colon) and factory.isidentifier() and _is_dotted(module)


def make(name: str) -> nn.Module:
    """Import a module, call the factory in it, and check that it gives a network.

    This runs the user's code.

    Args:
        name: `package.module:factory`; the factory is called without arguments.

    Raises:
        OptionError: There is no such module or factory, or it gives something else.

    Example:
        >>> make("torch.nn:Identity")
        Identity()
    """
    if not is_factory(name):
        raise OptionError(
            f"A network of your own is named `package.module:factory`; found `{name}`."
        )
    path, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise  # the user's module is there, and lacks something itself
        raise OptionError(
            f"There is no module `{path}` to import. Run the command in the folder that holds it, "
            "or install it."
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise OptionError(
            f"`{path}` has no function or class `{attribute}`."
            f"{did_you_mean(attribute, dir(module))}"
        )
    network = factory()
    if not isinstance(network, nn.Module):
        raise OptionError(
            f"A factory gives an `nn.Module`; `{name}` gave a {type(network).__name__}."
        )
    return network


def _is_dotted(module: str) -> bool:
    return bool(module) and all(part.isidentifier() for part in module.split("."))
