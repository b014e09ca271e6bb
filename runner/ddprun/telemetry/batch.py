"""Steps that are settled together, and their records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ddprun.telemetry.accumulator import OwnMessages
from ddprun.telemetry.control_message import ControlMessages, Numbers
from ddprun.telemetry.intervals import Ints
from ddprun.telemetry.records import PARTS, VERSION
from ddprun.telemetry.resolve import ResolvedSteps, mean
from ddprun.telemetry.writer import Writer, dumps
from ddprun_hooks.comm.control import PendingMessage
from ddprun_hooks.comm.trace import BucketTrace

_LAPS = {part: part.removesuffix("_us") for part in PARTS} | {"": ""}


@dataclass(slots=True)
class Batch:
    """Steps that are settled together."""

    resolved: ResolvedSteps | None
    """None: there is none, but a word is told all the same."""

    messages: OwnMessages
    """What this rank tells of them."""

    posted: PendingMessage | None
    """The words under way; None: there are none."""

    last: int
    """The newest step."""


class Recorded(NamedTuple):
    """A step whose time is divided."""

    record: dict[str, Any]
    gradients: Mapping[str, int]
    """When the gradients were complete, by parameter; empty if nobody has looked."""

    landed: Sequence[BucketTrace[int]]
    all_ready_us: Sequence[int]
    """When the last rank had each payload that landed ready, on this rank's clock; 0: ranks have not told."""


class Account:
    """A batch whose words are heard, or will never be: what its records say, step by step.

    Args:
        batch: whose steps have been settled.
        words: of all ranks about them; None: none of them has one.
        buckets: gradient buckets of the stage.
        offset_us: how far this rank's clock is ahead of rank 0's.
        rank: this one.
    """

    def __init__(
        self, batch: Batch, messages: ControlMessages | None, *, buckets: int, offset_us: float, rank: int
    ) -> None:
        assert batch.resolved is not None, "a batch without steps has no records"
        self.resolved = batch.resolved
        self._rank = rank
        count = len(self.resolved.steps)
        self.all_ready_us: Numbers = np.zeros(len(self.resolved.bucket_times.traces))
        """When the last rank had each payload ready, on this rank's clock; 0: ranks have not told."""

        self._mean_losses: list[float | None] = [None] * count
        if messages is not None:
            rows = batch.messages.rows
            message_of = np.full(count, -1)
            message_of[rows] = np.arange(len(rows))
            for row, loss in zip(rows, messages.mean_losses, strict=False):
                self._mean_losses[row] = loss
            self._match(messages, message_of, buckets, offset_us)

    def _match(self, messages: ControlMessages, message_of: Ints, buckets: int, offset_us: float) -> None:
        """Find the moments at which payloads were ready everywhere.

        Args:
            messages: of all ranks.
            message_of: the word about each step, -1: there is none; shape (steps,).
            buckets: of the stage.
            offset_us: added to moments that are told.
        """
        lines, bucket, _, _ = self.resolved.bucket_times.landed
        about, beside = message_of[lines // 2], lines % 2 > 0
        ready = np.where(beside, messages.last_sync_ready()[about], 0.0)
        if buckets:
            gradients = messages.all_ready(buckets)[about, np.where(beside, 0, bucket)]
            ready = np.where(beside, ready, gradients)
        self.all_ready_us = np.where((about >= 0) & (ready > 0), ready + offset_us, 0.0)

    def records(self, *, every: int, all_of_them: bool) -> Iterator[Recorded]:
        """The records of steps, once their time is divided; can be asked for once.

        Args:
            every: those of every n-th step are written.
            all_of_them: the others are wanted, too.
        """
        resolved, bucket_times = self.resolved, self.resolved.bucket_times
        steps, times, us = resolved.steps, resolved.times, resolved.us.tolist()
        ended, spans = [_LAPS[part] for part in resolved.buffer.parts], resolved.spans.tolist()
        ready = np.rint(self.all_ready_us).astype(np.int64).tolist()
        waits = bucket_times.waits[1:].T.tolist()
        landed, waited = (
            _bounds(bucket_times.landed[0], len(steps)),
            _bounds(bucket_times.waits[0], len(steps)),
        )
        for row, step in enumerate(steps):
            # Payloads are let go as soon as they are recorded, while the processor has them in its caches.
            size = landed[row + 1] - landed[row]
            traces = bucket_times.traces[:size]
            del bucket_times.traces[:size]
            if step.number % every and not all_of_them:
                continue
            first, end = resolved.firsts[row], resolved.firsts[row + 1]
            laps = zip(ended[first + 1 : end], spans[first + 1 : end], strict=True)
            # In the order of `PARTS`; written out, since this is made for every step.
            data, forward, backward, in_hook, waited_for, on_wire, optimizer, sync, other = us[row]
            record = {
                "v": VERSION,
                "rank": self._rank,
                "stage": step.stage,
                "step": step.number,
                "samples": resolved.samples[row],
                "loss": mean(resolved.loss_sums[row], resolved.samples[row]),
                "mean_loss": self._mean_losses[row],
                "start_us": times[first],
                "data_us": data,
                "forward_us": forward,
                "backward_us": backward,
                "exposed_hook_us": in_hook,
                "exposed_wait_us": waited_for,
                "exposed_wire_us": on_wire,
                "optimizer_us": optimizer,
                "sync_us": sync,
                "other_us": other,
                "step_us": resolved.step_us[row],
                "laps": [lap for lap in laps if lap[1] > 0],
                "waits": [wait for wait in waits[waited[row] : waited[row + 1]] if wait[1] > wait[0]],
            }
            yield Recorded(record, resolved.gradients[row], traces, ready[landed[row] : landed[row + 1]])


class Unwritten:
    """Records that are written together.

    Args:
        rank: whose they are.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._steps: list[bytes] = []
        self._payloads: list[bytes] = []

    def add_step(self, record: dict[str, Any]) -> None:
        """The record of a step."""
        self._steps.append(dumps(record))

    def add_payload(self, record: dict[str, Any]) -> None:
        """The record of a payload."""
        self._payloads.append(dumps(record))

    def put(self, writer: Writer) -> None:
        """Have them written."""
        for kind, lines in (("steps", self._steps), ("buckets", self._payloads)):
            if lines:
                writer.put(f"{kind}/rank-{self._rank:05}.jsonl", b"".join(lines), len(lines))


def _bounds(lines: Ints, rows: int) -> list[int]:
    """Where the entries of each step, in whose order they stand, begin; and where the last one's end."""
    bounds: list[int] = lines.searchsorted(np.arange(0, 2 * rows + 2, 2)).tolist()
    return bounds
