"""Values as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """Return a value with null in the place of NaN and infinity, which JSON does not have.

    Example:
        >>> finite({"ratio": float("inf"), "errors": (1.5, float("nan"))})
        {'ratio': None, 'errors': [1.5, None]}
    """
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
