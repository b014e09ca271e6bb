"""Who is late, since when and by how much: from made-up messages whose answer is known."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from ddprun.telemetry.control_message import (
    OWN_COLUMNS,
    READY_AT,
    STEPS_AT,
    SYNC_READY_AT,
    message_length,
)
from ddprun.telemetry.progress import summary_rows
from ddprun.telemetry.records import OWN_PARTS, StragglerCause, StragglerEpisode, Summary
from ddprun.telemetry.stragglers import StragglerDetector, _above_others_median, straggler_totals

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


class Message(NamedTuple):
    """What one rank says about a step."""

    sync_ready: float = 0.0
    own: Mapping[str, float] = MappingProxyType(dict.fromkeys(OWN_PARTS, 0.0))
    ready: Sequence[float] = ()


def message(
    step: int, late: dict[str, float], generator: torch.Generator, *, buckets: bool = True
) -> Message:
    """A rank's message about a step that begins at step * 12 ms.

    Args:
        step: which.
        late: microseconds more in a part of `OWN_PARTS`, in `bucket 1` …, or after the step before (`wire`).
        generator: of some noise.
        buckets: gradients are exchanged.
    """
    noise = (100 * torch.rand(len(OWN_PARTS), generator=generator)).tolist()
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
        return Message(own=parts, sync_ready=start + sum(parts.values()))
    ready, behind = [], 0.0
    for bucket, offset in enumerate(OFFSETS_US):
        behind += late.get(f"bucket {bucket}", 0.0)
        ready.append(before + offset + behind + late.get("backward_us", 0.0) + late.get("hook_us", 0.0))
    return Message(own=parts, ready=ready)


def turns_of(buckets: int) -> list[range]:
    """Of a stage with so many buckets and one backward pass."""
    return [range(buckets)] if buckets else []


def begin(it: StragglerDetector, params: Sequence[tuple[str, ...]]) -> None:
    """A stage with these buckets."""
    it.begin_stage(dict(enumerate(params)), turns_of(len(params)))


def found_in(
    late: dict[str, float], rank: int = 2, *, steps: int = 80, ranks: int = RANKS, buckets: bool = True
) -> StragglerDetector:
    """What is found where one rank is late in every step."""
    generator = torch.Generator().manual_seed(0)
    it = StragglerDetector(window=20, min_share=0.1)
    begin(it, PARAMS if buckets else [])
    for step in range(1, steps + 1):
        of_ranks = [
            message(step, late if r == rank else {}, generator, buckets=buckets) for r in range(ranks)
        ]
        it.add_messages([step], gathered(of_ranks, BUCKETS if buckets else 0))
    return it


def test_a_rank_that_is_late_for_a_broadcast_is_late_once() -> None:
    """The others do not wait for it there, but in backward."""
    it, generator = StragglerDetector(20, 0.1), torch.Generator()
    begin(it, PARAMS)
    for step in range(1, 81):
        late = [{"data_us": 5000.0} if rank == 2 else {} for rank in range(RANKS)]
        of_ranks = [message(step, one, generator) for one in late]
        of_ranks = [one._replace(sync_ready=one.ready[0] - OFFSETS_US[0]) for one in of_ranks]
        it.add_messages([step], gathered(of_ranks, BUCKETS))
    assert it.current is not None
    assert (round(it.current.late_us / 1000), it.current.cause) == (5, "data")


def gathered(of_ranks: Sequence[Message], buckets: int) -> NDArray[np.float64]:
    """The messages of all ranks about one step: shape (1, ranks, numbers of a message)."""
    numbers = np.zeros((1, len(of_ranks), message_length(turns_of(buckets))))
    numbers[..., STEPS_AT] = 1.0
    for rank, one in enumerate(of_ranks):
        numbers[0, rank, OWN_COLUMNS] = [one.own[part] for part in OWN_PARTS]
        numbers[0, rank, SYNC_READY_AT] = one.sync_ready
        numbers[0, rank, READY_AT : READY_AT + len(one.ready)] = one.ready
    return numbers


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
    now = found_in({part: 5000.0}, rank, ranks=ranks).current
    assert now is not None
    assert (now.rank, now.cause, now.bucket) == (rank, cause, bucket)
    assert now.params == (() if bucket is None else PARAMS[bucket])
    assert 4800 < now.late_us < 5200
    assert 11_000 < now.step_us < 13_000


def test_ranks_that_synchronise_beside_backward_alone_are_judged_by_that() -> None:
    """As in local SGD: there are no gradient buckets."""
    now = found_in({"forward_us": 5000.0}, buckets=False).current
    assert now is not None
    assert (now.rank, now.cause, now.bucket) == (2, "forward", None)
    assert 4800 < now.late_us < 5200


@pytest.mark.parametrize("late", [{}, {"forward_us": 900.0}, {"bucket 1": 1000.0}])
def test_nobody_is_late_by_little(late: dict[str, float]) -> None:
    """Less than a millisecond, or than a tenth of a step."""
    it = found_in(late)
    assert it.current is None
    assert it.episodes == []


def test_a_little_more_than_a_tenth_of_a_step_is_late() -> None:
    """1.6 ms of 12."""
    now = found_in({"forward_us": 1600.0}).current
    assert now is not None
    assert (now.rank, now.cause) == (2, "forward")


def test_late_in_three_steps_of_five_is_no_straggler() -> None:
    """The median is late, but in a quarter of the steps the rank is not."""
    generator = torch.Generator().manual_seed(0)
    it = StragglerDetector(window=20, min_share=0.1)
    begin(it, PARAMS)
    for step in range(1, 61):
        late = {"forward_us": 5000.0} if step % 5 < 3 else {}
        of_ranks = [message(step, late if rank == 1 else {}, generator) for rank in range(RANKS)]
        assert not it.add_messages([step], gathered(of_ranks, BUCKETS))
    assert it.episodes == []


def test_steps_in_which_nobody_is_waited_for_do_not_count() -> None:
    """As around an audit, between the synchronisations of local SGD."""
    generator = torch.Generator().manual_seed(0)
    it = StragglerDetector(window=20, min_share=0.1)
    begin(it, [])
    for step in range(1, 81):
        late = [{"forward_us": 5000.0} if rank == 1 else {} for rank in range(RANKS)]
        of_ranks = [message(step, more, generator, buckets=False) for more in late]
        it.add_messages([2 * step], gathered(of_ranks, 0))
        it.add_messages([2 * step + 1], gathered([Message() for _ in range(RANKS)], 0))
    assert it.current is not None
    assert (it.current.rank, it.current.cause) == (1, "forward")


def test_one_late_step_is_no_straggler() -> None:
    """The median of a window counts."""
    generator = torch.Generator().manual_seed(0)
    it = StragglerDetector(window=20, min_share=0.1)
    begin(it, PARAMS)
    for step in range(1, 41):
        late = {"forward_us": 50_000.0} if step % 7 == 0 else {}
        of_ranks = [message(step, late if rank == 1 else {}, generator) for rank in range(RANKS)]
        assert not it.add_messages([step], gathered(of_ranks, BUCKETS))
    assert it.current is None


@pytest.mark.parametrize("steps", [8, 35])
def test_a_rank_that_is_late_for_a_while_is_no_straggler(steps: int) -> None:
    """As one whose core does something else: in one window it is late and in the next not, or for 420 ms."""
    generator = torch.Generator().manual_seed(0)
    it = StragglerDetector(window=10, min_share=0.1)
    begin(it, PARAMS)
    for step in range(1, 81):
        late = {"forward_us": 5000.0} if 6 <= step < 6 + steps else {}
        of_ranks = [message(step, late if rank == 1 else {}, generator) for rank in range(RANKS)]
        assert not it.add_messages([step], gathered(of_ranks, BUCKETS))
    assert it.episodes == []


def late_twice(step: int) -> dict[str, float]:
    """For half a second and more, for one cause and then for another."""
    return {"forward_us": 5000.0} if step <= 120 else {"data_us": 6000.0} if 210 < step <= 330 else {}


def test_an_episode_begins_and_ends() -> None:
    """Each change is returned once, and the episode stays in the list; another cause is another episode."""
    generator = torch.Generator().manual_seed(0)
    it = StragglerDetector(window=10, min_share=0.1)
    begin(it, PARAMS)
    changes = []
    for step in range(1, 401):
        of_ranks = [message(step, late_twice(step) if rank == 3 else {}, generator) for rank in range(RANKS)]
        if it.add_messages([step], gathered(of_ranks, BUCKETS)):
            changes.append(None if it.current is None else it.current.cause)
    assert changes == ["forward", None, "data", None]
    assert [(one.cause, one.rank) for one in it.episodes] == [("forward", 3), ("data", 3)]
    first = it.episodes[0]
    assert (first.first_step, 60 <= first.last_step <= 120) == (1, True)
    assert 4800 < first.late_us < 5200


def test_episodes_do_not_depend_on_how_many_steps_come_at_once() -> None:
    """Steps that suddenly take longer come late and together: one judgement of all would find nothing."""
    generator = torch.Generator().manual_seed(0)
    steps = range(1, 401)
    messages = np.concatenate(
        [
            gathered(
                [message(step, late_twice(step) if rank == 3 else {}, generator) for rank in range(RANKS)],
                BUCKETS,
            )
            for step in steps
        ]
    )
    found = []
    for at_once in (1, 256, 400):
        it, changes = StragglerDetector(window=10, min_share=0.1), []
        begin(it, PARAMS)
        for first in range(0, len(steps), at_once):
            changes += it.add_messages(steps[first : first + at_once], messages[first : first + at_once])
        found.append((it.episodes, changes))
    assert [one.cause for one in found[0][0]] == ["forward", "data"]
    assert [now and now.cause for _, now in found[0][1]] == ["forward", None, "data", None]
    assert found[1:] == [found[0]] * 2


def test_of_very_many_episodes_the_shortest_go() -> None:
    """Memory is bounded however long a run is."""
    generator = torch.Generator().manual_seed(0)
    it = StragglerDetector(window=2, min_share=0.1)
    begin(it, PARAMS)
    for step in range(1, 1001):
        late = {"forward_us" if step // 2 % 2 else "data_us": 100_000.0}
        of_ranks = [message(50 * step, late if rank == 1 else {}, generator) for rank in range(3)]
        it.add_messages([step], gathered(of_ranks, BUCKETS))
    assert len(it.episodes) == 200


def test_one_rank_alone_is_never_late() -> None:
    """There is nobody who waits."""
    assert found_in({"data_us": 9000.0}, 0, ranks=1).current is None


def test_the_skew_of_a_step_is_that_of_its_last_buckets() -> None:
    """In backward and beside it, added up."""
    it = StragglerDetector(window=20, min_share=0.1)
    one, two = Message(5.0, ready=(1.0, 2.0)), Message(ready=(3.0, 1.5))
    begin(it, PARAMS[:2])
    it.add_messages([1], gathered([one, two], 2))
    it.add_messages([2], gathered([Message(sync_ready=5.0), Message(sync_ready=7.5)], 2))
    assert [step.skew_us for step in it._steps] == [5.0 + 0.5, 2.5]


def medians_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The plain way."""
    return np.array([[np.median(np.delete(row, rank)) for rank in range(len(row))] for row in values])


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_the_median_of_the_others_is_that(ranks: int) -> None:
    """With ties."""
    values = np.random.default_rng(1).integers(0, 6, (50, ranks)).astype(float)
    assert np.array_equal(values - _above_others_median(values), medians_of_others(values))


def episode(
    rank: int, cause: StragglerCause, late_us: float, first: int, last: int, **others: Any
) -> StragglerEpisode:
    return replace(StragglerEpisode(rank, cause, None, (), late_us, 10_000.0, first, last), **others)


def test_episodes_of_one_cause_are_added_up() -> None:
    """A mean over their steps; what cost most comes first, be it not the latest, the longest or in one go."""
    latest, longest = episode(0, "data", 7000.0, 101, 200), episode(2, "sync", 1000.0, 1001, 1500)
    some = [episode(1, "forward", 3000.0, 1, 100), episode(1, "forward", 6000.0, 201, 280)]
    first, second, third = straggler_totals([longest, some[0], latest, some[1]])
    assert (first.rank, first.cause, first.episodes, first.steps) == (1, "forward", 2, 180)
    assert first.late_us == (3000.0 * 100 + 6000.0 * 80) / 180
    assert first.lost_steps == 78.0
    assert (first.first_step, first.last_step) == (1, 280)
    assert first.when() == "in 180 steps (2 episodes)"
    assert (second.rank, second.episodes, second.when()) == (0, 1, "in steps 101 to 200")
    assert third.rank == 2


def test_a_late_rank_costs_less_where_ranks_synchronise_seldom() -> None:
    """Late by 8 ms in every eighth step is less than by 2 ms in every step."""
    seldom = episode(0, "data", 8000.0, 1, 100, step_us=80_000.0)
    first, second = straggler_totals([seldom, episode(1, "data", 2000.0, 101, 200)])
    assert (first.rank, first.lost_steps) == (1, 20.0)
    assert (second.rank, second.lost_steps) == (0, 10.0)


def test_another_cause_or_bucket_is_counted_apart() -> None:
    """And so is another rank; a stage of other buckets has other parameters."""
    backward = episode(1, "backward", 2000.0, 1, 10, bucket=0, params=("a",))
    others = [
        replace(backward, rank=2),
        replace(backward, bucket=1),
        replace(backward, params=("b",)),
        replace(backward, cause="forward", bucket=None, params=()),
    ]
    assert len(straggler_totals([backward, backward, *others])) == 5
    assert straggler_totals([]) == []


def test_the_closing_table_names_the_dearest() -> None:
    """With all of its episodes, and how many there are besides."""
    episodes = [
        episode(1, "forward", 3000.0, 1, 40),
        episode(0, "data", 4000.0, 101, 150),
        episode(1, "forward", 6000.0, 2001, 3080),
    ]
    assert _said([]) == "none"
    assert _said(episodes[:1]) == "rank 1 by 3.0 ms (forward) in steps 1 to 40"
    assert _said(episodes) == "rank 1 by 5.9 ms (forward) in 1,120 steps (2 episodes); and 1 more"


def _said(episodes: list[StragglerEpisode]) -> str:
    summary = Summary(status="done", steps=1, steps_per_s=1.0, communication_s=1.0, stragglers=episodes)
    return dict(summary_rows(summary))["stragglers"]


@pytest.mark.parametrize(
    ("late", "every", "bucket"),
    [("first", 1, 5), ("first", 3, 5), ("second", 1, 8), ("second", 2, 8), ("second", 4, 8), ("first", 9, 6)],
)
def test_a_rank_that_is_late_in_a_turn_is_found(late: str, every: int, bucket: int) -> None:
    """Buckets 5 and 6 are of the first turn, 7 and 8 of the second, which runs in every n-th step; after each
    turn all ranks go on together. How late a rank is counts for the mean step.
    """
    turns = [range(5, 7), range(7, 9)]
    it = StragglerDetector(window=20, min_share=0.04)
    it.begin_stage({number: (f"of {number}",) for number in range(5, 9)}, turns)
    for step in range(1, 121):
        numbers = np.zeros((1, 3, message_length(turns)))
        numbers[..., STEPS_AT] = 1.0
        for rank in range(3):
            by = 20_000.0 if rank == 1 else 100.0 * rank
            ready = np.array([10_000.0, 15_000.0, 40_000.0, 60_000.0])
            ready[[[0, 1], [3]][late == "second"]] += by
            if every == 9:
                ready[0] -= by
            if step % every:
                ready[2:] = 0.0
            more = by if late == "first" or step % every == 0 else 0.0
            parts = dict.fromkeys(OWN_PARTS, 1000.0) | {"backward_us": 5000.0 + more}
            numbers[0, rank, OWN_COLUMNS] = [parts[part] for part in OWN_PARTS]
            numbers[0, rank, READY_AT + 5 :] = np.where(ready, ready + 100_000.0 * step, 0.0)
        it.add_messages([step], numbers)
    assert it.current is not None
    assert (it.current.rank, it.current.cause, it.current.bucket) == (1, "backward", bucket)
    assert it.current.params == (f"of {bucket}",)
    often = every if late == "second" else 1
    assert it.current.late_us == pytest.approx(20_000 / often, rel=0.02)
