"""`ttapca train`: teach a network a data set, in a folder that survives a crash."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer import Argument, Option

from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter
from ttapca.errors import OptionError
from ttapca.support.progress import Steps

if TYPE_CHECKING:
    from torch import nn

    from ttapca.datasets import Images
    from ttapca.networks import EpochRecord, TrainingOptions
    from ttapca.networks.training import ScheduleName

CROP_FRACTION = 8  # a crop shifts by up to an eighth of the side: 4 pixels of 32
NEVER_MIRRORED = ("digits",)  # a mirrored 2 is no digit


def train(
    data: arguments.DataArgument,
    architecture: Annotated[
        str | None, Argument(metavar="ARCHITECTURE", help="resnet20, wrn-16-2, resnet26-gn, ...")
    ] = None,
    *,
    to: Annotated[
        Path, Option(metavar="DIR", help="The folder of the run; one with a run goes on.")
    ],
    model: Annotated[
        str | None, Option(metavar="MODULE:FACTORY", help="A network of your own, instead.")
    ] = None,
    normalise: Annotated[
        str | None, Option(metavar="NAME", help="none, half, cifar10, ... (default: measured).")
    ] = None,
    epochs: Annotated[int, Option(help="Passes over the training images.")] = 25,
    batch_size: Annotated[int, Option(help="How many images make a step.")] = 128,
    peak: Annotated[float, Option(help="The highest learning rate.")] = 0.2,
    schedule: Annotated[str, Option(help="one-cycle, or cosine.")] = "one-cycle",
    warmup: Annotated[float, Option(help="Epochs of warm-up, for cosine.")] = 1.0,
    momentum: Annotated[float, Option(help="Of Nesterov's kind.")] = 0.9,
    weight_decay: Annotated[float, Option(help="On weights, not on norms.")] = 5e-4,
    label_smoothing: Annotated[float, Option(help="Spread over all classes.")] = 0.0,
    padding: Annotated[
        int | None, Option(help="Largest shift of a random crop (default: side / 8).")
    ] = None,
    flip: Annotated[
        bool | None,
        Option("--flip/--no-flip", help="Mirror half of the images (default: not digits)."),
    ] = None,
    cutout: Annotated[int, Option(help="Side of a blanked square; 0 for none.")] = 0,
    average: Annotated[
        float, Option(help="Decay of the moving average of weights; 0 for none.")
    ] = 0.0,
    rotation_head: Annotated[
        str | None,
        Option(metavar="LAYER", help="Also learn rotations, sharing all up to this layer."),
    ] = None,
    rotation: Annotated[float, Option(help="Weight of the rotation loss.")] = 1.0,
    channels_last: Annotated[bool, Option(help="Memory layout; mostly faster.")] = True,
    seed: Annotated[int, Option(help="Of weights, order and augmentation.")] = 0,
    size: arguments.ImageSize = None,
    folder: arguments.DataFolder = None,
    tensorboard: Annotated[
        bool | None, Option(help="Write events (default: where it is installed).")
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Train a network; the same command goes on after a crash and ends with the same weights."""
    from ttapca import networks
    from ttapca.networks.runs import WEIGHTS

    images, test = (
        arguments.read_images(data, split, folder, size=size) for split in ("train", "test")
    )
    options = networks.TrainingOptions(
        epochs=epochs,
        batch_size=batch_size,
        peak=peak,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=cast("ScheduleName", schedule),  # the options refuse another name
        warmup=warmup,
        label_smoothing=label_smoothing,
        padding=images.images.shape[1] // CROP_FRACTION if padding is None else padding,
        flip=data not in NEVER_MIRRORED if flip is None else flip,
        cutout=cutout,
        average=average,
        rotation=rotation,
        channels_last=channels_last,
        seed=seed,
    )
    network, description = _network(architecture, model, images, normalise, rotation_head, seed)
    fingerprint = images.fingerprint()
    if fingerprint == test.fingerprint():  # a path to one set of images serves as both
        typer.echo("train: no test split, so accuracy is that of the training images", err=True)
    description["data"] = {"name": str(data), "training_images": fingerprint}
    last = _run(network, images, test, options, to, description, tensorboard)[-1]
    path = to / WEIGHTS
    if as_json:
        typer.echo(json.dumps({"weights": str(path), **dataclasses.asdict(last)}, indent=2))
    else:
        typer.echo(f"{path}  test accuracy {last.test_accuracy:.2f} %  {last.epoch} epochs")


def _network(
    architecture: str | None,
    factory: str | None,
    images: Images,
    normalise: str | None,
    split: str | None,
    seed: int,
) -> tuple[nn.Module, dict[str, Any]]:
    import torch

    from ttapca import networks
    from ttapca.networks.network import find_normalisation

    if (architecture is None) == (factory is None):
        raise OptionError(
            "Training needs one network: an architecture such as resnet20, or --model "
            f"package.module:factory; found {'neither' if factory is None else 'both'}."
        )
    generator = torch.Generator().manual_seed(seed)
    height, width, channels = images.images.shape[1:]
    classes, input_shape = len(images.class_names), (channels, height, width)
    description: dict[str, Any] = {"classes": classes, "input_shape": input_shape}
    network: nn.Module
    if architecture is not None:
        if normalise is None:
            normalisation = networks.normalisation_of(images)
        else:
            normalisation = find_normalisation(normalise)
        network = networks.build(
            architecture,
            classes=classes,
            normalisation=normalisation,
            input_shape=input_shape,
            generator=generator,
        )
        description |= {
            "architecture": architecture,
            "normalisation": dataclasses.asdict(normalisation),
        }
    else:
        if normalise is not None:
            raise OptionError("--normalise has no meaning for a network of your own.")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = arguments.network_source(factory).load(doubt=False)
        description["factory"] = factory
    if split is not None:
        network = networks.add_rotation_head(network, split, generator, input_shape)
    return network, {**description, "rotation_split": split, "class_names": images.class_names}


def _run(
    network: nn.Module,
    images: Images,
    test: Images,
    options: TrainingOptions,
    to: Path,
    description: dict[str, Any],
    tensorboard: bool | None,
) -> list[EpochRecord]:
    from ttapca.networks.runs import read_history, train

    done, steps = len(read_history(to)), len(images) // options.batch_size
    with ConsoleReporter("train") as reporter, _events(to, tensorboard) as write:
        if done:
            reporter.note(f"going on after epoch {done} of {options.epochs}")

        def announce(record: EpochRecord) -> None:
            reporter.note(
                f"epoch {record.epoch} of {options.epochs}: loss {record.loss:.3f}, training "
                f"accuracy {record.train_accuracy:.2f} %, test accuracy "
                f"{record.test_accuracy:.2f} %, {record.seconds:.1f} s"
            )
            write(record)

        try:
            return train(
                network,
                images,
                test,
                options,
                to,
                description=description,
                progress=Steps(reporter, "train", options.epochs * steps, done * steps),
                on_epoch=announce,
            )
        except KeyboardInterrupt:
            reporter.note("stopped; the same command goes on after the last whole epoch")
            raise


@contextmanager
def _events(folder: Path, wanted: bool | None) -> Iterator[Callable[[EpochRecord], None]]:
    """Where TensorBoard's events of a run go: nowhere, when it is neither wanted nor there."""
    if wanted is None:
        wanted = importlib.util.find_spec("tensorboard") is not None
    if not wanted:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:

        def write(record: EpochRecord) -> None:
            for name, value in dataclasses.asdict(record).items():
                if name != "epoch" and value is not None:
                    writer.add_scalar(name, value, record.epoch)

        yield write
