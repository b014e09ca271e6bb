"""From status pages to the ranks that keep the others waiting."""

from dataclasses import replace

import pytest

from ddprun.watchdog.hang_report import describe_activity, diagnose, diagnosis_headline
from ddprun.watchdog.status_page import RankStatus, UnfinishedCollective
from ddprun_hooks.errors import format_ranks


def wait(
    index: int, number: int, ranks: tuple[int, ...], peers: tuple[int, ...] | None = None
) -> UnfinishedCollective:
    return UnfinishedCollective(
        index, f"sequence {index}", number, ranks, peers, "all_reduce", "gradient bucket 0"
    )


def seen(rank: int, issued: tuple[int, ...], *waits: UnfinishedCollective) -> RankStatus:
    return RankStatus(
        rank=rank,
        pid=100 + rank,
        state="S",
        beat_age_s=0.1,
        stage="stages[0].train",
        step=3,
        phase="backward",
        phase_age_s=4.0,
        issued=issued,
        waits=waits,
        code_location="",
        hang_reported=False,
    )


def pages(*all_seen: RankStatus) -> dict[int, RankStatus]:
    return {one.rank: one for one in all_seen}


ALL = (0, 1, 2, 3)


def test_the_rank_that_has_not_issued_the_collective_is_late() -> None:
    """Those that have, wait with this one."""
    waits = wait(0, 5, ALL)
    found = diagnose(0, pages(*(seen(r, (5,), waits) for r in (0, 1, 3)), seen(2, (4,))))
    assert (found.cause, found.ranks) == ("late", (2,))


def test_a_rank_that_waits_for_another_is_not_the_cause() -> None:
    """Two levels: 0 waits for 2 between hosts, which waits for 3 inside its host."""
    found = diagnose(
        0,
        pages(
            seen(0, (7, 3), wait(1, 3, (0, 2))),
            seen(1, (7, 3), wait(1, 3, (1, 3))),
            seen(2, (7, 2), wait(0, 7, (2, 3))),
            seen(3, (6, 2)),
        ),
    )
    assert (found.cause, found.ranks) == ("late", (3,))


def test_a_rank_that_has_told_of_the_hang_and_ended_is_judged_by_what_it_waited_for() -> None:
    """Another host's ranks may find a hang first, and have ended when this one asks."""
    over = [
        replace(one, hang_reported=True, state="Z", beat_age_s=9.0)
        for one in (seen(2, (5,), wait(0, 5, ALL)), seen(3, (4,)))
    ]
    found = diagnose(0, pages(seen(0, (5,), wait(0, 5, ALL)), seen(1, (5,), wait(0, 5, ALL)), *over))
    assert (found.cause, found.ranks) == ("late", (3,))
    assert describe_activity(over[0]).startswith("is in backward of step 3")
    assert describe_activity(replace(over[0], hang_reported=False)).startswith("has ended")


def test_a_stopped_rank_is_late_even_if_it_has_issued_everything() -> None:
    """It was stopped with the collective under way."""
    waits = wait(0, 5, ALL)
    stopped = replace(seen(1, (5,), waits), state="T")
    found = diagnose(0, pages(stopped, *(seen(r, (5,), waits) for r in (0, 2, 3))))
    assert (found.cause, found.ranks) == ("late", (1,))
    assert "its process (101) is stopped, by SIGSTOP or a debugger; it was in backward" in describe_activity(
        stopped
    )


@pytest.mark.parametrize(("state", "beat_age_s"), [("Z", 0.1), ("gone", 0.1), ("R", 60.0)])
def test_a_rank_without_a_sign_of_life_is_late(state: str, beat_age_s: float) -> None:
    """It has ended, or a call holds Python's lock; what its status page says it waits for is old."""
    waits = wait(0, 5, (0, 1))
    lost = replace(seen(1, (4,), wait(0, 4, (0, 1))), state=state, beat_age_s=beat_age_s)
    assert diagnose(0, pages(seen(0, (5,), waits), lost)).ranks == (1,)
    assert "ended" in describe_activity(lost) or "no sign of life" in describe_activity(lost)


def test_ranks_that_cannot_be_asked_are_named_if_nobody_else_is_late() -> None:
    """Only then: a rank that is known to be late is the cause."""
    waits = wait(0, 5, ALL)
    unseen = pages(seen(0, (5,), waits), seen(1, (5,), waits))
    assert (diagnose(0, unseen).cause, diagnose(0, unseen).ranks) == ("silent", (2, 3))
    unseen[1] = seen(1, (4,))
    assert (diagnose(0, unseen).cause, diagnose(0, unseen).ranks) == ("late", (1,))


def test_ranks_that_wait_for_each_other_are_named_together() -> None:
    """One is in another collective than the other: code that acts by rank."""
    found = diagnose(0, pages(seen(0, (5, 0), wait(0, 5, (0, 1))), seen(1, (4, 1), wait(1, 1, (0, 1)))))
    assert (found.cause, found.ranks) == ("circle", (0, 1))


def test_a_collective_to_which_all_have_come_is_the_networks_fault() -> None:
    """Nobody is late, nobody is stopped."""
    waits = wait(0, 5, (0, 1))
    found = diagnose(0, pages(seen(0, (5,), waits), seen(1, (5,), waits)))
    assert (found.cause, found.ranks) == ("network", (0, 1))
    assert "has not completed for 4 s" in diagnosis_headline(found, 4)


def test_a_message_between_two_ranks_waits_for_its_peer() -> None:
    """Whatever that has issued."""
    waits = wait(0, 1, ALL, peers=(2,))
    assert diagnose(0, pages(seen(0, (1,), waits), *(seen(r, (9,)) for r in (1, 2, 3)))).ranks == (2,)


def test_ranks_are_named_in_spans() -> None:
    """Short for many, plain for one."""
    assert format_ranks([2]) == "rank 2"
    assert format_ranks([3, 0, 1, 2, 6]) == "ranks 0-3, 6"
