"""Records of steps that were resolved together: each bucket with its own step and its own ready time."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.control_message import (
    FINDING_AT,
    READY_AT,
    MessageAccumulator,
    OwnMessages,
    all_ready_us,
    means_over_ranks,
    message_length,
)
from ddprun.telemetry.records import PARTS, BucketRecord, StepRecord
from ddprun.telemetry.step_timing import NonBackwardExchanges, resolve_step_marks, step_records
from ddprun_hooks.comm.trace import BucketTrace
from tests.telemetry.steps import MadeStep, steps_of

OFFSET_US = 500.0


def trace(bucket: int, ready: int, kind: Any = "gradient") -> BucketTrace[int]:
    return BucketTrace(kind, bucket, (), "float32", 2, 8, ready, ready + 5, ready + 1)


def step_of(number: int, *, buckets: int = 0, beside: int = 0, exchanged: bool = True) -> MadeStep:
    """A step from number * 1000 to 900 µs later, with so many buckets in backward and beside it."""
    begin = 1000 * number
    parts = ["", "data_us", "backward_us", "sync_us"]
    step = MadeStep(number, 2, parts, [1000 * (begin + at) for at in (0, 0, 400, 900)], exchanged=exchanged)
    step.losses, step.samples = [torch.tensor(float(number))], [1]
    if buckets:
        step.traces = [trace(bucket, begin + bucket) for bucket in range(buckets)]
        step.backward_end = 1000 * (begin + 400)
    if beside:
        sent = [trace(place, begin + 500 + place, "delta") for place in range(beside)]
        step.sync = NonBackwardExchanges(sent, sent, [(1000 * (begin + 600), 1000 * (begin + 700))])
    return step


class RecordedStep(NamedTuple):
    """The record of a step, the traces of its buckets, and their records."""

    record: StepRecord
    traces: Sequence[BucketTrace[int]]
    buckets: list[BucketRecord]


def records_of(
    steps: list[MadeStep],
    ready_times: Mapping[int, tuple[float, Mapping[int, float]]],
    buckets: int,
    *,
    every: int = 1,
    us: NDArray[np.int64] | None = None,
) -> list[RecordedStep]:
    """The records of steps that are resolved together, on the second of two ranks.

    Args:
        steps: the steps.
        ready_times: of each step with a message, when the last rank was ready beside backward, and when it
            had buckets ready, on rank 0's clock.
        buckets: of the stage.
        every: as of `step_records`.
        us: instead of the parts that come of the steps.
    """
    messages = np.zeros((len(ready_times), 2, message_length([range(buckets)])))
    sums = np.ones((len(ready_times), 2, 2))
    for message, (step, (sync_ready, ready)) in enumerate(ready_times.items()):
        sums[message, :, 0] = step
        messages[message, 1, FINDING_AT + 1 : READY_AT] = sync_ready
        for bucket in range(buckets):
            messages[message, bucket % 2, READY_AT + bucket] = ready.get(bucket, 0.0)
    rows = {step.number: row for row, step in enumerate(steps)}
    own = OwnMessages(messages[:, 1], list(ready_times), [rows[step] for step in ready_times], {})
    resolved = resolve_step_marks(steps_of(steps), Clock(), every=1)
    if us is not None:
        resolved.parts_us[:] = us
    means: list[Sequence[float | None]] = [()] * len(steps)
    for row, of_message in zip(own.rows, means_over_ranks(sums), strict=True):
        means[row] = of_message
    all_ready = all_ready_us(
        resolved,
        own,
        messages if ready_times else None,
        offset_us=OFFSET_US,
    )
    found = step_records(resolved, means, all_ready, rank=1, every=every)
    return [RecordedStep(record, traces, list(buckets)) for record, traces, buckets in found]


def test_each_bucket_gets_the_ready_time_of_its_own_step() -> None:
    """Among steps without a message, without buckets, and with buckets beside backward."""
    steps = [
        step_of(1, buckets=2, exchanged=False),
        step_of(2, buckets=2),
        step_of(3),
        step_of(4, buckets=2, beside=3),
        step_of(5, beside=1),
        step_of(6, beside=1, exchanged=False),
        step_of(7, buckets=1, exchanged=False),
    ]
    ready_times = {
        2: (0.0, {0: 21.0, 1: 22.0}),
        3: (0.0, {}),
        4: (45.0, {0: 41.0, 1: 42.0}),
        5: (55.0, {}),
    }
    us = np.arange(len(steps) * len(PARTS)).reshape(len(steps), -1)
    found = records_of(steps, ready_times, 2, us=us)
    assert [[getattr(one.record, part) for part in PARTS] for one in found] == us.tolist()
    assert [one.record.step for one in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [one.record.mean_loss for one in found] == [None, 2.0, 3.0, 4.0, 5.0, None, None]
    assert [list(one.traces) for one in found] == [
        [*step.traces, *(step.sync.completed if step.sync else [])] for step in steps
    ]
    beside = 45.0 + OFFSET_US
    assert [[bucket.all_ready_us for bucket in one.buckets] for one in found] == [
        [None, None],
        [21.0 + OFFSET_US, 22.0 + OFFSET_US],
        [],
        [41.0 + OFFSET_US, 42.0 + OFFSET_US, beside, beside, beside],
        [55.0 + OFFSET_US],
        [None],
        [None],
    ]
    assert [[bucket.step for bucket in one.buckets] for one in found[3:5]] == [[4] * 5, [5]]
    assert [one.record.waits for one in found][3:] == [
        [(4002, 4400), (4600, 4700)],
        [(5600, 5700)],
        [(6600, 6700)],
        [(7001, 7400)],
    ]
    assert found[3].record.laps == [("backward", 400), ("sync", 500)]
    assert (found[3].record.start_us, found[3].record.step_us) == (4000, 900)


def test_each_of_many_buckets_has_its_ready_time() -> None:
    """As the last rank had it."""
    ready = {bucket: 1000.0 + bucket for bucket in range(300)}
    (found,) = records_of([step_of(1, buckets=300)], {1: (0.0, ready)}, 300)
    assert [one.all_ready_us for one in found.buckets] == [at + OFFSET_US for at in ready.values()]
    assert records_of([step_of(1)], {1: (0.0, {})}, 0)[0].buckets == []


def test_without_messages_nothing_is_known_of_other_ranks() -> None:
    """As after a failure."""
    found = records_of([step_of(1, buckets=1), step_of(2, beside=1)], {}, 1)
    assert [[bucket.all_ready_us for bucket in one.buckets] for one in found] == [[None], [None]]
    assert [one.record.mean_loss for one in found] == [None, None]


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_records_that_nobody_wants_are_not_made(every: int, steps: list[int]) -> None:
    """With `timings.every`; each of the others still has its own buckets."""
    found = records_of([step_of(number, buckets=1) for number in range(1, 7)], {}, 1, every=every)
    assert [one.record.step for one in found] == steps
    assert [one.traces[0].ready // 1000 for one in found] == steps


@pytest.mark.parametrize(
    ("buckets", "shared_with"),
    [(1, [0]), (3, [0, 1, 2]), (8, [*range(8)]), (20, [1, 1, 4, 4, 4, 6, 6, 9, 9, 9])],
)
def test_each_bucket_beside_backward_has_its_ready_time(buckets: int, shared_with: list[int]) -> None:
    """The last rank's; of more than eight, neighbours have that of the last of them."""
    resolved = resolve_step_marks(
        steps_of([step_of(1, beside=buckets), step_of(2, beside=2)]), Clock(), every=1
    )
    late = resolve_step_marks(steps_of([step_of(1, beside=buckets), step_of(2, beside=2)]), Clock(), every=1)
    late.trace_times.ready[:buckets] += 10 + 3 * np.arange(buckets)
    messages = [
        MessageAccumulator().add_and_make_messages(one, turns=[], offset_us=offset)
        for one, offset in ((resolved, OFFSET_US), (late, 0.0))
    ]
    of_all = np.stack([one.numbers for one in messages], 1)
    found = all_ready_us(resolved, messages[0], of_all, offset_us=OFFSET_US).tolist()
    ready = late.trace_times.ready + OFFSET_US
    assert found[: len(shared_with)] == ready[shared_with].tolist()
    assert found[buckets - 1] == ready[buckets - 1]
