"""What the words of a report mean, for a reader who has never seen them."""

from __future__ import annotations

from collections.abc import Iterable

from ttapca.benchmark.cells import Row, Setting

SETTINGS: dict[Setting, str] = {
    "episodic": "adaptation starts anew at each batch",
    "online": "adaptation goes on over one corruption, and starts anew at the next",
    "correlated": "like online, with the images of a class one after another",
    "continual": "adaptation goes on from one corruption to the next, and never starts anew",
    "mixed": "all corruptions at once, image by image; adaptation never starts anew",
}


def glossary(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Explain the methods and settings that occur.

    Args:
        rows: Of a file of results.

    Returns:
        Words and what they mean, methods first, in the order in which they occur; a method that
        this version does not know is left out.

    Example:
        >>> glossary([])
        []
    """
    from ttapca.methods import METHODS  # needs torch: only who asks for meanings waits for it

    cells = [row.cell for row in rows]
    methods = dict.fromkeys(cell.method for cell in cells)
    settings = dict.fromkeys(cell.setting for cell in cells)
    return [
        *((name, METHODS[name].summary) for name in methods if name in METHODS),
        *((name, SETTINGS[name]) for name in settings if name in SETTINGS),
    ]
