"""Plays steps of training against time: who computes, what is on which link, and who waits for whom.

All ranks of a host do the same, so one of them is played, and the others count in what they share: the cores
of the host, and its link to other hosts. So the cost grows with buckets, not with ranks. Work on a CPU is a
fluid: all threads that have some get equal shares of the cores. A link carries one message after the other
(first in, first out). A collective goes in rounds, each with a message that has to arrive, and to be copied
or summed by a core, before the next.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ddprun.predict.links import Level, Links

Blame = Literal["late", "hooks", "wire", "latency", "collectives"]
"""What a training thread waits for: the last rank to have a bucket ready; hooks; a link that is busy;
messages that are under way; the work of collectives."""

MOST_ROUNDS = 12
"""Of a collective with more rounds, several are played as one."""

_EPSILON_US = 1e-6


@dataclass(frozen=True, slots=True)
class Work:
    """Computation, in microseconds of a core (or of a GPU) that nobody else uses."""

    us: float
    part: str = "hooks"  # of a step, such as `forward_us`; or hooks


@dataclass(frozen=True, slots=True)
class Late:
    """The last rank is ready so much later than this one, in microseconds."""

    us: float


@dataclass(frozen=True, slots=True)
class Carry:
    """One collective."""

    work_us: float  # of this rank: copies, sums, system calls
    nbytes: Mapping[Level, float]  # what leaves each host for others, or goes between ranks inside, bytes
    rounds: int = 1  # messages that can only go one after the other
    latencies: Mapping[Level, float] = field(default_factory=dict)
    """How many times the latency of each link counts, in all rounds together."""

    wake_us: float = 0.0  # of each round at least: until threads have noticed that it is their turn
    queue: str = ""  # collectives of one queue share the threads of a process group


@dataclass(frozen=True, slots=True)
class Flight:
    """A bucket on its way."""

    name: str
    phases: tuple[Work | Late | Carry, ...]
    queue: str = "gradient"
    on_training_thread: bool = True  # its first work


@dataclass(frozen=True, slots=True)
class Send:
    """The training thread hands over a bucket."""

    flight: Flight


@dataclass(frozen=True, slots=True)
class Await:
    """The training thread waits for the buckets of a queue that were sent so many steps ago, or earlier."""

    queue: str = "gradient"
    steps_ago: int = 0


Instruction = Work | Send | Await


@dataclass(slots=True)
class Flown:
    """What became of a flight: microseconds from the beginning of its step."""

    name: str
    ready_us: float
    done_us: float = math.nan


@dataclass(slots=True)
class Played:
    """One step."""

    us: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of the training thread
    exposed: dict[Blame, float] = field(default_factory=lambda: defaultdict(float))  # it waited, for what
    flights: list[Flown] = field(default_factory=list)

    @property
    def exposed_us(self) -> float:
        """How long the training thread waited."""
        return sum(self.exposed.values())


@dataclass(frozen=True, slots=True)
class Machine:
    """What ranks share."""

    cores: float  # of a host; infinite where each rank computes on a device of its own
    local: int  # ranks of a host
    links: Links
    workers: int = 2  # collectives of one process group that run at once
    drag: float = 1.0
    """How much longer computation takes while something is under way, on a device of its own."""

    def share(self, threads: int = 1) -> float:
        """The part of a core that each of so many threads of a rank gets, while all ranks have as many."""
        return min(1.0, self.cores / (self.local * threads)) if threads else 1.0


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A flight, and where it is: first its message, then work, round by round."""

    flight: Flight
    flown: Flown
    step: int
    phase: int = -1
    round: int = 0  # of a collective, from 1
    running: bool = False  # False: done, or waiting for a thread of its queue
    done: bool = False
    wire_until_us: float = 0.0
    arrives_us: float = 0.0  # its message
    until_us: float = 0.0  # threads have noticed
    work_us: float = 0.0  # left
    next_work_us: float = 0.0  # that begins then


class Timeline:
    """Plays steps one after the other; what is under way at the end of one goes on in the next."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._now = 0.0
        self._free: dict[Level, float] = {"within": 0.0, "across": 0.0}  # when each link has nothing to do
        self._under_way: list[_UnderWay] = []
        self._threads = Counter[str]()  # that work on collectives, by queue
        self._waiting: dict[str, deque[_UnderWay]] = defaultdict(deque)  # for a thread of their queue
        self._step = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def play(self, instructions: Iterable[Instruction]) -> Played:
        """Play one step."""
        self._step += 1
        start, played = self._now, Played()
        for instruction in instructions:
            match instruction:
                case Work():
                    self._compute(instruction, played)
                case Send(flight):
                    flown = Flown(flight.name, self._now - start)
                    played.flights.append(flown)
                    sent = _UnderWay(flight, flown, self._step)
                    own = flight.phases[0] if flight.phases and flight.on_training_thread else None
                    if isinstance(own, Work):
                        sent.phase = 0
                        self._compute(own, played)
                    self._under_way.append(sent)
                    self._enter_next(sent)
                    self._go_on(sent)
                case Await(queue, steps_ago):
                    last = self._step - steps_ago
                    for one in list(self._under_way):
                        while one.flight.queue == queue and one.step <= last and not one.done:
                            self._pass(math.inf, None, played, one)
        played.us = self._now - start
        for flown in played.flights:
            flown.done_us -= start
        return played

    def _compute(self, work: Work, played: Played) -> None:
        left = work.us
        while left > _EPSILON_US:
            left = self._pass(left, work.part, played)

    def _pass(self, left: float, part: str | None, played: Played, awaited: _UnderWay | None = None) -> float:
        """Let time pass up to the next moment at which anything changes; gives what is left of the training
        thread's work.
        """
        machine = self._machine
        working = [one for one in self._under_way if one.work_us > 0]
        share = machine.share(len(working) + (part is not None))
        own_share = share / machine.drag if self._under_way and part != "hooks" else share
        passed = left / own_share if part is not None else math.inf
        for one in working:
            passed = min(passed, one.work_us / share)
        for one in self._under_way:
            for moment in (one.wire_until_us, one.arrives_us, one.until_us):
                if moment > self._now + _EPSILON_US:
                    passed = min(passed, moment - self._now)
        assert math.isfinite(passed), "somebody waits for nothing"
        if part is not None:
            played.parts[part] += passed
            left -= passed * own_share
        elif awaited is not None:
            played.exposed[self._blame(awaited)] += passed
        self._now += passed
        for one in working:
            one.work_us -= passed * share
        for one in list(self._under_way):
            self._go_on(one)
        return left

    def _blame(self, awaited: _UnderWay) -> Blame:
        """What a bucket is waiting for now."""
        match awaited.flight.phases[awaited.phase]:
            case Late():
                return "late"
            case Work():
                return "hooks"
        soon = self._now + _EPSILON_US
        if awaited.wire_until_us > soon:
            return "wire"
        return "latency" if awaited.arrives_us > soon else "collectives"

    def _go_on(self, one: _UnderWay) -> None:
        """Take a flight as far as it gets without time passing."""
        while one.running:
            if one.until_us > self._now + _EPSILON_US:
                return
            if one.next_work_us > 0:
                one.work_us, one.next_work_us = one.next_work_us, 0.0
            if one.work_us > _EPSILON_US:
                return
            one.work_us = 0.0
            phase = one.flight.phases[one.phase]
            if isinstance(phase, Carry) and one.round < phase.rounds:
                self._begin_round(one, phase)
            else:
                self._enter_next(one)

    def _begin_round(self, one: _UnderWay, carry: Carry) -> None:
        """A collective puts its next message on its links."""
        one.round += 1
        end = self._now
        for level, nbytes in carry.nbytes.items():
            took = 1e6 * self._machine.links.of(level).seconds(nbytes / carry.rounds)
            if took:
                self._free[level] = max(self._now, self._free[level]) + took
                end = max(end, self._free[level])
        one.wire_until_us = end
        for level, times in carry.latencies.items():
            end += 1e6 * self._machine.links.of(level).latency_s * times / carry.rounds
        # Threads need part of that time once the message is here, and part of it for whatever else cores do.
        one.arrives_us, one.until_us = end, max(end + carry.wake_us / 2, self._now + carry.wake_us)
        one.next_work_us = carry.work_us / carry.rounds

    def _enter_next(self, one: _UnderWay) -> None:
        """A flight enters its next phase, or is done; its thread takes the next one that waits."""
        before = one.flight.phases[one.phase] if one.phase >= 0 else None
        one.phase += 1
        one.running, one.round, one.until_us = True, 0, self._now
        if one.phase == len(one.flight.phases):
            one.running, one.done, one.flown.done_us = False, True, self._now
            self._under_way.remove(one)
        else:
            match one.flight.phases[one.phase]:
                case Work(us):
                    one.work_us = us
                case Late(us):
                    one.until_us = self._now + us
                case Carry(queue=queue):
                    one.running = self._threads[queue] < self._machine.workers
                    if one.running:
                        self._threads[queue] += 1
                    else:
                        self._waiting[queue].append(one)
        if isinstance(before, Carry):
            if self._waiting[before.queue]:
                waited = self._waiting[before.queue].popleft()
                waited.running, waited.until_us = True, self._now
                self._go_on(waited)
            else:
                self._threads[before.queue] -= 1


def rounds_of(op: str, ranks: int, *, in_trees: bool = False) -> int:
    """Messages of a collective that can only go one after the other: in a ring, or, as with NCCL, in a tree
    where that takes fewer. Pieces of an all-to-all go at once.
    """
    ring = ranks - 1
    tree = math.ceil(math.log2(max(2, ranks)))
    match op:
        case "all_reduce":
            return 2 * min(ring, tree) if in_trees else 2 * ring
        case "all_to_all":
            return min(1, ring)
        case "broadcast":
            return tree
    return ring
