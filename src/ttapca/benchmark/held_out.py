"""Conditions on which options may be chosen: none of them is part of what is reported.

Reported are the fifteen standard corruptions at severity 5, on test images. Options are chosen on
training images, under the four extra corruptions, or under the fifteen below severity 5. Options
that are chosen on the reported images show how well the choice fits, not how well the method works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ttapca._checks import Whole, check_option
from ttapca.benchmark import paper
from ttapca.benchmark.rows import CLEAN
from ttapca.benchmark.subject import Condition
from ttapca.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, STANDARD
from ttapca.corruptions.catalogue import find_all
from ttapca.datasets import Images, Split
from ttapca.errors import DataNotFoundError, OptionError, did_you_mean

SEED = 1  # of corrupted images; those that are reported have 0
# Kinds take turns: pruning looks at the first ones, and must not judge by noise alone.
CONDITIONS: tuple[Condition, ...] = (
    ("speckle_noise", 5), ("fog", 4), ("gaussian_blur", 5), ("jpeg_compression", 4),
    ("impulse_noise", 4), ("contrast", 4), ("glass_blur", 4), ("saturate", 5),
    ("gaussian_noise", 4), ("frost", 4), ("defocus_blur", 4), ("pixelate", 4),
    ("spatter", 5), ("snow", 4), ("zoom_blur", 4), ("elastic_transform", 4),
)  # fmt: skip


def check_held_out(conditions: Sequence[Condition]) -> None:
    """Refuse conditions that are reported, other words, and an empty list.

    Example:
        >>> check_held_out([("fog", 5)])
        Traceback (most recent call last):
        ttapca.errors.OptionError: Options are chosen on conditions that are not reported, ...
    """
    if not conditions:
        raise OptionError("A search needs at least one condition, such as fog:4; found none.")
    for name, severity in conditions:
        if name not in CORRUPTIONS or severity not in SEVERITIES:
            raise OptionError(
                f"A condition is a corruption and its severity, from {SEVERITIES[0]} to "
                f"{SEVERITIES[-1]}; found {name}:{severity}.{did_you_mean(name, CORRUPTIONS)}"
            )
    reported = [
        f"{name}:{severity}"
        for name, severity in conditions
        if name in STANDARD and severity == paper.SEVERITY
    ]
    if reported:
        raise OptionError(
            "Options are chosen on conditions that are not reported, and severity "
            f"{paper.SEVERITY} of the fifteen standard corruptions is; found {', '.join(reported)}."
            f" Take a severity below {paper.SEVERITY}, or {', '.join(EXTRA)}."
        )


def read_conditions(words: Sequence[str]) -> tuple[Condition, ...]:
    """Return the conditions of words such as `fog:4` or `extra:5`.

    Raises:
        OptionError: A word is something else, or names what is reported.

    Example:
        >>> read_conditions(["fog:4", "spatter:5"])
        (('fog', 4), ('spatter', 5))
    """
    found: list[Condition] = []
    for word in words:
        name, _, severity = word.partition(":")
        if name == CLEAN:
            raise OptionError(
                "Clean images are measured beside the conditions; found `clean` among these. "
                "Leave it out."
            )
        if not severity.isdecimal():
            raise OptionError(f"A condition is NAME:SEVERITY, such as fog:4; found `{word}`.")
        check_option("severity", int(severity), Whole(SEVERITIES[0], SEVERITIES[-1]))
        found += [(each, int(severity)) for each in find_all([name])]
    conditions = tuple(dict.fromkeys(found))
    check_held_out(conditions)
    return conditions


def check_split(data: str, split: Split, read: Callable[[Split], Images]) -> None:
    """Refuse test images if there are training images, and training images that are the same.

    Args:
        data: The data set, by name or path.
        split: The images that options are to be chosen on.
        read: Returns the images of a split.

    Raises:
        OptionError: The split is not one to choose options on.
        DataNotFoundError: There is no such data set.
    """
    try:
        training = read("train")
    except (DataNotFoundError, OptionError):
        if split == "train":
            raise
        return
    # A file, or a folder without splits, gives the same images for both.
    single = Path(data).exists() and training.fingerprint() == read("test").fingerprint()
    if single and split == "train":
        raise OptionError(
            f"Options are chosen on training images; {data} holds one set of images, which `bench` "
            "takes for testing. Name data with a `train` folder. If there is none, say --split "
            "test, and report on other images."
        )
    if not single and split == "test":
        raise OptionError(
            f"Options are chosen on training images where there are any; `{data}` has "
            f"{len(training):,}, and the test images were asked for. Leave --split out."
        )
