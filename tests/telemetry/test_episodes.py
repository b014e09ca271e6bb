"""Episodes of late ranks, summed up."""

from typing import Any

from ddprun.telemetry.episodes import totals
from ddprun.telemetry.progress import summary_rows


def episode(rank: int, cause: str, late_us: float, first: int, last: int, **others: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "cause": cause,
        "bucket": None,
        "params": [],
        "late_us": late_us,
        "step_us": 10_000.0,
        "first_step": first,
        "last_step": last,
        **others,
    }


def test_spells_of_a_kind_are_one() -> None:
    """A mean over their steps; what cost most comes first, be it not the latest, the longest or in one go."""
    latest, longest = episode(0, "data", 7000.0, 101, 200), episode(2, "sync", 1000.0, 1001, 1500)
    some = [episode(1, "forward", 3000.0, 1, 100), episode(1, "forward", 6000.0, 201, 280)]
    first, second, third = totals([longest, some[0], latest, some[1]])
    assert (first.rank, first.cause, first.episodes, first.steps) == (1, "forward", 2, 180)
    assert first.late_us == (3000.0 * 100 + 6000.0 * 80) / 180
    assert first.lost_steps == 78.0
    assert (first.first_step, first.last_step) == (1, 280)
    assert first.when() == "in 180 steps (2 episodes)"
    assert (second.rank, second.episodes, second.when()) == (0, 1, "in steps 101 to 200")
    assert third.rank == 2


def test_where_ranks_meet_seldom_a_late_one_costs_less() -> None:
    """Late by 8 ms in every eighth step is less than by 2 ms in every step."""
    seldom = episode(0, "data", 8000.0, 1, 100, step_us=80_000.0)
    first, second = totals([seldom, episode(1, "data", 2000.0, 101, 200)])
    assert (first.rank, first.lost_steps) == (1, 20.0)
    assert (second.rank, second.lost_steps) == (0, 10.0)


def test_another_cause_or_bucket_is_of_another_kind() -> None:
    """And so is another rank; a stage of other buckets has other parameters."""
    backward = episode(1, "backward", 2000.0, 1, 10, bucket=0, params=["a"])
    others = [
        {**backward, "rank": 2},
        {**backward, "bucket": 1},
        {**backward, "params": ["b"]},
        {**backward, "cause": "forward", "bucket": None, "params": []},
    ]
    assert len(totals([backward, backward, *others])) == 5
    assert totals([]) == []


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


def _said(episodes: list[dict[str, Any]]) -> str:
    facts: dict[str, Any] = dict.fromkeys(
        ("status", "world_size", "device", "backend", "loss", "audit", "run_dir")
    )
    counted = ("steps", "steps_per_s", "seconds_in_steps", "communication_s")
    numbers = dict.fromkeys((*counted, "exposed_communication_s", "wire_bytes"), 1)
    rows = summary_rows({**facts, **numbers, "metrics": {}, "straggler_wait_s": [], "stragglers": episodes})
    return dict(rows)["stragglers"]
