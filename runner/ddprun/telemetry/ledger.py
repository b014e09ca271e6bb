"""The ledger of steps: marks in the step, agreement with the other ranks beside it, records after it.

Each rank has a small control word about every step in which ranks synchronise (loss, samples, when its
payloads were ready, what it did before, whether a stop is wanted). The words of a quarter of a second
are posted together, and read a step later (`patience`), when they have long arrived. So all ranks learn the
mean loss, divide their waiting alike and stop at the same step, and none of that costs a wait. Steps in which
ranks do not synchronise have no word: their loss is in the next one.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ddprun.telemetry.batch import Batch, Entry, Unwritten, step_record
from ddprun.telemetry.chores import Chores
from ddprun.telemetry.clock import Clock
from ddprun.telemetry.overflow import overflow
from ddprun.telemetry.records import Landed, Totals, communication_us
from ddprun.telemetry.settle import Round, Settled, divide, settle
from ddprun.telemetry.step import Agreed, Marks, Step
from ddprun.telemetry.stragglers import Stragglers
from ddprun.telemetry.word import Word, Words, told_buckets, usual_step_us
from ddprun.telemetry.writer import Writer
from ddprun_hooks.exchange import Control
from ddprun_hooks.flight import Flight

_TOGETHER_US = 250_000.0
"""Words of about so much time are posted together: an exchange, however small, costs threads of all ranks
their time. It is also how long a wish to stop may take to be heard.
"""

_MOST_TOGETHER = 32


class Ledger:
    """Keeps the time of every step of this rank and writes every n-th.

    Args:
        clock: of the device the steps run on.
        control: for the control word.
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

        self.patience = 1
        """Control words are read so many steps after the last one's: more where they share a slow link with
        what goes on beside training."""

        self.together = 1
        """Steps whose words are posted together; the same on all ranks."""

        self.own_loss = math.nan
        """This rank's mean loss in the newest step whose marks have been read."""

        self.mark: Callable[[], Any] = clock.mark
        """This moment on the training thread's time line."""

        self._clock = clock
        self._control = control
        self._writer = writer
        self._every = every
        self.stragglers = stragglers
        self.chores = Chores()
        """What is left to do for steps that are over; all of it is done when a method here needs it."""

        self.observe: Callable[[dict[str, Any], Sequence[Flight[int]]], None] | None = None
        """Is told of every step's record, and of what landed in it."""

        self._buckets = 0  # gradient buckets of the stage
        self._told: list[int] = []  # those whose ready times are told
        self._closed: deque[Step] = deque()  # ended, marks not read yet
        self._batch = Batch()  # settled
        self._batches: deque[Batch] = deque()  # settled, their words under way
        self._round = Round()
        self._step: Step | None = None
        self._aside = Marks()  # traffic outside of steps
        self._last_end: Any = None  # mark of the last step's end, within a stage

    def begin_stage(self, params: Sequence[tuple[str, ...]]) -> None:
        """Steps of another stage begin.

        Args:
            params: of each gradient bucket that ranks exchange in it; the same on all ranks.
        """
        self._buckets, self._told, self.together = len(params), told_buckets(len(params)), 1
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

    def start(self, number: int, stage: int) -> None:
        """Start a step's time. What lies between two steps of a stage is the later one's `sync_us`."""
        now = self.mark()
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
        self.current.laps.append((part, self.mark()))

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
        due = sum(batch.last + self.patience <= step.number for batch in self._batches)
        lag = self._clock.lag
        if not lag:  # else marks of the step before might have to be waited for
            self.chores.add(self._settle_next)
        if len(self._batch.entries) + len(self._closed) >= self.together + lag:
            self._post(lag)
        return [agreed for _ in range(due) for agreed in self._collect()]

    def flush(self) -> list[Agreed]:
        """Settle every step that is still open; called at a stage's end by all ranks, even by those that have
        taken no step since ranks met.
        """
        self._last_end = None
        self._post(0, the_rest=True)
        return self._collect_all()

    def drain(self) -> list[Agreed]:
        """Settle every step that is over, and read the control words under way, without posting one for
        steps whose ranks have not met since; called by all ranks after the same step.
        """
        self._post(0)
        return self._collect_all()

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
        records = Unwritten(self._control.rank)
        for flight in traffic.landed:
            records.add_payload(Landed(flight, None, {}, stage, step))
        records.put(self._writer)

    def _post(self, but: int, *, the_rest: bool = False) -> None:
        """Read the marks of all steps that are over but the last `but`, and post their words.

        Args:
            but: steps whose marks cannot be read yet without waiting.
            the_rest: one word more, for steps whose ranks have not met since the last one.
        """
        self.chores.do_all()
        while len(self._closed) > but:
            self._settle_next()
        batch, self._batch = self._batch, Batch()
        if the_rest:
            # Also from a rank that has none: where ranks do not meet, others may have.
            word, last = self._word(None), self._round.last_step
            batch.entries.append(Entry(last, None, word, self._take_round().flights))
        if batch.entries:
            self._batches.append(batch)
        if words := [entry.word for entry in batch.entries if entry.word is not None]:
            batch.posted = self._control.post(
                [number for word in words for number in word.numbers(len(self._told))]
            )

    def _settle_next(self) -> None:
        """Read the marks of the oldest step that is over, and have its word ready."""
        settled = self._settle(self._closed.popleft())
        self._round.add(settled)
        self.own_loss = settled.loss
        entry = Entry(settled.step.number, settled)
        if settled.step.synchronised:
            entry.word, entry.finders = self._word(settled), self._take_round().flights
        self._batch.entries.append(entry)

    def _take_round(self) -> Round:
        found, self._round = self._round, Round()
        return found

    def _word(self, settled: Settled | None) -> Word:
        """About a step in which ranks have synchronised, and those since the last one; None: these alone."""
        found, step, at = self._round, None, None
        if settled is not None:
            step, at = settled.step, settled.sync.last_ready_us
        return Word(
            found.loss_sum,
            found.samples,
            stop=step is not None and step.stop,
            checkpoint=step is not None and step.checkpoint,
            compare_clocks=step is not None and step.compare_clocks,
            code=found.code,
            sync_ready=0.0 if at is None else at - self.offset_us,
            steps=found.steps,
            us=found.us,
            spent=found.spent,
            ready=() if settled is None else self._ready(settled),
        )

    def _ready(self, settled: Settled) -> list[float]:
        """When this rank had the buckets ready that a word tells of; none if it exchanged no gradients."""
        at = {flight.bucket: flight.ready - self.offset_us for flight in settled.backward.landed}
        return [at.get(bucket, 0.0) for bucket in self._told] if at else []

    def _settle(self, step: Step) -> Settled:
        return settle(step, self._clock, gradients=step.number % self._every == 0)

    def _collect_all(self) -> list[Agreed]:
        agreed = [agreed for _ in range(len(self._batches)) for agreed in self._collect()]
        self.chores.do_all()
        return agreed

    def _collect(self) -> list[Agreed]:
        """Read the words of the oldest batch; its steps are finished some time later."""
        batch = self._batches[0]  # until the others are heard, so that it is salvaged if they are gone
        words: list[Words] = []
        if batch.posted is not None:
            told_by = batch.posted.wait().numpy()  # (ranks, numbers of all words)
            count = sum(entry.word is not None for entry in batch.entries)
            numbers = told_by.reshape(len(told_by), count, -1).swapaxes(0, 1)
            words = Words.of(numbers)
            together = round(_TOGETHER_US / max(1.0, usual_step_us(numbers)))
            self.together = max(1, min(_MOST_TOGETHER, together))
        self._batches.popleft()
        told, records, agreed = iter(words), Unwritten(self._control.rank), []
        for entry in batch.entries:
            word = None if entry.word is None else next(told)
            if entry.settled is not None:
                self.chores.add(partial(self._finish, entry.settled, word, records))
            if word is not None and (entry.settled is not None or word.samples):
                agreed.append(self._agree(entry, word))
        self.chores.add(partial(records.put, self._writer))
        return agreed

    def _agree(self, entry: Entry, words: Words) -> Agreed:
        late, news = None, False
        if self.stragglers is not None:
            news = entry.settled is not None and self.stragglers.add(entry.step, words)
            late = self.stragglers.now
        return Agreed(
            step=entry.step,
            mean_loss=words.mean_loss,
            rank_losses=words.rank_losses,
            stop=words.stop,
            checkpoint=words.checkpoint,
            compare_clocks=words.compare_clocks,
            overflow=overflow(words.codes, entry.finders),
            straggler=late,
            straggler_is_news=news,
        )

    def salvage(self) -> None:
        """Record the steps that are over, without what other ranks have told of them: the run has failed."""
        self.chores.do_all()
        if self._clock.lag:
            return  # the device may never come to an end
        while self._closed:
            self._settle_next()
        batches, self._batches, self._batch = [*self._batches, self._batch], deque(), Batch()
        records = Unwritten(self._control.rank)
        for settled in [entry.settled for batch in batches for entry in batch.entries]:
            if settled is not None:
                self._finish(settled, None, records)
        records.put(self._writer)

    def _finish(self, settled: Settled, words: Words | None, records: Unwritten) -> None:
        """Divide a step's time as far as all ranks' clocks allow, count it, record it.

        Args:
            settled: the step.
            words: of all ranks; None: they have not met in it.
            records: take its lines.
        """
        all_ready = self._all_ready(settled, words)
        self._count(settled, divide(settled, all_ready))
        if self.observe is not None:
            self.observe(step_record(settled, words, self._control.rank), settled.landed)
        step = settled.step
        if step.number % self._every == 0:
            records.add_step(settled, words)
            for flight, at in zip(settled.landed, all_ready, strict=True):
                records.add_payload(Landed(flight, at, settled.gradients, step.stage, step.number))

    def _all_ready(self, settled: Settled, words: Words | None) -> list[float | None]:
        """When the last rank had each payload that landed ready, on this rank's clock."""
        gradients, beside = settled.backward.landed, settled.sync.landed
        if words is None:
            return [None] * (len(gradients) + len(beside))
        ready, offset_us, last = words.all_ready(self._buckets), self.offset_us, words.last_sync_ready
        return [
            *(ready[flight.bucket] + offset_us if ready else None for flight in gradients),
            *(last + offset_us if last else None for _ in beside),
        ]

    def _count(self, settled: Settled, exposed_us: int) -> None:
        totals = self.totals
        totals.steps += 1
        totals.samples += settled.samples
        for part, us in settled.us.items():
            totals.parts_us[part] += us
        totals.parts_us["step_us"] += settled.step_us
        self._count_traffic(settled.landed, exposed_us)

    def _count_traffic(self, landed: Sequence[Flight[int]], exposed_us: int) -> None:
        self.totals.communication_us += max(communication_us(landed), exposed_us)
        self.totals.wire_bytes += sum(flight.wire_bytes for flight in landed)
