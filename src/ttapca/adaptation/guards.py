"""A guard, which notices that adaptation has collapsed.

Entropy has a trivial minimum: predict the same class, with certainty, whatever the input. On the
way there, predictions concentrate on few classes, and their entropy vanishes. Few classes alone may
be those of the stream, and low entropy alone may mean a good network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ttapca._checks import Number, OneOf, Whole, check_option
from ttapca.errors import OptionError
from ttapca.spectral.stream import Stream
from ttapca.support.outputs import softmax_entropy

if TYPE_CHECKING:
    from ttapca.adaptation.optimisation import Predictor

GuardAction = Literal["rollback", "reset"]


@dataclass(frozen=True)
class GuardEvent:
    """One intervention of a guard."""

    batch: int  # number of the call of the adapter, counting from 0
    action: GuardAction
    effective_classes: float  # over which the predictions of the window were distributed
    entropy: float  # their mean entropy, as a share of the largest possible


class CollapseGuard:
    """Watches predictions over a window of batches.

    Effective classes are the exponential of the entropy of the mean prediction.

    Args:
        action: On collapse, `rollback` to the last good state, or `reset` to the source.
        window: Number of batches that are looked at together.
        classes: A collapse has fewer effective classes than this share of all, or than 2; of two
            classes, fewer than 1 plus this share.
        entropy: A collapse has a mean entropy below this share of the largest possible.

    Example:
        >>> guard = CollapseGuard(window=2)
        >>> one_class = torch.tensor([[50.0, 0.0, 0.0]]).repeat(8, 1)
        >>> [guard.collapsed(one_class) for _ in range(2)]
        [False, True]
    """

    keeps = ("marginals", "entropies")  # the window, which each stream has for itself

    def __init__(
        self,
        action: GuardAction = "rollback",
        *,
        window: int = 10,
        classes: float = 0.2,
        entropy: float = 0.05,
    ) -> None:
        check_option("guard", action, OneOf(get_args(GuardAction)))
        check_option("window", window, Whole(1))
        check_option("classes", classes, Number(above=0, below=1))
        check_option("entropy", entropy, Number(above=0, below=1))
        self.action: GuardAction = action
        self.window, self.classes, self.entropy = window, classes, entropy
        self.marginals: tuple[Tensor, ...] = ()
        self.entropies: tuple[float, ...] = ()
        self.effective_classes = self.mean_entropy = math.nan
        self._good: tuple[dict[str, Any], ...] = ()  # states to go back to

    @torch.no_grad()
    def collapsed(self, logits: Tensor) -> bool:
        """Return whether predictions have collapsed, given one more, (batch, classes, ...)."""
        if not torch.isfinite(logits).all():  # nothing was learned from it either
            return False
        count = logits.shape[1]
        dimensions = [d for d in range(logits.dim()) if d != 1]
        probabilities = logits.double().softmax(1).mean(dimensions)
        share = float(softmax_entropy(logits).mean()) / math.log(max(count, 2))
        self.marginals = (*self.marginals, probabilities.cpu())[-self.window :]
        self.entropies = (*self.entropies, share)[-self.window :]
        # An adapter that was moved may have taken older ones along to another device.
        marginal = torch.stack([each.cpu() for each in self.marginals]).mean(0)
        self.effective_classes = float(torch.special.entr(marginal).sum().exp())
        self.mean_entropy = sum(self.entropies) / len(self.entropies)
        few = self.effective_classes < (
            1.0 + self.classes if count == 2 else max(2.0, self.classes * count)
        )
        return self._full and few and self.mean_entropy < self.entropy

    @property
    def _full(self) -> bool:
        return len(self.entropies) == self.window

    def intervene(
        self, stream: Stream, logits: Tensor, call: int, parts: Collection[str]
    ) -> GuardEvent | None:
        """Look at one more batch of a stream: go back on collapse, else remember good `parts`."""
        if self.collapsed(logits):
            event = GuardEvent(call, self.action, self.effective_classes, self.mean_entropy)
            older = self._good[:1]  # taken now, since `forget` empties the good states as well
            stream.forget()
            if self.action == "rollback" and older:
                state = copy.deepcopy(older[0])
                stream.put({**state, "values": state["values"] | stream.lasting})
            return event
        if self._full and stream.batches % self.window == 0:
            # Two are kept, and the older one is gone back to: the newer may be on the way to a
            # collapse that is not visible yet.
            state = stream.contents()
            moved = {name: state["parts"][name] for name in parts}
            self._good = (*self._good, copy.deepcopy({**state, "parts": moved}))[-2:]
        return None


def check_can_collapse(predictor: Predictor, forgetting: str) -> None:
    """Refuse a guard over a method that cannot collapse, or whose collapse it cannot see."""
    outputs = predictor.outputs
    if not outputs.exclusive:
        raise OptionError(
            "A guard sees a collapse where predictions concentrate on few classes that exclude "
            f'each other; outputs of the kind "{outputs.kind}" do not. Leave out `guard`.'
        )
    if not predictor.needs_gradients:
        why = "a method that does not learn"
    elif predictor.forgets:
        why = "a method that forgets after each sample"
    elif forgetting == "episodic":
        why = "a method that forgets after each batch"
    else:
        return
    raise OptionError(
        f"A guard watches a stream for collapse, and would have no effect on {why}. Leave "
        'out `guard`, or adapt with gradients and forgetting="online".'
    )
