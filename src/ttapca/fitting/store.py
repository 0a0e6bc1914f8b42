"""A saved filter: a folder with `config.json`, `filter.safetensors` and a `README.md` card.

There is no pickle: what is read is JSON and raw tensors. The folder appears whole or not at all,
and every byte is covered by a checksum, so that a truncated or altered filter is refused.
`saved_format.py` then checks that the contents make a filter.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import safetensors.torch
import torch
from torch import Tensor

from ttapca._checks import OneOf, check_option, shown
from ttapca.errors import FilterExistsError, OptionError, SavedFilterError
from ttapca.fitting import saved_format as form
from ttapca.fitting.input_range import InputRange
from ttapca.spectral.cosine import Cosine
from ttapca.spectral.resemblance import Resemblance
from ttapca.spectral.source_classes import PairStatistic, SourceClasses
from ttapca.support.disk import make_folder, read_replaceable, recover, staged_folder, writing
from ttapca.support.parsing import check_plain, parse_json, read_bounded

if TYPE_CHECKING:
    from ttapca.fitting.fitted_filter import FittedFilter

FORMAT = "ttapca.filter"
FORMAT_VERSION = 1
CONFIG = "config.json"
TENSORS = "filter.safetensors"
CARD = "README.md"
LARGEST_FILE = 1 << 33  # bytes of the tensors

# Attributes of a filter, without the underscore, that are tensors of the same name in the file.
PLAIN = (
    "singular_values",
    "error_bound",
    "variances",
    "energies",
    "rest",
    "class_reach",
    "outliers",
    "textures",
)
# Attributes that have a tensor for each of some layers, which is its name's beginning in the file.
BY_LAYER = {
    "group_norm_": form.GROUP_NORM,
    "layer_norm_": form.LAYER_NORM,
    "fingerprint_": form.FINGERPRINT,
}


def save_filter(fitted: FittedFilter, path: Path, *, dtype: form.Storage, overwrite: bool) -> None:
    """Write a filter to a folder; see `FittedFilter.save`."""
    tensors = filter_tensors(fitted, stored_dtype(dtype))
    if "order" in tensors:
        tensors = form.packed(tensors, math.prod(fitted.shape))
    write_folder(path, filter_config(fitted, dtype), tensors, _card(fitted), overwrite=overwrite)


def filter_config(fitted: FittedFilter, dtype: form.Storage) -> dict[str, Any]:
    """Return what describes a filter, as JSON has it; `dtype` is that of its matrices."""
    source = {
        "n_samples": fitted.n_samples_,
        "total_variance": fitted.total_variance_,
        "explained_variance": float(fitted.explained_variance_ratio_.sum()),
        "agreement": fitted.agreement_,
        "mirror_agreement": fitted.mirror_agreement_,
        "temperature": fitted.temperature_,
    }
    return {
        "layer": fitted.layer,
        "route": fitted.route,
        "shape": list(fitted.shape),
        "output_shape": list(fitted.output_shape),
        "n_components": fitted.n_components_,
        "storage": dtype,
        "source": {name: fact for name, fact in source.items() if fact is not None},
        "versions": fitted.versions,
    }


def filter_tensors(fitted: FittedFilter, stored: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a filter by name, its matrices in the given precision."""
    tensors = {name: getattr(fitted, f"{name}_") for name in PLAIN}
    tensors["output_mean"] = fitted.mean_
    tensors["input_mean"] = fitted.center_ if fitted.basis.at_input else None
    if fitted.resemblance_ is not None:
        tensors |= fitted.resemblance_.tensors()
    if fitted.inputs_ is not None:
        tensors["inputs"] = torch.stack(fitted.inputs_)
    tensors |= {name: _rounded(each, stored) for name, each in fitted.basis.tensors().items()}
    for attribute, prefix in BY_LAYER.items():
        tensors |= {prefix + path: each for path, each in getattr(fitted, attribute).items()}
    classes = fitted.classes_
    if classes is not None:
        paths = sorted(classes.layers)
        tensors |= {form.CLASS_SHARES: classes.shares, form.CLASS_LOADINGS: classes.loadings}
        tensors[form.CLASS_LIKENESS] = torch.tensor([classes.likeness[path] for path in paths])
        tensors |= {form.CLASS_MOMENTS + path: classes.layers[path] for path in paths}
        if classes.pairs is not None:
            tensors[form.PAIR_NUMBERS] = classes.pairs.numbers
            tensors |= {form.PAIRS + path: each for path, each in classes.pairs.layers.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def filter_arguments(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the attributes of the filter of which these are config and tensors."""
    shape, source = tuple(config["shape"]), config["source"]
    at_input = "input_mean" in tensors
    attributes: dict[str, Any] = {f"{name}_": tensors.get(name) for name in PLAIN}
    attributes |= {name: _by_path(tensors, prefix) for name, prefix in BY_LAYER.items()}
    if "resemblance" in tensors:
        covariances = tensors.get("resemblance_covariances")
        attributes["resemblance_"] = Resemblance.of_tensors(tensors["resemblance"], covariances)
    if "inputs" in tensors:
        attributes["inputs_"] = InputRange(*tensors["inputs"])
    if form.CLASS_LIKENESS in tensors:
        layers, pairs = _by_path(tensors, form.CLASS_MOMENTS), None
        likeness = zip(sorted(layers), tensors[form.CLASS_LIKENESS].tolist(), strict=True)
        if form.PAIR_NUMBERS in tensors:
            pairs = PairStatistic.of_numbers(
                _by_path(tensors, form.PAIRS), tensors[form.PAIR_NUMBERS]
            )
        attributes["classes_"] = SourceClasses(
            tensors[form.CLASS_SHARES], tensors[form.CLASS_LOADINGS], layers, dict(likeness), pairs
        )
    return attributes | {
        "layer": config["layer"],
        "basis": form.kind_of(config, tensors).from_tensors(tensors, shape, at_input=at_input),
        "shape": shape,
        "output_shape": tuple(config["output_shape"]),
        "mean_": tensors.get("output_mean"),
        "center_": tensors["input_mean" if at_input else "output_mean"],
        "n_samples_": source["n_samples"],
        "total_variance_": source["total_variance"],
        "route": config["route"],
        "agreement_": source.get("agreement"),
        "mirror_agreement_": source.get("mirror_agreement"),
        "temperature_": source.get("temperature"),
        "versions": config["versions"],
    }


def _by_path(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def stored_dtype(name: str) -> torch.dtype:
    """Return the precision of that name, or raise `OptionError`."""
    check_option("dtype", name, OneOf(get_args(form.Storage)))
    return cast(torch.dtype, getattr(torch, name))


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    rounded = tensor.to(dtype)
    if not torch.isfinite(rounded).all():
        raise OptionError(
            f"{str(dtype).removeprefix('torch.')} cannot hold numbers as large as those of this "
            f"filter ({float(tensor.abs().max()):.3g}). Store it as bfloat16, which has their "
            "range."
        )
    return rounded


def _card(fitted: FittedFilter) -> str:
    side = "input" if fitted.basis.of_input else "output"
    kept = 100 * float(fitted.explained_variance_ratio_.sum())
    facts = {"fitted": fitted, "side": side, "kept": kept, "space": fitted.space_in_words()}
    return Path(__file__).with_name("card.md").read_text("utf-8").format(**facts)


def write_folder(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    card: str,
    *,
    overwrite: bool = True,
) -> None:
    """Write a folder, and add format and checksums to its config; raise as `FittedFilter.save`."""
    payload = safetensors.torch.save({name: t.contiguous() for name, t in tensors.items()})
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **config,
        "tensors_sha256": hashlib.sha256(payload).hexdigest(),
    }
    config["checksum"] = _checksum(config)
    make_folder(path.parent)
    with staged_folder(path, keep_old=False) as folder:
        check_target(path, overwrite=overwrite)
        (folder / TENSORS).write_bytes(payload)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / CARD).write_text(card, encoding="utf-8")


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise `FilterExistsError` or `StorageError` unless a filter may be saved to this folder."""

    def check() -> None:
        names = {each.name for each in path.iterdir()} if path.is_dir() else set()
        # What is replaced is lost: a `config.json` alone may belong to a network.
        if CONFIG in names and names <= {CONFIG, TENSORS, CARD}:
            if not overwrite:
                raise FilterExistsError(
                    f"`{path}` holds a saved filter already, which would be lost. Choose another "
                    "path, or replace it with `overwrite=True`."
                )
        elif names or (path.exists() and not path.is_dir()):
            raise FilterExistsError(
                "A filter is saved to a new or empty folder, or over another saved filter; "
                f"`{path}` holds something else. Choose another path."
            )

    read_replaceable(path, check)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not os.access(above, os.W_OK):
        with writing(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _checksum(config: dict[str, Any]) -> str:
    content = {key: value for key, value in config.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_filter(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the config and the tensors of a saved filter, and check that they make a filter."""
    config, tensors = read_folder(path)
    form.check_config(config, path)
    if config["route"] in Cosine.routes:
        tensors = form.unpacked(tensors, config["shape"], config["n_components"], path)
    form.check_tensors(config, tensors, path)
    return config, tensors


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_folder` wrote, and compare it with its checksums."""
    return read_replaceable(path, functools.partial(_read_folder, path))


def _read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with contextlib.suppress(OSError):  # if it cannot be put back, it is reported as missing
        recover(path)
    config = _read_config(path)
    check_plain(path / TENSORS, SavedFilterError)
    try:
        with (path / TENSORS).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_FILE:
                raise SavedFilterError(
                    f"`{path / TENSORS}` must have at most {LARGEST_FILE:,} bytes; it has {size:,}."
                )
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # takes no memory
            file.seek(0)
            payload = file.read(size) if digest == config.get("tensors_sha256") else b""
    except OSError as error:
        raise SavedFilterError(
            f"A saved filter holds `{TENSORS}`; `{path}` has none that can be read "
            f"({error.strerror}). Save the filter again."
        ) from error
    if not payload:
        raise SavedFilterError(
            f"`{path / TENSORS}` is not the file that was saved: its checksum differs from the one "
            f"in `{CONFIG}`, so it was cut short or altered. Copy the folder again, or save the "
            "filter again."
        )
    try:
        found = safetensors.torch.load(payload)
    except Exception as error:  # hostile bytes make the parser, or torch, raise anything
        raise SavedFilterError(f"`{path / TENSORS}` is not a safetensors file: {error}.") from error
    # The library returns them in another order each time; one file has one error.
    return config, dict(sorted(found.items()))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    check_plain(file, SavedFilterError)
    try:
        text = read_bounded(file, SavedFilterError)
    except OSError as error:
        raise SavedFilterError(
            f"A saved filter is a folder with a `{CONFIG}`; `{path}` has none that can be read "
            f"({error.strerror}). `fitted.save(path)` writes one."
        ) from error
    config = parse_json(text, f"`{file}`", SavedFilterError)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise SavedFilterError(
            f"`{file}` does not describe a saved filter: its `format` is not `{FORMAT}`."
        )
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise SavedFilterError(
            f"This ttapca reads saved filters of format version {FORMAT_VERSION}; `{file}` has "
            f"version {shown(version)}. Install the ttapca that wrote it, or fit again."
        )
    if config.get("checksum") != _checksum(config):
        raise SavedFilterError(
            f"`{file}` was altered after it was saved: its checksum does not match. Copy the "
            "folder again, or save the filter again."
        )
    return config
