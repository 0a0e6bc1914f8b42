"""Every error that ttapca raises on purpose.

All derive from `TtapcaError`, and from the builtin that a Python programmer would expect, so that
`except ValueError` works. A message states the rule, the value that was found, and the way out.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_NAME = 200
BETWEEN = ("ttapca.", "torch.")  # modules


class TtapcaError(Exception):
    """Base of all errors of this library."""


class TtapcaWarning(UserWarning):
    """Base of all warnings of this library: something works, but perhaps not as you want it."""


class TruncationWarning(TtapcaWarning):
    """A filter with learned gains drops so much that predictions on source data change."""


class BasisWarning(TtapcaWarning):
    """A method that is about principal components has a filter of other ones."""


class OtherWeightsWarning(TtapcaWarning):
    """A filter was fitted on other weights than the network has."""


class InputRangeWarning(TtapcaWarning):
    """Images are in other units than those of the fit, as if a normalisation were missing."""


class FewIndependentWarning(TtapcaWarning):
    """A filter was fitted on samples that resemble each other so much that they count for few."""


class HeavyTailsWarning(TtapcaWarning):
    """A filter was fitted on values whose variance comes from few samples, such as powers."""


class CallbackWarning(TtapcaWarning):
    """A callback of the user has failed; the work goes on."""


class UntrainedWarning(TtapcaWarning):
    """The weights of a network may be random, as before training."""


class OptionError(TtapcaError, ValueError):
    """An option has a value that makes no sense, or does not exist."""


class _NameError(TtapcaError, KeyError):
    def __str__(self) -> str:
        """Return the message itself: `KeyError` would print its `repr`, with quotes."""
        return str(self.args[0])


class LayerNotFoundError(_NameError):
    """No layer of the model has the given dotted path."""


class LayerOutputError(TtapcaError, TypeError):
    """A layer does not return one tensor, or is not called exactly once per forward pass."""


class ShapeError(TtapcaError, ValueError):
    """A tensor has the wrong shape."""


class InputTypeError(TtapcaError, TypeError):
    """A model was given something other than the tensors it can take."""


class OutOfMemoryError(TtapcaError, MemoryError):
    """There is not enough memory for the task."""


class FactoryError(TtapcaError, RuntimeError):
    """The user's function that makes a network has failed."""


class PixelTypeError(TtapcaError, TypeError):
    """Images are not arrays of grey levels."""


class NonFiniteError(TtapcaError, ValueError):
    """Data hold NaN or infinity, and finite numbers are needed."""


class NotEnoughDataError(TtapcaError, ValueError):
    """There are too few samples for the task, or their rank is too low."""


class AttachError(TtapcaError, RuntimeError):
    """A filter or method cannot be put on this model, or is there already."""


class SavedFilterError(TtapcaError, ValueError):
    """A saved filter is missing, truncated, tampered with or of another kind."""


class FilterExistsError(SavedFilterError, FileExistsError):
    """There is a filter, or something else, in the place of a filter to be saved."""


class SavedStreamError(TtapcaError, ValueError):
    """A saved stream is missing, damaged, or belongs to another kind of adapter."""


class CheckpointError(TtapcaError, ValueError):
    """A file of weights is missing, cut short, unsafe, or does not fit the network."""


class TrainingError(TtapcaError, RuntimeError):
    """A training run cannot go on."""


class DataFormatError(TtapcaError, ValueError):
    """A data file is truncated, has another layout, or holds values that it must not hold."""


class DataNotFoundError(TtapcaError, FileNotFoundError):
    """The data set, split or corruption asked for is not in the given place."""


class SourceError(TtapcaError, OSError):
    """One source of a data set did not deliver; another may."""


class DownloadError(TtapcaError, OSError):
    """No source of a data set delivered it."""


class FeedError(TtapcaError, OSError):
    """A server cannot be reached, or refuses images."""


class StorageError(TtapcaError, OSError):
    """The target cannot be written: read-only, full, in use, or in the way."""


class DamagedStreamError(StorageError):
    """The record of a stream on disk cannot be read."""


class ExportError(TtapcaError, RuntimeError):
    """A network cannot be written in the form that was asked for."""


class EngineError(TtapcaError, RuntimeError):
    """An engine cannot run tasks: it has no workers, other versions, or data they do not see."""


class PoolFullError(TtapcaError, RuntimeError):
    """More images wait for an answer than a pool may hold."""


class PoolClosedError(TtapcaError, RuntimeError):
    """A pool was closed, and answers nothing any more."""


class TooManyStreamsError(TtapcaError, RuntimeError):
    """A pool knows as many streams as it may."""


class UnknownStreamError(_NameError):
    """A pool knows no stream of this name."""


class StreamNameError(TtapcaError, ValueError):
    """The name of a stream has letters that it must not have, or is too long."""


def warn_caller(message: str, category: type[TtapcaWarning]) -> None:
    """Warn with the line of the user's code, through all callers in ttapca and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(BETWEEN):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a sentence, after a space, that offers the known names nearest to `name`, if any."""
    # Comparing a name as long as a file would take minutes.
    comparable = isinstance(name, str) and len(name) <= LONGEST_NAME
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.6) if comparable else []
    offered = " or ".join(f"`{candidate}`" for candidate in near)
    return f" Did you mean {offered}?" if near else ""


def refused_memory(error: BaseException) -> str | None:
    """Return the reason of a `MemoryError`, or of torch's `RuntimeError` for memory; else None."""
    text = str(error)
    by_torch = isinstance(error, RuntimeError) and re.search("allocate memory|out of memory", text)
    if not isinstance(error, MemoryError) and not by_torch:
        return None
    asked = re.search(r"allocate (\d+) bytes", text)
    if asked:
        return f"{int(asked[1]) / 1e9:,.1f} GB were asked for at once"
    return text.strip().rstrip(".") or "an allocation was refused"


@contextmanager
def enough_memory(task: str, remedy: str) -> Iterator[None]:
    """Raise `OutOfMemoryError` with a remedy if an allocation inside the block is refused."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        refused = refused_memory(error)
        if refused is None or isinstance(error, OutOfMemoryError):
            raise
        text = f"{task} needs more memory than there is: {refused}. {remedy}"
        raise OutOfMemoryError(text) from error
