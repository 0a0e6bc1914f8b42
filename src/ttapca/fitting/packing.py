"""The tensors of a filter of cosines in a small form: one whole number for each coefficient.

A filter of all cosines of a 3 x 224 x 224 image has 150,528 components. Their places and singular
values take 2.4 MB, and the mean of the layer's output, which follows from that of its input,
another 6.4 MB. But the places are the order of the singular values. So the file holds a level for
each coefficient: how many steps of 1 / `STEPS` octave its singular value lies below the largest
one. That is 16 bits each, and changes a singular value by less than a thousandth. The mean takes
16 bits as well, in steps of at most 1 / 32,767 of its range, and so does the reach of classes.

Whatever was packed once is packed again without loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ttapca.errors import SavedFilterError

LEVELS, LARGEST = "levels", "largest_singular_value"
STEPS = 1024  # an octave
NOT_KEPT = -1
DEEPEST = 2**15 - 1  # 32 octaves: less is rounding
MEAN_STEPS, MEAN_SCALE = "mean_steps", "mean_scale"
MOST_STEPS = 2**16 - 1
ROUNDING = 1e-9  # of a step: what was packed once must not be rounded up again
FINEST = 2.0**-40  # of the largest number: finer steps would lose digits of float64


def packed(tensors: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Return the tensors of a filter of cosines in the small form.

    Args:
        tensors: As `unpacked` returns them.
        size: Numbers in a sample.
    """
    kept = dict(tensors)
    order, values = kept.pop("order"), kept.pop("singular_values")
    octaves = (values[0] / values).log2()
    # Rounded up, so that no variance becomes larger and all of them together stay below the total.
    below = (octaves * STEPS - ROUNDING).ceil().clamp(0, DEEPEST).to(torch.int16)
    levels = torch.full((size,), NOT_KEPT, dtype=torch.int16)
    levels[order] = below
    kept[LEVELS], kept[LARGEST] = levels, values[:1].clone()
    if "input_mean" in kept:
        kept.pop("output_mean", None)
        kept[MEAN_STEPS], kept[MEAN_SCALE] = _steps_of(kept.pop("input_mean"))
    if "class_reach" in kept:  # components of one level change places
        reach = torch.zeros(size, dtype=torch.float32)
        reach[order] = kept["class_reach"]
        largest = torch.finfo(torch.float16).max
        kept["class_reach"] = reach[_order_of(levels)].clamp(max=largest).half()
    return kept


def unpacked(
    tensors: Mapping[str, Tensor], shape: Sequence[int], components: int, where: str
) -> dict[str, Tensor]:
    """Return the tensors as if they had never been packed; others are returned as they are.

    Raises:
        SavedFilterError: They cannot be what `packed` returns.
    """
    found = dict(tensors)
    if LEVELS not in found:
        return found
    levels, largest = found.pop(LEVELS), found.pop(LARGEST, None)
    size = math.prod(shape)
    _check_whole_numbers(LEVELS, levels, size, where)
    kept = int((levels != NOT_KEPT).sum())
    if int(levels.min()) < NOT_KEPT or kept != components:
        raise SavedFilterError(
            f"`{LEVELS}` of the filter in {where} must be {NOT_KEPT} but for its {components:,} "
            f"components, by its config; found {kept:,}. Save the filter again."
        )
    if largest is None or tuple(largest.shape) != (1,) or largest.dtype != torch.float64:
        raise SavedFilterError(
            f"`{LARGEST}` of the filter in {where} must be one number of 64 bits; found something "
            "else, or nothing. Save the filter again."
        )
    order = _order_of(levels)
    found["order"] = order
    found["singular_values"] = largest * torch.exp2(-levels[order].double() / STEPS)
    if MEAN_STEPS in found:
        steps, scale = found.pop(MEAN_STEPS), found.pop(MEAN_SCALE, None)
        found["input_mean"] = _mean_of(steps, scale, size, where)
    elif "input_mean" in found:  # as it was stored before
        found["input_mean"] = found["input_mean"].double()
    if "class_reach" in found:
        found["class_reach"] = found["class_reach"].float()
    return found


def _steps_of(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean as whole numbers of 16 bits, and the step and the offset that they count from.

    A step is a power of two and the offset is whole, so that nothing is lost on the way back.
    """
    low, high = float(mean.min()), float(mean.max())
    finest = max(FINEST * max(abs(low), abs(high)), torch.finfo(torch.float32).tiny)
    step = 2.0 ** math.ceil(math.log2(max((high - low) / (MOST_STEPS - 1), finest)))
    offset = math.floor(low / step) + 2**15
    steps = (mean / step).round() - offset
    return steps.to(torch.int16), torch.tensor([step, offset], dtype=torch.float64)


def _mean_of(steps: Tensor, scale: Tensor | None, size: int, where: str) -> Tensor:
    _check_whole_numbers(MEAN_STEPS, steps, size, where)
    if scale is None or tuple(scale.shape) != (2,) or scale.dtype != torch.float64:
        raise SavedFilterError(
            f"`{MEAN_SCALE}` of the filter in {where} must be two numbers of 64 bits; found "
            "something else, or nothing. Save the filter again."
        )
    step, offset = map(float, scale)
    return (steps.double() + offset) * step


def _check_whole_numbers(name: str, tensor: Tensor, size: int, where: str) -> None:
    if tuple(tensor.shape) != (size,) or tensor.dtype != torch.int16:
        raise SavedFilterError(
            f"`{name}` of the filter in {where} must be {size:,} whole numbers of 16 bits, by its "
            f"config; found {tuple(tensor.shape)} of {tensor.dtype}. Save the filter again."
        )


def _order_of(levels: Tensor) -> Tensor:
    """Return the places of the components, the first ones highest; by place within a level."""
    places = (levels != NOT_KEPT).nonzero()[:, 0]
    return places[levels[places].sort(stable=True).indices]
