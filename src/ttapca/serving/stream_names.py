"""How a stream may be called: one rule for pools, tokens and the description of the API."""

from __future__ import annotations

import re

from ttapca._checks import shown
from ttapca.errors import StreamNameError

PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]*"  # so that a name is never a path, nor needs an escape
LONGEST_NAME = 100  # letters


def check_name(name: object, longest: int = LONGEST_NAME) -> None:
    """Raise `StreamNameError` unless a stream may have this name.

    Args:
        name: From anybody.
        longest: How many letters it may have, where a part of the name is taken.

    Example:
        >>> check_name("camera-7")
        >>> check_name("../etc/passwd")
        Traceback (most recent call last):
        ttapca.errors.StreamNameError: The name of a stream must have 1 to 100 letters of ...
    """
    if not isinstance(name, str) or len(name) > longest or not re.fullmatch(PATTERN, name):
        raise StreamNameError(
            f"The name of a stream must have 1 to {longest} letters of A-Z, a-z, 0-9, dot, hyphen "
            f"and underscore, and begin with a letter or a digit; found {shown(name)}."
        )
