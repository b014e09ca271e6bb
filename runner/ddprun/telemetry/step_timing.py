"""Turns the marks of steps into times and records.

A running step only appends to its `StepMarks`: marks, losses and bucket traces. Once steps are over,
`resolve_step_marks` reads the marks of many of them at once. When it is known when all ranks had each bucket
ready (`control_message.py`), `split_exposed_time` splits the time in which this rank waited into
`exposed_hook_us`, `exposed_wait_us` and `exposed_wire_us`. `step_records` and `bucket_record` make records of
the result, whose fields `docs/records.md` explains.

Many steps are read at once, as arrays with a row for each, since Python code that runs once in a step costs
several times what it costs in a loop: the model has pushed it out of the processor's caches in between. Each
step has two *sections* in which buckets travel, with traces and waits of their own: its backward pass
(2 * row), and everything that is exchanged outside it (2 * row + 1).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.records import (
    OWN_PARTS,
    PARTS,
    RECORDS_VERSION,
    BucketRecord,
    CollectiveRecord,
    MachineRecord,
    StepRecord,
)
from ddprun_hooks.comm.trace import BucketTrace, read_finding_codes

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_COLUMN = {part: column for column, part in enumerate((*PARTS, ""))}
_BACKWARD, _SYNC = _COLUMN["backward_us"], _COLUMN["sync_us"]
_HOOK, _WAIT, _WIRE = (_COLUMN[f"exposed_{part}_us"] for part in ("hook", "wait", "wire"))
_MAX_LAPS = 400  # of a step, in its record
_LAP_NAMES = {part: part.removesuffix("_us") for part in (*PARTS, "")}
_OWN_COLUMNS = [_HOOK if part == "hook_us" else _COLUMN[part] for part in OWN_PARTS]


class Intervals(NamedTuple):
    """Times in microseconds, each on one of several time lines: a section's, or a step's; shape (n,) each."""

    section: IntArray  # or step, counted from 0: its time line
    start: IntArray
    end: IntArray  # one that ends before it starts covers nothing


class TraceTimes(NamedTuple):
    """When buckets were exchanged, in microseconds; shape (traces,) each."""

    section: IntArray
    bucket: IntArray
    ready: IntArray
    done: IntArray

    @classmethod
    def from_traces(cls, sections: Sequence[int], traces: Sequence[BucketTrace[int]]) -> "TraceTimes":
        numbers = list[int]()
        for section, trace in zip(sections, traces, strict=True):
            numbers += (section, trace.bucket, trace.ready, trace.done or trace.ready)
        return cls(*_as_columns(numbers, 4))


@dataclass(slots=True)
class NonBackwardExchanges:
    """What is exchanged outside backward, in a running step or between steps."""

    sent: list[BucketTrace[Any]] = field(default_factory=list)  # some may still be in flight
    completed: list[BucketTrace[Any]] = field(default_factory=list)  # maybe sent in an earlier step
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """When the training thread only waited: marks, from and to, of `TensorExchanger`."""


class MicroBatchNumbers(NamedTuple):
    """What a step keeps of one of its micro-batches."""

    means: Sequence[Any]
    """Its mean loss and the numbers beside it, from `Clock.copy_to_host`; None: it lacks one."""

    samples: int
    weight: float  # what its means count in those of a step


@dataclass(slots=True)
class StepMarks:
    """What a step leaves behind."""

    number: int  # counts from 1 in the run, as `step` in records
    stage: int
    parts: list[str] = field(default_factory=list)  # of `PARTS`, which ended at each mark; "": the step began
    marks: list[Any] = field(default_factory=list)
    traces: list[BucketTrace[Any]] = field(default_factory=list)  # gradient buckets of backward passes
    micro_batches: list[MicroBatchNumbers] = field(default_factory=list)
    backward_ends: list[tuple[int, int]] = field(default_factory=list)
    """Of each backward pass that exchanged gradients: the index of the mark that ended it, and where its
    traces end."""

    gradient_marks: Mapping[str, Any] | None = None  # marks of complete gradients; None: not measured
    non_backward_exchanges: NonBackwardExchanges | None = None
    exchanged: bool = True  # ranks exchanged something in it; alike on all of them
    cpu_us: int = 0  # processor time of this process, all threads
    requests: int = 0  # of this rank: a sum of `control_message.STOP` and the like
    lr: Sequence[float | None] | None = None  # of each parameter group; None: no step, or no rates
    grad_norm: Any = None  # of all gradients before clipping, from `Clock.copy_to_host`; None: not measured
    group_grad_norms: list[Any] | None = None  # the same of each parameter group; None: of no turn that ran
    machine: MachineRecord | None = None  # memory and load after it; None: not measured


@dataclass(slots=True)
class ResolvedSteps:
    """Steps that are over. Times are microseconds of this rank's clock; lists have an item for each step."""

    steps: list[StepMarks]  # in the order in which they were taken
    parts: list[str]  # as in `StepMarks`, of all steps
    times: list[int]  # of the marks
    durations: IntArray  # from the mark before to each mark
    mark_bounds: list[int]  # where each step's marks begin, and where the last one's end
    step_us: list[int]
    parts_us: IntArray
    """Shape (steps, parts); exposed communication is in backward and sync until `split_exposed_time`."""

    traces: list[BucketTrace[int]]  # that were waited for, in the order of sections
    trace_times: TraceTimes
    hook_work: Intervals  # of hooks on other threads, by section
    waits: Intervals  # in which the training thread only waited, by section
    waited_us: IntArray  # sums of `waits`, shape (sections,)
    in_hooks_us: IntArray  # time of hooks on the training thread, shape (sections,)
    weighted_sums: FloatArray
    """This rank's loss and the numbers beside it, summed over what counts in a step, then how much that is;
    shape (steps, 2 * numbers)."""

    means: list[list[float | None]]  # of the loss and the numbers beside it; None: nothing counts
    samples: list[int]
    gradient_times: Sequence[Mapping[str, int]]  # when each was complete; empty where not measured

    @property
    def findings(self) -> dict[int, list[BucketTrace[int]]]:
        """By row, the traces in which hooks have found something."""
        found: dict[int, list[BucketTrace[int]]] = {}
        if any(trace.findings for trace in self.traces):
            for section, trace in zip(self.trace_times.section.tolist(), self.traces, strict=True):
                if trace.findings:
                    found.setdefault(section // 2, []).append(trace)
        return found

    @property
    def own_parts_us(self) -> IntArray:
        """Microseconds of `OWN_PARTS`, before `split_exposed_time`: shape (steps, parts)."""
        hooks = self.in_hooks_us.reshape(-1, 2)
        own = self.parts_us.copy()
        own[:, [_BACKWARD, _SYNC]] -= hooks + self.waited_us.reshape(-1, 2)
        own[:, _HOOK] = hooks.sum(1)
        picked: IntArray = own[:, _OWN_COLUMNS]
        return picked


def means_of(sums: FloatArray) -> list[list[float | None]]:
    """Means of sums and weights, shape (n, 2 * numbers): a list for each row. None: nothing counts."""
    pairs = np.stack(np.split(sums, 2, axis=-1), -1).tolist()
    return [[total / weight if weight else None for total, weight in row] for row in pairs]


def loss_of(means: Sequence[float | None], turns: Sequence[int]) -> float | None:
    """The loss, of means of all numbers: the sum of those of `turns`, by index; None: one is not known."""
    known = [mean for turn in turns if (mean := means[turn]) is not None]
    return sum(known) if len(known) == len(turns) else None


def resolve_step_marks(
    steps: list[StepMarks], clock: Clock, *, every: int, numbers: int = 1
) -> ResolvedSteps:
    """Read the marks of steps that are over; waits for those that the device has not passed.

    There is at least one step; the steps' traces are taken out. The clock measures later marks from the last
    step's end. Gradient times are read for every n-th step (`every`).
    """
    count = len(steps)
    times = clock.marks_to_us([mark for step in steps for mark in step.marks])
    parts = [part for step in steps for part in step.parts]
    bounds = [0, *accumulate(len(step.marks) for step in steps)]
    durations = np.array(times)
    durations[1:] -= durations[:-1].copy()
    cells = np.repeat(np.arange(0, count * len(_COLUMN), len(_COLUMN)), np.diff(bounds))
    cells += [_COLUMN[part] for part in parts]
    parts_us = _sum_by_index(cells, durations, count * len(_COLUMN)).reshape(count, -1)

    backward = list(clock.read_traces([trace for step in steps for trace in step.traces]))
    ready = [trace.ready for trace in backward]
    handed_over = [trace.handed_over or trace.ready for trace in backward]
    sections, traces = list[int](), list[BucketTrace[int]]()
    in_hooks, waits = list[int](), list[int]()  # rows of (section, microseconds) and (section, start, end)
    first = 0
    for row, step in enumerate(steps):
        section, step_begin, step_end = 2 * row, first, first + len(step.traces)
        for mark, traces_end in step.backward_ends:
            end = step_begin + traces_end
            of_pass = slice(first, end)
            if end > first:
                sections += [section] * (end - first)
                traces += backward[of_pass]
                in_hooks += (section, sum(handed_over[of_pass]) - sum(ready[of_pass]))
                start, until = max(handed_over[of_pass]), times[bounds[row] + mark]
                if end < step_end:  # another pass follows: what came after the last bucket is no wait
                    done = max(trace.done or trace.ready for trace in backward[of_pass])
                    until = min(until, max(start, done))
                waits += (section, start, until)
            first = end
        assert first == step_end, "gradients were exchanged in backward passes that ended"
        step.traces = []
        if step.non_backward_exchanges is not None:
            section += 1
            completed = clock.read_traces(step.non_backward_exchanges.completed)
            sections += [section] * len(completed)
            traces += completed
            for trace in step.non_backward_exchanges.sent:  # those that are still in flight cannot be read
                in_hooks += (section, clock.training_thread_hook_us(trace))
            for start, until in step.non_backward_exchanges.waits:
                waits += (section, clock.mark_to_us(start), clock.mark_to_us(until))
    work = list[int]()
    for section, trace in zip(sections, traces, strict=True):
        for span in trace.spans:
            if not span.on_training_thread:
                work += (section, span.start, span.done)
    waiting, (hooks_section, hooks_us) = Intervals(*_as_columns(waits, 3)), _as_columns(in_hooks, 2)

    read_finding_codes(traces)
    gradient_times = [
        {name: clock.mark_to_us(mark) for name, mark in step.gradient_marks.items()}
        if step.gradient_marks and step.number % every == 0
        else {}
        for step in steps
    ]
    _read_norms(steps, clock)
    sums = _sums_and_weights(steps, clock, numbers)
    clock.reanchor()
    return ResolvedSteps(
        steps=steps,
        parts=parts,
        times=times,
        durations=durations,
        mark_bounds=bounds,
        step_us=[times[end - 1] - times[first] for first, end in pairwise(bounds)],
        parts_us=parts_us[:, : len(PARTS)],
        traces=traces,
        trace_times=TraceTimes.from_traces(sections, traces),
        hook_work=Intervals(*_as_columns(work, 3)),
        waits=waiting,
        waited_us=_sum_by_index(waiting.section, waiting.end - waiting.start, 2 * count),
        in_hooks_us=_sum_by_index(hooks_section, hooks_us, 2 * count),
        weighted_sums=sums,
        means=means_of(sums),
        samples=[sum(one.samples for one in step.micro_batches) for step in steps],
        gradient_times=gradient_times,
    )


def split_exposed_time(resolved: ResolvedSteps, all_ready_us: FloatArray) -> IntArray:
    """Move exposed communication out of backward's and sync's microseconds, into the three `exposed_` parts.

    `exposed_hook_us`: hooks on the training thread, and hooks on other threads while it waited.
    `exposed_wire_us`: the rest of its waiting while a bucket that all ranks had ready was on the wire, or
    after all ranks had all buckets ready. `exposed_wait_us`: what is left. Nothing could move then, since
    some rank had not got there yet.

    `all_ready_us`: when the last rank had each trace's bucket ready, on this rank's clock; 0: long ago, or
    not known. Shape (traces,). Changes `resolved.parts_us`, and returns all exposed communication of each
    step, shape (steps,).
    """
    count = len(resolved.in_hooks_us)
    hook, left, wire = resolved.in_hooks_us.copy(), resolved.waited_us.copy(), np.zeros(count, dtype=np.int64)
    waits, work, traces = resolved.waits, resolved.hook_work, resolved.trace_times
    if waits.section.size:
        all_ready = np.rint(all_ready_us).astype(np.int64)
        last_ready = np.zeros(count, dtype=np.int64)
        np.maximum.at(last_ready, traces.section, all_ready)
        on_wire = Intervals(traces.section, np.maximum(all_ready, traces.ready), traces.done)
        # Once all ranks have all buckets of a section ready, what is left of its waiting is the wire's.
        after = Intervals(np.arange(count), last_ready, np.full(count, waits.end.max()))
        moving = Intervals(*map(np.concatenate, zip(work, on_wire, after, strict=True)))
        in_hooks = _sum_by_index(waits.section, union_overlap_us(work, waits), count)
        while_moving = _sum_by_index(waits.section, union_overlap_us(moving, waits), count)
        hook += in_hooks
        left -= while_moving
        wire = while_moving - in_hooks
    exposed, parts_us = hook + left + wire, resolved.parts_us
    parts_us[:, [_BACKWARD, _SYNC]] -= exposed.reshape(-1, 2)
    for column, us in ((_HOOK, hook), (_WAIT, left), (_WIRE, wire)):
        parts_us[:, column] = us.reshape(-1, 2).sum(1)
    total: IntArray = exposed.reshape(-1, 2).sum(1)
    return total


def in_flight_us(traces: TraceTimes, count: int) -> IntArray:
    """Time in which some bucket was in flight, from ready to done, in microseconds: shape (steps,)."""
    if not traces.section.size:
        return np.zeros(count, dtype=np.int64)
    first, last = np.full(count, traces.ready.min()), np.full(count, traces.done.max())
    intervals = Intervals(traces.section // 2, traces.ready, traces.done)
    return union_overlap_us(intervals, Intervals(np.arange(count), first, last))


def union_overlap_us(intervals: Intervals, windows: Intervals) -> IntArray:
    """How many microseconds of each window (at least one) the union of intervals covers: shape (windows,)."""
    low, high = int(windows.start.min()), int(windows.end.max())

    def to_single_timeline(section: IntArray, moment: IntArray) -> IntArray:
        """Moments with all time lines laid end to end, so that one sort serves all."""
        position: IntArray = section * (high - low + 1) + (np.minimum(np.maximum(moment, low), high) - low)
        return position

    start = to_single_timeline(intervals.section, intervals.start)
    end = to_single_timeline(intervals.section, intervals.end)
    order = start.argsort(kind="stable")
    start = start[order]
    latest_end = np.zeros(len(start) + 1, dtype=np.int64)
    np.maximum.accumulate(end[order], out=latest_end[1:])
    more = latest_end[1:] - np.maximum(start, latest_end[:-1])
    covered = np.zeros(len(start) + 1, dtype=np.int64)
    np.add.accumulate(np.maximum(more, 0), out=covered[1:])

    def covered_until(position: IntArray) -> IntArray:
        begun = start.searchsorted(position, "right")
        # Of all that began before a position, only the one that ends last can reach beyond it.
        until: IntArray = covered[begun] - np.maximum(latest_end[begun] - position, 0)
        return until

    until_start = covered_until(to_single_timeline(windows.section, windows.start))
    return covered_until(to_single_timeline(windows.section, windows.end)) - until_start


def _sums_and_weights(steps: Sequence[StepMarks], clock: Clock, count: int) -> FloatArray:
    """This rank's loss and the numbers beside it, summed over what counts, and how much that is for each."""
    sums = [[0.0] * (2 * count) for _ in steps]
    rows = [micro_batch.means for step in steps for micro_batch in step.micro_batches]
    known = iter(clock.read_numbers([one for means in rows for one in means if one is not None]))
    for row, step in zip(sums, steps, strict=True):
        for means, _, weight in step.micro_batches:
            for index, one in enumerate(means):
                mean = math.nan if one is None else next(known)
                if one is not None and weight:
                    row[index] += mean * weight
                    row[count + index] += weight
    return np.array(sums)


def _read_norms(steps: Sequence[StepMarks], clock: Clock) -> None:
    """Make numbers of the norms that were measured."""
    measured = [step for step in steps if step.grad_norm is not None]
    of_groups = [norm for step in measured for norm in step.group_grad_norms or () if norm is not None]
    norms = iter(clock.read_numbers([*(step.grad_norm for step in measured), *of_groups]))
    for step in measured:
        step.grad_norm = next(norms)
    for step in measured:
        if step.group_grad_norms is not None:
            step.group_grad_norms = [one if one is None else next(norms) for one in step.group_grad_norms]


def _as_columns(numbers: Sequence[int], columns: int) -> IntArray:
    return np.array(numbers, dtype=np.int64).reshape(-1, columns).T


def _sum_by_index(indices: IntArray, values: IntArray, count: int) -> IntArray:
    """The sum of the values at each of `count` indices."""
    # In double precision: exact up to 2**53 microseconds, which are 285 years.
    return np.bincount(indices, values, count).astype(np.int64)


# Records.


def step_records(
    resolved: ResolvedSteps,
    all_means: Sequence[Sequence[float | None]],
    all_ready_us: FloatArray,
    value_names: Sequence[str] = (),
    *,
    turns: Sequence[int] = (0,),
    rank: int,
    every: int,
) -> Iterator[tuple[StepRecord, Sequence[BucketTrace[int]], Iterator[BucketRecord]]]:
    """Every n-th step's (`every`) record, its traces, and the records of its buckets, after
    `split_exposed_time`; the traces of `resolved` are taken out.

    `all_means`: over all ranks, of each step, of the loss and of the numbers of `value_names`; empty where
    ranks exchanged nothing. `turns`: as in `loss_of`.
    """
    steps, times, parts = resolved.steps, resolved.times, resolved.parts_us.tolist()
    ended, durations = [_LAP_NAMES[part] for part in resolved.parts], resolved.durations.tolist()
    all_ready = np.rint(all_ready_us).astype(np.int64).tolist()
    waits = np.stack(resolved.waits[1:], 1).tolist()
    # Where each step's entries begin in tables that are sorted by section, and where the last one's end.
    sections = np.arange(0, 2 * len(steps) + 2, 2)
    trace_bounds: list[int] = resolved.trace_times.section.searchsorted(sections).tolist()
    wait_bounds: list[int] = resolved.waits.section.searchsorted(sections).tolist()
    for row, step in enumerate(steps):
        # Traces are let go as soon as they are recorded, while the processor has them in its caches.
        first_trace, end_trace = trace_bounds[row], trace_bounds[row + 1]
        traces = resolved.traces[: end_trace - first_trace]
        del resolved.traces[: end_trace - first_trace]
        if step.number % every:
            continue
        first, end = resolved.mark_bounds[row], resolved.mark_bounds[row + 1]
        own, means = resolved.means[row], all_means[row]
        laps = [*zip(ended[first + 1 : end], durations[first + 1 : end], strict=True)]
        record = StepRecord(
            v=RECORDS_VERSION,
            rank=rank,
            stage=step.stage,
            step=step.number,
            samples=resolved.samples[row],
            loss=loss_of(own, turns),
            mean_loss=loss_of(means, turns) if means else None,
            values=dict(zip(value_names, own[1:], strict=True)) or None,
            mean_values=dict(zip(value_names, means[1:], strict=False)) or None,
            lr=step.lr,
            grad_norm=step.grad_norm,
            group_grad_norms=step.group_grad_norms,
            start_us=times[first],
            **dict(zip(PARTS, parts[row], strict=True)),
            step_us=resolved.step_us[row],
            cpu_us=step.cpu_us,
            laps=[lap for lap in _merge_laps(laps) if lap[1] > 0],
            waits=[
                (start, end) for start, end in waits[wait_bounds[row] : wait_bounds[row + 1]] if end > start
            ],
            machine=step.machine,
        )
        ready, gradients = all_ready[first_trace:end_trace], resolved.gradient_times[row]
        buckets = (
            bucket_record(trace, at or None, gradients, stage=step.stage, step=step.number, rank=rank)
            for trace, at in zip(traces, ready, strict=True)
        )
        yield record, traces, buckets


def _merge_laps(laps: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Laps as they are; or those of many updates, as in a round, as at most some hundred sums."""
    if len(laps) <= _MAX_LAPS:
        return laps
    size, merged = -(-len(laps) // (_MAX_LAPS // len(PARTS))), list[tuple[str, int]]()
    for first in range(0, len(laps), size):
        sums = dict[str, int]()
        for part, us in laps[first : first + size]:
            sums[part] = sums.get(part, 0) + us
        merged += sums.items()
    return merged


def bucket_record(
    trace: BucketTrace[int],
    all_ready_us: int | None,
    gradients_us: Mapping[str, int],
    *,
    stage: int,
    step: int,
    rank: int,
) -> BucketRecord:
    """The record of a bucket that is complete; with when all ranks had it ready, and when each gradient was
    (empty: not measured).
    """
    work_us = {"encode": 0, "decode": 0}
    for span in trace.spans:
        work_us[span.phase] += span.done - span.start
    params_ready_us = completed_by = None
    if trace.kind == "gradient" and gradients_us:
        of_params = {param.name: gradients_us.get(param.name) for param in trace.params}
        known = {name: at for name, at in of_params.items() if at is not None}
        params_ready_us = list(of_params.values())
        completed_by = max(known, key=known.__getitem__, default=None)
    assert trace.done is not None
    legs = [
        CollectiveRecord(leg.op, leg.group, leg.dtype, leg.bytes, leg.wire_bytes, leg.start, leg.done)
        for leg in trace.collectives
        if leg.done is not None
    ]
    return BucketRecord(
        v=RECORDS_VERSION,
        rank=rank,
        stage=stage,
        step=step,
        kind=trace.kind,
        bucket=trace.bucket,
        params=[param.name for param in trace.params],
        dtype=trace.dtype,
        numel=trace.numel,
        bytes=trace.bytes,
        wire_bytes=trace.wire_bytes,
        between_hosts_bytes=trace.between_hosts_bytes,
        hooks=trace.hooks,
        ready_us=trace.ready,
        all_ready_us=all_ready_us,
        launch_us=legs[0].start_us if legs else trace.ready,  # it is launched when it is ready
        done_us=trace.done,
        encode_us=work_us["encode"],
        decode_us=work_us["decode"],
        legs=legs,
        params_ready_us=params_ready_us,
        completed_by=completed_by,
        fidelity=None if trace.fidelity is None else asdict(trace.fidelity),
    )


TOTALS = ("samples", "wire_bytes", "communication_us", *PARTS, "step_us")
"""What the summary adds up over all steps of a rank; checkpoints have them in this order."""


def summary_fields(totals: Sequence[Mapping[str, float]], steps: int) -> dict[str, Any]:
    """What the summary says of all ranks' totals after so many steps of the run, by its fields; times are
    means over ranks, in seconds.
    """

    def mean_s(*names: str) -> float:
        return sum(total[name] for total in totals for name in names) / len(totals) / 1e6

    seconds_in_steps = mean_s("step_us")
    return {
        "samples": int(sum(total["samples"] for total in totals)),
        "seconds_in_steps": seconds_in_steps,
        "steps_per_s": steps / seconds_in_steps if seconds_in_steps else 0.0,
        "data_s": mean_s("data_us"),
        "compute_s": mean_s("forward_us", "backward_us", "optimizer_us"),
        "communication_s": mean_s("communication_us"),
        "exposed_communication_s": mean_s("exposed_hook_us", "exposed_wait_us", "exposed_wire_us"),
        "straggler_wait_s": [total["exposed_wait_us"] / 1e6 for total in totals],
        "wire_bytes": int(sum(total["wire_bytes"] for total in totals)),
    }


def totals_after_rank_change(totals: Sequence[Sequence[float]], rank: int, ranks: int) -> list[float]:
    """With what one of so many ranks goes on, after as many others as have `totals`. Counts are divided
    among the ranks: their sum stays. Times are the mean of the others': the mean over ranks stays.
    """
    counts = [sum(one[index] for one in totals[rank::ranks]) for index in range(2)]
    return [*counts, *(round(fmean(column)) for column in list(zip(*totals, strict=True))[2:])]
