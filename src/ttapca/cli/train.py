"""`ttapca train`: train a network on a data set; a crash loses one epoch at most."""

from __future__ import annotations

import dataclasses
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ttapca import networks
from ttapca.cli import arguments
from ttapca.cli.console import ConsoleReporter, print_json
from ttapca.datasets import Images
from ttapca.errors import OptionError
from ttapca.support.progress import Steps, counted

if TYPE_CHECKING:
    from torch import nn

CROP_FRACTION = 8  # a crop shifts by up to an eighth of the side: 4 pixels of 32
NEVER_MIRRORED = ("digits",)  # a mirrored 2 is no digit


@dataclass(kw_only=True)
class TrainingWishes:
    """Options of `TrainingOptions` by the same names; None if its default or the images decide."""

    epochs: int = 25
    batch_size: int = 128
    peak: float = 0.2
    optimizer: str = "sgd"
    schedule: str = "one-cycle"
    warmup: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    padding: int | None = None
    flip: Annotated[bool | None, Option("--flip/--no-flip")] = None
    cutout: int = 0
    average: float = 0.0
    rotation: float = 1.0
    channels_last: bool = True
    bfloat16: bool = False
    seed: int = 0

    def options(self, data: str, images: Images) -> networks.TrainingOptions:
        """Return the options of a training on these images."""
        by_images = {
            "padding": images.images.shape[1] // CROP_FRACTION,
            "flip": data not in NEVER_MIRRORED,
        }
        given = {name: value for name, value in vars(self).items() if value is not None}
        return networks.TrainingOptions(**(by_images | given))

    def check(self, rotation_head: str | None) -> None:
        """Refuse options without effect; their defaults may be given, as cards of networks do."""
        without = "would have no effect without"
        rising = self.warmup != 1 and self.schedule == "one-cycle"
        arguments.refuse({"--warmup": rising}, f"{without} --schedule cosine. Leave it out.")
        turned = self.rotation != 1 and rotation_head is None
        arguments.refuse({"--rotation": turned}, f"{without} --rotation-head LAYER. Leave it out.")


@dataclass(kw_only=True)
class NetworkWishes:
    """Options for the network, and for the weights that it begins with."""

    architecture: Annotated[str | None, Argument(metavar="ARCHITECTURE")] = None
    model: Annotated[str | None, Option(metavar="MODULE:FACTORY")] = None
    normalise: Annotated[str | None, Option(metavar="NAME")] = None
    start: Annotated[str | None, Option(metavar="FILE")] = None
    rotation_head: Annotated[str | None, Option(metavar="LAYER")] = None

    def network(self, images: Images, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        """Return the network before training, and the description that is kept with it."""
        import torch

        from ttapca.networks.checkpoints import find_weights

        if (self.architecture is None) == (self.model is None):
            raise OptionError(
                "Training needs one network: an architecture such as resnet20, or --model "
                f"package.module:factory; found {'neither' if self.model is None else 'both'}."
            )
        generator = torch.Generator().manual_seed(seed)
        height, width, channels = images.images.shape[1:]
        input_shape, names = (channels, height, width), images.class_names
        shape: dict[str, Any] = {"classes": len(names), "input_shape": input_shape}
        description = shape | {"class_names": names}
        network: nn.Module
        if self.architecture is not None:
            scale = self._normalisation(images)
            network = networks.build(
                self.architecture, normalisation=scale, generator=generator, **shape
            )
            description["architecture"] = self.architecture
            description["normalisation"] = dataclasses.asdict(scale)
        else:
            network = self._made_by_the_user(seed)
            description["factory"] = self.model
        if self.start is not None:
            networks.load_weights(network, find_weights(self.start))
            description["start"] = self.start
        if self.rotation_head is not None:
            network = networks.add_rotation_head(
                network, self.rotation_head, generator, input_shape
            )
        return network, description | {"rotation_split": self.rotation_head}

    def _normalisation(self, images: Images) -> networks.Normalisation:
        from ttapca.networks.checkpoints import describe_weights, stated_normalisation
        from ttapca.networks.network import find_normalisation

        if self.normalise is not None:
            return find_normalisation(self.normalise)
        # Weights are right for one normalisation only.
        told = None if self.start is None else stated_normalisation(describe_weights(self.start))
        return told or networks.normalisation_of(images)

    def _made_by_the_user(self, seed: int) -> nn.Module:
        import torch

        arguments.refuse(
            {"--normalise": self.normalise is not None},
            "is for the architectures of ttapca; a network of your own is trained on images in "
            "[0, 1], and normalises them itself if it wants to. Leave it out.",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return arguments.ModelOptions(model=self.model).source().load(doubt=False)


def train(
    data: arguments.DataArgument,
    to: Annotated[Path, Option(metavar="DIR")],
    wishes: TrainingWishes,
    network: NetworkWishes,
    size: arguments.ImageSize = None,
    shorter_side: arguments.ShorterSide = None,
    folder: arguments.DataFolder = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Train a network; after a crash, the same command continues and gives the same weights."""
    from ttapca.networks.runs import WEIGHTS, read_history

    wishes.check(network.rotation_head)
    images, test = (
        arguments.read_images(data, split, folder, size=size, shorter_side=shorter_side)
        for split in ("train", "test")
    )
    options = wishes.options(data, images)
    model, description = network.network(images, wishes.seed)
    fingerprint = images.fingerprint()
    if fingerprint == test.fingerprint():  # a path to one set of images serves as both
        typer.echo("train: no test split, so accuracy is that of the training images", err=True)
    description["data"] = {"name": str(data), "training_images": fingerprint}
    writer: AbstractContextManager[Any] = nullcontext()
    if importlib.util.find_spec("tensorboard"):
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(to / "tensorboard"))
    done, steps = len(read_history(to)), len(images) // options.batch_size
    with writer as events, ConsoleReporter("train", goes_on="after the last whole epoch") as log:
        if done:
            log.note(f"going on after epoch {done} of {options.epochs}")

        def announce(record: networks.EpochRecord) -> None:
            log.note(
                f"epoch {record.epoch} of {options.epochs}: loss {record.loss:.3f}, training "
                f"accuracy {record.train_accuracy:.2f} %, test accuracy "
                f"{record.test_accuracy:.2f} %, {record.seconds:.1f} s"
            )
            for name, value in dataclasses.asdict(record).items() if events else ():
                if name != "epoch" and value is not None:
                    events.add_scalar(name, value, record.epoch)

        progress = Steps(log, "train", options.epochs * steps, done * steps)
        run: dict[str, Any] = {"description": description, "progress": progress}
        last = networks.train(model, images, test, options, to, **run, on_epoch=announce)[-1]
    path = to / WEIGHTS
    if as_json:
        print_json({"weights": str(path), **dataclasses.asdict(last)})
    else:
        typer.echo(
            f"{path}  test accuracy {last.test_accuracy:.2f} %  {counted(last.epoch, 'epoch')}"
        )
