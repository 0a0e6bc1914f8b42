"""`ShiftAlarm`: tells when a stream begins to shift, and when that is over.

It judges blocks of images, each by itself, so that no image counts twice and blocks of a clean
stream are independent of each other.

Images of one class resemble each other, so that a block of one class counts for fewer images. The
chain says for how many, or else the predicted classes do. But batch statistics hide the classes of
a batch, so classes are believed to be many only if they were seen before a shift.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ttapca._checks import Number, Whole, check_option
from ttapca.adaptation.health import Health, joint_p_value
from ttapca.errors import CallbackWarning, OptionError
from ttapca.spectral.chain import design_effect
from ttapca.spectral.closed_form import ClosedFormGain
from ttapca.spectral.closed_form_rule import independent_images
from ttapca.spectral.constants import CONSTANTS
from ttapca.spectral.stream_batch import StreamBatch
from ttapca.spectral.stream_state import TINY, AlarmState, StreamState


@dataclass(frozen=True)
class ShiftAlarm:
    """Calls a function when the shift of a stream begins, and when it ends.

    Args:
        callback: Is given the `Health` of the stream; `shifted` says whether the shift begins or
            ends. If it raises an `Exception`, there is a `CallbackWarning`, and the stream goes on.
        begins: A shift begins after `blocks` blocks in a row with at most this p-value.
        ends: A shift ends after as many in a row with a larger p-value than this one.
        blocks: Number of blocks in a row.
        images: Least number of images of a block.

    Example:
        >>> alarm = ShiftAlarm(print, blocks=2)
        >>> alarm.next(*alarm.next(False, 0, p_value=0.002), p_value=0.004)
        (True, 0)
    """

    callback: Callable[[Health], object]
    begins: float = CONSTANTS.rare
    ends: float = CONSTANTS.ends
    blocks: int = CONSTANTS.blocks
    images: int = CONSTANTS.block

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
        """Return, after one more block, whether a shift has begun, and blocks in a row against."""
        against = p_value > self.ends if shifted else p_value <= self.begins
        run = run + 1 if against else 0
        return (not shifted, 0) if run >= self.blocks else (shifted, run)


class ShiftWatch:
    """Looks at batches for an alarm, if any, by closed-form gains and the source's class shares."""

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
        self._constants = gains[0].constants if gains else CONSTANTS
        self._shares = shares

    @torch.no_grad()
    def look(self, batch: StreamBatch, number: int, logits: Tensor | None) -> bool:
        """Look at images of a stream in its last pass; return whether a shift began or ended."""
        if self.alarm is None or batch.left_out:
            return False
        if any(gain.number not in batch.newer for gain in self._gains):
            return False  # the model has left a layer out
        groups = enumerate(batch.groups)
        own = [group for group, (stream, _) in groups if stream == number]
        size = int(batch.newer[self._gains[0].number].samples[own].sum())
        before, chain = batch.states[number].alarm, None
        if batch.chains is not None:
            chain = batch.chains[number]
        counts, skew = before.counts, before.skew
        ordered = chain is not None and bool(chain.place[0])
        if logits is not None and not ordered:
            shift = float(batch.shift[own].max())
            counts, skew = self._classes_after(before, logits, size, shift)
        sums = self._sums(batch, own, before)
        runs, few, alike = before.runs, before.few, before.alike
        if batch.plan is not None:
            runs += float(batch.plan.runs[number])
            few += float(batch.plan.few[number])
            alike += float(batch.plan.alike[number])
        images = before.images + size
        after = AlarmState(
            before.shifted, before.run, images, runs, few, alike, tuple(sums), counts, skew
        )
        if images >= self.alarm.images:
            if ordered:
                independent = _independent_in_block(
                    float(images), runs, few, alike, self._constants.likeness
                )
            else:
                independent = independent_images(
                    float(images), self._skew_of(after), self._constants
                )
            if batch.alike is not None:
                resemblance = float(batch.alike[own].max())
                independent = min(independent, design_effect(float(images), resemblance))
            p_values = []
            for gain, total in zip(self._gains, sums, strict=True):
                # What resizing may have done to the images.
                leeway = batch.spectra[gain.number].leeway[own].amax(0)
                evidence = gain.evidence(total / images, images, independent, leeway=leeway)
                p_values.append(evidence.p_value)
            shifted, run = self.alarm.next(before.shifted, before.run, joint_p_value(p_values))
            after = AlarmState(shifted, run, counts=counts, skew=skew)
        batch.alarms[number] = after
        return after.shifted != before.shifted

    def _sums(self, batch: StreamBatch, own: list[int], before: AlarmState) -> list[Tensor]:
        sums = []
        for gain in self._gains:
            newer = batch.newer[gain.number]
            samples, energies = newer.samples[own], gain.by_band(newer.energies[own])
            sums.append(samples @ energies.to(samples))
        if before.energies:
            sums = [new + old.to(new) for new, old in zip(sums, before.energies, strict=True)]
        return sums

    def _classes_after(
        self, before: AlarmState, logits: Tensor, size: int, shift: float
    ) -> tuple[Tensor | None, float]:
        """Return how often each class was predicted of late, and the skew before any shift."""
        if not isinstance(logits, Tensor) or logits.dim() < 2:
            return before.counts, before.skew
        if self._shares is not None and logits.shape[1] != len(self._shares):
            return before.counts, before.skew
        places = [d for d in range(logits.dim()) if d != 1]
        counts = size * logits.detach().double().softmax(1).mean(places).cpu()
        if before.counts is not None and len(before.counts) == len(counts):
            counts = counts + before.counts.to(counts) * math.exp(-size / CONSTANTS.recent)
        if shift or self._shares is None or float(counts.sum()) < CONSTANTS.recent / 2:
            return counts, before.skew
        return counts, skew_of(counts, self._shares)

    def _skew_of(self, alarm: AlarmState) -> float:
        """Return how surely classes are not those of the source: the worst if that is unknown."""
        counts, shares = alarm.counts, self._shares
        if counts is None or shares is None or len(shares) != len(counts):
            return 1.0
        return max(alarm.skew, skew_of(counts, shares))

    def facts_in(self, state: StreamState) -> dict[str, Any]:
        """Return the facts of the alarm about a stream, under names of `Health`."""
        if self.alarm is None:
            return {}
        alarm = state.alarm
        found: dict[str, Any] = {"shifted": alarm.shifted}
        if state.chain is not None and bool(state.chain.place[0]):
            return found
        found["skew"] = self._skew_of(alarm)
        if alarm.counts is not None and alarm.counts.sum():
            found["composition"] = tuple((alarm.counts / alarm.counts.sum()).tolist())
        return found

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


def _independent_in_block(
    samples: float, runs: float, few: float, alike: float, likeness: float
) -> float:
    """Return the number of independent images for which a block of images counts by itself.

    `runs` begin in it, and another one may go on from the block before; `few` of its images are of
    few classes in no order, and `alike` is the same, each times how alike they are. `likeness` is
    the correlation of the band energies of two images of one class.
    """
    others = samples - few
    begun = max(min(runs + 1, others), TINY)
    found = begun * design_effect(max(others, 0.0) / begun, likeness)
    return float(found + design_effect(few, likeness * alike / max(few, TINY)))


def skew_of(counts: Tensor, shares: Tensor) -> float:
    """Return how surely classes, counted, were not drawn by these shares, from 0 to 1.

    The cube root of chi squared is about normal (Wilson and Hilferty, 1931).
    """
    seen, source = float(counts.sum()), shares.to(counts)
    if seen <= 0:
        return 0.0
    chi = float((counts - seen * source).square().div(source).sum()) / seen
    freedom = max(1, len(source) - 1)
    seldom = NormalDist().inv_cdf(1 - CONSTANTS.rare**CONSTANTS.blocks)
    variance = 2 / (9 * freedom)
    chance = freedom * (1 - variance + seldom * math.sqrt(variance)) ** 3
    return max(0.0, 1 - chance / max(chi, 1e-12))
