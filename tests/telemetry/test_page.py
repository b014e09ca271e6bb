"""The page on which steps leave what they have: torn where it may be, and each step keeps its own."""

import pytest
import torch

from ddprun.telemetry.clock import HostClock
from ddprun.telemetry.settle import Settled, settle
from ddprun.telemetry.step import Page
from ddprun_hooks.comm.trace import BucketTrace
from tests.telemetry.made import Made, page_of


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


def told(settled: Settled) -> list[tuple[object, ...]]:
    """What is known of each step."""
    journeys = settled.journeys
    lines, waits = journeys.landed[0] // 2, journeys.waits
    return [
        (
            step.number,
            settled.us[row].tolist(),
            settled.loss_sums[row],
            settled.samples[row],
            journeys.landed[1:, lines == row].tolist(),
            waits[1:, waits[0] // 2 == row].tolist(),
        )
        for row, step in enumerate(settled.steps)
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_page_is_torn_between_steps(count: int) -> None:
    """Both pieces say of their steps what the page said."""
    whole = told(settle(page_of(steps()), HostClock(), every=1))
    page = page_of(steps())
    rest = page.tear_off(count)
    pieces = [told(settle(piece, HostClock(), every=1)) for piece in (page, rest) if piece.steps]
    assert [step for piece in pieces for step in piece] == whole
    assert len(pieces[0]) == count


def test_nothing_may_be_kept_of_a_page() -> None:
    """Then all of it is torn off."""
    page = page_of(steps())
    rest = page.tear_off(0)
    assert page == Page()
    assert rest.steps == page_of(steps()).steps


def test_a_step_that_does_not_end_leaves_nothing() -> None:
    """As where its data ran out, or it failed."""
    page = page_of(steps())
    whole = told(settle(page_of(steps()), HostClock(), every=1))
    page.parts += ("", "data_us")
    page.marks += (9, 10)
    page.traces.append(page.traces[0])
    page.losses.append(7.0)
    page.samples.append(3)
    page.forget()
    assert told(settle(page, HostClock(), every=1)) == whole
    page = Page(parts=[""], marks=[1])
    page.forget()
    assert page == Page()
