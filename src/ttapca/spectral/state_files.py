"""The file format for the states of streams, of adapters, services and other runtimes.

A file is of safetensors. Tensors of a `StreamState` have the names of its fields, joined by dots,
after `state.`; numbers are in the metadata. Other contents of a method are a tree in the metadata,
with a number in the place of each tensor. Nothing in a file is run, and everything is compared with
rules of the reader before anything is made of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ttapca._checks import shown
from ttapca.errors import SavedStreamError
from ttapca.spectral.chain import ChainState
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.stream_state import AlarmState, AutoState, StreamState, leaves
from ttapca.support.parsing import parse_json

FORMAT = "ttapca stream 3"
# Formats of earlier versions, of adapters and of pools.
OLDER = ("ttapca stream 1", "ttapca stream 2", "ttapca pool stream 1", "ttapca pool stream 2")
ABOUT = "ttapca"
STATE, OTHER = "state.", "other."
TENSOR, NESTED = "tensor", "state"
OTHER_SHAPE = "has another shape than in this network"
MOST_CLASSES = 1_000_000
# Squares of larger numbers, and sums of these, would be infinite.
LARGEST, LARGEST_SINGLE = 1e12, 1e18
# Tensors that may be negative, by the end of their names.
SIGNED = ("mean", "moments", "centres", "searched", "unsearched", "features", "leeway")
SHARES = ("shift", "unusual")  # at most 1
PRECISIONS = (torch.float32, torch.float64)
# The type of each number of a state, and its largest value; none is negative.
NUMBERS: dict[str, tuple[type, float]] = {
    "latest": (int, CONSTANTS.states - 1),
    "implausible": (int, LARGEST),
    "alarm.shifted": (bool, 1),
    "alarm.run": (int, LARGEST),
    "alarm.images": (int, LARGEST),
    "alarm.runs": (float, LARGEST),
    "alarm.few": (float, LARGEST),
    "alarm.alike": (float, LARGEST),
    "alarm.skew": (float, 1),
    "auto.adapting": (bool, 1),
    "auto.harmful": (bool, 1),
    "auto.switches": (int, LARGEST),
    "auto.images": (int, LARGEST),
}


@dataclass(frozen=True, eq=False)
class SavedStream:
    """The contents of a file."""

    kind: str  # fingerprint of the writer; only the same kind can read it
    state: StreamState | None = None  # of closed-form filters and statistics
    # Other contents of the method: tensors and numbers in dicts, lists and tuples.
    other: Mapping[str, Any] = field(default_factory=dict)
    # Numbers and words that a service keeps beside it.
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for name, value in ({} if self.state is None else leaves(self.state)).items():
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(np.ascontiguousarray(value))
            if isinstance(value, Tensor):
                # Copied, since safetensors refuses tensors that share memory.
                tensors[STATE + name] = value.detach().to("cpu", copy=True).contiguous()
            else:
                numbers[name] = value
        about = {
            "format": FORMAT,
            "kind": self.kind,
            "numbers": numbers,
            "facts": dict(self.facts),
            "other": _described(self.other, tensors, self.kind),
        }
        # One entry, since safetensors writes several in any order: the same state, the same bytes.
        return save(tensors, {ABOUT: json.dumps(about)})


def read_saved(data: bytes, kind: str, like: StreamState | None, name: str) -> SavedStream:
    """Read a file that `SavedStream.to_bytes` wrote, or raise `SavedStreamError`.

    The data may be from anybody: all is checked, but for `other` and `facts`. `kind` is the
    fingerprint of the reader, and `like` the state of its new streams.
    """
    about = _about(data, name)
    found = shown(about.get("format"))
    if about.get("format") in OLDER:
        raise SavedStreamError(
            f"{name} was saved by an older ttapca ({found}). Let the stream begin anew."
        )
    if about.get("format") != FORMAT:
        raise SavedStreamError(f"{name} must be of the format `{FORMAT}`; found {found}.")
    if about.get("kind") != kind:
        raise SavedStreamError(
            f"{name} is a stream of another network, filter or method. Load it with those that it "
            "was saved with."
        )
    tensors = _loaded(data, name)
    others = {each: value for each, value in tensors.items() if each.startswith(OTHER)}
    own = {each.removeprefix(STATE): value for each, value in tensors.items() if each not in others}
    numbers, facts = about.get("numbers"), about.get("facts")
    if not isinstance(numbers, dict) or not isinstance(facts, dict):
        raise SavedStreamError(f"{name} is no saved stream: its numbers are missing.")
    state = None
    if like is not None:
        state = _Reader(own, numbers, name).state(like)
    elif own or numbers:
        raise SavedStreamError(f"{name} is no saved stream of this method: it holds a state.")

    def nested(within: bytes) -> StreamState | None:
        """Return a state that a part of the method has kept, as a guard does, and no more."""
        if like is None or _about(within, name).get("other") != {"dict": {}}:
            raise SavedStreamError(f"{name} is no saved stream: it holds a state that is none.")
        return read_saved(within, kind, like, name).state

    other = _rebuilt(about.get("other"), others, name, nested)
    if not isinstance(other, dict):
        raise SavedStreamError(f"{name} is no saved stream: it holds {shown(other)}.")
    return SavedStream(kind, state, other, facts)


def with_tensors(data: bytes, tensors: Mapping[str, Any]) -> bytes:
    """Return the file of a stream with some tensors of its state replaced, for other runtimes.

    Args:
        data: A file of the stream, or of any other one of the same network and filter.
        tensors: Arrays by the names that tensors have in the file, such as `state.chain.place`.

    Raises:
        SavedStreamError: The bytes are something else, or have no such tensor.
    """
    about = _about(data, "the file")
    if about.get("format") != FORMAT:
        raise SavedStreamError(f"Parts of a state go into a file of the format `{FORMAT}`.")
    found = _loaded(data, "The file")
    for name, value in tensors.items():
        part = torch.as_tensor(value)
        if name not in found or part.numel() != found[name].numel():
            expected = f"{tuple(found[name].shape)}" if name in found else "no such part"
            raise SavedStreamError(
                f"Parts of a state have the names and sizes that they have in the file: it has "
                f"{expected} for `{name}`; found {tuple(part.shape)}."
            )
        # Runtimes want another dimension for single numbers.
        found[name] = part.to(found[name]).reshape(found[name].shape).contiguous()
    return save(found, {ABOUT: json.dumps(about)})


def _loaded(data: bytes, name: str) -> dict[str, Tensor]:
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise SavedStreamError(f"{name} is no saved stream: {error}.") from error


def _about(data: bytes, name: str) -> dict[str, Any]:
    """Return the metadata; the library of safetensors reads those of files only."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise SavedStreamError(f"{name} is no saved stream: it ends too early.")
    header = parse_json(data[8 : 8 + length], name, SavedStreamError)
    about = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(about, dict):
        return {}
    if isinstance(about.get(ABOUT), str):
        found = parse_json(about[ABOUT], name, SavedStreamError, finite=False)
        return found if isinstance(found, dict) else {}
    return about  # of an older version


class _Reader:
    """Makes a state of untrusted tensors and numbers, by dotted names."""

    def __init__(self, tensors: dict[str, Tensor], numbers: dict[str, Any], name: str) -> None:
        self._tensors, self._numbers, self._name = dict(tensors), dict(numbers), name

    def state(self, like: StreamState) -> StreamState:
        """Return the state, which has the same parts as that of a new stream."""
        found = {
            each.name: self._like(each.name, getattr(like, each.name))
            for each in fields(StreamState)
            if each.name not in ("alarm", "auto", "latest", "implausible")
        }
        numbers = {name: self._number(name) for name in ("latest", "implausible")}
        state = StreamState(**found, alarm=self._alarm(like), auto=self._auto(), **numbers)
        self._check(state)
        left = [*self._tensors, *self._numbers]
        if left:
            raise SavedStreamError(f"{self._name} is no saved stream: it holds `{min(left)}`.")
        return state

    def _like(self, name: str, like: Any) -> Any:
        """Return the part of this name, which has the form of another one."""
        if like is None:
            return None
        if isinstance(like, tuple):
            return tuple(self._like(f"{name}.{place}", each) for place, each in enumerate(like))
        if not is_dataclass(like):
            return self._tensor(name, like)
        found = {
            each.name: self._like(f"{name}.{each.name}", getattr(like, each.name))
            for each in fields(like)
        }
        table = name.startswith(("spectra", "layers"))
        lengths = {len(each) for each in found.values() if each is not None} if table else {1}
        if len(lengths) > 1 or not lengths <= set(range(1, CONSTANTS.states + 1)):
            self._refuse(name, "has parts of several lengths")
        made: Any = type(like)
        return made(**found)

    def _tensor(self, name: str, like: Any) -> Any:
        expected = torch.from_numpy(like) if isinstance(like, np.ndarray) else like
        found = self._tensors.pop(name, torch.empty(0, dtype=torch.bool))
        rows = 1 if name.startswith(("spectra", "layers", "conditions")) else 0
        if (
            found.dtype not in PRECISIONS
            or found.dim() != expected.dim()
            or found.shape[rows:] != expected.shape[rows:]
        ):
            self._refuse(name, OTHER_SHAPE)
        self._check_values(name, found)
        if name.startswith("conditions") and len(found) > 2 * CONSTANTS.memory:
            self._refuse(name, "has too many rows")
        return found.double().numpy() if isinstance(like, np.ndarray) else found.to(expected)

    def _check_values(self, name: str, found: Tensor) -> None:
        most = LARGEST if found.dtype == torch.float64 else LARGEST_SINGLE
        if name.rpartition(".")[2] in SHARES:
            most = 1.0
        least = -most if name.endswith(SIGNED) else 0.0
        if not bool(((found >= least) & (found <= most)).all()):  # NaN is neither
            self._refuse(name, "cannot be like that")

    def _number(self, name: str) -> Any:
        value, (kind, most) = self._numbers.pop(name, None), NUMBERS[name]
        allowed = (int, float) if kind is float else kind
        right = isinstance(value, allowed) and isinstance(value, bool) == (kind is bool)
        if not right or not 0 <= value <= most:
            self._refuse(name, f"is {shown(value)}")
        return value

    def _alarm(self, like: StreamState) -> AlarmState:
        names = [name for name in NUMBERS if name.startswith("alarm.")]
        found = {name.removeprefix("alarm."): self._number(name) for name in names}
        counts = self._optional("alarm.counts", range(1, MOST_CLASSES + 1))
        energies = []
        for place, each in enumerate(like.spectra):
            # The alarm does not sum the energy of the rest.
            bands = each.leeway.shape[2] - (each.rest_energy is not None)
            sums = self._optional(f"alarm.energies.{place}", range(bands, bands + 1))
            if sums is not None:
                energies.append(sums)
        if len(energies) not in (0, len(like.spectra)):
            self._refuse("alarm.energies", "are of some filters only")
        return AlarmState(**found, counts=counts, energies=tuple(energies))

    def _auto(self) -> AutoState | None:
        gain = self._optional("auto.gain", range(3, 4))
        sums = self._optional("auto.sums", range(4, 2 * MOST_CLASSES + 3))
        if gain is None or sums is None:
            return None  # its numbers, if there are any, are left over, which is refused
        names = ("adapting", "harmful", "switches", "images")
        found = {name: self._number(f"auto.{name}") for name in names}
        return AutoState(**found, gain=gain, sums=sums)

    def _optional(self, name: str, sizes: range) -> Tensor | None:
        """Return a vector of one of these sizes, or None."""
        found = self._tensors.pop(name, None)
        if found is None:
            return None
        if found.dtype not in PRECISIONS or found.dim() != 1 or len(found) not in sizes:
            self._refuse(name, OTHER_SHAPE)
        self._check_values(name, found)
        return found.double()

    def _check(self, state: StreamState) -> None:
        """Refuse parts that do not fit together, although each may be right by itself."""
        rows = len(state.spectra[0]) if state.spectra else 1
        if state.latest >= rows:
            self._refuse("latest", f"is {state.latest}")
        if float(state.outliers[0]) > 1:
            self._refuse("outliers", "cannot be like that")
        if bool((state.errors.diff(dim=1) > 1e-6 * state.errors[:, :1]).any()):  # falling sums
            self._refuse("errors", "cannot be like that")
        known, chain, layers = state.conditions, state.chain, state.layers
        if known is not None:
            # A stream that was never used has shown nothing, in one row, and has no state.
            least = rows if bool(state.spectra[0].samples.any()) else 0
            sizes = {len(known.centres), len(known.weights)}
            if len(sizes) > 1 or not least <= max(sizes) <= CONSTANTS.states:
                self._refuse("conditions", "do not match")
        if chain is not None:
            self._check_chain(chain)
        if layers is not None:
            mean, square = layers.moments.double().unbind(1)
            if bool((square < mean.square() * (1 - 1e-3) - 1e-6).any()):
                self._refuse("layers.moments", "cannot be like that")

    def _check_chain(self, chain: ChainState) -> None:
        if abs(float(chain.joint.sum()) - 1) > 1e-3:
            self._refuse("chain.joint", "is no probability")
        if float(chain.place.sum()) > 0 and not float(chain.recent[:, 0].sum()) > 0:
            self._refuse("chain.recent", "cannot be like that")
        size = chain.features.shape[1]
        number, sums, squares = np.split(chain.past_features, [1, 1 + size], axis=1)
        if (number < 0).any() or (squares * number < sums**2 * (1 - 1e-3) - 1e-6).any():
            self._refuse("chain.past_features", "cannot be like that")

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise SavedStreamError(f"{self._name} is no saved stream: `{name}` {why}.")


def _described(tree: Any, tensors: dict[str, Tensor], kind: str) -> Any:
    """Return a tree as JSON can hold it, and add its tensors to `tensors`."""
    form = NESTED if isinstance(tree, StreamState) else TENSOR
    if isinstance(tree, StreamState):
        content = bytearray(SavedStream(kind, tree).to_bytes())
        tree = torch.frombuffer(content, dtype=torch.uint8)
    if isinstance(tree, Tensor):
        number = sum(each.startswith(OTHER) for each in tensors)
        tensors[f"{OTHER}{number}"] = tree.detach().to("cpu", copy=True).contiguous()
        return {form: number}
    if isinstance(tree, Mapping):
        return {"dict": {name: _described(value, tensors, kind) for name, value in tree.items()}}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [_described(value, tensors, kind) for value in tree]}
    return tree


def _rebuilt(
    form: Any,
    tensors: Mapping[str, Tensor],
    name: str,
    nested: Callable[[bytes], StreamState | None],
) -> Any:
    """Return the tree that `_described` has described."""
    if form is None or isinstance(form, int | float):
        return form
    kind, inner = None, None
    if isinstance(form, Mapping) and len(form) == 1:
        ((kind, inner),) = form.items()
    if kind in (TENSOR, NESTED) and f"{OTHER}{inner}" in tensors:
        found = tensors[f"{OTHER}{inner}"].clone()
        if kind != NESTED:
            return found
        if found.dtype != torch.uint8:
            raise SavedStreamError(f"{name} is no saved stream: it holds a state that is none.")
        return nested(found.numpy().tobytes())
    if kind == "dict" and isinstance(inner, Mapping):
        return {each: _rebuilt(value, tensors, name, nested) for each, value in inner.items()}
    if kind in ("tuple", "list") and isinstance(inner, list):
        several = [_rebuilt(value, tensors, name, nested) for value in inner]
        return tuple(several) if kind == "tuple" else several
    raise SavedStreamError(f"{name} is no saved stream: it holds {shown(form)}.")
