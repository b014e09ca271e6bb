"""When ranks know what the others have posted, and which records come of their steps."""

import json
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from ddprun.telemetry import recorder as module
from ddprun.telemetry.clock import Clock, clock_for
from ddprun.telemetry.recorder import AgreedSteps, StepRecorder
from ddprun.telemetry.records import StragglerEpisode
from ddprun.telemetry.stragglers import StragglerDetector
from ddprun.telemetry.writer import RecordWriter
from ddprun_hooks.comm.control_channel import ControlChannel
from ddprun_hooks.comm.trace import BucketTrace, now_us
from ddprun_hooks.payload import Finding


class DeviceClock(Clock):
    """Marks as of a device that is one step behind the host; counts those that had to be waited for."""

    lag_steps = 1

    def __init__(self) -> None:
        self.step, self.waited = 0, 0

    def mark(self) -> tuple[int, int]:
        return self.step, now_us()

    def mark_to_us(self, mark: tuple[int, int] | int) -> int:
        if isinstance(mark, int):
            return mark
        self.waited += mark[0] >= self.step
        return mark[1]

    def marks_to_us(self, marks: list[tuple[int, int] | int]) -> list[int]:
        return [self.mark_to_us(mark) for mark in marks]

    def training_thread_hook_us(self, trace: BucketTrace[Any]) -> int:
        return 0

    def read_traces(self, traces: Sequence[BucketTrace[Any]]) -> list[BucketTrace[int]]:
        return [trace.convert_times_to_us(self.mark_to_us) for trace in traces]

    def copy_to_host(self, number: torch.Tensor) -> torch.Tensor:
        return number

    def read_numbers(self, copied: list[torch.Tensor]) -> list[float]:
        return [float(number) for number in copied]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[StepRecorder]:
    """A recorder of a world of one rank."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    writer = RecordWriter(tmp_path)
    yield StepRecorder(
        clock=clock_for(torch.device("cpu")),
        control=ControlChannel(group),
        writer=writer,
        every=1,
        stragglers=StragglerDetector(20, 0.1),
    )
    writer.close()


def steps_of(messages: Sequence[AgreedSteps]) -> list[int]:
    """About which steps that is."""
    return [step for agreed in messages for step in agreed.steps]


def take(recorder: StepRecorder, step: int, *, exchanged: bool = True) -> list[int]:
    """One step; the steps that ranks know of at its end."""
    recorder.begin_step(step, 0)
    recorder.note_loss(torch.tensor(float(step)), 1)
    return steps_of(recorder.end_step(exchanged=exchanged))


@pytest.mark.parametrize("control_delay_steps", [1, 3])
def test_messages_are_read_so_many_steps_after_the_last(
    alone: StepRecorder, monkeypatch: pytest.MonkeyPatch, control_delay_steps: int
) -> None:
    """Neither sooner nor later, whether they have come or not; what is left comes at the stage's end. A step
    in which ranks do not synchronise has none.
    """
    monkeypatch.setattr(module, "_POST_EVERY_US", 0.0)
    alone.control_delay_steps = control_delay_steps
    known = {number: step for step in range(1, 9) for number in take(alone, step, exchanged=step % 2 == 0)}
    assert known == {
        step: step + control_delay_steps for step in (2, 4, 6, 8) if step + control_delay_steps <= 8
    }
    left = steps_of(alone.end_stage())
    assert [*known, *left] == [2, 4, 6, 8]


def test_messages_about_short_steps_are_posted_together(
    alone: StepRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For half a second, 256 at most; steps without a message count, and a stage begins anew."""
    monkeypatch.setattr(module, "_POST_EVERY_US", 1e12)
    assert [take(alone, step) for step in (1, 2)] == [[], [1]]
    assert alone.steps_per_post == 256
    assert take(alone, 3) == [2], "posted before that was known"
    known = {step: found for step in range(4, 516) if (found := take(alone, step, exchanged=step % 20 == 0))}
    assert known == {259: [3, *range(20, 259, 20)], 515: list(range(260, 515, 20))}
    assert alone.wait_for_messages() == []
    alone.begin_stage([])
    assert [take(alone, step) for step in (516, 517)] == [[], [516]], "after step 515, which has no message"


def test_messages_wait_for_their_number_however_often_steps_without_any_are_resolved(
    alone: StepRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank resolves those at times of its own, which does not change when messages are posted."""
    alone.steps_per_post = 32
    monkeypatch.setattr(module, "_POST_EVERY_US", 0.0)
    known = {
        step: found for step in range(1, 100) if (found := take(alone, step, exchanged=step in (40, 41, 90)))
    }
    assert known == {41: [40], 43: [41], 91: [90]}, "once one is read, steps count as long"
    alone.steps_per_post = 32
    taken = []
    for step in range(100, 260):
        take(alone, step, exchanged=step in (101, 200))
        taken.append(alone.totals["samples"])
        alone.steps_per_post = 32
    assert steps_of(alone.wait_for_messages()) == []
    assert len(set(taken)) > 60, "steps without a message are counted at once when their time is over"


def test_messages_about_long_steps_are_posted_at_once(
    alone: StepRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a request to stop is known a step later."""
    monkeypatch.setattr(module, "_POST_EVERY_US", 1.0)
    assert [take(alone, step) for step in range(1, 5)] == [[], [1], [2], [3]]


def test_no_step_waits_for_a_device(alone: StepRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks of steps are read once the device has finished the last of them."""
    monkeypatch.setattr(module, "_POST_EVERY_US", 1e12)
    clock = alone._clock = DeviceClock()
    alone.mark = clock.mark
    known = {}
    for clock.step in range(1, 300):
        if found := take(alone, clock.step):
            known[clock.step] = found
    assert clock.waited == 0
    assert [number for found in known.values() for number in found] == list(range(1, 259))
    assert max(map(len, known.values())) == 256
    assert steps_of(alone.end_stage()) == list(range(259, 300))


def test_a_stage_may_end_with_nothing_left(alone: StepRecorder) -> None:
    """A message is posted all the same, since other ranks may have something; here no rank has."""
    take(alone, 1)
    assert steps_of(alone.wait_for_messages()) == [1]
    assert alone.end_stage() == []
    take(alone, 2, exchanged=False)
    (rest,) = alone.end_stage()
    assert (rest.steps, rest.loss) == ([2], 2.0)


def test_deferred_work_does_not_change_what_comes_of_it(
    alone: StepRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of it is done when: the same messages at the same steps, and the same totals."""
    monkeypatch.setattr(module, "_POST_EVERY_US", 1e12)
    known = {}
    for step in range(1, 300):
        if found := take(alone, step):
            known[step] = found
        for _ in range(step % 3):
            alone.do_some_deferred()
    assert known == {
        2: [1],
        3: [2],
        259: list(range(3, 259)),
    }
    assert steps_of(alone.end_stage()) == list(range(259, 300))
    assert alone.totals["samples"] == 299
    assert alone.totals["step_us"] == sum(record["step_us"] for record in recorded(alone, tmp_path))


def recorded(recorder: StepRecorder, folder: Path) -> list[dict[str, Any]]:
    """The records of steps."""
    recorder._writer.flush()
    return [json.loads(line) for line in (folder / "steps/rank-00000.jsonl").read_text().splitlines()]


def test_steps_of_a_run_that_fails_are_recorded(alone: StepRecorder, tmp_path: Path) -> None:
    """Also those whose messages nobody will read."""
    alone.control_delay_steps = 100
    for step in range(1, 6):
        take(alone, step)
    alone.steps_per_post = 32
    for step in range(6, 10):
        take(alone, step)
    assert alone._pending_steps, "messages are under way"
    alone.begin_step(10, 0)
    alone.lap("data_us")
    alone.salvage()
    records = recorded(alone, tmp_path)
    assert [record["step"] for record in records] == list(range(1, 10))
    assert records[-1]["mean_loss"] is None


def test_a_step_that_does_not_end_leaves_nothing(alone: StepRecorder, tmp_path: Path) -> None:
    """Its data ran out."""
    take(alone, 1)
    alone.begin_step(2, 0)
    alone.lap("data_us")
    alone.note_loss(torch.tensor(7.0), 3)
    alone.cancel_step()
    take(alone, 2)
    alone.end_stage()
    found = [(record["step"], record["samples"], record["loss"]) for record in recorded(alone, tmp_path)]
    assert found == [(1, 1, 1.0), (2, 1, 2.0)]


def test_steps_are_recorded_whose_messages_cannot_be_posted_any_more(
    alone: StepRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Posting may be where a rank first notices that the others are gone."""
    take(alone, 1)
    take(alone, 2)
    alone.steps_per_post = 1

    def gone(*_: Any) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(alone._control, "all_gather_async", gone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        take(alone, 3)
    alone.salvage()
    assert [record["step"] for record in recorded(alone, tmp_path)] == [1, 2, 3]


def test_a_rank_waits_from_its_last_bucket_to_the_end_of_backward(
    alone: StepRecorder, tmp_path: Path
) -> None:
    """Not to the end of the step's last part."""
    for step in (1, 2):
        alone.begin_step(step, 0)
        time.sleep(0.002)
        alone.lap("forward_us")
        ready = now_us()
        time.sleep(0.002)
        done = now_us()
        alone.traces.append(BucketTrace("gradient", 0, (), "float32", 2, 8, ready, done, ready + 1))
        alone.end_backward()
        time.sleep(0.002)
        alone.lap("optimizer_us")
        alone.end_step()
    alone.end_stage()
    for record in recorded(alone, tmp_path):
        ((start, end),) = record["waits"]
        laps = dict(record["laps"])
        until = ("sync", "forward", "backward")
        assert end == record["start_us"] + sum(laps.get(part, 0) for part in until)
        assert 1000 < end - start < laps["backward"]


def test_records_stand_in_the_order_of_steps(alone: StepRecorder, tmp_path: Path) -> None:
    """Also those of steps without a message."""
    for step in range(1, 200):
        take(alone, step, exchanged=step % 7 == 0)
    alone.end_stage()
    assert [record["step"] for record in recorded(alone, tmp_path)] == list(range(1, 200))


def test_requests_come_back_with_the_message_about_their_step(alone: StepRecorder) -> None:
    """Each of them alone, and only with that step."""
    requests: tuple[dict[str, bool], ...] = (
        {},
        {"stop": True},
        {"checkpoint": True},
        {"clocks_are_old": True},
        {"stop": True, "checkpoint": True},
    )
    known = []
    for step, request in enumerate(requests, start=1):
        alone.begin_step(step, 0)
        alone.note_loss(torch.tensor(1.0), 1)
        if request.pop("clocks_are_old", False):
            alone.clocks_compared_s = -math.inf
        known += alone.end_step(**request)
        alone.clocks_compared_s = math.inf
        known += alone.wait_for_messages()
    assert [agreed.steps for agreed in known] == [[1], [2], [3], [4], [5]]
    assert [(agreed.stop, agreed.checkpoint, agreed.compare_clocks) for agreed in known] == [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, True, False),
    ]


def test_an_overflow_comes_with_its_own_step(alone: StepRecorder) -> None:
    """Also among several steps at once, and at a stage's end after ranks synchronized last."""
    alone.steps_per_post = 64
    known = []
    for step in range(1, 7):
        alone.begin_step(step, 0)
        alone.note_loss(torch.tensor(float(step)), 1)
        found = [Finding("fp16", torch.tensor(1))] if step in (3, 6) else []
        now = now_us()
        alone.traces.append(BucketTrace("gradient", step, (), "float32", 2, 8, now, now, now, findings=found))
        alone.end_backward()
        known += alone.end_step(exchanged=step != 6)
    known += alone.end_stage()
    assert [agreed.steps for agreed in known] == [[1, 2, 3, 4, 5, 6]]
    assert known[0].loss == 6.0, "of the newest"
    assert [(step, finding.hook, at.bucket) for step, at, finding in known[0].overflows] == [
        (3, "fp16", 3),
        (6, "fp16", 6),
    ]


def test_steps_that_are_not_written_are_observed(tmp_path: Path) -> None:
    """`timings.every` is about files alone."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    writer, seen = RecordWriter(tmp_path), []
    recorder = StepRecorder(
        clock=clock_for(torch.device("cpu")),
        control=ControlChannel(group),
        writer=writer,
        every=4,
        stragglers=StragglerDetector(20, 0.1),
    )
    recorder.on_step_record = lambda record, traces: seen.append((record.step, len(traces)))
    for step in range(1, 14):
        take(recorder, step)
    recorder.wait_for_messages()
    assert seen == [(step, 0) for step in range(1, 14)]
    assert [record["step"] for record in recorded(recorder, tmp_path)] == [4, 8, 12]
    writer.close()


def test_the_newest_record_of_each_post_has_memory_and_load(tmp_path: Path) -> None:
    """Resident memory grows with what the process holds; a CPU has no device memory."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    writer = RecordWriter(tmp_path)
    recorder = StepRecorder(
        clock=clock_for(torch.device("cpu")),
        control=ControlChannel(group),
        writer=writer,
        every=2,
        stragglers=StragglerDetector(20, 0.1),
    )
    for step in range(1, 6):
        take(recorder, step)
    recorder.wait_for_messages()
    held = torch.ones(16 << 20)
    recorder.steps_per_post = 32
    for step in range(6, 16):
        take(recorder, step)
    recorder.wait_for_messages()
    before, *_, after = records = recorded(recorder, tmp_path)
    assert [record["step"] for record in records if "machine" in record] == [2, 4, 14]
    assert before["machine"].keys() == {"rss_bytes", "load", "device_bytes"}
    assert after["machine"]["rss_bytes"] - before["machine"]["rss_bytes"] >= 0.9 * held.nbytes
    assert abs(after["machine"]["rss_bytes"] / psutil.Process().memory_info().rss - 1) < 0.2
    assert 0 <= after["machine"]["load"] < 1e4
    assert after["machine"]["device_bytes"] is None
    writer.close()


@pytest.mark.parametrize("lag", [0, 1])
def test_ranks_know_the_same_at_the_same_steps_whenever_each_resolves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    """As in local SGD: ranks synchronise in some steps, and each resolves the others at times of its own."""
    store, ranks, steps = dist.HashStore(), 3, 400
    chance, own = random.Random(lag), threading.local()
    exchanged = {step for step in range(1, steps) if chance.random() < 0.1}

    def now_us() -> int:
        own.now_us += own.chance.choice((0, 10**9))
        return int(own.now_us)

    monkeypatch.setattr(module, "now_us", now_us)
    known: list[list[tuple[int, int, float]]] = [[] for _ in range(ranks)]
    resolved: list[list[int]] = [[] for _ in range(ranks)]

    def flat(now: int, messages: Sequence[AgreedSteps]) -> list[tuple[int, int, float]]:
        return [(now, step, one.loss or 0.0) for one in messages for step in one.steps]

    def work(rank: int) -> None:
        own.now_us, own.chance = 0, random.Random(f"{lag} {rank}")
        group: Any = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=30))
        writer, clock = RecordWriter(tmp_path), DeviceClock()
        recorder = StepRecorder(
            clock=clock if lag else clock_for(torch.device("cpu")),
            control=ControlChannel(group),
            writer=writer,
            every=1000,
            stragglers=StragglerDetector(20, 0.1),
        )
        for clock.step in range(1, steps + 1):
            recorder.begin_step(clock.step, 0)
            recorder.note_loss(torch.tensor(float(rank + clock.step)), 1)
            agreed = recorder.end_step(exchanged=clock.step in exchanged)
            known[rank] += flat(clock.step, agreed)
            resolved[rank].append(len(recorder._ended))
        known[rank] += flat(steps + 1, recorder.end_stage())
        writer.close()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank waits for messages that others do not post"
    assert known[0] == known[1] == known[2]
    assert [step for _, step, _ in known[0]] == [*sorted(exchanged), steps]
    assert resolved[0] != resolved[1], "each has resolved its steps at times of its own"


def test_marks_of_a_device_are_read_a_little_in_each_step(tmp_path: Path) -> None:
    """Of the step that the device has passed meanwhile, and no later one: nothing waits."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    writer, clock = RecordWriter(tmp_path), DeviceClock()
    recorder = StepRecorder(
        clock=clock,
        control=ControlChannel(group),
        writer=writer,
        every=1,
        stragglers=StragglerDetector(20, 0.1),
    )
    recorder.steps_per_post = 100
    for clock.step in range(1, 8):
        recorder.begin_step(clock.step, 0)
        recorder.note_loss(torch.tensor(1.0), 1)
        recorder.end_step()
        *passed, running = recorder._ended
        assert len(passed) == clock.step - 1, "nothing was resolved"
        assert all(isinstance(mark, int) for step in passed for mark in step.marks)
        assert not any(isinstance(mark, int) for mark in running.marks)
    assert clock.waited == 0
    writer.close()


def test_deferred_work_stops_after_a_short_time_and_goes_on_where_it_was(
    alone: StepRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes 200 µs; the rest is done when it is needed."""
    now, done = 0, list[str]()

    def work(name: str, parts: int) -> Iterator[None]:
        nonlocal now
        for part in range(parts):
            done.append(f"{name}{part}")
            now += 200
            yield

    monkeypatch.setattr(module, "now_us", lambda: now)
    monkeypatch.setattr(module, "_SLICE_US", 500)
    alone.do_some_deferred()
    alone._deferred += [work("a", 2), work("b", 4), work("c", 1)]
    alone.do_some_deferred()
    assert done == ["a0", "a1", "b0"], "it may take 500 µs"
    alone.do_some_deferred()
    assert done[3:] == ["b1", "b2", "b3"]
    alone._deferred.append(work("d", 1))
    alone._do_deferred()
    assert done[6:] == ["c0", "d0"]
    alone._do_deferred()
    assert len(done) == 8


def test_adding_up_goes_on_from_a_checkpoint(alone: StepRecorder) -> None:
    """With the episodes in which a rank was late."""
    late = StragglerEpisode(1, "backward", 0, ("0.weight",), 2000.0, 9000.0, 3, 40)
    take(alone, 1)
    alone.wait_for_messages()
    alone.stragglers.episodes = [late]
    state = alone.state_dict()
    alone.stragglers.episodes, alone.totals = [], {}
    alone.load_state_dict(json.loads(json.dumps(state)))
    assert alone.stragglers.episodes == [late]
    assert alone.state_dict() == state
    assert alone.totals["samples"] == 1


def test_deferred_work_that_fails_does_not_hold_up_what_is_behind_it(alone: StepRecorder) -> None:
    """What it has not done is lost; the rest is done when it is needed."""
    done = list[str]()

    def work(name: str, *, fails: bool) -> Iterator[None]:
        done.append(name)
        if fails:
            raise RuntimeError(name)
        yield

    alone._deferred += [work("a", fails=True), work("b", fails=False)]
    with pytest.raises(RuntimeError, match="a"):
        alone._do_deferred()
    alone._do_deferred()
    assert done == ["a", "b"]
