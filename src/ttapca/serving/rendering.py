"""What is answered, as JSON and PNG."""

from __future__ import annotations

import io
import json
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttapca.serving.answers import Answer, StreamGlance, StreamStatus
from ttapca.serving.tokens import Token


def json_bytes(content: object) -> bytes:
    """Return JSON; numbers that are not finite, which JSON does not have, become null.

    Example:
        >>> json_bytes({"ratio": float("inf"), "images": 3})
        b'{"ratio":null,"images":3}'
    """
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))
    return text.encode()


def _finite(content: object) -> object:
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def status_facts(status: StreamStatus, token: Token) -> dict[str, Any]:
    """Return the status of a stream, with the name that the holder of a token knows it by."""
    facts = status.to_dict()
    facts["health"]["stream"] = token.own_name(status.health.stream)
    return facts


def glance_facts(glance: StreamGlance, token: Token) -> dict[str, Any]:
    """Return the little that a list tells about a stream, with the name that the holder knows."""
    return {**asdict(glance), "stream": token.own_name(glance.stream)}


def answer_facts(answer: Answer, token: Token, classes: Sequence[str]) -> dict[str, Any]:
    """Return an answer: for each image the most probable class, its name and its probability."""
    probabilities, found = answer.logits.softmax(dim=1).max(dim=1)
    names = [classes[number] if number < len(classes) else None for number in found.tolist()]
    predictions = zip(found.tolist(), names, probabilities.tolist(), strict=True)
    return {
        "stream": token.own_name(answer.stream),
        "mode": answer.mode,
        "adapted": answer.adapted,
        "predictions": [
            {"class": number, "name": name, "probability": probability}
            for number, name, probability in predictions
        ],
        "differ": answer.differ,
        "health": status_facts(answer.status, token),
    }


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
