"""Who is late, since what and by how much: from made-up words of ranks whose answer is known."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ddprun.telemetry.control_message import (
    CHECKPOINT,
    CODE_AT,
    COMPARE_CLOCKS,
    LOSS_AT,
    MOST_READY,
    READY_AT,
    SAMPLES_AT,
    SPENT,
    SPENT_AT,
    STOP,
    SYNC_READY_AT,
    WISHES_AT,
    ControlMessages,
    blank,
    spent_of,
    sync_ready_of,
    told_buckets,
)
from ddprun.telemetry.stragglers import Stragglers, _beyond

RANKS, BUCKETS, STEP_US = 4, 3, 12_000.0
NORMAL = {
    "data_us": 500.0,
    "forward_us": 2000.0,
    "backward_us": 4500.0,
    "hook_us": 300.0,
    "optimizer_us": 900.0,
    "sync_us": 200.0,
    "other_us": 100.0,
}
OFFSETS_US = (2500.0, 3500.0, 4800.0)  # of buckets from the start of backward
PARAMS = [("3.weight",), ("1.weight", "1.bias"), ("0.weight",)]


class Word(NamedTuple):
    """What one rank tells."""

    loss_sum: float = 1.0
    samples: int = 1
    wishes: int = 0
    code: int = 0
    sync_ready: float = 0.0
    spent: Mapping[str, float] = MappingProxyType(dict.fromkeys(SPENT, 0.0))
    ready: Sequence[float] = ()

    def put_into(self, numbers: NDArray[np.float64]) -> None:
        """Write it as it travels."""
        numbers[LOSS_AT], numbers[SAMPLES_AT] = self.loss_sum, self.samples
        numbers[SPENT_AT:WISHES_AT] = [self.spent[part] for part in SPENT]
        numbers[WISHES_AT], numbers[CODE_AT] = self.wishes, self.code
        numbers[SYNC_READY_AT] = self.sync_ready
        numbers[READY_AT : READY_AT + len(self.ready)] = self.ready


def word(step: int, late: dict[str, float], generator: torch.Generator, *, buckets: bool = True) -> Word:
    """A rank's word about a step that begins at step * 12 ms.

    Args:
        step: which.
        late: microseconds more in a part of `SPENT`, in `bucket 1` …, or after the step before (`wire`).
        generator: of some noise.
        buckets: gradients are exchanged.
    """
    noise = (100 * torch.rand(len(SPENT), generator=generator)).tolist()
    parts = {name: us + more for (name, us), more in zip(NORMAL.items(), noise, strict=True)}
    for name, us in late.items():
        if name in parts:
            parts[name] += us
        elif name.startswith("bucket"):
            parts["backward_us"] += us
    # Ranks leave the exchange before together, unless this one's took longer.
    start = step * STEP_US + 1e9 + late.get("wire", 0.0)
    before = start + sum(parts.values()) - parts["backward_us"] - parts["hook_us"]
    if not buckets:
        return Word(spent=parts, sync_ready=start + sum(parts.values()))
    ready, behind = [], 0.0
    for bucket, offset in enumerate(OFFSETS_US):
        behind += late.get(f"bucket {bucket}", 0.0)
        ready.append(before + offset + behind + late.get("backward_us", 0.0) + late.get("hook_us", 0.0))
    return Word(spent=parts, ready=ready)


def found_in(
    late: dict[str, float], rank: int = 2, *, steps: int = 50, ranks: int = RANKS, buckets: bool = True
) -> Stragglers:
    """What is found where one rank is late in every step."""
    generator = torch.Generator().manual_seed(0)
    it = Stragglers(window=20, over=0.1)
    it.begin_stage(PARAMS if buckets else [])
    for step in range(1, steps + 1):
        messages = [word(step, late if r == rank else {}, generator, buckets=buckets) for r in range(ranks)]
        it.add([step], words_of(messages, BUCKETS if buckets else 0))
    return it


def words_of(messages: Sequence[Word], buckets: int) -> ControlMessages:
    """What ranks tell about one step."""
    numbers = np.stack([blank(1, len(told_buckets(buckets))) for _ in messages], 1)
    for rank, one in enumerate(messages):
        one.put_into(numbers[0, rank])
    return ControlMessages(numbers)


@pytest.mark.parametrize(
    ("part", "cause", "bucket"),
    [
        ("data_us", "data", None),
        ("forward_us", "forward", None),
        ("bucket 0", "backward", 0),
        ("bucket 1", "backward", 1),
        ("bucket 2", "backward", 2),
        ("optimizer_us", "optimizer", None),
        ("sync_us", "sync", None),
        ("hook_us", "communication", None),
        ("wire", "communication", None),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_late_rank_is_named_with_its_cause(part: str, cause: str, bucket: int | None, ranks: int) -> None:
    """And with the bucket in which backward fell behind, its parameters, and by how much."""
    rank = ranks - 1
    now = found_in({part: 5000.0}, rank, ranks=ranks).now
    assert now is not None
    assert (now.rank, now.cause, now.bucket) == (rank, cause, bucket)
    assert now.params == (() if bucket is None else PARAMS[bucket])
    assert 4800 < now.late_us < 5200
    assert 11_000 < now.step_us < 13_000


def test_ranks_that_meet_beside_backward_alone_are_judged_by_that() -> None:
    """As in local SGD: there are no gradient buckets."""
    now = found_in({"forward_us": 5000.0}, buckets=False).now
    assert now is not None
    assert (now.rank, now.cause, now.bucket) == (2, "forward", None)
    assert 4800 < now.late_us < 5200


@pytest.mark.parametrize("late", [{}, {"forward_us": 900.0}, {"bucket 1": 1000.0}])
def test_nobody_is_late_by_little(late: dict[str, float]) -> None:
    """Less than a millisecond, or than a tenth of a step."""
    it = found_in(late)
    assert it.now is None
    assert it.episodes == []


def test_a_little_more_than_a_tenth_of_a_step_is_late() -> None:
    """1.6 ms of 12."""
    now = found_in({"forward_us": 1600.0}).now
    assert now is not None
    assert (now.rank, now.cause) == (2, "forward")


def test_late_in_three_steps_of_five_is_no_straggler() -> None:
    """The median is late, but in a quarter of the steps the rank is not."""
    generator = torch.Generator().manual_seed(0)
    it = Stragglers(window=20, over=0.1)
    it.begin_stage(PARAMS)
    for step in range(1, 61):
        late = {"forward_us": 5000.0} if step % 5 < 3 else {}
        messages = [word(step, late if rank == 1 else {}, generator) for rank in range(RANKS)]
        assert not it.add([step], words_of(messages, BUCKETS))
    assert it.episodes == []


def test_steps_in_which_nobody_is_waited_for_do_not_count() -> None:
    """As where ranks meet for an audit, amid the rounds of local SGD."""
    generator = torch.Generator().manual_seed(0)
    it = Stragglers(window=20, over=0.1)
    it.begin_stage([])
    for step in range(1, 51):
        late = [{"forward_us": 5000.0} if rank == 1 else {} for rank in range(RANKS)]
        messages = [word(step, more, generator, buckets=False) for more in late]
        it.add([2 * step], words_of(messages, 0))
        it.add([2 * step + 1], words_of([Word() for _ in range(RANKS)], 0))
    assert it.now is not None
    assert (it.now.rank, it.now.cause) == (1, "forward")


def test_one_late_step_is_no_straggler() -> None:
    """The median of a window counts."""
    generator = torch.Generator().manual_seed(0)
    it = Stragglers(window=20, over=0.1)
    it.begin_stage(PARAMS)
    for step in range(1, 41):
        late = {"forward_us": 50_000.0} if step % 7 == 0 else {}
        messages = [word(step, late if rank == 1 else {}, generator) for rank in range(RANKS)]
        assert not it.add([step], words_of(messages, BUCKETS))
    assert it.now is None


@pytest.mark.parametrize("steps", [8, 35])
def test_a_rank_that_is_late_for_a_while_is_no_straggler(steps: int) -> None:
    """As one whose core does something else: in one window it is late and in the next not, or for 420 ms."""
    generator = torch.Generator().manual_seed(0)
    it = Stragglers(window=10, over=0.1)
    it.begin_stage(PARAMS)
    for step in range(1, 81):
        late = {"forward_us": 5000.0} if 6 <= step < 6 + steps else {}
        messages = [word(step, late if rank == 1 else {}, generator) for rank in range(RANKS)]
        assert not it.add([step], words_of(messages, BUCKETS))
    assert it.episodes == []


def late_twice(step: int) -> dict[str, float]:
    """For half a second and more, for one cause and then for another."""
    return {"forward_us": 5000.0} if step <= 60 else {"data_us": 6000.0} if 110 < step <= 160 else {}


def test_a_spell_begins_and_ends() -> None:
    """Each is news once, and stays in the list; another cause is another episode."""
    generator = torch.Generator().manual_seed(0)
    it = Stragglers(window=10, over=0.1)
    it.begin_stage(PARAMS)
    news = []
    for step in range(1, 191):
        messages = [word(step, late_twice(step) if rank == 3 else {}, generator) for rank in range(RANKS)]
        if it.add([step], words_of(messages, BUCKETS)):
            news.append(None if it.now is None else it.now.cause)
    assert news == ["forward", None, "data", None]
    assert [(one.cause, one.rank) for one in it.episodes] == [("forward", 3), ("data", 3)]
    first = it.episodes[0]
    assert (first.first_step, 60 <= first.last_step <= 65) == (1, True)
    assert 4800 < first.late_us < 5200
    other = Stragglers(window=10, over=0.1)
    other.load_state_dict(it.state_dict())
    assert other.episodes == it.episodes


@pytest.mark.parametrize("lengths", [[190], [7, 1, 90, 92], [1] * 190])
def test_words_that_come_together_are_looked_at_as_if_each_came_alone(lengths: Sequence[int]) -> None:
    """The same episodes, and the same news of the same steps."""
    generator = torch.Generator().manual_seed(0)
    numbers = []
    for step in range(1, 191):
        messages = [word(step, late_twice(step) if rank == 3 else {}, generator) for rank in range(RANKS)]
        numbers.append(words_of(messages if step % 9 else [Word()] * RANKS, BUCKETS).numbers)
    it, news, first = Stragglers(window=10, over=0.1), [], 0
    it.begin_stage(PARAMS)
    for length in lengths:
        end = first + length
        found = it.add(range(first + 1, end + 1), ControlMessages(np.concatenate(numbers[first:end])))
        news += [(step, None if late is None else late.cause) for step, late in found]
        first = end
    assert news == [(44, "forward"), (67, None), (151, "data"), (168, None)]
    assert [(one.cause, one.first_step, one.last_step) for one in it.episodes] == [
        ("forward", 1, 61),
        ("data", 107, 163),
    ]


def test_of_very_many_spells_the_shortest_go() -> None:
    """Memory is bounded however long a run is."""
    generator = torch.Generator().manual_seed(0)
    it = Stragglers(window=2, over=0.1)
    it.begin_stage(PARAMS)
    for step in range(1, 1001):
        late = {"forward_us" if step // 2 % 2 else "data_us": 5000.0}
        messages = [word(step, late if rank == 1 else {}, generator) for rank in range(3)]
        it.add([step], words_of(messages, BUCKETS))
    assert len(it.episodes) == 200


def test_one_rank_alone_is_never_late() -> None:
    """There is nobody who waits."""
    assert found_in({"data_us": 9000.0}, 0, ranks=1).now is None


def test_a_word_comes_back_as_it_was() -> None:
    """What all ranks read is what each has told."""
    one = Word(6.0, 3, wishes=STOP, code=7, sync_ready=5.0, spent=NORMAL, ready=(1.0, 2.0))
    two = Word(4.0, 1, wishes=CHECKPOINT + COMPARE_CLOCKS, ready=(3.0, 1.5))
    messages = words_of([one, two], 2)
    assert (messages.mean_losses, messages.rank_losses(0), messages.samples) == ([2.5], [2.0, 4.0], [4])
    assert messages.wishes == STOP + CHECKPOINT, "rank 0's wish alone to compare clocks counts"
    assert messages.met == [True]
    assert messages.codes == {0: [7, 0]}
    assert messages.apart_us == [5.0 + 0.5]
    assert words_of([Word(sync_ready=5.0), Word(sync_ready=7.5)], 0).apart_us == [2.5]
    assert sync_ready_of(messages.numbers[0]).tolist() == [[5.0], [0.0]]
    assert dict(zip(SPENT, spent_of(messages.numbers[0])[0].tolist(), strict=True)) == NORMAL
    assert messages.all_ready(2).tolist() == [[3.0, 2.0]]
    assert messages.last_sync_ready().tolist() == [5.0]
    assert words_of([Word(wishes=STOP + COMPARE_CLOCKS), Word()], 2).wishes == STOP + COMPARE_CLOCKS
    one_after_another = [[Word(wishes=COMPARE_CLOCKS), Word()], [Word(), Word(wishes=STOP + COMPARE_CLOCKS)]]
    several = ControlMessages(np.concatenate([words_of(one, 0).numbers for one in one_after_another]))
    assert several.wishes == STOP + COMPARE_CLOCKS, "of any word"
    assert ControlMessages(several.numbers[1:]).wishes == STOP
    nothing = words_of([Word(), Word()], 2)
    assert (nothing.met, nothing.codes, nothing.wishes) == ([False], {}, 0)
    assert words_of([Word(), Word()], 2).all_ready(2).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("buckets", [1, MOST_READY, MOST_READY + 1, 100, 1000])
def test_a_word_stays_small_however_many_buckets_there_are(buckets: int) -> None:
    """Then it tells of some, the last one among them; any other was ready when the next of these was."""
    told = told_buckets(buckets)
    assert len(told) == min(buckets, MOST_READY)
    assert told == sorted(set(told))
    assert told[-1] == buckets - 1
    none = Word()  # of a rank that has exchanged no gradients in the step
    messages = words_of([Word(ready=[1.0 + bucket for bucket in told]), none], buckets)
    ready = messages.all_ready(buckets)[0].tolist()
    assert len(ready) == buckets
    assert all(bucket <= at - 1 < bucket + math.ceil(buckets / MOST_READY) for bucket, at in enumerate(ready))


def medians_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The plain way."""
    return np.array([[np.median(np.delete(row, rank)) for rank in range(len(row))] for row in values])


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_the_median_of_the_others_is_that(ranks: int) -> None:
    """With ties."""
    values = np.random.default_rng(1).integers(0, 6, (50, ranks)).astype(float)
    assert np.array_equal(values - _beyond(values), medians_of_others(values))
