"""Guards: notice that adaptation has collapsed, go back to a good state, and say so.

Entropy has a trivial minimum: predict one class, surely, whatever the input. A stream on its way
there shows two signs together: the predictions of many batches concentrate on few classes, and
their entropy vanishes. Few classes alone may be what the stream holds, and low entropy alone may be
a good network.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ttapca.errors import OptionError
from ttapca.support.logits import softmax_entropy

GuardAction = Literal["rollback", "reset"]


@dataclass(frozen=True)
class GuardEvent:
    """One intervention.

    Attributes:
        batch: Which call of the adapter, counting from 0.
        action: `rollback` to the last good state, or `reset` to the source.
        effective_classes: How many classes the window's predictions were spread over.
        entropy: Their mean entropy, as a share of the largest possible.
    """

    batch: int
    action: GuardAction
    effective_classes: float
    entropy: float


class CollapseGuard:
    """Watches predictions over a window of batches.

    Args:
        action: What to do: `rollback` to the last good state, or `reset` to the source.
        window: How many batches are looked at together. A state counts as good once a whole window
            after it was healthy.
        classes: Collapse needs fewer effective classes than this share of all, and fewer than 2
            at least. Effective classes are the exponential of the entropy of the mean prediction.
        entropy: And mean entropy below this share of the largest possible.

    Example:
        >>> guard = CollapseGuard(window=2)
        >>> one_class = torch.tensor([[50.0, 0.0, 0.0]]).repeat(8, 1)
        >>> [guard.collapsed(one_class) for _ in range(2)]
        [False, True]
    """

    def __init__(
        self,
        action: GuardAction = "rollback",
        *,
        window: int = 10,
        classes: float = 0.2,
        entropy: float = 0.05,
    ) -> None:
        if action not in get_args(GuardAction):
            raise OptionError(f"A guard's action is rollback or reset; found {action!r}.")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise OptionError(f"`window` is a whole number of batches from 1 on; found {window!r}.")
        for name, share in (("classes", classes), ("entropy", entropy)):
            if not 0.0 < share < 1.0:
                raise OptionError(f"`{name}` is a share between 0 and 1; found {share}.")
        self.action: GuardAction = action
        self.window = window
        self.classes = classes
        self.entropy = entropy
        self._marginals: deque[Tensor] = deque(maxlen=window)
        self._entropies: deque[float] = deque(maxlen=window)
        self.effective_classes = math.nan
        self.mean_entropy = math.nan

    @torch.no_grad()
    def collapsed(self, logits: Tensor) -> bool:
        """Look at one more batch of logits, shape (batch, classes, ...); True on collapse.

        A batch that is not finite is not looked at: nothing was learned from it either.
        """
        if not torch.isfinite(logits).all():
            return False
        count = logits.shape[1]
        dimensions = [d for d in range(logits.dim()) if d != 1]
        probabilities = logits.double().softmax(1).mean(dimensions)
        self._marginals.append(probabilities.cpu())
        self._entropies.append(float(softmax_entropy(logits).mean()) / math.log(max(count, 2)))
        marginal = torch.stack(list(self._marginals)).mean(0)
        self.effective_classes = float(torch.special.entr(marginal).sum().exp())
        self.mean_entropy = sum(self._entropies) / len(self._entropies)
        few = self.effective_classes < max(2.0, self.classes * count)
        return self.full and few and self.mean_entropy < self.entropy

    @property
    def full(self) -> bool:
        """Whether a whole window has been seen."""
        return len(self._entropies) == self.window

    def state(self) -> dict[str, list[Tensor] | list[float]]:
        """What the window holds, for `load_state`."""
        return {"marginals": list(self._marginals), "entropies": list(self._entropies)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with the window of `state`."""
        self.forget()
        self._marginals.extend(state["marginals"])
        self._entropies.extend(state["entropies"])

    def forget(self) -> None:
        """Start a new window."""
        self._marginals.clear()
        self._entropies.clear()


def make_guard(guard: CollapseGuard | GuardAction | None) -> CollapseGuard | None:
    """A guard, or the one that an action stands for, or none."""
    return CollapseGuard(guard) if isinstance(guard, str) else guard
