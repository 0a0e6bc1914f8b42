"""A folder on disk for a fitted filter: `config.json`, `filter.safetensors` and a `README.md` card.

No pickle anywhere: what is read is JSON and raw tensors. The folder appears whole or not at all,
and every byte of it is covered by a checksum, so a truncated or altered filter is refused instead
of giving wrong numbers. This file knows folders and checksums; what a filter is,
`ttapca.fitting.fitted_filter` knows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ttapca._checks import shown
from ttapca.errors import FilterExistsError, SavedFilterError
from ttapca.support.disk import make_folder, recover, staged_folder
from ttapca.support.parsing import parse_json, read_bounded

FORMAT = "ttapca.filter"
FORMAT_VERSION = 1
CONFIG = "config.json"
TENSORS = "filter.safetensors"
CARD = "README.md"


def write_folder(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    card: str,
    *,
    overwrite: bool = True,
) -> None:
    """Write a folder.

    Args:
        path: The folder; its parents are made.
        config: Anything that JSON can hold, without the keys that this function adds: `format`,
            `format_version`, `tensors_sha256`, `checksum`.
        tensors: By name.
        card: Markdown for a person.
        overwrite: Whether to replace a saved filter that is there already.

    Raises:
        FilterExistsError: When there is one, and it was not to be replaced.
        SavedFilterError: When the path holds something that is not a saved filter.
        StorageError: When the disk is full or the folder cannot be written.
    """
    check_target(path, overwrite=overwrite)
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
        (folder / TENSORS).write_bytes(payload)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / CARD).write_text(card, encoding="utf-8")


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `write_folder` wrote: the config and the tensors.

    A folder that a killed process left beside its place is put back first.

    Raises:
        SavedFilterError: When the folder is missing, foreign, truncated or altered.
    """
    with contextlib.suppress(OSError):  # what cannot be put back is missing
        recover(path)
    config = _read_config(path)
    try:
        payload = (path / TENSORS).read_bytes()
    except OSError as error:
        raise SavedFilterError(
            f"A saved filter holds `{TENSORS}`; `{path}` has none that can be read "
            f"({error.strerror}). Save the filter again."
        ) from error
    if hashlib.sha256(payload).hexdigest() != config.get("tensors_sha256"):
        raise SavedFilterError(
            f"`{path / TENSORS}` is not the file that was saved: its checksum differs from the one "
            f"in `{CONFIG}`, so it was cut short or altered. Copy the folder again, or save the "
            "filter again."
        )
    try:
        return config, safetensors.torch.load(payload)
    except Exception as error:  # whatever the parser, and torch after it, make of hostile bytes
        raise SavedFilterError(f"`{path / TENSORS}` is not a safetensors file: {error}.") from error


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
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
    found: dict[str, Any] = config
    return found


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise unless a filter may be saved here.

    Args:
        path: The folder.
        overwrite: Whether a saved filter may be replaced.

    Raises:
        FilterExistsError: There is one, and it may not; or the path holds something else.
    """
    if (path / CONFIG).is_file() and not overwrite:
        raise FilterExistsError(
            f"`{path}` holds a saved filter already, which would be lost. Choose another path, or "
            "replace it with `overwrite=True`."
        )
    if not path.exists() or (path / CONFIG).is_file():
        return
    if not path.is_dir() or any(path.iterdir()):
        raise FilterExistsError(
            f"A filter is saved to a new or empty folder, or over another saved filter; `{path}` "
            "holds something else. Choose another path."
        )


def _checksum(config: dict[str, Any]) -> str:
    content = {key: value for key, value in config.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
