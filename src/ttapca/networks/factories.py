"""A network of the user's own, named as `package.module:factory`."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable
from types import ModuleType

from torch import nn

from ttapca.errors import FactoryError, OptionError, TtapcaError, did_you_mean


def is_factory(name: str) -> bool:
    """Whether a word has the form `package.module:factory`.

    Example:
        >>> is_factory("my.networks:small"), is_factory("weights.pth"), is_factory("C:/weights.pth")
        (True, False, False)
    """
    module, colon, factory = name.partition(":")
    dotted = all(part.isidentifier() for part in module.split("."))
    return bool(colon) and factory.isidentifier() and dotted


def make(name: str) -> nn.Module:
    """Import a module, call the factory in it without arguments, and check what it gives.

    This runs the user's code.

    Raises:
        OptionError: There is no such module or factory, it needs arguments, or it gives something
            else.
        FactoryError: The module or the factory fails.

    Example:
        >>> make("torch.nn:Identity")
        Identity()
    """
    if not is_factory(name):
        raise OptionError(
            f"A network of your own is named `package.module:factory`; found `{name}`."
        )
    path, _, attribute = name.partition(":")
    module = _imported(path)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise OptionError(
            f"`{path}` has no function or class `{attribute}`."
            f"{did_you_mean(attribute, dir(module))}"
        )
    network = _called(factory, name)
    if not isinstance(network, nn.Module):
        raise OptionError(
            f"A factory gives an `nn.Module`; `{name}` gave a {type(network).__name__}."
        )
    return network


def _imported(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:  # whatever the user's code may raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{path}.".startswith(f"{missing}."):
            raise OptionError(
                f"There is no module `{path}` to import. Run the command in the folder that holds "
                "it, or install it."
            ) from error
        raise FactoryError(
            f"The module `{path}` cannot be imported: {_failure(error)}. Mend it, or install what "
            "it needs."
        ) from error


def _called(factory: Callable[..., object], name: str) -> object:
    try:
        needed = inspect.signature(factory)
        needed.bind()
    except ValueError:  # a callable of C that tells nothing about itself
        pass
    except TypeError as error:
        raise OptionError(
            f"A factory is called without arguments; `{name}` takes {needed}: {error}. Write one "
            "that gives them, such as: def network(): return Network(classes=10)"
        ) from None
    try:
        return factory()
    except TtapcaError:
        raise
    except Exception as error:  # whatever the user's code may raise
        raise FactoryError(
            f"The factory `{name}` has failed: {_failure(error)}. Mend it; it must work without "
            "arguments."
        ) from error


def _failure(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (in {where.filename}, line {where.lineno})"
