"""A stream in a file: what was seen and what was made of it, as safetensors with a description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save
from torch import Tensor

from ttapca._checks import shown
from ttapca.errors import SavedStreamError
from ttapca.support.disk import replace_file
from ttapca.support.parsing import parse_json

FORMAT = "ttapca stream 1"
TENSOR = "tensor"


def write_stream(contents: Mapping[str, Any], kind: str, path: Path) -> None:
    """Write a stream to a file, in one step.

    Args:
        contents: Of the stream.
        kind: Tells apart adapters whose streams cannot take each other's place.
        path: Of the file.
    """
    tensors: dict[str, Tensor] = {}
    form = json.dumps(_taken_apart(contents, tensors))
    replace_file(path, save(tensors, metadata={"format": FORMAT, "kind": kind, "form": form}))


def read_stream(path: Path, kind: str, like: Mapping[str, Any]) -> dict[str, Any]:
    """Read the contents of a stream.

    Args:
        path: Of the file.
        kind: As it was written with.
        like: Contents of a stream of the same kind.

    Raises:
        SavedStreamError: The file is missing, damaged, or of another kind of adapter.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise SavedStreamError(f"{path} cannot be read: {error}.") from error
    except safetensors.SafetensorError as error:
        raise SavedStreamError(f"{path} is no saved stream: {error}.") from error
    if about.get("format") != FORMAT:
        found = shown(about.get("format"))
        raise SavedStreamError(f"{path} must be of the format `{FORMAT}`; found {found}.")
    if about.get("kind") != kind:
        raise SavedStreamError(
            f"{path} is a stream of another adapter. Load it with the method, the filter and the "
            "network it was saved with."
        )
    form = parse_json(about.get("form", ""), str(path), SavedStreamError, finite=False)
    found = _put_together(form, tensors, path)
    _compare(found, like, path)
    return dict(found)


def _taken_apart(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """The same with a number in the place of each tensor, which JSON can hold."""
    if isinstance(tree, Tensor):
        # In memory of its own: safetensors takes no two that share it.
        tensors[str(len(tensors))] = tree.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: len(tensors) - 1}
    if isinstance(tree, Mapping):
        return {"dict": {name: _taken_apart(value, tensors) for name, value in tree.items()}}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [_taken_apart(value, tensors) for value in tree]}
    return tree


def _put_together(form: Any, tensors: Mapping[str, Tensor], path: Path) -> Any:
    if form is None or isinstance(form, int | float):
        return form
    kind, inner = None, None
    if isinstance(form, Mapping) and len(form) == 1:
        ((kind, inner),) = form.items()
    if kind == TENSOR and str(inner) in tensors:
        return tensors[str(inner)].clone()
    if kind == "dict" and isinstance(inner, Mapping):
        return {name: _put_together(value, tensors, path) for name, value in inner.items()}
    if kind in ("tuple", "list") and isinstance(inner, list):
        found = [_put_together(value, tensors, path) for value in inner]
        return tuple(found) if kind == "tuple" else found
    raise SavedStreamError(f"{path} is no saved stream: it holds {shown(form)}.")


def _compare(found: Any, like: Mapping[str, Any], path: Path) -> None:
    """Refuse what has other names or shapes: a file may have been written by anybody."""
    for group in ("values", "parts"):
        here = found.get(group) if isinstance(found, Mapping) else None
        if not isinstance(here, Mapping) or here.keys() != like[group].keys():
            raise SavedStreamError(f"{path} is no saved stream: its {group} have other names.")
        for name, value in here.items():
            if not _fits(value, like[group][name]):
                raise SavedStreamError(
                    f"{path} is no saved stream: `{name}` has another shape than in this adapter."
                )


def _fits(found: Any, like: Any) -> bool:
    """Whether one may take the place of the other; what is None now may be a tensor later."""
    if found is None or like is None:
        return True
    if isinstance(like, Tensor):
        return isinstance(found, Tensor) and found.shape == like.shape
    if isinstance(like, Mapping):
        if not isinstance(found, Mapping):
            return False
        return all(_fits(found[name], like[name]) for name in found.keys() & like.keys())
    if isinstance(like, tuple | list):  # which may grow, as the window of a guard does
        return type(found) is type(like) and all(map(_fits, found, like))
    return isinstance(found, int | float)
