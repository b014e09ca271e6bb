"""The ledger of steps: marks in the step, agreement with the other ranks beside it, records after it.

At the end of a step in which ranks synchronise, each rank posts one small control word (loss, samples, when
its last payload was ready, whether a stop is wanted) and reads it a step later (`patience`), when it has long
arrived. So all ranks learn the mean loss, divide their waiting alike and stop at the same step, and none of
that costs a wait. A step in which ranks do not synchronise posts nothing: its loss is in the next step's word
that does.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import Tensor

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.records import (
    PARTS,
    VERSION,
    Exposed,
    Totals,
    Traffic,
    bucket_record,
    communication_us,
    exposed,
    tail,
)
from ddprun.telemetry.writer import Writer
from ddprun_hooks.exchange import Control, Posted
from ddprun_hooks.flight import Flight
from ddprun_hooks.payload import Kind

_KINDS: tuple[Kind, ...] = get_args(Kind)
_BUCKETS = 1_000_000
"""More than any model has: a bucket's number and its kind go into one number of the control word."""

_CODES = 3
_CHECKPOINT = 2  # beside 1, the wish to stop


@dataclass(slots=True)
class Marks:
    """Traffic of a step that runs, its times still marks."""

    sent: list[Flight[Any]] = field(default_factory=list)
    landed: list[Flight[Any]] = field(default_factory=list)
    waits: list[tuple[Any, Any]] = field(default_factory=list)

    def read(self, clock: Clock) -> Traffic:
        """The traffic in microseconds."""
        us = clock.us
        landed = [flight.mapped(us) for flight in self.landed]
        # What has not landed yet is not complete; of it only the time inside its hooks is wanted.
        sent = [_set_out(flight, clock) for flight in self.sent]
        return Traffic(sent, landed, [(us(start), us(end)) for start, end in self.waits])


def _set_out(flight: Flight[Any], clock: Clock) -> Flight[int]:
    return Flight(
        flight.kind,
        flight.bucket,
        flight.hooks,
        flight.dtype,
        flight.numel,
        flight.bytes,
        ready=clock.us(flight.ready),
        handed_over=clock.us(flight.handed_over),
    )


@dataclass(slots=True)
class Step:
    """One step while it runs."""

    number: int
    stage: int
    laps: list[tuple[str, Any]]
    """(part that ended here, mark); the first entry only starts the time."""

    flights: list[Flight[Any]] = field(default_factory=list)
    """Gradient buckets of the backward pass."""

    sync: Marks = field(default_factory=Marks)
    """What else was exchanged: changes of parameters, buffers."""

    backward_end: Any = None
    losses: list[tuple[Tensor, int]] = field(default_factory=list)
    """(mean loss of a micro-batch, samples) of this rank."""

    synchronised: bool = True
    stop: bool = False
    checkpoint: bool = False
    compare_clocks: bool = False


@dataclass(frozen=True, slots=True)
class Overflow:
    """A bucket whose mean a hook's cast made infinite though no rank's values were."""

    kind: Kind
    bucket: int
    hook: str
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know alike about one finished step, and about those since the last one like it."""

    step: int
    mean_loss: float
    """Mean over all samples of all ranks since the ranks synchronised before."""

    rank_losses: tuple[float, ...]
    """Each rank's own mean."""

    stop: bool
    """Some rank wants to stop."""

    checkpoint: bool
    """Some rank was asked for a checkpoint."""

    compare_clocks: bool
    """Rank 0 wants the clocks compared again."""

    overflow: Overflow | None = None
    """The first that is known."""


@dataclass(slots=True)
class _Settled:
    """A finished step whose marks have become microseconds."""

    step: Step
    us: dict[str, int]
    start_us: int
    backward: Traffic
    sync: Traffic
    loss: float
    samples: int

    @property
    def landed(self) -> list[Flight[int]]:
        return [*self.backward.landed, *self.sync.landed]


@dataclass(slots=True)
class _Round:
    """This rank's losses since the last control word, and what its hooks have found."""

    loss_sum: float = 0.0
    samples: int = 0
    steps: int = 0
    last_step: int = 0
    code: int = 0
    flights: list[Flight[int]] = field(default_factory=list)

    def find(self, landed: Sequence[Flight[int]]) -> None:
        """Keep the first finding."""
        self.code = self.code or _first_finding(landed)
        self.flights += [flight for flight in landed if flight.findings]

    def add(self, number: int, loss: float, samples: int) -> None:
        self.loss_sum += loss * samples if samples else 0.0
        self.samples += samples
        self.steps += 1
        self.last_step = number


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

        self.patience = 1
        """A control word is read so many steps after its own: more where it shares a slow link with what goes
        on beside training."""

        self.own_loss = math.nan
        """This rank's mean loss in the newest step whose marks have been read."""

        self._clock = clock
        self._control = control
        self._writer = writer
        self._every = every
        self._closed: deque[Step] = deque()  # ended, marks not read yet
        # step; what found something; control word under way
        self._posted: deque[tuple[int, _Settled | None, list[Flight[int]], Posted]] = deque()
        self._round = _Round()
        self._step: Step | None = None
        self._aside = Marks()  # traffic outside of steps
        self._last_end: Any = None  # mark of the last step's end, within a stage

    @property
    def current(self) -> Step:
        """The step that is running."""
        assert self._step is not None, "no step is running"
        return self._step

    @property
    def sync(self) -> Marks:
        """Takes what is exchanged beside backward, in the step that is running or between steps."""
        return self._aside if self._step is None else self._step.sync

    def mark(self) -> Any:
        """This moment on the training thread's time line."""
        return self._clock.mark()

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

    def end(
        self, *, stop: bool, compare_clocks: bool, checkpoint: bool = False, synchronised: bool = True
    ) -> list[Agreed]:
        """End the step; gives what is newly agreed about earlier ones.

        Args:
            stop: this rank wants to stop.
            checkpoint: this rank was asked for a checkpoint.
            compare_clocks: this rank wants the clocks compared.
            synchronised: the ranks have exchanged in this step; on all of them alike.
        """
        self.lap("other_us")
        step = self.current
        step.synchronised, step.stop = synchronised, stop
        step.checkpoint, step.compare_clocks = checkpoint, compare_clocks
        self._last_end = step.laps[-1][1]
        self._closed.append(step)
        self._step = None
        due = sum(number + self.patience <= step.number for number, *_ in self._posted)
        if len(self._closed) > self._clock.lag:
            self._close(self._closed.popleft())
        return [self._collect() for _ in range(due)]

    def flush(self) -> list[Agreed]:
        """Settle every step that is still open; called at a stage's end by all ranks."""
        self._last_end = None
        while self._closed:
            self._close(self._closed.popleft())
        if self._round.steps:
            self._post(self._round.last_step, None)
        return [self._collect() for _ in range(len(self._posted))]

    def drain(self) -> list[Agreed]:
        """Settle every step that is over, and read the control words under way, without posting one for
        steps whose ranks have not met since; called by all ranks after the same step.
        """
        while self._closed:
            self._close(self._closed.popleft())
        return [self._collect() for _ in range(len(self._posted))]

    def state_dict(self) -> dict[str, Any]:
        """What has been added up; after `drain`."""
        own = self._round
        return {
            "totals": self.totals.numbers(),
            "round": [own.loss_sum, own.samples, own.steps, own.last_step, own.code],
            "own_loss": self.own_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on adding up."""
        self.totals = Totals.of(state["totals"])
        self._round = _Round(*state["round"])
        self.own_loss = state["own_loss"]

    def write_aside(self, stage: int, step: int) -> None:
        """Write the records of what was exchanged between steps, and count it."""
        traffic, self._aside = self._aside.read(self._clock), Marks()
        self._round.find(traffic.landed)
        self._count_traffic(traffic.landed, 0)
        self._write_buckets(traffic.landed, stage, step)

    def _close(self, step: Step) -> None:
        settled = self._settle(step)
        self._round.add(step.number, settled.loss, settled.samples)
        self._round.find(settled.landed)
        self.own_loss = settled.loss
        if step.synchronised:
            self._post(step.number, settled)
        else:
            self._finish(settled, None, [0.0, 0.0])

    def _post(self, number: int, settled: _Settled | None) -> None:
        """Send the control word of a step in which ranks synchronised, or of those since the last one."""
        found = self._round
        word = [found.loss_sum, found.samples, 0.0, 0.0, 0.0, 0.0, float(found.code)]
        if settled is not None:
            step = settled.step
            ready = [traffic.last_ready_us for traffic in (settled.backward, settled.sync)]
            word[2:6] = [
                *(0.0 if at is None else at - self.offset_us for at in ready),
                float(step.stop + _CHECKPOINT * step.checkpoint),
                float(step.compare_clocks),
            ]
        self._round = _Round()
        self._posted.append((number, settled, found.flights, self._control.post(word)))

    def _settle(self, step: Step) -> _Settled:
        start = self._clock.us(step.laps[0][1])
        us = dict.fromkeys(PARTS, 0)
        before = start
        for part, mark in step.laps[1:]:
            now = self._clock.us(mark)
            us[part] += now - before
            before = now
        backward = Traffic()
        if step.backward_end is not None:
            flights = [flight.mapped(self._clock.us) for flight in step.flights]
            backward = Traffic(flights, flights, [tail(flights, self._clock.us(step.backward_end))])
        samples = sum(count for _, count in step.losses)
        loss_sum = sum(float(loss) * count for loss, count in step.losses if count)
        sync = step.sync.read(self._clock)
        self._clock.rebase(step.laps[-1][1])
        loss = loss_sum / samples if samples else math.nan
        return _Settled(step, us, start, backward, sync, loss, samples)

    def _collect(self) -> Agreed:
        number, settled, finders, posted = self._posted.popleft()
        words = posted.wait()  # (ranks, 7)
        losses, samples, backward, sync, stop, clocks, found = words.unbind(1)
        mean = float(losses.sum() / samples.sum())
        if settled is not None:
            self._finish(settled, mean, [float(ready.max()) + self.offset_us for ready in (backward, sync)])
        return Agreed(
            step=number,
            mean_loss=mean,
            rank_losses=tuple((losses / samples).tolist()),
            stop=bool((stop % _CHECKPOINT).any()),
            checkpoint=bool((stop >= _CHECKPOINT).any()),
            compare_clocks=bool(clocks[0]),
            overflow=_overflow(found.long().tolist(), finders),
        )

    def _finish(self, settled: _Settled, mean: float | None, all_ready_us: Sequence[float]) -> None:
        """Divide a step's time as far as all ranks' clocks allow, count it, write it."""
        us = settled.us
        in_backward = exposed(settled.backward, all_ready_us[0])
        in_sync = exposed(settled.sync, all_ready_us[1])
        us["backward_us"] -= in_backward.total_us
        us["sync_us"] -= in_sync.total_us
        us["exposed_hook_us"] = in_backward.hook_us + in_sync.hook_us
        us["exposed_wait_us"] = in_backward.wait_us + in_sync.wait_us
        us["exposed_wire_us"] = in_backward.wire_us + in_sync.wire_us
        self._count(settled, in_backward, in_sync)
        if settled.step.number % self._every == 0:
            self._write(settled, mean)

    def _count(self, settled: _Settled, *splits: Exposed) -> None:
        totals = self.totals
        totals.steps += 1
        totals.samples += settled.samples
        for part, us in settled.us.items():
            totals.parts_us[part] += us
        totals.parts_us["step_us"] += sum(settled.us.values())
        self._count_traffic(settled.landed, sum(split.total_us for split in splits))

    def _count_traffic(self, landed: Sequence[Flight[int]], exposed_us: int) -> None:
        self.totals.communication_us += max(communication_us(landed), exposed_us)
        self.totals.wire_bytes += sum(flight.wire_bytes for flight in landed)

    def _write(self, settled: _Settled, mean_loss: float | None) -> None:
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
        self._writer.put(f"steps/rank-{rank:05}.jsonl", lambda: [line])
        self._write_buckets(settled.landed, step.stage, step.number)

    def _write_buckets(self, flights: Sequence[Flight[int]], stage: int, step: int) -> None:
        rank = self._control.rank
        if flights:
            self._writer.put(
                f"buckets/rank-{rank:05}.jsonl",
                lambda: [bucket_record(f, rank=rank, stage=stage, step=step) for f in flights],
            )


def _first_finding(flights: Sequence[Flight[int]]) -> int:
    """The first payload that did not come back finite, as a number for the control word.

    0: all did. Else its kind, its bucket, and 1: this rank's values were finite, or 2: they were not.
    """
    for flight in sorted(flights, key=lambda flight: (flight.kind, flight.bucket)):
        for finding in flight.findings:
            if code := int(finding.code):
                return _CODES * (_BUCKETS * _KINDS.index(flight.kind) + flight.bucket) + code
    return 0


def _overflow(found: Sequence[int], flights: Sequence[Flight[int]]) -> Overflow | None:
    """What all ranks' numbers come to; the same on every rank, since all get the same mean."""
    if not any(found) or any(number % _CODES == 2 for number in found):
        return None
    kind, bucket = divmod(max(found) // _CODES, _BUCKETS)
    for flight in flights:
        if (flight.kind, flight.bucket) == (_KINDS[kind], bucket):
            hook = next((finding.hook for finding in flight.findings), "")
            names = tuple(param.name for param in flight.params)
            return Overflow(flight.kind, bucket, hook, names)
    return None
