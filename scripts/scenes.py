"""Measure methods on the road scenes of CamVid, in mean IoU with intervals; goes on if cut off.

    python scripts/scenes.py train --data DIR --to FOLDER
    python scripts/scenes.py run --data DIR --to FOLDER [--what tune]
    python scripts/scenes.py table --to FOLDER

Frames are 120 x 90. The network is trained on the 305 frames of two drives by day; the drive at
dusk, 0001TP, is held out. Every line of a file of results has the confusion matrix of each frame,
of one method in one condition.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch user knows
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ttapca
from ttapca.corruptions import EXTRA, STANDARD, corrupt
from ttapca.networks.evaluation import class_iou, confusion_matrix

WEIGHTS = Path(__file__).parent / "weights" / "scenes.safetensors"
CLASSES, UNLABELLED, SIZE = 11, 11, (120, 90)
DAY, DUSK = ("0006R0", "0016E5"), "0001TP"
MEAN, STD = (0.41, 0.42, 0.43), (0.30, 0.31, 0.31)  # of the frames by day, roughly
EPOCHS, BATCH, PEAK, SEED = 70, 8, 4e-3, 0


class Normalise(nn.Module):
    """Brings pixels from 0 to 1 around 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None])
        self.register_buffer("std", torch.tensor(STD)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        """Images of the same shape."""
        found: Tensor = (images - self.mean) / self.std
        return found


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """A convolution of 3 x 3 with BatchNorm and ReLU."""
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class SceneNet(nn.Module):
    """A U-Net of four scales, for a class of every pixel."""

    def __init__(self, width: int = 16, classes: int = CLASSES) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.normalise = Normalise()
        self.stem = block(3, width)
        self.down = nn.ModuleList(
            nn.Sequential(block(few, many, 2), block(many, many))
            for few, many in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(block(few + many, few) for few, many in itertools.pairwise(widths))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (batch, classes, height, width), from images in [0, 1]."""
        scales = [self.stem(self.normalise(images))]
        for down in self.down:
            scales.append(down(scales[-1]))
        found = scales.pop()
        for up, fine in zip(reversed(self.up), reversed(scales), strict=True):
            found = F.interpolate(found, size=fine.shape[-2:], mode="bilinear")
            found = up(torch.cat([found, fine], 1))
        logits: Tensor = self.head(found)
        return logits


def read_frames(data: Path, part: str, *drives: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Frames, (n, 90, 120, 3), and classes, (n, 180, 240), of some drives in order."""
    files = sorted(file for file in (data / part).iterdir() if file.name.startswith(drives))
    frames = [
        np.asarray(Image.open(each).convert("RGB").resize(SIZE, Image.Resampling.BOX))
        for each in files
    ]
    labels = [np.asarray(Image.open(data / f"{part}annot" / f"{each.stem}.png")) for each in files]
    return np.stack(frames), np.stack(labels)


def to_images(frames: NDArray[np.uint8]) -> Tensor:
    """Images, (n, 3, height, width), from 0 to 1."""
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255


def varied(images: Tensor, labels: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch mirrored, enlarged and cut at random; colours stay."""

    def drawn(least: float, most: float) -> float:
        return least + (most - least) * float(torch.rand((), generator=chance))

    if drawn(0, 1) < 0.5:
        images, labels = images.flip(-1), labels.flip(-1)
    height, width = images.shape[-2:]
    scale = drawn(1.0, 1.6)
    size = round(height * scale), round(width * scale)
    top, left = round(drawn(0, size[0] - height)), round(drawn(0, size[1] - width))
    here = slice(top, top + height), slice(left, left + width)
    images = F.interpolate(images, size=size, mode="bilinear")[..., here[0], here[1]]
    labels = F.interpolate(labels[:, None].float(), size=size)[:, 0, here[0], here[1]].long()
    return images.contiguous(memory_format=torch.channels_last), labels


def train(asked: argparse.Namespace) -> None:
    """Train the network, from the last epoch that was finished, and write its weights."""
    frames, labels = read_frames(asked.data, "train", *DAY)
    images, classes = to_images(frames), torch.from_numpy(labels).long()
    torch.manual_seed(SEED)
    network = SceneNet().to(memory_format=torch.channels_last)
    shares = torch.bincount(classes.flatten(), minlength=CLASSES + 1)[:CLASSES].float()
    weight = (shares.sum() / shares / CLASSES).sqrt().clamp(max=3)  # rare classes count more
    steps = EPOCHS * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), PEAK, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=steps)
    parts = {"network": network, "optimizer": optimizer, "schedule": schedule}
    asked.to.mkdir(parents=True, exist_ok=True)
    file, first = asked.to / "training.pt", 0
    if file.exists():
        known = torch.load(file, weights_only=True)
        first = known.pop("epoch") + 1
        for name, state in known.items():
            parts[name].load_state_dict(state)
    start = time.perf_counter()
    for epoch in range(first, EPOCHS):
        chance, total = torch.Generator().manual_seed(SEED + epoch), 0.0
        network.train()
        for rows in torch.randperm(len(images), generator=chance).split(BATCH):
            some, targets = varied(images[rows], classes[rows], chance)
            optimizer.zero_grad()
            loss = F.cross_entropy(network(some), targets, weight, ignore_index=UNLABELLED)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += loss.item() * len(rows)
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "epoch": epoch}, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
        seconds = time.perf_counter() - start
        print(f"epoch {epoch}: loss {total / len(images):.3f}, {seconds:.0f} s", flush=True)
    WEIGHTS.parent.mkdir(exist_ok=True)
    tensors = network.eval().state_dict()
    save_file({name: small(each) for name, each in tensors.items()}, WEIGHTS)


def small(tensor: Tensor) -> Tensor:
    """The tensor as it is written."""
    return tensor.half().contiguous() if tensor.is_floating_point() else tensor


def trained() -> SceneNet:
    """The network with the weights that come with this script, in evaluation mode."""
    network = SceneNet()
    network.load_state_dict(
        {
            name: each.float() if each.is_floating_point() else each
            for name, each in load_file(WEIGHTS).items()
        }
    )
    return network.eval().requires_grad_(False)


# What is measured: name of a line of the table, method of the library, options, and what the filter
# is fitted at. Frames count in order of the drive, batch by batch, and streams remember.
FOR_PLACES = "wiener, Mixture(1, 1, 4)"
Variant = tuple[str, dict[str, Any], dict[str, Any]]
VARIANTS: dict[str, Variant] = {
    "source": ("source", {}, {}),
    "bn": ("bn", {}, {}),
    "tent": ("tent", {}, {}),
    "pea": ("pea", {"augment": "none"}, {}),
    "unmix-tns": ("unmix-tns", {}, {}),
    "wiener": ("wiener", {}, {}),
    # Parts left out or changed.
    "wiener, order=shuffled": ("wiener", {"order": "shuffled"}, {}),
    "wiener, statistics=source": ("wiener", {"statistics": "source"}, {}),
    "wiener, order=auto": ("wiener", {"order": "auto"}, {}),
    "wiener, order=video": ("wiener", {"order": "video"}, {}),
    "wiener, prior=4": ("wiener", {"statistics": ttapca.Mixture(prior=4)}, {}),
    FOR_PLACES: (
        "wiener",
        {"statistics": ttapca.Mixture(first=1, last=1, prior=4)},
        {},
    ),
    "wiener, Mixture(0.5, 1, 4)": (
        "wiener",
        {"statistics": ttapca.Mixture(first=0.5, last=1, prior=4)},
        {},
    ),
    "wiener, states=1": ("wiener", {"states": 1}, {}),
    "wiener, outliers=False": ("wiener", {"outliers": False}, {}),
    "wiener, memory=50": ("wiener", {"memory": 50}, {}),
    "wiener, memory=1000": ("wiener", {"memory": 1000}, {}),
    "wiener, restore=0": ("wiener", {"restore": 0}, {}),
    "wiener, restore=1": ("wiener", {"restore": 1}, {}),
    "wiener, center=0": ("wiener", {"center": 0}, {}),
    "wiener, threshold=0": ("wiener", {"threshold": 0}, {}),
    "wiener, views=2": ("wiener", {"views": 2}, {}),
    "wiener, PCA": ("wiener", {}, {"route": "pca"}),
    "wiener, images": ("wiener", {}, {"layer": "normalise"}),
    "wiener, groups": ("wiener", {}, {"groups": True}),
}
STREAMS = {"day": ("test", "Seq05VD"), "dusk": ("test", DUSK)}
# Only these were looked at while anything was chosen.
HELD_STREAMS = {"held day": ("val", "0016E5"), "held dusk": ("train", DUSK)}
TEN = [
    (name, severity)
    for severity in (3, 5)
    for name in ("gaussian_noise", "defocus_blur", "fog", "contrast", "jpeg_compression")
]
FIFTEEN = [(name, 5) for name in STANDARD]
HELD = [(name, severity) for severity in (3, 5) for name in EXTRA]
CLEAN = ("clean", 0)
# Methods and batch sizes with the ten conditions, and methods with all fifteen.
REPORTED = (
    *itertools.product(("source", "bn", "wiener", FOR_PLACES, "unmix-tns", "tent"), [8]),
    *itertools.product(("bn", "wiener", FOR_PLACES), [1]),
    ("pea", 8),
)
FULL = ("source", "bn", "wiener", FOR_PLACES)
SLOW = ("tent", "unmix-tns", "pea")
DRAWS, RUN = 1000, 10  # of the bootstrap, and frames in a row that are drawn together

Cell = tuple[str, int, str, str, int]  # variant, batch size, stream, corruption, severity


def cells(what: str) -> list[Cell]:
    """Everything that is measured, quick methods first."""
    if what == "tune":
        chosen = [
            *((stream, *CLEAN) for stream in HELD_STREAMS),
            *(("held day", *condition) for condition in HELD),
        ]
        return [(name, 8, *each) for name in VARIANTS if name not in SLOW for each in chosen]
    ten = [*((stream, *CLEAN) for stream in STREAMS), *(("day", *each) for each in TEN)]
    fifteen = [("day", *each) for each in FIFTEEN if each not in TEN]
    found = [(name, size, *each) for name, size in REPORTED for each in ten]
    return found + [(name, 8, *each) for name in FULL for each in fifteen]


def fitted_filter(
    data: Path, to: Path, layer: str = "stem.0", groups: bool = False, route: str = "auto"
) -> ttapca.FittedFilter:
    """A filter of the frames by day, in order; kept on disk."""
    folder = to / f"filter-{layer}-{route}-{groups}"
    if not folder.exists():
        frames, _ = read_frames(data, "train", *DAY)
        drives = [name for name, count in zip(DAY, (101, 204), strict=True) for _ in range(count)]
        images = to_images(frames)
        ttapca.fit(trained(), layer, images, route=route, groups=drives if groups else None).save(
            folder
        )
    return ttapca.load(folder)


def run(asked: argparse.Namespace) -> None:
    """Measure what the file of results does not have."""
    asked.to.mkdir(parents=True, exist_ok=True)
    file = asked.to / f"{asked.what}.jsonl"
    known = {tuple(row["cell"]) for row in read(file)}
    wanted = [cell for cell in cells(asked.what) if cell not in known]
    if asked.only:
        wanted = [cell for cell in wanted if cell[0] in asked.only]
    for (name, size), group in itertools.groupby(wanted, key=lambda cell: cell[:2]):
        method, options, fitting = VARIANTS[name]
        if method == "wiener":
            options = {**options, "filter": fitted_filter(asked.data, asked.to, **fitting)}
        if method == "pea":
            options = {**options, "source": to_images(read_frames(asked.data, "train", *DAY)[0])}
        with ttapca.adapt(trained(), method, forgetting="online", **options) as adapted:
            for cell in group:
                frames, labels = spoilt(asked, *cell[2:])
                adapted.reset()
                start = time.perf_counter()
                counts = measured(adapted, to_images(frames), torch.from_numpy(labels), size)
                seconds = round(time.perf_counter() - start, 1)
                found = float(class_iou(counts.sum(0)).nanmean())
                row = {"cell": cell, "seconds": seconds, "counts": counts.flatten(1).tolist()}
                with file.open("a") as to:
                    to.write(json.dumps(row) + "\n")
                print(f"{cell}: mean IoU {found:.1f}, {seconds:.0f} s", flush=True)


def measured(adapted: ttapca.Adapter, images: Tensor, labels: Tensor, size: int) -> Tensor:
    """The confusion matrix of each frame, of a stream that begins here."""
    found = []
    for some, classes in zip(images.split(size), labels.split(size), strict=True):
        predicted = adapted(some).argmax(1)
        found += [
            confusion_matrix(one, two, CLASSES, UNLABELLED)
            for one, two in zip(predicted, classes, strict=True)
        ]
    return torch.stack(found)


def spoilt(
    asked: argparse.Namespace, stream: str, corruption: str, severity: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The frames of a stream, corrupted as small images are, and their classes."""
    frames, labels = read_frames(asked.data, *(STREAMS | HELD_STREAMS)[stream])
    if severity:
        frames = corrupt(frames, corruption, severity, table="cifar-c", textures=asked.frost)
    return frames, np.ascontiguousarray(labels[:, ::2, ::2])


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of results, if there is one."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def draws(frames: int) -> NDArray[np.int64]:
    """Frames of the bootstrap, (draws, frames): runs of them, as neighbours resemble each other."""
    chance = np.random.default_rng(SEED)
    starts = chance.integers(0, frames, (DRAWS, -(-frames // RUN)))
    drawn: NDArray[np.int64] = (starts[..., None] + np.arange(RUN)).reshape(DRAWS, -1)[:, :frames]
    return drawn % frames


def ious(rows: list[dict[str, Any]]) -> NDArray[np.float64]:
    """The mean IoU over some conditions, first of all frames and then of each draw."""
    each = []
    for row in rows:
        counts = torch.tensor(row["counts"]).reshape(-1, CLASSES, CLASSES)
        # How often each draw has each frame, (draws, frames).
        drawn = draws(len(counts))
        often = np.stack([np.bincount(one, minlength=len(counts)) for one in drawn])
        weights = torch.from_numpy(np.concatenate([np.ones((1, len(counts))), often]))
        sums = (weights @ counts.flatten(1).double()).reshape(-1, CLASSES, CLASSES)
        each.append([float(class_iou(one).nanmean()) for one in sums])
    return np.asarray(each).mean(0)


def tables(folder: Path, what: str) -> str:
    """A Markdown table of all results, with intervals from a bootstrap over frames."""
    rows = {tuple(row["cell"]): row for row in read(folder / f"{what}.jsonl")}
    columns: dict[str, list[tuple[str, str, int]]] = {}
    if what == "tune":
        columns["eight conditions"] = [("held day", *each) for each in HELD]
        columns |= {name: [("held day", name, each) for each in (3, 5)] for name in EXTRA}
        columns |= {stream: [(stream, *CLEAN)] for stream in HELD_STREAMS}
    else:
        columns["ten conditions"] = [("day", *each) for each in TEN]
        columns |= {name: [("day", name, each) for each in (3, 5)] for name, _ in TEN[:5]}
        columns["fifteen at 5"] = [("day", *each) for each in FIFTEEN]
        columns |= {stream: [(stream, *CLEAN)] for stream in STREAMS}
    lines = ["| method | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for name, size in dict.fromkeys(cell[:2] for cell in rows):
        words = []
        for conditions in columns.values():
            found = [rows.get((name, size, *each)) for each in conditions]
            if None in found:
                words.append("-")
                continue
            mean, *drawn = ious([row for row in found if row is not None])
            low, high = np.quantile(drawn, [0.025, 0.975])
            words.append(f"{mean:.1f} ({low:.1f} to {high:.1f})")
        lines.append(f"| {name}, {size} | " + " | ".join(words) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["train", "run", "table"])
    parser.add_argument("--data", type=Path, help="the folder of CamVid: train, trainannot, ...")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--frost", type=Path, help="the photographs of frost")
    parser.add_argument("--what", choices=["test", "tune"], default="test")
    parser.add_argument("--only", nargs="*", help="names of variants")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.task == "table":
        print(tables(asked.to, asked.what))
    else:
        {"train": train, "run": run}[asked.task](asked)


if __name__ == "__main__":
    main()
