"""What records say of steps that are settled together: each payload with its own step and its own moment."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ddprun.telemetry.accumulator import OwnMessages
from ddprun.telemetry.batch import Account, Batch
from ddprun.telemetry.clock import HostClock
from ddprun.telemetry.control_message import (
    LOSS_AT,
    MOST_READY,
    READY_AT,
    SAMPLES_AT,
    SYNC_READY_AT,
    ControlMessages,
    blank,
    told_buckets,
)
from ddprun.telemetry.records import PARTS
from ddprun.telemetry.resolve import resolve
from ddprun.telemetry.step import Traffic
from ddprun_hooks.comm.trace import BucketTrace
from tests.telemetry.made import Made, buffer_of

OFFSET_US = 500.0


def trace(bucket: int, ready: int, kind: Any = "gradient") -> BucketTrace[int]:
    return BucketTrace(kind, bucket, (), "float32", 2, 8, ready, ready + 5, ready + 1)


def step_of(number: int, *, buckets: int = 0, beside: int = 0, met: bool = True) -> Made:
    """A step from number * 1000 to 900 µs later, with so many payloads in backward and beside it."""
    begin = 1000 * number
    parts = ["", "data_us", "backward_us", "sync_us"]
    step = Made(number, 2, parts, [1000 * (begin + at) for at in (0, 0, 400, 900)], synchronised=met)
    step.losses, step.samples = [torch.tensor(float(number))], [1]
    if buckets:
        step.traces = [trace(bucket, begin + bucket) for bucket in range(buckets)]
        step.backward_end = 1000 * (begin + 400)
    if beside:
        sent = [trace(place, begin + 500 + place, "delta") for place in range(beside)]
        step.sync = Traffic(sent, sent, [(1000 * (begin + 600), 1000 * (begin + 700))])
    return step


def account_of(
    steps: list[Made], told: Mapping[int, tuple[float, Mapping[int, float]]], buckets: int
) -> Account:
    """The account of steps about which two ranks have told.

    Args:
        steps: that are settled together.
        told: of each step that has a word, when the last rank was ready beside backward, and when it had
            buckets ready, in moments of rank 0.
        buckets: of the stage.
    """
    places = told_buckets(buckets)
    numbers = np.stack([blank(len(told), len(places))] * 2, axis=1)
    numbers[..., SAMPLES_AT] = 1
    for word, (step, (sync_ready, ready)) in enumerate(told.items()):
        numbers[word, :, LOSS_AT] = step
        numbers[word, 1, SYNC_READY_AT] = sync_ready
        for place, bucket in enumerate(places):
            numbers[word, place % 2, READY_AT + place] = ready.get(bucket, 0.0)
    rows = {step.number: row for row, step in enumerate(steps)}
    messages = OwnMessages(list(told), [rows[step] for step in told], {})
    batch = Batch(resolve(buffer_of(steps), HostClock(), every=1), messages, None, steps[-1].number)
    return Account(
        batch, ControlMessages(numbers) if told else None, buckets=buckets, offset_us=OFFSET_US, rank=1
    )


def test_each_payload_gets_the_moment_of_its_own_step_and_bucket() -> None:
    """Among steps without a word, without payloads, and with some beside backward."""
    steps = [
        step_of(1, buckets=2, met=False),
        step_of(2, buckets=2),
        step_of(3),
        step_of(4, buckets=2, beside=3),
        step_of(5, beside=1),
        step_of(6, beside=1, met=False),
        step_of(7, buckets=1, met=False),
    ]
    told = {2: (0.0, {0: 21.0, 1: 22.0}), 3: (0.0, {}), 4: (45.0, {0: 41.0, 1: 42.0}), 5: (55.0, {})}
    account = account_of(steps, told, 2)
    account.resolved.us[:] = np.arange(account.resolved.us.size).reshape(account.resolved.us.shape)
    found = list(account.records(every=1, all_of_them=False))
    assert [[one.record[part] for part in PARTS] for one in found] == account.resolved.us.tolist()
    assert [one.record["step"] for one in found] == [1, 2, 3, 4, 5, 6, 7]
    assert [one.record["mean_loss"] for one in found] == [None, 2.0, 3.0, 4.0, 5.0, None, None]
    assert [list(one.landed) for one in found] == [
        [*step.traces, *(step.sync.landed if step.sync else [])] for step in steps
    ]
    beside = 45.0 + OFFSET_US
    assert [list(one.all_ready_us) for one in found] == [
        [0.0, 0.0],
        [21.0 + OFFSET_US, 22.0 + OFFSET_US],
        [],
        [41.0 + OFFSET_US, 42.0 + OFFSET_US, beside, beside, beside],
        [55.0 + OFFSET_US],
        [0.0],
        [0.0],
    ]
    assert [one.record["waits"] for one in found][3:] == [
        [[4002, 4400], [4600, 4700]],
        [[5600, 5700]],
        [[6600, 6700]],
        [[7001, 7400]],
    ]
    assert found[3].record["laps"] == [("backward", 400), ("sync", 500)]
    assert (found[3].record["start_us"], found[3].record["step_us"]) == (4000, 900)


def test_buckets_that_are_not_told_of_have_the_moment_of_the_next_one_that_is() -> None:
    """As backward fills them in order."""
    buckets = MOST_READY + 10
    moments = {bucket: 1000.0 + bucket for bucket in range(buckets)}
    (found,) = account_of([step_of(1, buckets=buckets)], {1: (0.0, moments)}, buckets).records(
        every=1, all_of_them=False
    )
    told = told_buckets(buckets)
    expected = [moments[next(at for at in told if at >= bucket)] + OFFSET_US for bucket in range(buckets)]
    assert list(found.all_ready_us) == expected


def test_without_any_words_nothing_is_known_of_the_others() -> None:
    """As after a failure."""
    found = list(
        account_of([step_of(1, buckets=1), step_of(2, beside=1)], {}, 1).records(every=1, all_of_them=False)
    )
    assert [list(one.all_ready_us) for one in found] == [[0.0], [0.0]]
    assert [one.record["mean_loss"] for one in found] == [None, None]


@pytest.mark.parametrize(("observed", "steps"), [(False, [3, 6]), (True, [1, 2, 3, 4, 5, 6])])
def test_records_that_nobody_wants_are_not_made(observed: bool, steps: list[int]) -> None:
    """With `timings.every` those of most steps, unless somebody looks on; each still has its own payloads."""
    made = [step_of(number, buckets=1) for number in range(1, 7)]
    found = list(account_of(made, {}, 1).records(every=3, all_of_them=observed))
    assert [one.record["step"] for one in found] == steps
    assert [one.landed[0].ready // 1000 for one in found] == steps
