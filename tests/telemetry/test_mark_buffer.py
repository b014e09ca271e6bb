"""The page on which steps leave what they have: torn where it may be, and each step keeps its own."""

import pytest
import torch

from ddprun.telemetry.clock import HostClock
from ddprun.telemetry.resolve import ResolvedSteps, resolve
from ddprun.telemetry.step import MarkBuffer
from ddprun_hooks.comm.trace import BucketTrace
from tests.telemetry.made import Made, buffer_of


def steps() -> list[Made]:
    """Five steps, each with as many payloads, marks and losses as none before it."""
    made = []
    for number in range(1, 6):
        begin = 1000 * number
        marks = [1000 * (begin + 10 * place) for place in range(number + 3)]
        step = Made(number, 0, ["", *["forward_us"] * number, "backward_us", "other_us"], marks)
        step.backward_end = marks[-2]
        step.traces = [
            BucketTrace(
                "gradient",
                bucket,
                (),
                "float32",
                2,
                8,
                begin + bucket,
                begin + bucket + 5,
                begin + bucket + 1,
            )
            for bucket in range(number - 1)
        ]
        step.losses = [torch.tensor(float(number))] * number
        step.samples = [1] * number
        made.append(step)
    return made


def told(resolved: ResolvedSteps) -> list[tuple[object, ...]]:
    """What is known of each step."""
    bucket_times = resolved.bucket_times
    lines, waits = bucket_times.landed[0] // 2, bucket_times.waits
    return [
        (
            step.number,
            resolved.us[row].tolist(),
            resolved.loss_sums[row],
            resolved.samples[row],
            bucket_times.landed[1:, lines == row].tolist(),
            waits[1:, waits[0] // 2 == row].tolist(),
        )
        for row, step in enumerate(resolved.steps)
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_page_is_torn_between_steps(count: int) -> None:
    """Both pieces say of their steps what the page said."""
    whole = told(resolve(buffer_of(steps()), HostClock(), every=1))
    buffer = buffer_of(steps())
    rest = buffer.split_off(count)
    pieces = [told(resolve(piece, HostClock(), every=1)) for piece in (buffer, rest) if piece.steps]
    assert [step for piece in pieces for step in piece] == whole
    assert len(pieces[0]) == count


def test_nothing_may_be_kept_of_a_page() -> None:
    """Then all of it is torn off."""
    buffer = buffer_of(steps())
    rest = buffer.split_off(0)
    assert buffer == MarkBuffer()
    assert rest.steps == buffer_of(steps()).steps


def test_a_step_that_does_not_end_leaves_nothing() -> None:
    """As where its data ran out, or it failed."""
    buffer = buffer_of(steps())
    whole = told(resolve(buffer_of(steps()), HostClock(), every=1))
    buffer.parts += ("", "data_us")
    buffer.marks += (9, 10)
    buffer.traces.append(buffer.traces[0])
    buffer.losses.append(7.0)
    buffer.samples.append(3)
    buffer.forget()
    assert told(resolve(buffer, HostClock(), every=1)) == whole
    buffer = MarkBuffer(parts=[""], marks=[1])
    buffer.forget()
    assert buffer == MarkBuffer()
