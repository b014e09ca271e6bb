"""What one rank tells: the same words, whichever steps are settled together."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ddprun.telemetry.accumulator import Accumulator
from ddprun.telemetry.clock import HostClock
from ddprun.telemetry.control_message import (
    CODE_AT,
    LOSS_AT,
    READY_AT,
    SAMPLES_AT,
    STEPS_AT,
    STOP,
    SYNC_READY_AT,
    US_AT,
    WISHES_AT,
    told_buckets,
)
from ddprun.telemetry.overflow import Overflow, overflow
from ddprun.telemetry.resolve import resolve
from ddprun.telemetry.step import Traffic
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.payload import Finding, ParamSlice
from tests.reads import Reads
from tests.telemetry.made import Made, buffer_of

OFFSET_US = 1000.0


class Told(NamedTuple):
    """One word."""

    step: int
    row: int
    finders: Sequence[BucketTrace[int]]


def step_of(number: int, samples: int, *, met: bool = True) -> Made:
    """A step of 10 µs that ends at number * 1000."""
    end = 1000 * number
    step = Made(number, 0, ["", "forward_us"], [1000 * (end - 10), 1000 * end], synchronised=met)
    step.losses.append(torch.tensor(0.1 * number))
    step.samples.append(samples)
    return step


def trace(bucket: int, ready: int, *codes: int, kind: str = "gradient") -> BucketTrace[int]:
    found = [Finding("fp16", "overflow", torch.tensor(code)) for code in codes]
    return BucketTrace(kind, bucket, (), "float32", 2, 8, ready, ready + 5, ready + 1, findings=found)  # type: ignore[arg-type]


def words_of(
    steps: Sequence[Made], lengths: Sequence[int], buckets: int = 3
) -> tuple[list[Told], NDArray[np.float64], Accumulator]:
    """The words about steps of which so many are settled together, and the round they leave."""
    told = told_buckets(buckets)
    messages, numbers, now, first = list[Told](), list[NDArray[np.float64]](), Accumulator(), 0
    for length in lengths:
        resolved = resolve(buffer_of(steps[first : first + length]), HostClock(), every=1)
        more, found, now = now.tell(resolved, buckets=told, offset_us=OFFSET_US)
        messages += [
            Told(step, first + row, more.finders.get(place, ()))
            for place, (step, row) in enumerate(zip(more.steps, more.rows, strict=True))
        ]
        numbers.append(found)
        first += length
    assert first == len(steps)
    return messages, np.concatenate(numbers), now


def any_steps(count: int, chance: random.Random) -> list[Made]:
    """Steps in some of which ranks meet, beside backward and in it."""
    steps = []
    for number in range(1, count + 1):
        step = step_of(number, chance.choice((0, 1, 3)), met=chance.random() < 0.6)
        step.wishes = chance.choice((0, 0, STOP))
        now = 1000 * number
        if chance.random() < 0.7:
            step.traces = [
                trace(bucket, now + bucket, *([1] if chance.random() < 0.2 else [])) for bucket in range(3)
            ]
            step.backward_end = step.marks[-1]
        if chance.random() < 0.3:
            beside = [trace(0, now + 30, kind="delta"), trace(1, now + 40, 2, kind="delta")]
            step.sync = Traffic(beside, beside, [(1000 * (now + 31), 1000 * (now + 50))])
        steps.append(step)
    return steps


@pytest.mark.parametrize("seed", range(10))
def test_words_are_the_same_whichever_steps_are_settled_together(seed: int) -> None:
    """Bit for bit, though losses are sums of fractions."""
    steps = any_steps(40, random.Random(seed))
    messages, numbers, left = words_of(steps, [1] * 40)
    for lengths in ([40], [7, 1, 20, 12], [32, 8]):
        other_words, other_numbers, other_left = words_of(steps, lengths)
        assert np.array_equal(numbers, other_numbers)
        assert other_left.plain() == left.plain()
        assert messages == other_words
    assert [told.step for told in messages] == [step.number for step in steps if step.synchronised]


def test_a_word_is_about_all_steps_since_the_one_before() -> None:
    """Sums are over these; moments, wishes and findings are the step's own, and what was found before it."""
    steps = [step_of(1, 2, met=False), step_of(2, 3), step_of(3, 1, met=False)]
    steps[0].traces, steps[0].backward_end = [trace(1, 700, 1)], steps[0].marks[-1]
    steps[1].traces, steps[1].backward_end = [trace(0, 1995), trace(2, 1999)], steps[1].marks[-1]
    beside = [trace(0, 2005, kind="delta"), trace(1, 2003, kind="delta")]
    steps[1].sync, steps[1].wishes = Traffic(beside, beside, []), STOP
    (told,), (numbers,), left = words_of(steps, [3])
    assert (told.step, told.row, list(told.finders)) == (2, 1, steps[0].traces)
    assert numbers[LOSS_AT] == pytest.approx(0.1 * 2 + 0.2 * 3)
    assert numbers[[SAMPLES_AT, STEPS_AT, US_AT, WISHES_AT]].tolist() == [5, 2, 20, STOP]
    assert numbers[CODE_AT] != 0
    assert numbers[SYNC_READY_AT] == 2005 - OFFSET_US
    assert numbers[READY_AT:].tolist() == [1995 - OFFSET_US, 0, 1999 - OFFSET_US]
    assert (left.last_step, left.code, left.finders) == (3, 0, [])
    assert Accumulator.of(left.plain()).plain() == left.plain()
    (rest,) = left.rest(3)
    assert rest[[SAMPLES_AT, STEPS_AT, US_AT, SYNC_READY_AT]].tolist() == [1, 1, 10, 0]


def test_of_many_buckets_those_that_are_told_of_are() -> None:
    """The others' ready times stay behind."""
    step = step_of(1, 1)
    step.traces, step.backward_end = [trace(bucket, 900 + bucket) for bucket in range(100)], step.marks[-1]
    _, (numbers,), _ = words_of([step], [1], buckets=100)
    assert numbers[READY_AT:].tolist() == [900 + bucket - OFFSET_US for bucket in told_buckets(100)]


def test_who_has_found_nothing_is_told_of_all_the_same() -> None:
    """As on a device, where that is known later: another rank may have lost something of the same payload."""
    steps = [step_of(1, 1), step_of(2, 1), step_of(3, 1)]
    for step, code in zip(steps, (0, 1, 0), strict=True):
        step.traces, step.backward_end = [trace(0, 1000 * step.number - 5, code)], step.marks[-1]
    messages, numbers, left = words_of(steps, [3])
    assert [list(told.finders) for told in messages] == [step.traces for step in steps]
    assert [code > 0 for code in numbers[:, CODE_AT]] == [False, True, False]
    assert left.finders == []
    left.find(steps[0].traces)
    told, _, after = left.tell(
        resolve(buffer_of([step_of(4, 1)]), HostClock(), every=1), buckets=[], offset_us=0.0
    )
    assert told.finders == {0: steps[0].traces}
    assert after.finders == []


def test_what_hooks_have_found_is_read_at_once() -> None:
    """Not bucket by bucket, also where every bucket of every step has a finding, as on a device; what was
    lost is told all the same, with its bucket, its hook and its parameters.
    """
    params = (ParamSlice("layer.weight", (2,), 0, 2),)
    steps = [step_of(number, 1) for number in range(1, 21)]
    for step in steps:
        step.losses = [torch.tensor(0.0)]
        step.traces = []
        for bucket in range(30):
            lost = torch.tensor(int((step.number, bucket) == (7, 4)))
            findings = [Finding("bf16", "overflow", torch.tensor(0)), Finding("fp16", "overflow", lost)]
            one = trace(bucket, 1000 * step.number - 5)
            step.traces.append(replace(one, params=params, findings=findings))
        step.backward_end = step.marks[-1]
    buffer = buffer_of(steps)
    with Reads() as reads:
        resolved = resolve(buffer, HostClock(), every=1)
        told, numbers, _ = Accumulator().tell(resolved, buckets=[], offset_us=0.0)
        codes = numbers[:, CODE_AT].astype(int).tolist()
        found = [overflow([0, code], told.finders.get(place, ())) for place, code in enumerate(codes)]
    assert reads.count == 0
    assert found == [
        Overflow("gradient", 4, "fp16", ("layer.weight",)) if step.number == 7 else None for step in steps
    ]


def test_a_loss_that_is_not_a_number_is_told_once() -> None:
    """It does not spread to the words that come after it."""
    steps = [step_of(number, 1) for number in range(1, 5)]
    steps[1].losses = [torch.tensor(float("nan"))]
    steps[2].losses = [torch.tensor(float("inf"))]
    _, numbers, left = words_of(steps, [4])
    losses = numbers[:, LOSS_AT]
    assert np.isnan(losses[1])
    assert losses[[0, 2, 3]].tolist() == [pytest.approx(0.1), float("inf"), pytest.approx(0.4)]
    assert left.plain()["loss_sum"] == 0.0


def test_what_an_older_checkpoint_holds_is_gone_on_from() -> None:
    """A checkpoint's keys are these, whatever a word looks like."""
    plain = {
        "loss_sum": 0.5,
        "samples": 2,
        "steps": 1,
        "us": 30,
        "last_step": 9,
        "code": 0,
        "spent": [1, 2, 3, 4, 5, 6, 7],
    }
    before = Accumulator.of(plain)
    assert before.plain() == plain
    messages, (numbers,), _ = before.tell(
        resolve(buffer_of([step_of(10, 3)]), HostClock(), every=1), buckets=[], offset_us=0.0
    )
    assert messages.steps == [10]
    assert numbers[[SAMPLES_AT, STEPS_AT, US_AT]].tolist() == [5, 2, 40]
    assert numbers[LOSS_AT] == 0.5 + 3 * float(torch.tensor(1.0))


def test_micro_batches_of_a_step_are_added_up() -> None:
    """Each by its samples; one without any counts nothing, whatever its loss is."""
    step = step_of(1, 3)
    step.losses += [torch.tensor(2.0), torch.tensor(float("nan"))]
    step.samples += [1, 0]
    _, (numbers,), _ = words_of([step], [1])
    assert numbers[LOSS_AT] == pytest.approx(3 * 0.1 + 2.0)
    assert numbers[SAMPLES_AT] == 4
