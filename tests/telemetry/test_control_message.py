"""Control messages are the same whichever steps a rank resolves together, and all ranks read them alike."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.control_message import (
    CHECKPOINT,
    COMPARE_CLOCKS,
    FINDING_AT,
    OWN_AT,
    READY_AT,
    REQUESTS_AT,
    SAMPLES_AT,
    STEPS_AT,
    STOP,
    SYNC_READY_AT,
    US_AT,
    MessageAccumulator,
    OwnMessages,
    empty_messages,
    first_overflow,
    means_over_ranks,
    message_length,
)
from ddprun.telemetry.recorder import AgreedSteps, combine_messages
from ddprun.telemetry.records import OWN_PARTS
from ddprun.telemetry.step_timing import FloatArray, NonBackwardExchanges, loss_of, resolve_step_marks
from ddprun.telemetry.stragglers import StragglerDetector
from ddprun_hooks.comm.trace import BucketTrace
from ddprun_hooks.payload import Finding, ParamSlice
from tests.reads import Reads
from tests.telemetry.steps import MadeStep, steps_of

OFFSET_US = 1000.0


class Message(NamedTuple):
    """What one message is about."""

    step: int
    row: int
    findings: Sequence[BucketTrace[int]]


def step_of(number: int, samples: int, *, exchanged: bool = True) -> MadeStep:
    """A step of 10 µs that ends at number * 1000."""
    end = 1000 * number
    step = MadeStep(number, 0, ["", "forward_us"], [1000 * (end - 10), 1000 * end], exchanged=exchanged)
    step.losses.append(torch.tensor(0.1 * number))
    step.samples.append(samples)
    return step


def trace(bucket: int, ready: int, *codes: int, kind: str = "gradient") -> BucketTrace[int]:
    found = [Finding("fp16", torch.tensor(code)) for code in codes]
    return BucketTrace(kind, bucket, (), "float32", 2, 8, ready, ready + 5, ready + 1, findings=found)  # type: ignore[arg-type]


class Messages(NamedTuple):
    """Messages about steps, and what is left for the next one."""

    about: list[Message]
    numbers: FloatArray  # a row for each
    losses: FloatArray  # of each, the sum and what it is over
    left: MessageAccumulator


def messages_of(steps: Sequence[MadeStep], lengths: Sequence[int], buckets: int = 3) -> Messages:
    """The messages about steps of which so many are resolved together."""
    messages, accumulator, first = list[Message](), MessageAccumulator(), 0
    numbers, losses = list[FloatArray](), list[FloatArray]()
    for length in lengths:
        resolved = resolve_step_marks(steps_of(steps[first : first + length]), Clock(), every=1)
        own = accumulator.add_and_make_messages(resolved, turns=[range(buckets)], offset_us=OFFSET_US)
        messages += [
            Message(step, first + row, own.findings.get(place, ()))
            for place, (step, row) in enumerate(zip(own.steps, own.rows, strict=True))
        ]
        numbers.append(own.numbers)
        losses.append(own.weighted_sums)
        first += length
    assert first == len(steps)
    return Messages(messages, np.concatenate(numbers), np.concatenate(losses), accumulator)


def left_over(accumulator: MessageAccumulator) -> list[object]:
    """All that an accumulator has added up."""
    return [
        accumulator.sums.tolist(),
        accumulator.weighted_sums.tolist(),
        accumulator.last_step,
        accumulator.first_finding,
    ]


def any_steps(count: int, chance: random.Random) -> list[MadeStep]:
    """Steps, some of which synchronise, with buckets in backward and beside it."""
    steps = []
    for number in range(1, count + 1):
        step = step_of(number, chance.choice((0, 1, 3)), exchanged=chance.random() < 0.6)
        step.requests = chance.choice((0, 0, STOP))
        now = 1000 * number
        if chance.random() < 0.7:
            step.traces = [
                trace(bucket, now + bucket, *([1] if chance.random() < 0.2 else [])) for bucket in range(3)
            ]
            step.backward_end = step.marks[-1]
        if chance.random() < 0.3:
            beside = [trace(0, now + 30, kind="delta"), trace(1, now + 40, 2, kind="delta")]
            step.sync = NonBackwardExchanges(beside, beside, [(1000 * (now + 31), 1000 * (now + 50))])
        steps.append(step)
    return steps


def test_of_several_exchanges_beside_backward_ranks_wait_in_the_first_after_the_computation() -> None:
    """For a late one; in an exchange that began in an earlier step, only where there is no other."""
    before, first, also_first, later = (trace(0, at, kind="delta") for at in (1000, 1992, 1994, 1999))
    found = []
    for completed, waited_us in (([first, also_first, later], (1995, 1999)), ([before, first], (1991, 1993))):
        step = step_of(2, 1)
        step.sync = NonBackwardExchanges([], completed, [(1000 * at, 1000 * at + 1000) for at in waited_us])
        found.append(messages_of([step], [1]).numbers[0, SYNC_READY_AT] + OFFSET_US)
    step.sync = NonBackwardExchanges([], [before], [(1_991_000, 1_992_000)])
    found.append(messages_of([step], [1]).numbers[0, SYNC_READY_AT] + OFFSET_US)
    assert found == [1994, 1992, 1000]
    step = step_of(2, 1)  # the first one precedes the computation
    step.parts, step.marks = ["", "forward_us", "sync_us"], [1_990_000, 1_996_000, 2_000_000]
    waits = [(1_993_000, 1_994_000), (1_999_000, 2_000_000)]
    step.sync = NonBackwardExchanges([], [first, later], waits)
    assert messages_of([step], [1]).numbers[0, SYNC_READY_AT] + OFFSET_US == 1999


@pytest.mark.parametrize("seed", range(10))
def test_messages_are_the_same_whichever_steps_are_resolved_together(seed: int) -> None:
    """Bit for bit, though losses are sums of fractions."""
    steps = any_steps(40, random.Random(seed))
    one_by_one = messages_of(steps, [1] * 40)
    for lengths in ([40], [7, 1, 20, 12], [32, 8]):
        others = messages_of(steps, lengths)
        assert np.array_equal(one_by_one.numbers, others.numbers)
        assert np.array_equal(one_by_one.losses, others.losses)
        assert left_over(others.left) == left_over(one_by_one.left)
        assert one_by_one.about == others.about
    exchanged = [step.number for step in steps if step.exchanged]
    assert [message.step for message in one_by_one.about] == exchanged


def test_a_message_is_about_all_steps_since_the_one_before() -> None:
    """Sums are over these; ready times and requests are the step's own; findings include those before it."""
    steps = [step_of(1, 2, exchanged=False), step_of(2, 3), step_of(3, 1, exchanged=False)]
    steps[0].traces, steps[0].backward_end = [trace(1, 700, 1)], steps[0].marks[-1]
    steps[1].traces, steps[1].backward_end = [trace(0, 1995), trace(2, 1999)], steps[1].marks[-1]
    beside = [trace(0, 2003, kind="delta"), trace(1, 2005, kind="delta")]
    steps[1].sync, steps[1].requests = NonBackwardExchanges(beside, beside, []), STOP
    (message,), (numbers,), (loss,), left = messages_of(steps, [3])
    assert (message.step, message.row, list(message.findings)) == (2, 1, steps[0].traces)
    assert loss.tolist() == pytest.approx([0.1 * 2 + 0.2 * 3, 5])
    assert numbers[[SAMPLES_AT, STEPS_AT, US_AT, REQUESTS_AT]].tolist() == [5, 2, 20, STOP]
    assert numbers[FINDING_AT] != 0
    assert sorted(numbers[FINDING_AT + 1 : READY_AT])[-2:] == [2003 - OFFSET_US, 2005 - OFFSET_US]
    assert numbers[SYNC_READY_AT] == 2005 - OFFSET_US
    assert numbers[READY_AT:].tolist() == [1995 - OFFSET_US, 0, 1999 - OFFSET_US]
    assert (left.last_step, left.first_finding, left.traces_with_findings) == (3, 0, [])
    own = empty_messages([range(3)], 2)
    own.add_remainder(left, 3)
    (rest,), about = own.numbers, own.steps
    assert about == [3]
    assert rest[[SAMPLES_AT, STEPS_AT, US_AT, SYNC_READY_AT]].tolist() == [1, 1, 10, 0]
    assert own.weighted_sums[0].tolist() == pytest.approx([0.3, 1])


def test_each_bucket_has_its_ready_time() -> None:
    """However many there are."""
    step = step_of(1, 1)
    step.traces, step.backward_end = [trace(bucket, 1900 + bucket) for bucket in range(100)], step.marks[-1]
    _, (numbers,), _, _ = messages_of([step], [1], buckets=100)
    assert numbers[READY_AT:].tolist() == [1900 + bucket - OFFSET_US for bucket in range(100)]


def test_findings_that_are_empty_are_kept_too() -> None:
    """As on a device, where that is known later: another rank may have lost something of the same bucket."""
    steps = [step_of(1, 1), step_of(2, 1), step_of(3, 1)]
    for step, code in zip(steps, (0, 1, 0), strict=True):
        step.traces, step.backward_end = [trace(0, 1000 * step.number - 5, code)], step.marks[-1]
    messages, numbers, _, left = messages_of(steps, [3])
    assert [list(message.findings) for message in messages] == [step.traces for step in steps]
    assert [finding > 0 for finding in numbers[:, FINDING_AT]] == [False, True, False]
    assert left.traces_with_findings == []
    left.note_findings(steps[0].traces)
    own = left.add_and_make_messages(
        resolve_step_marks(steps_of([step_of(4, 1)]), Clock(), every=1), turns=[], offset_us=0.0
    )
    assert own.findings == {0: steps[0].traces}
    assert left.traces_with_findings == []


def test_what_hooks_have_found_is_read_at_once() -> None:
    """Not bucket by bucket, also where every bucket of every step has a finding, as on a device; an overflow
    has its bucket, its hook and its parameters all the same.
    """
    params = (ParamSlice("layer.weight", (2,), 0, 2),)
    steps = [step_of(number, 1) for number in range(1, 21)]
    for step in steps:
        step.losses = [torch.tensor(0.0)]
        step.traces = []
        for bucket in range(30):
            lost = torch.tensor(int((step.number, bucket) == (7, 4)))
            findings = [Finding("bf16", torch.tensor(0)), Finding("fp16", lost)]
            one = trace(bucket, 1000 * step.number - 5)
            step.traces.append(replace(one, params=params, findings=findings))
        step.backward_end = step.marks[-1]
    made = steps_of(steps)
    with Reads() as reads:
        resolved = resolve_step_marks(made, Clock(), every=1)
        own = MessageAccumulator().add_and_make_messages(resolved, turns=[], offset_us=0.0)
        findings = own.numbers[:, FINDING_AT].astype(int).tolist()
        overflown = [place for place, code in enumerate(findings) if code]
        found = [first_overflow([0, findings[place]], own.findings.get(place, ())) for place in overflown]
    assert reads.count == 0
    assert [own.steps[place] for place in overflown] == [7]
    named = [(at.kind, at.bucket, finding.hook, at.params) for at, finding in filter(None, found)]
    assert named == [("gradient", 4, "fp16", params)]


def test_a_loss_that_is_not_a_number_is_in_one_message() -> None:
    """It does not spread to those that come after it."""
    steps = [step_of(number, 1) for number in range(1, 5)]
    steps[1].losses = [torch.tensor(float("nan"))]
    steps[2].losses = [torch.tensor(float("inf"))]
    _, _, losses, left = messages_of(steps, [4])
    assert np.isnan(losses[1, 0])
    assert losses[[0, 2, 3], 0].tolist() == [pytest.approx(0.1), float("inf"), pytest.approx(0.4)]
    assert left.weighted_sums.tolist() == [0.0, 0.0]


def test_adding_up_goes_on_from_a_checkpoint() -> None:
    """Whose keys are these, whatever a message looks like."""
    plain = {
        "samples": 2,
        "steps": 1,
        "us": 30,
        **dict(zip(OWN_PARTS, range(1, 8), strict=True)),
        "last_step": 9,
        "first_finding": 0,
        "loss": [0.5, 2.0],
        "values": {"fit": [0.25, 2.0], "old": [0.5, 2.0]},
    }
    both = MessageAccumulator.from_state_dict(plain, ["fit", "old"])
    assert both.state_dict(["fit", "old"]) == plain
    now = MessageAccumulator.from_state_dict(plain, ["new", "fit"])  # renamed, and in another order
    assert now.weighted_sums.tolist() == pytest.approx([0.5, math.nan, 0.25, 2.0, 0.0, 2.0], nan_ok=True)
    before = MessageAccumulator.from_state_dict(plain, [])
    own = before.add_and_make_messages(
        resolve_step_marks(steps_of([step_of(10, 3)]), Clock(), every=1), turns=[], offset_us=0.0
    )
    (numbers,) = own.numbers
    assert own.steps == [10]
    assert numbers[[SAMPLES_AT, STEPS_AT, US_AT]].tolist() == [5, 2, 40]
    assert own.weighted_sums.tolist() == [[0.5 + 3 * float(torch.tensor(1.0)), 5.0]]


def test_micro_batches_of_a_step_are_added_up() -> None:
    """Each by its samples; one without any counts nothing, whatever its loss is."""
    step = step_of(1, 3)
    step.losses += [torch.tensor(2.0), torch.tensor(float("nan"))]
    step.samples += [1, 0]
    _, (numbers,), (loss,), _ = messages_of([step], [1])
    assert loss.tolist() == pytest.approx([3 * 0.1 + 2.0, 4])
    assert numbers[SAMPLES_AT] == 4


def known(*messages: Sequence[tuple[FloatArray, float, int]]) -> AgreedSteps:
    """What ranks know after these messages, one behind another: of each, every rank's numbers, and the sum
    of its losses and what that is over.
    """
    numbers = np.array([[row for row, _, _ in of_ranks] for of_ranks in messages])
    sums = np.array([[loss for _, *loss in of_ranks] for of_ranks in messages], dtype=float)
    steps = list(range(1, len(messages) + 1))
    own = OwnMessages(numbers[:, 0], steps, list(range(len(steps))), {})
    found = combine_messages(own, numbers, means_over_ranks(sums), (), (0,), StragglerDetector(20, 0.1))
    assert found is not None
    return found


def test_what_a_step_lacks_is_known_from_the_steps_before() -> None:
    """A turn that did not run has no loss, and the sum of all turns' is not known; NaN is known."""
    numbers, found, names, turns = np.array([[message()[0]]]), None, ("often", "rarely"), (1, 2)
    for sums in ([3.0, 1.0, 2.0, 1, 1, 1], [3.0, 3.0, 0.0, 2, 2, 0], [math.nan, math.nan, 4.0, 1, 1, 1]):
        means = means_over_ranks(np.array([[sums]]))
        own = OwnMessages(numbers[:, 0], [1], [0], {})
        found = combine_messages(own, numbers, means, names, turns, StragglerDetector(20, 0.1), found)
        assert found is not None
        if not sums[5]:
            assert means == [[1.5, 1.5, None]]
            assert loss_of(means[0], turns) is None
            assert found.loss == 3.0
            assert found.mean_values == {"often": 1.5, "rarely": 2.0}
    assert found is not None
    assert found.loss is not None
    assert math.isnan(found.loss)


def message(loss_sum: float = 1.0, samples: int = 1, requests: int = 0) -> tuple[FloatArray, float, int]:
    """One rank's numbers, without buckets, and its loss."""
    numbers = np.zeros(message_length([]))
    numbers[[SAMPLES_AT, STEPS_AT, REQUESTS_AT]] = samples, 1, requests
    return numbers, loss_sum, samples


def test_all_ranks_know_what_each_has_posted() -> None:
    """Means over samples; requests of any rank, but those to compare clocks of rank 0 alone."""
    both = known([message(6.0, 3, STOP), message(4.0, 1, CHECKPOINT + COMPARE_CLOCKS)])
    assert (both.steps, both.loss) == ([1], 2.5)
    assert (both.stop, both.checkpoint, both.compare_clocks, both.nonfinite) == (True, True, False, False)
    first = known([message(requests=STOP + COMPARE_CLOCKS), message()])
    assert (first.stop, first.checkpoint, first.compare_clocks) == (True, False, True)
    several = known(
        [message(requests=COMPARE_CLOCKS), message()], [message(), message(requests=STOP + COMPARE_CLOCKS)]
    )
    assert (several.stop, several.compare_clocks) == (True, True), "of any message"
    last = known([message(), message(requests=STOP + COMPARE_CLOCKS)])
    assert (last.stop, last.compare_clocks) == (True, False)
    nothing = known([message(), message()])
    assert (nothing.stop, nothing.checkpoint, nothing.compare_clocks, nothing.overflows) == (*[False] * 3, [])
    assert known([message(), message(float("inf"))]).nonfinite


def test_the_parts_of_a_message_do_not_overlap() -> None:
    """Sums, requests, the first finding and ready times, one behind another."""
    places = [SAMPLES_AT, STEPS_AT, US_AT, *range(OWN_AT, OWN_AT + len(OWN_PARTS))]
    places += [REQUESTS_AT, *range(FINDING_AT, SYNC_READY_AT + 1), READY_AT]
    assert places == list(range(message_length([range(1)])))
