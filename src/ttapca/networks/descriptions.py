"""What files of networks and runs say about themselves, as schemas.

They are checked before anything is built. A description may hold
more than is listed here: callers of `train` add what they like.
"""

from __future__ import annotations

import math
from typing import get_args

from ttapca._checks import (
    Flag,
    ListOf,
    Maybe,
    Number,
    OneOf,
    Plain,
    Record,
    Rule,
    Such,
    Text,
    Whole,
)
from ttapca.networks.schedules import ScheduleName

LONGEST_SIDE = 16_384
LARGEST_IMAGE = 2**24  # numbers: 64 MB in float32, 3 x 2,364 x 2,364
MOST_CHANNELS = 1024
MOST_CLASSES = 100_000

INPUT_SHAPE = Such(
    ListOf(Whole(1, LONGEST_SIDE), 3, 3),
    lambda shape: shape[0] <= MOST_CHANNELS and math.prod(shape) <= LARGEST_IMAGE,
    f"channels (at most {MOST_CHANNELS:,}), height and width of at most {LARGEST_IMAGE:,} numbers",
)

_CHANNELS = (1, MOST_CHANNELS)
NORMALISATION = Record(
    {
        "mean": ListOf(Number(-1e6, 1e6), *_CHANNELS),
        "std": ListOf(Number(1e-9, 1e6), *_CHANNELS),
    }
)

OPTIONS: dict[str, Rule] = {
    "epochs": Whole(1, 10**6),
    "batch_size": Whole(1, 10**6),
    "peak": Number(0, 1e6),
    "momentum": Number(0, 1),
    "weight_decay": Number(0, 1e6),
    "schedule": OneOf(get_args(ScheduleName)),
    "warmup": Number(0, 1e6),
    "label_smoothing": Number(0, 1),
    "padding": Whole(0, LONGEST_SIDE),
    "flip": Flag(),
    "cutout": Whole(0, LONGEST_SIDE),
    "average": Number(0, 1),
    "rotation": Number(0, 1e6),
    "channels_last": Flag(),
    "seed": Whole(-(2**63), 2**64),
}

DESCRIPTION = Record(
    optional={
        "architecture": Text(100),
        "factory": Maybe(Text()),
        "classes": Whole(1, MOST_CLASSES),
        "input_shape": INPUT_SHAPE,
        "normalisation": NORMALISATION,
        "rotation_split": Maybe(Text()),
        "class_names": ListOf(Text(), 0, MOST_CLASSES),
        "data": Record({"name": Text()}, {"training_images": Text(64)}, others=Plain()),
        "training": Record(
            optional={**OPTIONS, "finished_epochs": Whole(1, 10**6)}, others=Plain()
        ),
        "test_accuracy": Number(0, 100),
    },
    others=Plain(),
)

# What the card of a packed network is made of.
PACKED = Record(
    {
        "architecture": Text(100),
        "input_shape": INPUT_SHAPE,
        "data": Record({"name": Text(), "training_images": Text(64)}, others=Plain()),
        "training": Record({"epochs": Whole(1), "seed": OPTIONS["seed"]}, others=Plain()),
    },
    others=Plain(),
)

_PERCENT = Number(0, 100)
FACTS = Record(
    {
        "options": Record(others=Plain()),
        "description": Record(others=Plain()),
        "history": Such(
            ListOf(
                Record(
                    {
                        "epoch": Whole(1, 10**6),
                        "learning_rate": Number(0, 1e6),
                        "loss": Number(),
                        "train_accuracy": _PERCENT,
                        "rotation_accuracy": Maybe(_PERCENT),
                        "test_accuracy": _PERCENT,
                        "seconds": Number(0),
                    }
                ),
                1,
                10**6,
            ),
            lambda records: (
                [record["epoch"] for record in records] == list(range(1, len(records) + 1))
            ),
            "the epochs from 1 on, one after the other",
        ),
    }
)
