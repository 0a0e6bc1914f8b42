"""`ShiftAlarm`: tells when a stream begins to shift, and when that is over.

The alarm judges blocks of images, each by itself: large batches as they come, small ones together.
So no image counts twice, blocks of a clean stream are independent of each other, and the end of a
shift is seen as soon as its beginning. A shift begins after some blocks in a row that hardly any
source batch is like, and ends after some in a row that many are like. In between, nothing changes.

Images of one class resemble each other, so that a block of one class counts for fewer images. A
stream whose order is looked at knows for how many. For others, the alarm looks at the classes that
are predicted. But batch statistics hide which classes a batch holds
(see `ttapca.spectral.source_classes`), so classes are believed to be many only where nothing had
shifted and the network predicted as it was. What the alarm keeps belongs to the stream.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttapca._checks import Number, Whole, check_option
from ttapca.adaptation.health import Health, joint_p_value
from ttapca.errors import CallbackWarning, OptionError
from ttapca.spectral.chain import design_effect
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.closed_form_rule import TINY, independent_images
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.stream import CHAIN, Stream

# Chosen on held-out conditions; docs/health.md has the measurements. The first four are defaults of
# `ShiftAlarm`, which says what they mean.
BEGINS = 0.01
ENDS = 0.05
BLOCKS = 2
IMAGES = 64
CLASS_MEMORY = 20.0  # after so many samples, a prediction counts 1 / e
ENOUGH = CLASS_MEMORY / 2  # predictions that tell whether classes are many
SURE = 6.0  # standard deviations of chi squared that chance is granted

# What a stream keeps.
STATE, BLOCK, CLASSES = "alarm/state", "alarm/block", "alarm/classes"

# Of a block: how many runs begin in it, how many images are of few classes, and how alike they are.
NO_CLASSES = (0.0, 0.0, 0.0)

# How often each class was predicted of late, and the skew when nothing had shifted: the worst.
NOTHING_KNOWN = (None, 1.0)


@dataclass(frozen=True)
class ShiftAlarm:
    """Calls a function when the shift of a stream begins, and when it ends.

    Args:
        callback: Is given the `Health` of the stream; `shifted` says whether the shift begins or
            ends, `stream` which stream it is. Where it raises an `Exception`, a `CallbackWarning`
            tells so: the stream and the prediction are as if it had not.
        begins: A shift begins after `blocks` blocks in a row with at most this p-value.
        ends: It ends after as many in a row with a larger p-value than this one.
        blocks: How many.
        images: A block has at least this many images.

    Raises:
        OptionError: An option makes no sense.

    Example:
        >>> alarm, state, states = ShiftAlarm(print), (False, 0), []
        >>> for p_value in (0.002, 0.6, 0.002, 0.004, 0.03, 0.6, 0.03, 0.7, 0.5):
        ...     state = alarm.next(*state, p_value)
        ...     states.append(int(state[0]))
        >>> states
        [0, 0, 0, 1, 1, 1, 1, 1, 0]
    """

    callback: Callable[[Health], object]
    begins: float = BEGINS
    ends: float = ENDS
    blocks: int = BLOCKS
    images: int = IMAGES

    def __post_init__(self) -> None:
        """Check the options."""
        if not callable(self.callback):
            raise OptionError(
                "`on_shift` must be a function of a `Health`, or a `ShiftAlarm`; found "
                f"{self.callback!r}."
            )
        check_option("begins", self.begins, Number(above=0, below=1))
        check_option("ends", self.ends, Number(self.begins, below=1))
        check_option("blocks", self.blocks, Whole(1))
        check_option("images", self.images, Whole(1))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShiftAlarm:
        """Return itself: a copy of an adapter calls the same function of the same object."""
        del memo
        return self

    def next(self, shifted: bool, run: int, p_value: float) -> tuple[bool, int]:
        """Return the state after one more block.

        Args:
            shifted: Whether a shift has begun.
            run: How many blocks in a row have spoken against that.
            p_value: Of the block.

        Returns:
            `shifted` and `run`, for the next block.
        """
        against = p_value > self.ends if shifted else p_value <= self.begins
        run = run + 1 if against else 0
        return (not shifted, 0) if run >= self.blocks else (shifted, run)


class ShiftWatch:
    """Looks at the batches of streams for an alarm; without one it looks at nothing.

    Args:
        alarm: What to watch for.
        gains: The closed-form gains of an adapter.
        shares: Share of each class in the predictions for source data; None where unknown.

    Raises:
        OptionError: There is an alarm, and no closed-form gain that could notice a shift.
    """

    def __init__(
        self, alarm: ShiftAlarm | None, gains: Sequence[ClosedFormGain], shares: Tensor | None
    ) -> None:
        if alarm is not None and not gains:
            raise OptionError(
                "`on_shift` needs a filter with closed-form gains, which notice a shift; this "
                "method has none. Adapt with `wiener`, `match` or `two-sided`, or leave it out."
            )
        self.alarm = alarm
        self._gains = list(gains)
        self._shares = shares

    def join(self, stream: Stream) -> None:
        """Declare what a stream keeps, with or without an alarm: both can load its files."""
        self._stream = stream
        if self._gains:
            stream.declare(STATE, (0, 0), lasting=True)
            stream.declare(BLOCK, (0, NO_CLASSES, None), lasting=True)
            stream.declare(CLASSES, NOTHING_KNOWN, lasting=True)

    def _knows_order(self, values: Mapping[str, Any]) -> bool:
        """Return whether a stream itself knows for how many images those of a run count.

        It does not if its chain has read nothing: predictions of every pixel, or of other classes.
        """
        return CHAIN in values and bool(values[CHAIN][2] > 0)  # its place in a run

    @torch.no_grad()
    def look(self, logits: Tensor | None) -> bool:
        """Look at a batch that was just predicted; return whether a shift began or ended.

        Args:
            logits: What was predicted; None where there are no classes that exclude each other.
        """
        if self.alarm is None:
            return False
        found = [gain.last_energies() for gain in self._gains]
        seen = [each for each in found if each is not None]
        if len(seen) < len(found):  # the model has left a layer out
            return False
        stream, size = self._stream, seen[0][1]
        self._count_classes(logits, size)
        samples, classes, sums = stream.past(BLOCK)
        energies = [size * each for each, _ in seen]
        if sums is not None:
            energies = [new + old.to(new) for new, old in zip(energies, sums, strict=True)]
        samples, plan = samples + size, stream.plan
        if plan is not None:
            shown = (plan.runs, plan.few, plan.alike)
            classes = tuple(old + new for old, new in zip(classes, shown, strict=True))
        if samples < self.alarm.images:
            stream.write(BLOCK, (samples, classes, tuple(energies)))
            return False
        if self._knows_order(stream.values):
            independent = _independent_in_block(float(samples), *classes)
        else:
            independent = independent_images(float(samples), self.skew_in(stream.values) or 0.0)
        p_value = joint_p_value(
            [
                gain.evidence(total / samples, samples, independent).p_value
                for gain, total in zip(self._gains, energies, strict=True)
            ]
        )
        before, run = stream.past(STATE)
        after, run = self.alarm.next(bool(before), run, p_value)
        stream.write(STATE, (int(after), run))
        stream.write(BLOCK, (0, NO_CLASSES, None))
        return after != bool(before)

    def _count_classes(self, logits: Any, size: int) -> None:
        """Add the classes that are predicted to those of before, as far as they are known."""
        shares, stream = self._shares, self._stream
        if shares is None or self._knows_order(stream.values):
            return
        if not isinstance(logits, Tensor) or logits.dim() < 2 or logits.shape[1] != len(shares):
            return
        stream.write(
            CLASSES, classes_after(stream.past(CLASSES), logits, size, stream.batch_shift, shares)
        )

    def counts_in(self, values: Mapping[str, Any]) -> Tensor | None:
        """Return how often each class was predicted of late; None where nobody looked."""
        counts: Tensor | None = None if self.alarm is None else values[CLASSES][0]
        return None if counts is None or not counts.sum() else counts

    def skew_in(self, values: Mapping[str, Any]) -> float | None:
        """Return how surely a stream has other classes than the source; None where nobody looks.

        Where an alarm looks and does not know the classes of the source, it expects the worst.
        """
        counts = self.counts_in(values)
        if self.alarm is None or self._knows_order(values):
            return None
        if counts is None or self._shares is None:
            return 1.0
        return max(float(values[CLASSES][1]), skew_of(counts, self._shares))

    def shifted_in(self, values: Mapping[str, Any]) -> bool | None:
        """Return whether a shift has begun and not ended; None without an alarm."""
        return None if self.alarm is None else bool(values[STATE][0])

    def tell(self, health: Health) -> None:
        """Call the function of the alarm."""
        if self.alarm is None:
            return
        try:
            self.alarm.callback(health)
        except Exception as error:
            warnings.warn(
                f"`on_shift` must not raise; it did, at {health}: {error!r}. The stream goes on.",
                CallbackWarning,
                stacklevel=2,
            )


def _independent_in_block(samples: float, runs: float, few: float, alike: float) -> float:
    """Return how many independent images a block is worth by itself.

    Args:
        samples: How many images it has.
        runs: How many runs begin in it; another one may go on from the block before.
        few: How many of the images are of few classes in no order.
        alike: The same, each times how alike they are.

    Example:
        >>> _independent_in_block(64.0, 64.0, 0.0, 0.0)  # in no order
        64.0
        >>> round(_independent_in_block(64.0, 0.0, 0.0, 0.0), 1)  # one run
        8.8
    """
    others, likeness = samples - few, CONSTANTS.likeness
    begun = max(min(runs + 1, others), TINY)
    found = begun * design_effect(max(others, 0.0) / begun, likeness)
    return float(found + design_effect(few, likeness * alike / max(few, TINY)))


def classes_after(
    before: tuple[Tensor | None, float],
    logits: Tensor,
    size: int,
    shift: float,
    shares: Tensor | None,
) -> tuple[Tensor, float]:
    """Return what is known about the classes of a stream after one more batch.

    Args:
        before: How often each class was predicted of late, shape (classes,), or None; and how
            surely classes were not those of the source when nothing had shifted.
        logits: Of the batch, shape (batch, classes, ...).
        size: How many samples it has.
        shift: How surely the stream has shifted, from 0 to 1.
        shares: Share of each class in the source data; None where unknown.
    """
    places = [d for d in range(logits.dim()) if d != 1]
    counts = size * logits.detach().double().softmax(1).mean(places).cpu()
    past, skew = before
    if past is not None and len(past) == len(counts):
        counts = counts + past.to(counts) * math.exp(-size / CLASS_MEMORY)
    if shares is not None and shift == 0 and float(counts.sum()) >= ENOUGH:
        skew = skew_of(counts, shares)
    return counts, skew


def skew_of(counts: Tensor, shares: Tensor) -> float:
    """Return how surely classes were not drawn by these shares, from 0 to 1.

    Chi squared is compared with what chance makes of it, and `SURE` standard deviations more.

    Args:
        counts: How often each class was predicted, shape (classes,).
        shares: Share of each class in the source data, shape (classes,).

    Example:
        >>> shares = torch.full((10,), 0.1)
        >>> skew_of(6 * torch.ones(10), shares)
        0.0
        >>> round(skew_of(60 * torch.eye(10)[3], shares), 2)
        0.94
    """
    seen, source = float(counts.sum()), shares.to(counts)
    if seen <= 0:
        return 0.0
    chi = float((counts - seen * source).square().div(source).sum()) / seen
    freedom = len(source) - 1
    chance = freedom + SURE * math.sqrt(2 * freedom)
    return max(0.0, 1 - chance / max(chi, 1e-12))


def make_alarm(on_shift: ShiftAlarm | Callable[[Health], object] | None) -> ShiftAlarm | None:
    """Return the alarm; a function stands for an alarm with defaults."""
    if on_shift is None or isinstance(on_shift, ShiftAlarm):
        return on_shift
    return ShiftAlarm(on_shift)
