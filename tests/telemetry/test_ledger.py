"""When ranks hear what they have told each other."""

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddprun.telemetry import chores
from ddprun.telemetry import ledger as module
from ddprun.telemetry.clock import clock_for
from ddprun.telemetry.ledger import Ledger
from ddprun.telemetry.writer import Writer
from ddprun_hooks.exchange import Control
from ddprun_hooks.flight import Flight, now_us


class DeviceClock:
    """Marks as of a device that is one step behind the host; counts those that had to be waited for."""

    lag = 1

    def __init__(self) -> None:
        self.step, self.waited = 0, 0

    def mark(self) -> tuple[int, int]:
        return self.step, now_us()

    def us(self, mark: tuple[int, int]) -> int:
        self.waited += mark[0] >= self.step
        return mark[1]

    def read(self, flights: Sequence[Flight[Any]]) -> list[Flight[int]]:
        return [flight.mapped(self.us) for flight in flights]

    def rebase(self, mark: tuple[int, int]) -> None: ...

    def settle(self) -> None: ...

    def on_host(self, number: torch.Tensor) -> torch.Tensor:
        return number


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger of a world of one rank."""
    group: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    writer = Writer(tmp_path)
    yield Ledger(clock=clock_for(torch.device("cpu")), control=Control(group, 0, 1), writer=writer, every=1)
    writer.close()


def take(ledger: Ledger, step: int, *, met: bool = True) -> list[int]:
    """One step; the steps that are heard of at its end."""
    ledger.start(step, 0)
    ledger.note_loss(torch.tensor(float(step)), 1)
    return [agreed.step for agreed in ledger.end(stop=False, compare_clocks=False, synchronised=met)]


@pytest.mark.parametrize("patience", [1, 3])
def test_control_words_are_read_so_many_steps_after_the_last(
    alone: Ledger, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    """Neither sooner nor later, whether they have come or not; what is left comes at the stage's end. A step
    in which ranks do not meet has none.
    """
    monkeypatch.setattr(module, "_TOGETHER_US", 0.0)
    alone.patience = patience
    heard = {number: step for step in range(1, 9) for number in take(alone, step, met=step % 2 == 0)}
    assert heard == {met: met + patience for met in (2, 4, 6, 8) if met + patience <= 8}
    left = [agreed.step for agreed in alone.flush()]
    assert [*heard, *left] == [2, 4, 6, 8]


def test_words_of_short_steps_travel_together(alone: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as their time is due, 32 at most; steps without a word count, and a stage begins anew."""
    monkeypatch.setattr(module, "_TOGETHER_US", 1e12)
    assert [take(alone, step) for step in (1, 2)] == [[], [1]]
    assert alone.together == 32
    assert take(alone, 3) == [2], "under way before that was known"
    heard = {step: found for step in range(4, 72) if (found := take(alone, step, met=step % 10 == 0))}
    assert heard == {35: [3, 10, 20, 30], 67: [40, 50, 60]}
    assert [agreed.step for agreed in alone.drain()] == [70]
    alone.begin_stage([])
    assert [take(alone, step) for step in (72, 73)] == [[], [72]], "after step 71, which has no word"


def test_words_of_long_steps_travel_at_once(alone: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps as long as a wish to stop may take to be heard, it is heard after each."""
    monkeypatch.setattr(module, "_TOGETHER_US", 1.0)
    assert [take(alone, step) for step in range(1, 5)] == [[], [1], [2], [3]]


def test_no_step_waits_for_a_device(alone: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marks of steps whose words travel together are read once the last of them is over there."""
    monkeypatch.setattr(module, "_TOGETHER_US", 1e12)
    clock = alone._clock = DeviceClock()
    alone.mark = clock.mark
    heard = {}
    for clock.step in range(1, 100):
        if found := take(alone, clock.step):
            heard[clock.step] = found
    assert clock.waited == 0
    assert [number for found in heard.values() for number in found] == list(range(1, 67))
    assert max(map(len, heard.values())) == 32
    assert [agreed.step for agreed in alone.flush()] == list(range(67, 100))


def test_a_stage_may_end_with_nothing_left_to_tell(alone: Ledger) -> None:
    """A word is posted all the same, since other ranks may have something; of nobody it says nothing."""
    take(alone, 1)
    assert [agreed.step for agreed in alone.drain()] == [1]
    assert alone.flush() == []
    take(alone, 2, met=False)
    (rest,) = alone.flush()
    assert (rest.step, rest.mean_loss) == (2, 2.0)


def test_bookkeeping_is_done_in_between_and_comes_out_alike(
    alone: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many chores are done when: the same words at the same steps, and the same totals."""
    monkeypatch.setattr(module, "_TOGETHER_US", 1e12)
    monkeypatch.setattr(chores, "_ENOUGH", 1)
    heard = {}
    for step in range(1, 100):
        if found := take(alone, step):
            heard[step] = found
        for _ in range(40 * (step % 3)):  # each does one at least, and a batch leaves 33
            alone.chores.do_some()
        if step % 3 == 2:
            assert alone.own_loss == float(step), "read as soon as there was time for it"
    assert heard == {2: [1], 3: [2], 35: list(range(3, 35)), 67: list(range(35, 67)), 99: list(range(67, 99))}
    assert [agreed.step for agreed in alone.flush()] == [99]
    assert alone.totals.steps == 99
    assert alone.totals.parts_us["step_us"] == sum(record["step_us"] for record in recorded(alone, tmp_path))


def recorded(ledger: Ledger, folder: Path) -> list[dict[str, Any]]:
    """The records of steps."""
    ledger._writer.flush()
    return [json.loads(line) for line in (folder / "steps/rank-00000.jsonl").read_text().splitlines()]


def test_steps_of_a_run_that_fails_are_recorded(alone: Ledger, tmp_path: Path) -> None:
    """Those whose words nobody will read, too."""
    alone.patience = 100
    for step in range(1, 6):
        take(alone, step)
    alone.together = 32
    for step in range(6, 10):
        take(alone, step)
    assert alone._batches, "words are under way"
    alone.salvage()
    records = recorded(alone, tmp_path)
    assert [record["step"] for record in records] == list(range(1, 10))
    assert records[-1]["mean_loss"] is None


def test_records_stand_in_the_order_of_steps(alone: Ledger, tmp_path: Path) -> None:
    """Those of steps without a word, too."""
    for step in range(1, 200):
        take(alone, step, met=step % 7 == 0)
    alone.flush()
    assert [record["step"] for record in recorded(alone, tmp_path)] == list(range(1, 200))
