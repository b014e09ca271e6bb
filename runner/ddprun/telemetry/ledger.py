"""The ledger of steps: marks in the step, agreement with the other ranks beside it, records after it.

At the end of a step each rank posts one small control word (loss, samples, when its last bucket was ready,
whether a stop is wanted) and reads the word of an earlier step, which has long arrived. So all ranks learn
the mean loss, divide their waiting alike and stop at the same step, and none of that costs a wait.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.records import (
    PARTS,
    VERSION,
    Backward,
    Totals,
    bucket_record,
    communication_us,
    exposed,
)
from ddprun.telemetry.writer import Writer
from ddprun_hooks.exchange import Control, Posted
from ddprun_hooks.flight import Flight


@dataclass(slots=True)
class Step:
    """One step while it runs."""

    number: int
    stage: int
    laps: list[tuple[str, Any]]
    """(part that ended here, mark); the first entry only starts the time."""

    flights: list[Flight[Any]] = field(default_factory=list)
    backward_end: Any = None
    losses: list[tuple[Tensor, int]] = field(default_factory=list)
    """(mean loss of a micro-batch, samples) of this rank."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know alike about one finished step."""

    step: int
    mean_loss: float
    """Mean over all samples of all ranks."""

    rank_losses: tuple[float, ...]
    """Each rank's own mean."""

    stop: bool
    """Some rank wants to stop."""

    compare_clocks: bool
    """Rank 0 wants the clocks compared again."""

    overflow: tuple[int, str] | None = None
    """The first bucket whose mean a hook's cast made infinite though no rank's gradient was, and the hook."""


@dataclass(slots=True)
class _Settled:
    """A finished step whose marks have become microseconds."""

    step: Step
    us: dict[str, int]
    start_us: int
    backward: Backward
    loss: float
    samples: int
    finder: str
    """The hook that has found something, if one has."""

    posted: Posted


class Ledger:
    """Keeps the time of every step of this rank and writes every n-th.

    Args:
        clock: of the device the steps run on.
        control: for the control word.
        writer: takes the records.
        every: write the records of every n-th step.
    """

    def __init__(self, *, clock: Clock, control: Control, writer: Writer, every: int) -> None:
        self.totals = Totals()
        self.offset_us = 0.0
        """How far this rank's clock is ahead of rank 0's."""

        self.bucket_params: Mapping[int, Sequence[str]] = {}
        """Parameter names of each gradient bucket."""

        self._clock = clock
        self._control = control
        self._writer = writer
        self._every = every
        self._closed: deque[Step] = deque()  # ended, marks not read yet
        self._posted: deque[_Settled] = deque()  # control word under way
        self._step: Step | None = None
        self._last_end: Any = None  # mark of the last step's end, within a stage

    @property
    def current(self) -> Step:
        """The step that is running."""
        assert self._step is not None, "no step is running"
        return self._step

    def start(self, number: int, stage: int) -> None:
        """Start a step's time. What lies between two steps of a stage is the later one's `sync_us`."""
        now = self._clock.mark()
        laps = [("", now)] if self._last_end is None else [("", self._last_end), ("sync_us", now)]
        self._step = Step(number, stage, laps)

    def cancel(self) -> None:
        """Forget the step that was started: there is no data for it."""
        self._step = None

    def note_loss(self, mean: Tensor, samples: int) -> None:
        """Note a micro-batch's mean loss, shape (), and how many samples it is of."""
        self.current.losses.append((self._clock.on_host(mean), samples))

    def lap(self, part: str) -> None:
        """End a part of the step (one of `PARTS`); what follows belongs to the next."""
        self.current.laps.append((part, self._clock.mark()))

    def end_backward(self) -> None:
        """End the backward pass in which gradients were exchanged."""
        self.lap("backward_us")
        self.current.backward_end = self.current.laps[-1][1]

    def end(self, *, stop: bool, compare_clocks: bool) -> Agreed | None:
        """End the step; gives what is agreed about an earlier one, None while there is none."""
        self.lap("other_us")
        self._last_end = self.current.laps[-1][1]
        self._closed.append(self.current)
        self._step = None
        if len(self._closed) > self._clock.lag:
            self._post(self._closed.popleft(), stop, compare_clocks)
        return self._collect() if len(self._posted) > 1 else None

    def flush(self) -> list[Agreed]:
        """Settle every step that is still open; called at a stage's end by all ranks."""
        self._last_end = None
        while self._closed:
            self._post(self._closed.popleft(), False, False)
        return [self._collect() for _ in range(len(self._posted))]

    def _post(self, step: Step, stop: bool, compare_clocks: bool) -> None:
        start = self._clock.us(step.laps[0][1])
        us = dict.fromkeys(PARTS, 0)
        before = start
        for part, mark in step.laps[1:]:
            now = self._clock.us(mark)
            us[part] += now - before
            before = now
        end = self._clock.us(step.backward_end) if step.backward_end is not None else before
        backward = Backward(end, [flight.mapped(self._clock.us) for flight in step.flights])
        samples = sum(count for _, count in step.losses)
        loss_sum = sum(float(loss) * count for loss, count in step.losses if count)
        self._clock.rebase(step.laps[-1][1])
        ready = backward.last_ready_us - self.offset_us
        found, hook = _first_finding(backward.flights)
        word = [loss_sum, samples, ready, float(stop), float(compare_clocks), float(found)]
        loss = loss_sum / samples if samples else math.nan
        posted = self._control.post(word)
        self._posted.append(_Settled(step, us, start, backward, loss, samples, hook, posted))

    def _collect(self) -> Agreed:
        settled = self._posted.popleft()
        words = settled.posted.wait()  # (ranks, 6)
        losses, samples, ready, stop, clocks, found = words.unbind(1)
        split = exposed(settled.backward, float(ready.max()) + self.offset_us)
        us = settled.us
        us["backward_us"] -= split.total_us
        us["exposed_hook_us"], us["exposed_wait_us"], us["exposed_wire_us"] = (
            split.hook_us,
            split.wait_us,
            split.wire_us,
        )
        mean = float(losses.sum() / samples.sum())
        self._count(settled)
        if settled.step.number % self._every == 0:
            self._write(settled, mean)
        return Agreed(
            step=settled.step.number,
            mean_loss=mean,
            rank_losses=tuple((losses / samples).tolist()),
            stop=bool(stop.any()),
            compare_clocks=bool(clocks[0]),
            overflow=_overflow(found.int().tolist(), settled.finder),
        )

    def _count(self, settled: _Settled) -> None:
        totals = self.totals
        totals.steps += 1
        totals.samples += settled.samples
        for part, us in settled.us.items():
            totals.parts_us[part] += us
        totals.parts_us["step_us"] += sum(settled.us.values())
        parts = settled.us
        hidden_or_not = communication_us(settled.backward.flights)
        exposed_us = parts["exposed_hook_us"] + parts["exposed_wait_us"] + parts["exposed_wire_us"]
        totals.communication_us += max(hidden_or_not, exposed_us)
        totals.wire_bytes += sum(flight.wire_bytes for flight in settled.backward.flights)

    def _write(self, settled: _Settled, mean_loss: float) -> None:
        rank, step = self._control.rank, settled.step
        line = {
            "v": VERSION,
            "rank": rank,
            "stage": step.stage,
            "step": step.number,
            "samples": settled.samples,
            "loss": settled.loss,
            "mean_loss": mean_loss,
            "start_us": settled.start_us,
            **settled.us,
            "step_us": sum(settled.us.values()),
        }
        flights, params = settled.backward.flights, self.bucket_params
        self._writer.put(f"steps/rank-{rank:05}.jsonl", lambda: [line])
        self._writer.put(
            f"buckets/rank-{rank:05}.jsonl",
            lambda: [
                bucket_record(f, params.get(f.bucket, ()), rank=rank, stage=step.stage, step=step.number)
                for f in flights
            ],
        )


def _first_finding(flights: Sequence[Flight[int]]) -> tuple[int, str]:
    """The first bucket that did not come back finite, as a number for the control word, and who noticed.

    0: all did. 3 * bucket + 1: this rank's gradient was finite. 3 * bucket + 2: it was not.
    """
    for flight in sorted(flights, key=lambda flight: flight.bucket):
        for finding in flight.findings:
            if code := int(finding.code):
                return 3 * flight.bucket + code, finding.hook
    return 0, ""


def _overflow(found: Sequence[int], hook: str) -> tuple[int, str] | None:
    """What all ranks' numbers come to; the same on every rank, since all get the same mean."""
    if not any(found) or any(number % 3 == 2 for number in found):
        return None
    return max(found) // 3, hook
