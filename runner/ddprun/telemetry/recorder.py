"""The recorder of steps: marks in the step, agreement with the other ranks beside it, records after it.

Each rank has a small control message about every step in which ranks synchronise (loss, samples, when its
payloads were ready, what it did before, whether a stop is wanted). The words of half a second are posted
together, and read a step later (`control_delay_steps`), when they have long arrived. So all ranks learn the
mean loss, divide their waiting alike and stop at the same step, and none of that costs a wait. Steps in which
ranks do not synchronise have no word: their loss is in the next one.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddprun.telemetry.accumulator import Accumulator, OwnMessages
from ddprun.telemetry.batch import Account, Batch, Recorded, Unwritten
from ddprun.telemetry.clock import Clock
from ddprun.telemetry.control_message import (
    CHECKPOINT,
    COMPARE_CLOCKS,
    STOP,
    ControlMessages,
    blank,
    told_buckets,
)
from ddprun.telemetry.deferred import DeferredWork
from ddprun.telemetry.global_step import GlobalStep, agree
from ddprun.telemetry.records import PARTS, Totals, bucket_record
from ddprun.telemetry.resolve import beside, divide, resolve, under_way_us
from ddprun.telemetry.step import MarkBuffer, Step, Traffic
from ddprun.telemetry.stragglers import Stragglers
from ddprun.telemetry.writer import Writer
from ddprun_hooks.comm.control import Control
from ddprun_hooks.comm.trace import BucketTrace, now_us, read_findings
from ddprun_hooks.comm.uncounted import Uncounted

_TOGETHER_US = 500_000.0
"""Words of about so much time are posted together: an exchange, however small, costs threads of all ranks
their time, and so does code that has not run for a while. It is also how long a wish to stop may take to be
heard.
"""

_MOST_TOGETHER, _MOST_ON_A_DEVICE = 256, 32
"""So many words at most, so that what is kept of steps is bounded. Marks of a device take longer to read, and
the host gives it nothing to do meanwhile.
"""

_IN_A_ROW = 8
"""Records that are made before looking whether there is still time."""


class StepRecorder:
    """Keeps the time of every step of this rank and writes every n-th.

    Args:
        clock: of the device the steps run on.
        control: for the control message.
        writer: takes the records.
        every: write the records of every n-th step.
        stragglers: looks for late ranks; on rank 0 alone.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        control: Control,
        writer: Writer,
        every: int,
        stragglers: Stragglers | None = None,
    ) -> None:
        self.totals = Totals()
        self.offset_us = 0.0
        """How far this rank's clock is ahead of rank 0's."""

        self.control_delay_steps = 1
        """Control messages are read so many steps after the last one's: more where they share a slow link
        with what goes on beside training."""

        self.together = 1
        """Steps whose words are posted together; the same on all ranks."""

        self.own_loss = math.nan
        """This rank's mean loss in the newest step whose marks have been read."""

        self.nonfinite: tuple[int, float] | None = None
        """The first step whose own loss was not finite, and the loss; None: each was that has been read."""

        self.mark: Callable[[], Any] = clock.mark
        """This moment on the training thread's time line."""

        self.uncounted: list[tuple[int, Uncounted]] = []
        """Collectives of hooks' own that nobody has been told of yet, and in which step each was found."""

        self._known_uncounted: set[Uncounted] = set()
        self._clock = clock
        self._most_together = _MOST_ON_A_DEVICE if clock.lag else _MOST_TOGETHER
        self._control = control
        self._writer = writer
        self._every = every
        self.stragglers = stragglers
        self.deferred = DeferredWork()
        """What is left to do for steps that are over; all of it is done when a method here needs it."""

        self.observe: Callable[[dict[str, Any], Sequence[BucketTrace[int]]], None] | None = None
        """Is told of every step's record, and of what landed in it."""

        self._buckets = 0  # gradient buckets of the stage
        self._told_buckets: list[int] = []  # those whose ready times are told
        self._buffer = (
            MarkBuffer()
        )  # of the step that runs, and of those before it whose marks are not read yet
        self._untold = 0  # steps since words were posted
        self._resolved_at = 0  # by this rank's own clock
        self._batches: deque[Batch] = deque()  # settled, their words under way
        self._accumulator = Accumulator()
        self._step: Step | None = None
        self._aside = Traffic()  # outside of steps
        self._last_end: Any = None  # mark of the last step's end, within a stage

    def begin_stage(self, params: Sequence[tuple[str, ...]]) -> None:
        """Steps of another stage begin.

        Args:
            params: of each gradient bucket that ranks exchange in it; the same on all ranks.
        """
        self._buckets, self._told_buckets, self.together = len(params), told_buckets(len(params)), 1
        self._untold = 0
        if self.stragglers is not None:
            self.stragglers.begin_stage(params)

    @property
    def current(self) -> Step:
        """The step that is running."""
        assert self._step is not None, "no step is running"
        return self._step

    @property
    def traces(self) -> list[BucketTrace[Any]]:
        """Takes the gradient buckets of the step that is running."""
        return self._buffer.traces

    @property
    def sync(self) -> Traffic:
        """Takes what is exchanged beside backward, in the step that is running or between steps."""
        if self._step is None:
            return self._aside
        if self._step.sync is None:
            self._step.sync = Traffic()
        return self._step.sync

    def start(self, number: int, stage: int) -> None:
        """Start a step's time. What lies between two steps of a stage is the later one's `sync_us`."""
        now, before, buffer = self.mark(), self._last_end, self._buffer
        self._step = Step(number, stage)
        if before is None:
            buffer.parts.append("")
            buffer.marks.append(now)
        else:
            buffer.parts += ("", "sync_us")
            buffer.marks += (before, now)

    def cancel(self) -> None:
        """Forget the step that was started: there is no data for it."""
        self._step = None
        self._buffer.forget()

    def note_loss(self, mean: Tensor, samples: int) -> None:
        """Note a micro-batch's mean loss, shape (), and how many samples it is of.

        On a device it is read some steps later: its memory must be its own.
        """
        assert self._step is not None, "no step is running"
        self._buffer.losses.append(self._clock.on_host(mean))
        self._buffer.samples.append(samples)

    def lap(self, part: str) -> None:
        """End a part of the step (one of `PARTS`); what follows belongs to the next."""
        assert self._step is not None, "no step is running"
        buffer = self._buffer
        buffer.parts.append(part)
        buffer.marks.append(self.mark())

    def end_backward(self) -> None:
        """End the backward pass in which gradients were exchanged."""
        self.current.backward_end = len(self._buffer.marks)
        self.lap("backward_us")

    def end(
        self, *, stop: bool, compare_clocks: bool, checkpoint: bool = False, synchronised: bool = True
    ) -> list[GlobalStep]:
        """End the step; gives what is newly agreed about earlier ones.

        Args:
            stop: this rank wants to stop.
            checkpoint: this rank was asked for a checkpoint.
            compare_clocks: this rank wants the clocks compared.
            synchronised: the ranks have exchanged in this step; on all of them alike.
        """
        step = self.current
        self.lap("other_us")
        if not synchronised:
            step.synchronised = False
        if stop or checkpoint or compare_clocks:
            step.wishes = STOP * stop + CHECKPOINT * checkpoint + COMPARE_CLOCKS * compare_clocks
        self._last_end = self._buffer.marks[-1]
        self._buffer.close(step)
        self._untold += 1
        self._step = None
        due = 0
        for batch in self._batches:
            due += batch.last + self.control_delay_steps <= step.number
        if self._untold >= self.together + self._clock.lag and self._must_resolve():
            self._resolve(self._clock.lag)
        return [agreed for _ in range(due) for agreed in self._collect()] if due else []

    def flush(self) -> list[GlobalStep]:
        """Settle every step that is still open; called at a stage's end by all ranks, even by those that have
        taken no step since ranks met.
        """
        self._last_end = None
        self._resolve(0, the_rest=True)
        return self._collect_all()

    def drain(self) -> list[GlobalStep]:
        """Settle every step that is over, and read the control messages under way, without posting one for
        steps whose ranks have not met since; called by all ranks after the same step.
        """
        self._resolve(0)
        return self._collect_all()

    def pause(self) -> list[GlobalStep]:
        """Settle as `drain` does; what comes before the next step is none of its time."""
        self._last_end = None
        return self.drain()

    def state_dict(self) -> dict[str, Any]:
        """What has been added up; after `drain`."""
        return {
            "totals": self.totals.numbers(),
            "round": self._accumulator.plain(),
            "own_loss": self.own_loss,
            "stragglers": [] if self.stragglers is None else self.stragglers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on adding up."""
        self.totals = Totals.of(state["totals"])
        self._accumulator = Accumulator.of(state["round"])
        self.own_loss = state["own_loss"]
        if self.stragglers is not None:
            self.stragglers.load_state_dict(state["stragglers"])

    def write_aside(self, stage: int, step: int) -> None:
        """Write the records of what was exchanged between steps, and count it."""
        traffic, self._aside = self._aside, Traffic()
        bucket_times = beside([(0, traffic)], self._clock)
        landed = bucket_times.traces
        read_findings(landed)
        self._note_uncounted((step, trace) for trace in landed)
        self._accumulator.find(landed)
        self._count_traffic(landed, int(under_way_us(bucket_times.landed, 1)[0]))
        records = Unwritten(self._control.rank)
        for trace in landed:
            records.add_payload(
                bucket_record(trace, None, {}, stage=stage, step=step, rank=self._control.rank)
            )
        records.put(self._writer)

    def _must_resolve(self) -> bool:
        """Whether steps wait that have words, which is so on all ranks after the same step; or, if none of
        them has one, whether they have waited for a while.

        That while is each rank's own. It decides of nothing that ranks do together: steps with a word are
        never settled by it, and `_untold` starts anew with words alone.
        """
        readable = (
            len(self._buffer.steps) - self._clock.lag
        )  # of the newest, marks might have to be waited for
        if readable < 1:
            return False
        if any(step.synchronised for step in islice(self._buffer.steps, readable)):
            return True
        return readable >= self._most_together or now_us() - self._resolved_at >= _TOGETHER_US

    def _resolve(self, but: int, *, the_rest: bool = False) -> None:
        """Read the marks of all steps that are over but the last `but`, and post their words.

        Args:
            but: steps whose marks cannot be read yet without waiting.
            the_rest: one word more, for steps whose ranks have not met since the last one.
        """
        self.deferred.do_all()
        self._resolved_at = now_us()
        buffer = self._buffer
        self._buffer = buffer.split_off(len(buffer.steps) - but)
        resolved, messages, last = None, OwnMessages([], [], {}), self._accumulator.last_step
        numbers = blank(0, len(self._told_buckets))
        if buffer.steps:
            last = buffer.steps[-1].number
            resolved = resolve(buffer, self._clock, every=self._every)
            self._note_uncounted(resolved.numbered_traces())
            self.own_loss = resolved.own_loss
            if self.nonfinite is None and not math.isfinite(sum(resolved.loss_sums)):
                losses = zip(resolved.steps, resolved.loss_sums, strict=True)
                self.nonfinite = next(
                    ((step.number, loss) for step, loss in losses if not math.isfinite(loss)), None
                )
            messages, numbers, self._accumulator = self._accumulator.tell(
                resolved, buckets=self._told_buckets, offset_us=self.offset_us
            )
        if the_rest:
            # Also from a rank that has none: where ranks do not meet, others may have.
            rest, self._accumulator = self._accumulator, Accumulator()
            messages.finders[len(messages.steps)] = rest.finders
            messages.steps.append(last)
            numbers = np.vstack((numbers, rest.rest(len(self._told_buckets))))
        if messages.steps:
            self._untold = but
        if resolved is not None or messages.steps:
            batch = Batch(resolved, messages, None, last)
            self._batches.append(batch)  # first, so that it is salvaged if nothing can be posted any more
            if messages.steps:
                batch.posted = self._control.post(torch.from_numpy(numbers.ravel()))

    def _note_uncounted(self, traces: Iterable[tuple[int, BucketTrace[int]]]) -> None:
        """Note what hooks have issued by themselves.

        Args:
            traces: each with its step.
        """
        for step, trace in traces:
            for note in trace.uncounted:
                if note not in self._known_uncounted:
                    self._known_uncounted.add(note)
                    self.uncounted.append((step, note))

    def _collect_all(self) -> list[GlobalStep]:
        agreed = [agreed for _ in range(len(self._batches)) for agreed in self._collect()]
        self.deferred.do_all()
        return agreed

    def _collect(self) -> list[GlobalStep]:
        """Read the words of the oldest batch; its steps are finished some time later."""
        batch = self._batches[0]  # until the others are heard, so that it is salvaged if they are gone
        messages = None
        if batch.posted is not None:
            told_by = batch.posted.wait().numpy()  # (ranks, numbers of all words)
            messages = ControlMessages(
                told_by.reshape(len(told_by), len(batch.messages.steps), -1).swapaxes(0, 1)
            )
            together = round(_TOGETHER_US / max(1.0, messages.usual_step_us))
            self.together = max(1, min(self._most_together, together))
        self._batches.popleft()
        if batch.resolved is not None:
            self.deferred.add(self._finish(batch, messages))
        return [] if messages is None else agree(batch.messages, messages, self.stragglers)

    def salvage(self) -> None:
        """Record the steps that are over, without what other ranks have told of them: the run has failed."""
        self.deferred.do_all()
        if self._clock.lag:
            return  # the device may never come to an end
        batches, self._batches = list(self._batches), deque()
        buffer, self._buffer = self._buffer, MarkBuffer()
        buffer.forget()
        if buffer.steps:
            resolved = resolve(buffer, self._clock, every=self._every)
            batches.append(Batch(resolved, OwnMessages([], [], {}), None, buffer.steps[-1].number))
        for batch in batches:
            if batch.resolved is not None:
                self.deferred.add(self._finish(batch, None))
        self.deferred.do_all()

    def _finish(self, batch: Batch, messages: ControlMessages | None) -> Iterator[None]:
        """Deferred work: divide the steps' time as far as all ranks' clocks allow, count it, record it.

        Args:
            batch: the steps.
            messages: of all ranks; None: they have not met in them.
        """
        account = Account(
            batch, messages, buckets=self._buckets, offset_us=self.offset_us, rank=self._control.rank
        )
        resolved = account.resolved
        exposed = divide(resolved, account.all_ready_us)
        under_way = under_way_us(resolved.bucket_times.landed, len(resolved.steps))
        self._count_traffic(resolved.bucket_times.traces, int(np.maximum(under_way, exposed).sum()))
        totals = self.totals
        totals.steps += len(resolved.steps)
        totals.samples += sum(resolved.samples)
        for part, us in zip(PARTS, resolved.us.sum(0).tolist(), strict=True):
            totals.parts_us[part] += us
        totals.parts_us["step_us"] += sum(resolved.step_us)
        yield
        records, lines = account.records(every=self._every, all_of_them=self.observe is not None), 0
        unwritten = Unwritten(self._control.rank)
        try:
            for recorded in records:
                lines += self._record(recorded, unwritten)
                if lines >= _IN_A_ROW:
                    lines = 0
                    yield
        finally:
            unwritten.put(self._writer)

    def _record(self, recorded: Recorded, unwritten: Unwritten) -> int:
        """Record a step, and tell whoever looks on; gives how many lines that took."""
        record, gradients, landed, all_ready = recorded
        if self.observe is not None:
            self.observe(record, landed)
        stage, step, rank = record["stage"], record["step"], self._control.rank
        if step % self._every:
            return 1
        unwritten.add_step(record)
        for trace, ready in zip(landed, all_ready, strict=True):
            unwritten.add_payload(
                bucket_record(trace, ready or None, gradients, stage=stage, step=step, rank=rank)
            )
        return 1 + len(landed)

    def _count_traffic(self, landed: Sequence[BucketTrace[int]], communication_us: int) -> None:
        self.totals.communication_us += communication_us
        self.totals.wire_bytes += sum(trace.wire_bytes for trace in landed)
