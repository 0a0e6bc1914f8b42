"""The layers of a network that can carry a filter, and the cost of a filter at each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.networks.network import explained_shape
from ttapca.spectral.basis_choice import LARGEST_DENSE, cosines_serve, takes_images, usual_basis
from ttapca.spectral.folded import WEIGHTED
from ttapca.spectral.image_statistics import is_image
from ttapca.support.modules import LayerPaths, device_and_dtype, evaluation_mode, multiply_adds
from ttapca.support.wrapping import temporary_patches

DEFAULT_COMPONENTS = 2000  # as in the paper
BYTES_A_NUMBER = 4  # a filter computes in float32


@dataclass(frozen=True)
class LayerFacts:
    """One layer, and the cost of a filter there.

    Attributes:
        name: Dotted path, without the names of wrappers in front.
        kind: The layer's class.
        input_shape: Shape for one sample; None if the layer does not take a tensor first.
        output_shape: Shape for one sample.
        outputs: How many values the output has (the paper's p).
        calls: How often the layer runs in one forward pass; a filter needs exactly one call.
        folds: Whether the filter works in the layer's input.
        components: How many components the cost is for: as asked, or as many as there can be.
        filter_bytes: Memory of the filter.
        multiply_adds: Of the filter, for one image.
        relative_cost: `multiply_adds` divided by the network's own; None if it has none.
    """

    name: str
    kind: str
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...]
    outputs: int
    calls: int
    folds: bool
    components: int
    filter_bytes: int
    multiply_adds: int
    relative_cost: float | None


@dataclass(frozen=True)
class LayerTable:
    """All layers of a network."""

    layers: tuple[LayerFacts, ...]  # in the order in which they finish
    multiply_adds: int  # in convolutions and linear layers, for one image
    parameters: int
    recommended: str | None  # the layer to start with; None if none can carry a filter
    advice: str = ""  # a better place than that layer, if there is one


@dataclass
class _Calls:
    """The calls of one layer in a forward pass."""

    module: nn.Module
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...]
    number: int = 0
    multiply_adds: int = 0


def describe_layers(
    model: nn.Module, input_shape: Sequence[int], components: int | None = None
) -> LayerTable:
    """Run one image through a network and list its layers.

    The recommended layer is the stem: the first affine one that takes the images, where a filter is
    small and fast, and sees single pixels. Otherwise it is the first affine one whose input is
    smaller than its output, or else the first layer called once.

    Args:
        model: Any module; left as it was.
        input_shape: The shape of one image.
        components: How many components the filter would have; by default as `ttapca fit` chooses.

    Example:
        >>> from ttapca.networks import build
        >>> table = describe_layers(build("resnet20"), (3, 32, 32))
        >>> table.recommended, round(table.multiply_adds / 1e6)
        ('conv1', 41)
    """
    image = tuple(input_shape)
    calls = _calls(model, image)
    total = sum(each.multiply_adds for each in calls.values())
    layers = [_facts(name, each, components, total, image) for name, each in calls.items()]
    usable = [layer for layer in layers if layer.calls == 1]
    folding = [layer for layer in usable if layer.folds]
    on_images = [layer for layer in folding if takes_images(layer.input_shape, image)]
    # A layer that only passes the images on is second to one that makes something of them.
    weighted = [layer for layer in on_images if isinstance(calls[layer.name].module, WEIGHTED)]
    best = next(iter([*weighted, *on_images, *folding, *usable]), None)
    return LayerTable(
        layers=tuple(layers),
        multiply_adds=total,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        recommended=best.name if best else None,
        advice=_advice(best, image),
    )


def _advice(best: LayerFacts | None, image: tuple[int, ...]) -> str:
    """Return advice if no affine layer takes the images, and a filter of them is worth it."""
    if best is None or not is_image(image):
        return ""
    shape = best.input_shape if best.folds else best.output_shape
    # A filter on the images as one vector does the same, unless there are too many for a matrix.
    same_numbers = math.prod(shape or ()) == math.prod(image)
    if same_numbers and (shape == image or best.filter_bytes <= LARGEST_DENSE):
        return ""
    return (
        "No affine layer of this network takes the images themselves, where a filter is small and "
        "repairs most: pass them through an `nn.Identity` first, and fit at that."
    )


def _calls(model: nn.Module, image: tuple[int, ...]) -> dict[str, _Calls]:
    """Run one image through a model, and return the calls of each layer by its path."""
    paths = LayerPaths(model)
    names = {module: paths.canonical(path) for path, module in paths.layers.items()}
    found: dict[str, _Calls] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or output.dim() < 2:
            return
        taken = tuple(args[0].shape[1:]) if args and isinstance(args[0], Tensor) else None
        shape = tuple(output.shape[1:])
        calls = found.setdefault(names[module], _Calls(module, taken, shape))
        calls.number += 1
        calls.multiply_adds += multiply_adds(module, math.prod(shape))

    device, dtype = device_and_dtype(model, model)
    with torch.no_grad(), evaluation_mode(model), temporary_patches() as patches:
        for module in names:
            patches.hook_output(module, note)
        with explained_shape(image):
            model(torch.zeros(1, *image, device=device, dtype=dtype))
    return found


def _facts(
    name: str, calls: _Calls, wish: int | None, total: int, image: tuple[int, ...]
) -> LayerFacts:
    outputs = math.prod(calls.output_shape)
    count = wish or DEFAULT_COMPONENTS
    sides = (calls.input_shape, calls.output_shape)
    basis, shape = usual_basis(calls.module, *sides, count, image, asked=wish is not None)
    if wish is None and cosines_serve(shape, image):
        count = math.prod(shape)
    components = min(count, basis.most_components(shape, outputs))
    cost = basis.cost(shape, components)
    return LayerFacts(
        name=name,
        kind=type(calls.module).__name__,
        input_shape=calls.input_shape,
        output_shape=calls.output_shape,
        outputs=outputs,
        calls=calls.number,
        folds=shape is calls.input_shape,
        components=components,
        filter_bytes=BYTES_A_NUMBER * (cost.numbers + math.prod(shape)),  # and the mean
        multiply_adds=cost.multiply_adds,
        relative_cost=cost.multiply_adds / total if total else None,
    )
