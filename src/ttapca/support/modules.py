"""Tools for other people's modules: find a layer, see its inputs and outputs, keep its flags."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ttapca.errors import AttachError, LayerNotFoundError, LayerOutputError, did_you_mean
from ttapca.support.tensors import at_least_float32
from ttapca.support.wrapping import finally_do, temporary_patches

# Attributes in which wrappers hold the network.
WRAPPED_BY_TORCH = ("module", "_orig_mod")
WRAPPED = ("model", *WRAPPED_BY_TORCH)


def multiply_adds(layer: nn.Module, outputs: int) -> int:
    """Return the multiply-adds of a convolution or linear layer for this many outputs; else 0."""
    if isinstance(layer, nn.Linear):
        return outputs * layer.in_features
    if isinstance(layer, _ConvNd):
        return outputs * layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return 0


def check_model(model: object) -> None:
    """Raise `AttachError` unless filters can be put on the layers of a model."""
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"A model is an `nn.Module`; found a {type(model).__name__}. Give the network itself."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise AttachError(
            "The layers of a model must run in Python, where a filter can act on them; this one is "
            "a program of `torch.jit`. Give the model that it was made from."
        )


class LayerPaths:
    """Dotted paths of layers, whatever wraps the network: `0` and `model.0` are mostly one."""

    def __init__(self, model: nn.Module) -> None:
        named = model.named_modules()
        self.layers: dict[str, nn.Module] = {name: module for name, module in named if name}
        self._model = model

    def find(self, path: str) -> str:
        """Return the path of a layer here: itself, or the only one that differs by wrappers."""
        if path in self.layers:
            return path
        for bare, known in zip((_unwrapped, _bare), self._by_bare_path, strict=True):
            near = known.get(bare(path), [])
            if len(near) == 1:
                return near[0]
            if near:
                several = " and ".join(f"`{name}`" for name in near)
                raise LayerNotFoundError(
                    f"The model has no layer `{path}`, but several that it may stand for: "
                    f"{several}. Name one of these."
                )
        names = [f"`{name}`" for name in self.layers]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        there = f" There are: {', '.join(names[:8]) or 'none'}{more}."
        offer = did_you_mean(path, self.layers) or there
        raise LayerNotFoundError(f"The model has no layer `{path}`.{offer}")

    def find_any(self, path: str) -> str:
        """Return the path that a layer has in this model; the path itself if there is none."""
        try:
            return self.find(path)
        except LayerNotFoundError:
            return path

    def canonical(self, path: str) -> str:
        """Return the path of a layer in the network without its wrappers, if it is unmistakable."""
        short = _unwrapped(path.removeprefix(self._prefix))
        return short if self.find_any(short) == path else path

    @cached_property
    def _prefix(self) -> str:
        return core_of(self._model)[0]

    @cached_property
    def _by_bare_path(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        found: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
        for name in self.layers:
            for known, bare in zip(found, (_unwrapped, _bare), strict=True):
                known.setdefault(bare(name), []).append(name)
        return found


def _unwrapped(path: str) -> str:
    """Return a path without the names that torch's own wrappers add, wherever these stand."""
    *above, name = path.split(".")
    return ".".join([*(each for each in above if each not in WRAPPED_BY_TORCH), name])


def _bare(path: str) -> str:
    """Return a path without the names that wrappers of any kind put in front of it."""
    *above, name = _unwrapped(path).split(".")
    return ".".join([*itertools.dropwhile(lambda each: each in WRAPPED, above), name])


def find_layer(model: nn.Module, path: str) -> nn.Module:
    """Return a layer by its dotted path; see `LayerPaths.find`."""
    paths = LayerPaths(model)
    return paths.layers[paths.find(path)]


def core_of(model: nn.Module) -> tuple[str, nn.Module]:
    """Return the prefix that wrappers give to paths of layers, and the network inside of them."""
    prefix = ""
    while True:
        for name in WRAPPED:
            inner = model._modules.get(name)
            if inner is not None and {*model.parameters()} == {*inner.parameters()}:
                prefix, model = f"{prefix}{name}.", inner
                break
        else:
            return prefix, model


def find_classifier(model: nn.Module, path: str | None) -> nn.Module:
    """Return the layer that makes the logits: by its dotted path, else the last `nn.Linear`."""
    if path is not None:
        return find_layer(model, path)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise AttachError(
            "The classifier is the last `nn.Linear` of a model; this one has none. Name the layer "
            'that makes the logits: `classifier="head"`.'
        )
    return linear[-1]


def path_of(model: nn.Module, layer: nn.Module) -> str:
    """Return the dotted path of a layer of a model."""
    found: str = next(path for path, module in model.named_modules() if module is layer)
    return found


def classifier_features(caught: list[Any], samples: int) -> Tensor:
    """Return the classifier's input, (samples, features), from its inputs in one forward pass."""
    if len(caught) != 1 or not isinstance(caught[0], Tensor) or len(caught[0]) != samples:
        calls = [tuple(getattr(value, "shape", ())) for value in caught]
        raise LayerOutputError(
            "The classifier is called once in a pass, on one row of features for each of the "
            f"{samples} samples; found calls on {calls}. Name the right layer with `classifier=`."
        )
    return at_least_float32(caught[0].flatten(1))


@contextmanager
def caught_inputs(layer: nn.Module) -> Iterator[list[Any]]:
    """Collect the first input of every call of a layer."""
    caught: list[Any] = []
    with temporary_patches() as patches:
        patches.hook_input(layer, _on_input(caught.append))
        yield caught


class _Reached(Exception):  # noqa: N818 - a signal: the rest of a forward pass is not needed
    pass


@contextmanager
def stopped_at(layer: nn.Module, *, before: bool = False) -> Iterator[list[Any]]:
    """Collect a layer's output, or first input, and leave the block: later layers do not run."""
    caught: list[Any] = []

    def catch(value: Any) -> None:
        caught.append(value)
        raise _Reached

    with suppress(_Reached), temporary_patches() as patches:
        if before:
            patches.hook_input(layer, _on_input(catch))
        else:
            patches.hook_output(layer, lambda _module, _args, output: catch(output))
        yield caught


def _on_input(see: Callable[[Any], None]) -> Callable[..., None]:
    return lambda _, args, kwargs: see(args[0] if args else next(iter(kwargs.values()), None))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore every module's own flag afterwards."""
    flags = training_flags(model)
    with finally_do(functools.partial(restore_training_flags, flags)):
        model.eval()
        yield


def training_flags(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return the training flag of every module: frozen parts may differ from the rest."""
    return [(module, module.training) for module in model.modules()]


def restore_training_flags(flags: list[tuple[nn.Module, bool]]) -> None:
    """Set the flags that `training_flags` returned."""
    for module, training in flags:
        module.training = training


def device_and_dtype(layer: nn.Module, model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return device and precision of a layer: by its own tensors, else by the model's."""
    for module in (layer, model):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            if tensor.is_floating_point():
                return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.get_default_dtype()
