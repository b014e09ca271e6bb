"""The ledger of steps: marks in the step, agreement with the other ranks beside it, records after it.

At the end of a step in which ranks synchronise, each rank posts one small control word (loss, samples, when
its payloads were ready, what it did before, whether a stop is wanted) and reads it a step later (`patience`),
when it has long arrived. So all ranks learn the mean loss, divide their waiting alike and stop at the same
step, and none of that costs a wait. A step in which ranks do not synchronise posts nothing: its loss is in
the next step's word that does.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.overflow import overflow
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
from ddprun.telemetry.step import Agreed, Marks, Round, Settled, Step
from ddprun.telemetry.stragglers import Stragglers
from ddprun.telemetry.word import Word, Words, told_buckets
from ddprun.telemetry.writer import Writer
from ddprun_hooks.exchange import Control, Posted
from ddprun_hooks.flight import Flight


class Ledger:
    """Keeps the time of every step of this rank and writes every n-th.

    Args:
        clock: of the device the steps run on.
        control: for the control word.
        writer: takes the records.
        every: write the records of every n-th step.
        stragglers: looks for late ranks; on rank 0 alone.
        observe: is told of every step's record, and of what landed in it.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        control: Control,
        writer: Writer,
        every: int,
        stragglers: Stragglers | None = None,
        observe: Callable[[dict[str, Any], Sequence[Flight[int]]], None] | None = None,
    ) -> None:
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
        self.stragglers = stragglers
        self._observe = observe
        self._buckets = 0  # gradient buckets of the stage
        self._closed: deque[Step] = deque()  # ended, marks not read yet
        # step; what found something; control word under way
        self._posted: deque[tuple[int, Settled | None, list[Flight[int]], Posted]] = deque()
        self._round = Round()
        self._step: Step | None = None
        self._aside = Marks()  # traffic outside of steps
        self._last_end: Any = None  # mark of the last step's end, within a stage

    def begin_stage(self, params: Sequence[tuple[str, ...]]) -> None:
        """Steps of another stage begin.

        Args:
            params: of each gradient bucket that ranks exchange in it; the same on all ranks.
        """
        self._buckets = len(params)
        if self.stragglers is not None:
            self.stragglers.begin_stage(params)

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

    def pause(self) -> list[Agreed]:
        """Settle as `drain` does; what comes before the next step is none of its time."""
        self._last_end = None
        return self.drain()

    def state_dict(self) -> dict[str, Any]:
        """What has been added up; after `drain`."""
        return {
            "totals": self.totals.numbers(),
            "round": self._round.plain(),
            "own_loss": self.own_loss,
            "stragglers": [] if self.stragglers is None else self.stragglers.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on adding up."""
        self.totals = Totals.of(state["totals"])
        self._round = Round.of(state["round"])
        self.own_loss = state["own_loss"]
        if self.stragglers is not None:
            self.stragglers.load_state_dict(state["stragglers"])

    def write_aside(self, stage: int, step: int) -> None:
        """Write the records of what was exchanged between steps, and count it."""
        traffic, self._aside = self._aside.read(self._clock), Marks()
        self._round.find(traffic.landed)
        self._count_traffic(traffic.landed, 0)
        self._write_buckets([(flight, None) for flight in traffic.landed], stage, step)

    def _close(self, step: Step) -> None:
        settled = self._settle(step)
        self._round.add(settled)
        self.own_loss = settled.loss
        if step.synchronised:
            self._post(step.number, settled)
        else:
            self._finish(settled, None)

    def _post(self, number: int, settled: Settled | None) -> None:
        """Send the control word of a step in which ranks synchronised, or of those since the last one."""
        found, self._round = self._round, Round()
        word = Word(found.loss_sum, found.samples, code=found.code, spent=found.spent)
        if settled is not None:
            step, at = settled.step, settled.sync.last_ready_us
            word = replace(
                word,
                stop=step.stop,
                checkpoint=step.checkpoint,
                compare_clocks=step.compare_clocks,
                sync_ready=0.0 if at is None else at - self.offset_us,
                ready=self._ready(settled),
            )
        posted = self._control.post(word.numbers(self._buckets))
        self._posted.append((number, settled, found.flights, posted))

    def _ready(self, settled: Settled) -> list[float]:
        """When this rank had the buckets ready that a word tells of; none if it exchanged no gradients."""
        at = {flight.bucket: flight.ready - self.offset_us for flight in settled.backward.landed}
        return [at.get(bucket, 0.0) for bucket in told_buckets(self._buckets)] if at else []

    def _settle(self, step: Step) -> Settled:
        start = self._clock.us(step.laps[0][1])
        us = dict.fromkeys(PARTS, 0)
        before, laps = start, []
        for part, mark in step.laps[1:]:
            now = self._clock.us(mark)
            us[part] += now - before
            laps.append((part, now - before))
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
        return Settled(step, us, start, laps, backward, sync, loss, samples)

    def _collect(self) -> Agreed:
        number, settled, finders, posted = self._posted.popleft()
        words = Words(posted.wait())
        if settled is not None:
            self._finish(settled, words)
        news = self.stragglers is not None and settled is not None and self.stragglers.add(number, words)
        return Agreed(
            step=number,
            mean_loss=words.mean_loss,
            rank_losses=words.rank_losses,
            stop=words.stop,
            checkpoint=words.checkpoint,
            compare_clocks=words.compare_clocks,
            overflow=overflow(words.codes, finders),
            straggler=None if self.stragglers is None else self.stragglers.now,
            straggler_is_news=news,
        )

    def _finish(self, settled: Settled, words: Words | None) -> None:
        """Divide a step's time as far as all ranks' clocks allow, count it, write it.

        Args:
            settled: the step.
            words: of all ranks; None: they have not met in it.
        """
        us, known = settled.us, self._all_ready(settled, words)
        in_backward, in_sync = (
            exposed(traffic, [at or 0.0 for at in ready])
            for traffic, ready in zip((settled.backward, settled.sync), known, strict=True)
        )
        us["backward_us"] -= in_backward.total_us
        us["sync_us"] -= in_sync.total_us
        us["exposed_hook_us"] = in_backward.hook_us + in_sync.hook_us
        us["exposed_wait_us"] = in_backward.wait_us + in_sync.wait_us
        us["exposed_wire_us"] = in_backward.wire_us + in_sync.wire_us
        self._count(settled, in_backward, in_sync)
        if self._observe is not None:
            self._observe(self._record(settled, words), settled.landed)
        if settled.step.number % self._every == 0:
            ready = [at for row in known for at in row]
            self._write(settled, list(zip(settled.landed, ready, strict=True)), words)

    def _all_ready(self, settled: Settled, words: Words | None) -> list[list[float | None]]:
        """When the last rank had each payload of backward, and beside it, ready, on this rank's clock."""
        gradients = [] if words is None else words.all_ready(self._buckets)
        beside = 0.0 if words is None else float(words.sync_ready.max())
        return [
            [
                gradients[flight.bucket] + self.offset_us if gradients else None
                for flight in settled.backward.landed
            ],
            [beside + self.offset_us if beside else None for _ in settled.sync.landed],
        ]

    def _count(self, settled: Settled, *splits: Exposed) -> None:
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

    def _record(self, settled: Settled, words: Words | None) -> dict[str, Any]:
        """The line of a step; once its time is divided."""
        step = settled.step
        return {
            "v": VERSION,
            "rank": self._control.rank,
            "stage": step.stage,
            "step": step.number,
            "samples": settled.samples,
            "loss": settled.loss,
            "mean_loss": None if words is None else words.mean_loss,
            "start_us": settled.start_us,
            **settled.us,
            "step_us": sum(settled.us.values()),
            "laps": [[part.removesuffix("_us"), us] for part, us in settled.laps if us],
            "waits": [[start, end] for start, end in settled.waits if end > start],
        }

    def _write(
        self, settled: Settled, landed: Sequence[tuple[Flight[int], float | None]], words: Words | None
    ) -> None:
        line = self._record(settled, words)
        self._writer.put(f"steps/rank-{self._control.rank:05}.jsonl", lambda: [line])
        self._write_buckets(landed, settled.step.stage, settled.step.number)

    def _write_buckets(
        self, landed: Sequence[tuple[Flight[int], float | None]], stage: int, step: int
    ) -> None:
        rank = self._control.rank
        if landed:
            self._writer.put(
                f"buckets/rank-{rank:05}.jsonl",
                lambda: [bucket_record(*one, rank=rank, stage=stage, step=step) for one in landed],
            )
