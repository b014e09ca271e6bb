"""When ranks hear what they have told each other."""

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddprun.telemetry import recorder as module
from ddprun.telemetry.clock import clock_for
from ddprun.telemetry.global_step import GlobalStep
from ddprun.telemetry.recorder import StepRecorder
from ddprun.telemetry.writer import Writer
from ddprun_hooks.comm.control import Control
from ddprun_hooks.comm.trace import BucketTrace, now_us
from ddprun_hooks.payload import Finding


class DeviceClock:
    """Marks as of a device that is one step behind the host; counts those that had to be waited for."""

    lag = 1

    def __init__(self) -> None:
        self.step, self.waited, self.base = 0, 0, 0

    def mark(self) -> tuple[int, int]:
        return self.step, now_us()

    def us(self, mark: tuple[int, int]) -> int:
        self.waited += mark[0] >= self.step
        assert mark[1] >= self.base, "marks are measured from what was before them"
        return mark[1]

    def times(self, marks: list[tuple[int, int]]) -> list[int]:
        return [self.us(mark) for mark in marks]

    def in_hooks_us(self, trace: BucketTrace[Any]) -> int:
        return 0

    def read(self, traces: Sequence[BucketTrace[Any]]) -> list[BucketTrace[int]]:
        return [trace.mapped(self.us) for trace in traces]

    def rebase(self, mark: tuple[int, int]) -> None:
        self.base = mark[1]

    def synchronize(self) -> None: ...

    def on_host(self, number: torch.Tensor) -> torch.Tensor:
        return number

    def numbers(self, on_host: list[torch.Tensor]) -> list[float]:
        return [float(number) for number in on_host]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[StepRecorder]:
    """A recorder of a world of one rank."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    writer = Writer(tmp_path)
    yield StepRecorder(
        clock=clock_for(torch.device("cpu")), control=Control(group, 0, 1), writer=writer, every=1
    )
    writer.close()


def heard_of(messages: Sequence[GlobalStep]) -> list[int]:
    """Of which steps that is."""
    return [step for agreed in messages for step in agreed.steps]


def take(recorder: StepRecorder, step: int, *, met: bool = True) -> list[int]:
    """One step; the steps that are heard of at its end."""
    recorder.start(step, 0)
    recorder.note_loss(torch.tensor(float(step)), 1)
    return heard_of(recorder.end(stop=False, compare_clocks=False, synchronised=met))


@pytest.mark.parametrize("control_delay_steps", [1, 3])
def test_control_words_are_read_so_many_steps_after_the_last(
    alone: StepRecorder, monkeypatch: pytest.MonkeyPatch, control_delay_steps: int
) -> None:
    """Neither sooner nor later, whether they have come or not; what is left comes at the stage's end. A step
    in which ranks do not meet has none.
    """
    monkeypatch.setattr(module, "_TOGETHER_US", 0.0)
    alone.control_delay_steps = control_delay_steps
    heard = {number: step for step in range(1, 9) for number in take(alone, step, met=step % 2 == 0)}
    assert heard == {met: met + control_delay_steps for met in (2, 4, 6, 8) if met + control_delay_steps <= 8}
    left = heard_of(alone.flush())
    assert [*heard, *left] == [2, 4, 6, 8]


def test_words_of_short_steps_travel_together(alone: StepRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as their time is due, 256 at most; steps without a word count, and a stage begins anew."""
    monkeypatch.setattr(module, "_TOGETHER_US", 1e12)
    assert [take(alone, step) for step in (1, 2)] == [[], [1]]
    assert alone.together == 256
    assert take(alone, 3) == [2], "under way before that was known"
    heard = {step: found for step in range(4, 516) if (found := take(alone, step, met=step % 20 == 0))}
    assert heard == {259: [3, *range(20, 259, 20)], 515: list(range(260, 515, 20))}
    assert alone.drain() == []
    alone.begin_stage([])
    assert [take(alone, step) for step in (516, 517)] == [[], [516]], "after step 515, which has no word"


def test_words_wait_for_their_number_however_often_steps_without_any_are_settled(
    alone: StepRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are settled once in a while, each rank when it likes; when words travel is no matter of it."""
    alone.together = 32
    monkeypatch.setattr(module, "_TOGETHER_US", 0.0)
    heard = {step: found for step in range(1, 100) if (found := take(alone, step, met=step in (40, 41, 90)))}
    assert heard == {41: [40], 43: [41], 91: [90]}, "once one is heard, steps count as long"
    alone.together = 32
    taken = []
    for step in range(100, 260):
        take(alone, step, met=step in (101, 200))
        taken.append(alone.totals.steps)
        alone.together = 32
    assert heard_of(alone.drain()) == []
    assert len(set(taken)) > 60, "steps without words are counted at once when their time is over"


def test_words_of_long_steps_travel_at_once(alone: StepRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps as long as a wish to stop may take to be heard, it is heard after each."""
    monkeypatch.setattr(module, "_TOGETHER_US", 1.0)
    assert [take(alone, step) for step in range(1, 5)] == [[], [1], [2], [3]]


def test_no_step_waits_for_a_device(alone: StepRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks of steps whose words travel together are read once the last of them is over there."""
    monkeypatch.setattr(module, "_TOGETHER_US", 1e12)
    clock = alone._clock = DeviceClock()
    alone.mark = clock.mark
    heard = {}
    for clock.step in range(1, 300):
        if found := take(alone, clock.step):
            heard[clock.step] = found
    assert clock.waited == 0
    assert [number for found in heard.values() for number in found] == list(range(1, 259))
    assert max(map(len, heard.values())) == 256
    assert heard_of(alone.flush()) == list(range(259, 300))


def test_a_stage_may_end_with_nothing_left_to_tell(alone: StepRecorder) -> None:
    """A word is posted all the same, since other ranks may have something; of nobody it says nothing."""
    take(alone, 1)
    assert heard_of(alone.drain()) == [1]
    assert alone.flush() == []
    take(alone, 2, met=False)
    (rest,) = alone.flush()
    assert (rest.steps, rest.mean_losses) == ([2], [2.0])


def test_bookkeeping_is_done_in_between_and_comes_out_alike(
    alone: StepRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many deferred work are done when: the same words at the same steps, and the same totals."""
    monkeypatch.setattr(module, "_TOGETHER_US", 1e12)
    heard = {}
    for step in range(1, 300):
        if found := take(alone, step):
            heard[step] = found
        for _ in range(step % 3):
            alone.deferred.do_some()
    assert heard == {
        2: [1],
        3: [2],
        259: list(range(3, 259)),
    }
    assert heard_of(alone.flush()) == list(range(259, 300))
    assert alone.totals.steps == 299
    assert alone.totals.parts_us["step_us"] == sum(record["step_us"] for record in recorded(alone, tmp_path))


def recorded(recorder: StepRecorder, folder: Path) -> list[dict[str, Any]]:
    """The records of steps."""
    recorder._writer.flush()
    return [json.loads(line) for line in (folder / "steps/rank-00000.jsonl").read_text().splitlines()]


def test_steps_of_a_run_that_fails_are_recorded(alone: StepRecorder, tmp_path: Path) -> None:
    """Those whose words nobody will read, too."""
    alone.control_delay_steps = 100
    for step in range(1, 6):
        take(alone, step)
    alone.together = 32
    for step in range(6, 10):
        take(alone, step)
    assert alone._batches, "words are under way"
    alone.start(10, 0)
    alone.lap("data_us")
    alone.salvage()
    records = recorded(alone, tmp_path)
    assert [record["step"] for record in records] == list(range(1, 10))
    assert records[-1]["mean_loss"] is None


def test_steps_are_recorded_whose_words_cannot_be_posted_any_more(
    alone: StepRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first a rank may hear of its peers' end is that it can tell them nothing."""
    take(alone, 1)
    take(alone, 2)
    alone.together = 1

    def gone(*_: Any) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(alone._control, "post", gone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        take(alone, 3)
    alone.salvage()
    assert [record["step"] for record in recorded(alone, tmp_path)] == [1, 2, 3]


def test_a_rank_waits_from_its_last_bucket_to_the_end_of_backward(
    alone: StepRecorder, tmp_path: Path
) -> None:
    """Which is a moment of its own, amid the step's others."""
    for step in (1, 2):
        alone.start(step, 0)
        time.sleep(0.002)
        alone.lap("forward_us")
        ready = now_us()
        time.sleep(0.002)
        done = now_us()
        alone.traces.append(BucketTrace("gradient", 0, (), "float32", 2, 8, ready, done, ready + 1))
        alone.end_backward()
        time.sleep(0.002)
        alone.lap("optimizer_us")
        alone.end(stop=False, compare_clocks=False)
    alone.flush()
    for record in recorded(alone, tmp_path):
        ((start, end),) = record["waits"]
        laps = dict(record["laps"])
        until = ("sync", "forward", "backward")
        assert end == record["start_us"] + sum(laps.get(part, 0) for part in until)
        assert 1000 < end - start < laps["backward"]


def test_records_stand_in_the_order_of_steps(alone: StepRecorder, tmp_path: Path) -> None:
    """Those of steps without a word, too."""
    for step in range(1, 200):
        take(alone, step, met=step % 7 == 0)
    alone.flush()
    assert [record["step"] for record in recorded(alone, tmp_path)] == list(range(1, 200))


def test_wishes_of_a_step_come_back_with_its_word(alone: StepRecorder) -> None:
    """Each of them alone, and only in the step in which it was told."""
    wishes: tuple[dict[str, bool], ...] = (
        {},
        {"stop": True},
        {"checkpoint": True},
        {"compare_clocks": True},
        {"stop": True, "checkpoint": True},
    )
    heard = []
    for step, wish in enumerate(wishes, start=1):
        alone.start(step, 0)
        alone.note_loss(torch.tensor(1.0), 1)
        heard += alone.end(**{"stop": False, "compare_clocks": False, **wish})
        heard += alone.drain()
    assert [agreed.steps for agreed in heard] == [[1], [2], [3], [4], [5]]
    assert [(agreed.stop, agreed.checkpoint, agreed.compare_clocks) for agreed in heard] == [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, True, False),
    ]


def test_an_overflow_is_told_with_its_own_step(alone: StepRecorder) -> None:
    """Of several that are heard of at once; also of what was found since ranks met last, at a stage's end."""
    alone.together = 64
    heard = []
    for step in range(1, 7):
        alone.start(step, 0)
        alone.note_loss(torch.tensor(float(step)), 1)
        found = [Finding("fp16", "overflow", torch.tensor(1))] if step in (3, 6) else []
        now = now_us()
        alone.traces.append(BucketTrace("gradient", step, (), "float32", 2, 8, now, now, now, findings=found))
        alone.end_backward()
        heard += alone.end(stop=False, compare_clocks=False, synchronised=step != 6)
    heard += alone.flush()
    assert [agreed.steps for agreed in heard] == [[1, 2, 3, 4, 5, 6]]
    assert heard[0].rank_losses == [6.0], "of the newest"
    assert [(step, one.hook, one.bucket) for step, one in heard[0].overflows] == [
        (3, "fp16", 3),
        (6, "fp16", 6),
    ]


def test_who_looks_on_is_told_of_steps_that_are_not_written(tmp_path: Path) -> None:
    """`timings.every` is about files alone."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    writer, seen = Writer(tmp_path), []
    recorder = StepRecorder(
        clock=clock_for(torch.device("cpu")), control=Control(group, 0, 1), writer=writer, every=4
    )
    recorder.observe = lambda record, landed: seen.append((record["step"], len(landed)))
    for step in range(1, 14):
        take(recorder, step)
    recorder.drain()
    assert seen == [(step, 0) for step in range(1, 14)]
    assert [record["step"] for record in recorded(recorder, tmp_path)] == [4, 8, 12]
    writer.close()


@pytest.mark.parametrize("lag", [0, 1])
def test_ranks_hear_each_other_at_the_same_steps_whenever_each_looks_at_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    """As in local SGD: ranks meet in some steps, and settle the others each at moments of its own."""
    chance = random.Random(lag)
    monkeypatch.setattr(module, "now_us", lambda: chance.choice((0, 10**9)))
    store, ranks, steps = dist.HashStore(), 3, 400
    meetings = {step for step in range(1, steps) if chance.random() < 0.1}
    heard: list[list[tuple[int, int, float]]] = [[] for _ in range(ranks)]
    resolved: list[list[int]] = [[] for _ in range(ranks)]

    def told(now: int, messages: Sequence[GlobalStep]) -> list[tuple[int, int, float]]:
        return [(now, *of) for one in messages for of in zip(one.steps, one.mean_losses, strict=True)]

    def work(rank: int) -> None:
        group: Any = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=30))
        writer, clock = Writer(tmp_path), DeviceClock()
        recorder = StepRecorder(
            clock=clock if lag else clock_for(torch.device("cpu")),
            control=Control(group, rank, ranks),
            writer=writer,
            every=1000,
        )
        for clock.step in range(1, steps + 1):
            recorder.start(clock.step, 0)
            recorder.note_loss(torch.tensor(float(rank + clock.step)), 1)
            agreed = recorder.end(stop=False, compare_clocks=False, synchronised=clock.step in meetings)
            heard[rank] += told(clock.step, agreed)
            resolved[rank].append(len(recorder._buffer.steps))
        heard[rank] += told(steps + 1, recorder.flush())
        writer.close()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank waits for words that others do not post"
    assert heard[0] == heard[1] == heard[2]
    assert [step for _, step, _ in heard[0]] == [*sorted(meetings), steps]
    assert resolved[0] != resolved[1], "each has settled its steps when it liked"
