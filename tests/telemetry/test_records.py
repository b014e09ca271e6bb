"""How a step's exposed communication is divided: on made-up journeys whose answer is known."""

from collections.abc import Sequence

import pytest

from ddprun.telemetry.records import PARTS, Exposed, Traffic, communication_us, exposed, tail
from ddprun.telemetry.settle import Settled, divide
from ddprun.telemetry.step import Step
from ddprun_hooks.flight import Flight, Leg, Slice


def flight(ready: int, handed_over: int, done: int, *slices: Slice[int]) -> Flight[int]:
    leg = Leg("all_reduce", "world.0", "float32", 8, 8, 0, handed_over, done)
    return Flight("gradient", 0, (), "float32", 2, 8, ready, done, handed_over, [leg], list(slices))


def in_backward(end_us: int, flights: Sequence[Flight[int]], all_ready_us: float) -> Exposed:
    return exposed(Traffic(flights, flights, [tail(flights, end_us)]), [all_ready_us] * len(flights))


def test_an_exchange_of_an_earlier_step_costs_only_the_waiting_that_is_left() -> None:
    """It set out in another step: its time in the hook belongs there; 15 µs are waited for here."""
    landed = Traffic(landed=[flight(100, 120, 515)], waits=[(500, 515)])
    split = exposed(landed, [130.0])
    assert (split.hook_us, split.wait_us, split.wire_us) == (0, 0, 15)
    set_out = Traffic(sent=[flight(100, 120, 515)])
    split = exposed(set_out, [])
    assert (split.hook_us, split.wait_us, split.wire_us) == (20, 0, 0)


def test_waiting_is_divided_where_the_last_rank_was_ready() -> None:
    """20 µs in the hook; then 30 µs until the last rank was ready; then 50 µs on the wire."""
    split = in_backward(200, [flight(100, 120, 195)], 150.0)
    assert (split.hook_us, split.wait_us, split.wire_us) == (20, 30, 50)


def test_hook_work_of_other_threads_counts_while_the_training_thread_waits() -> None:
    """A decode of 10 µs elsewhere in the tail is hook time, not wire; one before the tail is hidden."""
    decode = Slice(180, 190, "decode", False)
    hidden = Slice(105, 115, "encode", False)
    mine = Slice(100, 118, "encode", True)
    split = in_backward(200, [flight(100, 120, 195, mine, hidden, decode)], 150.0)
    assert (split.hook_us, split.wait_us, split.wire_us) == (30, 30, 40)


def test_what_landed_beside_backward_is_divided_by_its_own_last_rank() -> None:
    """A bucket whose last rank was ready at 150, waited for in backward; a payload of 430, in sync."""
    gradient, beside = flight(100, 120, 195), flight(400, 410, 495)
    settled = Settled(
        step=Step(1, 0, []),
        us=dict.fromkeys(PARTS, 0) | {"backward_us": 150, "sync_us": 120},
        start_us=0,
        step_us=270,
        laps=[],
        backward=Traffic([gradient], [gradient], [tail([gradient], 200)]),
        sync=Traffic([], [beside], [(410, 500)]),
        loss=1.0,
        samples=1,
    )
    assert divide(settled, [150.0, 430.0]) == (20 + 80) + 90
    assert (settled.us["backward_us"], settled.us["sync_us"]) == (150 - 100, 120 - 90)
    found = [settled.us[f"exposed_{part}_us"] for part in ("hook", "wait", "wire")]
    assert found == [20, 30 + 20, 50 + 70]


def test_each_bucket_is_matched_with_its_own_last_rank() -> None:
    """The first bucket was on the wire while the last rank still worked at the second: the wire was busy
    from 130 to 160 and from 190 on; in between nothing could move.
    """
    flights = [flight(100, 110, 160), flight(115, 120, 240)]
    split = exposed(Traffic(flights, flights, [(120, 250)]), [130.0, 190.0])
    assert (split.hook_us, split.wait_us, split.wire_us) == (15, 10 + 30, 30 + 60)


@pytest.mark.parametrize(("all_ready", "wait"), [(0.0, 0), (120.0, 0), (1e9, 80)])
def test_a_rank_that_is_last_itself_waits_for_nobody(all_ready: float, wait: int) -> None:
    """Ready times before the tail give no wait, ready times after it give all of it."""
    split = in_backward(200, [flight(100, 120, 195)], all_ready)
    assert (split.wait_us, split.wire_us) == (wait, 80 - wait)


def test_overlapping_journeys_count_once() -> None:
    """Communication time is a union: 100 to 160 and 200 to 210."""
    flights = [flight(100, 101, 150), flight(120, 121, 140), flight(150, 151, 160), flight(200, 201, 210)]
    assert communication_us(flights) == 70
