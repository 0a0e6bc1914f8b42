"""The library's advice in the words of the command line.

The library speaks Python: "pass it as `filter=`". Whoever typed a command has options instead. All
that a command says on standard error goes through here.
"""

from __future__ import annotations

import re

# What can be typed in place of an argument.
OPTIONS = {
    "filter": "--filter DIR",
    "size": "--size N",
    "root": "--in DIR",
    "corruption": "--corruption NAME",
    "severity": "--severity N",
    "overwrite": "--force",
    "n_components": "--components",
    "images": "--images N",
}

# Whole phrases that have another shape here; the first that fits is taken.
PHRASES = (
    (r"`ttapca\.fit\([^`]*\)` and pass it as `filter=`", "`ttapca fit` and name it: --filter DIR"),
    (r"Pass the module as `head=`, and as `split=` the layer whose output it takes\.",
     "`ttapca bench` takes it from weights that `ttapca train --rotation-head LAYER` wrote."),
    (r"`fitted\.save\(path\)`", "`ttapca fit`"),
    (r"`ttapca\.(fit|adapt|load)`", r"`ttapca \1`"),
    (r", or None for all", ""),
    (r"Say what the model takes of a batch: prepare=.*by name\.",
     "Name data that it takes; pictures are resized with --size N."),
    (r"read smaller batches, or take `route='dct'` for large images", "or a smaller --batch-size"),
    (r"Ask for fewer with `images`", "Ask for fewer with --images N"),
    (r"State it: normalisation ([\w, ]+), or a mean and a std\.",
     r"State it: --normalise NAME (\1), or --mean and --std."),
)  # fmt: skip

ARGUMENT = re.compile(r"`(\w+)=([^`]*)`|\b(n_components|size)=(\d+)")


def on_the_command_line(text: str) -> str:
    """Say the same to somebody who typed a command.

    Args:
        text: The message of an error or a warning.

    Returns:
        The message with arguments as options: those of a command by name, those of a method as
        what `--option` takes.

    Example:
        >>> on_the_command_line("All pictures must have one size. Give `size=` to resize them.")
        'All pictures must have one size. Give --size N to resize them.'
        >>> on_the_command_line("Switch them off with `consistency=False`.")
        'Switch them off with --option consistency=False.'
    """
    for phrase, words in PHRASES:
        text = re.sub(phrase, words, text)
    return ARGUMENT.sub(_option, text)


def _option(found: re.Match[str]) -> str:
    name, value = found[1] or found[3], found[2] or found[4]
    if name in OPTIONS:
        return f"{OPTIONS[name]} {value}" if found[4] else OPTIONS[name]
    return f"--option {name}={value or 'VALUE'}"
