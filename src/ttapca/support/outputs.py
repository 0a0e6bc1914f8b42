"""The kinds of outputs that models have, and the one form in which methods read them.

Methods read logits of classes that exclude each other, shape (batch, classes, ...). Outputs of
other kinds become such logits, and the logits that a method returns become outputs again:

    multiclass    (batch, classes, ...)         as they are
    binary        z: (batch,), (batch, 1, ...)  the logits 0 and z, whose softmax is z's sigmoid
    multilabel    (batch, labels, ...)          the same for every label: (batch, 2, labels, ...)
    regression                                  there are no classes
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ttapca._checks import Maybe, OneOf, check_option
from ttapca.errors import LayerOutputError, OptionError

OutputKind = Literal["multiclass", "binary", "multilabel", "regression"]

# What outputs are read as. `nothing`: they are returned as they are. `classes, if any`: a kind
# without classes is returned as it is. `probabilities`: of anything that is or is not so.
# `classes`: that exclude each other.
Reads = Literal["nothing", "classes, if any", "probabilities", "classes"]

# Finds the logits in what a model returns.
FindLogits = Callable[[Any], Tensor]


class Outputs:
    """Reads the outputs of a model as logits of classes, and writes such logits as outputs."""

    def __init__(
        self,
        kind: OutputKind | None = None,
        find: FindLogits | None = None,
        reads: Reads = "nothing",
    ) -> None:
        check_option("outputs", kind, Maybe(OneOf(get_args(OutputKind))))
        if find is not None and not callable(find):
            raise OptionError(
                "`logits` is a function that finds the logits in what the model returns; found "
                f"{find!r}."
            )
        if kind == "regression" and reads in ("probabilities", "classes"):
            raise OptionError(
                "This method looks at class probabilities; the outputs of a regression have none. "
                "Choose one that takes any output, or leave `outputs=` out."
            )
        if kind == "multilabel" and reads == "classes":
            raise OptionError(
                "This method is for classes that exclude each other; the labels of "
                '`outputs="multilabel"` do not. Choose one that takes labels, or any output.'
            )
        self.kind: OutputKind | None = kind
        self.find = find
        self.reads: Reads = reads
        self.found: OutputKind = kind or "multiclass"  # as which the last outputs were read
        self._flat = False  # whether the last outputs had no dimension for classes

    @property
    def exclusive(self) -> bool:
        """Whether there are classes, as far as is known, and they exclude each other."""
        return self.kind not in ("multilabel", "regression")

    def plain(self, output: Any) -> Any:
        """Return the logits in what a model returns, as they are."""
        if self.find is None:
            return output
        kind = type(output).__name__
        try:
            logits = self.find(output)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise LayerOutputError(
                f"`logits` finds the logits in what the model returns, a {kind}; it failed: "
                f"{error!r}."
            ) from error
        if not isinstance(logits, Tensor):
            raise LayerOutputError(
                "`logits` finds one tensor in what the model returns; it found a "
                f"{type(logits).__name__} in a {kind}."
            )
        return logits

    def __call__(self, output: Any) -> Any:
        """Return the logits in what a model returns, in the form in which the method reads them."""
        logits = self.plain(output)
        classes = self.exclusive and isinstance(logits, Tensor) and logits.dim() > 0
        if self.reads == "nothing" or (self.reads == "classes, if any" and not classes):
            return logits
        return self._as_classes(logits)

    def of_classes(self, output: Any) -> Tensor | None:
        """Return the logits of classes that exclude each other; None if there are none."""
        return self._as_classes(self.plain(output)) if self.exclusive else None

    def _as_classes(self, logits: Any) -> Tensor:
        if not isinstance(logits, Tensor) or not logits.dim():
            raise _no_logits(logits)
        alone = logits.dim() == 1 or logits.shape[1] == 1
        self.found = self.kind or ("binary" if alone else "multiclass")
        self._flat = logits.dim() == 1
        if self.found == "multiclass":
            _check(not alone, "multiclass", "two logits or more: (batch, classes, ...)", logits)
            return logits
        if self.found == "binary":
            _check(alone, "binary", "one logit: (batch,) or (batch, 1, ...)", logits)
            both = logits.unsqueeze(1) if self._flat else logits
            return torch.cat([torch.zeros_like(both), both], 1)
        _check(not self._flat, "multilabel", "one logit for each label: (batch, labels)", logits)
        return torch.stack([torch.zeros_like(logits), logits], 1)

    def as_returned(self, logits: Any) -> Any:
        """Return logits of classes as the model returns its outputs."""
        as_they_are = self.reads == "nothing" or self.found in ("multiclass", "regression")
        if as_they_are or (self.reads == "classes, if any" and not self.exclusive):
            return logits
        # As log odds they need no constant, and logits that no method changed stay bit for bit.
        odds = logits[:, 1] - logits[:, 0]
        return odds if self._flat or self.found == "multilabel" else odds.unsqueeze(1)

    def count(self, logits: Tensor) -> int:
        """Return how many numbers a model returns for each prediction that is read as these."""
        if self.found == "multilabel":
            return logits.shape[2]
        return 1 if self.found == "binary" else logits.shape[1]

    def of_pixels(self, logits: Tensor) -> bool:
        """Return whether logits, as methods read them, are predictions for every pixel."""
        return logits.dim() > (3 if self.found == "multilabel" else 2)


def _no_logits(output: object) -> LayerOutputError:
    found = f"a {type(output).__name__}"
    if isinstance(output, Tensor):
        found = f"shape {tuple(output.shape)}" if output.dim() else "a single number"
    return LayerOutputError(
        "The model must return logits as one tensor of shape (batch, classes, ...); found "
        f"{found}. Say how to find them: `logits=lambda output: output.logits`."
    )


def _check(holds: bool, kind: OutputKind, rule: str, logits: Tensor) -> None:
    if not holds:
        raise LayerOutputError(
            f'`outputs="{kind}"` needs {rule}; the model returns the shape {tuple(logits.shape)}. '
            f"Choose one of {', '.join(get_args(OutputKind))}, or leave it to their shape."
        )


def softmax_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each prediction in nats, shape (batch, ...); see `log_softmax`."""
    log_probabilities = log_softmax(logits)
    return -(log_probabilities.exp() * log_probabilities).sum(1)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log probabilities of logits, shape (batch, classes, ...), in float32 at least."""
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise _no_logits(logits)
    if logits.shape[1] < 2:
        raise LayerOutputError(
            "A method that lowers entropy needs logits of two classes or more; the model returns "
            f"{logits.shape[1]}, and the softmax of one logit is always 1. Return two, as an "
            "adapter does: torch.cat([torch.zeros_like(z), z], 1)."
        )
    return logits.log_softmax(1, dtype=torch.promote_types(logits.dtype, torch.float32))
