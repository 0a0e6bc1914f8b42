"""Where the commands keep data: the one place that reads it from the environment."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """The folder for data sets and other things that can be fetched again.

    Returns:
        `TTAPCA_HOME`, else `$XDG_CACHE_HOME/ttapca`, else `~/.cache/ttapca`. An empty variable
        counts as unset.

    Example:
        >>> cache_root().is_absolute()
        True
    """
    own = os.environ.get("TTAPCA_HOME")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    base = Path(shared).expanduser() if shared else Path.home() / ".cache"
    return base.absolute() / "ttapca"
