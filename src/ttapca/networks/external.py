"""Networks of other packages by name: `hf:NAME`, `timm:NAME`, and `package.module:factory`.

Preprocessing is as the network's own files state it. Weights are on this machine already.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ttapca._checks import FLAG, Either, ListOf, Maybe, Number, Plain, Record, Text, Whole, conform
from ttapca.datasets.pictures import PictureSize
from ttapca.errors import CheckpointError, FactoryError, OptionError, TtapcaError, did_you_mean
from ttapca.networks.network import (
    LONGEST_SIDE,
    MOST_CHANNELS,
    ImageNetwork,
    Normalisation,
    find_normalisation,
)
from ttapca.support.parsing import parse_json, read_bounded

TRANSFORMERS = "hf:"
TIMM = "timm:"
PROCESSOR_FILE = "preprocessor_config.json"
TIMM_FILES = ("model.safetensors", "pytorch_model.bin")  # in the cache of the Hugging Face hub
PIXELS = 255  # the highest value of a pixel
NEVER_CROPPED = 384  # pixels: from this side on, ConvNeXt's processor brings pictures to a square

_SIDE = Whole(1, LONGEST_SIDE)
_SIZE = Maybe(Either((_SIDE, ListOf(_SIDE, 1, 2), Record(others=Maybe(_SIDE)))))
_NUMBERS = Maybe(ListOf(Number(), 1, MOST_CHANNELS))
_FLAGS = ("do_normalize", "do_rescale", "rescale_offset", "do_center_crop", "include_top")
PROCESSOR = Record(
    optional={
        **dict.fromkeys(("image_mean", "image_std"), _NUMBERS),
        **dict.fromkeys(("size", "crop_size"), _SIZE),
        **dict.fromkeys(_FLAGS, Maybe(FLAG)),
        "rescale_factor": Maybe(Number(above=0)),
        "image_processor_type": Maybe(Text(1000)),
        "crop_pct": Maybe(Number(above=0, high=1)),
    },
    others=Plain(),
)


class HubNetwork(ImageNetwork):
    """A network of another package; `pictures` is the size that pictures are to be read in."""

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        normalisation: Normalisation,
        input_shape: Sequence[int],
        pictures: PictureSize,
        class_names: Sequence[str] = (),
    ) -> None:
        super().__init__(classes, normalisation, input_shape)
        self.model = model
        self.pictures = pictures
        self.class_names = tuple(class_names) if len(class_names) == classes else ()

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, classes) for images in [0, 1]."""
        output = self.model(self.normalise(images))
        logits: Tensor = getattr(output, "logits", output)
        return logits


def is_hub_name(name: str) -> bool:
    """Tell whether a word names a network of `transformers` or `timm`."""
    return name.startswith((TRANSFORMERS, TIMM))


def load_from_hub(name: str, normalisation: str | Normalisation | None = None) -> HubNetwork:
    """Load `hf:NAME`, where NAME may be a folder, or `timm:NAME`, in evaluation mode."""
    load = _from_transformers if name.startswith(TRANSFORMERS) else _from_timm
    stated = None if normalisation is None else find_normalisation(normalisation)
    return load(name.partition(":")[2], stated).eval()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(
            f"This network needs the package {name}, which cannot be imported: {error}. Get it "
            f"with: pip install {name}"
        ) from error


def _from_transformers(name: str, stated: Normalisation | None) -> HubNetwork:
    transformers = _package("transformers")
    try:
        model = transformers.AutoModelForImageClassification.from_pretrained(
            name, trust_remote_code=False, local_files_only=True
        )
    except OSError as error:
        raise OptionError(
            f"`{TRANSFORMERS}{name}` must be a folder, or in the cache of the Hugging Face hub; it "
            f"is neither: {_first_line(error)} Get it once with: hf download {name}"
        ) from error
    except (ValueError, RuntimeError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"transformers must know `{TRANSFORMERS}{name}`; it said: {_first_line(error)}"
        ) from error
    processor = _processor(transformers, name)
    normalisation = stated or _stated_normalisation(processor, name)
    pictures = _pictures(processor, getattr(model.config, "image_size", None), name)
    channels = int(getattr(model.config, "num_channels", 3))
    classes = model.config.num_labels
    labels = getattr(model.config, "id2label", None) or {}
    return HubNetwork(
        model,
        classes,
        normalisation,
        (channels, *(_sides(pictures.size) or (1, 1))),
        pictures,
        [str(labels[number]) for number in range(classes) if number in labels],
    )


def _processor(transformers: Any, name: str) -> Mapping[str, Any]:
    """Return the preprocessing that the network's files state; nothing if there is no such file."""
    try:
        path = transformers.utils.cached_file(name, PROCESSOR_FILE, local_files_only=True)
    except OSError:
        return {}
    content = read_bounded(Path(path), CheckpointError)
    processor: Mapping[str, Any] = parse_json(content, str(path), CheckpointError)
    conform(processor, PROCESSOR, str(path), CheckpointError)
    return processor


def _stated_normalisation(processor: Mapping[str, Any], name: str) -> Normalisation:
    """Return the normalisation of images in [0, 1] that equals a processor's of pixels."""
    mean, std = processor.get("image_mean"), processor.get("image_std")
    kind = processor.get("image_processor_type") or ""
    # EfficientNet's processor divides by the deviations once more, unless told not to.
    twice = kind.startswith("EfficientNet") and processor.get("include_top") is not False
    again = std if twice and std is not None else [1.0]
    if processor.get("do_normalize") is False:
        mean, std = [0.0], [1.0]
    if mean is None or std is None:
        raise OptionError(
            f"The files of `{TRANSFORMERS}{name}` have no `image_mean` and `image_std` in "
            f"{PROCESSOR_FILE}. State it: normalisation imagenet, half, ..., or a mean and a std."
        )
    factor = processor.get("rescale_factor") or 1 / PIXELS
    scale = PIXELS * factor if processor.get("do_rescale") is not False else PIXELS
    offset = 1.0 if processor.get("rescale_offset") else 0.0
    channels = max(len(std), len(again))
    both = zip(std * (channels // len(std)), again * (channels // len(again)), strict=True)
    return Normalisation(
        tuple((value + offset) / scale for value in mean),
        tuple(one * other / scale for one, other in both),
    )


def _pictures(processor: Mapping[str, Any], fallback: Any, name: str) -> PictureSize:
    """Return the size in which a processor gives pictures to its network."""
    size = processor.get("size")
    sides = _sides(size)
    crop = _sides(processor.get("crop_size")) or sides
    if processor.get("do_center_crop") and crop is not None:
        return _cropped(crop[0], min(sides or crop)) if crop[0] == crop[1] else PictureSize(crop)
    sides = sides or _sides(fallback)
    if sides is None:
        raise CheckpointError(
            f"The files of `{TRANSFORMERS}{name}` must state the size of its images; there is "
            f"neither `size` in {PROCESSOR_FILE} nor `image_size` in its configuration."
        )
    crop_pct = processor.get("crop_pct")
    stated = sides[0] != sides[1] or (isinstance(size, Mapping) and size.get("height"))
    if stated or (crop_pct is not None and sides[0] >= NEVER_CROPPED):
        return PictureSize(sides)  # of pictures with any proportions
    return _cropped(sides[0], int(sides[0] / (crop_pct or 1)))


def _cropped(side: int, shorter: int) -> PictureSize:
    return PictureSize(side, shorter if shorter > side else None)


def _sides(stated: Any) -> tuple[int, int] | None:
    """Return height and width; one number, or the `shortest_edge`, counts for both."""
    if isinstance(stated, Mapping):
        edge = stated.get("shortest_edge")
        both: Sequence[Any] = (stated.get("height") or edge, stated.get("width") or edge)
    else:
        both = stated if isinstance(stated, list | tuple) else (stated,)
    return None if None in both or not both else (both[0], both[-1])


def _from_timm(name: str, stated: Normalisation | None) -> HubNetwork:
    timm = _package("timm")
    config = timm.get_pretrained_cfg(name)
    if config is None:
        known = timm.list_pretrained()
        raise OptionError(
            f"timm has no network `{name}` with weights.{did_you_mean(name, known)} "
            "timm.list_pretrained() lists them."
        )
    file = _timm_file(config)
    if file is None:
        repository = getattr(config, "hf_hub_id", None)
        by_hand = f"timm.create_model({name!r}, pretrained=True)"
        raise OptionError(
            f"The weights of `{TIMM}{name}` must be in a cache of the Hugging Face hub or torch; "
            f"they are not. Get them with: {f'hf download {repository}' if repository else by_hand}"
        )
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(file)})
    own: Mapping[str, Any] = model.pretrained_cfg
    side = int(own["input_size"][-1])
    normalisation = stated or Normalisation(tuple(own["mean"]), tuple(own["std"]))
    return HubNetwork(
        model,
        int(model.num_classes),
        normalisation,
        tuple(own["input_size"]),
        _cropped(side, int(side / (own.get("crop_pct") or 1))),
    )


def _timm_file(config: Any) -> Path | None:
    """Return the weights of a network in the caches of the hub and of torch, if they are there."""
    repository = getattr(config, "hf_hub_id", None)
    if repository:
        hub = _package("huggingface_hub")
        own = getattr(config, "hf_hub_filename", None)
        for file in (own,) if own else TIMM_FILES:
            found = hub.try_to_load_from_cache(repository, file)
            if isinstance(found, str):
                return Path(found)
    url = getattr(config, "url", None)
    if url:
        path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
        return path if path.is_file() else None
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Networks of your own -----------------------------------------------------------------------------


def is_factory(name: str) -> bool:
    """Tell whether a word has the form `package.module:factory`, which `timm:NAME` has not."""
    if is_hub_name(name):
        return False
    module, colon, factory = name.partition(":")
    dotted = all(part.isidentifier() for part in module.split("."))
    return bool(colon) and factory.isidentifier() and dotted


def call_factory(name: str) -> nn.Module:
    """Import `package.module` and return the network that `factory()` makes. Runs users' code."""
    if not is_factory(name):
        raise OptionError(f"Name your own network as `package.module:factory`; found `{name}`.")
    path, _, attribute = name.partition(":")
    module = _import(path)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = [name for name in dir(module) if callable(getattr(module, name, None))]
        raise OptionError(
            f"`{path}` has no function or class `{attribute}`.{did_you_mean(attribute, known)}"
        )
    try:
        network = factory()
    except TtapcaError:
        raise
    except Exception as error:  # users' code may raise anything
        raise FactoryError(
            f"The factory `{name}` has failed: {_reason(error)}. It is called without arguments; "
            "write one that needs none, such as: def network(): return Network(classes=10)"
        ) from error
    if not isinstance(network, nn.Module):
        raise OptionError(
            f"A factory returns an `nn.Module`; `{name}` returned a {type(network).__name__}."
        )
    return network


def _import(path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except Exception as error:  # users' code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{path}.".startswith(f"{missing}."):
            raise OptionError(
                f"There is no module `{path}` to import. Run the command in the folder that holds "
                "it, or install it."
            ) from error
        raise FactoryError(
            f"The module `{path}` cannot be imported: {_reason(error)}. Mend it, or install what "
            "it needs."
        ) from error


def _reason(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (in {frame.filename}, line {frame.lineno})"
