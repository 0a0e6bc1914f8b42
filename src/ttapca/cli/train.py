"""`ttapca train`: teach a network a data set, in a folder that survives a crash."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ttapca.cli.inputs import (
    AsJson,
    DataArgument,
    DataFolder,
    ImageSize,
    read_images,
    tensorboard_writer,
    users_factory,
)
from ttapca.cli.reporting import StepReporter
from ttapca.errors import OptionError

if TYPE_CHECKING:
    from torch import nn

    from ttapca.datasets import Images
    from ttapca.networks import EpochRecord, TrainingOptions
    from ttapca.networks.training import ScheduleName

CROP_FRACTION = 8  # a crop shifts by up to an eighth of the side: 4 pixels of 32
NEVER_MIRRORED = ("digits",)  # a mirrored 2 is no digit


def train(
    data: DataArgument,
    architecture: Annotated[
        str | None,
        typer.Argument(metavar="ARCHITECTURE", help="resnet20, wrn-16-2, resnet26-gn, ..."),
    ] = None,
    *,
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder of the run; one with a run goes on.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="A network of your own, instead."),
    ] = None,
    normalise: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="none, half, cifar10, ... (default: measured)."),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = 25,
    batch_size: Annotated[int, typer.Option(help="Images a step.")] = 128,
    peak: Annotated[float, typer.Option(help="The highest learning rate.")] = 0.2,
    schedule: Annotated[str, typer.Option(help="one-cycle, or cosine.")] = "one-cycle",
    warmup: Annotated[float, typer.Option(help="Epochs of warm-up, for cosine.")] = 1.0,
    momentum: Annotated[float, typer.Option(help="Of Nesterov's kind.")] = 0.9,
    weight_decay: Annotated[float, typer.Option(help="On weights, not on norms.")] = 5e-4,
    label_smoothing: Annotated[float, typer.Option(help="Spread over all classes.")] = 0.0,
    padding: Annotated[
        int | None, typer.Option(help="Largest shift of a random crop (default: side / 8).")
    ] = None,
    flip: Annotated[
        bool | None,
        typer.Option("--flip/--no-flip", help="Mirror half of the images (default: not digits)."),
    ] = None,
    cutout: Annotated[int, typer.Option(help="Side of a blanked square; 0 for none.")] = 0,
    average: Annotated[
        float, typer.Option(help="Decay of the moving average of weights; 0 for none.")
    ] = 0.0,
    rotation_head: Annotated[
        str | None,
        typer.Option(metavar="LAYER", help="Also learn rotations, sharing all up to this layer."),
    ] = None,
    rotation: Annotated[float, typer.Option(help="Weight of the rotation loss.")] = 1.0,
    channels_last: Annotated[bool, typer.Option(help="Memory layout; mostly faster.")] = True,
    seed: Annotated[int, typer.Option(help="Of weights, order and augmentation.")] = 0,
    size: ImageSize = None,
    folder: DataFolder = None,
    tensorboard: Annotated[
        bool | None, typer.Option(help="Write events (default: where it is installed).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a network; the same command goes on after a crash and ends with the same weights."""
    from ttapca import networks

    images, test = (read_images(data, split, folder, size=size) for split in ("train", "test"))
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
    records = _run(network, images, test, options, to, description, tensorboard)
    _print(records, to, as_json)


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
    shape = tuple(images.images.shape[1:])
    input_shape = (shape[2], shape[0], shape[1])
    network: nn.Module
    description: dict[str, Any] = {"classes": len(images.class_names), "input_shape": input_shape}
    if architecture is not None:
        if normalise is None:
            normalisation = networks.normalisation_of(images)
        else:
            normalisation = find_normalisation(normalise)
        network = networks.build(
            architecture,
            classes=len(images.class_names),
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
            network = users_factory(str(factory))
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

    done = len(read_history(to))
    steps = len(images) // options.batch_size
    with ExitStack() as stack:
        bar = StepReporter("train", options.epochs * steps, done=done * steps)
        reporter = stack.enter_context(bar)
        if done:
            reporter.note(f"going on after epoch {done} of {options.epochs}")
        write = stack.enter_context(tensorboard_writer(to, tensorboard))
        try:
            return train(
                network,
                images,
                test,
                options,
                to,
                description=description,
                progress=reporter,
                on_epoch=_announcer(reporter, options.epochs, write),
            )
        except KeyboardInterrupt:
            reporter.note("stopped; the same command goes on after the last whole epoch")
            raise


def _announcer(
    reporter: StepReporter, epochs: int, write: Callable[[EpochRecord], None]
) -> Callable[[EpochRecord], None]:
    def announce(record: EpochRecord) -> None:
        reporter.note(
            f"epoch {record.epoch} of {epochs}: loss {record.loss:.3f}, training accuracy "
            f"{record.train_accuracy:.2f} %, test accuracy {record.test_accuracy:.2f} %, "
            f"{record.seconds:.1f} s"
        )
        write(record)

    return announce


def _print(records: list[EpochRecord], to: Path, as_json: bool) -> None:
    from ttapca.networks.runs import WEIGHTS

    last = records[-1]
    if as_json:
        facts = {"weights": str(to / WEIGHTS), **dataclasses.asdict(last)}
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(f"{to / WEIGHTS}  test accuracy {last.test_accuracy:.2f} %  {last.epoch} epochs")
