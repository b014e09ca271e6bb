"""Control messages: what ranks tell each other about the steps in which they exchange something.

A `MessageAccumulator` adds up this rank's numbers from one message to the next, and makes messages of
resolved steps (`step_timing.py`). The recorder posts those of half a second together and reads those of all
ranks a step later. `all_ready_us` matches their ready times with this rank's traces, so that
`step_timing.split_exposed_time` can split its waiting; `recorder.combine_messages` and `stragglers.py` read
the rest.

A message is a row of numbers: first those in `SUMS`, added up since the message before; then requests, the
first finding of hooks, and times at which buckets were ready, in microseconds of rank 0's clock (0: none).
The loss and the numbers beside it travel behind a message: sums since the message before, then weights.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddprun.telemetry.records import OWN_PARTS
from ddprun.telemetry.step_timing import FloatArray, IntArray, ResolvedSteps, means_of
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.payload import Finding

STOP, CHECKPOINT, COMPARE_CLOCKS = 1, 2, 4  # requests; a message has their sum
SUMS = ("samples", "steps", "us", *OWN_PARTS)
"""`samples`: what counts in the mean loss (`weight_by` may say otherwise). `us`: how long the steps took."""

SAMPLES_AT, STEPS_AT, US_AT, OWN_AT = range(4)
REQUESTS_AT = len(SUMS)
_SYNC_COLUMN_COUNT = 8
FINDING_AT = REQUESTS_AT + 1
SYNC_READY_AT = FINDING_AT + _SYNC_COLUMN_COUNT
READY_AT = SYNC_READY_AT + 1
"""Where in a message are: the first finding (`first_finding`); when the last bucket of the exchange outside
backward was ready in which ranks wait for a late one, with columns for earlier ones before it
(`_sync_column_by_trace`); when each gradient bucket was ready, by its number, zeros if this rank exchanged
none.
"""

_COMPUTE = ("forward_us", "backward_us", "optimizer_us")
OWN_COLUMNS, READY_COLUMNS = slice(OWN_AT, REQUESTS_AT), slice(READY_AT, None)


def message_length(turns: Sequence[range]) -> int:
    """How many numbers a message of a stage has whose turns have gradient buckets of these numbers."""
    return READY_AT + max((turn.stop for turn in turns), default=0)


@dataclass(slots=True)
class OwnMessages:
    numbers: FloatArray  # this rank's; shape (messages, numbers of a message)
    steps: list[int]  # that each is about; behind them the stage's last step, if `add_remainder` was called
    rows: list[int]  # these steps' rows in `ResolvedSteps`; the remainder of a stage has none
    findings: dict[int, Sequence[BucketTrace[int]]]  # by message, traces in which hooks have found something
    weighted_sums: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))
    """Of the loss and the numbers beside it: sums, then weights; shape (messages, 2 * numbers)."""

    def add_remainder(self, remainder: "MessageAccumulator", last_step: int) -> None:
        """Add a message with what is left at a stage's end, since steps without a message came last. Every
        rank sends one, since others may have something left where this one does not.
        """
        row = np.zeros((1, self.numbers.shape[1]))
        row[0, :REQUESTS_AT], row[0, FINDING_AT] = remainder.sums, remainder.first_finding
        self.findings[len(self.steps)] = remainder.traces_with_findings
        self.steps.append(last_step)
        self.numbers = np.vstack((self.numbers, row))
        self.weighted_sums = np.vstack(
            (self.weighted_sums, remainder.value_sums_or_zeros(self.weighted_sums.shape[1]))
        )


def empty_messages(turns: Sequence[range], values: int = 0) -> OwnMessages:
    """None so far, with so many numbers for those beside the loss."""
    return OwnMessages(np.zeros((0, message_length(turns))), [], [], {}, np.zeros((0, values)))


@dataclass(slots=True)
class MessageAccumulator:
    """What this rank has added up since its last message."""

    sums: FloatArray = field(default_factory=lambda: np.zeros(len(SUMS)))
    last_step: int = 0
    first_finding: int = 0  # code of the first bucket that did not come back finite
    traces_with_findings: list[BucketTrace[int]] = field(default_factory=list)  # of hooks
    weighted_sums: FloatArray = field(
        default_factory=lambda: np.zeros(0)
    )  # as in messages; empty: none so far

    def state_dict(self, value_names: Sequence[str]) -> dict[str, Any]:
        """As a checkpoint can hold it, with the numbers beside the loss by name."""
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        about = {"last_step": self.last_step, "first_finding": self.first_finding}
        loss, *pairs = self.value_sums_or_zeros(2 + 2 * len(value_names)).reshape(2, -1).T.tolist()
        return {**sums, **about, "loss": loss, "values": dict(zip(value_names, pairs, strict=True))}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], value_names: Sequence[str]) -> "MessageAccumulator":
        """From what `state_dict` returned. A number that had another name is NaN until the next message."""
        sums = np.array([state[name] for name in SUMS], dtype=np.float64)
        unknown = [math.nan if sums[SAMPLES_AT] else 0.0, 0.0]
        pairs = [state["loss"], *(state["values"].get(name, unknown) for name in value_names)]
        values = np.array(pairs, dtype=np.float64).T.ravel()
        return cls(sums, state["last_step"], state["first_finding"], weighted_sums=values)

    def value_sums_or_zeros(self, count: int) -> FloatArray:
        """What has been added up of numbers beside the loss: so many sums and weights."""
        return self.weighted_sums if len(self.weighted_sums) else np.zeros(count)

    def note_findings(self, traces: Iterable[BucketTrace[int]]) -> None:
        """Keep what hooks have found in these traces, and the first of it as a number."""
        if found := [trace for trace in traces if trace.findings]:
            first = next((int(finding.code) for _, finding in _nonfinite_findings(found)), 0)
            self.first_finding = self.first_finding or first
            self.traces_with_findings += found

    def add_and_make_messages(
        self, resolved: ResolvedSteps, *, turns: Sequence[range], offset_us: float
    ) -> OwnMessages:
        """Add up the resolved steps, and make a message of each in which ranks exchanged something. `turns`:
        as in `message_length`; `offset_us`: how far this rank's clock is ahead of rank 0's.
        """
        steps = resolved.steps
        rows = [row for row, step in enumerate(steps) if step.exchanged]
        values = self._sum_values_by_message(resolved)
        numbers = np.zeros((len(rows), message_length(turns)))
        self._put_sums(resolved, rows, numbers)
        if rows:
            numbers[:, REQUESTS_AT] = [steps[row].requests for row in rows]
            _put_ready_times(resolved, rows, numbers, offset_us)
        findings = self._put_findings(resolved, rows, numbers)
        numbers_of = [steps[row].number for row in rows]
        return OwnMessages(numbers, numbers_of, rows, findings, values)

    def _sum_values_by_message(self, resolved: ResolvedSteps) -> FloatArray:
        """The loss and the numbers beside it, for each message; keeps what there is since the last one."""
        count, sums = resolved.weighted_sums.shape[1], list[FloatArray]()
        running = self.value_sums_or_zeros(count)
        for step, values in zip(resolved.steps, resolved.weighted_sums, strict=True):
            running = running + values
            if step.exchanged:
                sums.append(running)
                running = np.zeros(count)
        self.weighted_sums = running
        return np.array(sums).reshape(len(sums), count)

    def _put_sums(self, resolved: ResolvedSteps, rows: Sequence[int], numbers: FloatArray) -> None:
        """Put the sums into the messages; keeps those since the last one."""
        running = np.empty((1 + len(resolved.steps), len(SUMS)))
        running[0] = self.sums
        running[1:, SAMPLES_AT] = resolved.weighted_sums[:, resolved.weighted_sums.shape[1] // 2]
        running[1:, STEPS_AT] = 1.0
        running[1:, US_AT] = resolved.step_us
        running[1:, OWN_AT:] = resolved.own_parts_us
        np.add.accumulate(running, axis=0, out=running)  # of whole numbers, so that differences are exact
        self.sums, self.last_step = running[-1].copy(), resolved.steps[-1].number
        if rows:
            at = running[1:][rows]
            numbers[:, :REQUESTS_AT] = at
            numbers[1:, :REQUESTS_AT] -= at[:-1]
            self.sums -= at[-1]

    def _put_findings(
        self, resolved: ResolvedSteps, rows: Sequence[int], numbers: FloatArray
    ) -> dict[int, Sequence[BucketTrace[int]]]:
        """Put the first finding into each message; returns all of them, by message."""
        by_row, by_message = resolved.findings, dict[int, Sequence[BucketTrace[int]]]()
        if not (by_row or self.traces_with_findings or self.first_finding):
            return by_message
        for row, message in enumerate(_message_index_by_step(rows, resolved).tolist()):
            self.note_findings(by_row.get(row, ()))
            if message >= 0:
                numbers[message, FINDING_AT] = self.first_finding
                if self.traces_with_findings:  # also where only another rank's values may have been lost
                    by_message[message] = self.traces_with_findings
                self.first_finding, self.traces_with_findings = 0, []
        return by_message


def means_over_ranks(values: FloatArray) -> list[list[float | None]]:
    """Means over all ranks of the loss and the numbers beside it, for each message; of sums and weights,
    shape (messages, ranks, 2 * numbers). None: no sample has one.
    """
    # The order of additions must not depend on how many messages there are: `sum` would choose one.
    return means_of(np.add.accumulate(values, axis=1)[:, -1])


def all_ready_us(
    resolved: ResolvedSteps, own: OwnMessages, messages: FloatArray | None, *, offset_us: float
) -> FloatArray:
    """When the last rank had each trace's bucket ready, on this rank's clock; 0: not known. Shape (traces,).

    `own` are this rank's messages, `messages` those of all ranks, shape (messages, ranks, numbers of a
    message); None: there are none.
    """
    if messages is None:
        return np.zeros(len(resolved.traces))
    about = _message_index_by_step(own.rows, resolved)[resolved.trace_times.section // 2]
    column = _ready_column_by_trace(resolved, messages.shape[-1])
    among_all = np.array([trace.among_all for trace in resolved.traces], dtype=bool)
    known = (about >= 0) & (column >= 0) & among_all
    ready = messages.max(1)[about, column]
    all_ready: FloatArray = np.where(known & (ready > 0), ready + offset_us, 0.0)
    return all_ready


def _put_ready_times(
    resolved: ResolvedSteps, rows: Sequence[int], numbers: FloatArray, offset_us: float
) -> None:
    """Put into this rank's messages when it had its buckets ready."""
    about = _message_index_by_step(rows, resolved)[resolved.trace_times.section // 2]
    column = _ready_column_by_trace(resolved, numbers.shape[-1])
    mine = (about >= 0) & (column >= 0)
    at = resolved.trace_times.ready - offset_us
    np.maximum.at(numbers, (about[mine], column[mine]), at[mine])


def _ready_column_by_trace(resolved: ResolvedSteps, length: int) -> IntArray:
    """Where in a message of so many numbers is when each trace was ready; -1: nowhere. Shape (traces,)."""
    at = READY_AT + resolved.trace_times.bucket
    outside = resolved.trace_times.section % 2 > 0
    columns: IntArray = np.where(outside, _sync_column_by_trace(resolved), np.where(at < length, at, -1))
    return columns


def _sync_column_by_trace(resolved: ResolvedSteps) -> IntArray:
    """Where in a message is when the traces were ready that are of the exchange outside backward in which
    ranks wait for one that is late; -1: of the others. Shape (traces,).

    It is the first exchange after the step's computation, since all ranks have ended it when a later one
    begins. Where nothing follows the computation, it is the step's first, or else one that an earlier step
    began. Its traces were ready before it was waited for. The last one has the last column; of more traces
    than columns, neighbours share one.
    """
    sections, _, ready, _ = resolved.trace_times
    waits, candidates = resolved.waits, sections % 2 > 0
    times, begins = np.array(resolved.times), resolved.mark_bounds[:-1]
    computed = np.maximum.reduceat(np.where(np.isin(resolved.parts, _COMPUTE), times, 0), begins)
    for since in (times[begins], computed):
        found = candidates & (ready >= since.repeat(2)[sections])
        candidates = np.where(np.isin(sections, sections[found]), found, candidates)
    first_ready = np.full(2 * len(resolved.steps), np.iinfo(np.int64).max)
    first_wait = first_ready.copy()
    np.minimum.at(first_ready, sections[candidates], ready[candidates])
    after = waits.start >= first_ready[waits.section]
    np.minimum.at(first_wait, waits.section[after], waits.start[after])
    first = candidates & (ready <= first_wait[sections])
    count = np.bincount(sections[first], minlength=2 * len(resolved.steps))
    later = count.cumsum()[sections] - first.cumsum()  # traces of the same exchange
    back = later * _SYNC_COLUMN_COUNT // np.maximum(count[sections], 1)
    columns: IntArray = np.where(first, SYNC_READY_AT - back, -1)
    return columns


def _message_index_by_step(rows: Sequence[int], resolved: ResolvedSteps) -> IntArray:
    """The message about each resolved step; -1: there is none. Shape (steps,)."""
    message_of = np.full(len(resolved.steps), -1)
    message_of[rows] = range(len(rows))
    return message_of


def _nonfinite_findings(traces: Iterable[BucketTrace[int]]) -> Iterator[tuple[BucketTrace[int], Finding]]:
    """The buckets that did not come back finite, in an order that is the same on all ranks, as they are."""
    for trace in sorted(traces, key=lambda trace: (trace.kind, trace.bucket)):
        yield from ((trace, finding) for finding in trace.findings if finding.code)


def first_overflow(
    codes: Sequence[int], traces: Sequence[BucketTrace[int]]
) -> tuple[BucketTrace[int], Finding] | None:
    """A bucket whose mean a hook's cast made infinite though every rank's own values were finite, and what
    that hook has found. `codes`: each rank's `first_finding`; `traces`: this rank's in which hooks have
    found something.
    """
    if 2 in codes:  # some rank's own values were not finite
        return None
    return next(_nonfinite_findings(traces), None)
