"""The layer that makes the logits, and the features that it takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ttapca.errors import LayerOutputError
from ttapca.support.tensors import at_least_float32


def path_of(model: nn.Module, layer: nn.Module) -> str:
    """Return the dotted path of a layer of a model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        >>> path_of(model, model[0])
        '0'
    """
    paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
    return paths[layer]


def features_of(caught: list[Any], samples: int) -> Tensor:
    """Return the classifier's input, one row for each sample, in float32 at least.

    Args:
        caught: The first input of each of its calls in one forward pass.
        samples: How many samples there are.

    Raises:
        LayerOutputError: There was another number of calls, or of rows.
    """
    if len(caught) != 1 or not isinstance(caught[0], Tensor) or len(caught[0]) != samples:
        calls = [tuple(getattr(value, "shape", ())) for value in caught]
        raise LayerOutputError(
            "The classifier is called once in a forward pass, on one row of features for each of "
            f"the {samples} samples; found calls on {calls}. Name the right layer with "
            "`classifier=`."
        )
    return at_least_float32(caught[0].flatten(1))
