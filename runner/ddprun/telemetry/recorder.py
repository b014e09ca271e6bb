"""The recorder of steps: marks in a step, control messages about it, records after it.

The loop calls `begin_step`, `lap` and `end_step`, which only append to the step's `StepMarks`
(`step_timing.py`). About every half second `end_step` resolves the steps that are over, and posts this
rank's control messages about those in which ranks exchanged something (`control_message.py`). It reads those
of all ranks `control_delay_steps` later, when they have long arrived, and returns what all agree on then
(`AgreedSteps`): so all ranks learn the mean loss and stop at the same step, and nothing waits for that.
Splitting the steps' waiting and making their records is deferred work, for when the training thread has to
wait anyway. The loss of a step in which ranks exchanged nothing is in the next message.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.control_message import (
    CHECKPOINT,
    COMPARE_CLOCKS,
    FINDING_AT,
    REQUESTS_AT,
    STEPS_AT,
    STOP,
    US_AT,
    MessageAccumulator,
    OwnMessages,
    all_ready_us,
    empty_messages,
    first_overflow,
    means_over_ranks,
)
from ddprun.telemetry.records import PARTS, ClockOffsets, MachineRecord, StepRecord, StragglerEpisode
from ddprun.telemetry.step_timing import (
    TOTALS,
    FloatArray,
    MicroBatchNumbers,
    NonBackwardExchanges,
    ResolvedSteps,
    StepMarks,
    TraceTimes,
    bucket_record,
    in_flight_us,
    loss_of,
    resolve_step_marks,
    split_exposed_time,
    step_records,
)
from ddprun.telemetry.stragglers import StragglerDetector
from ddprun.telemetry.writer import RecordWriter, encode_json_line, record_file
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.trace import BucketTrace, now_us, read_finding_codes
from ddprun_hooks.payload import Finding

_POST_EVERY_US = 500_000.0
"""Messages of about so much time are posted together: an exchange, however small, costs threads of all ranks
their time, and so does code that has not run for a while. A request to stop takes as long to be known."""

_MAX_PER_POST, _MAX_PER_POST_ON_DEVICE = 256, 32
"""At most so many messages in a post, which bounds the memory for steps. Fewer with a GPU: reading its marks
takes longer, and the GPU idles meanwhile."""

_COMPARE_CLOCKS_EVERY_S = 60.0  # none runs like another

_SLICE_US = 2000
"""How long `do_some_deferred` works. Meanwhile no thread of this rank can go on with a bucket that has
arrived. But each time the work is taken up again it waits for memory, and so does the model's code after it:
in steps of 3 ms that was 0.2 ms each time."""


class AgreedSteps(NamedTuple):
    """Steps in which ranks exchanged something: what all ranks now know of them, and of those before each."""

    steps: Sequence[int]  # at least one, oldest first
    stop: bool  # some rank asked to stop in one of them
    checkpoint: bool  # some rank was asked for a checkpoint
    compare_clocks: bool  # rank 0 wants the clocks compared again
    nonfinite: bool = False  # some rank's loss was not finite in one of the steps, or in one before them
    overflows: Sequence[tuple[int, BucketTrace[int], Finding]] = ()  # steps, and the first overflow of each
    straggler: StragglerEpisode | None = None  # who is late now
    straggler_changes: Sequence[
        tuple[int, StragglerEpisode | None]
    ] = ()  # steps, and who was late after each
    # A step in which these ranks alone exchanged nothing.
    skipped_exchange: tuple[int, list[int]] | None = None
    loss: float | None = None  # the newest mean loss that is known in the stage
    mean_values: Mapping[str, float] = MappingProxyType({})  # the newest means of numbers beside the loss


def combine_messages(
    own: OwnMessages,
    messages: FloatArray,
    means: Sequence[Sequence[float | None]],
    names: Sequence[str],
    turns: Sequence[int],
    stragglers: StragglerDetector,
    before: AgreedSteps | None = None,
) -> AgreedSteps | None:
    """What the messages of all ranks come to; None if they are about no step of any rank. `messages` are
    about the same steps as `own`, shape (messages, ranks, numbers of a message); so are `means`, of the loss
    and of the numbers of `names`; `turns` as in `loss_of`. `before`: what came before in the stage.
    """
    count = len(own.steps)
    if count > len(own.rows) and not messages[-1, :, STEPS_AT].any():
        count -= 1  # no rank had a step left at the stage's end
    if not count:
        return None
    changes = stragglers.add_messages(own.steps[: len(own.rows)], messages)
    overflows = list[tuple[int, BucketTrace[int], Finding]]()
    findings = messages[:count, :, FINDING_AT].astype(int)
    for message in np.flatnonzero(findings.any(1)).tolist():
        found = first_overflow(findings[message].tolist(), own.findings.get(message, ()))
        if found is not None:
            overflows.append((own.steps[message], *found))
    requests = np.bitwise_or.reduce(messages[..., REQUESTS_AT].astype(int), axis=0)  # of each rank
    of_any_rank = int(np.bitwise_or.reduce(requests))
    loss, values = (None, dict[str, float]()) if before is None else (before.loss, {**before.mean_values})
    for of_message in means[:count]:
        mean_loss = loss_of(of_message, turns)
        loss = loss if mean_loss is None else mean_loss
        values |= {n: mean for n, mean in zip(names, of_message[1:], strict=True) if mean is not None}
    return AgreedSteps(
        steps=own.steps[:count],
        stop=of_any_rank & STOP > 0,
        checkpoint=of_any_rank & CHECKPOINT > 0,
        compare_clocks=int(requests[0]) & COMPARE_CLOCKS > 0,
        nonfinite=not all(math.isfinite(of_message[0] or 0.0) for of_message in means),
        overflows=overflows,
        straggler=stragglers.current,
        straggler_changes=changes,
        skipped_exchange=_find_skipped_exchange(own, messages),
        loss=loss,
        mean_values=values,
    )


def _find_skipped_exchange(own: OwnMessages, messages: FloatArray) -> tuple[int, list[int]] | None:
    """The first step that some ranks took without an exchange and others with one, and those ranks."""
    since = messages[: len(own.rows), :, STEPS_AT].astype(int)  # steps of each rank since its last exchange
    uneven = np.flatnonzero(since.max(1) != since.min(1))
    if not len(uneven):
        return None
    first, message = since[uneven[0]], int(uneven[0])
    step = own.steps[message] - int(own.numbers[message, STEPS_AT]) + 1
    return step, np.flatnonzero(first > first.min()).tolist()


@dataclass(slots=True)
class _PendingSteps:
    """Steps that were resolved together, until the messages about them have arrived."""

    resolved: ResolvedSteps | None  # None: there were none, but a message was posted all the same
    own: OwnMessages
    last_step: int
    wait_for_gathered: Callable[[], Tensor] | None = None  # None: there are no messages about these steps


class StepRecorder:
    """Keeps the time of every step of this rank and writes the records of every n-th (`every`)."""

    def __init__(
        self,
        *,
        clock: Clock,
        control: ControlChannel,
        writer: RecordWriter,
        every: int,
        stragglers: StragglerDetector,
    ) -> None:
        self._clock, self._control, self._writer, self._every = clock, control, writer, every
        self.rank = control.rank
        self._max_per_post = _MAX_PER_POST_ON_DEVICE if clock.lag_steps else _MAX_PER_POST
        self.stragglers = stragglers
        self._deferred: deque[Iterator[None]] = deque()  # finished where its results are needed
        self.mark: Callable[[], Any] = clock.mark  # this moment on the training thread's time line
        self.offset_us = 0.0  # how far this rank's clock is ahead of rank 0's
        self.clocks_compared_s = time.monotonic()  # when that was measured last
        self.on_step_record: Callable[[StepRecord, Sequence[BucketTrace[int]]], None] | None = None
        """Is called with every step's record, and with the traces of what was waited for in it."""

        self.on_messages: Callable[[Sequence[int], FloatArray], None] | None = None
        """Is called with the steps that messages are about, and with those of all ranks."""

        self.control_delay_steps = 1
        """Messages are read so many steps later: more where they share a slow link with training."""

        self.exchanges_may_differ = False
        """One rank may exchange something in a step, and another one not: an error that messages show. Then
        only steps with an exchange count for when they post and read messages.
        """

        self.steps_per_post = 1  # steps whose messages are posted together; the same on all ranks
        self.totals = dict.fromkeys(TOTALS, 0)
        self.value_names: Sequence[str] = ()  # of the numbers beside the loss; the same on all ranks
        self._turns: Sequence[int] = (0,)  # as in `loss_of`
        self.agreed: AgreedSteps | None = None  # the newest of the stage
        self.own_loss = math.nan  # this rank's mean loss in the newest resolved step
        self.first_nonfinite_loss: tuple[int, float] | None = None  # the step, and this rank's loss in it
        self._bucket_numbers: Sequence[range] = ()  # of the gradient buckets of each turn of the stage
        self._step: StepMarks | None = None  # the running one
        self._ended: list[StepMarks] = []  # steps that are over, not resolved yet
        self._last_end: Any = None  # mark of the last step's end, within a stage
        self._last_cpu_ns = 0  # processor time of this process at that moment
        self._between_steps = NonBackwardExchanges()
        self._steps_since_post = 0
        self._last_exchange = 0  # of ranks that may differ: the newest step with one
        self._resolved_at = 0  # by this rank's own clock
        self._accumulator = MessageAccumulator()
        self._pending_steps: deque[_PendingSteps] = deque()  # whose messages are in flight

    def begin_stage(self, turns: Sequence[Mapping[int, tuple[str, ...]]], losses: Sequence[str] = ()) -> None:
        """Begin another stage. `turns`: for each of its turns, the parameters of the gradient buckets that
        ranks exchange, by the bucket's number, in the order in which backward fills them. `losses`: of its
        turns, by their names in `value_names`; none: the stage has one loss.
        """
        self._turns, self.agreed = [1 + self.value_names.index(name) for name in losses] or (0,), None
        self._bucket_numbers = [range(min(params), max(params) + 1) for params in turns if params]
        self.steps_per_post, self._steps_since_post = 1, 0
        params = {number: names for params in turns for number, names in params.items()}
        self.stragglers.begin_stage(params, self._bucket_numbers)

    # In a step.

    @property
    def running_step(self) -> StepMarks:
        """The running step."""
        assert self._step is not None, "no step is running"
        return self._step

    @property
    def traces(self) -> list[BucketTrace[Any]]:
        """Takes the gradient buckets of the running step."""
        return self.running_step.traces

    @property
    def non_backward_exchanges(self) -> NonBackwardExchanges:
        """Takes what is exchanged outside backward, in the running step or between steps."""
        if self._step is None:
            return self._between_steps
        if self._step.non_backward_exchanges is None:
            self._step.non_backward_exchanges = NonBackwardExchanges()
        return self._step.non_backward_exchanges

    def begin_step(self, number: int, stage: int) -> None:
        """Begin a step. What lies between two steps of a stage is the later one's `sync_us`."""
        now, before = self.mark(), self._last_end
        if before is None:
            self._last_cpu_ns = time.process_time_ns()
            self._step = StepMarks(number, stage, [""], [now])
        else:
            self._step = StepMarks(number, stage, ["", "sync_us"], [before, now])

    def cancel_step(self) -> None:
        """Drop the step that has begun: there is no data for it."""
        self._step = None

    def note_loss(
        self,
        mean: Tensor | None,
        samples: int,
        weight: float | None = None,
        values: Sequence[Tensor | None] = (),
    ) -> None:
        """Note a micro-batch's mean loss, shape () (None: it is not known), how many samples it is of, its
        weight in means (None: that is the number of samples), and the numbers of `value_names`; none: they
        are not known. On a device these are read some steps later: their memory must be their own.
        """
        numbers = [mean, *(values or [None] * len(self.value_names))]
        copies = [None if one is None else self._clock.copy_to_host(one) for one in numbers]
        micro_batch = MicroBatchNumbers(copies, samples, samples if weight is None else weight)
        self.running_step.micro_batches.append(micro_batch)

    @property
    def records_step(self) -> bool:
        """Whether the running step gets a record, in a file or for trackers."""
        return self.running_step.number % self._every == 0 or self.on_step_record is not None

    def note_update(
        self,
        param_groups: Sequence[Mapping[str, Any]],
        grad_norm: Tensor | None,
        group_norms: Sequence[Tensor | None] | None,
    ) -> None:
        """Note the learning rates of parameter groups, the norm of all gradients, and those of the groups.
        Norms are of shape (); None: not measured. On a device they are read some steps later, as losses are.
        """
        if not self.records_step:
            return
        step, copy_to_host = self.running_step, self._clock.copy_to_host
        rates = [group.get("lr") for group in param_groups]  # Adafactor's may be None
        if any(rate is not None for rate in rates):
            step.lr = [None if rate is None else float(rate) for rate in rates]
        step.grad_norm = None if grad_norm is None else copy_to_host(grad_norm.float())
        if group_norms is not None:
            step.group_grad_norms = [
                None if norm is None else copy_to_host(norm.float()) for norm in group_norms
            ]

    def lap(self, part: str) -> None:
        """End a part of the step (one of `PARTS`); what follows belongs to the next."""
        step = self._step
        assert step is not None, "no step is running"
        step.parts.append(part)
        step.marks.append(self.mark())

    def end_backward(self) -> None:
        """End a backward pass in which gradients were exchanged."""
        step = self.running_step
        step.backward_ends.append((len(step.marks), len(step.traces)))
        self.lap("backward_us")

    def note_gradient_times(self, marks: Mapping[str, Any]) -> None:
        """Note when a backward pass has completed each parameter's gradient."""
        self.running_step.gradient_marks = {**(self.running_step.gradient_marks or {}), **marks}

    def end_step(
        self,
        *,
        stop: bool = False,
        checkpoint: bool = False,
        exchanged: bool = True,
        at: Any = None,
        alone: bool = False,
    ) -> list[AgreedSteps]:
        """End the step, and return what all ranks newly agree on about earlier ones; waits for no message.

        `stop` and `checkpoint` are what this rank asks for. `exchanged`: ranks exchanged something in this
        step; alike on all of them. `at`: the mark of its end, if that was before now. `alone`: the other
        ranks may be gone, so nothing is exchanged.
        """
        step, cpu_ns = self.running_step, time.process_time_ns()
        step.parts.append("other_us")
        step.marks.append(self.mark() if at is None else at)
        step.cpu_us, self._last_cpu_ns = (cpu_ns - self._last_cpu_ns) // 1000, cpu_ns
        step.exchanged = exchanged
        if exchanged or not self.exchanges_may_differ:
            self._last_exchange = step.number
        compare_clocks = time.monotonic() - self.clocks_compared_s > _COMPARE_CLOCKS_EVERY_S
        if stop or checkpoint or compare_clocks:
            step.requests = STOP * stop + CHECKPOINT * checkpoint + COMPARE_CLOCKS * compare_clocks
        self._last_end = step.marks[-1] if at is None else None
        self._ended.append(step)
        self._steps_since_post += exchanged or not self.exchanges_may_differ
        self._step = None
        if alone:
            return []
        if self._clock.lag_steps:
            self._read_marks_early()
        due = 0
        for pending in self._pending_steps:
            if (
                pending.wait_for_gathered is not None
                and 0 < step.number - self._last_exchange < self._max_per_post
            ):
                break  # ranks may differ
            due += pending.last_step + self.control_delay_steps <= step.number
        enough = self._steps_since_post >= self.steps_per_post + self._clock.lag_steps
        if self.exchanges_may_differ and not self._steps_since_post:
            enough = True  # nothing to post
        if enough and self._must_resolve():
            self._resolve_and_post(self._count_unreadable_steps())
        return self._combine_oldest_posts(due) if due else []

    # Between steps.

    def compare_clocks(self) -> ClockOffsets:
        """Measure each rank's clock against rank 0's; called by all ranks at the same moment."""
        self.offset_us, bound = self._control.measure_clock_offset()
        measured = self._control.all_gather([self.offset_us, bound], "clock offsets")
        self.clocks_compared_s = time.monotonic()
        offset_us, error_us = ([round(us, 1) for us in column] for column in measured.T.tolist())
        return ClockOffsets(offset_us=offset_us, error_us=error_us)

    def wait_for_messages(self, *, post_remainder: bool = False) -> list[AgreedSteps]:
        """Wait for the messages about all steps that are over, and finish these.

        Called by all ranks after the same step. What they have added up since their last exchange stays for
        the next message; `post_remainder` sends it now.
        """
        self._resolve_and_post(0, post_remainder=post_remainder)
        agreed_steps = self._combine_oldest_posts(len(self._pending_steps))
        self._do_deferred()
        return agreed_steps

    def pause_timing(self) -> None:
        """What happens from here to the next step counts as no step's time."""
        self._last_end = None

    def end_stage(self) -> list[AgreedSteps]:
        """End the stage: `wait_for_messages`, with one message more for the steps since the last exchange.
        Called by all ranks, even by one without such steps.
        """
        self.pause_timing()
        return self.wait_for_messages(post_remainder=True)

    def record_between_step_exchanges(self, stage: int, step: int) -> None:
        """Write the records of what was exchanged between steps, and count it."""
        traffic, self._between_steps = self._between_steps, NonBackwardExchanges()
        traces, rank = list(self._clock.read_traces(traffic.completed)), self.rank
        read_finding_codes(traces)
        self._accumulator.note_findings(traces)
        times = TraceTimes.from_traces([0] * len(traces), traces)
        self._count_traffic(traces, int(in_flight_us(times, 1)[0]))
        records = [bucket_record(trace, None, {}, stage=stage, step=step, rank=rank) for trace in traces]
        self._write("buckets", list(map(encode_json_line, records)))

    def state_dict(self) -> dict[str, Any]:
        """What has been added up; after `wait_for_messages`."""
        return {
            "totals": [*self.totals.values()],
            "round": self._accumulator.state_dict(self.value_names),
            "own_loss": self.own_loss,
            "stragglers": msgspec.to_builtins(self.stragglers.episodes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on adding up."""
        self.totals = dict(zip(TOTALS, state["totals"], strict=True))
        self._accumulator = MessageAccumulator.from_state_dict(state["round"], self.value_names)
        self.own_loss = state["own_loss"]
        self.stragglers.episodes = msgspec.convert(state["stragglers"], list[StragglerEpisode])

    def salvage(self, *, wait_for_device: bool = False) -> None:
        """Record the steps that are over without the messages of other ranks: these may be gone. After a
        failure the device may never reach the end of a step.
        """
        self._do_deferred()
        if self._clock.lag_steps and not wait_for_device:
            return
        all_pending, self._pending_steps = self._pending_steps, deque()
        for pending in all_pending:
            if pending.resolved is not None:
                self._deferred.append(self._split_and_record(pending.resolved, pending.own, None))
        steps, self._ended = self._ended, []
        if steps:
            resolved = self._resolve(steps)
            self._deferred.append(self._split_and_record(resolved, empty_messages([]), None))
        self._do_deferred()

    # Steps that are over.

    def do_some_deferred(self) -> None:
        """Work for a short time: for when the thread has to wait anyway, as for gradients under way."""
        self._do_deferred(now_us() + _SLICE_US)

    def _do_deferred(self, until_us: float = math.inf) -> None:
        """Do what was deferred, in the order in which it came, until then."""
        while self._deferred:
            for _ in self._deferred[0]:
                if now_us() >= until_us:
                    return
            self._deferred.popleft()

    def _read_marks_early(self) -> None:
        """Read the marks of the step that the device has passed meanwhile: a little in each step, since the
        device would run out of work while many were read at once.
        """
        if len(self._ended) > self._clock.lag_steps:
            step = self._ended[-1 - self._clock.lag_steps]
            step.marks = self._clock.marks_to_us(step.marks)
            step.traces = list(self._clock.read_traces(step.traces))

    def _count_unreadable_steps(self) -> int:
        """The newest steps, whose marks the device has not reached; of ranks that may differ, as many with an
        exchange.
        """
        keep = lag = self._clock.lag_steps
        if self.exchanges_may_differ:
            steps = self._ended
            while keep < len(steps) and sum(step.exchanged for step in steps[len(steps) - keep :]) < lag:
                keep += 1
        return keep

    def _must_resolve(self) -> bool:
        """Whether steps are over that have a message, which is so on all ranks after the same step; or, if
        none of them has one, whether they have waited for a while.

        That while differs between ranks. It decides nothing that ranks do together: steps with a message
        never wait for it, and `_steps_since_post` counts from posted messages only.
        """
        readable = len(self._ended) - self._clock.lag_steps  # without waiting for a mark
        if readable < 1:
            return False
        if any(step.exchanged for step in islice(self._ended, readable)):
            return True
        return readable >= self._max_per_post or now_us() - self._resolved_at >= _POST_EVERY_US

    def _resolve_and_post(self, keep: int, *, post_remainder: bool = False) -> None:
        """Resolve the steps that are over, but for the newest `keep`, and post the messages about them.
        `post_remainder`: post one message more, for the steps since the last exchange.
        """
        self._do_deferred()
        self._resolved_at = now_us()
        count = len(self._ended) - keep
        steps, self._ended = self._ended[:count], self._ended[count:]
        own = empty_messages(self._bucket_numbers, 2 + 2 * len(self.value_names))
        last_step = self._accumulator.last_step
        resolved = None
        if steps:
            last_step = steps[-1].number
            recorded = [step for step in steps if step.number % self._every == 0]
            if recorded:
                # This takes some 70 µs; the load is the host's over a minute.
                resident, load = psutil.Process().memory_info().rss, round(os.getloadavg()[0], 2)
                recorded[-1].machine = MachineRecord(resident, self._clock.device_bytes(), load)
            resolved = self._resolve(steps)
            newest_first = (loss_of(means, self._turns) for means in reversed(resolved.means))
            self.own_loss = next((loss for loss in newest_first if loss is not None), self.own_loss)
            loss_sums = resolved.weighted_sums[:, 0]
            if self.first_nonfinite_loss is None and not np.isfinite(loss_sums).all():
                row = int(np.flatnonzero(~np.isfinite(loss_sums))[0])
                self.first_nonfinite_loss = resolved.steps[row].number, float(loss_sums[row])
            own = self._accumulator.add_and_make_messages(
                resolved, turns=self._bucket_numbers, offset_us=self.offset_us
            )
        if post_remainder:
            own.add_remainder(self._accumulator, last_step)
            self._accumulator = MessageAccumulator()
        if resolved is None and not own.steps:
            return
        pending = _PendingSteps(resolved, own, last_step)
        self._pending_steps.append(pending)  # first, so that it is salvaged if nothing can be posted any more
        if own.steps:
            exchanged = sum(step.exchanged for step in self._ended)
            self._steps_since_post = exchanged if self.exchanges_may_differ else keep
            numbers = np.hstack((own.numbers, own.weighted_sums))
            pending.wait_for_gathered = self._control.all_gather_async(torch.from_numpy(numbers.ravel()))

    def _resolve(self, steps: list[StepMarks]) -> ResolvedSteps:
        return resolve_step_marks(steps, self._clock, every=self._every, numbers=1 + len(self.value_names))

    def _combine_oldest_posts(self, posts: int) -> list[AgreedSteps]:
        """Read the messages of the oldest posts, whose steps are divided and recorded some time later."""
        agreed_steps = []
        for _ in range(posts):
            pending, messages, means = self._pending_steps[0], None, list[list[float | None]]()
            if pending.wait_for_gathered is not None:
                gathered: FloatArray = pending.wait_for_gathered().numpy()  # (ranks, numbers of all messages)
                gathered = gathered.reshape(len(gathered), len(pending.own.steps), -1).swapaxes(0, 1)
                messages, values = np.split(gathered, [pending.own.numbers.shape[1]], axis=2)
                means = means_over_ranks(values)
                steps, us = messages[..., STEPS_AT : US_AT + 1].sum((0, 1)).tolist()
                per_post = round(_POST_EVERY_US / max(1.0, us / max(1.0, steps)))
                self.steps_per_post = max(1, min(self._max_per_post, per_post))
            self._pending_steps.popleft()  # only now, so that it is salvaged if the other ranks are gone
            if pending.resolved is not None:
                record = self._split_and_record(pending.resolved, pending.own, messages, means)
                self._deferred.append(record)
            if messages is None:
                continue
            if self.on_messages is not None:
                self.on_messages(pending.own.steps, messages)
            names, turns, before = self.value_names, self._turns, self.agreed
            newest = combine_messages(pending.own, messages, means, names, turns, self.stragglers, before)
            if newest is not None:
                self.agreed = newest
                agreed_steps.append(newest)
        return agreed_steps

    def _split_and_record(
        self,
        resolved: ResolvedSteps,
        own: OwnMessages,
        messages: FloatArray | None,
        means: Sequence[Sequence[float | None]] = (),
    ) -> Iterator[None]:
        """Deferred work: split the steps' waiting, count their time, and record them. `messages`: those of
        all ranks, shape (messages, ranks, numbers of a message); None: there are none, and no `means`.
        """
        all_ready = all_ready_us(resolved, own, messages, offset_us=self.offset_us)
        exposed = split_exposed_time(resolved, all_ready)
        in_flight = in_flight_us(resolved.trace_times, len(resolved.steps))
        self._count_traffic(resolved.traces, int(np.maximum(in_flight, exposed).sum()))
        parts = zip(PARTS, resolved.parts_us.sum(0).tolist(), strict=True)
        for name, more in (("samples", sum(resolved.samples)), ("step_us", sum(resolved.step_us)), *parts):
            self.totals[name] += more
        yield
        all_means: list[Sequence[float | None]] = [()] * len(resolved.steps)
        for row, of_message in zip(own.rows, means, strict=False):
            all_means[row] = of_message
        every = self._every if self.on_step_record is None else 1
        steps, buckets = list[bytes](), list[bytes]()
        try:
            rank, names, turns = self.rank, self.value_names, self._turns
            for record, traces, of_buckets in step_records(
                resolved, all_means, all_ready, names, turns=turns, rank=rank, every=every
            ):
                if self.on_step_record is not None:
                    self.on_step_record(record, traces)
                if record.step % self._every == 0:
                    steps.append(encode_json_line(record))
                    buckets += map(encode_json_line, of_buckets)
                yield
        finally:
            self._write("steps", steps)
            self._write("buckets", buckets)

    def _write(self, kind: str, lines: Sequence[bytes]) -> None:
        if lines:
            self._writer.put(record_file(kind, self.rank), b"".join(lines), len(lines))

    def _count_traffic(self, traces: Sequence[BucketTrace[int]], communication_us: int) -> None:
        self.totals["communication_us"] += communication_us
        self.totals["wire_bytes"] += sum(trace.wire_bytes for trace in traces)
