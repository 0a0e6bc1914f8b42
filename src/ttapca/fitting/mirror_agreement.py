"""Do the predictions of source images stay when the images are mirrored?

Photographs mean the same when left and right are exchanged, digits and letters do not. Nobody has
to say which it is: the network was trained on such images, and knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ttapca.support.mirroring import mirror_back, mirror_images


def mirror_agreement(
    predict: Callable[..., Tensor | None],
    batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
) -> float | None:
    """Return the share of predicted classes that stay when images are mirrored, from 0 to 1.

    Each prediction has the weight of its probability: where the network hesitates between classes,
    any change may tip it.

    Args:
        predict: Returns the logits of the untouched model; None where there are none.
        batches: Source images, as the arguments of the model and its keyword arguments.

    Returns:
        None where the arguments hold no images, and where the model predicts no classes.

    Example:
        >>> left_is_brighter = lambda x: torch.stack([x[:, 0, 0, 0], x[:, 0, 0, 1]], 1)
        >>> mirror_agreement(left_is_brighter, [((torch.rand(9, 1, 1, 2),), {})])
        0.0
    """
    weights = agreeing = 0.0
    for args, kwargs in batches:
        mirrored = mirror_images(args, kwargs)
        plain = predict(*args, **kwargs)
        if mirrored is None or plain is None:
            return None
        seen = predict(*mirrored[0], **mirrored[1])
        back = None if seen is None else mirror_back(seen)
        if back is None or back.shape != plain.shape:
            return None
        probability, classes = plain.double().softmax(1).max(1)
        weights += float(probability.sum())
        agreeing += float(probability[classes == back.argmax(1)].sum())
    share = agreeing / weights if weights else torch.nan
    return share if 0.0 <= share <= 1.0 else None  # a network may return NaN
