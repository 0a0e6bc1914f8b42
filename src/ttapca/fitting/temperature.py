"""The temperature at which a network's probabilities are true, by labelled source samples.

Guo et al., On Calibration of Modern Neural Networks (ICML 2017, https://arxiv.org/abs/1706.04599).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ttapca.errors import NotEnoughDataError, OptionError
from ttapca.support.modules import device_and_dtype, evaluation_mode
from ttapca.support.outputs import Outputs

FEWEST_LABELLED = 100  # samples: with fewer, a temperature says little
COOLEST, HOTTEST, HALVINGS = 0.05, 20.0, 60


def temperature_of(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature at which labels are likeliest, by bisection: it is convex in 1 / T."""
    own, cool, hot = logits.double(), 1 / HOTTEST, 1 / COOLEST
    for _ in range(HALVINGS):
        middle = (cool + hot) / 2
        expected = ((own * middle).softmax(1) * own).sum(1)
        # How much likelier labels become if all is a little colder.
        slope = (own.gather(1, labels[:, None])[:, 0] - expected).mean()
        cool, hot = (middle, hot) if slope > 0 else (cool, middle)
    return 2 / (cool + hot)


def measured_temperature(
    model: nn.Module, labelled: Iterable[Any], outputs: Outputs | None = None
) -> float:
    """Return the temperature of a model by batches of samples and labels."""
    outputs = outputs or Outputs()
    device, dtype = device_and_dtype(model, model)
    logits, labels = [], []
    with evaluation_mode(model), torch.no_grad():
        for number, batch in enumerate(labelled):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise OptionError(
                    "Labelled batches are pairs of samples and labels; batch "
                    f"{number} is a {type(batch).__name__}. Pass a loader of such pairs."
                )
            found = outputs.of_classes(model(batch[0].to(device, dtype)))
            wanted = torch.as_tensor(batch[1]).long().cpu()
            if found is None or found.dim() != 2 or wanted.shape != found.shape[:1]:
                shape = None if found is None else tuple(found.shape)
                raise OptionError(
                    "A temperature needs classes that exclude each other, and one label for each "
                    f"sample; found logits of shape {shape} and labels of {tuple(wanted.shape)}."
                )
            if not 0 <= int(wanted.min()) <= int(wanted.max()) < found.shape[1]:
                raise OptionError(
                    f"Labels must be from 0 to {found.shape[1] - 1}, as the model has classes; "
                    f"batch {number} has {int(wanted.min())} to {int(wanted.max())}."
                )
            logits.append(found.float().cpu())
            labels.append(wanted)
    samples = sum(map(len, labels))
    if samples < FEWEST_LABELLED:
        raise NotEnoughDataError(
            f"A temperature needs {FEWEST_LABELLED} labelled samples that the network was not "
            f"trained on; found {samples}."
        )
    return temperature_of(torch.cat(logits), torch.cat(labels))
