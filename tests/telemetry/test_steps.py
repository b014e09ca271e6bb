"""How marks become numbers: of each step its own, and waiting is divided as a plain loop would."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ddprun.telemetry.clock import Clock
from ddprun.telemetry.records import PARTS
from ddprun.telemetry.step_timing import (
    Intervals,
    NonBackwardExchanges,
    ResolvedSteps,
    TraceTimes,
    in_flight_us,
    resolve_step_marks,
    split_exposed_time,
    union_overlap_us,
)
from ddprun_hooks.comm.trace import BucketTrace, CollectiveTrace, HookSpan
from tests.telemetry.steps import MadeStep, steps_of

COLUMN = {part: place for place, part in enumerate(PARTS)}


class Split(NamedTuple):
    """Microseconds of exposed communication."""

    hook_us: int
    wait_us: int
    wire_us: int


def trace(ready: int, handed_over: int, done: int, *spans: HookSpan[int]) -> BucketTrace[int]:
    leg = CollectiveTrace("all_reduce", "world.0", "float32", 8, 8, 0, handed_over, done)
    return BucketTrace("gradient", 0, (), "float32", 2, 8, ready, done, handed_over, [leg], list(spans))


def step_of(*laps: tuple[str, int], number: int = 1) -> MadeStep:
    """A step whose parts end at these microseconds; the first one only starts it."""
    return MadeStep(number, 0, [part for part, _ in laps], [1000 * at for _, at in laps])


def traffic(
    sent: Sequence[BucketTrace[int]], completed: Sequence[BucketTrace[int]], *waits: tuple[int, int]
) -> NonBackwardExchanges:
    return NonBackwardExchanges(
        list(sent), list(completed), [(1000 * start, 1000 * end) for start, end in waits]
    )


def resolved(*steps: MadeStep) -> ResolvedSteps:
    return resolve_step_marks(steps_of(steps), Clock(), every=1)


def splits(found: ResolvedSteps, all_ready_us: Sequence[float]) -> list[Split]:
    """What was exposed in each step, once that is divided."""
    exposed = split_exposed_time(found, np.array(all_ready_us, dtype=np.float64))
    columns = [COLUMN[f"exposed_{part}_us"] for part in ("hook", "wait", "wire")]
    rows = [Split(*row) for row in found.parts_us[:, columns].tolist()]
    assert [sum(row) for row in rows] == exposed.tolist()
    assert found.parts_us.sum(1).tolist() == found.step_us, "the parts are the step"
    return rows


def in_backward(end_us: int, traces: Sequence[BucketTrace[int]], *all_ready_us: float) -> Split:
    step = step_of(("", 0), ("backward_us", end_us))
    step.traces, step.backward_end = list(traces), 1000 * end_us
    return splits(resolved(step), all_ready_us)[0]


def beside(exchanged: NonBackwardExchanges, *all_ready_us: float) -> Split:
    step = step_of(("", 0), ("sync_us", 600))
    step.sync = exchanged
    return splits(resolved(step), all_ready_us)[0]


def test_an_exchange_of_an_earlier_step_costs_only_the_waiting_that_is_left() -> None:
    """It was sent in another step: its time in the hook belongs there; 15 µs are waited for here."""
    assert beside(traffic([], [trace(100, 120, 515)], (500, 515)), 130.0) == (0, 0, 15)
    assert beside(traffic([trace(100, 120, 515)], [])) == (20, 0, 0)


def test_waiting_is_divided_where_the_last_rank_was_ready() -> None:
    """20 µs in the hook; then 30 µs until the last rank was ready; then 50 µs on the wire."""
    assert in_backward(200, [trace(100, 120, 195)], 150.0) == (20, 30, 50)


def test_each_backward_pass_of_a_step_has_its_own_waiting() -> None:
    """After the first bucket has come, the first pass works on for 5 µs; then comes the forward pass of the
    next turn, which is nobody's waiting.
    """
    step = step_of(("", 0), ("backward_us", 200), ("forward_us", 300), ("backward_us", 500))
    step.traces, step.backward_end = [trace(100, 120, 195), trace(400, 410, 490)], 500_000
    step.earlier_passes = [(200_000, 1)]
    found = resolved(step)
    assert splits(found, [150.0, 430.0]) == [(20 + 10, 30 + 20, 45 + 70)]
    assert found.parts_us[0, COLUMN["backward_us"]] == 400 - 195
    assert found.waits.start.tolist() == [120, 410]
    assert found.waits.end.tolist() == [195, 500]


def test_hook_work_of_other_threads_counts_while_the_training_thread_waits() -> None:
    """A decode of 10 µs elsewhere in the tail is hook time, not wire; one before the tail is hidden."""
    decode = HookSpan(180, 190, "decode", False)
    hidden = HookSpan(105, 115, "encode", False)
    mine = HookSpan(100, 118, "encode", True)
    assert in_backward(200, [trace(100, 120, 195, mine, hidden, decode)], 150.0) == (30, 30, 40)


def test_what_landed_beside_backward_is_divided_by_its_own_last_rank() -> None:
    """A bucket whose last rank was ready at 150, waited for in backward; one of 430, in sync."""
    step = step_of(("", 0), ("backward_us", 200), ("sync_us", 550))
    step.traces, step.backward_end = [trace(100, 120, 195)], 200_000
    step.sync = traffic([], [trace(400, 410, 495)], (410, 500))
    found = resolved(step)
    assert splits(found, [150.0, 430.0]) == [(20, 30 + 20, 50 + 70)]
    assert found.parts_us[0, [COLUMN["backward_us"], COLUMN["sync_us"]]].tolist() == [200 - 100, 350 - 90]


def test_a_later_exchange_beside_backward_hides_no_late_rank() -> None:
    """It is not known when the last rank had its bucket ready: it is on the wire when this rank has."""
    first, second = trace(100, 100, 200), trace(210, 210, 260)
    assert beside(traffic([], [first, second], (100, 200), (210, 260)), 180.0, 0.0) == (0, 80, 20 + 50)


def test_each_bucket_is_matched_with_its_own_last_rank() -> None:
    """The first bucket was on the wire while the last rank still worked at the second: the wire was busy
    from 130 to 160 and from 190 on; in between nothing could move.
    """
    traces = [trace(100, 110, 160), trace(115, 120, 240)]
    assert in_backward(250, traces, 130.0, 190.0) == (15, 10 + 30, 30 + 60)


@pytest.mark.parametrize(("all_ready", "wait"), [(0.0, 0), (120.0, 0), (1e9, 80)])
def test_a_rank_that_is_last_itself_waits_for_nobody(all_ready: float, wait: int) -> None:
    """Ready times before the tail give no wait, ready times after it give all of it."""
    assert in_backward(200, [trace(100, 120, 195)], all_ready) == (20, wait, 80 - wait)


def test_overlapping_buckets_count_once() -> None:
    """Communication time is a union: 100 to 160 and 200 to 210, and in the next step 205 to 230."""
    rows = np.array(
        [(0, 0, 100, 150), (1, 0, 120, 140), (0, 1, 150, 160), (0, 2, 200, 210), (2, 0, 205, 230)]
    )
    assert in_flight_us(TraceTimes(*rows.T), 3).tolist() == [70, 25, 0]


def made_up_step(number: int, start: int, chance: random.Random) -> tuple[MadeStep, list[float]]:
    """Any step at all, and when what landed in it was ready on all ranks."""
    laps, now = [("", start)], start
    step = MadeStep(number, 0, [], [])
    all_ready: list[float] = []
    for part in ("sync_us", "data_us", "forward_us", "backward_us", "optimizer_us", "sync_us", "other_us"):
        begin, now = now, now + chance.choice((0, 5, 200, 1000))
        traces, at = [], begin
        for _ in range(chance.choice((0, 0, 1, 4))):
            ready = chance.randint(at, (at + now) // 2)
            at = handed_over = chance.randint(ready, (ready + now) // 2)
            done = chance.randint(handed_over, now)
            pieces = []
            for _ in range(chance.randint(0, 3)):
                first, last = sorted((chance.randint(ready, done), chance.randint(ready, done)))
                pieces.append(HookSpan(first, last, "decode", chance.random() < 0.3))
            traces.append(trace(ready, handed_over, done, *pieces))
        if part == "backward_us":
            step.traces, step.backward_end = traces, 1000 * now
            all_ready += [float(chance.randint(begin - 50, now + 50)) for _ in traces]
        elif part == "sync_us" and traces:
            waits, at = [], max(one.handed_over or 0 for one in traces)
            for _ in traces:
                begin_wait = chance.randint(at, now)
                at = chance.randint(begin_wait, now)
                waits.append((begin_wait, at))
            earlier = step.sync or NonBackwardExchanges()
            more = traffic(traces, traces, *waits)
            step.sync = NonBackwardExchanges(
                earlier.sent + more.sent, earlier.completed + more.completed, earlier.waits + more.waits
            )
            all_ready += [float(chance.choice((0, chance.randint(begin - 50, now + 50)))) for _ in traces]
        laps.append((part, now))
    step.parts, step.marks = [part for part, _ in laps], [1000 * at for _, at in laps]
    return step, all_ready


def plainly(step: MadeStep, all_ready: Sequence[float]) -> Split:
    """Each microsecond of waiting looked at by itself."""
    hook = wait = wire = 0
    gradients = step.traces if step.backward_end is not None else []
    last = max((one.handed_over or 0 for one in gradients), default=0)
    sync = step.sync or NonBackwardExchanges()
    exchanges = (
        (
            gradients,
            gradients,
            [(last, step.backward_end // 1000)] if step.backward_end is not None and gradients else [],
            all_ready[: len(gradients)],
        ),
        (
            sync.sent,
            sync.completed,
            [(start // 1000, end // 1000) for start, end in sync.waits],
            all_ready[len(gradients) :],
        ),
    )
    for sent, completed, waits, ready in exchanges:
        hook += sum((one.handed_over or 0) - one.ready for one in sent)
        work = [(w.start, w.done) for one in completed for w in one.spans if not w.on_training_thread]
        moving = [(max(at, one.ready), one.done or 0) for one, at in zip(completed, ready, strict=True)]
        for now in [now for start, end in waits for now in range(start, end)]:
            if any(start <= now < end for start, end in work):
                hook += 1
            elif now >= max(ready, default=0) or any(start <= now < end for start, end in moving):
                wire += 1
            else:
                wait += 1
    return Split(hook, wait, wire)


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_are_divided_together_come_out_as_each_alone_would(seed: int) -> None:
    """And as looking at every microsecond says."""
    chance = random.Random(seed)
    steps, all_ready, now = [], [], 1_000_000
    for number in range(1, 41):
        step, ready = made_up_step(number, now, chance)
        now = step.marks[-1] // 1000 + chance.randint(0, 10)
        steps.append(step)
        all_ready.append(ready)
    found = splits(resolved(*steps), [at for ready in all_ready for at in ready])
    alone = [splits(resolved(step), ready)[0] for step, ready in zip(steps, all_ready, strict=True)]
    assert found == alone == [plainly(step, ready) for step, ready in zip(steps, all_ready, strict=True)]
    assert any(split.wait_us for split in found)
    assert any(split.wire_us for split in found)


@pytest.mark.parametrize("seed", range(10))
def test_a_union_is_what_its_intervals_cover(seed: int) -> None:
    """Microsecond by microsecond, on separate time lines; also of intervals that end before they start."""
    chance = np.random.default_rng(seed)
    intervals = chance.integers(0, 60, (3, 12 * (seed > 0)))
    intervals[0] %= 3
    windows = np.sort(chance.integers(10, 50, (2, 9)), axis=0)
    lines = chance.integers(0, 3, (1, 9))
    covered = [
        {at for on, start, end in intervals.T.tolist() if on == line for at in range(start, end)}
        for line in range(3)
    ]
    expected = [
        len(covered[line] & set(range(start, end)))
        for line, start, end in zip(lines[0].tolist(), *windows.tolist(), strict=True)
    ]
    assert union_overlap_us(Intervals(*intervals), Intervals(lines[0], *windows)).tolist() == expected


def steps() -> list[MadeStep]:
    """Five steps, no two with the same number of traces, marks and losses."""
    made = []
    for number in range(1, 6):
        begin = 1000 * number
        marks = [1000 * (begin + 10 * place) for place in range(number + 3)]
        step = MadeStep(number, 0, ["", *["forward_us"] * number, "backward_us", "other_us"], marks)
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


def numbers_of(resolved: ResolvedSteps) -> list[tuple[object, ...]]:
    """All numbers of each step."""
    table, waits = np.array(resolved.trace_times), np.array(resolved.waits)
    return [
        (
            step.number,
            resolved.parts_us[row].tolist(),
            resolved.weighted_sums[row].tolist(),
            resolved.samples[row],
            table[1:, table[0] // 2 == row].tolist(),
            waits[1:, waits[0] // 2 == row].tolist(),
        )
        for row, step in enumerate(resolved.steps)
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_steps_are_resolved_together_or_not(count: int) -> None:
    """Both pieces give the numbers that all steps together give."""
    whole = numbers_of(resolve_step_marks(steps_of(steps()), Clock(), every=1))
    pieces = [
        resolve_step_marks(steps_of(some), Clock(), every=1) for some in (steps()[:count], steps()[count:])
    ]
    assert [step for piece in pieces for step in numbers_of(piece)] == whole
