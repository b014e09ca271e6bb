"""Latency and bandwidth between two hosts, by the collectives that training uses."""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddprun.doctor.clocks import length
from ddprun.doctor.findings import Finding, Level, pair_of
from ddprun.doctor.host import speed_of

_END, _SMALL, _ALL_REDUCE, _FROM_ONE, _FROM_OTHER = range(5)
_FIRST_BYTES, _MOST_BYTES = 64 << 10, 64 << 20
_LONG_ENOUGH_S, _WANTED_S = 0.05, 0.2
_REPEATS, _REPEATS_S = 5, 2.0
_WARM_UP, _SMALL_ROUNDS, _SMALL_S = 5, 200, 1.0

LONGEST_S = 60.0
"""What measuring a link takes at most, but for a collective that fails."""

_SLOW_MBIT, _LATE_S = 1000.0, 2e-3
_TELLING_MBIT = 10_000.0
"""One stream of Gloo's is not to be expected faster, whatever the interface."""

_SHARE_OF_SPEED = 0.3
_LOPSIDED = 2.0
_ALONE_UP_TO = 8
"""So many hosts are measured one pair after the other."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A link, by a group of its two hosts alone; medians."""

    backend: str
    latency_s: float
    """A small all-reduce."""

    there_mbit: float
    """Megabits a second from the first host to the second, by a broadcast."""

    back_mbit: float
    both_mbit: float
    """Each way, by an all-reduce, which sends both ways at once."""

    nbytes: int
    """Largest message."""

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it; `Measured(**plain)` is equal."""
        return asdict(self)


def rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Which pairs are measured, one round after the other: each pair once, and no host twice in a round.

    Up to eight hosts there is one pair in a round, so that nothing else is on the network. With more that
    would take too long, and there are as many pairs in a round as there can be (the circle method).
    """
    if hosts <= _ALONE_UP_TO:
        return [[pair] for pair in itertools.combinations(range(hosts), 2)]
    seats = list(range(hosts)) + [-1] * (hosts % 2)
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append(sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def measure(store: dist.Store, place: int, backend: str, device: torch.device, timeout_s: float) -> Measured:
    """Measure with the other host of a pair, which has to call this, too; both get the result.

    Args:
        store: of the pair and for this measurement alone.
        place: 0 or 1.
        backend: gloo or nccl.
        device: where the messages are.
        timeout_s: how long a collective may take.

    Raises:
        RuntimeError: a collective failed.
    """
    dist.init_process_group(
        backend, store=store, rank=place, world_size=2, timeout=timedelta(seconds=timeout_s)
    )
    try:
        link = _Link(place, device)
        if place == 1:
            link.follow()
            values = torch.zeros(5, dtype=torch.float64, device=device)
        else:
            latency_s = link.latency()
            both, there, back = (link.bandwidth(kind) for kind in (_ALL_REDUCE, _FROM_ONE, _FROM_OTHER))
            link.call(_END, 0)
            largest = float(link.largest)
            values = torch.tensor([latency_s, there, back, both, largest], dtype=torch.float64, device=device)
        dist.broadcast(values, 0)
        latency_s, there, back, both, largest = values.tolist()
        return Measured(backend, latency_s, there, back, both, int(largest))
    finally:
        dist.destroy_process_group()


class _Link:
    """Place 0 says what is done next, and measures; place 1 follows."""

    def __init__(self, place: int, device: torch.device) -> None:
        self._place, self._device = place, device
        self._small = torch.zeros(1, device=device)
        self._memory = torch.zeros(0, dtype=torch.uint8, device=device)
        self.largest = 0

    def follow(self) -> None:
        """Do what place 0 calls for, until the end."""
        kind = -1
        while kind != _END:
            word = torch.zeros(2, dtype=torch.int64, device=self._device)
            dist.broadcast(word, 0)
            kind, number = (int(value) for value in word.tolist())
            self._act(kind, number)

    def call(self, kind: int, nbytes: int) -> float:
        """Do something together; gives the seconds it took."""
        word = torch.tensor([kind, nbytes], dtype=torch.int64, device=self._device)
        message = self._message(nbytes)
        dist.broadcast(word, 0)
        self._meet()
        began = time.perf_counter()
        self._exchange(kind, message)
        self._meet()
        return time.perf_counter() - began

    def latency(self) -> float:
        """Median of small all-reduces, in seconds; what comes first is not counted."""
        took = statistics.median(self._small_ones(_WARM_UP))
        rounds = max(_WARM_UP, min(_SMALL_ROUNDS, int(_SMALL_S / took)))
        return statistics.median(self._small_ones(rounds))

    def _small_ones(self, count: int) -> list[float]:
        dist.broadcast(torch.tensor([_SMALL, count], dtype=torch.int64, device=self._device), 0)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self._meet()
            times.append(time.perf_counter() - began)
        return times

    def bandwidth(self, kind: int) -> float:
        """Median, in megabits a second that the busiest direction carries."""
        nbytes = _FIRST_BYTES
        took = self.call(kind, nbytes)
        while took < _LONG_ENOUGH_S and nbytes < _MOST_BYTES:
            nbytes = min(4 * nbytes, _MOST_BYTES)
            took = self.call(kind, nbytes)
        if took < _WANTED_S:
            nbytes = min(int(nbytes * _WANTED_S / took), _MOST_BYTES)
        times: list[float] = []
        while len(times) < _REPEATS and (sum(times) < _REPEATS_S or not times):
            times.append(self.call(kind, nbytes))
        self.largest = max(self.largest, nbytes)
        return 8e-6 * nbytes / statistics.median(times)

    def _act(self, kind: int, number: int) -> None:
        if kind == _SMALL:
            for _ in range(number):
                self._meet()
            return
        message = self._message(number)
        self._meet()
        self._exchange(kind, message)
        self._meet()

    def _exchange(self, kind: int, message: torch.Tensor) -> None:
        if kind == _ALL_REDUCE:
            dist.all_reduce(message.view(torch.float32))
        elif kind in (_FROM_ONE, _FROM_OTHER):
            dist.broadcast(message, 0 if kind == _FROM_ONE else 1)

    def _meet(self) -> None:
        dist.all_reduce(self._small)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _message(self, nbytes: int) -> torch.Tensor:
        nbytes = -(-nbytes // 4) * 4
        if self._memory.numel() < nbytes:
            self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._memory[:nbytes]


def link_findings(
    one: str, other: str, found: Measured, speeds_mbit: Sequence[float | None]
) -> list[Finding]:
    """What there is to say of a link.

    Args:
        one: name of the first host.
        other: of the second.
        found: what was measured between them.
        speeds_mbit: of the two hosts' interfaces, where they are known.
    """
    where, over = pair_of(one, other), f" over {found.backend}"
    late = found.latency_s > _LATE_S
    latency = Finding(
        where=where,
        check="latency",
        level="note" if late else "ok",
        found=f"a small all-reduce takes {length(found.latency_s)}{over}",
        do="fewer and larger messages: ddp.bucket_cap_mb, accumulate; or sync: local_sgd or diloco"
        if late
        else "",
        value={"backend": found.backend, "all_reduce_us": found.latency_s * 1e6},
    )
    return [latency, _bandwidth(one, other, found, [speed for speed in speeds_mbit if speed])]


def _bandwidth(one: str, other: str, found: Measured, speeds_mbit: Sequence[float]) -> Finding:
    slow, fast = sorted((found.there_mbit, found.back_mbit))
    told = (
        f"{one} to {other} {speed_of(found.there_mbit)}, back {speed_of(found.back_mbit)}, both at once "
        f"{speed_of(found.both_mbit)} each way over {found.backend}"
    )
    level: Level = "ok"
    do = []
    named = min(speeds_mbit, default=0.0)
    if slow < _SHARE_OF_SPEED * min(named, _TELLING_MBIT):
        level = "warning"
        told += f"; the interfaces say {speed_of(named)}"
        do.append("look for a slower link on the way, other traffic, or a limit (`tc qdisc`, the provider's)")
    if fast > _LOPSIDED * slow:
        level = "warning"
        do.append("one direction is slower than the other: look at cables, duplex and limits on that side")
    if slow < _SLOW_MBIT:
        level = "warning"
        seconds = 8e-6 * 100e6 / found.both_mbit
        told += f"; 100 MB of gradients take {length(seconds)}"
        do.append("send less: hooks: [int8] or [powersgd], sync: diloco; `ddprun explain` counts the bytes")
    value = {
        "backend": found.backend,
        "mbit_per_s": {f"{one} to {other}": found.there_mbit, f"{other} to {one}": found.back_mbit},
        "all_reduce_mbit_per_s": found.both_mbit,
        "bytes": found.nbytes,
    }
    return Finding(
        where=pair_of(one, other), check="bandwidth", level=level, found=told, do="; ".join(do), value=value
    )
