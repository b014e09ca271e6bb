"""Steps that are over: their marks become numbers, in columns.

What Python does once in a step costs several times what it does in a row, since the model has thrown its code
and data out of the processor's caches in between. So many steps are settled together, in operations on arrays
that have a row for each step. A *line* is a step's backward pass (2 * row) or what was exchanged beside it
(2 * row + 1), each with its own payloads and waits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.control_message import SPENT
from ddprun.telemetry.intervals import Ints, Union
from ddprun.telemetry.records import PARTS
from ddprun.telemetry.step import MarkBuffer, Step, Traffic
from ddprun_hooks.comm.trace import BucketTrace, read_findings

_COLUMN = {part: column for column, part in enumerate((*PARTS, ""))}
_BACKWARD, _SYNC = _COLUMN["backward_us"], _COLUMN["sync_us"]
_HOOK, _WIRE = _COLUMN["exposed_hook_us"], _COLUMN["exposed_wire_us"]
_SPENT = [_HOOK if part == "hook_us" else _COLUMN[part] for part in SPENT]


@dataclass(slots=True)
class BucketTimes:
    """Payloads that were sent or waited for, in the order of lines, in microseconds of this rank's clock."""

    traces: list[BucketTrace[int]]
    """That were waited for: complete."""

    landed: Ints
    """Line, bucket, and when it was ready and done: of each of them; shape (4, traces)."""

    sent: Ints
    """Line, and how long hooks ran on the training thread: of each that set out; shape (2, n)."""

    work: Ints
    """Line, start and end of hooks' work on other threads; shape (3, n)."""

    waits: Ints
    """Line, start and end of time in which the training thread only waited; shape (3, n)."""

    def and_those(self, other: "BucketTimes") -> "BucketTimes":
        """With others, on other lines."""
        traces = [*self.traces, *other.traces]
        landed, waits = np.hstack((self.landed, other.landed)), np.hstack((self.waits, other.waits))
        order = landed[0].argsort(kind="stable")
        return BucketTimes(
            [traces[place] for place in order.tolist()],
            landed[:, order],
            np.hstack((self.sent, other.sent)),
            np.hstack((self.work, other.work)),
            waits[:, waits[0].argsort(kind="stable")],
        )


def in_backward(buffer: MarkBuffer, times: Sequence[int], clock: Clock) -> BucketTimes:
    """What steps exchanged in backward passes: each only waited once its last bucket was handed over.

    Args:
        buffer: with the steps.
        times: of its marks.
        clock: which took them.
    """
    traces, buffer.traces = list(clock.read(buffer.traces)), []
    if not traces:
        return BucketTimes([], *(np.zeros((rows, 0), dtype=np.int64) for rows in (4, 2, 3, 3)))
    ends = np.array([0, *[step.traces_end for step in buffer.steps]])
    rows = np.flatnonzero(ends[1:] > ends[:-1])
    ends = ends[1:][rows]
    firsts = np.concatenate(([0], ends[:-1]))
    lines = np.repeat(2 * rows, ends - firsts)
    landed = _landed(lines, traces)
    handed_over = np.array([trace.handed_over for trace in traces])
    backward_ends = list[int]()
    for row in rows.tolist():
        end = buffer.steps[row].backward_end
        assert end is not None, "gradients were exchanged in a backward pass that ended"
        backward_ends.append(times[end])
    return BucketTimes(
        traces,
        landed,
        np.array((lines, handed_over - landed[2])),
        _work(lines.tolist(), traces),
        np.array(
            (
                2 * rows,
                np.maximum.reduceat(handed_over, firsts),
                backward_ends,
            )
        ),
    )


def beside(traffic: Sequence[tuple[int, Traffic]], clock: Clock) -> BucketTimes:
    """What was exchanged beside backward passes, and on which lines."""
    us, lines = clock.us, list[int]()
    traces, sent, waits = list[BucketTrace[int]](), list[int](), list[int]()
    for line, exchanged in traffic:
        landed = clock.read(exchanged.landed)
        lines += [line] * len(landed)
        traces += landed
        for trace in exchanged.sent:  # those that have not landed yet are not complete
            sent += (line, clock.in_hooks_us(trace))
        for start, end in exchanged.waits:
            waits += (line, us(start), us(end))
    on_lines = np.array(lines, dtype=np.int64)
    return BucketTimes(
        traces, _landed(on_lines, traces), _table(sent, 2), _work(lines, traces), _table(waits, 3)
    )


@dataclass(slots=True)
class ResolvedSteps:
    """Steps that are over. Arrays have a row for each of them; times are microseconds."""

    buffer: MarkBuffer
    """What they left behind."""

    times: list[int]
    """Of its marks."""

    spans: Ints
    """From the mark before to each."""

    firsts: list[int]
    """Where each step's marks begin; and where the last one's end."""

    step_us: list[int]
    us: Ints
    """Of each part, shape (steps, parts). What of it was exposed communication is in the parts that were
    exposed to it until `divide` has taken it out."""

    bucket_times: BucketTimes

    waited_us: Ints
    """On each line, shape (2 * steps,)."""

    in_hooks_us: Ints
    """The same, of hooks on the training thread."""

    loss_sums: list[float]
    """Of this rank, over the step's samples."""

    samples: list[int]
    gradients: Sequence[Mapping[str, int]]
    """When the gradients were complete, by parameter; empty where nobody has looked."""

    @property
    def steps(self) -> Sequence[Step]:
        """In the order in which they were taken."""
        return self.buffer.steps

    @property
    def found(self) -> list[tuple[int, BucketTrace[int]]]:
        """Rows, and the payloads of them in which hooks have found something."""
        if not any(trace.findings for trace in self.bucket_times.traces):
            return []
        rows = (self.bucket_times.landed[0] // 2).tolist()
        return [(row, one) for row, one in zip(rows, self.bucket_times.traces, strict=True) if one.findings]

    def numbered_traces(self) -> list[tuple[int, BucketTrace[int]]]:
        """Payloads in which hooks have issued collectives by themselves, each with its step."""
        if not any(trace.uncounted for trace in self.bucket_times.traces):
            return []
        numbers = [self.steps[line // 2].number for line in self.bucket_times.landed[0].tolist()]
        return list(zip(numbers, self.bucket_times.traces, strict=True))

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


def resolve(buffer: MarkBuffer, clock: Clock, *, every: int) -> ResolvedSteps:
    """Read the marks of steps that are over; waits for those that the device has not passed.

    Args:
        buffer: with one step at least, and none that runs.
        clock: which took the marks; later ones are measured from the last step's end.
        every: single gradients are wanted of every n-th step.
    """
    steps, count = buffer.steps, len(buffer.steps)
    times = clock.times(buffer.marks)
    firsts = [0, *[step.marks_end for step in steps]]
    spans, ends = np.array(times), np.array(firsts)
    spans[1:] -= spans[:-1].copy()
    cells = np.repeat(np.arange(0, count * len(_COLUMN), len(_COLUMN)), ends[1:] - ends[:-1])
    cells += [_COLUMN[part] for part in buffer.parts]
    us = _added_up(cells, spans, count * len(_COLUMN)).reshape(count, -1)
    bucket_times = in_backward(buffer, times, clock)
    if traffic := [(2 * row + 1, step.sync) for row, step in enumerate(steps) if step.sync is not None]:
        bucket_times = bucket_times.and_those(beside(traffic, clock))
    read_findings(bucket_times.traces)
    gradients = [
        _complete(step.gradients, clock) if step.gradients and step.number % every == 0 else {}
        for step in steps
    ]
    waits, sent = bucket_times.waits, bucket_times.sent
    loss_sums, samples = _losses_of(buffer, clock)
    clock.rebase(buffer.marks[-1])
    return ResolvedSteps(
        buffer=buffer,
        times=times,
        spans=spans,
        firsts=firsts,
        step_us=[times[until - 1] - times[first] for first, until in pairwise(firsts)],
        us=us[:, : len(PARTS)],
        bucket_times=bucket_times,
        waited_us=_added_up(waits[0], waits[2] - waits[1], 2 * count),
        in_hooks_us=_added_up(sent[0], sent[1], 2 * count),
        loss_sums=loss_sums,
        samples=samples,
        gradients=gradients,
    )


def divide(resolved: ResolvedSteps, all_ready_us: NDArray[np.float64]) -> Ints:
    """Take out of backward's and sync's microseconds what of them was exposed communication.

    `hook`: hooks that ran on the training thread, and hook work elsewhere while it waited. `wire`: the rest
    of its waiting in which some payload that every rank had ready was under way, or all had arrived. `wait`:
    what is left: nothing could move, because some rank had not come so far.

    Args:
        resolved: whose `us` are changed.
        all_ready_us: when the last rank had each payload that was waited for ready, on this rank's clock; 0:
            long ago, or ranks have not told. Shape (traces,).

    Returns:
        How much that was in each step; shape (steps,).
    """
    lines = len(resolved.in_hooks_us)
    exposed = np.zeros((3, lines), dtype=np.int64)  # hook, wait, wire
    exposed[0], exposed[1] = resolved.in_hooks_us, resolved.waited_us
    if resolved.bucket_times.waits.size:
        at_work, under_way = _while_waiting(resolved, np.rint(all_ready_us).astype(np.int64))
        exposed[0] += at_work
        exposed[1] -= under_way
        exposed[2] = under_way - at_work
    us = resolved.us
    us[:, [_BACKWARD, _SYNC]] -= exposed.sum(0).reshape(-1, 2)
    us[:, _HOOK : _WIRE + 1] = (exposed[:, ::2] + exposed[:, 1::2]).T
    total: Ints = us[:, _HOOK : _WIRE + 1].sum(1)
    return total


def _while_waiting(resolved: ResolvedSteps, all_ready: Ints) -> tuple[Ints, Ints]:
    """How long of its waiting on each line other threads were in hooks, and how long they were or something
    was on the wire; shape (lines,).
    """
    bucket_times, lines = resolved.bucket_times, len(resolved.in_hooks_us)
    waits, work, landed = bucket_times.waits, bucket_times.work, bucket_times.landed
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
        landed: payloads, as of `BucketTimes`.
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


def _landed(lines: Ints, traces: Sequence[BucketTrace[int]]) -> Ints:
    landed = np.empty((4, len(traces)), dtype=np.int64)
    landed[0], landed[1] = lines, [trace.bucket for trace in traces]
    landed[2] = [trace.ready for trace in traces]
    landed[3] = [trace.done or trace.ready for trace in traces]
    return landed


def _work(lines: Sequence[int], traces: Sequence[BucketTrace[int]]) -> Ints:
    work: list[int] = []
    for line, trace in zip(lines, traces, strict=True):
        for piece in trace.spans:
            if not piece.on_training_thread:
                work += (line, piece.start, piece.done)
    return _table(work, 3)


def _losses_of(buffer: MarkBuffer, clock: Clock) -> tuple[list[float], list[int]]:
    """This rank's losses, summed over each step's samples, and how many these are."""
    means, counts, first = clock.numbers(buffer.losses), buffer.samples, 0
    loss_sums, samples = list[float](), list[int]()
    for step in buffer.steps:
        end, loss_sum, count = step.losses_end, 0.0, 0
        for place in range(first, end):
            if counts[place]:
                loss_sum += means[place] * counts[place]
                count += counts[place]
        loss_sums.append(loss_sum)
        samples.append(count)
        first = end
    return loss_sums, samples


def _complete(marks: Mapping[str, Any], clock: Clock) -> dict[str, int]:
    return {name: clock.us(mark) for name, mark in marks.items()}
