"""What is answered, as JSON and PNG."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ttapca.serving.answers import Answer, StreamGlance, StreamStatus
from ttapca.serving.tokens import Token
from ttapca.support.outputs import OutputKind, Outputs
from ttapca.support.parsing import finite


def json_bytes(content: object) -> bytes:
    """Return JSON; numbers that are not finite, which JSON does not have, become null.

    Example:
        >>> json_bytes({"ratio": float("inf"), "images": 3})
        b'{"ratio":null,"images":3}'
    """
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    return text.encode()


def status_facts(status: StreamStatus, token: Token) -> dict[str, Any]:
    """Return the status of a stream, with the name that the holder of a token knows it by."""
    facts = status.to_dict()
    facts["health"]["stream"] = token.own_name(status.health.stream)
    return facts


def glance_facts(glance: StreamGlance, token: Token) -> dict[str, Any]:
    """Return how a stream is in short, with the name that the holder of a token knows it by."""
    return {**vars(glance), "stream": token.own_name(glance.stream)}


def answer_facts(
    answer: Answer, token: Token, classes: Sequence[str], *, full: bool = False
) -> dict[str, Any]:
    """Return an answer: what is predicted, and how the stream is, in short or in full.

    In full it takes a millisecond: as long as a small network needs for an image in a large batch.
    """
    health = status_facts(answer.status, token) if full else glance_facts(answer.glance, token)
    return {
        "stream": token.own_name(answer.stream),
        "mode": answer.mode,
        "adapted": answer.adapted,
        "predictions": predicted(answer.logits, classes, answer.outputs),
        "differ": answer.differ,
        "health": health,
    }


def predicted(
    logits: Tensor, classes: Sequence[str], outputs: OutputKind = "multiclass"
) -> list[dict[str, Any]]:
    """Return for each image the most probable class, its name and its probability.

    Of labels that do not exclude each other, it is the most probable one; `labels` has all that are
    more probable than not.

    Args:
        logits: As the network returns them, a row for each image.
        classes: Their names; fewer where they have none.
        outputs: What the logits mean.

    Example:
        >>> import torch
        >>> predicted(torch.tensor([[0.0, 100.0]]), ("cat", "dog"))
        [{'class': 1, 'name': 'dog', 'probability': 1.0}]
        >>> predicted(torch.tensor([-100.0]), ("calm", "alarm"), "binary")
        [{'class': 0, 'name': 'calm', 'probability': 1.0}]
    """
    probabilities = Outputs(outputs, reads="probabilities")(logits).softmax(dim=1)
    if outputs == "multilabel":
        return [_labelled(row, classes) for row in probabilities[:, 1].tolist()]
    best, found = probabilities.max(dim=1)
    pairs = zip(found.tolist(), best.tolist(), strict=True)
    return [_named(number, probability, classes) for number, probability in pairs]


def _named(number: int, probability: float, classes: Sequence[str]) -> dict[str, Any]:
    name = classes[number] if number < len(classes) else None
    return {"class": number, "name": name, "probability": probability}


def _labelled(probabilities: list[float], classes: Sequence[str]) -> dict[str, Any]:
    """Return the most probable label of an image, and all that are more probable than not."""
    every = [_named(number, each, classes) for number, each in enumerate(probabilities)]
    likely = [each for each in every if each["probability"] > 0.5]
    return {**max(every, key=lambda each: each["probability"]), "labels": likely}


def png_bytes(pixels: NDArray[np.uint8]) -> bytes:
    """Return pixels, uint8 (height, width, 3), as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def picture_urls(
    pictures: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None,
) -> dict[str, str | None]:
    """Return the last image before and after the filter as `data:` URLs, for a page.

    Example:
        >>> picture_urls(None)
        {'before': None, 'after': None}
    """
    urls: dict[str, str | None] = {"before": None, "after": None}
    for which, pixels in zip(urls, pictures or (), strict=False):
        urls[which] = f"data:image/png;base64,{b64encode(png_bytes(pixels)).decode()}"
    return urls
