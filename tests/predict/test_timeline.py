"""Time, played: what must hold whatever the numbers are."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from ddprun.predict.links import Link, LinkLevel, Links
from ddprun.predict.step_simulator import (
    AwaitTransfers,
    BucketTransfer,
    Compute,
    HostResources,
    Instruction,
    LastRankWait,
    SimulatedCollective,
    SimulatedStep,
    StepSimulator,
)

SLOW = Links(across=Link(1e6))  # a byte takes a microsecond
ALONE = HostResources(cores=math.inf, ranks_per_host=1, links=SLOW)


def transfer(
    nbytes: float, *, work_us: float = 0.0, rounds: int = 1, hooks_us: float = 0.0, **more: float
) -> BucketTransfer:
    """A bucket with one collective between hosts."""
    collective = SimulatedCollective(work_us, {"across": nbytes}, rounds, **more)  # type: ignore[arg-type]
    return BucketTransfer(f"{nbytes:g}", (Compute(hooks_us), collective, Compute(hooks_us)))


def play(machine: HostResources, *instructions: Instruction) -> SimulatedStep:
    """One step."""
    return StepSimulator(machine).simulate_step(instructions)


def whole(played: SimulatedStep) -> float:
    """All that the training thread did."""
    return sum(played.parts_us.values()) + sum(played.waits_us.values())


def test_a_step_is_its_work_if_nothing_is_sent() -> None:
    """And its parts are those it was told."""
    played = play(ALONE, Compute(300, "forward_us"), Compute(700, "backward_us"), AwaitTransfers())
    assert played.step_us == pytest.approx(1000)
    assert played.parts_us == {"forward_us": 300, "backward_us": 700}
    assert not played.waits_us


@pytest.mark.parametrize("backward_us", [0.0, 40.0, 100.0, 250.0])
def test_what_overlaps_with_work_costs_nothing(backward_us: float) -> None:
    """A message of 100 µs that is sent while there is work."""
    played = play(ALONE, transfer(100), Compute(backward_us, "backward_us"), AwaitTransfers())
    assert played.step_us == pytest.approx(max(100, backward_us))
    assert sum(played.waits_us.values()) == pytest.approx(max(0.0, 100 - backward_us))
    assert whole(played) == pytest.approx(played.step_us)


def test_a_link_carries_one_message_after_the_other() -> None:
    """First in, first out: the sum of their bytes, and each ends when it is through."""
    played = play(
        ALONE,
        transfer(100),
        transfer(50),
        transfer(7),
        AwaitTransfers(),
    )
    assert played.step_us == pytest.approx(157)
    assert [one.done_us for one in played.transfers] == pytest.approx([100, 150, 157])
    assert played.waits_us == {"wire": pytest.approx(157)}


def test_what_is_one_way_at_first_counts_once() -> None:
    """Of what follows without a pause the largest: the part of it that exceeds what has counted already."""
    two_ranks = transfer(100, one_way_bytes=40, start_spread_us=5)
    for first, done in (
        (two_ranks, [140, 240]),
        (transfer(30, one_way_bytes=10, start_spread_us=5), [40, 170]),
    ):
        played = play(ALONE, first, two_ranks, AwaitTransfers())
        assert [one.done_us for one in played.transfers] == pytest.approx(done)
    played = play(ALONE, two_ranks, AwaitTransfers(), two_ranks, AwaitTransfers())
    assert played.step_us == pytest.approx(280)
    for latency_us, took_us in ((5, 140), (6, 100)):  # within a latency, both first say that they are ready
        machine = HostResources(math.inf, 1, Links(across=Link(1e6, latency_us / 1e6)))
        assert play(machine, two_ranks, AwaitTransfers()).step_us == pytest.approx(took_us)


@pytest.mark.parametrize(("rounds", "messages"), [(1, 1), (2, 2), (2, 8), (8, 8)])
def test_each_message_goes_at_the_rate_of_its_size(rounds: int, messages: int) -> None:
    """However many rounds are simulated as one; and so long the link is busy. What goes ahead is another."""
    link = Link(1e6, 0.0, ((100.0, 0.5e6), (1000.0, 1e6)))
    ring = transfer(800, rounds=rounds, messages=messages, one_way_bytes=50, start_spread_us=5)
    played = play(HostResources(math.inf, 1, Links(across=link)), ring, AwaitTransfers())
    busy_us = 1e6 * messages * link.transmission_seconds(800 / messages)
    assert played.links_busy_us == pytest.approx({"within": 0, "across": busy_us})
    assert played.step_us == pytest.approx(busy_us + 100)


@pytest.mark.parametrize(
    ("sent", "latency_us", "rates"), [(0.0, 40, ()), (3.0, 37, ()), (60.0, 30, ()), (60.0, 40, ((60, 1e6),))]
)
def test_a_message_that_is_sent_hides_latency_of_another(
    sent: float, latency_us: float, rates: tuple[tuple[float, float], ...]
) -> None:
    """Up to a quarter, where two are on their way; measured rates have it."""
    links = Links(across=Link(1e6, 10e-6, rates))
    for rounds in (1, 2):
        counts: Mapping[LinkLevel, float] = {"across": 4 * rounds}
        ring = SimulatedCollective(0.0, {"across": rounds * sent}, rounds, counts, double_buffered=True)
        played = play(HostResources(math.inf, 1, links), BucketTransfer("", (ring,)), AwaitTransfers())
        assert played.step_us == pytest.approx(rounds * (sent + latency_us))


@pytest.mark.parametrize(
    ("latency_s", "first"), [(0.0, 100e3), (0.9e-3, 100e3), (1e-3, 400e3), (8e-3, 400e3)]
)
def test_what_blocks_an_idle_link_goes_first_once(latency_s: float, first: float) -> None:
    """Before the first of all rounds; if the other end is near, at most what a card's queue holds."""
    machine = HostResources(math.inf, 1, Links(across=Link(1e6, latency_s)))
    ring = transfer(6e6, rounds=6, queued_ahead_bytes=400e3)
    played = play(machine, ring, ring, AwaitTransfers())
    assert played.transfers[1].done_us == pytest.approx(12e6 + first)
    inside = SimulatedCollective(0.0, {"within": 100.0}, queued_ahead_bytes=400e3)
    machine = HostResources(math.inf, 1, Links(within=Link(1e6, latency_s)))
    assert play(machine, BucketTransfer("", (inside,)), AwaitTransfers()).step_us == pytest.approx(100)


def test_rounds_of_two_collectives_take_turns_on_a_link() -> None:
    """A small one waits for the messages of a large one in each of its rounds."""
    played = play(
        ALONE,
        transfer(1000, rounds=10),
        transfer(10, rounds=10),
        AwaitTransfers(),
    )
    large, small = played.transfers
    assert large.done_us == pytest.approx(1009)  # before the last message of the small one
    assert small.done_us == pytest.approx(1010)


def test_latency_is_no_burden_for_a_link() -> None:
    """Two messages, each under way for 30 µs more: the second is sent meanwhile."""
    links = Links(across=Link(1e6, 30e-6))
    played = play(
        HostResources(math.inf, 1, links),
        transfer(100, latency_counts={"across": 1}),  # type: ignore[arg-type]
        transfer(100, latency_counts={"across": 1}),  # type: ignore[arg-type]
        AwaitTransfers(),
    )
    assert [one.done_us for one in played.transfers] == pytest.approx([130, 230])
    assert played.waits_us == {"wire": pytest.approx(170), "latency": pytest.approx(60)}  # of the first, then


@pytest.mark.parametrize("local", [1, 2, 4, 16])
@pytest.mark.parametrize("cores", [1.0, 2.0, 3.5])
def test_cores_are_shared(local: int, cores: float) -> None:
    """Whatever the order, no more is done in a microsecond than cores can do, and no work is lost."""
    machine = HostResources(cores, local, Links())
    played = play(
        machine,
        Compute(200, "forward_us"),
        transfer(0, work_us=300, hooks_us=50),
        Compute(100, "backward_us"),
        AwaitTransfers(),
    )
    work_us = 200 + 300 + 2 * 50 + 100
    assert played.step_us >= work_us * local / cores - 1e-3
    if local >= cores:  # all cores are always at work
        assert played.step_us == pytest.approx(work_us * local / cores)
    if 2 * local <= cores:  # everything overlaps that can
        assert played.step_us == pytest.approx(200 + 50 + 300 + 50)
    assert whole(played) == pytest.approx(played.step_us)


def test_a_process_group_has_two_threads() -> None:
    """The third collective of a group begins when one of the first two has ended."""
    phases = [
        BucketTransfer(str(us), (SimulatedCollective(us, {}, queue="one"),)) for us in (100.0, 300.0, 10.0)
    ]
    played = play(ALONE, *phases, AwaitTransfers())
    assert [one.done_us for one in played.transfers] == pytest.approx([100, 300, 110])
    others = [
        BucketTransfer(one.name, (SimulatedCollective(us, {}, queue=one.name),))
        for one, us in zip(phases, (100.0, 300.0, 10.0), strict=True)
    ]
    assert [one.done_us for one in play(ALONE, *others, AwaitTransfers()).transfers] == [
        100,
        300,
        10,
    ]


def test_all_wait_for_the_last_rank() -> None:
    """It is blamed for as long as nothing can move."""
    late = BucketTransfer(
        "late", (Compute(0.0), LastRankWait(60.0), SimulatedCollective(0.0, {"across": 100.0}))
    )
    played = play(ALONE, late, Compute(20, "backward_us"), AwaitTransfers())
    assert played.step_us == pytest.approx(160)
    assert played.waits_us == {"late": pytest.approx(40), "wire": pytest.approx(100)}


def test_what_overlaps_with_the_next_steps_is_awaited_there() -> None:
    """An exchange of 250 µs under three steps of 100 µs, applied two steps later."""
    simulator = StepSimulator(ALONE)
    sent = BucketTransfer("delta", (SimulatedCollective(0.0, {"across": 250.0}),), "sync")
    steps: Sequence[Sequence[Instruction]] = [
        (Compute(100, "forward_us"), AwaitTransfers("sync", 2), sent),
        (Compute(100, "forward_us"), AwaitTransfers("sync", 2)),
        (Compute(100, "forward_us"), AwaitTransfers("sync", 2)),
    ]
    played = [simulator.simulate_step(step) for step in steps]
    assert [one.step_us for one in played] == pytest.approx([100, 100, 150])
    assert simulator.has_no_active_transfers
    (times,) = played[0].transfers
    assert (times.ready_us, times.done_us) == pytest.approx((100, 350))


def test_times_of_a_transfer_count_from_its_own_step() -> None:
    """Also of one that is done in the next step, and if other steps came before."""
    simulator = StepSimulator(ALONE)
    simulator.simulate_step([Compute(1000, "forward_us")])
    step = simulator.simulate_step([Compute(100, "forward_us"), transfer(250)])
    assert simulator.simulate_step([AwaitTransfers()]).step_us == pytest.approx(250)
    (times,) = step.transfers
    assert (times.ready_us, times.done_us) == pytest.approx((100, 350))


def test_a_gpu_computes_slower_while_it_sends() -> None:
    """By a factor, and only then."""
    machine = HostResources(math.inf, 8, SLOW, collective_threads=1, overlap_slowdown=1.25)
    played = play(
        machine,
        Compute(100, "forward_us"),
        transfer(100),
        Compute(100, "backward_us"),
        AwaitTransfers(),
    )
    assert played.parts_us == {"forward_us": pytest.approx(100), "backward_us": pytest.approx(120)}


@pytest.mark.parametrize("what", ["bytes", "latency", "work"])
def test_more_never_takes_less(what: str) -> None:
    """Of bytes, latency or work."""
    times = []
    for amount in (0, 1, 2, 5, 10, 50):
        links = Links(across=Link(1e6, amount * 1e-5 if what == "latency" else 0.0))
        collective = SimulatedCollective(
            work_us=10.0 * amount if what == "work" else 5.0,
            bytes_by_level={"across": 100.0 * amount if what == "bytes" else 100.0},
            rounds=4,
            latency_counts={"across": 4},
            wake_us=3.0,
        )
        buckets = [
            BucketTransfer(str(number), (Compute(2.0), collective, Compute(2.0))) for number in range(4)
        ]
        played = play(HostResources(2, 4, links), *buckets, Compute(30, "backward_us"), AwaitTransfers())
        assert whole(played) == pytest.approx(played.step_us)
        times.append(played.step_us)
    assert all(one <= other + 1e-6 for one, other in pairwise(times))
