"""Something small to compare on, the same in every process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

import ttapca
from ttapca.benchmark import ImageSource, Observation, Plan, Results, Row, Setting, Subject
from ttapca.datasets import read_digits, to_tensor
from ttapca.networks import build
from ttapca.networks.architectures import DIGITS_SHAPE

IMAGES = 50
DIGITS_PLAN = Plan(
    model="digits",
    data="digits",
    methods=("ttapca-relu",),
    corruptions=("fog",),
    settings=("online",),
    batch_sizes=(25,),
    components=(16,),
    images=50,
)
# What a second run cannot repeat.
PASSING = {"seconds": 0.0, "peak_memory": 0.0, "finished": ""}


class Recorder:
    """A reporter that remembers how many images of each task were done, and its notes."""

    def __init__(self) -> None:
        self.images: dict[str, int] = {}
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, task: str, done: int, total: int | None, facts: str = "") -> None:
        assert total is None or self.images.get(task, 0) <= done <= total
        self.images[task] = done


def small_subject(images: int = IMAGES) -> Subject:
    """An untrained network whose BatchNorm layers are off, some digits, a filter of rank ten."""
    generator = torch.Generator().manual_seed(0)
    network = build("small-cnn", input_shape=DIGITS_SHAPE, generator=generator).eval()
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) / 5)
    training = to_tensor(read_digits("train").images[:100])
    fitted = ttapca.fit(network, "conv1", training, 10)
    return Subject("small", network, "digits", ImageSource(read_digits()[:images]), fitted)


def lasting(results: Results) -> tuple[list[Row], list[Observation]]:
    """All that a second run must repeat, in order."""
    rows = [replace(row, outcome=replace(row.outcome, **PASSING)) for row in results.rows()]
    return rows, results.observations()


def by_cell(results: Results) -> dict[object, object]:
    """The same, whatever the order."""
    rows, observations = lasting(results)
    return {row.cell: row for row in rows} | {("seen", one.cell): one for one in observations}


def plain_streams(
    setting: Setting, labels: Sequence[int], corruptions: int, seed: int, change_every: int = 500
) -> list[list[tuple[int, int]]]:
    """The orders of arrival, written out: streams of (corruption, image)."""
    random, images = np.random.default_rng(seed), len(labels)
    pairs = [(number, image) for number in range(corruptions) for image in range(images)]
    if setting == "mixed":
        return [[pairs[place] for place in random.permutation(len(pairs))]]
    order = random.permutation(images).tolist()
    if setting in ("correlated", "episodic-sorted", "continual-correlated"):
        rank = random.permutation(max(labels) + 1)
        order = sorted(order, key=lambda image: rank[labels[image]])  # sorting is stable
    if setting.startswith("dirichlet"):
        concentration = float(setting.removeprefix("dirichlet-"))
        parts = plain_stretches([labels[image] for image in order], concentration, random)
        order = [order[place] for part in parts for place in part]
    if setting in ("drifting", "gradual", "recurring"):
        return [plain_stream(setting, order, corruptions, random)]
    if setting != "changing":
        return [[(number, image) for image in order] for number in range(corruptions)]
    stream, shown = [], 0
    while shown < images:
        for number in range(corruptions):
            stream += [(number, image) for image in order[shown : shown + change_every]]
        shown += change_every
    return [stream]


def plain_stream(
    setting: Setting, order: Sequence[int], corruptions: int, random: np.random.Generator
) -> list[tuple[int, int]]:
    """One stream whose corruptions take turns in one of the newer ways."""
    images = len(order)
    if setting == "drifting":
        pairs = [(number, image) for number in range(corruptions) for image in range(images)]
        arrival = {pair: pair[0] + random.triangular(-1, 0, 1) for pair in pairs}
        return sorted(pairs, key=lambda pair: arrival[pair])
    if setting == "gradual":
        half = (images + 1) // 2
        path = [(severity, order[:half]) for severity in range(5)]
        path += [(severity, order[half:]) for severity in (4, 3, 2, 1, 0)]
        starts = range(0, corruptions, 5)
        return [(at + n, image) for at in starts for n, part in path for image in part]
    sizes = [images // 20 + (number < images % 20) for number in range(20)]
    stream = []
    for number, size in enumerate(sizes):
        part = order[sum(sizes[:number]) :][:size]
        stream += [(corruption, image) for corruption in range(corruptions) for image in part]
    return stream


def plain_stretches(
    labels: Sequence[int], concentration: float, random: np.random.Generator
) -> list[list[int]]:
    """Deal out each class to the stretches, then go through each stretch class by class."""
    classes = sorted(set(labels))
    count = min(len(classes), 100)
    shares = random.dirichlet([concentration] * count, len(classes)).tolist()
    turns = random.permuted([range(len(classes))] * count, axis=1).tolist()
    held: list[dict[int, list[int]]] = [{each: [] for each in classes} for _ in range(count)]
    for each, share in zip(classes, shares, strict=True):
        waiting = [place for place, label in enumerate(labels) if label == each]
        total, given, dealt = len(waiting), 0.0, 0
        for stretch in range(count):
            given += share[stretch]
            end = total if stretch == count - 1 else math.floor(given * total)
            held[stretch][each] = waiting[dealt:end]
            dealt = end
    found = []
    for stretch, turn in zip(held, turns, strict=True):
        ordered = sorted(zip(turn, classes, strict=True))
        found.append([place for _, each in ordered for place in stretch[each]])
    return found
