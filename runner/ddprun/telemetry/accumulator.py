"""What this rank adds up from one control message to the next, and the words that come of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ddprun.telemetry.control_message import (
    CODE_AT,
    LOSS_AT,
    READY_AT,
    SAMPLES_AT,
    SPENT_AT,
    STEPS_AT,
    SUMS,
    SYNC_READY_AT,
    US_AT,
    WISHES_AT,
    Numbers,
    blank,
)
from ddprun.telemetry.overflow import first_finding
from ddprun.telemetry.resolve import ResolvedSteps
from ddprun_hooks.comm.trace import BucketTrace


@dataclass(slots=True)
class OwnMessages:
    """Words of this rank's."""

    steps: list[int]
    """About which they are; one more than `rows` if the last one tells the rest of a stage, whose steps are
    finished."""

    rows: list[int]
    """Of these steps, where they are settled."""

    finders: dict[int, Sequence[BucketTrace[int]]]
    """By place, payloads in which something was found since the word before."""


@dataclass(slots=True)
class Accumulator:
    """Since the last word."""

    sums: Numbers = field(default_factory=lambda: np.zeros(len(SUMS)))
    last_step: int = 0
    code: int = 0
    """What was found first (`telemetry.overflow`)."""

    finders: list[BucketTrace[int]] = field(default_factory=list)

    def find(self, landed: Sequence[BucketTrace[int]]) -> None:
        """Keep the first finding."""
        if found := [trace for trace in landed if trace.findings]:
            self.code = self.code or first_finding(found)
            self.finders += found

    def plain(self) -> dict[str, Any]:
        """As a checkpoint can hold it; `of` reads it back."""
        loss_sum, samples, steps, us, *spent = self.sums.tolist()
        return {
            "loss_sum": loss_sum,
            "samples": int(samples),
            "steps": int(steps),
            "us": int(us),
            "last_step": self.last_step,
            "code": self.code,
            "spent": spent,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "Accumulator":
        """From what `plain` gave."""
        sums = [plain["loss_sum"], plain["samples"], plain["steps"], plain["us"], *plain["spent"]]
        return cls(np.array(sums, dtype=np.float64), plain["last_step"], plain["code"])

    def tell(
        self, resolved: ResolvedSteps, *, buckets: Sequence[int], offset_us: float
    ) -> tuple[OwnMessages, Numbers, "Accumulator"]:
        """The words about those steps in which ranks have synchronised, and what is left for the next one.

        Args:
            resolved: steps after those of this round.
            buckets: those whose ready times are told.
            offset_us: how far this rank's clock is ahead of rank 0's.

        Returns:
            The words, their numbers, of shape (words, numbers of a word), and the round that has begun.
        """
        steps = resolved.steps
        rows = [row for row, step in enumerate(steps) if step.synchronised]
        numbers = blank(len(rows), len(buckets))
        left = self._add_up(resolved, rows, numbers)
        if rows:
            numbers[:, WISHES_AT] = [steps[row].wishes for row in rows]
            _put_moments(resolved, rows, numbers, buckets, offset_us)
        finders = self._find_in(resolved, rows, numbers, left)
        return OwnMessages([steps[row].number for row in rows], rows, finders), numbers, left

    def rest(self, buckets: int) -> Numbers:
        """A word about no step of its own: shape (1, numbers of a word), with room for ready times."""
        numbers = blank(1, buckets)
        numbers[0, :WISHES_AT] = self.sums
        numbers[0, CODE_AT] = self.code
        return numbers

    def _add_up(self, resolved: ResolvedSteps, rows: Sequence[int], numbers: Numbers) -> "Accumulator":
        """Put the sums into the words."""
        running = np.empty((1 + len(resolved.steps), len(SUMS)))
        running[0] = self.sums
        running[1:, SAMPLES_AT] = resolved.samples
        running[1:, STEPS_AT] = 1.0
        running[1:, US_AT] = resolved.step_us
        running[1:, SPENT_AT:] = resolved.spent_us
        # Losses are added in the order of their steps, whichever are settled together.
        loss_sum, losses = float(self.sums[LOSS_AT]), []
        for step, loss in zip(resolved.steps, resolved.loss_sums, strict=True):
            loss_sum += loss
            if step.synchronised:
                losses.append(loss_sum)
                loss_sum = 0.0
        running[:, LOSS_AT] = 0.0
        np.add.accumulate(running, axis=0, out=running)  # of whole numbers, so that differences are exact
        left = running[-1].copy()
        if rows:
            at = running[1:][rows]
            numbers[:, :WISHES_AT] = at
            numbers[1:, :WISHES_AT] -= at[:-1]
            numbers[:, LOSS_AT] = losses
            left -= at[-1]
        left[LOSS_AT] = loss_sum
        return Accumulator(left, resolved.steps[-1].number)

    def _find_in(
        self, resolved: ResolvedSteps, rows: Sequence[int], numbers: Numbers, left: "Accumulator"
    ) -> dict[int, Sequence[BucketTrace[int]]]:
        """Put into each word what was found first; gives who found it, by place."""
        found: dict[int, list[BucketTrace[int]]] = {}
        for row, trace in resolved.found:
            found.setdefault(row, []).append(trace)
        left.code, left.finders = self.code, list(self.finders)
        finders: dict[int, Sequence[BucketTrace[int]]] = {}
        if not found and not left.code and not left.finders:
            return finders
        message_of = {row: place for place, row in enumerate(rows)}
        for row in range(len(resolved.steps)):
            if row in found:
                left.find(found[row])
            place = message_of.get(row)
            if place is not None:
                numbers[place, CODE_AT] = left.code
                if left.finders:  # also where another rank alone may have lost something
                    finders[place] = left.finders
                left.code, left.finders = 0, []
        return finders


def _put_moments(
    resolved: ResolvedSteps, rows: Sequence[int], numbers: Numbers, told: Sequence[int], offset_us: float
) -> None:
    """Put into the words when this rank had its payloads ready."""
    message_of = np.full(len(resolved.steps), -1)
    message_of[rows] = range(len(rows))
    lines, buckets, ready, _ = resolved.bucket_times.landed
    messages, beside = message_of[lines // 2], lines % 2 > 0
    at = ready - offset_us
    if told:
        place = np.full(told[-1] + 1, -1)
        place[told] = range(len(told))
        mine = (messages >= 0) & ~beside
        mine &= place[np.where(mine, buckets, 0)] >= 0
        numbers[messages[mine], READY_AT + place[buckets[mine]]] = at[mine]
    if beside.any():
        mine = (messages >= 0) & beside
        np.maximum.at(numbers[:, SYNC_READY_AT], messages[mine], at[mine])


NOTHING_ADDED: Mapping[str, Any] = MappingProxyType(Accumulator().plain())
"""The part `round` of a recorder's state that has just met."""
