"""Draw the pictures of docs/method/pictures.md, from CIFAR-10 and the network in the package.

ttapca data get cifar10 frost
python scripts/draw_method.py        # writes docs/pictures/method-*.svg; a minute
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import ttapca
from ttapca import networks
from ttapca.cli.arguments import cache_root
from ttapca.corruptions import corrupt
from ttapca.datasets import Images, TensorBatches, load, to_tensor
from ttapca.serving import StreamPool
from ttapca.spectral.calibration import SourceSpectrum, band_edges, band_means
from ttapca.spectral.constants import CONSTANTS

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
INK, QUIET = "#1c1d21", "#70747c"
SOURCE, NOISE, BLUR = "#0b5fa5", "#b04a00", "#2f7d4f"
LAYER = "conv1"
COLUMNS = 5
STYLE = {
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "#fdfdfc",
    "axes.facecolor": "#fdfdfc",
    "font.size": 11,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "ttapca",  # the same bytes each time
    "xtick.color": QUIET,
    "ytick.color": QUIET,
}


def write(figure: Figure, name: str) -> None:
    """Write a figure, without the date."""
    path = PICTURES / f"method-{name}.svg"
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    print(path)


def damaged(images: Images, corruption: str, severity: int) -> Tensor:
    """Return corrupted images as a network takes them."""
    textures = cache_root() / "frost"
    return to_tensor(corrupt(images.images, corruption, severity, textures=textures))


def show(axes: Axes, picture: Tensor, text: str = "", colour: str = INK) -> None:
    """Show a small picture, from 0 to 1, (3, height, width), with a line below it."""
    axes.imshow(picture.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_xlabel(text, color=colour)
    for spine in axes.spines.values():
        spine.set_visible(False)


def patterns(fitted: ttapca.FittedFilter) -> None:
    """Some components, from the strongest to the weakest."""
    numbers = (1, 2, 5, 20, 100, 500, 1500, 3000)
    figure = Figure(figsize=(9, 1.6))
    for place, number in enumerate(numbers):
        one = torch.zeros(1, fitted.n_components_, dtype=fitted.center_.dtype)
        one[0, number - 1] = 1
        nothing = torch.zeros_like(fitted.center_)[None]
        pattern = fitted.basis.add_rebuilt(nothing, one).reshape(fitted.shape)
        pattern = 0.5 + 0.5 * pattern / pattern.abs().max()
        show(figure.add_subplot(1, len(numbers), place + 1), pattern, f"{number:,}")
    write(figure, "patterns")


def strengths(fitted: ttapca.FittedFilter, seen: Tensor) -> Tensor:
    """Return the variance of each component in images, over that in the source."""
    centred = seen.flatten(1).to(fitted.center_) - fitted.center_
    found: Tensor = fitted.basis.project(centred).square().mean(0)
    return found / fitted.explained_variance_


def spectrum(fitted: ttapca.FittedFilter, seen: dict[str, Tensor]) -> None:
    """How strongly components occur, with noise and with blur."""
    figure = Figure(figsize=(7.5, 3.4))
    axes = figure.add_subplot()
    edges = band_edges(fitted.n_components_)
    place = torch.arange(len(edges) - 1)
    source = band_means(fitted.explained_variance_, edges)
    lines = {
        "training images": (source, SOURCE),
        "with noise": (source * band_means(strengths(fitted, seen["noise"]), edges), NOISE),
        "with blur": (source * band_means(strengths(fitted, seen["blur"]), edges), BLUR),
    }
    for name, (values, colour) in lines.items():
        axes.semilogy(place, values, color=colour, marker="o", markersize=4, linewidth=2)
        axes.annotate(
            name, (float(place[-1]), float(values[-1])), (8, -4), color=colour,
            textcoords="offset points",
        )  # fmt: skip
    axes.set(xticks=[0, len(place) - 1], ylabel="strength (variance)")
    axes.set_xticklabels(["large shapes", "fine grain"], color=INK)
    write(figure, "spectrum")


def repair(pool: StreamPool, test: Images, model: nn.Module) -> None:
    """Images as they were, with noise, and filtered, and what the network reads in each."""
    figure = Figure(figsize=(7.5, 5.6))
    clean, noisy = to_tensor(test.images), damaged(test, "gaussian_noise", 4)
    for start in range(100, 400, 50):  # the stream gets to know the condition
        pool.predict("camera", noisy[start : start + 50])
    with torch.no_grad():
        before = model(noisy[:100]).argmax(1)
    shown = 0
    for number in range(100):
        answer = int(pool.predict("camera", noisy[number, None]).logits.argmax(1))
        if int(before[number]) == test.labels[number] or answer != test.labels[number]:
            continue
        pictures = pool.pictures("camera")
        assert pictures is not None
        made = torch.from_numpy(pictures[1]).permute(2, 0, 1) / 255
        named = [test.class_names[int(each)] for each in (test.labels[number], before[number])]
        row = [
            (clean[number], named[0], INK),
            (noisy[number], f"read as {named[1]}", NOISE),
            (made, f"read as {named[0]}", BLUR),
        ]
        for place, (picture, text, colour) in enumerate(row):
            axes = figure.add_subplot(3, COLUMNS, COLUMNS * place + shown + 1)
            show(axes, picture, text, colour)
            if shown == 0:
                axes.set_ylabel(("as it was", "with noise", "after the filter")[place])
        shown += 1
        if shown == COLUMNS:
            break
    figure.tight_layout()
    write(figure, "repair")


def usual(fitted: ttapca.FittedFilter, seen: dict[str, Tensor]) -> None:
    """What is usual for one image and for two hundred, and a batch that sticks out."""
    assert fitted.energies_ is not None
    normal = SourceSpectrum(fitted.energies_)
    figure = Figure(figsize=(7.5, 3.2))
    edges = band_edges(fitted.n_components_)
    noisy = band_means(strengths(fitted, seen["noise"]), edges).log2()
    for number, count in enumerate((1, 200)):
        axes = figure.add_subplot(1, 2, number + 1)
        range_ = normal.batches_of(count).normal_range(CONSTANTS.threshold)
        low, high = range_.low / math.log(2), range_.high / math.log(2)
        place = torch.arange(len(low))
        axes.fill_between(place, low, high, color=SOURCE, alpha=0.25, linewidth=0)
        axes.plot(place, noisy[: len(low)], color=NOISE, marker="o", markersize=4, linewidth=2)
        axes.axhline(0, color=QUIET, linewidth=0.8)
        axes.set(xticks=[0, len(place) - 1], ylim=(-3, 7), title=f"{count} image{'s'[: count > 1]}")
        axes.set_xticklabels(["large shapes", "fine grain"], color=INK)
        if number == 0:
            axes.set_ylabel("strength, in doublings")
            axes.text(0.1, -2.7, "usual", color=SOURCE)
    figure.tight_layout()
    write(figure, "usual")


def stream(pool: StreamPool, test: Images) -> None:
    """The shift of a stream of single images while frost comes and goes."""
    clean, frosty = to_tensor(test.images), damaged(test, "frost", 4)
    images = torch.cat([clean[:200], frosty[200:400], clean[400:600]])
    shifts = [pool.predict("camera", image[None]).shift for image in images]
    figure = Figure(figsize=(7.5, 2.6))
    axes = figure.add_subplot()
    axes.axvspan(200, 400, color=NOISE, alpha=0.12, linewidth=0)
    axes.text(300, 1.04, "frost", color=NOISE, ha="center")
    axes.plot(shifts, color=INK, linewidth=1.6)
    axes.set(xlabel="image", ylabel="shift", ylim=(-0.03, 1.15), xlim=(0, len(images)))
    write(figure, "stream")


def main() -> None:
    """Draw all of them."""
    mpl.rcParams.update(STYLE)
    model = networks.load("cifar10-resnet20").eval()
    train, test = (load("cifar10", split, root=cache_root()) for split in ("train", "test"))
    test = test[:600]
    fitted = ttapca.fit(model, LAYER, TensorBatches(train[:10_000], 200), route="pca")

    def at_filter(images: Tensor) -> Tensor:
        """Return what the filter sees of images: the input of its layer."""
        kept: list[Tensor] = []
        hook = model.get_submodule(LAYER).register_forward_pre_hook(
            lambda _, inputs: kept.append(inputs[0].detach())
        )
        with torch.no_grad():
            model(images)
        hook.remove()
        return kept[0]

    seen = {
        "noise": at_filter(damaged(test, "gaussian_noise", 5)),
        "blur": at_filter(damaged(test, "gaussian_blur", 5)),
    }
    patterns(fitted)
    spectrum(fitted, seen)
    usual(fitted, seen)
    with StreamPool(model, fitted) as pool:
        repair(pool, test, model)
    with StreamPool(model, fitted) as pool:
        stream(pool, test)


if __name__ == "__main__":
    main()
