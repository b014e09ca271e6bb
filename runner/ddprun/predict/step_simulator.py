"""Simulates training steps: who computes, what is on which link, and who waits for whom.

All ranks of a host do the same, so one of them is simulated, and the others count in what they share: the
cores of the host, and its link to other hosts. So the cost grows with buckets, not with ranks. Work on a CPU
is a fluid: all threads that have some get equal shares of the cores. A link carries one message after the
other (first in, first out). A collective goes in rounds, each with a message that has to arrive, and to be
copied or summed by a core, before the next.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddprun.predict.links import Link, LinkLevel, Links

WaitCause = Literal["late", "hooks", "wire", "latency", "collectives"]
"""What a training thread waits for: the last rank to have a bucket ready; hooks; a link that is busy;
messages that are under way; the work of collectives."""

MAX_SIMULATED_ROUNDS = 12  # of a collective with more rounds, several are simulated as one
_EPSILON_US = 1e-6


@dataclass(frozen=True, slots=True)
class Compute:
    """Computation, in microseconds of a core (or of a GPU) that nobody else uses."""

    us: float
    part: str = "hooks"  # of a step, such as `forward_us`; or hooks


@dataclass(frozen=True, slots=True)
class LastRankWait:
    """A phase that lasts until the last rank is ready, so many microseconds after this one."""

    us: float


@dataclass(frozen=True, slots=True)
class SimulatedCollective:
    work_us: float  # of this rank: copies, sums, system calls
    bytes_by_level: Mapping[LinkLevel, float]  # what leaves each host, and what its ranks send to each other
    rounds: int = 1  # messages that can only go one after the other
    latency_counts: Mapping[LinkLevel, float] = field(default_factory=dict)
    """How many times the latency of each link counts, in all rounds together."""

    double_buffered: bool = False
    """Two messages are on their way: to send one hides some of the latency, at most a quarter."""

    one_way_bytes: float = 0.0
    """Bytes that one side sends before the other may answer; counts only if ranks begin further apart than
    the link's latency. Of back-to-back collectives the largest counts."""

    start_spread_us: float = 0.0  # how far apart ranks begin
    queued_ahead_bytes: float = 0.0
    """Between hosts, the first message waits for this many of other ranks, or for as many as a queue holds.
    Of back-to-back collectives the largest counts."""

    messages: int = 1  # into which the bytes of each level are divided: a link may carry long ones faster
    wake_us: float = 0.0  # of each round at least: until threads have noticed that it is their turn
    queue: str = ""  # collectives of one queue share the threads of a process group


@dataclass(frozen=True, slots=True)
class BucketTransfer:
    """A bucket that the training thread hands over, and the phases of its exchange: hooks, waiting for the
    last rank, and collectives.
    """

    name: str
    phases: tuple[Compute | LastRankWait | SimulatedCollective, ...]
    queue: str = "gradient"
    on_training_thread: bool = True  # its first work


@dataclass(frozen=True, slots=True)
class AwaitTransfers:
    """The training thread waits for the buckets of a queue that were sent so many steps ago, or earlier."""

    queue: str = "gradient"
    steps_ago: int = 0


Instruction = Compute | BucketTransfer | AwaitTransfers


@dataclass(slots=True)
class TransferTimes:
    """When a transfer was ready and done, in microseconds since its step began."""

    name: str
    ready_us: float
    done_us: float = math.nan  # while it is in progress


@dataclass(slots=True)
class SimulatedStep:
    step_us: float = 0.0
    parts_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of the training thread
    waits_us: dict[WaitCause, float] = field(default_factory=lambda: defaultdict(float))  # of that thread
    transfers: list[TransferTimes] = field(default_factory=list)
    links_busy_us: dict[LinkLevel, float] = field(default_factory=dict)  # how long they carried anything


@dataclass(frozen=True, slots=True)
class HostResources:
    """What ranks share."""

    cores: float  # of a host; infinite where each rank computes on a device of its own
    ranks_per_host: int
    links: Links
    collective_threads: int = 2  # collectives of one process group that run at once
    overlap_slowdown: float = 1.0
    """How much longer computation takes while something is under way, on a device of its own."""

    def core_share(self, threads: int = 1) -> float:
        """The part of a core that each of so many threads of a rank gets, while all ranks have as many."""
        return min(1.0, self.cores / (self.ranks_per_host * threads)) if threads else 1.0


@dataclass(slots=True, eq=False)
class _ActiveTransfer:
    """A transfer in progress. In each round first its message is sent, then its work is done."""

    transfer: BucketTransfer
    times: TransferTimes
    step: int
    step_start_us: float
    phase: int = -1
    round: int = 0  # of a collective, from 1
    running: bool = False  # False: done, or waiting for a thread of its queue
    done: bool = False
    wire_until_us: float = 0.0
    arrives_us: float = 0.0  # its message
    resumes_us: float = 0.0  # threads have noticed that it is here
    work_left_us: float = 0.0
    next_work_us: float = 0.0  # that begins when threads have noticed


class StepSimulator:
    """Simulates steps one after the other; transfers in progress at the end of one go on in the next."""

    def __init__(self, machine: HostResources) -> None:
        self._machine = machine
        self._now = 0.0
        self._link_free_us: dict[LinkLevel, float] = {"within": 0.0, "across": 0.0}  # from when on it is free
        # What has counted of `one_way_bytes` and `queued_ahead_bytes` since nothing was under way.
        self._lead_bytes: dict[LinkLevel, float] = {"within": 0.0, "across": 0.0}
        self._busy_us: dict[LinkLevel, float] = {"within": 0.0, "across": 0.0}
        self._active_transfers: list[_ActiveTransfer] = []
        self._threads = Counter[str]()  # that work on collectives, by queue
        self._waiting: dict[str, deque[_ActiveTransfer]] = defaultdict(deque)  # for a thread of their queue
        self._step = 0

    @property
    def has_no_active_transfers(self) -> bool:
        """Whether nothing is under way."""
        return not self._active_transfers

    def simulate_step(self, instructions: Iterable[Instruction]) -> SimulatedStep:
        self._step += 1
        start, busy_before, step = self._now, dict(self._busy_us), SimulatedStep()
        for instruction in instructions:
            match instruction:
                case Compute():
                    self._simulate_compute(instruction, step)
                case BucketTransfer(name, phases):
                    times = TransferTimes(name, self._now - start)
                    step.transfers.append(times)
                    active = _ActiveTransfer(instruction, times, self._step, start)
                    own = phases[0] if phases and instruction.on_training_thread else None
                    if isinstance(own, Compute):
                        active.phase = 0
                        self._simulate_compute(own, step)
                    self._active_transfers.append(active)
                    self._enter_next_phase(active)
                    self._advance_transfer(active)
                case AwaitTransfers(queue, steps_ago):
                    last = self._step - steps_ago
                    for one in list(self._active_transfers):
                        while one.transfer.queue == queue and one.step <= last and not one.done:
                            self._advance_time(math.inf, None, step, one)
        step.step_us = self._now - start
        step.links_busy_us = {level: us - busy_before[level] for level, us in self._busy_us.items()}
        return step

    def _simulate_compute(self, work: Compute, step: SimulatedStep) -> None:
        left = work.us
        while left > _EPSILON_US:
            left = self._advance_time(left, work.part, step)

    def _advance_time(
        self, left: float, part: str | None, step: SimulatedStep, awaited: _ActiveTransfer | None = None
    ) -> float:
        """Advance time until something changes; returns what is left of the training thread's work."""
        machine = self._machine
        working = [one for one in self._active_transfers if one.work_left_us > 0]
        share = machine.core_share(len(working) + (part is not None))
        own_share = share / machine.overlap_slowdown if self._active_transfers and part != "hooks" else share
        passed = left / own_share if part is not None else math.inf
        for one in working:
            passed = min(passed, one.work_left_us / share)
        for one in self._active_transfers:
            for moment in (one.wire_until_us, one.arrives_us, one.resumes_us):
                if moment > self._now + _EPSILON_US:
                    passed = min(passed, moment - self._now)
        assert math.isfinite(passed), "somebody waits for nothing"
        if part is not None:
            step.parts_us[part] += passed
            left -= passed * own_share
        elif awaited is not None:
            step.waits_us[self._wait_cause(awaited)] += passed
        self._now += passed
        for one in working:
            one.work_left_us -= passed * share
        for one in list(self._active_transfers):
            self._advance_transfer(one)
        return left

    def _wait_cause(self, awaited: _ActiveTransfer) -> WaitCause:
        match awaited.transfer.phases[awaited.phase]:
            case LastRankWait():
                return "late"
            case Compute():
                return "hooks"
        soon = self._now + _EPSILON_US
        if awaited.wire_until_us > soon:
            return "wire"
        return "latency" if awaited.arrives_us > soon else "collectives"

    def _advance_transfer(self, one: _ActiveTransfer) -> None:
        """Take a transfer as far as it gets without time passing."""
        while one.running:
            if one.resumes_us > self._now + _EPSILON_US:
                return
            if one.next_work_us > 0:
                one.work_left_us, one.next_work_us = one.next_work_us, 0.0
            if one.work_left_us > _EPSILON_US:
                return
            one.work_left_us = 0.0
            phase = one.transfer.phases[one.phase]
            if isinstance(phase, SimulatedCollective) and one.round < phase.rounds:
                self._begin_round(one, phase)
            else:
                self._enter_next_phase(one)

    def _begin_round(self, one: _ActiveTransfer, collective: SimulatedCollective) -> None:
        """A collective puts its next message on its links."""
        one.round += 1
        end = self._now
        for level, nbytes in collective.bytes_by_level.items():
            link: Link = getattr(self._machine.links, level)
            free_us = self._link_free_us[level]
            lead = 0.0
            if one.round == 1:
                if all(other.round == 0 for other in self._active_transfers if other is not one):
                    self._lead_bytes[level] = 0.0
                if collective.start_spread_us >= 1e6 * link.latency_s:
                    lead = collective.one_way_bytes
                if level == "across":
                    lead += min(collective.queued_ahead_bytes, link.max_queued_bytes)
                lead = max(0.0, lead - self._lead_bytes[level])
                self._lead_bytes[level] += lead
            rounds_per_message = collective.rounds / collective.messages
            busy = 1e6 * link.transmission_seconds(nbytes / collective.messages) / rounds_per_message
            self._busy_us[level] += busy
            took = busy + 1e6 * link.transmission_seconds(lead)
            if took:
                self._link_free_us[level] = max(self._now, free_us) + took
                end = max(end, self._link_free_us[level])
        one.wire_until_us = end
        for level, count in collective.latency_counts.items():
            link = getattr(self._machine.links, level)
            latency_us = 1e6 * link.latency_s * count / collective.rounds
            if collective.double_buffered and not link.rate_by_bytes:  # those are measured with it
                sent = collective.bytes_by_level.get(level, 0.0) / collective.rounds
                latency_us -= min(1e6 * link.transmission_seconds(sent), latency_us / 4)
            end += latency_us
        one.arrives_us = end
        # Threads need part of that time once the message is here, and part of it for whatever else cores do.
        one.resumes_us = max(end + collective.wake_us / 2, self._now + collective.wake_us)
        one.next_work_us = collective.work_us / collective.rounds

    def _enter_next_phase(self, one: _ActiveTransfer) -> None:
        """A transfer enters its next phase, or is done; its thread takes the next one that waits."""
        before = one.transfer.phases[one.phase] if one.phase >= 0 else None
        one.phase += 1
        one.running, one.round, one.resumes_us = True, 0, self._now
        if one.phase == len(one.transfer.phases):
            one.running, one.done, one.times.done_us = False, True, self._now - one.step_start_us
            self._active_transfers.remove(one)
        else:
            match one.transfer.phases[one.phase]:
                case Compute(us):
                    one.work_left_us = us
                case LastRankWait(us):
                    one.resumes_us = self._now + us
                case SimulatedCollective(queue=queue):
                    one.running = self._threads[queue] < self._machine.collective_threads
                    if one.running:
                        self._threads[queue] += 1
                    else:
                        self._waiting[queue].append(one)
        if isinstance(before, SimulatedCollective):
            if self._waiting[before.queue]:
                waited = self._waiting[before.queue].popleft()
                waited.running, waited.resumes_us = True, self._now
                self._advance_transfer(waited)
            else:
                self._threads[before.queue] -= 1


def round_count(op: str, ranks: int, *, use_trees: bool = False) -> int:
    """Messages of a collective that can only go one after the other: in a ring, or, as with NCCL, in a tree
    where that takes fewer. Pieces of an all-to-all go at once.
    """
    ring = ranks - 1
    tree = math.ceil(math.log2(max(2, ranks)))
    match op:
        case "all_reduce":
            return 2 * min(ring, tree) if use_trees else 2 * ring
        case "all_to_all":
            return min(1, ring)
        case "broadcast":
            return tree
    return ring
