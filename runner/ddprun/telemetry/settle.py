"""Steps that are over: their marks become numbers, in columns.

What Python does once in a step costs several times what it does in a row, since the model has thrown its code
and data out of the processor's caches in between. So many steps are settled together, in operations on arrays
that have a row for each step. A *line* is a step's backward pass (2 * row) or what was exchanged beside it
(2 * row + 1), each with its own payloads and waits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.records import PARTS
from ddprun.telemetry.step import Step, Traffic
from ddprun.telemetry.stretches import Ints, Union
from ddprun.telemetry.word import SPENT
from ddprun_hooks.flight import Flight

_COLUMN = {part: column for column, part in enumerate((*PARTS, ""))}
_BACKWARD, _SYNC = _COLUMN["backward_us"], _COLUMN["sync_us"]
_HOOK, _WIRE = _COLUMN["exposed_hook_us"], _COLUMN["exposed_wire_us"]
_SPENT = [_HOOK if part == "hook_us" else _COLUMN[part] for part in SPENT]


class Journeys:
    """Payloads that were sent or waited for on some lines, in microseconds of this rank's clock."""

    def __init__(self) -> None:
        self.flights: list[Flight[int]] = []
        """That were waited for: complete."""

        self.found: list[tuple[int, Flight[int]]] = []
        """Lines, and the payloads on them in which hooks have found something."""

        self._landed: list[int] = []  # line, bucket, ready, done
        self._sent: list[int] = []  # line, microseconds in hooks on the training thread
        self._work: list[int] = []  # line, start, end of hooks on other threads
        self._waits: list[int] = []  # line, start, end

    def add_backward(self, line: int, flights: Sequence[Flight[int]], end: int) -> None:
        """A backward pass that ended at `end`: it only waited once its last bucket was handed over."""
        last = 0
        for flight in flights:
            handed_over = flight.handed_over
            assert handed_over is not None, "a finished flight has been handed over"
            self._sent += (line, handed_over - flight.ready)
            if handed_over > last:
                last = handed_over
            self._land(line, flight)
        if flights:
            self._waits += (line, last, end)

    def add_beside(self, line: int, traffic: Traffic, clock: Clock) -> None:
        """What was exchanged beside a backward pass."""
        us = clock.us
        for flight in traffic.sent:  # those that have not landed yet are not complete
            self._sent += (line, clock.in_hooks_us(flight))
        for landed in clock.read(traffic.landed):
            self._land(line, landed)
        for start, end in traffic.waits:
            self._waits += (line, us(start), us(end))

    def landed(self) -> Ints:
        """Line, bucket, and when it was ready and done: of each payload that was waited for; shape (4, n)."""
        return _table(self._landed, 4)

    def sent(self) -> Ints:
        """Line, and how long hooks ran on the training thread: of each that set out; shape (2, n)."""
        return _table(self._sent, 2)

    def work(self) -> Ints:
        """Line, start and end of hooks' work on other threads; shape (3, n)."""
        return _table(self._work, 3)

    def waits(self) -> Ints:
        """Line, start and end of time in which the training thread only waited; shape (3, n)."""
        return _table(self._waits, 3)

    def _land(self, line: int, flight: Flight[int]) -> None:
        ready = flight.ready
        self.flights.append(flight)
        self._landed += (line, flight.bucket, ready, flight.done or ready)
        for piece in flight.slices:
            if not piece.on_training_thread:
                self._work += (line, piece.start, piece.done)
        if flight.findings:
            self.found.append((line, flight))


@dataclass(slots=True)
class Settled:
    """Steps that are over. Arrays have a row for each of them; times are microseconds."""

    steps: Sequence[Step]
    times: list[int]
    """All marks, one step's behind another's."""

    firsts: list[int]
    """Where each step's begin in it; and where the last one's end."""

    step_us: list[int]
    us: Ints
    """Of each part, shape (steps, parts). What of it was exposed communication is in the parts that were
    exposed to it until `divide` has taken it out."""

    flights: Sequence[Flight[int]]
    """That were waited for."""

    found: Sequence[tuple[int, Flight[int]]]
    """Rows, and the payloads in which hooks have found something."""

    landed: Ints
    """Line, bucket, and when it was ready and done: of each of them; shape (4, flights)."""

    work: Ints
    """Line, start and end of hooks' work on other threads; shape (3, n)."""

    waits: Ints
    """Line, start and end of time in which the training thread only waited; shape (3, n)."""

    waited_us: Ints
    """On each line, shape (2 * steps,)."""

    in_hooks_us: Ints
    """The same, of hooks on the training thread."""

    loss_sums: list[float]
    """Of this rank, over the step's samples."""

    samples: list[int]
    gradients: list[Mapping[str, int]]
    """When the gradients were complete, by parameter; empty where nobody has looked."""

    @property
    def own_loss(self) -> float:
        """This rank's mean in the newest step."""
        return mean(self.loss_sums[-1], self.samples[-1])

    @property
    def spent_us(self) -> Ints:
        """What the training thread did itself, before `divide`: shape (steps, `SPENT`)."""
        hooks = self.in_hooks_us.reshape(-1, 2)
        own = self.us.copy()
        own[:, [_BACKWARD, _SYNC]] -= hooks + self.waited_us.reshape(-1, 2)
        own[:, _HOOK] = hooks.sum(1)
        spent: Ints = own[:, _SPENT]
        return spent


def settle(steps: Sequence[Step], clock: Clock, *, every: int) -> Settled:
    """Read the marks of steps that are over; waits for those that the device has not passed.

    Args:
        steps: in the order in which they were taken, one at least.
        clock: which took the marks; later ones are measured from the last step's end.
        every: single gradients are wanted of every n-th step.
    """
    times: list[int] = []
    columns: list[int] = []  # for each mark, of the part that ended there
    journeys, gradients = Journeys(), list[Mapping[str, int]]()
    for row, step in enumerate(steps):
        times += clock.times(step.marks)
        columns += [_COLUMN[part] for part in step.parts]
        if step.backward_end is not None:
            journeys.add_backward(2 * row, clock.read(step.flights), clock.us(step.backward_end))
        if step.sync is not None:
            journeys.add_beside(2 * row + 1, step.sync, clock)
        gradients.append(
            _complete(step.gradients, clock) if step.gradients and step.number % every == 0 else {}
        )
        clock.rebase(step.marks[-1])
    count, lengths = len(steps), [len(step.marks) for step in steps]
    firsts = [0, *accumulate(lengths)]
    marks = np.array(times)
    marks[1:] -= marks[:-1].copy()
    cells = np.repeat(np.arange(0, count * len(_COLUMN), len(_COLUMN)), lengths) + columns
    us = _added_up(cells, marks, count * len(_COLUMN)).reshape(count, -1)
    waits, sent = journeys.waits(), journeys.sent()
    loss_sums, samples = _losses_of(steps)
    return Settled(
        steps=steps,
        times=times,
        firsts=firsts,
        step_us=[times[until - 1] - times[first] for first, until in pairwise(firsts)],
        us=us[:, : len(PARTS)],
        flights=journeys.flights,
        found=[(line // 2, flight) for line, flight in journeys.found],
        landed=journeys.landed(),
        work=journeys.work(),
        waits=waits,
        waited_us=_added_up(waits[0], waits[2] - waits[1], 2 * count),
        in_hooks_us=_added_up(sent[0], sent[1], 2 * count),
        loss_sums=loss_sums,
        samples=samples,
        gradients=gradients,
    )


def divide(settled: Settled, all_ready_us: NDArray[np.float64]) -> Ints:
    """Take out of backward's and sync's microseconds what of them was exposed communication.

    `hook`: hooks that ran on the training thread, and hook work elsewhere while it waited. `wire`: the rest
    of its waiting in which some payload that every rank had ready was under way, or all had arrived. `wait`:
    what is left: nothing could move, because some rank had not come so far.

    Args:
        settled: whose `us` are changed.
        all_ready_us: when the last rank had each payload that was waited for ready, on this rank's clock; 0:
            long ago, or ranks have not told. Shape (flights,).

    Returns:
        How much that was in each step; shape (steps,).
    """
    lines = len(settled.in_hooks_us)
    exposed = np.zeros((3, lines), dtype=np.int64)  # hook, wait, wire
    exposed[0], exposed[1] = settled.in_hooks_us, settled.waited_us
    if settled.waits.size:
        at_work, under_way = _while_waiting(settled, np.rint(all_ready_us).astype(np.int64))
        exposed[0] += at_work
        exposed[1] -= under_way
        exposed[2] = under_way - at_work
    us = settled.us
    us[:, [_BACKWARD, _SYNC]] -= exposed.sum(0).reshape(-1, 2)
    us[:, _HOOK : _WIRE + 1] = (exposed[:, ::2] + exposed[:, 1::2]).T
    total: Ints = us[:, _HOOK : _WIRE + 1].sum(1)
    return total


def _while_waiting(settled: Settled, all_ready: Ints) -> tuple[Ints, Ints]:
    """How long of its waiting on each line other threads were in hooks, and how long they were or something
    was on the wire; shape (lines,).
    """
    waits, work, landed, lines = settled.waits, settled.work, settled.landed, len(settled.in_hooks_us)
    low, high = int(waits[1].min()), int(waits[2].max())
    at_work = np.zeros(lines, dtype=np.int64)
    if work.size:
        at_work = _added_up(waits[0], Union(work, low, high).within(waits), lines)
    moving = np.empty((3, work.shape[1] + landed.shape[1] + lines), dtype=np.int64)
    moving[:, : work.shape[1]] = work
    on_wire, done = moving[:, work.shape[1] : -lines], moving[:, -lines:]
    on_wire[0], on_wire[1], on_wire[2] = landed[0], all_ready, landed[3]
    # Once all payloads of a line have been ready everywhere, what is left of its waiting is the wire's.
    done[0], done[1], done[2] = np.arange(lines), 0, high
    np.maximum.at(done[1], landed[0], all_ready)
    return at_work, _added_up(waits[0], Union(moving, low, high).within(waits), lines)


def under_way_us(landed: Ints, count: int) -> Ints:
    """Time during which at least one payload was under way, from ready to done, in microseconds.

    Args:
        landed: payloads, as of `Journeys`.
        count: of steps.

    Returns:
        Shape (steps,).
    """
    if not landed.size:
        return np.zeros(count, dtype=np.int64)
    low, high = int(landed[2].min()), int(landed[3].max())
    windows = np.empty((3, count), dtype=np.int64)
    windows[0], windows[1], windows[2] = np.arange(count), low, high
    stretches = landed[[0, 2, 3]]
    stretches[0] //= 2
    return Union(stretches, low, high).within(windows)


def mean(loss_sum: float, samples: int) -> float:
    """Over samples; NaN without any."""
    return loss_sum / samples if samples else math.nan


def _table(numbers: Sequence[int], columns: int) -> Ints:
    return np.array(numbers, dtype=np.int64).reshape(-1, columns).T


def _added_up(places: Ints, values: Ints, count: int) -> Ints:
    """Sums of the values that have one place, of `count` places."""
    # In double precision: exact up to 2**53 microseconds, which are 285 years.
    return np.bincount(places, values, count).astype(np.int64)


def _losses_of(steps: Sequence[Step]) -> tuple[list[float], list[int]]:
    """This rank's losses, summed over each step's samples, and how many these are."""
    rows, losses, counts = [], [], []
    for row, step in enumerate(steps):
        for loss, count in zip(step.losses, step.samples, strict=True):
            if count:
                rows.append(row)
                losses.append(loss)
                counts.append(count)
    loss_sums, samples = [0.0] * len(steps), [0] * len(steps)
    if losses:
        for row, loss, count in zip(rows, torch.stack(losses).tolist(), counts, strict=True):
            loss_sums[row] += loss * count
            samples[row] += count
    return loss_sums, samples


def _complete(marks: Mapping[str, Any], clock: Clock) -> dict[str, int]:
    return {name: clock.us(mark) for name, mark in marks.items()}
